"""Reductions, scans and statistics of the Vector Engine against loops, float64 NumPy and PyTorch."""
from __future__ import annotations

import functools
import itertools
import operator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tests.isa.vector_calls import F32, SPECIALS, call, cost, pairs, quiet_pure_and_blind_to_layout, same_bits, tile

from opennki.errors import NkiError
from opennki.isa import vector_reduce as v
from opennki.isa.declare import ISA
from opennki.isa.target import TRN1, TRN2

rng = np.random.default_rng(11)
MIN = np.finfo(F32).min
IDLE, RESET, REDUCE, RESET_REDUCE, LOAD_REDUCE = range(5)


def fails(name, target=TRN2, **given):
    with pytest.raises(NkiError) as info:
        ISA[name].check(call(name, **given), target)
    assert info.value.rule and info.value.why and info.value.fix
    return info.value


def passes(name, **given):
    ISA[name].check(call(name, **given), TRN2)


def lanes_sum(row):
    """The defined order of sums, element by element: 32 lanes, then a tree."""
    lanes = [None] * 32
    for i, x in enumerate(row):
        lanes[i % 32] = x if lanes[i % 32] is None else F32(lanes[i % 32] + x)
    half = 16
    while half:
        for j in range(half):
            if lanes[j + half] is not None:
                lanes[j] = F32(lanes[j] + lanes[j + half])
        half //= 2
    return lanes[0]


# ---- tensor_reduce ---------------------------------------------------------------------------------------


@pytest.mark.oracle
@pytest.mark.parametrize("op, oracle",
                         [("add", np.sum), ("multiply", np.prod), ("maximum", np.max), ("minimum", np.min)])
@pytest.mark.parametrize("axis", [1, 2, 3, -1, -3, (1, 2), [2, 3], (1, 2, 3), [-1, -2, -3], (3, 1), (2,)])
@pytest.mark.parametrize("keepdims", [False, True])
def test_reduce_over_free_axes(op, oracle, axis, keepdims):
    x = rng.uniform(0.5, 1.5, (5, 3, 7, 4)).astype(F32)
    got = v.tensor_reduce(op, x, axis, keepdims=keepdims)
    want = oracle(x.astype(np.float64), axis=axis if isinstance(axis, int) else tuple(axis),
                  keepdims=keepdims)
    want = want if want.ndim > 1 else want[:, None]
    assert got.shape == want.shape
    assert ISA["tensor_reduce"].results[0].shape(
        call("tensor_reduce", data=tile(*x.shape), axis=axis, keepdims=keepdims)) == want.shape
    np.testing.assert_allclose(got, want, rtol=1e-5)
    same_bits(v.tensor_reduce(op, x, axis, keepdims=keepdims, negate=True), -got)


@pytest.mark.oracle
@pytest.mark.parametrize("n", [1, 2, 31, 32, 33, 64, 100, 513])
def test_sums_follow_the_defined_order(n):
    x = (rng.normal(size=(3, n)) * 10.0 ** rng.integers(-6, 7, (3, n))).astype(F32)
    with np.errstate(all="ignore"):
        want = np.array([[lanes_sum(row)] for row in x], F32)
    same_bits(v.tensor_reduce("add", x, 1), want)


@pytest.mark.oracle
def test_maximum_and_minimum_pass_nan_on_as_torch():
    x = np.stack([np.roll(SPECIALS, k) for k in range(6)])
    x[3:][np.isnan(x[3:])] = 0
    for op, oracle in (("maximum", torch.amax), ("minimum", torch.amin)):
        np.testing.assert_array_equal(v.tensor_reduce(op, x, 1)[:, 0], oracle(torch.from_numpy(x), 1).numpy())


@pytest.mark.oracle
def test_subtract_and_logical_reductions():
    x = np.array([[8, 1, 2, 0.5], [0, 0, 0, 0], [-1, 0, 3, 0]], F32)
    np.testing.assert_array_equal(v.tensor_reduce("subtract", x, 1)[:, 0],
                                  [functools.reduce(operator.sub, row) for row in x.tolist()])
    for op, oracle in (("logical_and", all), ("logical_or", any),
                       ("logical_xor", lambda r: sum(map(bool, r)) % 2)):
        np.testing.assert_array_equal(v.tensor_reduce(op, x, 1)[:, 0], [oracle(row) for row in x.tolist()])


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["int8", "uint8", "int16", "uint16", "int32", "uint32"])
@pytest.mark.parametrize("op, oracle", [
    ("bitwise_and", operator.and_), ("bitwise_or", operator.or_), ("bitwise_xor", operator.xor)])
