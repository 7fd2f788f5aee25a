"""`neuronxcc.nki.compile`: the home of jit and of the kernel object."""

from __future__ import annotations

from opennki.dialects.neuronxcc._missing import missing
from opennki.kernels.entry import jit, simulate_kernel
from opennki.kernels.generic import GenericKernel
from opennki.kernels.modes import _native_mode_map, compute_mode

__all__ = ["GenericKernel", "_native_mode_map", "compute_mode", "jit", "simulate_kernel"]
__getattr__ = missing("neuronxcc.nki.compile")
