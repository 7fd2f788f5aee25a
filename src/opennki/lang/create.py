"""Making tensors: nl.ndarray, zeros, ones, full, constants, random tiles.

On-chip tensors have dimensions (block..., partition, free...); the partition dimension is the one marked with
`par_dim`, else the first. Source: api_legacy section 1 and neuronxcc.nki.language.
"""

from __future__ import annotations

import operator
from math import prod
from typing import Any

import numpy as np

from opennki.errors import NkiTypeError, NkiValueError, make, warn
from opennki.ir.build import current
from opennki.isa import dtypes
from opennki.lang.emit import call, dtype_name
from opennki.lang.index import Index
from opennki.lang.memory import Buffer, buffer_of
from opennki.lang.placement import place
from opennki.lang.ranges import Grid, mgrid
from opennki.lang.tensor import Tensor

# experimental flag of the vendor's decorators that lifts the scope rule of shared_hbm
SHARED_HBM_ANYWHERE = "skip-non-top-level-shared-hbm-check"


class ParDim(int):
    """A size in a shape that is the partition dimension."""

    def __repr__(self) -> str:
        return f"par_dim({int(self)})"


def par_dim(size: Any) -> ParDim:
    """Mark a size as the partition dimension of a shape."""
    return ParDim(operator.index(size))


def shape_of(shape: Any) -> tuple[tuple[int, ...], int]:
    """(sizes, position of the partition dimension) of a shape argument."""
    dims = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    marked = [i for i, d in enumerate(dims) if isinstance(d, ParDim)]
    if len(marked) > 1:
        raise NkiValueError(
            f"shape {dims} marks {len(marked)} dimensions with par_dim",
            rule="a tensor has one partition dimension",
        )
    sizes = []
    for d in dims:
        if isinstance(d, (float, str)) or not hasattr(d, "__index__"):
            raise NkiTypeError(
                f"shape {dims} holds {d!r}",
                rule="the dimensions of a tensor are integers",
                fix="use // instead of / for sizes",
            )
        size = operator.index(d)
        if size < 1:
            raise NkiValueError(
                f"shape {dims} has a dimension of size {size}", rule="each dimension is at least 1"
            )
        sizes.append(size)
    return tuple(sizes), marked[0] if marked else 0


def ndarray(shape: Any, dtype: Any, buffer: Any = None, name: str = "") -> Tensor:
    """A new tensor with undefined contents, in SBUF unless `buffer` says otherwise.

    Raises err_num_partition_exceed_arch_limit, err_shared_hbm_must_in_kernel_level; NkiValueError for an
    on-chip tensor of one dimension, and for a placement against the rules (see `lang.placement`). A PSUM
    tile larger than a bank is a warning.
    """
    builder = current()
    where = buffer_of(buffer)
    sizes, pdim = shape_of(shape)
    kind = dtype_name(dtype)
    if where.space in ("sbuf", "psum"):
        _check_on_chip(sizes, pdim, kind, where, name)
    else:
        pdim = 0
        flags = builder.options.get("experimental_flags", ())
        if where.space == "shared_hbm" and not builder.in_kernel_scope() and SHARED_HBM_ANYWHERE not in flags:
            raise make(
                "err_shared_hbm_must_in_kernel_level",
                f"a shared_hbm tensor {name or ''}{sizes} is made in a loop, branch or callee",
            )
    table = place(builder, sizes, pdim, kind, where, str(name))
    return Tensor.of(builder.alloc(sizes, kind, where.space, name=str(name), pdim=pdim, placement=table))


def _check_on_chip(sizes: tuple[int, ...], pdim: int, kind: str, where: Buffer, name: str) -> None:
    target = current().target
    if len(sizes) - pdim < 2:
        raise NkiValueError(
            f"a tensor {name}{sizes} in {where.space.upper()} without a free dimension",
            rule="an on-chip tensor has a partition dimension and at least one free dimension",
            why="SBUF and PSUM are addressed by partition and byte within it",
            fix=(
                f"use ({sizes[pdim]}, 1) for one element per partition, or (1, {sizes[pdim]}) for one "
                f"partition"
            ),
        )
    if sizes[pdim] > target.partitions:
        raise make(
            "err_num_partition_exceed_arch_limit",
            f"the tensor {name}{sizes} has {sizes[pdim]} partitions (dimension {pdim}), at most "
            f"{target.partitions}",
        )
    free = prod(sizes[pdim + 1 :]) * dtypes.itemsize(kind)
    if where.space == "psum" and free > target.psum_bank_bytes:
        warn(
            NkiValueError(
                f"a PSUM tile {name}{sizes[pdim:]} {kind} takes {free} bytes per partition",
                rule=(
                    f"a PSUM bank has {target.psum_bank_bytes} bytes per partition, and a matmul writes "
                    f"one bank"
                ),
                fix=f"tile the free dimension by {target.psum_bank_bytes // dtypes.itemsize(kind)}",
            )
        )


