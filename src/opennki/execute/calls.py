"""Native calls before they are laid out in memory, and the ways they go over memory, which passes change.

A call that goes over an iteration space with one stride per operand and dimension (elementwise programs and copies) can be taken apart as a
`Walk` and put together again over another one. Other calls are opaque to passes.
"""

from __future__ import annotations

import ctypes as C
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from opennki.execute import abi
from opennki.execute.assemble import Program, Walk, affine_array, tile_array
from opennki.execute.shapes import joined
from opennki.ir.affine import Affine
from opennki.ir.nodes import Alloc, Instr
from opennki.isa import dtypes

Strides = tuple[int, ...]
FAR = 4 << 20  # bytes from which on a tensor is not expected in the second-level cache


@dataclass
class Call:
    """An instruction, or several, with a native form."""

    kind: int
    what: Any
    addresses: list[tuple[Affine, int]]
    shape: tuple[int, ...] = ()
    bounds: list[tuple[Affine, tuple[int, ...], int, int, int, int]] = field(default_factory=list)  # base, strides, low, high, size, error
    clips: list[tuple[Affine, int, int]] = field(default_factory=list)
    preds: list[Affine] = field(default_factory=list)
    indices: list[Affine] = field(default_factory=list)
    instrs: tuple[Instr, ...] = ()  # what it computes
    whole: bool = False  # the mask decides whether it runs, and narrows nothing
    places: tuple[int, int] = (0, 0)  # of a product: places of each operand that is packed once and kept, see execute.keep
    errors: int = 0  # of steps: how many are reported before those of its descriptor, which count from 1
    sources: list[tuple[int, int]] = field(default_factory=list)  # what it was made from: number of each operand, and bytes into it

    def but(self, **fields: Any) -> Call:
        """The same with other fields."""
        made = Call.__new__(Call)
        made.__dict__.update(self.__dict__, **fields)
        return made

    @property
    def size(self) -> int:
        """Elements that it handles, about; a step of a matrix product is much less than that."""
        count = prod(self.shape)
        return count * max(1, int(self.what.K) // 32) * max(1, int(self.what.blocks)) if self.kind == abi.K_MM else count

    @property
    def overwrites(self) -> bool:
        """Whether the results get new values in all elements, whatever they had before."""
        if self.clips or self.preds:
            return False
        return self.kind in (abi.K_EW, abi.K_COPY, abi.K_SCAN, abi.K_PFOLD) or (
            self.kind == abi.K_MM and self.what.accumulate != abi.ADDS_TO_RESULT
        )

    def expressions(self) -> list[Affine]:
        """Every affine expression of the call."""
        return [
            *(e for e, _ in self.addresses), *(b[0] for b in self.bounds), *(c[0] for c in self.clips), *self.preds, *self.indices,
        ]  # fmt: skip


def known(call: Call, key: Any, make: Callable[[], Any]) -> Any:
    """What `make` says of the descriptor of a call, by a key: calls that are alike share descriptors, which never change. Masks count."""
    table = call.what.__dict__.setdefault("known", {})
    key = key, not call.clips, not call.bounds
    found = table.get(key, _UNKNOWN)
    if found is _UNKNOWN:
        found = table[key] = make()
    return found


_UNKNOWN = object()


def _with(call: Call, addresses: list[tuple[Affine, int]], descriptor: tuple[Any, Strides]) -> Call:
    """A call at other addresses, with another descriptor and shape."""
    return call.but(addresses=addresses, what=descriptor[0], shape=descriptor[1])


def redescribed(call: Call, **fields: Any) -> Call:
    """The call with other fields of its descriptor, a structure that it may share."""
    what = type(call.what).from_buffer_copy(call.what)
    for name, value in fields.items():
        setattr(what, name, value)
    return call.but(what=what)


def descriptor_of(call: Call | None) -> tuple[Any, Strides] | None:
    """Descriptor and shape of a call, which others like it may share."""
    return None if call is None else (call.what, call.shape)


def space(call: Call) -> Walk | None:
    """The iteration space of a call, None where it is opaque."""
    if call.kind not in (abi.K_COPY, abi.K_EW):
        return None
    return known(call, "space", lambda: _space(call))  # type: ignore[no-any-return]


def _space(call: Call) -> Walk:
    if call.kind == abi.K_COPY:
        what, rank = call.what, call.what.rank
        strides = [tuple(what.d_stride[:rank]), tuple(what.s_stride[:rank])]
        return Walk(tuple(what.shape[:rank]), rank, not call.clips, strides, [], [], _FIRST)
    walk: Walk = call.what.walk
    return replace(walk, free=False) if call.clips else walk


_FIRST = frozenset({0})


def over(call: Call, walk: Walk, tidy: bool = True) -> Call | None:
    """The call over another iteration space; None where it has more dimensions than native code takes. `tidy`: its dimensions are put in
    order and joined first."""
    if tidy and not (call.clips or call.bounds):
        walk = _tidied(walk) if walk.free else _joined(walk, walk.outer)
    rank = len(walk.shape)
    if rank > abi.RANK:
        return None
    if call.kind == abi.K_COPY:
        copy = abi.Copy(rank, call.what.width)
        copy.shape[:rank], copy.d_stride[:rank], copy.s_stride[:rank] = walk.shape, walk.tiles[0], walk.tiles[1]
        return call.but(what=copy, shape=walk.shape)
    old = call.what
    new = abi.Elementwise.from_buffer_copy(old.structure)
    tiles, preds, indices = tile_array(walk.tiles, old.walk.dtypes), affine_array(walk.preds), affine_array(walk.indices)
    new.outer, new.inner = walk.outer, rank - walk.outer
    new.shape[:rank] = walk.shape
    new.tiles, new.preds, new.indices = tiles, preds, indices
    made = replace(walk, free=old.walk.free, dtypes=old.walk.dtypes)
    return call.but(what=Program(new, (old, tiles, preds, indices), made), shape=walk.shape)


def _tidied(walk: Walk) -> Walk:
    """Dimensions in the order of what is stored, joined where that is the same walk for all operands."""
    lead = walk.tiles[min(walk.stores)]
    order = sorted(range(len(walk.shape)), key=lambda d: -abs(lead[d]))

    def ordered(table: list[Strides]) -> list[Strides]:
        return [tuple(s[d] for d in order) for s in table]

    shape = tuple(walk.shape[d] for d in order)
    tiles, preds, indices = map(ordered, (walk.tiles, walk.preds, walk.indices))
    walk = _joined(replace(walk, shape=shape, tiles=tiles, preds=preds, indices=indices), len(order))
    rank = len(walk.shape)
    return replace(walk, outer=rank - (2 if rank > 1 and walk.shape[-1] < abi.SHORT else 1))


def _joined(walk: Walk, count: int) -> Walk:
    """The first `count` dimensions joined where that is the same walk for all operands."""
    tables = [*walk.tiles, *walk.preds, *walk.indices]
    shape, strides = joined(walk.shape[:count], [t[:count] for t in tables])
    strides = [s + t[count:] for s, t in zip(strides, tables, strict=True)]
    n, m = len(walk.tiles), len(walk.tiles) + len(walk.preds)
    return replace(walk, shape=shape + walk.shape[count:], outer=len(shape), tiles=strides[:n], preds=strides[n:m], indices=strides[m:])


def product_scratch(what: Any) -> int:
    """Bytes of scratch memory of a matrix product."""
    from opennki.execute.build import library

    lib = library().lib
    assert lib is not None
    return int(lib.nki_mm_scratch(C.byref(what)))


def kept_bytes(what: Any, moving: int) -> int:
    """Bytes of an operand of a matrix product as it is packed and kept, 0 where products are not made from packed operands."""
    from opennki.execute.build import library

    lib = library().lib
    assert lib is not None
    return int(lib.nki_mm_kept(C.byref(what), moving))


def pointer(what: Any) -> int:
    """Address of a descriptor."""
    return C.addressof(getattr(what, "structure", what))


# ---- operands ----
SIZES = {0: 4, 1: 2, 2: 2, 3: 1, 4: 1, 5: 1, 6: 4, 7: 4, 8: 4, 9: 2, 10: 2, 11: 1, 12: 1, 13: 1}  # bytes, by number of the dtype
_FIELDS = {
    # kind: (address, strides, dtype, extents, written) of each operand, by the names in the descriptor
    abi.K_MM: ((0, "s_stride", "s_dtype", ("K", "M"), False), (1, "m_stride", "m_dtype", ("K", "N"), False),
               (2, "d_stride", None, ("M", "N"), True)),
    abi.K_SCAN: ((0, "x_stride", "x_dtype", ("rows", "n"), False), (1, "y_stride", "y_dtype", ("rows", "n"), False),
                 (2, "d_stride", "d_dtype", ("rows", "n"), True), (3, "i_stride", "i_dtype", ("rows",), False)),
    abi.K_PFOLD: ((0, "x_stride", "x_dtype", ("p", "f"), False), (1, "d_stride", "d_dtype", ("f",), True)),
}  # fmt: skip


@dataclass(slots=True)
class Operand:
    """How a call goes over one of its operands: number of the address, extents, byte strides, bytes of an element, and whether it is
    written. `name`: the field of the descriptor that has the strides."""

    address: int
    shape: Strides
    strides: Strides
    width: int
    written: bool
    name: str = ""


def operands(call: Call) -> list[Operand] | None:
    """The operands of a call, None where it is opaque."""
    return known(call, ("operands", len(call.addresses)), lambda: _operands(call))  # type: ignore[no-any-return]


def _operands(call: Call) -> list[Operand] | None:
    walk = space(call)
    if walk is not None:
        if call.kind == abi.K_COPY:
            widths = [call.what.width] * 2
        else:
            widths = [SIZES[number] for number in call.what.walk.dtypes]
        return [Operand(i, walk.shape, s, w, i in walk.stores) for i, (s, w) in enumerate(zip(walk.tiles, widths, strict=True))]
    if call.kind not in _FIELDS:
        return None
    out = []
    for address, name, dtype, extents, written in _FIELDS[call.kind]:
        if address < len(call.addresses):
            strides = getattr(call.what, name)
            strides = (strides,) if isinstance(strides, int) else tuple(strides)
            width = 4 if dtype is None else SIZES[getattr(call.what, dtype)]
            out.append(Operand(address, tuple(getattr(call.what, e) for e in extents), strides, width, written, name))
    return out


def over_split(call: Call, walk: Walk, address: int, dims: list[tuple[int, int]]) -> Call | None:
    """The call with dimensions split where an operand goes over several of the dimensions (extent, stride) in one walk. None where it has
    more dimensions then than native code takes."""
    key = "split", address, tuple(dims)
    descriptor = known(call, key, lambda: descriptor_of(_over_split(call, walk, address, dims)))
    return None if descriptor is None else call if descriptor[0] is call.what else _with(call, call.addresses, descriptor)


def _over_split(call: Call, walk: Walk, address: int, dims: list[tuple[int, int]]) -> Call | None:
    shape = list(walk.shape)
    tables = [[list(s) for s in table] for table in (walk.tiles, walk.preds, walk.indices)]
    lead = tables[0][address]
    axis, split = 0, False
    while axis < len(shape):
        n = next((n for n, d in dims if lead[axis] == d and n < shape[axis] and shape[axis] % n == 0), None)
        if n is not None:
            split = True
            shape[axis : axis + 1] = [shape[axis] // n, n]
            for table in tables:
                for strides in table:
                    strides[axis : axis + 1] = [strides[axis] * n, strides[axis]]
        else:
            axis += 1
    if not split:
        return call
    tiles, preds, indices = ([tuple(s) for s in table] for table in tables)
    return over(call, replace(walk, shape=tuple(shape), outer=len(shape) - 1, tiles=tiles, preds=preds, indices=indices), tidy=False)


def moved(call: Call, operand: Operand, offset: Affine, slot: int, strides: Strides) -> Call | None:
    """The call with an operand somewhere else."""
    descriptor = known(call, ("moved", operand.address, strides), lambda: descriptor_of(_restrided(call, operand, strides)))
    if descriptor is None:
        return None
    addresses = list(call.addresses)
    addresses[operand.address] = offset, slot
    return _with(call, addresses, descriptor)


def _restrided(call: Call, operand: Operand, strides: Strides) -> Call | None:
    """The call with other strides of an operand."""
    walk = space(call)
    if walk is not None:
        tiles = list(walk.tiles)
        tiles[operand.address] = strides
        return over(call, replace(walk, tiles=tiles))
    what = type(call.what).from_buffer_copy(call.what)
    field_ = getattr(what, operand.name)
    setattr(what, operand.name, strides[0] if isinstance(field_, int) else type(field_)(*strides))
    return call.but(what=what)


def widened(call: Call) -> Call:
    """A call on short rows, several of them at a time."""
    if call.kind != abi.K_EW or call.bounds or call.clips:
        return call
    descriptor = known(call, "widened", lambda: descriptor_of(_widened(call)))
    return call if descriptor is None or descriptor[0] is call.what else _with(call, call.addresses, descriptor)


def _widened(call: Call) -> Call:
    walk = space(call)
    if walk is None or not walk.free or len(walk.shape) < 2 or walk.shape[-1] >= abi.SHORT:
        return call
    return over(call, walk) or call


def is_far(alloc: Alloc) -> bool:
    """Whether a tensor is in main memory and exceeds the caches of a core."""
    return not alloc.on_chip and alloc.size * dtypes.itemsize(alloc.dtype) >= FAR


def from_afar(call: Call, slot: int) -> Call:
    """The call with its loads from a tensor that exceeds the caches marked as such."""
    if call.kind != abi.K_EW:
        return call
    tiles = frozenset(n for n, (_, one) in enumerate(call.addresses) if one == slot)
    return _with(call, call.addresses, known(call, ("afar", tiles), lambda: (_from_afar(call.what, tiles), call.shape)))


def _from_afar(what: Any, tiles: frozenset[int]) -> Program:
    old = what.structure
    new, uops = abi.Elementwise.from_buffer_copy(old), (abi.Uop * max(1, old.n_uops))(*old.uops[: old.n_uops])
    for op in uops[: old.n_uops]:
        if op.code in (abi.LOAD, abi.LOAD_RAW, abi.TREE) and op.a in tiles:
            op.pad = 1
    new.uops = uops
    return Program(new, (what, uops), what.walk)
