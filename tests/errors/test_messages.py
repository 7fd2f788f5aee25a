"""Whole messages as golden text, errors of notebook cells, and the completeness of the catalogue."""

from __future__ import annotations

import ast
import linecache
from pathlib import Path

import numpy as np
import pytest
from tests.errors import test_activation, test_checks, test_control_flow, test_indexing, test_masks, test_memory, test_outputs
from tests.errors.harness import SMALL, A, failure, normalised

import opennki
from opennki import jit, simulate_kernel
from opennki.catalogue import CATALOGUE
from opennki.errors import NkiError, make, render

MESSAGES = {
    "slice past the end": (test_indexing.slice_past_the_end, (A,), {}),
    "loop index past the end": (test_indexing.loop_index_past_the_end, (A,), {}),
    "bare arange": (test_indexing.bare_arange, (A,), {}),
    "mixed index": (test_indexing.slice_and_arange, (A,), {}),
    "mask of a tile": (test_masks.tile_as_mask, (A,), {}),
    "branch on an arange": (test_masks.branch_on_an_arange, (A,), {}),
    "out of scope": (test_control_flow.loop_tile_used_after_the_loop, (A,), {}),
    "dependent iterations": (test_control_flow.iterations_store_to_one_place, (A,), {}),
    "operand in HBM": (test_memory.isa_operand_in_hbm, (A,), {}),
    "too many partitions": (test_memory.load_with_too_many_partitions, (A,), {}),
    "too wide for the Tensor Engine": (test_memory.stationary_tile_too_wide, (A,), {}),
    "bias of another type": (test_activation.integer_bias, (A,), {}),
    "no bias in an allocated kernel": (test_activation.activation_before_the_first_placement, (A,), {}),
    "parameter written": (test_outputs.store_to_a_parameter, (A,), {}),
    "output never stored": (test_outputs.output_never_stored, (A,), {}),
    "read of nothing": (test_checks.one_element_missing, (SMALL,), {}),
    "masked elements stored": (test_checks.masked_load_computed_and_stored_whole, (SMALL,), {"checks": {"masked": "error"}}),
}


@pytest.mark.golden
@pytest.mark.parametrize("name", MESSAGES)
def test_message(name, golden):
    fn, args, options = MESSAGES[name]
    golden(normalised(str(failure(fn, *args, kernel=jit(fn, mode="simulation", platform_target="trn1"), **options))))


@pytest.mark.golden
def test_message_of_a_runtime_index(golden):
    rows = np.array([[0], [2], [700]], np.int32)
    error = failure(test_indexing.gather, SMALL, rows, kind=IndexError)
    golden(normalised(f"{type(error).__name__}: {error}\ncaused by\n{error.__cause__}"))


# ---- notebook cells ----------------------------------------------------------------------------------------
CELL = '''
def kernel(x):
    tile = nl.load(x)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    return nl.exp(x)
'''


@pytest.mark.parametrize("name", ["<ipython-input-3-0a1b2c>", "/tmp/ipykernel_4242/1234567890.py"])
@pytest.mark.parametrize("eager", [False, True])
def test_a_notebook_cell_shows_its_line(name, eager):
    """A cell has no file: its source stands in linecache only."""
    from opennki.dialects.neuronxcc import language as nl
    namespace = {"nl": nl}
    exec(compile(CELL, name, "exec"), namespace)  # our own text
    linecache.cache[name] = (len(CELL), None, CELL.splitlines(keepends=True), name)
    try:
        error = failure(namespace["kernel"], A, eager=eager)
        assert (error.loc.file, error.loc.line, error.loc.function) == (name, 5, "kernel")
        assert f"{name}:5: err_unsupported_memory" in str(error) and "    return nl.exp(x)\n" in str(error)
    finally:
        del linecache.cache[name]


def test_source_that_is_not_available():
    """Code from a string has a line but no text; the report still says everything else."""
    from opennki.dialects.neuronxcc import language as nl
    namespace = {"nl": nl}
    exec(compile(CELL, "<string>", "exec"), namespace)  # our own text
    error = failure(namespace["kernel"], A)
    lines = str(error).splitlines()
    assert lines[0].startswith("<string>:5: err_unsupported_memory") and lines[1].startswith("  operand: ")


def test_a_call_over_several_lines():
    """The line shown is the one on which the call starts."""
    from opennki.dialects.neuronxcc import language as nl

    def kernel(x):
        tile = nl.load(x)
        return nl.add(
            tile,
            x)
    error = failure(kernel, A)
    assert error.loc.source() == "return nl.add("


# ---- the catalogue -----------------------------------------------------------------------------------------
SRC = Path(opennki.__file__).parent
TESTS = Path(__file__).parent
# Not raised: names of old releases, and what newer releases took back.
NOT_RAISED = {"err_tensor_creation_on_scratchpad_with_init_value_not_allowed", "err_read_modify_write_on_kernel_parameter"}


def strings(folder, *, without=()):
    found = set()
    for path in folder.rglob("*.py"):
        if path.name not in without:
            nodes = ast.walk(ast.parse(path.read_text("utf-8")))
            found |= {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    return found


def test_every_code_is_raised_somewhere_and_tested():
    raised, tested = strings(SRC, without=("catalogue.py",)), strings(TESTS, without=("test_messages.py",))
    codes = set(CATALOGUE) - NOT_RAISED
    assert not codes - raised, "in the catalogue and never raised"
    assert not codes - tested, "raised and never tested"
    named = {s for s in raised if s.startswith("err_") and s.replace("_", "").isalnum()}
    assert not named - set(CATALOGUE), "raised and not in the catalogue"


def test_every_entry_says_rule_reason_and_remedy():
    for code, entry in CATALOGUE.items():
        error = make(code, "something is wrong", operand="x (1, 2)")
        text = render(error)
        assert isinstance(error, NkiError) and error.code == code
        for label in ("operand", "rule", "why", "fix"):
            assert f"\n  {label}: " in text
        for part in (entry.rule, entry.why, entry.fix):
            assert len(part) > 10 and not part.endswith(".")


def test_every_error_states_a_rule():
    """No error of the language, the verifier or the tracer is raised with a message alone."""
    names = {"NkiTypeError", "NkiValueError", "NkiIndexError", "NkiReadError"}
    bare = []
    for folder in ("lang", "trace", "interpret", "kernels", "isa"):
        for path in (SRC / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
                    if not {k.arg for k in node.keywords} & {"rule", "code"}:
                        bare.append(f"{path.name}:{node.lineno}")
    assert not bare


def test_no_internal_frame_is_blamed():
    """Whatever the public call, the place is in this file."""
    for kernel in (test_memory.unknown_dtype, test_outputs.output_never_stored, test_indexing.float_index):
        assert "/src/opennki/" not in failure(kernel, A).loc.file
    with pytest.raises(NkiError) as caught:
        simulate_kernel(None)
    assert caught.value.loc.file == __file__
