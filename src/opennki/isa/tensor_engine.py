"""Instructions of the Tensor Engine: matrix multiplication and transposition.

The Tensor Engine reads SBUF and writes PSUM. It holds one operand, the stationary tile, in its array of 128 x
128 cells and streams the other, the moving tile, through it; products are summed in float32.
"""
from __future__ import annotations

from functools import cache
from math import prod
from typing import Annotated as T
from typing import Any

import numpy as np

from opennki.errors import NkiTypeError, NkiValueError, make
from opennki.isa import cost
from opennki.isa.declare import (
    FLOATS,
    ON_CHIP,
    PARTITIONS,
    PSUM,
    SBUF,
    Affine,
    Array,
    Attr,
    DType,
    EngineChoice,
    In,
    InOut,
    Limit,
    Mask,
    PeWork,
    Result,
    instruction,
)
from opennki.isa.enums import engine as engine_enum
from opennki.isa.known import certain

_DOUBLE_ROW = ("double_row_gen3", "double_row")
# Accepted spellings whose operand layout the vendor has not published.
_UNDOCUMENTED = ("double_pixel_gen3", "double_pixel", "double_col_gen3", "double_col")
PERF_MODES = (None, "none", *_DOUBLE_ROW, *_UNDOCUMENTED)
_FP8 = frozenset({"float8_e4m3", "float8_e4m3fn", "float8_e5m2"})


def _double_row(perf_mode: str | None) -> bool:
    return perf_mode in _DOUBLE_ROW


def _free(shape: tuple[int, ...], perf_mode: str | None) -> tuple[int, ...]:
    """Free dimensions of an operand that stay in the product."""
    return tuple(shape[2:] if _double_row(perf_mode) else shape[1:])


def _matmul_shape(c: Any) -> tuple[int, ...]:
    return (prod(_free(c.stationary.shape, c.perf_mode)), *_free(c.moving.shape, c.perf_mode))


def _matmul_passes(d: Any, hw: Any) -> int:
    onezero = bool(cost.attr(d, "is_stationary_onezero") or cost.attr(d, "is_moving_onezero"))
    return max(int(hw.pe_cycles("tfloat32" if d.dtypes[x] == "float32r" else d.dtypes[x], onezero=onezero))
               for x in ("stationary", "moving"))


