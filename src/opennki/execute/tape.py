"""The tree of nodes as a flat tape in memory, for C."""

from __future__ import annotations

import array as memory
import ctypes as C
import struct
from dataclasses import dataclass, field
from operator import add
from typing import TYPE_CHECKING, Any

import numpy as np

from opennki.execute import abi
from opennki.execute.calls import Call, kept_bytes, pointer, product_scratch
from opennki.execute.nodes import Back, Branch, Divide, Forget, Loop, Mark, Node, Repeat, Run, Zero
from opennki.ir.affine import Affine, Var
from opennki.isa import dtypes

if TYPE_CHECKING:
    from opennki.execute.lower import Lowering

Op = tuple[int, int, int, int, int]  # code, a, b, c, n


class Native:
    """A tape laid out for C. Everything that the structures point to lives as long as this object."""

    def __init__(self, lowering: Lowering) -> None:
        self.layout = lowering.layout
        self.ops: list[Op] = []
        self.calls: list[Call] = []
        self.affines: list[Affine] = []
        self.tests: list[tuple[Affine, int]] = []
        self.watches: list[Mark] = []
        # after the tensors: the cells of those that are watched
        first = len(self.layout.allocs)
        self.cells = {alloc: (first + n, lowering.watch.size(alloc)) for n, alloc in enumerate(lowering.watch.cells)}
        self.body(lowering.nodes)
        self.emit(abi.OP_END)
        self.n_env = max(1, len(self.layout.vars))
        self.n_buffers = first + len(self.cells)
        self.image = self._image()

    # ---- ops ----
    def emit(self, code: int, a: int = 0, b: int = 0, c: int = 0, n: int = 0) -> int:
        """Append an op; returns its place."""
        self.ops.append((code, a, b, c, n))
        return len(self.ops) - 1

    def patch(self, place: int) -> None:
        """A jump goes to what comes next."""
        code, a, _, c, n = self.ops[place]
        self.ops[place] = (code, a, len(self.ops), c, n)

    def affine(self, expr: Affine) -> int:
        """Number of an affine expression."""
        self.affines.append(expr)
        return len(self.affines) - 1

    def body(self, nodes: list[Node]) -> None:
        """The ops of a list of nodes."""
        for node in nodes:
            if isinstance(node, Run):
                self.calls.append(node.call)
                self.emit(abi.OP_RUN, len(self.calls) - 1)
            elif isinstance(node, Loop):
                slot = self.layout.var(node.var)
                start = self.emit(abi.OP_FOR, slot, c=int(node.parallel), n=node.trips)
                self.body(node.body)
                self.emit(abi.OP_NEXT, slot, start + 1, n=node.trips)
                self.patch(start)
            elif isinstance(node, Branch):
                test = self.emit(abi.OP_IF, self.affine(node.test))
                self.body(node.then)
                if node.orelse:
                    jump = self.emit(abi.OP_JUMP)
                    self.patch(test)
                    self.body(node.orelse)
                    self.patch(jump)
                else:
                    self.patch(test)
            elif isinstance(node, Divide):
                self.emit(abi.OP_DIV, self.layout.var(node.var), self.affine(node.of), n=node.division.by)
            elif isinstance(node, Zero):
                self.emit(abi.OP_ZERO, node.slot, n=node.size)
            elif isinstance(node, Forget):
                self.emit(abi.OP_ZERO, self.cells[node.alloc][0], n=node.size)
            elif isinstance(node, Mark):
                self.watches.append(node)
                self.emit(abi.OP_MARK, len(self.watches) - 1)
            elif isinstance(node, Back):
                self.emit(abi.OP_BACK, node.index)
            elif isinstance(node, Repeat):
                self.emit(abi.OP_FOR, node.counter, n=1)
                start = len(self.ops)
                self.body(node.body)
                self.emit(abi.OP_NEXT, node.counter, start, n=-1)  # counts on, and never goes back
                size = dtypes.itemsize(node.cond.dtype) + 256 * dtypes.is_float(node.cond.dtype)
                for base, count in node.tests:
                    self.tests.append((base, node.slot))
                    self.emit(abi.OP_TEST, len(self.tests) - 1, start, size, count)

    def watch(self, node: Mark, base: list[tuple[int, int, int]]) -> Any:
        """The structure of a use of a watched tensor."""
        out = abi.Watch(self.cells[node.alloc][0], node.error, len(node.shape), len(base))
        out.shape[: len(node.shape)] = node.shape
        for i, (expr, (cell, cells)) in enumerate(zip(base, node.cells, strict=True)):
            out.base[i], out.cell[i], out.cells[i] = expr, cell, cells
            if node.ends:
                out.low[i], out.high[i] = node.ends[i]
            else:
                out.moving[i][: len(node.shape)] = node.moving[i]
        return out

    # ---- memory ----
    def _image(self) -> Image:
        terms: list[int] = []
        slots: dict[Var, int] = self.layout.vars
        image = Image(n_env=self.n_env, n_buffers=self.n_buffers)

        def affine(expr: Affine) -> tuple[int, int]:
            """A constant, and the first term and, in the upper half, how many there are."""
            if not expr.terms:
                return expr.const, 0
            first = len(terms) // 2
            for a, c in expr.terms:
                terms.extend((c, slots[a]))  # type: ignore[index]
            return expr.const, first | len(expr.terms) << 32

        def kept(call: Call) -> tuple[int, int]:
            if not any(call.places):
                return (call.errors, -1) if call.kind == abi.K_STEPS else (-1, -1)
            numbers = [-1, -1]
            for operand, places in enumerate(call.places):
                if places:
                    numbers[operand] = len(image.keeps) // 2
                    image.keeps.extend((places, kept_bytes(call.what, operand)))
            return numbers[0], numbers[1]

        image.calls = calls = bytearray(_CALL.size * len(self.calls))
        addresses, bounds, clips, exprs = image.addresses, image.bounds, image.clips, image.exprs
        known: dict[int, int] = {}
        for number, c in enumerate(self.calls):
            what = known.get(id(c.what))
            if what is None:
                what = known[id(c.what)] = len(image.whats)
                image.whats.append(c.what)
            rank, starts = len(c.shape), (8 * len(addresses), 8 * len(bounds), 8 * len(clips), 8 * len(exprs))
            for e, slot in c.addresses:
                addresses.extend((*affine(e), slot) if e.terms else (e.const, 0, slot))
            for e, strides, *rest in c.bounds:
                bounds.extend((*affine(e), *strides, *_PADS[len(strides)], *rest))
            for e, axis, stride in c.clips:
                clips.extend((*affine(e), axis, stride))
            for e in (*c.preds, *c.indices):
                exprs.extend(affine(e))
            _CALL.pack_into(
                calls, number * _CALL.size, c.kind, rank, what, *c.shape, *_PADS[rank], len(c.addresses), len(c.bounds), len(c.clips),
                len(c.preds), len(c.indices), c.whole, *(kept(c) if c.kind in _OF_THEIR_OWN else _NOT_KEPT), *starts,
                starts[3] + 16 * len(c.preds),
            )  # fmt: skip
        image.ops = bytearray().join(_OP.pack(*op) for op in self.ops)
        for e in self.affines:
            image.affines.extend(affine(e))
        for e, slot in self.tests:
            image.tests.extend((*affine(e), slot))
        for w in self.watches:
            image.watches.append(self.watch(w, [(const, rest & 0xFFFFFFFF, rest >> 32) for const, rest in map(affine, w.base)]))
        image.terms.extend(terms)
        image.scratch = max([scratch_of(c) for c in self.calls if c.kind in _OF_THEIR_OWN], default=0)
        return image


