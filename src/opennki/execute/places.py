"""Whether operands share memory: how far a tile reaches, and the lane that it keeps to."""

from __future__ import annotations

from functools import lru_cache

from opennki.ir.affine import Affine


class Reach:
    """The bytes that a tile covers, counted from its first element: from `low` up to `high`. Its outermost dimension repeats them every
    `step` bytes, 0 where there is none such; each repetition covers `inner` bytes, and they do not meet."""

    __slots__ = ("high", "inner", "low", "step")

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...], item: int) -> None:
        low, high = 0, item
        for n, s in zip(shape, strides, strict=True):
            if s > 0:
                high += s * (n - 1)
            else:
                low += s * (n - 1)
        self.low, self.high = low, high
        moving = [(s, n) for n, s in zip(shape, strides, strict=True) if n > 1 and s]
        self.step = self.inner = 0
        if len(moving) > 1 and low == 0:
            step, count = max(moving)
            inner = high - step * (count - 1)
            if inner <= step:
                self.step, self.inner = step, inner

    def apart(self, other: Reach, delta: int) -> bool:
        """Whether a tile that begins `delta` bytes after another one shares no byte with it."""
        if delta + self.low >= other.high or delta + self.high <= other.low:
            return True
        step = self.step
        return step > 0 and step == other.step and other.inner <= delta % step <= step - self.inner

    def apart_along(self, other: Reach, delta: Affine) -> bool:
        """`apart`, for a distance that depends on loop indices."""
        if not delta.terms:
            return self.apart(other, delta.const)
        step = self.step  # both keep to lanes of rows, whatever the rows
        return (
            step > 0 and step == other.step and other.inner <= delta.const % step <= step - self.inner
            and all(c % step == 0 for _, c in delta.terms)
        )  # fmt: skip


@lru_cache(4096)
def reach_of(shape: tuple[int, ...], strides: tuple[int, ...], item: int) -> Reach:
    """The reach of a tile, strides in bytes."""
    return Reach(shape, strides, item)
