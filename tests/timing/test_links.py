"""Collectives on the links between chips: distances, and how their time depends on ranks, sizes and places."""

from __future__ import annotations

import json
from collections import deque
from itertools import pairwise

import numpy as np
import pytest

import opennki.dropin  # noqa: F401  isort: skip
import neuronxcc.nki as nki
import neuronxcc.nki.distributed as dist
import neuronxcc.nki.language as nl
import neuronxcc.nki.nccl as nccl
from opennki.errors import NkiValueError
from opennki.isa.target import TARGETS, resolve
from opennki.isa.topology import TOPOLOGIES, group_on
from opennki.timing import constants, estimate
from opennki.tools.latency import bench
from opennki.trace.kernel import DeclTensor

STEP = constants.LINK_STEP.value


def test_every_target_has_a_topology():
    assert set(TOPOLOGIES) == {target.name for target in TARGETS.values()}
    for name, topology in TOPOLOGIES.items():
        assert topology.source and topology.chips >= 1 and topology.instance in topology.describe(), name


@pytest.mark.parametrize("name", ["trn1", "inf2", "trn2n"])
def test_distances_are_those_of_walks(name):
    """Against a breadth-first search over the links of a torus."""
    topology = TOPOLOGIES[name]

    def neighbours(chip):
        at, rest = [], chip
        for size in reversed(topology.shape):
            at.insert(0, rest % size)
            rest //= size
        for axis, size in enumerate(topology.shape):
            for step in (-1, 1):
                other = list(at)
                other[axis] = (at[axis] + step) % size
                number = 0
                for value, extent in zip(other, topology.shape, strict=True):
                    number = number * extent + value
                yield number

    for start in (0, 5, topology.chips - 1):
        seen, todo = {start: 0}, deque([start])
        while todo:
            chip = todo.popleft()
            for other in neighbours(chip):
                if other not in seen:
                    seen[other] = seen[chip] + 1
                    todo.append(other)
        assert {chip: topology.distance(start, chip) for chip in range(topology.chips)} == seen


def test_groups():
    trn2, torus = resolve("trn2"), TOPOLOGIES["trn2"]
    one = group_on(torus, trn2, range(8))
    assert (one.ranks, one.chips, one.each, one.mean, one.far) == (8, 1, 8, 0.0, 0)
    row = group_on(torus, trn2, range(0, 32, 8))  # a row of four chips: two neighbours, one opposite
    assert (row.chips, row.each, row.far) == (4, 1, 2) and row.mean == pytest.approx(4 / 3)
    assert group_on(torus, trn2, range(8), cores=2).chips == 2
    assert group_on(TOPOLOGIES["trn3"], resolve("trn3"), range(512)).far == 1
    with pytest.raises(NkiValueError, match=r"trn2.48xlarge, that is 128 ranks"):
        group_on(torus, trn2, [128])


def traced(body, shape=(128, 512), target="trn2", grid=None):
    kernel = nki.jit(body, platform_target=target, mode="trace")
    return (kernel[grid] if grid else kernel).trace(DeclTensor(shape, "float32"))


def reduced(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    dist.all_reduce([x], [out], np.add)
    return out


def test_kernels_without_collectives_have_no_links():
    def copy(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.load(x))
        return out

    one, many = estimate(traced(copy)), estimate(traced(copy), ranks=64)
    assert one.links is None and one.latency_us == many.latency_us and "links" not in one.bounds and one.metrics()["cc_op_count"] == 0


def test_a_collective_takes_longer_with_more_ranks_and_more_bytes():
    kernel, large = traced(reduced), traced(reduced, (4096, 4096))
    times = [estimate(kernel, ranks=n).links.busy_ns for n in (1, 2, 8, 16, 64, 128)]
    assert times[0] == 0 and times[1] == 2 * STEP * 1e3  # within a chip: there and back
    assert all(a <= b for a, b in pairwise(times)) and times[-1] > times[2]
    wire = 2 * 4096 * 4096 * 4 * 127 / 128 / (resolve("trn2").link_gbps * constants.LINK_ONE_WAY.value)
    assert wire <= estimate(large, ranks=128).links.busy_ns <= wire + 2 * 127 * STEP * 1e3 + 1
    slower, faster = (estimate(traced(reduced, (4096, 4096), t), ranks=32).links.busy_ns for t in ("trn1", "trn2"))
    assert slower > faster


def test_the_end_of_the_kernel_waits_for_its_links():
    alone, many = (estimate(traced(reduced), ranks=n) for n in (1, 128))
    assert many.latency_us - alone.latency_us == pytest.approx(many.links.busy_ns / 1e3, abs=10)
    assert many.latency_us > many.links.busy_ns / 1e3
    metrics = many.metrics()
    assert metrics["cc_op_count"] == 1 and metrics["cc_op_time"] == pytest.approx(many.links.busy_ns * 1e-9)
    assert many.bounds["links"] == many.links.busy_ns


def test_groups_of_a_chip_are_nearer_than_groups_across():
    def grouped(x, groups):
        def body(x):
            out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
            nccl.all_reduce(np.add, [x], [out], groups)
            return out

        return estimate(traced(body, (1024, 1024))).links

    near = grouped(None, [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]])
    across = grouped(None, [[0, 8], [1, 9], [2, 10], [3, 11], [4, 12], [5, 13], [6, 14], [7, 15]])
    assert near.ranks == across.ranks == 16
    assert near.link_bytes == 0 and across.link_bytes >= 1024 * 1024 * 4 and near.busy_ns < across.busy_ns


def test_pairs_and_letters_by_distance():
    def permuted(pairs):
        def body(x):
            out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
            nccl.collective_permute(out, x, source_target_pairs=pairs)
            return out

        return estimate(traced(body, (1024, 1024)), ranks=128).links.busy_ns

    assert permuted([(0, 1)]) < permuted([(0, 8)]) < permuted([(0, 80)])

    def loop(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        for _ in nl.sequential_range(5000):
            nccl.collective_permute_implicit(dst=out, src=x)
        return out

    many = estimate(traced(loop), ranks=16)
    assert many.links.collectives == 5000
    assert many.links.busy_ns == pytest.approx(5000 * permuted_once(), rel=1e-6)
    assert many.latency_us * 1e3 > many.links.busy_ns, "the links carry one collective at a time"


def permuted_once():
    def body(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nccl.collective_permute_implicit(dst=out, src=x)
        return out

    return estimate(traced(body), ranks=16).links.busy_ns


def test_what_is_shown():
    kernel = nki.jit(reduced, platform_target="trn2", mode="trace")
    text = bench(kernel, [DeclTensor((128, 512), "float32")], {}, False)
    assert "1 among 128 ranks, 8 on a chip, 4 x 4 torus of trn2.48xlarge" in text and "an estimate from documents alone" in text
    made = json.loads(bench(kernel, [DeclTensor((128, 512), "float32")], {}, True, 4))
    assert made["links"]["ranks"] == 4 and made["links"]["busy_ns"] > 0 and made["cc_op_count"] == 1
    with pytest.raises(NkiValueError, match="fewer ranks"):
        bench(kernel, [DeclTensor((128, 512), "float32")], {}, True, 129)
    with pytest.raises(NkiValueError, match="positive"):
        estimate(traced(reduced), ranks=0)
