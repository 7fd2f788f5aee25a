"""Index arithmetic: affine expressions of loop indices and program ids, with intervals.

`Affine` = const + sum(coefficient * atom). An atom is a `Var` (a loop index counted from 0, or a program id) or a
`FloorDiv` of an affine expression by a constant, so that `i // 2` and `i % 2` stay exact without unrolling.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import gcd, inf

Range = tuple[int, int]


class Var:
    """A loop index or program id: takes every integer of [lo, hi]."""

    __slots__ = ("hi", "kind", "lo", "name", "site")

    def __init__(self, name: str, lo: int, hi: int, kind: str = "loop", site: object = None) -> None:
        self.name, self.lo, self.hi, self.kind, self.site = name, lo, hi, kind, site

    @property
    def key(self) -> str:
        """Text that identifies and sorts the atom."""
        return self.name

    def range(self, ranges: Mapping[Var, Range]) -> Range:
        """Interval of the values on the current path."""
        return ranges.get(self) or (self.lo, self.hi)

    def evaluate(self, env: Mapping[Var, int]) -> int:
        """Value under an assignment of the variables."""
        return env[self]

    def variables(self) -> tuple[Var, ...]:
        """The variables inside."""
        return (self,)

    def __repr__(self) -> str:
        return self.name


class FloorDiv:
    """floor(of / by) for a positive constant `by`."""

    __slots__ = ("_key", "by", "of")

    def __init__(self, of: Affine, by: int) -> None:
        self.of, self.by = of, by
        self._key = f"(({of}) // {by})"

    @property
    def key(self) -> str:
        """Text that identifies and sorts the atom."""
        return self._key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FloorDiv) and other._key == self._key

    def __hash__(self) -> int:
        return hash(self._key)

    def range(self, ranges: Mapping[Var, Range]) -> Range:
        """Interval of the values on the current path."""
        lo, hi = self.of.range(ranges)
        return lo // self.by, hi // self.by

    def evaluate(self, env: Mapping[Var, int]) -> int:
        """Value under an assignment of the variables."""
        return self.of.evaluate(env) // self.by

    def variables(self) -> tuple[Var, ...]:
        """The variables inside."""
        return self.of.variables()

    def __repr__(self) -> str:
        return self._key


Atom = Var | FloorDiv


class Affine:
    """const + sum(coefficient * atom), immutable; terms are sorted by atom and have non-zero coefficients."""

    __slots__ = ("const", "terms")

    def __init__(self, const: int = 0, terms: tuple[tuple[Atom, int], ...] = ()) -> None:
        self.const, self.terms = const, terms

    @property
    def is_const(self) -> bool:
        """True when no variable is left."""
        return not self.terms

    def add(self, other: Affine | int, sign: int = 1) -> Affine:
        """self + sign * other."""
        if isinstance(other, int):
            return self if other == 0 else Affine(self.const + sign * other, self.terms)
        if not other.terms:
            return Affine(self.const + sign * other.const, self.terms)
        if not self.terms:
            terms = other.terms if sign == 1 else tuple((a, sign * c) for a, c in other.terms)
            return Affine(self.const + sign * other.const, terms)
        merged: dict[Atom, int] = dict(self.terms)
        for atom, coefficient in other.terms:
            merged[atom] = merged.get(atom, 0) + sign * coefficient
        terms = tuple(sorted(((a, c) for a, c in merged.items() if c), key=_by_atom))
        return Affine(self.const + sign * other.const, terms)

    def scale(self, factor: int) -> Affine:
        """factor * self."""
        if factor == 1:
            return self
        if factor == 0:
            return ZERO
        return Affine(self.const * factor, tuple((a, c * factor) for a, c in self.terms))

    def floordiv(self, by: int, ranges: Mapping[Var, Range] | None = None) -> Affine:
        """floor(self / by), by > 0; terms that `by` divides leave the quotient exactly."""
        if by == 1:
            return self
        whole = tuple((a, c // by) for a, c in self.terms if c % by == 0)
        rest = Affine(self.const % by, tuple((a, c) for a, c in self.terms if c % by))
        quotient = Affine(self.const // by, whole)
        lo, hi = rest.range(ranges or {})
        if lo // by == hi // by:
            return quotient.add(int(lo // by))
        return quotient.add(Affine(0, ((FloorDiv(rest, by), 1),)))

    def range(self, ranges: Mapping[Var, Range]) -> Range:
        """Interval of the values, each variable within `ranges` or its own bounds."""
        lo = hi = self.const
        tighter: list[tuple[float, float]] = []
        for atom, coefficient in self.terms:
            a, b = atom.range(ranges)
            if coefficient > 0:
                lo, hi = lo + coefficient * a, hi + coefficient * b
            else:
                lo, hi = lo + coefficient * b, hi + coefficient * a
            if isinstance(atom, FloorDiv) and coefficient % atom.by == 0:
                low, high = self._remainder_range(atom, coefficient, ranges)
                tighter.append((low, high))
        for low, high in tighter:
            lo, hi = int(max(lo, low)), int(min(hi, high))
        return lo, hi

    def _remainder_range(self, atom: FloorDiv, coefficient: int, ranges: Mapping[Var, Range]) -> tuple[float, float]:
        """Interval with `of - by * (of // by)`, the remainder, taken as one term: x and x // 4 are not independent in x % 4."""
        factor = -(coefficient // atom.by)
        rest = self.add(Affine(0, ((atom, coefficient),)), -1).add(atom.of.scale(factor), -1)
        if len(rest.terms) >= len(self.terms):
            return UNBOUNDED
        a, b = atom.of.range(ranges)
        low, high = (a % atom.by, b % atom.by) if a // atom.by == b // atom.by else (0, atom.by - 1)
        first, last = rest.range(ranges)
        return first + min(factor * low, factor * high), last + max(factor * low, factor * high)

    def evaluate(self, env: Mapping[Var, int]) -> int:
        """Value under an assignment of the variables."""
        value = self.const
        for atom, coefficient in self.terms:
            value += coefficient * atom.evaluate(env)
        return value

    def variables(self) -> tuple[Var, ...]:
        """The variables inside, without repeats."""
        if not self.terms:
            return ()
        return tuple(dict.fromkeys(v for atom, _ in self.terms for v in atom.variables()))

    def coefficient(self, var: Var) -> int:
        """Coefficient of a variable as a plain term."""
        return next((c for a, c in self.terms if a is var), 0)

    def key(self) -> tuple[object, ...]:
        """Hashable identity."""
        return (self.const, *((a.key, c) for a, c in self.terms))

    def __str__(self) -> str:
        parts = [f"{c}*{a}" if c != 1 else f"{a}" for a, c in self.terms]
        if self.const or not parts:
            parts.append(str(self.const))
        return " + ".join(parts)

    __repr__ = __str__


def _by_atom(term: tuple[Atom, int]) -> str:
    return term[0].key


ZERO = Affine()


def constant(value: int) -> Affine:
    """The affine expression of a number."""
    return Affine(int(value))


def variable(var: Var) -> Affine:
    """The affine expression of one variable."""
    return Affine(0, ((var, 1),))


class Pred:
    """expr + sum(strides[j] * iota_j) >= 0, where iota_j counts along dimension j of an instruction's tile.

    A predicate without strides is a condition of control flow: it holds for a whole program point.
    """

    __slots__ = ("expr", "strides")

    def __init__(self, expr: Affine, strides: tuple[int, ...] = ()) -> None:
        self.expr, self.strides = expr, strides

    def negated(self) -> Pred:
        """The opposite condition (on integers: not e >= 0 is -1 - e >= 0)."""
        return Pred(Affine(-1).add(self.expr, -1), tuple(-s for s in self.strides))

    def key(self) -> tuple[object, ...]:
        """Hashable identity."""
        return (self.expr.key(), self.strides)

    def __str__(self) -> str:
        iotas = [f"{s}*d{j}" if s != 1 else f"d{j}" for j, s in enumerate(self.strides) if s]
        text = " + ".join(iotas + ([str(self.expr)] if self.expr.terms or self.expr.const or not iotas else []))
        return f"{text} >= 0"

    __repr__ = __str__


def narrowed(ranges: Mapping[Var, Range], pred: Pred) -> dict[Var, Range] | None:
    """Ranges after a scalar predicate is known to hold; None when it cannot hold.

    Each variable is bounded by the extremes of the other terms, so predicates of several variables narrow too.
    """
    out = dict(ranges)
    expr = pred.expr
    if expr.range(out)[1] < 0:
        return None
    for atom, coefficient in expr.terms:
        if not isinstance(atom, Var):
            continue
        lo, hi = out.get(atom) or (atom.lo, atom.hi)
        others = Affine(expr.const, tuple((a, c) for a, c in expr.terms if a is not atom)).range(out)[1]
        if coefficient > 0:
            lo = max(lo, -(others // coefficient))
        else:
            hi = min(hi, others // -coefficient)
        if lo > hi:
            return None
        out[atom] = (lo, hi)
    return out


def implied(expr: Affine, facts: Iterable[Affine], ranges: Mapping[Var, Range]) -> bool:
    """True when `expr >= 0` follows from the ranges, or from them and `fact >= 0` for one of the facts."""
    if expr.range(ranges)[0] >= 0:
        return True
    expr = _reduced(expr)
    return any(expr.add(_reduced(fact), -1).range(ranges)[0] >= 0 for fact in facts)


def _reduced(expr: Affine) -> Affine:
    """The smallest expression that is >= 0 where this one is: 128*i + 127 >= 0 is i >= 0, on integers."""
    factor = gcd(*(c for _, c in expr.terms))
    return Affine(expr.const // factor, tuple((a, c // factor) for a, c in expr.terms)) if factor > 1 else expr


UNBOUNDED: tuple[float, float] = (-inf, inf)
