"""From accesses to NumPy views of memory: compiled once per kernel, evaluated at each step.

A machine (`interpret.machine.Instance`) has `env`, the values of the loop indices and program ids by slot, `buffers`, one byte array per
tensor by slot, and `views`, a cache for views that never move.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from opennki.errors import Loc, NkiError, NkiValueError, make
from opennki.ir.affine import Affine, FloorDiv, Range, Var
from opennki.ir.nodes import Access, Alloc
from opennki.ir.verify import describe
from opennki.isa import dtypes

Array = np.ndarray
Env = list[int]
Getter = Callable[[Any], Array]


class Layout:
    """Slots of variables and tensors of one kernel."""

    def __init__(self) -> None:
        self.vars: dict[Var, int] = {}
        self.allocs: dict[Alloc, int] = {}
        self.views = 0
        self.fixed: dict[int, list[int]] = {}  # cached views by the slot of their tensor
        self.moving: set[int] = set()

    def var(self, var: Var) -> int:
        """Slot of a variable."""
        return self.vars.setdefault(var, len(self.vars))

    def alloc(self, alloc: Alloc) -> int:
        """Slot of a tensor."""
        return self.allocs.setdefault(alloc, len(self.allocs))

    def elements(self, access: Access) -> int:
        """Elements, of the dtype of an access, of the memory that it is in."""
        return access.alloc.size

    def origin(self, access: Access) -> int | Callable[[Env], int]:
        """Byte offset of a tensor in its memory, which indices read at run time count from."""
        return 0

    def address(self, access: Access) -> tuple[tuple[int, ...], int | Callable[[Env], int], tuple[int, ...]]:
        """(elements from one index of each dimension to the next, byte offset of the first element, byte strides of the tile)."""
        steps = []
        step = 1
        for size in reversed(access.view_shape):
            steps.append(step)
            step *= size
        steps.reverse()
        item = dtypes.itemsize(access.dtype)
        base = Affine()
        strides = [0] * len(access.shape)
        for dim, unit in zip(access.dims, steps, strict=True):
            if dim.base.terms or dim.base.const:
                base = base.add(dim.base.scale(unit))
            for j, s in enumerate(dim.strides):
                if s:
                    strides[j] += s * unit
        return tuple(steps), compile_affine(base.scale(item), self), tuple(s * item for s in strides)

    def view(self, slot: int) -> int:
        """A new slot for a cached view of a tensor."""
        self.fixed.setdefault(slot, []).append(self.views)
        self.views += 1
        return self.views - 1


def compile_affine(expr: Affine, layout: Layout) -> int | Callable[[Env], int]:
    """The number, or a function of the environment."""
    if expr.is_const:
        return expr.const
    const = expr.const
    plain = [(layout.var(a), c) for a, c in expr.terms if isinstance(a, Var)]
    divs = [(compile_affine(a.of, layout), a.by, c) for a, c in expr.terms if isinstance(a, FloorDiv)]
    if divs:
        def with_divs(env: Env) -> int:
            value = const
            for slot, c in plain:
                value += c * env[slot]
            for of, by, c in divs:
                value += c * ((of if isinstance(of, int) else of(env)) // by)
            return value
        return with_divs
    if len(plain) == 1:
        (s0, c0), = plain
        return lambda env: const + c0 * env[s0]
    if len(plain) == 2:
        (s0, c0), (s1, c1) = plain
        return lambda env: const + c0 * env[s0] + c1 * env[s1]

    def many(env: Env) -> int:
        value = const
        for slot, c in plain:
            value += c * env[slot]
        return value
    return many


def value_of(expr: int | Callable[[Env], int], env: Env) -> int:
    """Value of a compiled affine expression."""
    return expr if isinstance(expr, int) else expr(env)


class View:
    """A compiled access. `shape` is the tile, `strides` are in bytes; `get(machine)` gives the array, `box(machine, lo, hi)` a part."""

    __slots__ = ("access", "alloc", "base", "bounds", "dims", "dtype", "dynamic", "elements", "get", "itemsize", "loc", "origin", "shape",
                 "slot", "steps", "strides", "what")

    def __init__(self, access: Access, layout: Layout, ranges: dict[Var, Range], what: str, loc: Loc | None,
                 clipped: bool = False) -> None:
        self.access = access
        self.alloc = access.alloc
        self.slot = layout.alloc(access.alloc)
        self.dtype = dtypes.storage(access.dtype)
        self.itemsize = self.dtype.itemsize
        self.shape = access.shape
        self.what, self.loc = what, loc
        self.dims = access.dims
        self.elements = layout.elements(access)
        self.origin = layout.origin(access)
        self.steps, self.base, self.strides = layout.address(access)
        self.bounds = self._bounds(layout, ranges, clipped)
        self.dynamic = None
        if any(d.dyn is not None for d in access.dims):
            self.dynamic = Dynamic(self, layout, ranges)
            self.get: Getter = self.dynamic.gather
        elif isinstance(self.base, int) and not self.bounds and self.slot not in layout.moving:
            self.get = self._fixed(layout.view(self.slot), self.base)
        else:
            self.get = self._computed(self.base)

    def _bounds(self, layout: Layout, ranges: dict[Var, Range], clipped: bool) -> list[tuple[Any, tuple[int, ...], int, int]]:
        """Dimensions whose index is not proven inside: (base, strides, size, axis)."""
        out = []
        for axis, (dim, size) in enumerate(zip(self.access.dims, self.access.view_shape, strict=True)):
            if dim.dyn is not None:
                continue
            lo, hi = dim.base.range(ranges)
            for s, n in zip(dim.strides, self.shape, strict=True):
                if s > 0:
                    hi += s * (n - 1)
                else:
                    lo += s * (n - 1)
            if (lo < 0 or hi >= size) and 0 not in self.shape:
                out.append((compile_affine(dim.base, layout), dim.strides, size, axis))
        return out

    def _fixed(self, key: int, offset: int) -> Getter:
        shape, dtype, strides, slot = self.shape, self.dtype, self.strides, self.slot
        empty = 0 in shape

        def get(machine: Any) -> Array:
            found = machine.views[key]
            if found is None:
                found = np.empty(shape, dtype) if empty else np.ndarray(shape, dtype, machine.buffers[slot], offset, strides)
                machine.views[key] = found
            return found  # type: ignore[no-any-return]
        return get

    def _computed(self, base: int | Callable[[Env], int]) -> Getter:
        shape, dtype, strides, slot = self.shape, self.dtype, self.strides, self.slot
        if 0 in shape:
            return lambda machine: np.empty(shape, dtype)
        if self.bounds:
            whole = (0,) * len(shape)

            def checked(machine: Any) -> Array:
                self.check(machine.env, whole, shape)
                return np.ndarray(shape, dtype, machine.buffers[slot], value_of(base, machine.env), strides)
            return checked
        if isinstance(base, int):
            return lambda machine: np.ndarray(shape, dtype, machine.buffers[slot], base, strides)
        ndarray = np.ndarray

        def get(machine: Any) -> Array:
            return ndarray(shape, dtype, machine.buffers[slot], base(machine.env), strides)
        return get

    def check(self, env: Env, lo: tuple[int, ...], hi: tuple[int, ...]) -> None:
        """Raise when the part lo..hi of the tile is outside the tensor."""
        for base, strides, size, axis in self.bounds:
            first = last = value_of(base, env)
            for s, a, b in zip(strides, lo, hi, strict=True):
                if s > 0:
                    first, last = first + s * a, last + s * (b - 1)
                else:
                    first, last = first + s * (b - 1), last + s * a
            if first < 0 or last >= size:
                raise make("err_tensor_access_out_of_bound", f"{self.what}: dimension {axis} has {size} elements and is indexed from "
                           f"{first} to {last}", loc=self.loc, operand=describe(self.access))

    def box(self, machine: Any, lo: tuple[int, ...], hi: tuple[int, ...]) -> Array:
        """The part lo..hi of the tile."""
        if self.dynamic is not None:
            return self.dynamic.gather(machine, lo, hi)
        shape = tuple(b - a for a, b in zip(lo, hi, strict=True))
        if self.bounds:
            self.check(machine.env, lo, hi)
        offset = value_of(self.base, machine.env)
        for s, a in zip(self.strides, lo, strict=True):
            offset += s * a
        return np.ndarray(shape, self.dtype, machine.buffers[self.slot], offset, self.strides)

    def shadow(self, machine: Any, lo: tuple[int, ...] | None = None, hi: tuple[int, ...] | None = None) -> Array:
        """State of the elements (see `interpret.shadow`), of the whole tile or a part."""
        lo = lo or (0,) * len(self.shape)
        hi = hi or self.shape
        shape = tuple(b - a for a, b in zip(lo, hi, strict=True))
        if 0 in shape:
            return np.ones(shape, np.uint8)
        if self.dynamic is not None:
            where, inside = self.dynamic.flat(machine, lo, hi)
            found: Array = machine.shadows[self.slot][where]
            return found if inside is None else np.where(inside, found, np.uint8(1))  # nothing is read of rows that are left out
        return self.element_view(machine.shadows[self.slot], machine, lo, hi)

    def element_view(self, table: Array, machine: Any, lo: tuple[int, ...], hi: tuple[int, ...]) -> Array:
        """The part lo..hi of a table with one entry per element of the tensor."""
        offset = value_of(self.base, machine.env) // self.itemsize
        strides = tuple(s // self.itemsize for s in self.strides)
        for s, a in zip(strides, lo, strict=True):
            offset += s * a
        shape = tuple(b - a for a, b in zip(lo, hi, strict=True))
        unit = table.itemsize
        return np.ndarray(shape, table.dtype, table, offset * unit, tuple(s * unit for s in strides))


class Dynamic:
    """Gather and scatter for an access with runtime indices."""

    __slots__ = ("bases", "skip", "tiles", "view")

    def __init__(self, view: View, layout: Layout, ranges: dict[Var, Range]) -> None:
        self.view = view
        self.skip = False
        self.bases = [compile_affine(d.base, layout) for d in view.dims]
        self.tiles = [None if d.dyn is None else View(d.dyn, layout, ranges, f"{view.what}: index", view.loc) for d in view.dims]
        if any(d.dyn is not None and d.dyn.dtype.startswith("float") for d in view.dims):
            raise NkiValueError(f"{view.what}: a runtime index of {describe(view.access)} is no integer", loc=view.loc,
                                rule="a runtime index is an integer tile")

    def flat(self, machine: Any, lo: tuple[int, ...], hi: tuple[int, ...]) -> tuple[Array, Array | None]:
        """(element offsets of a part of the tile, truth of being inside or None)."""
        view = self.view
        rank = len(view.shape)
        shape = tuple(b - a for a, b in zip(lo, hi, strict=True))
        total = np.full(shape, value_of(view.origin, machine.env) // view.itemsize, np.int64)
        inside: Array | None = None
        outside = False
        wrong: tuple[int, int, int] = (0, 0, 0)
        places = zip(view.dims, self.bases, self.tiles, view.steps, view.access.view_shape, strict=True)
        for axis, (dim, base, tile, unit, size) in enumerate(places):
            index: Any = value_of(base, machine.env)
            for j, s in enumerate(dim.strides):
                if s:
                    index = index + (s * np.arange(lo[j], hi[j])).reshape([-1 if k == j else 1 for k in range(rank)])
            if tile is not None:
                machine.check_defined(tile)
                values = tile.get(machine).astype(np.int64)
                if values.size == 1:
                    index = index + int(values.reshape(-1)[0])
                else:
                    rows = values.reshape(-1)
                    index = index + rows[lo[0]:hi[0]].reshape([-1] + [1] * (rank - 1))
                good = np.asarray((index >= 0) & (index < size))
                if not np.all(good):
                    if not outside:
                        wrong = axis, int(np.asarray(index)[~good].flat[0]), size
                    outside = True
                    inside = np.asarray(good) if inside is None else inside & good
            total = total + np.asarray(index) * unit
        if outside and not self.skip:
            assert inside is not None
            bad = np.broadcast_to(np.logical_not(inside), shape)
            first = int(np.broadcast_to(total, shape)[bad][0])
            raise self.outside(wrong, first)
        if inside is not None:
            inside = np.broadcast_to(inside, shape)
            total = np.where(inside, total, 0)
        return total, inside

    def outside(self, wrong: tuple[int, int, int], first: int) -> IndexError:
        """The error of an index outside: (dimension, index, size), and the place in the flattened tensor."""
        # kernels of the vendor's users catch a plain IndexError about the flattened tensor; our report is its cause
        made = IndexError(f"index {first} is out of bounds for axis 0 with size {self.view.alloc.size}")
        made.__cause__ = self.error(wrong)
        return made

    def error(self, wrong: tuple[int, int, int]) -> NkiError:
        """The report of an index outside: (dimension, index, size)."""
        axis, index, size = wrong
        name = self.view.alloc.name or repr(self.view.alloc)
        return make("err_tensor_access_out_of_bound", f"{self.view.what}: dimension {axis} of {name} has {size} elements and a runtime "
                    f"index is {index}", loc=self.view.loc, operand=describe(self.view.access),
                    fix="correct the indices, or use oob_mode=nisa.oob_mode.skip to leave such rows out")

    def gather(self, machine: Any, lo: tuple[int, ...] | None = None, hi: tuple[int, ...] | None = None) -> Array:
        """A copy of the addressed elements (those outside, where they are skipped, are element 0)."""
        view = self.view
        offsets, inside = self.flat(machine, lo or (0,) * len(view.shape), hi or view.shape)
        machine.inside = inside
        flat = np.ndarray((view.elements,), view.dtype, machine.buffers[view.slot])
        return flat[offsets]

    def scatter(self, machine: Any, value: Array, where: Array | None, lo: tuple[int, ...], hi: tuple[int, ...]) -> None:
        """Write to the addressed elements; where two are the same, the later one stays."""
        view = self.view
        offsets, inside = self.flat(machine, lo, hi)
        flat = np.ndarray((view.elements,), view.dtype, machine.buffers[view.slot])
        for extra in (inside, machine.inside):
            if extra is not None:
                where = np.broadcast_to(extra, offsets.shape) if where is None else where & extra
        value = np.broadcast_to(value, offsets.shape)
        if where is not None:
            offsets, value = offsets[where], value[where]
        flat[offsets] = value
        shadow = machine.shadows[view.slot]
        if shadow is not None:
            shadow[offsets] = 1
