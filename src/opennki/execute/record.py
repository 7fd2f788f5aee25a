"""Recording: an instruction's declared body, run over symbols, gives the expression that native code computes.

A symbol is a tile (with strides of its own, so that reshapes and transpositions cost nothing), a constant, a scalar function of symbols,
a selection, a fold, or what has a native kernel of its own (`execute.forms`). Values that have to be in memory before they can be seen in
another form are `late`: a temporary tile is made of them. What a body does beyond that raises `Unsupported`, and the instruction stays with
the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from opennki.execute.shapes import JOINED, Axes, Unsupported, broadcast, carried, strides_of
from opennki.isa import dtypes
from opennki.isa.scalar import SCALAR

FLOAT = np.dtype(np.float32)
BOOL = np.dtype(bool)
INT64 = np.dtype(np.int64)
EXACT = 1 << 24  # integers up to here are float32 numbers
_FINITE = 1e38  # numbers below it are finite in float32 too


class Constant:
    """An array that comes with the instruction, as the source of a tile."""

    __slots__ = ("array",)

    def __init__(self, array: np.ndarray) -> None:
        self.array = np.ascontiguousarray(array)


@dataclass(frozen=True, slots=True)
class Part:
    """A tile that begins `offset` bytes after another one."""

    base: Any
    offset: int


@dataclass(eq=False)
class Sym:
    """A value. kind: tile, pred, index, const, call (scalar function `name`), select, fold, tree (a fold of `args`), round, exact,
    wide (an operation on 64-bit integers), or one of `execute.steps`.

    strides: of a tile, pred or index, per dimension (bytes, or steps of the affine value); source: its number among the operands, a
    `Constant`, a temporary tile, or a `Part` of one; raw: bits of an element, not a number; axes: what a mask narrows each dimension with
    (see `execute.shapes`), () where there is nothing to narrow.
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
    axes: Axes = ()

    __array_priority__ = 1000

    # ---- what it is ----
    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def is_leaf(self) -> bool:
        """Whether another form of it is a matter of strides."""
        return self.kind in ("tile", "const", "pred", "index")

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
        shape = tuple(self.shape[i] for i in order)
        if self.kind == "wide" and self.name == "load":
            return loaded(self.args[0].transpose(order))
        if self.is_leaf:
            return seen(self, shape, tuple(self.strides[i] for i in order) if self.strides else (),
                        tuple(self.axes[i] for i in order) if self.axes else ())  # fmt: skip
        return late(self, shape, lambda t: t.transpose(order))

    def astype(self, dtype: Any, copy: bool = True, order: str = "K") -> Sym:
        return converted(self, np.dtype(dtype))

    def copy(self, order: str = "C") -> Sym:
        return self

    def any(self, axis: Any = None, keepdims: bool = False) -> Any:
        from opennki.execute.forms import fold

        if axis is None or self.dtype != BOOL:
            raise Unsupported("it asks for the truth of a value")
        return tagged(fold(self, "logical_or", axis, keepdims), BOOL)

    def sum(self, axis: Any = None, keepdims: bool = False) -> Any:
        from opennki.execute.forms import fold

        if axis is None or self.dtype != BOOL:
            raise Unsupported("a sum in another order")
        return fold(self, "add", axis, keepdims)  # of truths: exact in any order

    def all(self, *args: Any, **kwargs: Any) -> Any:
        raise Unsupported("it asks for the truth of a value")

    max = min = argmax = all

    def __getitem__(self, key: Any) -> Sym:
        parts = key if isinstance(key, tuple) else (key,)
        if len(parts) == 1 and isinstance(parts[0], np.ndarray):
            from opennki.execute.forms import picked

            return picked(self, parts[0])
        if Ellipsis in parts or any(not (p is None or isinstance(p, (slice, int, np.integer))) for p in parts):
            raise Unsupported("an index into a value")
        return _viewed(self, parts)

    # ---- operations ----
    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, dtype: Any = None, **kwargs: Any) -> Any:
        from opennki.execute.forms import UFUNCS, bits_or_truth, matmul, partition_fold

        if method == "reduce" and ufunc.__name__ in SCALAR and kwargs.get("axis") == 0 and kwargs.get("keepdims"):
            return partition_fold(inputs[0], ufunc.__name__)
        if method != "__call__" or kwargs:
            raise Unsupported(f"numpy.{ufunc.__name__}.{method}")
        if ufunc is np.matmul:
            return matmul(*inputs)
        if ufunc in (np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.invert):
            return bits_or_truth(ufunc.__name__, *inputs)
        name = UFUNCS.get(ufunc)
        if name is None:
            raise Unsupported(f"numpy.{ufunc.__name__}")
        return call(name, *inputs)

    def __array_function__(self, function: Any, types_: Any, args: Any, kwargs: Any) -> Any:
        from opennki.execute.forms import numpy_like

        found = numpy_like.__dict__.get(function.__name__)
        if found is None or found is function:
            raise Unsupported(f"numpy.{function.__name__}")
        return found(*args, **kwargs)

    def but(self, **fields: Any) -> Sym:
        """The same value with other fields."""
        made = Sym.__new__(Sym)
        made.__dict__.update(self.__dict__, **fields)
        return made

    def become(self, other: Sym) -> None:
        """Take another value: what an assignment into an array does."""
        self.__dict__.update(other.__dict__)

    def __matmul__(self, other: Any) -> Sym:
        from opennki.execute.forms import matmul

        return matmul(self, other)


