"""Arguments of kernels: what is odd gives the right result or a clear error, and a failed kernel leaves the caller's arrays alone."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
from tests.errors.harness import SMALL, A

from opennki import jit, simulate_kernel, trace
from opennki.dialects.neuronxcc import language as nl
from opennki.dialects.neuronxcc import typing as nt
from opennki.errors import NkiError
from opennki.kernels.framework import UnifiedKernel


def double(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.load(x) * 2)
    return out


def report(kernel, *args, kind=NkiError, **kwargs):
    """Text of the error of a call; it points at the call, and says what to do."""
    def call():
        simulate_kernel(kernel, *args, **kwargs)  # HERE
    with pytest.raises(kind) as caught:
        call()
    error = caught.value
    assert isinstance(error, NkiError) and error.loc.file == __file__ and "# HERE" in error.loc.source(), str(error)
    assert "rule: " in str(error)
    return str(error)


@pytest.mark.parametrize("array", [
    np.array([[1, None], [2, 3]], object), np.array([["a", "b"]]), np.array([["a"]], "S1"), np.array([["2020-01-01"]], "M8[D]"),
    np.array([[1 + 2j]]), np.zeros((2, 2), [("a", "f4"), ("b", "i4")]), np.zeros((2, 2), np.longdouble)],
    ids=lambda a: str(a.dtype))
@pytest.mark.parametrize("eager", [False, True])
def test_arrays_of_no_numbers(array, eager):
    text = report(double, array, kind=TypeError, eager=eager)
    assert "'x'" in text and str(array.dtype) in text and "arrays of numbers" in text and ".astype" in text


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int32, np.uint8, np.int8, np.int16, np.uint16, np.uint32,
                                   ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fn])
def test_dtypes_pass_through(dtype):
    x = np.array([[1, 2, 3], [4, 5, 6]]).astype(dtype)

    def kernel(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.load(x))
        return out
    got = simulate_kernel(kernel, x)
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(got, x)


def test_bool_array():
    x = np.array([[True, False, True]])

    def kernel(x):
        out = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.shared_hbm)
        nl.store(out, nl.load(x))
        return out
    np.testing.assert_array_equal(simulate_kernel(kernel, x), [[1, 0, 1]])


VIEWS = {
    "transposed": SMALL.T, "fortran": np.asfortranarray(SMALL), "stepped": np.arange(48, dtype=np.float32).reshape(6, 8)[::2, ::2],
    "reversed": SMALL[::-1, ::-1], "broadcast": np.broadcast_to(np.float32([1, 2, 3]), (4, 3)),
    "big endian": SMALL.astype(">f4"), "matrix": SMALL.view(np.matrix), "masked": np.ma.masked_array(SMALL, SMALL > 3),
    "read-only": np.frombuffer(SMALL.tobytes(), np.float32).reshape(3, 4),
    "unaligned": np.frombuffer(b"\0" + SMALL.tobytes(), np.uint8)[1:].view(np.float32).reshape(3, 4),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("eager", [False, True])
def test_arrays_of_any_layout(name, eager):
    x = VIEWS[name]
    before = np.array(x)
    got = simulate_kernel(double, x, eager=eager)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(before) * 2)
    np.testing.assert_array_equal(np.asarray(x), before)


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("eager", [False, True])
def test_empty_arrays(shape, eager):
    """An empty tensor cannot be made; a kernel that only looks at the shape of an empty array runs."""
    x = np.zeros(shape, np.float32)
    with pytest.raises(ValueError) as caught:
        simulate_kernel(double, x, eager=eager)
    assert "size 0" in str(caught.value) and "at least 1" in str(caught.value)
    assert caught.value.loc.source().startswith("out = nl.ndarray")

    def looks(x, y):
        out = nl.ndarray(y.shape, dtype=y.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.load(y) + len(x.shape))
        return out
    np.testing.assert_array_equal(simulate_kernel(looks, x, SMALL, eager=eager), SMALL + len(shape))


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.uint64])
def test_wide_dtypes(dtype):
    with pytest.raises(TypeError) as caught:
        simulate_kernel(double, SMALL.astype(dtype))
    text = str(caught.value)
    assert np.dtype(dtype).name in text and ".astype(np.float32)" in text and "nl.load(x)" in caught.value.loc.source()


@pytest.mark.parametrize("eager", [False, True])
def test_zero_dimensional_array(eager):
    def kernel(x, y):
        out = nl.ndarray(y.shape, dtype=y.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.load(y) * nl.load(x))
        return out
    assert simulate_kernel(kernel, np.array(3.0, np.float32), np.float32([[2.0]]), eager=eager).item() == 6


@pytest.mark.parametrize("scalar", [2, 2.0, np.float32(2), np.int64(2), np.float16(2), True], ids=repr)
def test_scalars_are_constants(scalar):
    def kernel(x, n):
        out = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.shared_hbm)
        nl.store(out, nl.load(x) * n)
        return out
    np.testing.assert_array_equal(simulate_kernel(kernel, SMALL, scalar), SMALL * np.float32(scalar))


@dataclass
class Config:
    """A constant that is not hashable."""

    factors: list


@pytest.mark.parametrize(("constant", "get"), [
    ([2, 3], lambda c: c[1]), ({"f": 3}, lambda c: c["f"]), ({2, 3}, max), (Config([2, 3]), lambda c: c.factors[1]),
    ("3", int), (None, lambda c: 3), (lambda: 3, lambda c: c()), (bytearray(b"\3"), lambda c: c[0])], ids=lambda v: type(v).__name__)
def test_constants_of_any_kind(constant, get):
    """In simulation nothing is cached by value, so a constant need not be hashable (err_nki_param_not_hashable is of framework calls)."""
    def kernel(x, c):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.load(x) * get(c))
        return out
    np.testing.assert_array_equal(simulate_kernel(kernel, SMALL, constant), SMALL * 3)


@pytest.mark.parametrize(("arguments", "name", "kind"), [
    ({"c": [2, 3]}, "c", "list"), ({"c": {"f": 3}}, "c", "dict"), ({"c": {2, 3}}, "c", "set"), ({"c": Config([2])}, "c", "Config"),
    ({"c": bytearray(b"3")}, "c", "bytearray"), ({"c": (1, [2])}, "c", "tuple"), ({"c": 1, "more": [3]}, "more", "list"),
    ({"c": [SMALL, 1, {2: 3}]}, "c[2]", "dict"), ({"c": {"a": SMALL, "b": {1}}}, "c['b']", "set")], ids=str)
def test_constants_of_framework_calls_are_hashable(arguments, name, kind):
    """A framework's call is kept under its arguments; what cannot be a key is named, at the call."""
    def kernel(x, c, more=None):
        return double(x)
    with pytest.raises(TypeError) as caught:
        UnifiedKernel(kernel).dump_config(SMALL, **arguments)  # HERE
    error = caught.value
    assert isinstance(error, NkiError) and error.code == "err_nki_param_not_hashable"
    assert error.loc.file == __file__ and "# HERE" in error.loc.source()
    text = str(error)
    assert f"the argument {name!r} is a {kind}, which is not hashable" in text and f"  operand: {name}\n" in text
    assert "  rule: " in text and "  why: " in text and "tuple" in text.partition("  fix: ")[2]


