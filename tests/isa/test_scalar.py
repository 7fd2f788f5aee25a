"""Every scalar function against the math module, element by element, and against its own C text."""

import builtins
import ctypes
import math
import operator
import shutil
import subprocess

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opennki.isa.scalar import ACTIVATIONS, ALU_OPERATORS, C_PRELUDE, GROUPS, SCALAR, resolve
from tests.isa.scalar_oracles import BINARY, BITS, EXACT, INF, SPECIAL, UNARY, check, operands, run

def test_every_function_has_an_oracle():
    assert {*UNARY, *BINARY, *BITS} == set(SCALAR)
    assert {f.name for f in SCALAR.values()} == set(SCALAR)
    for name, f in SCALAR.items():
        assert f.arity == (2 if name in BINARY or (name in BITS and name != "invert") else 1)
        assert f.group in GROUPS and f.doc.endswith(".") and f.c
        assert (f.identity is not None) == f.reducible
        assert set(f.engines) <= {"vector", "scalar", "gpsimd"}


def test_the_vendor_sets():
    assert sorted(ALU_OPERATORS) == sorted(
        [
            "invert",
            "bitwise_and",
            "bitwise_or",
            "bitwise_xor",
            "left_shift",
            "right_shift",
            "add",
            "subtract",
            "multiply",
            "maximum",
            "minimum",
            "equal",
            "not_equal",
            "greater_equal",
            "greater",
            "less_equal",
            "less",
            "logical_not",
            "logical_and",
            "logical_or",
            "logical_xor",
            "rsqrt",
            "reciprocal",
            "abs",
            "power",
        ]
    )
    assert sorted(ACTIVATIONS) == sorted(
        [
            "copy",
            "square",
            "sigmoid",
            "relu",
            "gelu",
            "gelu_dx",
            "gelu_apprx_tanh",
            "gelu_apprx_sigmoid",
            "silu",
            "silu_dx",
            "tanh",
            "softplus",
            "mish",
            "erf",
            "erf_dx",
            "exp",
            "log",
            "sin",
            "arctan",
            "sqrt",
            "rsqrt",
            "reciprocal",
            "sign",
            "abs",
        ]
    )
    assert {n for n, f in SCALAR.items() if f.reducible} == set(
        [
            "bitwise_and",
            "bitwise_or",
            "bitwise_xor",
            "add",
            "subtract",
            "multiply",
            "maximum",
            "minimum",
            "logical_and",
            "logical_or",
            "logical_xor",
        ]
    )
    assert all("scalar" in SCALAR[name].engines for name in ACTIVATIONS)
    assert SCALAR["log"].domain == (2.0**-64, 2.0**64)
    assert SCALAR["sqrt"].domain == (2.0**-116, 2.0**118)
    assert SCALAR["rsqrt"].domain == (2.0**-87, 2.0**97)
    assert SCALAR["reciprocal"].domain == (2.0**-42, 2.0**42) and SCALAR["reciprocal"].domain_of_magnitude
    assert SCALAR["sin"].domain == (-math.pi, math.pi)
    assert SCALAR["arctan"].domain == (-math.pi / 2, math.pi / 2)
    assert SCALAR["exp"].domain is None


@pytest.mark.oracle
@pytest.mark.parametrize("name", [*UNARY, *BINARY])
@pytest.mark.parametrize("form", ["numpy", "raw"])
def test_against_python(name, form):
    args = operands(name)
    check(name, run(name, *args, form=form), args)


@pytest.mark.parametrize("name", [*UNARY, *BINARY])
def test_shapes_and_layouts(name):
    args = [np.resize(a, (6, 10)) for a in operands(name)]
    plain = run(name, *args)
    turned = run(name, *(np.asfortranarray(a) for a in args))
    assert plain.shape == (6, 10) and plain.dtype == np.float32
    np.testing.assert_allclose(turned, plain, rtol=1e-6, atol=1e-38)
    point = run(name, *(a[0, 0:1] for a in args))
    np.testing.assert_allclose(point, plain[0, 0:1], rtol=1e-6)
    if SCALAR[name].arity == 2:
        column = run(name, args[0], args[1][:, :1])
        np.testing.assert_array_equal(column[:, 0], plain[:, 0])
        assert column.shape == (6, 10)
    for a in args:  # operands stay as they are
        a.setflags(write=False)
    run(name, *args)


