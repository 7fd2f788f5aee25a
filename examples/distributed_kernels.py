"""Kernels with collectives, and their references in NumPy: a tensor-parallel MLP, ring attention, and a mixture of experts.

`examples/distributed.py` runs them.
"""
import numpy as np

import opennki.dropin  # noqa: F401  isort: skip  (provides neuronxcc; not needed under `opennki run`)
import neuronxcc.nki as nki
import neuronxcc.nki.distributed as dist
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import neuronxcc.nki.nccl as nccl

P, N = 128, 512


@nki.jit(platform_target="trn2")
def tensor_parallel_mlp(x, up, down):
    """out = sum over ranks of gelu(x up) down: each rank has columns of `up` and the same rows of `down`.

    x: (hidden, tokens); up: (hidden, part); down: (part, hidden); out: (tokens, hidden). tokens at most 128, the others multiples of 128.
    """
    hidden, tokens = x.shape
    part = up.shape[1]
    partial = nl.ndarray((tokens, hidden), dtype=nl.float32, buffer=nl.shared_hbm)
    out = nl.ndarray((tokens, hidden), dtype=nl.float32, buffer=nl.shared_hbm)
    inner = nl.ndarray((nl.par_dim(P), part // P, tokens), dtype=x.dtype)
    for j in nl.affine_range(part // P):
        psum = nl.zeros((P, tokens), dtype=nl.float32, buffer=nl.psum)
        for k in nl.affine_range(hidden // P):
            psum += nisa.nc_matmul(nl.load(up[nl.ds(k * P, P), nl.ds(j * P, P)]), nl.load(x[nl.ds(k * P, P), :]))
        inner[:, j, :] = nisa.activation(op=nl.gelu, data=psum, dtype=x.dtype)
    for n in nl.affine_range(hidden // N):
        psum = nl.zeros((tokens, N), dtype=nl.float32, buffer=nl.psum)
        for j in nl.affine_range(part // P):
            psum += nisa.nc_matmul(inner[:, j, :], nl.load(down[nl.ds(j * P, P), nl.ds(n * N, N)]))
        nl.store(partial[:, nl.ds(n * N, N)], psum)
    dist.all_reduce([partial], [out], np.add)
    return out


@nki.jit(platform_target="trn2")
def ring_attention(q, k, v, ranks):
    """Attention of this rank's queries over the keys and values of all ranks, which go round the ring.

    q, k: (d, tokens), v: (tokens, d) of this rank; tokens 128, d at most 128; out: (tokens, d). Not causal; online softmax.
    """
    d, tokens = q.shape
    out = nl.ndarray((tokens, d), dtype=nl.float32, buffer=nl.shared_hbm)
    keys, values = (nl.ndarray((2, *t.shape), dtype=t.dtype, buffer=nl.shared_hbm) for t in (k, v))
    nl.store(keys[0], nl.load(k))
    nl.store(values[0], nl.load(v))
    queries = nl.load(q)
    row_max = nl.full((tokens, 1), nl.fp32.min, dtype=nl.float32)
    row_sum, acc = nl.zeros((tokens, 1), dtype=nl.float32), nl.zeros((tokens, d), dtype=nl.float32)
    for _ in nl.sequential_range(ranks):
        scores = nl.multiply(nisa.nc_matmul(queries, nl.load(keys[0])), d**-0.5)
        new_max = nl.maximum(row_max, nl.max(scores, axis=1, keepdims=True))
        shrink = nl.exp(nl.subtract(row_max, new_max))
        p = nl.exp(nl.subtract(scores, new_max))
        product = nisa.nc_matmul(nl.copy(nisa.nc_transpose(p)), nl.load(values[0]))
        acc[...] = nl.add(nl.multiply(acc, shrink), product)
        row_sum[...] = nl.add(nl.multiply(row_sum, shrink), nl.sum(p, axis=1, keepdims=True))
        row_max[...] = nl.copy(new_max)
        for moving in (keys, values):
            nccl.collective_permute_implicit(dst=moving[1], src=moving[0])
            nl.store(moving[0], nl.load(moving[1]))
    nl.store(out, nl.multiply(acc, nl.reciprocal(row_sum)))
    return out


@nki.jit(platform_target="trn2")
def mixture_of_experts(x, expert):
    """Each rank holds an expert. Its tokens, sorted into equal shares by the expert they go to, are exchanged, computed, and sent back.

    x: (ranks * share, hidden) of this rank; expert: (hidden, hidden); share and hidden at most 128; out: as x.
    """
    rows, hidden = x.shape
    there, computed, out = (nl.ndarray((rows, hidden), dtype=nl.float32, buffer=nl.shared_hbm) for _ in range(3))
    nccl.all_to_all([x], [there], None, split_dim=0, concat_dim=0)
    weight = nl.load(expert)
    for i in nl.affine_range(rows // P):
        tokens = nl.copy(nisa.nc_transpose(nl.load(there[nl.ds(i * P, P), :])))
        nl.store(computed[nl.ds(i * P, P), :], nl.maximum(nisa.nc_matmul(tokens, weight), 0.0))
    nccl.all_to_all([computed], [out], None, split_dim=0, concat_dim=0)
    return out


def mlp_case(ranks, hidden=512, tokens=64):
    """(kernel, arguments of a rank, expected result of a rank)."""
    rng = np.random.default_rng(0)
    part = max(P, 4 * hidden // ranks // P * P)
    x = rng.standard_normal((hidden, tokens), np.float32)
    up = [rng.standard_normal((hidden, part), np.float32) / np.float32(hidden**0.5) for _ in range(ranks)]
    down = [rng.standard_normal((part, hidden), np.float32) / np.float32((part * ranks) ** 0.5) for _ in range(ranks)]
    wide = np.float64(x.T) @ np.concatenate(up, axis=1)
    wanted = gelu(wide) @ np.concatenate(down)
    return tensor_parallel_mlp, lambda r: (x, up[r], down[r]), lambda r: wanted


def gelu(x):
    """Gaussian error linear unit, in float64."""
    from math import erf

    return x * 0.5 * (1 + np.vectorize(erf)(x / np.sqrt(2)))


def attention_case(ranks, tokens=128, d=64):
    """(kernel, arguments of a rank, expected result of a rank)."""
    rng = np.random.default_rng(1)
    q, k = (rng.standard_normal((ranks, d, tokens), np.float32) for _ in range(2))
    v = rng.standard_normal((ranks, tokens, d), np.float32)
    keys, values = np.concatenate(list(k), axis=1).astype(np.float64), np.concatenate(list(v))

    def wanted(r):
        scores = q[r].T @ keys / np.sqrt(d)
        p = np.exp(scores - scores.max(axis=1, keepdims=True))
        return p / p.sum(axis=1, keepdims=True) @ values

    return ring_attention, lambda r: (q[r], k[r], v[r], ranks), wanted


def experts_case(ranks, share=16, hidden=128):
    """(kernel, arguments of a rank, expected result of a rank)."""
    rng = np.random.default_rng(2)
    share = max(share, P // ranks)
    x = rng.standard_normal((ranks, ranks * share, hidden), np.float32)
    experts = rng.standard_normal((ranks, hidden, hidden), np.float32) / np.float32(hidden**0.5)

    def wanted(r):
        parts = np.split(x[r].astype(np.float64), ranks)
        return np.concatenate([np.maximum(part @ expert, 0) for part, expert in zip(parts, experts, strict=True)])

    return mixture_of_experts, lambda r: (x[r], experts[r]), wanted


CASES = {"mlp": mlp_case, "attention": attention_case, "experts": experts_case}