def test_lists_of_arrays():
    def kernel(xs, named):
        out = nl.ndarray(xs[0].shape, dtype=xs[0].dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.load(xs[0]) + nl.load(xs[1]) * nl.load(named["w"]))
        return out
    got = simulate_kernel(kernel, [SMALL, SMALL + 1], {"w": SMALL, "n": 3})
    np.testing.assert_array_equal(got, SMALL + (SMALL + 1) * SMALL)


def test_a_list_in_place_of_an_array():
    """A list is a constant, and an operand is no constant."""
    def kernel(x):
        return nl.load(x)
    with pytest.raises(TypeError) as caught:
        simulate_kernel(kernel, [[1.0, 2.0]])
    assert "list" in str(caught.value) and "tensor in HBM" in str(caught.value)


@pytest.mark.parametrize(("args", "kwargs", "word"), [
    ((), {}, "missing"), ((SMALL, SMALL), {}, "too many"), ((SMALL,), {"z": 1}, "'z'"), ((), {"y": SMALL}, "'x'")], ids=str)
@pytest.mark.parametrize("eager", [False, True])
def test_calls_that_do_not_fit_the_signature(args, kwargs, word, eager):
    text = report(double, *args, kind=TypeError, eager=eager, **kwargs)
    assert "double" in text and word in text and "(x)" in text


def test_what_is_no_function():
    with pytest.raises(TypeError, match="is no function"):
        simulate_kernel(3, SMALL)
    with pytest.raises(TypeError, match="is no function"):
        jit(SMALL)
    with pytest.raises(ValueError, match=r"' passed to nki\.jit"):
        jit(double, mode="fast")


# ---- the caller's arrays ----------------------------------------------------------------------------------------------------------------
def writes_then_fails(a: nt.mutable_tensor, b: nt.mutable_tensor, idx):
    rows = nl.load(idx)
    nl.store(a, nl.load(a) + 1)
    tile = nl.load(a[rows, nl.arange(4)[None, :]])
    nl.store(b, tile)
    return a, b


