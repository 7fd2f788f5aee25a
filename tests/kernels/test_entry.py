"""Entry points: every way in which public harnesses make, wrap, nest, subscript and call a kernel."""

from __future__ import annotations

import functools
import inspect
import tempfile
import warnings

import ml_dtypes
import numpy as np
import pytest

import opennki.dialects.neuronxcc as nki
from opennki.dialects.neuronxcc import language as nl
from opennki.dialects.neuronxcc import typing as nt
from opennki.errors import NkiError, NkiTypeError, NkiValueError
from opennki.kernels.base import TraceKernel
from opennki.kernels.generic import GenericKernel
from opennki.kernels.numpy_kernel import BaremetalKernel, BenchmarkKernel, ProfileKernel

A = np.arange(128 * 16, dtype=np.float32).reshape(128, 16)
B = np.linspace(-1, 1, 128 * 16, dtype=np.float32).reshape(128, 16)


def add(a, b, scale=1.0, *, shift: float = 0.0):
    """out = a + b * scale + shift."""
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.load(a) + nl.load(b) * scale + shift)
    return out


def halves(a):
    """Each of two programs doubles its half."""
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    part = nl.ds(nl.program_id(0) * 8, 8)
    nl.store(out[:, part], nl.load(a[:, part]) * 2.0)
    return out


def into(a, out):
    """The older style: the output is a parameter."""
    nl.store(out, nl.load(a) * 2.0)


JITS = {
    "bare": lambda f: nki.jit(f),
    "called": lambda f: nki.jit()(f),
    "simulation": lambda f: nki.jit(f, mode="simulation"),
    "factory simulation": lambda f: nki.jit(mode="simulation")(f),
    "positional mode": lambda f: nki.jit(f, "simulation"),
    "auto": lambda f: nki.jit(mode="auto")(f),
    "trace": lambda f: nki.jit(mode="trace")(f),
    "nki.trace": lambda f: nki.trace(f),
    "nki.trace called": lambda f: nki.trace()(f),
    "baremetal mode": lambda f: nki.jit(mode="baremetal")(f),
    "benchmark mode": lambda f: nki.jit(mode="benchmark")(f),
    "platform_target": lambda f: nki.jit(mode="simulation", platform_target="trn2")(f),
    "debug_kernel": lambda f: nki.jit(f, debug_kernel=True),
    "kernel_return": lambda f: nki.jit(kernel_return=False)(f),
    "show_compiler_tb": lambda f: nki.jit(show_compiler_tb=True)(f),
    "experimental_flags": lambda f: nki.jit(experimental_flags="enable-mutable-parameter, skip-x")(f),
    "additional_compile_opt": lambda f: nki.jit(additional_compile_opt="--disable-internal-io-dge")(f),
    "baremetal": lambda f: nki.baremetal(f),
    "baremetal factory": lambda f: nki.baremetal(save_neff_name="file.neff", save_trace_name="t.ntff")(f),
    "baremetal artifacts": lambda f: nki.baremetal(artifacts_dir=tempfile.mkdtemp(dir="."), additional_compile_opt="-O1")(f),
    "baremetal of jit": lambda f: nki.baremetal(nki.jit(f)),
    "benchmark": lambda f: nki.benchmark(f),
    "benchmark factory": lambda f: nki.benchmark(warmup=5, iters=20)(f),
    "benchmark with arguments": lambda f: nki.benchmark(f, warmup=5, iters=20, save_neff_name="file.neff"),
    "profile": lambda f: nki.profile(f, working_directory=tempfile.mkdtemp(dir=".")),
    "profile factory": lambda f: nki.profile(working_directory="there", profile_nth=2, overwrite=True)(f),
    "jit of baremetal": lambda f: nki.jit(nki.baremetal(f), mode="simulation"),
    "jit of jit": lambda f: nki.jit(nki.jit(f, mode="trace"), mode="simulation", platform_target="trn2"),
    "benchmark of trace": lambda f: nki.benchmark(nki.trace(f)),
    "partial": lambda f: functools.partial(nki.jit(f)),
}


# The values of the inputs are not used, so the results have none: NaN.
TIMED = {form for form in JITS if "benchmark" in form}