def test_bitwise_reductions(op, oracle, kind):
    info = np.iinfo(kind)
    x = rng.integers(info.min, info.max, (4, 45), endpoint=True).astype(kind)
    mask = rng.random((4, 45)) < 0.4
    got = v.tensor_reduce(op, x, [1])
    assert got.dtype == x.dtype and got[:,
                                        0].tolist() == [functools.reduce(oracle, row) for row in x.tolist()]
    got = v.tensor_reduce(op, x, [1], mask=mask)
    assert got[:, 0].tolist() == [functools.reduce(oracle, row[m].tolist()) for row, m in zip(x, mask)]
    assert ISA["tensor_reduce"].raw(call("tensor_reduce", op=op, data=tile(4, 45, dtype=kind), axis=1))


@pytest.mark.oracle
@given(arrays(F32, (2, 3, 9), elements=st.floats(-4, 4, width=32)), arrays(bool, (2, 3, 9)))
def test_masked_elements_are_no_operands(x, mask):
    for op, oracle, empty in (("add", np.sum, 0), ("multiply", np.prod, 1), ("maximum", np.max, -np.inf),
                              ("minimum", np.min, np.inf)):
        got = v.tensor_reduce(op, x, (1, 2), mask=mask)
        for p in range(2):
            kept = x[p][mask[p]].astype(np.float64)
            want = oracle(kept) if kept.size else empty
            np.testing.assert_allclose(got[p, 0], want, rtol=1e-4, atol=1e-3)


def test_masked_nan_does_not_count():
    x = np.array([[np.nan, 1, 2]], F32)
    assert v.tensor_reduce("add", x, 1, mask=np.array([[False, True, True]])) == 3


def test_tensor_reduce_refuses():
    data = tile(8, 4, 4)
    passes("tensor_reduce", op="add", data=data, axis=(1, 2), keepdims=False, negate=True)
    for axis in (0, (0, 1), -3, (1, 1), (1, -2), 3, -4, ()):
        assert fails("tensor_reduce", op="add", data=data, axis=axis).operand == "axis"
    fails("tensor_reduce", op="bitwise_or", data=data, axis=1)
    ints = tile(8, 4, dtype="int16")
    passes("tensor_reduce", op="bitwise_or", data=ints, axis=1)
    fails("tensor_reduce", op="bitwise_or", data=ints, axis=1, negate=True)
    fails("tensor_reduce", op="bitwise_or", data=ints, axis=1, dtype="float32")


# ---- tensor_scalar_reduce --------------------------------------------------------------------------------


@pytest.mark.oracle
@pytest.mark.parametrize("reduce_op, oracle", [
    ("add", np.sum), ("multiply", np.prod), ("maximum", np.max), ("minimum", np.min),
    ("subtract", lambda x,
     **kw: 2 * x[..., :1].reshape(len(x), -1)[:, :1].reshape(-1, 1, 1) - np.sum(x, **kw))])
def test_tensor_scalar_reduce(reduce_op, oracle):
    x = rng.uniform(0.5, 1.5, (4, 3, 5)).astype(F32)
    lane = rng.uniform(0.8, 1.2, (4, 1, 1)).astype(F32)
    out, total = v.tensor_scalar_reduce(data=x, op0="multiply", operand0=lane, reduce_op=reduce_op,
                                        reduce_res=np.zeros((4, 1, 1), F32))
    same_bits(out, (x.astype(np.float64) * lane).astype(F32))
    np.testing.assert_allclose(total, oracle(out.astype(np.float64), axis=(1, 2), keepdims=True), rtol=1e-5)
    mask = np.broadcast_to(np.arange(5) < 3, x.shape)
    out, total = v.tensor_scalar_reduce(data=x, op0="abs", operand0=F32(0), reduce_op="maximum", mask=mask,
                                        reduce_res=np.zeros((4, 1, 1), F32))
    np.testing.assert_array_equal(total, x[:, :, :3].max(axis=(1, 2), keepdims=True))


