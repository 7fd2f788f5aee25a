"""`opennki bench` and `opennki profile`: the estimate for a kernel as text, and the files of a profile."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from opennki.ir.locations import locations_text
from opennki.ir.print import to_text
from opennki.kernels.base import TraceKernel
from opennki.kernels.options import compile_opts
from opennki.passes.allocate import allocate
from opennki.report.occupancy import occupancy
from opennki.report.page import page
from opennki.report.trace_events import chrome_trace
from opennki.timing import COMPUTE, Timeline, estimate
from opennki.toolchain import NEFF_NAME, neff, ntff
from opennki.toolchain.compile import Source, compile_kernel
from opennki.toolchain.files import make_folder, write_file

SHOWN_LINES = 8


def bench(kernel: TraceKernel, args: list[Any], kwargs: dict[str, Any], as_json: bool, ranks: int | None = None) -> str:
    """The estimate for a kernel and its arguments as text: latency, what bounds it, engines, traffic, source lines by cost."""
    timeline = estimate(kernel.trace(*args, **kwargs), ranks=ranks)
    return summary(timeline) if not as_json else json.dumps({**timeline.metrics(), "latency_us": timeline.latency_us,
        "bound_by": timeline.bound_by, "kernel": timeline.kernel, "target": timeline.target, "estimate": timeline.is_estimate,
        **({"links": asdict(timeline.links)} if timeline.links is not None else {})}, indent=1)


def summary(timeline: Timeline) -> str:
    """A timeline in a few lines."""
    engines = ", ".join(f"{name} {100 * timeline.engines[name].active:.0f}%" for name in (*COMPUTE, "dma"))
    moved = timeline.traffic
    rows = [f"{timeline.kernel} on {timeline.target}: {timeline.latency_us:.3f} us, bound by {timeline.bound_by}",
            f"  engines active: {engines}",
            f"  HBM: {moved.hbm_read_bytes} bytes read, {moved.hbm_write_bytes} written; {timeline.work.macs} multiply-accumulates"]
    if timeline.links is not None:
        use = timeline.links
        rows += [f"  collectives: {use.collectives} among {use.where}: {use.busy_ns / 1e3:.3f} us,",
                 f"    {use.link_bytes} bytes on the links of a chip",
                 "    (an estimate from documents alone: no collective was compared with a measurement)"]
    total = timeline.latency_ns or 1.0
    for cost in timeline.by_source_line()[:SHOWN_LINES]:
        where = "" if cost.location is None else f"{cost.location}: {cost.location.source()}"
        rows.append(f"  {100 * cost.critical_ns / total:5.1f}%  {where}")
    return "\n".join([*rows, *(f"  warning: {text}" for text in timeline.warnings), f"  {timeline.is_estimate}"])


def profile(kernel: TraceKernel, args: list[Any], kwargs: dict[str, Any], folder: str, ranks: int | None = None) -> str:
    """Write NEFF, NTFF, JSON summary, report and Perfetto trace of a kernel into a folder; returns what to print. Errors: NkiError."""
    made = kernel.trace(*args, **kwargs)
    opts = compile_opts(kernel)
    compiled = compile_kernel(Source(made, to_text(made), locations_text(made)), allocator=opts.allocator,
                              skip_middle_end=opts.skip_middle_end)
    timeline = estimate(made, record=True, ranks=ranks)
    used = occupancy(timeline, allocate(made, allocator=opts.allocator, skip_middle_end=opts.skip_middle_end, spill=True))
    trace = ntff.encode(timeline, neff.parse(compiled.neff).digest)
    out = Path(make_folder(folder, "the folder of the profile"))
    files = {NEFF_NAME: compiled.neff, "profile.ntff": trace, "summary.json": json.dumps(ntff.parse(trace).summary(), indent=1).encode(),
             "report.html": page(timeline, used).encode("utf-8"), "trace.json": chrome_trace(timeline, used).encode("utf-8")}
    for name, data in files.items():
        write_file(out / name, data, "the profile")
    return "\n".join([summary(timeline), *(f"wrote {out / name}" for name in files)])
