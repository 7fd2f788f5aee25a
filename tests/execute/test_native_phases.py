"""Elementwise programs of several phases, and of several rows at a time."""

from __future__ import annotations

import numpy as np
import pytest

from opennki.execute import abi
from opennki.execute.assemble import elementwise, uop
from opennki.isa import dtypes
from opennki.isa.dtype_names import STORAGE
from opennki.isa.reduce import reduce_free
from tests.execute import native
from tests.execute.test_native_elementwise import L, S, lib, random, run

__all__ = ["lib"]  # a fixture


@pytest.mark.parametrize("shape", [(5, 3), (5, 31), (4, 33), (6, 256), (3, 700), (2, 4097)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_softmax(lib, shape, dtype):
    x = random(shape, dtype)
    out, total = np.zeros(shape, STORAGE[dtype]), np.zeros((shape[0], 1), np.float32)
    phases = [
        (False, [uop(L, 0, 0), uop(abi.FOLD, 1, 0, fn="maximum")]),
        (True, [uop(abi.FUNC, 2, 1, fn="negative")]),
        (
            False,
            [uop(L, 0, 0), uop(abi.FUNC, 0, 0, 2, fn="add"), uop(abi.FUNC, 0, 0, fn="exp"), uop(S, 1, 0), uop(abi.FOLD, 3, 0, fn="add")],
        ),
        (True, [uop(abi.FUNC, 4, 3, fn="reciprocal"), uop(S, 2, 3)]),
        (False, [uop(L, 0, 1), uop(abi.FUNC, 0, 0, 4, fn="multiply"), uop(S, 1, 0)]),
    ]
    run(lib, 1, 1, phases, [(x, dtype), (out, dtype), (np.broadcast_to(total, shape), "float32")])
    value = dtypes.to_float32(x, dtype)
    e = native.call(lib, "exp", np.ascontiguousarray(value + -reduce_free(value, "maximum", 1, keepdims=True)))
    s = reduce_free(e, "add", 1, keepdims=True)
    native.assert_same(total, s)
    native.assert_same(out, dtypes.from_float32(dtypes.round_to(e, dtype) * (np.float32(1) / s), dtype))


def test_a_row_register_is_not_seen_before_the_end_of_its_phase(lib):
    x, out = random((3, 300)), np.zeros((3, 300), np.float32)
    phases = [
        (False, [uop(L, 0, 0), uop(abi.FOLD, 1, 0, fn="add")]),
        (False, [uop(L, 0, 0), uop(abi.FUNC, 0, 0, 1, fn="subtract"), uop(abi.FOLD, 1, 0, fn="maximum"), uop(S, 1, 0)]),
        (False, [uop(L, 0, 1), uop(abi.FUNC, 0, 0, 1, fn="divide"), uop(S, 1, 0)]),
    ]
    run(lib, 1, 1, phases, [(x, "float32"), (out, "float32")])
    centred = x - reduce_free(x, "add", 1, keepdims=True)
    native.assert_same(out, centred / reduce_free(centred, "maximum", 1, keepdims=True))


def test_long_programs_take_their_storage_from_the_heap(lib):
    x, out = random((2, 600)), np.zeros((2, 600), np.float32)
    ops = [uop(L, i, 0) if i == 0 else uop(abi.FUNC, i, i - 1, fn="add", imm=float(i)) for i in range(120)]
    run(lib, 1, 1, [(False, [*ops, uop(S, 1, 119)])], [(x, "float32"), (out, "float32")])
    want = x.copy()
    for i in range(1, 120):
        want = want + np.float32(i)
    native.assert_same(out, want)


def test_assembly_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="at most"):
        elementwise(5, 4, (1,) * 9, [], [])
    with pytest.raises(ValueError, match="do not fit"):
        elementwise(1, 1, (2, 2), [], [((4,), "float32")])


@pytest.mark.parametrize("pad", [0, 5])
@pytest.mark.parametrize("rows", [1, 8, 33, 70])
@pytest.mark.parametrize("n", [1, 3, 40, 300, 512, 1024, 1100, 2048, 2100, 4500])
def test_rows_go_through_the_phases_in_blocks(lib, rows, n, pad):
    """Rows side by side and apart, one value per row, a fold of each, a row that is kept, results in place and in bfloat16."""
    x, out = random((rows, n + pad))[:, :n], np.zeros((rows, n + pad), STORAGE["bfloat16"])[:, :n]
    x[rows // 2, n // 2] = np.nan
    scale, largest, total = random((rows, 1), seed=1), np.zeros((rows, 1), np.float32), np.zeros((rows, 1), np.float32)
    y = x.copy() if pad else x
    first = [uop(L, 0, 0), uop(L, 1, 1), uop(abi.FUNC, 2, 0, 1, fn="multiply"), uop(abi.FOLD, 3, 2, fn="maximum"), uop(abi.KEEP, 0, 2)]
    between = [uop(abi.FUNC, 4, 3, fn="add", imm=0.5), uop(S, 2, 3)]
    last = [uop(abi.KEPT, 5, 0), uop(abi.FUNC, 6, 5, 4, fn="subtract"), uop(abi.FOLD, 7, 6, fn="add"), uop(S, 4, 6), uop(S, 5, 6)]
    wide = (np.broadcast_to(col, x.shape) for col in (scale, largest, total))
    tiles = [(x, "float32"), *((w, "float32") for w in wide), (y, "float32"), (out, "bfloat16")]
    scaled = x * scale
    maximum = reduce_free(scaled, "maximum", 1, keepdims=True)
    want = scaled - (maximum + np.float32(0.5))
    run(lib, 1, 1, [(False, first), (True, between), (False, last), (True, [uop(S, 3, 7)])], tiles)
    native.assert_same(largest, maximum)
    native.assert_same(y, want)
    native.assert_same(out, dtypes.from_float32(want, "bfloat16"))
    native.assert_same(total, reduce_free(want, "add", 1, keepdims=True))


def test_rows_that_store_to_one_place_run_in_turn(lib):
    x, out, state = random((40, 6)), np.zeros((40, 6), np.float32), np.zeros((1, 6), np.float32)
    ops = [uop(L, 0, 0), uop(L, 1, 1), uop(abi.FUNC, 2, 1, 0, fn="add"), uop(S, 1, 2), uop(S, 2, 2)]
    run(lib, 1, 1, [(False, ops)], [(x, "float32"), (np.broadcast_to(state, x.shape), "float32"), (out, "float32")])
    native.assert_same(out, np.add.accumulate(x, axis=0))


@pytest.mark.parametrize("base", [-1, 0])
def test_a_choice_that_is_the_same_everywhere(lib, base):
    """A predicate without strides, as that of a branch."""
    x, out, total = random((9, 70)), np.zeros((9, 70), np.float32), np.zeros((9, 1), np.float32)
    ops = [uop(L, 0, 0), uop(abi.FUNC, 1, 0, fn="exp"), uop(abi.PRED, 2, 0), uop(abi.SELECT, 3, 1, 0, 2), uop(abi.FOLD, 4, 3, fn="add"),
           uop(abi.KEEP, 0, 3)]  # fmt: skip
    phases = [(False, ops), (False, [uop(abi.KEPT, 5, 0), uop(S, 1, 5)]), (True, [uop(S, 2, 4)])]
    tiles = [(x, "float32"), (out, "float32"), (np.broadcast_to(total, x.shape), "float32")]
    run(lib, 1, 1, phases, tiles, preds=[(0, 0)], bases=((base,), ()))
    want = native.call(lib, "exp", x) if base >= 0 else x
    native.assert_same(out, want)
    native.assert_same(total, reduce_free(want, "add", 1, keepdims=True))
