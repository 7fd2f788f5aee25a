"""RMSNorm and causal attention with gradients in JAX: the kernels of `nki_kernels`, tied together by `jax.custom_vjp`.

`rms_norm` and `attention` are functions of JAX arrays like any other: under jit, grad, vmap.
"""
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).parent))
from nki_kernels import EPS, attention_backward, attention_forward, rms_norm_backward, rms_norm_forward


# ---- in JAX ------------------------------------------------------------------------------------------------
@jax.custom_vjp
def rms_norm(x, weight):
    """x / rms(x) * weight over the last dimension of x (..., d), weight (d,); the leading sizes multiply to a multiple of 128."""
    return rms_norm_forward(x.reshape(-1, x.shape[-1]), weight[None]).reshape(x.shape)


def _rms_norm_backward(saved, d_out):
    x, weight = saved
    d_x, d_weight = rms_norm_backward(x.reshape(-1, x.shape[-1]), weight[None], d_out.reshape(-1, x.shape[-1]))
    return d_x.reshape(x.shape), d_weight[0]


rms_norm.defvjp(lambda x, weight: (rms_norm(x, weight), (x, weight)), _rms_norm_backward)


@jax.custom_vjp
def attention(q, k, v):
    """Causal attention of each head: q, k, v (heads, tokens, d), one program of the grid for each head."""
    return attention_forward[q.shape[0]](q, k, v)


attention.defvjp(lambda q, k, v: (attention(q, k, v), (q, k, v)),
                 lambda saved, d_out: attention_backward[d_out.shape[0]](*saved, d_out))


# ---- the same without kernels ------------------------------------------------------------------------------
def rms_norm_jax(x, weight):
    """`rms_norm` in JAX alone."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPS) * weight


def attention_jax(q, k, v):
    """`attention` in JAX alone."""
    scores = jnp.einsum("hqd,hkd->hqk", q, k) * q.shape[-1] ** -0.5
    causal = jnp.tril(jnp.ones(scores.shape[1:], bool))
    return jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1) @ v
