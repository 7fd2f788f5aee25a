"""Random kernels by native code and by the interpreter, which must agree in every bit.

    python scripts/fuzz_executor.py --minutes 5 --seed 1
    python scripts/fuzz_executor.py --replay failure.txt

Programs are made from their number, so a number is enough to see one again (--seed N --programs 1). A program that differs is made smaller
and printed as the text of a kernel, with how its arguments are made; --out DIR keeps the texts. The programs run in a process of their own,
so that a crash of native code is a failure like others, with the program that caused it.
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import queue
import re
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
HANG = 120  # seconds without an answer
CRASHES = 5  # after which it ends


def work(first: int, step: int, results: Any, small: bool) -> None:
    """Run programs one after the other, and tell what came of each."""
    from tests.execute import differ

    from opennki.ir.nodes import Instr, statements
    from opennki.ir.parse import from_text

    seed = first
    while True:
        results.put(("start", seed))
        text, styles = differ.program(seed)
        found: list[Any] = []
        kind, what = "same", ""
        try:
            what = differ.check(text, styles, found)
        except differ.Undefined:
            kind = "undefined"
        except differ.Refused as exc:
            kind, what = "refused", str(exc)
        if kind == "same" and what:
            kind = "different"
            if small:

                def still(smaller: str, styles: dict[str, str], wanted: str = " ".join(what.split()[:2])) -> bool:
                    try:
                        return " ".join(differ.check(smaller, styles).split()[:2]) == wanted
                    except (differ.Undefined, differ.Refused):
                        return False

                text = differ.shrunk(text, styles, still)
        covered = (len(found[0].lowering.calls), len(found[0].lowering.fallbacks)) if found else (0, 0)
        kernel = from_text(text)
        ops = sorted({s.op for s in statements(kernel.body) if isinstance(s, Instr)})
        styles = {p.name: styles[p.name] for p in kernel.params}
        results.put((kind, seed, what, text if kind == "different" else "", styles, covered, ops))
        seed += step


def fuzz(first: int, minutes: float, programs: int | None, out: Path | None, small: bool = True, step: int = 1) -> dict[str, int]:
    """Run programs `first`, `first` + `step`, ... for a time, or a number of them. Prints failures; returns counts."""
    counts: dict[str, int] = collections.Counter()
    ops: dict[str, int] = collections.Counter()
    seen: set[Any] = set()
    context = multiprocessing.get_context("spawn")
    end, seed = time.monotonic() + 60 * minutes, first
    while time.monotonic() < end and (programs is None or counts["programs"] < programs):
        results = context.Queue()
        worker = context.Process(target=work, args=(seed, step, results, small), daemon=True)
        worker.start()
        try:
            while time.monotonic() < end and (programs is None or counts["programs"] < programs):
                kind, seed, *rest = _next(results, worker)
                if kind == "start":
                    continue
                what, text, styles, covered, used = rest
                counts["programs"] += 1
                counts[kind] += 1
                counts["native programs"] += covered[0]
                counts["interpreted instructions"] += covered[1]
                ops.update(used if kind == "same" and covered[0] else ())
                if kind == "different":
                    _report(seed, what, text, styles, out, seen)
        except _Gone as gone:
            counts["programs"] += 1
            counts["crashed"] += 1
            print(f"!!! program {seed}: {gone}", flush=True)
            if counts["crashed"] >= CRASHES:
                break
        finally:
            worker.kill()
            worker.join()
        seed += step
    print(", ".join(f"{n} {kind}" for kind, n in counts.items()), f"; the next number is {seed}")
    print("instructions in programs that agreed:", ", ".join(f"{op} {n}" for op, n in ops.most_common()), flush=True)
    return counts


class _Gone(Exception):
    pass


def _next(results: Any, worker: Any) -> Any:
    end = time.monotonic() + HANG
    while True:
        try:
            return results.get(timeout=0.2)
        except queue.Empty:
            if not worker.is_alive():
                raise _Gone(f"the process ended with {worker.exitcode}") from None
            if time.monotonic() > end:
                raise _Gone(f"no answer in {HANG} s") from None


def _report(seed: int, what: str, text: str, styles: dict[str, str], out: Path | None, seen: set[Any]) -> None:
    like = (re.sub(r"\d+", "", what)[:40], tuple(sorted(set(re.findall(r"= \w+\.(\w+)\(|^ *(\w+)\(", text, re.M)))))
    if like in seen:
        print(f"!!! program {seed}: {what} (like one before)", flush=True)
        return
    seen.add(like)
    page = f"# program {seed}: {what}\n# styles {json.dumps(styles)}\n{text}"
    print(f"!!! {page}", flush=True)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{seed}.txt").write_text(page, encoding="utf-8")


def replay(path: Path) -> int:
    """Run a program that was kept."""
    from tests.execute import differ

    page = path.read_text(encoding="utf-8")
    styles = json.loads(re.search(r"^# styles (.*)$", page, re.M).group(1))  # type: ignore[union-attr]
    text = "".join(line for line in page.splitlines(True) if not line.startswith("#"))
    what = differ.check(text, styles)
    print(what or "the same bits")
    return int(bool(what))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="number of the first program")
    parser.add_argument("--programs", type=int, help="at most so many")
    parser.add_argument("--out", type=Path, help="folder for the programs that differ")
    parser.add_argument("--as-they-are", action="store_true", help="do not make failures smaller")
    parser.add_argument("--replay", type=Path, help="run one program that was kept")
    args = parser.parse_args()
    if args.replay:
        return replay(args.replay)
    counts = fuzz(args.seed, args.minutes, args.programs, args.out, not args.as_they_are)
    return int(bool(counts["different"] or counts["crashed"]))


if __name__ == "__main__":
    sys.exit(main())
