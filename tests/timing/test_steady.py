"""What is skipped in steady states of loops against running every instruction."""
import random

import numpy as np
import pytest
from timing_cases import BF16, aperiodic, buffered, causal, matmul, periodic, resident, rows, traced

from opennki.timing import estimate, machine


def everything(kernel):
    """The estimate with every instruction run."""
    def loop(self, node):
        for i in range(node.trips):
            self.env[node.slot] = i
            self.run(node.body)
    kept = machine.Machine.loop
    machine.Machine.loop = loop
    try:
        return estimate(kernel)
    finally:
        machine.Machine.loop = kept


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


def test_random_programs():
    """Random nests of loads, arithmetic and guards, with a fixed seed."""
    import neuronxcc.nki.isa as nisa
    import neuronxcc.nki.language as nl
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
