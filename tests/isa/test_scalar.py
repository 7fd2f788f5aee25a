"""Every scalar function against the math module, element by element, and against its own C text."""

import builtins
import ctypes
import math
import operator
import shutil
import subprocess
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opennki.isa.scalar import ACTIVATIONS, ALU_OPERATORS, C_PRELUDE, GROUPS, SCALAR, resolve

INF, NAN = math.inf, math.nan
SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 1e-38, -1e-38, 1.0, -1.0, 3.4e38, -3.4e38, INF, -INF, NAN]
EDGES = [
    0.5,
    -0.5,
    1.5,
    -1.5,
    2.5,
    -2.5,
    2.0,
    -2.0,
    3.0,
    -3.0,
    7.0,
    -7.0,
    10.0,
    -10.0,
    88.0,
    -88.0,
    100.0,
    -100.0,
]


def run(name, *args, form="numpy"):
    """Call a function of the table; whatever the caller's error state, nothing may warn."""
    f = SCALAR[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if form == "raw":
            with np.errstate(all="ignore"):
                return f.raw(*args)
        with np.errstate(all="warn"):
            return f.numpy(*args)


def guarded(fn):
    """IEEE results where the math module raises instead."""

    def call(*args):
        try:
            return float(fn(*args))
        except OverflowError:
            return INF
        except ValueError:
            return NAN

    return call


def sigmoid(x):
    return 0.0 if x < -700 else 1 / (1 + math.exp(-x))


def divide(a, b):
    if b == 0:
        return NAN if a == 0 or math.isnan(a) else math.copysign(INF, a) * math.copysign(1, b)
    return a / b


def python_mod(a, b):
    if math.isnan(a) or math.isnan(b) or math.isinf(a) or b == 0:
        return NAN
    if math.isinf(b):
        return math.copysign(a, b) if a == 0 else a if (a < 0) == (b < 0) else b
    m = math.fmod(a, b)
    if m and (m < 0) != (b < 0):
        return m + b
    return m if m else math.copysign(0.0, b)


def power(a, b):
    if a == 0 and b < 0:
        odd = math.isfinite(b) and b % 2 == 1
        return math.copysign(INF, a) if odd else INF
    try:
        return math.pow(a, b)
    except OverflowError:
        return -INF if a < 0 and b % 2 == 1 else INF


def phi(x):
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi) if abs(x) < 1e19 else 0.0


def finite(x, low=-3.4028234663852886e38, high=3.4028234663852886e38):
    return x if math.isnan(x) else min(max(x, low), high)


def softplus(x):
    return max(x, 0.0) + math.log1p(math.exp(-abs(x))) if not math.isnan(x) else NAN


def tanh_form(x):
    x = finite(x, high=INF)
    inner = 0.7978845608028654 * (x + 0.044715 * x**3) if abs(x) < 1e13 else x
    return 0.5 * x * (1 + math.tanh(inner))


def either_nan(pick):
    return lambda a, b: NAN if math.isnan(a) or math.isnan(b) else pick(a, b)


def rounding(fn):
    return lambda x: math.copysign(fn(x), x) if math.isfinite(x) else x


