"""Instructions that take several native kernels: what is computed on the way goes into temporary tiles.

Any value can be computed so: what has a kernel of its own gets its operands from memory, what has to be seen in another form is stored
first, and what is left is elementwise. A mask narrows each step by itself: every dimension knows which one of the instruction's iteration
space it follows. See native/steps.h.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from opennki.execute import abi
from opennki.execute import abi_steps as S
from opennki.execute.calls import Call
from opennki.execute.program import Elementwise, Program
from opennki.execute.record import BOOL, FLOAT, INT64, Constant, Part, Sym, number, storage_name, tile, widened
from opennki.execute.shapes import JOINED, WHOLE, Axes, Unsupported, aligned, broadcast, carried, joined_shape
from opennki.execute.step_layout import ALIGN, Made, What
from opennki.execute.values import in_order, leaves
from opennki.ir.affine import Affine

if TYPE_CHECKING:
    from opennki.execute.instruction import Instruction

ELEMENTWISE = frozenset({"call", "select", "fold", "round", "exact"})
MOST = 32  # operands of a step


@dataclass(frozen=True, slots=True)
class Scratch:
    """A temporary tile: where it is in scratch memory, and its dtype (int64 too)."""

    offset: int
    dtype: str


class Steps:
    """The steps of one instruction."""

    def __init__(self, one: Instruction) -> None:
        self.one, self.lowering = one, one.lowering
        self.addresses: list[tuple[Affine, int]] = []
        self.errors = len(self.lowering.broken)  # before those of its steps
        self.numbers: dict[int, int] = {}  # of an operand -> of its address
        self.made: list[Made] = []
        self.room = 0
        self.blob = bytearray()
        self.places: dict[Constant, int] = {}
        self.preds: list[Affine] = []
        self.indices: list[Affine] = []
        self.tiles: dict[int, Sym] = {}
        self.results: dict[int, list[Sym]] = {}  # of kernels with several
        self.alive: list[Sym] = []  # what the table above knows by id()
        self.inside: Sym | None = None  # which elements of the operand that was gathered last exist, where others are skipped

    def call(self) -> Call:
        """The call that runs all steps. Raises Unsupported."""
        one = self.one
        for value in one.fetched:
            self.tile(value)
        if one.by_row:
            self._check_rows()
        self._store_all()
        if one.by_row:
            self.made[0].again = len(self.made)
        iteration = one.plan.iteration
        what = What(self.made, iteration[0] if iteration else 1, len(iteration), bytes(self.blob), self.room)
        if len(self.addresses) > abi.MAX_ADDRESSES or max(len(self.preds), len(self.indices)) > abi.MAX_EXPRESSIONS:
            raise Unsupported("more operands than a call takes")
        call = Call(abi.K_STEPS, what, self.addresses, iteration, whole=one.whole, sources=[(n, 0) for n in self.numbers])
        call.clips, call.preds, call.indices = list(one.clips), self.preds, self.indices
        call.errors = self.errors
        self._bounds(call)
        return call

    def _check_rows(self) -> None:
        """Rows are stored one after the other, as an index may come twice; what they are made from has to be read before the first one."""
        views = self.one.views
        written = {views[out.source].slot for out, _ in self.one.pairs if self.dynamic(out)}
        for _, value in self.one.pairs:
            read = [_home(leaf.source) for leaf in leaves(value) if leaf.kind == "tile"]
            if any(isinstance(source, int) and views[source].slot in written for source in read):  # others are constants
                raise Unsupported("rows of a tensor that are updated one after the other by the tensor itself")

    def _bounds(self, call: Call) -> None:
        one = self.one
        for number_ in range(one.first, len(one.views)):
            view = one.views[number_]
            views = [(view, one.axes.get(number_, ()))] if view.dynamic is None else [(t, ()) for t in view.dynamic.tiles if t is not None]
            if view.dynamic is not None and view.bounds:
                raise Unsupported("an index that may be outside, beside one that is read from memory")
            for v, axes in views:
                for _, strides, size, axis in v.bounds:
                    low = high = 0
                    along = [0] * len(one.plan.iteration)
                    for j, (s, n) in enumerate(zip(strides, v.shape, strict=True)):
                        k = axes[j] if axes else -1
                        if k >= 0:
                            along[k] += s
                        else:
                            low, high = low + min(0, s * (n - 1)), high + max(0, s * (n - 1))
                    base = v.access.dims[axis].base
                    call.bounds.append((base, tuple(along), low, high, size, one.report(v, axis)))

    # ---- memory ----
    def scratch(self, shape: tuple[int, ...], dtype: str, axes: Axes = ()) -> Sym:
        """A temporary tile as what is stored to."""
        item = 8 if dtype == "int64" else np.dtype(np.uint8).itemsize if dtype == "bool" else _storage(dtype).itemsize
        count = int(np.prod(shape, dtype=np.int64))
        source = Scratch(self.room, dtype)
        self.room += -(-max(1, count) * item // ALIGN) * ALIGN
        if self.room > 1 << 30:
            raise Unsupported("temporary tiles of more than 1 GiB")
        strides, step = [], item
        for n in reversed(shape):
            strides.append(step)
            step *= n
        return tile(source, shape, tuple(reversed(strides)), _storage(dtype), True, axes)

    def where(self, source: Any) -> tuple[int, int]:
        """Where an operand is: the number of an address, or scratch memory, or the constants; and the offset."""
        if isinstance(source, Part):
            which, offset = self.where(source.base)
            return which, offset + source.offset
        if isinstance(source, Scratch):
            return S.SCRATCH, source.offset
        if isinstance(source, Constant):
            if source not in self.places:
                self.blob += b"\0" * (-len(self.blob) % 8)
                self.places[source] = len(self.blob)
                self.blob += source.array.tobytes()
            return S.CONSTANTS, self.places[source]
        return self.address(source), 0

    def address(self, number_: int) -> int:
        """The number of the address of an operand; of its tensor where its indices are read from memory."""
        if number_ not in self.numbers:
            view = self.one.views[number_]
            self.numbers[number_] = len(self.addresses)
            self.addresses.append((Affine() if view.dynamic is not None else self.one.begin(view), view.slot))
        return self.numbers[number_]

    def dtype(self, source: Any) -> int:
        """Number of the dtype of an operand, -1 where elementwise programs have no such."""
        base = source.base if isinstance(source, Part) else source
        if isinstance(base, Constant):
            return S.I64 if base.array.dtype == INT64 else 0
        name = base.dtype if isinstance(base, Scratch) else self.one.views[base].access.dtype
        return S.I64 if name == "int64" else abi.DTYPES.get(name, -1)

    def dtype_of(self, view: Any) -> int:
        """Number of the dtype of a tensor."""
        return abi.DTYPES.get(view.access.dtype, -1)

    def add(self, kind: int, what: Any, sources: list[Any], extent: tuple[int, ...], axes: Axes, preds: Any = (),
            indices: Any = (), error: int = 0) -> None:  # fmt: skip
        """Append a step. preds, indices: expressions."""
        if len(sources) > MOST or len(preds) > 8 or len(extent) > abi.RANK:
            raise Unsupported("more operands than a step takes")
        axes = tuple(-1 if a == WHOLE else a for a in axes or (-1,) * len(extent))
        if any(a == JOINED or isinstance(a, tuple) for a in axes):
            raise Unsupported("a mask of dimensions that are joined")
        numbers: list[list[int]] = [[], []]
        for table, expressions, found in ((self.preds, preds, numbers[0]), (self.indices, indices, numbers[1])):
            for e in expressions:
                found.append(len(table))
                table.append(e)
        self.made.append(Made(kind, what, [self.where(s) for s in sources], extent, axes, numbers[0], numbers[1], error))

    # ---- values in memory ----
    def tile(self, value: Sym, dtype: str = "") -> Sym:
        """A value as a tile. dtype: of the temporary tile, where it is computed."""
        if value.kind == "tile":
            return value
        found = self.tiles.get(id(value))
        if found is None:
            from opennki.execute.step_kinds import COMPUTE

            found = COMPUTE[value.kind](self, value) if value.kind in COMPUTE else self.stored(value, dtype)
            self.tiles[id(value)] = found
            self.alive.append(value)
        return found

    def stored(self, value: Sym, dtype: str = "") -> Sym:
        """A value stored in a new temporary tile."""
        wide = value.kind in ("wide", "exact") and value.dtype != BOOL  # 64 bits are rounded or cut off where they are stored
        name = dtype or ("int64" if wide else storage_name(value.dtype) if value.raw else "float32")
        made = self.scratch(value.shape, name, self.axes(value))
        self.store(made, value)
        return as_value(made, value)

    def contiguous(self, value: Sym) -> Sym:
        """A value as a tile without gaps."""
        if value.kind != "tile":
            return self.tile(value)
        steps, step = [], (8 if value.dtype == INT64 else value.dtype.itemsize if value.raw else _size(self.dtype(value.source)))
        for n in reversed(value.shape):
            steps.append(step)
            step *= n
        same = all(n == 1 or s == t for n, s, t in zip(value.shape, value.strides, reversed(steps), strict=True))
        return value if same else self.stored(value)

    def lowered(self, value: Sym) -> Sym:
        """A value of which elementwise programs can compute all that is not in memory yet."""
        if value.kind in ("tile", "const", "pred", "index"):
            return value
        if value.kind not in ELEMENTWISE:
            return self.tile(value)
        if (found := self.tiles.get(id(value))) is not None:
            return found
        parts = tuple(self.lowered(a) for a in value.args)
        if all(a is b for a, b in zip(parts, value.args, strict=True)):
            return value
        made = value.but(args=parts)
        self.tiles[id(value)] = made
        self.alive.append(value)
        return made

    def store(self, out: Sym, value: Sym, guards: Any = ()) -> None:
        """Store a value in a tile, where the guards hold."""
        from opennki.execute.step_integers import store_wide
        from opennki.execute.step_kinds import store_concat

        target = self.dtype(out.source)
        if value.kind == "exact" and value.shape != out.shape and value.size == out.size:
            value = self.stored(value).reshape(out.shape)
        if value.kind == "concat":
            store_concat(self, out, value, guards)
            return
        if value.kind in ("wide", "cast") or (value.kind == "exact" and target == S.I64):
            store_wide(self, out, value, guards)
            return
        if value.kind not in ELEMENTWISE and value.kind not in ("const", "pred", "index"):
            value = self.tile(value)
        if value.raw and value.kind != "const" and (self._kind(value) != target or target == S.I64):
            held = self.tile(value)
            if held.dtype.kind in "iu" and (target >= 7 or held.dtype == INT64):
                store_wide(self, out, widened(held), guards)
                return
            value = number(held)
        self.elementwise([(out, self.lowered(value))], guards)

    def _kind(self, value: Sym) -> int:
        """Number of the dtype of bits."""
        if value.kind == "tile":
            return self.dtype(value.source)
        return abi.DTYPES.get(storage_name(value.dtype), -1)

    # ---- elementwise ----
    def elementwise(self, pairs: list[tuple[Sym, Sym]], guards: Any = ()) -> None:
        """Store values that consist of elementwise operations and folds."""
        for attempt in (self._program, self._with_folds_apart, self._with_shapes_apart, self._with_guards_apart):
            try:
                with self.together():
                    attempt(pairs, guards)
                return
            except Unsupported:
                if attempt == self._with_guards_apart:
                    raise

    @contextmanager
    def together(self) -> Iterator[None]:
        """Steps that are made all of them or, where Unsupported is raised, none: then what was known of their results is forgotten too."""
        mark = len(self.made), len(self.preds), len(self.indices)
        known = dict(self.tiles), dict(self.results), self.inside
        try:
            yield
        except Unsupported:
            del self.made[mark[0] :], self.preds[mark[1] :], self.indices[mark[2] :]
            self.tiles, self.results, self.inside = known
            raise

    def _with_folds_apart(self, pairs: list[tuple[Sym, Sym]], guards: Any) -> None:
        """With each fold in a program of its own."""
        self._program([(out, self._folded(value)) for out, value in pairs], guards)

    def _folded(self, value: Sym) -> Sym:
        if not value.args:
            return value
        parts = tuple(self._folded(a) for a in value.args)
        made = value if all(a is b for a, b in zip(parts, value.args, strict=True)) else value.but(args=parts)
        if value.kind != "fold":
            return made
        found = self.tiles.get(id(value))
        if found is None:
            out = self.scratch(value.shape, storage_name(value.dtype) if value.raw else "float32", self.axes(value))
            self._program([(out, made)], ())
            found = self.tiles[id(value)] = as_value(out, value)
            self.alive.append(value)
        return found

    def _with_shapes_apart(self, pairs: list[tuple[Sym, Sym]], guards: Any) -> None:
        """With values in a shape of their own stored in that shape first."""
        if all(out.shape == value.shape or value.size != out.size or value.kind == "tile" for out, value in pairs):
            raise Unsupported("shapes are the same")
        apart = [value.shape != out.shape and value.size == out.size for out, value in pairs]
        self._program([(out, self.tile(self.stored(value).reshape(out.shape)) if own else value)
                       for own, (out, value) in zip(apart, pairs, strict=True)], guards)  # fmt: skip

    def _with_guards_apart(self, pairs: list[tuple[Sym, Sym]], guards: Any) -> None:
        """With guards, and large parts of values, as tiles."""
        for out, value in pairs:
            parts = tuple(self.tile(a) if a.args else a for a in value.args)
            self._program([(out, value.but(args=parts) if value.args and value.kind != "fold" else value)],
                          [g if g.kind == "tile" else self.stored(g) for g in guards])  # fmt: skip

    def _program(self, pairs: list[tuple[Sym, Sym]], guards: Any) -> None:
        one = self.one
        if one.narrow:
            pairs = [(self.unjoined(out), self.unjoined(value)) for out, value in pairs]
            guards = [self.unjoined(g) for g in guards]
        program = Program(
            iteration=None,
            dtype_of=lambda source: -1 if self.dtype(source) == S.I64 else self.dtype(source),
            keeps_axes=bool(one.narrow),
            guards=list(guards),
            same=lambda a, b: a == b,
            apart=self.apart,
            meets=lambda a, b: not self.disjoint(a, b),
        )
        made = Elementwise(program, pairs)
        kind, what, sources, shape = made.made()
        axes: Axes = ()
        if one.narrow:
            tags = self._tags(made, pairs, guards)
            axes = tuple(tags[i] for i in (*made.outer, *made.axes))
        preds = [one.preds[p][0] for p in program.preds_used]
        self.add(kind, what, sources, shape, axes, preds, [one.indices[i][0] for i in program.indices_used])

    def unjoined(self, value: Sym) -> Sym:
        """A value with the dimensions taken apart that a mask narrows and that were joined."""
        if not value.args:
            shape = joined_shape(value.shape, value.axes)
            return value if shape == value.shape else value.reshape(shape)
        parts = tuple(self.unjoined(a) for a in value.args)
        if all(a is b for a, b in zip(parts, value.args, strict=True)):
            return value
        if value.kind == "fold":
            shape, gone, at = parts[0].shape, list[int](), 0
            for i, n in enumerate(value.args[0].shape):
                first = at
                size = 1
                while size < n or at == first:
                    size *= shape[at]
                    at += 1
                gone += range(first, at) if i in value.more["axes"] else []
            full = tuple(1 if i in gone else n for i, n in enumerate(shape))
            made = Sym("fold", full, value.dtype, parts, value.name, raw=value.raw, more={"axes": tuple(gone)})
            return made
        rank = max(p.ndim for p in parts)
        parts = tuple(p if p.ndim == rank else self._grown(p, rank) for p in parts)
        return value.but(args=parts, shape=broadcast(*(p.shape for p in parts)))

    @staticmethod
    def _grown(value: Sym, rank: int) -> Sym:
        """A value of one element, or of one for each partition, with more dimensions."""
        if value.size not in (1, value.shape[0]):
            raise Unsupported("an operand of other dimensions than those that a mask narrows")
        return value.reshape((value.size,) + (1,) * (rank - 1))

    def _tags(self, made: Elementwise, pairs: list[tuple[Sym, Sym]], guards: Any) -> list[int]:
        """What narrows each dimension of a program. Raises Unsupported where its operands do not agree."""
        tags: list[Any] = [-1] * len(made.shape)
        found = []
        for leaf in [leaf for out, value in pairs for leaf in (out, *leaves(value))] + [leaf for g in guards for leaf in leaves(g)]:
            if leaf.kind == "const" or leaf.size == 1:
                continue
            row = made.axes and leaf.size == made.rows and leaf.shape != made.full_row and leaf.shape != made.shape
            shape = tuple(1 if i in made.axes else n for i, n in enumerate(made.shape)) if row else made.shape
            found.append((aligned(leaf.axes, leaf.shape, shape), aligned((0,) * leaf.ndim, leaf.shape, shape)))
        for axes, _ in found:
            for i, a in enumerate(axes):
                if a not in (-1, WHOLE):
                    if tags[i] not in (-1, a):
                        raise Unsupported("operands that a mask narrows in different ways")
                    tags[i] = a
        for axes, there in found:
            if any(t != -1 and a == -1 and h != -1 for t, a, h in zip(tags, axes, there, strict=True)):
                raise Unsupported("operands of which a mask narrows only some")
        return tags

    def axes(self, value: Sym) -> Axes:
        """What narrows the dimensions of a value."""
        if not self.one.narrow:
            return ()
        if not value.args and value.kind != "fetched":
            return value.axes
        if value.kind == "fetched":
            return value.axes
        inner = [(a.shape, self.axes(a)) for a in value.args]
        if value.kind == "matmul":
            (s, a), (t, b) = inner
            made: Axes = ((a or (-1,) * len(s))[0], (b or (-1,) * len(t))[1])
            return carried(value.more.get("base", value.shape), made, value.shape)
        if value.kind in ("scan", "pfold", "fold"):
            shape, found = inner[0]
            gone = value.more.get("axes", (0,) if value.kind == "pfold" else ())
            kept = tuple(-1 if i in gone else a for i, a in enumerate(found or (-1,) * len(shape)))
            return carried(tuple(1 if i in gone else n for i, n in enumerate(shape)), kept, value.shape)
        if value.kind in ("call", "select", "round", "exact", "wide", "cast"):
            tags: list[Any] = [-1] * value.ndim
            for shape, found in inner:
                for i, tag in enumerate(aligned(found, shape, value.shape)):
                    tags[i] = tag if tag not in (-1, WHOLE) or tags[i] == -1 else tags[i]
            return tuple(tags)
        if value.kind == "take":
            return inner[1][1]
        return self.tile(value).axes or (-1,) * value.ndim

    # ---- the results ----
    def apart(self, a: Any, b: Any) -> bool:
        """Whether two operands are the same elements in the same order, or share none."""
        x, y = _home(a), _home(b)
        if isinstance(x, (Scratch, Constant)) or isinstance(y, (Scratch, Constant)):
            return bool(x != y or a == b)
        if x == y or self.one.place(x) == self.one.place(y):
            return bool(a == b) or (a == x and b == y)
        return self.one.apart(x, y)

    def same(self, a: Any, b: Any) -> bool:
        """Whether two operands are the same elements."""
        return bool(a == b) or (isinstance(a, int) and isinstance(b, int) and bool(self.one.place(a) == self.one.place(b)))

    def disjoint(self, a: Any, b: Any) -> bool:
        """Whether two operands share no memory."""
        x, y = _home(a), _home(b)
        if isinstance(x, (Scratch, Constant)) or isinstance(y, (Scratch, Constant)):
            return bool(x != y)
        return x != y and self.one.disjoint(x, y)

    def _store_all(self) -> None:
        one, pairs = self.one, list(self.one.pairs)
        for i, (out, value) in enumerate(pairs):
            outs = [other.source for j, (other, _) in enumerate(pairs) if j != i]  # in what order they are stored is not said
            found = [leaf for leaf in leaves(value) if leaf.kind == "tile"]
            read = [leaf.source for leaf in found]
            turned = any(self.same(out.source, leaf.source) and not in_order(out, leaf) for leaf in found)
            if turned or any(not self.apart(out.source, s) for s in read) or any(not self.disjoint(o, s) for o in outs for s in read):
                pairs[i] = out, self.staged(value)
        plain = [(out, value) for out, value in pairs if not self.dynamic(out) and value.kind in (*ELEMENTWISE, "tile") and not value.raw]
        groups = {bool(self.guards(out)): [p for p in plain if bool(self.guards(p[0])) == bool(self.guards(out))] for out, _ in plain}
        done: list[Sym] = []
        for group in groups.values():
            if len(group) > 1 and not one.overlap(pairs):
                with suppress(Unsupported), self.together():
                    self._program([(out, self.lowered(value)) for out, value in group], self.guards(group[0][0]))
                    done += [out for out, _ in group]
        for out, value in pairs:
            if any(out is d for d in done):
                continue
            if self.dynamic(out):
                from opennki.execute.step_kinds import scatter

                scatter(self, out, value, self.guards(out))
            else:
                self.store(out, value, self.guards(out))

    def staged(self, value: Sym) -> Sym:
        """A value in memory of its own."""
        return self.stored(value) if value.kind == "tile" else self.tile(value)

    def dynamic(self, out: Sym) -> bool:
        """Whether the indices of a result are read from memory."""
        return self.one.views[out.source].dynamic is not None

    def guards(self, out: Sym) -> list[Sym]:
        """What has to hold where a result is stored: the rest of the mask, and that the element was there to be read."""
        turned = self.one.turned.get(out.source)
        made = [g.transpose(turned) for g in self.one.guards] if turned else list(self.one.guards)
        made = made if turned or out.shape == self.one.plan.iteration else []
        if self.inside is not None and self.inside.shape == out.shape:
            made.append(self.inside)
        return made


def as_value(out: Sym, value: Sym) -> Sym:
    """A tile that was stored to as the value that it holds."""
    raw = value.raw or out.source.dtype == "int64"
    kind = INT64 if out.source.dtype == "int64" else value.dtype if value.raw or value.dtype == BOOL else FLOAT
    return Sym("tile", out.shape, kind, strides=out.strides, source=out.source, raw=raw, axes=out.axes)


def _home(source: Any) -> Any:
    return source.base if isinstance(source, Part) else source


def _storage(dtype: str) -> np.dtype[Any]:
    from opennki.isa import dtypes

    return INT64 if dtype == "int64" else dtypes.storage(dtype)


def _size(dtype: int) -> int:
    return {0: 4, 6: 4, 7: 4, 8: 4, 1: 2, 2: 2, 9: 2, 10: 2, S.I64: 8}.get(dtype, 1)