def test_tensor_scalar_reduce_refuses_reverse0():
    given = {"data": tile(8, 4), "op0": "add", "operand0": 1.0, "reduce_op": "add", "reduce_res": tile(8, 1)}
    passes("tensor_scalar_reduce", **given)
    assert fails("tensor_scalar_reduce", reverse0=True, **given).operand == "reverse0"


# ---- scans -----------------------------------------------------------------------------------------------

FUNCTIONS = {"add": np.add, "subtract": np.subtract, "multiply": np.multiply, "maximum": np.maximum,
             "minimum": np.minimum}


def scan_loop(d0, d1, initial, op0, op1, reverse0, reverse1, mask=None):
    out = np.zeros(d0.shape, F32)
    for p in range(d0.shape[0]):
        state = F32(initial[p])
        for i in np.ndindex(d0.shape[1:]):
            if mask is None or mask[(p, *i)]:
                a, b = d0[(p, *i)], d1[(p, *i)]
                step = FUNCTIONS[op0](state, a) if reverse0 else FUNCTIONS[op0](a, state)
                state = FUNCTIONS[op1](b, step) if reverse1 else FUNCTIONS[op1](step, b)
            out[(p, *i)] = state
    return out


@pytest.mark.oracle
@pytest.mark.parametrize("op0, op1", list(itertools.product(FUNCTIONS, FUNCTIONS)))
def test_tensor_tensor_scan_as_a_loop(op0, op1):
    d0, d1 = rng.uniform(-1.5, 1.5, (2, 3, 2, 7)).astype(F32)
    lane = rng.normal(size=(3, 1, 1)).astype(F32)
    mask = rng.random(d0.shape) < 0.6
    for swap in itertools.product((False, True), repeat=2):
        want = scan_loop(d0, d1, lane[:, 0, 0], op0, op1, *swap)
        same_bits(v.tensor_tensor_scan(d0, d1, lane, op0, op1, *swap), want)
        want = scan_loop(d0, d1, [2.0] * 3, op0, op1, *swap, mask)
        got = v.tensor_tensor_scan(d0, d1, F32(2), op0, op1, *swap, mask=mask)
        same_bits(got, want)


@pytest.mark.oracle
def test_scan_of_special_values():
    d0, d1 = pairs()
    with np.errstate(all="ignore"):
        want = scan_loop(d0, d1, [1.0] * d0.shape[0], "multiply", "add", False, False)
    same_bits(v.tensor_tensor_scan(d0, d1, 1, "multiply", "add"), want)


def test_scan_records():
    a, psum = tile(8, 4), tile(8, 4, space="psum")
    given = {"initial": 0.0, "op0": "add", "op1": "add"}
    passes("tensor_tensor_scan", data0=a, data1=psum, **given)
    assert fails("tensor_tensor_scan", data0=psum, data1=psum, **given).code == "err_unsupported_memory"
    c = call("tensor_tensor_scan", data0=tile(8, 4, dtype="bfloat16"), data1=a, **given)
    assert ISA["tensor_tensor_scan"].results[0].dtype(c) == "float32"


@pytest.mark.oracle
@pytest.mark.parametrize("op1, start",
                         [("add", 0.0), ("subtract", 0.0), ("multiply", 1.0), ("maximum", -np.inf),
                                        ("minimum", np.inf)])
@pytest.mark.parametrize("op0, imm0", [("add", F32(0.25)), ("multiply", np.array([[1], [-2], [0.5]], F32)),
                                       ("abs", F32(0))])
