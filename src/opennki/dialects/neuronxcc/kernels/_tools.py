"""What the kernels of this folder share: checks of their arguments, and pieces of attention."""

from __future__ import annotations

import os
import sys
from math import gcd
from typing import Any

import numpy as np

import opennki.dialects.neuronxcc.compiler as ncc
import opennki.dialects.neuronxcc.isa as nisa
import opennki.dialects.neuronxcc.language as nl
from opennki.dialects.neuronxcc.constants import sizeinbytes
from opennki.errors import Loc, NkiError, NkiTypeError, NkiValueError, caller, user_frame

ROWS = 128  # partitions of a tile
BANK = 512  # float32 elements of a PSUM bank, and the most that a matmul streams
SD_SCALE = 0.125  # of the scores, in the kernels for Stable Diffusion
LOWEST = -3.0e38  # below every score; finite, so that differences of it are numbers
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep


def _calling_line() -> Loc:
    """The line that calls the kernel: the innermost one outside of this folder, which is the user's mistake."""
    frame = user_frame(sys._getframe(1))
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = user_frame(frame.f_back) if frame.f_back is not None else None
    return Loc(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) if frame is not None else caller()


def fail(kind: type[NkiError], message: str, operand: str, rule: str, fix: str, why: str = "") -> NkiError:
    """The error for an argument that the kernel cannot take, at the line of the call."""
    return kind(message, loc=_calling_line(), operand=operand, rule=rule, fix=fix, why=why)


def require(holds: bool, message: str, *, operand: str, rule: str, fix: str, why: str = "") -> None:
    """Raise NkiValueError at the line of the call unless a rule about an argument holds."""
    if not holds:
        raise fail(NkiValueError, message, operand, rule, fix, why)


def require_shape(name: str, tensor: Any, shape: tuple[int, ...], layout: str) -> None:
    """Raise NkiValueError unless a tensor has the shape that the others ask for."""
    require(
        tuple(tensor.shape) == shape,
        f"{name} has shape {tuple(tensor.shape)}, {shape} is needed",
        operand=name,
        rule=f"{name} has the layout {layout}",
        fix=f"pass {name} as {shape}",
    )


def require_rank(name: str, tensor: Any, rank: int, layout: str) -> None:
    """Raise NkiValueError unless a tensor has `rank` dimensions, NkiTypeError if it is none."""
    if not hasattr(tensor, "shape"):
        raise fail(
            NkiTypeError, f"{name} is {type(tensor).__name__}", name, f"{name} is a tensor {layout}", "pass a tensor"
        )
    require(
        len(tensor.shape) == rank,
        f"{name} has {len(tensor.shape)} dimensions: {tuple(tensor.shape)}",
        operand=name,
        rule=f"{name} has the layout {layout}",
        fix=f"reshape {name} to {rank} dimensions",
    )


def require_one_dtype(**tensors: Any) -> None:
    """Raise NkiTypeError unless all tensors have the dtype of the first."""
    (first, leader), *others = tensors.items()
    for name, tensor in others:
        if tensor.dtype != leader.dtype:
            raise fail(
                NkiTypeError,
                f"{name} is {dtype_name(tensor)} and {first} is {dtype_name(leader)}",
                name,
                f"{', '.join(tensors)} have one dtype",
                f"cast {name} to {dtype_name(leader)}",
            )


def dtype_name(tensor: Any) -> str:
    return str(getattr(tensor.dtype, "name", tensor.dtype))


def require_grid(shape: tuple[int, ...], names: str, part: bool = False) -> None:
    """Raise NkiValueError unless the launch grid is `shape`, or smaller with `part`."""
    got = tuple(nl.num_programs(axis) for axis in range(nl.program_ndim()))
    fits = len(got) == len(shape) and all(have == want or (part and have < want) for want, have in zip(shape, got, strict=True))
    require(
        fits,
        f"the grid is {got}, not {shape}" if got else "the kernel is launched without a grid",
        operand="grid",
        rule=f"the grid is [{names}]",
        fix="launch it as kernel[" + ", ".join(str(n) for n in shape) + "](...)",
    )


def largest_divisor(n: int, most: int) -> int:
    """The size of blocks that n is cut into: the largest of most, most/2, ... that divides it."""
    return gcd(n, most)