def _binary(name: str, swapped: bool = False) -> Any:
    def method(self: Sym, other: Any) -> Sym:
        return call(name, other, self) if swapped else call(name, self, other)

    return method


def _bitwise(name: str) -> Any:
    def method(self: Sym, *other: Any) -> Sym:
        from opennki.execute.forms import bits_or_truth

        return bits_or_truth(name, self, *other)

    return method


for _method, _function in {
    "add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide", "mod": "mod", "pow": "power",
    "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal", "eq": "equal", "ne": "not_equal",
}.items():  # fmt: skip
    setattr(Sym, f"__{_method}__", _binary(_function))
    if _method in ("add", "sub", "mul", "truediv", "mod", "pow"):
        setattr(Sym, f"__r{_method}__", _binary(_function, True))
for _method, _function in {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "invert": "invert"}.items():
    setattr(Sym, f"__{_method}__", _bitwise(_function))
    setattr(Sym, f"__r{_method}__", _bitwise(_function))
Sym.__neg__ = lambda self: call("negative", self)  # type: ignore[attr-defined,operator]
Sym.__abs__ = lambda self: call("abs", self)  # type: ignore[attr-defined]
Sym.__hash__ = object.__hash__  # type: ignore[method-assign]

_TRUTHS = frozenset({"comparison", "logical"})


# ---- values -----------------------------------------------------------------------------------------------------------


def tile(source: Any, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any], raw: bool, axes: Any = ()) -> Sym:
    """An operand of an instruction."""
    return Sym("tile", shape, dtype if raw else FLOAT, strides=strides, source=source, raw=raw, axes=axes)


def const(value: Any) -> Sym:
    """A number, or an array: a constant where its elements are all the same, else a tile."""
    kind = value.__class__
    if kind is Sym:
        return value  # type: ignore[no-any-return]
    if kind is np.float32 or (kind is np.ndarray and value.ndim == 0 and value.dtype is FLOAT):
        return Sym("const", (), FLOAT, value=float(value))
    if kind is float and -_FINITE < value < _FINITE:
        return Sym("const", (), FLOAT, value=float(np.float32(value)))
    if kind is int and -EXACT <= value <= EXACT:
        return Sym("const", (), FLOAT, value=float(value), more={"int": value})
    array = np.asarray(value)
    if array.dtype.kind not in "fbiuV" or not array.size:
        raise Unsupported(f"a constant of {array.dtype}")
    first = array.reshape(-1)[0]
    if array.size > 1 and any(array.strides) and not (array == first).all():
        return _array(array)
    if array.dtype is FLOAT:
        return Sym("const", array.shape, FLOAT, value=float(first))
    if array.dtype.kind == "V" or (array.dtype.kind == "f" and array.dtype.itemsize <= 2):
        bits = int(np.asarray(first).reshape(1).view(f"u{array.dtype.itemsize}")[0])
        return Sym("const", array.shape, array.dtype, value=float(first), raw=True, more={"bits": bits})
    if array.dtype.kind in "iu":
        return Sym("const", array.shape, FLOAT, value=float(np.float32(first)), more={"int": int(first)})
    with np.errstate(all="ignore"):
        return Sym("const", array.shape, BOOL if array.dtype == BOOL else FLOAT, value=float(np.float32(first)))


