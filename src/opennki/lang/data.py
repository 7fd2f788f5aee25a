"""Operations of the language on tiles and values: copy, broadcast, selection, matmul, transpose, random
numbers, facts of the target.

Source: api_legacy neuronxcc.nki.language.
"""

from __future__ import annotations

import operator
from math import prod
from typing import Any

import numpy as np

from opennki import settings
from opennki.errors import NkiTypeError, NkiValueError, caller, make
from opennki.ir.affine import Pred
from opennki.ir.build import current, maybe_current
from opennki.ir.nodes import Access
from opennki.isa import dtypes
from opennki.isa.target import FALLBACK, Target, resolve
from opennki.lang import ops
from opennki.lang.create import fill, ndarray, shape_of
from opennki.lang.emit import call
from opennki.lang.index import Condition, Index, Mask
from opennki.lang.ops import need_tile
from opennki.lang.tensor import Tensor


# ---- copies and views ----
def copy(src: Any, mask: Any = None, dtype: Any = None) -> Tensor:
    """A copy of an on-chip tile, in SBUF unless it is assigned to a PSUM tensor."""
    src = need_tile(src, "nl.copy: src")
    if any(True for _ in src.access.dynamic()):
        raise make("err_copy_dynamic_indirect_indices_not_natively_supported", f"nl.copy of {src.describe()}")
    return call("tensor_copy", (src,), {"mask": mask, "dtype": dtype})  # type: ignore[no-any-return]


def broadcast_to(src: Any, shape: Any) -> Tensor:
    """A new SBUF tile with src repeated by NumPy's rules, over partitions too; src itself if it has the
    shape already.
    """
    sizes, _ = shape_of(shape)
    if isinstance(src, Tensor) and not src.on_chip:
        return src.broadcast_to(sizes)
    src = need_tile(src, "nl.broadcast_to: src")
    if src.shape == sizes:
        return src
    if len(src.shape) > len(sizes) or not all(
        n in (1, m) for n, m in zip(src.shape[::-1], sizes[::-1], strict=False)
    ):
        raise NkiValueError(
            f"nl.broadcast_to of {src.describe()} to {sizes}",
            rule="a dimension is broadcast only from size 1, dimensions are counted from the last",
        )
    lead = (1,) * (len(sizes) - len(src.shape))
    wide = ops.broadcast_tile(src.reshape(lead + src.shape) if lead else src, sizes)
    if wide.access.alloc is not src.access.alloc and wide.access.is_whole:
        return wide
    return call("tensor_copy", (wide,), {"mask": ops.defined(wide)})  # type: ignore[no-any-return]


def expand_dims(data: Any, axis: Any) -> Tensor:
    """View with dimensions of size 1 more."""
    if not isinstance(data, Tensor):
        raise NkiTypeError(f"nl.expand_dims of {type(data).__name__}", rule="data is a tile")
    return data.expand_dims(axis)


def static_cast(data: Any, dtype: Any) -> Any:
    """A tile, array or number in another dtype; works outside of kernels on arrays."""
    if isinstance(data, Tensor):
        return ops.cast(data, dtype)
    try:
        target = dtypes.storage(dtypes.canonical(dtype))
    except TypeError as exc:
        raise NkiTypeError(
            f"nl.static_cast: {exc}", rule="a dtype is one of nl.float32, nl.bfloat16, ..., or its NumPy equivalent"
        ) from None
    if dtypes.canonical(dtype) == "bool":
        target = np.dtype(np.bool_)
    return (
        np.asarray(data).astype(target) if isinstance(data, (np.ndarray, list, tuple)) else target.type(data)
    )


