"""Arrays of a body that is expanded into JAX: the array interface of NumPy over values that may have no numbers yet.

A body of `isa/` is written for NumPy. Called with `Value` operands it builds JAX operations: operators and NumPy functions come here
through NumPy's own protocols (`__array_ufunc__`, `__array_function__`), and what NumPy makes without them (`np.empty`, `np.asarray`, ...)
through the module `numpy_like`, which stands in for `np` in the body (`inline_bodies`).

A value is a NumPy array as long as it is known while the program is made, so that index arithmetic and constants are computed then. Where a
body needs a number that is known only when the program runs, `Unknown` is raised.
"""
from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_LARGEST = float(np.finfo(np.float32).max)
_UNIFORM_FROM = 64  # elements from which a constant array is looked at for being one number


class Unknown(Exception):
    """A body asked for something that JAX cannot say while the program is made."""


def x64() -> Any:
    """A context in which 64-bit integers exist."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64
    return enable_x64(True)


def exact(*values: Any) -> Any:
    """`x64` where an operation on these values has 64-bit integers, in which bodies compute exact integer results; else no context.

    Not for everything: some operations of JAX (its iota, constants) look at the setting again when they are compiled, outside.
    """
    wide = integers = traced = False
    for v in _leaves(values):
        kind, size = v.dtype.kind, v.dtype.itemsize
        wide |= kind in "iu" and size == 8
        if isinstance(v, jax.Array):
            traced |= kind in "iu" and size == 8
            integers |= kind in "iu"
    return _wide_context() if traced or (wide and integers) else nullcontext()


@contextmanager
def _wide_context() -> Iterator[bool]:
    with x64():
        yield True


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for v in value:
            yield from _leaves(v)
    elif isinstance(value, (np.ndarray, np.generic, jax.Array)):
        yield value


def known(value: Any) -> bool:
    """True for values with numbers: NumPy arrays and Python numbers."""
    return not isinstance(value, jax.Array)


def to_jax(value: Any) -> jax.Array:
    """A JAX array; constants of one number do not become literals of the program."""
    if isinstance(value, jax.Array):
        return value
    array = np.asarray(value)
    if array.dtype.kind in "iu" and array.dtype.itemsize == 8:
        return _wide(array)
    if array.size >= _UNIFORM_FROM:
        first = array[(0,) * array.ndim]
        if not any(array.strides) or (array == first).all():
            return jnp.full(array.shape, first, array.dtype)
    return jnp.asarray(array)


def _wide(array: np.ndarray) -> jax.Array:
    """64-bit integers from a 32-bit constant: older versions of JAX compile 64-bit constants as 32-bit ones outside `x64`."""
    low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
    narrow = np.int32 if low >= -2**31 and high < 2**31 else np.uint32
    if narrow is np.uint32 and not 0 <= low <= high < 2**32:
        raise Unknown("constants of more than 32 bits")
    with x64():
        return to_jax(array.astype(narrow)).astype(array.dtype)


def _number(value: Any) -> Any:
    """A Python number as an operand: one that float32 cannot hold stays finite, as it is in float64."""
    if isinstance(value, float) and abs(value) > _LARGEST and value not in (float("inf"), float("-inf")) and value == value:
        return _LARGEST if value > 0 else -_LARGEST
    return value


def plain(value: Any) -> Any:
    """The array inside, for operands of every kind; tuples and lists of them too."""
    if isinstance(value, Value):
        return value.array
    if isinstance(value, (tuple, list)):
        return type(value)(plain(v) for v in value)
    return _number(value)


def wrapped(value: Any) -> Any:
    """What a JAX or NumPy function returned, as a body gets it."""
    if isinstance(value, (tuple, list)):
        return type(value)(wrapped(v) for v in value)
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        return Value(value)
    return value


def _traced(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_traced(v) for v in value)
    return isinstance(value, jax.Array)


def _for_jax(value: Any) -> Any:
    if isinstance(value, list) and value and all(isinstance(v, (bool, int, float)) for v in value):
        return np.asarray(value)  # NumPy takes lists for arrays, JAX does not
    if isinstance(value, (tuple, list)):
        return type(value)(_for_jax(v) for v in value)
    return to_jax(value) if isinstance(value, np.ndarray) else value


def index_of(key: Any) -> Any:
    """An index with JAX or NumPy arrays in it."""
    return tuple(_narrow(plain(k)) for k in key) if isinstance(key, tuple) else _narrow(plain(key))


def _narrow(index: Any) -> Any:
    """An index array of 32 bits: none counts further."""
    wide = isinstance(index, (np.ndarray, jax.Array)) and index.dtype.kind in "iu" and index.dtype.itemsize == 8
    return index.astype(np.int32) if wide else index


def _is_basic(key: Any) -> bool:
    parts = key if isinstance(key, tuple) else (key,)
    return all(k is None or k is Ellipsis or isinstance(k, (int, np.integer, slice)) for k in parts)


class Value:
    """An array. `part_of` is the array whose memory it would share in NumPy: such a part is not written to. `few_bits`: it holds
    float32 numbers that bfloat16 can hold, so that products of them need no more than one pass of a matrix unit."""

    __slots__ = ("array", "few_bits", "part_of")
    __array_priority__ = 1000

    def __init__(self, array: Any, part_of: Value | None = None, few_bits: bool = False) -> None:
        self.array = array if isinstance(array, jax.Array) else np.asarray(array)
        self.part_of = part_of
        self.few_bits: bool = few_bits or (part_of is not None and part_of.few_bits)

    # ---- what it is ----
    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.array.dtype)

    @property
    def ndim(self) -> int:
        return len(self.array.shape)

    @property
    def size(self) -> int:
        return prod(self.array.shape)

    @property
    def T(self) -> Value:
        return Value(self.array.T, self)

    def __len__(self) -> int:
        return int(self.shape[0])

    def __repr__(self) -> str:
        return f"<value {self.shape} {self.dtype}>"

    # ---- numbers, where they are known ----
    def _numbers(self, what: str) -> np.ndarray:
        if not known(self.array):
            raise Unknown(f"{what} of a value that is known only when the kernel runs")
        return np.asarray(self.array)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.asarray(self._numbers("the numbers"), dtype)

    def __bool__(self) -> bool:
        return bool(self._numbers("the truth"))

    def __int__(self) -> int:
        return int(self._numbers("the number"))

    def __index__(self) -> int:
        return int(self._numbers("the number").__index__())

    def __float__(self) -> float:
        return float(self._numbers("the number"))

    def item(self) -> Any:
        return self._numbers("the number").item()

    # ---- forms ----
    def reshape(self, *shape: Any) -> Value:
        wanted = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        return Value(self.array.reshape(wanted), self)

    def transpose(self, *axes: Any) -> Value:
        wanted = axes[0] if len(axes) == 1 and (axes[0] is None or isinstance(axes[0], (tuple, list))) else axes or None
        return Value(self.array.transpose(wanted), self)

    def ravel(self) -> Value:
        return self.reshape(-1)

    def copy(self, order: str = "C") -> Value:
        return Value(self.array if not known(self.array) else np.array(self.array))

    def astype(self, dtype: Any, order: str = "K", copy: bool = True) -> Value:
        return self if not copy and self.dtype == np.dtype(dtype) else Value(cast(self.array, np.dtype(dtype)))

    def view(self, dtype: Any) -> Value:
        same = self.array.view(np.dtype(dtype)) if known(self.array) else bitcast(self.array, np.dtype(dtype))
        value = Value(same, self)
        value.few_bits = False
        return value

    # ---- elements ----
    def __getitem__(self, key: Any) -> Value:
        at = index_of(key)
        if _is_basic(at):
            return Value(self.array[at], self)
        if not _traced(at) and known(self.array):
            return Value(self.array[at])
        _no_choice(at)
        with exact(self.array):
            return Value(to_jax(self.array)[_for_jax(at)])

    def __setitem__(self, key: Any, value: Any) -> None:
        at, new = index_of(key), plain(value)
        if known(self.array) and not _traced(new) and not _traced(at):
            self.write(np.array(self.array))
            self.array[at] = new
            return
        _no_choice(at)
        if at is Ellipsis or at == slice(None):
            self.write(jnp.broadcast_to(cast(to_jax(new), self.dtype), self.shape))
        else:
            self.write(to_jax(self.array).at[_for_jax(at)].set(cast(to_jax(new), self.dtype)))

    def _own(self) -> None:
        if self.part_of is not None:
            raise Unknown("a write to a part of an array")

    def write(self, array: Any) -> None:
        """Give it other contents."""
        self._own()
        self.array, self.few_bits = array, False

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    # ---- NumPy's protocols ----
    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **kw: Any) -> Any:
        result = _ufunc(ufunc, method, inputs, kw)
        if out is None:
            return result
        target = out[0] if isinstance(out, tuple) else out
        if not isinstance(target, Value):
            raise Unknown("a result in an array of NumPy")
        target[...] = result
        return target

    def __array_function__(self, func: Any, kinds: Any, args: Any, kw: Any) -> Any:
        return call(func.__name__, args, kw)


def _no_choice(at: Any) -> None:
    parts = at if isinstance(at, tuple) else (at,)
    if any(isinstance(k, jax.Array) and k.dtype == np.bool_ for k in parts):
        raise Unknown("the choice of elements by truth values that are known only when the kernel runs")


def cast(array: Any, dtype: np.dtype[Any]) -> Any:
    """Another dtype, as NumPy casts."""
    if known(array):
        with np.errstate(all="ignore"):
            return np.asarray(array).astype(dtype)
    if array.dtype == dtype:
        return array
    with x64() if dtype.kind in "iu" and dtype.itemsize == 8 else nullcontext():
        return array.astype(dtype)


def bitcast(array: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """The same bytes as elements of another dtype; the last dimension grows or shrinks."""
    if np.dtype(array.dtype) == dtype:
        return array
    old, new = np.dtype(array.dtype).itemsize, dtype.itemsize
    if old == new:
        return lax.bitcast_convert_type(array, dtype)
    if old > new:
        parts = lax.bitcast_convert_type(array, dtype)
        return parts.reshape(*array.shape[:-1], array.shape[-1] * (old // new))
    return lax.bitcast_convert_type(array.reshape(*array.shape[:-1], array.shape[-1] * old // new, new // old), dtype)


_RUNNING = {np.maximum: lax.cummax, np.minimum: lax.cummin, np.add: lax.cumsum, np.multiply: lax.cumprod}

# ---- functions -------------------------------------------------------------------------------------------


def _ufunc(ufunc: Any, method: str, inputs: tuple[Any, ...], kw: dict[str, Any]) -> Any:
    operands = [plain(v) for v in inputs]
    options = {k: plain(v) for k, v in kw.items()}
    if not any(_traced(v) for v in (*operands, *options.values())):
        with np.errstate(all="ignore"):
            return wrapped(getattr(ufunc, method)(*operands, **options))
    function = getattr(jnp, ufunc.__name__, None)
    if function is None:
        raise Unknown(f"numpy.{ufunc.__name__}")
    dtype = options.pop("dtype", None)
    if method != "__call__":
        function = _RUNNING.get(ufunc) if method == "accumulate" else getattr(function, method, None)
        if function is None:
            raise Unknown(f"numpy.{ufunc.__name__}.{method}")
    if ufunc is np.matmul:
        few = all(isinstance(v, Value) and v.few_bits for v in inputs)
        options["precision"] = lax.Precision.DEFAULT if few else lax.Precision.HIGHEST
    with exact(operands) as wide:
        if wide is not None:
            operands = [np.asarray(v, np.int64) if isinstance(v, int) else v for v in operands]
        result = function(*[_for_jax(v) for v in operands], **options)
    return Value(result if dtype is None else cast(result, np.dtype(dtype)))


def _copyto(dst: Value, src: Any, where: Any = True) -> None:
    new = cast(to_jax(plain(src)), dst.dtype)
    dst.write(jnp.where(to_jax(plain(where)), new, to_jax(dst.array)))


def _partition(x: Any, kth: int, axis: int = -1) -> Value:
    array = plain(x)  # a sorted array is partitioned everywhere
    return Value(np.sort(array, axis=axis) if known(array) else jnp.sort(array, axis=axis))


def _argmax(x: Any, axis: int | None = None) -> Value:
    array = plain(x)
    if known(array):
        return Value(np.argmax(array, axis))
    return Value(lax.argmax(array.reshape(-1) if axis is None else array, 0 if axis is None else axis % array.ndim, np.int32))


def _take_along_axis(x: Any, at: Any, axis: int) -> Any:
    array, index = plain(x), _narrow(plain(at))
    if known(array) and known(index):
        return Value(np.take_along_axis(array, index, axis))
    return Value(jnp.take_along_axis(to_jax(array), to_jax(index), axis))


# NumPy functions whose JAX form has another name or signature, by name.
_OWN: dict[str, Callable[..., Any]] = {
    "copyto": _copyto,
    "partition": _partition,
    "argmax": _argmax,
    "take_along_axis": _take_along_axis,
    "may_share_memory": lambda a, b, max_work=None: False,
    "shape": lambda a: a.shape,
    "ndim": lambda a: a.ndim,
    "size": lambda a: a.size,
}


def call(name: str, args: Any, kw: Any) -> Any:
    """A NumPy function, named, of operands that may be values."""
    own = _OWN.get(name)
    if own is not None and (name != "copyto" or isinstance(args[0], Value)):
        return own(*args, **kw)
    operands, options = plain(tuple(args)), {k: plain(v) for k, v in kw.items()}
    if not _traced(operands) and not any(_traced(v) for v in options.values()):
        return wrapped(getattr(np, name)(*operands, **options))
    function = getattr(jnp, name, None)
    if function is None:
        raise Unknown(f"numpy.{name}")
    with exact(operands) as wide:
        if wide is not None and name == "where":
            operands = tuple(np.asarray(v, np.int64) if isinstance(v, int) else v for v in operands)
        return wrapped(function(*_for_jax(operands), **{k: _for_jax(v) for k, v in options.items()}))


def _method(name: str) -> Any:
    def method(self: Value, *args: Any, **kw: Any) -> Any:
        return call(name, (self, *args), kw)
    return method


for _name in ("all", "any", "sum", "max", "min", "prod", "argmax", "argmin", "repeat", "squeeze", "mean"):
    setattr(Value, _name, _method(_name))


def _operator(ufunc: Any, swap: bool) -> Any:
    def operator(self: Value, other: Any) -> Any:
        return _ufunc(ufunc, "__call__", (other, self) if swap else (self, other), {})
    return operator


def _in_place(ufunc: Any) -> Any:
    def operator(self: Value, other: Any) -> Value:
        self[...] = _ufunc(ufunc, "__call__", (self, other), {})
        return self
    return operator


_function: Any
for _name, _function in (
    ("add", np.add), ("sub", np.subtract), ("mul", np.multiply), ("truediv", np.divide), ("floordiv", np.floor_divide),
    ("mod", np.remainder), ("pow", np.power), ("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor),
    ("lshift", np.left_shift), ("rshift", np.right_shift), ("matmul", np.matmul),
):
    setattr(Value, f"__{_name}__", _operator(_function, False))
    setattr(Value, f"__r{_name}__", _operator(_function, True))
    setattr(Value, f"__i{_name}__", _in_place(_function))
for _name, _function in (("lt", np.less), ("le", np.less_equal), ("gt", np.greater), ("ge", np.greater_equal),
                         ("eq", np.equal), ("ne", np.not_equal)):
    setattr(Value, f"__{_name}__", _operator(_function, False))
for _name, _function in (("neg", np.negative), ("abs", np.absolute), ("invert", np.invert)):
    setattr(Value, f"__{_name}__", lambda self, f=_function: _ufunc(f, "__call__", (self,), {}))


# ---- the module that stands in for numpy ---------------------------------------------------------------------


def _asarray(x: Any, dtype: Any = None, order: Any = None, copy: Any = None) -> Value:
    value = x if isinstance(x, Value) else Value(np.stack([plain(v) for v in x]) if _mixed(x) else np.asarray(plain(x)))
    return value if dtype is None else value.astype(dtype, copy=False)


def _mixed(x: Any) -> bool:
    if isinstance(x, (tuple, list)) and any(isinstance(v, Value) and not known(v.array) for v in x):
        raise Unknown("an array made of values that are known only when the kernel runs")
    return False


def _array(x: Any, dtype: Any = None, order: Any = None, copy: Any = True) -> Value:
    return Value(_asarray(x, dtype).array)


def _made(name: str) -> Callable[..., Value]:
    def make(shape: Any, *args: Any, **kw: Any) -> Value:
        return Value(getattr(np, name)(shape, *[plain(a) for a in args], **kw))
    return make


def _full(shape: Any, value: Any, dtype: Any = None, order: Any = None) -> Value:
    if isinstance(value, Value) and not known(value.array):
        return Value(jnp.full(shape, value.array, dtype))
    return Value(np.full(shape, plain(value), dtype))


class _Module(types.ModuleType):
    """numpy, but for what does not ask its operands."""

    asarray = staticmethod(_asarray)
    ascontiguousarray = staticmethod(_asarray)
    array = staticmethod(_array)
    empty = staticmethod(_made("zeros"))  # unwritten memory has any value
    zeros = staticmethod(_made("zeros"))
    ones = staticmethod(_made("ones"))
    eye = staticmethod(_made("eye"))
    full = staticmethod(_full)
    ndarray = Value

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


numpy_like = _Module("numpy")
