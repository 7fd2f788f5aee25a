"""Errors of activations and of direct allocation."""

from __future__ import annotations

import numpy as np
import pytest
from tests.errors.harness import A, Invalid

from opennki import simulate_kernel
from opennki.dialects.neuronxcc import compiler as ncc
from opennki.dialects.neuronxcc import isa as nisa
from opennki.dialects.neuronxcc import language as nl

invalid = Invalid()


def place(start):
    """A placement in SBUF at a byte address."""
    return ncc.sbuf.alloc(lambda idx, pdim, fdim: (0, start))


@invalid("err_activation_bias_invalid_type", "int32", "bias, ", kind=TypeError)
def integer_bias(x):
    bias = nl.zeros((128, 1), dtype=nl.int32)
    return nisa.activation(nl.exp, nl.load(x), bias=bias)  # HERE


@invalid("err_activation_bias_invalid_type", "(128, 512)", kind=TypeError)
def bias_of_every_element(x):
    tile = nl.load(x)
    return nisa.activation(nl.exp, tile, bias=tile)  # HERE


@invalid("err_activation_bias_invalid_type", "activation_reduce", kind=TypeError)
def integer_bias_of_a_reduction(x):
    bias, total = nl.zeros((128, 1), dtype=nl.int32), nl.ndarray((128, 1), dtype=nl.float32)
    return nisa.activation_reduce(nl.exp, nl.load(x), reduce_op=np.add, reduce_res=total, bias=bias)  # HERE


@invalid("err_activation_scale_invalid_type", "bfloat16", "float32", kind=TypeError)
def bfloat16_scale(x):
    scale = nl.ones((128, 1), dtype=nl.bfloat16)
    return nisa.activation(nl.exp, nl.load(x), scale=scale)  # HERE


@invalid("err_activation_scale_scalar_or_vector", "(128, 2)", "[P, 1]", kind=ValueError)
def scale_of_two_columns(x):
    scale = nl.ones((128, 2), dtype=nl.float32)
    return nisa.activation(nl.exp, nl.load(x), scale=scale)  # HERE


@invalid("err_num_partition_mismatch", "64 partitions", kind=ValueError)
def bias_of_fewer_partitions(x):
    bias = nl.zeros((64, 1), dtype=nl.float32)
    return nisa.activation(nl.exp, nl.load(x), bias=bias)  # HERE


@invalid("", "op is", kind=TypeError)
def operator_that_is_no_activation(x):
    return nisa.activation(np.maximum, nl.load(x))  # HERE


@invalid("", "reduce_op", "np.add", kind=ValueError)
def reduction_by_maximum_on_trn1(x):
    total = nl.ndarray((128, 1), dtype=nl.float32)
    return nisa.activation_reduce(nl.exp, nl.load(x), reduce_op=np.max, reduce_res=total)  # HERE


@invalid("err_bias_tensor_must_be_specified_in_allocation", "activation", "zero [P, 1] tile", kind=ValueError)
def activation_without_bias_in_an_allocated_kernel(x):
    tile = nl.ndarray((128, 512), dtype=x.dtype, buffer=place(0))
    tile[...] = nl.load(x)
    return nl.exp(tile)  # HERE


@invalid("err_bias_tensor_must_be_specified_in_allocation", kind=ValueError)
def isa_activation_without_bias_in_an_allocated_kernel(x):
    tile = nl.ndarray((128, 512), dtype=x.dtype, buffer=place(0))
    tile[...] = nl.load(x)
    return nisa.activation(nl.exp, tile)  # HERE


@invalid("err_bias_tensor_must_be_specified_in_allocation", kind=ValueError)
def activation_before_the_first_placement(x):
    y = nl.exp(nl.load(x))  # HERE
    tile = nl.ndarray((128, 512), dtype=x.dtype, buffer=place(0))
    tile[...] = y
    return tile


@invalid("err_transpose_on_tensor_engine_not_allowed_in_allocated_kernel", "nc_transpose", kind=ValueError)
def transpose_in_an_allocated_kernel(x):
    tile = nl.ndarray((128, 128), dtype=x.dtype, buffer=place(0))
    tile[...] = nl.load(x[:, 0:128])
    return nisa.nc_transpose(tile)  # HERE


@invalid("err_transpose_on_tensor_engine_not_allowed_in_allocated_kernel", "nl.matmul", "transpose_x", kind=ValueError)
def matmul_in_an_allocated_kernel(x):
    tile = nl.ndarray((128, 128), dtype=x.dtype, buffer=place(0))
    tile[...] = nl.load(x[:, 0:128])
    return nl.matmul(tile, tile)  # HERE


@invalid("err_tensor_creation_on_scratchpad_with_init_value_not_supported", "nisa.memset", kind=ValueError)
def zeros_with_a_placement(x):
    return nl.zeros((128, 4), dtype=x.dtype, buffer=place(0))  # HERE


@invalid("err_tensor_creation_on_scratchpad_with_init_value_not_supported", kind=ValueError)
def full_with_a_placement_in_psum(x):
    return nl.full((128, 4), 1.5, dtype=x.dtype, buffer=ncc.psum.mod_alloc(base_bank=0))  # HERE


test_invalid = invalid.test()


def test_activations_that_are_fine():
    def kernel(x):
        out = nl.ndarray((128, 512), dtype=x.dtype, buffer=nl.shared_hbm)
        bias, scale = nl.full((128, 1), 0.5, dtype=nl.float16), nl.full((128, 1), -0.25, dtype=nl.float32)
        nl.store(out, nisa.activation(nl.exp, nl.load(x), bias=bias, scale=scale))
        return out
    np.testing.assert_allclose(simulate_kernel(kernel, A), np.exp(A * -0.25 + 0.5), rtol=1e-5)


def test_an_allocated_kernel_that_is_fine():
    def kernel(x):
        out = nl.ndarray((128, 128), dtype=x.dtype, buffer=nl.shared_hbm)
        tile = nl.ndarray((128, 128), dtype=x.dtype, buffer=place(0))
        zero = nl.ndarray((128, 1), dtype=nl.float32, buffer=place(512))
        result = nl.ndarray((128, 128), dtype=x.dtype, buffer=place(1024))
        tile[...] = nl.load(x[:, 0:128])
        zero[...] = nisa.memset((128, 1), value=0, dtype=nl.float32)
        result[...] = nisa.activation(nl.exp, tile, bias=zero, scale=-1.0)
        nl.store(out, result)
        return out
    np.testing.assert_allclose(simulate_kernel(kernel, A), np.exp(-A[:, :128]), rtol=1e-5)


@pytest.mark.parametrize("target", ["trn1", "trn2"])
def test_reciprocal_takes_no_bias_on_trn1(target):
    from opennki import jit

    def kernel(x):
        out = nl.ndarray((128, 512), dtype=x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nisa.activation(nl.reciprocal, nl.load(x), bias=nl.ones((128, 1), dtype=nl.float32)))
        return out
    run = jit(kernel, mode="simulation", platform_target=target)
    if target == "trn2":
        np.testing.assert_allclose(run(A), 1 / (A + 1), rtol=1e-5)
    else:
        with pytest.raises(ValueError, match="no bias before trn2"):
            run(A)
