"""Elementwise instructions of the Vector Engine against plain NumPy, Python integers and PyTorch."""
from __future__ import annotations

import math
import operator

import ml_dtypes
import numpy as np
import pytest
import torch
from tests.isa.vector_calls import F32, SPECIALS, call, cost, fails, pairs, passes, quiet_pure_and_blind_to_layout, same_bits, tile

from opennki.errors import NkiTypeError, NkiValueError
from opennki.isa import dtypes
from opennki.isa import vector_elementwise as v
from opennki.isa.declare import ISA
from opennki.isa.target import TRN1, TRN2, TRN3

INT_DTYPES = ("int8", "uint8", "int16", "uint16", "int32", "uint32")
rng = np.random.default_rng(7)


# ---- tensor_tensor ---------------------------------------------------------------------------------------


@pytest.mark.oracle
@pytest.mark.parametrize("op, oracle",
                         [("add", np.add), ("subtract", np.subtract), ("multiply", np.multiply)])
def test_arithmetic_is_float64_rounded_once(op, oracle):
    # float64 has more than twice the bits of float32, so rounding its sum or product once more is harmless.
    a, b = pairs()
    with np.errstate(all="ignore"):
        want = oracle(a.astype(np.float64), b.astype(np.float64)).astype(F32)
    same_bits(v.tensor_tensor(a, b, op), want)


@pytest.mark.oracle
@pytest.mark.parametrize("op, oracle", [
    ("equal", operator.eq), ("not_equal", operator.ne), ("less", operator.lt), ("less_equal", operator.le),
    ("greater", operator.gt), ("greater_equal", operator.ge),
    ("logical_and", lambda x, y: bool(x) and bool(y)), ("logical_or", lambda x, y: bool(x) or bool(y)),
    ("logical_xor", lambda x, y: bool(x) != bool(y))])
def test_truth_values_are_one_and_zero(op, oracle):
    a, b = pairs()
    want = np.array([[float(oracle(float(x), float(y))) for x, y in zip(ra, rb)] for ra, rb in zip(a, b)],
                    F32)
    same_bits(v.tensor_tensor(a, b, op), want)


@pytest.mark.oracle
@pytest.mark.parametrize("op, oracle", [("maximum", torch.maximum), ("minimum", torch.minimum)])
def test_maximum_and_minimum_as_torch_nan_included(op, oracle):
    a, b = pairs()
    got, want = v.tensor_tensor(a, b, op), oracle(torch.from_numpy(a), torch.from_numpy(b)).numpy()
    np.testing.assert_array_equal(got, want)  # the sign of a zero is free


@pytest.mark.oracle
def test_power_as_math_pow():
    a = np.abs(rng.normal(size=(8, 40))).astype(F32) + F32(0.01)
    b = rng.normal(size=(8, 40)).astype(F32)
    want = np.array([[math.pow(x, y) for x, y in zip(ra, rb)] for ra, rb in zip(a.tolist(), b.tolist())])
    np.testing.assert_allclose(v.tensor_tensor(a, b, "power"), want, rtol=2e-6)


def _python_bits(op, x, y, bits):
    x, y = x & ((1 << bits) - 1), y & ((1 << bits) - 1)
    if op == "left_shift":
        return (x << y if y < bits else 0) & ((1 << bits) - 1)
    if op == "right_shift":
        return x >> y if y < bits else 0
    return {"bitwise_and": x & y, "bitwise_or": x | y, "bitwise_xor": x ^ y}[op]


def _integers(kind, shape):
    info = np.iinfo(kind)
    x = rng.integers(info.min, info.max, shape, endpoint=True).astype(kind)
    x.flat[:2] = info.min, info.max
    return x


@pytest.mark.oracle
@pytest.mark.parametrize("kind", INT_DTYPES)
@pytest.mark.parametrize("op", ["bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift"])
def test_bitwise_operators_keep_bits(op, kind):
    a, b = _integers(kind, (4, 33)), _integers(kind, (4, 33))
    if "shift" in op:
        b = (np.arange(132).reshape(4, 33) % 35).astype(kind)
    got = v.tensor_tensor(a, b, op)
    bits = got.dtype.itemsize * 8
    want = [_python_bits(op, x, y, bits) for x, y in zip(a.ravel().tolist(), b.ravel().tolist())]
    assert got.dtype == a.dtype
    assert [x & ((1 << bits) - 1) for x in got.ravel().tolist()] == want
    assert ISA["tensor_tensor"].raw(call("tensor_tensor", data1=tile(4, 33, dtype=kind), op=op,
                                         data2=tile(4, 33, dtype=kind)))


