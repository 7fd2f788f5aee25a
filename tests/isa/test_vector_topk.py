"""max8, nc_find_index8 and nc_match_replace8 against loops over Python numbers."""
from __future__ import annotations


import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tests.isa.vector_calls import F32, SPECIALS, call, cost, quiet_pure_and_blind_to_layout, same_bits, tile

from opennki.errors import NkiError
from opennki.isa import dtypes
from opennki.isa import vector_topk as v
from opennki.isa.declare import ISA
from opennki.isa.target import TRN2

rng = np.random.default_rng(13)
ONES = 2**32 - 1
SMALL = st.sampled_from([float(x) for x in (-np.inf, -1, -0.0, 0, 0.5, 1, 2, np.inf)])
DATA = arrays(F32, st.tuples(st.integers(1, 3), st.integers(8, 20)), elements=SMALL)


def places(index, kind="uint32"):
    return dtypes.convert(index, index.dtype.name, kind).tolist()


# ---- max8 ------------------------------------------------------------------------------------------------


@pytest.mark.oracle
@given(DATA)
def test_max8_as_sorted(data):
    got = v.max8(src=data)
    assert got.shape == (len(data), 8) and got.dtype == F32
    for row, want in zip(got.tolist(), data.tolist()):
        assert row == sorted(want, reverse=True)[:8]


@pytest.mark.oracle
@pytest.mark.parametrize("shape", [(128, 512), (3, 8), (2, 5, 7, 3), (1, 16384)])
def test_max8_as_torch_topk(shape):
    x = rng.normal(size=shape).astype(F32)
    want = torch.topk(torch.from_numpy(x).reshape(shape[0], -1), 8).values.numpy()
    same_bits(v.max8(src=x), want)


def test_max8_of_special_values():
    x = np.stack([np.roll(SPECIALS, k) for k in range(4)])
    x[2:][np.isnan(x[2:])] = -np.inf
    got = v.max8(src=x)
    assert np.isnan(got[:2, 0]).all() and (got[:2, 1] == np.inf).all() and (got[2:, 0] == np.inf).all()
    for row in got:
        same_bits(row, got[0] if np.isnan(row[0]) else got[2])  # whatever the order of the data
    zeros = v.max8(src=np.array([[0.0, -0.0] * 6], F32))
    assert np.signbit(zeros).tolist() == [[False] * 6 + [True] * 2]
    tiny = v.max8(src=np.array([[1e-45, -1e-45, *[-1.0] * 8]], F32))
    assert tiny[0, 0] == F32(1e-45) and tiny[0, 1] == F32(-1e-45)
    negative_nan = np.full((1, 9), -1, F32)
    negative_nan.view(np.uint32)[0, 4] = 0xFFC00001
    assert np.isnan(v.max8(src=negative_nan)[0, 0])


def test_max8_mask_leaves_out():
    x = np.arange(20, dtype=F32)[None]
    assert v.max8(src=x, mask=x < 10).tolist() == [[9, 8, 7, 6, 5, 4, 3, 2]]
    assert v.max8(src=x, mask=x < 3).tolist() == [[2, 1, 0, *[-np.inf] * 5]]
    assert v.max8(src=x[:, ::-1], mask=np.ones((1, 20), bool))[0, 0] == 19


def test_max8_record():
    result, = ISA["max8"].results
    assert result.shape(call("max8", src=tile(32, 4, 4))) == (32, 8) and result.dtype == "src"


# ---- nc_find_index8 --------------------------------------------------------------------------------------


def find_loop(data, vals, mask=None):
    """k-th time a value is asked for: its k-th place."""
    rows = []
    for r, row in enumerate(data.tolist()):
        asked, out = [], []
        for value in vals[r].tolist():
            where = [i for i, x in enumerate(row) if x == value and (mask is None or mask[r, i])]
            k = sum(1 for x in asked if x == value)
            asked.append(value)
            out.append(where[k] if k < len(where) else ONES)
        rows.append(out)
    return rows


