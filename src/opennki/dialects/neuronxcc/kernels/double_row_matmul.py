"""`neuronxcc.nki.kernels.double_row_matmul`. Source: api_legacy neuronxcc.nki.kernels."""

from __future__ import annotations

from opennki.dialects.neuronxcc._later import later
from opennki.dialects.neuronxcc._missing import missing

_M = "neuronxcc.nki.kernels.double_row_matmul"
quantized_double_row_matmul = later(
    _M, "quantized_double_row_matmul", "Matrix multiplication of fp8 data in double-row mode."
)

__all__ = ["quantized_double_row_matmul"]
__getattr__ = missing(_M)
