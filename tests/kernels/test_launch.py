"""Runs on several ranks: every collective against NumPy, groups, orders, threads, and what goes wrong."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import opennki
import opennki.dropin
import neuronxcc.nki as nki
import neuronxcc.nki.distributed as dist
import neuronxcc.nki.language as nl
import neuronxcc.nki.nccl as nccl
from neuronxcc.nki._private.private_api import cc_div, sendrecv
from opennki.ir.parse import from_text
from opennki.ir.print import to_text
from opennki.errors import NkiError, NkiTypeError, NkiValueError


@pytest.fixture(autouse=True)
def target(monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")


def hbm(shape, like):
    return nl.ndarray(shape, dtype=like.dtype, buffer=nl.shared_hbm)


@nki.jit
def reductions(x, groups):
    total, largest = hbm(x.shape, x), hbm(x.shape, x)
    nccl.all_reduce(srcs=[x], dsts=[total], op=np.add, replica_groups=groups)
    nccl.all_reduce(np.max, [x], [largest], groups)
    return total, largest


@nki.jit
def scatter(x, groups, n):
    out = hbm((x.shape[0], x.shape[1] // n), x)
    nccl.reduce_scatter(op=np.add, srcs=[x], dsts=[out], replica_groups=groups, reduce_scatter_dim=1)
    return out


@nki.jit
def gather(x, groups, n):
    out = hbm((x.shape[0] * n, x.shape[1]), x)
    nccl.all_gather(op=np.add, srcs=[x], dsts=[out], replica_groups=groups, all_gather_dim=0)
    return out


@nki.jit
def exchange(x, groups, n):
    out = hbm((x.shape[0] // n, x.shape[1] * n), x)
    nccl.all_to_all([x], [out], None, groups, 0, 1)
    return out


@nki.jit
def spread(x, groups):
    out = hbm(x.shape, x)
    nccl.broadcast([x], [out], None, groups, out.shape)
    return out


DTYPES = ["float32", ml_dtypes.bfloat16, "float16", "int32", ml_dtypes.float8_e4m3]


def inputs(ranks, shape=(16, 32), dtype="float32"):
    rng = np.random.default_rng(ranks)
    return [rng.integers(-4, 5, shape).astype(dtype) for _ in range(ranks)]


def groups_of(ranks, size, shuffled):
    numbers = np.random.default_rng(1).permutation(ranks) if shuffled else np.arange(ranks)
    return tuple(tuple(int(r) for r in numbers[i : i + size]) for i in range(0, ranks, size))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks, size, shuffled", [(2, 2, False), (8, 4, True), (6, 2, True), (16, 16, False), (64, 8, False)])
def test_every_collective(ranks, size, shuffled, dtype):
    groups, x = groups_of(ranks, size, shuffled), inputs(ranks, dtype=dtype)
    sums, gathered = (
        opennki.launch(reductions, ranks, lambda r: (x[r], groups)),
        opennki.launch(gather, ranks, lambda r: (x[r], groups, size)),
    )
    shards, parts = (opennki.launch(k, ranks, lambda r: (x[r], groups, size)) for k in (scatter, exchange))
    copies = opennki.launch(spread, ranks, lambda r: (x[r], groups))
    for group in groups:
        together = [x[r] for r in group]
        total = np.sum([t.astype(np.float64) for t in together], axis=0).astype(dtype)
        for at, r in enumerate(group):
            np.testing.assert_array_equal(sums[r][0], total)
            np.testing.assert_array_equal(sums[r][1], np.max(together, axis=0))
            np.testing.assert_array_equal(gathered[r], np.concatenate(together))
            np.testing.assert_array_equal(shards[r], np.split(total, size, axis=1)[at])
            np.testing.assert_array_equal(parts[r], np.concatenate([np.split(t, size)[at] for t in together], axis=1))
            np.testing.assert_array_equal(copies[r], together[0])


@nki.jit
def letters(x, peers):
    paired, ring, received, both = (hbm(x.shape, x) for _ in range(4))
    nccl.collective_permute(dst=paired, src=x, source_target_pairs=[(0, 2), (2, 1)])
    for channel in nl.affine_range(2):
        nccl.collective_permute_implicit(
            dst=ring[channel * 8 : channel * 8 + 8],
            src=x[channel * 8 : channel * 8 + 8],
            replica_groups=[[3, 1, 0, 2]],
            channel_id=channel,
            num_channels=2,
        )
    nccl.send([x], peer_id=peers)
    nccl.recv([received], peer_id=[3, 0, 1, 2])
    nccl.collective_permute_reduce_implicit(both, x, received, np.add, [[0, 1, 2, 3]])
    return paired, ring, received, both


def test_gathered_and_scattered_rows_of_another_shape():
    """Along dimension 0 the parts follow each other in memory: (1, ranks * rows, n) holds as many (1, rows, n)."""
    parts = [np.random.default_rng(r).standard_normal((1, 16, 8)).astype(np.float32) for r in range(4)]
    groups = [[0, 2], [3, 1]]

    @nki.jit(platform_target="trn2")
    def kernel(x):
        whole = nl.ndarray((1, 64, 8), dtype=x.dtype, buffer=nl.shared_hbm)
        mine = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nl.store(whole[0], nl.zeros((64, 8), x.dtype))
        there = whole[0:1, 16:48, :]
        nccl.all_gather(op=np.add, srcs=[x], dsts=[there], replica_groups=groups, all_gather_dim=0)
        nccl.reduce_scatter(op=np.add, srcs=[there], dsts=[mine], replica_groups=groups, reduce_scatter_dim=0)
        return whole, mine

    for checks in ("full", "off"):
        got = opennki.launch(kernel, 4, lambda r: (parts[r],), checks=checks)
        for rank, (whole, mine) in enumerate(got):
            group = next(g for g in groups if rank in g)
            np.testing.assert_array_equal(whole[0, 16:48], np.concatenate([parts[r][0] for r in group]))
            np.testing.assert_array_equal(mine, 2 * parts[rank])


def test_letters():
    x = inputs(4)
    got = opennki.launch(letters, 4, lambda r: (x[r], (1, 2, 3, 0)))
    for r in range(4):
        np.testing.assert_array_equal(got[r][0], {2: x[0], 1: x[2]}.get(r, np.zeros_like(x[0])))
        np.testing.assert_array_equal(got[r][1], x[{1: 3, 0: 1, 2: 0, 3: 2}[r]])
        np.testing.assert_array_equal(got[r][2], x[(r - 1) % 4])
        np.testing.assert_array_equal(got[r][3], x[(r - 1) % 4] + x[(r - 2) % 4])


@nki.jit
def ring_sum(x, steps):
    """Adds what comes round the ring, with the collective in a loop, masked in its last iteration."""
    buffers, out = nl.ndarray((2, *x.shape), dtype=x.dtype, buffer=nl.shared_hbm), hbm(x.shape, x)
    total, mine = nl.ndarray(x.shape, x.dtype), nl.load(x)
    total[...] = mine
    nl.store(buffers[0], mine)
    for i in nl.sequential_range(steps):
        nccl.collective_permute_implicit(dst=buffers[1], src=buffers[0], mask=(i < steps - 1))
        total[...] = nl.add(total, nl.load(buffers[1]), mask=(i < steps - 1))
        nl.store(buffers[0], nl.load(buffers[1]), mask=(i < steps - 1))
    nl.store(out, total)
    return out


@pytest.mark.parametrize("order", ["program", "reversed", "shuffle:1"])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_orders_and_threads_change_nothing(order, threads):
    x = [np.random.default_rng(r).standard_normal((16, 8), np.float32) for r in range(8)]
    got = opennki.launch(ring_sum, 8, lambda r: (x[r], 8), order=order, threads=threads, checks="off")
    for r in range(8):
        want = x[r]
        for step in range(1, 8):
            want = want + x[(r - step) % 8]
        np.testing.assert_array_equal(got[r], want)


@nki.jit
def round_the_ring(x, groups, dynamic):
    """An all-gather by the ring of a group: what a step brings is stored where it belongs, in two channels."""
    steps, half = len(groups[0]), x.shape[0] // 2
    out = nl.ndarray((steps, 2, half, x.shape[1]), dtype=x.dtype, buffer=nl.shared_hbm)
    buffers = nl.ndarray((2, 2, half, x.shape[1]), dtype=x.dtype, buffer=nl.shared_hbm)
    rows, columns = nl.mgrid[0:half, 0:x.shape[1]]
    for channel in nl.affine_range(2):
        nl.store(buffers[0, channel], nl.load(x[channel * half + rows, columns]))

    def step(at):
        for channel in nl.static_range(2):
            tile = nl.load(buffers[0, channel, rows, columns])
            place = cc_div(at * 2 + channel, 2, groups)
            nl.store(out[place, channel, rows, columns], value=tile)
            nccl.collective_permute_implicit(dst=buffers[1, channel], src=buffers[0, channel], replica_groups=groups,
                                             channel_id=channel, num_channels=2)  # fmt: skip
            nl.store(buffers[0, channel], nl.load(buffers[1, channel]))

    if dynamic:
        for i in nl.sequential_range(steps):
            step(i)
    else:
        for i in range(steps):
            step(i)
    return out


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("groups", [[[0, 1, 2, 3, 4, 5]], [[4, 0, 2], [1, 5, 3]]])
@pytest.mark.parametrize("checks", ["full", "off"])
def test_places_in_a_ring(groups, dynamic, checks):
    x = inputs(6)
    got = opennki.launch(round_the_ring, 6, lambda r: (x[r], groups, dynamic), checks=checks)
    for group in groups:
        for rank in group:
            np.testing.assert_array_equal(got[rank].reshape(-1, x[0].shape[1]), np.concatenate([x[r] for r in group]))


def test_arrays_that_are_written_change_on_success_alone():
    x = [np.full((4, 4), float(r), np.float32) for r in range(3)]

    def run(x: "nt.mutable_tensor", fail):  # noqa: F821, UP037
        dist.all_reduce([x], [x], np.add)
        if fail:
            dist.collective_permute([x], [x], [(0, 9)])
        return x

    with pytest.raises(NkiValueError, match="names rank 9"):
        opennki.launch(nki.jit(run), 3, lambda r: (x[r], True))
    assert [a[0, 0] for a in x] == [0, 1, 2]
    opennki.launch(nki.jit(run), 3, lambda r: (x[r], False))
    assert [a[0, 0] for a in x] == [3, 3, 3]


def test_ranks_do_not_write_into_each_other():
    def run(x: "nt.mutable_tensor"):  # noqa: F821, UP037
        dist.all_reduce([x], [x], np.add)
        return x

    x = np.ones((8, 4), np.float32)
    with pytest.raises(NkiValueError, match=r"rank 0 writes 'x', whose memory is 'x' of rank 1"):
        opennki.launch(nki.jit(run), 2, lambda r: (x[r : r + 4],))
    opennki.launch(nki.jit(run), 2, lambda r: (x[4 * r : 4 * r + 4],))
    assert (x == 2).all()


def test_grid_programs_of_ranks_meet_their_likes():
    @nki.jit
    def kernel(x):
        out = hbm(x.shape, x)
        p = nl.program_id(0)
        dist.all_reduce([x[p]], [out[p]], np.add)
        return out

    x = inputs(3, (2, 8, 4))
    for got in opennki.launch(kernel[2], 3, lambda r: (x[r],)):
        np.testing.assert_array_equal(got, sum(x))


def test_cores_exchange_tiles():
    @nki.jit
    def kernel(x):
        out = hbm(x.shape, x)
        p = nl.program_id(0)
        tile, other = nl.load(x[p]), nl.zeros(x.shape[1:], x.dtype)
        sendrecv(send_to_rank=1 - p, recv_from_rank=1 - p, src=tile, dst=other, pipe_id=3)
        nl.store(out[p], other)
        return out

    x = np.arange(64, dtype=np.float32).reshape(2, 8, 4)
    np.testing.assert_array_equal(nki.simulate_kernel(kernel[nl.nc(2)], x), x[::-1])


def test_one_rank_is_a_world():
    x = inputs(1)[0]
    assert reductions.trace(x, ()).has_collectives
    np.testing.assert_array_equal(nki.simulate_kernel(reductions, x, ())[0], x)


def test_each_rank_may_have_constants_of_its_own():
    @nki.jit
    def kernel(x, rank):
        out = hbm(x.shape, x)
        mine = hbm(x.shape, x)
        nl.store(mine, nl.load(x) * float(rank))
        dist.all_reduce([mine], [out], np.add)
        return out

    x = np.ones((4, 4), np.float32)
    for got in opennki.launch(kernel, 4, lambda r: {"x": x, "rank": r}):
        np.testing.assert_array_equal(got, x * 6)


# ---- what goes wrong ----


@nki.jit
def uneven(x, way):
    out = hbm(x.shape, x)
    if way == "reduce":
        dist.all_reduce([x], [out], np.add)
    elif way == "copy":
        dist.broadcast([x], [out])
    else:
        nl.store(out, nl.load(x))
    return out


def test_a_rank_that_never_comes_is_named():
    x = inputs(3)
    with pytest.raises(NkiError) as caught:
        opennki.launch(uneven, 3, lambda r: (x[r], "none" if r == 1 else "reduce"))
    text = str(caught.value)
    assert "2 ranks wait for ever" in text and "for rank 1" in text and "ended: rank 1" in text
    assert text.count("test_launch.py:") == 3, "the line of each rank that waits, and that of the error"


def test_different_collectives_at_one_step():
    x = inputs(2)
    with pytest.raises(NkiError) as caught:
        opennki.launch(uneven, 2, lambda r: (x[r], ("reduce", "copy")[r]))
    text = str(caught.value)
    assert "rank 0 waits in rank_all_reduce" in text and "rank 1 waits in rank_broadcast" in text


@pytest.mark.parametrize(
    "shapes, dtypes, text", [(((4, 4), (8, 4)), ("float32",) * 2, "8, 4"), (((4, 4),) * 2, ("float32", "int32"), "int32")]
)
def test_different_shapes_and_dtypes(shapes, dtypes, text):
    with pytest.raises(NkiValueError, match=r"(?s)src of rank 1 is .*" + text):
        opennki.launch(uneven, 2, lambda r: (np.ones(shapes[r], dtypes[r]), "reduce"))


def test_different_attributes():
    @nki.jit
    def kernel(x, op):
        out = hbm(x.shape, x)
        dist.all_reduce([x], [out], op)
        return out

    with pytest.raises(NkiValueError, match="op='maximum'"):
        opennki.launch(kernel, 2, lambda r: (inputs(2)[r], (np.add, np.max)[r]))


def test_what_is_sent_and_never_received():
    @nki.jit
    def kernel(x, rank):
        out = hbm(x.shape, x)
        if rank == 0:
            nccl.send([x], peer_id=1)
        nl.store(out, nl.load(x))
        return out

    with pytest.raises(NkiValueError, match="rank 1 never received what rank 0 sent"):
        opennki.launch(kernel, 2, lambda r: (inputs(2)[r], r))


def test_the_rank_of_an_error_is_named():
    @nki.jit
    def kernel(x, index):
        out = hbm(x.shape, x)
        dist.all_reduce([x], [out], np.add)
        nl.store(out, nl.load(x[nl.arange(4)[:, None], nl.arange(4)[None, :] + index]))
        return out

    x = inputs(3, (4, 8))
    with pytest.raises(NkiError, match="index"):
        opennki.launch(kernel, 3, lambda r: (x[r], 6 if r == 2 else 0))


def test_destinations_of_another_size():
    @nki.jit
    def kernel(x):
        out = hbm((x.shape[0] * 3, x.shape[1]), x)
        dist.all_gather([x], [out])
        return out

    with pytest.raises(NkiValueError, match=r"dst is \(48, 32\) and the members make \(32, 32\)"):
        opennki.launch(kernel, 2, lambda r: (inputs(2)[r],))


@pytest.mark.parametrize("ranks", [0, -1, True, 1.5, 1 << 20])
def test_numbers_of_ranks(ranks):
    with pytest.raises(NkiValueError, match="number of ranks"):
        opennki.launch(uneven, ranks, lambda r: (inputs(1)[0], "none"))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: dist.all_reduce(x, None, np.add),
        lambda x: dist.all_reduce([x], [x, x], np.add),
        lambda x: nccl.all_reduce([x], [x], np.add, colour=1),
        lambda x: dist.broadcast([x], [x], None, (1, 2)),
    ],
)
def test_arguments_of_collectives(call):
    def kernel(x):
        call(x)
        return x

    with pytest.raises((NkiTypeError, NkiValueError)):
        opennki.launch(nki.jit(kernel), 1, lambda r: (inputs(1)[0],))


def test_arguments_of_a_rank():
    with pytest.raises(NkiTypeError, match=r"args_of\(0\) is ndarray"):
        opennki.launch(uneven, 2, lambda r: inputs(1)[0])


def test_the_text_form_keeps_collectives():
    kernel = letters.trace(inputs(4)[0], (1, 2, 3, 0))
    again = from_text(to_text(kernel))
    assert again.has_collectives and to_text(again) == to_text(kernel)