UNARY = {
    "abs": math.fabs,
    "negative": lambda x: -x,
    "reciprocal": lambda x: divide(1.0, x),
    "rsqrt": lambda x: divide(1.0, math.sqrt(x)),
    "logical_not": lambda x: float(not x),
    "copy": lambda x: x,
    "square": lambda x: x * x,
    "sqrt": math.sqrt,
    "sign": lambda x: x if math.isnan(x) else float((x > 0) - (x < 0)),
    "relu": lambda x: x if x > 0 or math.isnan(x) else 0.0,
    "exp": math.exp,
    "log": lambda x: -INF if x == 0 else math.log(x),
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
    "arctan": math.atan,
    "tanh": math.tanh,
    "sigmoid": sigmoid,
    "silu": lambda x: finite(x, high=INF) * sigmoid(x),
    "silu_dx": lambda x: sigmoid(x) * (1 + finite(x) * (1 - sigmoid(x))),
    "softplus": softplus,
    "mish": lambda x: finite(x, high=INF) * math.tanh(softplus(x)),
    "erf": math.erf,
    "erf_dx": lambda x: 2 / math.sqrt(math.pi) * (math.exp(-x * x) if not abs(x) > 1e19 else 0.0),
    "gelu": lambda x: 0.5 * finite(x, high=INF) * math.erfc(-x / math.sqrt(2)),
    "gelu_dx": lambda x: 0.5 * math.erfc(-x / math.sqrt(2)) + finite(x) * phi(x),
    "gelu_apprx_tanh": tanh_form,
    "gelu_apprx_sigmoid": lambda x: finite(x, high=INF) * sigmoid(1.702 * x),
    "ceil": rounding(math.ceil),
    "floor": rounding(math.floor),
    "trunc": rounding(math.trunc),
}
BINARY = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": divide,
    "maximum": either_nan(builtins.max),
    "minimum": either_nan(builtins.min),
    "power": power,
    "fmod": math.fmod,
    "mod": python_mod,
    "equal": lambda a, b: float(a == b),
    "not_equal": lambda a, b: float(a != b),
    "greater": lambda a, b: float(a > b),
    "greater_equal": lambda a, b: float(a >= b),
    "less": lambda a, b: float(a < b),
    "less_equal": lambda a, b: float(a <= b),
    "logical_and": lambda a, b: float(bool(a) and bool(b)),
    "logical_or": lambda a, b: float(bool(a) or bool(b)),
    "logical_xor": lambda a, b: float(bool(a) != bool(b)),
}
BITS = {
    "bitwise_and": lambda a, b, w: a & b,
    "bitwise_or": lambda a, b, w: a | b,
    "bitwise_xor": lambda a, b, w: a ^ b,
    "left_shift": lambda a, b, w: a << b if b < w else 0,
    "right_shift": lambda a, b, w: a >> b if b < w else 0,
    "invert": lambda a, b, w: ~a,
}
# One rounding of the float64 value is the float32 value, for these.
EXACT = {
    "abs", "negative", "copy", "square", "sqrt", "sign", "relu", "ceil", "floor", "trunc", "add", "subtract",
    "multiply", "divide", "reciprocal", "maximum", "minimum", "fmod", "logical_not",
    *(n for n in BINARY if SCALAR[n].group in ("comparison", "logical")),
}  # fmt: skip
# Relative error; 1e-6 (some eight units in the last place) unless named. In some compositions the argument of
# exp is rounded to float32, which costs its magnitude in relative error.
RELATIVE = {
    "erf": 7e-8, "gelu": 7e-8, "erf_dx": 1e-5, "silu": 1e-5, "sigmoid": 1e-5, "mish": 1e-5,
    "gelu_apprx_sigmoid": 2e-5,
}  # fmt: skip
# Absolute error, where terms cancel.
ABSOLUTE = {"gelu_dx": 1e-8, "silu_dx": 3e-7, "gelu_apprx_tanh": 1e-6}


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


def operands(name):
    rng = np.random.default_rng(3)
    if name in UNARY:
        spread = rng.standard_normal(400) * np.repeat([0.01, 1, 4, 50], 100)
        return (np.array([*SPECIAL, *EDGES, *spread], np.float32),)
    grid = np.array([*SPECIAL, *EDGES], np.float32)
    a, b = (g.reshape(-1) for g in np.meshgrid(grid, grid))
    ra, rb = rng.standard_normal((2, 500)).astype(np.float32) * np.float32(3)
    return np.concatenate([a, ra]), np.concatenate([b, rb])


def expected(name, args):
    fn = guarded({**UNARY, **BINARY}[name])
    values = np.array([fn(*point) for point in zip(*(a.tolist() for a in args))])
    with np.errstate(all="ignore"):
        return values, values.astype(np.float32)


def check(name, got, args):
    wide, want = expected(name, args)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    number = ~np.isnan(want)
    got, want, wide = got[number], want[number], wide[number]
    if name in EXACT:
        np.testing.assert_array_equal(got, want)
        if name not in ("maximum", "minimum", "sign"):
            np.testing.assert_array_equal(np.signbit(got), np.signbit(want))
        return
    with np.errstate(all="ignore"):
        tolerance = np.maximum(np.abs(wide) * RELATIVE.get(name, 1e-6), ABSOLUTE.get(name, 1e-37))
        wrong = ~((got == want) | (np.abs(got.astype(np.float64) - wide) <= tolerance))
    assert not wrong.any(), [(*(a[number][wrong][0] for a in args), got[wrong][0], wide[wrong][0])]


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
