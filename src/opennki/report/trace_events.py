"""A Timeline in the Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

import json
from typing import Any

from opennki.report.data import lanes, short
from opennki.timing import Timeline

PROCESS = 1


def chrome_trace(timeline: Timeline, occupancy: dict[str, Any] | None = None) -> str:
    """JSON text: a complete event for each recorded row, on a thread for each queue; occupancy of SBUF and PSUM as counters.

    Times are microseconds with nanosecond digits. Source: the public document "Trace Event Format".
    """
    order = lanes(timeline)
    name = f"{timeline.kernel} on {timeline.target} (estimate)"
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": PROCESS, "tid": 0, "args": {"name": name}}]
    for number, lane in enumerate(order):
        events.append({"ph": "M", "name": "thread_name", "pid": PROCESS, "tid": number + 1, "args": {"name": lane}})
        events.append({"ph": "M", "name": "thread_sort_index", "pid": PROCESS, "tid": number + 1, "args": {"sort_index": number}})
    thread = {lane: number + 1 for number, lane in enumerate(order)}
    for row in sorted(timeline.rows, key=lambda r: (r.start_ns, r.id)):
        args: dict[str, Any] = {"id": row.id, "operands": row.operands, "bytes": row.bytes, "flops": row.flops, "wait_ns": row.wait_ns}
        if row.location is not None:
            args["nki_source_location"] = f"{short(row.location.file)}:{row.location.line}"
        if row.iteration:
            args["iteration"] = list(row.iteration)
        if row.waits_for >= 0:
            args["waits_for"] = row.waits_for
        events.append({
            "ph": "X", "name": row.op, "cat": row.engine, "pid": PROCESS, "tid": thread[row.queue],
            "ts": row.start_ns / 1e3, "dur": row.duration_ns / 1e3, "args": args,
        })  # fmt: skip
    for memory, part in (occupancy or {}).items():
        for at, size in zip(part["at"], part["bytes"], strict=True):
            events.append({"ph": "C", "name": f"{memory} bytes per partition", "pid": PROCESS, "tid": 0, "ts": at / 1e3,
                           "args": {"bytes": size}})  # fmt: skip
    other = {"note": timeline.is_estimate, "latency_us": timeline.latency_us, "bound_by": timeline.bound_by}
    if timeline.truncated:
        other["truncated"] = f"{timeline.truncated} further instructions are not in the trace"
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns", "otherData": other}, separators=(",", ":"))