def test_tensor_scalar_cumulative_as_the_documented_loop(op0, imm0, op1, start):
    src = rng.uniform(-1.2, 1.2, (3, 2, 6)).astype(F32)
    lane = np.broadcast_to(np.asarray(imm0).reshape(-1, 1, 1), (3, 1, 1))
    held = np.array([[[3.0]], [[-1.0]], [[0.5]]], F32)
    load = np.array([[[-4.0]], [[2.0]], [[0.0]]], F32)
    with np.errstate(all="ignore"):
        x = np.abs(src) if op0 == "abs" else FUNCTIONS[op0](src, lane)
    for command, first, imm1 in ((RESET_REDUCE, np.full((3, 1, 1), start), None), (REDUCE, held, None),
                                 (LOAD_REDUCE, load, load)):
        got, registers = v.tensor_scalar_cumulative(
            src=src, dst=np.empty_like(src), op0=op0, op1=op1, imm0=imm0 if np.ndim(imm0) == 0 else lane,
            imm1=imm1,
            reduce_cmd=command, registers=held)
        for p in range(3):
            state = F32(first[p, 0, 0])
            for i in np.ndindex(2, 6):
                state = FUNCTIONS[op1](x[(p, *i)], state)
                assert got[(p, *i)] == state
            assert registers[p, 0, 0] == state
    assert registers.shape == (3, 1, 1) and (held == [[[3.0]], [[-1.0]], [[0.5]]]).all()


def test_tensor_scalar_cumulative_examples_of_the_vendor_test():
    ones = np.ones((128, 64), F32)
    up = np.arange(1, 65, dtype=F32)
    given = {"src": ones, "dst": ones, "op0": "add", "imm0": F32(0), "op1": "add"}
    first, registers = v.tensor_scalar_cumulative(**given)
    assert (first == up).all()
    second, _ = v.tensor_scalar_cumulative(**given, reduce_cmd=REDUCE, registers=registers)
    assert (second == up + 64).all()
    loaded, registers = v.tensor_scalar_cumulative(**given, imm1=F32(1), reduce_cmd=LOAD_REDUCE,
                                                   registers=registers)
    chained, _ = v.tensor_scalar_cumulative(**given, reduce_cmd=REDUCE, registers=registers)
    assert (loaded == up + 1).all() and (chained == up + 65).all()
    fresh, _ = v.tensor_scalar_cumulative(**given, reduce_cmd=REDUCE)  # registers start at 0
    assert (fresh == up).all()


def test_tensor_scalar_cumulative_skips_what_a_mask_excludes():
    src = np.array([[1, 2, 4, 8]], F32)
    got, registers = v.tensor_scalar_cumulative(src=src, dst=src, op0="add", op1="add", imm0=F32(0),
                                                mask=np.array([[False, True, False, True]]))
    assert got.tolist() == [[0, 2, 2, 10]] and registers == 10


def test_tensor_scalar_cumulative_refuses():
    given = {"src": tile(8, 4), "dst": tile(8, 4), "op0": "add", "op1": "add", "imm0": 0.0}
    passes("tensor_scalar_cumulative", **given)
    passes("tensor_scalar_cumulative", **given, imm1=1.0, reduce_cmd=LOAD_REDUCE)
    assert fails("tensor_scalar_cumulative", **given, reduce_cmd=IDLE).operand == "reduce_cmd"
    assert fails("tensor_scalar_cumulative", **given, reduce_cmd=LOAD_REDUCE).operand == "imm1"
    passes("tensor_scalar_cumulative", **given, imm1=1.0)  # only load_reduce uses it, public tests pass it always
    assert fails("tensor_scalar_cumulative", **{**given, "dst": tile(8, 5)}).operand == "dst"


# ---- statistics ------------------------------------------------------------------------------------------


@pytest.mark.oracle
@pytest.mark.parametrize("shape", [(4, 512), (4, 511), (3, 2), (3, 1), (2, 3, 5)])
def test_bn_stats_in_float64(shape):
    x = (rng.normal(size=shape) * 3 + 100).astype(F32)
    got = v.bn_stats(x)
    assert got.shape == (shape[0], 6) and got.dtype == F32
    flat = x.reshape(shape[0], -1).astype(np.float64)
    for half in (0, 1):
        part = flat[:, half::2]
        n = part.shape[1]
        some = np.stack([np.full(shape[0], n), part.mean(1), part.var(1) * n], 1) if n else 0
        want = np.broadcast_to(some, (shape[0], 3))
        np.testing.assert_allclose(got[:, 3 * half:3 * half + 3], want, rtol=2e-5, atol=1e-6)


