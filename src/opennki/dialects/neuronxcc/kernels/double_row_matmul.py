"""`neuronxcc.nki.kernels.double_row_matmul`: products of fp8 operands, two rows of the contraction at a time. The kernel is
opennki's own, with the documented name, arguments, layouts and result (public reference kernels of nki-samples).
"""

from __future__ import annotations

from typing import Any

import numpy as np

import opennki.dialects.neuronxcc.isa as nisa
import opennki.dialects.neuronxcc.language as nl
from opennki.dialects.neuronxcc._missing import missing
from opennki.dialects.neuronxcc.constants import sizeinbytes
from opennki.dialects.neuronxcc.kernels import _tools as t
from opennki.errors import NkiTypeError
from opennki.kernels.entry import jit

_M = "neuronxcc.nki.kernels.double_row_matmul"
_LARGEST = 240.0  # of float8_e4m3
_PAIR = 2
_BANKS = 6  # of PSUM for sums; the others are for transposes
_RESIDENT = 0.25  # part of SBUF for the rows that are quantised


@jit(platform_target="trn2")
def quantized_double_row_matmul(
    lhs: Any, rhs_quantized: Any, rhs_scale: Any, TILES_IN_BLOCK_M: int, TILES_IN_BLOCK_N: int, TILES_IN_BLOCK_K: int
) -> Any:
    """lhs @ rhs in fp8: lhs is quantised row by row here, rhs comes quantised column by column. trn2 and later.

    lhs: (M, K) float32, bfloat16 or float16. rhs_quantized: float8_e4m3 (K / 2, 2 N): of each two tiles (128, 512) of rhs
    that follow each other along K, the second stands to the right of the first. rhs_scale: (128, N), the factor of each
    column in every row. M, N and K are multiples of 128 TILES_IN_BLOCK_M, 512 TILES_IN_BLOCK_N and 128 TILES_IN_BLOCK_K,
    the last of which is even: what is worked on together. Sums are float32. Returns (M, N) of the dtype of lhs. Errors:
    NkiValueError and NkiTypeError for arguments against these rules.
    """
    t.require_rank("lhs", lhs, 2, "(M, K)")
    t.require_rank("rhs_quantized", rhs_quantized, 2, "(K / 2, 2 N)")
    t.require_rank("rhs_scale", rhs_scale, 2, "(128, N)")
    rows, depth = lhs.shape
    columns = rhs_quantized.shape[1] // _PAIR
    if rhs_quantized.dtype != nl.float8_e4m3:
        raise t.fail(
            NkiTypeError,
            f"rhs_quantized is {t.dtype_name(rhs_quantized)}",
            "rhs_quantized",
            "rhs_quantized is float8_e4m3",
            "divide each column by its largest magnitude / 240, then cast",
        )
    t.require_shape("rhs_quantized", rhs_quantized, (depth // _PAIR, _PAIR * columns), "(K / 2, 2 N)")
    t.require_shape("rhs_scale", rhs_scale, (t.ROWS, columns), "(128, N)")
    sizes = (("M", rows, t.ROWS, TILES_IN_BLOCK_M), ("N", columns, t.BANK, TILES_IN_BLOCK_N), ("K", depth, t.ROWS, TILES_IN_BLOCK_K))
    for name, size, tile, tiles in sizes:
        t.require(
            isinstance(tiles, int | np.integer) and tiles > 0 and size > 0 and size % (tile * tiles) == 0,
            f"{name} is {size} and TILES_IN_BLOCK_{name} is {tiles}",
            operand=f"TILES_IN_BLOCK_{name}",
            rule=f"{name} is a multiple of {tile} times TILES_IN_BLOCK_{name}",
            fix=f"pass a divisor of {max(size // tile, 1)}",
        )
    t.require(
        TILES_IN_BLOCK_K % _PAIR == 0,
        f"TILES_IN_BLOCK_K is {TILES_IN_BLOCK_K}",
        operand="TILES_IN_BLOCK_K",
        rule="TILES_IN_BLOCK_K is even",
        why="the Tensor Engine takes two tiles of the contraction at a time",
        fix="pass an even number",
    )
    t.require_grid((), "")
    out = nl.ndarray((rows, columns), dtype=lhs.dtype, buffer=nl.shared_hbm)
    work = _Product(depth, TILES_IN_BLOCK_M, TILES_IN_BLOCK_N, TILES_IN_BLOCK_K)
    scales = nl.load(rhs_scale, dtype=nl.float32)
    for m in nl.affine_range(rows // work.rows):
        left, factors = work.quantise(lhs, m * work.rows)
        for n in nl.affine_range(columns // work.columns):
            sums = work.products(left, rhs_quantized, n)
            work.store(out, sums, factors, scales, m * work.rows, n * work.columns)
    return out


class _Product:
    """What is done to a block of rows and of columns. rows, columns, depth: of a block, of which there are `blocks` along K;
    tiles: (along M, along N) in one."""

    def __init__(self, depth: int, tiles_m: int, tiles_n: int, tiles_k: int) -> None:
        self.rows, self.columns, self.depth = tiles_m * t.ROWS, tiles_n * t.BANK, tiles_k * t.ROWS
        self.blocks, self.tiles = depth // self.depth, (tiles_m, tiles_n)
        self.pairs = tiles_k // _PAIR

    def quantise(self, lhs: Any, start: Any) -> tuple[Any, Any]:
        """Rows from `start` in fp8, transposed (128, pairs, 2, rows), and their factors (128, tiles along M)."""
        out = nl.ndarray((t.ROWS, self.blocks * self.pairs, _PAIR, self.rows), dtype=nl.float8_e4m3)
        factors = nl.ndarray((t.ROWS, self.tiles[0]), dtype=nl.float32)
        for i in nl.affine_range(self.tiles[0]):
            load = self._rows(lhs, start + i * t.ROWS)
            largest = nl.ndarray((t.ROWS, self.blocks), dtype=nl.float32)
            for block in nl.affine_range(self.blocks):
                nisa.activation_reduce(
                    op=nl.abs, data=load(block), reduce_op=np.maximum, reduce_res=largest[:, nl.ds(block, 1)], dtype=nl.bfloat16
                )
            top = nl.maximum(nisa.tensor_reduce(np.max, largest, axis=(1,), keepdims=True), 1e-30)
            factors[:, nl.ds(i, 1)] = nl.multiply(top, 1.0 / _LARGEST)
            inverse = nl.multiply(nl.reciprocal(top), _LARGEST)
            for block in nl.affine_range(self.blocks):
                scaled = nl.multiply(load(block), inverse, dtype=nl.float8_e4m3)
                self._turn(out, scaled, block, i)
        return out, factors

    def _rows(self, lhs: Any, start: Any) -> Any:
        """A function of a block along K, which gives 128 rows of it; all of them are loaded once where they fit."""
        if lhs.shape[1] * sizeinbytes(lhs.dtype) > _RESIDENT * nl.tile_size.total_available_sbuf_size:
            return lambda block: nl.load(lhs[nl.ds(start, t.ROWS), nl.ds(block * self.depth, self.depth)])
        whole = nl.load(lhs[nl.ds(start, t.ROWS), :])
        return lambda block: whole[:, nl.ds(block * self.depth, self.depth)]

    def _turn(self, out: Any, scaled: Any, block: Any, i: Any) -> None:
        """Transpose 128 scaled rows into their place; a bank takes several transposes."""
        each = t.largest_divisor(self.pairs, 4)
        for group in nl.affine_range(self.pairs // each):
            bank = nl.ndarray((t.ROWS, each, _PAIR, t.ROWS), dtype=nl.bfloat16, buffer=nl.psum)
            for c in range(each):
                for half in range(_PAIR):
                    column = nl.ds(((group * each + c) * _PAIR + half) * t.ROWS, t.ROWS)
                    bank[:, c, half, :] = nisa.nc_transpose(scaled[:, column], dtype=nl.bfloat16)
            place = out[:, nl.ds(block * self.pairs + group * each, each), :, nl.ds(i * t.ROWS, t.ROWS)]
            place[...] = nl.copy(bank, dtype=nl.float8_e4m3)

    def products(self, left: Any, rhs: Any, n: Any) -> Any:
        """The sums over K, (128, 512) float32 for each (tile along M, tile along N): in PSUM where there is a bank for each."""
        places = [(i, j) for j in range(self.tiles[1]) for i in range(self.tiles[0])]
        if len(places) <= _BANKS:
            banks = {place: nl.zeros((t.ROWS, t.BANK), dtype=nl.float32, buffer=nl.psum) for place in places}
            for block in nl.affine_range(self.blocks):
                for j in range(self.tiles[1]):
                    right = self._columns(rhs, n, j, block)
                    for i in range(self.tiles[0]):
                        self._add(banks[i, j], left, right, i, block)
            return banks
        sums = {place: nl.zeros((t.ROWS, t.BANK), dtype=nl.float32) for place in places}
        for block in nl.sequential_range(self.blocks):
            for j in range(self.tiles[1]):
                right = self._columns(rhs, n, j, block)
                for i in range(self.tiles[0]):
                    part = nl.zeros((t.ROWS, t.BANK), dtype=nl.float32, buffer=nl.psum)
                    self._add(part, left, right, i, block)
                    sums[i, j][...] = nl.add(sums[i, j], part)
        return sums

    def _columns(self, rhs: Any, n: Any, j: int, block: Any) -> Any:
        """(128, pairs, 2, 512) of a block along K and a tile of columns."""
        row, pair, half, column = nl.mgrid[0 : t.ROWS, 0 : self.pairs, 0:_PAIR, 0 : t.BANK]
        at = (n * self.tiles[1] + j) * _PAIR + half
        return nl.load(rhs[(block * self.pairs + pair) * t.ROWS + row, at * t.BANK + column])

    def _add(self, into: Any, left: Any, right: Any, i: int, block: Any) -> None:
        """Add the products of a block along K."""
        for p in nl.affine_range(self.pairs):
            stationary = left[:, block * self.pairs + p, :, i * t.ROWS : (i + 1) * t.ROWS]
            into += nisa.nc_matmul(stationary, right[:, p, :, :], perf_mode="double_row_gen3")

    def store(self, out: Any, sums: Any, factors: Any, scales: Any, row: Any, column: Any) -> None:
        """Apply the factors of rows and columns, and store."""
        for (i, j), total in sums.items():
            part = nl.ds(column + j * t.BANK, t.BANK)
            value = nisa.scalar_tensor_tensor(
                data=total, op0=np.multiply, operand0=factors[:, i : i + 1], op1=np.multiply, operand1=scales[:, part], dtype=out.dtype
            )
            nl.store(out[nl.ds(row + i * t.ROWS, t.ROWS), part], value)


__all__ = ["quantized_double_row_matmul"]
__getattr__ = missing(_M)
