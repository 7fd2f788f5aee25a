"""GpSimd Engine: selection, index tiles, gathers, partition reductions and segments against plain loops."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from opennki.errors import NkiError, NkiTypeError, NkiValueError
from opennki.isa import gpsimd_engine as ge
from opennki.isa.declare import ISA
from opennki.isa.target import TRN1, TRN2

from .bodies import FLOATS, INTS, NUMPY, bits, call, check, operand, run, same

pytestmark = pytest.mark.oracle
FP32_MIN = float(np.array(0xFF7FFFFF, np.uint32).view(np.float32))


@pytest.mark.parametrize("dtype", [*FLOATS, "int8", "uint8", "int16", "uint16"])
@pytest.mark.parametrize("value", [0.0, -9984.0, 3])
def test_affine_select(dtype, value):
    tile = operand((16, 24), dtype)
    p, f = np.ogrid[:16, :24]
    pred = p >= f
    want = tile.copy()
    with np.errstate(all="ignore"):
        for i in range(16):
            for j in range(24):
                if not i >= j:
                    limits = np.iinfo(dtype) if dtype in INTS else None
                    want[i, j] = value if limits is None else min(max(value, limits.min), limits.max)
    same(run("affine_select", pred=pred, on_true_tile=tile, on_false_value=value), want)


def test_affine_select_keeps_the_least_float():
    tile = operand((4, 3, 4), "float32")
    p, i, j = np.ogrid[:4, :3, :4]
    got = run("affine_select", pred=i + j < p, on_true_tile=tile, on_false_value=FP32_MIN)
    want = np.where(i + j < p, tile, np.array(0xFF7FFFFF, np.uint32).view(np.float32))
    same(got, want)


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int16", "uint8", "float32", "bfloat16"])
def test_iota(dtype):
    expr = 5 - 7 * np.arange(12, dtype=np.int64)[:, None] + 300 * np.arange(9, dtype=np.int64)[None, :]
    got = run("iota", expr=expr, dtype=dtype)
    if dtype in INTS:
        info = np.iinfo(dtype)
        want = np.array([[min(max(int(v), info.min), info.max) for v in row] for row in expr], dtype)
    else:
        want = expr.astype(np.float32).astype(NUMPY[dtype])
    same(got, want)
    rule = ISA["iota"].results[0]
    seen = call("iota", expr=SimpleNamespace(shape=(12, 9)), dtype=dtype)
    assert rule.shape(seen) == (12, 9) and rule.dtype(seen) == dtype


def test_iota_is_exact_beyond_float32():
    expr = np.array([[2**24 + 1, 2**31 - 1, -(2**31)]], np.int64)
    same(run("iota", expr=expr, dtype="int32"), expr.astype(np.int32))


def test_iota_refuses_too_many_partitions():
    check("iota", expr=SimpleNamespace(shape=(128, 4)), dtype="int32")
    with pytest.raises(NkiValueError) as e:
        check("iota", expr=SimpleNamespace(shape=(129, 4)), dtype="int32")
    assert e.value.code == "err_num_partition_exceed_arch_limit"


def gather(src, index, run_length, count):
    """Element by element, from the description: core, then index, then element of the run."""
    partitions = src.shape[0]
    flat = src.reshape(partitions, -1)
    out = np.empty((partitions, count, run_length), src.dtype)
    for p in range(partitions):
        core = p // 16
        for i in range(count):
            start = int(index.reshape(partitions, -1)[16 * core + i % 16, i // 16])
            out[p, i] = flat[p, start:start + run_length]
    return out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8"])
@pytest.mark.parametrize("partitions,run_length,free,count", [
    (16, 1, (3,), None), (32, 4, (4,), 64), (128, 2, (2, 2), 40), (16, 32, (1,), 7), (64, 8, (3,), 48)])
def test_local_gather(dtype, partitions, run_length, free, count):
    src = operand((partitions, 20, 8), dtype)
    index = np.random.default_rng(1).integers(0, 160 - run_length + 1, (partitions, *free)).astype(np.uint16)
    used = count or 16 * int(np.prod(free))
    got = run("local_gather", src_buffer=src, index=index, num_elem_per_idx=run_length,
              num_valid_indices=count)
    want = gather(src, index, run_length, used)
    same(got.reshape(want.shape), want)
    groups = (used // 16, 16) if used % 16 == 0 else (used,)
    assert got.shape == (partitions, *groups, run_length)


def test_local_gather_outside_shows():
    src = np.arange(16 * 4, dtype=np.float32).reshape(16, 4)
    index = np.full((16, 1), 9, np.uint16)
    index[0] = 3
    got = ge.local_gather(src, index).reshape(16, 16)
    np.testing.assert_array_equal(got[:, 0], src[:, 3])
    assert np.isnan(got[:, 1:]).all()
    assert (ge.local_gather(src.astype(np.uint8), index).reshape(16, 16)[:, 1:] == 255).all()


GATHER = {"src_buffer": ((128, 512, 4), "float32"), "index": ((128, 4), "uint16")}


def test_what_local_gather_accepts_and_costs():
    check("local_gather", **GATHER, num_elem_per_idx=4, num_valid_indices=64)
    check("local_gather", **{**GATHER, "index": ((128, 256), "uint16")})
    check("local_gather", **GATHER, num_valid_indices=1)
    d = SimpleNamespace(P=128, S=2048, I=4, dtypes={"src_buffer": "float32"})
    assert ISA["local_gather"].cost(d, TRN1) == pytest.approx(150 + 64 / 8)
    d.num_elem_per_idx, d.num_valid_indices, d.dtypes["src_buffer"] = 4, 32, "bfloat16"
    assert ISA["local_gather"].cost(d, TRN1) == pytest.approx(150 + 32 * 4 / ((28 + 16) / 16 / 2))


@pytest.mark.parametrize("given,text", [
    ({"src_buffer": ((40, 8), "float32"), "index": ((40, 4), "uint16")}, "multiple of 16"),
    ({"num_valid_indices": 65}, "is 65, index holds 64"), ({"num_valid_indices": 0}, "is 0"),
    ({"index": ((128, 257), "uint16")}, "4112 indices"),
])
def test_what_local_gather_refuses(given, text):
    with pytest.raises(NkiValueError) as e:
        check("local_gather", **{**GATHER, **given})
    assert text in str(e.value) and e.value.fix


@pytest.mark.parametrize("dtype", [*FLOATS, "int32", "uint8"])
@pytest.mark.parametrize("shape", [(1, 3), (128, 6, 5), (37, 9)])
def test_partition_sum_and_maximum(dtype, shape):
    data = operand(shape, dtype, special=False)
    values = data.astype(np.float64)
    got = run("tensor_partition_reduce", op="maximum", data=data)
    with np.errstate(all="ignore"):
        want = values.max(axis=0, keepdims=True).astype(np.float32)
    if dtype == "int32":
        np.testing.assert_allclose(got.astype(np.float64), want, rtol=2**-23)
    else:
        same(got, want.astype(data.dtype))
    got = run("tensor_partition_reduce", op="add", data=data, dtype="float32")
    np.testing.assert_allclose(got, values.sum(axis=0, keepdims=True), rtol=1e-4,
                               atol=1e-5 * np.abs(values).max())
    assert got.shape == (1, *shape[1:])


def test_partition_reduce_special_values():
    data = np.array([[np.nan, np.inf, np.inf, -0.0, 1e-40], [1, 1, -np.inf, -0.0, 1e-40]], np.float32)
    same(run("tensor_partition_reduce", op="add", data=data),
         np.array([[np.nan, np.inf, np.nan, -0.0, 2 * np.float32(1e-40)]], np.float32))
    got = run("tensor_partition_reduce", op="maximum", data=data)
    assert np.isnan(got[0, 0]) and got[0, 1] == np.inf and got[0, 2] == np.inf
    assert got[0, 4] == np.float32(1e-40)


@pytest.mark.parametrize("dtype", INTS)
@pytest.mark.parametrize("op,fold", [("bitwise_or", "__or__"), ("bitwise_and", "__and__")])
def test_bitwise_partition_reduce(dtype, op, fold):
    data = operand((40, 7), dtype)
    want = []
    for column in data.T:
        total = int(column[0])
        for v in column[1:]:
            total = getattr(total, fold)(int(v))
        want.append(total)
    same(run("tensor_partition_reduce", op=op, data=data), np.array([want], dtype))


@pytest.mark.parametrize("op,dtype", [("add", "float32"), ("maximum", "bfloat16"), ("bitwise_and", "uint8"),
                                      ("bitwise_or", "int32"), ("bitwise_and", "int32")])
def test_mask_leaves_elements_out(op, dtype):
    data = operand((12, 3, 4), dtype, special=False)
    p, i, j = np.ogrid[:12, :3, :4]
    mask = (p + i < 9) & (j < 3) & (p < 8)
    got = run("tensor_partition_reduce", op=op, data=data, mask=mask)
    fold = {"add": np.add, "maximum": np.maximum, "bitwise_and": np.bitwise_and,
            "bitwise_or": np.bitwise_or}[op]
    for a in range(3):
        for b in range(3):
            chosen = [data[q, a, b] for q in range(12) if q + a < 9 and q < 8]
            if data.dtype.kind != "i" and dtype != "uint8":
                chosen = [np.float64(v) for v in chosen]
            want = chosen[0]
            for v in chosen[1:]:
                want = fold(want, v)
            np.testing.assert_allclose(np.float64(got[0, a, b]), np.float64(want), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", INTS)
def test_a_masked_element_keeps_every_bit_of_bitwise_and(dtype):
    data, mask = np.full((3, 2), 0x6D, dtype), np.array([[True, True], [False, True], [False, True]])
    data[1:, 0] = 0
    same(run("tensor_partition_reduce", op="bitwise_and", data=data, mask=mask), np.full((1, 2), 0x6D, dtype))


def test_a_masked_sum_keeps_the_sign_of_zero():
    data, mask = np.full((3, 2), -0.0, np.float32), np.array([[True, True], [False, True], [False, False]])
    same(run("tensor_partition_reduce", op="add", data=data, mask=mask), np.full((1, 2), -0.0, np.float32))


def test_partition_reduce_of_float_bits_is_refused():
    check("tensor_partition_reduce", op="bitwise_or", data=((4, 4), "int32"))
    check("tensor_partition_reduce", op="add", data=((4, 4), "float32"))
    with pytest.raises(NkiTypeError, match="bitwise_or of float32"):
        check("tensor_partition_reduce", op="bitwise_or", data=((4, 4), "float32"))


def bounds(ids):
    """Walk out from each element while the id is the same."""
    n, start, end = len(ids), [], []
    for i, v in enumerate(ids):
        if v == 0:
            start.append(n)
            end.append(-1)
            continue
        a = b = i
        while a > 0 and ids[a - 1] == v:
            a -= 1
        while b + 1 < n and ids[b + 1] == v:
            b += 1
        start.append(a)
        end.append(b + 1)
    return np.array([[start, end]])


@pytest.mark.parametrize("ids", [
    [0, 1, 1, 2, 2, 2, 0, 3, 3], [5], [0], [0, 0, 0], [1, 1, 1, 1], [1, 2, 1, 2], [3, 0, 3, 3, 0, 0, 3],
    list(np.sort(np.random.default_rng(3).integers(0, 9, 40))), [-1, -1, 7, 7, 0],
    [2**24, 2**24 + 1, 2**24 + 2]])
@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_sequence_bounds(ids, dtype):
    tile = np.array([ids], dtype)
    same(run("sequence_bounds", segment_ids=tile), bounds(list(tile[0])).astype(dtype))
    other = "float32" if dtype == "int32" else "int32"
    same(run("sequence_bounds", segment_ids=tile, dtype=other), bounds(list(tile[0])).astype(other))


def test_sequence_bounds_example():
    got = run("sequence_bounds", segment_ids=np.array([[0, 1, 1, 2, 2, 2, 0, 3, 3]], np.int32))
    np.testing.assert_array_equal(got, [[[9, 1, 1, 3, 3, 3, 9, 7, 7], [-1, 3, 3, 6, 6, 6, -1, 9, 9]]])
    check("sequence_bounds", segment_ids=((1, 9), "int32"), dtype="float32")
    with pytest.raises(NkiTypeError, match="dtype is bfloat16"):
        check("sequence_bounds", segment_ids=((1, 9), "int32"), dtype="bfloat16")


def test_prebuilt_libraries_are_refused():
    given = {"function_name": "f", "lib_file_name": "lib.so", "srcs": [], "dsts": []}
    with pytest.raises(NkiError, match="cannot run here") as e:
        check("builtin_custom_op", **given)
    assert "prebuilt" in e.value.rule and e.value.why and e.value.fix
    with pytest.raises(NkiError, match="cannot run here"):
        ge.builtin_custom_op("f", "lib.so", 1, 1, [], [])


def test_costs():
    d = SimpleNamespace(P=128, F=512)
    assert ISA["affine_select"].cost(d, TRN1) == ISA["iota"].cost(d, TRN2) == 662
    assert ISA["tensor_partition_reduce"].cost(d, TRN1) == ISA["sequence_bounds"].cost(d, TRN1) == 150 + 1024
    assert bits(np.float32(FP32_MIN)) == 0xFF7FFFFF
