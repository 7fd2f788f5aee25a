"""The size of the IR follows the text of a kernel, not the trips of its loops. Times are measured in benchmarks/trace.py."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from examples.flash_attention import flash_attention

from opennki import jit, simulate_kernel
from opennki.dialects.neuronxcc import language as nl
from opennki.interpret.simulate import Checks, tape_of
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


def causal(x, heads, tiles):
    """Attention as public kernels write it: heads in a loop, tiles above the diagonal left out by an `if`, a mask that says the same as
    that `if`, a helper with many keywords, and loop variables with the same names before and after."""
    out = nl.ndarray((heads, tiles, nl.par_dim(128), 512), dtype=x.dtype, buffer=nl.shared_hbm)
    rows = nl.ndarray((heads, nl.par_dim(128), tiles), dtype=nl.float32)
    acc = nl.zeros((heads, tiles, nl.par_dim(128), 512), dtype=nl.float32)
    for head in nl.affine_range(heads):
        for i in nl.affine_range(tiles):
            rows[head, :, i] = nl.copy(nl.load(x[head, :, nl.ds(i, 1)]))
    for j in nl.affine_range(tiles // 4):
        for head in nl.affine_range(heads):
            for i in nl.affine_range(tiles):
                if (i + 1) * 128 - 1 >= j * 512:
                    core(x=x, acc=acc, rows=rows, head=head, i=i, j=j, a=1.0, b=1.0, c=1.0, d=1.0, e=1.0, f=1.0, g=1.0, h=1.0, k=1.0, m=1.0)
    for head in nl.affine_range(heads):
        for i in nl.affine_range(tiles):
            nl.store(out[head, i], acc[head, i])
    return out


def core(x, acc, rows, head, i, j, a, b, c, d, e, f, g, h, k, m):
    mask = i * 128 >= j * 512
    tile = nl.load(x[head, :, nl.ds(j * 512, 512)])
    product = nl.ndarray((128, 512), dtype=nl.float32)
    product[...] = nl.multiply(tile, rows[head, :, nl.ds(i, 1)], mask=mask)
    scale = a * b * c * d * e * f * g * h * k * m
    acc[head, i] = nl.loop_reduce(nl.multiply(product, scale, mask=mask), op=np.add, loop_indices=(j,), mask=mask)


def test_heads_in_a_loop_cost_nothing():
    """Neither statements, nor steps, nor elements that are followed at run time."""
    plans = []
    for heads, tiles in ((1, 8), (4, 8), (4, 32)):
        kernel = jit(causal, mode="simulation", platform_target="trn1").trace(array(heads, 128, tiles * 128), heads, tiles)
        tape = tape_of(kernel, Checks())
        plans.append(len(tape.steps))
        assert not tape.tracked
        assert not tape.frees
    assert len(set(plans)) == 1
    assert plans[0] < 60


def test_heads_in_a_loop_give_the_values_of_numpy():
    heads, tiles = 2, 8
    x = np.random.default_rng(0).standard_normal((heads, 128, tiles * 128)).astype(np.float32)
    got = simulate_kernel(jit(causal, platform_target="trn1"), x, heads, tiles)
    expected = np.zeros((heads, tiles, 128, 512), np.float32)
    for head in range(heads):
        for i in range(tiles):
            for j in range(tiles // 4):
                if i >= 4 * j:
                    expected[head, i] += x[head, :, j * 512:j * 512 + 512] * x[head, :, i:i + 1]
    np.testing.assert_array_equal(got, expected)
