"""`neuronxcc.nki.typing`: annotations of kernel parameters and locals, and runtime scalars."""

from __future__ import annotations

from typing import Any

from opennki.dialects.neuronxcc._missing import missing
from opennki.lang.annotations import mutable, mutable_tensor, tensor
from opennki.lang.loops import RuntimeScalar

__all__ = ["mutable", "mutable_tensor", "scalar", "tensor"]


def scalar(x: Any) -> RuntimeScalar:
    """A scalar that is known at run time only: the condition of a do-while loop, or an index.

    x: a [1, 1] tile, or a Python value (`cond = scalar(True)` before the loop).
    """
    return RuntimeScalar(x)


__getattr__ = missing("neuronxcc.nki.typing")