@pytest.mark.oracle
@pytest.mark.parametrize("op, oracle",
                         [("add", operator.add), ("subtract", operator.sub), ("multiply", operator.mul)])
@pytest.mark.parametrize("kinds", [("int32", "int32"), ("uint32", "uint32"), ("int32", "uint32")])
def test_integers_are_exact_and_saturate(op, oracle, kinds):
    a, b = _integers(kinds[0], (4, 33)), _integers(kinds[1], (4, 33))
    a[1], b[1] = a[1] % 1000, b[1] % 1000
    a[2, :3], b[2, :3] = 2**24 + 1, 1
    got = v.tensor_tensor(a, b, op)
    out = dtypes.convert(got, got.dtype.name, kinds[0])
    info = np.iinfo(kinds[0])
    want = [max(info.min, min(oracle(x, y), info.max)) for x,
            y in zip(a.ravel().tolist(), b.ravel().tolist())]
    assert out.ravel().tolist() == want


@pytest.mark.parametrize("op, kinds, space, engine, chosen, raw", [
    ("add", ("int32", "int32"), "sbuf", "", "gpsimd", True),
    ("multiply", ("int32", "uint32"), "sbuf", "", "gpsimd", True),
    ("add", ("int32", "int32"), "sbuf", "gpsimd", "gpsimd", True),
    ("add", ("int32", "int32"), "sbuf", "vector", "vector", False),
    ("add", ("int32", "int32"), "psum", "", "vector", False),
    ("add", ("int32", "int16"), "sbuf", "", "vector", False),
    ("maximum", ("int32", "int32"), "sbuf", "", "vector", False),
    ("power", ("float32", "float32"), "sbuf", "", "gpsimd", False),
    ("bitwise_or", ("int32", "int32"), "sbuf", "", "vector", True),
    ("add", ("float32", "float32"), "sbuf", "", "vector", False)])
def test_engine_of_tensor_tensor(op, kinds, space, engine, chosen, raw):
    c = call("tensor_tensor", data1=tile(8, 4, dtype=kinds[0]), data2=tile(8, 4, dtype=kinds[1], space=space),
             op=op,
             engine=engine)
    assert ISA["tensor_tensor"].raw(c) is raw
    if chosen != "vector" or engine != "vector":
        assert ISA["tensor_tensor"].choose_engine(c, TRN2) == chosen
    passes("tensor_tensor", **vars(c))


def test_tensor_tensor_refuses():
    one, psum = tile(8, 4), tile(8, 4, space="psum")
    passes("tensor_tensor", data1=one, data2=psum, op="add")
    assert fails("tensor_tensor", data1=psum, data2=psum, op="add").code == "err_unsupported_memory"
    assert fails("tensor_tensor", data1=psum, data2=one, op="power").code == "err_unsupported_memory"
    assert fails("tensor_tensor", data1=psum, data2=one, op="add",
                 engine="gpsimd").code == "err_unsupported_memory"
    assert isinstance(fails("tensor_tensor", data1=one, data2=one, op="power", engine="vector"),
                      NkiValueError)
    assert isinstance(fails("tensor_tensor", data1=one, data2=one, op="bitwise_and"), NkiTypeError)
    ints = tile(8, 4, dtype="int8")
    passes("tensor_tensor", data1=ints, data2=ints, op="bitwise_and", dtype="int32")
    assert fails("tensor_tensor", data1=ints, data2=ints, op="bitwise_and",
                 dtype="float32").operand == "dtype"
    assert fails("tensor_tensor", data1=ints, data2=ints, op="bitwise_and",
                 engine="gpsimd").operand == "engine"


def test_results_of_tensor_tensor():
    result, = ISA["tensor_tensor"].results
    c = call("tensor_tensor", data1=tile(8, 4, dtype="bfloat16"), data2=tile(8, 4, dtype="float16"), op="add")
    assert result.shape == "data1" and result.dtype(c) == "float32"


# ---- tensor_scalar ---------------------------------------------------------------------------------------


