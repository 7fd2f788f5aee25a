"""Stores past the caches, of tiles in main memory: what they take is made piece by piece, in lines, and the rest is as it was."""

from __future__ import annotations

import numpy as np
import pytest

from opennki.execute import abi
from opennki.execute.assemble import uop
from opennki.isa import dtypes
from opennki.isa.dtype_names import STORAGE
from opennki.isa.scalar import SCALAR
from tests.execute import native
from tests.execute.test_native_elementwise import L, S, lib, random, run

__all__ = ["lib"]  # a fixture

FAR = {"pad": 1}
FUNCTIONS = ("add", "subtract", "multiply", "maximum", "minimum", "divide")


def inside(shape, dtype, skip):
    """An array that begins `skip` elements behind a line, and what is around it."""
    size = int(np.prod(shape))
    around = np.full(size + skip + 64, 7, STORAGE[dtype])
    first = (-around.ctypes.data % 64) // around.itemsize + skip
    around = around if first + size <= around.size else np.full(size + first + 64, 7, STORAGE[dtype])
    first = (-around.ctypes.data % 64) // around.itemsize + skip
    return around, first, around[first : first + size].reshape(shape)


def put_specials(x, dtype, seed):
    """NaN, infinities, zeros and denormals among the elements."""
    values = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-40, -1e-40, 3e38, -3e38], np.float32)
    places = x.reshape(-1)[seed % 3 :: 11]
    with np.errstate(over="ignore"):
        places[:] = np.resize(dtypes.from_float32(values, dtype), places.shape)


@pytest.mark.parametrize("shape", [(1, 130), (3, 700), (2, 2048), (2, 2083), (1, 9001), (9, 256)])
@pytest.mark.parametrize("skip", [0, 8, 13])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
def test_functions_that_make_what_is_stored(lib, shape, skip, dtype):
    rows = shape[0]
    for source in ("bfloat16", "float32"):
        x, y = (inside(shape, source, skip + i)[2] for i in range(2))
        for i, operand in enumerate((x, y)):
            operand[:] = random(shape, source, seed=i)
            put_specials(operand, source, i)
        wide = np.broadcast_to(random((rows, 1), seed=2), shape)
        a, b = dtypes.to_float32(x, source), dtypes.to_float32(y, source)
        for name in FUNCTIONS:
            fn = SCALAR[name].numpy
            with np.errstate(all="ignore"):
                cases = {
                    "xy": ([uop(abi.FUNC, 3, 0, 1, fn=name)], fn(a, b)),
                    "x1": ([uop(abi.FUNC, 3, 0, fn=name, imm=1.25)], fn(a, np.full_like(a, 1.25))),
                    "1x": ([uop(abi.FUNC, 3, -1, 0, fn=name, imm=1.25)], fn(np.full_like(a, 1.25), a)),
                    "xc": ([uop(abi.FUNC, 3, 0, 2, fn=name)], fn(a, wide)),
                    "cx": ([uop(abi.FUNC, 3, 2, 0, fn=name)], fn(wide, a)),
                    "xx": ([uop(abi.FUNC, 3, 0, 0, fn=name)], fn(a, a)),
                    "(x-y)c": ([uop(abi.FUNC, 3, 0, 1, fn="subtract"), uop(abi.FUNC, 3, 3, 2, fn=name)], fn(a - b, wide)),
                    "-x": ([uop(abi.FUNC, 3, 0, fn="negative")], -a),
                }
            for what, (ops, want) in cases.items():
                around, first, out = inside(shape, dtype, skip)
                loads = [uop(L, 0, 0, **FAR), uop(L, 1, 1, **FAR), uop(L, 2, 2)]
                tiles = [(x, source), (y, source), (wide, "float32"), (out, dtype)]
                run(lib, 1, 1, [(False, [*loads, *ops, uop(S, 3, 3, **FAR)])], tiles)
                with np.errstate(all="ignore"):
                    expected = np.array(dtypes.from_float32(want.astype(np.float32), dtype))
                native.assert_same(out, expected, (name, what, source))
                assert (around[:first] == 7).all() and (around[first + out.size :] == 7).all(), (name, what)


def test_results_that_others_read_too(lib):
    """Stored twice, folded, and kept for a later phase: the store is not the only reader."""
    x, total = random((5, 1000)), np.zeros((5, 1), np.float32)
    first, second, third = (np.zeros(x.shape, STORAGE[t]) for t in ("float32", "bfloat16", "float32"))
    phases = [
        (
            False,
            [
                uop(L, 0, 0, **FAR),
                uop(abi.FUNC, 1, 0, fn="multiply", imm=3.0),
                uop(S, 1, 1, **FAR),
                uop(S, 2, 1, **FAR),
                uop(abi.FOLD, 2, 1, fn="add"),
                uop(abi.KEEP, 0, 1),
            ],
        ),
        (False, [uop(abi.KEPT, 0, 0), uop(abi.FUNC, 0, 0, 2, fn="subtract"), uop(S, 3, 0, **FAR)]),
        (True, [uop(S, 4, 2)]),
    ]
    tiles = [(x, "float32"), (first, "float32"), (second, "bfloat16"), (third, "float32"), (np.broadcast_to(total, x.shape), "float32")]
    run(lib, 1, 1, phases, tiles)
    want = x * np.float32(3)
    native.assert_same(first, want)
    native.assert_same(second, np.array(dtypes.from_float32(want, "bfloat16")))
    native.assert_same(third, want - total)
    assert np.allclose(total, want.sum(axis=1, keepdims=True), rtol=1e-4)


@pytest.mark.parametrize("gap", [0, 5, 64])
def test_rows_with_gaps_between_them(lib, gap):
    """What is asked for is not what lies behind, but nothing else is written."""
    x, y = (random((40, 512 + gap), seed=i) for i in range(2))
    out = np.full(x.shape, 7, np.float32)
    ops = [uop(L, 0, 0, **FAR), uop(L, 1, 1, **FAR), uop(abi.FUNC, 2, 0, 1, fn="add"), uop(S, 2, 2, **FAR)]
    run(lib, 1, 1, [(False, ops)], [(a[:, :512], "float32") for a in (x, y, out)])
    native.assert_same(out[:, :512], x[:, :512] + y[:, :512])
    assert (out[:, 512:] == 7).all()
