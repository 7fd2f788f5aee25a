"""`torch_neuronx` on the CPU: the deprecated `nki_jit`, and `nki_op` and `wrap_nki` of current releases."""

from __future__ import annotations

import functools
import warnings
from typing import Any

from opennki.dialects.neuronxcc._missing import missing
from opennki.kernels.entry import jit

_LAZY = ("nki_op", "wrap_nki")  # they import torch
__all__ = ["nki_jit", *_LAZY]


def nki_jit(func: Any = None, **kwargs: Any) -> Any:
    """`nki.jit`, under the name that older drivers use, for kernels that write into parameters too. Warns that it is deprecated."""
    warnings.warn(
        "torch_neuronx.nki_jit is deprecated, use nki.jit (from neuronxcc import nki) in its place", DeprecationWarning, stacklevel=2
    )
    kwargs.setdefault("kernel_return", False)
    return functools.partial(jit, **kwargs) if func is None else jit(func, **kwargs)


_missing = missing("torch_neuronx", __all__)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from opennki.bind.torch import neuron

        return getattr(neuron, name)
    return _missing(name)