@pytest.mark.oracle
@pytest.mark.parametrize("reverse0", [False, True])
@pytest.mark.parametrize("reverse1", [False, True])
@pytest.mark.parametrize("vector", [False, True])
def test_tensor_scalar_two_steps(reverse0, reverse1, vector):
    data = np.tile(SPECIALS, (6, 1)).reshape(6, 3, 6)
    first = np.array([2.5, -1.0, np.inf, np.nan, 0.0, 1e30], F32).reshape(6, 1, 1) if vector else F32(2.5)
    second = F32(-0.75)
    got = v.tensor_scalar(data, "subtract", first, reverse0, "multiply", second, reverse1)
    with np.errstate(all="ignore"):
        x, y = data.astype(np.float64), np.float64(first) if not vector else first.astype(np.float64)
        want = (y - x if reverse0 else x - y).astype(F32)
        want = (want.astype(np.float64) * np.float64(second)).astype(F32)
    same_bits(got, want)
    got = v.tensor_scalar(data, "add", first, reverse0, "subtract", second, reverse1)
    with np.errstate(all="ignore"):
        want = (x + y).astype(F32)
        want = second - want if reverse1 else want - second
    same_bits(got, want)


def test_tensor_scalar_does_not_round_between_the_steps():
    data = np.full((1, 1), 256.0, F32)
    got = v.tensor_scalar(data, "add", F32(1), op1="subtract", operand1=F32(256))
    assert dtypes.from_float32(got, "bfloat16").astype(F32) == 1  # 257 is no bfloat16


@pytest.mark.oracle
@pytest.mark.parametrize("op, oracle", [
    ("abs", abs), ("rsqrt", lambda x: 1 / math.sqrt(x)), ("reciprocal", lambda x: 1 / x),
    ("logical_not", lambda x: float(not x))])
def test_unary_operators_ignore_their_operand(op, oracle):
    data = np.abs(rng.normal(size=(4, 9))).astype(F32) + F32(0.5)
    data = -data if op == "abs" else data
    want = np.array([[oracle(x) for x in row] for row in data.tolist()])
    np.testing.assert_allclose(v.tensor_scalar(data, op, F32(np.nan)), want, rtol=3e-7)
    same_bits(v.tensor_scalar(data, "multiply", F32(1), op1=op), v.tensor_scalar(data, op, F32(0)))


@pytest.mark.oracle
@pytest.mark.parametrize("kind", INT_DTYPES)
def test_tensor_scalar_bitwise(kind):
    data = _integers(kind, (3, 20))
    bits = data.dtype.itemsize * 8
    lanes = np.array([[1], [3], [2]], "uint8")
    got = v.tensor_scalar(data, "bitwise_and", -2, op1="left_shift", operand1=lanes)
    want = [[_python_bits("left_shift", _python_bits("bitwise_and", x, -2, bits), n, bits) for x in row]
            for row, n in zip(data.tolist(), (1, 3, 2))]
    assert [[x & ((1 << bits) - 1) for x in row] for row in got.tolist()] == want
    assert got.dtype == data.dtype
    got = v.tensor_scalar(data, "left_shift", 1, True)  # 1 << data
    want = [[_python_bits("left_shift", 1, x, bits) for x in row] for row in data.tolist()]
    assert [[x & ((1 << bits) - 1) for x in row] for row in got.tolist()] == want
    np.testing.assert_array_equal(v.tensor_scalar(data, "invert", 0),
                                  -1 - data.astype(np.int64) if kind[0] == "i"
                                  else (1 << bits) - 1 - data.astype(np.int64))


def test_tensor_scalar_refuses():
    data, ints = tile(8, 4), tile(8, 4, dtype="int32")
    passes("tensor_scalar", data=data, op0="add", operand0=1.0)
    passes("tensor_scalar", data=data, op0="add", operand0=tile(8, 1), op1="rsqrt", operand1=0.0)
    fails("tensor_scalar", data=data, op0="add", operand0=1.0, op1="add")
    fails("tensor_scalar", data=data, op0="add", operand0=1.0, operand1=2.0)
    fails("tensor_scalar", data=ints, op0="add", operand0=1, op1="bitwise_and", operand1=1)
    fails("tensor_scalar", data=data, op0="bitwise_and", operand0=1)
    fails("tensor_scalar", data=ints, op0="bitwise_and", operand0=1.0)
    fails("tensor_scalar", data=ints, op0="bitwise_and", operand0=tile(8, 1))
    fails("tensor_scalar", data=ints, op0="bitwise_and", operand0=1, dtype="float32")
    fails("tensor_scalar", data=ints, op0="bitwise_and", operand0=1, engine="gpsimd")
    passes("tensor_scalar", data=ints, op0="invert", operand0=None)
    fails("tensor_scalar", data=data, op0="subtract", operand0=1.0, engine="gpsimd")
    passes("tensor_scalar", data=data, op0="rsqrt", operand0=1.0, engine="gpsimd")
    fails("tensor_scalar", data=data, op0="rsqrt", operand0=1.0, engine="vector")
    assert fails("tensor_scalar", data=tile(8, 4, space="psum"), op0="rsqrt",
                 operand0=1.0).code == "err_unsupported_memory"


