"""What a runtime is told of a kernel's exception."""

from __future__ import annotations

import numpy as np
import pytest

from opennki import simulate_kernel
from opennki.bind import failures
from opennki.dialects.neuronxcc import language as nl


def gather(x, rows):
    out = nl.ndarray((rows.shape[0], x.shape[1]), dtype=x.dtype, buffer=nl.shared_hbm)
    index = nl.load(rows)
    nl.store(out, nl.load(x[index, nl.arange(x.shape[1])[None, :]]))
    return out


def test_an_index_error_comes_with_the_report_of_the_kernel():
    """A runtime index outside of its tensor is a plain IndexError, with our report as its cause."""
    with pytest.raises(IndexError) as caught:
        simulate_kernel(gather, np.zeros((3, 4), np.float32), np.array([[0], [7]], np.int32))
    text = failures.describe(caught.value)
    assert text.startswith("IndexError: index 28 is out of bounds for axis 0 with size 12\n")
    place = f"{__file__}:{gather.__code__.co_firstlineno + 3}"
    assert f"\n{place}: err_tensor_access_out_of_bound: dma_copy: src: dimension 0 of x has 3 elements and a runtime index is 7\n" in text
    assert "    nl.store(out, nl.load(x[index" in text and "  fix: " in text
    assert "interpret/views.py" not in text


def test_an_exception_without_a_report_shows_its_own_line():
    try:
        {}["absent"]
    except KeyError as exc:
        error = exc
    text = failures.describe(error)
    assert text.startswith(f"KeyError: 'absent'\n  at {__file__}:")
    assert text.endswith(' in test_an_exception_without_a_report_shows_its_own_line\n      {}["absent"]')
