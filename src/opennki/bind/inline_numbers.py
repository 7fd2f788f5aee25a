"""Dtypes and building blocks in JAX: rounding to a dtype, and the reductions and scans that bodies call.

Rounding is that of `isa.dtypes`. Sums are XLA's: they do not follow the one defined order of `isa.reduce`, so a float32 sum of n elements
may differ from the interpreter's in its last bits.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from opennki.bind.inline_values import Unknown, Value, cast, exact, known, plain, to_jax
from opennki.isa import dtypes, reduce, scalar
from opennki.isa import known as shortcuts

# Mantissa bits of the formats with the exponents of float32. They are rounded to on their own: XLA may drop a cast there and back (with
# "excess precision"), but not this. For formats with fewer exponents it would flush what is below their smallest normal number.
_MANTISSA = {"bfloat16": 7, "tfloat32": 10}


def read(array: Any, name: str) -> Any:
    """float32 of storage."""
    if known(array):
        return dtypes.reader(name)(np.ascontiguousarray(array))
    return cast(array, np.dtype(np.float32))


def encode(x: Any, name: str) -> Any:
    """Storage of float32, rounded once, to nearest even."""
    name = dtypes.canonical(name)
    if known(x):
        return dtypes.from_float32(np.ascontiguousarray(x), name)
    storage = dtypes.storage(name)
    if name in _MANTISSA:
        x = lax.reduce_precision(x, 8, _MANTISSA[name])
    elif storage.itemsize == 1 and dtypes.is_float(name):
        x = _to_odd(x)
    if name == "bool":
        return (x != 0).astype(np.uint8)
    if dtypes.is_integer(name):
        return _to_integer(x, storage)
    return cast(x, storage)


@jax.custom_jvp
def _to_odd(x: jax.Array) -> jax.Array:
    """float32 with 8 significant bits, the last one sticky: XLA may round to an 8-bit float by way of float16, and from here that equals
    rounding once."""
    bits = lax.bitcast_convert_type(x, np.uint32)
    lost = (bits & np.uint32(0xFFFF)) != 0
    rounded = lax.bitcast_convert_type((bits & np.uint32(0xFFFF0000)) | (lost.astype(np.uint32) << 16), np.float32)
    return jnp.where(jnp.isnan(x), x, rounded)


@_to_odd.defjvp
def _to_odd_jvp(primals: Any, tangents: Any) -> Any:
    return _to_odd(*primals), tangents[0]


def _to_integer(x: jax.Array, storage: np.dtype[Any]) -> jax.Array:
    info = np.iinfo(storage)
    value = jnp.where(jnp.isnan(x), np.float32(0), jnp.rint(x))
    over = value >= np.float32(info.max)
    under = value <= np.float32(info.min)
    inside = jnp.where(over | under, np.float32(0), value).astype(storage)
    return jnp.where(over, storage.type(info.max), jnp.where(under, storage.type(info.min), inside))


def store(value: Any, name: str) -> Any:
    """Storage of dtype `name` of what a body returned: rounded, or bits where it has that dtype already."""
    array = value if isinstance(value, jax.Array) else np.asarray(value)
    kind = np.dtype(array.dtype)
    if kind == np.float32:
        return encode(array, name)
    if kind == dtypes.storage(name) and name != "tfloat32":
        return array
    return convert(array, dtypes.canonical(kind), name)


def convert(array: Any, src: str, dst: str, out: Any = None) -> Any:
    """`isa.dtypes.convert` of arrays without numbers too."""
    if out is not None:
        raise Unknown("a conversion into an array")
    inner = plain(array)
    src, dst = dtypes.canonical(src), dtypes.canonical(dst)
    if known(inner):
        result: Any = dtypes.convert(np.ascontiguousarray(inner), src, dst)
    elif src == dst:
        result = inner
    elif dtypes.is_integer(src) and dtypes.is_integer(dst):
        result = _integer(inner, dst)
    else:
        result = encode(cast(inner, np.dtype(np.float32)), dst)
    return Value(result) if isinstance(array, Value) else result


def _integer(array: jax.Array, dst: str) -> jax.Array:
    if dst == "bool":
        return (array != 0).astype(np.uint8)
    storage = dtypes.storage(dst)
    given, wanted = np.iinfo(array.dtype), np.iinfo(storage)
    with exact(array):
        if given.min < wanted.min:
            array = jnp.maximum(array, to_jax(np.dtype(array.dtype).type(wanted.min)))
        if given.max > wanted.max:
            array = jnp.minimum(array, to_jax(np.dtype(array.dtype).type(wanted.max)))
    return array.astype(storage)


# ---- building blocks of bodies: what stands in for a function of isa/ ----------------------------------------

_REDUCE: dict[str, Callable[..., jax.Array]] = {"add": jnp.sum, "multiply": jnp.prod, "maximum": jnp.max, "minimum": jnp.min,
           "logical_and": jnp.all, "logical_or": jnp.any}
_BITS = {"bitwise_and": lax.bitwise_and, "bitwise_or": lax.bitwise_or, "bitwise_xor": lax.bitwise_xor}


def _reduce(x: Any, op: Any, axes: tuple[int, ...], keepdims: bool) -> jax.Array:
    name = scalar.resolve(op)
    if name == "subtract":  # the first minus the others
        first = tuple(0 if a in axes else slice(None) for a in range(x.ndim))
        x = (-x).at[first].multiply(-1)
        name = "add"
    if name == "logical_xor":
        return ((x != 0).sum(axes, keepdims=keepdims) % 2).astype(np.float32)
    if name in _BITS:
        zero = np.dtype(x.dtype).type(0)
        value = lax.reduce(x, ~zero if name == "bitwise_and" else zero, _BITS[name], axes)
        return jnp.expand_dims(value, axes) if keepdims else value
    value = _REDUCE[name](x != 0 if name.startswith("logical") else x, axis=axes, keepdims=keepdims)
    return value.astype(np.float32) if name.startswith("logical") else value


def reduce_free(x: Value, op: Any, axes: Any, keepdims: bool = False) -> Value:
    """`isa.reduce.reduce_free` in the order of XLA."""
    given = (axes,) if isinstance(axes, int) else tuple(axes)
    return Value(_reduce(to_jax(plain(x)), op, tuple(sorted(a % x.ndim for a in given)), keepdims))


def reduce_partition(x: Value, op: Any) -> Value:
    """`isa.reduce.reduce_partition` in the order of XLA."""
    return Value(_reduce(to_jax(plain(x)), op, (0,), True))


def scan(step: Callable[..., Any], state: Any, *rows: Any) -> tuple[Value, Value]:
    """`isa.reduce.running` as a scan."""
    columns = tuple(to_jax(plain(r)).T for r in rows)

    def once(carry: jax.Array, xs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        new = plain(step(Value(carry), *[Value(x) for x in xs])).astype(np.float32)
        return new, new
    last, states = lax.scan(once, cast(to_jax(plain(state)), np.dtype(np.float32)), columns)
    return Value(states.T), Value(last)


def scan_free(function: Callable[[Any], Callable[..., Any]], data0: Value, data1: Value, initial: Any, op0: Any, op1: Any,
              reverse0: bool = False, reverse1: bool = False) -> Value:
    """`isa.reduce.scan_free` as a scan; `function` gives the scalar function of an operator."""
    f0, f1 = function(op0), function(op1)
    partitions = data0.shape[0]

    def step(state: Value, a: Value, b: Value) -> Any:
        between = f0(state, a) if reverse0 else f0(a, state)
        return f1(b, between) if reverse1 else f1(between, b)
    start = jnp.broadcast_to(to_jax(plain(initial)).reshape(-1), (partitions,))
    flat = (partitions, -1)
    return scan(step, start, data0.reshape(flat), data1.reshape(flat))[0].reshape(data0.shape)


def certain(truth: Value) -> bool:
    """`isa.known.certain`: False where there are no numbers yet."""
    inner = plain(truth)
    return bool(known(inner) and np.all(inner))


def blockwise(formula: Callable[..., Any], flat: Value) -> Any:
    """The float64 formulas of `isa.scalar`, in float32 and at once."""
    x, y = plain(flat), plain(formula(flat))
    if known(y):
        return Value(y)
    # the formulas stand a large number for infinity, which float32 does not round back to it
    return Value(jnp.where(jnp.isinf(x) & (jnp.abs(y) >= np.finfo(np.float32).max), y * 2, y))


STANDS_IN: dict[Any, Any] = {
    reduce.reduce_free: reduce_free, reduce.reduce_partition: reduce_partition, reduce.running: scan, shortcuts.certain: certain,
    dtypes.convert: convert, scalar._blockwise: blockwise,
}
