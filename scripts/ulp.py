"""The errors of the approximate functions of the native library over many values, against what docs/executor.md and the tests promise.

    python scripts/ulp.py [--values 10000000] [--every] [--only NAME] [--seed 0]

Functions with a bound in units in the last place are compared with float64; compositions (sigmoid, gelu ...) with the NumPy side of
isa/scalar.py, by the largest error relative to its bound in tests/execute/test_native_functions.py. --every: each float32 that there is,
for functions of one operand (4.3e9 values, some minutes for each). Ends with an error where a bound does not hold.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import numpy as np  # noqa: E402

CHUNK = 1 << 20


def operands(rng, arity, n):
    """Values of every kind: random bits, usual magnitudes, a line, whole numbers, and numbers near one."""
    parts = [
        rng.integers(0, 1 << 32, n // 2, dtype=np.uint32).view(np.float32),
        (rng.standard_normal(n // 4) * 10).astype(np.float32),
        rng.uniform(-110, 100, n // 8).astype(np.float32),
        np.rint(rng.standard_normal(n // 16) * 30).astype(np.float32),
        (1 + rng.standard_normal(n - n // 2 - n // 4 - n // 8 - n // 16) / 1000).astype(np.float32),
    ]
    a = np.concatenate(parts)
    if arity == 1:
        return (a,)
    b = np.concatenate([parts[0][::-1], (parts[1] / 2)[::-1], parts[2] / 20, np.rint(parts[3] / 10), parts[4] * 50])
    return a, b


def chunks(rng, arity, values, every):
    """The operands, a chunk at a time."""
    if every and arity == 1:
        for start in range(0, 1 << 32, CHUNK):
            yield (np.arange(start, start + CHUNK, dtype=np.uint32).view(np.float32),)
        return
    for start in range(0, values, CHUNK):
        yield operands(rng, arity, min(CHUNK, values - start))


def units(got, truth):
    """Largest error in units in the last place of the float32 nearest to the truth, and where it is. NaN and infinity have to agree, but
    for the last step to infinity."""
    want = truth.astype(np.float32)
    if (np.isnan(got) != np.isnan(want)).any() or (np.signbit(got) != np.signbit(want))[~np.isnan(want)].any():
        return np.inf, int(np.argmax((np.isnan(got) != np.isnan(want)) | (np.signbit(got) != np.signbit(want)) & ~np.isnan(want)))
    largest = np.float64(np.finfo(np.float32).max)
    edge = (np.isinf(got) != np.isinf(want)) & (np.abs(truth) >= largest * (1 + 2.0**-23))
    if edge.any():
        return np.inf, int(np.argmax(edge))
    finite = np.isfinite(want) & np.isfinite(got)
    error = np.zeros(got.shape)
    error[finite] = np.abs(got[finite].astype(np.float64) - truth[finite]) / np.spacing(np.abs(want[finite])).astype(np.float64)
    return float(error.max(initial=0)), int(error.argmax()) if error.size else 0


def part_of_bound(got, want, x, relative, absolute):
    """Largest error as a part of its bound, and where it is."""
    wrong = (np.isnan(got) != np.isnan(want)) | (np.isinf(got) != np.isinf(want))
    if wrong.any():
        return np.inf, int(np.argmax(wrong))
    finite = np.isfinite(want)
    g, w = got.astype(np.float64), want.astype(np.float64)
    bound = relative * np.abs(w) + absolute * np.clip(np.abs(x), 1, 1e30) + 1.5e-45
    part = np.where(finite, np.abs(g - w) / bound, 0.0)
    return float(np.nanmax(part)), int(np.nanargmax(part))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--values", type=int, default=10_000_000)
    parser.add_argument("--every", action="store_true", help="each float32, for functions of one operand")
    parser.add_argument("--only", default="")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    from tests.execute import native
    from tests.execute.test_native_functions import CLOSE, TRUTH, ULP

    from opennki.isa.scalar import SCALAR

    failed = 0
    print(f"{'function':<20}{'values':>14}{'largest':>10}{'bound':>8}   unit               at")
    for name in [*sorted(ULP), *sorted(CLOSE)]:
        if args.only and name != args.only:
            continue
        rng, largest, place, count, start = np.random.default_rng(args.seed), 0.0, (), 0, time.monotonic()
        for given in chunks(rng, SCALAR[name].arity, args.values, args.every):
            with np.errstate(all="ignore"):
                got = native.call(native.best(), name, *given)
                if name in ULP:
                    error, at = units(got, TRUTH[name](*(g.astype(np.float64) for g in given)))
                else:
                    error, at = part_of_bound(got, SCALAR[name].numpy(*given), given[0], *CLOSE[name])
            count += got.size
            if error > largest:
                largest, place = error, tuple(float(g[at]) for g in given)
        bound = ULP.get(name, 1.0)
        what = "ulp of float32" if name in ULP else "part of the bound"
        failed += largest > bound
        mark = "" if largest <= bound else "  TOO LARGE"
        print(f"{name:<20}{count:>14}{largest:>10.4f}{bound:>8}   {what:<18} {place} ({time.monotonic() - start:.0f} s){mark}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