@pytest.mark.oracle
def test_bn_aggr_combines_pieces_of_any_size():
    pieces = [(rng.normal(size=(5, n)) * s + m).astype(F32) for n, s,
              m in ((512, 1, 50), (100, 5, -3), (1, 1, 2), (7, 0, 9))]
    stats = np.concatenate([v.bn_stats(p) for p in pieces], axis=1)
    every = np.concatenate(pieces, axis=1).astype(np.float64)
    got = v.bn_aggr(stats)
    np.testing.assert_allclose(got[:, 0], every.mean(1), rtol=1e-5)
    np.testing.assert_allclose(got[:, 1], every.var(1), rtol=1e-5)
    want_var, want_mean = torch.var_mean(torch.from_numpy(pieces[0]), 1, correction=0)
    got = v.bn_aggr(v.bn_stats(pieces[0]))
    np.testing.assert_allclose(got, np.stack([want_mean, want_var], 1), rtol=1e-4)


@pytest.mark.oracle
@given(arrays(F32, (2, 3, 7), elements=st.floats(-100, 100, width=32)), arrays(bool, (2, 3, 7)))
def test_bn_masks_exclude_elements(x, mask):
    got = v.bn_stats(x, mask=mask)
    for p in range(2):
        for half in (0, 1):
            kept = x[p].ravel()[half::2][mask[p].ravel()[half::2]].astype(np.float64)
            want = [kept.size, kept.mean(), kept.var() * kept.size] if kept.size else [0, 0, 0]
            np.testing.assert_allclose(got[p, 3 * half:3 * half + 3], want, rtol=1e-4, atol=2e-2)


def test_bn_specials_and_records():
    x = np.array([[np.nan, 1, 2, 3], [np.inf, 1, 2, 3], [0, -0.0, 0, -0.0]], F32)
    got = v.bn_stats(x)
    assert np.isnan(got[0, 1:3]).all() and got[0, 3:].tolist() == [2, 2, 2]
    assert got[1, 1] == np.inf and np.isnan(got[1, 2])
    assert got[2].tolist() == [2, 0, 0, 2, 0, 0]
    assert np.isnan(v.bn_aggr(np.zeros((1, 6), F32))).all()
    half = np.zeros((1, 6), bool)
    half[:, :3] = True
    np.testing.assert_allclose(v.bn_aggr(v.bn_stats(x[2:] + F32(5)), mask=half), [[5, 0]])
    passes("bn_aggr", data=tile(8, 12))
    fails("bn_aggr", data=tile(8, 8))
    assert {limit.at_most for limit in ISA["bn_stats"].limits} == {"partitions", "bn_stats_fmax"}
    for name, shape in (("bn_stats", (8, 6)), ("bn_aggr", (8, 2))):
        assert ISA[name].results[0].shape(call(name, data=tile(8, 12))) == shape


# ---- selection with reduction ----------------------------------------------------------------------------


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["uint8", "int16", "bool"])
@pytest.mark.parametrize("reverse", [False, True])
def test_select_reduce(kind, reverse):
    on_true = np.tile(SPECIALS, (3, 1))
    predicate = rng.integers(0, 2, on_true.shape).astype(kind)
    lane = np.array([[5.0], [-np.inf], [MIN]], F32)
    got, res, registers = v.select_reduce(dst=np.zeros_like(on_true), predicate=predicate, on_true=on_true,
                                          on_false=lane,
                                          reduce_res=np.zeros((3, 1), F32), reduce_cmd=RESET_REDUCE,
                                          reverse_pred=reverse)
    chosen = (predicate == 0) if reverse else (predicate != 0)
    want = np.empty_like(on_true)
    for p, f in np.ndindex(want.shape):
        want[p, f] = on_true[p, f] if chosen[p, f] else lane[p, 0]
    same_bits(got, want)
    np.testing.assert_array_equal(res, torch.amax(torch.from_numpy(want), 1, keepdim=True).numpy())
    assert registers is res or (registers == res)[~np.isnan(res)].all()


