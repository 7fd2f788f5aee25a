"""Kernels of our own with the shapes of published measurements whose kernels are not in the legacy dialect, and probes for traces."""
from __future__ import annotations

import ml_dtypes
import numpy as np

import opennki.dropin  # noqa: F401  isort: skip
import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl

BF16 = np.dtype(ml_dtypes.bfloat16)


@nki.jit
def single_accumulator(lhs_t, rhs):
    """lhs_t.T @ rhs, operands resident in SBUF, one PSUM tensor of 128 x 2048 for all rows of the result."""
    (k, m), n = lhs_t.shape, rhs.shape[1]
    out = nl.ndarray((m, n), dtype=lhs_t.dtype, buffer=nl.shared_hbm)
    left = nl.ndarray((k // 128, nl.par_dim(128), m), dtype=lhs_t.dtype, buffer=nl.sbuf)
    right = nl.ndarray((k // 128, nl.par_dim(128), n), dtype=rhs.dtype, buffer=nl.sbuf)
    for q in nl.affine_range(k // 128):
        left[q] = nl.load(lhs_t[q * 128:(q + 1) * 128, :])
        right[q] = nl.load(rhs[q * 128:(q + 1) * 128, :])
    acc = nl.ndarray((nl.par_dim(128), n), dtype=nl.float32, buffer=nl.psum)
    for i in nl.sequential_range(m // 128):
        acc[...] = nl.zeros((128, n), nl.float32)
        for j in nl.affine_range(n // 512):
            for q in nl.affine_range(k // 128):
                acc[:, j * 512:(j + 1) * 512] += nisa.nc_matmul(left[q, :, i * 128:(i + 1) * 128], right[q, :, j * 512:(j + 1) * 512])
        nl.store(out[i * 128:(i + 1) * 128, :], nl.copy(acc, dtype=lhs_t.dtype))
    return out


@nki.jit
def blocked(lhs_t, rhs):
    """lhs_t.T @ rhs with K in two blocks, whose partial sums are added in SBUF, and N in four."""
    m, n = lhs_t.shape[1], rhs.shape[1]
    out = nl.ndarray((m, n), dtype=lhs_t.dtype, buffer=nl.shared_hbm)
    for j in nl.affine_range(n // 512):
        total = nl.zeros((m // 128, nl.par_dim(128), 512), dtype=lhs_t.dtype)
        for b in nl.sequential_range(2):
            right = nl.ndarray((8, nl.par_dim(128), 512), dtype=rhs.dtype, buffer=nl.sbuf)
            for q in nl.affine_range(8):
                right[q] = nl.load(rhs[(b * 8 + q) * 128:(b * 8 + q + 1) * 128, j * 512:(j + 1) * 512])
            for i in nl.affine_range(4):
                left = nl.ndarray((8, nl.par_dim(128), 512), dtype=lhs_t.dtype, buffer=nl.sbuf)
                for q in nl.affine_range(8):
                    left[q] = nl.load(lhs_t[(b * 8 + q) * 128:(b * 8 + q + 1) * 128, i * 512:(i + 1) * 512])
                for s in nl.affine_range(4):
                    acc = nl.zeros((128, 512), dtype=nl.float32, buffer=nl.psum)
                    for q in nl.affine_range(8):
                        acc += nisa.nc_matmul(left[q, :, s * 128:(s + 1) * 128], right[q])
                    part = nl.copy(acc, dtype=lhs_t.dtype)
                    total[i * 4 + s] = nl.add(total[i * 4 + s], part)
        for i in nl.affine_range(m // 128):
            nl.store(out[i * 128:(i + 1) * 128, j * 512:(j + 1) * 512], total[i])
    return out


@nki.jit
def load_and_store(x):
    """A copy through SBUF."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.load(x))
    return out


@nki.jit
def exponential(x):
    """exp of one tile."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nisa.activation(op=nl.exp, data=nl.load(x)))
    return out


@nki.jit
def chain(x):
    """Activations of one element per partition, each on the result of the one before."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x)
    for _ in range(16):
        tile = nisa.activation(op=nl.exp, data=tile)
    nl.store(out, tile)
    return out


def _zeros(*shapes, dtype=BF16):
    return [np.zeros(s, dtype) for s in shapes]


KERNELS = {
    "single PSUM tile": (single_accumulator, _zeros((2048, 2048), (2048, 2048))),
    "blocked": (blocked, _zeros((2048, 2048), (2048, 2048))),
    "load 4 x 4096": (load_and_store, _zeros((4, 4096))),
    "load 128 x 128": (load_and_store, _zeros((128, 128))),
    "exp 128 x 128": (exponential, _zeros((128, 128))),
    "chain of activations": (chain, _zeros((128, 1), dtype=np.float32)),
}
