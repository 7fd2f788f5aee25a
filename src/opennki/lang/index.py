"""Index expressions and the masks made from them (see `lang.ranges` for `nl.arange`, `nl.mgrid` and `nl.ds`).

An `Index` is base + sum(strides[j] * iota_j) over a shape; base is affine in loop indices and program ids. It needs no kernel, so
indices may be built outside of one. Source: api_legacy section 1 "Indexing", "Masks".
"""
from __future__ import annotations

import operator
import sys
from collections.abc import Iterator
from typing import Any

from opennki.errors import NkiTypeError, NkiValueError, make
from opennki.ir.affine import Affine, Pred, constant
from opennki.ir.build import current, maybe_current
from opennki.lang.bytecode import instructions, positions


def broadcast_shapes(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """NumPy's broadcast of shapes; raises ValueError."""
    rank = max(map(len, shapes), default=0)
    out = [1] * rank
    for shape in shapes:
        for i, n in enumerate(shape, rank - len(shape)):
            if n != 1:
                if out[i] not in (1, n):
                    raise ValueError(f"shapes {', '.join(map(str, shapes))} do not broadcast together")
                out[i] = n
    return tuple(out)


def _aligned(strides: tuple[int, ...], rank: int) -> tuple[int, ...]:
    return (0,) * (rank - len(strides)) + strides


class Index:
    """An index expression; shape () for a loop index or program id."""

    __slots__ = ("base", "shape", "strides")
    __array_ufunc__ = None  # NumPy scalars on the left defer to us

    def __init__(self, base: Affine, strides: tuple[int, ...] = (), shape: tuple[int, ...] = ()) -> None:
        self.base, self.strides, self.shape = base, strides, shape

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    # ---- arithmetic ---------------------------------------------------------------------------------------------------------
    def _plus(self, other: Any, sign: int) -> Any:
        if isinstance(other, Index):
            if not other.shape:
                return Index(self.base.add(other.base, sign), self.strides, self.shape)
            if not self.shape:
                strides = other.strides if sign == 1 else tuple(-s for s in other.strides)
                return Index(self.base.add(other.base, sign), strides, other.shape)
            shape = broadcast_shapes(self.shape, other.shape)
            rank = len(shape)
            a, b = _aligned(self.strides, rank), _aligned(other.strides, rank)
            return Index(self.base.add(other.base, sign), tuple(x + sign * y for x, y in zip(a, b, strict=True)), shape)
        number = _integer(other)
        if number is None:
            return self._as_number(other, operator.add if sign == 1 else operator.sub)
        return Index(self.base.add(number, sign), self.strides, self.shape)

    def __add__(self, other: Any) -> Any:
        return self._plus(other, 1)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self._plus(other, -1)

    def __rsub__(self, other: Any) -> Any:
        return (-self)._plus(other, 1)

    def __neg__(self) -> Index:
        return self * -1

    def __pos__(self) -> Index:
        return self

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, Index):
            if not other.shape and other.base.is_const:
                other = other.base.const
            elif not self.shape and self.base.is_const:
                return other * self.base.const
            elif not other.shape:
                other = current().concrete(other.base)
            elif not self.shape:
                return other * current().concrete(self.base)
            else:
                raise NkiTypeError("two nl.arange expressions cannot be multiplied",
                                   rule="an index is affine: constants times nl.arange, loop indices and program ids",
                                   fix="index a flattened view of the tensor, or make the values with nisa.iota")
        number = _integer(other)
        if number is None:
            return self._as_number(other, operator.mul)
        return Index(self.base.scale(number), tuple(s * number for s in self.strides), self.shape)

    __rmul__ = __mul__

    def _divisor(self, other: Any, symbol: str) -> int:
        if isinstance(other, Index):
            other = operator.index(other)
        number = _integer(other)
        if number is None or number <= 0:
            raise NkiTypeError(f"an index {symbol} {other!r}",
                               rule=f"the right side of {symbol} on an index is a positive integer constant")
        if any(s % number for s in self.strides):
            raise NkiTypeError(f"an nl.arange expression {symbol} {number} is not affine",
                               rule="an index is affine: constants times nl.arange, loop indices and program ids",
                               fix="reshape the tensor so that the two parts are dimensions of their own")
        return number

    def __floordiv__(self, other: Any) -> Any:
        by = self._divisor(other, "//")
        builder = maybe_current()
        base = self.base.floordiv(by, builder.ranges if builder else None)
        return Index(base, tuple(s // by for s in self.strides), self.shape)

    def __mod__(self, other: Any) -> Any:
        by = self._divisor(other, "%")
        builder = maybe_current()
        quotient = self.base.floordiv(by, builder.ranges if builder else None)
        return Index(self.base.add(quotient.scale(by), -1), (0,) * len(self.strides), self.shape)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def _as_number(self, other: Any, op: Any) -> Any:
        """Arithmetic with something that is no integer: only a scalar index has a number."""
        if isinstance(other, (float, complex)) or hasattr(other, "__float__"):
            return op(operator.index(self), other)
        return NotImplemented

    def __truediv__(self, other: Any) -> Any:
        return operator.index(self) / other

    def __rtruediv__(self, other: Any) -> Any:
        return other / operator.index(self)

    def __rfloordiv__(self, other: Any) -> Any:
        return other // operator.index(self)

    def __rmod__(self, other: Any) -> Any:
        return other % operator.index(self)

    def __pow__(self, other: Any) -> Any:
        return operator.index(self) ** other

    def __rpow__(self, other: Any) -> Any:
        return other ** operator.index(self)

    # ---- comparisons ----------------------------------------------------------------------------------------------------------
    def _compare(self, other: Any, make_preds: Any) -> Any:
        if isinstance(other, Mask) or other is None or isinstance(other, str):
            return NotImplemented
        difference = self._plus(other, -1) if isinstance(other, Index) or _integer(other) is not None else None
        if difference is None:
            if hasattr(other, "access"):
                raise make("err_unsupported_expression_in_mask", "a mask compares an index with the values of a tensor")
            if isinstance(other, float) or hasattr(other, "__float__"):
                return make_preds.number(operator.index(self), other)
            return NotImplemented
        return make_preds(difference)

    def __ge__(self, other: Any) -> Any:
        return self._compare(other, _GE)

    def __gt__(self, other: Any) -> Any:
        return self._compare(other, _GT)

    def __le__(self, other: Any) -> Any:
        return self._compare(other, _LE)

    def __lt__(self, other: Any) -> Any:
        return self._compare(other, _LT)

    def __eq__(self, other: Any) -> Any:
        return self._compare(other, _EQ)

    def __ne__(self, other: Any) -> Any:
        return self._compare(other, _NE)

    # ---- numbers ------------------------------------------------------------------------------------------------------------
    def __index__(self) -> int:
        if self.shape:
            raise NkiTypeError("an nl.arange expression is not a number", rule="it stands for all elements of a tile at once",
                               fix="use a loop index or a constant")
        return self.base.const if self.base.is_const else current().concrete(self.base)

    __int__ = __index__

    def __float__(self) -> float:
        return float(operator.index(self))

    def __hash__(self) -> int:
        return hash(operator.index(self))

    def __bool__(self) -> bool:
        if self.shape:
            raise make("err_control_flow_condition_depending_on_arange", "the truth of an nl.arange expression")
        return bool(self != 0)

    # ---- shape ----------------------------------------------------------------------------------------------------------------
    def __getitem__(self, key: Any) -> Index:
        keys = key if isinstance(key, tuple) else (key,)
        strides: list[int] = []
        shape: list[int] = []
        base, axis = self.base, 0
        for k in keys:
            if k is None:
                strides.append(0)
                shape.append(1)
                continue
            if k is Ellipsis:
                count = len(self.shape) - axis - sum(1 for x in keys if x is not None and x is not Ellipsis) + axis
                for _ in range(count):
                    strides.append(self.strides[axis])
                    shape.append(self.shape[axis])
                    axis += 1
                continue
            if axis >= len(self.shape):
                raise NkiValueError(f"an index of {len(self.shape)} dimensions is indexed with more", rule="t[:, None] adds one")
            n, s = self.shape[axis], self.strides[axis]
            if isinstance(k, slice):
                start, stop, step = k.indices(n)
                base = base.add(start * s)
                strides.append(s * step)
                shape.append(len(range(start, stop, step)))
            else:
                base = base.add(range(n)[operator.index(k)] * s)
            axis += 1
        strides += self.strides[axis:]
        shape += self.shape[axis:]
        return Index(base, tuple(s if n > 1 else 0 for s, n in zip(strides, shape, strict=True)), tuple(shape))

    def reshape(self, *shape: Any) -> Index:
        """The expression with dimensions of size one added or removed."""
        dims = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else tuple(shape)
        kept = [(s, n) for s, n in zip(self.strides, self.shape, strict=True) if n != 1]
        if [n for n in dims if n != 1] != [n for _, n in kept]:
            raise NkiValueError(f"an index of shape {self.shape} is reshaped to {dims}", rule="only dimensions of size 1 come and go")
        source = iter(kept)
        return Index(self.base, tuple(0 if n == 1 else next(source)[0] for n in dims), dims)

    def __iter__(self) -> Iterator[Any]:
        raise NkiTypeError("an index expression is iterated over", rule="it stands for all elements at once",
                           fix="loop over nl.affine_range or range")

    def __setitem__(self, key: Any, value: Any) -> None:
        raise make("err_cannot_assign_to_index", "assignment to an element of an index expression")

    def __repr__(self) -> str:
        parts = [f"{s}*d{j}" for j, s in enumerate(self.strides) if s]
        return " + ".join([*parts, str(self.base)]) if self.base.terms or self.base.const or not parts else " + ".join(parts)


def _integer(value: Any) -> int | None:
    """The value of an integer (bool, int, NumPy integer or integral 0-d array), else None."""
    if isinstance(value, int):
        return int(value)
    if isinstance(value, (float, Index, str)) or value is None or hasattr(value, "access"):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


class _Comparison:
    def __init__(self, preds: Any, number: Any, negate: bool = False) -> None:
        self.preds, self.number, self.negate = preds, number, negate

    def __call__(self, difference: Index) -> Any:
        preds = tuple(Pred(expr, strides) for expr, strides in self.preds(difference))
        if not difference.shape:
            if all(p.expr.is_const for p in preds):
                truth = all(p.expr.const >= 0 for p in preds)
                return truth != self.negate
            return Condition(preds, self.negate)
        if self.negate:
            raise make("err_unsupported_expression_in_mask", "!= between index expressions in a mask",
                       fix="use two instructions, one with < and one with >, or nl.where")
        return _joined(Mask(preds, difference.shape))


def _ge(d: Index) -> list[tuple[Affine, tuple[int, ...]]]:
    return [(d.base, d.strides)]


def _le(d: Index) -> list[tuple[Affine, tuple[int, ...]]]:
    return [(d.base.scale(-1), tuple(-s for s in d.strides))]


_GE = _Comparison(_ge, operator.ge)
_GT = _Comparison(lambda d: [(d.base.add(-1), d.strides)], operator.gt)
_LE = _Comparison(_le, operator.le)
_LT = _Comparison(lambda d: [(constant(-1).add(d.base, -1), tuple(-s for s in d.strides))], operator.lt)
_EQ = _Comparison(lambda d: _ge(d) + _le(d), operator.eq)
_NE = _Comparison(lambda d: _ge(d) + _le(d), operator.ne, negate=True)


class Mask:
    """A conjunction of comparisons over a tile."""

    __slots__ = ("preds", "shape")

    def __init__(self, preds: tuple[Pred, ...], shape: tuple[int, ...]) -> None:
        self.preds, self.shape = preds, shape

    def __and__(self, other: Any) -> Any:
        if isinstance(other, (bool, int)) or type(other).__name__ == "bool":
            return self if other else Mask((Pred(constant(-1), (0,) * len(self.shape)),), self.shape)
        if isinstance(other, Condition):
            preds = other.as_preds()
            if preds is None:
                return self & bool(other)
            return Mask(self.preds + tuple(Pred(p.expr, (0,) * len(self.shape)) for p in preds), self.shape)
        if not isinstance(other, Mask):
            raise make("err_unsupported_expression_in_mask", f"a mask joined by & with {type(other).__name__}")
        shape = broadcast_shapes(self.shape, other.shape)
        rank = len(shape)
        return Mask(tuple(Pred(p.expr, _aligned(p.strides, rank)) for p in self.preds + other.preds), shape)

    __rand__ = __and__

    def __or__(self, other: Any) -> Any:
        raise make("err_unsupported_expression_in_mask", "masks joined by |", fix="use two instructions, or nl.where")

    __ror__ = __or__
    __xor__ = __rxor__ = __or__

    def __invert__(self) -> Any:
        if len(self.preds) != 1:
            raise make("err_unsupported_expression_in_mask", "~ of a mask of several comparisons")
        return Mask((self.preds[0].negated(),), self.shape)

    def __bool__(self) -> bool:
        frame = sys._getframe(1)
        end = _value_of_and(frame)
        if end is None:
            raise make("err_control_flow_condition_depending_on_arange", "the truth of a comparison of nl.arange or nl.mgrid values")
        # `a and b` as a value: Python drops a and keeps b, so b is joined with a where it is made (see _joined)
        _pending.append((frame.f_code, frame.f_lasti, end, self))
        return True

    def __setitem__(self, key: Any, value: Any) -> None:
        raise make("err_cannot_assign_to_index", "assignment to an element of a mask")

    def __iter__(self) -> Iterator[Any]:
        raise NkiTypeError("a mask is iterated over", rule="it stands for all elements of a tile at once")

    def __repr__(self) -> str:
        return " & ".join(f"({p})" for p in self.preds)


_pending: list[tuple[Any, int, int, Mask]] = []


def _value_of_and(frame: Any) -> int | None:
    """End offset of the right operand if the truth is asked by `and` in a value context, else None."""
    found, position = instructions(frame.f_code), positions(frame.f_code).get(frame.f_lasti)
    if position is None:
        return None
    if found[position].opname == "JUMP_IF_FALSE_OR_POP":
        return int(found[position].argval)
    # 3.12 and later: COPY, [TO_BOOL,] POP_JUMP_IF_FALSE, POP_TOP
    jump = found[position + 1] if found[position].opname == "TO_BOOL" and position + 1 < len(found) else found[position]
    if jump.opname.startswith("POP_JUMP_IF_FALSE") and position and found[position - 1].opname == "COPY":
        return int(jump.argval)
    return None


def _joined(mask: Mask) -> Mask:
    """Join a new mask with the left operands of the `and` expressions that it stands in."""
    if not _pending:
        return mask
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back  # type: ignore[assignment]
    kept = []
    for entry in _pending:
        code, start, end, left = entry
        if frame is not None and frame.f_code is code and start < frame.f_lasti < end:
            mask = left & mask
            kept.append(entry)
    _pending[:] = kept
    return mask


class Condition:
    """A condition on loop indices and program ids alone: usable in `if` and as a mask of whole instructions."""

    __slots__ = ("negate", "preds")

    def __init__(self, preds: tuple[Pred, ...], negate: bool = False) -> None:
        self.preds, self.negate = preds, negate

    def as_preds(self) -> tuple[Pred, ...] | None:
        """The conjunction of predicates, None if it is none."""
        if not self.negate:
            return self.preds
        return (self.preds[0].negated(),) if len(self.preds) == 1 else None

    def __bool__(self) -> bool:
        builder = current()
        return all(builder.decide(p) for p in self.preds) != self.negate

    def __and__(self, other: Any) -> Any:
        if isinstance(other, Mask):
            return other & self
        if isinstance(other, Condition):
            a, b = self.as_preds(), other.as_preds()
            return Condition(a + b) if a is not None and b is not None else bool(self) and bool(other)
        if isinstance(other, (bool, int)) or type(other).__name__ == "bool":
            return self if other else False
        return NotImplemented

    __rand__ = __and__

    def __or__(self, other: Any) -> Any:
        return bool(self) or bool(other)

    __ror__ = __or__

    def __xor__(self, other: Any) -> Any:
        return bool(self) != bool(other)

    def __invert__(self) -> Condition:
        return Condition(self.preds, not self.negate)

    def __eq__(self, other: Any) -> Any:
        return bool(self) == bool(other)

    def __hash__(self) -> int:
        return hash(bool(self))

    def __int__(self) -> int:
        return int(bool(self))

    __index__ = __int__

    def __repr__(self) -> str:
        text = " and ".join(str(p) for p in self.preds)
        return f"not ({text})" if self.negate else text