def _matmul_cost(d: Any, hw: Any) -> float:
    # A double row pass contracts both halves of the free dimension at once.
    halves = 2 if _double_row(cost.attr(d, "perf_mode")) else 1
    rows = max(min(hw.mm_init_interval, d.M // halves), d.N // halves)
    return float(rows * _matmul_passes(d, hw))


def _matmul_pe(d: Any, hw: Any) -> PeWork:
    halves = 2 if _double_row(cost.attr(d, "perf_mode")) else 1
    columns, moved, passes = d.M // halves, d.N // halves, _matmul_passes(d, hw)
    wide = "float32" in (d.dtypes["stationary"], d.dtypes["moving"])
    return PeWork("stationary", *cost.load_stationary(hw, columns, wide), d.K * halves * columns * moved,
                  bool(cost.attr(d, "is_transpose")), passes / halves)


def _check_perf_mode(c: Any, target: Any) -> None:
    if c.perf_mode in _UNDOCUMENTED:
        raise NkiValueError(
            f"the meaning of perf_mode {c.perf_mode!r} is not public", operand="perf_mode",
            rule="perf_mode is None or 'double_row_gen3'",
            why="the vendor documents no operand layout for it",
            fix="leave perf_mode out, or use 'double_row_gen3' with fp8 operands of shape [K, 2, F]")
    if not _double_row(c.perf_mode):
        return
    if not target.pe_double_row_k:
        raise NkiValueError(
            f"perf_mode {c.perf_mode!r} needs trn2 or later, the target is {target.name}",
            operand="perf_mode",
            rule="double row matmul runs on NeuronCore-v3 and later",
            why="the PE array of earlier chips has no fp8 double row mode",
            fix='set platform_target="trn2", or leave perf_mode out')
    for name, tile in (("stationary", c.stationary), ("moving", c.moving)):
        if tile.dtype not in _FP8:
            raise NkiTypeError(
                f"{name} is {tile.dtype}, double row matmul takes fp8", operand=name,
                rule="both operands of a double row matmul are float8_e4m3 or float8_e5m2",
                why="a cell of the PE array holds two 8-bit elements, not two wider ones",
                fix="cast to fp8, or leave perf_mode out")
        if len(tile.shape) < 3 or tile.shape[1] != 2:
            raise NkiValueError(
                f"{name} has shape {tuple(tile.shape)}, double row matmul takes [K, 2, F]", operand=name,
                rule="the first free dimension of a double row operand is the pair, of size 2",
                why="contraction runs over the partitions and over the pair",
                fix="reshape so that rows k and k + 128 of the contraction are the two elements of the pair")


def _check_pe_tile(c: Any, target: Any) -> None:
    position, size = tuple(c.tile_position or ()), tuple(c.tile_size or ())
    if bool(position) != bool(size):
        raise NkiValueError(
            "tile_position and tile_size are given together",
            operand="tile_position" if position else "tile_size",
            rule="both or neither", why="they name one part of the PE array", fix="give the other one too")
    if not position:
        return
    for name, value in (("tile_position", position), ("tile_size", size)):
        if len(value) != 2:
            raise NkiValueError(f"{name} has {len(value)} elements", operand=name, rule="(row, column)",
                                why="the PE array has two dimensions", fix=f"give {name} as a tuple of two")
        for v in value:  # an affine expression is checked where its values are known
            if isinstance(v, int) and v % target.pe_tile_min:
                raise NkiValueError(
                    f"{name} {value} is not a multiple of {target.pe_tile_min}", operand=name,
                    rule=f"rows and columns of a PE tile are multiples of {target.pe_tile_min}",
                    why="the PE array is cut into blocks of this size", fix="use multiples of it")
    if all(isinstance(v, int) for v in size):
        if not target.pe_tile_32x32 and size == (32, 32):
            raise NkiValueError(
                f"a PE tile of 32 x 32 does not exist on {target.name}", operand="tile_size",
                rule="a PE tile has more than 32 rows or more than 32 columns before trn2",
                why="the array of NeuronCore-v2 has no tiles of 32 x 32",
                fix="use (64, 32), (32, 64) or larger")
        need = (c.stationary.shape[0], prod(_free(c.stationary.shape, c.perf_mode)))
        if size[0] < need[0] or size[1] < need[1]:
            raise NkiValueError(
                f"tile_size {size} is smaller than the stationary tile {need}", operand="tile_size",
                rule="tile_size is at least the size of the stationary tile",
                why="the stationary tile is held in that part of the PE array", fix="enlarge tile_size")
    if all(isinstance(v, int) for v in (*position, *size)):
        if position[0] + size[0] > target.pe_rows or position[1] + size[1] > target.pe_cols:
            raise NkiValueError(
                f"tile {size} at {position} reaches outside the PE array", operand="tile_position",
                rule=f"the PE array has {target.pe_rows} rows and {target.pe_cols} columns",
                why="a tile is a part of it", fix="move or shrink the tile")


def _check_matmul(c: Any, target: Any) -> None:
    _check_perf_mode(c, target)
    for name, most, why in (
            ("stationary", target.gemm_stationary_fmax,
             "the free dimension of the stationary tile fills the PE columns"),
            ("moving", target.gemm_moving_fmax, "one row of the result fills one PSUM bank")):
        size = prod(_free(getattr(c, name).shape, c.perf_mode))
        if size > most:
            raise make("err_size_of_dimension_exceed_arch_limit",
                       f"{name} has {size} free elements, the limit is {most}: {why}", operand=name,
                       fix=f"tile the free dimension of {name} by {most}")
    _check_pe_tile(c, target)
    if c.accumulate and c.dst is None:
        raise NkiValueError("accumulate without dst", operand="accumulate", rule="accumulate adds to dst",
                            why="there is nothing to add to", fix="give dst")
    shape = _matmul_shape(c)
    if c.dst is not None and (c.dst.shape[0] != shape[0] or prod(c.dst.shape) != prod(shape)):
        raise NkiValueError(f"dst has shape {tuple(c.dst.shape)}, the product has {shape}",
                            operand="dst",
                            rule="dst has the shape of the product", why="each element of dst gets one sum",
                            fix="index dst to the shape of the product")


def _float32(x: Array) -> Array:
    """Contiguous float32 copy or view. BLAS may sum in another order for another layout, so there is only
    one layout."""
    return np.ascontiguousarray(x, dtype=np.float32)


@cache
def _eye(n: int) -> Array:
    return np.eye(n, dtype=np.float32)


def _selected(moving: Array) -> Array | slice | None:
    """Rows of the stationary tile that the columns of `moving` pass on, None if one is not a single 1.

    An identity selects every row; part of one, which a mask leaves, or a permutation is as good.
    """
    x = moving.astype(np.float32)
    if x.shape[0] == x.shape[1] and certain(x == _eye(x.shape[0])):
        return slice(None)
    rows: Array = x.argmax(axis=0)
    single = certain(np.count_nonzero(x, axis=0) == 1) and certain(x[rows, np.arange(x.shape[1])] == 1)
    return rows if single else None


def routed(stationary: Array, moving: Array) -> Array:
    """The product of two raw tiles that passes bits on: where each column of `moving` has a single 1, the rows of `stationary` that they
    select, transposed, in the dtype of `stationary`; else the product in float32."""
    rows = _selected(moving)
    if rows is not None:
        moved: Array = stationary[rows].T
        return moved
    a, b = _float32(stationary), _float32(moving)
    if np.may_share_memory(a, b):
        b = b.copy()
    with np.errstate(all="ignore"):
        return np.asarray(a.T @ b)


@instruction(
    engine="tensor", family="matmul",
    source="api_legacy: isa.nc_matmul; perf modes: isa.nc_matmul kwargs_seen",
    results=(Result(shape=_matmul_shape, dtype=lambda c: "float32", space="psum", spaces=PSUM),),
    limits=(Limit("K", "pe_rows", "the contraction runs down the rows of the PE array"),),
    # A mask counts the dimensions of the product [M, N...].
    mask_dims={"stationary": (None, 0), "moving": (None, 1, 2, 3, 4)},
    raw=lambda c: bool(c.is_transpose), check=_check_matmul, cost=_matmul_cost, pe=_matmul_pe)
def nc_matmul(stationary: T[Array, In("K M", SBUF, FLOATS, operand_mask=True)],
              moving: T[Array, In("K N", SBUF, FLOATS, operand_mask=True)], *,
              is_stationary_onezero: T[bool, Attr((bool,))] = False,
              is_moving_onezero: T[bool, Attr((bool,))] = False,
              is_transpose: T[bool, Attr((bool,))] = False,
              tile_position: T[tuple[int, ...], Affine(many=True)] = (),
              tile_size: T[tuple[int, ...], Affine(many=True)] = (),
              mask: T[Any, Mask] = None,
              perf_mode: T[str | None, Attr((str,), PERF_MODES, optional=True)] = None,
              dst: T[Array | None, InOut("R C*", PSUM, optional=True, when="accumulate")] = None,
              accumulate: T[bool, Attr((bool,))] = False, **kwargs: Any) -> Any:
    """Matrix product of two SBUF tiles into PSUM: result[m, n] = sum over k of stationary[k, m] * moving[k,
    n].

    stationary: [K, M], K <= 128 partitions, M <= 128 free elements. moving: [K, N], N <= 512 free elements
    (the result fits one PSUM bank of 2 KiB per partition); it may have several free dimensions, the result
    has the same ones. Both in SBUF, fp8, bfloat16, float16, tfloat32 or float32. An operand may be masked,
    `x[i < n]`: elements outside read as zero, which shortens the contraction. Result: [M, N] float32 in PSUM;
    the sum is in float32. `acc += nc_matmul(...)` into a PSUM tile accumulates in place.

    is_stationary_onezero, is_moving_onezero: the operand holds only 0 and 1 (speeds up float32, changes no
    value). is_transpose: the moving tile is an identity matrix and the stationary tile is transposed bit for
    bit. (Before trn2 the hardware multiplies instead, so there NaN and infinity spread over their row; this
    is not reproduced.) tile_position, tile_size: (row, column) of the part of the PE array to use, both or
    neither, multiples of 32. perf_mode "double_row_gen3" (trn2 and later): fp8 operands [K, 2, F]; the
    contraction runs over K and the pair, M and N are the elements after the pair. mask counts the dimensions
    of the result. Cost: max(min(64, M), N) cycles, times 4 for float32, times 2 for float32 with a onezero
    operand.
    """
    if is_transpose and not accumulate and not _double_row(perf_mode):
        moved = routed(stationary, moving)
        return (moved, None) if dst is None else moved.reshape(dst.shape)
    a, b = _float32(stationary), _float32(moving)
    if _double_row(perf_mode):
        # [K, 2, F]: the pair joins the contraction.
        k = a.shape[0]
        a, b = a.reshape(2 * k, -1), b.reshape(2 * k, -1)
    if np.may_share_memory(a, b):
        b = b.copy()  # NumPy computes x.T @ x by another BLAS routine, whose bits differ
    with np.errstate(all="ignore"):
        product = a.T @ b
        if dst is None:
            return product, None
        if product.shape != dst.shape:
            product = product.reshape(dst.shape)
            return dst + product if accumulate else product
        return np.add(dst, product, out=product) if accumulate else product


def _transpose_engine(c: Any, target: Any) -> str:
    if c.engine:
        return str(c.engine)
    return "vector" if c.data.space == "psum" else "tensor"


def _check_transpose(c: Any, target: Any) -> None:
    chosen = _transpose_engine(c, target)
    rows, columns = c.data.shape[0], prod(c.data.shape[1:])
    if chosen == "tensor":
        if c.data.space != "sbuf":
            raise make("err_unsupported_memory", "data is in PSUM, which the Tensor Engine does not read",
                       operand="data",
                       fix="copy data to SBUF first, or use engine=nki.isa.vector_engine for up to 32 x 32")
        most, why = target.pe_rows, "the tile passes through the PE array, 128 x 128 cells"
        more = ""
    else:
        most, why = target.vector_transpose_max, "the Vector Engine transposes blocks of 32 x 32"
        more = ", or copy it to SBUF and use the Tensor Engine"
    for name, size in (("partitions", rows), ("free elements", columns)):
        if size > most:
            raise make("err_size_of_dimension_exceed_arch_limit",
                       f"data has {size} {name}, the {chosen.capitalize()} Engine takes {most}: {why}",
                       operand="data", fix=f"tile data by {most} x {most}" + more)


def _transpose_cost(d: Any, hw: Any) -> float:
    if d.engine == "vector":
        return cost.streaming(d, hw)
    # The identity operand holds only zeros and ones.
    passes = hw.pe_cycles_fp32_onezero if d.dtypes["data"] in ("float32", "int32", "uint32") else 1
    return float(max(d.P, min(hw.mm_init_interval, d.F)) * passes)


def _transpose_pe(d: Any, hw: Any) -> PeWork:
    # The tile is the stationary operand, an identity matrix of its height moves.
    wide = d.dtypes["data"] in ("float32", "int32", "uint32")
    return PeWork("data", *cost.load_stationary(hw, d.F, wide), d.P * d.P * d.F, True, hw.pe_cycles_fp32_onezero if wide else 1)


@instruction(
    engine="tensor vector", family="transpose", source="api_legacy: isa.nc_transpose",
    # The Vector Engine writes SBUF too; PSUM is what both engines write.
    results=(Result(shape=lambda c: (prod(c.data.shape[1:]), c.data.shape[0]), dtype="data", space="psum",
                    spaces=PSUM),),
    limits=(PARTITIONS,), raw=True, mask_on="data", mask_dims={"result": (1, 0)},
    choose_engine=_transpose_engine, check=_check_transpose, cost=_transpose_cost, pe=_transpose_pe)
def nc_transpose(data: T[Array, In("P F", ON_CHIP)], *, mask: T[Any, Mask] = None,
                 dtype: T[Any, DType] = None,
                 engine: T[Any, EngineChoice] = engine_enum.unknown, **kwargs: Any) -> Array:
    """Transposes a tile between partition and free dimension: result[f, p] = data[p, f].

    data: [P, F], free dimensions are flattened. Tensor Engine (the default for SBUF): up to 128 x 128, from
    SBUF to PSUM. Vector Engine (the default for PSUM): up to 32 x 32, from SBUF or PSUM. Result: [F, P] in
    PSUM, dtype of data unless dtype is given; bits are kept where the dtype is. (Before trn2 the Tensor
    Engine multiplies with an identity matrix, so there NaN and infinity spread; this is not reproduced.) mask
    counts the dimensions of data. Cost: Vector Engine max(64, F); Tensor Engine max(P, min(64, F)), twice
    that for 4-byte data.
    """
    return data.T
