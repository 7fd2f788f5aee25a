"""Allocation: a place in SBUF or PSUM for each on-chip tensor of a kernel.

Placements that the kernel asks for (`ncc.sbuf.alloc`, `mod_alloc`, their PSUM forms) stay as they are. The others are packed so that no
two tensors that are alive together meet. Tensors made in a loop body get several buffers where there is room, so that iterations
overlap: as many as `multi_buffer(n)` asks for, else up to four; one under `no_reorder()`. In PSUM a tile lies within one bank, or starts
at one, and tensors get banks of their own while there are enough. Where full columns do not fit, results take the place of operands that
are not read again (`passes.inplace`), and tiles of at most 64 partitions that no instruction reads together with another tile may start
at a later quadrant.
Sources: api_legacy neuronxcc.nki.compiler; seeds "Alloc Decorators"; sizes and alignments from `isa.target`.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from opennki.errors import Loc, NkiError, NkiValueError, make
from opennki.ir.nodes import Alloc, DoWhile, For, Instr, Kernel, statements
from opennki.ir.verify import accesses
from opennki.isa import dtypes
from opennki.isa import target as targets
from opennki.isa.declare import ISA
from opennki.isa.target import Target
from opennki.lang.placement import start_partitions
from opennki.passes.clobber import clobbered
from opennki.passes.contract import contracted
from opennki.passes.inplace import in_place
from opennki.passes.liveness import Interval, Liveness, liveness
from opennki.passes.memory_map import MEMORIES, MemoryMap, Peak, Placement, bytes_per_partition, capacity, tile
from opennki.passes.pack import Item, pack, stack

__all__ = ["MemoryMap", "Placement", "allocate", "capacity_problems"]

SHOWN = 6
BUFFERS = (4, 3, 2)  # of a tensor of a loop body, where the kernel does not say, the first that fits


def allocate(kernel: Kernel, *, allocator: str = "auto", skip_middle_end: bool = False, spill: bool = False) -> MemoryMap:
    """Place the on-chip tensors of a kernel.

    allocator: `auto`; `stack`, each tensor above everything that is alive when it is made; or `forced`, which ignores the placements that
    the kernel asks for. skip_middle_end: leave the kernel as it is; else tensors of which an iteration uses only its own part shrink to
    that part first (`passes.contract`), and the map's `kernel` is the result. spill: where SBUF is too small for tensors that the kernel
    does not place itself, go on above its end, as a compiler that spills to HBM does, and say so in the notes.

    Raises NkiValueError when a memory is too small, with the tensors that are alive at its fullest point; for a placement outside of its
    memory; and where the kernel's own placements overwrite what is read later, with both tensors (`passes.clobber`).
    """
    if allocator not in ("auto", "stack", "forced"):
        raise NkiValueError(f"allocator={allocator!r}", rule="an allocator is auto, stack or forced")
    made = kernel if skip_middle_end else contracted(kernel, 0, direct=allocator == "forced")
    out = MemoryMap(made, targets.resolve(kernel.target), live=liveness(made), allocator=allocator)
    for memory in MEMORIES:
        error = _Memory(out, memory, allocator, spill).place()
        if error is not None:
            raise error
    error = clobbered(out)
    if error is not None:
        raise error
    if made is not kernel:  # tensors that shrank keep their number
        by_id = {a.id: p for a, p in out.placements.items()}
        for stmt in statements(kernel.body):
            if isinstance(stmt, Alloc) and stmt.on_chip and stmt not in out.placements and stmt.id in by_id:
                out.placements[stmt] = by_id[stmt.id]
    return out


def capacity_problems(kernel: Kernel) -> list[NkiError]:
    """The errors of memories that are too small, one for each; the check of a simulation, which needs no buffers beyond one."""
    made = contracted(kernel, 0, direct=False)
    out = MemoryMap(made, targets.resolve(kernel.target), live=liveness(made))
    found = [_Memory(out, memory, "auto").fits() for memory in MEMORIES]
    return [e for e in found if e is not None]


class _Memory:
    """The tensors of one memory."""

    def __init__(self, out: MemoryMap, memory: str, allocator: str, spill: bool = False) -> None:
        self.out, self.memory, self.allocator = out, memory, allocator
        self.spill = spill and memory == "sbuf"
        self.target: Target = out.target
        self.live: Liveness = out.live
        self.room = capacity(out.target, memory)
        tensors = [a for a in out.live.intervals if a.space == memory]
        direct = allocator != "forced"
        self.direct = [a for a in tensors if direct and a.placement is not None]
        self.auto = [a for a in tensors if not direct or a.placement is None]

    def place(self) -> NkiError | None:
        """Fill in the placements and the peak of this memory; the error if it is too small."""
        for alloc in (*self.auto, *self.direct):
            if tile(alloc)[1] > self.target.partitions:
                return make("err_num_partition_exceed_arch_limit", f"the tensor {alloc.name or repr(alloc)} {alloc.shape} has "
                            f"{tile(alloc)[1]} partitions, at most {self.target.partitions}", loc=alloc.loc)
        for alloc in self.direct:
            self.out.placements[alloc] = placement = self._direct(alloc)
            error = self._outside(alloc, placement)
            if error is not None:
                return error
        self.out.peaks[self.memory] = peak = self._peak()
        if not self._search():
            error = self._error(peak)
            if not self.spill or self.direct:
                return error
            there, self.room = self.room, sum(self._single(a, True) for a in self.auto)
            if not self._attempt({}, False):
                return error
            place = f"{error.loc}: " if error.loc is not None else ""
            self.out.notes += (f"{place}{error.message}: what is above {there:,} would be spilled to HBM, which the timing model does not "
                               f"count\n  {error.operand}\n  fix: {error.fix}",)
        high = max((r.address + r.size for a in self.live.intervals if a.space == self.memory
                    for r in self.out.placements[a].regions()), default=0)
        self.out.peaks[self.memory] = replace(peak, high=high)
        return None

    def fits(self) -> NkiError | None:
        """The error if this memory is too small for one buffer of each tensor."""
        if not self.auto or sum(self._single(a, True) for a in self.auto) + sum(map(self._weight, self.direct)) <= self.room:
            return None
        for alloc in self.direct:
            self.out.placements[alloc] = self._direct(alloc)
        return None if self._attempt({}, False) or self._last_resorts() else self._error(self._peak())

    def _single(self, alloc: Alloc, whole: bool) -> int:
        blocks, _, size = tile(alloc)
        return blocks * self._stride(size, blocks, whole)

    # ---- what the kernel asked for ---------------------------------------------------------------------------------------------
    def _direct(self, alloc: Alloc) -> Placement:
        blocks, partitions, size = tile(alloc)
        bank = self.target.psum_bank_bytes
        raw = [tuple(map(int, a)) for a in alloc.placement]
        table = tuple((a[0], a[1]) if self.memory == "sbuf" else (a[1], a[0] * bank + a[2]) for a in raw)
        start, address = table[0]
        return Placement(self.memory, start, partitions, address, size, 1, address // bank if self.memory == "psum" else None,
                         blocks, size, table)

    def _outside(self, alloc: Alloc, placement: Placement) -> NkiError | None:
        """The error of bytes that are not there. The compiler's own part of SBUF is: public kernels reach into it, with a note."""
        last = max(placement.regions(), key=lambda r: r.address)
        end, memory, name = last.address + last.size, self.memory.upper(), alloc.name or repr(alloc)
        there = self.target.sbuf_partition_bytes if self.memory == "sbuf" else self.room
        text = f"the {memory} tensor {name} {alloc.shape} is placed at bytes {last.address} to {end} of a partition"
        if end > there:
            return NkiValueError(text, loc=alloc.loc, rule=f"{memory} of {self.target.name} has {there} bytes per partition, "
                                 f"{self.room} of them for kernels", fix="use fewer or smaller buffers")
        if end > self.room:
            self.out.notes += (f"{text}, of which the compiler keeps those from {self.room} on",)
        return None

    # ---- what we choose --------------------------------------------------------------------------------------------------------
    def _search(self) -> bool:
        if not self.auto:
            return True
        asked, free = self._buffers()
        if self.allocator == "stack":
            tries: Iterator[tuple[int, dict[Alloc, int]]] = ((cap, {}) for cap in _caps(asked))
        else:
            tries = self._tries(asked, free)
        for cap, more in tries:
            copies = {a: min(n, cap) for a, n in asked.items()} | more
            for whole in (True, False) if self.memory == "psum" else (False,):
                if self._attempt(copies, False, whole):
                    self._note(asked, copies)
                    return True
        return self._last_resorts()

    def _last_resorts(self) -> bool:
        """What is tried where nothing else fits: results in the place of their operands, short tiles at later quadrants, both."""
        if self.allocator == "stack":
            return self._attempt({}, False, share=True)
        ways = ((False, True), (True, False), (True, True)) if self.memory == "sbuf" else ((False, True),)
        return any(self._attempt({}, quadrants, share=share) for quadrants, share in ways)

    def _tries(self, asked: dict[Alloc, int], free: dict[Alloc, int]) -> Iterator[tuple[int, dict[Alloc, int]]]:
        caps = _caps(asked)
        moved = _moved(self.out.kernel)
        if free:
            for n in BUFFERS:
                yield caps[0], {a: min(n, most) for a, most in free.items()}
            yield caps[0], {a: 2 for a in free if a in moved}
        for cap in caps:
            yield cap, {}

    def _buffers(self) -> tuple[dict[Alloc, int], dict[Alloc, int]]:
        """(buffers that a directive asks for, the most that are of use to other tensors of loops)."""
        asked: dict[Alloc, int] = {}
        free: dict[Alloc, int] = {}
        for alloc in self.auto:
            loops = self.live.loops(alloc)
            if not loops or any(isinstance(loop, DoWhile) for loop in loops):
                continue
            home = loops[-1]
            assert isinstance(home, For)
            total = 1
            for loop in loops:
                total *= loop.trips if isinstance(loop, For) else 1
            number = _multi_buffer(home)
            if number is not None:
                asked[alloc] = min(number, total)
            elif total > 1 and not any(_no_reorder(loop) for loop in loops if isinstance(loop, For)):
                free[alloc] = total
        return {a: n for a, n in asked.items() if n > 1}, free

    def _note(self, asked: dict[Alloc, int], copies: dict[Alloc, int]) -> None:
        for alloc, wanted in asked.items():
            got = copies.get(alloc, 1)
            if got < wanted:
                where = f" at {alloc.loc}" if alloc.loc else ""
                self.out.notes += (f"{alloc.name or repr(alloc)}{where} has {got} of the {wanted} buffers that multi_buffer asks for: "
                                   f"{self.memory.upper()} has no room for more",)

    def _attempt(self, copies: dict[Alloc, int], quadrants: bool, whole: bool = False, share: bool = False) -> bool:
        fixed = [Item((a.id, n), self.live.intervals[a], r.size, r.partitions, address=r.address, start=r.start_partition, fixed=True)
                 for a in self.direct for n, r in enumerate(self.out.placements[a].regions())]
        movable = _movable(self.out.kernel) if quadrants else frozenset()
        shapes = {a: self._item(a, copies.get(a, 1), a in movable, whole) for a in self.auto}
        merged = in_place(self.out.kernel, self.live) if share else {}
        for alloc in sorted((a for a in self.auto if a in merged), key=lambda a: self.live.intervals[a].start):
            # operands come first, so that chains end up in one item
            item, mine = shapes[merged[alloc]][0], shapes[alloc][0]
            item.interval = Interval(item.interval.start, mine.interval.end)
            item.starts = item.starts if len(item.starts) < len(mine.starts) else mine.starts
            shapes[alloc] = item, shapes[alloc][1]
        items = [*fixed, *{id(item): item for item, _ in shapes.values()}.values()]
        if not (stack if self.allocator == "stack" else pack)(items, self.room):
            return False
        for alloc, (item, stride) in shapes.items():
            blocks, partitions, size = tile(alloc)
            bank = item.address // self.target.psum_bank_bytes if self.memory == "psum" else None
            self.out.placements[alloc] = Placement(self.memory, item.start, partitions, item.address, size, copies.get(alloc, 1), bank,
                                                   blocks, stride)
        return True

    def _item(self, alloc: Alloc, copies: int, movable: bool, whole: bool) -> tuple[Item, int]:
        blocks, partitions, size = tile(alloc)
        tiles = blocks * copies
        stride = self._stride(size, tiles, whole)
        interval = self.live.intervals[alloc]
        if copies > 1:
            interval = self.live.span(self.live.loops(alloc)[-1])
        width = stride * tiles if whole else stride * (tiles - 1) + size
        starts = start_partitions(partitions, self.target) if movable else (0,)
        item = Item(alloc.id, interval, width, partitions, starts=starts)
        bank = self.target.psum_bank_bytes
        if self.memory == "sbuf":
            item.align = max(self.target.sbuf_min_align, dtypes.itemsize(alloc.dtype))
        elif tiles > 1 or whole or size > bank:
            item.align = min(stride, bank)
        else:
            item.align, item.window = max(self.target.psum_min_align, dtypes.itemsize(alloc.dtype)), bank
        return item, stride

    def _stride(self, size: int, tiles: int, whole: bool) -> int:
        """Bytes from one tile of a tensor to the next: in PSUM, no tile of up to a bank crosses the end of one."""
        bank = self.target.psum_bank_bytes
        if self.memory == "sbuf" or (tiles == 1 and not whole and size <= bank):
            return size
        if whole or size > bank:
            return -(-size // bank) * bank
        stride = self.target.psum_min_align
        while stride < size:
            stride *= 2
        return stride

    # ---- the fullest point -------------------------------------------------------------------------------------------------------
    def _weight(self, alloc: Alloc) -> int:
        placement = self.out.placements.get(alloc)
        if placement is not None and placement.direct:
            return sum(r.size for r in placement.regions())
        return bytes_per_partition(alloc)

    def _peak(self) -> Peak:
        tensors = [*self.auto, *self.direct]
        events: dict[int, int] = {}
        for alloc in tensors:
            interval = self.live.intervals[alloc]
            events[interval.start] = events.get(interval.start, 0) + self._weight(alloc)
            events[interval.end + 1] = events.get(interval.end + 1, 0) - self._weight(alloc)
        size, most, where = 0, 0, 0
        for position in sorted(events):
            size += events[position]
            if size > most:
                most, where = size, position
        live = [a for a in tensors if self.live.intervals[a].meets(Interval(where, where))]
        return Peak(most, tuple(sorted(live, key=lambda a: (-self._weight(a), a.id))), where)

    def _error(self, peak: Peak) -> NkiError:
        space, room = self.memory.upper(), self.room
        names = "; ".join(f"{a.name or repr(a)} {a.shape} {a.dtype}: {self._weight(a):,} at line {a.loc.line if a.loc else '?'}"
                          for a in peak.live[:SHOWN])
        more = f"; and {len(peak.live) - SHOWN} more" if len(peak.live) > SHOWN else ""
        loc: Loc | None = peak.live[0].loc if peak.live else None
        if peak.size > room:
            what = f"{peak.size:,} bytes per partition of {space} are alive at once, {room:,} are there"
        else:
            what = (f"{peak.size:,} bytes per partition of {space} are alive at once, {room:,} are there, and no arrangement of the "
                    f"tensors was found that fits")
        largest = next((a for a in peak.live if self._weight(a)), None)
        shrink = f"shrink {largest.name or repr(largest)} first: " if largest is not None else ""
        return NkiValueError(
            what, loc=loc, operand=f"alive, in bytes per partition: {names}{more}", rule=f"the tensors that are alive together fit {space}",
            why="what does not fit is spilled to HBM by the compiler, or refused",
            fix=f"{shrink}use smaller tiles, make tensors inside the loop that uses them, or store results earlier")


def _caps(asked: dict[Alloc, int]) -> list[int]:
    """Bounds on the buffers that directives ask for: all of them, then ever fewer."""
    most = max(asked.values(), default=1)
    out = [most]
    while most > 1:
        most //= 2
        out.append(most)
    return out


def _multi_buffer(loop: For) -> int | None:
    for text in loop.directives:
        if text.startswith("multi_buffer(") and text[13:-1].isdigit():
            return int(text[13:-1])
    return None


def _no_reorder(loop: For) -> bool:
    return any(text.startswith("no_reorder(") for text in loop.directives)


def _moved(kernel: Kernel) -> set[Alloc]:
    """Tensors that a DMA reads or writes."""
    return {a.alloc for s in statements(kernel.body) if isinstance(s, Instr) and (s.engine or ISA[s.op].engines[0]) == "dma"
            for a, _, _ in accesses(s)}


def _movable(kernel: Kernel) -> frozenset[Alloc]:
    """Tensors that no instruction reads together with another on-chip tile: where two are read, both start at the same partition."""
    seen: set[Alloc] = set()
    stay: set[Alloc] = set()
    for stmt in statements(kernel.body):
        if isinstance(stmt, DoWhile) and stmt.cond is not None:
            stay.add(stmt.cond.alloc)
        elif isinstance(stmt, Instr):
            used = list(accesses(stmt))
            read = [a.alloc for a, is_read, _ in used if is_read and a.alloc.on_chip]
            seen.update(a.alloc for a, _, _ in used)
            if len(read) > 1 or ISA[stmt.op].family == "matmul":
                stay.update(a.alloc for a, _, _ in used)
    return frozenset(seen - stay)
