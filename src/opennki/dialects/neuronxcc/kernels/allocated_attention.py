"""`neuronxcc.nki.kernels.allocated_attention`. Source: api_legacy neuronxcc.nki.kernels."""

from __future__ import annotations

from opennki.dialects.neuronxcc._later import later
from opennki.dialects.neuronxcc._missing import missing

_M = "neuronxcc.nki.kernels.allocated_attention"
allocated_fused_self_attn_for_SD_small_head_size = later(
    _M,
    "allocated_fused_self_attn_for_SD_small_head_size",
    "Self-attention in one kernel, with direct allocation.",
)

__all__ = ["allocated_fused_self_attn_for_SD_small_head_size"]
__getattr__ = missing(_M)
