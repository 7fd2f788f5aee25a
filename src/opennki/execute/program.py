"""From expressions to native programs: phases of vector operations, matrix products, scans, folds and copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

from opennki.execute import abi
from opennki.execute.assemble import elementwise, uop
from opennki.execute.record import Sym, Unsupported, strides_of
from opennki.execute.shapes import joined
from opennki.execute.unfold import unfolded
from opennki.execute.values import converted, dtype_number, effort, folds_of, in_order, integer, leaves
from opennki.execute.whole import copy_scan_fold, product
from opennki.isa.scalar import SCALAR

MAX_REGISTERS = 64
KEPT = 4096  # elements of a row up to which a later phase gets a value as it was kept
EFFORT = 4  # and from which on that is worth it, see effort
_WIDTH = {7: 32, 8: 32, 9: 16, 10: 16, 11: 8, 12: 8, 13: 8, 0: 32, 1: 16, 2: 16, 3: 8, 4: 8, 5: 8, 6: 32}  # bits, by dtype number
_SIGNED = frozenset({7, 9, 11})

Made = tuple[int, Any, list[Any], tuple[int, ...]]


@dataclass
class Program:
    """What is known of an instruction. dtype_of: number of the dtype of an operand, -1 if native code has no such. keeps_axes: the axes of
    the iteration space must stay as they are. guards: predicates that stores are subject to. same: whether two operands are the same
    elements in the same order; apart: whether they are that, or share no memory; meets: whether they may
    share any."""

    iteration: tuple[int, ...] | None
    dtype_of: Callable[[Any], int]
    keeps_axes: bool
    guards: list[Sym]
    same: Callable[[Any, Any], bool]
    apart: Callable[[Any, Any], bool]
    meets: Callable[[Any, Any], bool]
    far: Callable[[Any], bool] = lambda source: False
    parts: bool = False  # whether operands may be a `Part` of one
    preds_used: list[int] = field(default_factory=list)
    indices_used: list[int] = field(default_factory=list)

    def dtype(self, source: Any) -> int:
        """Number of a dtype. Raises Unsupported."""
        number = self.dtype_of(source)
        if number < 0:
            raise Unsupported("a dtype without native code")
        return number


def compile_values(program: Program, pairs: list[tuple[Sym, Sym]], fused: bool = False) -> Iterator[Made]:
    """Native calls that store values in their tiles: (kind, descriptor, operands in order, iteration space)."""
    if not pairs:
        return
    early = False
    apart, same = program.apart, program.same
    for number, (_, value) in enumerate(pairs):
        for leaf in {id(leaf): leaf for leaf in leaves(value) if leaf.kind == "tile"}.values():
            for n, (out, _) in enumerate(pairs):
                if not apart(out.source, leaf.source):
                    raise Unsupported("a result that overlaps an operand")
                if same(out.source, leaf.source):
                    if not in_order(out, leaf):
                        raise Unsupported("a result in another order than an operand in its place")
                    early |= n < number
    if early:
        raise Unsupported("an operand in the place of an earlier result")
    if fused:
        alone = [pair for pair in pairs if _is_apart(program, pair, pairs)]
        for out, value in alone:
            yield copy_scan_fold(program, out, value) or _elementwise(program, [(out, value)])
        pairs = [pair for pair in pairs if not any(pair is other for other in alone)]
        if not pairs:
            return
    elif len(pairs) == 1:
        out, value = pairs[0]
        made = product(program, out, value) or copy_scan_fold(program, out, value)
        if made is not None:
            if program.guards:
                raise Unsupported("a mask on an instruction that is not elementwise")
            yield made
            return
    yield _elementwise(program, pairs)


def _elementwise(program: Program, pairs: list[tuple[Sym, Sym]]) -> Made:
    made = Elementwise(program, pairs)
    flat = unfolded(made) if program.parts and not program.keeps_axes and not program.guards else None
    if flat is not None:
        try:
            return Elementwise(program, flat).made()
        except Unsupported:
            pass
    return made.made()


def _is_apart(program: Program, pair: tuple[Sym, Sym], pairs: list[tuple[Sym, Sym]]) -> bool:
    """Whether a pair is a copy that shares nothing with the others: it is better made by itself, and before them."""
    out, value = pair
    if value.kind != "tile" or not value.raw or program.dtype_of(value.source) != program.dtype_of(out.source) or program.guards:
        return False
    others = [leaf for other in pairs if other is not pair for leaf in leaves(other[1]) if leaf.kind == "tile"]
    return not any(program.meets(source, leaf.source) for leaf in others for source in (out.source, value.source))


# ---- elementwise ----------------------------------------------------------------------------------------------------


def _read(op: abi.Uop) -> range:
    """The tiles that an operation reads."""
    return range(op.a, op.a + (op.b if op.code == abi.TREE else op.code in (abi.LOAD, abi.LOAD_RAW)))


class Elementwise:
    """Values as one elementwise program: phases over the elements of a row, and once for the row."""

    def __init__(self, program: Program, pairs: list[tuple[Sym, Sym]]) -> None:
        self.program, self.pairs = program, pairs
        self.tiles: list[tuple[Any, tuple[int, ...], int]] = []  # source, strides over the iteration space, dtype
        self.tile_numbers: dict[Any, int] = {}
        self.phases: dict[tuple[int, int], list[Any]] = {}  # (depth, 0 row or 1 element) -> operations
        self.memo: dict[Any, int] = {}
        self.numbers: dict[int, int] = {}  # id of a value -> its number; what is computed alike has the same
        self.alike: dict[Any, int] = {}
        self.kept: dict[int, int] = {}  # number of a value -> the row that is kept of it
        self.sources: list[Any] = []
        self.registers = 0
        self.depths: dict[int, int] = {}
        self.named: list[Sym] = []  # keeps alive what the tables above know by id()
        folds = {id(f): f for _, v in pairs for f in folds_of(v)}
        if folds:
            first = next(iter(folds.values()))
            self.shape, self.axes = first.args[0].shape, first.more["axes"]
            if any(f.args[0].shape != self.shape or f.more["axes"] != self.axes for f in folds.values()):
                raise Unsupported("folds over several shapes")
        else:
            self.shape, self.axes = self._plain_shape(), ()
        self.count = prod(self.shape)
        if self.axes:
            self.outer = tuple([i for i in range(len(self.shape)) if i not in self.axes])
            self.rows = prod([self.shape[i] for i in self.outer])
            self.full_row = tuple([1 if i in self.axes else n for i, n in enumerate(self.shape)])
        else:
            self.outer, self.rows, self.full_row = tuple(range(len(self.shape))), self.count, self.shape
        if program.keeps_axes and program.iteration is not None and (self.axes or self.shape != program.iteration):
            raise Unsupported("a mask, or an index that may be outside, on a fold")
        self.preds: list[tuple[int, ...]] = []
        self.indices: list[tuple[int, ...]] = []
        self.loaded: list[tuple[tuple[int, int], Any, int]] = []
        self.stored: list[tuple[tuple[int, int], Any]] = []

    def _plain_shape(self) -> tuple[int, ...]:
        return self.pairs[0][0].shape if len(self.pairs) == 1 else max([o.shape for o, _ in self.pairs], key=prod)

    # ---- operands ----
    def spread(self, sym: Sym, row: bool = False) -> tuple[int, ...]:
        """Strides of a leaf over the iteration space."""
        strides = sym.strides or (0,) * sym.ndim
        if row or (self.axes and sym.size == self.rows and sym.shape != self.full_row):
            kept = strides_of(sym.shape, strides, tuple(self.shape[i] for i in self.outer)) if sym.size > 1 else (0,) * len(self.outer)
            out = [0] * len(self.shape)
            for i, s in zip(self.outer, kept, strict=True):
                out[i] = s
            return tuple(out)
        if sym.shape == self.shape:
            return tuple([0 if n == 1 else s for n, s in zip(sym.shape, strides, strict=True)])
        if sym.size == 1:
            return (0,) * len(self.shape)
        if sym.ndim > len(self.shape):
            raise Unsupported("an operand with more dimensions than the result")
        grown = (1,) * (len(self.shape) - sym.ndim) + sym.shape
        padded = (0,) * (len(self.shape) - sym.ndim) + tuple(strides)
        for n, wanted in zip(grown, self.shape, strict=True):
            if n not in (1, wanted):
                if sym.size == self.count:
                    return strides_of(sym.shape, strides, self.shape)
                raise Unsupported(f"an operand of shape {sym.shape} for {self.shape}")
        return tuple([0 if n == 1 else s for n, s in zip(grown, padded, strict=True)])

    def tile(self, source: Any, strides: tuple[int, ...]) -> int:
        """Number of a tile of the program."""
        key = source, strides
        found = self.tile_numbers.get(key)
        if found is None:
            found = self.tile_numbers[key] = len(self.tiles)
            self.tiles.append((source, strides, self.program.dtype(source)))
        return found

    def register(self) -> int:
        self.registers += 1
        if self.registers > MAX_REGISTERS:
            raise Unsupported("more values than registers")
        return self.registers - 1

    # ---- expressions ----
    def depth(self, sym: Sym) -> int:
        """How many folds are inside each other in a value."""
        if not sym.args:
            return 0
        found = self.depths.get(id(sym))
        if found is None:
            found = max([self.depth(a) for a in sym.args]) + (sym.kind == "fold")
            self.depths[id(sym)] = found
            self.named.append(sym)
        return found

    def is_row(self, sym: Sym) -> bool:
        """Whether a value has one element for each row."""
        return self.axes != () and self.depth(sym) > 0 and sym.size == self.rows

    def emit(self, phase: tuple[int, int], *op: Any, **more: Any) -> None:
        self.phases.setdefault(phase, []).append(uop(*op, **more))

    def number(self, sym: Sym) -> int:
        """The same for values that are computed alike from the same elements."""
        found = self.numbers.get(id(sym))
        if found is None:
            self.named.append(sym)
            source = sym.source
            if sym.kind == "tile" and source not in self.sources:
                same = self.program.same
                source = next((s for s in self.sources if same(s, source)), source)
                if source is sym.source:
                    self.sources.append(source)
            key = (sym.kind, sym.name, sym.shape, sym.dtype, sym.strides, source, repr(sym.value), sym.raw,
                   repr(sorted(sym.more.items())) if sym.more else "", *[self.number(a) for a in sym.args])  # fmt: skip
            found = self.numbers[id(sym)] = self.alike.setdefault(key, len(self.alike))
        return found

    def value(self, sym: Sym, phase: tuple[int, int]) -> int:
        """Register of a value in a phase."""
        if sym.kind == "fold":
            return self._fold(sym)
        if phase[1] and self.is_row(sym):
            return self.value(sym, (self.depth(sym), 0))
        number = self.number(sym)
        key = number, phase if phase[1] else "row"
        made = self.memo.get(key)
        if made is not None:
            return made
        made = self._from_before(sym, number, phase) if phase[1] and sym.args and not sym.raw else None
        if made is None:
            made = self._value(sym, phase)
        self.memo[key] = made
        self.named.append(sym)
        return made

    def _from_before(self, sym: Sym, number: int, phase: tuple[int, int]) -> int | None:
        """A value that an earlier phase has computed for the whole row, if keeping it is less work than doing that again."""
        before = min([p for p in self.phases if p[1] and p < phase and (number, p) in self.memo], default=None)
        if before is None or prod([self.shape[i] for i in self.axes]) > KEPT or effort(sym) < EFFORT:
            return None
        if number not in self.kept:
            self.kept[number] = len(self.kept)
            self.emit(before, abi.KEEP, self.kept[number], self.memo[number, before])
        made = self.register()
        self.emit(phase, abi.KEPT, made, self.kept[number])
        return made

    def _fold(self, sym: Sym) -> int:
        key = self.number(sym), "row"
        if key not in self.memo:
            phase = (self.depth(sym) - 1, 1)
            source = self.value(sym.args[0], phase)
            made = self.register()
            self.emit(phase, abi.FOLD, made, source, fn=sym.name)
            self.memo[key] = made
            self.named.append(sym)
        return self.memo[key]

    def _value(self, sym: Sym, phase: tuple[int, int]) -> int:
        row = not phase[1]
        if sym.kind == "const":
            made = self.register()
            self.emit(phase, abi.CONST, made, imm=sym.value, bits=sym.more.get("bits") if sym.raw else None)
            return made
        if sym.kind == "tile":
            made, number = self.register(), self.tile(sym.source, self.spread(sym, row))
            self.loaded.append((phase, sym.source, number))
            self.emit(phase, abi.LOAD_RAW if sym.raw else abi.LOAD, made, number, pad=int(not row and self.program.far(sym.source)))
            return made
        if sym.kind in ("pred", "index"):
            used, table = (
                (self.program.preds_used, self.preds) if sym.kind == "pred" else (self.program.indices_used, self.indices)
            )
            if len(used) >= 8:
                raise Unsupported("more predicates than a call takes")
            used.append(sym.source)
            table.append(self.spread(sym, row))
            made = self.register()
            raw = int(sym.kind == "index" and sym.dtype.kind == "i")
            self.emit(phase, abi.PRED if sym.kind == "pred" else abi.INDEX, made, len(used) - 1, raw)
            return made
        if sym.kind == "call":
            return self._call(sym, phase)
        if sym.kind == "round":
            source = self.value(sym.args[0], phase)
            made = self.register()
            self.emit(phase, abi.ROUND, made, source, int(sym.value))
            return made
        if sym.kind == "select":
            c, a, b = (self.value(x, phase) for x in sym.args)
            made = self.register()
            self.emit(phase, abi.SELECT, made, a, b, c)
            return made
        if sym.kind == "tree":
            return self._tree(sym, phase)
        raise Unsupported(f"{sym.kind} inside an expression")

    def _tree(self, sym: Sym, phase: tuple[int, int]) -> int:
        """The tree of a function over elements of tiles, whose numbers follow each other."""
        tiles = [(leaf.source, self.spread(leaf)) for leaf in sym.args]
        first = self.tile_numbers.get(tiles[0], len(self.tiles))
        if any(self.tile_numbers.get(tile) != first + i for i, tile in enumerate(tiles)):
            first = len(self.tiles)
            self.tiles += [(source, strides, self.program.dtype(source)) for source, strides in tiles]
            for number, tile in enumerate(tiles, first):
                self.tile_numbers[tile] = number
        self.loaded += [(phase, source, first + i) for i, (source, _) in enumerate(tiles)]
        made = self.register()
        self.emit(phase, abi.TREE, made, first, len(tiles), fn=sym.name, pad=int(self.program.far(tiles[0][0])))
        return made

    def _call(self, sym: Sym, phase: tuple[int, int]) -> int:
        entry = SCALAR[sym.name]
        bits = entry.group == "bitvec"
        numbers = [a for a in sym.args if a.kind == "const"]
        imm, regs, more = 0.0, [], {}
        for a in sym.args:
            if a.kind == "const" and len(sym.args) == 2 and len(numbers) == 1:
                regs.append(-1)
                if bits:
                    more["bits"] = integer(a.value)
                imm = a.value
            else:
                regs.append(self.value(a, phase))
        made = self.register()
        width, signed = -1, 0
        if bits:
            number = dtype_number(sym)
            width, signed = _WIDTH[number], int(number in _SIGNED)
        self.emit(phase, abi.FUNC, made, regs[0], regs[1] if len(regs) > 1 else -1, width, fn=sym.name, imm=imm, pad=signed, **more)
        return made

    def store(self, out: Sym, value: Sym) -> None:
        """Store a value in a tile."""
        dtype = self.program.dtype(out.source)
        if value.kind == "round" and int(value.value) == dtype:
            value = value.args[0]  # the store rounds
        row = self.is_row(value) or (bool(self.axes) and value.kind == "fold")
        if self.axes and not row and value.size == self.rows and out.size == self.rows and self.count != self.rows:
            row = True  # what is the same for a whole row, without a fold of its own
        if row:
            phase = (max(1, self.depth(value)), 0)
        else:
            phase = (self.depth(value), 1)
            if value.shape != self.shape and value.size == self.count and value.size > 1:
                value = value.reshape(self.shape)
        if out.size != (self.rows if row else self.count):
            raise Unsupported(f"a result of {out.shape} among results of {self.shape}")
        where = self.spread(out, row)
        number = self.tile(out.source, where)
        self.stored.append((phase, out.source))
        far = int(not row and self.program.far(out.source))
        guard = -1
        if self.program.guards:
            parts = [self.value(g, phase) for g in self.program.guards]
            guard = parts[0]
            for p in parts[1:]:
                made = self.register()
                self.emit(phase, abi.FUNC, made, guard, p, fn="multiply")
                guard = made
        if value.kind == "exact":
            a, b = (self.value(x, phase) for x in value.args)
            made = self.register()
            signs = sum(int(dtype_number(x) in _SIGNED) << i for i, x in enumerate(value.args))
            self.emit(phase, abi.EXACT, made, a, b, dtype, fn=value.name, pad=signs)
            self.emit(phase, abi.STORE_RAW if dtype > 6 else abi.STORE, number, made, -1, guard, pad=far)
        elif value.raw:
            if dtype_number(value) != dtype:
                value = converted(value, dtype)
                self.emit(phase, abi.STORE, number, self.value(value, phase), -1, guard, pad=far)
            else:
                self.emit(phase, abi.STORE_RAW, number, self.value(value, phase), -1, guard, pad=far)
        else:
            self.emit(phase, abi.STORE, number, self.value(value, phase), -1, guard, pad=far)

    def made(self) -> Made:
        """The program."""
        folds = {self.number(f): f for _, v in self.pairs for f in folds_of(v)} if self.axes else {}
        for fold in sorted(folds.values(), key=self.depth):  # so that later phases find what they have computed
            self._fold(fold)
        for out, value in self.pairs:
            self.store(out, value)
        self._order()
        order = [*self.outer, *self.axes]
        strides = [*[s for _, s, _ in self.tiles], *self.preds, *self.indices]
        shape = self.shape
        if order != [*range(len(shape))]:
            strides = [tuple([s[i] for i in order]) for s in strides]
            shape = tuple([shape[i] for i in order])
        outer = len(self.outer)
        if self.program.keeps_axes:
            outer = len(self.outer) if self.axes else max(0, len(shape) - 1)
        elif self.axes:
            left, first = joined(shape[:outer], [s[:outer] for s in strides])
            right, second = joined(shape[outer:], [s[outer:] for s in strides])
            shape, strides, outer = left + right, [a + b for a, b in zip(first, second, strict=True)], len(left)
        else:
            shape, strides = joined(shape, strides)
            outer = len(shape) - (2 if len(shape) > 1 and shape[-1] < abi.SHORT else 1)
        if len(shape) > abi.RANK:
            raise Unsupported("too many dimensions")
        tiles, preds = strides[: len(self.tiles)], strides[len(self.tiles) : len(self.tiles) + len(self.preds)]
        indices = strides[len(self.tiles) + len(self.preds) :]
        phases = [(not element, self.phases[depth, element]) for depth, element in sorted(self.phases)]
        what = elementwise(
            outer,
            len(shape) - outer,
            shape,
            phases=phases,
            tiles=[(s, dtype) for s, (_, _, dtype) in zip(tiles, self.tiles, strict=True)],
            preds=preds,
            indices=indices,
        )
        kept = self.program.iteration if self.program.keeps_axes else None
        return abi.K_EW, what, [source for source, _, _ in self.tiles], shape if kept is None else kept


    def _order(self) -> None:
        """Values are of what was in memory before the program: in a phase, loads come before the stores into the same elements. Raises
        Unsupported where that is not enough."""
        early: set[tuple[tuple[int, int], int]] = set()
        for when, source in self.stored:
            for later, other, tile in self.loaded:
                if later < when or not self.program.meets(source, other):
                    continue
                if later > when or not self.program.apart(source, other):
                    raise Unsupported("an operand that is read again after it has changed")
                early.add((later, tile))
        for phase, ops in self.phases.items() if early else ():
            ops.sort(key=lambda op: not any((phase, tile) in early for tile in _read(op)))
