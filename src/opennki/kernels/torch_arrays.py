"""CPU torch tensors as NumPy arrays on the same memory, and back. Imported only when a torch tensor shows
up."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch

_VIEWS = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e5m2: (torch.uint8, ml_dtypes.float8_e5m2),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
}


def to_numpy(value: Any) -> Any:
    """The value with each torch tensor in it as a NumPy array that shares its memory."""
    if isinstance(value, torch.Tensor):
        tensor = value.detach()
        tensor = tensor if tensor.device.type == "cpu" else tensor.cpu()
        if tensor.dtype in _VIEWS:
            view, dtype = _VIEWS[tensor.dtype]
            return tensor.contiguous().view(view).numpy().view(dtype)
        return tensor.numpy()
    if isinstance(value, tuple):
        return tuple(map(to_numpy, value))
    if isinstance(value, list):
        return list(map(to_numpy, value))
    if isinstance(value, dict):
        return {k: to_numpy(v) for k, v in value.items()}
    return value


def to_torch(value: Any) -> Any:
    """The value with each NumPy array in it as a torch tensor."""
    if isinstance(value, np.ndarray):
        for dtype, (view, storage) in _VIEWS.items():
            if value.dtype == storage:
                return torch.from_numpy(
                    np.ascontiguousarray(value).view(np.int16 if view == torch.int16 else np.uint8)
                ).view(dtype)
        return torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, tuple):
        return tuple(map(to_torch, value))
    if isinstance(value, list):
        return list(map(to_torch, value))
    return value
