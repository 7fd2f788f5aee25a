"""`neuronxcc.nki._torch_xla`: the PyTorch bridge. Importing it imports torch."""

from __future__ import annotations

from opennki.bind.torch import PyTorchXLAKernel
from opennki.dialects.neuronxcc._missing import missing
from opennki.dialects.torch_shims.torch_neuronx import nki_jit

__all__ = ["PyTorchXLAKernel", "nki_jit"]
__getattr__ = missing("neuronxcc.nki._torch_xla")