def _table() -> memory.array[int]:
    return memory.array("q")


@dataclass
class Image:
    """A tape without pointers: tables of 64-bit integers, and records of calls whose pointers are numbers of descriptors (`whats`) and
    byte offsets into the tables."""

    n_env: int
    n_buffers: int
    scratch: int = 0
    ops: bytearray = field(default_factory=bytearray)
    calls: bytearray = field(default_factory=bytearray)
    addresses: memory.array[int] = field(default_factory=_table)
    bounds: memory.array[int] = field(default_factory=_table)
    clips: memory.array[int] = field(default_factory=_table)
    exprs: memory.array[int] = field(default_factory=_table)
    affines: memory.array[int] = field(default_factory=_table)
    tests: memory.array[int] = field(default_factory=_table)
    terms: memory.array[int] = field(default_factory=_table)
    keeps: memory.array[int] = field(default_factory=_table)
    whats: list[Any] = field(default_factory=list)
    watches: list[Any] = field(default_factory=list)

    def laid(self) -> tuple[abi.TapeStruct, list[Any]]:
        """The tape as C wants it, and what it points to."""
        calls, ops = memory.array("B", self.calls), memory.array("B", self.ops)
        watches = (abi.Watch * max(1, len(self.watches)))(*self.watches)
        keep: list[Any] = [self, calls, ops, watches]
        places = [pointer(what) for what in self.whats]
        bases = [_place(table) for table in (self.addresses, self.bounds, self.clips, self.exprs, self.exprs)]
        if len(calls) < FEW * _CALL.size:
            for at in range(0, len(calls), _CALL.size):
                _WHAT.pack_into(calls, at + _WHAT_AT, places[_WHAT.unpack_from(calls, at + _WHAT_AT)[0]])
                _TABLES.pack_into(calls, at + _TABLES_AT, *map(add, _TABLES.unpack_from(calls, at + _TABLES_AT), bases))
        else:
            table = np.frombuffer(calls, CALL)
            table["what"] = np.array(places, np.uint64)[table["what"].astype(np.intp)]
            for name, base in zip(_TABLE_NAMES, bases, strict=True):
                table[name] += np.uint64(base)
        struct = abi.TapeStruct.from_buffer_copy(_TAPE.pack(
            _place(ops), _place(calls), _place(self.affines), _place(self.terms), _place(self.tests), C.addressof(watches),
            _place(self.keeps), len(ops) // _OP.size, self.n_env, self.n_buffers, self.scratch, len(self.keeps) // 2,
        ))  # fmt: skip
        return struct, keep


