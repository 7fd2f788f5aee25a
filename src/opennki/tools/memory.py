"""`opennki memory`: where a kernel's tensors live in SBUF and PSUM over program order, as text, SVG or JSON."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from html import escape
from pathlib import Path
from string import ascii_letters
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from opennki.ir.nodes import Alloc
from opennki.kernels.options import compile_opts
from opennki.passes.allocate import allocate
from opennki.passes.liveness import Interval
from opennki.passes.memory_map import MEMORIES, MemoryMap, Placement, capacity

COLUMNS, ROWS = 72, 16
WIDTH = 110  # columns of the terminal that the table needs
ROWS_SHOWN = 60  # tensors that the table lists, the largest ones
COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red", "bright_cyan", "bright_yellow", "bright_green", "bright_magenta")
_HUES = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#ff9da7", "#9c755f", "#8cd17d")

Placed = tuple[Alloc, Placement, Interval]


def memory_of(kernel: Any, args: list[Any], kwargs: dict[str, Any]) -> MemoryMap:
    """The memory map of a kernel (a TraceKernel) for arguments, with the allocator that its decorators ask for. Raises NkiError."""
    options = compile_opts(kernel)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = kernel.trace(*args, **kwargs)
    return allocate(made, allocator=options.allocator, skip_middle_end=options.skip_middle_end)


def show(memory: MemoryMap, console: Console | None = None) -> None:
    """Print the map: for each memory what is used, a drawing (addresses down, program order across), and the tensors."""
    if console is None:
        console = Console(highlight=False)
        console.width = max(console.width, WIDTH)
    console.print(f"{memory.kernel.name} on {memory.target.name}: {len(memory.live.places)} positions in program order, "
                  f"allocator {memory.allocator}", soft_wrap=True)
    for name in MEMORIES:
        placed = list(memory.of(name))
        peak, room = memory.peaks[name], capacity(memory.target, name)
        console.print()
        if not placed:
            console.print(f"{name.upper()}: not used", style="bold")
            continue
        console.print(f"{name.upper()}: {peak.high:,} of {room:,} bytes per partition in use", style="bold")
        loc = memory.live.places[peak.position] if peak.position < len(memory.live.places) else None
        where = f" ({os.path.basename(loc.file)}:{loc.line})" if loc else ""
        console.print(f"  alive at once: at most {peak.size:,} bytes, at position {peak.position}{where}", soft_wrap=True)
        marks = {alloc: n for n, (alloc, _, _) in enumerate(placed)}
        for line in _drawing(memory, name, placed, marks):
            console.print(line, no_wrap=True, crop=False, soft_wrap=True)
        console.print(_table(memory, placed, marks))
    for note in memory.notes:
        console.print(f"note: {note}", style="yellow", soft_wrap=True)


def span(memory: MemoryMap, placed: Placed) -> Interval:
    """Positions in which the place of a tensor is taken: all of its loop where it has several buffers."""
    alloc, place, interval = placed
    return interval if place.copies == 1 else memory.live.span(memory.live.loops(alloc)[-1])


def _drawing(memory: MemoryMap, name: str, placed: list[Placed], marks: dict[Alloc, int]) -> Iterator[Text]:
    positions = max(1, len(memory.live.places))
    columns = min(COLUMNS, positions * max(1, min(4, COLUMNS // positions)))
    unit = memory.target.psum_bank_bytes if name == "psum" else max(1, -(-memory.peaks[name].high // ROWS))
    rows = -(-memory.peaks[name].high // unit)
    cells: list[list[int | None]] = [[None] * columns for _ in range(rows)]
    for item in sorted(placed, key=lambda p: -p[1].extent):  # small ones last, on top
        time = span(memory, item)
        first, last = _columns(time, columns, positions)
        for region in item[1].regions():
            for row in range(region.address // unit, (region.address + region.size - 1) // unit + 1):
                for column in range(first, last + 1):
                    cells[row][column] = marks[item[0]]
    for row, line in enumerate(cells):
        label = f"bank {row}" if name == "psum" else f"{row * unit:,}"
        text = Text(f"{label:>9} ", style="dim")
        for cell in line:
            if cell is None:
                text.append("·", style="dim")
            else:
                text.append(_mark(cell), style=COLOURS[cell % len(COLOURS)])
        yield text
    loops = Text(f"{'loops':>9} ", style="dim")
    depth = [0] * columns
    for place in memory.live.spans.values():
        first, last = _columns(place, columns, positions)
        for column in range(first, last + 1):
            depth[column] += 1
    loops.append("".join(str(d) if 0 < d < 10 else "+" if d else " " for d in depth), style="dim")
    yield loops


def _columns(time: Interval, columns: int, positions: int) -> tuple[int, int]:
    """First and last column of an interval."""
    first = time.start * columns // positions
    return first, max(first, (time.end + 1) * columns // positions - 1)


def _mark(number: int) -> str:
    return ascii_letters[number % len(ascii_letters)]


def _table(memory: MemoryMap, placed: list[Placed], marks: dict[Alloc, int]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("", "tensor", "shape", "dtype", "at", "bytes", "buffers", "partitions", "positions", "line"):
        table.add_column(title, justify="right" if title in ("at", "bytes", "buffers", "line") else "left", no_wrap=True)
    shown = sorted(sorted(placed, key=lambda p: -p[1].extent)[:ROWS_SHOWN], key=lambda p: marks[p[0]])
    for alloc, place, interval in shown:
        number = marks[alloc]
        at = f"bank {place.bank}" + (f" + {place.address % memory.target.psum_bank_bytes}" if place.address % memory.target.psum_bank_bytes
                                     else "") if place.bank is not None else f"{place.address:,}"
        blocks = f"{place.blocks} x {place.size:,}" if place.blocks > 1 else f"{place.size:,}"
        end = place.start_partition + place.partitions - 1
        table.add_row(Text(_mark(number), style=COLOURS[number % len(COLOURS)]), alloc.name or repr(alloc), "x".join(map(str, alloc.shape)),
                      alloc.dtype, at, blocks, str(place.copies) if not place.direct else f"{len(place.regions())} own",
                      f"{place.start_partition}-{end}", f"{interval.start}-{interval.end}", str(alloc.loc.line) if alloc.loc else "")
    if len(placed) > len(shown):
        table.caption = f"and {len(placed) - len(shown)} smaller tensors"
    return table


def svg(memory: MemoryMap) -> str:
    """The map as an SVG picture: program order across, addresses down, one rectangle for each place, with its tensor as a tooltip."""
    width, height, left, top = 1000, 360, 80, 50
    positions = max(1, len(memory.live.places))
    parts = [f'<text x="{left}" y="20" font-size="14">{escape(memory.kernel.name)} on {escape(memory.target.name)}</text>']
    for k, name in enumerate(MEMORIES):
        y0 = top + k * (height + 60)
        high = max(memory.peaks[name].high, 1)
        parts.append(f'<text x="{left}" y="{y0 - 8}" font-weight="bold">{name.upper()}: {memory.peaks[name].high:,} of '
                     f'{capacity(memory.target, name):,} bytes per partition</text>')
        parts.append(f'<rect x="{left}" y="{y0}" width="{width}" height="{height}" fill="#f6f6f6" stroke="#999"/>')
        for n, item in enumerate(memory.of(name)):
            alloc, place, _ = item
            time = span(memory, item)
            x, w = left + time.start * width / positions, (time.end + 1 - time.start) * width / positions
            line = f", line {alloc.loc.line}" if alloc.loc else ""
            label = (f"{alloc.name or repr(alloc)} {list(alloc.shape)} {alloc.dtype}, "
                     f"{place.size:,} bytes x {place.blocks * place.copies}{line}")
            for region in place.regions():
                y, h = y0 + region.address * height / high, max(region.size * height / high, 0.5)
                parts.append(f'<rect x="{x:.2f}" y="{y:.2f}" width="{w:.2f}" height="{h:.2f}" fill="{_HUES[n % len(_HUES)]}" '
                             f'fill-opacity="0.85" stroke="#333" stroke-width="0.3"><title>{escape(label)}</title></rect>')
        step = memory.target.psum_bank_bytes if name == "psum" else max(1, -(-high // 8))
        for address in range(0, high + 1, step):
            y = y0 + address * height / high
            parts.append(f'<text x="{left - 6}" y="{y + 4:.2f}" text-anchor="end" fill="#555">{address:,}</text>')
            parts.append(f'<line x1="{left}" x2="{left + width}" y1="{y:.2f}" y2="{y:.2f}" stroke="#bbb" stroke-width="0.3"/>')
        parts.append(f'<text x="{left}" y="{y0 + height + 14}" fill="#555">position 0</text>')
        parts.append(f'<text x="{left + width}" y="{y0 + height + 14}" fill="#555" text-anchor="end">position {positions - 1}</text>')
    total = top + 2 * (height + 60)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width + left + 20} {total}" font-family="sans-serif" font-size="11">'
            '<rect width="100%" height="100%" fill="white"/>' + "\n".join(parts) + "</svg>\n")


def write(memory: MemoryMap, svg_file: str | None, json_file: str | None) -> None:
    """Write the files that were asked for, each whole or not at all."""
    for path, text in ((svg_file, lambda: svg(memory)), (json_file, lambda: json.dumps(memory.to_json(), indent=1) + "\n")):
        if path:
            target = Path(path)
            part = target.with_name(f".{target.name}.{os.getpid()}.part")
            try:
                part.write_text(text(), encoding="utf-8")
                part.replace(target)
            finally:
                part.unlink(missing_ok=True)
