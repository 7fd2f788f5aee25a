"""flash_attn_bwd against the gradients of attention in float64 by torch.autograd."""

from __future__ import annotations

import warnings

import numpy as np
import opennki.dropin  # noqa: F401  isort: skip
import pytest

from neuronxcc import nki
from neuronxcc.nki.kernels.attention import FlashConfig, flash_attn_bwd, flash_fwd
from opennki.errors import NkiError, NkiTypeError, NkiValueError
from opennki.ir.nodes import Instr, statements
from opennki.timing import estimate
from tests.kernels.library import attention_oracle as oracle
from tests.kernels.library.attention_oracle import BF16, close, normal

SEED = np.array([77], np.int32)


def inputs(b, h, kv, d, queries, keys, dtype=np.float32):
    q, dy = (normal(n, b, h, d, queries, dtype=dtype) for n in (1, 4))
    k, v = (normal(n, b, kv, d, keys, dtype=dtype) for n in (2, 3))
    return q, k, v, dy


def run(q, k, v, o, dy, lse, seed=None, checks="full", **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return nki.simulate_kernel(flash_attn_bwd[k.shape[0], k.shape[1]], q, k, v, o, dy, lse, seed, checks=checks, **kwargs)


def check(args, tolerance, *, scale=None, causal=True, window=-1, bias=None, sinks=None, mixed=False, checks="full"):
    q, k, v, dy = args
    o, lse, expected = oracle.attention(q, k, v, dy, scale=scale, causal=causal, window=window, bias=bias, sinks=sinks)
    got = run(q, k, v, o.swapaxes(2, 3).astype(q.dtype), dy, lse.astype(np.float32), use_causal_mask=causal, mixed_precision=mixed,
              softmax_scale=scale, sliding_window=window, logit_bias_ref=bias, sinks=sinks, checks=checks)
    assert len(got) == len(expected) == (3 if sinks is None else 4)
    for a, b in zip(got, expected, strict=True):
        close(a, b, tolerance)
    for a in got[:3]:
        assert a.dtype == q.dtype
    assert sinks is None or got[3].dtype == (np.float32 if mixed else q.dtype)


@pytest.mark.parametrize("b, h, kv, d, queries, keys", [
    (1, 1, 1, 64, 128, 128), (2, 4, 2, 16, 256, 256), (1, 3, 1, 128, 384, 640), (1, 2, 2, 1, 256, 512), (1, 1, 1, 96, 1024, 512)])
@pytest.mark.parametrize("causal", [True, False])
def test_shapes_and_heads(b, h, kv, d, queries, keys, causal):
    check(inputs(b, h, kv, d, queries, keys), 2e-6, causal=causal)


@pytest.mark.parametrize("d, keys", [(256, 512), (384, 256), (512, 384), (1024, 128)])
def test_a_head_of_more_than_128(d, keys):
    check(inputs(1, 2, 1, d, 256, keys), 2e-6)


@pytest.mark.parametrize("dtype, mixed, tolerance", [
    (np.float32, True, 2e-6), (BF16, True, 1.5e-2), (BF16, False, 1.5e-2), (np.float16, True, 2e-3), (np.float16, False, 2e-3)])
def test_dtypes_and_mixed_precision(dtype, mixed, tolerance):
    check(inputs(1, 2, 1, 64, 512, 512, dtype), tolerance, mixed=mixed)


@pytest.mark.parametrize("window", [1, 100, 256, 5000])
def test_sliding_windows(window):
    check(inputs(1, 1, 1, 32, 768, 768), 2e-6, window=window)


@pytest.mark.parametrize("scale", [0.3, -0.25])
def test_the_scale_is_the_callers(scale):
    check(inputs(1, 1, 1, 32, 256, 256), 5e-6, scale=scale)


@pytest.mark.parametrize("causal", [True, False])
def test_a_bias(causal):
    check(inputs(1, 2, 1, 32, 256, 384), 3e-6, bias=normal(7, 1, 1, 256, 384), causal=causal, scale=0.3)


@pytest.mark.parametrize("h, kv, dtype, mixed, tolerance", [(2, 2, np.float32, False, 3e-6), (4, 2, BF16, True, 1.5e-2)])
def test_sinks_take_weight_and_have_a_gradient(h, kv, dtype, mixed, tolerance):
    check(inputs(2, h, kv, 32, 256, 256, dtype), tolerance, sinks=normal(9, 2, h, dtype=dtype), mixed=mixed, window=130)


@pytest.mark.parametrize("dtype, tolerance", [(np.float32, 3e-6), (BF16, 1.5e-2)])
def test_queries_that_do_not_fit_come_in_ranges(dtype, tolerance, monkeypatch):
    monkeypatch.setattr("opennki.dialects.neuronxcc.kernels._flash_backward._RESIDENT", 0.0)
    check(inputs(1, 2, 1, 64, 384, 512, dtype), tolerance, mixed=dtype is BF16)


# ---- dropout: the masks of the forward pass ----
def forward(q, k, v, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return nki.simulate_kernel(flash_fwd[k.shape[0], k.shape[1]], q, k, np.ascontiguousarray(v.swapaxes(2, 3)), SEED,
                                   mixed_precision=False, config=FlashConfig(seq_tile_size=512), **kwargs)


def what_is_kept(q, k, rate, causal):
    """The mask of the forward pass, read off by values that are rows of an identity."""
    keys, out = k.shape[3], []
    for start in range(0, keys, 128):
        v = np.zeros((k.shape[0], k.shape[1], 128, keys), np.float32)
        v[:, :, np.arange(128), start + np.arange(128)] = 1
        out.append(forward(q, k, v, dropout_p=rate, use_causal_mask=causal)[0])
    return np.concatenate(out, axis=3) != 0


@pytest.mark.parametrize("causal, rate, checks", [(True, 0.2, "full"), (False, 0.5, "full"), (True, 0.2, "off")])
def test_dropout_is_that_of_the_forward_pass(causal, rate, checks):
    q, k, v, dy = inputs(2, 2, 1, 128, 384, 512)
    keep = what_is_kept(q, k, rate, causal)
    o, lse, expected = oracle.attention(q, k, v, dy, causal=causal, keep=keep, rate=rate)
    mine, logs = forward(q, k, v, dropout_p=rate, use_causal_mask=causal)
    close(mine, o, 3e-6)
    close(logs, lse, 3e-6)
    got = run(q, k, v, mine.swapaxes(2, 3), dy, logs, SEED, use_causal_mask=causal, dropout_p=rate, checks=checks)
    for a, b in zip(got, expected, strict=True):
        close(a, b, 5e-6)


def test_forward_and_backward_belong_together_in_torch():
    torch = pytest.importorskip("torch")

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            o, lse = flash_fwd[1, 1](q, k, v.swapaxes(2, 3), None, mixed_precision=False, config=FlashConfig(seq_tile_size=512))
            ctx.save_for_backward(q, k, v, o, lse)
            return o

        @staticmethod
        def backward(ctx, dy):
            q, k, v, o, lse = ctx.saved_tensors
            return flash_attn_bwd[1, 1](q, k, v, o.swapaxes(2, 3), dy.swapaxes(2, 3), lse, None, use_causal_mask=True)

    q, k, v, dy = inputs(1, 2, 1, 32, 256, 512)
    leaves = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
    Attention.apply(*leaves).backward(torch.tensor(dy).swapaxes(2, 3))
    for leaf, expected in zip(leaves, oracle.attention(q, k, v, dy)[2], strict=True):
        close(leaf.grad, expected, 3e-6)


def test_in_jax():
    import jax

    q, k, v, dy = inputs(1, 2, 2, 32, 256, 256)
    o, lse, expected = oracle.attention(q, k, v, dy)
    step = jax.jit(lambda *args: flash_attn_bwd[1, 2](*args, None, use_causal_mask=True))
    for a, b in zip(step(q, k, v, o.swapaxes(2, 3).astype(np.float32), dy, lse.astype(np.float32)), expected, strict=True):
        close(a, b, 3e-6)


@pytest.mark.parametrize("target", ["trn1", "trn2", "trn3"])
def test_native_code_and_targets(target, monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", target)
    check(inputs(1, 2, 1, 64, 512, 512, BF16), 1.5e-2, mixed=True, checks="off")


@pytest.mark.parametrize("target", ["trn1", "trn2"])
@pytest.mark.parametrize("h, kv, d, length, mixed", [
    (1, 1, 128, 4096, True), (8, 1, 128, 4096, True), (1, 1, 128, 32768, True), (1, 1, 128, 8192, False), (2, 1, 256, 4096, True)])
def test_memory_and_time_at_real_sizes(target, h, kv, d, length, mixed, monkeypatch):
    from opennki.passes.allocate import allocate

    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", target)
    dtype = BF16 if mixed else np.float32
    q, k, lse = np.empty((1, h, d, length), dtype), np.empty((1, kv, d, length), dtype), np.empty((1, h, 128, length // 128), np.float32)
    kernel = flash_attn_bwd[1, kv].trace(q, k, k, q, q, lse, None, use_causal_mask=True, mixed_precision=mixed)
    allocate(kernel)
    if h == 1 and length == 4096:
        found = estimate(kernel)
        assert not found.warnings
        # twice what the busiest engine needs; a kernel whose engines wait for each other takes three times
        assert found.latency_us < 420


def change(**values):
    return lambda call: call.update(values)


@pytest.mark.parametrize("alter, kind, operand", [
    (change(q_ref=np.zeros((4, 32, 256), np.float32)), NkiValueError, "q_ref"),
    (change(dy_ref=np.zeros((1, 4, 256, 32), np.float32)), NkiValueError, "dy_ref"),
    (change(o_ref=np.zeros((1, 4, 32, 256), BF16)), NkiTypeError, "o_ref"),
    (change(v_ref=np.zeros((1, 4, 32, 256), np.float32)), NkiValueError, "v_ref"),
    (change(lse_ref=np.zeros((1, 4, 256), np.float32)), NkiValueError, "lse_ref"),
    (change(lse_ref=np.zeros((1, 4, 2, 128), np.float32)), NkiValueError, "lse_ref"),
    (change(sliding_window=5), NkiValueError, "sliding_window"),
    (change(dropout_p=0.1), NkiValueError, "seed_ref"),
    (change(sinks=np.zeros((4,), np.float32)), NkiValueError, "sinks"),
    (change(sinks=np.zeros((1, 2), np.float32)), NkiValueError, "sinks"),
    (change(logit_bias_ref=np.zeros((1, 2, 256, 256), np.float32)), NkiValueError, "logit_bias_ref"),
    (lambda call: call.update({n: np.zeros((1, 4 if n[0] in "qod" else 2, 130, 256), np.float32) for n in
                               ("q_ref", "k_ref", "v_ref", "o_ref", "dy_ref")}), NkiValueError, "q_ref"),
    (lambda call: (1, 4), NkiValueError, "grid"),
])
def test_bad_arguments_are_errors_at_the_call(alter, kind, operand):
    q, k, v, dy = inputs(1, 4, 2, 32, 256, 256)
    call = {"q_ref": q, "k_ref": k, "v_ref": v, "o_ref": q, "dy_ref": dy, "lse_ref": np.zeros((1, 4, 128, 2), np.float32), "seed_ref": None}
    grid = alter(call) or (1, 2)
    with pytest.raises(NkiError) as caught:
        nki.simulate_kernel(flash_attn_bwd[grid], **call)
    error = caught.value
    assert isinstance(error, kind) and error.operand == operand
    assert error.rule and error.fix and error.loc.file == __file__


def test_many_heads_do_not_make_a_longer_program():
    sizes = []
    for heads in (2, 16):
        q, k, lse = np.empty((1, heads, 128, 8192), BF16), np.empty((1, 1, 128, 8192), BF16), np.empty((1, heads, 128, 64), np.float32)
        kernel = flash_attn_bwd[1, 1].trace(q, k, k, q, q, lse, None, use_causal_mask=True, mixed_precision=True)
        sizes.append(sum(1 for _ in statements(kernel.body)))
    assert sizes[0] == sizes[1] < 300


def test_the_places_of_instructions_are_lines_of_the_kernel():
    from opennki.dialects.neuronxcc.kernels import _flash_backward

    q, lse = np.empty((1, 1, 64, 128), np.float32), np.empty((1, 1, 128, 1), np.float32)
    kernel = flash_attn_bwd[1, 1].trace(q, q, q, q, q, lse, None)
    files = {kernel.locs[s.loc].file for s in statements(kernel.body) if isinstance(s, Instr)}
    assert _flash_backward.__file__ in files and __file__ not in files
