"""Making tensors."""

from __future__ import annotations

import warnings

import ml_dtypes
import numpy as np
import pytest

from opennki.dialects.neuronxcc import language as nl
from opennki.errors import NkiWarning
from opennki.lang.memory import psum as allocated_psum
from opennki.lang.memory import sbuf as allocated_sbuf

from .harness import BF16, FLOATS, FP32, INTS, close, fails, kernel_of, ops, run, sample, tiles

pytestmark = pytest.mark.oracle
X = sample((4, 6))


@pytest.mark.parametrize(
    "dtype", [*FLOATS, *INTS, np.dtype(np.bool_), np.dtype(ml_dtypes.float8_e5m2)], ids=str
)
def test_fills(dtype):
    def body(t):
        return nl.zeros((4, 6), dtype), nl.ones((4, 6), dtype), nl.full((4, 6), 3, dtype)

    def kernel(x):
        outs = []
        for t in body(x):
            out = nl.ndarray((4, 6), dtype, buffer=nl.shared_hbm)
            nl.store(out, t)
            outs.append(out)
        return tuple(outs)

    for got, number in zip(run(kernel, X), (0, 1, 3), strict=True):
        close(got.astype(np.float32), np.full((4, 6), min(number, 1) if dtype == np.bool_ else number))


@pytest.mark.parametrize("buffer", [nl.sbuf, nl.psum, None])
@pytest.mark.parametrize("shape", [(2, nl.par_dim(16), 5), (2, 3, nl.par_dim(16), 5), (nl.par_dim(16), 4, 5)])
def test_block_dimensions_are_filled_by_one_memset(buffer, shape):
    blocks = tuple(int(n) for n in shape[: [isinstance(n, type(nl.par_dim(1))) for n in shape].index(True)])

    def kernel(x):
        out = nl.ndarray(shape, nl.float32, buffer=nl.shared_hbm)
        t = nl.full(shape, 2.5, nl.float32, buffer=buffer)
        for index in np.ndindex(blocks):
            nl.store(out[index], t[index] if index else t)
        return out

    close(run(kernel, X), np.full(tuple(int(n) for n in shape), 2.5))
    assert ops(kernel, X).count("memset") == 1


def test_values_of_other_kinds():
    def kernel(x):
        out = nl.ndarray((4, 6), nl.bfloat16, buffer=nl.shared_hbm)
        nl.store(out, nl.full((4, 6), fill_value=nl.finfo(nl.bfloat16).min, dtype=nl.bfloat16))
        return out

    close(run(kernel, X), np.full((4, 6), float(ml_dtypes.finfo(BF16).min)))


def test_like():
    x = sample((16, 5), BF16)

    def kernel(x):
        t = nl.load(x)
        zero, other, empty = nl.zeros_like(t), nl.zeros_like(t, dtype=nl.float32), nl.empty_like(t)
        assert zero.dtype == t.dtype and other.dtype == np.float32 and empty.shape == t.shape
        block = nl.zeros_like(nl.ndarray((3, nl.par_dim(8), 2), nl.int32))
        assert block.shape == (3, 8, 2) and block.block == 1
        hbm = nl.empty_like(x, buffer=nl.shared_hbm)
        empty[...] = zero + t
        nl.store(hbm, empty)
        return hbm

    close(run(kernel, x), x)


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint8, np.bool_, ml_dtypes.bfloat16])
def test_shared_constant(dtype):
    a = (np.arange(40) % 2).reshape(8, 5).astype(dtype)
    close(tiles(lambda t: nl.load(nl.shared_constant(a)), X).astype(np.float32), a.astype(np.float32))
    close(tiles(lambda t: nl.load(nl.shared_constant(a, dtype=nl.bfloat16)), X), a.astype(np.float32))


def test_equal_constants_are_one():
    def kernel(x):
        out = nl.ndarray((128, 128), nl.uint8, buffer=nl.shared_hbm)
        a, b = nl.shared_identity_matrix(128), nl.shared_identity_matrix(n=128)
        assert a.access.alloc is b.access.alloc and a.dtype == np.uint8
        assert nl.shared_identity_matrix(128, dtype=nl.bfloat16).access.alloc is not a.access.alloc
        nl.store(out, nl.load(a))
        return out

    close(run(kernel, X), np.eye(128))


def test_facts_of_a_tensor():
    def kernel(x):
        t = nl.ndarray((nl.par_dim(128), 4), nl.float16, buffer=nl.psum, name="acc")
        assert t.buffer is nl.psum and t.name == "acc" and t.itemsize == 2 and t.ndim == 2
        assert t.shape_2d == (128, 4) and nl.ndarray((8, 3, 4), nl.float16).shape_2d == (8, 12)
        assert nl.ndarray([3, 4], "float32").buffer is nl.sbuf and nl.hbm is nl.private_hbm
        assert nl.gemm_grid().p.shape == (128, 512) and nl.gemm_stationary_grid().x.shape == (128, 128)
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.load(x))
        return out

    close(run(kernel, X), X)


