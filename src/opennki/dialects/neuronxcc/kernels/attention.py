"""`neuronxcc.nki.kernels.attention`. Source: api_legacy neuronxcc.nki.kernels; public documentation of
FlashConfig."""

from __future__ import annotations

from dataclasses import dataclass

from opennki.dialects.neuronxcc._later import later
from opennki.dialects.neuronxcc._missing import missing

_M = "neuronxcc.nki.kernels.attention"


@dataclass(frozen=True)
class FlashConfig:
    """Configuration of flash_fwd.

    seq_tile_size: keys and values of one large tile; attn_core_tile_size: tiles that are worked on at a time;
    training: keep the log-sum-exp for the backward pass; should_transpose_v: v comes transposed; lse_dtype:
    dtype of the log-sum-exp, "" for that of the inputs.
    """

    seq_tile_size: int = 2048
    attn_core_tile_size: int = 256
    training: bool = True
    should_transpose_v: bool = False
    lse_dtype: str = ""


flash_fwd = later(_M, "flash_fwd", "Flash attention, forward.")
flash_attn_bwd = later(_M, "flash_attn_bwd", "Flash attention, backward.")
fused_self_attn_for_SD_small_head_size = later(
    _M, "fused_self_attn_for_SD_small_head_size", "Self-attention in one kernel, for small head sizes."
)
attention_isa_kernel = later(_M, "attention_isa_kernel", "Attention on instructions.")

__all__ = [
    "FlashConfig",
    "attention_isa_kernel",
    "flash_attn_bwd",
    "flash_fwd",
    "fused_self_attn_for_SD_small_head_size",
]
__getattr__ = missing(_M)
