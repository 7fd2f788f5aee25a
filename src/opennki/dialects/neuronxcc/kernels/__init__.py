"""`neuronxcc.nki.kernels`: the kernels that come with the language, opennki's own, under the vendor's names.

Each is in the module that the vendor documents for it, and here too; modules are imported when a name is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from opennki.dialects.neuronxcc._missing import missing

_HOME = {
    "FlashConfig": "attention",
    "attention_isa_kernel": "attention",
    "flash_attn_bwd": "attention",
    "flash_fwd": "attention",
    "fused_self_attn_for_SD_small_head_size": "attention",
    "allocated_fused_self_attn_for_SD_small_head_size": "allocated_attention",
    "allocated_fused_rms_norm_qkv": "allocated_fused_linear",
    "quantized_double_row_matmul": "double_row_matmul",
    "add_kernel_nx8x128x512": "tutorial",
    "adaptive_avg_pool2d_kernel": "vision",
    "resize_nearest_fixed_dma_kernel": "vision",
    "select_and_scatter_kernel": "vision",
}
__all__ = list(_HOME)
_missing = missing("neuronxcc.nki.kernels", __all__)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return _missing(name)
