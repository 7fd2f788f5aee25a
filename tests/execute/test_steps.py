"""Instructions of several native steps in kernels: runtime indices, random numbers, masks, loops, threads."""

from __future__ import annotations

import numpy as np
import pytest
from tests.bind import kernels as k
from tests.execute.agree import both
from tests.execute.test_executor import executor, normal, traced

from opennki.execute.executor import coverage, native
from opennki.interpret import checks
from opennki.interpret.checks import Checks, tape_of
from opennki.interpret.prepared import Prepared

import neuronxcc.nki.typing  # isort: skip

nki, nl, nisa, nt = k.nki, k.nl, k.nisa, neuronxcc.nki.typing


def draws(x):
    """Random numbers before and after a seed, in a loop, and under a mask."""
    out = nl.ndarray((4, 64, 32), dtype=nl.float32, buffer=nl.shared_hbm)
    ip, ix = nl.mgrid[0:64, 0:32]
    nl.store(out[0], nl.rand((64, 32)))
    nl.random_seed(-3)
    for i in nl.sequential_range(2):
        nl.store(out[1 + i], nl.add(nl.rand((64, 32)), nl.dropout(nl.load(x), 0.4)))
    tile = nl.zeros((64, 32), dtype=nl.float32)
    tile[ip, ix] = nl.dropout(nl.load(x)[ip, ix], 0.5, mask=ip < 50)
    nl.store(out[3], tile)
    return out


def repeats(x):
    """Random numbers of a loop that runs until a counter is used up: each round has its own."""
    out = nl.ndarray((64, 32), dtype=nl.float32, buffer=nl.shared_hbm)
    total = nl.zeros((64, 32), nl.float32)
    left = nl.full((1, 8), 5, dtype=nl.float32)
    cond = nt.scalar(True)
    while cond:
        total[...] = nl.add(total, nl.rand((64, 32)))
        left[...] = nl.subtract(left, 1)
        cond = nt.scalar(nl.multiply(left[:, 3:4], -1.0))
    nl.store(out, nl.add(total, nl.load(x)))
    return out


def programs(x):
    out = nl.ndarray((2, 3, 128, 256), dtype=nl.float32, buffer=nl.shared_hbm)
    i, j = nl.program_id(0), nl.program_id(1)
    nl.store(out[i, j], nl.add(nl.rand((128, 256)), nl.load(x)))
    return out


def paged(table, pages):
    """Rows named by a tile, then written back under names."""
    out = nl.ndarray((64, table.shape[1]), dtype=table.dtype, buffer=nl.shared_hbm)
    index = nl.load(pages)
    ix = nl.arange(table.shape[1])[None, :]
    rows = nl.load(table[index[nl.arange(32)[:, None], 0], ix])
    nl.store(out[nl.arange(64)[:, None], ix], nl.zeros((64, table.shape[1]), table.dtype))
    nl.store(out[index[nl.arange(32)[:, None], 1], ix], nl.multiply(rows, 2.0))
    return out


def chosen(x):
    """The place of the largest value of each row decides which columns are read."""
    out = nl.ndarray((64, 4), dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x)
    best = nisa.max8(src=tile)
    place = nisa.nc_find_index8(data=tile, vals=best)
    nl.store(out, nl.gather_flattened(tile, place)[:, 0:4])
    return out


def turned(x):
    out = nl.ndarray((24, 32), dtype=x.dtype, buffer=nl.shared_hbm)
    row, column = nl.mgrid[0:32, 0:24]
    tile = nl.zeros((nl.par_dim(24), 32), x.dtype)
    tile[...] = nisa.nc_transpose(nl.load(x)[row, column], mask=row > column)
    nl.store(out, tile)
    return out