# ---- selection and gathering ----
def where(condition: Any, x: Any, y: Any, dtype: Any = None, mask: Any = None) -> Tensor:
    """x where the condition is nonzero, y elsewhere; the shapes broadcast together.

    condition: a tile, or a comparison of index expressions. x, y: tiles or numbers. Result: the promoted
    dtype of x and y unless dtype is given.
    """
    tiles = [v for v in (x, y) if isinstance(v, Tensor)]
    for value, what in ((x, "x"), (y, "y")):
        if not ops.is_number(value):
            need_tile(value, f"nl.where: {what}")
    if isinstance(condition, (Mask, Condition, bool, np.bool_)):
        condition = _mask_tile(condition, tiles)
    condition = need_tile(condition, "nl.where: condition")
    shape = condition.shape
    for tile in tiles:
        shape = ops.joint_shape(shape, tile.shape, "nl.where")
    kind = (
        dtype
        if dtype is not None
        else dtypes.promote(
            *(
                v.access.dtype
                if isinstance(v, Tensor)
                else "int32"
                if isinstance(v, Index)
                else dtypes.weak(v)
                for v in (x, y)
            )
        )
    )
    operands, psum = [], 0
    for value in (condition, x, y):
        if not isinstance(value, Tensor):
            operands.append(ops.plain_number(value))
            continue
        value = ops.broadcast_tile(value, shape)
        if value.access.space == "psum":
            psum += 1
            if psum > 1:
                value = call("tensor_copy", (value,), {"mask": ops.defined(value)})
        operands.append(value)
    return call("select", tuple(operands), {"dtype": kind, "mask": mask})  # type: ignore[no-any-return]


def _mask_tile(condition: Any, tiles: list[Tensor]) -> Tensor:
    """A comparison of index expressions as a tile of 0 and 1."""
    shape: tuple[int, ...] = condition.shape if isinstance(condition, Mask) else ()
    for tile in tiles:
        shape = ops.joint_shape(shape, tile.shape, "nl.where") if shape else tile.shape
    if not shape:
        raise NkiTypeError("nl.where of a condition and two numbers", rule="at least one operand is a tile")
    made = ndarray(shape, "uint8")
    fill(made, 0)
    fill(made, 1, condition)
    return made


def gather_flattened(data: Any, indices: Any, mask: Any = None, dtype: Any = None) -> Tensor:
    """Elements of each partition by index: result[p, i...] = flattened data[p][indices[p, i...]]; indices
    are uint32.
    """
    return call(
        "gather_flattened",
        (need_tile(data, "nl.gather_flattened: data"), need_tile(indices, "nl.gather_flattened: indices")),  # type: ignore[no-any-return]
        {"mask": mask, "dtype": dtype},
    )


# ---- Tensor Engine ----
def matmul(x: Any, y: Any, transpose_x: Any = False, mask: Any = None) -> Tensor:
    """x @ y, or x.T @ y with transpose_x, into PSUM in float32.

    x: [M, K], or [K, M] with transpose_x; y: [K, N]; K and M at most 128, N at most 512. Without transpose_x,
    x is transposed on the Tensor Engine first
    (err_transpose_on_tensor_engine_not_allowed_in_allocated_kernel).
    """
    x, y = need_tile(x, "nl.matmul: x"), need_tile(y, "nl.matmul: y")
    inner = x.shape[0] if transpose_x else prod(x.shape[1:])
    if inner != y.shape[0]:
        axis = "partitions" if transpose_x else "free elements"
        raise NkiValueError(
            f"nl.matmul of x {x.shape} and y {y.shape}" + (" with transpose_x" if transpose_x else ""),
            rule=f"the {axis} of x and the partitions of y are the contracted dimension, of one size",
        )
    return call("nc_matmul", (_in_sbuf(x) if transpose_x else _transposed(x), _in_sbuf(y)), {"mask": mask})  # type: ignore[no-any-return]


def _in_sbuf(x: Tensor) -> Tensor:
    if x.access.space != "psum":
        return x
    a = x.access
    plain = Tensor(Access(a.alloc, a.dtype, a.dims, a.shape, a.view), x.block, x.bounds, x.mask)
    copied = call("tensor_copy", (plain,), {"mask": ops.defined(x)})
    return _with_operand_mask(copied, a.mask)


