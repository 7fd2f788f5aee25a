"""Views: how an index expression on a tensor becomes an `Access` (indexing, reshape, broadcast, reinterpretation)."""
from __future__ import annotations

import operator
from math import prod
from typing import Any

from opennki.errors import NkiIndexError, NkiTypeError, NkiValueError, make
from opennki.ir.affine import Affine, constant
from opennki.ir.build import maybe_current
from opennki.ir.nodes import Access, Dim
from opennki.lang.index import Index, broadcast_shapes
from opennki.lang.ranges import ds

ZERO = Affine()


class New:
    """What one dimension of a view is indexed with: base + sum(strides * iota) [+ dyn], and the bound that was not proven."""

    __slots__ = ("base", "dyn", "strides")

    def __init__(self, base: Affine, strides: tuple[int, ...], dyn: Access | None = None) -> None:
        self.base, self.strides, self.dyn = base, strides, dyn


def scalar_base(value: Any, size: int) -> Affine:
    """Affine value of an int or scalar index; negative ints count from the end."""
    if isinstance(value, Index):
        return value.base
    number = operator.index(value)
    return constant(number + size if number < 0 else number)


def span(key: Any, size: int, axis: int) -> tuple[Affine, int, int]:
    """(start, length, step) of a slice or ds over a dimension."""
    if isinstance(key, ds):
        start, length, step = key.start, key.size, 1
        base = start.base if isinstance(start, Index) else constant(operator.index(start))
        return base, length, step
    step = 1 if key.step is None else operator.index(key.step)
    if step <= 0:
        raise NkiIndexError(f"slice step {step} in dimension {axis}", rule="the step of a slice is positive")
    start = 0 if key.start is None else key.start
    stop = size if key.stop is None else key.stop
    if not isinstance(start, Index) and not isinstance(stop, Index):
        lo, hi = operator.index(start), operator.index(stop)
        lo = lo + size if lo < 0 else lo
        hi = hi + size if hi < 0 else hi
        if hi > size and key.stop is not None:
            raise make("err_tensor_access_out_of_bound",
                       f"slice {lo}:{hi} of dimension {axis}, which has {size} elements")
        return constant(lo), max(0, -(-(hi - lo) // step)), step
    if not isinstance(stop, Index) and operator.index(stop) < 0:
        stop = stop + size
    length = operator.index(stop - start)
    base = start.base if isinstance(start, Index) else constant(operator.index(start))
    return base, max(0, -(-length // step)), step


def compose(access: Access, news: list[New], shape: tuple[int, ...]) -> Access:
    """Index an access: `news` has one entry per dimension of its tile, `shape` is the new tile."""
    rank = len(shape)
    dims = []
    for dim in access.dims:
        base, strides, dyn = dim.base, [0] * rank, None
        for coefficient, new in zip(dim.strides, news, strict=True):
            if not coefficient:
                continue
            if new.base.terms or new.base.const:
                base = base.add(new.base.scale(coefficient))
            for k, s in enumerate(new.strides):
                strides[k] += coefficient * s
            if new.dyn is not None:
                if coefficient != 1 or dyn is not None or dim.dyn is not None:
                    raise NkiValueError("a runtime index into a strided or already indirect view",
                                        rule="a runtime index counts whole rows of a tensor",
                                        fix="index the original tensor")
                dyn = new.dyn
        if dim.dyn is not None:
            dyn = dim.dyn if dim.dyn.size == 1 else compose(dim.dyn, [news[0], New(ZERO, (0,) * rank)], _rows(shape, news[0]))
        dims.append(Dim(base, tuple(strides), dyn))
    return Access(access.alloc, access.dtype, tuple(dims), shape, access.view, access.mask)


def _rows(shape: tuple[int, ...], new: New) -> tuple[int, ...]:
    return (shape[0], *(1 for _ in shape[1:])) if any(new.strides) else (1,) * len(shape)


def check_bound(new: New, size: int, shape: tuple[int, ...], axis: int) -> bool:
    """True when an index is proven inside its dimension; raises when it is outside for certain and cannot be masked."""
    if new.dyn is not None:
        return True
    builder = maybe_current()
    lo, hi = new.base.range(builder.ranges if builder else {})
    for s, n in zip(new.strides, shape, strict=True):
        if s > 0:
            hi += s * (n - 1)
        elif s < 0:
            lo += s * (n - 1)
    return (lo >= 0 and hi < size) or 0 in shape


def outside(bounds: tuple[tuple[New, int, int, tuple[int, ...]], ...], tensor: str, operand: str, loc: Any) -> None:
    """Raise for the first of bounds that are known to be broken, of an operand that is a part of a tensor."""
    for new, size, axis, shape in bounds:
        builder = maybe_current()
        lo, hi = new.base.range(builder.ranges if builder else {})
        for s, n in zip(new.strides, shape, strict=True):
            lo, hi = lo + min(0, s * (n - 1)), hi + max(0, s * (n - 1))
        raise make("err_tensor_access_out_of_bound",
                   f"dimension {axis} of {tensor} has {size} elements and is indexed from {lo} to {hi}", loc=loc, operand=operand)


def same_place(a: Access, b: Access) -> bool:
    """True when two accesses certainly address the same elements in the same order."""
    if a is b:
        return True
    return (a.alloc is b.alloc and a.dtype == b.dtype and a.shape == b.shape and a.view_shape == b.view_shape
            and not a.mask and not b.mask
            and all(x.strides == y.strides and x.dyn is y.dyn is None and x.base.key() == y.base.key()
                    for x, y in zip(a.dims, b.dims, strict=True)))


def reshape(access: Access, shape: tuple[int, ...]) -> Access:
    """The tile in another shape with the same elements in row-major order, without a copy."""
    if prod(shape) != access.size:
        raise NkiValueError(f"cannot reshape {access.size} elements of shape {access.shape} to {shape}",
                            rule="a reshape keeps the number of elements")
    if access.is_whole:
        rank = len(shape)
        dims = tuple(Dim(ZERO, tuple(int(i == j) for j in range(rank))) for i in range(rank))
        return Access(access.alloc, access.dtype, dims, shape, shape, access.mask)
    regrouped = _regroup(access, shape)
    if regrouped is None:
        regrouped = _regroup(linear(access), shape)
    if regrouped is None:
        raise NkiValueError(f"a view of shape {access.shape} cannot be reshaped to {shape} without a copy",
                            rule="the dimensions that a reshape joins are contiguous in memory",
                            fix="copy the tile with nl.copy first")
    return regrouped


def linear(access: Access) -> Access:
    """The same access on the tensor's memory seen as one dimension."""
    view = access.view_shape
    base, strides = ZERO, [0] * len(access.shape)
    step = 1
    for dim, size in zip(reversed(access.dims), reversed(view), strict=True):
        if dim.dyn is not None:
            raise NkiValueError("a tile with runtime indices cannot be reshaped", rule="a reshape keeps one affine access",
                                fix="load it into a tile first")
        base = base.add(dim.base.scale(step))
        for j, s in enumerate(dim.strides):
            strides[j] += s * step
        step *= size
    return Access(access.alloc, access.dtype, (Dim(base, tuple(strides)),), access.shape, (prod(view),), access.mask)


def _regroup(access: Access, shape: tuple[int, ...]) -> Access | None:
    """Match old and new dimensions group by group; None when a joined group is not contiguous."""
    old = list(access.shape)
    new_strides: list[list[int]] = [[] for _ in access.dims]
    i = 0
    j = 0
    while j < len(shape) or i < len(old):
        group_old = [i] if i < len(old) else []
        group_new = [j] if j < len(shape) else []
        n_old = old[i] if i < len(old) else 1
        n_new = shape[j] if j < len(shape) else 1
        i, j = i + len(group_old), j + len(group_new)
        while n_old != n_new:
            if n_old < n_new:
                if i >= len(old):
                    return None
                group_old.append(i)
                n_old *= old[i]
                i += 1
            else:
                if j >= len(shape):
                    return None
                group_new.append(j)
                n_new *= shape[j]
                j += 1
        for d, dim in enumerate(access.dims):
            unit = _joined_stride([(old[k], dim.strides[k]) for k in group_old])
            if unit is None:
                return None
            step = 1
            out = []
            for k in reversed(group_new):
                out.append(unit * step if shape[k] > 1 else 0)
                step *= shape[k]
            new_strides[d] += reversed(out)
    dims = tuple(Dim(dim.base, tuple(s), dim.dyn) for dim, s in zip(access.dims, new_strides, strict=True))
    return Access(access.alloc, access.dtype, dims, shape, access.view, access.mask)


def _joined_stride(group: list[tuple[int, int]]) -> int | None:
    """Stride of the innermost of dimensions that are joined, None when they do not follow each other."""
    unit: int | None = None
    step = 0
    for n, s in reversed(group):
        if n == 1:
            continue
        if unit is None:
            unit, step = s, s * n
        elif s != step:
            return None
        else:
            step *= n
    return unit or 0


def broadcast(access: Access, shape: tuple[int, ...]) -> Access:
    """The tile repeated along dimensions of size one, without a copy."""
    rank = len(shape)
    if len(access.shape) > rank or broadcast_shapes(access.shape, shape) != shape:
        raise NkiValueError(f"cannot broadcast shape {access.shape} to {shape}",
                            rule="a dimension is broadcast only from size 1")
    lead = rank - len(access.shape)
    dims = tuple(Dim(d.base, (0,) * lead + tuple(0 if n == 1 else s for s, n in zip(d.strides, access.shape, strict=True)), d.dyn)
                 for d in access.dims)
    return Access(access.alloc, access.dtype, dims, shape, access.view, access.mask)


def reinterpret(access: Access, dtype: str, old_size: int, new_size: int) -> Access:
    """The same bytes read as another dtype."""
    if old_size == new_size:
        return Access(access.alloc, dtype, access.dims, access.shape, access.view, access.mask)
    if not access.is_whole:
        raise NkiTypeError(f"a part of a tensor cannot be viewed as {dtype}",
                           rule="a view with another item size is of a whole tensor", fix="view the tensor, then index it")
    *lead, last = access.view_shape
    if last * old_size % new_size:
        raise NkiValueError(f"{last} elements of {old_size} bytes are no whole number of {dtype}",
                            rule="the last dimension holds a whole number of elements of the new dtype")
    shape = (*lead, last * old_size // new_size)
    rank = len(shape)
    dims = tuple(Dim(ZERO, tuple(int(i == j) for j in range(rank))) for i in range(rank))
    return Access(access.alloc, dtype, dims, shape, shape, access.mask)
