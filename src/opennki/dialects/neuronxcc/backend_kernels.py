"""`neuronxcc.nki.compiler.backends.neuron.{TraceKernel,FrameworkKernel,NumpyKernel}`: the kernel classes."""

from __future__ import annotations

from opennki.dialects.neuronxcc._missing import missing
from opennki.kernels.base import TraceKernel
from opennki.kernels.framework import FrameworkKernel, LegacyFrameworkKernel, UnifiedKernel
from opennki.kernels.numpy_kernel import BaremetalKernel, BenchmarkKernel, NumpyKernel, ProfileKernel, SimulateKernel
from opennki.kernels.payload import KERNEL_VERSION
from opennki.trace.kernel import DeclTensor

__all__ = [
    "BaremetalKernel",
    "BenchmarkKernel",
    "DeclTensor",
    "FrameworkKernel",
    "KERNEL_VERSION",
    "LegacyFrameworkKernel",
    "NumpyKernel",
    "ProfileKernel",
    "SimulateKernel",
    "TraceKernel",
    "UnifiedKernel",
]
__getattr__ = missing("neuronxcc.nki.compiler.backends.neuron.FrameworkKernel")
