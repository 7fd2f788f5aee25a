"""`torch_neuronx` on the CPU: the deprecated `nki_jit`."""
from __future__ import annotations

import warnings
from typing import Any

from opennki.kernels.entry import jit


def nki_jit(func: Any = None, **kwargs: Any) -> Any:
    """`nki.jit`, under the name that older drivers use."""
    warnings.warn("torch_neuronx.nki_jit is deprecated, use nki.jit", DeprecationWarning, stacklevel=2)
    return jit(func, **kwargs)