@pytest.mark.oracle
@given(DATA, st.data())
def test_find_index8_as_a_loop(data, draw):
    vals = draw.draw(arrays(F32, (len(data), 8), elements=SMALL))
    mask = draw.draw(arrays(bool, data.shape))
    assert places(v.nc_find_index8(data=data, vals=vals)) == find_loop(data, vals)
    assert places(v.nc_find_index8(data=data, vals=vals, mask=mask)) == find_loop(data, vals, mask)
    best = v.max8(src=data)
    found = np.array(places(v.nc_find_index8(data=data, vals=best)))
    np.testing.assert_array_equal(np.take_along_axis(data, found, 1), best)
    assert all(len(set(row)) == 8 for row in found.tolist())


def test_find_index8_of_several_dimensions_nan_and_16_bits():
    data = rng.permutation(2 * 4 * 6).astype(F32).reshape(2, 4, 6)
    vals = data.reshape(2, -1)[:, [3, 0, 23, 7, 7, 1, 2, 9]].reshape(2, 2, 4)
    assert places(v.nc_find_index8(data=data, vals=vals)) == [[3, 0, 23, 7, ONES, 1, 2, 9]] * 2
    data[0, 0, 0] = np.nan
    nan = np.full((2, 8), np.nan, F32)
    assert places(v.nc_find_index8(data=data, vals=nan), "uint16") == [[0xFFFF] * 8] * 2


# ---- nc_match_replace8 -----------------------------------------------------------------------------------


def replace_loop(data, vals, imm, mask=None):
    out, index = data.copy(), np.full(vals.shape, ONES)
    for r in range(len(data)):
        gone = set()
        for j in range(7, -1, -1):
            for i, x in enumerate(data[r].tolist()):
                if x == vals[r, j] and i not in gone and (mask is None or mask[r, i]):
                    out[r, i], index[r, j] = imm, i
                    gone.add(i)
                    break
    return out, index.tolist()


@pytest.mark.oracle
@given(DATA, st.data(), SMALL)
def test_match_replace8_as_a_loop(data, draw, imm):
    vals = draw.draw(arrays(F32, (len(data), 8), elements=SMALL))
    mask = draw.draw(st.one_of(st.none(), arrays(bool, data.shape)))
    got, index = v.nc_match_replace8(data=data, vals=vals, imm=imm, dst_idx=np.zeros(vals.shape, F32),
                                     mask=mask)
    want, want_index = replace_loop(data, vals, imm, mask)
    same_bits(got, want)
    assert places(index) == want_index


@pytest.mark.oracle
def test_match_replace8_repeated_values_as_documented():
    # The published example of NKI 2.32: repeated values fill dst_idx from its last column on.
    data = np.array([[1, 2, 3, 4, 8, 8, 8, 8, 8, 8, 8]], F32)
    vals = np.array([[3, 8, 8, 8, 8, 8, 8, 8]], F32)
    got, index = v.nc_match_replace8(data=data, vals=vals, imm=-1, dst_idx=vals)
    assert places(index) == [[2, 10, 9, 8, 7, 6, 5, 4]]
    assert got.tolist() == [[1, 2, -1, 4, *[-1] * 7]]
    assert places(v.nc_find_index8(data=data, vals=vals)) == [[2, 4, 5, 6, 7, 8, 9, 10]]


def test_match_replace8_more_matches_than_values_and_fewer():
    data = np.array([[5, 1, 5, 5, 2]], F32)
    vals = np.array([[5, 5, 9, 9, 9, 9, 9, 1]], F32)
    got, index = v.nc_match_replace8(data=data, vals=vals, imm=float("-inf"), dst_idx=vals)
    assert got.tolist() == [[-np.inf, -np.inf, -np.inf, 5, 2]]
    assert places(index) == [[2, 0, ONES, ONES, ONES, ONES, ONES, 1]]
    assert v.nc_match_replace8(data=data, vals=vals, imm=0.0)[1] is None


