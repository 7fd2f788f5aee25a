"""opennki: an open implementation of the Neuron Kernel Interface (NKI)."""

from opennki import isa as _isa
from opennki._version import __version__
from opennki.frameworks import register as _register
from opennki.kernels.entry import baremetal, benchmark, jit, profile, simulate_kernel, trace
from opennki.kernels.generic import GenericKernel
from opennki.kernels.launch import launch
from opennki.lang.tensor import Tensor as tensor

__all__ = ["GenericKernel", "__version__", "baremetal", "benchmark", "jit", "launch", "profile", "simulate_kernel", "tensor", "trace"]

_register()
