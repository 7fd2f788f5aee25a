"""`neuronxcc.nki.compiler.backends.neuron.{tensor,indexing}`: the vendor's names of types, which kernels use in annotations."""
from __future__ import annotations

from opennki.dialects.neuronxcc._missing import missing
from opennki.lang.index import Index as TileIndex
from opennki.lang.tensor import Tensor

# one class serves for tensors and tiles in every memory
local_tile = local_tensor = hbm_tensor = tensor = Tensor

__all__ = ["TileIndex", "hbm_tensor", "local_tensor", "local_tile", "tensor"]
__getattr__ = missing("neuronxcc.nki.compiler.backends.neuron.tensor")