@pytest.mark.parametrize("ops, target, ok", [
    (("multiply", "add"), TRN2, True), (("multiply", None), TRN2, True), (("add", None), TRN3, True),
    (("add", "multiply"), TRN2, False), (("subtract", None), TRN2, False), (("multiply", "add"), TRN1,
                                                                            False)])
def test_tensor_scalar_on_the_scalar_engine(ops, target, ok):
    given = {"data": tile(8, 4), "op0": ops[0], "operand0": 2.0, "op1": ops[1], "engine": "scalar",
             "operand1": None if ops[1] is None else 1.0}
    if ok:
        passes("tensor_scalar", target, **given)
    else:
        assert fails("tensor_scalar", target, **given).operand == "engine"


def test_tensor_scalar_engine():
    choose = ISA["tensor_scalar"].choose_engine
    assert choose(call("tensor_scalar", op0="add", op1="rsqrt"), TRN2) == "gpsimd"
    assert choose(call("tensor_scalar", op0="add"), TRN2) == "vector"


# ---- scalar_tensor_tensor, reciprocal --------------------------------------------------------------------


@pytest.mark.oracle
@pytest.mark.parametrize("reverse", [(False, False), (True, False), (False, True), (True, True)])
def test_scalar_tensor_tensor(reverse):
    data, other = pairs()
    scale = np.linspace(-2, 2, data.shape[0], dtype=F32)[:, None]
    got = v.scalar_tensor_tensor(data=data, op0="subtract", operand0=scale, op1="subtract", operand1=other,
                                 reverse0=reverse[0], reverse1=reverse[1])
    with np.errstate(all="ignore"):
        x = scale.astype(np.float64) - data if reverse[0] else data.astype(np.float64) - scale
        x = x.astype(F32).astype(np.float64)
        want = (other - x if reverse[1] else x - other).astype(F32)
    same_bits(got, want)


def test_scalar_tensor_tensor_refuses():
    psum, given = tile(8, 4, space="psum"), {"op0": "add", "operand0": 1.0, "op1": "add"}
    passes("scalar_tensor_tensor", data=psum, operand1=tile(8, 4), **given)
    assert fails("scalar_tensor_tensor", data=psum, operand1=psum, **given).code == "err_unsupported_memory"
    assert fails("scalar_tensor_tensor", data=tile(8, 2, 2), operand1=tile(8, 4),
                 **given).code == "err_exceed_max_supported_dimension"


@pytest.mark.oracle
def test_reciprocal_is_float64_rounded_once():
    x = SPECIALS.reshape(2, 9)
    with np.errstate(all="ignore"):
        same_bits(v.reciprocal(x), (1 / x.astype(np.float64)).astype(F32))


# ---- copies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tensor_copy", "tensor_copy_dynamic_src"])
def test_copies_are_exact_where_the_engine_is(name):
    record, src = ISA[name], tile(8, 4, dtype="int32")
    big = np.array([[2**24 + 1, -(2**31)]], np.int32)
    assert record.raw(call(name, src=src)) and record.raw(call(name, src=src, engine="gpsimd"))
    assert record.raw(call(name, src=src, dtype="int32"))
    np.testing.assert_array_equal(record.body(big), big)
    assert not record.raw(call(name, src=src, engine="scalar"))
    assert not record.raw(call(name, src=src, dtype="float32"))
    psum = tile(8, 4, space="psum")
    passes(name, src=psum)
    assert fails(name, src=psum, engine="gpsimd").code == "err_unsupported_memory"


