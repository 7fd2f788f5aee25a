"""Attention and its gradients in float64, by torch.autograd: what the kernels of neuronxcc.nki.kernels.attention are compared with."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

BF16 = np.dtype(ml_dtypes.bfloat16)


class _Torch:
    """PyTorch, where it is there; else the test that asks is left out."""

    def __getattr__(self, name):
        return getattr(pytest.importorskip("torch", reason="PyTorch is the oracle"), name)


torch = _Torch()


def normal(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def widened(x):
    return torch.tensor(np.asarray(x).astype(np.float64))


def hidden(queries, keys, causal, window):
    """True where a query does not see a key: those after it, and those `window` or more before it."""
    q, k = torch.arange(queries)[:, None], torch.arange(keys)[None]
    out = torch.zeros((queries, keys), dtype=torch.bool)
    if causal or window > 0:
        out |= k > q
    if window > 0:
        out |= q - k >= window
    return out


def attention(q, k, v, dy=None, *, scale=None, causal=True, window=-1, bias=None, sinks=None, keep=None, rate=0.0):
    """o (b, h, queries, d), lse (b, h, 128, queries / 128), and the gradients of q, k, v (and sinks) as they are laid out.

    q, dy: (b, h, d, queries); k, v: (b, kv, d, keys). keep: what dropout keeps, (b, h, queries, keys), of probability 1 - rate.
    """
    q, k, v = (widened(x).requires_grad_() for x in (q, k, v))
    leaves = [q, k, v]
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("bhdq,bhdk->bhqk", q, wide_k) * (q.shape[2] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + widened(bias)
    scores = scores.masked_fill(hidden(*scores.shape[2:], causal, window), -torch.inf)
    whole = scores
    if sinks is not None:
        leaves.append(widened(sinks).requires_grad_())
        whole = torch.cat([scores, leaves[-1][:, :, None, None].expand(*scores.shape[:3], 1)], -1)
    lse = torch.logsumexp(whole, -1)
    weights = torch.exp(scores - lse[..., None])
    if keep is not None:
        weights = weights * torch.tensor(keep) / (1 - rate)
    o = torch.einsum("bhqk,bhdk->bhqd", weights, wide_v)
    if dy is not None:
        o.backward(widened(dy).swapaxes(2, 3))
    rows = lse.detach().numpy()
    rows = rows.reshape(*rows.shape[:2], -1, 128).swapaxes(2, 3)
    return o.detach().numpy(), rows, [x.grad.numpy() for x in leaves] if dy is not None else []


def close(got, expected, tolerance):
    """Compare in float64, relative to the largest element."""
    got = np.asarray(got).astype(np.float64)
    assert got.shape == expected.shape
    assert np.isfinite(got).all()
    error = np.abs(got - expected).max() / max(1.0, np.abs(expected).max())
    assert error < tolerance, error
