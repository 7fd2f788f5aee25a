"""`neuronxcc.nki.kernels.allocated_fused_linear`: a projection of normalised rows, whose tiles have addresses. The kernel is
opennki's own, with the documented name, arguments and result (public reference kernels of nki-samples).

Dividing a row by its root mean square and multiplying it by a matrix may be done in either order, so that the rows go to
the Tensor Engine as they are, and the factor of each is applied to its products on their way out of PSUM.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import opennki.dialects.neuronxcc.isa as nisa
import opennki.dialects.neuronxcc.language as nl
from opennki.dialects.neuronxcc._missing import missing
from opennki.dialects.neuronxcc.kernels import _tools as t
from opennki.kernels.entry import jit

_M = "neuronxcc.nki.kernels.allocated_fused_linear"
_MOST = 8192


@jit
def allocated_fused_rms_norm_qkv(hidden: Any, weights: Any, norm_dtype: Any = nl.float32, eps: float = 1e-6) -> Any:
    """(hidden / rms(hidden)) weights with direct allocation, where rms is sqrt(mean of squares + eps) of each row.

    hidden: (batch, seq, dim), weights: (dim, out) of the same dtype, float16 or bfloat16 (float32 too, as far as it fits);
    dim a multiple of 128 up to 8192, out at most 512. weights have the factors of the norm in them. norm_dtype: of 1 / rms;
    sums are float32. Returns (batch, seq, out) of the dtype of hidden. No grid. Errors: NkiValueError and NkiTypeError for
    arguments against these rules.
    """
    t.require_rank("hidden", hidden, 3, "(batch, seq, dim)")
    t.require_rank("weights", weights, 2, "(dim, out)")
    batch, length, dim = hidden.shape
    out_dim = weights.shape[1]
    t.require(
        dim % t.ROWS == 0 and dim <= _MOST,
        f"dim is {dim}",
        operand="hidden",
        rule="dim is a multiple of 128 up to 8192",
        why="the contraction runs over 128 partitions at a time, and all of the weights stay in SBUF",
        fix="pad dim with zeros, and scale eps and weights for the mean over the padded row",
    )
    t.require_shape("weights", weights, (dim, out_dim), "(dim, out)")
    t.require(
        out_dim <= t.BANK,
        f"out is {out_dim}",
        operand="weights",
        rule="out is at most 512",
        why="the products of a row fill one PSUM bank",
        fix="call the kernel for parts of the columns",
    )
    t.require_one_dtype(hidden=hidden, weights=weights)
    t.require_grid((), "")
    out = nl.ndarray((batch, length, out_dim), dtype=hidden.dtype, buffer=nl.shared_hbm)
    rows = batch * length
    x, y = hidden.reshape((rows, dim)), out.reshape((rows, out_dim))
    work = _Projection(-(-rows // t.ROWS), dim, out_dim, hidden.dtype, norm_dtype)
    work.load(weights, float(eps))
    for i in nl.affine_range(rows // t.ROWS):
        work.tile(x, y, i, t.ROWS)
    if rows % t.ROWS:
        work.tile(x, y, rows // t.ROWS, rows % t.ROWS)
    return out


class _Projection:
    """The tiles of the kernel, with their addresses, and what is done to them."""

    def __init__(self, tiles: int, dim: int, out_dim: int, dtype: Any, norm_dtype: Any) -> None:
        self.dim, self.dtype, self.norm_dtype = dim, dtype, norm_dtype
        self.chunks = dim // t.ROWS
        self.each = t.largest_divisor(self.chunks, t.BANK // t.ROWS)  # transposes of a bank, which are float32 as all products
        sbuf, rows, groups = t.Sbuf("weights", "the weights and rows fit SBUF"), nl.par_dim(t.ROWS), self.chunks // self.each
        self.weights = sbuf.tile((t.ROWS, self.chunks, out_dim), dtype)
        self.identity = sbuf.tile((t.ROWS, t.ROWS), dtype)
        self.zero = sbuf.tile((t.ROWS, 1), nl.float32)
        self.eps = sbuf.tile((t.ROWS, 1), nl.float32)
        self.x = sbuf.tile((tiles, rows, dim), dtype, (3,))
        self.squares = sbuf.tile((tiles, rows, dim), nl.bfloat16, (1,))
        self.sums = sbuf.tile((tiles, rows, 1), nl.float32, (4,))
        self.inverse = sbuf.tile((tiles, rows, 1), norm_dtype, (4,))
        self.turned = sbuf.tile((tiles, groups, rows, self.each * t.ROWS), dtype, (1, min(groups, 4)))
        self.result = sbuf.tile((tiles, rows, out_dim), dtype, (3,))
        self.banks = t.psum((tiles, groups, rows, self.each * t.ROWS), nl.float32, 0, (1, 4))
        self.products = t.psum((tiles, rows, out_dim), nl.float32, 4, (4,))

    def load(self, weights: Any, eps: float) -> None:
        """Constants and weights (dim, out)."""
        self.identity[...] = nl.load(nl.shared_identity_matrix(t.ROWS, dtype=self.dtype))
        self.zero[...] = nisa.memset(self.zero.shape, 0.0, nl.float32)
        self.eps[...] = nisa.memset(self.eps.shape, eps, nl.float32)
        step = t.largest_divisor(self.chunks, 16)
        row, chunk, column = nl.mgrid[0 : t.ROWS, 0:step, 0 : weights.shape[1]]
        for n in nl.affine_range(self.chunks // step):
            part = weights[(n * step + chunk) * t.ROWS + row, column]
            self.weights[:, nl.ds(n * step, step), :] = nl.load(part)

    def tile(self, x: Any, y: Any, i: Any, rows: int) -> None:
        """128 rows of x, or the last few."""
        part = nl.ds(i * t.ROWS, rows)
        tile = self.x[i, 0:rows, :]
        tile[...] = nl.load(x[part, :])
        sums, inverse = self.sums[i, 0:rows, :], self.inverse[i, 0:rows, :]
        self.squares[i, 0:rows, :] = nisa.activation_reduce(
            op=nl.square, data=tile, reduce_op=np.add, reduce_res=sums, bias=self.zero[0:rows, :], dtype=nl.bfloat16
        )
        inverse[...] = nisa.activation(op=nl.rsqrt, data=sums, scale=1.0 / self.dim, bias=self.eps[0:rows, :], dtype=self.norm_dtype)
        products: Any = self.products[i, 0:rows, :]
        for group in nl.affine_range(self.chunks // self.each):
            for c in range(self.each):
                column = nl.ds((group * self.each + c) * t.ROWS, t.ROWS)
                place = self.banks[i, group, :, c * rows : (c + 1) * rows]  # side by side, so that the copy reads no gaps
                place[...] = nisa.nc_matmul(self.x[i, 0:rows, column], self.identity[0:rows, 0:rows], is_transpose=True)
            filled = slice(0, self.each * rows)
            self.turned[i, group, :, filled] = nisa.tensor_copy(self.banks[i, group, :, filled], dtype=self.dtype)
            for c in range(self.each):
                left = self.turned[i, group, :, c * rows : (c + 1) * rows]
                right = self.weights[:, group * self.each + c, :]
                if group * self.each + c == 0:
                    products[...] = nisa.nc_matmul(left, right)
                else:
                    products += nisa.nc_matmul(left, right)
        self.result[i, 0:rows, :] = nisa.tensor_scalar(products, np.multiply, inverse, dtype=self.dtype)
        nl.store(y[part, :], self.result[i, 0:rows, :])


__all__ = ["allocated_fused_rms_norm_qkv"]
__getattr__ = missing(_M)
