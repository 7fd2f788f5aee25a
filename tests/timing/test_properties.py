"""What must hold for every kernel: more work takes no less time, limits of the hardware are not beaten, every target and every error."""
import dataclasses
from itertools import pairwise

import numpy as np
import pytest
from timing_cases import BF16, buffered, causal, copy, matmul, product, rows, traced

from opennki.errors import NkiValueError
from opennki.ir.nodes import Instr, statements
from opennki.isa.declare import ISA
from opennki.timing import COMPUTE, constants, costs, estimate


def test_more_rows_take_longer():
    times = [estimate(traced(rows, (128 * n, 512))).latency_us for n in range(1, 40)]
    assert times == sorted(times) and len(set(times)) == len(times)


@pytest.mark.parametrize("target", ["trn1", "trn2", "trn3"])
def test_wider_tiles_take_longer(target):
    times = [estimate(traced(copy, (128, 2**n), target=target)).latency_us for n in range(3, 14)]
    assert times == sorted(times)


@pytest.mark.parametrize("target", ["trn1", "trn2", "trn3"])
def test_float32_takes_longer_than_bfloat16(target):
    wide, short = (estimate(traced(matmul, (1024, 1024), (1024, 2048), dtype=d, target=target)) for d in (np.float32, BF16))
    assert wide.latency_us > short.latency_us
    assert wide.macs == short.macs == 1024 * 1024 * 2048
    assert wide.work.adjusted_macs == 4 * short.work.adjusted_macs


def test_more_buffers_are_never_slower():
    def kernel(factor):
        def body(x):
            return buffered(x, factor)
        return traced(body, (128 * 64, 512))
    times = [estimate(kernel(n)).latency_us for n in (1, 2, 3, 4)]
    assert times == sorted(times, reverse=True) and times[0] > 1.2 * times[-1]


@pytest.mark.parametrize("target", ["trn1", "inf2", "trn2", "trn3"])
@pytest.mark.parametrize("kernel, shapes", [(rows, [(2048, 512)]), (causal, [(1024, 128)]), (matmul, [(512, 512), (512, 1024)])])
def test_no_resource_is_faster_than_itself(kernel, shapes, target):
    t = estimate(traced(kernel, *shapes, target=target))
    run = t.latency_ns - t.launch_us * 1e3
    for name in (*COMPUTE, "dma", "hbm", "dma queues"):
        assert t.bounds[name] <= run * (1 + 1e-9), name
    assert all(0 <= use.active <= 1 for use in t.engines.values())
    assert t.hbm_read_bytes + t.hbm_write_bytes <= t.spec.hbm_core_gbps * run
    assert t.bound_by in (*t.bounds, "dependencies", "launch")


def test_order_on_an_engine_and_of_data():
    """Recorded rows of an engine do not overlap, and nothing starts before what it waits for is visible."""
    t = estimate(traced(causal, (128 * 6, 256)), record=True)
    by_id = {r.id: r for r in t.rows}
    for name in COMPUTE:
        mine = sorted((r for r in t.rows if r.engine == name), key=lambda r: r.start_ns)
        assert all(a.start_ns + a.duration_ns <= b.start_ns + 1e-6 for a, b in pairwise(mine))
    waits = [r for r in t.rows if r.waits_for >= 0]
    assert waits and all(by_id[r.waits_for].visible_ns <= r.start_ns + 1e-6 for r in waits)


def test_the_estimate_says_what_it_is():
    first, third = (estimate(traced(copy, (128, 128), target=n)) for n in ("trn1", "trn3"))
    assert "estimate" in first.is_estimate and "no spread" in first.is_estimate
    assert "documentation only" in third.is_estimate and "documentation only" not in first.is_estimate


