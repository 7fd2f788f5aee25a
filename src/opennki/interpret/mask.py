"""Masks at run time: the box that a mask narrows an instruction to, and the truth values that are left inside it."""
from __future__ import annotations

from typing import Any

import numpy as np

from opennki.interpret.views import Env, Layout, compile_affine, value_of
from opennki.ir.affine import Pred

Box = tuple[tuple[int, ...], tuple[int, ...]]


class Masker:
    """A compiled mask over an iteration space."""

    __slots__ = ("boxes", "rest", "scalars", "shape")

    def __init__(self, preds: tuple[Pred, ...], shape: tuple[int, ...], layout: Layout) -> None:
        self.shape = shape
        self.scalars: list[Any] = []
        self.boxes: list[tuple[Any, int, int]] = []
        self.rest: list[tuple[Any, tuple[int, ...]]] = []
        for p in preds:
            base = compile_affine(p.expr, layout)
            # a stride along a dimension of one element never moves
            strides = tuple(s if n > 1 else 0 for s, n in zip(p.strides or (0,) * len(shape), shape, strict=True))
            moving = [j for j, s in enumerate(strides) if s]
            if not moving:
                self.scalars.append(base)
            elif len(moving) == 1:
                self.boxes.append((base, moving[0], strides[moving[0]]))
            else:
                self.rest.append((base, strides))

    def box(self, env: Env) -> Box | None:
        """The part of the iteration space that the mask can be true in; None when it is empty."""
        for base in self.scalars:
            if value_of(base, env) < 0:
                return None
        lo, hi = [0] * len(self.shape), list(self.shape)
        for base, axis, stride in self.boxes:
            value = value_of(base, env)
            if stride > 0:
                lo[axis] = max(lo[axis], -(value // stride))
            else:
                hi[axis] = min(hi[axis], value // -stride + 1)
        if any(a >= b for a, b in zip(lo, hi, strict=True)):
            return None
        return tuple(lo), tuple(hi)

    def where(self, env: Env, lo: tuple[int, ...], hi: tuple[int, ...]) -> np.ndarray | None:
        """Truth values over a box, None when all are true."""
        truth: np.ndarray | None = None
        for base, strides in self.rest:
            value = truth_of(value_of(base, env), strides, lo, hi)
            truth = value if truth is None else truth & value
        return None if truth is None or truth.all() else truth


def truth_of(base: int, strides: tuple[int, ...], lo: tuple[int, ...], hi: tuple[int, ...]) -> np.ndarray:
    """base + sum(strides * iota) >= 0 over a box (read-only: it may be a broadcast view)."""
    shape = tuple(b - a for a, b in zip(lo, hi, strict=True))
    least = base + sum(min(s * a, s * (b - 1)) for s, a, b in zip(strides, lo, hi, strict=True))
    most = base + sum(max(s * a, s * (b - 1)) for s, a, b in zip(strides, lo, hi, strict=True))
    if least >= 0 or most < 0 or 0 in shape:
        return np.full(shape, least >= 0)
    # the innermost moving dimension against the sum of the others: no array of index values is made
    axis = max(j for j, s in enumerate(strides) if s and shape[j] > 1)
    others = tuple(0 if j == axis else s for j, s in enumerate(strides))
    ends = tuple(a + 1 if j == axis or not s else b for j, (s, a, b) in enumerate(zip(others, lo, hi, strict=True)))
    kind = np.int32 if least > -2**31 and most < 2**31 else np.int64
    rest = (-index_values(base, others, lo, ends)).astype(kind)
    row = (strides[axis] * np.arange(lo[axis], hi[axis], dtype=np.int64)).astype(kind)
    truth = np.greater_equal(row.reshape([-1 if k == axis else 1 for k in range(len(shape))]), rest)
    return np.broadcast_to(truth, shape)


def index_values(base: int, strides: tuple[int, ...], lo: tuple[int, ...], hi: tuple[int, ...]) -> np.ndarray:
    """base + sum(strides * iota) over a box, int64."""
    rank = len(lo)
    total = np.full(tuple(b - a for a, b in zip(lo, hi, strict=True)), base, np.int64)
    for j, s in enumerate(strides):
        if s:
            total += (s * np.arange(lo[j], hi[j], dtype=np.int64)).reshape([-1 if k == j else 1 for k in range(rank)])
    return total


def clip(lo: tuple[int, ...], hi: tuple[int, ...], shape: tuple[int, ...], iteration: tuple[int, ...],
         dims: tuple[int | None, ...] | None) -> Box:
    """The part of an operand that belongs to a box of the iteration space. `dims` maps its dimensions (None: not narrowed)."""
    low, high = [], []
    for j, n in enumerate(shape):
        k = j if dims is None else (dims[j] if j < len(dims) else None)
        if k is None or k >= len(iteration) or n != iteration[k] or (n == 1 and dims is None):
            low.append(0)
            high.append(n)
        else:
            low.append(lo[k])
            high.append(hi[k])
    return tuple(low), tuple(high)
