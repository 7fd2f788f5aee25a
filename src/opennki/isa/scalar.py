"""The one table of scalar functions: ALU operators, activation functions, and what `nki.language` adds to
them.

Each entry gives the meaning twice, as a NumPy callable (the reference) and as a C expression (for a native
executor), with its documented input range, its identity where it reduces, and its engines. Arithmetic is
float32: operands are float32 arrays and so is the result, comparisons and logical functions included (0 or
1). Functions of the group "bitvec" take integer arrays of one dtype instead and keep it.

Special values: NaN passes through arithmetic, maximum and minimum; it is true to the logical functions and
unequal to everything. Where both operands of maximum or minimum are zeros, the second one is the result (as
MAXPS does). Functions that tend to a limit give that limit at infinity (silu(-inf) is -0, not NaN). Source:
the public NKI documentation, "Supported Math Operators for NKI ISA" and "Supported Activation Functions".
"""

from __future__ import annotations

import builtins
import difflib
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from opennki.isa.zeros import MAXIMUM, MINIMUM

Array = npt.NDArray[Any]
Fn = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class ScalarFunction:
    """One scalar function.

    numpy: callable on one or two arrays (float32; integer for "bitvec"), which broadcasts and never warns.
    raw: the same without the guard against floating-point warnings (0.6 µs per call), for callers that hold
        `numpy.errstate(all="ignore")` themselves; a NumPy ufunc (with out=) wherever the function is one.
    c: C expression in `a` and `b` (float; element type T for "bitvec", with U its unsigned type and W its
    width in bits), using <math.h> and `C_PRELUDE`. To be compiled with -ffp-contract=off. domain: documented
    valid input (low, high) on the Scalar Engine, or None; of |a| if `domain_of_magnitude`. identity: e with
    f(x, e) = x, what a missing element of a reduction counts as; None if not reducible. engines: engines that
    have it ("vector", "scalar", "gpsimd"); empty where the compiler composes it. exact_int: callable on int64
    arrays for the exact integer path of the GpSimd Engine, or None.
    """

    name: str
    arity: int
    group: str
    numpy: Fn
    c: str
    doc: str
    engines: tuple[str, ...]
    raw: Fn
    domain: tuple[float, float] | None = None
    domain_of_magnitude: bool = False
    reducible: bool = False
    identity: float | None = None
    exact_int: Fn | None = None


GROUPS = ("arithmetic", "bitvec", "comparison", "logical", "activation", "rounding")

C_PRELUDE = """\
#include <math.h>
static inline float nki_mod(float a, float b) {
    float m = fmodf(a, b);
    if (m != 0.0f) return ((b < 0.0f) != (m < 0.0f)) ? m + b : m;
    return b == 0.0f ? m : copysignf(0.0f, b);
}
static inline double nki_erf64(double x) {
    double c = x > 4.0 ? 4.0 : (x < -4.0 ? -4.0 : x), s = c * c;
    double p = ((((((ERF_P7 * s + ERF_P6) * s + ERF_P5) * s + ERF_P4) * s + ERF_P3) * s + ERF_P2) * s
        + ERF_P1) * s + ERF_P0;
    double q = ((((ERF_Q5 * s + ERF_Q4) * s + ERF_Q3) * s + ERF_Q2) * s + ERF_Q1) * s + 1.0;
    return p / q * c;
}
static inline float nki_low(float a) { return a < -0x1.fffffep+127f ? -0x1.fffffep+127f : a; }
static inline float nki_finite(float a) { return a > 0x1.fffffep+127f ? 0x1.fffffep+127f : nki_low(a); }
static inline float nki_sigmoid(float a) { return 1.0f / (1.0f + expf(-a)); }
static inline float nki_softplus(float a) { return (a > 0.0f || a != a ? a : 0.0f) + log1pf(expf(-fabsf(a)));
} static inline double nki_clip(double x) { return x < -1e100 ? -1e100 : (x > 1e100 ? 1e100 : x); }
static inline double nki_cdf(double x, double e) {
    double t = 2.5 / (fabs(x) * 0x1.6a09e667f3bcdp-1 + 2.5);
    double r = (((((((((TAIL_10 * t + TAIL_9) * t + TAIL_8) * t + TAIL_7) * t + TAIL_6) * t + TAIL_5) * t
        + TAIL_4) * t + TAIL_3) * t + TAIL_2) * t + TAIL_1) * t + TAIL_0;
    r = r * t * e * 0.5;
    return x > 0.0 ? 1.0 - r : r;
}
static inline float nki_gelu(float a) {
    double x = nki_clip(a);
    return (float)(nki_cdf(x, exp(x * x * -0.5)) * x);
}
static inline float nki_gelu_dx(float a) {
    double x = nki_clip(a), e = exp(x * x * -0.5);
    return (float)(x * e * 0x1.9884533d43651p-2 + nki_cdf(x, e));
}
"""

