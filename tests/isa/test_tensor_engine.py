"""Tensor Engine: bodies against float64 and PyTorch, rules by their errors."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from opennki.errors import NkiTypeError, NkiValueError
from opennki.isa import tensor_engine as te
from opennki.isa.declare import ISA
from opennki.isa.target import TRN1, TRN2

from .bodies import FLOATS, INTS, NUMPY, bits, call, check, operand, run, same

pytestmark = pytest.mark.oracle


def in_float64(a, b):
    """Sum of products in float64, IEEE rules for NaN and infinity, without a matrix product."""
    with np.errstate(all="ignore"):
        return (a.astype(np.float64)[:, :, None] * b.astype(np.float64)[:, None, :]).sum(axis=0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("k,m,n", [(1, 1, 1), (3, 5, 7), (128, 128, 512), (32, 1, 9), (128, 16, 1)])
def test_product(dtype, k, m, n):
    a = operand((k, m), dtype, 1, special=False, scale=1.0)
    b = operand((k, n), dtype, 2, special=False, scale=1.0)
    got, absent = run("nc_matmul", stationary=a, moving=b)
    assert absent is None and got.dtype == np.float32
    a64, b64 = a.astype(np.float64), b.astype(np.float64)
    bound = np.abs(a64).T @ np.abs(b64) * (k + 1) * 2.0**-24 + 1e-44
    assert (np.abs(got - a64.T @ b64) <= bound).all()


@pytest.mark.parametrize("shape", [(128, 128), (17, 33)])
def test_a_product_with_itself_has_the_bits_of_a_product_with_a_copy(shape):
    x = operand(shape, special=False)  # whether BLAS would give others depends on the machine
    same(run("nc_matmul", stationary=x, moving=x)[0], run("nc_matmul", stationary=x, moving=x.copy())[0])


def test_nan_and_infinity_spread_by_ieee():
    a, b = operand((8, 16), seed=3), operand((8, 24), seed=4)
    for x in (a, b):  # sums that overflow float32 have an infinity that float64 does not have
        x[np.isfinite(x) & (np.abs(x) > 1e9)] = 2
    got, _ = run("nc_matmul", stationary=a, moving=b)
    with np.errstate(all="ignore"):
        want = in_float64(a, b).astype(np.float32)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    finite = np.isfinite(want)
    np.testing.assert_array_equal(np.isinf(got) | np.isnan(got), np.isinf(want) | np.isnan(want))
    np.testing.assert_allclose(got[finite], want[finite], rtol=1e-5, atol=1e-4)
    assert np.isnan(want).any() and np.isinf(want).any() and finite.any()


def test_torch_agrees():
    torch = pytest.importorskip("torch")
    a, b = operand((128, 64), special=False), operand((128, 96), seed=1, special=False)
    got, _ = run("nc_matmul", stationary=a, moving=b)
    want = torch.einsum("km,kn->mn", torch.from_numpy(a).double(), torch.from_numpy(b).double())
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-4, atol=1e-3)


def test_denormal_products_are_kept():
    a = np.full((1, 2), 1e-20, np.float32)
    b = np.full((1, 3), 1e-20, np.float32)
    got, _ = run("nc_matmul", stationary=a, moving=b)
    assert (got == np.float32(1e-20) * np.float32(1e-20)).all() and (got > 0).all()


@pytest.mark.parametrize("shape", [(128, 128), (7, 5), (64, 33)])
def test_layout_changes_no_bit(shape):
    a = operand(shape, seed=5, special=False)
    b = operand((shape[0], 40), seed=6, special=False)
    want, _ = te.nc_matmul(a, b)
    for x in (np.asfortranarray(a), np.repeat(a, 2, axis=1)[:, ::2],
              np.ascontiguousarray(a[:, ::-1])[:, ::-1]):
        for y in (np.asfortranarray(b), np.repeat(b, 3, axis=0)[::3]):
            got, _ = te.nc_matmul(x, y)
            np.testing.assert_array_equal(bits(got), bits(want))


def test_operands_that_share_memory_change_no_bit():
    a = operand((128, 128), seed=7, special=False)
    want, _ = te.nc_matmul(a, a.copy())
    got, _ = te.nc_matmul(a, a)
    np.testing.assert_array_equal(bits(got), bits(want))


def test_accumulates_into_dst():
    a, b = operand((4, 6), special=False), operand((4, 8), seed=1, special=False)
    old = operand((6, 2, 4), seed=2)
    product = (a.astype(np.float64).T @ b.astype(np.float64)).astype(np.float32).reshape(6, 2, 4)
    added = te.nc_matmul(a, b, dst=old, accumulate=True)
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(added, old + product, rtol=1e-5, atol=1e-4)
    replaced = te.nc_matmul(a, b, dst=old)
    np.testing.assert_allclose(replaced, product, rtol=1e-5, atol=1e-4)
    assert replaced.shape == added.shape == (6, 2, 4)


def test_result_has_the_free_dimensions_of_moving():
    shape = ISA["nc_matmul"].results[0].shape
    assert shape(call("nc_matmul", stationary=((16, 3, 4), "float32"),
                      moving=((16, 2, 5), "float32"))) == (12, 2, 5)
    assert shape(call("nc_matmul", stationary=((16, 2, 12), "float8_e5m2"),
                      moving=((16, 2, 7, 5), "float8_e5m2"),
                      perf_mode="double_row_gen3")) == (12, 7, 5)
    a, b = operand((128, 16), special=False), operand((128, 4, 128), seed=1, special=False)
    got, _ = run("nc_matmul", stationary=a, moving=b.reshape(128, 512))
    np.testing.assert_allclose(got.reshape(16, 4, 128), np.einsum("km,kab->mab", a, b.astype(np.float64)),
                               rtol=1e-4,
                               atol=1e-3)


@pytest.mark.parametrize("dtype", ["float8_e5m2", "float8_e4m3"])
def test_double_row_contracts_the_pair_too(dtype):
    a = operand((128, 2, 48), dtype, special=False, scale=1.0)
    b = operand((128, 2, 256), dtype, seed=1, special=False, scale=1.0)
    got, _ = te.nc_matmul(a.astype(np.float32).reshape(128, 96), b.astype(np.float32).reshape(128, 512),
                          perf_mode="double_row_gen3")
    want = np.einsum("kli,klj->ij", a.astype(np.float64), b.astype(np.float64))
    assert got.shape == (48, 256)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", FLOATS)
def test_transpose_by_identity_moves_bits(dtype):
    a = operand((16, 9), dtype)
    identity = np.eye(16).astype(NUMPY[dtype])
    got, _ = run("nc_matmul", dtype=dtype, stationary=a, moving=identity, is_transpose=True)
    same(got, np.array([[a[k, m] for k in range(16)] for m in range(9)]))
    into = te.nc_matmul(a, identity, is_transpose=True, dst=np.zeros((9, 16), NUMPY[dtype]))
    same(into, got)


def test_part_of_an_identity_and_permutations_move_bits_too():
    a = operand((16, 9))
    rows = np.random.default_rng(0).permutation(16)[:11]
    moving = np.zeros((16, 11), np.float32)
    moving[rows, np.arange(11)] = 1
    want = np.array([[a[k, m] for k in rows] for m in range(9)])
    same(run("nc_matmul", stationary=a, moving=moving, is_transpose=True)[0], want)
    part = np.eye(16, 7, dtype=np.float32)
    same(run("nc_matmul", stationary=a, moving=part, is_transpose=True)[0], a[:7].T.copy())
    finite = operand((16, 9), special=False)
    for spoil in (0.0, 2.0, -1.0):
        moving[rows[3], 3] = spoil
        got, _ = run("nc_matmul", stationary=finite, moving=moving, is_transpose=True)
        np.testing.assert_array_equal(got[:, 3], spoil * finite[rows[3]])
    moving[rows[3], 3] = moving[rows[4], 3] = 1
    got, _ = run("nc_matmul", stationary=finite, moving=moving, is_transpose=True)
    np.testing.assert_array_equal(got[:, 3], finite[rows[3]] + finite[rows[4]])


def test_transpose_flag_without_identity_is_a_product():
    a, b = operand((8, 5), special=False), operand((8, 8), seed=1, special=False)
    got, _ = run("nc_matmul", stationary=a, moving=b, is_transpose=True)
    np.testing.assert_allclose(got, a.astype(np.float64).T @ b, rtol=1e-5, atol=1e-4)
    c = operand((8, 5), "bfloat16", special=False)
    got = te.nc_matmul(c, np.eye(8, dtype=np.float32), is_transpose=True, dst=np.ones((5, 8), np.float32),
                       accumulate=True)
    np.testing.assert_array_equal(got, 1 + c.astype(np.float32).T)


A, B = ((64, 64), "bfloat16"), ((64, 512), "bfloat16")
ROW8 = {"stationary": ((128, 2, 128), "float8_e5m2"), "moving": ((128, 2, 512), "float8_e5m2")}


def test_what_the_check_accepts():
    check("nc_matmul", stationary=A, moving=B)
    check("nc_matmul", stationary=A, moving=B, tile_position=(64, 0), tile_size=(64, 64))
    check("nc_matmul", TRN2, **ROW8, perf_mode="double_row_gen3")
    check("nc_matmul", TRN2, stationary=((32, 32), "bfloat16"), moving=((32, 9), "bfloat16"),
          tile_position=(32, 96),
          tile_size=(32, 32))
    check("nc_matmul", stationary=A, moving=B, dst=((64, 2, 256), "float32", "psum"), accumulate=True)


@pytest.mark.parametrize("given,kind,text", [
    ({"stationary": ((64, 129), "bfloat16")}, NkiValueError, "129 free elements, the limit is 128"),
    ({"moving": ((64, 2, 257), "bfloat16")}, NkiValueError, "514 free elements, the limit is 512"),
    ({"tile_position": (0, 0)}, NkiValueError, "given together"),
    ({"tile_size": (64, 64)}, NkiValueError, "given together"),
    ({"tile_position": (16, 0), "tile_size": (64, 64)}, NkiValueError, "not a multiple of 32"),
    ({"tile_position": (0, 0, 0), "tile_size": (64, 64)}, NkiValueError, "3 elements"),
    ({"tile_position": (0, 0), "tile_size": (32, 64)}, NkiValueError, "smaller than the stationary tile"),
    ({"tile_position": (0, 0), "tile_size": (64, 32)}, NkiValueError, "smaller than the stationary tile"),
    ({"tile_position": (0, 0), "tile_size": (32, 32)}, NkiValueError, "does not exist on trn1"),
    ({"tile_position": (96, 0), "tile_size": (64, 64)}, NkiValueError, "outside the PE array"),
    ({"tile_position": (0, 96), "tile_size": (64, 64)}, NkiValueError, "outside the PE array"),
    ({"perf_mode": "double_row_gen3"}, NkiValueError, "needs trn2 or later"),
    ({"perf_mode": "double_pixel_gen3"}, NkiValueError, "not public"),
    ({"accumulate": True}, NkiValueError, "accumulate without dst"),
    ({"dst": ((64, 511), "float32", "psum")}, NkiValueError, r"the product has \(64, 512\)"),
    ({"dst": ((512, 64), "float32", "psum")}, NkiValueError, r"the product has \(64, 512\)"),
])
def test_what_the_check_refuses(given, kind, text):
    with pytest.raises(kind, match=text) as e:
        check("nc_matmul", **{"stationary": A, "moving": B, **given})
    assert e.value.rule and e.value.why and e.value.fix
    assert e.value.operand in given or e.value.operand in ("stationary", "moving", "tile_size")


def test_the_lone_one_of_position_and_size_is_named():
    for name in ("tile_position", "tile_size"):
        with pytest.raises(NkiValueError) as e:
            check("nc_matmul", stationary=A, moving=B, **{name: (64, 64)})
        assert e.value.operand == name


@pytest.mark.parametrize("given,kind,text", [
    ({"moving": ((128, 2, 512), "bfloat16")}, NkiTypeError, "moving is bfloat16"),
    ({"moving": ((128, 2), "float8_e5m2")}, NkiValueError, r"moving has shape \(128, 2\)"),
    ({"moving": ((128, 3, 128), "float8_e5m2")}, NkiValueError, r"moving has shape \(128, 3, 128\)"),
    ({"stationary": ((128, 128), "float8_e5m2")}, NkiValueError, r"takes \[K, 2, F\]"),
    ({"stationary": ((128, 2, 129), "float8_e5m2")}, NkiValueError, "129 free elements"),
])
def test_what_double_row_refuses(given, kind, text):
    with pytest.raises(kind, match=text):
        check("nc_matmul", TRN2, **{**ROW8, **given}, perf_mode="double_row_gen3")


def dims(**values):
    return SimpleNamespace(**values)


@pytest.mark.parametrize("m,n,kinds,extra,cycles", [
    (128, 512, ("bfloat16", "bfloat16"), {}, 512),
    (128, 16, ("float16", "float8_e5m2"), {}, 64),
    (16, 8, ("tfloat32", "float32r"), {}, 16),
    (128, 512, ("float32", "float32"), {}, 2048),
    (128, 512, ("float32", "bfloat16"), {}, 2048),
    (128, 512, ("float32", "float32"), {"is_moving_onezero": True}, 1024),
    (256, 1024, ("float8_e5m2", "float8_e5m2"), {"perf_mode": "double_row_gen3"}, 512),
    (64, 16, ("float8_e5m2", "float8_e5m2"), {"perf_mode": "double_row_gen3"}, 32),
])
def test_cost_of_a_product(m, n, kinds, extra, cycles):
    d = dims(K=128, M=m, N=n, dtypes=dict(zip(("stationary", "moving"), kinds)), **extra)
    assert ISA["nc_matmul"].cost(d, TRN2) == cycles


@pytest.mark.parametrize("dtype", FLOATS + INTS)
@pytest.mark.parametrize("shape", [(1, 1), (32, 2), (128, 64), (5, 128)])
def test_nc_transpose_moves_bits(dtype, shape):
    x = operand(shape, dtype)
    want = np.empty(shape[::-1], x.dtype)
    for p in range(shape[0]):
        for f in range(shape[1]):
            want[f, p] = x[p, f]
    same(run("nc_transpose", data=x), want)


def test_nc_transpose_casts():
    x = operand((8, 4), "float32")
    with np.errstate(all="ignore"):
        same(run("nc_transpose", data=x, dtype="bfloat16"), x.astype(NUMPY["bfloat16"]).T)


@pytest.mark.parametrize("space,asked,chosen", [
    ("sbuf", "", "tensor"), ("psum", "", "vector"), ("sbuf", "vector", "vector"),
    ("sbuf", "tensor", "tensor")])
def test_engine_of_a_transpose(space, asked, chosen):
    c = call("nc_transpose", data=((32, 32), "float32", space), engine=asked)
    assert ISA["nc_transpose"].choose_engine(c, TRN1) == chosen
    ISA["nc_transpose"].check(c, TRN1)


@pytest.mark.parametrize("shape,space,engine,code", [
    ((129, 8), "sbuf", "", "err_size_of_dimension_exceed_arch_limit"),
    ((8, 4, 33), "sbuf", "", "err_size_of_dimension_exceed_arch_limit"),
    ((33, 8), "sbuf", "vector", "err_size_of_dimension_exceed_arch_limit"),
    ((8, 33), "psum", "", "err_size_of_dimension_exceed_arch_limit"),
    ((8, 8), "psum", "tensor", "err_unsupported_memory"),
])
def test_what_nc_transpose_refuses(shape, space, engine, code):
    with pytest.raises((NkiTypeError, NkiValueError)) as e:
        check("nc_transpose", data=(shape, "float32", space), engine=engine)
    assert e.value.code == code and e.value.fix


def test_nc_transpose_result_and_cost():
    rule = ISA["nc_transpose"].results[0]
    assert rule.shape(call("nc_transpose", data=((8, 3, 4), "float32"))) == (12, 8)
    cost = ISA["nc_transpose"].cost
    assert cost(dims(P=32, F=8, engine="vector", dtypes={"data": "float32"}), TRN1) == 64
    assert cost(dims(P=128, F=128, engine="tensor", dtypes={"data": "bfloat16"}), TRN1) == 128
    assert cost(dims(P=16, F=128, engine="tensor", dtypes={"data": "bfloat16"}), TRN1) == 64
    assert cost(dims(P=128, F=128, engine="tensor", dtypes={"data": "float32"}), TRN1) == 256
