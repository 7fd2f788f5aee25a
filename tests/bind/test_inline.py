# ruff: noqa: E402
"""Whole kernels expanded into JAX programs: loops, branches, masks, programs, dtypes, gradients, fusion with what is around them."""
from __future__ import annotations

import importlib.util
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp

import opennki.dropin  # noqa: F401  isort: skip
import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import neuronxcc.nki.typing as nt
from opennki.bind.inline import CannotInline, first_unsupported, inline
from opennki.bind.inline_numbers import encode
from opennki.errors import NkiTypeError, NkiValueError
from opennki.isa import dtypes
from tests.bind.compare import agree, both, close, exact, integers, kernel_of, normal

BF16 = np.dtype(ml_dtypes.bfloat16)
EXAMPLE = Path(__file__).parents[2] / "examples" / "flash_attention.py"


def add(x, y):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range((x.shape[0] + 127) // 128):
        row, column = i * 128 + nl.arange(128)[:, None], nl.arange(x.shape[1])[None, :]
        inside = row < x.shape[0]
        nl.store(out[row, column], nl.add(nl.load(x[row, column], mask=inside), nl.load(y[row, column], mask=inside)), mask=inside)
    return out


def softmax(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(x.shape[0] // 128):
        t = nl.load(x[nl.ds(i * 128, 128), :])
        e = nl.exp(nl.subtract(t, nl.max(t, axis=1, keepdims=True)))
        nl.store(out[nl.ds(i * 128, 128), :], nl.divide(e, nl.sum(e, axis=1, keepdims=True)))
    return out


def rmsnorm(x, g):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    gain = nl.load(g.reshape((1, g.shape[0])))
    for i in nl.affine_range((x.shape[0] + 127) // 128):
        row, column = i * 128 + nl.arange(128)[:, None], nl.arange(x.shape[1])[None, :]
        t = nl.load(x[row, column], mask=row < x.shape[0])
        mean = nl.divide(nl.sum(nl.square(t), axis=[1]), x.shape[1])
        scaled = nl.multiply(t, nl.rsqrt(mean + 1e-6))
        nl.store(out[row, column], nl.multiply(scaled, gain.broadcast_to((128, x.shape[1]))), mask=row < x.shape[0])
    return out


def matmul(lhs_t, rhs):
    """Loops over tiles, six of them along the contraction."""
    k, m = lhs_t.shape
    n = rhs.shape[1]
    out = nl.ndarray((m, n), dtype=lhs_t.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(m // 64):
        for j in nl.affine_range(n // 128):
            acc = nl.zeros((64, 128), dtype=nl.float32, buffer=nl.psum)
            for c in nl.affine_range(k // 32):
                part = nl.ds(c * 32, 32)
                acc += nisa.nc_matmul(nl.load(lhs_t[part, nl.ds(i * 64, 64)]), nl.load(rhs[part, nl.ds(j * 128, 128)]))
            nl.store(out[nl.ds(i * 64, 64), nl.ds(j * 128, 128)], acc)
    return out


def by_parity(x):
    """A branch on the loop index, in a loop that is too long to be unrolled."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.sequential_range(x.shape[0] // 16):
        t = nl.load(x[nl.ds(i * 16, 16), :])
        if i % 2 == 0:
            t[...] = nl.multiply(t, 2.0)
        else:
            if i > 3:
                t[...] = nl.negative(t)
        nl.store(out[nl.ds(i * 16, 16), :], t)
    return out


def over_programs(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    p, q = nl.program_id(0), nl.program_id(1)
    rows, columns = nl.ds(p * 32, 32), nl.ds(q * 48, 48)
    t = nl.load(x[rows, columns])
    if p == 1:
        t[...] = nl.add(t, q)
    nl.store(out[rows, columns], t)
    return out


def in_place(x: nl.mutable_tensor, y):
    """Adds to its first input, which nothing returns."""
    nl.store(x, nl.add(nl.load(x), nl.load(y)))
    out = nl.ndarray((y.shape[0], 1), dtype=y.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.sum(nl.load(x), axis=1, keepdims=True))
    return out


def transposed(x):
    out = nl.ndarray((x.shape[1], x.shape[0]), dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(x.shape[0] // 32):
        t = nl.load(x[nl.ds(i * 32, 32), :])
        nl.store(out[:, nl.ds(i * 32, 32)], nl.copy(nisa.nc_transpose(t), dtype=x.dtype))
    return out


def strided(x):
    """Every second column is written, in reverse order, and read with two strides in one dimension."""
    p, f = x.shape
    t = nl.zeros((p, 2 * f), dtype=x.dtype)
    ip, ix = nl.mgrid[0:p, 0:f]
    t[ip, 2 * ix] = nl.load(x[ip, f - 1 - ix])
    t[ip, 2 * ix + 1] = nl.load(x)
    i, a, b = nl.mgrid[0:p, 0:4, 0:3]
    out = nl.ndarray((p, 2 * f), dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, t)
    some = nl.ndarray((p, 4, 3), dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(some, nl.copy(t[i, a * 5 + b * 2]))
    return out, some


def accumulated(x):
    """A running value in SBUF over more iterations than are unrolled, with a mask that moves with the loop."""
    p, f = x.shape
    total = nl.zeros((p, f), dtype=nl.float32)
    ip, ix = nl.mgrid[0:p, 0:f]
    for i in nl.sequential_range(9):
        total[ip, ix] = nl.add(nl.multiply(total[ip, ix], 0.5), nl.load(x), mask=ix + ip < i * 4)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, total)
    return out


def triangle(x):
    """The inner loop runs under a condition on both indices."""
    n = x.shape[0] // 16
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(n):
        total = nl.zeros((16, x.shape[1]), dtype=nl.float32)
        for j in nl.sequential_range(n):
            if j <= i:
                total += nl.load(x[nl.ds(j * 16, 16), :])
        nl.store(out[nl.ds(i * 16, 16), :], total)
    return out


def while_positive(n):
    """A loop whose trips are known when it runs."""
    out = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.shared_hbm)
    count, left = nl.zeros((1, 1), dtype=nl.int32), nl.load(n)
    cond = nt.scalar(True)
    while cond:
        count[...] = count + 1
        left[...] = left - 2
        cond = nt.scalar(left > 0)
    nl.store(out, count)
    return out


def either_tile(x):
    """The branches make the tile that is used after them."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.sequential_range(x.shape[0] // 16):
        if i % 3 == 1:
            t = nl.load(x[nl.ds(i * 16, 16), :])
        else:
            t = nl.negative(nl.load(x[nl.ds(i * 16, 16), :]))
        nl.store(out[nl.ds(i * 16, 16), :], t)
    return out


KERNELS = {
    "add": (add, (normal(300, 40), normal(300, 40, seed=1)), exact),
    "softmax": (softmax, (normal(256, 100),), close),
    "softmax_bf16": (softmax, (normal(256, 100, dtype=BF16),), close),
    "rmsnorm": (rmsnorm, (normal(300, 64), normal(64)), close),
    "matmul": (matmul, (normal(192, 128), normal(192, 384)), close),
    "matmul_bf16": (matmul, (normal(192, 128, dtype=BF16), normal(192, 384, dtype=BF16)), close),
    "by_parity": (by_parity, (normal(144, 24),), exact),
    "either_tile": (either_tile, (normal(144, 24),), exact),
    "in_place": (in_place, (normal(64, 32), normal(64, 32, seed=1)), close),
    "transposed": (transposed, (normal(96, 48),), exact),
    "transposed_int32": (transposed, (integers(96, 48, low=-2**31, high=2**31 - 1),), exact),
    "add_int32": (add, (integers(130, 8, low=-2**31, high=2**31 - 1), integers(130, 8, low=-2**31, high=2**31 - 1, seed=1)), exact),
    "add_fp8": (add, (normal(130, 8).astype(ml_dtypes.float8_e4m3), normal(130, 8, seed=1).astype(ml_dtypes.float8_e4m3)), exact),
    "strided": (strided, (normal(16, 20),), exact),
    "accumulated": (accumulated, (normal(16, 40),), exact),
    "triangle": (triangle, (normal(96, 24),), close),
    "while_positive": (while_positive, (np.array([[7]], np.int32),), exact),
    "while_at_least_once": (while_positive, (np.array([[-7]], np.int32),), exact),
}


@pytest.mark.parametrize("name", KERNELS)
def test_agrees_with_the_interpreter(name):
    fn, arrays, check = KERNELS[name]
    agree(fn, *arrays, check=check, experimental_flags="skip-mutable-return-check")


@pytest.mark.parametrize("grid, shape", [((2, 2), (64, 96)), ((3, 4), (96, 192))])
def test_programs_of_a_grid(grid, shape):
    got, want = both(kernel_of(over_programs)[grid], normal(*shape))
    exact(got, want)


def flash_attention():
    spec = importlib.util.spec_from_file_location("flash_attention_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.flash_attention


def test_flash_attention():
    q, k = (normal(64, 1024, dtype=BF16, seed=s) for s in (0, 1))
    got, want = both(flash_attention(), q, k, normal(1024, 64, dtype=BF16))
    # probabilities are rounded to bfloat16 from values that differ in their last bits
    np.testing.assert_allclose(got[0].astype(np.float32), want[0].astype(np.float32), atol=2e-2, rtol=2e-2)
    assert np.mean(got[0] != want[0]) < 0.02


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, lambda f: lambda *a: [r[0] for r in jax.vmap(f)(*[x[None] for x in a])]],
                         ids=["eager", "jit", "vmap"])
def test_under_the_transformations_of_jax(wrap):
    agree(softmax, normal(256, 32), wrap=wrap)
    agree(by_parity, normal(144, 8), wrap=wrap, check=exact)


def test_without_jit():
    with jax.disable_jit():
        agree(add, normal(130, 8), normal(130, 8, seed=1), check=exact)


def test_operations_around_it_fuse():
    x = normal(128, 64)
    f = inline(kernel_of(softmax).trace(x))
    text = jax.jit(lambda x: f(x * 2)[0] + 1).lower(x).compile().as_text()
    assert "custom-call" not in text
    np.testing.assert_allclose(jax.jit(lambda x: f(x * 2)[0] + 1)(x), jax.nn.softmax(x * 2) + 1, rtol=1e-5)


@pytest.mark.parametrize("platform", ["cuda", "rocm", "tpu"])
def test_lowers_for_other_platforms(platform):
    """As the lowering of a primitive, with exact 32-bit integers too."""
    from jax.extend.core import Primitive
    from jax.interpreters import mlir
    x, y = (integers(160, 8, low=-2**31, high=2**31 - 1, seed=s) for s in (0, 1))
    call = Primitive("expanded")
    call.multiple_results = True
    call.def_abstract_eval(lambda *_: [jax.core.ShapedArray(x.shape, x.dtype)])
    mlir.register_lowering(call, mlir.lower_fun(inline(kernel_of(add).trace(x, y)), multiple_results=True))
    program = jax.jit(lambda x, y: call.bind(x, y)[0]).trace(x, y)
    text = program.lower(lowering_platforms=(platform,)).as_text()
    assert "stablehlo.add" in text and "custom_call" not in text
    exact([np.asarray(program.lower().compile()(x, y))], [nki.simulate_kernel(kernel_of(add), x, y)])


@pytest.mark.parametrize("dtype, precision", [(BF16, "DEFAULT"), (np.dtype(np.float16), "HIGHEST"), (np.dtype(np.float32), "HIGHEST")])
def test_products_of_bfloat16_need_one_pass(dtype, precision):
    """Accelerators split float32 operands of a product into several passes, which bfloat16 numbers do not need."""
    x, y = normal(64, 64, dtype=dtype), normal(64, 128, dtype=dtype)
    text = inline(kernel_of(matmul).trace(x, y)).lower(x, y).as_text()
    assert f"precision = [{precision}, {precision}]" in text if precision != "DEFAULT" else "HIGHEST" not in text


def test_gradients():
    x, g = normal(300, 64), normal(64)
    f = inline(kernel_of(rmsnorm).trace(x, g))

    def plain(x, g):
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + 1e-6) * g

    weight = normal(300, 64, seed=5)
    got = jax.grad(lambda x, g: (f(x, g)[0] * weight).sum(), (0, 1))(x, g)
    want = jax.grad(lambda x, g: (plain(x, g) * weight).sum(), (0, 1))(x, g)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_gradients_through_loops_and_branches():
    x = normal(144, 24)
    f = inline(kernel_of(by_parity).trace(x))
    factor = jax.grad(lambda x: f(x)[0].sum())(x).reshape(9, 16, 24)[:, 0, 0]
    assert factor.tolist() == [2, 1, 2, 1, 2, -1, 2, -1, 2]
    a, b = normal(192, 128), normal(192, 384)
    m = inline(kernel_of(matmul).trace(a, b))
    got = jax.jit(jax.grad(lambda a: m(a, b)[0].sum()))(a)
    np.testing.assert_allclose(got, np.broadcast_to(b.sum(1)[:, None], a.shape), rtol=1e-3, atol=1e-3)


def test_what_is_returned():
    x, y = normal(64, 32), normal(64, 32, seed=1)
    kernel = kernel_of(in_place, experimental_flags="skip-mutable-return-check").trace(x, y)
    out, new = inline(kernel)(x, y)
    assert out.shape == (64, 1)
    np.testing.assert_array_equal(new, x + y)

    @nki.jit(platform_target="trn2")
    def returned(x: nl.mutable_tensor):
        nl.store(x, nl.multiply(nl.load(x), 2.0))
        return x
    results = inline(returned.trace(x))(x)
    assert len(results) == 1
    np.testing.assert_array_equal(results[0], 2 * x)


def test_arguments_are_checked():
    f = inline(kernel_of(softmax).trace(normal(128, 8)))
    with pytest.raises(NkiTypeError, match="traced for float32"):
        f(normal(128, 8, dtype=BF16))
    with pytest.raises(NkiValueError, match="traced for"):
        f(normal(128, 9))
    with pytest.raises(NkiTypeError, match="has 1 inputs"):
        f()


def test_eight_byte_tensors_are_refused():
    def low_words(x):
        words = x.view(nl.int32)
        out = nl.ndarray(words.shape, dtype=nl.int32, buffer=nl.shared_hbm)
        nl.store(out, nl.load(words))
        return out
    x = np.arange(64, dtype=np.int64).reshape(8, 8)
    kernel = kernel_of(low_words).trace(x)
    message, _ = first_unsupported(kernel)
    assert "int64" in message
    with pytest.raises(CannotInline, match="8-byte"):
        inline(kernel)(x.astype(np.int32))


@pytest.mark.parametrize("name", ["float32", "tfloat32", "bfloat16", "float16", "float8_e4m3", "float8_e4m3fn", "float8_e5m2", "int8",
                                  "uint8", "int16", "uint16", "int32", "uint32", "bool"])
def test_rounding_is_that_of_the_dtypes(name):
    """Every upper half of a float32 with interesting lower halves."""
    upper = np.arange(65536, dtype=np.uint32) << 16
    bits = np.concatenate([upper | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    x = bits.view(np.float32)
    tiny = np.abs(x) < np.finfo(np.float32).tiny  # XLA flushes what float32 cannot hold normally
    x = np.where(tiny, np.float32(0), x)
    got, want = np.asarray(jax.jit(lambda x: encode(x, name))(x)), dtypes.from_float32(x, name)
    assert got.dtype == want.dtype
    nan = np.isnan(want.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
    if name in ("bfloat16", "float16"):  # results below the smallest normal number may be flushed too
        nan |= np.abs(want.astype(np.float32)) < np.finfo(np.float32).tiny
    size = f"u{want.dtype.itemsize}"
    np.testing.assert_array_equal(got.view(size)[~nan], want.view(size)[~nan])
