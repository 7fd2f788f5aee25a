"""Errors of outputs, parameters, aliases, sub-kernels and launch grids."""

from __future__ import annotations

import numpy as np
import pytest
from tests.errors.harness import SMALL, A, Invalid, check_report, failure

from opennki import jit, simulate_kernel, trace
from opennki.dialects.neuronxcc import language as nl
from opennki.dialects.neuronxcc import typing as nt
from opennki.errors import NkiWarning, NkiError

invalid = Invalid()


@invalid("err_tensor_output_not_written_to", "never stored", "(128, 512)", kind=ValueError)
def output_never_stored(x):
    out = nl.ndarray((128, 512), dtype=x.dtype, buffer=nl.shared_hbm)  # HERE
    nl.load(x)
    return out


@invalid("err_tensor_output_not_written_to", "never stored", "never runs", kind=ValueError)
def output_stored_in_a_loop_that_never_runs(x):
    out = nl.ndarray((128, 512), dtype=x.dtype, buffer=nl.shared_hbm)  # HERE
    for _i in nl.affine_range(0):
        nl.store(out, nl.load(x))
    return out


@invalid("err_tensor_output_not_written_to", kind=ValueError)
def second_output_never_stored(x):
    a = nl.ndarray((128, 512), dtype=x.dtype, buffer=nl.shared_hbm)
    b = nl.ndarray((128, 1), dtype=x.dtype, buffer=nl.shared_hbm)  # HERE
    nl.store(a, nl.load(x))
    return a, b


@invalid("err_tensor_output_not_written_to", "no output", "shared_hbm", kind=ValueError)
def kernel_without_output(x):
    nl.load(x)  # HERE


@invalid("err_cannot_update_immutable_parameter", "'x'", "nt.mutable_tensor", kind=ValueError)
def store_to_a_parameter(x):
    out = nl.ndarray((128, 512), dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x)
    nl.store(out, tile)
    nl.store(x, tile)  # HERE
    return out


@invalid("err_cannot_update_immutable_parameter", kind=ValueError)
def parameter_written_and_returned(x):
    nl.store(x[0:1], nl.load(x[1:2]))  # HERE
    return x


@invalid("err_cannot_update_immutable_parameter", "constant", kind=ValueError)
def store_to_a_constant(x):
    c = nl.shared_constant(np.zeros((128, 512), np.float32))
    nl.store(c, nl.load(x))  # HERE
    return c


@invalid("err_mutable_parameter_not_returned", "'x'", "return value", kind=ValueError)
def mutable_parameter_not_returned(x: nt.mutable_tensor):
    out = nl.ndarray((128, 512), dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x)
    nl.store(out, tile)
    nl.store(x, tile)  # HERE
    return out


@invalid("err_annotation_shape_mismatch", "(128, 256)", "(128, 512)", kind=ValueError)
def wrong_annotation(x):
    out = nl.ndarray((128, 512), dtype=x.dtype, buffer=nl.shared_hbm)
    tile: nt.tensor[128, 256] = nl.load(x)  # HERE
    nl.store(out, tile)
    return out


@invalid("err_shared_hbm_must_in_kernel_level", kind=ValueError)
def output_made_in_a_sub_kernel(x):
    @trace
    def sub(x):
        return nl.ndarray((128, 512), dtype=x.dtype, buffer=nl.shared_hbm)  # HERE
    out = sub(x)
    nl.store(out, nl.load(x))
    return out


@invalid("err_nested_kernel_with_spmd_grid", "[grid]", kind=ValueError)
def sub_kernel_with_a_grid(x):
    @trace
    def sub(x):
        return nl.load(x)
    return sub[2](x)  # HERE


@invalid("err_unexpected_output_dependencies", "grid", "axes 0", grid=(2,), kind=ValueError, eager=False)
def programs_store_to_one_place(x):
    out = nl.ndarray((64, 512), dtype=x.dtype, buffer=nl.shared_hbm)
    p = nl.program_id(0)
    nl.store(out, nl.load(x[nl.ds(p * 64, 64)]))  # HERE
    return out


@invalid("err_unexpected_output_dependencies", "axes 1", grid=(2, 3), kind=ValueError, eager=False)
def second_axis_of_the_grid_stores_to_one_place(x):
    out = nl.ndarray((128, 512), dtype=x.dtype, buffer=nl.shared_hbm)
    p = nl.program_id(0)
    part = nl.add(nl.load(x[nl.ds(p * 64, 64)]), nl.program_id(1))
    nl.store(out[nl.ds(p * 64, 64)], part)  # HERE
    return out


@invalid("", "program_id(1)", "1 dimensions", grid=(2,), kind=ValueError)
def program_id_of_an_axis_that_does_not_exist(x):
    return nl.load(x[nl.program_id(1)])  # HERE


test_invalid = invalid.test()


def test_paths_that_return_other_tensors():
    def kernel(x):
        if nl.program_id(0) == 0:
            a = nl.ndarray((128, 512), dtype=x.dtype, buffer=nl.shared_hbm)
        else:
            a = nl.ndarray((64, 512), dtype=x.dtype, buffer=nl.shared_hbm)
        nl.store(a[0:64], nl.load(x[0:64]))
        return a
    first = kernel.__code__.co_firstlineno
    error = failure(None, A, kernel=jit(kernel, platform_target="trn1")[2], kind=ValueError)
    text = str(error)
    assert f"test_outputs.py:{first + 2}" in text and f"test_outputs.py:{first + 4}" in text and "rule:" in text