def _place(table: memory.array[int]) -> int:
    """Address of a table; one that is empty has none of its own."""
    return table.buffer_info()[0] or _NOWHERE.buffer_info()[0]


def scratch_of(call: Call) -> int:
    """Bytes of scratch memory of a call."""
    if call.kind == abi.K_MM:
        return product_scratch(call.what)
    return int(call.what.scratch) if call.kind == abi.K_STEPS else 0


_CALL, _OP, _TAPE = struct.Struct(f"=iiQ{abi.RANK}q8i5Q"), struct.Struct("=4iq"), struct.Struct("=7Q5q")
CALL = np.dtype([
    ("kind", "i4"), ("rank", "i4"), ("what", "u8"), ("shape", "i8", abi.RANK), ("counts", "i4", 5), ("whole", "i4"), ("keep", "i4", 2),
    ("addresses", "u8"), ("bounds", "u8"), ("clips", "u8"), ("preds", "u8"), ("indices", "u8"),
])  # fmt: skip
assert _CALL.size == C.sizeof(abi.Call) == CALL.itemsize and _OP.size == C.sizeof(abi.OpStruct)
assert _TAPE.size == C.sizeof(abi.TapeStruct)
_OF_THEIR_OWN, _NOT_KEPT = (abi.K_MM, abi.K_STEPS), (-1, -1)
_NOWHERE = memory.array("q", [0])
_TABLE_NAMES = ("addresses", "bounds", "clips", "preds", "indices")
_WHAT, _TABLES = struct.Struct("=Q"), struct.Struct("=5Q")
_WHAT_AT, _TABLES_AT = abi.Call.what.offset, abi.Call.addresses.offset
FEW = 32  # calls below which NumPy's own time counts
_SIZES = {abi.Address: 3, abi.Bound: abi.RANK + 6, abi.Clip: 4, abi.AffineExpr: 2, abi.Term: 2, abi.Keep: 2}
assert all(C.sizeof(kind) == 8 * size for kind, size in _SIZES.items())
_PADS = [(0,) * (abi.RANK - rank) for rank in range(abi.RANK + 1)]
