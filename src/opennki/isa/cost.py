"""Cost formulas that several engines share. Rates and fixed costs come from the target record, formulas
from isa_costs."""
from __future__ import annotations

from math import ceil
from typing import Any

from opennki.isa.dtypes import itemsize


def attr(d: Any, name: str, default: Any = None) -> Any:
    """An attribute of the instruction, where the caller of a cost function knows it."""
    return getattr(d, name, default)


def streaming(d: Any, hw: Any) -> float:
    """One element per partition and cycle, at least the issue interval: max(MIN_II, N)."""
    return float(max(hw.min_ii, d.F))


def gpsimd(d: Any, hw: Any) -> float:
    """Start of a GpSimd instruction and one element per partition and cycle: 150 + N."""
    return float(hw.gpsimd_start + d.F)


def dma(hw: Any, partitions: int, moved: float, share: float = 1.0) -> float:
    """Base-clock cycles in which the DMA engines move `moved` bytes at `share` of their sustained rate.

    One engine serves 8 partitions, so few rows use few engines; all engines of a core together are bound by
    HBM. The fixed latency of a transfer (`Target.dma_latency_ns`) is not in it: transfers overlap.
    """
    engines = min(hw.dma_engines_core, max(1, ceil(partitions / hw.dma_partitions)))
    rate = min(engines * hw.dma_engine_gbps, hw.dma_core_gbps) * share
    return float(moved / rate * hw.clock_base)


def tile_bytes(d: Any, name: str) -> int:
    """Bytes of the elements of the iteration space in the dtype of operand `name`."""
    return int(d.P * d.F * itemsize(d.dtypes[name]))


def load_stationary(hw: Any, columns: int, wide: bool) -> tuple[float, bool]:
    """(cycles, hidden) of LoadStationary for a tile of `columns`: four times as fast as MultiplyMoving and hidden behind the one before,
    except in float32 (`wide`), where each pass loads its part of the operand at one column a cycle before it multiplies."""
    if wide:
        return float(columns * hw.pe_load_passes_fp32), False
    return columns / hw.load_stationary_speedup, True
