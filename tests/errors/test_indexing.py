"""Errors of indexing: codes, lines, words."""

from __future__ import annotations

import numpy as np
import pytest
from tests.errors.harness import SMALL, A, Invalid, check_report, failure

from opennki import simulate_kernel
from opennki.dialects.neuronxcc import language as nl

invalid = Invalid()


@invalid("err_1d_arange_not_supported", "one-dimensional", "[:, None]")
def bare_arange(x):
    out = nl.ndarray((128, 1), dtype=x.dtype, buffer=nl.shared_hbm)
    i = nl.arange(128)
    tile = nl.load(x[i])  # HERE
    nl.store(out, tile)
    return out


@invalid("err_1d_arange_not_supported", "one-dimensional")
def bare_arange_beside_an_int(x):
    tile = nl.load(x)
    return tile[nl.arange(16), 3]  # HERE


@invalid("err_tensor_access_out_of_bound", "dimension 0", "128", "from 1 to 128", kind=IndexError)
def static_index_past_the_end(x):
    i = nl.arange(128)[:, None]
    t = nl.load(x[i + 1, nl.arange(512)[None, :]])  # HERE
    return t


@invalid("err_tensor_access_out_of_bound", "dimension 1", "-1", kind=IndexError)
def static_index_before_the_start(x):
    return nl.load(x[nl.arange(128)[:, None], nl.arange(512)[None, :] - 1])  # HERE


@invalid("err_tensor_access_out_of_bound", "slice 0:513", "512 elements", kind=IndexError)
def slice_past_the_end(x):
    return nl.load(x[:, 0:513])  # HERE


@invalid("err_tensor_access_out_of_bound", "3 indices", "2 dimensions", kind=IndexError)
def too_many_indices(x):
    return nl.load(x[0, 1, 2])  # HERE


@invalid("err_tensor_access_out_of_bound", "dimension 0", kind=IndexError)
def integer_past_the_end(x):
    return nl.load(x[128, 0:100])  # HERE


@invalid("err_tensor_access_out_of_bound", "dimension 0", kind=IndexError)
def negative_integer_before_the_start(x):
    return nl.load(x[-129, 0:100])  # HERE


@invalid("err_tensor_access_out_of_bound", "dimension 1", "from", "599", kind=IndexError)
def loop_index_past_the_end(x):
    out = nl.ndarray((128, 512), dtype=x.dtype, buffer=nl.shared_hbm)
    for k in nl.affine_range(6):
        tile = nl.load(x[:, 0:100])
        nl.store(out[:, nl.ds(k * 100, 100)], tile)  # HERE
    return out


@invalid("err_tensor_access_out_of_bound", "dimension 1", kind=IndexError)
def sbuf_tile_past_the_end(x):
    tile = nl.load(x)
    return nl.exp(tile[:, nl.ds(500, 13)])  # HERE


@invalid("err_tensor_access_out_of_bound", "dimension 0", grid=(3,), kind=IndexError)
def program_id_past_the_end(x):
    out = nl.ndarray((3, 64, 512), dtype=x.dtype, buffer=nl.shared_hbm)
    p = nl.program_id(0)
    tile = nl.load(x[nl.ds(p * 64, 64), :])  # HERE
    nl.store(out[p], tile)
    return out


@invalid("err_unsupported_mixing_basic_advanced_tensor_indexing", "basic", "advanced")
def slice_and_arange(x):
    return nl.load(x[nl.arange(128)[:, None], 0:16])  # HERE


@invalid("err_unsupported_mixing_basic_advanced_tensor_indexing")
def ellipsis_and_arange(x):
    return nl.load(x[..., nl.arange(16)[None, :]])  # HERE


@invalid("err_unsupported_mixing_basic_advanced_tensor_indexing")
def ds_and_mgrid(x):
    i = nl.mgrid[0:128, 0:16]
    return nl.load(x[nl.ds(0, 128), i[1]])  # HERE


