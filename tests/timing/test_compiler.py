"""What the model takes the compiler and the DMA engines to do, on kernels of which the other way takes visibly longer."""
import numpy as np
import pytest
from timing_cases import copy, traced

import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
from opennki.isa.target import resolve
from opennki.timing import constants, estimate

SPEC = resolve("trn1")


def columns(x):
    """The first half of each row: many short runs, and much for each partition."""
    rows = x.reshape((128, x.shape[0] // 128, x.shape[1]))
    half = x.shape[1] // 2
    out = nl.ndarray((128, x.shape[0] // 128, half), dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.load(rows[:, :, 0:half]))
    return out


def test_what_a_partition_gets_decides_about_the_rate_and_not_the_run():
    load = estimate(traced(columns, (128 * 128, 256)), record=True).rows[0]
    assert load.descriptors == 128 * 128
    each = constants.DMA_DESCRIPTOR.value + 512 / SPEC.dma_engine_gbps  # 512 bytes in a row, 64 KiB for each partition
    assert load.duration_ns == pytest.approx(8 * 128 * each, rel=1e-6)
    short = estimate(traced(copy, (128, 128)), record=True).rows[0]
    assert short.duration_ns == pytest.approx(8 * constants.descriptor_ns(512, SPEC.dma_engine_gbps, SPEC), abs=1e-3)
    assert short.duration_ns > 1.5 * 8 * each


def turned_load(x):
    out = nl.ndarray((x.shape[1], x.shape[0]), dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.load_transpose2d(x))
    return out


def turned_store(x):
    out = nl.ndarray((x.shape[1], x.shape[0]), dtype=x.dtype, buffer=nl.shared_hbm)
    p, f = nl.arange(x.shape[0])[:, None], nl.arange(x.shape[1])[None, :]
    nl.store(out[f, p], nl.load(x))
    return out


@pytest.mark.parametrize("kernel, row", [(turned_load, 0), (turned_store, 1)])
@pytest.mark.parametrize("shape", [(128, 128), (64, 128), (128, 64)])
def test_a_transpose_by_dma_takes_a_word_for_each_element(kernel, row, shape):
    found = estimate(traced(kernel, shape), record=True).rows[row]
    elements = shape[0] * shape[1] / SPEC.dma_engines_core  # all engines share them, however many partitions there are
    assert found.duration_ns == pytest.approx(elements * constants.DMA_WORD.value / SPEC.dma_engine_gbps, rel=1e-3)


def softmax(x):
    """exp, its sum by an instruction of its own, and the quotient."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    e = nisa.activation(op=nl.exp, data=nl.load(x))
    total = nisa.tensor_reduce(nl.add, data=e, axis=(1,), keepdims=True)
    nl.store(out, nl.multiply(e, nl.reciprocal(total)))
    return out


def largest(x):
    """As above with a maximum, which the Scalar Engine of trn1 does not fold."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    e = nisa.activation(op=nl.exp, data=nl.load(x))
    total = nisa.tensor_reduce(nl.maximum, data=e, axis=(1,), keepdims=True)
    nl.store(out, nl.multiply(e, nl.reciprocal(total)))
    return out


def test_a_sum_of_what_an_activation_makes_is_part_of_it():
    both, apart = (estimate(traced(k, (128, 2048)), record=True) for k in (softmax, largest))
    assert both.instructions == apart.instructions - 1
    assert both.engines["vector"].busy_ns < apart.engines["vector"].busy_ns - 2000 / SPEC.clock_vector
    first = [next(r for r in t.rows if r.op == "activation") for t in (both, apart)]
    assert first[0].duration_ns - first[1].duration_ns == pytest.approx(SPEC.min_ii / SPEC.clock_scalar, abs=1e-3)  # reads the registers


def by_program(x):
    """Each program its own rows."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    rows = nl.ds(nl.program_id(0) * 128, 128)
    nl.store(out[rows, :], nl.load(x[rows, :]))
    return out


def in_place(x):
    """Reads what it writes: programs that do the same are not one program."""
    nl.store(x, nl.multiply(nl.load(x), 2.0))


def test_programs_that_do_the_same_are_counted_once():
    alone, grid = estimate(traced(copy, (128, 512))), estimate(traced(copy, (128, 512), grid=(10,)))
    assert grid.latency_us == alone.latency_us and grid.instructions == alone.instructions
    assert any("axis 0 of the grid" in w for w in grid.warnings) and not alone.warnings
    mixed = estimate(traced(by_program, (512, 512), grid=(4, 3)))
    assert mixed.instructions == estimate(traced(by_program, (512, 512), grid=(4,))).instructions == 8
    assert any("axis 1 of the grid" in w for w in mixed.warnings)
    changed = estimate(traced(in_place, (128, 512), grid=(10,)))
    assert changed.instructions == 30 and not changed.warnings
    assert estimate(traced(copy, (128, 512), grid=(10,)), program=(3,)).latency_us == alone.latency_us


def test_programs_that_do_the_same_run_by_their_conditions_too():
    def guarded(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        if nl.program_id(0) < 1:
            nl.store(out, nl.load(x))
        return out

    assert not estimate(traced(guarded, (128, 512), grid=(10,))).warnings
    assert np.isfinite(estimate(traced(guarded, (128, 512), grid=(10,))).latency_us)
