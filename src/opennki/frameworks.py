"""The frameworks whose tensors opennki knows: where they come from, and where their kernel classes live.

Only names stand here: a framework is imported by its own program, its kernel class when a tensor shows up.
"""

from __future__ import annotations

from opennki.kernels.modes import Framework, register_framework
from opennki.settings import widen_xla_pool


def register() -> None:
    """Register the frameworks, in the order in which arguments are asked."""
    widen_xla_pool()
    register_framework(
        Framework(
            "jax",
            "jax",
            # a program that is still importing jax has no arrays yet
            lambda jax, value: isinstance(value, getattr(jax, "Array", ())),
            "opennki.bind.jax:JAXKernel",
        )
    )
    register_framework(
        Framework(
            "torchxla",
            "torch",
            lambda torch, value: isinstance(value, getattr(torch, "Tensor", ())),
            "opennki.bind.torch:PyTorchXLAKernel",
            compiled="opennki.bind.torch.graphs",
            types=lambda torch: (torch.Tensor, torch.nn.Parameter),
        )
    )
