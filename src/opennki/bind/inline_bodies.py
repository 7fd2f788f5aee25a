"""Bodies of instructions over the arrays of `inline_values`: `isa.bodies` with JAX in the place of NumPy."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from opennki.bind.inline_numbers import STANDS_IN, scan_free
from opennki.bind.inline_values import numpy_like
from opennki.isa import reduce, scalar
from opennki.isa.bodies import Translator


def _scalar_function(op: Any) -> Callable[..., Any]:
    return TRANSLATOR(scalar.SCALAR)[scalar.resolve(op)].raw  # type: ignore[no-any-return]


TRANSLATOR = Translator(numpy_like, {**STANDS_IN, reduce.scan_free: partial(scan_free, _scalar_function)})
