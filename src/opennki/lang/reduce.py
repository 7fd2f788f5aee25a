"""Reductions of the language: max, min, sum, prod, mean, var, all, softmax, rms_norm.

Axes are free dimensions. Values are accumulated in float32 in the order of `isa.reduce` and rounded once.
Source: api_legacy neuronxcc.nki.language.
"""

from __future__ import annotations

from math import prod
from typing import Any

from opennki.errors import NkiTypeError, NkiValueError
from opennki.isa import dtypes
from opennki.lang import ops
from opennki.lang.emit import call, dtype_name
from opennki.lang.index import Mask
from opennki.lang.ops import need_tile
from opennki.lang.tensor import Tensor

F32 = "float32"


def axes_of(x: Tensor, axis: Any, api: str) -> tuple[int, ...]:
    """Sorted free axes of an axis argument: an int, or a tuple or list of them, negative ones from the
    end.
    """
    rank = len(x.shape)
    given = tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)
    if not given or any(isinstance(a, bool) or not hasattr(a, "__index__") for a in given):
        raise NkiTypeError(f"{api}: axis is {axis!r}", rule="axis is an integer or a tuple of integers")
    axes = tuple(sorted(int(a) + rank if int(a) < 0 else int(a) for a in given))
    if axes[0] < 0 or axes[-1] >= rank or len(set(axes)) < len(axes):
        raise NkiValueError(
            f"{api}: axis {axis} of {x.describe()}",
            rule=f"the free axes of this tile are 1 to {rank - 1}, each at most once",
        )
    if axes[0] == 0:
        raise NkiValueError(
            f"{api}: axis 0 of {x.describe()} is the partition dimension",
            rule="the Vector Engine reduces free dimensions",
            why="each of its lanes sees one partition",
            fix="use nki.isa.tensor_partition_reduce, a matmul with ones, or nl.transpose first",
        )
    return axes


def reduce(
    op: str, api: str, x: Any, axis: Any, dtype: Any = None, mask: Any = None, keepdims: Any = False
) -> Tensor:
    """x reduced over free axes by a scalar function; dropped axes unless keepdims, (P, 1) at least."""
    x = need_tile(x, f"{api}: x")
    axes = axes_of(x, axis, api)
    return call("tensor_reduce", (op, x, axes), {"dtype": dtype, "mask": mask, "keepdims": bool(keepdims)})  # type: ignore[no-any-return]


def _float_dtype(x: Tensor, dtype: Any) -> Any:
    return dtype if dtype is not None else F32 if dtypes.is_integer(x.access.dtype) else x.access.dtype


def mean(x: Any, axis: Any, dtype: Any = None, mask: Any = None, keepdims: Any = False) -> Tensor:
    """Arithmetic mean over free axes; float32 for integers unless dtype is given."""
    x = need_tile(x, "nl.mean: x")
    total = reduce("add", "nl.mean", x, axis, F32, mask, keepdims)
    count = prod(x.shape[a] for a in axes_of(x, axis, "nl.mean"))
    return _scaled(total, 1.0 / count, _float_dtype(x, dtype))


def _scaled(x: Tensor, factor: float, dtype: Any) -> Tensor:
    mask = Mask(x.mask, x.shape) if x.mask else None
    return call("tensor_scalar", (x, "multiply", factor), {"dtype": dtype, "mask": mask})  # type: ignore[no-any-return]


def var(x: Any, axis: Any, dtype: Any = None, mask: Any = None) -> Tensor:
    """Variance over free axes, divided by the number of elements as NumPy does; float32 for integers
    unless dtype is given.
    """
    x = need_tile(x, "nl.var: x")
    axes = axes_of(x, axis, "nl.var")
    center = mean(x, axes, F32, mask, keepdims=True)
    away = ops.elementwise("subtract", x, center, F32, mask)
    total = reduce("add", "nl.var", ops.unary("square", away, F32, mask), axes, F32, mask)
    return _scaled(total, 1.0 / prod(x.shape[a] for a in axes), _float_dtype(x, dtype))


def all_true(x: Any, axis: Any, dtype: Any = bool, mask: Any = None) -> Tensor:
    """1 where every element along the axes is nonzero, else 0; bool unless dtype is given."""
    found = reduce("logical_and", "nl.all", x, axis, bool, mask)
    kind = dtype_name(bool if dtype is None else dtype)
    return found if kind == "bool" else ops.cast(found, kind)


def softmax(x: Any, axis: Any, dtype: Any = None, compute_dtype: Any = None, mask: Any = None) -> Tensor:
    """exp(x - max(x)) / sum(exp(x - max(x))) over free axes, in float32; dtype of x unless dtype or
    compute_dtype is given.
    """
    x = need_tile(x, "nl.softmax: x")
    axes = axes_of(x, axis, "nl.softmax")
    kind = (
        dtype if dtype is not None else compute_dtype if compute_dtype is not None else _float_dtype(x, None)
    )
    top = reduce("maximum", "nl.softmax", x, axes, F32, mask, keepdims=True)
    powers = ops.unary("exp", ops.elementwise("subtract", x, top, F32, mask), F32, mask)
    total = reduce("add", "nl.softmax", powers, axes, F32, mask, keepdims=True)
    return ops.elementwise("multiply", powers, _inverse("reciprocal", total), kind, mask)  # type: ignore[no-any-return]


def _inverse(op: str, x: Tensor) -> Tensor:
    return ops.unary(op, x, F32, Mask(x.mask, x.shape) if x.mask else None)  # type: ignore[no-any-return]


def rms_norm(
    x: Any,
    w: Any,
    axis: Any,
    n: Any,
    epsilon: Any = 1e-06,
    dtype: Any = None,
    compute_dtype: Any = None,
    mask: Any = None,
) -> Tensor:
    """x / sqrt(sum(x * x) / n + epsilon) * w over free axes, in float32; n is the number of elements that
    are averaged.

    w: a tile that broadcasts to x, (1, F) for instance, or None. Result: dtype of x unless dtype or
    compute_dtype is given.
    """
    x = need_tile(x, "nl.rms_norm: x")
    axes = axes_of(x, axis, "nl.rms_norm")
    kind = (
        dtype if dtype is not None else compute_dtype if compute_dtype is not None else _float_dtype(x, None)
    )
    total = reduce("add", "nl.rms_norm", ops.unary("square", x, F32, mask), axes, F32, mask, keepdims=True)
    valid = Mask(total.mask, total.shape) if total.mask else None
    shifted = call(
        "tensor_scalar",
        (total, "multiply", 1.0 / float(n)),
        {"op1": "add", "operand1": float(epsilon), "dtype": F32, "mask": valid},
    )
    scaled = ops.elementwise("multiply", x, _inverse("rsqrt", shifted), kind if w is None else F32, mask)
    return scaled if w is None else ops.elementwise("multiply", scaled, w, kind, mask)  # type: ignore[no-any-return]
