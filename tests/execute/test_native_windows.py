"""Trees over the elements of windows at each level of CPU, against folds of the same elements."""

import numpy as np
import pytest

from opennki.execute import abi
from opennki.execute.assemble import elementwise, uop
from opennki.isa import dtypes
from opennki.isa.dtype_names import STORAGE
from opennki.isa.reduce import reduce_free
from tests.execute import native
from tests.execute.test_unfold import odd

FUNCTIONS = ("add", "multiply", "maximum", "minimum")


@pytest.fixture(params=native.LEVELS)
def lib(request):
    return native.at_level(request.param)


def pooled(lib, fn, x, dtype, window, step, out, pad=0):
    """The folds of windows of x (planes, height, width) by native code."""
    (height, width), strides = window, x.strides
    places = [i * strides[1] + j * strides[2] for i in range(height) for j in range(width)]
    walk = (strides[0], step * strides[1], step * strides[2])
    tiles = [(walk, dtype)] * len(places) + [(out.strides, "float32")]
    ops = [uop(abi.TREE, 0, 0, len(places), fn=fn, pad=pad), uop(abi.STORE, len(places), 0)]
    program = elementwise(1, 2, out.shape, [(False, ops)], tiles)
    program.run(lib, [x.ctypes.data + place for place in places] + [out.ctypes.data])


def expected(fn, x, window, step, shape):
    (height, width), (_, ho, wo) = window, shape
    parts = [x[:, i : i + step * ho : step, j : j + step * wo : step][:, :ho, :wo] for i in range(height) for j in range(width)]
    with np.errstate(all="ignore"):
        return reduce_free(np.stack(parts, -1), fn, (3,))


@pytest.mark.parametrize("window", [(1, 2), (2, 2), (1, 3), (3, 3), (2, 3), (4, 4), (5, 5), (4, 8), (11, 1), (7, 1), (8, 1)])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_windows(lib, window, step):
    rng = np.random.default_rng(window[0] * 10 + step)
    for n in (1, 5, 15, 16, 17, 33, 56, 700):
        for special, fn in [(s, f) for f in FUNCTIONS for s in (False, True)]:
            shape = (2, 3, n)
            height, width = window[0] + step * 2, window[1] + step * (n - 1)
            # exactly what is read: the sanitizers know the end
            x = odd(2, height, width) if special else rng.standard_normal((2, height, width)).astype(np.float32)
            out = np.zeros(shape, np.float32)
            pooled(lib, fn, x, "float32", window, step, out, pad=n % 2)
            native.assert_same(out, expected(fn, x, window, step, shape), (fn, n, special))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3", "int32", "uint8"])
def test_other_dtypes_and_layouts(lib, dtype):
    rng = np.random.default_rng(1)
    x = np.array(dtypes.from_float32((rng.standard_normal((2, 31, 44)) * 20).astype(np.float32), dtype)).astype(STORAGE[dtype])
    for fn in ("add", "maximum"):
        for view in (x, x[:, ::-1, ::-1], x.transpose(0, 2, 1)):
            shape = (2, 9, 9)
            out = np.zeros((2, 9, 18), np.float32)[:, :, ::2]
            pooled(lib, fn, view, dtype, (3, 3), 2, out)
            native.assert_same(out, expected(fn, np.asarray(dtypes.to_float32(view, dtype)), (3, 3), 2, shape), (fn, dtype))


def test_tiles_with_strides_of_their_own_and_results_on_operands(lib):
    """What other passes have moved: each tile goes its own way. And a result that lies on what a window reads."""
    a, b, c = odd(4, 3, 40), odd(4, 3, 80)[:, :, ::2], odd(40, 4, 3).transpose(1, 2, 0)
    for fn in FUNCTIONS:
        out = np.zeros((4, 3, 40), np.float32)
        tiles = [(t.strides, "float32") for t in (a, b, c, out)]
        ops = [uop(abi.TREE, 0, 0, 3, fn=fn), uop(abi.STORE, 3, 0)]
        elementwise(1, 2, out.shape, [(False, ops)], tiles).run(lib, [t.ctypes.data for t in (a, b, c, out)])
        with np.errstate(all="ignore"):
            native.assert_same(out, reduce_free(np.stack([a, b, c], -1), fn, (3,)), fn)
    x = odd(3, 2048)
    want = expected("add", x[:, None, :], (1, 2), 2, (3, 1, 1024))[:, 0]
    ops = [uop(abi.TREE, 0, 0, 2, fn="add"), uop(abi.STORE, 2, 0)]
    tiles = [((x.strides[0], 8), "float32")] * 2 + [((x.strides[0], 4), "float32")]
    elementwise(1, 1, (3, 1024), [(False, ops)], tiles).run(lib, [x.ctypes.data, x.ctypes.data + 4, x.ctypes.data])
    native.assert_same(x[:, :1024], want, "a row that ends before what is read next")