def _array(array: np.ndarray) -> Sym:
    if array.dtype.kind in "iu":
        if np.abs(array.astype(np.float64)).max() > EXACT:
            return loaded(tile(Constant(array.astype(np.int64)), array.shape, array.astype(np.int64).strides, INT64, True))
        more = {"integers": array.astype(np.int64)}
    elif array.dtype == BOOL or array.dtype == FLOAT:
        more = {}
    else:
        raise Unsupported(f"an array of {array.dtype} constants")
    numbers = np.ascontiguousarray(array, np.float32)
    return Sym("tile", array.shape, BOOL if array.dtype == BOOL else FLOAT, strides=numbers.strides, source=Constant(numbers), more=more)


def loaded(raw: Sym) -> Sym:
    """The integers of a tile in 64 bits."""
    return Sym("wide", raw.shape, INT64, (raw,), "load")


def widened(value: Sym) -> Sym:
    """An integer value in 64 bits."""
    if value.kind in ("wide", "exact"):
        return value
    if value.kind == "const" and "int" in value.more:
        return Sym("wide", value.shape, INT64, name="const", more={"int": value.more["int"]})
    if "integers" in value.more and value.kind == "tile":
        array = value.more["integers"]
        if array.shape == value.shape:
            return loaded(tile(Constant(array), array.shape, np.ascontiguousarray(array).strides, INT64, True))
    if (value.raw and value.dtype.kind in "iu") or value.dtype == BOOL or value.kind == "index":
        return loaded(value)
    raise Unsupported("an integer that is none")


def number(value: Sym) -> Sym:
    """The value as float32, where it is bits that float32 can hold."""
    if not value.raw:
        return value
    if value.kind == "tile":
        return Sym("tile", value.shape, FLOAT, strides=value.strides, source=value.source, axes=value.axes)
    if value.kind == "const":
        return Sym("const", value.shape, FLOAT, value=value.value)
    return Sym("late", value.shape, FLOAT, (value,), more={"how": number})


def tagged(sym: Sym, dtype: np.dtype[Any]) -> Sym:
    """The same value under another dtype."""
    return sym.but(dtype=dtype)


def converted(sym: Sym, kind: np.dtype[Any]) -> Sym:
    """astype."""
    if sym.kind in ("wide", "exact"):
        if kind in (INT64, np.dtype(np.uint64)):
            return tagged(sym, kind)
        if kind == BOOL:
            return call("not_equal", sym, 0)
        return Sym("cast", sym.shape, kind, (sym,), raw=kind != FLOAT, more={"wraps": True})
    if kind == FLOAT and sym.raw:
        return number(sym)
    if kind == sym.dtype:
        return sym
    if sym.kind == "const":
        if kind.kind in "iu" and sym.raw is False and "int" not in sym.more and sym.value == int(sym.value):
            return Sym("const", sym.shape, sym.dtype, value=sym.value, more={"int": int(sym.value)})
        return sym if kind.kind in "iu" else tagged(sym, kind)
    if kind == BOOL:
        return call("not_equal", sym, 0)
    if sym.dtype == BOOL and kind == FLOAT:
        return tagged(sym, FLOAT)
    if sym.kind == "index" and kind.kind in "iu":
        return sym  # whole numbers that float32 holds: what stores them converts them
    if kind.kind in "iu" and (sym.dtype == BOOL or (sym.raw and sym.dtype.kind in "iu")):
        wide = widened(sym)
        return tagged(wide, kind) if kind.itemsize == 8 else converted(wide, kind)
    raise Unsupported(f"a conversion of {sym.dtype} to {kind} in the middle")