def test_match_replace8_keeps_shapes_and_finds_top_k():
    data = rng.permutation(6 * 24).astype(F32).reshape(6, 4, 6)
    left, order = data, np.sort(data.reshape(6, -1), axis=1)[:, ::-1]
    for k in range(3):
        best = v.max8(src=left)
        same_bits(best, np.ascontiguousarray(order[:, 8 * k:8 * k + 8]))
        left, _ = v.nc_match_replace8(data=left, vals=best, imm=MIN)
    assert left.shape == data.shape and (left == MIN).all()


MIN = float(np.finfo(F32).min)


# ---- rules -----------------------------------------------------------------------------------------------


def fails(name, **given):
    with pytest.raises(NkiError) as info:
        ISA[name].check(call(name, **given), TRN2)
    assert info.value.rule and info.value.why and info.value.fix
    return info.value


def test_topk_refuses():
    ok, eight = tile(8, 2, 2, 2, 4), tile(8, 2, 4)
    ISA["max8"].check(call("max8", src=ok), TRN2)
    ISA["nc_find_index8"].check(call("nc_find_index8", data=ok, vals=eight, dtype="uint16"), TRN2)
    given = {"vals": eight, "imm": 0.0, "dst_idx": eight}
    ISA["nc_match_replace8"].check(call("nc_match_replace8", data=tile(8, 4), **given), TRN2)
    assert fails("max8", src=tile(8, 7)).operand == "src"
    assert fails("max8", src=tile(8, 2, 2, 2, 2, 2)).code == "err_exceed_max_supported_dimension"
    assert fails("nc_find_index8", data=tile(8, 7), vals=eight).operand == "data"
    assert fails("nc_find_index8", data=ok, vals=tile(8, 9)).operand == "vals"
    assert fails("nc_find_index8", data=ok,
                 vals=tile(8, 2, 2, 2)).code == "err_exceed_max_supported_dimension"
    assert fails("nc_find_index8", data=ok, vals=eight, dtype="int32").operand == "dtype"
    assert fails("nc_match_replace8", data=ok, vals=tile(8, 7), imm=0.0).operand == "vals"
    assert fails("nc_match_replace8", data=ok, vals=eight, imm=0.0, dst_idx=tile(8, 8)).operand == "dst_idx"
    for name in ("max8", "nc_find_index8", "nc_match_replace8"):
        assert {limit.at_most for limit in ISA[name].limits} == {"partitions", "max8_fmax"}


def test_topk_results_and_cycles():
    result, = ISA["nc_find_index8"].results
    c = call("nc_find_index8", data=tile(32, 128), vals=tile(32, 8))
    assert result.shape(c) == (32, 8) and result.dtype(c) == "uint32"
    for name in ("max8", "nc_find_index8", "nc_match_replace8"):
        assert cost(name, TRN2, 512, {"data": "float32"}) == 512


def _samples():
    x = np.stack([np.roll(SPECIALS, k) for k in range(4)])
    mask = np.arange(x.size).reshape(x.shape) % 5 > 0
    vals = np.ascontiguousarray(x[:, [0, 1, 1, 2, 5, 6, 7, 8]])
    yield v.max8, {"src": x}
    yield v.max8, {"src": x, "mask": mask}
    yield v.nc_find_index8, {"data": x, "vals": vals, "mask": mask}
    yield v.nc_match_replace8, {"data": x, "vals": vals, "imm": 1e300, "dst_idx": vals, "mask": mask}


@pytest.mark.parametrize("body, given", list(_samples()), ids=lambda x: getattr(x, "__name__", ""))
def test_bodies_are_quiet_pure_and_blind_to_layout(body, given):
    quiet_pure_and_blind_to_layout(body, (), given)