@invalid("err_cannot_assign_to_index", "index expression")
def assignment_to_an_index(x):
    i = nl.arange(128)[:, None]
    i[0, 0] = 3  # HERE
    return nl.load(x[i, 0])


@invalid("err_cannot_assign_to_index", "mask")
def assignment_to_a_mask(x):
    m = nl.arange(128)[:, None] < 3
    m[0, 0] = True  # HERE
    return nl.load(x, mask=m)


@invalid("", "index", "3.5", kind=TypeError)
def float_index(x):
    return nl.load(x[3.5])  # HERE


@invalid("", "'row'", kind=TypeError)
def text_index(x):
    return nl.load(x["row"])  # HERE


@invalid("", "do not broadcast", kind=ValueError)
def indices_that_do_not_broadcast(x):
    return nl.load(x[nl.arange(128)[:, None], nl.arange(64)[:, None]])  # HERE


@invalid("", "not affine", kind=TypeError)
def index_modulo(x):
    i = nl.arange(128)[:, None]
    return nl.load(x[i, nl.arange(512)[None, :] % 7])  # HERE


@invalid("", "multiplied", "affine", kind=TypeError)
def product_of_indices(x):
    i = nl.arange(16)[:, None]
    return nl.load(x[i, i * nl.arange(4)[None, :]])  # HERE


@invalid("", "step", "positive", kind=IndexError)
def backward_slice(x):
    return nl.load(x[:, 10:0:-1])  # HERE


@invalid("", "...", kind=ValueError)
def two_ellipses(x):
    return nl.load(x[..., 0, ...])  # HERE


@invalid("", "reshape", kind=ValueError)
def reshape_to_another_size(x):
    return nl.load(x.reshape((128, 500)))  # HERE


@invalid("", "iterated", "affine_range", kind=TypeError)
def loop_over_an_arange(x):
    for i in nl.arange(4):  # HERE
        nl.load(x[i])
    return x


@invalid("err_indirect_indices_free_dim", "[N, 1]")
def index_tile_with_several_columns(x):
    wide = nl.zeros((128, 4), dtype=nl.int32)
    return nl.load(x[wide, nl.arange(512)[None, :]])  # HERE


@invalid("err_indirect_indices_free_dim", "partitions")
def index_tile_on_the_free_dimension(x):
    idx = nl.zeros((128, 1), dtype=nl.int32)
    i = nl.arange(128)[:, None]
    return nl.load(x[i, idx])  # HERE


@invalid("err_indirect_indices_are_not_supported_with_nki_api", "load_transpose2d")
def transpose_of_a_gather(x):
    idx = nl.zeros((64, 1), dtype=nl.int32)
    return nl.load_transpose2d(x[idx, nl.arange(16)[None, :]])  # HERE


@invalid("err_indirect_indices_are_not_supported_with_nki_api", "runtime index")
def arithmetic_on_a_runtime_index(x):
    tile = nl.load(x)
    at = nl.zeros((1, 1), dtype=nl.int32)
    return nl.exp(tile[nl.arange(128)[:, None], at[0, 0] + nl.arange(16)[None, :]])  # HERE


@invalid("err_copy_dynamic_indirect_indices_not_natively_supported", "assignment", "tensor_copy_dynamic_src")
def assignment_from_a_runtime_index(x):
    tile = nl.load(x)
    out = nl.ndarray((128, 16), dtype=x.dtype, buffer=nl.sbuf)
    at = nl.zeros((1, 1), dtype=nl.int32)
    out[...] = tile[nl.arange(128)[:, None], at[0, 0] + nl.arange(16)[None, :]]  # HERE
    return out


@invalid("err_copy_dynamic_indirect_indices_not_natively_supported", "nl.copy")
def copy_from_a_runtime_index(x):
    tile = nl.load(x)
    at = nl.zeros((1, 1), dtype=nl.int32)
    return nl.copy(tile[nl.arange(128)[:, None], at[0, 0] + nl.arange(16)[None, :]])  # HERE


