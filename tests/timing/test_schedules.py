"""Schedules small enough to be computed by hand, to the picosecond of rounding."""
import numpy as np
import pytest
from timing_cases import BF16, chain, copy, product, rows, traced

from opennki.isa.target import resolve
from opennki.timing import COMPUTE, ENGINES, constants, estimate


def ns(*parts):
    """A sum of parts that are each rounded to ps."""
    return sum(round(p * 1000) for p in parts) / 1000


@pytest.mark.parametrize("name", ["trn1", "inf2", "trn2", "trn3"])
def test_a_copy_is_a_load_and_a_store(name):
    spec = resolve(name)
    t = estimate(traced(copy, (128, 1024), target=name), record=True)
    each = 8 * constants.descriptor_ns(4096, spec.dma_engine_gbps, spec)  # 8 partitions for each of 16 engines
    load, store = t.rows
    assert load.start_ns == spec.dma_first_byte_ns
    assert load.duration_ns == store.duration_ns == pytest.approx(each, abs=1e-3)
    assert load.visible_ns == ns(spec.dma_first_byte_ns, each, spec.dma_done_ns)
    assert store.start_ns == ns(spec.dma_first_byte_ns, each, spec.dma_done_ns, spec.dma_first_byte_ns)
    assert store.waits_for == load.id
    assert t.latency_us == pytest.approx(constants.launch_us(spec) + store.visible_ns / 1000, abs=1e-9)
    assert (t.hbm_read_bytes, t.hbm_write_bytes) == (128 * 4096, 128 * 4096)
    assert t.traffic.dma_descriptors == 256 and t.traffic.dma_transfers == 2


def test_dependent_activations_wait_for_results():
    spec = resolve("trn1")
    t = estimate(traced(chain, (128, 1)), record=True)
    first, second, third = (r for r in t.rows if r.engine == "scalar")
    issue = ns((spec.min_ii + spec.instruction_overhead) / spec.clock_scalar)
    latency = ns(constants.SCALAR_LATENCY.value / spec.clock_scalar)
    assert first.duration_ns == ns(issue, spec.act_table_load_ns)  # the first one loads the table of exp
    assert second.duration_ns == third.duration_ns == issue
    assert third.start_ns - second.start_ns == pytest.approx(issue + latency, abs=1e-6)
    assert round((third.start_ns - second.start_ns) * spec.clock_scalar) == 264  # the published interval


@pytest.mark.parametrize("dtype, passes, load", [(BF16, 1, 0), (np.float32, 4, 4 * 128)])
def test_a_product_takes_a_cycle_for_each_row_and_pass(dtype, passes, load):
    spec = resolve("trn1")
    t = estimate(traced(product, (128, 128), (128, 512), dtype=dtype), record=True)
    row = next(r for r in t.rows if r.engine == "tensor")
    assert row.duration_ns == pytest.approx((512 * passes + load) / spec.clock_tensor, abs=2e-3)
    assert row.visible_ns - row.start_ns - row.duration_ns == pytest.approx(constants.TENSOR_LATENCY.value / spec.clock_tensor, abs=1e-3)
    copied = next(r for r in t.rows if r.engine in ("scalar", "vector"))
    assert copied.start_ns == pytest.approx(row.visible_ns + constants.SEMAPHORE.value, abs=1e-6)
    assert t.macs == 128 * 128 * 512 and t.work.matmuls == 1
    assert t.work.adjusted_macs == t.macs * passes


def test_independent_rows_overlap():
    """Sixteen tiles: the DMA engines are busy without a break once they began, so that each tile adds its bytes only."""
    spec = resolve("trn2")
    t = [estimate(traced(rows, (128 * n, 4096), target="trn2")) for n in (16, 17, 18)]
    tile = 8 * constants.descriptor_ns(4 * 4096, spec.dma_engine_gbps, spec)
    assert t[2].latency_ns - t[1].latency_ns == pytest.approx(t[1].latency_ns - t[0].latency_ns, abs=1)
    assert t[1].latency_ns - t[0].latency_ns == pytest.approx(2 * tile, rel=0.3)
    assert t[0].bound_by == "dma"


def test_few_partitions_use_few_engines():
    spec = resolve("trn2")
    narrow = estimate(traced(copy, (4, 4096), dtype=BF16, target="trn2"), record=True)
    assert [u.instructions > 0 for u in narrow.dma_engines] == [True] + [False] * 15
    assert narrow.rows[0].queue == "dma0"
    assert narrow.rows[0].duration_ns == pytest.approx(4 * 8192 / spec.dma_engine_gbps, abs=1e-3)  # published: 1416 ns
    assert narrow.rows[0].duration_ns == pytest.approx(1416, rel=0.01)


def test_a_timeline_is_whole():
    t = estimate(traced(chain, (128, 64)), record=True)
    assert set(t.engines) == set(ENGINES)
    assert [r.id for r in t.rows] == list(range(len(t.rows)))
    assert sum(c.critical_ns for c in t.lines) + t.launch_us * 1e3 == pytest.approx(t.latency_ns, abs=1e-6)
    for name in COMPUTE:
        assert t.engines[name].busy_ns == pytest.approx(sum(r.duration_ns for r in t.rows if r.engine == name), abs=1e-6)
        assert t.engines[name].instructions == sum(r.engine == name for r in t.rows)
    assert all(r.location.file.endswith("timing_cases.py") and r.operands for r in t.rows)
    ranked = t.by_source_line()
    assert [c.critical_ns for c in ranked] == sorted((c.critical_ns for c in t.lines), reverse=True)


def test_metrics_are_those_of_the_vendor():
    t = estimate(traced(product, (128, 128), (128, 512), dtype=BF16))
    m = t.metrics()
    assert m["total_time"] == pytest.approx(t.latency_us * 1e-6)
    assert m["model_flops"] == 2 * 128 * 128 * 512
    assert m["hfu_estimated_percent"] == pytest.approx(m["hardware_flops"] / (2 * 128 * 128 * 2.8e9 * m["total_time"]))
    assert m["mbu_estimated_percent"] == pytest.approx((m["hbm_read_bytes"] + m["hbm_write_bytes"]) / m["total_time"] / 410e9)
    assert m["neuroncore_cycle_count"] == round(t.latency_ns * 1.4)
    assert m["matmul_instruction_count"] == 1 and m["psum_read_sbuf_write_count"] == 1
    assert all(0 <= v <= 1 for k, v in m.items() if k.endswith("_percent"))
    assert m["peak_flops_bandwidth_ratio"] == pytest.approx(223.78, rel=1e-3)  # as the vendor prints it for trn1
    line = t.roofline()
    assert line.attained < line.ceiling <= line.peak and line.intensity > 0