@pytest.mark.oracle
@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int16", "uint32", "int32"])
@pytest.mark.parametrize("name", BITS)
def test_bit_operations(name, dtype):
    info, width = np.iinfo(dtype), np.iinfo(dtype).bits
    values = sorted({info.min, info.max, 0, 1, 2, 3, 5, width - 1, width, max(info.min, -1), max(info.min, -7), 0x5A})
    a, b = (g.reshape(-1) for g in np.meshgrid(np.array(values, dtype), np.array(values, dtype)))
    f = SCALAR[name]
    got = run(name, a, b) if f.arity == 2 else run(name, a)
    assert got.dtype == np.dtype(dtype)
    mask = (1 << width) - 1
    for x, y, g in zip(a.tolist(), b.tolist(), got.tolist()):
        assert g & mask == BITS[name](x & mask, y & mask, width) & mask
    if f.arity == 2:
        assert run(name, a[::2], b[::2]).tolist() == got[::2].tolist()


@pytest.mark.oracle
def test_erf_is_within_one_unit_in_the_last_place():
    x = np.concatenate([
        np.linspace(-4.5, 4.5, 20001), np.geomspace(1e-45, 5, 5000), [0.0, INF, -INF, 40.0]
    ]).astype(np.float32)  # fmt: skip
    got = run("erf", x).astype(np.float64)
    want = np.array([math.erf(v) for v in x.tolist()])
    unit = np.maximum(np.spacing(np.abs(want).astype(np.float32)), np.float32(1e-45)).astype(np.float64)
    assert (np.abs(got - want) <= unit).all()
    assert np.signbit(run("erf", np.array([-0.0], np.float32)))[0]


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("name", "fn"),
    [
        ("gelu", torch.nn.functional.gelu),
        ("gelu_apprx_tanh", lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
        ("silu", torch.nn.functional.silu),
        ("mish", torch.nn.functional.mish),
        ("softplus", torch.nn.functional.softplus),
        ("sigmoid", torch.sigmoid),
        ("relu", torch.relu),
        ("rsqrt", torch.rsqrt),
        ("erf", torch.erf),
    ],
)
def test_against_torch(name, fn):
    x = np.random.default_rng(5).uniform(-12, 12, (64, 33)).astype(np.float32)
    x = np.abs(x) if name == "rsqrt" else x
    np.testing.assert_allclose(run(name, x), fn(torch.from_numpy(x)).numpy(), rtol=2e-6, atol=2e-6)