def _with_operand_mask(x: Tensor, preds: tuple[Pred, ...]) -> Tensor:
    if not preds:
        return x
    a = x.access
    return Tensor(Access(a.alloc, a.dtype, a.dims, a.shape, a.view, preds), x.block, x.bounds, x.mask)


def _transposed(x: Tensor) -> Tensor:
    """x with partition and free dimension exchanged, in SBUF; operand masks follow."""
    builder = current()
    builder.not_allocated_directly(
        "err_transpose_on_tensor_engine_not_allowed_in_allocated_kernel",
        "nl.matmul without transpose_x",
        caller(),
    )
    x = _in_sbuf(x)
    a = x.access
    if len(a.shape) > 2:
        x = x.reshape((a.shape[0], prod(a.shape[1:])))
    preds = a.mask
    if preds:
        if len(a.shape) > 2:
            raise make(
                "err_exceed_max_supported_dimension",
                "nl.matmul: x has an operand mask and more than two dimensions",
                operand=x.describe(),
            )
        x = Tensor(Access(a.alloc, a.dtype, a.dims, a.shape, a.view), x.block, x.bounds, x.mask)
    turned = call("nc_transpose", (x,), {"mask": _operand_mask(preds, x)})
    moved = call("tensor_copy", (turned,), {"mask": ops.defined(turned)})
    return _with_operand_mask(moved, tuple(Pred(p.expr, p.strides[::-1]) for p in preds))


def _operand_mask(preds: tuple[Pred, ...], x: Tensor) -> Mask | None:
    """What of x is read: elements outside an operand mask may be undefined."""
    chosen = preds or x.mask
    return Mask(chosen, x.shape) if chosen else None


def transpose(x: Any, dtype: Any = None, mask: Any = None) -> Tensor:
    """The transpose of a 2-dimensional tile of at most 128 x 128, in PSUM."""
    x = need_tile(x, "nl.transpose: x")
    if len(x.shape) != 2:
        raise make(
            "err_exceed_max_supported_dimension",
            f"nl.transpose of {len(x.shape)} dimensions, expected 2",
            operand=x.describe(),
        )
    most = current().target.pe_rows
    if max(x.shape) > most:
        raise make(
            "err_size_of_dimension_exceed_arch_limit",
            f"nl.transpose of shape {x.shape}, at most {most} x {most}",
            operand=x.describe(),
        )
    return call("nc_transpose", (_in_sbuf(x),), {"dtype": dtype, "mask": mask})  # type: ignore[no-any-return]


# ---- random numbers ----
def rand(shape: Any, dtype: Any = np.float32) -> Tensor:
    """A tile of random numbers, uniform in [0, 1)."""
    sizes, partition = shape_of(shape)
    if partition:
        raise make(
            "err_leading_dimension_of_tensor_must_be_partition",
            f"nl.rand of {shape}, whose dimension {partition} is the partition dimension",
        )
    return call("rand", (sizes,), {"dtype": dtype})  # type: ignore[no-any-return]


def random_seed(seed: Any, mask: Any = None) -> None:
    """Set the seed of the random numbers that follow: a number, or a tile of one element."""
    call(
        "random_seed",
        (need_tile(seed, "nl.random_seed: seed") if isinstance(seed, Tensor) else seed,),
        {"mask": mask},
    )


def dropout(x: Any, rate: Any, dtype: Any = None, mask: Any = None) -> Tensor:
    """x with elements set to 0 with probability `rate`: a number, a tile of one element, or [P, 1]; the
    others are not scaled.
    """
    x = need_tile(x, "nl.dropout: x")
    if isinstance(rate, Tensor):
        rate = need_tile(rate, "nl.dropout: rate")
        if rate.size == 1 and x.shape[0] > 1:
            rate = ops.broadcast_tile(rate, (x.shape[0], *rate.shape[1:]))
    return call("dropout", (x, rate), {"dtype": dtype, "mask": mask})  # type: ignore[no-any-return]