def test_accumulator_registers_chain():
    held = np.array([[3.0], [-7.0]], F32)
    x = np.array([[1, 2], [-9, -8]], F32)
    ones = np.ones((2, 2), np.uint8)

    def run(command, res=True):
        got = v.select_reduce(dst=x, predicate=ones, on_true=x, on_false=F32(0), reduce_cmd=command,
                              registers=held,
                              reduce_res=np.zeros((2, 1), F32) if res else None)
        assert (got[1] is None) != res
        return got[2].ravel().tolist()

    assert run(REDUCE) == [3, -7] and run(RESET_REDUCE) == [2, -8]
    assert run(RESET) == [-np.inf, -np.inf] and run(IDLE, False) == [3, -7]
    assert held.ravel().tolist() == [3, -7]
    assert v.select_reduce(dst=x, predicate=ones, on_true=x, on_false=F32(0),
                           reduce_cmd=REDUCE)[2].tolist() == [[2], [0]]
    masked = v.select_reduce(dst=x, predicate=ones, on_true=x, on_false=F32(0), reduce_cmd=RESET_REDUCE,
                             mask=np.array([[True, False]] * 2))[2]
    assert masked.tolist() == [[1], [-9]]


def test_accumulators_of_tiles_of_any_rank():
    x = np.arange(24, dtype=F32).reshape(2, 3, 4)
    got, res, registers = v.select_reduce(dst=x, predicate=np.ones(x.shape, np.uint8), on_true=x, on_false=F32(0),
                                          reduce_res=np.zeros((2, 1, 1), F32), reduce_cmd=RESET_REDUCE)
    assert got.shape == x.shape and registers.shape == res.shape == (2, 1, 1)
    assert registers.ravel().tolist() == [11, 23]


COMPARE = {"equal": operator.eq, "less": operator.lt, "less_equal": operator.le, "greater": operator.gt,
           "greater_equal": operator.ge}


@pytest.mark.oracle
@pytest.mark.parametrize("op0, op1", list(itertools.product(COMPARE, COMPARE)))
def test_range_select(op0, op1):
    x = rng.normal(size=(3, 2, 8)).astype(F32)
    low, high = np.array([[35], [32.5], [np.nan]], F32), np.array([[41], [np.inf], [40]], F32)
    got, res, _ = v.range_select(on_true_tile=x, comp_op0=op0, comp_op1=op1, bound0=low[:, None],
                                 bound1=high[:, None],
                                 range_start=32, reduce_cmd=RESET_REDUCE, reduce_res=np.zeros((3, 1, 1), F32))
    for p in range(3):
        row = [t if COMPARE[op0](32 + i, low[p, 0]) and COMPARE[op1](32 + i, high[p, 0]) else MIN
               for i, t in enumerate(x[p].ravel())]
        assert got[p].ravel().tolist() == [float(t) for t in row] and res[p, 0, 0] == max(row)


def test_range_select_chains_with_select_reduce():
    x = np.array([[1, 5, 2]], F32)
    bound = {"bound0": np.zeros((1, 1), F32), "bound1": np.full((1, 1), 2, F32), "comp_op0": "greater_equal",
             "comp_op1": "less"}
    _, none, registers = v.range_select(on_true_tile=x, **bound, reduce_cmd=RESET_REDUCE)
    assert none is None and registers == 5
    _, _, registers = v.range_select(on_true_tile=x + 3, range_start=1, **bound, reduce_cmd=REDUCE,
                                     registers=registers)
    assert registers == 5  # position 1 only, value 4
    _, _, registers = v.select_reduce(dst=x, predicate=np.ones((1, 3), np.uint8), on_true=x + 3,
                                      on_false=F32(0),
                                      reduce_cmd=REDUCE, registers=registers)
    assert registers == 8


