"""`neuronxcc.nki.kernels.allocated_fused_linear`. Source: api_legacy neuronxcc.nki.kernels."""

from __future__ import annotations

from opennki.dialects.neuronxcc._later import later
from opennki.dialects.neuronxcc._missing import missing

_M = "neuronxcc.nki.kernels.allocated_fused_linear"
allocated_fused_rms_norm_qkv = later(
    _M, "allocated_fused_rms_norm_qkv", "RMSNorm and QKV projection, with direct allocation."
)

__all__ = ["allocated_fused_rms_norm_qkv"]
__getattr__ = missing(_M)
