"""`torch_xla` on the CPU."""

from __future__ import annotations

from typing import Any


def device(index: int | None = None) -> Any:
    """The device that tensors are put on: the CPU."""
    import torch

    return torch.device("cpu")


def sync(wait: bool = False, reset_scope: bool = True) -> None:
    """Nothing is pending: kernels run when they are called."""
