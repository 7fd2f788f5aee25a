"""Tensors of an expanded kernel as values, and tiles as slices, windows and gathers of them.

A tensor is an array of its shape in its storage dtype; writing to it makes a new one. Where masked accesses reach past its end, the array
has a margin there (`margins`), so that such a tile is still a window with an offset. Dimensions that are no windows are gathered and
scattered: reads outside give some element, writes outside are dropped.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from opennki.bind.inline_values import bitcast, known, to_jax
from opennki.ir.affine import Affine, FloorDiv, Pred, Range, Var, narrowed
from opennki.ir.nodes import Access, Alloc, DoWhile, For, If, Instr, Kernel, Stmt
from opennki.ir.verify import accesses
from opennki.isa import dtypes

Index = Any  # int, or an int32 scalar of JAX
_KNOWN_UP_TO = 1 << 16  # elements up to which a tensor with known numbers is written in NumPy
_WIDEST_MARGIN = 4096  # elements of one dimension


def value_of(expr: Affine, env: Mapping[Var, Index]) -> Index:
    """An affine expression under an assignment of its variables."""
    value: Index = expr.const
    for atom, c in expr.terms:
        value = value + c * (value_of(atom.of, env) // atom.by if isinstance(atom, FloorDiv) else env[atom])
    return value


def index_values(base: Index, strides: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    """base + sum(strides * iota) over a shape; a NumPy array where base is a number."""
    rank = len(shape)
    total: Any = np.zeros((1,) * rank, np.int32)
    for j, s in enumerate(strides):
        if s:
            total = total + (s * np.arange(shape[j], dtype=np.int32)).reshape([-1 if k == j else 1 for k in range(rank)])
    return jnp.broadcast_to(base + total, shape) if isinstance(base, jax.Array) else np.broadcast_to(base + total, shape)


def holds(pred: Pred, env: Mapping[Var, Index], shape: tuple[int, ...]) -> Any:
    """Truth values of a predicate over a shape."""
    return index_values(value_of(pred.expr, env), pred.strides or (0,) * len(shape), shape) >= 0


def all_hold(preds: tuple[Pred, ...], env: Mapping[Var, Index], shape: tuple[int, ...]) -> Any:
    """Truth values of a conjunction over a shape."""
    truth: Any = np.ones(shape, bool)
    for pred in preds:
        truth = truth & holds(pred, env, shape)
    return truth


# ---- margins ---------------------------------------------------------------------------------------------


def _reach(access: Access, ranges: Mapping[Var, Range]) -> list[Range]:
    """The lowest and highest index of each dimension."""
    out = []
    for dim in access.dims:
        lo, hi = dim.base.range(ranges)
        for s, n in zip(dim.strides, access.shape, strict=True):
            lo, hi = lo + min(0, s * (n - 1)), hi + max(0, s * (n - 1))
        out.append((int(lo), int(hi)))
    return out


def margins(kernel: Kernel) -> dict[Alloc, tuple[int, ...]]:
    """Elements past the end of each dimension that accesses reach; only for tensors that are indexed as what they are."""
    most: dict[Alloc, list[int]] = {}
    other: set[Alloc] = set()

    def visit(body: list[Stmt], ranges: dict[Var, Range]) -> None:
        for stmt in body:
            if isinstance(stmt, Instr):
                for access, _, _ in accesses(stmt):
                    note(access, ranges)
            elif isinstance(stmt, For):
                visit(stmt.body, {**ranges, stmt.var: (0, stmt.trips - 1)})
            elif isinstance(stmt, If):
                visit(stmt.then, narrowed(ranges, stmt.pred) or ranges)
                visit(stmt.orelse, narrowed(ranges, stmt.pred.negated()) or ranges)
            elif isinstance(stmt, DoWhile):
                visit(stmt.body, ranges)

    def note(access: Access, ranges: dict[Var, Range]) -> None:
        alloc = access.alloc
        if access.view is not None or access.dtype != alloc.dtype:
            other.add(alloc)
            return
        found = most.setdefault(alloc, [0] * len(alloc.shape))
        for i, (lo, hi) in enumerate(_reach(access, ranges)):
            if lo >= 0 and access.dims[i].dyn is None:
                found[i] = max(found[i], hi + 1 - alloc.shape[i])

    visit(kernel.body, {v: (v.lo, v.hi) for v in kernel.grid})
    return {a: tuple(n if n <= min(_WIDEST_MARGIN, max(512, a.shape[i])) else 0 for i, n in enumerate(extra))
            for a, extra in most.items() if any(extra) and a not in other}


# ---- tiles -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Axis:
    """One dimension of a tensor in a tile: the dimensions of the tile that move along it, the outer ones first, and as one window of
    `count` elements, `step` apart, where they are one (`step` 0: they are not)."""

    dims: tuple[int, ...]
    step: int
    count: int


def _axes(access: Access) -> list[_Axis] | None:
    """Dimensions of the tensor, or None where one of the tile moves along several of them."""
    used: set[int] = set()
    out = []
    for dim in access.dims:
        rows = dim.dyn is not None and dim.dyn.size > 1  # an index for each position of dimension 0
        moving = [j for j, s in enumerate(dim.strides) if (s and access.shape[j] > 1) or (j == 0 and rows)]
        if used & set(moving):
            return None
        used |= set(moving)
        moving.sort(key=lambda j: -abs(dim.strides[j]))
        step, count = 1, 1
        for j in reversed(moving):  # the innermost one first
            s = dim.strides[j]
            if count == 1:
                step = s
            elif s != step * count:
                step = 0
                break
            count *= access.shape[j]
        out.append(_Axis(tuple(moving), step if moving else 1, prod(access.shape[j] for j in moving)))
    return out


class Memory:
    """The tensors of one program, and how tiles are read and written."""

    def __init__(self, margin: Mapping[Alloc, tuple[int, ...]]) -> None:
        self.margin = margin
        self.arrays: dict[Alloc, Any] = {}

    def size_of(self, alloc: Alloc) -> tuple[int, ...]:
        """Shape of the array that holds a tensor."""
        extra = self.margin.get(alloc)
        return alloc.shape if extra is None else tuple(n + e for n, e in zip(alloc.shape, extra, strict=True))

    def clear(self, alloc: Alloc) -> None:
        """A new tensor. What was never written has any value: zero."""
        self.arrays[alloc] = np.broadcast_to(np.zeros((), dtypes.storage(alloc.dtype)), self.size_of(alloc))

    def put(self, alloc: Alloc, array: Any) -> None:
        """Give a tensor its contents."""
        extra = self.margin.get(alloc)
        if extra is not None:
            array = jnp.pad(array, [(0, e) for e in extra])
        self.arrays[alloc] = array

    def whole(self, alloc: Alloc) -> Any:
        """The contents of a tensor."""
        array = self._array(alloc)
        return array if alloc not in self.margin else array[tuple(slice(0, n) for n in alloc.shape)]

    def _array(self, alloc: Alloc) -> Any:
        if alloc not in self.arrays:
            self.clear(alloc)
        return self.arrays[alloc]

    def _as_indexed(self, access: Access) -> Any:
        """The contents in the shape and dtype that an access indexes."""
        array = self._array(access.alloc)
        storage = dtypes.storage(access.dtype)
        if array.dtype != storage:
            flat = array.reshape(-1)
            array = flat.view(storage) if known(array) and array.flags.c_contiguous else bitcast(to_jax(flat), storage)
            return array.reshape(access.view_shape)
        return array if access.view is None else array.reshape(access.view)

    # ---- reading ----
    def read(self, access: Access, env: Mapping[Var, Index], ranges: Mapping[Var, Range]) -> Any:
        """The elements of a tile, in storage dtype."""
        array = self._as_indexed(access)
        if 0 in access.shape:
            return np.zeros(access.shape, array.dtype)
        axes = _axes(access)
        if axes is None:
            return self._gather(array, access, env)
        bases = [value_of(d.base, env) for d in access.dims]
        reach = _reach(access, ranges)
        indices: dict[int, Any] = {}
        starts: list[Index] = [0] * len(axes)
        sizes = list(array.shape)
        for i, axis in enumerate(axes):
            if access.dims[i].dyn is None and axis.step > 0 and reach[i][0] >= 0 and reach[i][1] < array.shape[i]:
                starts[i], sizes[i] = bases[i], (axis.count - 1) * axis.step + 1
            else:
                indices[i] = self._indices(access, i, axis, bases[i], env)
        array = window(array, starts, sizes)
        if any(axis.step > 1 and i not in indices for i, axis in enumerate(axes)):
            array = array[tuple(slice(None) if i in indices else slice(None, None, axis.step) for i, axis in enumerate(axes))]
        for i, index in indices.items():
            array = _take(array, index, i)
        return self._to_tile(array, access, axes)

    def _indices(self, access: Access, i: int, axis: _Axis, base: Index, env: Mapping[Var, Index]) -> Any:
        """The indices along a dimension of the tensor, one after the other in the order of `axis.dims`."""
        dim = access.dims[i]
        shape = tuple(access.shape[j] for j in axis.dims)
        index = index_values(base, tuple(dim.strides[j] for j in axis.dims), shape)
        if dim.dyn is not None:
            at = self.read(dim.dyn, env, {}).reshape(-1)
            at = at.astype(np.int32)
            if dim.dyn.size == 1:
                index = index + at[0]
            else:
                index = index + at.reshape([-1 if j == 0 else 1 for j in axis.dims])
        return index.reshape(-1)

    def _to_tile(self, array: Any, access: Access, axes: list[_Axis]) -> Any:
        """From the order of the tensor's dimensions to that of the tile's; dimensions that nothing moves along are repeated."""
        flat = [j for axis in axes for j in axis.dims]
        array = array.reshape([access.shape[j] for j in flat])
        if flat != sorted(flat):
            array = array.transpose([flat.index(j) for j in sorted(flat)])
        there = set(flat)
        array = array.reshape([n if j in there else 1 for j, n in enumerate(access.shape)])
        if array.shape == access.shape:
            return array
        return np.broadcast_to(array, access.shape) if known(array) else jnp.broadcast_to(array, access.shape)

    def full_indices(self, access: Access, env: Mapping[Var, Index]) -> list[Any]:
        """The index of every element of a tile, by dimension of the tensor."""
        out = []
        for dim in access.dims:
            index = index_values(value_of(dim.base, env), dim.strides, access.shape)
            if dim.dyn is not None:
                at = self.read(dim.dyn, env, {}).reshape(-1).astype(np.int32)
                index = index + (at[0] if dim.dyn.size == 1 else at.reshape([-1] + [1] * (len(access.shape) - 1)))
            out.append(index)
        return out

    def _gather(self, array: Any, access: Access, env: Mapping[Var, Index]) -> Any:
        indices = self.full_indices(access, env)
        if known(array) and all(known(i) for i in indices):
            return array[tuple(np.clip(i, 0, n - 1) for i, n in zip(indices, array.shape, strict=True))]
        return to_jax(array).at[tuple(indices)].get(mode="clip")

    def inside(self, access: Access, env: Mapping[Var, Index]) -> Any:
        """Truth values of the runtime indices of a tile being inside the tensor."""
        truth: Any = np.ones(access.shape, bool)
        for dim, index, n in zip(access.dims, self.full_indices(access, env), access.view_shape, strict=True):
            if dim.dyn is not None:
                truth = truth & (index >= 0) & (index < n)
        return truth

    # ---- writing ----
    def write(self, access: Access, value: Any, env: Mapping[Var, Index], ranges: Mapping[Var, Range]) -> None:
        """Give a tile new elements, in storage dtype and of its shape."""
        if 0 in access.shape:
            return
        alloc = access.alloc
        array = self._as_indexed(access)
        new = self._written(array, access, value, env, ranges)
        storage = dtypes.storage(alloc.dtype)
        if new.dtype != storage:
            new = bitcast(to_jax(new.reshape(-1)), storage)
        self.arrays[alloc] = new.reshape(self.size_of(alloc))

    def _written(self, array: Any, access: Access, value: Any, env: Mapping[Var, Index], ranges: Mapping[Var, Range]) -> Any:
        if value.shape == array.shape and access.is_whole:
            return value
        axes = _axes(access)
        repeated = axes is None or prod(access.shape) != prod(a.count for a in axes)
        if repeated or axes is None:
            return self._scatter(array, access, value, env)
        flat = [j for a in axes for j in a.dims]
        there = set(flat)
        value = value.reshape([n for j, n in enumerate(access.shape) if j in there])
        if flat != sorted(flat):
            value = value.transpose([sorted(flat).index(j) for j in flat])
        value = value.reshape([a.count for a in axes])
        starts = [value_of(d.base, env) for d in access.dims]
        reach = _reach(access, ranges)
        loose = [i for i, (a, d, (lo, hi), n) in enumerate(zip(axes, access.dims, reach, array.shape, strict=True))
                 if a.step <= 0 or lo < 0 or hi >= n or d.dyn is not None]
        if loose:
            return self._scatter_along(array, access, axes, loose, value, starts, env)
        sizes = [(a.count - 1) * a.step + 1 for a in axes]
        fixed = all(not isinstance(s, jax.Array) for s in starts)
        if known(array) and known(value) and fixed and array.size <= _KNOWN_UP_TO:
            array = np.array(array)
            array[tuple(slice(s, s + n, a.step) for s, n, a in zip(starts, sizes, axes, strict=True))] = value
            return array
        array, value = to_jax(array), to_jax(value)
        if any(a.step > 1 for a in axes):
            # between the elements of the tile the window keeps its own
            config = [(0, 0, a.step - 1) for a in axes]
            own = np.zeros(sizes, bool)
            own[tuple(slice(None, None, a.step) for a in axes)] = True
            value = jnp.where(own, lax.pad(value, np.zeros((), value.dtype), config), window(array, starts, sizes))
        if value.shape == array.shape:
            return value
        return lax.dynamic_update_slice(array, value, starts)

    def _scatter_along(self, array: Any, access: Access, axes: list[_Axis], loose: list[int], value: Any, starts: list[Index],
                       env: Mapping[Var, Index]) -> Any:
        """Write where some dimensions are no windows inside the tensor; `value` has the order of the tensor's dimensions."""
        indices: list[Any] = []
        rank = len(axes)
        alone = len(loose) == 1  # then the other dimensions, where they are whole, stay windows
        for i, (axis, start, n) in enumerate(zip(axes, starts, array.shape, strict=True)):
            if alone and i not in loose and axis.count == n and axis.step == 1:
                indices.append(slice(None))
                continue
            alone = alone and i in loose
            index = self._indices(access, i, axis, start, env)
            indices.append(jnp.where(index < 0, n, index))
        if not all(isinstance(k, slice) for i, k in enumerate(indices) if i not in loose):
            indices = [np.arange(n) if isinstance(k, slice) else k for k, n in zip(indices, array.shape, strict=True)]
            indices = [k.reshape([-1 if i == j else 1 for j in range(rank)]) for i, k in enumerate(indices)]
        return to_jax(array).at[tuple(indices)].set(to_jax(value), mode="drop")

    def _scatter(self, array: Any, access: Access, value: Any, env: Mapping[Var, Index]) -> Any:
        indices = [jnp.where(i < 0, n, i) for i, n in zip(self.full_indices(access, env), array.shape, strict=True)]
        return to_jax(array).at[tuple(indices)].set(to_jax(value), mode="drop")


def _take(array: Any, index: Any, axis: int) -> Any:
    if known(array) and known(index):
        return np.take(array, np.clip(index, 0, array.shape[axis] - 1), axis=axis)
    return jnp.take(to_jax(array), index, axis=axis, mode="clip")


def window(array: Any, starts: list[Index], sizes: list[int]) -> Any:
    """A part of an array."""
    if list(array.shape) == sizes:
        return array
    if all(not isinstance(s, jax.Array) for s in starts):
        return array[tuple(slice(s, s + n) for s, n in zip(starts, sizes, strict=True))]
    return lax.dynamic_slice(to_jax(array), starts, sizes)