def call(name: str, *args: Any) -> Sym:
    """A scalar function of values."""
    entry = SCALAR[name]
    values = [const(a) for a in args[: entry.arity]]
    shape = broadcast(*[v.shape for v in values])
    if entry.group == "bitvec":
        raw = next((v for v in values if v.raw), None)
        if raw is None or raw.dtype.kind not in "iu" or any(v.kind == "wide" for v in values):
            raise Unsupported(f"{name} of numbers")
        bits = tuple(tagged(v, np.dtype(np.int32)) if v.kind == "index" else v for v in values)
        return Sym("call", shape, raw.dtype, bits, name, raw=True)
    if any([v.raw for v in values]):
        known = all(_exact(v) or (entry.group in _TRUTHS and _zero(w)) for v, w in zip(values, reversed(values), strict=True))
        values = [number(v) if known else widened(v) if v.raw else v for v in values]
    if any([v.kind in ("wide", "exact") for v in values]):
        return _wide(name, values, shape)
    return Sym("call", shape, BOOL if entry.group in _TRUTHS else FLOAT, tuple(values), name)


def _exact(value: Sym) -> bool:
    """Whether a value is a number that float32 holds, and arithmetic on it is that of float32."""
    return not value.raw or value.kind == "const" or value.dtype == FLOAT or (value.dtype.kind in "iu" and value.dtype.itemsize < 4)


def _zero(value: Sym) -> bool:
    return value.kind == "const" and value.value == 0


def _wide(name: str, values: list[Sym], shape: tuple[int, ...]) -> Sym:
    simple = all(v.kind == "wide" and v.name == "load" and v.args[0].kind == "tile" and not isinstance(v.args[0].source, Constant)
                 for v in values)  # fmt: skip
    if simple and name in ("add", "subtract", "multiply"):
        return Sym("exact", shape, values[0].dtype, tuple(v.args[0] for v in values), name)
    truth = SCALAR[name].group == "comparison"
    if not truth and name not in ("add", "subtract", "multiply", "maximum", "minimum"):
        raise Unsupported(f"{name} of 64-bit integers")
    return Sym("wide", shape, BOOL if truth else INT64, tuple(widened(v) for v in values), name)


def scalar_function(name: str, _: Any) -> Any:
    """What stands for a callable of the table: float32 results, as the table's have."""

    def function(*args: Any, out: Any = None, **kwargs: Any) -> Any:
        if not any([a.__class__ is Sym for a in args]):
            return SCALAR[name].numpy(*args)
        made = call(name, *args)
        return tagged(made, FLOAT) if made.dtype == BOOL and made.kind != "wide" else made

    return function


# ---- other forms of a value ---------------------------------------------------------------------------------------------


def late(sym: Sym, shape: tuple[int, ...], how: Callable[[Sym], Sym]) -> Sym:
    """What `how` makes of the value as a contiguous tile."""
    if sym.kind in ("wide", "exact") and sym.dtype != BOOL:
        return loaded(Sym("late", shape, INT64, (sym,), raw=True, more={"how": how}))
    return Sym("late", shape, sym.dtype, (sym,), raw=sym.raw, more={"how": how})


def seen(sym: Sym, shape: tuple[int, ...], strides: tuple[int, ...], axes: Axes = ()) -> Sym:
    """A leaf in another form."""
    return Sym(sym.kind, shape, sym.dtype, sym.args, sym.name, strides, sym.source, sym.value, sym.raw,
               {k: v for k, v in sym.more.items() if k != "integers" or shape == sym.shape}, axes)  # fmt: skip


