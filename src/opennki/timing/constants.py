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


SMALLEST = Constant(
    5.0, "µs", "what the smallest kernel (a load, an instruction, a store) takes of the shortest published latency of a target "
    "(Target.launch_floor_us); the rest is start and stop", (61, 93))
DMA_DESCRIPTOR = Constant(
    13.0, "ns", "what a descriptor takes besides its bytes on NeuronCore-v2; the published trn2 trace of 256-byte descriptors at 21 B/ns "
    "shows none", (24, 26, 88))
DMA_SHORT = Constant(
    0.44, "of the rate", "rate of transfers with fewer bytes per partition than the documented 4 KiB that saturate an engine, on "
    "NeuronCore-v2; the same trace shows no loss on trn2", (24, 26, 88))
DMA_WORD = Constant(
    64.0, "bytes", "what an element by itself takes of a DMA engine's rate where a tile is transposed on the way; thresholds of the tests "
    "of nki-samples 0898a77 for attention with transposed keys and results (675, 536 and 600 µs)")
RESIDENT_LIMIT = Constant(
    32768.0, "instructions", "size up to which the compiler looks for loads that loops repeat and keeps their tiles in SBUF if they fit: "
    "HBM traffic of published rows 2 and 8 shows that it does, that of row 24 that it does not", (2, 8, 24))
SEMAPHORE = Constant(
    30.0, "ns", "end of an instruction to start of an engine that waits for it: engine_done_to_dma_trigger of a published trace")
VECTOR_LATENCY = Constant(
    44.0, "cycles", "end of an instruction to visible result, Vector Engine: the fixed overhead of 144 cycles that AWS's own top-k "
    "estimate uses for dependent instructions (nki-library rotational_topk_utils.py) less the documented 100")
SCALAR_LATENCY = Constant(
    100.0, "cycles", "the same for the Scalar Engine: interval of dependent one-element instructions, 264 cycles, less the issue "
    "interval and the documented 100 (NKI performance guide)")
TENSOR_LATENCY = Constant(
    188.0, "cycles", "the same for the Tensor Engine: one cycle for each row of the array and the documented start of a tensor access; "
    "assumed")
GPSIMD_LATENCY = Constant(100.0, "cycles", "the same for GpSimd: the documented overhead of a dependent instruction")
WINDOW = Constant(
    96.0, "instructions", "how far ahead of its place an instruction may be scheduled within its engine; assumed: little changes beyond")
DMA_WINDOW = Constant(256.0, "transfers", "the same for DMA, whose queues run beside each other; assumed")
BUFFERS = Constant(
    4.0, "buffers", "most buffers that a tensor made in a loop gets from the compiler where memory allows; assumed")

LINK_STEP = Constant(
    1.5, "µs", "a step of a collective between NeuronCores of an instance: the vendor gives about 1 to 2 µs for a hop of a ring "
    "(neuron-runtime/explore/intranode-collective-comm); no measurement of a whole collective is at hand")
LINK_ONE_WAY = Constant(
    0.5, "of the rate", "share of a chip's documented NeuronLink bandwidth that its links carry in one direction; assumed: the documents "
    "do not say whether the figure counts both directions")

CONSTANTS = {name: value for name, value in globals().items() if isinstance(value, Constant)}


def latency_ns(engine: str, target: Target) -> float:
    """ns from the end of streaming to the visible result, on an engine."""
    if engine == "scalar" and target.generation >= 3:
        return target.activation_fixed_ns - target.instruction_overhead / target.clock_scalar
    constant = {"tensor": TENSOR_LATENCY, "vector": VECTOR_LATENCY, "scalar": SCALAR_LATENCY, "gpsimd": GPSIMD_LATENCY}[engine]
    return constant.value / target.clock_ghz(engine)


def launch_us(target: Target) -> float:
    """Start and stop of a kernel."""
    return target.launch_floor_us - SMALLEST.value


def descriptor_ns(size: int, rate: float, target: Target, partition: int = 0) -> float:
    """Time of one descriptor on a DMA engine of a rate in bytes per ns. `partition`: bytes per partition of its transfer, if there are
    more of them."""
    if target.generation >= 3:
        return max(size, target.dma_small_bytes) / rate
    whole = max(size, partition)
    return DMA_DESCRIPTOR.value + size * max(1.0, min(1 / DMA_SHORT.value, target.dma_full_bytes / whole)) / rate


def word_ns(size: int, rate: float) -> float:
    """Time of an element that no neighbour follows in memory, on a DMA engine."""
    return max(size, DMA_WORD.value) / rate