@pytest.fixture(autouse=True)
def quiet(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("form", JITS)
def test_every_form_is_called_and_simulated(form):
    kernel = JITS[form](add)
    expected = A + B * np.float32(2) + np.float32(1)
    for result, values in (
        (kernel(A, B, 2.0, shift=1.0), np.full_like(A, np.nan) if form in TIMED else expected),
        (nki.simulate_kernel(kernel, A, B, 2.0, shift=1.0), expected),
        (nki.simulate_kernel(kernel, b=B, a=A, scale=2.0, shift=1.0), expected),
    ):
        assert isinstance(result, np.ndarray) and result.dtype == np.float32
        np.testing.assert_array_equal(result, values)


@pytest.mark.parametrize("form", [f for f in JITS if f != "partial"])
def test_a_grid_before_or_after_the_wrapper(form):
    wrap = JITS[form]
    for make in (lambda: wrap(halves)[2], lambda: wrap(nki.jit(halves)[2]), lambda: wrap(halves)[(2,)], lambda: wrap(nki.trace(halves)[2])):
        kernel = make()
        np.testing.assert_array_equal(kernel(A), np.full_like(A, np.nan) if form in TIMED else A * 2)
        np.testing.assert_array_equal(nki.simulate_kernel(kernel, A), A * 2)
        np.testing.assert_array_equal(nki.simulate_kernel(nki.baremetal(kernel), A), A * 2)
        np.testing.assert_array_equal(nki.simulate_kernel(nki.jit(kernel, mode="simulation"), A), A * 2)
    assert wrap(halves).grid is None


def test_plain_functions_are_simulated_too():
    np.testing.assert_array_equal(nki.simulate_kernel(add, A, B), A + B)


@pytest.mark.parametrize(
    "form", ["bare", "nki.trace", "trace", "simulation", "baremetal", "benchmark", "kernel_return"]
)
def test_outputs_that_are_parameters_are_written_in_place(form):
    wrap = JITS[form]
    for call in (lambda k, *a: k(*a), nki.simulate_kernel):
        out = np.zeros_like(A)
        assert call(wrap(into), A, out) is None
        np.testing.assert_array_equal(out, 0 * A if form in TIMED and call is not nki.simulate_kernel else A * 2)


def test_a_mutable_parameter_is_updated_and_returned():
    @nki.jit
    def kernel(a, acc: nt.mutable_tensor):
        nl.store(acc, nl.load(a) + nl.load(acc))
        return acc

    acc = B.copy()
    result = kernel(A, acc)
    np.testing.assert_array_equal(acc, A + B)
    np.testing.assert_array_equal(result, acc)


def test_a_failing_kernel_leaves_the_arrays_alone():
    @nki.trace
    def kernel(a, out):
        nl.store(out, nl.load(a))
        nl.store(out, nl.load(a[nl.arange(128)[:, None], nl.arange(17)[None, :]]))

    out = np.full_like(A, 7)
    with pytest.raises(NkiError):
        kernel(A, out)
    assert (out == 7).all()


@pytest.mark.parametrize("wrap", [nki.jit, nki.baremetal, nki.benchmark, nki.trace], ids=lambda f: f.__name__)
def test_a_kernel_looks_like_its_function(wrap):
    kernel = wrap(add)
    assert inspect.signature(kernel) == inspect.signature(add) == inspect.signature(kernel[2])
    assert (kernel.__name__, kernel.__doc__, kernel.__wrapped__) == ("add", add.__doc__, add)
    assert isinstance(kernel, TraceKernel) and "add" in repr(kernel)


def test_the_classes_of_the_modes():
    assert type(nki.jit(add)) is GenericKernel
    assert type(nki.jit(add, mode="baremetal")) is type(nki.baremetal(add)) is BaremetalKernel
    assert type(nki.jit(add, mode="benchmark")) is type(nki.benchmark(add)) is BenchmarkKernel
    assert type(nki.jit(add, mode="profile", working_directory="/tmp")) is ProfileKernel


def test_subscripting_makes_a_new_kernel():
    kernel = nki.jit(halves)
    gridded = kernel[2]
    assert kernel.grid is None and gridded.grid == 2 and gridded is not kernel
    np.testing.assert_array_equal(gridded(A), A * 2)
    np.testing.assert_array_equal(nki.simulate_kernel(kernel[nl.spmd_dim(2)], A), A * 2)
    np.testing.assert_array_equal(
        nki.simulate_kernel(nki.jit(halves, platform_target="trn2")[nl.nc(2)], A), A * 2
    )


def test_a_kernel_inside_a_kernel_is_inlined():
    inner = nki.jit(mode="trace")(lambda tile: tile * 3.0)
    middle = nki.jit(lambda tile: inner(tile) + 1.0)

    @nki.baremetal
    def kernel(a):
        out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
        nl.store(out, middle(nl.load(a)))
        return out

    np.testing.assert_array_equal(nki.simulate_kernel(kernel, A), A * 3 + 1)


def test_a_grid_inside_a_kernel_is_an_error():
    inner = nki.jit(halves)

    @nki.jit
    def kernel(a):
        return inner[2](a)

    with pytest.raises(NkiError) as caught:
        kernel(A)
    assert caught.value.code == "err_nested_kernel_with_spmd_grid"


def test_kernels_can_be_methods():
    class Model:
        scale = 4.0

        @nki.jit
        def forward(self, a):
            out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
            nl.store(out, nl.load(a) * self.scale)
            return out

    np.testing.assert_array_equal(Model().forward(A), A * 4)


def test_results_keep_their_structure():
    @nki.jit
    def kernel(a):
        outs = [nl.ndarray(a.shape, dtype=d, buffer=nl.shared_hbm) for d in (nl.float32, nl.bfloat16)]
        for out in outs:
            nl.store(out, nl.load(a))
        return outs[0], [outs[1], {"again": outs[0]}]

    first, (second, third) = kernel(A)
    np.testing.assert_array_equal(first, A)
    np.testing.assert_array_equal(third["again"], A)
    assert second.dtype == ml_dtypes.bfloat16


def test_cpu_torch_tensors_run():
    torch = pytest.importorskip("torch")
    a, b = torch.from_numpy(A.copy()), torch.from_numpy(B.copy()).bfloat16()
    result = nki.jit(add)(a, b)
    assert isinstance(result, torch.Tensor) and torch.equal(result, a + b.float())
    out = torch.zeros(128, 16)
    nki.trace(into)(a, out)
    assert torch.equal(out, a * 2)


def test_an_argument_may_be_described_where_values_do_not_matter():
    kernel = nki.benchmark(save_neff_name="file.neff", save_trace_name="profile.ntff")(add)
    result = kernel(nt.tensor[[128, 16], nl.bfloat16], b=nt.tensor[(128, 16), nl.bfloat16], scale=3.0)
    assert result.shape == (128, 16) and result.dtype == ml_dtypes.bfloat16
    for argument in (nt.tensor[128, 16], nt.tensor[[128, 16]], nt.tensor[[128, 16], nl.bfloat16, 3]):
        with pytest.raises(NkiTypeError, match="describes no array"):
            kernel(argument, A)


# ---- what says no ----


def test_an_unknown_mode_has_the_vendors_words():
    with pytest.raises(NkiValueError, match=r"'fast' passed to nki\.jit"):
        nki.jit(add, mode="fast")


def test_profile_needs_a_directory():
    for form in (lambda: nki.profile(add), lambda: nki.profile()(add), lambda: nki.jit(add, mode="profile")):
        with pytest.raises(NkiValueError, match="Please specify working directory"):
            form()


def test_a_trace_needs_the_standard_neff_name():
    with pytest.raises(NkiValueError, match=r"save_trace_name"):
        nki.baremetal(save_neff_name="other.neff", save_trace_name="t.ntff")(add)


@pytest.mark.parametrize(
    "call",
    [
        lambda: nki.jit(3),
        lambda: nki.baremetal(3),
        lambda: nki.trace("f"),
        lambda: nki.simulate_kernel(None, A),
        lambda: nki.jit(add)["x"],
        lambda: nki.jit(add)[1.5](A, B),
        lambda: nki.jit(add)(A),
        lambda: nki.jit(add)(A, B, nothing=1),
    ],
)
def test_wrong_calls_are_type_errors(call):
    with pytest.raises(NkiTypeError):
        call()


@pytest.mark.parametrize("grid", [(2, -1), -1])
def test_a_negative_grid_is_an_error(grid):
    with pytest.raises(NkiValueError, match="grid"):
        nki.jit(add)[grid]


def test_an_unknown_target_lists_the_known_ones():
    with pytest.raises(NkiValueError, match="trn9") as caught:
        nki.jit(add, platform_target="trn9")(A, B)
    assert "trn2" in str(caught.value)


def test_a_parameter_of_the_kernel_comes_before_an_option_of_the_same_name():
    def kernel(x, order, checks=1.0):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.add(nl.multiply(nl.load(x), order), checks))
        return out
    for jitted in (nki.jit(kernel), nki.jit(kernel, mode="simulation")):
        np.testing.assert_allclose(nki.simulate_kernel(jitted, A, order=2.0, checks=3.0), A * 2 + 3, rtol=1e-6)
        np.testing.assert_allclose(jitted(A, order=2.0), A * 2 + 1, rtol=1e-6)
