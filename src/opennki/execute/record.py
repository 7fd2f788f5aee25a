"""Recording: an instruction's declared body, run over symbols, gives the expression that native code computes.

A symbol is a tile (with strides of its own, so that reshapes and transpositions cost nothing), a constant, a scalar function of symbols,
a selection, a fold, a scan or a matrix product. What a body does beyond that raises `Unsupported`, and the instruction stays with the
interpreter.
"""

from __future__ import annotations

import dataclasses
import types
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from opennki.isa import known, reduce, vector_rules
from opennki.isa.bodies import Translator
from opennki.isa.scalar import SCALAR, resolve

FLOAT = np.dtype(np.float32)


class Unsupported(Exception):
    """A body does something that has no native form; the text says what."""


def _shape(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError as exc:
        raise Unsupported(str(exc)) from None


@dataclass(eq=False)
class Sym:
    """A value. kind: tile, pred, index, const, call (scalar function `name`), select, fold, scan, matmul, exact.

    strides: of a tile, pred or index, per dimension (bytes, or steps of the affine value); source: its number among the operands.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    args: tuple[Any, ...] = ()
    name: str = ""
    strides: tuple[int, ...] = ()
    source: Any = None
    value: float = 0.0
    raw: bool = False
    more: dict[str, Any] = field(default_factory=dict)

    __array_priority__ = 1000

    # ---- what it is ----
    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def T(self) -> Sym:
        return self.transpose()

    def __len__(self) -> int:
        return self.shape[0]

    def __bool__(self) -> bool:
        raise Unsupported("it asks for the truth of a value")

    __int__ = __float__ = __index__ = __iter__ = item = __bool__  # type: ignore[assignment]

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise Unsupported("it asks NumPy for the numbers")

    # ---- forms ----
    def reshape(self, *shape: Any, order: str = "C") -> Sym:
        wanted = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        sizes = [int(n) for n in wanted]
        if -1 in sizes:
            sizes[sizes.index(-1)] = self.size // max(1, abs(prod(sizes)))
        return reshaped(self, tuple(sizes))

    def ravel(self) -> Sym:
        return self.reshape(-1)

    def transpose(self, *axes: Any) -> Sym:
        order = axes[0] if len(axes) == 1 and isinstance(axes[0], (tuple, list)) else axes
        order = tuple(order) if order and order[0] is not None else tuple(reversed(range(self.ndim)))
        if self.strides or not self.args:
            strides = tuple(self.strides[i] for i in order) if self.strides else ()
            return _as(self, tuple(self.shape[i] for i in order), strides)
        raise Unsupported("a transposition of a computed value")

    def astype(self, dtype: Any, copy: bool = True, order: str = "K") -> Sym:
        kind = np.dtype(dtype)
        if kind == self.dtype:
            return self
        if self.kind == "const" or kind == np.bool_ or (self.dtype == np.bool_ and kind == FLOAT):
            return Sym(self.kind, self.shape, kind, self.args, self.name, self.strides, self.source, self.value, self.raw, self.more)
        if self.kind == "index" and kind.kind in "iu":
            return self  # whole numbers that float32 holds: what stores them converts them
        if kind in (np.int64, np.uint64) and self.kind == "tile" and self.raw:
            return Sym("wide", self.shape, kind, (self,))
        raise Unsupported(f"a conversion of {self.dtype} to {kind} in the middle")

    def copy(self, order: str = "C") -> Sym:
        return self

    def any(self, *args: Any, **kwargs: Any) -> Any:
        raise Unsupported("it asks for the truth of a value")

    all = sum = max = min = argmax = any

    def __getitem__(self, key: Any) -> Sym:
        parts = key if isinstance(key, tuple) else (key,)
        if any(p is not None and not isinstance(p, slice) and p is not Ellipsis for p in parts) or Ellipsis in parts:
            raise Unsupported("an index into a value")
        shape, strides, axis = [], [], 0
        for p in parts:
            if p is None:
                shape.append(1)
                strides.append(0)
                continue
            if p != slice(None):
                raise Unsupported("a slice of a value")
            shape.append(self.shape[axis])
            strides.append(self.strides[axis] if self.strides else 0)
            axis += 1
        shape += self.shape[axis:]
        strides += self.strides[axis:]
        return _as(self, tuple(shape), tuple(strides)) if self.strides else reshaped(self, tuple(shape))

    # ---- operations ----
    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, dtype: Any = None, **kwargs: Any) -> Any:
        if method != "__call__" or kwargs:
            raise Unsupported(f"numpy.{ufunc.__name__}.{method}")
        if ufunc is np.matmul:
            return matmul(*inputs)
        name = _UFUNCS.get(ufunc)
        if name is None:
            raise Unsupported(f"numpy.{ufunc.__name__}")
        return call(name, *inputs)

    def __array_function__(self, function: Any, types_: Any, args: Any, kwargs: Any) -> Any:
        found = getattr(numpy_like, function.__name__, None)
        if found is None or found is function:
            raise Unsupported(f"numpy.{function.__name__}")
        return found(*args, **kwargs)

    def become(self, other: Sym) -> None:
        """Take another value: what an assignment into an array does."""
        self.__dict__.update(other.__dict__)

    def __matmul__(self, other: Any) -> Sym:
        return matmul(self, other)


def _binary(name: str, swapped: bool = False) -> Any:
    def method(self: Sym, other: Any) -> Sym:
        return call(name, other, self) if swapped else call(name, self, other)

    return method


for _method, _function in {
    "add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide", "mod": "mod", "pow": "power",
    "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal", "eq": "equal", "ne": "not_equal",
}.items():  # fmt: skip
    setattr(Sym, f"__{_method}__", _binary(_function))
    if _method in ("add", "sub", "mul", "truediv", "mod", "pow"):
        setattr(Sym, f"__r{_method}__", _binary(_function, True))
def _logical(name: str) -> Any:
    def method(self: Sym, other: Any = None) -> Sym:
        operands = (self,) if name == "logical_not" else (self, const(other))
        if any(o.dtype != np.bool_ for o in operands):
            raise Unsupported("an operator on bits")
        made = call(name, *operands)
        return Sym(made.kind, made.shape, np.dtype(bool), made.args, made.name)

    return method


for _method, _function in {"and": "logical_and", "or": "logical_or", "xor": "logical_xor", "invert": "logical_not"}.items():
    setattr(Sym, f"__{_method}__", _logical(_function))
    if _method != "invert":
        setattr(Sym, f"__r{_method}__", _logical(_function))
Sym.__neg__ = lambda self: call("negative", self)  # type: ignore[attr-defined,operator]
Sym.__abs__ = lambda self: call("abs", self)  # type: ignore[attr-defined]
Sym.__hash__ = object.__hash__  # type: ignore[method-assign]

_UFUNCS = {
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
_TRUTHS = frozenset({"comparison", "logical"})


def const(value: Any) -> Sym:
    """A number, or an array whose elements are all the same."""
    if isinstance(value, Sym):
        return value
    array = np.asarray(value)
    if array.dtype.kind not in "fbiu" or not array.size:
        raise Unsupported(f"a constant of {array.dtype}")
    first = array.reshape(-1)[0]
    if array.size > 1 and any(array.strides) and not (array == first).all():
        raise Unsupported("an array of constants")
    if array.dtype.kind in "iu" and abs(int(first)) > 1 << 24:
        raise Unsupported("an integer constant that float32 does not have")
    return Sym("const", array.shape, FLOAT, value=float(np.float32(first)))


def call(name: str, *args: Any) -> Sym:
    """A scalar function of values."""
    entry = SCALAR[name]
    values = [const(a) for a in args[: entry.arity]]
    if any(v.kind == "wide" for v in values):
        if name not in ("add", "subtract", "multiply") or not all(v.kind == "wide" for v in values):
            raise Unsupported(f"{name} of 64-bit integers")
        return Sym("exact", _shape(*(v.shape for v in values)), values[0].dtype, tuple(v.args[0] for v in values), name)
    raw = entry.group == "bitvec"
    if raw != any(v.raw for v in values):
        raise Unsupported(f"{name} of {'numbers' if raw else 'bits'}")
    shape = _shape(*(v.shape for v in values))
    dtype = values[0].dtype if raw else np.dtype(bool) if entry.group in _TRUTHS else FLOAT
    return Sym("call", shape, dtype, tuple(values), name, raw=raw)


def scalar_function(name: str, _: Any) -> Any:
    """What stands for a callable of the table: float32 results, as the table's have."""

    def function(*args: Any, out: Any = None, **kwargs: Any) -> Any:
        if not any(isinstance(a, Sym) for a in args):
            return SCALAR[name].numpy(*args)
        made = call(name, *args)
        return made.astype(FLOAT) if made.dtype == np.bool_ else made

    return function


def select(condition: Any, a: Any, b: Any) -> Sym:
    """np.where."""
    c, x, y = const(condition), const(a), const(b)
    if x.raw != y.raw and "const" not in (x.kind, y.kind):
        raise Unsupported("a selection between bits and numbers")
    raw = x.raw or y.raw
    return Sym("select", _shape(c.shape, x.shape, y.shape), x.dtype if x.kind != "const" else y.dtype, (c, x, y), raw=raw)


def fold(x: Any, op: Any, axes: Any, keepdims: bool = False) -> Sym:
    """reduce_free: a fold over free axes."""
    x, name = const(x), resolve(op)
    reduced = tuple(sorted({int(a) % x.ndim for a in ((axes,) if isinstance(axes, (int, np.integer)) else axes)}))
    if 0 in reduced or not reduced or x.raw or SCALAR[name].group == "bitvec":
        raise Unsupported("a fold of this kind")
    full = tuple(1 if i in reduced else n for i, n in enumerate(x.shape))
    made = Sym("fold", full, FLOAT, (x,), name, more={"axes": reduced})
    return made if keepdims else reshaped(made, tuple(n for i, n in enumerate(x.shape) if i not in reduced))


def partition_fold(x: Any, op: Any) -> Sym:
    """reduce_partition: a fold over the partitions."""
    x, name = const(x), resolve(op)
    if x.kind != "tile" or x.raw:
        raise Unsupported("a fold over the partitions of a computed value")
    return Sym("pfold", (1, *x.shape[1:]), FLOAT, (x,), name)


def scan(data0: Any, data1: Any, initial: Any, op0: Any, op1: Any, reverse0: bool = False, reverse1: bool = False) -> Sym:
    """scan_free."""
    values = const(data0), const(data1), const(initial)
    if any(v.kind not in ("tile", "const") or v.raw for v in values) or values[0].kind != "tile" or values[1].kind != "tile":
        raise Unsupported("a scan of a computed value")
    return Sym("scan", values[0].shape, FLOAT, values, more={"ops": (resolve(op0), resolve(op1)), "reverse": (reverse0, reverse1)})


def matmul(a: Any, b: Any) -> Sym:
    """A product of two tiles, the left one transposed."""
    x, y = const(a), const(b)
    if x.kind != "tile" or y.kind != "tile" or x.ndim != 2 or y.ndim != 2 or x.raw or y.raw:
        raise Unsupported("a product of computed values")
    return Sym("matmul", (x.shape[0], y.shape[1]), FLOAT, (x, y))


def _as(sym: Sym, shape: tuple[int, ...], strides: tuple[int, ...]) -> Sym:
    return Sym(sym.kind, shape, sym.dtype, sym.args, sym.name, strides, sym.source, sym.value, sym.raw, sym.more)


def reshaped(sym: Sym, shape: tuple[int, ...]) -> Sym:
    """A value in another shape: tiles by their strides, computed values by their parts."""
    if shape == sym.shape:
        return sym
    if prod(shape) != sym.size:
        raise Unsupported(f"a reshape of {sym.shape} to {shape}")
    if sym.kind == "const":
        return _as(sym, shape, ())
    if sym.strides:
        return _as(sym, shape, strides_of(sym.shape, sym.strides, shape))
    if sym.kind in ("fold", "scan", "matmul", "pfold"):
        # elements keep their order: what stores them finds them by it
        more = {"base": sym.shape, **sym.more}
        return Sym(sym.kind, shape, sym.dtype, sym.args, sym.name, (), sym.source, sym.value, sym.raw, more)
    parts = tuple(_part(a, sym.shape, shape) for a in sym.args)
    return Sym(sym.kind, shape, sym.dtype, parts, sym.name, raw=sym.raw, more=sym.more)


def _part(arg: Sym, old: tuple[int, ...], new: tuple[int, ...]) -> Sym:
    """An argument of a value that is reshaped from `old` to `new`."""
    if arg.size == 1:
        return reshaped(arg, (1,) * len(new))
    if arg.shape == old:
        return reshaped(arg, new)
    if arg.ndim == len(old) and arg.shape[0] == old[0] == new[0] and prod(arg.shape[1:]) == 1:
        return reshaped(arg, (arg.shape[0],) + (1,) * (len(new) - 1))
    raise Unsupported(f"a reshape of a value with a part of {arg.shape}")


def strides_of(shape: tuple[int, ...], strides: tuple[int, ...], new: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a tile seen in another shape. Raises Unsupported where it would have to be copied."""
    old = [(n, s) for n, s in zip(shape, strides, strict=True) if n != 1]
    out: list[int] = []
    i = 0
    remaining, stride = (old[0] if old else (1, 0))
    for n in new:
        if n == 1:
            out.append(0)
            continue
        # join old dimensions until they hold n
        while remaining % n and i + 1 < len(old) and stride == old[i + 1][0] * old[i + 1][1]:
            i += 1
            remaining, stride = remaining * old[i][0], old[i][1]
        if remaining == 1 and i + 1 < len(old):
            i += 1
            remaining, stride = old[i]
            while remaining % n and i + 1 < len(old) and stride == old[i + 1][0] * old[i + 1][1]:
                i += 1
                remaining, stride = remaining * old[i][0], old[i][1]
        if remaining % n:
            raise Unsupported(f"a reshape of {shape} to {new} that is no view")
        remaining //= n
        out.append(stride * remaining)
        if remaining == 1 and i + 1 < len(old):
            i += 1
            remaining, stride = old[i]
    return tuple(out)


def tile(source: Any, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any], raw: bool) -> Sym:
    """An operand of an instruction."""
    return Sym("tile", shape, dtype if raw else FLOAT, strides=strides, source=source, raw=raw)


# ---- the module in the place of NumPy ---------------------------------------------------------------------------------


def _asarray(value: Any, dtype: Any = None, **kwargs: Any) -> Any:
    if isinstance(value, Sym):
        return value if dtype is None else value.astype(dtype)
    return np.asarray(value, dtype, **kwargs)


def _broadcast_to(value: Any, shape: Any) -> Any:
    if not isinstance(value, Sym):
        return np.broadcast_to(value, shape)
    wanted = tuple(shape)
    if value.shape == wanted:
        return value
    if value.kind == "const":
        return _as(value, wanted, ())
    if value.strides:
        grown = (1,) * (len(wanted) - value.ndim) + value.shape
        strides = (0,) * (len(wanted) - value.ndim) + value.strides
        return _as(value, wanted, tuple(0 if n == 1 else s for n, s in zip(grown, strides, strict=True)))
    raise Unsupported("a computed value spread over a shape")


def _copyto(out: Any, value: Any, casting: str = "same_kind", where: Any = True) -> None:
    if not isinstance(out, Sym):
        raise Unsupported("an assignment into an array of numbers")
    before = dataclasses.replace(out)
    made = const(value) if where is True else select(where, value, before)
    if made.shape != before.shape:
        made = _broadcast_to(made, before.shape) if made.kind in ("const", "tile") else made
    out.become(made)


def _full(shape: Any, value: Any, dtype: Any = np.float32, **kwargs: Any) -> Any:
    if isinstance(value, Sym):
        return _broadcast_to(value, shape if isinstance(shape, tuple) else (shape,))
    if np.dtype(dtype) != FLOAT:
        return np.full(shape, value, dtype)
    return Sym("const", shape if isinstance(shape, tuple) else (int(shape),), FLOAT, value=float(np.float32(value)))


def _where(*args: Any) -> Any:
    return select(*args) if any(isinstance(a, Sym) for a in args) else np.where(*args)


def _either(name: str) -> Any:
    """A NumPy function over symbols, or over numbers."""
    plain = getattr(np, name)

    def function(*args: Any, out: Any = None, dtype: Any = None, **kwargs: Any) -> Any:
        if any(isinstance(a, Sym) for a in args):
            return call(_UFUNCS[plain], *args)
        if out is not None:
            kwargs["out"] = out
        return plain(*args, **({"dtype": dtype} if dtype is not None else {}), **kwargs)

    return function


def _errstate(*args: Any, **kwargs: Any) -> Any:
    return nullcontext()


class _Namespace(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


numpy_like = _Namespace("numpy_like")
numpy_like.__dict__.update(
    ndarray=Sym,
    asarray=_asarray,
    array=lambda value, dtype=None, **k: _asarray(value, dtype) if isinstance(value, Sym) else np.array(value, dtype, **k),
    ascontiguousarray=lambda value, dtype=None: _asarray(value, dtype),
    broadcast_to=_broadcast_to,
    where=_where,
    copyto=_copyto,
    full=_full,
    errstate=_errstate,
    may_share_memory=lambda a, b: False,
    shape=lambda value: value.shape if isinstance(value, Sym) else np.shape(value),
    size=lambda value: value.size if isinstance(value, Sym) else np.size(value),
    matmul=matmul,
    **{ufunc.__name__: _either(ufunc.__name__) for ufunc in _UFUNCS},
)

TRANSLATOR = Translator(
    numpy_like,
    {
        reduce.reduce_free: fold,
        reduce.reduce_partition: partition_fold,
        reduce.scan_free: scan,
        known.certain: lambda truth: False,  # a shortcut that only numbers can justify
        vector_rules.included: lambda mask, like: mask,
    },
    scalar_function,
)
