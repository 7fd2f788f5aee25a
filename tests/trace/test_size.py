"""The size of the IR follows the text of a kernel, not the trips of its loops. Times are measured in benchmarks/trace.py."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from examples.flash_attention import flash_attention

from opennki import jit
from opennki.dialects.neuronxcc import language as nl
from opennki.ir.nodes import For, Instr, statements
from opennki.ir.verify import verify
from opennki.isa.target import TRN1


def array(*shape, dtype=np.float32):
    return np.broadcast_to(np.zeros((), dtype), shape)


def traced(function, *values):
    kernel = jit(function, mode="simulation", platform_target="trn1").trace(*values)
    verify(kernel, TRN1)
    return kernel, list(statements(kernel.body))


def attention(tokens):
    q = array(128, tokens, dtype=ml_dtypes.bfloat16)
    return traced(flash_attention.func, q, q, array(tokens, 128, dtype=ml_dtypes.bfloat16))


def test_flash_attention_of_32k_tokens():
    small, large = attention(1024)[1], attention(32768)[1]
    assert len(large) < 5000
    assert len(large) == len(small)


@pytest.mark.parametrize("trips", [4, 1_000_000])
def test_the_trips_of_a_loop_cost_nothing(trips):
    def kernel(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        for i in nl.affine_range(trips):
            a = nl.load(x[:, nl.ds(i * 4, 4)])
            nl.store(out[:, nl.ds(i * 4, 4)], nl.multiply(a, 2.5))
        return out

    nodes = traced(kernel, array(128, 4 * trips))[1]
    assert sum(isinstance(n, Instr) for n in nodes) == 3
    assert [n.trips for n in nodes if isinstance(n, For)] == [trips]
    assert len(nodes) < 10


def test_a_python_loop_is_unrolled():
    def kernel(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        for i in range(50):
            nl.store(out[:, nl.ds(i * 4, 4)], nl.multiply(nl.load(x[:, nl.ds(i * 4, 4)]), 2.5))
        return out

    nodes = traced(kernel, array(128, 200))[1]
    assert sum(isinstance(n, Instr) for n in nodes) == 150
    assert not any(isinstance(n, For) for n in nodes)
