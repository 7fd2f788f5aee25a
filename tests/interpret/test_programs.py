"""Programs of a grid: what they may share, how they wait for each other, and in which order they run."""
import numpy as np
import pytest

import opennki.dropin  # noqa: F401  isort: skip
import neuronxcc.nki as nki
import neuronxcc.nki.language as nl
from opennki.errors import NkiError, NkiValueError, NkiWarning
from opennki.ir.build import current
from opennki.lang.emit import call


def test_programs_that_store_the_same_values_get_a_warning():
    @nki.jit(mode="simulation", platform_target="trn1")
    def copy(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.load(x))
        return out
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    with pytest.warns(NkiWarning, match="different programs"):
        np.testing.assert_array_equal(copy[3](x), x)
    with pytest.raises(NkiValueError, match="err_unexpected_output_dependencies"):
        nki.simulate_kernel(copy[3], x, checks={"repeated": "error"})


def ring(steps):
    """Each program adds its left neighbour's value, `steps` times, with a barrier between write and read in the loop."""
    @nki.jit(mode="simulation", platform_target="trn1")
    def kernel(x):
        n = nl.num_programs(0)
        p = nl.program_id(0)
        board = nl.ndarray((steps + 1, n, 8), dtype=x.dtype, buffer=nl.shared_hbm)
        out = nl.ndarray((n, 8), dtype=x.dtype, buffer=nl.shared_hbm)
        mine = nl.load(x[nl.ds(p, 1)])
        nl.store(board[0, nl.ds(p, 1)], mine)
        for s in nl.sequential_range(steps):
            call("barrier", (), {})
            left = nl.load(board[s, nl.ds((p + n - 1) % n, 1)])
            mine[...] = nl.add(mine, left)
            nl.store(board[s + 1, nl.ds(p, 1)], mine)
        nl.store(out[nl.ds(p, 1)], mine)
        return out
    return kernel


@pytest.mark.parametrize("order", ["program", "reversed", "shuffle:1", "shuffle:2"])
def test_barriers_inside_a_loop(order):
    """A program instance is suspended in the middle of a loop and goes on where it was."""
    x = np.random.default_rng(0).integers(0, 9, (5, 8)).astype(np.float32)
    expected = x.copy()
    for _ in range(4):
        expected = expected + np.roll(expected, 1, axis=0)
    result = nki.simulate_kernel(ring(4)[5], x, order=order)
    np.testing.assert_array_equal(result, expected)


def test_a_program_that_never_arrives_is_named():
    @nki.jit(mode="simulation", platform_target="trn1")
    def kernel(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        p = nl.program_id(0)
        nl.store(out[nl.ds(p, 1)], nl.load(x[nl.ds(p, 1)]))
        if p > 0:
            call("barrier", (), {})
        return out
    with pytest.raises(NkiError, match="wait for ever"):
        kernel[3](np.ones((3, 4), np.float32))


@pytest.mark.parametrize("op, reduce", [(np.add, np.sum), (np.maximum, np.max)])
def test_all_reduce_over_one_axis(op, reduce):
    @nki.jit(mode="simulation", platform_target="trn1")
    def kernel(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        i, j = nl.program_id(0), nl.program_id(1)
        tile = nl.load(x[i, j])
        nl.store(out[i, j], nl.all_reduce(tile, op=op, program_axes=[1]))
        return out
    x = np.random.default_rng(1).integers(-9, 9, (2, 3, 4, 5)).astype(np.float32)
    expected = np.broadcast_to(reduce(x, axis=1, keepdims=True), x.shape)
    np.testing.assert_array_equal(kernel[2, 3](x), expected)


def test_no_builder_is_left_behind():
    with pytest.raises(NkiError, match="outside of a kernel"):
        current()


def test_progress_counts_programs_or_outermost_iterations():
    def kernel(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        p, n = nl.program_id(0), nl.num_programs(0)
        for i in nl.affine_range(6 // n):
            for j in nl.affine_range(2):
                rows = nl.ds((p * (6 // n) + i) * 2 + j, 1)
                nl.store(out[rows], nl.load(x[rows]))
        return out
    x = np.arange(48, dtype=np.float32).reshape(12, 4)
    seen = []
    jitted = nki.jit(kernel, mode="simulation", platform_target="trn1")
    nki.simulate_kernel(jitted, x, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(n, 6) for n in range(1, 7)]
    seen.clear()
    nki.simulate_kernel(jitted[3], x, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
