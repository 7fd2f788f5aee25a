"""Errors of loops, branches and scopes."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from tests.errors.harness import SMALL, A, Invalid

from opennki import jit, simulate_kernel
from opennki.dialects.neuronxcc import language as nl
from opennki.dialects.neuronxcc import typing as nt
from opennki.errors import NkiWarning

invalid = Invalid()


@invalid("err_dynamic_control_flow_not_supported", "truth", "nl.where", kind=ValueError)
def branch_on_one_element(x):
    tile = nl.load(x[0:1, 0:1])
    if tile > 0:  # HERE
        return nl.exp(tile)
    return tile


@invalid("err_dynamic_control_flow_not_supported", "Python number", kind=ValueError)
def tile_as_a_number(x):
    tile = nl.load(x[0:1, 0:1])
    for _i in range(tile):  # HERE
        pass
    return tile


@invalid("err_while_loop_requires_unconditional_entry", "do-while", kind=ValueError, eager=False)
def while_on_a_value(x):
    i = nl.load(x[0:1, 0:1])
    cond = nt.scalar(i)
    while cond:  # HERE
        cond = nt.scalar(i)
    return i


@invalid("err_dynamic_control_flow_not_supported", "runtime scalar", kind=ValueError, eager=False)
def branch_on_a_runtime_scalar(x):
    i = nl.load(x[0:1, 0:1])
    cond = nt.scalar(i)
    if cond:  # HERE
        return i
    return i


@invalid("err_ambiguous_tensor_truth_value", kind=ValueError)
def while_on_many_values(x):
    i = nl.load(x)
    cond = nt.scalar(i)
    while cond:  # HERE
        cond = nt.scalar(i)
    return i


@invalid("err_local_variable_used_out_of_scope", "made at", "before the loop", kind=ValueError, eager=False)
def loop_tile_used_after_the_loop(x):
    out = nl.ndarray((128, 512), dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(4):
        tile = nl.load(x[:, nl.ds(i * 128, 128)])
    nl.store(out[:, 0:128], tile)  # HERE
    return out


@invalid("err_local_variable_used_out_of_scope", kind=ValueError, eager=False)
def loop_tile_used_in_arithmetic(x):
    for i in nl.sequential_range(4):
        tile = nl.load(x[:, nl.ds(i * 128, 128)])
    return nl.exp(tile)  # HERE


@invalid("err_local_variable_used_out_of_scope", kind=ValueError, eager=False)
def inner_tile_used_in_the_outer_loop(x):
    out = nl.ndarray((4, 128, 128), dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(4):
        for _j in nl.affine_range(2):
            tile = nl.load(x[:, nl.ds(i * 128, 128)])
        nl.store(out[i], tile)  # HERE
    return out


@invalid("err_unexpected_output_dependencies", "affine loop i ", "sequential_range", kind=ValueError, eager=False)
def iterations_store_to_one_place(x):
    out = nl.ndarray((128, 128), dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(4):
        tile = nl.load(x[:, nl.ds(i * 128, 128)])
        nl.store(out, tile)  # HERE
    return out


@invalid("err_unexpected_output_dependencies", "affine loop", kind=ValueError, eager=False)
def iterations_write_one_tile(x):
    out = nl.ndarray((128, 128), dtype=x.dtype, buffer=nl.shared_hbm)
    last = nl.zeros((128, 128), dtype=x.dtype)
    for i in nl.affine_range(4):
        last[...] = nl.load(x[:, nl.ds(i * 128, 128)])  # HERE
    nl.store(out, last)
    return out


@invalid("err_unexpected_output_dependencies", "affine loop", kind=ValueError, eager=False)
def iterations_overlap(x):
    out = nl.ndarray((128, 512), dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(4):
        tile = nl.load(x[:, nl.ds(i * 128, 128)])
        nl.store(out[:, nl.ds(i * 100, 128)], tile)  # HERE
    return out


@invalid("err_unexpected_output_dependencies", "inner", kind=ValueError, eager=False)
def inner_iterations_store_to_one_place(x):
    out = nl.ndarray((4, 128, 128), dtype=x.dtype, buffer=nl.shared_hbm)
    for outer in nl.affine_range(4):
        for inner in nl.affine_range(2):
            tile = nl.load(x[:, nl.ds(inner * 128, 128)])
            nl.store(out[outer], tile)  # HERE
    return out


@invalid("", "integers", "//", kind=TypeError)
def float_trip_count(x):
    for _i in nl.affine_range(x.shape[1] / 128):  # HERE
        pass
    return nl.load(x)


@invalid("", "takes 1 to 3", kind=TypeError)
def loop_without_bounds(x):
    for _i in nl.sequential_range():  # HERE
        pass
    return nl.load(x)


@invalid("", "step 0", kind=ValueError)
def loop_that_stands_still(x):
    for _i in nl.affine_range(0, 4, 0):  # HERE
        pass
    return nl.load(x)


@invalid("", "directive", kind=TypeError)
def unknown_directive(x):
    for _i in nl.affine_range(2, directives="fast"):  # HERE
        pass
    return nl.load(x)


@invalid("err_shared_hbm_must_in_kernel_level", "loop", kind=ValueError, eager=False)
def output_made_in_a_loop(x):
    for _i in nl.affine_range(2):
        out = nl.ndarray((128, 512), dtype=x.dtype, buffer=nl.shared_hbm)  # HERE
    return out


def helper(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    i = nl.arange(128)
    nl.store(out, nl.load(x[i]))
    return out


test_invalid = invalid.test()


def test_the_innermost_line_of_the_user_is_shown():
    """An error in a helper shows the line of the helper, which no decorator marks."""
    from tests.errors.harness import failure

    def kernel(x):
        return helper(x)
    error = failure(kernel, A)
    assert error.loc.function == "helper" and "nl.load(x[i])" in str(error)


def test_loops_that_are_fine():
    def kernel(x):
        out = nl.ndarray((128, 512), dtype=x.dtype, buffer=nl.shared_hbm)
        total = nl.ndarray((128, 1), dtype=nl.float32, buffer=nl.shared_hbm)
        acc = nl.zeros((128, 1), dtype=nl.float32)
        for i in nl.affine_range(4):
            tile = nl.load(x[:, nl.ds(i * 128, 128)])
            acc += nl.sum(tile, axis=1)
            nl.store(out[:, nl.ds(i * 128, 128)], tile * 2)
        last = nl.zeros((128, 128), dtype=x.dtype)
        for i in nl.sequential_range(4):
            last[...] = nl.load(x[:, nl.ds(i * 128, 128)])
        nl.store(total, acc + last[:, 0:1])
        return out, total
    out, total = simulate_kernel(kernel, A, checks={"carried": "off"})
    np.testing.assert_array_equal(out, A * 2)
    np.testing.assert_allclose(total[:, 0], A.sum(1, dtype=np.float64) + A[:, 384], rtol=1e-6)


def test_do_while_that_is_fine():
    def kernel(n):
        out = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.shared_hbm)
        count, left = nl.zeros((1, 1), dtype=nl.int32), nl.load(n)
        cond = nt.scalar(True)
        while cond:
            count[...] = count + 1
            left[...] = left - 2
            cond = nt.scalar(left > 0)
        nl.store(out, count)
        return out
    assert simulate_kernel(kernel, np.array([[7]], np.int32)).item() == 4
    assert simulate_kernel(kernel, np.array([[-7]], np.int32)).item() == 1


def test_loop_tile_kept_in_a_list_of_an_unrolled_loop():
    def kernel(x):
        out = nl.ndarray((3, 4), dtype=x.dtype, buffer=nl.shared_hbm)
        kept = []
        for i in nl.static_range(2):
            kept.append(nl.load(x) * (i + 1))
        nl.store(out, kept[0] + kept[1])
        return out
    np.testing.assert_array_equal(simulate_kernel(kernel, SMALL), SMALL * 3)


def test_a_variable_of_one_side_says_which_side_it_is_missing_on():
    def kernel(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        if nl.program_id(0) == 0:
            tile = nl.load(x)
        nl.store(out, tile)
        return out

    with pytest.raises(UnboundLocalError) as caught:
        jit(kernel, mode="simulation", platform_target="trn2")[2].simulate(np.zeros((4, 4), np.float32))
    (note,) = caught.value.__notes__
    assert "pid0" in note and "test_control_flow.py:" in note and "both sides" in note
    with pytest.raises(NameError) as caught:
        jit(lambda x: nothing_of_this_name, mode="simulation").simulate(np.zeros((4, 4), np.float32))  # noqa: F821
    assert not getattr(caught.value, "__notes__", ())


def test_a_return_that_is_indented_too_far_is_a_warning():
    """The kernel means what Python does: one iteration runs."""
    def kernel(x, early):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.zeros(x.shape, x.dtype))
        for i in nl.affine_range(4):
            nl.store(out[:, nl.ds(i * 2, 2)], nl.load(x[:, nl.ds(i * 2, 2)]))
            if early == "always":
                return out
            if early == "guarded" and i == 1:
                return out
        return out

    x = np.arange(1, 33, dtype=np.float32).reshape(4, 8)
    run = jit(kernel, mode="simulation", platform_target="trn1").simulate
    with pytest.warns(NkiWarning, match="loop of 4 iterations is left in the first one") as caught:
        got = run(x, "always")
    assert caught[0].filename == __file__ and "affine_range(4)" in str(caught[0].message)
    np.testing.assert_array_equal(got, np.where(np.arange(8) < 2, x, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error", NkiWarning)
        np.testing.assert_array_equal(run(x, "guarded"), np.where(np.arange(8) < 4, x, 0))
        np.testing.assert_array_equal(run(x, "never"), x)
