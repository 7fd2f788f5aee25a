"""The numbers of one instruction: time on its engine, latency, DMA shares, traffic, work. All from its declaration and the target record.

Times are integer picoseconds, so that a steady state of a loop repeats exactly.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import ceil, prod
from typing import Any

from opennki.ir.cost import cost_view
from opennki.ir.nodes import Access, Instr, PredTile
from opennki.ir.verify import accesses, call_view
from opennki.isa.declare import ISA, Op
from opennki.isa.dtypes import itemsize
from opennki.isa.scalar import TABLES
from opennki.isa.target import Target
from opennki.timing import constants
from opennki.timing.links import Links

ENGINE_NAMES = ("tensor", "vector", "scalar", "gpsimd", "sync", "dma")
TENSOR, VECTOR, SCALAR, GPSIMD, SYNC, DMA = range(6)
PS = 1000


@dataclass(frozen=True, slots=True)
class Numbers:
    """What one execution of an instruction takes and does. `issue`: ps until the next independent instruction; `latency`: ps more until
    the result is visible; `load`: ps of a LoadStationary that is not hidden. `lanes`: (engine of the DMA, ps) of a transfer; the number
    after the last engine is the links between chips, where a collective takes `network` ps for `link_bytes` (`timing.links`)."""

    issue: int
    latency: int = 0
    load: int = 0
    lanes: tuple[tuple[int, int], ...] = ()
    hbm_read: int = 0
    hbm_write: int = 0
    sbuf_read: int = 0
    sbuf_write: int = 0
    psum_read: int = 0
    psum_write: int = 0
    moved: int = 0
    descriptors: int = 0
    macs: int = 0
    transpose_macs: int = 0
    adjusted: float = 0.0
    elements: int = 0
    network: int = 0
    link_bytes: int = 0


def ps(ns: float) -> int:
    """ns as ps."""
    return round(ns * PS)


def choices(instr: Instr, target: Target) -> list[tuple[int, float]]:
    """(engine, ns) of the engines that may run an instruction, the one in the IR last: the others are those to which the compiler moves
    it, as its declaration says."""
    decl = ISA[instr.op]
    names = [instr.engine]
    if decl.moves is not None and instr.engine == decl.engines[0]:
        names = [*decl.moves(call_view(decl, instr.operands, "", instr.results[0].dtype if instr.results else None)), instr.engine]
    view = cost_view(instr, target)
    out = []
    for name in names:
        view.engine = name
        fixed = target.instruction_overhead if name in ("vector", "scalar") else 0
        clock = target.clock_base if name == "dma" else target.clock_ghz(name)
        out.append((ENGINE_NAMES.index(name), (decl.cost(view, target) + fixed) / clock))
    return out


def numbers(instr: Instr, engine: int, target: Target, sizes: tuple[int, ...] | None, shape: tuple[int, ...],
            links: Links | None = None) -> Numbers:
    """The numbers of an instruction of which a mask leaves `sizes` of its iteration space `shape` (None: all of it). `links`: those between
    the chips of the ranks."""
    view = cost_view(instr, target)
    view.engine = ENGINE_NAMES[engine]
    for name in _broadcasts(instr, target):
        view.spaces[name] = "psum"
    share = 1.0
    if sizes is not None and shape:
        free = prod(sizes[1:]) / max(1, prod(shape[1:]))
        share = free * sizes[0] / max(1, shape[0])
        view.P = min(view.P, sizes[0])
        for name in ("F", "N"):
            if hasattr(view, name):
                setattr(view, name, max(1, round(getattr(view, name) * free)))
        if hasattr(view, "M"):
            view.M = min(view.M, sizes[0])
    traffic = _traffic(instr, share)
    if engine == DMA:
        moved = _transfer(instr, view, target, sizes, share, traffic)
        network, sent = links.time(instr, share) if links is not None else (0.0, 0.0)
        if network:
            lanes = (*moved.lanes, (target.dma_engines_core, ps(network)))
            moved = replace(moved, lanes=lanes, network=ps(network), link_bytes=round(sent))
        return moved
    name = ENGINE_NAMES[engine]
    clock = target.clock_ghz(name)
    decl = ISA[instr.op]
    cycles = float(decl.cost(view, target))
    if engine in (VECTOR, SCALAR) and cycles > target.min_ii and _wide_stride(instr, target):
        cycles *= 2
    if engine in (VECTOR, SCALAR):
        cycles += target.instruction_overhead
    load = 0
    more: dict[str, Any] = {}
    if decl.pe is not None and engine == TENSOR:
        work = decl.pe(view, target)
        load = 0 if work.hidden else ps(work.load / clock)
        more = {"macs": 0 if work.transpose else work.macs, "transpose_macs": work.macs if work.transpose else 0,
                "adjusted": work.macs * work.weight}
    elif engine != SYNC:
        more = {"elements": int(view.P * view.F)}
    return Numbers(ps(cycles / clock), ps(constants.latency_ns(name, target)) if engine != SYNC else 0, load, **traffic, **more)


def _traffic(instr: Instr, share: float) -> dict[str, Any]:
    out: dict[str, Any] = dict.fromkeys(("hbm_read", "hbm_write", "sbuf_read", "sbuf_write", "psum_read", "psum_write"), 0)
    for access, read, written in accesses(instr):
        if access.space == "register":
            continue
        size = round(access.size * itemsize(access.dtype) * share)
        if read:
            out[f"{access.space}_read"] += size
        if written:
            out[f"{access.space}_write"] += size
    return out


def _broadcasts(instr: Instr, target: Target) -> list[str]:
    """Operands that repeat one partition for all. Engines have no such read: the compiler multiplies them by ones on the Tensor Engine,
    and where the product fits a PSUM bank the instruction reads it there (published row 30)."""
    decl, out = ISA[instr.op], []
    for param, value in zip(decl.params, instr.operands, strict=True):
        if isinstance(value, Access) and value.alloc.on_chip and value.shape and value.shape[0] > 1 and value.view is None and not any(
                dim.strides[0] or dim.dyn is not None for dim in value.dims) and prod(value.shape[1:]) <= target.psum_fmax:
            out.append(param.name)
    return out


def _wide_stride(instr: Instr, target: Target) -> bool:
    """Whether an operand on chip is walked with an innermost stride above the documented limit."""
    for access, _, _ in accesses(instr):
        if access.space in ("sbuf", "psum") and len(access.shape) > 1:
            steps = element_strides(access)
            inner = next((s for s, n in zip(reversed(steps[1:]), reversed(access.shape[1:]), strict=True) if n > 1), 0)
            if abs(inner) * itemsize(access.dtype) > target.free_stride_bytes:
                return True
    return False


def element_strides(access: Access) -> tuple[int, ...]:
    """Elements of the tensor's memory between neighbours along each dimension of the tile (of a partition, on chip)."""
    view = access.view_shape
    first = access.alloc.pdim + 1 if access.alloc.on_chip else 0
    scale = [prod(view[d + 1:]) if d >= first else 0 for d in range(len(view))]
    return tuple(sum(s.strides[j] * scale[d] for d, s in enumerate(access.dims)) for j in range(len(access.shape)))


