"""The timing model against published latencies: row, published, predicted, error, what bounds it.

    python benchmarks/timing.py [--checkouts DIR] [--only TEXT] [--lines]

Kernels of others are read from local clones (DIR/owner__name, any clone will do); a row whose clone is missing says so. The default for
DIR is the environment variable OPENNKI_CHECKOUTS, else `checkouts` beside this repository.
"""
from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import opennki.dropin  # noqa: F401  isort: skip
import numpy as np
from timing_rows import LEFT_OUT, ROWS, Checkouts, Missing

from opennki.timing import estimate


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    where = Path(os.environ.get("OPENNKI_CHECKOUTS", Path(__file__).parents[2] / "checkouts"))
    parser.add_argument("--checkouts", type=Path, default=where)
    parser.add_argument("--only", default="")
    parser.add_argument("--lines", action="store_true", help="the five most expensive source lines of each kernel")
    args = parser.parse_args()
    clones = Checkouts(args.checkouts)
    warnings.simplefilter("ignore")
    print(f"{'id':>3} {'kernel':<44} {'target':<6} {'published':>10} {'predicted':>10} {'error':>7}  {'kind':<12} {'bound by':<13}"
          f" {'trace':>6} {'model':>6}  instructions (simulated)")
    found, profiles = [], []
    for row in ROWS:
        if args.only and args.only not in row.name:
            continue
        os.environ["NEURON_PLATFORM_TARGET_OVERRIDE"] = row.target
        start = time.perf_counter()
        try:
            kernel = row.trace(clones)
            traced = time.perf_counter()
            timeline = estimate(kernel, record=row.probe is not None)
        except Missing as missing:
            print(f"{row.id:>3} {row.name:<44} {row.target:<6} {row.measured:>10.1f} {missing}")
            continue
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{row.id:>3} {row.name:<44} {row.target:<6} {row.measured:>10.1f} does not trace: {error} ({where.name})"
            print(text.replace("\n", " ")[:220])
            continue
        done = time.perf_counter()
        predicted = row.probe(timeline) if row.probe is not None else timeline.latency_us
        error = predicted / row.measured - 1
        found.append((row, predicted, error))
        print(f"{row.id:>3} {row.name:<44} {row.target:<6} {row.measured:>10.1f} {predicted:>10.1f} {error:>+7.1%}  "
              f"{row.kind + (' (fit)' if row.fit else ''):<12} {timeline.bound_by:<13} {traced - start:>5.1f}s {done - traced:>5.1f}s  "
              f"{timeline.instructions} ({timeline.simulated})", flush=True)
        for text in timeline.warnings:
            print(f"    {text}")
        if args.lines:
            for cost in timeline.by_source_line()[:5]:
                where = cost.location
                print(f"    {cost.critical_ns / 1e3:>9.1f} µs  {({k: round(v / 1e3, 1) for k, v in cost.busy_ns.items()})}  "
                      f"{where.line if where else 0}: {where.source()[:90] if where else ''}")
        if row.profile:
            profiles.append((row, timeline))
    print()
    summary("rows that constants were fitted on", [e for r, _, e in found if r.kind == "measured" and r.fit])
    summary("held-out measured rows, one core, no spills", [e for r, _, e in found if r.kind == "measured" and not r.fit])
    summary("all measured rows, one core, no spills", [e for r, _, e in found if r.kind == "measured"])
    summary("rows with compiler spills", [e for r, _, e in found if r.kind == "spills"])
    summary("products that the Tensor Engine bounds", [e for r, _, e in found if r.pe_bound])
    for row, predicted, _ in found:
        if row.kind == "upper bound":
            share = predicted / row.measured
            print(f"  upper bound {row.id}: {share:.0%} of it{'' if share <= 1 else '  EXCEEDED'}{'  below half' if share < 0.5 else ''}")
    for group in dict.fromkeys(r.group for r, _, _ in found if r.group):
        members = [(r, p) for r, p, _ in found if r.group == group]
        wrong = [(a.id, b.id) for a, p in members for b, q in members if a.measured < b.measured and p >= q]
        if len(members) > 1:
            print(f"  order in {group}: {'right' if not wrong else f'wrong for rows {wrong}'}")
    if profiles:
        print(f"\n{'id':>3} {'':<40} {'HBM read':>24} {'HBM write':>22}   active: scalar       vector       gpsimd")
        for row, t in profiles:
            p = row.profile
            shares = "   ".join(f"{p[e]:.3f} {t.engines[e].active:.3f}" for e in ("scalar", "vector", "gpsimd"))
            print(f"{row.id:>3} {row.name:<40} {p['hbm_read'] / 1e6:>10.1f} {t.hbm_read_bytes / 1e6:>10.1f} MB "
                  f"{p['hbm_write'] / 1e6:>9.1f} {t.hbm_write_bytes / 1e6:>9.1f} MB    {shares}   (published, predicted)")
    print("\nleft out: " + "; ".join(f"{k}: {v}" for k, v in LEFT_OUT.items()))
    return 0


def summary(title: str, errors: list[float]) -> None:
    """Median and 90th percentile of absolute errors."""
    if errors:
        a = np.abs(errors)
        print(f"  {title}: {len(a)} rows, median {np.median(a):.1%}, 90th percentile {np.percentile(a, 90):.1%}, worst {a.max():.1%}")


if __name__ == "__main__":
    sys.exit(main())
