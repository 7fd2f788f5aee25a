"""Moving tiles between HBM and SBUF: nl.load, nl.store, nl.load_transpose2d, nl.atomic_rmw.

Source: api_legacy neuronxcc.nki.language.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from opennki.errors import NkiTypeError, NkiValueError, make
from opennki.ir.build import current
from opennki.ir.nodes import Access
from opennki.isa import scalar
from opennki.isa.enums import oob_mode
from opennki.lang import ops, view
from opennki.lang.emit import call, dtype_name, mask_preds
from opennki.lang.tensor import Tensor, align


def need_hbm(value: Any, what: str) -> Tensor:
    """The HBM tensor that a transfer needs."""
    if not isinstance(value, Tensor):
        fix = (
            "pass the array as an argument of the kernel, or embed it with nl.shared_constant"
            if isinstance(value, np.ndarray)
            else ""
        )
        raise NkiTypeError(
            f"{what} is {type(value).__name__}",
            rule=f"{what} is a tensor in HBM, or an index of one",
            fix=fix,
        )
    if value.on_chip:
        raise make(
            "err_unsupported_memory",
            f"{what} is on chip",
            operand=value.describe(),
            fix="nl.copy copies between SBUF and PSUM; nl.load and nl.store move between HBM and SBUF",
        )
    return value


def _check_indirect(value: Tensor, what: str) -> None:
    """An index tile stands for the partition dimension, so nothing else may vary along it."""
    dims = value.access.dims
    if any(d.dyn is not None and d.dyn.size > 1 for d in dims) and any(
        d.strides and d.strides[0] for d in dims
    ):
        raise make(
            "err_indirect_indices_free_dim",
            f"{what}: an index tile beside an index that varies along the partitions",
            operand=value.describe(),
        )


def _two_dims(access: Access) -> Access:
    shape = access.shape
    return access if len(shape) > 1 else view.reshape(access, (shape[0] if shape else 1, 1))


def _check_partitions(shape: tuple[int, ...], what: str) -> None:
    limit = current().target.partitions
    if shape[0] > limit:
        raise make(
            "err_num_partition_exceed_arch_limit",
            f"{what} has shape {shape}: {shape[0]} partitions, at most {limit}",
            fix="tile the first dimension by nl.tile_size.pmax",
        )


def load(src: Any, mask: Any = None, dtype: Any = None, mode: Any = oob_mode.error) -> Tensor:
    """A new SBUF tile with the elements of an HBM tensor or index; (n, 1) for one dimension, (1, 1) for
    one element.

    Elements outside of the mask stay undefined, and with mode=oob_mode.skip rows whose runtime index is
    outside. Raises err_unsupported_memory, err_num_partition_exceed_arch_limit,
    err_indirect_indices_free_dim.
    """
    src = need_hbm(src, "nl.load: src")
    _check_indirect(src, "nl.load")
    access = _two_dims(src.access)
    _check_partitions(access.shape, "the tile of nl.load")
    kind = access.dtype if dtype is None else dtype_name(dtype)
    builder = current()
    tile = Tensor.of(builder.alloc(access.shape, kind, "sbuf", temporary=True))
    call("dma_copy", (), {"dst": tile, "src": Tensor(access, 0, src.bounds), "mask": mask, "oob_mode": mode})
    found = mask_preds(mask)
    if found is not None:
        preds, rank = found
        tile.mask = tuple(align(p, rank, len(access.shape)) for p in preds)
    return tile


def store(dst: Any, value: Any, mask: Any = None, mode: Any = oob_mode.error) -> None:
    """Write a tile or a number to an HBM tensor or index, cast to its dtype and broadcast to its shape.

    Raises err_unsupported_memory, err_store_dst_shape_smaller_than_other_shape,
    err_indirect_indices_free_dim.
    """
    dst = need_hbm(dst, "nl.store: dst")
    _check_indirect(dst, "nl.store")
    if ops.is_number(value):
        one = call("memset", ((1, 1), ops.plain_number(value), dst.access.dtype), {})
        access = _two_dims(dst.access)
        source = Tensor(view.broadcast(view.reshape(one.access, (1,) * len(access.shape)), access.shape))
        call("dma_copy", (), {"dst": Tensor(access, 0, dst.bounds), "src": source, "mask": mask, "oob_mode": mode})
        return
    target, source = _source(dst, value, "nl.store", mask)
    call("dma_copy", (), {"dst": target, "src": source, "mask": mask, "oob_mode": mode})


def _source(dst: Tensor, value: Any, api: str, mask: Any) -> tuple[Tensor, Tensor]:
    """(destination, source) of one shape, the source in SBUF."""
    value = ops.need_tile(value, f"{api}: value")
    if value.access.space == "psum":
        valid = ops.defined(value)
        copied = call(
            "tensor_copy", (value,), {"mask": mask if valid is None and value.shape == dst.shape else valid}
        )
        value = Tensor(copied.access, 0)
    if value.shape == dst.shape:
        return dst, value
    given, wanted = value.shape, dst.shape
    if [n for n in given if n != 1] == [n for n in wanted if n != 1]:
        if any(True for _ in dst.access.dynamic()):
            return dst, value.reshape(wanted)
        return Tensor(view.reshape(dst.access, given), 0, dst.bounds), value
    if value.size == dst.size and given[0] == wanted[0]:
        return dst, value.reshape(wanted)
    for lead in (
        (1,) * (len(wanted) - len(given)) + given,
        given[:1] + (1,) * (len(wanted) - len(given)) + given[1:],
    ):
        if len(lead) == len(wanted) and all(a in (1, b) for a, b in zip(lead, wanted, strict=True)):
            return dst, Tensor(view.broadcast(view.reshape(value.access, lead), wanted))
    raise make(
        "err_store_dst_shape_smaller_than_other_shape",
        f"{api}: a value of shape {given} is stored to {dst.describe()}",
    )


def load_transpose2d(src: Any, mask: Any = None, dtype: Any = None) -> Tensor:
    """A new SBUF tile (n, m) from an HBM tensor or index (m, n), n at most 128. The mask counts the
    dimensions of src. A runtime index of one element shifts src; an index tile that names rows is refused.
    """
    src = need_hbm(src, "nl.load_transpose2d: src")
    if len(src.shape) != 2:
        raise make(
            "err_exceed_max_supported_dimension",
            f"nl.load_transpose2d of {len(src.shape)} dimensions, expected 2",
            operand=src.describe(),
        )
    if any(index.size > 1 for index in src.access.dynamic()):
        raise make(
            "err_indirect_indices_are_not_supported_with_nki_api",
            "nl.load_transpose2d of rows that an index tile names",
            operand=src.describe(),
        )
    _check_partitions(src.shape[::-1], "the tile of nl.load_transpose2d")
    return call("dma_transpose", (src,), {"mask": mask, "dtype": dtype})  # type: ignore[no-any-return]


def atomic_rmw(dst: Any, value: Any, op: Any, mask: Any = None) -> None:
    """dst = dst + value in HBM, where dst is indexed by an index tile [N, 1] in SBUF."""
    dst = need_hbm(dst, "nl.atomic_rmw: dst")
    try:
        name = scalar.resolve(op)
    except TypeError as exc:
        raise NkiTypeError(f"nl.atomic_rmw: {exc}", rule="the operator is np.add") from None
    if name != "add":
        raise NkiValueError(
            f"nl.atomic_rmw with {name}",
            rule="the operator is np.add",
            why="the DMA engines accumulate by addition only",
        )
    if not any(True for _ in dst.access.dynamic()):
        raise NkiValueError(
            "nl.atomic_rmw without a runtime index",
            operand=dst.describe(),
            rule="dst is indexed by an index tile [N, 1] in SBUF",
            fix="load, add and store instead",
        )
    _check_indirect(dst, "nl.atomic_rmw")
    target, source = _source(dst, value, "nl.atomic_rmw", mask)
    call("dma_copy", (), {"dst": target, "src": source, "mask": mask, "dst_rmw_op": "add"})
