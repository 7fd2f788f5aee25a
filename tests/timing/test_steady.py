"""What is skipped in steady states of loops against running every instruction."""
import random

import numpy as np
import pytest
from timing_cases import BF16, aperiodic, buffered, causal, matmul, periodic, resident, rows, traced

import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
from opennki.timing import estimate, machine, programs


def everything(kernel):
    """The estimate with every instruction run."""
    def loop(self, node):
        for i in range(node.trips):
            self.env[node.slot] = i
            self.run(node.body)
    kept, machine.Machine.loop = machine.Machine.loop, loop
    periods, programs.PERIODS = programs.PERIODS, 1 << 30
    try:
        return estimate(kernel)
    finally:
        machine.Machine.loop, programs.PERIODS = kept, periods


def agree(kernel, share=1.0, tolerance=0.0):
    """Both ways give the same timeline, and the fast one runs at most that share of the instructions."""
    fast, full = estimate(kernel), everything(kernel)
    assert full.simulated == full.instructions == fast.instructions
    assert fast.latency_us == pytest.approx(full.latency_us, rel=tolerance, abs=1e-9)
    assert fast.traffic == full.traffic and fast.work == full.work and fast.bounds == pytest.approx(full.bounds)
    for name, use in full.engines.items():
        assert fast.engines[name].instructions == use.instructions
        assert fast.engines[name].busy_ns == pytest.approx(use.busy_ns, rel=1e-9, abs=1e-6)
    assert sum(c.critical_ns for c in fast.lines) == pytest.approx(fast.latency_ns - fast.launch_us * 1e3, abs=1e-3)
    assert fast.simulated <= share * full.simulated
    return fast


TARGETS = ("trn1", "trn2", "trn3")


@pytest.mark.parametrize("target", TARGETS)
def test_a_plain_loop(target):
    agree(traced(rows, (128 * 400, 256), target=target), 0.3)


@pytest.mark.parametrize("target", TARGETS)
def test_nested_loops_of_a_product(target):
    agree(traced(matmul, (2048, 1024), (2048, 4096), dtype=BF16, target=target), 0.5)


@pytest.mark.parametrize("target", TARGETS)
def test_causal_guards(target):
    agree(traced(causal, (128 * 48, 128), target=target), 0.9)


@pytest.mark.parametrize("target", TARGETS)
def test_periodic_guards(target):
    agree(traced(periodic, (128 * 300, 256), target=target), 0.3)


@pytest.mark.parametrize("target", TARGETS)
def test_aperiodic_guards_and_masks(target):
    agree(traced(aperiodic, (128 * 400 - 57, 256), target=target), 0.5)


@pytest.mark.parametrize("n", [6, 17, 40])
def test_tiles_from_outside_of_the_loop(n):
    agree(traced(resident, (128 * n, 512), (128 * n, 512)))


@pytest.mark.parametrize("factor", [1, 2, 3, 5])
def test_directives(factor):
    def kernel(x):
        return buffered(x, factor)
    agree(traced(kernel, (128 * 100, 256)), 0.5)


def test_ten_million_instructions_are_not_run():
    """A tiled product that executes more than ten million instructions: a few hundred are run, the others repeat."""
    t = estimate(traced(matmul, (8192, 65536), (8192, 65536), dtype=BF16))
    assert t.instructions > 10_000_000
    assert t.simulated < 10_000
    assert t.macs == 8192 * 65536 * 65536
    part = estimate(traced(matmul, (8192, 65536), (8192, 32768), dtype=BF16))
    assert t.latency_us - t.launch_us == pytest.approx(2 * (part.latency_us - part.launch_us), rel=1e-4)