def test_tensor_copy_dynamic_dst():
    record, src, dst = ISA["tensor_copy_dynamic_dst"], tile(8, 4, dtype="int32"), tile(8, 4, dtype="float32")
    assert not record.results and [p.name for p in record.outputs] == ["dst"]
    assert record.raw(call("tensor_copy_dynamic_dst", src=src, dst=src))
    assert not record.raw(call("tensor_copy_dynamic_dst", src=src, dst=dst))
    x = np.arange(8, dtype=F32).reshape(2, 4)
    np.testing.assert_array_equal(record.body(dst=np.zeros((2, 4), F32), src=x), x)
    assert fails("tensor_copy_dynamic_dst", src=src, dst=tile(8, 4, dtype="int32", space="psum"),
                 engine="gpsimd").operand == "dst"


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float8_e4m3", "int32", "uint8"])
@pytest.mark.parametrize("predicate", ["uint8", "uint16", "uint32"])
@pytest.mark.parametrize("reverse", [False, True])
def test_tensor_copy_predicated_keeps_bits(kind, predicate, reverse):
    store = dtypes.storage(kind)
    bits = np.arange(128 * store.itemsize, dtype=np.uint8) * np.uint8(7)
    src, dst = bits.view(store).reshape(4, 32), bits[::-1].copy().view(store).reshape(4, 32)
    chosen = rng.integers(0, 3, (4, 32)).astype(predicate) << (8 * (np.dtype(predicate).itemsize - 1))
    got = v.tensor_copy_predicated(src=src, dst=dst, predicate=chosen, reverse_pred=reverse)
    assert got.dtype == store
    for p in range(4):
        for f in range(32):
            want = src if (int(chosen[p, f]) != 0) != reverse else dst
            assert got[p, f].tobytes() == want[p, f].tobytes()


@pytest.mark.parametrize("kind, value, stored", [
    ("float32", F32(0.1), F32(0.1)), ("bfloat16", F32(0.1), ml_dtypes.bfloat16(0.1)), ("int8", F32(2.5), 2),
    ("int8", 300, 127), ("int32", 2**24 + 1, 2**24 + 1), ("uint8", F32(np.nan), 0), ("float16", F32(1e6),
                                                                                     np.inf)])
def test_tensor_copy_predicated_of_a_number(kind, value, stored):
    dst = np.zeros((1, 2), dtypes.storage(kind))
    got = v.tensor_copy_predicated(src=value, dst=dst, predicate=np.array([[1, 0]], np.uint8))
    assert got.dtype == dst.dtype and got[0, 0] == stored and got[0, 1] == 0 and not dst.any()


def test_tensor_copy_predicated_refuses():
    f32, psum, p8 = tile(8, 4), tile(8, 4, space="psum"), tile(8, 4, dtype="uint8", space="psum")
    passes("tensor_copy_predicated", src=f32, dst=f32, predicate=p8)
    passes("tensor_copy_predicated", src=0.0, dst=psum, predicate=p8)
    passes("tensor_copy_predicated", src=True, dst=tile(8, 4, dtype="bool"), predicate=p8)
    for number in (-100, 2, 0.5):
        assert "0 or 1" in fails("tensor_copy_predicated", src=number, dst=tile(8, 4, dtype="bool"), predicate=p8).rule
    assert fails("tensor_copy_predicated", src=psum, dst=f32, predicate=p8).code == "err_unsupported_memory"
    assert fails("tensor_copy_predicated", src=tile(8, 4, dtype="bfloat16"), dst=f32,
                 predicate=p8).operand == "src"


# ---- memset ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value, kind, stored", [
    (0.2, "float32", F32(0.2)), (0, "bfloat16", 0), (2**31 - 1, "int32", 2**31 - 1), (2**40, "int32",
                                                                                      2**31 - 1),
    (4294967295, "uint32", 4294967295), (-1, "uint8", 0), (2.5, "int8", 2), (float("nan"), "int16", 0),
    (float("-inf"), "float16", -np.inf), (True, "uint8", 1), (np.float32(0.1), "float32", F32(0.1)),
    (np.int32(-5), "int32", -5), (1e300, "float32", np.inf), (10**30, "int32", 2**31 - 1),
    (-10**30, "int32", -2**31), (10**30, "float32", F32(1e30)), (-10**400, "float32", -np.inf),
    (2**63, "float32", F32(2**63)), (-2**63, "float32", -F32(2**63)), (-2**63, "int32", -2**31), (2**24 + 1, "int32", 2**24 + 1)])
def test_memset(value, kind, stored):
    got = v.memset((4, 2, 3), value, kind)
    assert got.shape == (4, 2, 3)
    out = dtypes.convert(got, got.dtype.name, kind)
    assert (out == stored).all()


def test_memset_record():
    c = call("memset", shape=[128, 4], value=0, dtype="bfloat16")
    result, = ISA["memset"].results
    assert result.shape(c) == (128, 4) and result.dtype(c) == "bfloat16"
    passes("memset", **vars(c))
    assert fails("memset", shape=(129, 4), value=0,
                 dtype="int8").code == "err_num_partition_exceed_arch_limit"
    fails("memset", shape=(128,), value=0, dtype="int8")


