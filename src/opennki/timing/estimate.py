"""`estimate`: a kernel in, a `Timeline` out."""
from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

from opennki.errors import NkiValueError
from opennki.ir.nodes import Kernel
from opennki.ir.verify import accesses
from opennki.isa.declare import ISA
from opennki.isa.target import Target, resolve
from opennki.timing import constants
from opennki.timing.costs import DMA, ENGINE_NAMES, PS, SYNC, Numbers, describe
from opennki.timing.hoist import repeated_axes
from opennki.timing.links import Links
from opennki.timing.lower import Op, Program
from opennki.timing.machine import Machine
from opennki.timing.programs import run_programs
from opennki.timing.timeline import COMPUTE, EngineUse, LineCost, LinkUse, Row, Timeline, Traffic, Work

BOUND = 0.8  # a resource bounds a kernel when it is busy for this share of the time


def estimate(kernel: Kernel, *, record: bool = False, max_rows: int = 100_000, program: tuple[int, ...] | None = None,
             ranks: int | None = None) -> Timeline:
    """How long a kernel takes on its target, by the model of docs/timing.md.

    record: keep a row for each executed instruction, up to `max_rows` of them. program: the position in the launch grid of the one
    instance to look at; None is the whole grid, on the core with the most instances (instances on one core run one after the other, cores
    side by side). ranks: how many run the kernel at the same time, for its collectives; None for those that
    it names, else all of the target's instance. The result is deterministic. Raises NkiValueError for a program outside of the grid, a
    negative `max_rows`, or more ranks than the instance has.
    """
    if max_rows < 0:
        raise NkiValueError(f"max_rows={max_rows}", operand="max_rows", rule="the number of rows is not negative",
                            fix="leave max_rows out, or pass record=False")
    target = resolve(kernel.target)
    if ranks is not None and ranks < 1:
        raise NkiValueError(f"ranks={ranks}", operand="ranks", rule="the number of ranks is positive")
    lowered = Program(kernel, target, Links(kernel, target, ranks))
    rows = Recorder(kernel, max_rows) if record else None
    machine = Machine(lowered, target, rows)
    instances, cores = _instances(kernel, program)
    count, same = len(instances), repeated_axes(kernel) if len(instances) > 1 else []
    if same:
        instances = list({tuple(x for d, x in enumerate(at) if d not in same): at for at in reversed(instances)}.values())[::-1]
        lowered.warnings.append(f"programs along axis {', '.join(map(str, same))} of the grid do the same work: it is counted once")
    run_programs(machine, instances)
    return _timeline(kernel, target, lowered, machine, rows, program or (), count, cores)


def _instances(kernel: Kernel, program: tuple[int, ...] | None) -> tuple[list[tuple[int, ...]], int]:
    """The program instances that one core runs, and how many cores work."""
    sizes = [v.hi + 1 for v in kernel.grid]
    if program is not None:
        given = tuple(program)
        if len(given) != len(sizes) or any(not 0 <= x < n for x, n in zip(given, sizes, strict=False)):
            raise NkiValueError(f"program {given} of a grid of {tuple(sizes)}", operand="program",
                                rule="a program is a position in the launch grid, one index for each dimension",
                                fix="leave program out for the whole grid")
        return [given], 1
    everything = list(product(*map(range, sizes)))
    if not kernel.cores or len(kernel.cores) != prod(sizes):
        return everything, 1
    by_core: dict[int, list[tuple[int, ...]]] = {}
    for position, core in zip(everything, kernel.cores, strict=True):
        by_core.setdefault(core, []).append(position)
    return max(by_core.values(), key=len), len(by_core)


class Recorder:
    """Collects rows until there are enough."""

    def __init__(self, kernel: Kernel, limit: int) -> None:
        self.kernel, self.limit = kernel, limit
        self.rows: list[Row] = []
        self.next = 0
        self.texts: dict[int, str] = {}
        self.tensors: dict[int, tuple[int, ...]] = {}

    @property
    def full(self) -> bool:
        """True when no more rows are kept."""
        return len(self.rows) >= self.limit

    def add(self, machine: Machine, op: Op, what: Numbers, start: int, length: int, visible: int, ready: int, cause: int,
            made: list[int]) -> None:
        """Keep a row of an instruction."""
        who = machine.who
        assert who is not None
        number, self.next = self.next, self.next + 1
        waits = who[cause] if cause >= 0 else -1
        for c in made:
            who[c] = number
        if self.full:
            return
        text = self.texts.get(op.index)
        if text is None:
            text = self.texts[op.index] = describe(op.instr)
            self.tensors[op.index] = tuple(sorted({access.alloc.id for access, _, _ in accesses(op.instr) if access.alloc.on_chip}))
        name = ENGINE_NAMES[op.engine]
        queue = f"dma{what.lanes[0][0]}" if op.engine == DMA and len(what.lanes) == 1 else name
        moved = what.hbm_read + what.hbm_write if op.engine == DMA else what.sbuf_read + what.sbuf_write + what.psum_read + what.psum_write
        self.rows.append(Row(
            number, op.name, name, queue, start / PS, length / PS, visible / PS, self.kernel.loc(op.loc),
            tuple(machine.env[s] for s in op.loops), moved, 2 * (what.macs + what.transpose_macs), what.elements, text,
            max(0, start - ready) / PS, waits, what.descriptors, self.tensors[op.index]))


