"""Target records: every limit and rate of the chips, with the source of each fact.

Instruction limits and costs name a field of `Target`, so that a new chip is a new record and no instruction
changes. A field is declared with its meaning, unit and source; `SOURCES` collects the sources by name.
What is marked "assumed" or "inferred" is not documented by the vendor: nothing exact may rest on it.
"""

from __future__ import annotations

import dataclasses
import enum
import warnings
from dataclasses import dataclass
from typing import Any

from opennki import settings
from opennki.errors import NkiValueError, user_frame

_SDK = "aws-neuron-sdk@81ce03ae:"
_ARCH = (f"{_SDK}nki/guides/architecture/trainium_inferentia2_arch.rst (gen2), trainium2_arch.rst (gen3), "
         "trainium3_arch.rst (gen4)")
_ARCH2 = f"{_SDK}nki/guides/architecture/trainium_inferentia2_arch.rst"
_GEN2_ONLY = f"{_ARCH2} (gen2); assumed the same for gen3 and gen4"
_ISA226 = "aws-neuron-sdk@v2.26.1(1043931f):nki/api/nki/isa/__init__.py"
_ISA = f"{_SDK}nki/api/nki/isa/__init__.py"
_LANG = f"{_SDK}nki/api/nki/language/__init__.py"
_DMA_GUIDE = f"{_SDK}nki/deep-dives/nki-dma-bandwidth-guide.rst"
_DMA_OVERVIEW = f"{_SDK}nki/get-started/about/nki-dma-overview.rst"
_DGE = f"{_SDK}nki/deep-dives/nki-dge.rst"
_TRACES = (f"inferred from trn2 traces, {_SDK}nki/img/overviews/nki-dma-intro-3.png and -5.png; "
           "assumed for other generations")
_KLR = "leanprover/KLR:KLR/Trace.lean (kernelEnv), an open NKI compiler; the documentation gives no value"


class nc_version(enum.IntEnum):
    """Generation of the NeuronCore: gen2 is trn1 and inf2, gen3 is trn2, gen4 is trn3.

    Source: aws-neuron-sdk v2.26.1 nki.isa.nc_version (gen2, gen3); gen4 from later releases.
    """

    gen2 = 2
    gen3 = 3
    gen4 = 4


