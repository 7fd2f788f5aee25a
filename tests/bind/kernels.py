"""Small kernels for the tests of the bridges."""

from __future__ import annotations

import opennki.dropin  # noqa: F401
import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import neuronxcc.nki.typing as nt
import numpy as np


@nki.jit
def axpy(x, y, a=2.0):
    """a * x + y for 2-D tiles of at most 128 rows."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.load(x) * a + nl.load(y))
    return out


@nki.jit
def rows(x):
    """Each program of the grid doubles 32 rows."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    start = nl.program_id(0) * 32
    nl.store(out[nl.ds(start, 32)], nl.load(x[nl.ds(start, 32)]) * 2)
    return out


@nki.jit
def several(x):
    """Results in a structure: a tensor, and a list of a tensor of another dtype and a reduction."""
    double = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    narrow = nl.ndarray(x.shape, dtype=nl.bfloat16, buffer=nl.shared_hbm)
    total = nl.ndarray((x.shape[0], 1), dtype=nl.float32, buffer=nl.shared_hbm)
    tile = nl.load(x)
    nl.store(double, tile * 2)
    nl.store(narrow, tile)
    nl.store(total, nl.sum(tile, axis=1, keepdims=True))
    return double, [narrow, total]


@nki.jit
def accumulate(x, acc: nt.mutable_tensor):
    """acc += x, in place."""
    nl.store(acc, nl.load(acc) + nl.load(x))
    return acc


@nki.trace
def scale_into(x, out):
    """Old style: writes its last argument and returns nothing."""
    nl.store(out, nl.load(x) * 3)


@nki.jit
def copy(x):
    """The same values, through SBUF."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.load(x))
    return out


@nki.jit
def move(x):
    """The same values by DMA, of any shape."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=x)
    return out


@nki.jit
def shout(x):
    """Prints what it copies."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x)
    nl.device_print("shout", tile)
    nl.store(out, tile)
    return out


@nki.jit
def pick(table, index):
    """Rows of a table by a runtime index, which may be out of bounds."""
    out = nl.ndarray((index.shape[0], table.shape[1]), dtype=table.dtype, buffer=nl.shared_hbm)
    rows_ = nl.load(index)
    columns = nl.arange(table.shape[1])[None, :]
    nl.store(out, nl.load(table[rows_[nl.arange(index.shape[0])[:, None], 0], columns]))
    return out


@nki.jit
def matmul(a, b):
    """a @ b for one tile; a is given transposed."""
    out = nl.ndarray((a.shape[1], b.shape[1]), dtype=nl.float32, buffer=nl.shared_hbm)
    nl.store(out, nl.copy(nisa.nc_matmul(nl.load(a), nl.load(b))))
    return out


def numbers(*shape, seed=0, dtype=np.float32):
    """Reproducible values."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)
