"""What index expressions start from: `nl.arange`, `nl.mgrid` and `nl.ds`. They need no kernel."""
from __future__ import annotations

import operator
from typing import Any

from opennki.errors import NkiTypeError, NkiValueError
from opennki.ir.affine import constant
from opennki.lang.index import Index


def arange(*args: Any) -> Index:
    """Index vector start .. stop-1 (`arange(stop)`, `arange(start, stop)`, `arange(start, stop, step)`); start may be a loop index.

    Shape (n,): add dimensions with `[:, None]` before indexing a tensor (err_1d_arange_not_supported).
    """
    if not 1 <= len(args) <= 3:
        raise NkiTypeError(f"nl.arange takes 1 to 3 arguments, not {len(args)}",
                           rule="nl.arange(stop), (start, stop) or (start, stop, step)")
    start, stop, step = (0, args[0], 1) if len(args) == 1 else (*args, 1)[:3]
    return _span(start, stop, step, "nl.arange")


def _span(start: Any, stop: Any, step: Any, what: str) -> Index:
    step = operator.index(step)
    length = stop - start if start is not None else stop
    count = operator.index(length)
    n = -(-count // step) if step > 0 else 0
    if n < 0 or step <= 0:
        raise NkiValueError(f"{what} of {count} elements with step {step}", rule="the stop is not below the start, the step is positive")
    base = start.base if isinstance(start, Index) else constant(operator.index(start or 0))
    return Index(base, (step if n != 1 else 0,), (n,))


class Grid(tuple):  # type: ignore[type-arg]
    """The indices of a dense grid: a tuple of Index, also by name: p, x, y, z (first dimension first)."""

    def __new__(cls, indices: Any) -> Grid:
        return super().__new__(cls, indices)

    def __getattr__(self, name: str) -> Index:
        position = {"p": 0, "x": 1, "y": 2, "z": 3, "w": 4}.get(name)
        if position is None or position >= len(self):
            raise AttributeError(f"an nl.mgrid of {len(self)} dimensions has no {name!r}")
        return self[position]  # type: ignore[no-any-return]


class _MGrid:
    """`nl.mgrid[0:P, 0:F]`."""

    def __getitem__(self, key: Any) -> Any:
        keys = key if isinstance(key, tuple) else (key,)
        spans = []
        for k in keys:
            if not isinstance(k, slice) or isinstance(k.step, complex):
                raise NkiTypeError(f"nl.mgrid[{k!r}]", rule="nl.mgrid takes slices such as 0:128, one for each dimension")
            spans.append(_span(k.start or 0, k.stop, 1 if k.step is None else k.step, "nl.mgrid"))
        # dense, as numpy.mgrid: each component has the shape of the whole grid
        shape = tuple(span.shape[0] for span in spans)
        return Grid([Index(span.base, tuple(span.strides[0] if i == axis else 0 for i in range(len(keys))), shape)
                     for axis, span in enumerate(spans)])


mgrid = _MGrid()


class ds:
    """`nl.ds(start, size)`: the slice start : start + size; start may be an index expression."""

    __slots__ = ("size", "start")

    def __init__(self, start: Any, size: Any) -> None:
        self.start, self.size = start, operator.index(size)

    def __repr__(self) -> str:
        return f"nl.ds({self.start}, {self.size})"
