"""Forwarding: what a copy has put into a tile on chip is read where it comes from, what is only copied on is stored where it goes, and
what does not change in a loop is computed before it.

A kernel loads each tile before it uses it, because the hardware wants it in SBUF; native code reads it in HBM as well. Everything here is
about memory: the same elements are computed from the same elements, so no bit changes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from opennki.execute import abi
from opennki.execute.calls import (
    SIZES,
    Call,
    Operand,
    descriptor_of,
    from_afar,
    is_far,
    kept_bytes,
    known,
    moved,
    operands,
    over_split,
    space,
)
from opennki.execute.nodes import Back, Divide, Loop, Made, Node, Run, Zero, inner, walk
from opennki.execute.parallel import used
from opennki.ir.affine import Affine, Range, Var
from opennki.ir.nodes import Access, Alloc
from opennki.ir.verify import accesses

if TYPE_CHECKING:
    from opennki.execute.lower import Lowering

OFTEN = 2  # reads of a tile above which it is worth having close together
FAR = 4096  # bytes between rows above which a product, which goes over them in short pieces, wants them close together


class Copied(NamedTuple):
    """A copy: extents and byte strides of both sides, those of the destination falling, and where both begin."""

    node: Run
    dims: list[tuple[int, int, int]]
    to: tuple[Affine, int]
    source: tuple[Affine, int]
    width: int
    target: Alloc
    origin: Access


def forward(lowering: Lowering, nodes: list[Node]) -> None:
    """Forward copies and move what does not change out of loops, in a tree of nodes."""
    written: set[Alloc] = set()
    for node in walk(nodes):
        if node.__class__ is Run:
            written.update([a.alloc for a, w in node.touches if w])
        elif node.__class__ is not Loop:
            written |= changed(node)
    _Body(lowering, nodes, written).forward()
    _hoist(nodes)


def changed(node: Node) -> set[Alloc]:
    """The tensors that a node itself writes."""
    kind = node.__class__
    if kind is Run:
        return {a.alloc for a, written in node.touches if written}
    if kind is Back:
        return {a.alloc for a, _, written in accesses(node.instr) if written}
    return {node.alloc} if kind is Zero else set()


class _Body:
    """A list of nodes, and where in it (or inside of what stands there) each tensor is used. `written`: the tensors that the kernel
    writes anywhere."""

    def __init__(self, lowering: Lowering, body: list[Node], written: set[Alloc]) -> None:
        self.lowering, self.body, self.written = lowering, body, written
        self.places: dict[Alloc, list[int]] = {}
        self.zeroed: dict[Alloc, list[int]] = {}
        places = self.places
        for n, node in enumerate(body):
            if node.__class__ is Run:
                for access, _ in node.touches:
                    at = places.get(access.alloc)
                    if at is None:
                        places[access.alloc] = [n]
                    elif at[-1] != n:
                        at.append(n)
                continue
            if node.__class__ is Made:
                continue
            found: dict[Alloc, None] = {}
            for one in walk([node]):
                if one.__class__ is Run:
                    for access, _ in one.touches:
                        found[access.alloc] = None
                elif one.__class__ is Zero:
                    self.zeroed.setdefault(one.alloc, []).append(n)
                elif one.__class__ is not Loop:
                    found.update(dict.fromkeys(used(one)))
            for alloc in found:
                places.setdefault(alloc, []).append(n)

    def forward(self) -> None:
        """Take out the copies that are not needed."""
        for node in self.body:
            for part in () if node.__class__ is Run else inner(node):
                _Body(self.lowering, part, self.written).forward()
        gone = set()
        for place, node in enumerate(self.body):
            copied = copy_of(node) if node.__class__ is Run else None
            if copied is not None and (self.read_at_source(place, copied) or self.stored_at_target(place, copied)):
                gone.add(place)
                for alloc in {copied.target, copied.origin.alloc}:
                    del self.places[alloc][bisect_left(self.places[alloc], place)]
        if gone:
            self.body[:] = [node for place, node in enumerate(self.body) if place not in gone]

    def read_at_source(self, place: int, copied: Copied) -> bool:
        """Let those who read the target of a copy read its source. True where nobody reads the target any more."""
        target, source, count = copied.target, copied.origin.alloc, self.lowering.uses
        if target is source or not (target.on_chip and target.kind == "local") or not 1 < count.get(target, 0) <= OFTEN + 1:
            return False
        at = self.places[target][bisect_right(self.places[target], place) :]
        users = [(n, node) for n in at for node in _users(self.body[n], target)]
        if not users or count.get(target) != len(users) + 1:
            return False  # somebody before it, or after this list
        if source in self.written and (
            any(place < n <= at[-1] for n in self.zeroed.get(source, ()))
            or any(source in changed(node) for n in self.between(source, place + 1, at[-1] + 1) for node in walk([self.body[n]]))
        ):
            return False
        changes: list[tuple[Run, Call]] = []
        times = 0
        for n, node in users:
            call = _redirected(node, copied, source not in self.written) if isinstance(node, Run) else None
            if call is None:
                return False
            changes.append((node, call))
            times += 1 if source not in self.written and _keeps(call, copied.source[1], node.ranges) else _times(self.body[n], node)
        if times > OFTEN:
            return False
        for node, call in changes:
            count[source] += source not in used(node)
            node.call = call
            node.touches = [t for t in node.touches if t[0].alloc is not target] + [(copied.origin, False)]
        count[source] -= 1
        del count[target]
        self.add(source, at)
        return True

    def between(self, alloc: Alloc, first: int, end: int) -> list[int]:
        """The places first .. end-1 that use a tensor."""
        places = self.places.get(alloc, [])
        return places[bisect_left(places, first) : bisect_left(places, end)]

    def add(self, alloc: Alloc, at: list[int]) -> None:
        """More places that use a tensor."""
        places = self.places.setdefault(alloc, [])
        for n in at:
            k = bisect_left(places, n)
            if k == len(places) or places[k] != n:
                places.insert(k, n)

    def stored_at_target(self, place: int, copied: Copied) -> bool:
        """Let the call that makes what a copy takes away store it where the copy puts it. True where the copy has nothing left to do."""
        middle, target, count = copied.origin.alloc, copied.target, self.lowering.uses
        if target is middle or not (middle.on_chip and middle.kind == "local") or count.get(middle) != 2:
            return False
        makers = self.places[middle][: bisect_left(self.places[middle], place)]
        if len(makers) != 1 or self.between(target, makers[0], place):
            return False
        node = self.body[makers[0]]
        if not isinstance(node, Run) or not node.call.overwrites or not all(w for a, w in node.touches if a.alloc is middle):
            return False
        if any(makers[0] <= n < place for alloc in (middle, target) for n in self.zeroed.get(alloc, ())):
            return False
        call, slot = node.call, copied.source[1]
        outs = [o for o in operands(call) or () if call.addresses[o.address][1] == slot]
        if len(outs) != 1 or not outs[0].written or prod(outs[0].shape) != prod(n for n, _, _ in copied.dims):
            return False
        back = turned(copied)
        moved_call = _moved(call, outs[0].address, back, node.ranges) if back is not None else None
        if moved_call is None:
            return False
        node.call = moved_call
        node.touches = [t for t in node.touches if t[0].alloc is not middle] + [t for t in copied.node.touches if t[1]]
        del count[middle]
        self.add(target, makers)
        return True


def copy_of(node: Run) -> Copied | None:
    """What a call copies, if it is nothing but a copy of elements."""
    call = node.call
    if call.clips or call.bounds or call.preds or call.indices or call.kind not in (abi.K_EW, abi.K_COPY):
        return None
    form = known(call, "copy", lambda: _copied(call))
    if form is None:
        return None
    to, source, width, dims = form
    target = [a for a, written in node.touches if written]
    origin = [a for a, written in node.touches if not written]
    if len(target) != 1 or len(origin) != 1:
        return None
    return Copied(node, dims, call.addresses[to], call.addresses[source], width, target[0].alloc, origin[0])


def _copied(call: Call) -> tuple[int, int, int, list[tuple[int, int, int]]] | None:
    """Address of the target, and of the source, width and dimensions of a copy."""
    if call.kind == abi.K_EW:
        what = call.what.structure
        if what.n_uops != 2 or what.n_tiles != 2 or what.tiles[0].dtype != what.tiles[1].dtype:
            return None
        load, store = what.uops[0], what.uops[1]
        if load.code not in (abi.LOAD, abi.LOAD_RAW) or store.code != load.code + 2 or store.a != load.d or store.c >= 0:
            return None
        if load.code == abi.LOAD and what.tiles[0].dtype > 6:
            return None
        source, to, width = load.a, store.d, SIZES[what.tiles[0].dtype]
    else:
        source, to, width = 1, 0, call.what.width
    walk_ = space(call)
    assert walk_ is not None
    dims = _falling([(n, d, s) for n, d, s in zip(walk_.shape, walk_.tiles[to], walk_.tiles[source], strict=True) if n > 1], width)
    return None if dims is None else (to, source, width, dims)


def _falling(dims: list[tuple[int, int, int]], width: int) -> list[tuple[int, int, int]] | None:
    """Dimensions with the strides of the target falling; None where they are no mixed radix."""
    dims = sorted(dims, key=lambda d: -d[1])
    reach = width
    for n, d, _ in reversed(dims):
        if d < reach:
            return None
        reach = n * d
    return dims


def turned(copied: Copied) -> Copied | None:
    """The copy the other way round."""
    dims = _falling([(n, s, d) for n, d, s in copied.dims], copied.width)
    return None if dims is None else copied._replace(dims=dims, to=copied.source, source=copied.to)


def _redirected(node: Run, copied: Copied, steady: bool) -> Call | None:
    """A call that reads the source of a copy instead of its target. steady: nobody writes the source."""
    call: Call | None = node.call
    if node.call.bounds or any([written for a, written in node.touches if a.alloc is copied.target]):
        return None
    for address, (_, slot) in enumerate(node.call.addresses):
        if slot == copied.to[1]:
            call = _moved(call, address, copied, node.ranges, steady) if call is not None else None
    return from_afar(call, copied.source[1]) if call is not None and is_far(copied.origin.alloc) else call


def _moved(call: Call, address: int, copied: Copied, ranges: dict[Var, Range], steady: bool = False) -> Call | None:
    """The call with what it addresses in the target of a copy at its place in the source."""
    offset, to = call.addresses[address][0], copied.to[0]
    if offset.const == to.const and offset.terms == to.terms and call.kind in (abi.K_EW, abi.K_COPY):  # as the copy, or a part of it
        key = "for a copy", address, copied.width, *copied.dims
        descriptor = known(call, key, lambda: descriptor_of(_elsewhere(call, address, copied, ranges, steady)))
        if descriptor is None:
            return None
        addresses = list(call.addresses)
        addresses[address] = copied.source
        return call.but(addresses=addresses, what=descriptor[0], shape=descriptor[1])
    return _elsewhere(call, address, copied, ranges, steady)


def _elsewhere(call: Call, address: int, copied: Copied, ranges: dict[Var, Range], steady: bool) -> Call | None:
    walk_ = space(call)
    if walk_ is not None and walk_.free:
        call = over_split(call, walk_, address, [(n, d) for n, d, _ in copied.dims]) or call
    operand = next((o for o in operands(call) or () if o.address == address), None)
    way = None if operand is None else _way(operand, call.addresses[address][0], copied, ranges)
    if way is None or operand is None:
        return None
    if call.kind == abi.K_MM and max(map(abs, way[2])) > FAR and not (steady and _is_kept(call, address, way[0], ranges)):
        return None
    return moved(call, operand, *way)


def _keeps(call: Call, slot: int, ranges: dict[Var, Range]) -> bool:
    """Whether a call will read a tensor only where it packs operands that are kept, once for each place."""
    at = [(n, offset) for n, (offset, one) in enumerate(call.addresses) if one == slot]
    return call.kind == abi.K_MM and all(n < 2 and _is_kept(call, n, offset, ranges) for n, offset in at)


def _is_kept(call: Call, address: int, offset: Affine, ranges: dict[Var, Range]) -> bool:
    """Whether a product will pack this operand once (execute.keep): it comes to the same place again in some loop."""
    moving = {atom for atom, _ in offset.terms}
    return any(hi > lo and var not in moving for var, (lo, hi) in ranges.items()) and kept_bytes(call.what, address) > 0


def _way(operand: Operand, offset: Affine, copied: Copied, ranges: dict[Var, Range]) -> tuple[Affine, int, tuple[int, ...]] | None:
    """Offset, slot and strides of what an operand addresses in the target of a copy, in its source. None where it is not inside, or not
    regular there."""
    if operand.width != copied.width:
        return None
    delta = offset.add(copied.to[0], -1)
    dims = copied.dims
    low = [0] * len(dims)
    high = [0] * len(dims)
    result = copied.source[0]
    rest = delta.const
    for k, (_, d, s) in enumerate(dims):
        if rest:
            digit, rest = divmod(rest, d)
            low[k], high[k] = digit, digit
            result = result.add(digit * s)
    if rest:
        return None

    def step(size: int) -> tuple[int, int] | None:
        for k, (_, d, _) in enumerate(dims):
            if abs(size) >= d and size % d == 0:
                return k, size // d
        return None

    for atom, coefficient in delta.terms:
        found = step(coefficient)
        if found is None or not isinstance(atom, Var):
            return None
        k, count = found
        a, b = atom.range(ranges)
        low[k], high[k] = low[k] + min(count * a, count * b), high[k] + max(count * a, count * b)
        result = result.add(Affine(0, ((atom, count * dims[k][2]),)))
    strides = []
    for n, stride in zip(operand.shape, operand.strides, strict=True):
        if n == 1 or stride == 0:
            strides.append(0)
            continue
        found = step(stride)
        if found is None:
            return None
        k, count = found
        low[k], high[k] = low[k] + min(0, count * (n - 1)), high[k] + max(0, count * (n - 1))
        strides.append(count * dims[k][2])
    if any([a < 0 or b >= n for a, b, (n, _, _) in zip(low, high, dims, strict=True)]):
        return None
    return (result, copied.source[1], tuple(strides))


def _users(top: Node, alloc: Alloc) -> list[Node]:
    """The nodes of a tree that use a tensor."""
    if top.__class__ is Run:
        return [top] if any([a.alloc is alloc for a, _ in top.touches]) else []
    return [node for node in walk([top]) if alloc in used(node)]


def _times(top: Node, wanted: Node) -> int:
    """How often a node runs in one execution of a node around it."""
    if top is wanted:
        return 1
    count = sum(_times(node, wanted) for part in inner(top) for node in part)
    return count * (top.trips if isinstance(top, Loop) else 1)


# ---- what does not change in a loop -----------------------------------------------------------------------------------
def _hoist(body: list[Node]) -> None:
    place = 0
    while place < len(body):
        node = body[place]
        if node.__class__ is Run:
            place += 1
            continue
        for part in inner(node):
            _hoist(part)
        if isinstance(node, Loop) and node.trips > 0:
            out = _invariant(node)
            body[place:place] = out
            place += len(out)
        place += 1


def _invariant(loop: Loop) -> list[Node]:
    """Take the calls out of a loop that do the same in each iteration."""
    out: list[Node] = []
    moving = {loop.var}
    writers: dict[Alloc, int] = {}
    first: dict[Alloc, int] = {}
    steady = []  # calls that may do the same in each iteration
    for place, node in enumerate(loop.body):
        if node.__class__ is Run and node.call.overwrites and not node.call.bounds:
            steady.append((place, node))
        for one in walk([node]):
            if one.__class__ is Divide or one.__class__ is Loop:
                moving.add(one.var)
                continue
            for alloc in changed(one):
                writers[alloc] = writers.get(alloc, 0) + 1
            for alloc in used(one):
                first.setdefault(alloc, place)
    gone: set[int] = set()
    for place, node in steady:
        if any([atom in moving for e in node.call.expressions() for atom, _ in e.terms]):
            continue
        results, read = changed(node), {a.alloc for a, w in node.touches if not w}
        if results & read or not all(a.on_chip and a.kind == "local" and writers[a] == 1 and first[a] == place for a in results):
            continue
        if any(writers.get(a) for a in read):
            continue
        for n, one in enumerate(loop.body):
            if isinstance(one, Made) and one.alloc in results:
                gone.add(n)
                out.append(one)
        out.append(node)
        gone.add(place)
        writers.update(dict.fromkeys(results, 0))
    if not gone:
        return out
    loop.body[:] = [node for place, node in enumerate(loop.body) if place not in gone]
    return out