def test_private_hbm_is_memory_of_the_program():
    def kernel(x):
        scratch = nl.ndarray(x.shape, x.dtype, buffer=nl.private_hbm)
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        for i in nl.sequential_range(3):
            nl.store(scratch, nl.load(x) * i)
            nl.store(out, nl.load(scratch))
        return out

    close(run(kernel, X), X * 2)


def made(fn):
    def kernel(x):
        fn(x)
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.load(x))
        return out

    return kernel


def in_loop(x):
    for _i in nl.affine_range(2):
        nl.ndarray((4, 6), nl.float32, buffer=nl.shared_hbm)


@pytest.mark.parametrize(
    "code,fn",
    [
        ("err_num_partition_exceed_arch_limit", lambda x: nl.ndarray((129, 4), nl.float32)),
        ("err_num_partition_exceed_arch_limit", lambda x: nl.zeros((2, nl.par_dim(200), 4), nl.float32)),
        (
            "err_hbm_tensor_with_init_value_not_supported",
            lambda x: nl.zeros((4, 4), nl.float32, buffer=nl.hbm),
        ),
        (
            "err_hbm_tensor_with_init_value_not_supported",
            lambda x: nl.full((4, 4), 1, nl.float32, buffer=nl.shared_hbm),
        ),
        (
            "err_tensor_creation_on_scratchpad_with_init_value_not_supported",
            lambda x: nl.ones((4, 4), nl.float32, buffer=allocated_sbuf.mod_alloc(base_addr=0)),
        ),
        ("err_shared_hbm_must_in_kernel_level", in_loop),
        ("", lambda x: nl.ndarray((128,), nl.float32)),
        ("", lambda x: nl.ndarray((4, 2.5), nl.float32)),
        ("", lambda x: nl.ndarray((4, 0), nl.float32)),
        ("", lambda x: nl.ndarray((nl.par_dim(4), nl.par_dim(4)), nl.float32)),
        ("", lambda x: nl.ndarray((4, 4), "no_dtype")),
        ("", lambda x: nl.ndarray((4, 4), nl.float32, buffer="cache")),
        ("", lambda x: nl.ndarray((4, 4), nl.float32, init=3)),
        ("", lambda x: nl.zeros_like(3)),
        ("", lambda x: nl.full((4, 4), nl.load(x), nl.float32)),
    ],
)
def test_errors(code, fn):
    fails(code, made(fn), X)


def test_error_of_one_dimension_says_what_to_write():
    assert "(128, 1)" in str(fails("", made(lambda x: nl.ndarray((128,), nl.float32)), X))


def test_flag_lifts_the_rule_of_shared_hbm():
    kernel = kernel_of(made(in_loop), experimental_flags="skip-non-top-level-shared-hbm-check")
    close(kernel.simulate(X), X)


def test_flag_of_a_callee_lifts_the_rule_in_its_body_alone():
    flag = "skip-non-top-level-shared-hbm-check"
    inner = kernel_of(lambda x: nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm), experimental_flags=flag)

    def kernel(x, again):
        spare, out = inner(x), nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nl.store(spare, nl.load(x))
        nl.store(out, nl.load(spare))
        if again:
            in_loop(x)
        return out

    close(run(kernel, X, False), X)
    fails("err_shared_hbm_must_in_kernel_level", kernel, X, True)


def test_large_psum_tile_is_a_warning():
    with pytest.warns(NkiWarning, match="bank"):
        run(made(lambda x: nl.ndarray((128, 513), nl.float32, buffer=nl.psum)), X)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NkiWarning)
        run(made(lambda x: nl.ndarray((128, 512), nl.float32, buffer=nl.psum)), X)


def test_direct_allocation_is_noted():
    x, y = sample((32, 16), FP32, 1), sample((16, 8), FP32, 2)

    def product(x, y):
        nl.ndarray((32, 8), nl.float32, buffer=allocated_psum.mod_alloc(base_bank=0))
        out = nl.ndarray((32, 8), x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.matmul(nl.load(x), nl.load(y)))
        return out

    fails("err_transpose_on_tensor_engine_not_allowed_in_allocated_kernel", product, x, y)


def test_a_fill_whose_place_the_compiler_chooses_may_be_allocated_directly():
    x = sample((16, 8), FP32, 3)

    def kernel(x):
        out = nl.ndarray((16, 8), x.dtype, buffer=nl.shared_hbm)
        tile = nl.ndarray((16, 8), x.dtype, buffer=allocated_sbuf.mod_alloc(base_addr=0))
        zero = nl.zeros((16, 8), x.dtype, buffer=allocated_sbuf.mod_alloc(base_addr=1024), lazy_initialization=True)
        tile[...] = nl.load(x)
        zero[...] = nl.add(zero, tile, max_free_vec_size=512)
        nl.store(out, zero)
        return out

    close(run(kernel, x), x)
