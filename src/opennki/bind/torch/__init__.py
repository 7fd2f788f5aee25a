"""NKI kernels in PyTorch programs: the custom ops, and the kernel class that calls them.

Importing this package imports torch and registers the ops. Source: seeds "PyTorch-XLA bridge".
"""

from opennki.bind.torch.kernel import PyTorchXLAKernel, register_autograd
from opennki.bind.torch.neuron import nki_op, wrap_nki

__all__ = ["PyTorchXLAKernel", "nki_op", "register_autograd", "wrap_nki"]
