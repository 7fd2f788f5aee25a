"""What the scalar functions are compared with: Python and float64."""

import builtins
import math
import warnings

import numpy as np

from opennki.isa.scalar import SCALAR


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
