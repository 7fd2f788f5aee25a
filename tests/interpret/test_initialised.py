"""Which tensors need no written-state: the proof holds for what kernels usually do, and not for what can read too early."""

import numpy as np
import pytest

import opennki.dropin  # noqa: F401
import neuronxcc.nki as nki
import neuronxcc.nki.language as nl
from opennki.errors import NkiReadError
from opennki.passes.initialised import unproven

X = np.arange(4 * 8 * 16, dtype=np.float32).reshape(4, 8, 16)
ROWS = np.array([[1], [0]], np.int32)


def output():
    return nl.ndarray((4, 8, 16), dtype=nl.float32, buffer=nl.shared_hbm)


def under_a_branch(x, rows):
    out = output()
    for i in nl.affine_range(4):
        if i > 1:
            nl.store(out[i], nl.exp(nl.load(x[i])))
    return out


def part_of_a_tile(x, rows):
    out = output()
    for i in nl.affine_range(4):
        t = nl.ndarray((8, 16), dtype=x.dtype)
        if i > 1:
            t[:, 0:8] = nl.load(x[i, :, 0:8])
            nl.store(out[i, :, 0:8], t[:, 0:8])
    return out


@pytest.mark.parametrize("kernel", [under_a_branch, part_of_a_tile])
def test_what_one_statement_writes_and_reads_is_proven(kernel):
    assert not unproven(nki.jit(kernel).trace(X, ROWS))
    nki.simulate_kernel(kernel, X, ROWS)


def written_under_another_branch(x, rows):
    out = output()
    for i in nl.affine_range(4):
        t = nl.ndarray((8, 16), dtype=x.dtype)
        if i > 1:
            t[...] = nl.load(x[i])
        if i > 0:
            nl.store(out[i], t)
    return out


def written_in_a_later_iteration(x, rows):
    out = output()
    t = nl.ndarray((8, 16), dtype=x.dtype)
    for i in nl.sequential_range(4):
        nl.store(out[i], t)
        t[...] = nl.load(x[i])
    return out


def read_beyond_what_was_written(x, rows):
    out = output()
    for i in nl.affine_range(4):
        t = nl.ndarray((8, 16), dtype=x.dtype)
        if i > 1:
            t[:, 0:8] = nl.load(x[i, :, 0:8])
            nl.store(out[i], t)
    return out


def written_and_read_at_different_runtime_indices(x, rows):
    out = output()
    board = nl.ndarray((4, 8, 16), dtype=x.dtype, buffer=nl.private_hbm)
    table = nl.load(rows)
    p, f = nl.arange(2)[:, None], nl.arange(16)[None, :]
    other = nl.load(rows)
    other[...] = nl.add(table, 2)
    for i in nl.sequential_range(2):
        nl.store(board[table[p, 0], i, f], nl.load(x[0, 0:2]))
        nl.store(out[0, 0:2], nl.load(board[other[p, 0], i, f]))
    return out


@pytest.mark.parametrize("kernel", [written_under_another_branch, written_in_a_later_iteration, read_beyond_what_was_written,
                                    written_and_read_at_different_runtime_indices])
def test_reads_that_can_come_too_early_are_tracked_and_found(kernel):
    assert unproven(nki.jit(kernel).trace(X, ROWS))
    with pytest.raises(NkiReadError, match="never written"):
        nki.simulate_kernel(kernel, X, ROWS)
