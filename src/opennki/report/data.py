"""The data of a report: a Timeline as columns, so that a hundred thousand rows are a few megabytes and quick to load."""

from __future__ import annotations

import base64
import linecache
from typing import Any

import numpy as np

from opennki.errors import UNKNOWN, Loc
from opennki.timing import ENGINES, Row, Timeline

CONTEXT = 2  # source lines around one that costs something
SHOWN_PATH = 2  # last parts of a file's path that a report shows; the rest is of this machine


class Table:
    """Values by number, each once."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._number: dict[Any, int] = {}

    def add(self, value: Any) -> int:
        """Number of a value."""
        number = self._number.get(value)
        if number is None:
            number = self._number[value] = len(self.values)
            self.values.append(value)
        return number


def short(path: str) -> str:
    """The end of a path, without what is of this machine."""
    return "/".join(path.replace("\\", "/").split("/")[-SHOWN_PATH:])


def lanes(timeline: Timeline) -> list[str]:
    """Queues in the order of ENGINES; those of DMA that were used, by number."""
    used = {row.queue for row in timeline.rows}
    dma = sorted((q for q in used if q not in ENGINES), key=lambda q: (len(q), q))
    return [*(e for e in ENGINES[:-1]), *(["dma"] if "dma" in used or not dma else []), *dma]


def column(values: Any, dtype: str) -> dict[str, str]:
    """Numbers as base64 of little-endian bytes."""
    array = np.asarray(values, dtype=np.dtype(dtype).newbyteorder("<"))
    return {"dtype": dtype, "data": base64.b64encode(array.tobytes()).decode("ascii")}


def document(timeline: Timeline, occupancy: dict[str, Any] | None = None) -> dict[str, Any]:
    """Everything that the page shows, as JSON-able data.

    occupancy: memory -> {"capacity": bytes, "at": times in ns, "bytes": bytes from then on}, from `occupancy`; None leaves it out.
    """
    ops, texts, places = Table(), Table(), Table()
    order = lanes(timeline)
    number = {name: i for i, name in enumerate(order)}
    rows = sorted(timeline.rows, key=lambda r: (number[r.queue], r.start_ns, r.id))
    roof = timeline.roofline()
    costs = timeline.by_source_line()
    document: dict[str, Any] = {
        "kernel": timeline.kernel, "target": timeline.target, "latency_us": timeline.latency_us, "launch_us": timeline.launch_us,
        "estimate": timeline.is_estimate, "bound_by": timeline.bound_by, "bounds": timeline.bounds,
        "instructions": timeline.instructions, "simulated": timeline.simulated, "truncated": timeline.truncated,
        "programs": timeline.programs, "cores": timeline.cores, "program": list(timeline.program), "warnings": list(timeline.warnings),
        "engines": {n: {"busy_ns": u.busy_ns, "active": u.active, "wait_ns": u.wait_ns, "instructions": u.instructions}
                    for n, u in timeline.engines.items()},
        "metrics": timeline.metrics(),
        "roofline": {"intensity": roof.intensity, "attained": roof.attained, "peak": roof.peak, "bandwidth": roof.bandwidth},
        "lines": [
            {"place": places.add(c.location or UNKNOWN), "critical_ns": c.critical_ns, "busy_ns": c.busy_ns,
             "instructions": c.instructions, "hbm_bytes": c.hbm_bytes, "flops": c.flops}
            for c in costs
        ],
        "occupancy": {
            memory: {"capacity": part["capacity"], "at": column(part["at"], "float64"), "bytes": column(part["bytes"], "float64")}
            for memory, part in (occupancy or {}).items()
        },
        "lanes": order,
    }  # fmt: skip
    document["rows"] = _rows(rows, number, ops, texts, places)
    document["ops"], document["texts"] = ops.values, texts.values
    document["places"] = [_place(loc) for loc in places.values]
    return document


def _rows(rows: list[Row], number: dict[str, int], ops: Table, texts: Table, places: Table) -> dict[str, Any]:
    """The rows as columns, sorted by lane and start."""
    first = [0]
    iterations: list[int] = []
    for row in rows:
        iterations += row.iteration
        first.append(len(iterations))
    return {
        "count": len(rows),
        "id": column([r.id for r in rows], "int32"),
        "lane": column([number[r.queue] for r in rows], "uint16"),
        "op": column([ops.add(r.op) for r in rows], "uint16"),
        "text": column([texts.add(r.operands) for r in rows], "int32"),
        "place": column([places.add(r.location or UNKNOWN) for r in rows], "int32"),
        "start": column([r.start_ns for r in rows], "float64"),
        "duration": column([r.duration_ns for r in rows], "float32"),
        "wait": column([r.wait_ns for r in rows], "float32"),
        "waits_for": column([r.waits_for for r in rows], "int32"),
        "bytes": column([r.bytes for r in rows], "float32"),
        "flops": column([r.flops for r in rows], "float32"),
        "elements": column([r.elements for r in rows], "float32"),
        "first": column(first, "int32"),
        "iteration": column(iterations, "int32"),
    }


def _place(loc: Loc) -> dict[str, Any]:
    """A source line, with its text where the file can be read."""
    if loc == UNKNOWN:
        return {"file": "", "line": 0, "text": "", "around": []}
    around = [(n, _line(loc, n)) for n in range(max(1, loc.line - CONTEXT), loc.line + CONTEXT + 1)]
    return {"file": short(loc.file), "line": loc.line, "text": loc.source(), "around": around, "function": loc.function}


def _line(loc: Loc, number: int) -> str:
    return linecache.getline(loc.file, number).rstrip("\n")[:400]