@pytest.mark.parametrize("eager", [False, True])
def test_a_kernel_that_fails_late_changes_nothing(eager):
    a, b, idx = SMALL.copy(), SMALL.copy(), np.array([[0], [1], [9]], np.int32)
    with pytest.raises(IndexError):
        simulate_kernel(writes_then_fails, a, b, idx, eager=eager)
    np.testing.assert_array_equal(a, SMALL)
    np.testing.assert_array_equal(b, SMALL)
    idx[2] = 2
    simulate_kernel(writes_then_fails, a, b, idx, eager=eager)
    np.testing.assert_array_equal(a, SMALL + 1)
    np.testing.assert_array_equal(b, SMALL + 1)


@pytest.mark.parametrize("eager", [False, True])
def test_a_kernel_that_fails_in_its_last_program_changes_nothing(eager):
    def kernel(a: nt.mutable_tensor, idx):
        p = nl.program_id(0)
        row = nl.load(idx[nl.ds(p, 1)])
        nl.store(a[nl.ds(p, 1)], nl.load(a[row, nl.arange(4)[None, :]]) + 1)
        return a
    a, idx = SMALL.copy(), np.array([[0], [1], [99]], np.int32)
    with pytest.raises(IndexError):
        simulate_kernel(jit(kernel)[3], a, idx, eager=eager)
    np.testing.assert_array_equal(a, SMALL)


def add_one(a: nt.mutable_tensor, b: nt.mutable_tensor):
    nl.store(a, nl.load(a) + 1)
    nl.store(b, nl.load(b) + 1)
    return a, b


@pytest.mark.parametrize("eager", [False, True])
def test_a_read_only_array_that_is_written(eager):
    """Neither array is changed, whichever is read-only."""
    for locked in (0, 1):
        arrays = [SMALL.copy(), SMALL.copy()]
        arrays[locked].flags.writeable = False
        text = report(add_one, *arrays, kind=ValueError, eager=eager)
        assert "read-only" in text and "copy" in text and f"'{'ab'[locked]}'" in text
        for array in arrays:
            np.testing.assert_array_equal(array, SMALL)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("overlap", ["same", "view", "reversed"])
def test_arrays_that_overlap(overlap, eager):
    base = np.arange(24, dtype=np.float32).reshape(6, 4)
    a = base[0:3]
    b = {"same": a, "view": base[2:5], "reversed": base[4:1:-1]}[overlap]
    before = base.copy()
    text = report(add_one, a, b, kind=ValueError, eager=eager)
    assert "'a'" in text and "'b'" in text and "share memory" in text
    np.testing.assert_array_equal(base, before)


@pytest.mark.parametrize("eager", [False, True])
def test_arrays_that_do_not_overlap(eager):
    """Neighbours and interleaved rows of one array share no element."""
    base = np.zeros((6, 4), np.float32)
    simulate_kernel(add_one, base[0:3], base[3:6], eager=eager)
    simulate_kernel(add_one, base[0::2], base[1::2], eager=eager)
    np.testing.assert_array_equal(base, np.full((6, 4), 2, np.float32))


def test_one_array_twice_where_none_is_written():
    def kernel(x, y):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.load(x) + nl.load(y))
        return out
    np.testing.assert_array_equal(simulate_kernel(kernel, SMALL, SMALL), SMALL * 2)


@pytest.mark.parametrize("layout", ["transposed", "stepped", "reversed"])
def test_results_go_into_arrays_of_any_layout(layout):
    out = {"transposed": np.zeros((4, 3), np.float32).T, "stepped": np.zeros((6, 8), np.float32)[::2, ::2],
           "reversed": np.zeros((3, 4), np.float32)[::-1]}[layout]

    def kernel(x, out):
        nl.store(out, nl.load(x) * 2)
    simulate_kernel(trace(kernel), SMALL, out)
    np.testing.assert_array_equal(out, SMALL * 2)


def test_an_output_array_of_another_dtype_or_size():
    def kernel(x, out):
        nl.store(out, nl.load(x) * 2)
    out = np.zeros((3, 4), np.int32)
    simulate_kernel(trace(kernel), SMALL, out)
    np.testing.assert_array_equal(out, SMALL * 2)
    small = np.zeros((3, 3), np.float32)
    with pytest.raises(ValueError) as caught:
        simulate_kernel(trace(kernel), SMALL, small)
    assert caught.value.code == "err_store_dst_shape_smaller_than_other_shape"
    assert not small.any()


@pytest.mark.parametrize("checks", ["all", 3, {"read": "maybe"}, {"speed": "off"}], ids=str)
def test_unknown_checks(checks):
    assert "checks=" in report(double, SMALL, kind=ValueError, checks=checks)


def test_large_kernels_run_in_order_given():
    assert "program order" in report(double, A, order="random")
