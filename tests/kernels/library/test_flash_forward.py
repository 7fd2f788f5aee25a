"""flash_fwd against attention in float64."""

from __future__ import annotations

import warnings

import ml_dtypes
import numpy as np
import opennki.dropin  # noqa: F401  isort: skip
import pytest
from neuronxcc import nki
from neuronxcc.nki.kernels.attention import FlashConfig, flash_fwd
from opennki.errors import NkiError, NkiTypeError, NkiValueError, NkiWarning
from opennki.timing import estimate
from tests.kernels.library import attention_oracle as oracle
from tests.kernels.library.attention_oracle import BF16, close, normal

SMALL = FlashConfig(seq_tile_size=512)


def inputs(b, h, kv, d, queries, keys, dtype=np.float32, grow=1.0):
    q = (normal(1, b, h, d, queries) * grow).astype(dtype)
    k, v = (normal(n, b, kv, d, keys, dtype=dtype) for n in (2, 3))
    return q, k, v


def run(q, k, v, seed=None, config=SMALL, checks="full", **kwargs):
    v = v if config.should_transpose_v else np.ascontiguousarray(v.swapaxes(2, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return nki.simulate_kernel(flash_fwd[k.shape[0], k.shape[1]], q, k, v, seed, config=config, checks=checks, **kwargs)


def check(q, k, v, tolerance, *, logs=None, scale=None, causal=True, window=-1, bias=None, mixed=False, **kwargs):
    kwargs |= {"softmax_scale": scale, "use_causal_mask": causal, "sliding_window": window}
    o, lse = run(q, k, v, logit_bias=bias, mixed_precision=mixed, **kwargs)
    expected, rows, _ = oracle.attention(q, k, v, scale=scale, causal=causal, window=window, bias=bias)
    assert o.dtype == q.dtype and lse.dtype == (np.float32 if mixed else q.dtype)
    close(o, expected, tolerance)
    close(lse, rows, tolerance if logs is None else logs)


@pytest.mark.parametrize("b, h, kv, d, queries, keys", [
    (1, 1, 1, 64, 512, 512), (2, 4, 2, 16, 128, 512), (1, 3, 1, 128, 640, 1024), (1, 2, 2, 1, 256, 512), (1, 1, 1, 96, 1024, 512)])
@pytest.mark.parametrize("causal", [True, False])
def test_shapes_and_heads(b, h, kv, d, queries, keys, causal):
    check(*inputs(b, h, kv, d, queries, keys), 2e-6, causal=causal)


@pytest.mark.parametrize("dtype, mixed, tolerance", [
    (np.float32, True, 8e-3), (BF16, True, 8e-3), (BF16, False, 8e-3), (np.float16, True, 8e-3), (np.float16, False, 1e-3)])
def test_dtypes_and_mixed_precision(dtype, mixed, tolerance):
    check(*inputs(1, 2, 1, 64, 512, 512, dtype), tolerance, mixed=mixed)


@pytest.mark.parametrize("window, queries, keys, causal", [(1, 512, 512, True), (100, 1024, 1024, False), (512, 1024, 1024, True),
                                                           (700, 1024, 512, True), (5000, 512, 1024, True)])
def test_sliding_windows_are_causal(window, queries, keys, causal):
    check(*inputs(1, 1, 1, 32, queries, keys), 2e-6, window=window, causal=causal)


@pytest.mark.parametrize("scale", [0.3, 2.0, -0.25, 0.0])
def test_the_scale_is_the_callers(scale):
    check(*inputs(1, 1, 1, 32, 256, 512), 5e-6, scale=scale)


@pytest.mark.parametrize("grow", [30.0, 3000.0])
def test_large_scores_neither_overflow_nor_lose_the_row(grow):
    q, k, v = inputs(1, 1, 1, 64, 256, 512, grow=grow)
    check(q, k, v, 1e-4 * grow / 30)


def test_a_hidden_key_with_a_huge_score_is_of_no_consequence():
    q, k, v = inputs(1, 1, 1, 16, 256, 512)
    k[..., 200:] *= 1e4
    q[..., :100] = np.abs(q[..., :100])
    k[..., 200:] = np.abs(k[..., 200:])
    got, _ = run(q, k, v, mixed_precision=False)
    expected, _, _ = oracle.attention(q, k, v)
    close(got[:, :, :200], expected[:, :, :200], 2e-6)


@pytest.mark.parametrize("dtype, mixed, tolerance", [(np.float32, False, 3e-6), (BF16, True, 2e-2)])
def test_a_bias_is_added_after_the_scale(dtype, mixed, tolerance):
    bias = normal(7, 1, 1, 256, 1024, dtype=dtype)
    check(*inputs(1, 2, 1, 32, 256, 1024, dtype), tolerance, bias=bias, causal=False, scale=0.3, mixed=mixed)


def test_a_bias_may_hide_keys():
    bias = np.where(normal(8, 1, 1, 256, 512) > 0, -np.inf, 0).astype(np.float32)
    bias[..., 0] = 0
    check(*inputs(1, 1, 1, 32, 256, 512), 3e-6, bias=bias)


@pytest.mark.parametrize(
    "config", [FlashConfig(), FlashConfig(seq_tile_size=1024, attn_core_tile_size=1), FlashConfig(should_transpose_v=True)])
def test_the_configuration_changes_no_result(config):
    check(*inputs(1, 1, 1, 64, 256, 2048), 2e-6, config=config)


def test_inference_returns_the_output_alone_and_the_lse_has_its_dtype():
    q, k, v = inputs(1, 1, 1, 32, 128, 512)
    o = run(q, k, v, config=FlashConfig(seq_tile_size=512, training=False))
    both, lse = run(q, k, v, config=FlashConfig(seq_tile_size=512, lse_dtype="bfloat16"))
    assert isinstance(o, np.ndarray) and np.array_equal(o, both)
    assert lse.dtype == ml_dtypes.bfloat16


def test_keys_that_do_not_fit_are_loaded_in_parts(monkeypatch):
    args = inputs(1, 2, 1, 64, 1024, 1024)
    whole = run(*args)
    monkeypatch.setattr("opennki.dialects.neuronxcc.kernels._flash_forward._RESIDENT", 0.0)
    for a, b in zip(whole, run(*args), strict=True):
        assert np.array_equal(a, b)


# ---- dropout ----
def weights_seen(rate, seed, q, k, **kwargs):
    """The weights of the keys, dropped, read off by values that are rows of an identity."""
    keys = k.shape[3]
    out = []
    for start in range(0, keys, 128):
        v = np.zeros((k.shape[0], k.shape[1], 128, keys), np.float32)
        v[:, :, np.arange(128), start + np.arange(128)] = 1
        out.append(run(q, k, v, None if seed is None else np.array([seed], np.int32), dropout_p=rate, mixed_precision=False, **kwargs)[0])
    return np.concatenate(out, axis=3)


def test_dropout_drops_weights_of_its_own_and_scales_the_others():
    q, k, _ = inputs(2, 2, 1, 128, 256, 512)
    plain = weights_seen(0.0, None, q, k, use_causal_mask=False)
    dropped = weights_seen(0.25, 41, q, k, use_causal_mask=False)
    kept = dropped != 0
    assert abs(kept.mean() - 0.75) < 0.005
    np.testing.assert_allclose(dropped[kept], plain[kept] / 0.75, rtol=1e-5)
    tiles = kept.reshape(2, 2, 2, 128, 4, 128).transpose(0, 1, 2, 4, 3, 5).reshape(-1, 128 * 128)
    assert abs(np.corrcoef(tiles) - np.eye(len(tiles))).max() < 0.05
    assert np.array_equal(kept, weights_seen(0.25, 41, q, k, use_causal_mask=False) != 0)
    assert not np.array_equal(kept, weights_seen(0.25, 42, q, k, use_causal_mask=False) != 0)


# ---- who calls it ----
@pytest.mark.parametrize("target", ["trn1", "trn2", "trn3"])
def test_native_code_and_targets(target, monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", target)
    q, k, v = inputs(1, 2, 1, 64, 512, 1024, BF16)
    for checks in ("fast", "off"):
        o, lse = run(q, k, v, checks=checks)
        expected, rows, _ = oracle.attention(q, k, v)
        close(o, expected, 8e-3)
        close(lse, rows, 8e-3)


def test_in_jax_and_torch():
    import jax
    torch = pytest.importorskip("torch")

    q, k, v = inputs(1, 2, 1, 32, 256, 512)
    v = np.ascontiguousarray(v.swapaxes(2, 3))
    step = jax.jit(lambda q, k, v: flash_fwd[1, 1](q, k, v, None, mixed_precision=False, config=SMALL))
    expected, rows, _ = oracle.attention(q, k, v.swapaxes(2, 3))
    for o, lse in (step(q, k, v), flash_fwd[1, 1](*map(torch.tensor, (q, k, v)), None, mixed_precision=False, config=SMALL)):
        close(o, expected, 2e-6)
        close(lse, rows, 2e-6)


@pytest.mark.parametrize("target", ["trn1", "trn2"])
@pytest.mark.parametrize("b, h, kv, d, length, dtype", [(1, 1, 1, 128, 4096, BF16), (1, 8, 1, 128, 8192, BF16), (1, 1, 1, 96, 32768, BF16),
                                                        (1, 1, 1, 128, 8192, np.float32)])
def test_memory_and_time_at_real_sizes(target, b, h, kv, d, length, dtype, monkeypatch):
    from opennki.passes.allocate import allocate

    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", target)
    q, k = np.empty((b, h, d, length), dtype), np.empty((b, kv, d, length), dtype)
    kernel = flash_fwd[b, kv].trace(q, k, k.swapaxes(2, 3), None, mixed_precision=dtype is BF16)
    allocate(kernel)
    if length == 4096:
        found = estimate(kernel)
        assert not found.warnings
        # the matrix products alone take a third of this; a kernel that does not overlap them takes twice it
        assert found.latency_us < 300


def test_it_is_benchmarked():
    q, k, v = inputs(1, 1, 1, 64, 512, 512, BF16)
    bench = nki.benchmark(warmup=1, iters=5)(flash_fwd)[1, 1]
    bench(q, k, v.swapaxes(2, 3), None, config=SMALL)
    assert bench.benchmark_result.nc_latency.get_latency_percentile(50) > 0


def bad(change):
    q, k, v = inputs(1, 4, 2, 32, 256, 512)
    call = {"q": q, "k": k, "v": np.ascontiguousarray(v.swapaxes(2, 3)), "seed": None, "config": SMALL}
    grid = change(call) or (1, 2)
    return grid, call


def test_a_smaller_grid_computes_its_part():
    q, k, v = inputs(2, 4, 2, 32, 128, 512)
    v = np.ascontiguousarray(v.swapaxes(2, 3))
    whole, _ = nki.simulate_kernel(flash_fwd[2, 2], q, k, v, None, config=SMALL)
    with pytest.warns(NkiWarning, match="never stored"):
        part, _ = nki.simulate_kernel(flash_fwd[2, 1], q, k, v, None, config=SMALL)
    assert np.array_equal(part[:, :2], whole[:, :2]) and np.isnan(part[:, 2:]).all()


def change(**values):
    return lambda call: call.update(values)


@pytest.mark.parametrize("alter, kind, operand", [
    (change(q=np.zeros((1, 4, 130, 256), np.float32), k=np.zeros((1, 2, 130, 512), np.float32)), NkiValueError, "q"),
    (change(q=np.zeros((4, 32, 256), np.float32)), NkiValueError, "q"),
    (change(q=np.zeros((1, 3, 32, 256), np.float32)), NkiValueError, "q"),
    (change(q=np.zeros((1, 4, 32, 200), np.float32)), NkiValueError, "q"),
    (change(k=np.zeros((1, 2, 16, 512), np.float32)), NkiValueError, "k"),
    (change(v=np.zeros((1, 2, 32, 512), np.float32)), NkiValueError, "v"),
    (change(v=np.zeros((1, 2, 512, 32), BF16)), NkiTypeError, "v"),
    (change(k=3), NkiTypeError, "k"),
    (change(config=FlashConfig(seq_tile_size=300)), NkiValueError, "config"),
    (change(config=FlashConfig()), NkiValueError, "config"),
    (change(config=FlashConfig(512, training=False), seed=np.array([1], np.int32), dropout_p=0.1), NkiValueError, "dropout_p"),
    (change(dropout_p=0.1), NkiValueError, "seed"),
    (change(dropout_p=1.5, seed=np.array([1], np.int32)), NkiValueError, "dropout_p"),
    (change(seed=np.array([1, 2], np.int32), dropout_p=0.1), NkiValueError, "seed"),
    (change(softmax_scale=float("nan")), NkiValueError, "softmax_scale"),
    (change(logit_bias=np.zeros((1, 4, 256, 512), np.float32)), NkiValueError, "logit_bias"),
    (change(logit_bias=np.zeros((256, 512), np.float32)), NkiValueError, "logit_bias"),
    (change(config=FlashConfig(seq_tile_size=512, lse_dtype="nothing")), NkiValueError, "config"),
    (lambda call: (1, 4), NkiValueError, "grid"),
    (lambda call: (2,), NkiValueError, "grid"),
])
def test_bad_arguments_are_errors_at_the_call(alter, kind, operand):
    grid, call = bad(alter)
    with pytest.raises(NkiError) as caught:
        nki.simulate_kernel(flash_fwd[grid], **call)
    error = caught.value
    assert isinstance(error, kind) and error.operand == operand
    assert error.rule and error.fix and error.loc.file == __file__


def test_the_names_are_where_programs_look():
    from neuronxcc.nki import kernels
    from neuronxcc.nki.kernels import attention

    assert kernels.flash_fwd is attention.flash_fwd and kernels.flash_attn_bwd is attention.flash_attn_bwd
    assert kernels.FlashConfig is attention.FlashConfig
