"""`neuronxcc.starfish.support.util`: comparison of results, as public tests use it.

The tolerance is relative to the range of the reference, not to each element, so that small elements of a long
sum do not fail. Source: calls in public tests (`allclose(actual, expected, atol=1e-5, rtol=0.05,
verbose=1)`); not documented, the exact formula is ours.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from opennki.dialects.neuronxcc._missing import missing
from opennki.dialects.neuronxcc.support_dtype import as_native_type
from opennki.errors import NkiTypeError, NkiValueError

__all__ = ["allclose", "isclose"]
_MODES = ("max", "elementwise")


def isclose(
    a: Any, b: Any, *, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False, mode: str = "max"
) -> np.ndarray[Any, Any]:
    """Where |a - b| <= atol + rtol * scale; scale is the largest finite |b| (mode "max") or |b| itself
    ("elementwise").

    a, b: arrays of one shape, of any numeric dtype. Infinities are close to equal ones only, NaN to NaN only
    with equal_nan.
    """
    if mode not in _MODES:
        raise NkiValueError(f"mode {mode!r}", rule="a mode is " + " or ".join(_MODES))
    x, y = (as_native_type(v).astype(np.float64) for v in (a, b))
    if x.shape != y.shape:
        raise NkiTypeError(
            f"arrays of shapes {x.shape} and {y.shape} are compared", rule="both have one shape"
        )
    finite = np.isfinite(x) & np.isfinite(y)
    known = np.abs(y[np.isfinite(y)])
    scale = (known.max() if known.size else 0.0) if mode == "max" else np.where(finite, np.abs(y), 0.0)
    with np.errstate(all="ignore"):
        close = np.where(
            finite, np.abs(np.where(finite, x, 0) - np.where(finite, y, 0)) <= atol + rtol * scale, x == y
        )
    return close | (np.isnan(x) & np.isnan(y)) if equal_nan else close


def allclose(
    a: Any,
    b: Any,
    *,
    rtol: float = 1e-5,
    atol: float = 1e-8,
    equal_nan: bool = False,
    mode: str = "max",
    verbose: Any = 0,
    error_threshold: float = 0.0,
) -> bool:
    """True when all elements are close (see `isclose`), or no larger share of them than error_threshold is
    not; verbose prints how many."""
    close = isclose(a, b, rtol=rtol, atol=atol, equal_nan=equal_nan, mode=mode)
    wrong = int(close.size - np.count_nonzero(close))
    if verbose and wrong:
        print(f"allclose: {wrong} of {close.size} elements differ by more than rtol={rtol}, atol={atol}")
    return wrong <= error_threshold * close.size


__getattr__ = missing("neuronxcc.starfish.support.util")