def test_a_grid_runs_on_its_cores():
    import neuronxcc.nki.language as nl

    def kernel(x):
        i = nl.program_id(0)
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nl.store(out[i * 128:(i + 1) * 128, :], nl.exp(nl.load(x[i * 128:(i + 1) * 128, :])))
        return out
    whole = traced(kernel, (512, 2048), grid=(4,), target="trn2")
    everything, one = estimate(whole), estimate(whole, program=(2,))
    assert everything.programs == 4 and everything.cores == 1 and one.programs == 1 and one.program == (2,)
    assert one.latency_us < everything.latency_us < 4 * one.latency_us
    assert everything.hbm_read_bytes == 4 * one.hbm_read_bytes
    cores = estimate(traced(kernel, (512, 2048), grid=(nl.nc(2) * 2,), target="trn2"))
    assert cores.cores == 2 and cores.programs == 2
    assert one.latency_us < cores.latency_us < everything.latency_us


@pytest.mark.parametrize("program", [(4,), (-1,), (0, 0), ()])
def test_a_program_outside_of_the_grid_is_refused(program):
    import neuronxcc.nki.language as nl

    def kernel(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        i = nl.program_id(0)
        nl.store(out[i * 128:(i + 1) * 128, :], nl.load(x[i * 128:(i + 1) * 128, :]))
        return out
    with pytest.raises(NkiValueError, match="grid"):
        estimate(traced(kernel, (512, 64), grid=(4,)), program=program)


def test_a_negative_limit_is_refused():
    with pytest.raises(NkiValueError, match="max_rows"):
        estimate(traced(copy, (128, 64)), record=True, max_rows=-1)


def test_an_unknown_target_is_refused():
    kernel = traced(copy, (128, 64))
    with pytest.raises(NkiValueError, match="unknown target"):
        estimate(dataclasses.replace(kernel, target="trn9"))


def test_an_empty_kernel_is_its_launch():
    kernel = dataclasses.replace(traced(copy, (128, 64)), body=[], outputs=[])
    t = estimate(kernel, record=True)
    assert t.latency_us == t.launch_us > 0 and t.bound_by == "launch" and not t.rows
    assert set(t.metrics()) == set(estimate(traced(copy, (128, 64))).metrics())


def test_the_kernel_stays_as_it_is():
    from opennki.ir.print import to_text
    kernel = traced(matmul, (512, 256), (512, 1024))
    before = to_text(kernel)
    estimate(kernel)
    assert to_text(kernel) == before


def test_tensors_beyond_sbuf_are_named():
    import neuronxcc.nki.language as nl

    def kernel(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        held = nl.ndarray((x.shape[0] // 128, nl.par_dim(128), x.shape[1]), dtype=x.dtype, buffer=nl.sbuf)
        for i in nl.affine_range(x.shape[0] // 128):
            held[i] = nl.load(x[i * 128:(i + 1) * 128, :])
        for i in nl.affine_range(x.shape[0] // 128):
            nl.store(out[i * 128:(i + 1) * 128, :], held[i])
        return out
    t = estimate(traced(kernel, (128 * 64, 2048)))
    assert any("SBUF" in w and "spill" in w for w in t.warnings)


def test_masks_narrow_time_and_bytes():
    import neuronxcc.nki.language as nl

    def kernel(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        row, column = nl.mgrid[0:128, 0:512]
        tile = nl.load(x[row, column], mask=column < 100)
        nl.store(out[row, column], nl.exp(tile, mask=column < 100), mask=column < 100)
        return out
    narrow, whole = estimate(traced(kernel, (128, 512))), estimate(traced(rows, (128, 512)))
    assert narrow.latency_us < whole.latency_us
    assert narrow.hbm_read_bytes == 128 * 100 * 4


def test_every_constant_has_a_source():
    assert len(constants.CONSTANTS) >= 8
    for name, constant in constants.CONSTANTS.items():
        assert len(constant.source) > 30 and constant.unit and constant.value > 0, name


def test_every_instruction_can_be_timed():
    """The model names no instruction: what it needs of each is in its declaration."""
    for name, decl in ISA.items():
        assert callable(decl.cost), name
        assert decl.dma_share is None or decl.engines == ("dma",), name
        assert decl.pe is None or "tensor" in decl.engines, name
    kernel = traced(product, (128, 128), (128, 512))
    for stmt in statements(kernel.body):
        if isinstance(stmt, Instr):
            assert costs.describe(stmt)
