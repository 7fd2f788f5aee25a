"""The forms of values that have native kernels of their own, and the module that stands in the place of NumPy while a body is recorded.

The functions of `isa/` that are replaced here are those with a native counterpart: folds, scans, searches, gathers, random numbers.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np

from opennki.execute.record import (
    BOOL,
    FLOAT,
    INT64,
    Constant,
    Sym,
    call,
    const,
    late,
    loaded,
    number,
    reshaped,
    scalar_function,
    seen,
    tile,
    widened,
)
from opennki.execute.shapes import Unsupported, broadcast
from opennki.isa import gpsimd_engine, known, language_ops, reduce, tensor_engine, vector_rules, vector_topk
from opennki.isa.bodies import Translator
from opennki.isa.scalar import SCALAR, resolve

UFUNCS = {
    getattr(np, ufunc): name
    for ufunc, name in {
        "add": "add", "subtract": "subtract", "multiply": "multiply", "divide": "divide", "maximum": "maximum", "minimum": "minimum",
        "negative": "negative", "absolute": "abs", "sqrt": "sqrt", "exp": "exp", "log": "log", "square": "square",
        "reciprocal": "reciprocal",
        "equal": "equal", "not_equal": "not_equal", "greater": "greater", "greater_equal": "greater_equal", "less": "less",
        "less_equal": "less_equal", "power": "power", "tanh": "tanh", "sin": "sin", "cos": "cos", "floor": "floor", "ceil": "ceil",
        "trunc": "trunc", "logical_and": "logical_and", "logical_or": "logical_or", "logical_not": "logical_not",
    }.items()
}  # fmt: skip
_LOGICAL = {"bitwise_and": "logical_and", "bitwise_or": "logical_or", "bitwise_xor": "logical_xor", "invert": "logical_not"}


# ---- selections and folds ------------------------------------------------------------------------------------------


def select(condition: Any, a: Any, b: Any) -> Sym:
    """np.where."""
    c, x, y = const(condition), const(a), const(b)
    c = c if c.dtype == BOOL or c.kind == "const" else call("not_equal", c, 0)
    shape = broadcast(c.shape, x.shape, y.shape)
    kinds = {v.dtype for v in (x, y) if v.raw}
    wide = any(v.kind in ("wide", "exact") for v in (x, y))
    if not kinds and not wide:
        return Sym("select", shape, x.dtype if x.kind != "const" else y.dtype, (c, x, y))
    if len(kinds) == 1:
        (kind,) = kinds
        x, y = (_as_bits(v, kind) for v in (x, y))
        if x.raw and y.raw:
            return Sym("select", shape, kind, (c, x, y), raw=True)
        if kind == FLOAT:
            return select(c, number(x), number(y))
    if not kinds and any(v.dtype == FLOAT and v.kind != "const" and v.kind not in ("wide", "exact", "index") for v in (x, y)):
        return select(c, *(v.astype(np.float32) if v.kind in ("wide", "exact") else v for v in (x, y)))
    return Sym("wide", shape, INT64, (widened(x), widened(y), widened(c) if c.dtype == BOOL else c), "select")


def _as_bits(value: Sym, kind: np.dtype[Any]) -> Sym:
    """A value as bits of a dtype, where it fits."""
    if value.raw:
        return value
    whole = value.more.get("int")
    if value.kind == "const" and whole is not None and kind.kind in "iu" and np.iinfo(kind).min <= whole <= np.iinfo(kind).max:
        return Sym("const", value.shape, kind, value=value.value, raw=True, more={"bits": whole, "int": whole})
    if kind.kind not in "iu" and value.kind in ("wide", "index"):
        return Sym("cast", value.shape, kind, (value,), raw=True)
    if value.kind == "const" and kind == FLOAT:
        return Sym("const", value.shape, kind, value=value.value, raw=True)
    return value


def fold(x: Any, op: Any, axes: Any, keepdims: bool = False) -> Sym:
    """reduce_free: a fold over free axes."""
    x, name = const(x), resolve(op)
    reduced = tuple(sorted({int(a) % x.ndim for a in ((axes,) if isinstance(axes, (int, np.integer)) else axes)}))
    bits = SCALAR[name].group == "bitvec"
    x = x if bits else number(x)
    if 0 in reduced or not reduced or x.raw != bits or x.kind == "wide":
        raise Unsupported("a fold of this kind")
    full = tuple(1 if i in reduced else n for i, n in enumerate(x.shape))
    made = Sym("fold", full, x.dtype if bits else FLOAT, (x,), name, raw=bits, more={"axes": reduced})
    return made if keepdims else reshaped(made, tuple(n for i, n in enumerate(x.shape) if i not in reduced))


# ---- values with kernels of their own --------------------------------------------------------------------------------


def bits_or_truth(name: str, *args: Any) -> Sym:
    """A bitwise operator: on truths it is a logical one."""
    values = [const(a) for a in args]
    return call(_LOGICAL[name] if all(v.dtype == BOOL for v in values) else name, *values)


def _numbers(value: Any) -> Sym:
    made = number(const(value))
    if made.kind in ("wide", "exact"):
        raise Unsupported("64-bit integers where numbers are wanted")
    return made


def partition_fold(x: Any, op: Any) -> Sym:
    """reduce_partition: a fold over the partitions."""
    x, name = const(x), resolve(op)
    bits = SCALAR[name].group == "bitvec"
    x = x if bits else _numbers(x)
    if x.raw != bits:
        raise Unsupported("a fold of this kind")
    return Sym("pfold", (1, *x.shape[1:]), x.dtype if bits else FLOAT, (x,), name, raw=bits)


def scan(data0: Any, data1: Any, initial: Any, op0: Any, op1: Any, reverse0: bool = False, reverse1: bool = False) -> Sym:
    """scan_free."""
    values = tuple(_numbers(v) for v in (data0, data1, initial))
    return Sym("scan", values[0].shape, FLOAT, values, more={"ops": (resolve(op0), resolve(op1)), "reverse": (reverse0, reverse1)})


def running(step: Callable[..., Any], state: Any, *rows: Any) -> tuple[Sym, Sym]:
    """reduce.running: a program that goes over the columns, one after the other."""
    values = [_numbers(state), *(_numbers(r) for r in rows)]
    slots = [Sym("slot", (values[1].shape[0],), v.dtype, source=i) for i, v in enumerate(values)]
    made = Sym("running", values[1].shape, FLOAT, tuple(values), more={"step": const(step(*slots))})
    return part(made, 0), part(made, 1, values[0].shape)


def matmul(a: Any, b: Any) -> Sym:
    """A product of matrices."""
    x, y = _numbers(a), _numbers(b)
    if x.ndim != 2 or y.ndim != 2:
        raise Unsupported("a product of more than two dimensions")
    return Sym("matmul", (x.shape[0], y.shape[1]), FLOAT, (x, y))


def routed(stationary: Any, moving: Any) -> Sym:
    """tensor_engine.routed: bits that come out are those of float32, which holds every dtype that goes in."""
    x = number(const(stationary)).reshape(stationary.shape[0], -1)
    y = number(const(moving)).reshape(moving.shape[0], -1)
    made = Sym("route", (x.shape[1], y.shape[1]), FLOAT, (x.transpose(), y))
    return made if moving.ndim == 2 else made.reshape(x.shape[1], *moving.shape[1:])


def take(rows: Any, positions: Any) -> Sym:
    """gpsimd_engine.take_rows."""
    x, at = const(rows), const(positions)
    if at.kind != "wide" or (not x.raw and x.dtype != FLOAT):
        raise Unsupported("a gather by numbers")
    poison = np.asarray(gpsimd_engine.poison(x.dtype), x.dtype).reshape(1).view(f"u{x.dtype.itemsize}")[0]
    return Sym("take", at.shape, x.dtype, (x, at), raw=x.raw, more={"poison": int(poison)})

def picked(sym: Sym, rows: np.ndarray) -> Sym:
    """Rows of a tile by their numbers, which are known."""
    if rows.ndim != 1 or sym.ndim != 2:
        raise Unsupported("an index into a value")
    places = tile(Constant(rows.astype(np.int64)), (sym.shape[1], rows.size), (0, 8), INT64, True)
    return take(sym.transpose(), loaded(places)).transpose()


def drawn(stream: Any, state: Any, shape: Any) -> Sym:
    """language_ops.drawn."""
    args = () if state is None else (_numbers(state),)
    return Sym("uniform", tuple(int(n) for n in shape), FLOAT, args, more={"stream": stream})


def seeded(seed: Any, stream: Any) -> Sym:
    """language_ops.seeded."""
    return Sym("seeded", (language_ops.STATE_ROWS, 1), FLOAT, (const(seed),), more={"stream": stream})


def largest(x: Any, count: int) -> Sym:
    """vector_topk.largest."""
    x = _numbers(x)
    return Sym("largest", (x.shape[0], min(count, x.shape[1])), FLOAT, (x,))


def first_matches(x: Any, values: Any, mask: Any, backwards: bool) -> tuple[Sym, Sym]:
    """vector_topk.first_matches."""
    args = (_numbers(x), _numbers(values)) + (() if mask is None else (const(mask),))
    made = Sym("match", args[1].shape, FLOAT, args, more={"backwards": backwards})
    taken = part(made, 1, args[0].shape)
    taken.dtype = BOOL
    return part(made, 0), taken


def segment_bounds(ids: Any) -> tuple[Sym, Sym]:
    """gpsimd_engine.segment_bounds."""
    made = Sym("segments", ids.shape, INT64, (const(ids),))
    return tuple(loaded(p) for p in (part(made, 0), part(made, 1)))  # type: ignore[return-value]


def part(made: Sym, which: int, shape: tuple[int, ...] | None = None) -> Sym:
    """One of several results of a kernel."""
    return Sym("part", made.shape if shape is None else shape, made.dtype, (made,), raw=made.dtype == INT64, more={"which": which})


def concatenated(parts: Any, axis: int = 0) -> Any:
    """np.concatenate."""
    if not any(isinstance(p, Sym) for p in parts):
        return np.concatenate(parts, axis)
    values = [const(p) for p in parts]
    axis %= values[0].ndim
    shape = list(values[0].shape)
    shape[axis] = sum(v.shape[axis] for v in values)
    wide = any(v.kind in ("wide", "exact") for v in values)
    if len({v.raw for v in values}) > 1 and not wide:
        raise Unsupported("bits beside numbers")
    return Sym("concat", tuple(shape), INT64 if wide else values[0].dtype, tuple(values), raw=values[0].raw or wide, more={"axis": axis})


def stacked(parts: Any, axis: int = 0) -> Any:
    """np.stack along the first axis."""
    if axis:
        raise Unsupported("a stack along another axis")
    return concatenated([p[None] for p in parts])


def repeated(value: Any, times: Any, axis: int = 0) -> Any:
    """np.repeat of each element along an axis."""
    if not isinstance(value, Sym):
        return np.repeat(value, times, axis)
    shape = value.shape
    grown = (*shape[: axis + 1], int(times), *shape[axis + 1 :])
    spread = broadcast_to(reshaped(value, (*shape[: axis + 1], 1, *shape[axis + 1 :])), grown)
    return reshaped(spread, (*shape[:axis], shape[axis] * int(times), *shape[axis + 1 :]))


# ---- the module in the place of NumPy ---------------------------------------------------------------------------------


def _asarray(value: Any, dtype: Any = None, **kwargs: Any) -> Any:
    if isinstance(value, Sym):
        return value if dtype is None else value.astype(dtype)
    return np.asarray(value, dtype, **kwargs)


def broadcast_to(value: Any, shape: Any) -> Any:
    """np.broadcast_to."""
    if not isinstance(value, Sym):
        if isinstance(value, np.generic):  # as NumPy does it, in a third of the time
            return np.ndarray(shape, value.dtype, np.array(value), 0, (0,) * len(shape))
        return np.broadcast_to(value, shape)
    wanted = tuple(shape)
    if value.shape == wanted:
        return value
    if value.kind == "const":
        return seen(value, wanted, ())
    if value.kind == "wide" and value.name == "load":
        inner = broadcast_to(value.args[0], wanted)
        return Sym("wide", wanted, value.dtype, (inner,), "load")
    if value.is_leaf:
        grown = (1,) * (len(wanted) - value.ndim) + value.shape
        strides = (0,) * (len(wanted) - value.ndim) + (value.strides or (0,) * value.ndim)
        axes = (-1,) * (len(wanted) - value.ndim) + value.axes if value.axes else ()
        return seen(value, wanted, tuple(0 if n == 1 else s for n, s in zip(grown, strides, strict=True)), axes)
    return late(value, wanted, lambda t: broadcast_to(t, wanted))


def _copyto(out: Any, value: Any, casting: str = "same_kind", where: Any = True) -> None:
    if not isinstance(out, Sym):
        raise Unsupported("an assignment into an array of numbers")
    before = out.but()
    made = const(value) if where is True else select(where, value, before)
    if made.shape != before.shape:
        made = broadcast_to(made, before.shape) if made.kind in ("const", "tile") else made
    out.become(made)


def _full(shape: Any, value: Any, dtype: Any = np.float32, **kwargs: Any) -> Any:
    if isinstance(value, Sym):
        return broadcast_to(value, shape if isinstance(shape, tuple) else (shape,))
    if np.dtype(dtype) != FLOAT:
        return np.full(shape, value, dtype)
    return Sym("const", shape if isinstance(shape, tuple) else (int(shape),), FLOAT, value=float(np.float32(value)))


def _where(*args: Any) -> Any:
    return select(*args) if any(isinstance(a, Sym) for a in args) else np.where(*args)


def _either(name: str) -> Any:
    """A NumPy function over symbols, or over numbers."""
    plain = getattr(np, name)

    def function(*args: Any, out: Any = None, dtype: Any = None, **kwargs: Any) -> Any:
        if any([a.__class__ is Sym for a in args]):
            return call(UFUNCS[plain], *args)
        if out is not None:
            kwargs["out"] = out
        if dtype is not None:
            kwargs["dtype"] = dtype
        return plain(*args, **kwargs)

    return function


def _errstate(*args: Any, **kwargs: Any) -> Any:
    return nullcontext()


class _Namespace(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        found = self.__dict__[name] = getattr(np, name)
        return found


numpy_like = _Namespace("numpy_like")
numpy_like.__dict__.update(
    ndarray=Sym,
    asarray=_asarray,
    array=lambda value, dtype=None, **k: _asarray(value, dtype) if isinstance(value, Sym) else np.array(value, dtype, **k),
    ascontiguousarray=lambda value, dtype=None: _asarray(value, dtype),
    broadcast_to=broadcast_to,
    where=_where,
    copyto=_copyto,
    full=_full,
    zeros_like=lambda value: _full(value.shape, 0.0) if isinstance(value, Sym) else np.zeros_like(value),
    errstate=_errstate,
    may_share_memory=lambda a, b: False,
    shape=lambda value: value.shape if isinstance(value, Sym) else np.shape(value),
    size=lambda value: value.size if isinstance(value, Sym) else np.size(value),
    matmul=matmul,
    concatenate=concatenated,
    stack=stacked,
    repeat=repeated,
    **{ufunc.__name__: _either(ufunc.__name__) for ufunc in UFUNCS},
)


def _certain(truth: Any) -> bool:
    """A shortcut that only numbers can justify."""
    if truth.__class__ is np.bool_:
        return bool(truth)
    return not isinstance(truth, Sym) and bool(np.all(truth))


TRANSLATOR = Translator(
    numpy_like,
    {
        reduce.reduce_free: fold,
        reduce.reduce_partition: partition_fold,
        reduce.scan_free: scan,
        reduce.running: running,
        known.certain: _certain,
        vector_rules.included: lambda mask, like: mask,
        vector_topk.largest: largest,
        vector_topk.first_matches: first_matches,
        gpsimd_engine.take_rows: take,
        gpsimd_engine.segment_bounds: segment_bounds,
        tensor_engine.routed: routed,
        language_ops.drawn: drawn,
        language_ops.seeded: seeded,
    },
    scalar_function,
)