# ---- programs ----
def all_reduce(
    x: Any,
    op: Any,
    program_axes: Any,
    dtype: Any = None,
    mask: Any = None,
    parallel_reduce: Any = True,
    asynchronous: Any = False,
) -> Tensor:
    """x reduced over the programs along axes of the launch grid; every program gets the result."""
    return call(
        "all_reduce",
        (need_tile(x, "nl.all_reduce: x"), op, program_axes_of(program_axes)),  # type: ignore[no-any-return]
        {
            "dtype": dtype,
            "mask": mask,
            "parallel_reduce": bool(parallel_reduce),
            "asynchronous": bool(asynchronous),
        },
    )


def program_axes_of(axes: Any) -> tuple[int, ...]:
    """Grid axes as numbers: integers, or the program ids along them (as public kernels write them)."""
    grid = current().grid
    out = []
    for axis in tuple(axes) if isinstance(axes, (tuple, list)) else (axes,):
        if isinstance(axis, Index):
            variables = axis.base.variables()
            if len(variables) != 1 or variables[0] not in grid:
                raise NkiTypeError(
                    f"program axis {axis!r}",
                    rule="a program axis is an integer, or nl.program_id of that axis",
                )
            out.append(grid.index(variables[0]))
            continue
        number = operator.index(axis)
        if not 0 <= number < max(1, len(grid)):
            raise NkiValueError(
                f"program axis {number} of a grid of {len(grid)} dimensions",
                rule="a program axis is one of the launch grid",
            )
        out.append(number)
    return tuple(out)


def barrier(program_axes: Any) -> None:
    """Wait for all programs along the axes."""
    call("barrier", (), {"program_axes": program_axes_of(program_axes)})


def device_print(prefix: Any, x: Any, mask: Any = None) -> None:
    """Print a prefix and the values of a tile, in simulation only."""
    if not isinstance(x, Tensor):
        raise NkiTypeError(
            f"nl.device_print of {type(x).__name__}",
            rule="x is a tile",
            fix="use print for values known at trace time",
        )
    call("device_print", (str(prefix), Tensor(x.access, 0, x.bounds, x.mask)), {"mask": mask})


# ---- facts ----
def target_record() -> Target:
    """The target of the kernel that is being traced, else that of the settings."""
    builder = maybe_current()
    return (
        builder.target
        if builder is not None
        else resolve(settings.current().platform_target_override or FALLBACK)
    )


class TileSize:
    """Limits of tiles on the current target, in elements or bytes per partition."""

    @property
    def pmax(self) -> int:
        """Most partitions of a tile."""
        return target_record().partitions

    @property
    def psum_fmax(self) -> int:
        """Float32 elements per partition of a PSUM bank."""
        return target_record().psum_fmax

    @property
    def gemm_stationary_fmax(self) -> int:
        """Most free elements of the stationary operand of a matmul."""
        return target_record().gemm_stationary_fmax

    @property
    def gemm_moving_fmax(self) -> int:
        """Most free elements of the moving operand of a matmul."""
        return target_record().gemm_moving_fmax

    @property
    def bn_stats_fmax(self) -> int:
        """Most free elements of bn_stats."""
        return target_record().bn_stats_fmax

    @property
    def psum_min_align(self) -> int:
        """Alignment of an address in PSUM, bytes."""
        return target_record().psum_min_align

    @property
    def sbuf_min_align(self) -> int:
        """Alignment of an address in SBUF, bytes."""
        return target_record().sbuf_min_align

    @property
    def total_available_sbuf_size(self) -> int:
        """SBUF bytes per partition that a kernel can use."""
        return target_record().sbuf_usable_bytes


tile_size = TileSize()


class fp32:
    """Limits of float32."""

    min = float(np.finfo(np.float32).min)
    max = float(np.finfo(np.float32).max)


class bfp16:
    """Limits of bfloat16."""

    min = float(dtypes.finfo("bfloat16").min)
    max = float(dtypes.finfo("bfloat16").max)
