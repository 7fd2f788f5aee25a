"""Stand-ins for traced calls, and the awkward values that every Vector Engine test uses."""
from __future__ import annotations

import warnings
from types import SimpleNamespace

import numpy as np
import pytest

from opennki.errors import NkiError
from opennki.isa.declare import ISA, Register
from opennki.isa.target import TRN2

F32 = np.float32
SPECIALS = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45, 1.1754942e-38, 3.4028235e38,
                     -3.4028235e38, 1.0, -1.0, 1.5, 0.1, -7.25, 16777217.0, 2.0**-30, 65504.0], F32)


def tile(*shape, dtype="float32", space="sbuf"):
    """What check, raw, cost and results see of a tile."""
    return SimpleNamespace(shape=shape, dtype=dtype, space=space)


def call(name, **given):
    """The arguments of an instruction as the functions of its record get them."""
    record = ISA[name]
    shown = [p for p in record.params if not isinstance(p.spec, Register)]
    values = {p.name: None if p.required else p.default for p in shown}
    assert set(given) <= set(values), set(given) - set(values)
    values.update({"engine": "", **given})
    return SimpleNamespace(**values)


def cost(name, hw, f, dtypes, spaces=None, engine="vector", **attributes):
    """Cycles of one instruction."""
    spaces = spaces or dict.fromkeys(dtypes, "sbuf")
    d = SimpleNamespace(P=128, F=f, dtypes=dtypes, spaces=spaces, engine=engine, **attributes)
    return ISA[name].cost(d, hw)


def pairs():
    """Every pair of special values, as two (P, F) arrays."""
    a, b = np.meshgrid(SPECIALS, SPECIALS, indexing="ij")
    return np.ascontiguousarray(a), np.ascontiguousarray(b)


def same_bits(got, want):
    """Equal bit by bit, any NaN equal to any NaN."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype == F32, (got.dtype, want.dtype)
    assert got.shape == want.shape, (got.shape, want.shape)
    nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(got.view(np.int32)[~nan], want.view(np.int32)[~nan])


def layouts(x):
    """The values of x in other memory layouts."""
    yield np.asfortranarray(x)
    wide = np.zeros((*x.shape[:-1], x.shape[-1] * 2), x.dtype)
    wide[..., ::2] = x
    yield wide[..., ::2]
    yield np.ascontiguousarray(x[..., ::-1])[..., ::-1]


def quiet_pure_and_blind_to_layout(body, args, kwargs):
    """A body gives no warning, leaves its operands alone, and gives the same bits for every memory layout of them."""
    def results(swap):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            got = body(*(swap.get(id(x), x) for x in args), **{n: swap.get(id(x), x) for n, x in kwargs.items()})
        return got if isinstance(got, tuple) else (got,)

    inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, np.ndarray)]
    for x in inputs:
        x.flags.writeable = False
    want = results({})
    assert any(y is not None for y in want)
    moved = [list(layouts(x)) for x in inputs]
    for k in range(3):
        got = results({id(x): m[k] for x, m in zip(inputs, moved)})
        for x, y in zip(got, want, strict=True):
            assert (x is None) == (y is None)
            assert x is None or (x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes())


def fails(name, target=TRN2, **given):
    with pytest.raises(NkiError) as info:
        ISA[name].check(call(name, **given), target)
    assert info.value.rule and info.value.why and info.value.fix
    return info.value


def passes(name, target=TRN2, **given):
    ISA[name].check(call(name, **given), target)
