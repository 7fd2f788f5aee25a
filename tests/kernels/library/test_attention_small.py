"""attention_isa_kernel and the attention of Stable Diffusion, against attention in float64."""

from __future__ import annotations

import warnings

import numpy as np
import opennki.dropin  # noqa: F401  isort: skip
import pytest

from neuronxcc import nki
from neuronxcc.nki._private_kernels.attention import attention_isa_kernel
from neuronxcc.nki.kernels.attention import fused_self_attn_for_SD_small_head_size as fused
from opennki.errors import NkiError, NkiTypeError, NkiValueError
from opennki.timing import estimate
from tests.kernels.library import attention_oracle as oracle
from tests.kernels.library.attention_oracle import BF16, close, normal

CAUSAL, FULL = "CausalAttentionMMSoftmaxMMWithoutSwap", "AttentionMMSoftmaxMMWithoutSwap"


def simulate(*args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return nki.simulate_kernel(*args, **kwargs)


def expected(q, k, v, scale, causal):
    """(heads, queries, d) for q (heads, d, queries), k (kv, d, keys), v (kv, keys, d)."""
    return oracle.attention(q[None], k[None], v.swapaxes(1, 2)[None], scale=scale, causal=causal)[0][0]


def inputs(heads, kv, d, queries, keys, dtype=np.float32):
    return normal(1, heads, d, queries, dtype=dtype), normal(2, kv, d, keys, dtype=dtype), normal(3, kv, keys, d, dtype=dtype)


@pytest.mark.parametrize("heads, kv, d, queries, keys, grid", [
    (2, 2, 64, 256, 256, None), (4, 2, 128, 256, 640, None), (2, 1, 32, 256, 384, 2), (1, 1, 32, 512, 512, 2), (1, 1, 128, 512, 640, 4)])
@pytest.mark.parametrize("name", [CAUSAL, FULL])
@pytest.mark.parametrize("by_head", [True, False])
def test_the_isa_kernel(heads, kv, d, queries, keys, grid, name, by_head):
    q, k, v = inputs(heads, kv, d, queries, keys)
    out = np.full((heads, d, queries) if by_head else (heads, queries, d), np.nan, np.float32)
    kernel = attention_isa_kernel if grid is None else nki.trace(attention_isa_kernel)[grid,]
    simulate(kernel, q, k, v, 0.1, out, kernel_name=name)
    close(out.swapaxes(1, 2) if by_head else out, expected(q, k, v, 0.1, name == CAUSAL), 2e-6)


@pytest.mark.parametrize("dtype, tolerance", [("bfloat16", 8e-3), ("float16", 1e-3)])
def test_the_isa_kernel_as_programs_call_it(dtype, tolerance):
    torch = pytest.importorskip("torch")
    from torch_neuronx.xla_impl.ops import nki_jit

    q, k, v = inputs(2, 2, 64, 256, 256)
    with pytest.warns(DeprecationWarning, match="nki_jit"):
        call = nki_jit()(attention_isa_kernel)
    tensors = [torch.tensor(x).to(getattr(torch, dtype)) for x in (q, k, v)]
    out = torch.zeros((2, 64, 256), dtype=tensors[0].dtype)
    call(*tensors, 1.0, out, kernel_name=CAUSAL)
    close(out.float().numpy().swapaxes(1, 2), expected(*(x.float().numpy() for x in tensors), 1.0, True), tolerance)


@pytest.mark.parametrize("alter, kind, operand", [
    (lambda c: c.update(kernel_name="Other"), NkiValueError, "kernel_name"),
    (lambda c: c.update(v=c["v"].swapaxes(1, 2)), NkiValueError, "v"),
    (lambda c: c.update(out=np.zeros((2, 64, 128), np.float32)), NkiValueError, "out"),
    (lambda c: c.update(k=c["k"].astype(BF16)), NkiTypeError, "k"),
    (lambda c: c.update(q=c["q"][:, :, :100], out=c["out"][:, :, :100]), NkiValueError, "q"),
    (lambda c: (3,), NkiValueError, "grid"),
])
def test_bad_arguments_of_the_isa_kernel(alter, kind, operand):
    q, k, v = inputs(2, 2, 64, 256, 256)
    call = {"q": q, "k": k, "v": v, "scale": 1.0, "out": np.zeros_like(q), "kernel_name": CAUSAL}
    grid = alter(call)
    with pytest.raises(NkiError) as caught:
        nki.simulate_kernel(nki.trace(attention_isa_kernel)[grid] if grid else attention_isa_kernel, **call)
    assert isinstance(caught.value, kind) and caught.value.operand == operand
    assert caught.value.rule and caught.value.fix and caught.value.loc.file == __file__


@pytest.mark.parametrize("batch, d, length, dtype, mixed, causal, tolerance", [
    (2, 64, 256, np.float32, False, False, 2e-6), (1, 128, 640, np.float32, True, True, 8e-3), (1, 40, 512, np.float16, False, True, 1e-3),
    (1, 8, 128, BF16, True, False, 8e-3)])
def test_fused_attention(batch, d, length, dtype, mixed, causal, tolerance):
    q, k, v = normal(1, batch, d, length, dtype=dtype), normal(2, batch, length, d, dtype=dtype), normal(3, batch, length, d, dtype=dtype)
    for checks in ("full", "off"):
        got = simulate(fused[batch], q, k, v, use_causal_mask=causal, mixed_precision=mixed, checks=checks)
        assert got.dtype == dtype
        close(got, expected(q, k.swapaxes(1, 2), v, 0.125, causal), tolerance)


def test_fused_attention_in_torch_and_jax():
    import jax
    torch = pytest.importorskip("torch")

    q, k, v = normal(1, 1, 32, 256), normal(2, 1, 256, 32), normal(3, 1, 256, 32)
    wanted = expected(q, k.swapaxes(1, 2), v, 0.125, False)
    close(fused[1](*map(torch.tensor, (q, k, v)), mixed_precision=False), wanted, 2e-6)
    close(jax.jit(lambda *a: fused[1](*a, mixed_precision=False))(q, k, v), wanted, 2e-6)


@pytest.mark.parametrize("shape, k_shape, kind, operand, grid", [
    ((1, 200, 256), (1, 256, 200), NkiValueError, "q_ref", 1), ((1, 64, 200), (1, 200, 64), NkiValueError, "q_ref", 1),
    ((1, 64, 256), (1, 64, 256), NkiValueError, "k_ref", 1), ((1, 64, 256), (1, 256, 64), NkiValueError, "grid", 2)])
def test_bad_arguments_of_fused_attention(shape, k_shape, kind, operand, grid):
    q, k = np.zeros(shape, np.float32), np.zeros(k_shape, np.float32)
    with pytest.raises(kind) as caught:
        nki.simulate_kernel(fused[grid], q, k, k)
    assert caught.value.operand == operand and caught.value.rule and caught.value.loc.file == __file__


@pytest.mark.parametrize("target", ["trn1", "trn2"])
def test_memory_and_time_at_real_sizes(target, monkeypatch):
    from opennki.passes.allocate import allocate

    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", target)
    q, k = np.empty((1, 128, 4096), BF16), np.empty((1, 4096, 128), BF16)
    for kernel in (fused[1].trace(q, k, k), nki.trace(attention_isa_kernel).trace(q, q, k, 1.0, q.copy(), kernel_name=FULL)):
        allocate(kernel)
        found = estimate(kernel)
        assert not found.warnings
        assert found.latency_us < 536  # the documented threshold on hardware