def _fact(doc: str, source: str, **default: Any) -> Any:
    """A field of Target; one with a default has the same value for every generation."""
    return dataclasses.field(metadata={"doc": doc, "source": source}, **default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What one NeuronCore of one kind of instance can hold and do.

    Bytes are per partition where the meaning says so; rates are in 1e9 per second (GHz, GB/s); cycles are
    those of the engine that runs the instruction; 0 means that the hardware does not have the feature.
    """

    name: str = _fact("name of the instance family", "aws-neuron-sdk: instance types")
    device: str = _fact("name of the chip", _ARCH)
    generation: int = _fact("generation of the NeuronCore, a member of nc_version", _ARCH)

    # Tiles. The free-size limits of single instructions are documented as one number for every generation.
    partitions: int = _fact("partitions of SBUF and PSUM, the largest P of a tile", _ARCH, default=128)
    max_free_dims: int = _fact(
        "free dimensions of an access pattern (5 dimensions with the partition dimension)",
        f"{_LANG} (axes of reductions reach [1,2,3,4]); {_ISA226} (max8: up to 5 dimensions)", default=4)
    quadrant_partitions: int = _fact(
        "partitions of a quadrant: start partitions are its multiples", _ARCH2, default=32)

    # Tensor Engine
    pe_rows: int = _fact("rows of the PE array: largest contraction size of one pass", _ARCH, default=128)
    pe_cols: int = _fact("columns of the PE array", _ARCH, default=128)
    gemm_stationary_fmax: int = _fact("largest free size of the stationary tile", _ARCH, default=128)
    gemm_moving_fmax: int = _fact("largest free size of the moving tile", _ARCH, default=512)
    pe_tile_min: int = _fact("rows and columns of a PE tile are multiples of this", _ISA226, default=32)
    pe_tile_32x32: bool = _fact("a PE tile may be 32 x 32", f"{_ISA226} (nc_matmul)")
    pe_double_row_k: int = _fact("contraction size of an fp8 double-row matmul", _ARCH)
    pe_mx_k: int = _fact("contraction size of an MX matmul", _ARCH)
    pe_transpose_mode: bool = _fact("the PE array has a transpose mode, exact for every bit pattern",
                                    f"{_ISA}; {_ARCH}")
    pe_cycles_fp32: int = _fact("cycles per moving row, float32", _ARCH, default=4)
    pe_cycles_fp32_onezero: int = _fact(
        "cycles per moving row, float32, one operand of zeros and ones",
        f"inferred: {_ISA} says it could be 2x faster", default=2)
    pe_cycles_2byte: int = _fact("cycles per moving row, bf16, fp16 and tf32", _ARCH, default=1)
    pe_cycles_fp8: int = _fact("cycles per moving row, fp8", _ARCH, default=1)
    mm_init_interval: int = _fact("least cycles between two MultiplyMoving", _GEN2_ONLY, default=64)
    load_stationary_speedup: int = _fact(
        "how much faster than MultiplyMoving of the same size LoadStationary is at most", _GEN2_ONLY,
        default=4)
    pe_load_passes_fp32: int = _fact(
        "cycles per column of LoadStationary, float32: one for each pass, not hidden behind MultiplyMoving",
        "inferred from published latencies 1, 2, 4 and 6, where the Tensor Engine bounds float32 products", default=4)
    tensor_tflops_bf16: float = _fact("documented dense peak, bf16, 1e12 operations per second", _ARCH)
    tensor_tflops_fp32: float = _fact("documented dense peak, float32, 1e12 operations per second", _ARCH)

    # PSUM and SBUF
    psum_banks: int = _fact("PSUM banks of a partition", _ARCH, default=8)
    psum_bank_bytes: int = _fact("bytes of a PSUM bank, per partition", _ARCH, default=2048)
    psum_partition_bytes: int = _fact("bytes of PSUM, per partition", _ARCH, default=16384)
    psum_fmax: int = _fact("float32 elements of a PSUM bank, per partition", _LANG, default=512)
    psum_min_align: int = _fact("alignment of a byte address in PSUM", _KLR, default=4)
    sbuf_partition_bytes: int = _fact("bytes of SBUF, per partition", _ARCH)
    sbuf_reserved_bytes: int = _fact(
        "bytes of SBUF that the compiler keeps for itself, per partition",
        "gen2: 16 KiB, NKI 2.26 documentation of sbuf.alloc; gen3, gen4: from total_available_sbuf_size in "
        "leanprover/KLR:KLR/Trace.lean (nki-library@d2ad3a57 uses 520 bytes less on gen3)")
    sbuf_min_align: int = _fact("alignment of a byte address in SBUF", _KLR, default=1)

    # Limits of single instructions on the Vector and GpSimd Engine
    bn_stats_fmax: int = _fact("largest free size of bn_stats", f"{_ISA226} (bn_stats)", default=512)
    max8_fmin: int = _fact("least elements per partition of max8 and nc_find_index8",
                           f"{_ISA226} (max8, nc_find_index8)", default=8)
    max8_fmax: int = _fact("most elements per partition of max8, nc_find_index8 and nc_match_replace8",
                           f"{_ISA226} (max8, nc_find_index8, nc_match_replace8)", default=16384)
    vector_transpose_max: int = _fact("rows and columns of a transpose on the Vector Engine",
                                      f"{_ISA226} (nc_transpose)", default=32)
    gather_core_partitions: int = _fact("partitions that one core of the GpSimd Engine sees",
                                        f"{_ISA226} (local_gather)", default=16)
    gather_indices_max: int = _fact("indices of local_gather per core", f"{_ISA226} (local_gather)",
                                    default=4096)
    gather_run_max: int = _fact("elements per index of local_gather", f"{_ISA226} (local_gather)", default=32)

    # Rates
    clock_tensor: float = _fact("clock of the Tensor Engine, GHz", _ARCH)
    clock_vector: float = _fact("clock of the Vector Engine, GHz", _ARCH)
    clock_scalar: float = _fact("clock of the Scalar Engine, GHz", _ARCH)
    clock_gpsimd: float = _fact("clock of the GpSimd Engine, GHz", _ARCH)
    clock_sync: float = _fact("clock of the Sync Engine, GHz", "assumed: the base clock")
    clock_base: float = _fact(
        "clock of the cycle counter, GHz",
        f"{_SDK}tools/neuron-explorer/profile-schema-reference.rst (neuroncore_cycle_count); gen4 assumed")
    vector_lanes: int = _fact("lanes of the Vector Engine", _ARCH, default=128)
    scalar_lanes: int = _fact("lanes of the Scalar Engine", _ARCH, default=128)
    gpsimd_processors: int = _fact("processors of the GpSimd Engine",
                                   f"{_ARCH2}, trainium2_arch.rst; gen4 assumed", default=8)
    vector_fast_factor: int = _fact("Vector Engine perf mode: bf16/fp16, contiguous, SBUF to SBUF", _ARCH)
    vector_mid_factor: int = _fact("Vector Engine perf mode: bf16/fp16, strided or one side in PSUM", _ARCH)
    scalar_fast_factor: int = _fact("Scalar Engine perf mode: tensor_copy, tensor_scalar, bf16/fp16", _ARCH)
    free_stride_bytes: int = _fact("innermost stride in bytes above which an engine reads at half rate",
                                   _GEN2_ONLY, default=16)

    # Fixed costs
    min_ii: int = _fact("least cycles between two instructions of an engine",
                        f"{_ISA226}; {_SDK}nki/api/nki.api.shared.rst", default=64)
    min_ii_dynamic: int = _fact("the same with dynamic addressing",
                                f"{_ISA226} (tensor_copy_dynamic_src, tensor_copy_dynamic_dst)", default=600)
    gpsimd_start: int = _fact("cycles to start an instruction of the GpSimd Engine",
                              f"{_ISA226} (affine_select, iota)", default=150)
    instruction_overhead: int = _fact("cycles added to a tiny or dependent instruction", _GEN2_ONLY,
                                      default=100)
    tensor_access_overhead: int = _fact("cycles to start an access of SBUF or PSUM", _GEN2_ONLY, default=60)
    act_table_load_ns: float = _fact("loading an activation table, ns", _TRACES, default=1280.0)
    activation_fixed_ns: float = _fact("latency of an isolated activation besides streaming, ns", _TRACES,
                                       default=295.0)
    launch_floor_us: float = _fact("shortest published kernel latency, µs",
                                   "inferred from published latencies (trn1 14, trn2 15); gen4 assumed")

    # HBM and DMA
    hbm_gib: int = _fact("HBM of a device, GiB", _ARCH)
    hbm_device_gbps: float = _fact("HBM bandwidth of a device, GB/s", _ARCH)
    hbm_core_gbps: float = _fact("HBM bandwidth of a core, GB/s: the device's share", _ARCH)
    dma_engines_device: int = _fact("DMA engines of a device", _ARCH)
    dma_engines_core: int = _fact("DMA engines of a core", _ARCH, default=16)
    dma_queues: int = _fact("queues of a DMA engine", _DMA_OVERVIEW, default=16)
    dma_partitions: int = _fact("SBUF partitions that one DMA engine serves", _DMA_OVERVIEW, default=8)
    dma_engine_peak_gbps: float = _fact("peak of a DMA engine, GB/s", _DMA_OVERVIEW)
    dma_engine_gbps: float = _fact("what a DMA engine sustains, GB/s (bytes per ns)", _DMA_GUIDE)
    dma_core_gbps: float = _fact("what the DMA engines of a core sustain together, GB/s", _DMA_GUIDE)
    dma_latency_ns: float = _fact("descriptor set-up, semaphore and start across engines, ns", _DMA_GUIDE,
                                  default=1300.0)
    dma_done_ns: float = _fact("last byte to start of the waiting engine, ns", _TRACES, default=300.0)
    dma_trigger_ns: float = _fact("end of an instruction to trigger of the DMA, ns", _TRACES, default=30.0)
    dma_first_byte_ns: float = _fact("trigger to first byte, static queue, ns", _TRACES, default=1000.0)
    dma_small_bytes: int = _fact("descriptors below this are bound by overhead", _DMA_GUIDE, default=256)
    dma_good_bytes: int = _fact("least recommended bytes per partition", _DMA_GUIDE, default=2048)
    dma_full_bytes: int = _fact("bytes per partition that saturate an engine", _DMA_GUIDE, default=4096)
    hwdge_instances: int = _fact("hardware descriptor generators of a core",
                                 f"{_DGE}; trainium2_arch.rst; gen4 assumed as gen3")
    hwdge_issue_ns: float = _fact("issue of one instruction by a hardware descriptor generator, ns", _DGE)

    # The chip around the core
    cores_per_device: int = _fact("physical NeuronCores of a device", _ARCH)
    max_lnc: int = _fact("physical cores of a logical NeuronCore, at most",
                         f"{_SDK}nki/get-started/about/lnc.rst; gen4: nki-library tests")
    cc_cores: int = _fact("cores for collective communication", _ARCH)
    link_gbps: float = _fact(
        "NeuronLink bandwidth of a device, GB/s",
        f"{_SDK}about-neuron/arch/neuron-hardware/trn1-arch.rst, inf2-arch.rst (GiB/s there), trainium2.rst, "
        "trainium3.rst")

    @property
    def nc_version(self) -> nc_version:
        """The generation as the enum that `nki.isa.get_nc_version()` returns."""
        return nc_version(self.generation)

    @property
    def sbuf_usable_bytes(self) -> int:
        """SBUF bytes per partition that a kernel can use (`tile_size.total_available_sbuf_size`)."""
        return self.sbuf_partition_bytes - self.sbuf_reserved_bytes

    @property
    def multi_core(self) -> bool:
        """Whether a grid may span several physical cores."""
        return self.name in MULTI_CORE_TARGETS

    def clock_ghz(self, engine: str) -> float:
        """Clock of an engine in GHz: tensor, vector, scalar, gpsimd or sync; KeyError for another name."""
        if engine not in ("tensor", "vector", "scalar", "gpsimd", "sync"):
            raise KeyError(engine)
        return float(getattr(self, f"clock_{engine}"))

    def pe_cycles(self, dtype: str, *, onezero: bool = False) -> int:
        """Cycles of the Tensor Engine per moving row, for the name of the operands' dtype.

        `onezero`: an operand is declared to hold only zeros and ones, which helps float32. KeyError for a
        dtype that the Tensor Engine does not take.
        """
        if dtype == "float32":
            return self.pe_cycles_fp32_onezero if onezero else self.pe_cycles_fp32
        if dtype in ("bfloat16", "float16", "tfloat32"):
            return self.pe_cycles_2byte
        if dtype.startswith("float8_"):
            return self.pe_cycles_fp8
        raise KeyError(dtype)


SOURCES: dict[str, str] = {f.name: f.metadata["source"] for f in dataclasses.fields(Target)}
DOCS: dict[str, str] = {f.name: f.metadata["doc"] for f in dataclasses.fields(Target)}

TRN1 = Target(
    name="trn1", device="Trainium1", generation=nc_version.gen2,
    pe_tile_32x32=False, pe_double_row_k=0, pe_mx_k=0, pe_transpose_mode=False,
    tensor_tflops_bf16=92.0, tensor_tflops_fp32=23.0,
    sbuf_partition_bytes=192 * 1024, sbuf_reserved_bytes=16 * 1024,
    clock_tensor=2.8, clock_vector=1.12, clock_scalar=1.4, clock_gpsimd=1.4, clock_sync=1.4, clock_base=1.4,
    vector_fast_factor=1, vector_mid_factor=1, scalar_fast_factor=1, launch_floor_us=14.0,
    hbm_gib=32, hbm_device_gbps=820.0, hbm_core_gbps=410.0, dma_engines_device=32,
    dma_engine_peak_gbps=27.2, dma_engine_gbps=17.0, dma_core_gbps=272.0,
    hwdge_instances=0, hwdge_issue_ns=0.0,
    cores_per_device=2, max_lnc=1, cc_cores=6, link_gbps=384 * 1.073741824,
)

INF2 = dataclasses.replace(TRN1, name="inf2", device="Inferentia2", link_gbps=192 * 1.073741824)

TRN2 = Target(
    name="trn2", device="Trainium2", generation=nc_version.gen3,
    pe_tile_32x32=True, pe_double_row_k=256, pe_mx_k=0, pe_transpose_mode=True,
    tensor_tflops_bf16=79.0, tensor_tflops_fp32=20.0,
    sbuf_partition_bytes=224 * 1024, sbuf_reserved_bytes=16392,
    clock_tensor=2.4, clock_vector=0.96, clock_scalar=1.2, clock_gpsimd=1.2, clock_sync=1.2, clock_base=1.2,
    vector_fast_factor=4, vector_mid_factor=2, scalar_fast_factor=1, launch_floor_us=15.0,
    hbm_gib=96, hbm_device_gbps=3000.0, hbm_core_gbps=375.0, dma_engines_device=128,
    dma_engine_peak_gbps=27.2, dma_engine_gbps=23.0, dma_core_gbps=368.0,
    hwdge_instances=2, hwdge_issue_ns=600.0,
    cores_per_device=8, max_lnc=2, cc_cores=20, link_gbps=1280.0,
)

TRN3 = Target(
    name="trn3", device="Trainium3", generation=nc_version.gen4,
    pe_tile_32x32=True, pe_double_row_k=256, pe_mx_k=512, pe_transpose_mode=True,
    tensor_tflops_bf16=79.0, tensor_tflops_fp32=20.0,
    sbuf_partition_bytes=256 * 1024, sbuf_reserved_bytes=16392,
    clock_tensor=2.4, clock_vector=1.2, clock_scalar=1.2, clock_gpsimd=1.2, clock_sync=1.2, clock_base=1.2,
    vector_fast_factor=4, vector_mid_factor=2, scalar_fast_factor=2, launch_floor_us=15.0,
    hbm_gib=144, hbm_device_gbps=4700.0, hbm_core_gbps=587.0, dma_engines_device=128,
    dma_engine_peak_gbps=38.4, dma_engine_gbps=33.0, dma_core_gbps=528.0,
    hwdge_instances=2, hwdge_issue_ns=600.0,
    cores_per_device=8, max_lnc=2, cc_cores=20, link_gbps=2560.0,
)

# trn1n and trn2n have the same chips with more network; they keep their names, which payloads carry.
TARGETS: dict[str, Target] = {
    "trn1": TRN1,
    "trn1n": dataclasses.replace(TRN1, name="trn1n"),
    "inf2": INF2,
    "trn2": TRN2,
    "trn2n": dataclasses.replace(TRN2, name="trn2n"),
    "trn3": TRN3,
    "gen2": TRN1,
    "gen3": TRN2,
    "gen4": TRN3,
    "core_v2": TRN1,
    "core_v3": TRN2,
    "core_v4": TRN3,
}

# Where a grid over several physical cores is legal (err_multi_cores_spmd_not_supported otherwise).
MULTI_CORE_TARGETS = frozenset({"trn2", "trn2n", "trn3", "core_v4", "gen3"})

FALLBACK = "trn1"
FALLBACK_WARNING = "Unable to read MLA target. Assuming cross compile to trn1."


def resolve(name: str | Target) -> Target:
    """The record of a target by name or alias, in any case. Raises NkiValueError for an unknown name."""
    if isinstance(name, Target):
        return name
    target = TARGETS.get(name.strip().lower()) if isinstance(name, str) else None
    if target is None:
        raise NkiValueError(
            f"unknown target {name!r}",
            rule="a target is one of " + ", ".join(TARGETS),
            why="limits, costs and the grid rules are those of one chip",
            fix="pass platform_target= or set NEURON_PLATFORM_TARGET_OVERRIDE to one of these names")
    return target


def detect() -> tuple[Target, bool]:
    """The target of this process, and whether it is only the fallback.

    NEURON_PLATFORM_TARGET_OVERRIDE decides; without it there is no chip to ask, so the fallback is trn1, with
    the vendor's warning. Raises NkiValueError for an unknown name in the variable.
    """
    override = settings.current().platform_target_override
    if override is not None:
        return resolve(override), False
    frame = user_frame()
    if frame is None:
        warnings.warn(FALLBACK_WARNING, UserWarning, stacklevel=2)
    else:  # at the user's line, and once for each unless filters say otherwise
        registry = frame.f_globals.setdefault("__warningregistry__", {})
        warnings.warn_explicit(FALLBACK_WARNING, UserWarning, frame.f_code.co_filename, frame.f_lineno,
                               registry=registry)
    return TARGETS[FALLBACK], True
