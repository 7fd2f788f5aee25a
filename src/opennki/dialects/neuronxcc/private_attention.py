"""`neuronxcc.nki._private_kernels.attention`: where programs look first for attention_isa_kernel.

The other private kernels of the vendor have no public description.
"""

from __future__ import annotations

from opennki.dialects.neuronxcc._missing import missing
from opennki.dialects.neuronxcc.kernels.attention import attention_isa_kernel

__all__ = ["attention_isa_kernel"]
__getattr__ = missing("neuronxcc.nki._private_kernels.attention")
