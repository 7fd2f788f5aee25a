"""Tracing: seconds and sizes of the IR, and printing and parsing of large kernels.

    python benchmarks/trace.py [--instructions 20000] [--text 100000] [--repeat 3]

Expected (issue "A kernel runs"): flash attention of 32k tokens in under 1 s and 5000 nodes, verified; a loop of a million trips in
milliseconds; text of 100k instructions printed and parsed in seconds. Times are CPU seconds of the best run; nothing is asserted here,
the sizes are held by tests/trace/test_size.py.
"""
from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent.parent)]

import ml_dtypes
import numpy as np

import opennki.dropin  # noqa: F401  isort: skip
import neuronxcc.nki as nki
import neuronxcc.nki.language as nl
from examples.flash_attention import flash_attention

from opennki import settings
from opennki.ir.equal import same
from opennki.ir.nodes import Instr, Kernel, statements
from opennki.ir.parse import from_text
from opennki.ir.print import to_text
from opennki.ir.verify import verify
from opennki.isa.target import TRN1


def million(x):
    """A loop of a million trips around four instructions."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(x.shape[1] // 4):
        a = nl.load(x[:, nl.ds(i * 4, 4)])
        b = nl.multiply(a, 2.5)
        nl.store(out[:, nl.ds(i * 4, 4)], nl.add(b, a))
    return out


def unrolled(x, trips):
    """A loop that Python unrolls into `trips` times four instructions on whole tiles."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for i in range(trips):
        a = nl.load(x[:, nl.ds(i * 4, 4)])
        b = nl.multiply(a, 2.5)
        nl.store(out[:, nl.ds(i * 4, 4)], nl.add(b, a))
    return out


def array(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    """An array of this shape that takes no memory; tracing reads no values."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def best(function: Callable[[], Any], repeat: int) -> tuple[float, Any]:
    """Shortest CPU time of `repeat` calls, and the last result."""
    shortest, result = float("inf"), None
    for _ in range(repeat):
        start = time.process_time()
        result = function()
        shortest = min(shortest, time.process_time() - start)
    return shortest, result


def size(kernel: Kernel) -> str:
    """Nodes and instructions of a kernel."""
    nodes = list(statements(kernel.body))
    return f"{len(nodes)} nodes, {sum(isinstance(n, Instr) for n in nodes)} instructions"


def row(what: str, seconds: float, note: str) -> None:
    """Print one line of the table."""
    print(f"{what:34} {seconds * 1e3:10.2f} ms   {note}", flush=True)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--instructions", type=int, default=20_000, help="of the unrolled kernel")
    parser.add_argument("--text", type=int, default=100_000, help="instructions of the kernel that is printed and parsed")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()

    def traced(function: Callable[..., Any], *values: Any, repeat: int = args.repeat) -> tuple[float, Kernel]:
        jitted = nki.jit(getattr(function, "func", function), mode="simulation", platform_target="trn1")
        return best(lambda: jitted.trace(*values), repeat)

    q = array(128, 32768, dtype=ml_dtypes.bfloat16)
    seconds, kernel = traced(flash_attention, q, q, array(32768, 128, dtype=ml_dtypes.bfloat16))
    row("flash attention, 32k tokens", seconds, f"traced: {size(kernel)}")
    row("", best(lambda: verify(kernel, TRN1), args.repeat)[0], "verified")

    seconds, kernel = traced(million, array(128, 4_000_000))
    row("affine loop of 1,000,000 trips", seconds, f"traced: {size(kernel)}")

    trips = args.instructions // 4
    seconds, kernel = traced(unrolled, array(128, 4 * trips), trips)
    row(f"unrolled, {args.instructions} instructions", seconds, f"traced: {size(kernel)}, {seconds / args.instructions * 1e6:.1f} µs each")
    seconds = best(lambda: verify(kernel, TRN1), args.repeat)[0]
    row("", seconds, f"verified, {seconds / args.instructions * 1e6:.1f} µs each")

    trips = args.text // 4
    kernel = traced(unrolled, array(128, 4 * trips), trips, repeat=1)[1]
    seconds, text = best(lambda: to_text(kernel), 1)
    row(f"text of {args.text} instructions", seconds, f"printed: {len(text) / 1e6:.1f} MB, {seconds / args.text * 1e6:.1f} µs each")
    seconds, back = best(lambda: from_text(text), 1)
    row("", seconds, f"parsed, {seconds / args.text * 1e6:.1f} µs each, {'the same kernel' if same(kernel, back) else 'ANOTHER KERNEL'}")

    def read() -> None:
        for _ in range(1000):
            settings.current()
    row("1000 reads of the settings", best(read, args.repeat)[0], "")
    return 0


if __name__ == "__main__":
    sys.exit(main())