# erf(x) = x p(x²)/q(x²) on |x| <= 4, relative error below 9e-10 (a Lawson-weighted rational least-squares
# fit); beyond 4, float32 rounds erf to 1. Evaluated in float64, so the float32 result is within one unit in
# the last place.
_ERF_P = (
    1.1283791680560284,
    0.17715468327279882,
    0.05258563802018249,
    0.003449047065173107,
    0.00033976715704556366,
    3.3072879435021593e-06,
    2.7914365114362548e-09,
    -1.4451165250172803e-10,
)
_ERF_Q = (
    1.0,
    0.4903326191953779,
    0.11004677077923493,
    0.014515815430483787,
    0.001179058155497776,
    5.286724535493248e-05,
)
# exp(y²) erfc(y) = t r(t) with t = 2.5 / (2.5 + y), relative error below 7e-9 for y >= 0 (found likewise). It
# gives the normal distribution function its relative accuracy in the tail, which 1 + erf loses.
_TAIL = (
    0.22567583479256445,
    0.22567586013618948,
    0.20761372895225808,
    0.1717392869934342,
    0.11900828654461504,
    0.08391644912534955,
    -0.04689527346032342,
    0.1375615537418096,
    -0.23552738077449956,
    0.14044677796369442,
    -0.029215130194155926,
)
for _prefix, _values in (("ERF_P", _ERF_P), ("ERF_Q", _ERF_Q), ("TAIL_", _TAIL)):
    for _i in reversed(range(len(_values))):  # 10 before 1
        C_PRELUDE = C_PRELUDE.replace(f"{_prefix}{_i}", f"({_values[_i].hex()})")

_F0, _F1, _HALF = np.float32(0), np.float32(1), np.float32(0.5)
_LARGEST = np.finfo(np.float32).max
_BLOCK = 16384  # elements per step of the float64 formulas: their temporaries then stay in the L2 cache


def _horner(coefficients: tuple[float, ...], s: Array) -> Array:
    value = np.full_like(s, coefficients[-1])
    for c in coefficients[-2::-1]:
        value *= s
        value += c
    return value


def _erf64(x: Array) -> Array:
    """erf of a float64 array, with a relative error below 9e-10 for |x| <= 4 and 1.5e-8 beyond."""
    x = np.minimum(np.maximum(x, -4.0), 4.0)
    s = x * x
    value = _horner(_ERF_P, s)
    value /= _horner(_ERF_Q, s)
    value *= x
    return value


def _in_float64(formula: Fn) -> Fn:
    """A float32 function from a float64 formula, evaluated block by block."""

    def apply(a: Array) -> Array:
        return _blockwise(formula, np.asarray(a, np.float32).reshape(-1)).reshape(np.shape(a))

    return apply


def _blockwise(formula: Fn, flat: Array) -> Array:
    out = np.empty(flat.shape, np.float32)
    for i in range(0, flat.size, _BLOCK):
        out[i : i + _BLOCK] = formula(flat[i : i + _BLOCK].astype(np.float64))
    return out


_SQRT_HALF = 0.7071067811865476
_INV_SQRT_2PI = 0.3989422804014327
_FAR = 1e100  # stands for infinity in float64 formulas where inf * 0 would turn a limit into NaN


def _cdf64(x: Array, e: Array) -> Array:
    """Normal distribution function of a float64 array, given e = exp(-x²/2); relative error below 7e-9."""
    t = 2.5 / (np.abs(x) * _SQRT_HALF + 2.5)
    tail = _horner(_TAIL, t)
    tail *= t
    tail *= e
    tail *= 0.5
    return np.where(x > 0, 1.0 - tail, tail)