@pytest.mark.oracle
@pytest.mark.parametrize(("name", "of"), [("gelu_dx", "gelu"), ("silu_dx", "silu"), ("erf_dx", "erf")])
def test_derivatives(name, of):
    functions = {"gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu, "erf": torch.erf}
    x = torch.linspace(-6, 6, 501, dtype=torch.float64, requires_grad=True)
    functions[of](x).sum().backward()
    got = run(name, x.detach().numpy().astype(np.float32))
    np.testing.assert_allclose(got, x.grad.numpy(), atol=1e-6)


def test_limits_at_infinity():
    inf = np.array([-INF, INF], np.float32)
    limits = {
        "silu": [-0.0, INF], "mish": [-0.0, INF], "gelu": [-0.0, INF], "gelu_apprx_tanh": [-0.0, INF],
        "gelu_apprx_sigmoid": [-0.0, INF], "softplus": [0.0, INF], "silu_dx": [0.0, 1.0],
        "gelu_dx": [0.0, 1.0], "erf_dx": [0.0, 0.0], "erf": [-1.0, 1.0], "sigmoid": [0.0, 1.0],
        "tanh": [-1.0, 1.0],
    }  # fmt: skip
    for name, want in limits.items():
        assert run(name, inf).tolist() == want, name


@pytest.mark.parametrize("name", [n for n, f in SCALAR.items() if f.reducible and f.group != "logical"])
def test_identity_changes_no_bit(name):
    f = SCALAR[name]
    if f.group == "bitvec":
        x = np.array([0, 1, -1, 127, -128], np.int8)
        e = np.full_like(x, f.identity)
    else:
        x = np.array([v for v in SPECIAL if v == v], np.float32)
        e = np.full_like(x, f.identity)
    got = run(name, x, e)
    assert got.tobytes() == x.tobytes()


def test_identity_of_logical_operators():
    truth = np.array([0.0, 1.0], np.float32)
    for name in ("logical_and", "logical_or", "logical_xor"):
        assert run(name, truth, np.float32(SCALAR[name].identity)).tolist() == [0.0, 1.0]


@given(st.integers(-(2**31), 2**31 - 1), st.integers(-(2**31), 2**31 - 1))
@settings(max_examples=50)
def test_exact_integers(a, b):
    x, y = np.array([a], np.int64), np.array([b], np.int64)
    for name, fn in {
        "add": operator.add, "subtract": operator.sub, "multiply": operator.mul,
        "maximum": builtins.max, "minimum": builtins.min,
    }.items():  # fmt: skip
        assert SCALAR[name].exact_int(x, y).tolist() == [fn(a, b)]
    for name, fn in {"abs": abs, "negative": operator.neg, "square": lambda v: v * v, "copy": int}.items():
        got = SCALAR[name].exact_int(x)
        assert got.tolist() == [fn(a)] and got.dtype == np.int64


# ---- the C text ----


@pytest.fixture(scope="session")
def native(tmp_path_factory):
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    assert compiler, "a C compiler is needed (README): the C text of the table is compiled"
    folder = tmp_path_factory.mktemp("scalar_c")
    lines = ["#include <stdint.h>", C_PRELUDE]
    for f in SCALAR.values():
        second, load = (", const E *y", "E b = y[i];") if f.arity == 2 else ("", "")
        for suffix, kind, unsigned, bits in (
            ("", "float", "uint32_t", 32), ("_i32", "int32_t", "uint32_t", 32),
            ("_i8", "int8_t", "uint8_t", 8)
        ):  # fmt: skip
            if (f.group == "bitvec") == (suffix == ""):
                continue
            body = f"for (int i = 0; i < n; i++) {{ E a = x[i]; {load} out[i] = {f.c}; }}"
            head = f"void f_{f.name}{suffix}(int n, E *out, const E *x{second})"
            lines.append(f"#define E {kind}\n#define T {kind}\n#define U {unsigned}\n#define W {bits}")
            lines.append(f"{head} {{ {body} }}\n#undef E\n#undef T\n#undef U\n#undef W")
    (folder / "scalar.c").write_text("\n".join(lines))
    flags = [
        "-O2",
        "-ffp-contract=off",
        "-std=c11",
        "-Wall",
        "-Werror",
        "-Wno-unused-function",
        "-shared",
        "-fPIC",
    ]
    command = [compiler, *flags, "scalar.c", "-o", "scalar.so", "-lm"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(folder / "scalar.so"))


def call_c(native, symbol, args):
    args = [np.ascontiguousarray(a) for a in args]
    out = np.empty_like(args[0])
    pointers = [a.ctypes.data_as(ctypes.c_void_p) for a in (out, *args)]
    getattr(native, symbol)(len(out), *pointers)
    return out


@pytest.mark.oracle
@pytest.mark.parametrize("name", [*UNARY, *BINARY])
def test_c_text(native, name):
    args = operands(name)
    got = call_c(native, f"f_{name}", args)
    check(name, got, args)
    if name in EXACT | {"mod", "erf", "rsqrt"}:  # the same bits as NumPy, signs of zeros included
        want = run(name, *args)
        number = ~np.isnan(want)
        assert got[number].tobytes() == want[number].tobytes()


@pytest.mark.oracle
@pytest.mark.parametrize("dtype", ["int32", "int8"])
@pytest.mark.parametrize("name", BITS)
def test_c_text_of_bit_operations(native, name, dtype):
    info = np.iinfo(dtype)
    values = np.array([info.min, info.max, 0, 1, -1, 5, 7, 8, 31, 32], dtype)
    a, b = (g.reshape(-1) for g in np.meshgrid(values, values))
    args = (a, b) if SCALAR[name].arity == 2 else (a,)
    got = call_c(native, f"f_{name}_i{info.bits}", args)
    assert got.tolist() == run(name, *args).tolist()


# ---- resolve ----


@pytest.mark.parametrize(
    ("op", "name"),
    [
        *((name, name) for name in SCALAR),
        (np.add, "add"), (np.sum, "add"), ("sum", "add"), (operator.add, "add"), (builtins.sum, "add"),
        (np.subtract, "subtract"), (np.multiply, "multiply"), (np.prod, "multiply"), (np.divide, "divide"),
        (np.true_divide, "divide"), (np.power, "power"), (np.mod, "mod"), (np.remainder, "mod"),
        (np.fmod, "fmod"),
        (np.max, "maximum"), (np.amax, "maximum"), (np.maximum, "maximum"), ("max", "maximum"),
        (builtins.max, "maximum"), (np.min, "minimum"), (np.amin, "minimum"), (np.minimum, "minimum"),
        ("min", "minimum"), (builtins.min, "minimum"), (np.abs, "abs"), (np.absolute, "abs"),
        (builtins.abs, "abs"),
        (np.copy, "copy"), ("identity", "copy"), ("relu", "relu"), (np.positive, "copy"),
        (np.square, "square"),
        (np.logical_and, "logical_and"), (np.logical_or, "logical_or"), (np.logical_xor, "logical_xor"),
        (np.logical_not, "logical_not"), (np.all, "logical_and"), (np.any, "logical_or"),
        (np.bitwise_and, "bitwise_and"), (np.bitwise_or, "bitwise_or"), (np.bitwise_xor, "bitwise_xor"),
        (np.invert, "invert"), (np.bitwise_not, "invert"), (np.left_shift, "left_shift"),
        (np.right_shift, "right_shift"), (operator.lshift, "left_shift"), (operator.rshift, "right_shift"),
        (np.equal, "equal"), (np.not_equal, "not_equal"), (np.greater, "greater"), (np.less, "less"),
        (np.greater_equal, "greater_equal"), (np.less_equal, "less_equal"), (operator.lt, "less"),
        (operator.le, "less_equal"), (operator.gt, "greater"), (operator.ge, "greater_equal"),
        (operator.eq, "equal"), (operator.ne, "not_equal"), (operator.and_, "bitwise_and"),
        (operator.or_, "bitwise_or"), (operator.xor, "bitwise_xor"), (operator.sub, "subtract"),
        (operator.mul, "multiply"), (operator.truediv, "divide"), (np.exp, "exp"), (np.log, "log"),
        (np.sin, "sin"), (np.cos, "cos"), (np.tan, "tan"), (np.tanh, "tanh"), (np.arctan, "arctan"),
        (np.sqrt, "sqrt"), (np.reciprocal, "reciprocal"), (np.sign, "sign"), (np.negative, "negative"),
        (np.ceil, "ceil"), (np.floor, "floor"), (np.trunc, "trunc"),
    ],
)  # fmt: skip
def test_resolve(op, name):
    assert resolve(op) == name


def test_resolve_own_functions():
    def anything():
        """Stands for a function of nki.language."""

    anything.nki_op = "max"
    assert resolve(anything) == "maximum"
    anything.nki_op = "no_such"
    with pytest.raises(TypeError):
        resolve(anything)


@pytest.mark.parametrize(
    ("op", "hint"),
    [
        ("maximun", "did you mean maximum"),
        ("gelu_tanh", "gelu_apprx_tanh"),
        (np.linalg.norm, "known operators are abs, add"),
        (np.identity, "not an operator"),
        (np.arctan2, "did you mean"),
        ([], "not an operator"),
        (None, "not an operator"),
        (3, "not an operator"),
    ],
)
def test_resolve_refuses(op, hint):
    with pytest.raises(TypeError, match="not an operator of the NeuronCore") as error:
        resolve(op)
    assert hint in str(error.value)