# ---- attention ----------------------------------------------------------------------------------------------------------
class Scope:
    """Which keys a query sees: those up to itself if `causal`, and of them the last `window` if that is positive."""

    def __init__(self, causal: bool, window: int) -> None:
        self.window = max(int(window), 0)
        self.causal = causal or self.window > 0

    def meets(self, query: Any, queries: int, key: Any, keys: int) -> Any:
        """Conditions, all of which hold where some pair of a block of queries and a block of keys is seen."""
        found = []
        if self.causal:
            found.append(query + (queries - 1) >= key)
        if self.window:
            found.append(key + (keys - 1) + self.window > query)
        return found

    def cuts(self, query: Any, queries: int, key: Any, keys: int) -> Any:
        """(condition, sign, offset) of each border that may cross the blocks: where the condition holds, pairs with
        sign * (query - key) + offset < 0 are not seen."""
        found = []
        if self.causal:
            found.append((key + (keys - 1) > query, 1, 0))
        if self.window:
            found.append((query + (queries - 1) >= key + self.window, -1, self.window - 1))
        return found


def hide(tile: Any, scope: Scope, query: Any, key: Any, shape: tuple[int, int], turned: bool, value: float) -> None:
    """Set the pairs of a tile that are not seen to a value. shape: (partitions, columns); the partitions are queries
    from `query`, the columns keys from `key`, and the other way round if `turned`."""
    part, column = nl.mgrid[0 : shape[0], 0 : shape[1]]
    rows, columns = shape
    blocks = (query, columns, key, rows) if turned else (query, rows, key, columns)
    for crosses, sign, offset in scope.cuts(*blocks):
        if crosses:
            away = (query + column - key - part) if turned else (query + part - key - column)
            tile[...] = nisa.affine_select(
                pred=(away * sign + offset >= 0), on_true_tile=tile, on_false_value=value, dtype=tile.dtype
            )


def split_rows(columns: Any, count: int) -> Any:
    """(3, 128 * count) bfloat16 of columns (128, count) float32: three parts whose sum is exact, as rows.

    A product with three rows of ones then adds one number to each row or column of a product, in float32.
    """
    parts = nl.ndarray((ROWS, count, 3), dtype=nl.bfloat16)
    rest = columns
    for n in range(3):
        parts[:, :, n] = nl.copy(rest, dtype=nl.bfloat16)
        if n < 2:
            rest = nl.subtract(rest, parts[:, :, n], dtype=nl.float32)
    rows = nl.ndarray((3, count * ROWS), dtype=nl.bfloat16)
    for i in nl.affine_range(count):
        rows[:, nl.ds(i * ROWS, ROWS)] = nl.copy(nisa.nc_transpose(parts[:, i, :]), dtype=nl.bfloat16)
    return rows


def kept(seed: Any, ones: Any, rate: float, index: Any) -> Any:
    """A tile of ones and zeros, zero with probability `rate`: the same for one seed and index in every kernel.

    seed: (1, 1) int32; ones: the tile (128, 128); index: an affine expression that tells the tiles of one call apart.
    """
    number = nisa.iota(index + nl.arange(1)[None, :], dtype=nl.int32)
    # a bit operation is exact on the Vector Engine, whose sums of integers are rounded to 24 bits
    nl.random_seed(nisa.tensor_tensor(seed, number, op=np.bitwise_xor))
    return nl.dropout(ones, rate)


def kept_index(batch: Any, head: Any, heads: int, query_tile: Any, query_tiles: int, key_tile: Any, key_tiles: int) -> Any:
    """The index of `kept` for 128 queries and 128 keys of one head of one sequence of the batch."""
    return ((batch * heads + head) * query_tiles + query_tile) * key_tiles + key_tile


def product_dtype(dtype: Any, mixed_precision: bool) -> Any:
    """What the Tensor Engine multiplies: bfloat16 under mixed precision, else the dtype of the inputs."""
    return nl.bfloat16 if mixed_precision else dtype


def load_seed(seed: Any, name: str) -> Any:
    """The seed of dropout as a tile (1, 1) int32."""
    require(
        seed is not None,
        f"dropout without {name}",
        operand=name,
        rule=f"{name} is a tensor of one int32 where dropout_p > 0",
        fix=f"pass {name} as np.array([number], np.int32), or dropout_p=0.0",
    )
    require_shape(name, seed, (1,), "(1,)")
    return nl.load(seed.reshape((1, 1)), dtype=nl.int32)


