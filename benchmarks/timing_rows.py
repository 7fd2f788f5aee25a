"""Published latencies and the kernels they belong to: what `benchmarks/timing.py` compares the timing model with.

The numbers are facts from public documents and logs; the kernels stay in their own repositories, of which local clones are read. FITTED
are the rows that a constant or a rule of the model was taken from; the others are held out.
"""
from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

F32, BF16, F16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)


class Missing(Exception):
    """A clone that is not there."""


class Checkouts:
    """Local clones of public repositories, named owner__name; files are read at a commit and imported from a temporary folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = tempfile.TemporaryDirectory()
        self.count = 0

    def text(self, repo: str, commit: str, path: str) -> str:
        """A file of a repository."""
        where = self.root / repo.replace("/", "__")
        if not where.exists():
            raise Missing(f"no clone of {repo} at {where}")
        run = subprocess.run(["git", "-C", str(where), "show", f"{commit}:{path}"], capture_output=True, text=True, check=False)
        if run.returncode:
            raise Missing(f"{repo} has no {path} at {commit}")
        return run.stdout

    def module(self, repo: str, commit: str, path: str, edits: dict[str, str] | None = None) -> ModuleType:
        """A file as a module; `edits` set constants that the file leaves to its reader (pattern: replacement)."""
        source = self.text(repo, commit, path)
        for pattern, replacement in (edits or {}).items():
            source, n = re.subn(pattern, replacement, source, flags=re.MULTILINE)
            if not n:
                raise Missing(f"{path}: nothing matches {pattern}")
        self.count += 1
        file = Path(self.folder.name) / f"public_{self.count}_{Path(path).stem.replace('.', '_')}.py"
        file.write_text(source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[file.stem] = module
        spec.loader.exec_module(module)
        return module


@dataclass(frozen=True)
class Published:
    """A published number. `unit` is µs of the whole kernel, or ns between two events of its timeline (`probe`)."""

    id: int
    name: str
    target: str
    measured: float
    kind: str
    trace: Callable[[Checkouts], Any]
    group: str = ""
    note: str = ""
    profile: dict[str, float] = field(default_factory=dict)
    probe: Callable[[Any], float] | None = None
    pe_bound: bool = False

    @property
    def fit(self) -> bool:
        """Whether a constant or a rule of the model was taken from the row."""
        return self.id in FITTED


def empty(*shapes: Any, dtype: Any = F32) -> list[Any]:
    """Arrays of zeros, for shapes; other values as they are."""
    return [np.zeros(s, dtype) if isinstance(s, tuple) else s for s in shapes]


def nkibench(kernel: str, *shapes: Any) -> Callable[[Checkouts], Any]:
    """A kernel of NKIBench, all float32."""
    def trace(clones: Checkouts) -> Any:
        module = clones.module("zhang677/AccelOpt", "47e29a7c", f"NKIBench/kernels/{kernel}.py")
        return module.kernel.trace(*empty(*shapes))
    return trace


def tutorial(path: str, function: str, *arrays: Any) -> Callable[[Checkouts], Any]:
    """A kernel of the vendor's tutorials."""
    def trace(clones: Checkouts) -> Any:
        return getattr(clones.module("aws-neuron/aws-neuron-sdk", "v2.26.1", f"nki/examples/{path}"), function).trace(*arrays)
    return trace


def mamba(version: int, seq: int, channels: int) -> Callable[[Checkouts], Any]:
    """A version of the fused Mamba tutorial."""
    return tutorial("fused_mamba/mamba_nki_kernels.py", f"mamba_v{version}",
                    *empty((1, channels, seq), (1, channels, seq), (channels, 16), (1, 16, seq), (1, 16, seq)))


def sample(path: str, function: str, grid: Any, *arrays: Any, **keywords: Any) -> Callable[[Checkouts], Any]:
    """A reference kernel of nki-samples."""
    def trace(clones: Checkouts) -> Any:
        kernel = getattr(clones.module("aws-neuron/nki-samples", "0898a77", f"src/nki_samples/reference/{path}"), function)
        return (kernel if grid is None else kernel[grid]).trace(*arrays, **keywords)
    return trace


def vector_add(function: str, edits: dict[str, str], n: int) -> Callable[[Checkouts], Any]:
    """A vector addition of the CS149 assignment with its constant set."""
    def trace(clones: Checkouts) -> Any:
        module = clones.module("stanford-cs149/asst4-trainium2", "HEAD", "part1/kernels.py", edits)
        return getattr(module, function).trace(*empty((n,), (n,)))
    return trace


def own(name: str) -> Callable[[Checkouts], Any]:
    """A kernel of ours of a published shape (benchmarks/timing_kernels.py)."""
    def trace(_clones: Checkouts) -> Any:
        from timing_kernels import KERNELS
        kernel, arrays = KERNELS[name]
        return kernel.trace(*arrays)
    return trace


