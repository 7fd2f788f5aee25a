"""Reports on launch grids: program ids, blocks, order of programs, races, barriers, reductions across programs."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from tests.lang.harness import run, sample

from opennki import jit
from opennki.dialects.neuronxcc import iterators, private_api
from opennki.dialects.neuronxcc import language as nl
from opennki.errors import NkiError

ORDERS = ("program", "reversed", "shuffle:1", "shuffle:2")


# ---- BR044: order ---------------------------------------------------------------------------------------------------
def rows(a, x):
    """One program per row of a matrix-vector product."""
    out = nl.ndarray((a.shape[0], 1), a.dtype, buffer=nl.shared_hbm)
    row = nl.program_id(0)
    product_ = nl.multiply(nl.load(a[nl.ds(row, 1)]), nl.load(x))
    nl.store(out[nl.ds(row, 1)], nl.sum(product_, axis=1, keepdims=True))
    return out


@pytest.mark.parametrize("size", [4, 33])
def test_BR044_the_order_of_programs_does_not_show(size):
    """Serial interpreter hides a mismatch: programs in any order give the same bits, run after run."""
    a, x = sample((size, 16), seed=1), sample((1, 16), seed=2)
    results = [run(rows, a, x, grid=size, order=order) for order in ORDERS * 2]
    for got in results:
        np.testing.assert_array_equal(got, results[0])
    np.testing.assert_allclose(results[0][:, 0], a.astype(np.float64) @ x[0], rtol=1e-5, atol=1e-5)


def one_place(x):
    """Every program writes row 0."""
    out = nl.ndarray((1, 16), x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.load(x[nl.ds(nl.program_id(0), 1)]))
    return out


def overlapping(x):
    """Program p writes rows p and p + 1."""
    out = nl.ndarray((x.shape[0] + 1, 16), x.dtype, buffer=nl.shared_hbm)
    p = nl.program_id(0)
    tile = nl.broadcast_to(nl.load(x[nl.ds(p, 1)]), shape=(2, 16))
    nl.store(out[nl.ds(p, 2)], tile)
    return out


def neighbour(x):
    """Program p reads what program p - 1 wrote."""
    out = nl.ndarray((x.shape[0] + 1, 16), x.dtype, buffer=nl.shared_hbm)
    p = nl.program_id(0)
    if p == 0:
        nl.store(out[0:1], nl.load(x[0:1]))
    nl.store(out[nl.ds(p + 1, 1)], nl.load(out[nl.ds(p, 1)]) + nl.load(x[nl.ds(p, 1)]))
    return out


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kernel", [one_place, overlapping, neighbour])
def test_BR044_programs_that_race_are_reported(kernel, order):
    """A kernel whose result depends on the order is an error in every order, at the line that writes or reads."""
    with pytest.raises(NkiError) as caught:
        run(kernel, sample((4, 16)), grid=4, order=order)
    error = caught.value
    assert error.loc.file == __file__ and error.loc.function == kernel.__name__
    if kernel is neighbour and error.code != "err_unexpected_output_dependencies":
        assert "never written" in str(error)  # an order in which the reader runs first
    else:
        assert error.code == "err_unexpected_output_dependencies" and "grid" in str(error)


def test_BR044_an_unknown_order_is_an_error():
    """The order is one that exists."""
    with pytest.raises(NkiError, match="reversed"):
        run(rows, sample((4, 16)), sample((1, 16)), grid=4, order="random")


# ---- BR088, BR089: ids and blocks -----------------------------------------------------------------------------------
@pytest.mark.parametrize("grid", [(1, 2, 3), (2, 3, 4), (5,), (1, 1, 1), (2, 2)])
@pytest.mark.parametrize("order", ["program", "shuffle:3"])
def test_BR088_ids_and_counts_of_programs(grid, order):
    """program ids wrong in interpret mode: each program writes its ids, and the sizes of the grid, into its own place."""
    rank = len(grid)

    def table(x):
        ids = nl.ndarray((*grid, 1, rank), nl.int32, buffer=nl.shared_hbm)
        sizes = nl.ndarray((*grid, 1, rank + 2), nl.int32, buffer=nl.shared_hbm)
        me = tuple(nl.program_id(axis) for axis in range(rank))
        mine = nl.ndarray((1, rank), nl.int32, buffer=nl.sbuf)
        counts = nl.ndarray((1, rank + 2), nl.int32, buffer=nl.sbuf)
        for axis in range(rank):
            mine[:, axis] = nl.load(x)
            mine[:, axis] += me[axis]
            counts[:, axis] = nl.num_programs(axis)
        counts[:, rank] = nl.num_programs()
        counts[:, rank + 1] = nl.program_ndim()
        nl.store(ids[me], mine)
        nl.store(sizes[me], counts)
        return ids, sizes
    ids, sizes = run(table, np.zeros((1, 1), np.int32), grid=grid, order=order)
    for place in product(*(range(n) for n in grid)):
        assert tuple(ids[place][0]) == place
        assert tuple(sizes[place][0]) == (*grid, int(np.prod(grid)), rank)


@pytest.mark.parametrize("blocks", [1, 2, 3, 4])
def test_BR089_every_block_is_computed(blocks):
    """NaN with three and more blocks: x + 1 over blocks of (8, 16) is right in each of them."""
    def add_one(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        mine = nl.ds(nl.program_id(0) * 8, 8)
        nl.store(out[mine], nl.load(x[mine]) + 1.0)
        return out
    x = sample((8 * blocks, 16))
    for order in ORDERS:
        np.testing.assert_array_equal(run(add_one, x, grid=blocks, order=order), x + np.float32(1))


def test_BR089_two_dimensional_blocks_with_a_ragged_edge():
    """The same on a grid of (3, 2) whose last blocks stick out of the tensor and are masked."""
    def add_one(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        p, f = nl.mgrid[0:8, 0:16]
        p, f = nl.program_id(0) * 8 + p, nl.program_id(1) * 16 + f
        inside = (p < x.shape[0]) & (f < x.shape[1])
        tile = nl.load(x[p, f], mask=inside)
        nl.store(out[p, f], nl.add(tile, 1.0, mask=inside), mask=inside)
        return out
    x = sample((19, 27))
    np.testing.assert_array_equal(run(add_one, x, grid=(3, 2)), x + np.float32(1))


# ---- BR078: reductions across programs ------------------------------------------------------------------------------
@pytest.mark.parametrize(("op", "oracle"), [(np.add, np.sum), (np.maximum, np.max), (nl.minimum, np.min)])
@pytest.mark.parametrize("order", ORDERS)
def test_BR078_all_reduce_over_a_grid(op, oracle, order):
    """all_reduce meaning unclear: it reduces over the programs along an axis of the grid; every program gets the result."""
    def kernel(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        me = nl.program_id(0)
        nl.store(out[me], nl.all_reduce(nl.load(x[me]), op, program_axes=[0]))
        return out
    x = sample((4, 8, 16))
    got = run(kernel, x, grid=(4,), order=order)
    want = oracle(x.astype(np.float64), axis=0)
    for program in range(4):
        np.testing.assert_allclose(got[program], want, rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(got[program], got[0])


def test_BR078_all_reduce_along_one_axis_of_two():
    """Programs that differ elsewhere than along program_axes are other groups."""
    def kernel(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        i, j = nl.program_id(0), nl.program_id(1)
        nl.store(out[i, j], nl.all_reduce(nl.load(x[i, j]), np.add, program_axes=[1]))
        return out
    x = sample((2, 3, 4, 8))
    got = run(kernel, x, grid=(2, 3), order="shuffle:5")
    want = np.broadcast_to(x.astype(np.float64).sum(1, keepdims=True), x.shape)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_BR078_the_documentation_says_what_is_reduced():
    """The documentation says: over programs of the grid, and that every one gets the result."""
    text = nl.all_reduce.__doc__
    assert "programs" in text and "grid" in text and "every program" in text


# ---- BR026, BR077: barriers -----------------------------------------------------------------------------------------
def test_BR026_a_program_that_skips_a_barrier_is_named():
    """LNC2 with differing control flow can deadlock: the deadlock is found, the program that waits and its line are named."""
    def half(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        core = nl.program_id(0)
        nl.store(out[core], nl.load(x[core]))
        if core == 0:
            private_api.core_barrier(out, (0, 1))  # the other core does not come
        return out
    with pytest.raises(NkiError) as caught:
        run(half, sample((2, 4, 8)), target="trn2", grid=(nl.nc(2),))
    text = str(caught.value)
    assert "program (0,) waits in core_barrier" in text and "(1,)" in text
    assert "the other core does not come" in text and "unconditionally" in text


def test_BR026_different_barriers_do_not_match():
    """Two cores that wait at different places wait for ever: both are named with their lines."""
    def crossed(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        core = nl.program_id(0)
        nl.store(out[core], nl.load(x[core]))
        if core == 0:
            private_api.core_barrier(out, (0, 1))
        else:
            with iterators.sync_program([0]):
                pass
        return out
    with pytest.raises(NkiError) as caught:
        run(crossed, sample((2, 4, 8)), target="trn2", grid=(nl.nc(2),))
    text = str(caught.value)
    assert "program (0,) waits" in text and "program (1,) waits" in text and text.count("test_programs.py:") >= 2


def exchange(x):
    """Each core doubles its half, meets the other, and adds the other's half."""
    scratch = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    core = nl.program_id(0)
    nl.store(scratch[core], nl.load(x[core]) * 2.0)
    private_api.core_barrier(scratch, (0, 1))
    nl.store(out[core], nl.load(scratch[core]) + nl.load(scratch[1 - core]))
    return out


@pytest.mark.parametrize("order", ORDERS)
def test_BR077_a_kernel_with_a_barrier_runs_any_number_of_times(order):
    """LNC2 kernel with barrier used twice: each call gives the same, and a barrier orders what is exchanged."""
    x = sample((2, 8, 16))
    kernel = jit(exchange, mode="simulation", platform_target="trn2")[nl.nc(2)]
    want = np.stack([2 * x[0] + 2 * x[1]] * 2)
    for _ in range(3):
        np.testing.assert_array_equal(kernel.simulate(x, order=order), want)


def test_BR077_without_the_barrier_the_exchange_is_a_race():
    """The same without the barrier is reported, in the order of programs and in the reverse one."""
    def racy(x):
        scratch = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        core = nl.program_id(0)
        nl.store(scratch[core], nl.load(x[core]) * 2.0)
        nl.store(out[core], nl.load(scratch[core]) + nl.load(scratch[1 - core]))
        return out
    for order in ("program", "reversed"):
        with pytest.raises(NkiError) as caught:
            run(racy, sample((2, 8, 16)), target="trn2", grid=(nl.nc(2),), order=order)
        assert caught.value.loc.function == "racy"
