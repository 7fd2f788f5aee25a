"""Affine expressions compiled for the event loop: numbers and slots of an environment instead of atoms and dictionaries."""
from __future__ import annotations

from typing import Any

from opennki.ir.affine import Affine, FloorDiv, Pred, Var

Terms = tuple[int, tuple[tuple[int, int], ...], tuple[Any, ...]]  # const, (slot, coefficient)..., (coefficient, terms, divisor)...


class Slots:
    """Numbers of the variables in the environment."""

    def __init__(self) -> None:
        self.of: dict[Var, int] = {}

    def slot(self, var: Var) -> int:
        """The number of a variable, a new one where it has none."""
        return self.of.setdefault(var, len(self.of))

    def compile(self, expr: Affine) -> Terms:
        """The compiled form of an expression."""
        plain, divided = [], []
        for atom, coefficient in expr.terms:
            if isinstance(atom, FloorDiv):
                divided.append((coefficient, self.compile(atom.of), atom.by))
            else:
                plain.append((self.slot(atom), coefficient))
        return expr.const, tuple(plain), tuple(divided)


def value(terms: Terms, env: Any) -> Any:
    """Value in an environment, of numbers or of NumPy arrays."""
    total: Any = terms[0]
    for slot, coefficient in terms[1]:
        total = total + coefficient * env[slot]
    for coefficient, inner, by in terms[2]:
        total = total + coefficient * (value(inner, env) // by)
    return total


def slots_of(terms: Terms) -> set[int]:
    """Slots that an expression depends on."""
    out = {slot for slot, _ in terms[1]}
    for _, inner, _ in terms[2]:
        out |= slots_of(inner)
    return out


class Clip:
    """The part of an iteration space that a mask leaves, as the number of elements along each dimension. Predicates over several
    dimensions at once (a diagonal) narrow nothing: an engine streams the whole tile."""

    __slots__ = ("boxes", "scalars", "shape")

    def __init__(self, preds: tuple[Pred, ...], shape: tuple[int, ...], slots: Slots) -> None:
        self.shape = shape
        self.scalars: list[Terms] = []
        self.boxes: list[tuple[Terms, int, int]] = []
        for pred in preds:
            moving = [(j, s) for j, s in enumerate(pred.strides) if s and shape[j] > 1]
            least = pred.expr.range({})[0] + sum(min(0, s * (shape[j] - 1)) for j, s in moving)
            if least >= 0:
                continue
            base = slots.compile(pred.expr)
            if not moving:
                self.scalars.append(base)
            elif len(moving) == 1:
                self.boxes.append((base, moving[0][0], moving[0][1]))

    @property
    def narrows(self) -> bool:
        """False where the mask is always true."""
        return bool(self.scalars or self.boxes)

    def sizes(self, env: Any) -> tuple[int, ...] | None:
        """Elements along each dimension; None when nothing is left."""
        for base in self.scalars:
            if value(base, env) < 0:
                return None
        lo, hi = [0] * len(self.shape), list(self.shape)
        for base, axis, stride in self.boxes:
            at = value(base, env)
            if stride > 0:
                lo[axis] = max(lo[axis], -(at // stride))
            else:
                hi[axis] = min(hi[axis], at // -stride + 1)
        if any(a >= b for a, b in zip(lo, hi, strict=True)):
            return None
        return tuple(b - a for a, b in zip(lo, hi, strict=True))

    def expressions(self) -> list[tuple[Terms, int, int]]:
        """(expression, stride or 0, size) of all that the result depends on."""
        return [(b, 0, 0) for b in self.scalars] + [(b, s, self.shape[a]) for b, a, s in self.boxes]