def _timeline(kernel: Kernel, target: Target, lowered: Program, machine: Machine, rows: Recorder | None, program: tuple[int, ...],
              instances: int, cores: int) -> Timeline:
    traffic: dict[str, float] = dict.fromkeys(
        ("hbm_read", "hbm_write", "sbuf_read", "sbuf_write", "psum_read", "psum_write", "moved", "descriptors", "macs", "transpose_macs",
         "adjusted", "elements", "network", "link_bytes"), 0)
    collectives = 0
    issued = [0] * len(ENGINE_NAMES)
    counts, busy, waited = [0] * len(ENGINE_NAMES), [0] * len(ENGINE_NAMES), [0] * len(ENGINE_NAMES)
    lines: dict[Any, list[Any]] = {}
    psum_to_sbuf = [0, 0]
    matmuls = activations = transfer = 0
    for op in lowered.ops:
        n = machine.count[op.index]
        if not n:
            continue
        hits = machine.masked[op.index]
        parts = [(op.numbers[k], m) for k, m in hits.items()] if hits is not None else [(op.numbers[None], n)]
        line = lines.setdefault(op.loc, [0, {}, 0, 0, 0])
        for what, m in parts:
            for key in traffic:
                traffic[key] += getattr(what, key) * m
            issued[op.engine] += (what.issue + what.load) * m
            line[3] += (what.hbm_read + what.hbm_write) * m
            line[4] += 2 * (what.macs + what.transpose_macs) * m
            if op.engine != DMA and what.psum_read and what.sbuf_write:
                psum_to_sbuf[0] += what.sbuf_write * m
                psum_to_sbuf[1] += m
            if op.engine == DMA:
                transfer += max((t for _, t in what.lanes), default=0) * m
        name = ENGINE_NAMES[op.engine]
        counts[op.engine] += n
        busy[op.engine] += machine.busy[op.index]
        waited[op.engine] += machine.waited[op.index]
        collectives += n * (ISA[op.name].travel is not None)
        matmuls += n * (name == "tensor")
        activations += n * (name == "scalar")
        line[0] += machine.critical[op.index]
        line[1][name] = line[1].get(name, 0.0) + machine.busy[op.index] / PS
        line[2] += n
    launch = constants.launch_us(target)
    total = launch * 1e3 + machine.front / PS
    engines = {name: EngineUse(busy[i] / PS, counts[i], busy[i] / PS / total, waited[i] / PS)
               for i, name in enumerate(ENGINE_NAMES) if name in COMPUTE}
    sync = machine.lines[SYNC].busy / PS
    engines["sync"] = EngineUse(sync + busy[SYNC] / PS, counts[DMA] + counts[SYNC], (sync + busy[SYNC] / PS) / total)
    engines_of_dma = machine.group[:target.dma_engines_core]
    lanes = tuple(EngineUse(g.busy / PS, counts[DMA] if g.busy else 0, g.busy / PS / total) for g in engines_of_dma)
    most = max((u.busy_ns for u in lanes), default=0.0)
    engines["dma"] = EngineUse(most, counts[DMA], most / total, waited[DMA] / PS)
    bounds = {name: issued[ENGINE_NAMES.index(name)] / PS for name in COMPUTE}
    bounds["dma"] = most
    bounds["dma queues"] = sync
    bounds["hbm"] = (traffic["hbm_read"] + traffic["hbm_write"]) / target.hbm_core_gbps
    links = None
    if lowered.links.used:
        bounds["links"] = traffic["network"] / PS
        links = LinkUse(lowered.links.describe(), lowered.links.ranks, collectives, traffic["network"] / PS, int(traffic["link_bytes"]))
    total_instructions = sum(counts)
    costs = tuple(LineCost(kernel.loc(loc), v[0] / PS, v[1], v[2], int(v[3]), int(v[4])) for loc, v in lines.items())
    whole = {k: int(v) for k, v in traffic.items() if k != "adjusted"}
    return Timeline(
        kernel.name, target.name, total / 1e3, launch, engines, lanes,
        Traffic(whole["hbm_read"], whole["hbm_write"], whole["sbuf_read"], whole["sbuf_write"], whole["psum_read"], whole["psum_write"],
                psum_to_sbuf[0], psum_to_sbuf[1], counts[DMA], whole["moved"], whole["descriptors"], transfer / PS),
        Work(whole["macs"], whole["transpose_macs"], traffic["adjusted"], matmuls, activations, whole["elements"]),
        bounds, _bound_by(bounds, machine.front / PS, launch * 1e3), total_instructions, machine.simulated, costs,
        tuple(rows.rows) if rows is not None else (), max(0, total_instructions - len(rows.rows)) if rows is not None else 0,
        program, instances, cores, tuple(lowered.warnings), links)


def _bound_by(bounds: dict[str, float], run: float, launch: float) -> str:
    if launch > run:
        return "launch"
    name = max(bounds, key=lambda k: bounds[k])
    return name if bounds[name] >= BOUND * run else "dependencies"
