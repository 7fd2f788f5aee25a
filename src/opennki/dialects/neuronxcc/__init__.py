"""The legacy namespace `neuronxcc.nki`: surface only, the meaning is in `opennki.lang` and `opennki.isa`."""

from __future__ import annotations

from typing import Any

from opennki.dialects.neuronxcc._missing import missing
from opennki.kernels.entry import baremetal, benchmark, jit, profile, simulate_kernel, trace
from opennki.kernels.framework import FrameworkKernel
from opennki.kernels.generic import GenericKernel
from opennki.lang.tensor import Tensor as tensor

__all__ = [
    "FrameworkKernel",
    "GenericKernel",
    "baremetal",
    "benchmark",
    "compiler",
    "isa",
    "jit",
    "language",
    "profile",
    "simulate_kernel",
    "tensor",
    "trace",
    "typing",
]
_SUBMODULES = frozenset(
    {"compiler", "compile", "distributed", "isa", "kernels", "language", "nccl", "typing"}
)
_missing = missing("neuronxcc.nki")


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:  # `import neuronxcc.nki as nki` gives nki.language, as the vendor's package does
        import importlib

        return importlib.import_module(f"{__name__}.{name}")
    return _missing(name)