CASES = {
    "random numbers": (draws, (normal(64, 32),), None),
    "random numbers of a do-while loop": (repeats, (normal(64, 32),), None),
    "random numbers of programs": (programs, (normal(128, 256),), (2, 3)),
    "rows by index": (paged, (normal(100, 48), np.stack([np.random.default_rng(0).integers(0, 100, 32),
                                                          np.random.default_rng(1).permutation(64)[:32]], 1).astype(np.int32)), None),
    "a search": (chosen, (normal(64, 40),), None),
    "a mask of a transposition": (turned, (normal(32, 24),), None),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_agrees_with_the_interpreter(case):
    fn, arrays, grid = CASES[case]
    ir = traced(fn, *arrays, grid=grid)
    assert coverage(executor(ir))["interpreted"] == 0
    assert both(ir, list(arrays), seed=-(2**40))


def test_a_mask_of_a_transposition_counts_the_dimensions_of_the_operand():
    x = normal(32, 24)
    got = nki.simulate_kernel(nki.jit(turned, platform_target="trn2"), x)
    row, column = np.mgrid[0:32, 0:24]
    np.testing.assert_array_equal(got, np.where(row > column, x, 0).T)


def test_threads_draw_the_same_numbers(monkeypatch):
    x = normal(128, 256)
    ir = traced(programs, x, grid=(2, 3))
    assert executor(ir).lowering.programs is not None
    outs = []
    for threads in ("1", "2", "5"):
        monkeypatch.setenv("OPENNKI_NUM_THREADS", threads)
        out = np.zeros((2, 3, 128, 256), np.float32)
        Prepared(ir, "off", native=native).run([x], [out], seed=11)
        outs.append(out)
    assert all((o == outs[0]).all() for o in outs)
    assert len({o.tobytes() for o in outs[0].reshape(6, -1)}) == 6


def test_seeds_of_a_run_differ():
    ir = traced(draws, normal(64, 32))
    plan = Prepared(ir, "off", native=native)
    outs = []
    for seed in (0, 1, 0, 2**63, -(2**63)):
        out = np.zeros((4, 64, 32), np.float32)
        plan.run([normal(64, 32)], [out], seed=seed)
        outs.append(out)
    np.testing.assert_array_equal(outs[0], outs[2])
    np.testing.assert_array_equal(outs[3], outs[4])  # the same 64 bits
    assert (outs[0][0] != outs[1][0]).any()
    np.testing.assert_array_equal(outs[0][1:3], outs[1][1:3])  # after random_seed the seed of the run does not count


def test_large_kernels_are_native_where_there_is_the_memory(monkeypatch):
    """The interpreter gives tensors back after their last use above 256 MiB; native code keeps them, up to a quarter of the memory."""

    def kernel(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        held = nl.ndarray((600, nl.par_dim(128), 1024), dtype=x.dtype, buffer=nl.sbuf)
        for i in nl.affine_range(600):
            held[i] = nl.load(x)
        for i in nl.sequential_range(600):
            nl.store(out, held[599 - i])
        return out

    ir = traced(kernel, np.zeros((128, 1024), np.float32))
    assert tape_of(ir, Checks.of("full")).frees
    monkeypatch.setattr(checks, "_memory", lambda: 8 << 30)
    assert not tape_of(ir, Checks.of("off")).frees and executor(ir) is not None
    monkeypatch.setattr(checks, "_memory", lambda: 1 << 30)
    assert tape_of(ir, Checks.of("fast")).frees


def added_to_itself(x, index):
    """Rows of a tile are added to those that an index names, in the same tile: all of them are read before the first one changes."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tile, rows = nl.load(x), nl.load(index)
    ix = nl.arange(x.shape[1])[None, :]
    nisa.dma_copy(dst=tile[rows, ix], src=tile, dst_rmw_op=np.add)
    nl.store(out, tile)
    return out


@pytest.mark.parametrize("rows", [(1, 2, 0), (2, 0, 1), (2, 1, 0)])  # what an index names twice is not defined
def test_rows_that_are_added_to_the_tile_they_come_from(rows):
    x, index = normal(3, 8), np.array(rows, np.int32).reshape(3, 1)
    want = x.copy()
    for row, target in zip(x, rows, strict=True):
        want[target] += row
    ir = traced(added_to_itself, x, index)
    assert both(ir, [x, index])
    np.testing.assert_array_equal(nki.simulate_kernel(nki.jit(added_to_itself), x, index, checks="off"), want)
