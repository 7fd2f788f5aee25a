"""Contraction of tensors of which an iteration uses its own part: what an outer loop carries from one round to the next stays."""

from __future__ import annotations

import numpy as np
import pytest

from opennki import jit
from opennki.dialects.neuronxcc import isa as nisa
from opennki.dialects.neuronxcc import language as nl
from opennki.dialects.neuronxcc.private_api import do_while
from opennki.ir.nodes import Alloc, statements
from opennki.passes.contract import SMALLEST, contracted

ROUNDS, PARTS, FREE = 3, 4, 512
X = np.random.default_rng(0).standard_normal((ROUNDS, PARTS, 128, FREE)).astype(np.float32)


def sizes(kernel):
    return {a.shape for a in statements(contracted(kernel).body) if isinstance(a, Alloc) and a.on_chip and len(a.shape) == 3}


def ran(fn, *args):
    """The results at every level of checks, which agree, and the shapes of the block tensors as they are kept."""
    kernel = jit(fn, mode="simulation", platform_target="trn1")
    got = [kernel.simulate(*args, checks=checks) for checks in ("full", "fast", "off")]
    for other in got[1:]:
        np.testing.assert_array_equal(other, got[0])
    return got[0], sizes(kernel.trace(*args))


def block():
    assert PARTS * 128 * FREE >= SMALLEST
    return nl.ndarray((PARTS, nl.par_dim(128), FREE), np.float32, buffer=nl.sbuf)


def result(x):
    return nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)


def test_a_state_is_carried_from_round_to_round():
    def kernel(x):
        out, state = result(x), nl.zeros((PARTS, nl.par_dim(128), FREE), np.float32, buffer=nl.sbuf)
        for n in nl.sequential_range(ROUNDS):
            for i in nl.sequential_range(PARTS):
                state[i] = nl.add(state[i], nl.load(x[n, i]))
                nl.store(out[n, i], state[i])
        return out

    got, shapes = ran(kernel, X)
    np.testing.assert_array_equal(got, np.cumsum(X, 0))
    assert shapes == {(PARTS, 128, FREE)}


def test_a_state_is_carried_by_a_do_while():
    def kernel(x, more):
        out, state = nl.ndarray(x.shape[1:], x.dtype, buffer=nl.shared_hbm), nl.zeros((PARTS, nl.par_dim(128), FREE), np.float32)
        at, cond = nl.zeros((1, 1), np.int32), nl.ndarray((1, 1), np.uint8, buffer=nl.hbm)
        with do_while(cond):
            for i in nl.sequential_range(PARTS):
                rows = nl.arange(128)[:, None]
                state[i] = nl.add(state[i], nl.load(x[at, i, rows, nl.arange(FREE)[None, :]]))
                nl.store(out[i], state[i])
            at[...] = nl.add(at, 1)
            nl.store(cond, nl.load(more[at, nl.arange(1)[None, :]]))
        return out

    more = np.array([[1], [1], [1], [0]], np.uint8)
    got, shapes = ran(kernel, X, more)
    np.testing.assert_allclose(got, X.sum(0), rtol=1e-5, atol=1e-5)
    assert shapes == {(PARTS, 128, FREE)}


@pytest.mark.parametrize("skip", [False, True])
def test_rows_that_a_load_leaves_out_are_those_of_the_round_before(skip):
    def kernel(x, which):
        out, kept = result(x), block()
        for n in nl.sequential_range(ROUNDS):
            at = nl.load(which[n])
            for i in nl.affine_range(PARTS):
                rows, free = nl.mgrid[0:128, 0:FREE]
                mode = nisa.oob_mode.skip if skip else nisa.oob_mode.error
                kept[i, rows, free] = nl.load(x[at[0, 0], i, rows, free], mode=mode)
                nl.store(out[n, i], nl.copy(kept[i]))
        return out

    which = [1, ROUNDS, 0] if skip else [1, 2, 0]
    got, shapes = ran(kernel, X, np.array(which, np.int32)[:, None])
    np.testing.assert_array_equal(got, X[[1, 1, 0]] if skip else X[which])
    assert shapes == ({(PARTS, 128, FREE)} if skip else {(1, 128, FREE)})  # written anew in each round, it shrinks


def test_what_a_mask_leaves_out_is_that_of_the_round_before():
    def kernel(x):
        out, kept = result(x), nl.zeros((PARTS, nl.par_dim(128), FREE), np.float32, buffer=nl.sbuf)
        for n in nl.sequential_range(ROUNDS):
            for i in nl.affine_range(PARTS):
                rows, free = nl.mgrid[0:128, 0:FREE]
                kept[i, rows, free] = nl.load(x[n, i, rows, free], mask=free < 100 * (n + 1))
                nl.store(out[n, i], nl.copy(kept[i]))
        return out

    want, kept = np.zeros_like(X), np.zeros_like(X[0])
    for n in range(ROUNDS):
        kept[..., : 100 * (n + 1)] = X[n][..., : 100 * (n + 1)]
        want[n] = kept
    got, shapes = ran(kernel, X)
    np.testing.assert_array_equal(got, want)
    assert shapes == {(PARTS, 128, FREE)}


def test_loops_over_all_of_its_own_parts_come_back_to_none():
    def kernel(x):
        out, kept = nl.ndarray(x.shape[1:], x.dtype, buffer=nl.shared_hbm), nl.zeros((PARTS, nl.par_dim(128), FREE), np.float32)
        for i in nl.sequential_range(PARTS):
            for n in nl.sequential_range(ROUNDS):
                kept[i] = nl.add(kept[i], nl.load(x[n, i]))
            nl.store(out[i], kept[i])
        return out

    got, shapes = ran(kernel, X)
    np.testing.assert_allclose(got, X.sum(0), rtol=1e-5, atol=1e-5)
    assert shapes == {(1, 128, FREE)}