def _viewed(sym: Sym, parts: tuple[Any, ...]) -> Sym:
    """A slice of a value."""
    if sym.kind == "wide" and sym.name == "load":
        return loaded(_viewed(sym.args[0], parts))
    if not sym.is_leaf:
        whole = all(p is None or p == slice(None) for p in parts)
        shape = tuple(np.empty(sym.shape, np.int8)[parts].shape)
        return reshaped(sym, shape) if whole else late(sym, shape, lambda t: _viewed(t, parts))
    shape_: list[int] = []
    strides: list[int] = []
    axes: list[Any] = []
    offset = axis = 0
    old = sym.strides or (0,) * sym.ndim
    tags = sym.axes or (-1,) * sym.ndim
    for p in parts:
        if p is None:
            shape_.append(1)
            strides.append(0)
            axes.append(-1)
            continue
        n, s, tag = sym.shape[axis], old[axis], tags[axis]
        axis += 1
        if isinstance(p, slice):
            start, stop, step = p.indices(n)
            shape_.append(len(range(start, stop, step)))
            strides.append(s * step)
            axes.append(tag if shape_[-1] == n or tag == -1 else JOINED)
            offset += s * start
        else:
            offset += s * (int(p) % n)
            if tag != -1:
                raise Unsupported("an element of a dimension that a mask narrows")
    shape_ += sym.shape[axis:]
    strides += old[axis:]
    axes += tags[axis:]
    if offset and sym.kind in ("pred", "index"):
        return late(sym, tuple(shape_), lambda t: _viewed(t, parts))
    made = seen(sym, tuple(shape_), tuple(strides) if sym.strides else (), tuple(axes) if sym.axes else ())
    if offset:
        made.source = Part(sym.source, offset) if not isinstance(sym.source, Part) else Part(sym.source.base, sym.source.offset + offset)
    return made


def reshaped(sym: Sym, shape: tuple[int, ...]) -> Sym:
    """A value in another shape: tiles by their strides, computed values by their parts, or late."""
    if shape == sym.shape:
        return sym
    if prod(shape) != sym.size:
        raise Unsupported(f"a reshape of {sym.shape} to {shape}")
    if sym.kind == "const":
        return seen(sym, shape, ())
    if sym.kind == "wide" and sym.name == "load":
        return loaded(reshaped(sym.args[0], shape))
    if sym.is_leaf:
        try:
            return seen(sym, shape, strides_of(sym.shape, sym.strides, shape), carried(sym.shape, sym.axes, shape))
        except Unsupported:
            return late(sym, shape, lambda t: reshaped(t, shape))
    if sym.kind in ("fold", "scan", "matmul", "pfold"):
        # elements keep their order: what stores them finds them by it
        return Sym(sym.kind, shape, sym.dtype, sym.args, sym.name, raw=sym.raw, more={"base": sym.shape, **sym.more})
    if sym.kind in ("call", "select", "round", "exact"):
        try:
            parts = tuple(_part(a, sym.shape, shape) for a in sym.args)
            return Sym(sym.kind, shape, sym.dtype, parts, sym.name, value=sym.value, raw=sym.raw, more=sym.more)
        except Unsupported:
            pass
    return late(sym, shape, lambda t: reshaped(t, shape))


def _part(arg: Sym, old: tuple[int, ...], new: tuple[int, ...]) -> Sym:
    """An argument of a value that is reshaped from `old` to `new`."""
    if arg.size == 1:
        return reshaped(arg, (1,) * len(new))
    if arg.shape == old:
        return reshaped(arg, new)
    if arg.ndim == len(old) and arg.shape[0] == old[0] == new[0] and prod(arg.shape[1:]) == 1:
        return reshaped(arg, (arg.shape[0],) + (1,) * (len(new) - 1))
    raise Unsupported(f"a reshape of a value with a part of {arg.shape}")


def storage_name(dtype: np.dtype[Any]) -> str:
    """The name of the dtype of a temporary tile."""
    return dtypes.canonical(dtype)