def run_length(access: Access, start: int, sizes: tuple[int, ...] | None = None) -> int:
    """Elements that lie next to each other, walking the dimensions of a tile from the last to `start`."""
    steps, shape = element_strides(access), sizes if sizes is not None and len(sizes) == len(access.shape) else access.shape
    run = 1
    for j in range(len(shape) - 1, start - 1, -1):
        if shape[j] == 1:
            continue
        if steps[j] != run:
            break
        run *= shape[j]
    return run


def longest_run(access: Access) -> int:
    """Elements of a tile that lie next to each other, walking its dimensions in the best order."""
    run = 1
    for step, n in sorted(zip(element_strides(access), access.shape, strict=True)):
        if n > 1 and step == run:
            run *= n
    return run


def _sides(instr: Instr) -> tuple[list[Access], list[Access]]:
    sources = [a for a, read, written in accesses(instr) if read and not written and a not in _indices(instr)]
    targets = [a for a, _, written in accesses(instr) if written and a.space != "register"]
    return sources, targets


def _indices(instr: Instr) -> set[Access]:
    found: set[Access] = set()
    for access, _, _ in accesses(instr):
        found.update(access.dynamic())
    return found


def _transfer(instr: Instr, view: Any, target: Target, sizes: tuple[int, ...] | None, share: float, traffic: dict[str, Any]) -> Numbers:
    """A DMA: descriptors of bytes that lie together on both sides, spread over the engines by partition (8 for each)."""
    decl = ISA[instr.op]
    sources, targets = _sides(instr)
    sides = [*sources, *targets] or [a for a, _, _ in accesses(instr)]
    chip = next((a for a in (*targets, *sources) if a.alloc.on_chip), None)
    start = 0 if chip is None else 1
    size = max(itemsize(a.dtype) for a in sides)
    biggest = max(sides, key=lambda a: a.size)
    partitions = 1 if chip is None else chip.shape[0]
    turned = decl.family == "transpose"
    outside = next((a for a in sides if not a.alloc.on_chip), None)
    run = min(run_length(a, start, sizes if a.shape == biggest.shape else None) for a in sides)
    if turned and not target.pe_transpose_mode:  # before trn2 no DMA engine transposes: element by element
        run = 1
    elements = max(1, round(biggest.size * share))
    rate = target.dma_engine_gbps * (decl.dma_share(view, target) if decl.dma_share is not None else 1.0)
    if turned and target.pe_transpose_mode:
        run = max(run, target.dma_full_bytes // size)
    descriptors = ceil(elements / run)
    if chip is None:
        lanes = range(target.dma_engines_core)
        # descriptors are not longer than what saturates an engine, so that all engines have some
        short = min(run * size, target.dma_full_bytes)
        each = constants.descriptor_ns(short, rate, target)
        spread = [(lane, each * ceil(ceil(elements * size / short) / target.dma_engines_core)) for lane in lanes]
    else:
        used = min(partitions, sizes[0] if sizes is not None else partitions)
        first = _first_partition(chip)
        rows = max(1, ceil(descriptors / max(1, used)))
        each = constants.descriptor_ns(run * size, rate, target, rows * run * size)
        line = longest_run(outside) if run == 1 and outside is not None else 1
        if line > 1:  # transposed: memory is walked along its lines, element by element on the side of the partitions
            line = min(line, max(1, target.dma_full_bytes // size))
            each = max(constants.word_ns(size, rate), constants.descriptor_ns(line * size, rate, target) / line)
        count: dict[int, float] = {}
        for p in range(first, first + used):
            lane = (p // target.dma_partitions) % target.dma_engines_core
            count[lane] = count.get(lane, 0) + 1
        if line > 1:  # the engines share out the lines
            count = dict.fromkeys(range(target.dma_engines_core), used / target.dma_engines_core)
        spread = [(lane, n * rows * each) for lane, n in sorted(count.items())]
    both = (traffic["hbm_read"] + traffic["hbm_write"]) / target.hbm_core_gbps
    lanes_ps = tuple((lane, ps(max(t, both)) if len(spread) == target.dma_engines_core else ps(t)) for lane, t in spread)
    moved = elements * size
    # where there are hardware descriptor generators, they make the descriptors of every transfer
    issue = ps(target.hwdge_issue_ns if target.hwdge_instances else target.min_ii / target.clock_sync)
    return Numbers(issue, lanes=lanes_ps, moved=moved, descriptors=descriptors, **traffic)


def _first_partition(access: Access) -> int:
    base = access.dims[access.alloc.pdim].base if access.view is None and access.alloc.pdim < len(access.dims) else None
    return base.const if base is not None and base.is_const else 0


@cache
def table_number(name: str) -> int:
    """Number of an activation table set."""
    return sorted(set(TABLES.values())).index(name)


def table_of(instr: Instr, engine: int) -> int:
    """The table set that an instruction needs on the Scalar Engine, -1 for none."""
    if engine != SCALAR:
        return -1
    for param, value in zip(ISA[instr.op].params, instr.operands, strict=True):
        if isinstance(param.spec, Op) and isinstance(value, str) and value in TABLES:
            return table_number(TABLES[value])
    return -1


def describe(instr: Instr) -> str:
    """Operands as text, tensors with their shape."""
    decl, parts = ISA[instr.op], []
    for access in instr.results:
        parts.append(f"{_name(access)} =")
    for param, value in zip(decl.params, instr.operands, strict=True):
        if isinstance(value, Access):
            if value.space != "register":
                parts.append(f"{param.name}={_name(value)}")
        elif isinstance(value, str) or (isinstance(value, (int, float)) and not isinstance(value, bool) and param.default != value):
            parts.append(f"{param.name}={value}")
        elif isinstance(value, PredTile):
            parts.append(f"{param.name}=mask")
    return " ".join(parts)


def _name(access: Access) -> str:
    return f"{access.alloc.name or repr(access.alloc)}[{'x'.join(map(str, access.shape))} {access.dtype} {access.space}]"
