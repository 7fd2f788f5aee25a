"""Instructions of the DMA engines: copies between memories, on the way cast, accumulated, transposed or
summed.

Runtime indices of the operands are followed by the executor: a body gets the rows that they select.
"""
from __future__ import annotations

from typing import Annotated as T
from typing import Any

import numpy as np

from opennki.errors import NkiValueError, make
from opennki.isa import cost, enums
from opennki.isa.declare import (
    ANYWHERE,
    NUMERIC,
    Array,
    Attr,
    DType,
    In,
    InOut,
    Mask,
    Op,
    Out,
    Result,
    instruction,
)

_BULK = ("hbm", "sbuf")
_AXES = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}
_DGE = Attr((enums.dge_mode,), tuple(enums.dge_mode))
MAX_SOURCES = 8


def _check_dge(c: Any, target: Any) -> None:
    if c.dge_mode == enums.dge_mode.hwdge and not target.hwdge_instances:
        raise NkiValueError(
            f"dge_mode.hwdge is not available on {target.name}", operand="dge_mode",
            rule="hardware descriptor generation needs trn2 or later",
            why="NeuronCore-v2 has no descriptor generator in hardware",
            fix='leave dge_mode out, use dge_mode.swdge, or set platform_target="trn2"')


def _check_copy(c: Any, target: Any) -> None:
    _check_dge(c, target)
    if c.dst_rmw_op is not None and c.oob_mode != enums.oob_mode.error:
        raise NkiValueError(
            "dst_rmw_op together with oob_mode.skip", operand="oob_mode",
            rule="dst_rmw_op needs oob_mode.error",
            why="the DMA engine cannot leave rows out while it accumulates",
            fix="leave oob_mode out, or keep the indices inside by clamping them")


def _copy_share(d: Any, _hw: Any) -> float:
    """DMA compute runs at half the copy rate (isa_costs: dma_compute)."""
    return 0.5 if cost.attr(d, "dst_rmw_op") is not None else 1.0


def _transpose_share(d: Any, hw: Any) -> float:
    """0.9 of the copy rate from HBM, 0.5 from SBUF (isa_costs: dma_transpose). Before trn2 no DMA engine transposes: it copies elements."""
    return 1.0 if not hw.pe_transpose_mode else 0.9 if d.spaces["src"] == "hbm" else 0.5


@instruction(
    engine="dma", family="dma", source="api_legacy: isa.dma_copy", limits=(),
    raw=lambda c: c.dst_rmw_op is None,
    check=_check_copy,
    dma_share=_copy_share,
    cost=lambda d, hw: cost.dma(hw, d.P, max(cost.tile_bytes(d, "src"), cost.tile_bytes(d, "dst")), _copy_share(d, hw)))
def dma_copy(*, dst: T[Array, InOut("P F*", ANYWHERE, indirect=True, when="dst_rmw_op")],
             src: T[Array, In("P F*", ANYWHERE, indirect=True)], mask: T[Any, Mask] = None,
             dst_rmw_op: T[str | None, Op(frozenset({"add"}), optional=True)] = None,
             oob_mode: T[enums.oob_mode,
                         Attr((enums.oob_mode,), tuple(enums.oob_mode))] = enums.oob_mode.error,
             dge_mode: T[enums.dge_mode, _DGE] = enums.dge_mode.unknown) -> Array:
    """Copies src to dst by DMA: dst = src, or dst = dst + src with dst_rmw_op=np.add.

    dst, src: tiles of one shape in HBM or SBUF (a PSUM tile goes through SBUF); the dtypes may differ, then
    each element is cast; with equal dtypes bits are kept. The sum is in float32. Either may be indexed at run
    time by a [N, 1] integer tile in SBUF along its first dimension. dst is read only with dst_rmw_op; rows
    that an index names twice are then not defined. oob_mode.error raises for an index outside, oob_mode.skip
    leaves the row (not with dst_rmw_op). dge_mode: who makes the descriptors, hwdge from trn2. mask counts
    the dimensions of the tiles. Cost: bytes / sustained DMA rate, half the rate with dst_rmw_op.
    """
    if dst_rmw_op is None:
        return src
    with np.errstate(all="ignore"):
        return np.asarray(dst + src)


def _axes(src: Any, axes: Any) -> tuple[int, ...]:
    return _AXES[len(src.shape)] if axes is None else tuple(axes)


def _check_dma_transpose(c: Any, target: Any) -> None:
    rank = len(c.src.shape)
    if rank not in _AXES or (c.axes is not None and tuple(c.axes) != _AXES[rank]):
        raise NkiValueError(
            f"axes {c.axes} of a tile with {rank} dimensions", operand="axes",
            rule="axes are (1, 0) for 2 dimensions, (2, 1, 0) for 3 and (3, 1, 2, 0) for 4",
            why="the DMA engines swap the first and the last dimension",
            fix="leave axes out, or reshape src to one of these forms")
    shape = [c.src.shape[i] for i in _AXES[rank]]
    if shape[0] > target.partitions:
        raise make("err_num_partition_exceed_arch_limit",
                   f"the last dimension of src, {shape[0]}, becomes the partition dimension of the result",
                   operand="src",
                   fix=f"tile the last dimension of src by {target.partitions}")
    if getattr(c, "mask", None) is not None and rank > 2:
        raise NkiValueError(
            f"mask on a transpose of {rank} dimensions", operand="mask", rule="mask is for 2 dimensions",
            why="its dimensions are those of src, and more than two are not mapped to the result",
            fix="slice src instead of masking it")
    dims = getattr(c.src, "dims", ())
    if any(d.dyn is not None and d.dyn.size > 1 for d in dims) and target.generation < 3:
        raise make("err_indirect_indices_are_not_supported_with_nki_api", "an index tile names the rows of src", operand="src",
                   fix="gather with nl.load or nisa.dma_copy first; trn2 and later gather while they transpose")
    _check_dge(c, target)


