"""Random kernels, stream against stream: loops, branches, masks, runtime indices, do-while loops, grids. No race, and the same results."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
from tests.execute import differ

from opennki.errors import NkiError
from opennki.interpret.prepared import Prepared
from opennki.interpret.queues import run_streams
from opennki.ir.parse import from_text
from opennki.passes.allocate import allocate
from opennki.passes.program import Streams
from opennki.passes.streams import streams

PROGRAMS = 60
SEED = 3  # of random numbers, as in `differ`


def disagreement(seed):
    """None where the kernel is left out: it reads what is undefined, does not fit, or has a form that streams do not follow."""
    text, styles = differ.program(seed)
    kernel = from_text(text)
    arrays = differ.arrays_of(kernel, styles)
    try:
        with differ.library_functions():
            reference = Prepared(kernel, differ.REFERENCE)
        wanted = differ._run(reference, kernel, arrays)
    except Exception:
        return None
    try:
        memory = allocate(kernel)
    except NkiError as error:
        assert "alive at once" in error.message or "partitions" in error.message, error
        return None
    made = streams(kernel, memory)
    assert Streams.from_json(json.loads(json.dumps(made.to_json()))) == made
    try:
        with differ.library_functions():
            got = run_streams(kernel, memory, made, copy.deepcopy(arrays), order=seed, seed=SEED)
    except NkiError as error:
        if "cannot be followed" in error.message:
            return None
        return error.message
    for number, (a, b) in enumerate(zip(wanted, got, strict=False)):
        b = b.view(np.uint8) if b.dtype == bool else b
        if differ._different(np.ascontiguousarray(a), np.ascontiguousarray(b)).any():
            return f"result {number} differs"
    return ""


@pytest.mark.filterwarnings("ignore")
def test_random_kernels_run_as_streams():
    found = {seed: disagreement(seed) for seed in range(PROGRAMS)}
    assert not {seed: text for seed, text in found.items() if text}
    assert sum(text is not None for text in found.values()) > PROGRAMS / 2
