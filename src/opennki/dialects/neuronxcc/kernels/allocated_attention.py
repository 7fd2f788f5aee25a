"""`neuronxcc.nki.kernels.allocated_attention`: attention whose tiles have addresses. The kernel is opennki's own, with the
documented name, arguments, layouts and result (public reference kernels of nki-samples); `_flash_forward` explains the
two passes that it makes over the keys.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import opennki.dialects.neuronxcc.isa as nisa
import opennki.dialects.neuronxcc.language as nl
from opennki.dialects.neuronxcc._missing import missing
from opennki.dialects.neuronxcc.kernels import _tools as t
from opennki.kernels.entry import jit

_M = "neuronxcc.nki.kernels.allocated_attention"
_TILES = t.BANK // t.ROWS  # tiles of 128 in a block of 512 queries or keys


@jit
def allocated_fused_self_attn_for_SD_small_head_size(
    q_ref: Any, k_ref: Any, v_ref: Any, use_causal_mask: bool = False, mixed_precision: bool = True
) -> Any:
    """(softmax(0.125 q.T k) v).T of Stable Diffusion with direct allocation, for the grid [batch].

    q_ref, k_ref: (batch, d, seq), v_ref: (batch, seq, d), all of one dtype; d <= 128, seq a multiple of 512 whose keys and
    values fit SBUF. There is no causal mask. mixed_precision: products of bfloat16, else of the inputs' dtype; sums and
    softmax are float32. Returns (batch, d, seq). Errors: NkiValueError and NkiTypeError for arguments against these rules.
    """
    t.require_rank("q_ref", q_ref, 3, "(batch, d, seq)")
    batch, d, length = q_ref.shape
    t.check_small_attention(q_ref, k_ref, v_ref, (batch, d, length), "(batch, d, seq)")
    t.require(
        length % t.BANK == 0,
        f"the sequence is {length}",
        operand="q_ref",
        rule="the sequence is a multiple of 512",
        why="addresses are laid out for blocks of 512",
        fix="use fused_self_attn_for_SD_small_head_size, which takes multiples of 128",
    )
    t.require(
        not use_causal_mask,
        "use_causal_mask is set",
        operand="use_causal_mask",
        rule="this kernel has no causal mask",
        fix="use fused_self_attn_for_SD_small_head_size",
    )
    t.require_grid((batch,), "batch")
    out = nl.ndarray((batch, d, length), dtype=q_ref.dtype, buffer=nl.shared_hbm)
    b = nl.program_id(0)
    work = _Attention(d, length, t.product_dtype(q_ref.dtype, mixed_precision), q_ref.dtype)
    work.load(k_ref[b], v_ref[b])
    # one block ahead: the engines find the largest scores of the next block while they weigh the values of this one
    work.begin(q_ref[b], 0)
    for i in nl.affine_range(_TILES):
        for j in nl.affine_range(work.blocks):
            work.find(0, i, j)
    work.split(0)
    for block in nl.sequential_range(work.blocks - 1):
        work.begin(q_ref[b], block + 1)
        work.weigh(block, block + 1)
        work.split(block + 1)
        work.finish(out[b], block)
    work.weigh(work.blocks - 1, None)
    work.finish(out[b], work.blocks - 1)
    return out


class _Attention:
    """The tiles of the kernel, with their addresses, and what is done to them. Tiles of a block have its index in front,
    and as many buffers as blocks are worked on at a time."""

    def __init__(self, d: int, length: int, dtype: Any, out_dtype: Any) -> None:
        self.d, self.dtype, self.out_dtype = d, dtype, out_dtype
        self.blocks, self.key_tiles = length // t.BANK, length // t.ROWS
        sbuf, blocks, rows = t.Sbuf("q_ref", "the keys and values of a sequence fit SBUF"), self.blocks, t.ROWS
        self.keys = sbuf.tile((d, length), dtype)
        self.values = sbuf.tile((rows, self.key_tiles, d + 1), dtype)
        self.zero = sbuf.tile((rows, 1), nl.float32)
        self.ones = sbuf.tile((3, rows), nl.bfloat16)
        self.identity = sbuf.tile((rows, rows), out_dtype)
        self.identity_of_parts = sbuf.tile((rows, rows), nl.bfloat16)
        self.queries = sbuf.tile((blocks, nl.par_dim(d), t.BANK), dtype, (2,))
        self.found = sbuf.tile((blocks, nl.par_dim(rows), _TILES, blocks), nl.float32, (2,))
        self.rest = sbuf.tile((blocks, 3, nl.par_dim(rows), _TILES), nl.float32, (2, 3))
        self.parts = sbuf.tile((blocks, nl.par_dim(rows), _TILES, 3), nl.bfloat16, (2,))
        self.shift = sbuf.tile((blocks, nl.par_dim(3), t.BANK), nl.bfloat16, (2,))
        self.exps = sbuf.tile((blocks, self.key_tiles, nl.par_dim(rows), t.BANK), dtype, (1, 4))
        self.inverse = sbuf.tile((blocks, nl.par_dim(rows), _TILES), nl.float32, (2,))
        self.weighted = sbuf.tile((blocks, _TILES, nl.par_dim(rows), d), out_dtype, (1, 4))
        self.turned = sbuf.tile((blocks, nl.par_dim(d), t.BANK), out_dtype, (2,))
        # the eight banks: scores of both passes, sums, and transposes
        self.scores = t.psum((blocks, _TILES, blocks, nl.par_dim(rows), t.BANK), nl.float32, 0, (1, 1, 2))
        self.scores_turned = t.psum((blocks, self.key_tiles, nl.par_dim(rows), t.BANK), nl.float32, 2, (1, 3))
        self.sums = t.psum((blocks, 2, nl.par_dim(rows), 2, d + 1), nl.float32, 5, (1, 2))
        self.rows = t.psum((blocks, nl.par_dim(3), t.BANK), nl.float32, 7, (1,))
        self.out = t.psum((blocks, nl.par_dim(d), t.BANK), nl.float32, 7, (1,))

    def load(self, k: Any, v: Any) -> None:
        """Constants, keys (d, keys) and values (keys, d)."""
        self.zero[...] = nisa.memset(self.zero.shape, 0.0, nl.float32)
        self.ones[...] = nisa.memset(self.ones.shape, 1.0, nl.bfloat16)
        self.identity[...] = nl.load(nl.shared_identity_matrix(t.ROWS, dtype=self.out_dtype))
        self.identity_of_parts[...] = nl.load(nl.shared_identity_matrix(t.ROWS, dtype=nl.bfloat16))
        row, tile, column = nl.mgrid[0 : t.ROWS, 0:_TILES, 0 : self.d]
        for j in nl.affine_range(self.blocks):
            part, tiles = nl.ds(j * t.BANK, t.BANK), nl.ds(j * _TILES, _TILES)
            self.keys[:, part] = nl.load(k[:, part], dtype=self.dtype)
            self.values[:, tiles, 0 : self.d] = nl.load(v[j * t.BANK + tile * t.ROWS + row, column], dtype=self.dtype)
            self.values[:, tiles, self.d : self.d + 1] = nisa.memset((t.ROWS, _TILES, 1), 1.0, self.dtype)

    def begin(self, q: Any, block: Any) -> None:
        """Load a block of queries of q (d, queries)."""
        self.queries[block] = nl.load(q[:, nl.ds(block * t.BANK, t.BANK)], dtype=self.dtype)

    def find(self, block: Any, i: Any, j: Any) -> None:
        """The largest score of each of 128 queries for 512 keys."""
        scores = self.scores[block, i, j]
        scores[...] = nisa.nc_matmul(self.queries[block, :, nl.ds(i * t.ROWS, t.ROWS)], self.keys[:, nl.ds(j * t.BANK, t.BANK)])
        self.found[block, :, i, nl.ds(j, 1)] = nisa.tensor_reduce(np.max, scores, axis=(1,), keepdims=True)

    def split(self, block: Any) -> None:
        """The negated maxima as three rows of bfloat16 whose sum is exact."""
        self.rest[block, 0] = nisa.tensor_reduce(np.max, self.found[block], axis=(2,), negate=True)
        for n in range(3):
            part = self.parts[block, :, :, n]
            part[...] = nisa.tensor_copy(self.rest[block, n], dtype=nl.bfloat16)
            if n < 2:
                self.rest[block, n + 1] = nisa.tensor_tensor(self.rest[block, n], part, op=np.subtract, dtype=nl.float32)
        for i in nl.affine_range(_TILES):
            place = self.rows[block, :, nl.ds(i * t.ROWS, t.ROWS)]
            place[...] = nisa.nc_matmul(self.parts[block, :, i, :], self.identity_of_parts, is_transpose=True)
        self.shift[block] = nisa.tensor_copy(self.rows[block], dtype=nl.bfloat16)

    def weigh(self, block: Any, following: Any) -> None:
        """Exponentials with keys as partitions, and what they weigh; and the maxima of the following block."""
        for j in nl.affine_range(self.blocks):
            for i in nl.affine_range(_TILES):
                self._weigh(block, j * _TILES + i)
                if following is not None:
                    self.find(following, i, j)

    def _weigh(self, block: Any, c: Any) -> None:
        """Add the values of 128 keys, weighted."""
        scores: Any = self.scores_turned[block, c]
        scores[...] = nisa.nc_matmul(self.keys[:, nl.ds(c * t.ROWS, t.ROWS)], self.queries[block])
        scores += nisa.nc_matmul(self.ones, self.shift[block])
        self.exps[block, c] = nisa.activation(op=nl.exp, data=scores, scale=t.SD_SCALE, bias=self.zero, dtype=self.dtype)
        for i in range(_TILES):
            place: Any = self.sums[block, i // 2, :, i % 2, :]
            exps = self.exps[block, c, :, i * t.ROWS : (i + 1) * t.ROWS]
            if c == 0:
                place[...] = nisa.nc_matmul(exps, self.values[:, c, :])
            else:
                place += nisa.nc_matmul(exps, self.values[:, c, :])

    def finish(self, out: Any, block: Any) -> None:
        """Store the sums over their weights, transposed, to out (d, queries)."""
        d = self.d
        for i in range(_TILES):
            sums, inverse = self.sums[block, i // 2], self.inverse[block, :, i : i + 1]
            inverse[...] = nisa.reciprocal(sums[:, i % 2, d : d + 1], dtype=nl.float32)
            self.weighted[block, i] = nisa.tensor_scalar(sums[:, i % 2, 0:d], np.multiply, inverse, dtype=self.out_dtype)
            place = self.out[block, :, i * t.ROWS : (i + 1) * t.ROWS]
            place[...] = nisa.nc_matmul(self.weighted[block, i], self.identity, is_transpose=True)
        self.turned[block] = nisa.tensor_copy(self.out[block], dtype=self.out_dtype)
        nl.store(out[:, nl.ds(block * t.BANK, t.BANK)], self.turned[block])


__all__ = ["allocated_fused_self_attn_for_SD_small_head_size"]
__getattr__ = missing(_M)
