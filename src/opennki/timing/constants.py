"""What the model assumes beyond the target record: each constant with its source. None belongs to a kernel.

Documented figures live in `isa.target`; here are those that were fitted, read from published traces, or assumed. docs/timing.md gives the
error with them on rows that no constant was fitted on.
"""
from __future__ import annotations

from dataclasses import dataclass

from opennki.isa.target import Target


@dataclass(frozen=True, slots=True)
class Constant:
    """A number, its unit, where it came from and the ids of the published rows that it was fitted on (none: documented or assumed)."""

    value: float
    unit: str
    source: str
    rows: tuple[int, ...] = ()


LAUNCH = Constant(11.5, "µs", "start and stop of a kernel besides its instructions: rest of the smallest published kernel after its own "
                  "transfers and instructions", (61,))
DMA_STREAM = Constant(23.0, "B/ns", "rate of a DMA engine while it moves bytes, at least: 32 KiB in 1416 ns in the published trn2 trace; the same is "
                      "assumed of NeuronCore-v2, whose lower documented rate comes from a fixed time for each transfer")
DMA_IDEAL = Constant(32768.0, "bytes", "transfer per engine at which the documented sustained rate holds (DMA bandwidth guide)")
SEMAPHORE = Constant(30.0, "ns", "end of an instruction to start of another engine that waits for it: engine_done_to_dma_trigger of the "
                     "published trn2 trace")
VECTOR_LATENCY = Constant(44.0, "cycles", "end of an instruction to visible result, Vector Engine: the fixed overhead of 144 cycles that AWS's own "
                          "top-k estimate uses for dependent instructions (nki-library rotational_topk_utils.py) less the documented 100")
SCALAR_LATENCY = Constant(100.0, "cycles", "the same for the Scalar Engine: interval of dependent one-element instructions, 264 cycles, less "
                          "the issue interval and the documented 100 (NKI performance guide)")
TENSOR_LATENCY = Constant(188.0, "cycles", "the same for the Tensor Engine: one cycle for each row of the array and the documented start of a "
                          "tensor access; assumed")
GPSIMD_LATENCY = Constant(100.0, "cycles", "the same for GpSimd: the documented overhead of a dependent instruction")
WINDOW = Constant(64.0, "instructions", "how far ahead of its place an instruction may be scheduled within its engine; assumed")
DMA_WINDOW = Constant(256.0, "transfers", "the same for DMA, whose queues run beside each other; assumed")
BUFFERS = Constant(4.0, "buffers", "most buffers that a tensor made in a loop gets from the compiler where memory allows; assumed")

CONSTANTS = {name: value for name, value in globals().items() if isinstance(value, Constant)}


def latency_ns(engine: str, target: Target) -> float:
    """ns from the end of streaming to the visible result, on an engine."""
    if engine == "scalar" and target.generation >= 3:
        return target.activation_fixed_ns - target.instruction_overhead / target.clock_scalar
    constant = {"tensor": TENSOR_LATENCY, "vector": VECTOR_LATENCY, "scalar": SCALAR_LATENCY, "gpsimd": GPSIMD_LATENCY}[engine]
    return constant.value / target.clock_ghz(engine)


def dma_fixed_ns(target: Target) -> float:
    """Time that a transfer takes on each DMA engine besides its bytes: what makes the documented rate of the documented ideal transfer out of
    the rate while bytes move (0.5 µs on NeuronCore-v2, none later)."""
    return max(0.0, DMA_IDEAL.value / target.dma_engine_gbps - DMA_IDEAL.value / DMA_STREAM.value)