# Constants (opennki.timing.constants, Target.pe_load_passes_fp32), the choice of engines (4, 6, 8, 12), what a broadcast costs (30)
FITTED = frozenset((1, 2, 4, 6, 8, 12, 24, 26, 30, 61, 74, 75, 88, 93))
MATMUL = [np.zeros(s, BF16) for s in ((8192, 4096), (8192, 8192))]
BENCH = "NKIBench: neuron-profile total_time, mean of 10"
ROWS = [
    Published(1, "swiglu K1024 M4096 N3072", "trn1", 4221.78, "spills", nkibench(
        "swiglu_M4096_N3072_K1024_0", (8, 4, 128, 8, 128), (8, 128, 3072), (24, 128, 1024), (8, 128, 3072)), "", BENCH,
        {"hbm_read": 141623296, "hbm_write": 83886080, "scalar": .0933, "vector": .1347, "gpsimd": .0007}, pe_bound=True),
    Published(2, "matmul_add_rmsnorm K2048 M4096 N2048", "trn1", 2666.58, "measured", nkibench(
        "matmul_add_rmsnorm_M4096_N2048_K2048_0", (4096, 2048), (2048, 2048), 1e-5, (4096, 2048), (2048,)), "", BENCH,
        {"hbm_read": 98115584, "hbm_write": 33554432, "scalar": .1679, "vector": .1242, "gpsimd": .0011}, pe_bound=True),
    Published(4, "matmul K5120 M4096 N12288", "trn1", 35199.74, "measured", nkibench(
        "matmul_M4096_N12288_K5120_0", (32, 128, 40, 128), (40, 128, 12288)), "", BENCH,
        {"hbm_read": 9059762176, "hbm_write": 201326592, "scalar": .068, "vector": .0, "gpsimd": .0007}, pe_bound=True),
    Published(6, "rmsnorm_matmul K1024 M4096 N2048", "trn1", 1055.76, "measured", nkibench(
        "rmsnorm_matmul_M4096_N2048_K1024_0", (32, 128, 1024), (8, 128, 2048)), "", BENCH,
        {"hbm_read": 39387136, "hbm_write": 33554432, "scalar": .1775, "vector": .0388, "gpsimd": .0051}, pe_bound=True),
    Published(7, "rope H64 N4096 D128", "trn1", 4333.01, "measured", nkibench(
        "rope_single_freq_apply_B1_H64_N4096_D128_0", (128, 64 * 4096), (64, 64 * 4096), (64, 64 * 4096)), "", BENCH,
        {"hbm_read": 268435456, "hbm_write": 134217728, "scalar": .1411, "vector": .7164, "gpsimd": .0074}),
    Published(8, "bmm B16 K64 M4096 N4096", "trn1", 4610.89, "spills", nkibench(
        "bmm_B16_M4096_K64_N4096_0", (16, 4096, 64), (16, 64, 4096)), "", BENCH,
        {"hbm_read": 67436544, "hbm_write": 1086324736, "scalar": .3726, "vector": .0, "gpsimd": .0261}),
    Published(12, "adamw M10944 N2048", "trn1", 1999.83, "measured", nkibench(
        "adamw_M10944_N2048_0", *[(10944, 2048)] * 4), "", BENCH,
        {"hbm_read": 358612992, "hbm_write": 89653248, "scalar": .6162, "vector": .9002, "gpsimd": .0059}),
    Published(24, "matmul tutorial, tiled", "trn1", 51800.0, "measured",
              tutorial("matrix_multiplication/matrix_multiplication_nki_kernels.py", "nki_matmul_tiled_", *MATMUL), "matmul"),
    Published(26, "matmul tutorial, blocked free dimension", "trn1", 22070.0, "measured",
              tutorial("matrix_multiplication/matrix_multiplication_nki_kernels.py", "nki_matmul_block_free_dimension_", *MATMUL),
              "matmul"),
    Published(28, "mamba v1 seq 512 channels 256", "trn1", 172.93, "measured", mamba(1, 512, 256), "mamba 256"),
    Published(30, "mamba v2 seq 512 channels 4096", "trn1", 1610.0, "measured", mamba(2, 512, 4096), "mamba 512"),
    Published(31, "mamba v3 seq 1024 channels 4096", "trn1", 3300.0, "measured", mamba(3, 1024, 4096), "mamba 1024"),
    Published(34, "mamba v2 seq 2048", "trn1", 8900.0, "spills", mamba(2, 2048, 4096), "mamba 2048"),
    Published(35, "mamba v3 seq 3072", "trn1", 10100.0, "measured", mamba(3, 3072, 4096), "mamba 3072"),
    Published(36, "mamba v2 seq 3072", "trn1", 13100.0, "spills", mamba(2, 3072, 4096), "mamba 3072"),
    Published(38, "mamba v2 seq 4096", "trn1", 17600.0, "spills", mamba(2, 4096, 4096), "mamba 4096"),
    Published(39, "mamba v3 seq 5120", "trn1", 17300.0, "measured", mamba(3, 5120, 4096), "mamba 5120"),
    Published(40, "mamba v2 seq 5120", "trn1", 23700.0, "spills", mamba(2, 5120, 4096), "mamba 5120"),
    Published(41, "mamba v3 seq 6144", "trn1", 19600.0, "measured", mamba(3, 6144, 4096), "mamba 6144"),
    Published(42, "mamba v2 seq 6144", "trn1", 27500.0, "spills", mamba(2, 6144, 4096), "mamba 6144"),
    Published(43, "mamba v3 seq 7168", "trn1", 24200.0, "measured", mamba(3, 7168, 4096), "mamba 7168"),
    Published(44, "mamba v2 seq 7168", "trn1", 41300.0, "spills", mamba(2, 7168, 4096), "mamba 7168"),
    Published(47, "layernorm tutorial v1, 300 x 1000", "trn1", 2311.0, "outlier", tutorial(
        "layernorm/layernorm_nki_kernel.py", "nki_layernorm_kernel_v1", np.zeros((300, 1000), F32), 1e-5, *empty((1000,), (1000,)))),
    Published(59, "CS149 vector_add_tiled ROW_CHUNK=128", "trn2", 378.0, "measured", vector_add(
        "vector_add_tiled", {r"^    ROW_CHUNK = 1$": "    ROW_CHUNK = 128"}, 25600), "cs149"),
    Published(61, "CS149 vector_add_stream FREE_DIM=200", "trn2", 15.0, "measured", vector_add(
        "vector_add_stream", {r"^    FREE_DIM = 2$": "    FREE_DIM = 200"}, 25600), "cs149"),
    Published(62, "CS149 vector_add_stream FREE_DIM=2000", "trn2", 28.0, "measured", vector_add(
        "vector_add_stream", {r"^    FREE_DIM = 2$": "    FREE_DIM = 2000"}, 256000)),
    Published(74, "allocated SD attention 4096, float32", "trn1", 430.5, "upper bound", sample(
        "allocated_attention.py", "allocated_fused_self_attn_for_SD_small_head_size", 1,
        *empty((1, 128, 4096), (1, 128, 4096), (1, 4096, 128)))),
    Published(75, "allocated SD attention 4096, bfloat16", "trn1", 399.0, "upper bound", sample(
        "allocated_attention.py", "allocated_fused_self_attn_for_SD_small_head_size", 1,
        *empty((1, 128, 4096), (1, 128, 4096), (1, 4096, 128), dtype=BF16))),
    Published(77, "allocated rms_norm_qkv 128 x 512", "trn1", 25.0, "upper bound", sample(
        "allocated_fused_linear.py", "allocated_fused_rms_norm_qkv", None, *empty((1, 128, 512), (512, 512), dtype=F16))),
    Published(88, "adaptive_avg_pool2d 1x64x56x56 to 7", "trn1", 68.25, "upper bound", sample(
        "vision.py", "adaptive_avg_pool2d_kernel", None, *empty((1, 64, 56, 56)), 7)),
    Published(91, "adaptive_avg_pool2d 4x64x56x56 to 7", "trn1", 159.6, "upper bound", sample(
        "vision.py", "adaptive_avg_pool2d_kernel", None, *empty((4, 64, 56, 56)), (7, 7))),
    Published(93, "adaptive_avg_pool2d 1x512x7x7 to 1", "trn1", 14.7, "upper bound", sample(
        "vision.py", "adaptive_avg_pool2d_kernel", None, *empty((1, 512, 7, 7)), 1)),
    Published(95, "adaptive_avg_pool2d 2x2048x32x32 to 3", "trn1", 592.2, "upper bound", sample(
        "vision.py", "adaptive_avg_pool2d_kernel", None, *empty((2, 2048, 32, 32)), (3, 3))),
    Published(102, "matmul 2048, single PSUM accumulator", "trn2", 366.0, "measured", own("single PSUM tile"), "autotune"),
    Published(105, "matmul 2048, by hand (90.92 % MFU)", "trn2", 240.3, "measured", own("blocked"), "autotune", pe_bound=True),
    Published(49, "DMA [4, 4096] bfloat16, one engine, ns", "trn2", 1416.0, "trace", own("load 4 x 4096"),
              probe=lambda t: t.rows[0].duration_ns),
    Published(50, "DMA [128, 128] bfloat16, an engine's share, ns", "trn2", 97.0, "trace", own("load 128 x 128"),
              probe=lambda t: t.rows[0].duration_ns),
    Published(54, "activation exp [128, 128] alone, ns", "trn2", 400.0, "trace", own("exp 128 x 128"),
              probe=lambda t: next(r.visible_ns - r.start_ns for r in t.rows if r.engine == "scalar") - 1280.0),
    Published(57, "dependent one-element activations, ns apart", "trn1", 189.0, "trace", own("chain of activations"),
              probe=lambda t: [r.start_ns for r in t.rows if r.engine == "scalar"][-1] - [
                  r.start_ns for r in t.rows if r.engine == "scalar"][-2]),
]
# Rows that belong to no single kernel, or whose kernel is not public: aggregates, end-to-end models, targets of libraries.
LEFT_OUT = {52: "an activation table load is a constant of the model", 51: "skew between DMA engines is not modelled",
            **dict.fromkeys((109, 110), "an aggregate"), **dict.fromkeys((111, 112, 113, 114), "a whole model"),
            **dict.fromkeys((117, 118, 120), "its kernel is not in the legacy dialect")}