def attention(q, k, v):
    """A row of blocks of causal attention for each program of the first axis."""
    (heads, d, n), out = q.shape, nl.ndarray((q.shape[0], q.shape[2], v.shape[2]), dtype=q.dtype, buffer=nl.shared_hbm)
    head = nl.program_id(0)
    for i in nl.affine_range(n // 128):
        left = nl.load(q[head, :, nl.ds(i * 128, 128)])
        total = nl.zeros((128, v.shape[2]), dtype=nl.float32)
        for j in nl.sequential_range(n // 128):
            if j <= i:
                scores = nisa.nc_matmul(left, nl.load(k[head, :, nl.ds(j * 128, 128)]))
                weights = nisa.activation(op=nl.exp, data=scores)
                total[...] = nl.add(total, nisa.nc_matmul(nisa.nc_transpose(weights), nl.load(v[head, nl.ds(j * 128, 128), :])))
        nl.store(out[head, nl.ds(i * 128, 128), :], total)
    return out


@pytest.mark.parametrize("target", TARGETS)
def test_programs_of_a_grid(target):
    shapes = [(12, 64, 1024), (12, 64, 1024), (12, 1024, 64)]
    t = agree(traced(attention, *shapes, target=target, grid=(12,)), 0.5)
    alone = estimate(traced(attention, *shapes, target=target, grid=(12,)), program=(3,))
    assert t.instructions == 12 * alone.instructions and t.latency_us < 12 * alone.latency_us


def test_programs_whose_work_depends_on_their_place_are_all_run():
    def some(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        rows, column = nl.mgrid[0:128, 0:x.shape[1]]
        at = nl.program_id(0) * 128 + rows
        nl.store(out[at, column], nl.load(x[at, column], mask=at < x.shape[0]), mask=at < x.shape[0])
        return out

    t = agree(traced(some, (128 * 20 - 60, 256), grid=(20,)))
    assert t.simulated == t.instructions == 40


def test_random_programs():
    """Random nests of loads, arithmetic and guards, with a fixed seed."""
    for seed in range(24):
        rng = random.Random(seed)
        outer, inner = rng.randrange(2, 14), rng.randrange(5, 60)
        width = rng.choice((16, 128, 512))
        every, from_, deep = rng.randrange(1, 5), rng.randrange(0, inner), rng.random() < 0.5
        steps = [rng.choice(("exp", "add", "reduce", "matmul", "copy")) for _ in range(rng.randrange(1, 5))]

        def kernel(x, steps=steps, outer=outer, inner=inner, every=every, from_=from_, deep=deep):
            out = nl.ndarray((outer, 128, x.shape[2]), dtype=x.dtype, buffer=nl.shared_hbm)
            for i in nl.affine_range(outer):
                total = nl.zeros((128, x.shape[2]), dtype=nl.float32)
                for j in nl.sequential_range(inner):
                    tile = nl.load(x[j])
                    value = nl.ndarray((128, x.shape[2]), dtype=nl.float32, buffer=nl.sbuf)
                    value[...] = nl.copy(tile)
                    for step in steps:
                        if step == "exp":
                            value[...] = nl.exp(value)
                        elif step == "add":
                            value[...] = nl.add(value, tile)
                        elif step == "reduce":
                            value[...] = nl.subtract(value, nl.max(value, axis=1, keepdims=True))
                        elif step == "copy":
                            value[...] = nl.copy(value)
                        else:
                            product = nisa.nc_matmul(value[:, 0:16], value)
                            value[0:16, :] = nl.copy(product)
                    if j % every == 0:
                        total[...] = nl.add(total, value)
                    if deep and j >= from_ and j <= from_ + i:
                        total[...] = nl.multiply(total, tile)
                nl.store(out[i], total)
            return out

        agree(traced(kernel, (inner, 128, width), target=rng.choice(TARGETS)))


def test_recording_changes_nothing():
    kernel = traced(causal, (128 * 12, 128))
    assert estimate(kernel, record=True).latency_us == estimate(kernel).latency_us
    some = estimate(kernel, record=True, max_rows=10)
    assert len(some.rows) == 10 and some.truncated == some.instructions - 10
    assert some.latency_us == estimate(kernel).latency_us


def test_nothing_depends_on_the_run():
    kernel = traced(aperiodic, (128 * 40 - 3, 256))
    first, second = estimate(kernel), estimate(traced(aperiodic, (128 * 40 - 3, 256)))
    assert first.latency_us == second.latency_us and first.engines == second.engines and first.lines == second.lines
    assert isinstance(first.latency_us, float) and np.isfinite(first.latency_us)
