"""`neuronxcc.nki.kernels.vision`. Source: api_legacy neuronxcc.nki.kernels."""

from __future__ import annotations

from opennki.dialects.neuronxcc._later import later
from opennki.dialects.neuronxcc._missing import missing

_M = "neuronxcc.nki.kernels.vision"
select_and_scatter_kernel = later(
    _M, "select_and_scatter_kernel", "Backward pass of a 3 x 3 max pooling with stride 2."
)
resize_nearest_fixed_dma_kernel = later(
    _M, "resize_nearest_fixed_dma_kernel", "Resize to the nearest pixel, by DMA."
)
adaptive_avg_pool2d_kernel = later(_M, "adaptive_avg_pool2d_kernel", "Adaptive average pooling.")

__all__ = ["adaptive_avg_pool2d_kernel", "resize_nearest_fixed_dma_kernel", "select_and_scatter_kernel"]
__getattr__ = missing(_M)
