"""`torch_xla.core.xla_model` on the CPU."""
from __future__ import annotations

from typing import Any


def xla_device(n: int | None = None, devkind: str | None = None) -> Any:
    """The device that tensors are put on: the CPU."""
    import torch
    return torch.device("cpu")


def mark_step(wait: bool = False, reset_scope: bool = True) -> None:
    """Nothing is pending: kernels run when they are called."""


def wait_device_ops(devices: Any = None) -> None:
    """Nothing is pending."""
