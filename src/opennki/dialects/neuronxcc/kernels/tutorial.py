"""`neuronxcc.nki.kernels.tutorial`. Source: api_legacy neuronxcc.nki.kernels."""

from __future__ import annotations

from opennki.dialects.neuronxcc._later import later
from opennki.dialects.neuronxcc._missing import missing

_M = "neuronxcc.nki.kernels.tutorial"
add_kernel_nx8x128x512 = later(_M, "add_kernel_nx8x128x512", "Elementwise addition.")

__all__ = ["add_kernel_nx8x128x512"]
__getattr__ = missing(_M)