def test_selections_refuse():
    a, psum, p8 = tile(8, 4), tile(8, 4, space="psum"), tile(8, 4, dtype="uint8", space="psum")
    given = {"dst": psum, "predicate": p8, "on_false": 0.0}
    passes("select_reduce", on_true=a, **given)
    passes("select_reduce", on_true=a, **given, reduce_res=tile(8, 1), reduce_cmd=RESET_REDUCE)
    assert fails("select_reduce", on_true=psum, **given).code == "err_unsupported_memory"
    assert fails("select_reduce", on_true=a, **given, reduce_res=tile(8, 1)).operand == "reduce_res"
    given = {"on_true_tile": a, "comp_op0": "less", "comp_op1": "less", "bound0": tile(8, 1),
             "bound1": tile(8, 1)}
    passes("range_select", **given)
    passes("range_select", **given, on_false_value=np.float32(-3.4028235e38))
    passes("range_select", **given, on_false_value=-3.4028235e38)
    for value in (0.0, -np.inf, -9984.0, np.nan):
        assert fails("range_select", **given, on_false_value=value).operand == "on_false_value"
    assert fails("range_select", **given, reduce_res=tile(8, 1)).operand == "reduce_res"
    assert ISA["range_select"].min_generation == 3


# ---- all of them -----------------------------------------------------------------------------------------


def _samples():
    a, b = pairs()
    lane = SPECIALS[:, None].copy()
    res = np.zeros_like(lane)
    p = (np.arange(a.size).reshape(a.shape) % 3).astype(np.uint8)
    mask = p != 1
    for op in ("add", "multiply", "maximum", "subtract", "logical_xor"):
        yield v.tensor_reduce, (op, a, 1), {"mask": mask}
    yield v.tensor_reduce, ("bitwise_xor", p, 1), {}
    yield v.tensor_scalar_reduce, (), {"data": a, "op0": "multiply", "operand0": lane, "reduce_op": "add",
                                       "reduce_res": res}
    yield v.tensor_tensor_scan, (a, b, lane, "multiply", "add"), {}
    yield v.tensor_tensor_scan, (a, b, lane, "subtract", "maximum"), {"mask": mask}
    yield v.tensor_scalar_cumulative, (), {"src": a, "dst": b, "op0": "multiply", "imm0": lane,
                                           "op1": "subtract"}
    yield v.bn_stats, (a,), {"mask": mask}
    yield v.bn_stats, (b,), {}
    yield v.bn_aggr, (b,), {}
    yield v.select_reduce, (), {"dst": a, "predicate": p, "on_true": a, "on_false": lane, "reduce_res": res,
                                "reduce_cmd": 3}
    yield v.range_select, (), {"on_true_tile": a, "comp_op0": "less", "comp_op1": "greater", "bound0": lane,
                               "bound1": res,
                               "reduce_cmd": 2, "registers": lane}


@pytest.mark.parametrize("body, args, kwargs", list(_samples()), ids=lambda x: getattr(x, "__name__", ""))
def test_bodies_are_quiet_pure_and_blind_to_layout(body, args, kwargs):
    quiet_pure_and_blind_to_layout(body, args, kwargs)


def test_registers_are_hidden_and_shared():
    for name in ("select_reduce", "range_select", "tensor_scalar_cumulative"):
        assert ISA[name].index["registers"] and "registers" not in ISA[name].signature.parameters
        assert [p.spec.engine for p in ISA[name].params if p.name == "registers"] == ["vector"]


@pytest.mark.parametrize("cycles, name, f, dtypes, more", [
    (512, "tensor_reduce", 512, {"data": "float32"}, {"op": "add"}),
    (256, "tensor_reduce", 512, {"data": "bfloat16"}, {"op": "add"}),
    (512, "tensor_reduce", 512, {"data": "bfloat16"}, {"op": "minimum"}),
    (576, "tensor_scalar_reduce", 512, {"data": "float32"}, {}),
    (1024, "tensor_tensor_scan", 512, {"data0": "float32"}, {}),
    (512, "tensor_scalar_cumulative", 512, {"src": "float32"}, {}),
    (512, "bn_stats", 512, {"data": "float32"}, {}), (104, "bn_aggr", 24, {"data": "float32"}, {}),
    (64, "bn_aggr", 6, {"data": "float32"}, {}), (512, "select_reduce", 512, {"on_true": "float32"}, {}),
    (512, "range_select", 512, {"on_true_tile": "float32"}, {})])
def test_documented_cycles(cycles, name, f, dtypes, more):
    assert cost(name, TRN1, f, dtypes, **more) == cycles
