"""What a timing estimate is: one record with the latency, the use of each engine, traffic, bounds and, on request, a row per instruction.

Times are nanoseconds from the start of the kernel unless a name says otherwise, sizes are bytes, everything is of one program instance on
one core, and everything is an estimate (`Timeline.is_estimate` says of what). Metric names are those of the vendor's profiler
(perf_model.md section 4, from tools/neuron-explorer/profile-schema-reference.rst): times in seconds, `*_percent` fractions of 1.
"""
from __future__ import annotations

from dataclasses import dataclass, field

from opennki.errors import Loc
from opennki.isa.target import Target, resolve

COMPUTE = ("tensor", "vector", "scalar", "gpsimd")
ENGINES = (*COMPUTE, "sync", "dma")  # `dma` is all DMA engines together; `Timeline.dma_engines` has each
LABEL = ("estimate of a deterministic model of the documented hardware; no device was measured, so there is no spread and every percentile "
         "is this number")
DERIVED = "; constants of this target come from documentation only, no measurement of it is public"


@dataclass(frozen=True, slots=True)
class EngineUse:
    """How an engine was used. `busy_ns`: time in which it worked, without waiting for semaphores; `active`: busy_ns / total time;
    `wait_ns`: time in which its next instruction waited for data or a buffer. Of `dma` the busiest DMA engine counts."""

    busy_ns: float = 0.0
    instructions: int = 0
    active: float = 0.0
    wait_ns: float = 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """One executed instruction or DMA transfer. `id` counts in program order; `engine` is a name of ENGINES, `queue` the engine's name,
    or dma0 ... dma15 where one DMA engine moves all of it, or dma. `start_ns` to `start_ns + duration_ns` is its time on the engine;
    `visible_ns` is when its results can be read. `wait_ns`: how long after the engine was free it started; `waits_for`: id of the row
    that it waited for, or -1. `iteration` are the values of the loop indices around it, outermost first. `location`: None where
    unknown. `tensors`: numbers of the on-chip tensors that it touches (`ir.nodes.Alloc.id`).
    """

    id: int
    op: str
    engine: str
    queue: str
    start_ns: float
    duration_ns: float
    visible_ns: float
    location: Loc | None
    iteration: tuple[int, ...]
    bytes: int
    flops: int
    elements: int
    operands: str
    wait_ns: float = 0.0
    waits_for: int = -1
    descriptors: int = 0
    tensors: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LineCost:
    """What one source line costs. `critical_ns`: by how much its instructions moved the end of the timeline, which adds up to the
    latency over all lines and the launch; `busy_ns`: time on engines, by engine."""

    location: Loc | None
    critical_ns: float
    busy_ns: dict[str, float]
    instructions: int
    hbm_bytes: int
    flops: int

    @property
    def total_busy_ns(self) -> float:
        """Time on all engines together."""
        return sum(self.busy_ns.values())


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that moved, by memory and direction, and what the DMA engines did for it."""

    hbm_read_bytes: int = 0
    hbm_write_bytes: int = 0
    sbuf_read_bytes: int = 0
    sbuf_write_bytes: int = 0
    psum_read_bytes: int = 0
    psum_write_bytes: int = 0
    psum_read_sbuf_write_bytes: int = 0
    psum_read_sbuf_write_count: int = 0
    dma_transfers: int = 0
    dma_bytes: int = 0
    dma_descriptors: int = 0
    dma_transfer_ns: float = 0.0

    @property
    def hbm_bytes(self) -> int:
        """Read and written."""
        return self.hbm_read_bytes + self.hbm_write_bytes


@dataclass(frozen=True, slots=True)
class Work:
    """Arithmetic. `macs`: multiply-accumulates of matrix products without transposes; `transpose_macs`: those that the Tensor Engine
    spends on transposes; `adjusted_macs`: both in units of bf16 throughput (float32 counts 4, fp8 double row 0.5); counts of
    instructions."""

    macs: int = 0
    transpose_macs: int = 0
    adjusted_macs: float = 0.0
    matmuls: int = 0
    activations: int = 0
    elements: int = 0


@dataclass(frozen=True, slots=True)
class LinkUse:
    """Collectives on the links between chips. `where`: ranks and topology in words; `busy_ns`: time of all of them together, side by side
    with everything else; `link_bytes`: what the busiest chip sends, each byte counted once for every link that it takes. Only documents
    stand behind these numbers, no measurement."""

    where: str
    ranks: int
    collectives: int
    busy_ns: float
    link_bytes: int


@dataclass(frozen=True, slots=True)
class Roofline:
    """Where the kernel stands: operations per HBM byte, what it attains and what the chip allows, in operations per second.
    `peak` is that of the dtypes in use."""

    intensity: float
    attained: float
    peak: float
    bandwidth: float
    ridge: float

    @property
    def ceiling(self) -> float:
        """The most that this intensity allows."""
        return min(self.peak, self.intensity * self.bandwidth)


@dataclass(frozen=True, slots=True)
class Timeline:
    """The estimate for one program instance of a kernel. `bounds` are times in ns below which each resource alone cannot get, `bound_by`
    is the largest of them, or "dependencies" or "launch" where none of them explains most of the latency. `rows` is empty unless they
    were recorded; `truncated` counts what the limit of rows left out. `instructions` were executed in the model's sense, `simulated` of
    them one by one (the others in steady states of loops)."""

    kernel: str
    target: str
    latency_us: float
    launch_us: float
    engines: dict[str, EngineUse]
    dma_engines: tuple[EngineUse, ...]
    traffic: Traffic
    work: Work
    bounds: dict[str, float]
    bound_by: str
    instructions: int
    simulated: int
    lines: tuple[LineCost, ...] = ()
    rows: tuple[Row, ...] = ()
    truncated: int = 0
    program: tuple[int, ...] = ()
    programs: int = 1
    cores: int = 1
    warnings: tuple[str, ...] = field(default=())
    links: LinkUse | None = None

    @property
    def is_estimate(self) -> str:
        """What the numbers are, for every place that shows them."""
        return LABEL + (DERIVED if self.spec.generation >= 4 else "")

    @property
    def spec(self) -> Target:
        """The record of the target."""
        return resolve(self.target)

    @property
    def latency_ns(self) -> float:
        """Latency in ns."""
        return self.latency_us * 1e3

    @property
    def hbm_read_bytes(self) -> int:
        """Bytes read from HBM."""
        return self.traffic.hbm_read_bytes

    @property
    def hbm_write_bytes(self) -> int:
        """Bytes written to HBM."""
        return self.traffic.hbm_write_bytes

    @property
    def macs(self) -> int:
        """Multiply-accumulates of matrix products, transposes not counted."""
        return self.work.macs

    def by_source_line(self) -> list[LineCost]:
        """Source lines, the most expensive first: by what they add to the latency, then by time on engines."""
        return sorted(self.lines, key=lambda c: (-c.critical_ns, -c.total_busy_ns, str(c.location)))

    def roofline(self) -> Roofline:
        """Operations per HBM byte against what the core can do. Transposes are not useful work and do not count."""
        spec, seconds = self.spec, self.latency_us * 1e-6
        operations = 2 * self.work.macs + self.work.elements
        share = self.work.adjusted_macs / max(1, self.work.macs + self.work.transpose_macs)
        lanes = spec.vector_lanes * spec.clock_vector + spec.scalar_lanes * spec.clock_scalar
        peak = 2e9 * spec.pe_rows * spec.pe_cols * spec.clock_tensor / max(share, 1e-9) if self.work.macs else lanes * 1e9
        bandwidth = min(spec.hbm_core_gbps, spec.dma_core_gbps) * 1e9
        intensity = operations / max(1, self.traffic.hbm_bytes)
        return Roofline(intensity, operations / seconds if seconds else 0.0, peak, bandwidth, peak / bandwidth)

    def metrics(self) -> dict[str, float]:
        """The summary under the vendor's metric names; seconds, bytes, counts and fractions of 1."""
        spec, total, work, moved = self.spec, self.latency_us * 1e-6, self.work, self.traffic
        peak = 2e9 * spec.pe_rows * spec.pe_cols * spec.clock_tensor * total
        bandwidth = spec.hbm_core_gbps * 1e9 * total
        flops, transposes = 2 * (work.macs + work.transpose_macs), 2 * work.transpose_macs
        out: dict[str, float] = {
            "total_time": total, "total_exec_time": total - self.launch_us * 1e-6,
            "total_active_time": total - self.launch_us * 1e-6,
            "total_active_time_percent": (1 - self.launch_us / self.latency_us) if self.latency_us else 0.0,
            "neuroncore_cycle_count": float(round(self.latency_us * 1e3 * spec.clock_base)),
        }
        for name in (*COMPUTE, "sync"):
            use = self.engines[name]
            out[f"{name}_engine_active_time"] = use.busy_ns * 1e-9
            out[f"{name}_engine_active_time_percent"] = use.active
            out[f"{name}_engine_instruction_time"] = use.busy_ns * 1e-9
            out[f"{name}_engine_instruction_count"] = use.instructions
        dma = self.engines["dma"]
        out |= {
            "matmul_instruction_count": work.matmuls, "activate_instruction_count": work.activations,
            "model_flops": 2 * work.macs, "hardware_flops": flops, "transpose_flops": transposes,
            "adjusted_hardware_flops": 2 * work.adjusted_macs,
            "mm_arithmetic_intensity": 2 * work.macs / max(1, moved.hbm_bytes),
            "peak_flops_bandwidth_ratio": 2 * spec.pe_rows * spec.pe_cols * spec.clock_tensor / spec.hbm_core_gbps,
            "mfu_estimated_percent": 2 * work.macs / peak if peak else 0.0,
            "hfu_estimated_percent": flops / peak if peak else 0.0,
            "mfu_inst_estimated_percent": 2 * work.adjusted_macs / peak if peak else 0.0,
            "mfu_max_achievable_estimated_percent": min(1.0, self.bounds.get("tensor", 0.0) / max(1e-9, *self.bounds.values(), 0.0)),
            "hbm_read_bytes": moved.hbm_read_bytes, "hbm_write_bytes": moved.hbm_write_bytes,
            "sbuf_read_bytes": moved.sbuf_read_bytes, "sbuf_write_bytes": moved.sbuf_write_bytes,
            "psum_read_bytes": moved.psum_read_bytes, "psum_write_bytes": moved.psum_write_bytes,
            "psum_read_sbuf_write_bytes": moved.psum_read_sbuf_write_bytes,
            "psum_read_sbuf_write_count": moved.psum_read_sbuf_write_count,
            "spill_save_bytes": 0, "spill_reload_bytes": 0,
            "mbu_estimated_percent": moved.hbm_bytes / bandwidth if bandwidth else 0.0,
            "mbu_min_read_util_percent": moved.hbm_read_bytes / bandwidth if bandwidth else 0.0,
            "dma_active_time": dma.busy_ns * 1e-9, "dma_active_time_percent": dma.active,
            "dma_transfer_count": moved.dma_transfers, "dma_transfer_total_bytes": moved.dma_bytes,
            "dma_transfer_average_bytes": moved.dma_bytes / max(1, moved.dma_transfers),
            "dma_transfer_time": moved.dma_transfer_ns * 1e-9,
            "dma_packet_time": sum(use.busy_ns for use in self.dma_engines) * 1e-9,
            "dma_queue_count": sum(1 for use in self.dma_engines if use.instructions),
        }
        busy = self.links.busy_ns * 1e-9 if self.links is not None else 0.0
        out |= {"cc_op_time": busy, "cc_op_count": self.links.collectives if self.links is not None else 0,
                "cc_op_active_time_percent": busy / total if total else 0.0}
        return out
