"""`torch_xla.core.xla_model` on the CPU: one process, one device, nothing deferred."""

from __future__ import annotations

from typing import Any

from opennki.dialects.neuronxcc._missing import missing

__all__ = ["get_ordinal", "get_rng_state", "get_xla_supported_devices", "is_master_ordinal", "mark_step", "master_print",
           "optimizer_step", "set_rng_state", "wait_device_ops", "xla_device", "xrt_world_size"]

_seed = 0


def xla_device(n: int | None = None, devkind: str | None = None) -> Any:
    """The device that tensors are put on: the CPU."""
    import torch

    return torch.device("cpu")


def get_xla_supported_devices(devkind: str | None = None, max_devices: int | None = None) -> list[str]:
    """The names of the devices."""
    return ["cpu"]


def mark_step(wait: bool = False, reset_scope: bool = True) -> None:
    """Nothing is pending: kernels run when they are called."""


def wait_device_ops(devices: Any = None) -> None:
    """Nothing is pending."""


def optimizer_step(optimizer: Any, barrier: bool = False, optimizer_args: dict[str, Any] | None = None, **_: Any) -> Any:
    """`optimizer.step()`: there is no other process to reduce gradients with."""
    return optimizer.step(**(optimizer_args or {}))


def get_rng_state(device: Any = None) -> int:
    """The seed of the device's generator, from which programs derive seeds of dropout; 0 until it is set."""
    return _seed


def set_rng_state(seed: int, device: Any = None) -> None:
    """Set the seed of the device's generator, an integer of 64 bits."""
    global _seed
    _seed = int(seed)


def get_ordinal() -> int:
    """The number of this process."""
    return 0


def xrt_world_size() -> int:
    """The number of processes."""
    return 1


def is_master_ordinal(local: bool = True) -> bool:
    """Whether this is the first process."""
    return True


def master_print(*args: Any, flush: bool = False, **kwargs: Any) -> None:
    """Print, as this is the first process."""
    print(*args, flush=flush, **{key: value for key, value in kwargs.items() if key in ("sep", "end", "file")})


__getattr__ = missing("torch_xla.core.xla_model")
