"""Timelines for the tests of reports: made up, of any length."""

from __future__ import annotations

import random
from pathlib import Path

from opennki.errors import Loc
from opennki.timing import ENGINES, EngineUse, LineCost, Row, Timeline, Traffic, Work

OPS = {"tensor": "nc_matmul", "vector": "tensor_tensor", "scalar": "activation", "gpsimd": "iota", "sync": "wait", "dma": "dma_copy"}
SOURCE = Path(__file__)


def made_up(count=200, text="dst=acc[128, 512]"):
    """A timeline of `count` rows whose engines work side by side; its source lines are those of this file."""
    rng = random.Random(0)
    rows, free = [], {}
    for number in range(count):
        engine = rng.choice(ENGINES)
        queue = f"dma{rng.randrange(16)}" if engine == "dma" else engine
        start = free.get(queue, 2000.0) + rng.random() * 80
        took = rng.choice((64.0, 128.0, 300.0))
        free[queue] = start + took
        moved = 65536 if engine == "dma" else 0
        place, iteration = Loc(str(SOURCE), 10 + number % 5), (number // 7, number % 7)
        rows.append(Row(number, OPS[engine], engine, queue, start, took, start + took, place, iteration, moved, 1 << 20, 65536, text,
                        5.0, number - 1))
    end = max(r.start_ns + r.duration_ns for r in rows)
    use = {e: EngineUse(sum(r.duration_ns for r in rows if r.engine == e), sum(r.engine == e for r in rows), 0.3, 10.0) for e in ENGINES}
    lines = tuple(LineCost(Loc(str(SOURCE), n), end / 5, {"tensor": 100.0 * n}, 40, 1 << 20, 1 << 22) for n in range(10, 15))
    return Timeline("a_kernel", "trn2", end / 1e3, 2.0, use, (), Traffic(1 << 20, 1 << 18), Work(1 << 24, 0, float(1 << 24), 40, 20, 4096),
                    {"tensor": end / 2, "dma": end / 3}, "tensor", count, count, lines, tuple(rows))


OCCUPANCY = {"sbuf": {"capacity": 196608, "at": [2000.0, 3000.0], "bytes": [4096, 0]},
             "psum": {"capacity": 16384, "at": [2000.0], "bytes": [2048]}}
