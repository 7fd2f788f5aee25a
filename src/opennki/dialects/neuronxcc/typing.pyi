# Made by `python -m opennki.tools.stubs` from signatures and docstrings; do not edit.
"""`neuronxcc.nki.typing`: annotations of kernel parameters and locals, and runtime scalars."""
from typing import Any

from opennki.lang.annotations import Mutable
from opennki.lang.annotations import TensorType
from opennki.lang.loops import RuntimeScalar

mutable: Mutable
mutable_tensor: TensorType
tensor: TensorType


def scalar(x: Any) -> RuntimeScalar:
    """A scalar that is known at run time only: the condition of a do-while loop, or an index.

    x: a [1, 1] tile, or a Python value (`cond = scalar(True)` before the loop).
    """
