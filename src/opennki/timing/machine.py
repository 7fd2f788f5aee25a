"""The event loop: instructions in program order, each put on its engine at the earliest time that its data, buffers and engine allow.

An engine is a line of time with the gaps that waiting left; an instruction may fill a gap that is not further back than the scheduling
window, which stands for what the compiler's scheduler reorders. All times are integer picoseconds.
"""
from __future__ import annotations

from typing import Any

from opennki.isa.target import Target
from opennki.timing import constants
from opennki.timing.costs import DMA, ENGINE_NAMES, PS, SYNC, TENSOR, Numbers, numbers, ps
from opennki.timing.lower import FREE, LOOP, OP, TAKE, Buffer, Loop, Op, Program
from opennki.timing.steady import Watch
from opennki.timing.terms import value

Gap = list[int]  # start, end, number of the instruction that left it


class Line:
    """A resource that does one thing at a time. `gaps` are unused spans, oldest first; `count` counts what it did."""

    __slots__ = ("busy", "count", "free", "gaps", "window")

    def __init__(self, window: int) -> None:
        self.window = window
        self.free = self.count = self.busy = 0
        self.gaps: list[Gap] = []

    def _first(self, ready: int) -> int:
        """Number of the first gap that ends after `ready`; gaps that are out of the window are dropped."""
        gaps, oldest = self.gaps, self.count - self.window
        while gaps and gaps[0][2] < oldest:
            del gaps[0]
        i = len(gaps)
        while i and gaps[i - 1][1] > ready:
            i -= 1
        return i

    def put(self, ready: int, length: int) -> int:
        """Reserve the earliest span of a length from `ready` on; returns its start."""
        self.count += 1
        gaps = self.gaps
        if gaps:
            i = self._first(ready)
            while i < len(gaps):
                gap = gaps[i]
                start = gap[0] if gap[0] > ready else ready
                if start + length <= gap[1]:
                    if start > gap[0]:
                        if start + length < gap[1]:
                            gaps.insert(i + 1, [start + length, gap[1], gap[2]])
                        gap[1] = start
                    elif start + length < gap[1]:
                        gap[0] = start + length
                    else:
                        del gaps[i]
                    return start
                i += 1
        if ready > self.free:
            if self.window:
                gaps.append([self.free, ready, self.count])
            self.free = ready + length
            return ready
        start = self.free
        self.free = start + length
        return start

    def share(self, ready: int, length: int) -> tuple[int, int]:
        """Reserve a length from `ready` on in pieces, as a queue that is served in turn with others; returns start and end."""
        self.count += 1
        gaps, first = self.gaps, -1
        if gaps:
            i = self._first(ready)
            while i < len(gaps):
                gap = gaps[i]
                start = gap[0] if gap[0] > ready else ready
                room = gap[1] - start
                if first < 0:
                    first = start
                if room > length:
                    if start > gap[0]:
                        gaps.insert(i + 1, [start + length, gap[1], gap[2]])
                        gap[1] = start
                    else:
                        gap[0] = start + length
                    return first, start + length
                length -= room
                if start > gap[0]:
                    gap[1] = start
                    i += 1
                else:
                    del gaps[i]
                if not length:
                    return first, start + room
        if ready > self.free:
            if self.window:
                gaps.append([self.free, ready, self.count])
            self.free = ready
        start = self.free
        self.free = start + length
        return start if first < 0 else first, self.free

    def repeat(self, delta: int, periods: int, since: int, each: int, moved: int) -> None:
        """Continue as in the last period, of `each` things and length `delta`, in which the end moved by `moved`, for so many periods;
        the loop began after number `since`.

        Gaps repeat as those of the last periods, the latest as they are now, older ones as they are after being filled for some periods.
        """
        if self.gaps and each:
            known = max(0, min(3, (self.count - since) // each - 2))  # the oldest age that is taken as settled
            ages: list[list[Gap]] = [[] for _ in range(known + 1)]
            kept: list[Gap] = []
            for gap in self.gaps:
                age = (self.count - gap[2]) // each
                if age <= known and gap[2] > since:
                    ages[age].append(gap)
                else:
                    kept.append(gap)
            kept = [g for g in kept if g[2] >= self.count + each * periods - self.window]
            for age in range(min(periods + known, self.window // each + 1), -1, -1):
                source = min(age, known)
                steps = periods - (age - source)
                kept += [[g[0] + steps * delta, g[1] + steps * delta, g[2] + steps * each] for g in ages[source]]
            self.gaps = kept
        self.free += moved * periods
        self.count += each * periods


class Machine:
    """One program instance on one core."""

    def __init__(self, program: Program, target: Target, record: Any = None) -> None:
        self.program, self.target, self.record = program, target, record
        n, cells = len(program.ops), program.cells
        self.env: list[Any] = [0] * max(1, len(program.slots.of))
        self.seen, self.same, self.writer = [0] * cells, [0] * cells, [-1] * cells  # visible to others, to the writer's engine; its number
        self.read, self.reader = [0] * cells, [-1] * cells
        self.count, self.busy, self.critical, self.waited = [0] * n, [0] * n, [0] * n, [0] * n
        self.masked: list[dict[Any, int] | None] = [{} if op.clip is not None else None for op in program.ops]
        window, dma_window = round(constants.WINDOW.value), round(constants.DMA_WINDOW.value)
        self.lines = [Line(window) for _ in ENGINE_NAMES]
        self.lines[SYNC] = Line(dma_window)
        self.lanes = [Line(dma_window) for _ in range(target.dma_engines_core + 1)]  # the last one: the links between chips
        self.group = _groups(program, self.lanes)
        self.routes: dict[int, Any] = {}
        self.last_use = [[(0, 0)] * 6 for _ in range(2)]
        self.held: Any = None
        self.table = -1
        self.front = 0
        self.simulated = self.skipped = 0
        self.log: list[int] = []
        self.path: list[int] = []
        self.depth = 0
        self.events: list[Any] | None = None
        self.who = [-1] * cells if record is not None else None
        self.hop = ps(constants.SEMAPHORE.value)
        self.first_byte, self.done = ps(target.dma_first_byte_ns), ps(target.dma_done_ns)
        self.reload = ps(target.act_table_load_ns)

    def run(self, nodes: list[Any]) -> None:
        """Run a body."""
        for node in nodes:
            kind = node.kind
            if kind == OP:
                self.step(node)
            elif kind >= TAKE:
                self.buffer(node)
            elif kind == LOOP:
                self.loop(node)
            else:
                taken = value(node.terms, self.env) >= 0
                self.path.append(taken)
                self.run(node.then if taken else node.orelse)

    def buffer(self, node: Buffer) -> None:
        """Take a buffer: its cells are free from the time it was released; or release it after its last use."""
        family = node.family
        ring, base, size = family.ring, family.base, family.cells
        assert ring is not None
        seen, same, read, writer, reader = self.seen, self.same, self.read, self.writer, self.reader
        end = base + size
        if node.kind != TAKE:
            ring.times.append(max(read[base], seen[base]) if size == 1 else max(max(read[base:end]), max(seen[base:end])))
        if node.kind != FREE:
            if ring.fresh or not ring.times:
                ring.fresh -= ring.fresh > 0
                at = 0
            else:
                at = ring.times.popleft()
            if size == 1:
                seen[base] = same[base] = read[base] = at
                writer[base] = reader[base] = -1
            else:
                seen[base:end] = same[base:end] = read[base:end] = [at] * size
                writer[base:end] = reader[base:end] = [-1] * size
            if self.who is not None:
                self.who[base:end] = [-1] * size

    def loop(self, node: Loop) -> None:
        """Run a loop, skipping what repeats."""
        env, slot, trips = self.env, node.slot, node.trips
        if self.record is not None and not self.record.full:
            for i in range(trips):
                env[slot] = i
                self.run(node.body)
            return
        watch = Watch(self, node) if trips > 4 else None
        self.depth += 1
        i = 0
        while i < trips:
            env[slot] = i
            mark, turn = len(self.log), len(self.path)
            self.run(node.body)
            i += 1
            if watch is not None and i < trips:
                i += watch.after(i, mark, turn)
        self.depth -= 1
        if not self.depth:
            self.log.clear()
            self.path.clear()

    def touched(self, refs: list[Any]) -> list[int]:
        """Indices of the cells of accesses, now."""
        env = self.env
        out = []
        for ref in refs:
            c = ref.const
            for slot, k in ref.terms:
                c += k * env[slot]
            if ref.odd:
                c = value((ref.const, ref.terms, ref.divs), env)
                if ref.table is not None:
                    c += ref.table[value(ref.block, env)]
                if ref.ends is not None:
                    low, high = ref.ends
                    out += [min(max(c + o, low), high) for o in ref.many or (0,)]
                    continue
            if ref.many is None:
                out.append(c)
            else:
                out += [c + o for o in ref.many]
        return out

    def step(self, op: Op) -> None:
        """Run one instruction."""
        clip = op.clip
        if clip is None:
            what: Numbers = op.numbers[None]
        else:
            sizes = clip.sizes(self.env)
            self.path.append(-1 if sizes is None else hash(sizes))
            if sizes is None:
                return
            found = op.numbers.get(sizes)
            if found is None:
                found = op.numbers[sizes] = numbers(op.instr, op.engine, self.target, sizes, op.shape, self.program.links)
            what = found
            hits = self.masked[op.index]
            assert hits is not None
            hits[sizes] = hits.get(sizes, 0) + 1
        engine, index = op.engine, op.index
        seen, same, writer, read, reader = self.seen, self.same, self.writer, self.read, self.reader
        hop = self.hop
        ready = 0
        cause = -1
        used = self.touched(op.reads)
        for c in used:
            t = same[c] if writer[c] == engine else seen[c]
            if t > ready:
                ready, cause = t, c
        made: list[int] = []
        if op.chained:
            made = self.touched(op.chained)
            for c in made:
                if writer[c] != engine and seen[c] > ready:
                    ready, cause = seen[c], c
                if reader[c] != engine and read[c] + hop > ready:
                    ready, cause = read[c] + hop, c
        if op.writes:
            written = self.touched(op.writes)
            for c in written:
                t = same[c] if writer[c] == engine else seen[c]
                if t > ready:
                    ready, cause = t, c
                t = read[c] if reader[c] == engine or reader[c] < 0 else read[c] + hop
                if t > ready:
                    ready, cause = t, c
            made = made + written if made else written
        issue = what.issue
        line = self.lines[engine]
        if engine == DMA:
            start, finish, visible, length = self._transfer(what, ready)
            before = start
        else:
            if op.held is not None and what.load:
                held = self.touched([op.held])
                key = (*held, *(seen[c] for c in held))
                if key != self.held:
                    issue += what.load
                    self.held = key
            if op.table >= 0 and op.table != self.table:
                issue += self.reload
                self.table = op.table
            if op.ports:
                ready = self._ports(op.ports, engine, ready, issue)
            before = line.free
            if op.ordered and line.free > ready:
                ready = line.free
            start = line.put(ready, issue)
            finish = start + issue
            visible = finish + what.latency
            length = issue
            if op.ports:
                for bit in (0, 1):
                    if op.ports >> bit & 1:
                        self.last_use[bit][engine] = (start, finish)
        end = visible
        for c in used:
            if finish > read[c]:
                read[c] = finish
                reader[c] = engine
        shown = visible if engine == DMA else visible + hop
        for c in made:
            seen[c] = shown
            same[c] = visible
            writer[c] = engine
        self.count[index] += 1
        self.busy[index] += length
        if start > before and engine != DMA:
            self.waited[index] += start - before
        if end > self.front:
            self.critical[index] += end - self.front
            self.front = end
        self.simulated += 1
        if self.depth:
            self.log.append(start)
            if self.events is not None:
                self.events.append((op, start, ready, finish, visible, shown, used, made, what))
        if self.who is not None:
            self.record.add(self, op, what, start, length, visible, ready, cause, made)

    def _transfer(self, what: Numbers, ready: int) -> tuple[int, int, int, int]:
        """Trigger a DMA and move its bytes: (first byte, last byte, visible, time on the DMA engines)."""
        trigger = self.lines[SYNC].share(ready, what.issue)[0]
        self.lines[SYNC].busy += what.issue
        begin = trigger + self.first_byte
        route = self.routes.get(id(what))
        if route is None:
            longest: dict[int, tuple[Line, int]] = {}
            for lane, length in what.lanes:
                line = self.group[lane]
                if length >= longest.get(id(line), (line, 0))[1]:
                    longest[id(line)] = (line, length)
            route = self.routes[id(what)] = (what, tuple(longest.values()))
        first, last, most = 1 << 62, 0, 0
        for line, length in route[1]:
            at, end = line.share(begin, length)
            line.busy += length
            if at < first:
                first = at
            if end > last:
                last = end
            if length > most:
                most = length
        return first, last, last + self.done, most

    def _ports(self, bits: int, engine: int, ready: int, issue: int) -> int:
        """Wait for the engine that uses a port which excludes this one."""
        other = ((2 if engine == 1 else 1) if bits & 2 else -1, (3 if engine == 1 else 1) if bits & 1 else -1)
        line = self.lines[engine]
        start = ready if ready > line.free else line.free
        for bit, who in ((1, other[0]), (0, other[1])):
            if who >= 0:
                a, b = self.last_use[bit][who]
                if start < b and start + issue > a:
                    start = b
                    ready = b
        return ready


def _groups(program: Program, lanes: list[Line]) -> list[Line]:
    """One line for the DMA engines that all transfers use alike, so that most transfers are one reservation."""
    patterns: list[list[Any]] = [[] for _ in lanes]
    for op in program.ops:
        if op.engine == DMA:
            shares = dict(op.numbers[None].lanes) if None in op.numbers else None
            for lane in range(len(lanes)):
                patterns[lane].append(op.index if shares is None else shares.get(lane))
    first: dict[Any, int] = {}
    return [lanes[first.setdefault(tuple(p), i)] for i, p in enumerate(patterns)]


__all__ = ["PS", "TENSOR", "Line", "Machine"]