def _gelu64(x: Array) -> Array:
    x = np.minimum(np.maximum(x, -_FAR), _FAR)
    value = _cdf64(x, np.exp(x * x * -0.5))
    value *= x
    return value


def _gelu_dx64(x: Array) -> Array:
    x = np.minimum(np.maximum(x, -_FAR), _FAR)
    e = np.exp(x * x * -0.5)
    value: Array = x * e * _INV_SQRT_2PI + _cdf64(x, e)
    return value


def _sigmoid(a: Array) -> Array:
    return _F1 / (_F1 + np.exp(-a))


def _silu(a: Array) -> Array:
    a = np.maximum(a, -_LARGEST)
    return a * _sigmoid(a)


def _silu_dx(a: Array) -> Array:
    a = np.minimum(np.maximum(a, -_LARGEST), _LARGEST)
    s = _sigmoid(a)
    value: Array = s * (_F1 + a * (_F1 - s))
    return value


_TANH_SCALE = np.float32(0.7978845608028654)  # sqrt(2/pi)
_TANH_CUBE = np.float32(0.044715)
_SIGMOID_SCALE = np.float32(1.702)


def _gelu_apprx_tanh(a: Array) -> Array:
    a = np.maximum(a, -_LARGEST)
    value: Array = _HALF * a * (_F1 + np.tanh(_TANH_SCALE * (a + _TANH_CUBE * (a * a * a))))
    return value


def _gelu_apprx_sigmoid(a: Array) -> Array:
    a = np.maximum(a, -_LARGEST)
    return a * _sigmoid(_SIGMOID_SCALE * a)


def _softplus(a: Array) -> Array:
    return np.maximum(a, _F0) + np.log1p(np.exp(-np.abs(a)))


def _mish(a: Array) -> Array:
    a = np.maximum(a, -_LARGEST)
    return a * np.tanh(_softplus(a))


_TWO_OVER_SQRT_PI = np.float32(1.1283791670955126)


def _erf_dx(a: Array) -> Array:
    value: Array = _TWO_OVER_SQRT_PI * np.exp(-(a * a))
    return value


def _power(a: Array, b: Array) -> Array:
    """NumPy takes the square root for an exponent of one half in some layouts of memory and not in others; -0 and -inf differ."""
    root = np.equal(b, np.float32(0.5)) & (np.equal(a, _F0) | np.equal(a, np.float32(-_INF)))
    return np.where(root, np.abs(a), np.power(a, b))


def _rsqrt(a: Array) -> Array:
    return _F1 / np.sqrt(a)


def _relu(a: Array) -> Array:
    return np.maximum(a, _F0) + _F0  # + 0 so that relu(-0) is +0 on every machine


def _copy(a: Array) -> Array:
    return np.array(a)


def _as_float(test: Fn) -> Fn:
    def apply(*operands: Array) -> Array:
        return np.asarray(test(*operands)).astype(np.float32)

    return apply


_UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


def _shift(ufunc: Fn) -> Fn:
    def apply(a: Array, b: Array) -> Array:
        """Shift on the unsigned view; a count of the width or more (as unsigned) gives 0."""
        a = np.asarray(a)
        b = np.asarray(b, dtype=a.dtype)
        unsigned = _UNSIGNED[a.dtype.itemsize]
        return np.asarray(ufunc(a.view(unsigned), b.view(unsigned))).view(a.dtype)

    return apply


SCALAR: dict[str, ScalarFunction] = {}
_INF = float("inf")


def _define(arity: int, group: str, name: str, fn: Fn, c: str, engines: str, doc: str, **more: Any) -> None:
    # Bit operations raise no floating-point flags, so they need no guard. As a decorator errstate costs half
    # of what it costs as a context.
    guarded = fn if group == "bitvec" else np.errstate(all="ignore")(fn)
    if "identity" in more:
        more["reducible"] = True
    SCALAR[name] = ScalarFunction(name, arity, group, guarded, c, doc, tuple(engines.split()), fn, **more)


# fmt: off
_name: str
_fn: Fn
_c: str
_engines: str
_doc: str
_more: dict[str, Any]

