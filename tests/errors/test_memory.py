"""Errors of memories, buffers, shapes and limits."""

from __future__ import annotations

import numpy as np
from tests.errors.harness import A, Invalid

from opennki.dialects.neuronxcc import isa as nisa
from opennki.dialects.neuronxcc import language as nl

invalid = Invalid()


@invalid("err_unsupported_memory", "HBM", "nl.load", kind=TypeError)
def arithmetic_on_hbm(x):
    return nl.exp(x)  # HERE


@invalid("err_unsupported_memory", "HBM", kind=TypeError)
def operator_on_hbm(x):
    tile = nl.load(x)
    return tile + x  # HERE


@invalid("err_unsupported_memory", "on chip", "nl.copy", kind=TypeError)
def load_of_a_tile(x):
    tile = nl.load(x)
    return nl.load(tile)  # HERE


@invalid("err_unsupported_memory", "on chip", kind=TypeError)
def store_to_a_tile(x):
    tile = nl.load(x)
    nl.store(tile, tile)  # HERE


@invalid("err_unsupported_memory", "HBM", kind=TypeError)
def store_of_hbm(x):
    out = nl.ndarray((128, 512), dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, x)  # HERE
    return out


@invalid("err_unsupported_memory", "PSUM", kind=TypeError)
def matmul_result_in_sbuf_operand_in_psum(x):
    acc = nl.ndarray((128, 128), dtype=nl.float32, buffer=nl.psum)
    return nisa.nc_matmul(acc, nl.load(x))  # HERE


@invalid("err_unsupported_memory", "HBM", kind=TypeError)
def isa_operand_in_hbm(x):
    return nisa.tensor_tensor(x, x, nl.add)  # HERE


@invalid("err_unsupported_memory", "both in PSUM", kind=TypeError)
def two_operands_in_psum(x):
    a = nl.ndarray((128, 128), dtype=nl.float32, buffer=nl.psum)
    b = nl.ndarray((128, 128), dtype=nl.float32, buffer=nl.psum)
    return nisa.tensor_tensor(a, b, nl.add)  # HERE


@invalid("err_unsupported_memory", "assigned", kind=TypeError)
def hbm_assigned_to_a_tile(x):
    tile = nl.ndarray((128, 512), dtype=x.dtype, buffer=nl.sbuf)
    tile[...] = x  # HERE
    return tile


@invalid("err_hbm_tensor_with_init_value_not_supported", "nl.shared_hbm", kind=ValueError)
def zeros_in_hbm(x):
    return nl.zeros((128, 512), dtype=x.dtype, buffer=nl.shared_hbm)  # HERE


@invalid("err_hbm_tensor_with_init_value_not_supported", kind=ValueError)
def full_in_private_hbm(x):
    return nl.full((128, 512), 2.0, dtype=x.dtype, buffer=nl.private_hbm)  # HERE


@invalid("err_num_partition_exceed_arch_limit", "129 partitions", "nl.tile_size.pmax", kind=ValueError)
def tile_with_too_many_partitions(x):
    return nl.ndarray((129, 4), dtype=x.dtype)  # HERE


@invalid("err_num_partition_exceed_arch_limit", "nl.load", "(512, 128)", kind=ValueError)
def load_with_too_many_partitions(x):
    return nl.load(x.reshape((512, 128)))  # HERE


@invalid("err_num_partition_exceed_arch_limit", "200", kind=ValueError)
def broadcast_to_too_many_partitions(x):
    return nl.broadcast_to(nl.load(x[0:1, 0:8]), shape=(200, 8))  # HERE


@invalid("err_num_partition_mismatch", "(128, 512)", "(64, 512)", kind=ValueError)
def operator_on_other_partitions(x):
    return nl.load(x) + nl.load(x[0:64])  # HERE


@invalid("err_num_partition_mismatch", "64 partitions", kind=ValueError)
def isa_operands_with_other_partitions(x):
    return nisa.tensor_tensor(nl.load(x), nl.load(x[0:64]), nl.add)  # HERE


@invalid("", "do not broadcast", kind=ValueError)
def free_dimensions_that_do_not_broadcast(x):
    return nl.load(x) + nl.load(x[:, 0:100])  # HERE


@invalid("err_size_of_dimension_exceed_arch_limit", "nl.transpose", "128", kind=ValueError)
def transpose_of_a_wide_tile(x):
    return nl.transpose(nl.load(x))  # HERE


@invalid("err_size_of_dimension_exceed_arch_limit", "512", kind=ValueError)
def moving_tile_too_wide(x):
    w = nl.zeros((128, 513), dtype=nl.float32)
    return nisa.nc_matmul(nl.load(x[:, 0:128]), w)  # HERE


@invalid("err_size_of_dimension_exceed_arch_limit", "129", kind=ValueError)
def stationary_tile_too_wide(x):
    tile = nl.load(x)
    return nisa.nc_matmul(tile[:, 0:129], tile)  # HERE