def check_attention(heads: int, kv_heads: int, dropout_p: float, scale: float, bias: Any, bias_name: str, queries: int, keys: int) -> None:
    """The rules that forward and backward have in common."""
    require(
        kv_heads > 0 and heads % kv_heads == 0,
        f"{heads} heads of queries and {kv_heads} of keys",
        operand="q",
        rule="the heads of keys and values divide those of queries",
        fix="repeat the heads of k and v, or pass as many as divide those of q",
    )
    require(
        0.0 <= dropout_p < 1.0,
        f"dropout_p is {dropout_p}",
        operand="dropout_p",
        rule="dropout_p is a probability below 1",
        fix="pass 0.0 <= dropout_p < 1.0",
    )
    require(
        bool(np.isfinite(scale)),
        f"softmax_scale is {scale}",
        operand="softmax_scale",
        rule="softmax_scale is a finite number",
        fix="pass None for 1 / sqrt(d)",
    )
    if bias is not None:
        require_rank(bias_name, bias, 4, "(1, 1, seq_q, seq_k)")
        require_shape(bias_name, bias, (1, 1, queries, keys), "(1, 1, seq_q, seq_k): one for all of the batch and heads")


def check_sequence(name: str, length: int) -> None:
    """A sequence is made of tiles of 128."""
    require(
        length > 0 and length % ROWS == 0,
        f"{name} has a sequence of {length}",
        operand=name,
        rule="a sequence is a multiple of 128",
        why="128 queries or keys fill the partitions of a tile",
        fix="pad the sequence, and hide the padding by a mask or bias",
    )


def require_small_head(name: str, d: int) -> None:
    """A head fits the partitions of a tile."""
    require(
        0 < d <= ROWS,
        f"the head dimension is {d}",
        operand=name,
        rule="the head dimension is at most 128",
        why="the contraction of queries and keys runs over the partitions",
        fix=f"check the layout of {name}: d comes before the sequence",
    )


def check_small_attention(q: Any, k: Any, v: Any, k_shape: tuple[int, ...], layout: str) -> None:
    """The rules of the kernels for Stable Diffusion: q (batch, d, seq), v (batch, seq, d)."""
    batch, d, length = q.shape
    for name, tensor in (("k_ref", k), ("v_ref", v)):
        require_rank(name, tensor, 3, "(batch, seq, d)")
    require_shape("k_ref", k, k_shape, layout)
    require_shape("v_ref", v, (batch, length, d), "(batch, seq, d)")
    require_one_dtype(q_ref=q, k_ref=k, v_ref=v)
    require_small_head("q_ref", d)
    check_sequence("q_ref", length)


# ---- direct allocation --------------------------------------------------------------------------------------------------
class Sbuf:
    """Gives tiles their places in SBUF, one after the other. operand, rule: what is wrong if they do not fit."""

    def __init__(self, operand: str, rule: str) -> None:
        self.end, self.operand, self.rule = 0, operand, rule

    def tile(self, shape: tuple[Any, ...], dtype: Any, buffers: tuple[int, ...] = ()) -> Any:
        """A tile; block dimension n has buffers[n] places, which its blocks take in turn."""
        width, start = sizeinbytes(dtype), self.end
        for size in (*shape[len(buffers) + 1 :], *buffers):
            width *= size
        self.end += -(-width // 64) * 64
        room = nl.tile_size.total_available_sbuf_size
        require(
            self.end <= room,
            f"the tiles take more than the {room} bytes of each partition",
            operand=self.operand,
            rule=self.rule,
            fix="use a kernel that the compiler allocates, or shorter sequences or rows",
        )
        return nl.ndarray(shape, dtype=dtype, buffer=ncc.sbuf.mod_alloc(base_addr=start, num_free_tiles=buffers))


def psum(shape: tuple[Any, ...], dtype: Any, bank: int, banks: tuple[int, ...]) -> Any:
    """Tiles of a bank each, from `bank` on; block dimension n takes banks[n] of them in turn."""
    return nl.ndarray(shape, dtype=dtype, buffer=ncc.psum.mod_alloc(base_bank=bank, num_bank_tiles=banks))