# ---- ALU operators ---------------------------------------------------------------------
for _name, _fn, _c, _engines, _doc, _more in (
    ("add", np.add, "a + b", "vector gpsimd scalar",
     "a + b; on the Scalar Engine from gen3; int32 exactly on GpSimd.", {"identity": -0.0, "exact_int":
     np.add}),
    ("subtract", np.subtract, "a - b", "vector gpsimd",
     "a - b; reduces as x0 - x1 - x2 - ...; int32 exactly on GpSimd.",
     {"identity": 0.0, "exact_int": np.subtract}),
    ("multiply", np.multiply, "a * b", "vector gpsimd scalar",
     "a * b; on the Scalar Engine from gen3; int32 exactly on GpSimd.",
     {"identity": 1.0, "exact_int": np.multiply}),
    ("maximum", MAXIMUM, "(a > b || a != a) ? a : b", "vector",
     "The larger operand; NaN if either is NaN.", {"identity": -_INF, "exact_int": np.maximum}),
    ("minimum", MINIMUM, "(a < b || a != a) ? a : b", "vector",
     "The smaller operand; NaN if either is NaN.", {"identity": _INF, "exact_int": np.minimum}),
    ("power", _power, "powf(a, b)", "gpsimd", "a to the power b.", {}),
    ("divide", np.divide, "a / b", "vector", "a / b.", {}),
    ("fmod", np.fmod, "fmodf(a, b)", "vector", "Remainder of a / b with the sign of a, as in C.", {}),
    ("mod", np.remainder, "nki_mod(a, b)", "vector", "Remainder of a / b with the sign of b, as in Python.",
    {}),
):
    _define(2, "arithmetic", _name, _fn, _c, _engines, _doc, **_more)

for _name, _fn, _c, _engines, _doc, _more in (
    ("abs", np.abs, "fabsf(a)", "vector scalar", "Absolute value.", {"exact_int": np.abs}),
    ("negative", np.negative, "-a", "", "-a.", {"exact_int": np.negative}),
    ("reciprocal", np.reciprocal, "1.0f / a", "vector scalar", "1 / a.",
     {"domain": (2.0**-42, 2.0**42), "domain_of_magnitude": True}),
    ("rsqrt", _rsqrt, "1.0f / sqrtf(a)", "gpsimd scalar", "1 / sqrt(a).", {"domain": (2.0**-87, 2.0**97)}),
):
    _define(1, "arithmetic", _name, _fn, _c, _engines, _doc, **_more)

for _name, _fn, _c in (
    ("equal", np.equal, "=="), ("not_equal", np.not_equal, "!="),
    ("greater", np.greater, ">"), ("greater_equal", np.greater_equal, ">="),
    ("less", np.less, "<"), ("less_equal", np.less_equal, "<="),
):
    _define(2, "comparison", _name, _as_float(_fn), f"(a {_c} b) ? 1.0f : 0.0f", "vector",
            f"1 if a {_c} b else 0.")

_define(2, "logical", "logical_and", _as_float(np.logical_and), "(a != 0.0f && b != 0.0f) ? 1.0f : 0.0f",
        "vector", "1 if both operands are nonzero else 0.", identity=1.0)
_define(2, "logical", "logical_or", _as_float(np.logical_or), "(a != 0.0f || b != 0.0f) ? 1.0f : 0.0f",
        "vector", "1 if any operand is nonzero else 0.", identity=0.0)
_define(2, "logical", "logical_xor", _as_float(np.logical_xor), "((a != 0.0f) != (b != 0.0f)) ? 1.0f : 0.0f",
        "vector", "1 if exactly one operand is nonzero else 0.", identity=0.0)
_define(1, "logical", "logical_not", _as_float(np.logical_not), "(a == 0.0f) ? 1.0f : 0.0f",
        "vector", "1 if the operand is zero else 0.")

_define(2, "bitvec", "bitwise_and", np.bitwise_and, "a & b", "vector", "Bitwise and.", identity=-1)
_define(2, "bitvec", "bitwise_or", np.bitwise_or, "a | b", "vector", "Bitwise or.", identity=0)
_define(2, "bitvec", "bitwise_xor", np.bitwise_xor, "a ^ b", "vector", "Bitwise exclusive or.", identity=0)
_define(1, "bitvec", "invert", np.invert, "(T)~a", "vector", "Bitwise not.")
_define(2, "bitvec", "left_shift", _shift(np.left_shift), "(U)b < W ? (T)((U)a << (U)b) : (T)0", "vector",
        "a << b, bits leaving at the top are lost; 0 for a count of the width or more.")