@invalid("err_size_of_dimension_exceed_arch_limit", "bn_stats", "513", kind=ValueError)
def statistics_of_too_many_elements(x):
    return nisa.bn_stats(nl.zeros((128, 513), dtype=nl.float32))  # HERE


@invalid("err_size_of_dimension_exceed_arch_limit", "Vector Engine takes 32", kind=ValueError)
def vector_transpose_too_large(x):
    return nisa.nc_transpose(nl.load(x[0:64, 0:16]), engine=nisa.vector_engine)  # HERE


@invalid("err_exceed_max_supported_dimension", "3 dimensions", kind=ValueError)
def transpose_of_three_dimensions(x):
    return nl.transpose(nl.zeros((64, 4, 4), dtype=x.dtype))  # HERE


@invalid("err_exceed_max_supported_dimension", "load_transpose2d", kind=ValueError)
def load_transpose_of_three_dimensions(x):
    return nl.load_transpose2d(x.reshape((16, 8, 512)))  # HERE


@invalid("err_failed_to_infer_tile_from_local_tensor", "partition dimension", "t[i]", kind=ValueError)
def compute_on_block_dimensions(x):
    blocks = nl.zeros((4, nl.par_dim(128), 16), dtype=x.dtype)
    return nl.exp(blocks)  # HERE


@invalid("err_failed_to_infer_tile_from_local_tensor", kind=ValueError)
def isa_compute_on_block_dimensions(x):
    blocks = nl.zeros((4, nl.par_dim(128), 16), dtype=x.dtype)
    return nisa.activation(nl.exp, blocks)  # HERE


@invalid("err_leading_dimension_of_tensor_must_be_partition", "axis 0", kind=ValueError)
def dimension_before_the_partitions(x):
    return nl.expand_dims(nl.load(x), 0)  # HERE


@invalid("err_leading_dimension_of_tensor_must_be_partition", "nl.rand", kind=ValueError)
def random_tile_with_block_dimensions(x):
    return nl.rand((2, nl.par_dim(128), 4), dtype=x.dtype)  # HERE


@invalid("err_store_dst_shape_smaller_than_other_shape", "(128, 512)", "(128, 100)", kind=ValueError)
def store_to_a_smaller_tensor(x):
    out = nl.ndarray((128, 100), dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.load(x))  # HERE
    return out


@invalid("err_store_dst_shape_smaller_than_other_shape", "assigned", kind=ValueError)
def assignment_to_a_smaller_tile(x):
    tile = nl.ndarray((128, 1), dtype=x.dtype)
    tile[...] = nl.load(x)  # HERE
    return tile


@invalid("err_store_dst_shape_smaller_than_other_shape", "updated", kind=ValueError)
def update_of_a_smaller_tile(x):
    tile = nl.zeros((128, 1), dtype=x.dtype)
    tile += nl.load(x)  # HERE
    return tile


@invalid("", "without a free dimension", "(128, 1)", kind=ValueError)
def tile_of_one_dimension(x):
    return nl.ndarray((128,), dtype=x.dtype)  # HERE


@invalid("", "integers", kind=TypeError)
def float_size(x):
    return nl.ndarray((128, x.shape[1] / 2), dtype=x.dtype)  # HERE


@invalid("", "size 0", kind=ValueError)
def tile_without_elements(x):
    return nl.ndarray((128, 0), dtype=x.dtype)  # HERE


@invalid("", "dtype", kind=TypeError)
def unknown_dtype(x):
    return nl.ndarray((128, 4), dtype="float31")  # HERE


@invalid("", "buffer", kind=TypeError)
def unknown_buffer(x):
    return nl.ndarray((128, 4), dtype=x.dtype, buffer="dram")  # HERE


@invalid("", "contracted", kind=ValueError)
def matmul_of_shapes_that_do_not_fit(x):
    tile = nl.load(x)
    return nl.matmul(tile[:, 0:64], tile)  # HERE




@invalid("", "expected (128, 511)", kind=ValueError)
def asserted_shape(x):
    return x.assert_shape((128, 511))  # HERE


@invalid("", "NumPy array", "nl.shared_constant", kind=TypeError)
def numpy_operand(x):
    return nl.add(nl.load(x), A)  # HERE


@invalid("", "NumPy array", "nl.shared_constant", kind=TypeError)
def numpy_operand_of_an_operator(x):
    return nl.load(x) * A  # HERE


@invalid("", "NumPy array", "nl.shared_constant", kind=TypeError)
def numpy_operand_on_the_left(x):
    return A - nl.load(x)  # HERE


@invalid("", "np.exp", "nl.exp", kind=TypeError)
def numpy_function_of_a_tile(x):
    return np.exp(nl.load(x))  # HERE


@invalid("", "ndarray", "argument", kind=TypeError)
def numpy_array_loaded(x):
    return nl.load(A)  # HERE


@invalid("", "integers", "bitwise", kind=TypeError)
def bitwise_on_floats(x):
    tile = nl.load(x)
    return nl.bitwise_and(tile, tile)  # HERE


test_invalid = invalid.test()
