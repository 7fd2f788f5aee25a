"""Maximum and minimum of two zeros: the second one, on every CPU.

NumPy leaves it to the vector unit. That of x86 gives the second operand, as the table of scalar functions says (`isa.scalar`); that of Arm
takes +0 for larger than -0. There these functions put the second zero in place.
"""

from __future__ import annotations

from typing import Any

import numpy as np


class SecondZero:
    """np.maximum or np.minimum with the second of two zeros as the result: what folds and bodies use of a ufunc."""

    def __init__(self, ufunc: np.ufunc) -> None:
        self.ufunc = ufunc

    def __call__(self, a: Any, b: Any, out: Any = None) -> Any:
        """The elementwise function; `out` may be one of the operands."""
        zeros = None
        if isinstance(a, (np.ndarray, np.generic)) and isinstance(b, (np.ndarray, np.generic, int, float)) and a.dtype.kind == "f":
            zeros = np.equal(a, 0) & np.equal(b, 0)
            second = np.array(b, a.dtype)
        value = self.ufunc(a, b) if out is None else self.ufunc(a, b, out=out)
        if zeros is None or not zeros.any():
            return value
        if out is None:
            return np.where(zeros, second, value)
        np.copyto(value, second, where=zeros)
        return value

    def reduce(self, array: Any, axis: int = 0, out: Any = None, initial: Any = None) -> Any:
        """The fold along axis 0, one step after the other."""
        assert axis == 0
        value = np.full(array.shape[1:], initial, array.dtype) if initial is not None else np.array(array[0])
        for step in array if initial is not None else array[1:]:
            self(value, step, out=value)
        if out is None:
            return value
        out[...] = value
        return out


def _second_where_needed(ufunc: np.ufunc) -> Any:
    zeros = np.zeros((2, 67), np.float32)
    zeros[0] = -0.0
    exact = np.signbit(ufunc(zeros[0], zeros[1])).any() or not np.signbit(ufunc(zeros[1], zeros[0])).all()
    return SecondZero(ufunc) if exact else ufunc


MAXIMUM, MINIMUM = map(_second_where_needed, (np.maximum, np.minimum))