@instruction(
    engine="dma", family="transpose", source="api_legacy: isa.dma_transpose", limits=(), raw=True,
    results=(Result(shape=lambda c: tuple(c.src.shape[i] for i in _axes(c.src, c.axes)), dtype="src"),),
    mask_on="src", mask_dims={"result": (1, 0)}, check=_check_dma_transpose,
    dma_share=_transpose_share,
    cost=lambda d, hw: cost.dma(hw, hw.partitions, cost.tile_bytes(d, "src"), _transpose_share(d, hw)))
def dma_transpose(src: T[Array, In("P F*", _BULK, indirect=True)], *,
                  axes: T[Any, Attr((tuple, list), (None, *_AXES.values()), optional=True)] = None,
                  mask: T[Any, Mask] = None, dtype: T[Any, DType] = None,
                  dge_mode: T[enums.dge_mode, _DGE] = enums.dge_mode.unknown, **kwargs: Any) -> Array:
    """Transposes a tile while it is moved into SBUF: the first and the last dimension of src change places.

    src: HBM or SBUF, 2 to 4 dimensions, indexed at run time by one element, or from trn2 by a [N, 1] tile.
    axes: (1, 0), (2, 1, 0) or (3, 1, 2, 0), by default the one for the dimensions of src. Result:
    src.transpose(axes) in SBUF, so the last dimension of src is at most 128; dtype of src unless dtype is given;
    bits are kept where the dtype is. dge_mode: hwdge from trn2. mask (2 dimensions) counts those of src. Cost:
    bytes / (0.9 of the sustained DMA rate from HBM, 0.5 of it from SBUF).
    """
    return src.transpose(_axes(src, axes))


@instruction(
    engine="dma", family="dma", source="api_legacy: isa._tiled_offloaded_memcpy", limits=(), raw=True, dma_share=lambda d, hw: 1.0,
    surface="internal",
    cost=lambda d, hw: cost.dma(hw, hw.partitions, max(cost.tile_bytes(d, "src"), cost.tile_bytes(d, "dst"))))
def tiled_offloaded_memcpy(*, src: T[Array, In("P F*", _BULK)], dst: T[Array, Out("P F*", _BULK)],
                           dtype: T[Any, DType] = None, **kwargs: Any) -> Array:
    """Copies src to dst by DMA, of any size: dst = src.

    src, dst: tiles of one shape, usually both in HBM; the dtypes may differ, then each element is cast. The
    vendor's name is `_tiled_offloaded_memcpy`; it is not documented, its meaning is inferred from public
    kernels. dtype is that of dst. Cost: bytes / sustained DMA rate.
    """
    return src


def _check_fma(c: Any, target: Any) -> None:
    given = [getattr(c, f"src{i}") for i in range(MAX_SOURCES)]
    count = sum(tile is not None for tile in given)
    if any(tile is None for tile in given[:count]):
        raise NkiValueError("sources are not contiguous", operand="src0", rule="src0 ... src(k-1) are given",
                            why="they are the positional arguments", fix="pass the sources by position")
    if len(c.scales) != count:
        raise NkiValueError(
            f"{len(c.scales)} scales for {count} sources", operand="scales", rule="one scale for each source",
            why="dst is the sum of scales[k] * src[k]", fix="pass as many scales as sources")


_Source = In("P F*", _BULK, NUMERIC, optional=True)


@instruction(
    engine="dma", family="dma", source="api_legacy: isa._tiled_offloaded_fma", limits=(), surface="internal",
    check=_check_fma, dma_share=lambda d, hw: 0.5,
    # Every source is read; DMA compute runs at half the copy rate (isa_costs: dma_compute).
    cost=lambda d, hw: cost.dma(hw, hw.partitions,
                                sum(cost.tile_bytes(d, s) for s in d.dtypes if s.startswith("src")), 0.5))
def tiled_offloaded_fma(src0: T[Array, In("P F*", _BULK)], src1: T[Array | None, _Source] = None,
                        src2: T[Array | None, _Source] = None, src3: T[Array | None, _Source] = None,
                        src4: T[Array | None, _Source] = None, src5: T[Array | None, _Source] = None,
                        src6: T[Array | None, _Source] = None, src7: T[Array | None, _Source] = None, *,
                        dst: T[Array, Out("P F*", _BULK)], scales: T[Any, Attr((tuple, list))]) -> Array:
    """Sum of scaled tiles by DMA: dst = scales[0] * src0 + scales[1] * src1 + ..., in this order, in
    float32.

    Up to 8 sources and dst of one shape, in HBM or SBUF; scales: one number for each source; each product and
    each sum is rounded to float32, dst is rounded once to its dtype. The vendor's name is
    `_tiled_offloaded_fma(*srcs, dst, scales)`; it is not documented, its meaning is inferred from public
    kernels. Cost: bytes read / half the sustained DMA rate.
    """
    sources = [s for s in (src0, src1, src2, src3, src4, src5, src6, src7) if s is not None]
    with np.errstate(all="ignore"):
        total: Array = sources[0] * np.float32(scales[0])
        for tile, scale in zip(sources[1:], scales[1:]):
            total = total + tile * np.float32(scale)
    return total