@invalid("", "integer", kind=TypeError)
def float_index_tile(x):
    idx = nl.zeros((64, 1), dtype=nl.float32)
    return nl.load(x[idx, nl.arange(16)[None, :]])  # HERE


@invalid("err_unsupported_memory", "index tile", "nl.load", args=(A, np.zeros((64, 1), np.int32)), kind=TypeError)
def index_tile_in_hbm(x, idx):
    return nl.load(x[idx, nl.arange(16)[None, :]])  # HERE


test_invalid = invalid.test()


def gather(x, idx):
    out = nl.ndarray((idx.shape[0], x.shape[1]), dtype=x.dtype, buffer=nl.shared_hbm)
    rows = nl.load(idx)
    tile = nl.load(x[rows, nl.arange(x.shape[1])[None, :]])  # HERE
    nl.store(out, tile)
    return out


def scatter(x, idx):
    out = nl.ndarray((200, x.shape[1]), dtype=x.dtype, buffer=nl.shared_hbm)
    rows = nl.load(idx)
    nl.store(out[rows, nl.arange(x.shape[1])[None, :]], nl.load(x))  # HERE
    return out


@pytest.mark.parametrize("kernel", [gather, scatter])
@pytest.mark.parametrize("eager", [False, True])
def test_runtime_index_outside(kernel, eager):
    """The vendor's simulator raises a plain IndexError about the flattened tensor; its cause is our report."""
    rows = np.array([[0], [2], [700]], np.int32)
    error = failure(kernel, SMALL, rows, kind=IndexError, eager=eager)
    size = SMALL.size if kernel is gather else 800
    assert type(error) is IndexError and str(error) == f"index {700 * 4} is out of bounds for axis 0 with size {size}"
    check_report(error.__cause__, kernel, "err_tensor_access_out_of_bound", ("runtime index", "700", "oob_mode"))


@pytest.mark.parametrize("value", [-1, -2**31, 2**31 - 1])
def test_runtime_index_extremes(value):
    rows = np.array([[0], [value], [1]], np.int32)
    error = failure(gather, SMALL, rows, kind=IndexError)
    check_report(error.__cause__, gather, "err_tensor_access_out_of_bound", (str(value),))


def test_runtime_index_inside():
    rows = np.array([[2], [0], [2]], np.int32)
    np.testing.assert_array_equal(simulate_kernel(gather, SMALL, rows), SMALL[[2, 0, 2]])


def test_index_that_a_mask_keeps_inside():
    def kernel(x):
        out = nl.ndarray((100, 512), dtype=x.dtype, buffer=nl.shared_hbm)
        i, j = nl.arange(128)[:, None], nl.arange(512)[None, :]
        nl.store(out[i, j], nl.load(x[i, j], mask=i < 100), mask=i < 100)
        return out
    np.testing.assert_array_equal(simulate_kernel(kernel, A), A[:100])


def masked_too_far(x):
    out = nl.ndarray((100, 512), dtype=x.dtype, buffer=nl.shared_hbm)
    i, j = nl.arange(128)[:, None], nl.arange(512)[None, :]
    tile = nl.load(x[i, j])
    nl.store(out[i, j], tile, mask=i < 101)  # HERE
    return out


def masked_too_far_in_the_last_iteration(x):
    out = nl.ndarray((200, 512), dtype=x.dtype, buffer=nl.shared_hbm)
    i, j = nl.arange(64)[:, None], nl.arange(512)[None, :]
    for k in nl.affine_range(4):
        tile = nl.load(x[i, j])
        nl.store(out[k * 64 + i, j], tile, mask=k * 64 + i < 201)  # HERE
    return out


@pytest.mark.parametrize("kernel", [masked_too_far, masked_too_far_in_the_last_iteration])
@pytest.mark.parametrize("checks", ["full", "fast"])
def test_mask_that_lets_too_much_pass(kernel, checks):
    error = failure(kernel, A, kind=IndexError, checks=checks)
    check_report(error, kernel, "err_tensor_access_out_of_bound", ("dimension 0",))