# ---- all of them -----------------------------------------------------------------------------------------


def _samples():
    a, b = pairs()
    lane = SPECIALS[:, None].copy()
    p = (np.arange(a.size).reshape(a.shape) % 3).astype(np.uint8)
    yield v.tensor_tensor, (a, b, "multiply"), {}
    yield v.tensor_tensor, (a, b, "power"), {}
    yield v.tensor_tensor, (p, p, "bitwise_xor"), {}
    yield v.tensor_tensor, (p.astype(np.int32), p.astype(np.int32), "multiply"), {}
    yield v.tensor_scalar, (a, "add", lane, True, "rsqrt", F32(0)), {}
    yield v.tensor_scalar, (p, "left_shift", 3, True), {}
    yield v.scalar_tensor_tensor, (), {"data": a, "op0": "subtract", "operand0": lane, "op1": "multiply",
                                       "operand1": b}
    yield v.reciprocal, (a,), {}
    yield v.tensor_copy_predicated, (), {"src": a, "dst": b, "predicate": p}
    big = np.tile(a[:16], (2, 1))
    yield v.nc_stream_shuffle, (big, big[::-1].copy(), [255, *range(31)]), {}


@pytest.mark.parametrize("body, args, kwargs", list(_samples()), ids=lambda x: getattr(x, "__name__", ""))
def test_bodies_are_quiet_pure_and_blind_to_layout(body, args, kwargs):
    quiet_pure_and_blind_to_layout(body, args, kwargs)


@pytest.mark.parametrize("cycles, name, given", [
    (512, "tensor_tensor",
     {"dtypes": {"data1": "float32", "data2": "float32"}, "spaces": {"data1": "psum", "data2": "sbuf"},
                            "op": "add"}),
    (1024, "tensor_tensor", {"dtypes": {"data1": "float32", "data2": "float32"}, "op": "add"}),
    (512, "tensor_tensor", {"dtypes": {"data1": "bfloat16", "data2": "bfloat16"}, "op": "add"}),
    (1024, "tensor_tensor", {"dtypes": {"data1": "bfloat16", "data2": "bfloat16"}, "op": "maximum"}),
    (1024 + 150, "tensor_tensor",
     {"dtypes": {"data1": "int32", "data2": "int32"}, "op": "add", "engine": "gpsimd"}),
    (512, "tensor_scalar", {"dtypes": {"data": "float32"}}),
    (128, "tensor_scalar", {"dtypes": {"data": "bfloat16", "operand0": "float32"}}),
    (512, "tensor_scalar", {"dtypes": {"data": "bfloat16"}, "engine": "scalar"}),
    (2048, "tensor_scalar", {"dtypes": {"data": "float32"}, "engine": "gpsimd"}),
    (512, "scalar_tensor_tensor", {"dtypes": {"data": "bfloat16", "operand1": "bfloat16"}, "op0": "subtract",
                                   "op1": "multiply"}),
    (1024, "scalar_tensor_tensor", {"dtypes": {"data": "bfloat16", "operand1": "bfloat16"}, "op0": "add",
                                    "op1": "multiply"}),
    (4096, "reciprocal", {"dtypes": {"data": "float32"}}),
    (256, "tensor_copy", {"dtypes": {"src": "bfloat16"}, "spaces": {"src": "psum"}}),
    (600, "tensor_copy_dynamic_src", {"dtypes": {"src": "float32"}}),
    (1024, "tensor_copy_predicated", {"dtypes": {"src": "float32", "predicate": "uint8"}}),
    (512, "tensor_copy_predicated", {"dtypes": {"src": "float32", "predicate": "uint8"},
                                     "spaces": {"src": "psum", "predicate": "sbuf"}}),
    (256, "memset", {"dtypes": {"result": "bfloat16"}, "value": 0}),
    (512, "memset", {"dtypes": {"result": "bfloat16"}, "value": 1}),
    (512, "nc_stream_shuffle", {"dtypes": {"src": "float32", "dst": "float32"}})])
def test_documented_cycles_on_trn2(cycles, name, given):
    assert cost(name, TRN2, 512, **given) == cycles


def test_short_instructions_cost_the_issue_interval():
    assert cost("tensor_scalar", TRN1, 1, {"data": "float32"}) == 64
    assert cost("tensor_scalar", TRN1, 512, {"data": "bfloat16"}) == 512  # no fast modes before trn2
