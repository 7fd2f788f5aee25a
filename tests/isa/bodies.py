"""What tests of instruction bodies share: a caller that follows the convention, and hard operands."""

from __future__ import annotations

from types import SimpleNamespace

import ml_dtypes
import numpy as np

from opennki.isa import declare, dtypes
from opennki.isa.target import TRN1

FLOATS = ("float32", "bfloat16", "float16", "float8_e5m2", "float8_e4m3")
INTS = ("int32", "uint32", "int16", "uint16", "int8", "uint8")
NUMPY = {**{n: np.dtype(n) for n in (*INTS, "float32", "float16")},
         **{n: np.dtype(getattr(ml_dtypes, n)) for n in ("bfloat16", "float8_e5m2", "float8_e4m3")}}


def operand(shape, dtype="float32", seed=0, special=True, scale=4.0):
    """Random storage array; floats have NaN, infinities, both zeros, denormals and large values in it."""
    rng = np.random.default_rng([seed, *shape])
    if dtype in INTS:
        info = np.iinfo(dtype)
        x = rng.integers(info.min, info.max, shape, endpoint=True).astype(dtype)
        x.reshape(-1)[-2:] = (info.min, info.max)[-x.size:]
        return x
    x = (rng.standard_normal(shape) * scale).astype(np.float32)
    if special:
        hard = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-40, -1e-45, 3e38, -3e38, 65504, 1e-8],
                        np.float32)
        flat = x.reshape(-1)
        n = min(flat.size, hard.size)
        flat[rng.permutation(flat.size)[:n]] = hard[:n]
    with np.errstate(all="ignore"):
        return x.astype(NUMPY[dtype])


def bits(x):
    """Bit patterns, for comparisons that tell -0 from 0."""
    x = np.ascontiguousarray(x)
    return x.view(f"u{x.dtype.itemsize}")


def same(got, want):
    """Equal bits, any NaN being as good as another."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape, (got.shape, want.shape)
    assert got.dtype == want.dtype, (got.dtype, want.dtype)
    if got.dtype.kind not in "iub":
        nan = np.isnan(want.astype(np.float32))
        np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
        got, want = np.where(nan, np.zeros((), got.dtype), got), np.where(nan, np.zeros((), want.dtype), want)
    np.testing.assert_array_equal(bits(got), bits(want))


def tile(x, space="sbuf"):
    """How a check or a result rule sees an array (or a shape and a dtype)."""
    if isinstance(x, SimpleNamespace):
        return x
    if isinstance(x, tuple):
        return SimpleNamespace(shape=x[0], dtype=x[1], space=x[2] if len(x) > 2 else space)
    return SimpleNamespace(shape=x.shape, dtype=dtypes.canonical(x.dtype), space=space)


def call(name, **given):
    """The call of an instruction as checks see it: arguments by name, defaults filled in."""
    inst = declare.ISA[name]
    values = {"engine": ""}
    for p in inst.params:
        value = given.get(p.name, None if p.required else p.default)
        if p.name == "engine":
            value = given.get("engine", "")
        if isinstance(p.spec, declare.Tile) and isinstance(value, (tuple, np.ndarray)):
            value = tile(value)
        values[p.name] = value
    return SimpleNamespace(**values)


def check(name, target=TRN1, **given):
    """Run the instruction's own check."""
    declare.ISA[name].check(call(name, **given), target)


def run(name, dtype=None, **given):
    """Call a body by the convention and round what it returns: the first result as `dtype` or as declared."""
    inst = declare.ISA[name]
    c = call(name, **given, dtype=dtype)
    raw = inst.raw(c)
    # the tracer and the executor deal with dtype, mask and engine; a body that must have one gets None
    arguments = {p.name: None for p in inst.params if p.required}
    for key, value in given.items():
        spec = inst.params[inst.index[key]].spec
        if isinstance(spec, declare.Tile) and isinstance(value, np.ndarray) and not raw:
            value = dtypes.to_float32(value, dtypes.canonical(value.dtype))
        arguments[key] = value
    before = {k: v.copy() for k, v in arguments.items() if isinstance(v, np.ndarray)}
    values = inst.body(**arguments)
    for key, value in before.items():
        assert bits(arguments[key]).tobytes() == bits(value).tobytes(), f"the body changed {key}"
    first = values[0] if isinstance(values, tuple) else values
    rule = inst.results[0] if inst.results else None
    if rule is not None:
        shape = rule.shape(c) if callable(rule.shape) else getattr(c, rule.shape).shape
        natural = rule.dtype(c) if callable(rule.dtype) else getattr(c, rule.dtype).dtype
        first = first.reshape(shape)
    else:
        natural = c.dst.dtype
    wanted = dtype or natural
    if raw:
        first = dtypes.convert(first, dtypes.canonical(first.dtype), wanted)
    else:
        assert first.dtype == np.float32, first.dtype
        first = dtypes.from_float32(first, wanted)
    return (first, *values[1:]) if isinstance(values, tuple) else first
