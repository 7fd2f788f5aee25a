"""Errors of masks and of conditions on index expressions."""

from __future__ import annotations

import numpy as np
from tests.errors.harness import A, Invalid

from opennki import simulate_kernel
from opennki.dialects.neuronxcc import language as nl

invalid = Invalid()


@invalid("err_unsupported_expression_in_mask", "mask is", "nl.where", kind=TypeError)
def tile_as_mask(x):
    tile = nl.load(x)
    return nl.exp(tile, mask=tile > 0)  # HERE


@invalid("err_unsupported_expression_in_mask", "values of a tensor", kind=TypeError)
def index_compared_with_a_tile(x):
    tile = nl.load(x)
    m = nl.arange(512)[None, :] < tile  # HERE
    return nl.exp(tile, mask=m)


@invalid("err_unsupported_expression_in_mask", "joined by |", kind=TypeError)
def masks_joined_by_or(x):
    i, j = nl.arange(128)[:, None], nl.arange(512)[None, :]
    return nl.load(x[i, j], mask=(i < 3) | (j < 3))  # HERE


@invalid("err_unsupported_expression_in_mask", "!=", kind=TypeError)
def not_equal_in_a_mask(x):
    i, j = nl.arange(128)[:, None], nl.arange(512)[None, :]
    return nl.load(x[i, j], mask=i != 3)  # HERE


@invalid("err_unsupported_expression_in_mask", "~", kind=TypeError)
def negated_conjunction(x):
    i, j = nl.arange(128)[:, None], nl.arange(512)[None, :]
    return nl.load(x[i, j], mask=~((i < 3) & (j < 3)))  # HERE


@invalid("err_unsupported_expression_in_mask", "joined by & with", kind=TypeError)
def mask_joined_with_a_tile(x):
    i, j = nl.arange(128)[:, None], nl.arange(512)[None, :]
    tile = nl.load(x[i, j])
    return nl.exp(tile, mask=(i < 3) & (tile > 0))  # HERE


@invalid("err_unsupported_expression_in_mask", "mask is", "'all'", kind=TypeError)
def text_as_mask(x):
    return nl.load(x, mask="all")  # HERE


@invalid("err_unsupported_expression_in_mask", "beside other indices", kind=TypeError)
def mask_beside_an_index(x):
    tile = nl.load(x)
    return nl.copy(tile[nl.arange(128)[:, None] < 3, 0])  # HERE


@invalid("", "not affine", kind=TypeError)
def remainder_in_a_mask(x):
    i, j = nl.arange(128)[:, None], nl.arange(512)[None, :]
    return nl.load(x[i, j], mask=j % 2 == 0)  # HERE


@invalid("err_control_flow_condition_depending_on_arange", "comparison of nl.arange", "mask=", kind=ValueError)
def branch_on_an_arange(x):
    i = nl.arange(128)[:, None]
    if i < 3:  # HERE
        return nl.load(x)
    return nl.load(x)


@invalid("err_control_flow_condition_depending_on_arange", kind=ValueError)
def branch_on_an_mgrid(x):
    g = nl.mgrid[0:128, 0:512]
    if g.p + g.x > 3:  # HERE
        return nl.load(x)
    return nl.load(x)


@invalid("err_control_flow_condition_depending_on_arange", kind=ValueError)
def loop_on_an_arange(x):
    i = nl.arange(128)[:, None]
    while i > 3:  # HERE
        pass
    return nl.load(x)


@invalid("err_control_flow_condition_depending_on_arange", kind=ValueError)
def truth_of_an_arange(x):
    i = nl.arange(128)[:, None]
    return nl.load(x) if i else nl.exp(nl.load(x))  # HERE


@invalid("err_control_flow_condition_depending_on_arange", kind=ValueError)
def not_of_a_mask(x):
    i = nl.arange(128)[:, None]
    return nl.load(x, mask=not i < 3)  # HERE


@invalid("err_control_flow_condition_depending_on_arange", kind=ValueError)
def or_of_masks(x):
    i, j = nl.arange(128)[:, None], nl.arange(512)[None, :]
    return nl.load(x[i, j], mask=i < 3 or j < 3)  # HERE


@invalid("err_ambiguous_tensor_truth_value", "(128, 512)", "nl.where", kind=ValueError)
def branch_on_a_tile(x):
    tile = nl.load(x)
    if tile > 0:  # HERE
        return nl.exp(tile)
    return tile


@invalid("err_ambiguous_tensor_truth_value", "nl.logical_and", kind=ValueError)
def and_of_tiles(x):
    tile = nl.load(x)
    both = (tile > 0) and (tile < 1)  # HERE
    return both


@invalid("err_ambiguous_tensor_truth_value", kind=ValueError)
def not_of_a_tile(x):
    tile = nl.load(x)
    return not tile  # HERE


test_invalid = invalid.test()


def test_masks_that_are_fine():
    def kernel(x):
        out = nl.ndarray((128, 512), dtype=x.dtype, buffer=nl.shared_hbm)
        i, j = nl.arange(128)[:, None], nl.arange(512)[None, :]
        tile = nl.zeros((128, 512), dtype=x.dtype)
        tile[i, j] = nl.load(x[i, j], mask=(i < 100) & (j >= 2) & (i + j < 300))
        nl.store(out, tile)
        return out
    i, j = np.arange(128)[:, None], np.arange(512)[None, :]
    np.testing.assert_array_equal(simulate_kernel(kernel, A), np.where((i < 100) & (j >= 2) & (i + j < 300), A, 0))