_define(2, "bitvec", "right_shift", _shift(np.right_shift), "(U)b < W ? (T)((U)a >> (U)b) : (T)0", "vector",
        "Logical a >> b, zeros entering at the top, whatever the sign; 0 for a count of the width or more.")

ALU_OPERATORS: frozenset[str] = frozenset(SCALAR) - {"divide", "fmod", "mod", "negative"}

# ---- activation functions of the Scalar Engine -----------------------------------------
_TANH_C = "0x1.988454p-1f * (nki_low(a) + 0x1.6e4e26p-5f * (nki_low(a) * nki_low(a) * nki_low(a)))"
for _name, _fn, _c, _doc, _more in (
    ("copy", _copy, "a", "a itself.", {"exact_int": np.array}),
    ("square", np.square, "a * a", "a * a.", {"exact_int": np.square}),
    ("sqrt", np.sqrt, "sqrtf(a)", "Square root.", {"domain": (2.0**-116, 2.0**118)}),
    ("sign", np.sign, "a != a ? a : (float)((a > 0.0f) - (a < 0.0f))", "-1, 0 or 1; NaN for NaN.", {}),
    ("relu", _relu, "((a > 0.0f || a != a) ? a : 0.0f)", "max(a, 0).", {}),
    ("exp", np.exp, "expf(a)", "e to the power a.", {}),
    ("log", np.log, "logf(a)", "Natural logarithm.", {"domain": (2.0**-64, 2.0**64)}),
    ("sin", np.sin, "sinf(a)", "Sine.", {"domain": (-np.pi, np.pi)}),
    ("arctan", np.arctan, "atanf(a)", "Arc tangent.", {"domain": (-np.pi / 2, np.pi / 2)}),
    ("tanh", np.tanh, "tanhf(a)", "Hyperbolic tangent.", {}),
    ("sigmoid", _sigmoid, "nki_sigmoid(a)", "1 / (1 + exp(-a)).", {}),
    ("silu", _silu, "nki_low(a) * nki_sigmoid(nki_low(a))", "a sigmoid(a).", {}),
    ("silu_dx", _silu_dx,
     "nki_sigmoid(nki_finite(a)) * (1.0f + nki_finite(a) * (1.0f - nki_sigmoid(nki_finite(a))))",
     "Derivative of silu: s (1 + a (1 - s)) with s = sigmoid(a).", {}),
    ("softplus", _softplus, "nki_softplus(a)", "log(1 + exp(a)).", {}),
    ("mish", _mish, "nki_low(a) * tanhf(nki_softplus(nki_low(a)))", "a tanh(softplus(a)).", {}),
    ("erf", _in_float64(_erf64), "(float)nki_erf64(a)", "Error function.", {}),
    ("erf_dx", _erf_dx, "0x1.20dd76p+0f * expf(-(a * a))", "Derivative of erf: 2/sqrt(pi) exp(-a²).", {}),
    ("gelu", _in_float64(_gelu64), "nki_gelu(a)", "a/2 (1 + erf(a / sqrt(2))).", {}),
    ("gelu_dx", _in_float64(_gelu_dx64), "nki_gelu_dx(a)", "Derivative of gelu.", {}),
    ("gelu_apprx_tanh", _gelu_apprx_tanh, f"0.5f * nki_low(a) * (1.0f + tanhf({_TANH_C}))",
     "a/2 (1 + tanh(sqrt(2/pi) (a + 0.044715 a³))); usual constants, the vendor states none.", {}),
    ("gelu_apprx_sigmoid", _gelu_apprx_sigmoid, "nki_low(a) * nki_sigmoid(0x1.b3b646p+0f * nki_low(a))",
     "a sigmoid(1.702 a); usual constant, the vendor states none.", {}),
):
    _define(1, "activation", _name, _fn, _c, "scalar", _doc, **_more)

ACTIVATIONS: frozenset[str] = frozenset(
    name for name, entry in SCALAR.items() if entry.group == "activation"
) | {"abs", "reciprocal", "rsqrt"}

