"""What `opennki sweep` does."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from opennki import settings
from opennki.tools.sweep import pool, tables
from opennki.tools.sweep.plan import Point, axes_of, points_of, setup_of
from opennki.tools.sweep.store import RESULTS, Store

SHOWN = 5  # points that the summary names
EVERY = 5.0  # seconds between two lines of progress where they do not overwrite each other


@dataclass(frozen=True, slots=True)
class Options:
    """How a sweep is run. `jobs`: worker processes, None for OPENNKI_NUM_THREADS. `retry`: points that did not succeed are run again.
    `ray`: on a Ray cluster, at `ray_address` or wherever Ray finds one."""

    out: str = "sweep"
    jobs: int | None = None
    limit: float = 300.0
    checks: str = "fast"
    seed: int = 0
    retry: bool = False
    formats: Sequence[str] = ("csv",)
    plot: bool = True
    ray: bool = False
    ray_address: str | None = None


def sweep(script: str, attribute: str, args: Sequence[str], target: str | None, grid: Sequence[str], options: Options,
          err: TextIO | None = None) -> tuple[str, int]:  # fmt: skip
    """Run a sweep; returns what to print and the exit status: 0 where it is complete and some point succeeded, 1 where none did, 130 where
    it was interrupted. What is done before an interrupt or an error is kept. Raises NkiError for what no point can be run with."""
    for name in options.formats:
        if name == "parquet":
            tables.library("parquet", "pyarrow")  # says now what is missing
    setup = setup_of(script, options.checks, options.seed)
    axes = axes_of(grid)
    points = points_of(setup, attribute, args, target, axes)
    store = Store(options.out)
    interrupted = False
    try:
        rows = store.rows
        done = {p.key for p in points if p.key in rows and not (options.retry and rows[p.key]["status"] != "ok")}
        todo = [p for p in points if p.key not in done]
        progress = Progress(len(points), len(points) - len(todo), err or sys.stderr)
        progress.counts.update(rows[key]["status"] for key in done)
        jobs = options.jobs or settings.current().num_threads
        request = setup.request()
        results = (pool.on_ray(request, todo, options.limit, options.ray_address) if options.ray
                   else pool.on_this_machine(request, todo, jobs, options.limit))  # fmt: skip
        try:
            for point, row in results:
                store.add(point.key, row)
                progress.step(row["status"])
        except KeyboardInterrupt:
            interrupted = True
        finally:
            results.close()
            progress.end()
            written = _write(store, points, axes, options, f"{attribute} of {script}")
    finally:
        store.close()
    table = tables.rows_of(points, store.rows)
    lines = [_summary(table, axes), *(f"wrote {path}" for path in written)]
    if interrupted:
        return "\n".join([*lines, "interrupted; the same command goes on from here"]), 130
    return "\n".join(lines), 0 if any(row["status"] == "ok" for row in table) else 1


def _write(store: Store, points: list[Point], axes: dict[str, list[str]], options: Options, title: str) -> list[str]:
    rows = tables.rows_of(points, store.rows)
    names = tables.columns(points, rows)
    written = [str(store.folder / RESULTS)]
    kinds: dict[str, Callable[..., None]] = {"csv": tables.write_csv, "parquet": tables.write_parquet}
    for kind in options.formats:
        kinds[kind](store.folder / f"results.{kind}", names, rows)
        written.append(str(store.folder / f"results.{kind}"))
    if options.plot and tables.write_plot(store.folder / "plot.svg", axes, rows, title):
        written.append(str(store.folder / "plot.svg"))
    return written


def _summary(rows: list[dict[str, Any]], axes: dict[str, list[str]]) -> str:
    """How many points ended how, the fastest, and the most frequent errors."""

    def named(row: dict[str, Any]) -> str:
        return ", ".join(f"{n}={row[n]}" for n in axes) or "the only point"

    counts = Counter(row["status"] for row in rows)
    lines = [f"{len(rows)} points: " + ", ".join(f"{n} {status}" for status, n in counts.most_common())]
    timed = sorted((r for r in rows if r["status"] == "ok"), key=lambda r: (r["latency_us"], r["point"]))
    lines += [f"  {row['latency_us']:12.3f} us  {named(row)}" for row in timed[:SHOWN]]
    if len(timed) > SHOWN:
        lines.append(f"  ... {timed[-1]['latency_us']:8.3f} us  {named(timed[-1])}")
    if timed:
        lines.append("  (estimates of a model; no device was measured)")
    errors: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["status"] != "ok":
            first = (str(row.get("error") or "").splitlines() or [""])[0]
            errors.setdefault(f"{row['status']}: {first}", []).append(row)
    for text, which in sorted(errors.items(), key=lambda e: -len(e[1]))[:SHOWN]:
        lines.append(f"  {len(which)} x {text} (first: {named(which[0])})")
    return "\n".join(lines)


class Progress:
    """A line that says how far the sweep is. On a terminal it is written over; elsewhere there is a new one every some seconds."""

    def __init__(self, total: int, before: int, out: TextIO) -> None:
        self.total, self.before, self.done, self.out = total, before, before, out
        self.counts: Counter[str] = Counter()
        self.start = self.shown = time.monotonic()
        self.live = out.isatty()
        if before:
            print(f"{before} of {total} points are done already", file=out, flush=True)

    def step(self, status: str) -> None:
        """A point has ended."""
        self.done += 1
        self.counts[status] += 1
        now = time.monotonic()
        if self.live or now - self.shown >= EVERY or self.done == self.total:
            self.shown = now
            self._show(now)

    def _show(self, now: float) -> None:
        here = self.done - self.before
        left = (now - self.start) / here * (self.total - self.done)
        states = ", ".join(f"{n} {status}" for status, n in self.counts.most_common())
        rest = f", about {left:.0f} s left" if self.done < self.total else f", {now - self.start:.1f} s"
        text = f"[{self.done}/{self.total}] {states}{rest}"
        print(f"\r\x1b[K{text}" if self.live else text, end="" if self.live else "\n", file=self.out, flush=True)

    def end(self) -> None:
        """No more points."""
        if self.live and self.done > self.before:
            print(file=self.out, flush=True)
