"""Kernels for the tests of the timing model: small ones that can be computed by hand, and loops with guards of every kind."""
import ml_dtypes
import numpy as np

import opennki.dropin  # noqa: F401  isort: skip
import neuronxcc.nki as nki
import neuronxcc.nki.compiler as ncc
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl

BF16 = np.dtype(ml_dtypes.bfloat16)


def traced(function, *shapes, dtype=np.float32, target="trn1", grid=None):
    """The IR of a kernel for arrays of zeros."""
    kernel = nki.jit(function, platform_target=target)
    return (kernel if grid is None else kernel[grid]).trace(*[np.zeros(s, dtype) for s in shapes])


def copy(x):
    """A load and a store."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.load(x))
    return out


def chain(x):
    """Three dependent activations."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x)
    for _ in range(3):
        tile = nisa.activation(op=nl.exp, data=tile)
    nl.store(out, tile)
    return out


def product(a, b):
    """One product of tiles."""
    out = nl.ndarray((a.shape[1], b.shape[1]), dtype=nl.float32, buffer=nl.shared_hbm)
    nl.store(out, nl.copy(nisa.nc_matmul(nl.load(a), nl.load(b))))
    return out


def rows(x):
    """exp of 128 rows at a time."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(x.shape[0] // 128):
        nl.store(out[i * 128:(i + 1) * 128, :], nisa.activation(op=nl.exp, data=nl.load(x[i * 128:(i + 1) * 128, :])))
    return out


def matmul(a, b):
    """a.T @ b by tiles of 128 x 128 and 128 x 512."""
    (k, m), n = a.shape, b.shape[1]
    out = nl.ndarray((m, n), dtype=a.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(m // 128):
        for j in nl.affine_range(n // 512):
            acc = nl.zeros((128, 512), nl.float32, buffer=nl.psum)
            for q in nl.affine_range(k // 128):
                acc += nisa.nc_matmul(nl.load(a[q * 128:(q + 1) * 128, i * 128:(i + 1) * 128]),
                                      nl.load(b[q * 128:(q + 1) * 128, j * 512:(j + 1) * 512]))
            nl.store(out[i * 128:(i + 1) * 128, j * 512:(j + 1) * 512], nl.copy(acc, dtype=a.dtype))
    return out


def causal(x):
    """Blocks on and below the diagonal."""
    n = x.shape[0] // 128
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(n):
        total = nl.zeros((128, x.shape[1]), dtype=nl.float32)
        for j in nl.sequential_range(n):
            if j <= i:
                total[...] = nl.add(total, nl.load(x[j * 128:(j + 1) * 128, :]))
        nl.store(out[i * 128:(i + 1) * 128, :], total)
    return out


def periodic(x):
    """Every second iteration computes, the others copy."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(x.shape[0] // 128):
        tile = nl.load(x[i * 128:(i + 1) * 128, :])
        result = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.sbuf)
        if i % 2 == 0:
            result[...] = nl.exp(tile)
        else:
            result[...] = nl.reciprocal(nl.exp(tile))
        nl.store(out[i * 128:(i + 1) * 128, :], result)
    return out


def aperiodic(x):
    """The work changes at a third and at two thirds of the loop, and the last tile is masked."""
    n = (x.shape[0] + 127) // 128
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    row, column = nl.mgrid[0:128, 0:x.shape[1]]
    for i in nl.affine_range(n):
        inside = i * 128 + row < x.shape[0]
        tile = nl.load(x[i * 128 + row, column], mask=inside)
        result = nl.ndarray((128, x.shape[1]), dtype=x.dtype, buffer=nl.sbuf)
        result[...] = nl.exp(tile, mask=inside)
        if i * 3 > n:
            result[...] = nl.multiply(result, tile, mask=inside)
        if i * 3 > 2 * n:
            result[...] = nl.add(result, tile, mask=inside)
        nl.store(out[i * 128 + row, column], result, mask=inside)
    return out


def resident(x, y):
    """Tiles loaded before a loop and used in it by index: their times decide when the loop can go on."""
    n = x.shape[0] // 128
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    held = nl.ndarray((n, nl.par_dim(128), x.shape[1]), dtype=x.dtype, buffer=nl.sbuf)
    for i in nl.affine_range(n):
        held[i] = nl.load(x[i * 128:(i + 1) * 128, :])
    for k in nl.sequential_range(3):
        for i in nl.affine_range(n):
            tile = nl.add(held[i], nl.load(y[i * 128:(i + 1) * 128, :]))
            nl.store(out[i * 128:(i + 1) * 128, :], tile)
    return out


def buffered(x, factor):
    """A loop whose tensors have so many buffers."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(x.shape[0] // 128, directives=ncc.multi_buffer(factor)):
        nl.store(out[i * 128:(i + 1) * 128, :], nl.exp(nl.load(x[i * 128:(i + 1) * 128, :])))
    return out