def full(shape: Any, value: Any, dtype: Any, buffer: Any = None, name: str = "", lazy: Any = False) -> Tensor:
    """A new on-chip tensor filled with a number. A directly allocated one has none, unless the compiler may choose where it is filled
    (`lazy`, the undocumented lazy_initialization).

    Raises err_hbm_tensor_with_init_value_not_supported,
    err_tensor_creation_on_scratchpad_with_init_value_not_supported.
    """
    where = buffer_of(buffer)
    if where.space not in ("sbuf", "psum"):
        raise make("err_hbm_tensor_with_init_value_not_supported", f"a filled tensor in {where!r}")
    if where.placement is not None and not lazy:
        raise make(
            "err_tensor_creation_on_scratchpad_with_init_value_not_supported",
            f"a filled tensor with a placement in {where!r}",
        )
    made = ndarray(shape, dtype, buffer, name)
    fill(made, value)
    return made


def fill(into: Tensor, value: Any, mask: Any = None) -> None:
    """Set every element of a tensor, block dimensions included, with one memset."""
    access = into.access
    if into.block:
        # a tile has its partition dimension first: the block dimensions become free ones
        order = (into.block, *(i for i in range(len(access.shape)) if i != into.block))
        into = Tensor(into.permute(*order).access, 0)
    call("memset", (into.shape, _number(value), access.dtype), {"mask": mask}, into=into)


def _number(value: Any) -> Any:
    if isinstance(value, (np.generic, np.ndarray)):
        return value.item()
    if isinstance(value, Index):
        return operator.index(value)
    if isinstance(value, Tensor):
        raise NkiTypeError(
            f"fill value {value.describe()}",
            rule="a tensor is filled with a number",
            fix="make it with nl.ndarray and assign the tile: t[...] = tile",
        )
    return value


def like(a: Any, dtype: Any = None, buffer: Any = None, name: str = "", value: Any = None) -> Tensor:
    """A new tensor with the shape and dtype of `a` (and, on chip, its partition dimension), filled if
    `value` is given.
    """
    if not isinstance(a, Tensor):
        raise NkiTypeError(
            f"{type(a).__name__} has no tensor shape", rule="nl.zeros_like and nl.empty_like take a tensor"
        )
    shape = tuple(ParDim(n) if i == a.block and a.on_chip else n for i, n in enumerate(a.shape))
    kind = a.access.dtype if dtype is None else dtype
    return ndarray(shape, kind, buffer, name) if value is None else full(shape, value, kind, buffer, name)


def shared_constant(constant: Any, dtype: Any = None) -> Tensor:
    """A NumPy array that is known at trace time, as a constant tensor in HBM; equal ones are one tensor."""
    array = np.asarray(constant)
    try:
        given = dtypes.canonical(array.dtype)
    except TypeError as exc:
        raise NkiTypeError(f"nl.shared_constant of {array.dtype}: {exc}", rule="a constant is an array of numbers") from None
    kind = given if dtype is None else dtype_name(dtype)
    stored = (
        np.ascontiguousarray(array).view(dtypes.storage(given))
        if given == "bool"
        else array.astype(dtypes.storage(given))
    )
    if kind != given:
        stored = dtypes.convert(stored, given, kind)
    return Tensor.of(current().constant(np.ascontiguousarray(stored).reshape(array.shape), kind))


def identity(n: Any, dtype: Any = np.uint8) -> Tensor:
    """The n x n identity as a constant in HBM."""
    return shared_constant(np.eye(operator.index(n), dtype=np.float32), dtype)


def gemm_grid(stationary: bool) -> Grid:
    """Index grid of the largest stationary tile, or of the largest moving tile (that of a matmul result)."""
    target = current().target
    free = target.gemm_stationary_fmax if stationary else target.gemm_moving_fmax
    return mgrid[0 : target.partitions, 0:free]  # type: ignore[no-any-return]