# Function sets of the Scalar Engine's activation tables. The vendor publishes no grouping; this one is assumed: functions computed from the
# same table share a set, and what needs no table is in every set.
TABLES: dict[str, str] = {
    name: table for table, names in {
        "exp": "exp sigmoid silu silu_dx softplus mish tanh", "log": "log", "sqrt": "sqrt rsqrt", "trigonometric": "sin cos arctan",
        "gelu": "erf erf_dx gelu gelu_dx gelu_apprx_tanh gelu_apprx_sigmoid"}.items() for name in names.split()}

# ---- further elementwise functions of nki.language -------------------------------------
_define(1, "activation", "cos", np.cos, "cosf(a)", "scalar", "Cosine.")
_define(1, "activation", "tan", np.tan, "tanf(a)", "", "Tangent.")
_define(1, "rounding", "ceil", np.ceil, "ceilf(a)", "", "Smallest integer not below a.")
_define(1, "rounding", "floor", np.floor, "floorf(a)", "", "Largest integer not above a.")
_define(1, "rounding", "trunc", np.trunc, "truncf(a)", "", "Integer part of a.")
# fmt: on

# ---- what callers may pass as an operator ----------------------------------------------

_ALIASES: dict[str, str] = {
    "max": "maximum", "amax": "maximum", "min": "minimum", "amin": "minimum",
    "sum": "add", "prod": "multiply", "sub": "subtract", "mul": "multiply", "mult": "multiply",
    "div": "divide", "true_divide": "divide", "pow": "power", "remainder": "mod",
    "all": "logical_and", "any": "logical_or",
    "absolute": "abs", "fabs": "abs", "neg": "negative", "fix": "trunc", "atan": "arctan",
    "identity": "copy", "positive": "copy",
    "bitwise_not": "invert", "bitwise_invert": "invert",
    "bitwise_left_shift": "left_shift", "bitwise_right_shift": "right_shift",
    "logical_shift_left": "left_shift", "logical_shift_right": "right_shift",
}  # fmt: skip

_PYTHON = {
    builtins: "max min sum abs pow all any",
    operator: "add sub mul mod pow neg abs",
}
_OPERATOR = {
    "truediv": "divide", "and_": "bitwise_and", "or_": "bitwise_or", "xor": "bitwise_xor", "invert": "invert",
    "lshift": "left_shift", "rshift": "right_shift", "eq": "equal", "ne": "not_equal", "lt": "less",
    "le": "less_equal", "gt": "greater", "ge": "greater_equal", "not_": "logical_not", "pos": "copy",
}  # fmt: skip


def _known_objects() -> dict[object, str]:
    known: dict[object, str] = {name: name for name in SCALAR}
    known.update(_ALIASES.items())
    for name in tuple(known):
        target = known[name]
        function = getattr(np, str(name), None)  # older NumPy lacks some spellings
        if callable(function) and name != "identity":  # numpy.identity makes a matrix
            known[function] = target
    for module, names in _PYTHON.items():
        for name in names.split():
            known[getattr(module, name)] = _ALIASES.get(name, name)
    for name, target in _OPERATOR.items():
        known[getattr(operator, name)] = target
    return known


_KNOWN = _known_objects()


def resolve(op: object) -> str:
    """Name in `SCALAR` of an operator given as a name, a NumPy function, a Python operator or an nki
    function.

    np.max, np.amax, np.maximum and "max" are "maximum", np.sum is "add", np.prod "multiply", np.all
    "logical_and", np.any "logical_or". An object may name its function itself in an attribute `nki_op`.
    Raises TypeError, with the nearest names, for anything else.
    """
    try:
        name = _KNOWN.get(op)
    except TypeError:  # unhashable
        name = None
    if name is None:
        own = getattr(op, "nki_op", None)
        name = _KNOWN.get(own) if isinstance(own, str) else None
    if name is None:
        raise _unknown(op)
    return name


def _unknown(op: object) -> TypeError:
    text = op if isinstance(op, str) else getattr(op, "__name__", "")
    names = [name for name in _KNOWN if isinstance(name, str)]
    near = difflib.get_close_matches(text, names, n=4, cutoff=0.6) if isinstance(text, str) else []
    shown = repr(op)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    hint = f"did you mean {', '.join(near)}?" if near else f"known operators are {', '.join(sorted(SCALAR))}"
    return TypeError(f"{shown} is not an operator of the NeuronCore; {hint}")