def several_cores(x):
    out = nl.ndarray((2, 64, 512), dtype=x.dtype, buffer=nl.shared_hbm)
    p = nl.program_id(0)
    nl.store(out[p], nl.load(x[nl.ds(p * 64, 64)]))
    return out


@pytest.mark.parametrize("grid", [nl.nc(2), (nl.nc(2),), nl.spmd_dim(nl.nc(2), 1)], ids=str)
def test_several_cores_need_trn2(grid):
    def launch(target):
        return jit(several_cores, mode="simulation", platform_target=target)[grid](A)  # HERE
    np.testing.assert_array_equal(launch("trn2"), A.reshape(2, 64, 512))
    with pytest.raises(ValueError) as caught:
        launch("trn1")
    check_report(caught.value, launch, "err_multi_cores_spmd_not_supported", ("2 physical cores", "trn1", "trn2"))


@pytest.mark.parametrize(("grid", "kind", "word"), [
    ((2, -1), ValueError, "at least 1"), (1.5, TypeError, "integers"), ("2", TypeError, "integers"),
    (True, TypeError, "integers"), (None, TypeError, "integers")], ids=str)
def test_grids_that_are_none(grid, kind, word):
    def subscript():
        return jit(several_cores)[grid]  # HERE
    with pytest.raises(kind) as caught:
        subscript()
    check_report(caught.value, subscript, "", (word, "launch grid"))


def test_grid_zero_is_one_program():
    """Published kernels launch with [0]."""
    def kernel(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        p = nl.program_id(0)
        nl.store(out[nl.ds(p * 128, 128)], nl.load(x[nl.ds(p * 128, 128)]))
        return out
    with pytest.warns(NkiWarning, match="one program"):
        np.testing.assert_array_equal(jit(kernel, mode="simulation", platform_target="trn1")[0](A), A)


@pytest.mark.parametrize("cores", [0, -2])
def test_cores_that_are_none(cores):
    with pytest.raises(ValueError, match="number of cores is positive"):
        nl.nc(cores)


CALLS = {
    "load": lambda: nl.load(A), "ndarray": lambda: nl.ndarray((128, 4), nl.float32), "zeros": lambda: nl.zeros((128, 4), nl.float32),
    "program_id": lambda: nl.program_id(0), "num_programs": lambda: nl.num_programs(0), "rand": lambda: nl.rand((128, 4)),
    "affine_range": lambda: list(nl.affine_range(4)), "sequential_range": lambda: list(nl.sequential_range(4)),
    "shared_constant": lambda: nl.shared_constant(SMALL), "identity": lambda: nl.shared_identity_matrix(4),
}


@pytest.mark.parametrize("name", CALLS)
def test_api_outside_of_a_kernel(name):
    with pytest.raises(NkiError) as caught:
        CALLS[name]()
    text = str(caught.value)
    if name == "load":  # an array is no tensor, in a kernel or outside
        assert "shared_constant" in text
        return
    assert caught.value.code == "err_nki_api_outside_of_nki_kernel" and "nki.simulate_kernel" in text
    assert caught.value.loc.file == __file__ and caught.value.loc.source() in text


def test_isa_outside_of_a_kernel():
    from opennki.dialects.neuronxcc import isa as nisa

    def call():
        nisa.memset((128, 4), value=0, dtype=nl.float32)  # HERE
    with pytest.raises(NkiError) as caught:
        call()
    check_report(caught.value, call, "err_nki_api_outside_of_nki_kernel")


def test_a_failed_trace_leaves_no_kernel_open():
    """After an error, calls outside of kernels are still outside, and the next kernel runs."""
    failure(output_never_stored, A)
    with pytest.raises(NkiError) as caught:
        nl.ndarray((128, 4), nl.float32)
    assert caught.value.code == "err_nki_api_outside_of_nki_kernel"

    def fine(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.load(x))
        return out
    np.testing.assert_array_equal(simulate_kernel(fine, A), A)


def test_indices_outside_of_a_kernel_are_fine():
    i, j = nl.arange(4)[:, None], nl.arange(3)[None, :]
    assert ((i + 2 * j) < 3).shape == (4, 3) and nl.mgrid[0:4, 0:3].p.ndim == 2


def increment(x: nt.mutable_tensor):
    nl.store(x, nl.load(x) + 1)
    return x


def test_a_mutable_parameter_is_read_and_written():
    """Older releases refused this (err_read_modify_write_on_kernel_parameter); current ones take it, and so do we."""
    x = SMALL.copy()
    result = simulate_kernel(increment, x)
    np.testing.assert_array_equal(x, SMALL + 1)
    np.testing.assert_array_equal(result, SMALL + 1)


def test_an_old_style_kernel_writes_its_arguments():
    def kernel(x, out):
        nl.store(out, nl.load(x) * 2)
    out = np.zeros_like(SMALL)
    assert simulate_kernel(trace(kernel), SMALL, out) is None
    np.testing.assert_array_equal(out, SMALL * 2)


def test_a_grid_whose_programs_write_apart_is_fine():
    def kernel(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        p, q = nl.program_id(0), nl.program_id(1)
        part = nl.ds(p * 64, 64), nl.ds(q * 256, 256)
        nl.store(out[part], nl.load(x[part]))
        return out
    np.testing.assert_array_equal(simulate_kernel(jit(kernel)[2, 2], A), A)


def test_old_names_are_in_the_catalogue():
    from opennki.catalogue import CATALOGUE
    assert CATALOGUE["err_tensor_creation_on_scratchpad_with_init_value_not_allowed"] is CATALOGUE[
        "err_tensor_creation_on_scratchpad_with_init_value_not_supported"]
    assert "err_read_modify_write_on_kernel_parameter" in CATALOGUE
