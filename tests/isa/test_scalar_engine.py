"""Scalar Engine: activation and its reduction against float64 and PyTorch, accumulators, masks, rules."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from opennki.errors import NkiTypeError, NkiValueError
from opennki.isa import scalar_engine as se
from opennki.isa.declare import ISA
from opennki.isa.enums import reduce_cmd
from opennki.isa.target import TRN1, TRN2

from .bodies import FLOATS, INTS, NUMPY, bits, check, operand, run, same

pytestmark = pytest.mark.oracle

# float64 formulas written for this test; PyTorch covers the rest
ORACLE = {
    "copy": lambda x: x, "square": lambda x: x * x, "exp": np.exp, "tanh": np.tanh, "abs": np.abs,
    "relu": lambda x: np.where(np.isnan(x), x, np.maximum(x, 0.0)), "sign": np.sign,
    "reciprocal": lambda x: 1 / x,
    "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "log": np.log, "arctan": np.arctan,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}


@pytest.mark.parametrize("op", sorted(ORACLE))
@pytest.mark.parametrize("dtype", FLOATS)
def test_activation_is_op_of_scaled_and_biased_data(op, dtype):
    data = operand((128, 40), dtype, 1)
    scale = operand((128, 1), "float32", 2, special=False)
    bias = operand((128, 1), "bfloat16", 3, special=False)
    with np.errstate(all="ignore"):
        x = (data.astype(np.float32) * scale).astype(np.float32) + bias.astype(np.float32)
        want = ORACLE[op](x.astype(np.float64)).astype(np.float32)
    got, res, regs = run("activation", op=op, data=data, scale=scale, bias=bias, dtype="float32")
    assert res is None and (regs == 0).all()
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_allclose(got, want, rtol=4e-6, atol=1e-38)


@pytest.mark.parametrize("op,name",
                         [("silu", "silu"), ("softplus", "softplus"), ("gelu", "gelu"), ("mish", "mish")])
def test_torch_agrees(op, name):
    torch = pytest.importorskip("torch")
    data = operand((32, 64), seed=4, special=False)
    want = getattr(torch.nn.functional, name)(torch.from_numpy(data * np.float32(0.5)).double()).numpy()
    got, *_ = run("activation", op=op, data=data, scale=0.5)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_each_step_is_rounded():
    """data * scale is rounded before the bias is added: no fused multiply-add."""
    data, scale = np.full((1, 1), 1 + 2.0**-12, np.float32), 1 + 2.0**-12
    bias = np.full((1, 1), -(1 + 2.0**-11), np.float32)
    got, *_ = se.activation("copy", data, scale=scale, bias=bias)
    assert got[0, 0] == 0  # exactly 2**-24 if it were fused


@pytest.mark.parametrize("scale", [1, 1.0, 2.0, 0.0, -1.0, 1 + 2.0**-23, np.float32(2), np.float32(np.inf)])
def test_scale_may_be_a_number(scale):
    data = operand((4, 30))
    got, _, regs = run("activation", op="copy", data=data.reshape(4, 5, 6), scale=scale)
    with np.errstate(all="ignore"):
        want = np.array([[v * np.float32(scale) for v in row] for row in data], np.float32)
    same(got, want.reshape(4, 5, 6))
    assert regs.shape == (4, 1, 1)


@pytest.mark.parametrize("dtype", FLOATS + INTS)
def test_copy_keeps_values(dtype):
    data = operand((8, 32), dtype)
    got, *_ = run("activation", op="copy", data=data)
    if dtype in ("int32", "uint32"):
        assert got.dtype == data.dtype
        np.testing.assert_allclose(got.astype(np.float64), data.astype(np.float64), rtol=2**-23)
    else:
        same(got, data)


def test_dtype_rounds_once_and_shape_is_kept():
    data = operand((16, 4, 5), "float32")
    got, *_ = run("activation", op="square", data=data, dtype="bfloat16")
    with np.errstate(all="ignore"):
        same(got, (data * data).astype(NUMPY["bfloat16"]))
    int_bias = run("activation", op="copy", data=data, bias=np.ones((16, 1, 1), np.float16))[0]
    with np.errstate(all="ignore"):
        same(int_bias, data + np.float32(1))


def lanes(x, start=None):
    """32 lanes, then a binary tree, element by element in Python floats rounded to float32."""
    acc = [np.float32(-0.0)] * 32
    with np.errstate(all="ignore"):
        for i, v in enumerate(x):
            acc[i % 32] = np.float32(acc[i % 32] + v)
        for half in (16, 8, 4, 2, 1):
            for j in range(half):
                acc[j] = np.float32(acc[j] + acc[j + half])
        return acc[0] if start is None else np.float32(start + acc[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(4, 100), (3, 7, 11), (2, 1)])
def test_sum_of_the_result_before_rounding(shape, dtype):
    data = operand(shape, dtype, special=False)
    x = np.tanh(data.astype(np.float32))
    want = np.array([lanes(row.reshape(-1)) for row in x], np.float32)
    out, res, regs = run("activation_reduce", op="tanh", data=data, reduce_op="add",
                         reduce_res=np.zeros((shape[0],) + (1,) * (len(shape) - 1), np.float32))
    np.testing.assert_allclose(res.reshape(-1), want, rtol=2e-6, atol=1e-6)
    np.testing.assert_array_equal(bits(res), bits(regs))
    copied, res, _ = run("activation_reduce", op="copy", data=data, reduce_op="add",
                         reduce_res=np.zeros((shape[0],) + (1,) * (len(shape) - 1), np.float32))
    want = np.array([lanes(row.astype(np.float32).reshape(-1)) for row in data], np.float32)
    np.testing.assert_array_equal(bits(res.reshape(-1)), bits(want))
    assert copied.dtype == data.dtype and out.shape == data.shape


def test_accumulators_live_on():
    data = operand((4, 64), special=False)
    regs = operand((4, 1), seed=9, special=False)
    res = np.zeros((4, 1), np.float32)
    rows = np.array([[lanes(r)] for r in data])
    cases = {reduce_cmd.idle: regs, reduce_cmd.reset: np.zeros((4, 1), np.float32),
             reduce_cmd.reset_reduce: rows,
             reduce_cmd.reduce: regs + rows}
    for cmd, want in cases.items():
        _, got, new = se.activation("copy", data, reduce_op="add", reduce_res=res, reduce_cmd=cmd, regs=regs)
        np.testing.assert_array_equal(bits(new), bits(want))
        np.testing.assert_array_equal(bits(got), bits(new))
        _, absent, _ = se.activation("copy", data, reduce_op="add", reduce_cmd=cmd, regs=regs)
        assert absent is None
    first = se.activation("copy", data, reduce_op="add", reduce_cmd=reduce_cmd.reset_reduce, regs=regs)[2]
    second = se.activation("copy", data, reduce_op="add", reduce_cmd=reduce_cmd.reduce, regs=first)[2]
    np.testing.assert_array_equal(second, rows + rows)


@pytest.mark.parametrize("op,fold", [("maximum", np.max), ("minimum", np.min), ("multiply", np.prod)])
def test_other_reductions(op, fold):
    data = operand((4, 10), special=False, scale=1.0)
    regs = np.full((4, 1), 7, np.float32)
    new = se.activation("copy", data, reduce_op=op, reduce_cmd=reduce_cmd.reset_reduce, regs=regs)[2]
    np.testing.assert_allclose(new[:, 0], fold(data.astype(np.float64), axis=1), rtol=1e-6)
    kept = se.activation("copy", data, reduce_op=op, reduce_cmd=reduce_cmd.reduce, regs=regs)[2]
    np.testing.assert_allclose(kept[:, 0], fold(np.concatenate([regs, data], 1).astype(np.float64), axis=1),
                               rtol=1e-6)


def test_nan_and_infinity_reach_the_sum():
    data = np.ones((3, 40), np.float32)
    data[0, 5], data[1, 3], data[1, 9], data[2, 0] = np.nan, np.inf, -np.inf, np.inf
    _, res, _ = se.activation_reduce("copy", data, reduce_op="add", reduce_res=np.zeros((3, 1), np.float32))
    assert np.isnan(res[0, 0]) and np.isnan(res[1, 0]) and res[2, 0] == np.inf


@pytest.mark.parametrize("cmd", [reduce_cmd.reset, reduce_cmd.reduce, reduce_cmd.reset_reduce])
def test_mask_leaves_elements_and_rows_out(cmd):
    data = operand((4, 3, 8), special=False)
    data[3], data[:, 2, 5:] = np.nan, np.nan  # outside the mask
    regs = np.arange(1, 5, dtype=np.float32).reshape(4, 1, 1)
    p, i, j = np.ogrid[:4, :3, :8]
    mask = (p < 3) & (8 * i + j < 21)
    _, res, new = se.activation("copy", data, reduce_op="add", reduce_cmd=cmd, regs=regs, mask=mask,
                                reduce_res=np.zeros((4, 1, 1), np.float32))
    total = np.where(mask, data, 0).astype(np.float64).sum(axis=(1, 2))
    want = {reduce_cmd.reset: 0 * total, reduce_cmd.reset_reduce: total,
            reduce_cmd.reduce: regs[:, 0, 0] + total}[cmd]
    np.testing.assert_allclose(new[:3, 0, 0], want[:3], rtol=1e-5, atol=1e-5)
    assert new[3, 0, 0] == 4  # a row outside keeps its register
    np.testing.assert_array_equal(res, new)


@pytest.mark.parametrize("op,fold", [("maximum", np.max), ("minimum", np.min), ("multiply", np.prod)])
def test_masked_elements_count_as_the_identity(op, fold):
    data = operand((4, 9), special=False, scale=1.0)
    data = np.abs(data) + 1 if op == "minimum" else -np.abs(data) - 1
    mask = np.arange(9)[None] < np.array([9, 5, 1, 3])[:, None]
    regs = se.activation("copy", data, reduce_op=op, reduce_cmd=reduce_cmd.reset_reduce, mask=mask,
                         regs=np.zeros((4, 1), np.float32))[2]
    want = [fold(row[keep].astype(np.float64)) for row, keep in zip(data, mask)]
    np.testing.assert_allclose(regs[:, 0], want, rtol=1e-6)


def test_a_masked_sum_keeps_the_sign_of_zero():
    mask = np.array([[True, False, False], [True, True, False]])
    regs = se.activation("copy", np.full((2, 3), -0.0, np.float32), reduce_op="add", reduce_cmd=reduce_cmd.reset_reduce, mask=mask,
                         regs=np.zeros((2, 1), np.float32))[2]
    assert np.signbit(regs).all()


def test_layout_changes_no_bit():
    data = operand((64, 6, 50), special=False)
    res = np.zeros((64, 1, 1), np.float32)
    want = se.activation_reduce("exp", data, reduce_op="add", reduce_res=res, scale=0.3)
    for x in (np.asfortranarray(data), np.repeat(data, 2, axis=2)[:, :, ::2], data[:, ::-1].copy()[:, ::-1]):
        got = se.activation_reduce("exp", x, reduce_op="add", reduce_res=res, scale=0.3)
        for g, w in zip(got, want):
            np.testing.assert_array_equal(bits(g), bits(w))


DATA = {"op": "exp", "data": ((128, 512), "float32")}
RES = {"reduce_op": "add", "reduce_res": ((128, 1), "float32")}


def test_what_the_check_accepts():
    check("activation", **DATA)
    check("activation", **DATA, bias=((128, 1), "float16"), scale=((128, 1), "float32"))
    check("activation", TRN2, op="reciprocal", data=((128, 512), "float32"), bias=((128, 1), "float32"))
    check("activation", TRN2, **DATA, reduce_op="maximum", reduce_cmd=reduce_cmd.reduce)
    check("activation", **DATA, **RES)
    check("activation_reduce", **DATA, **RES, scale=np.float32(2))


@pytest.mark.parametrize("name", ["activation", "activation_reduce"])
@pytest.mark.parametrize("given,kind,code", [
    ({"scale": ((128, 2), "float32")}, NkiValueError, "err_activation_scale_scalar_or_vector"),
    ({"scale": ((128, 1), "bfloat16")}, NkiTypeError, "err_activation_scale_invalid_type"),
    ({"bias": ((128, 1), "int32")}, NkiTypeError, "err_activation_bias_invalid_type"),
    ({"bias": ((128, 1), "float8_e5m2")}, NkiTypeError, "err_activation_bias_invalid_type"),
    ({"bias": ((128, 2), "float32")}, NkiTypeError, "err_activation_bias_invalid_type"),
    ({"op": "reciprocal", "bias": ((128, 1), "float32")}, NkiValueError, ""),
    ({"reduce_op": "maximum"}, NkiValueError, ""),
])
def test_what_the_check_refuses(name, given, kind, code):
    with pytest.raises(kind) as e:
        check(name, TRN1, **{**DATA, **RES, **given})
    assert e.value.code == code and e.value.rule and e.value.why and e.value.fix


@pytest.mark.parametrize("cmd", [reduce_cmd.reduce, reduce_cmd.reset_reduce])
def test_reduce_needs_an_operator(cmd):
    with pytest.raises(NkiValueError, match=f"reduce_cmd {cmd.name} without reduce_op"):
        check("activation", TRN1, **DATA, reduce_cmd=cmd)


def test_cost():
    wide, narrow = SimpleNamespace(P=128, F=512), SimpleNamespace(P=128, F=3)
    assert ISA["activation"].cost(wide, TRN1) == 512
    assert ISA["activation"].cost(narrow, TRN1) == 64
    assert ISA["activation"].cost(SimpleNamespace(P=1, F=512, reduce_res=object()), TRN1) == 576
    assert ISA["activation_reduce"].cost(wide, TRN1) == 576
