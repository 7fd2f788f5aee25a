"""Which kernel class a call gets: modes, frameworks by argument, what is kept, what is imported."""

from __future__ import annotations

import subprocess
import sys
import types

import numpy as np
import pytest

import opennki
from opennki import jit
from opennki.dialects.neuronxcc import language as nl
from opennki.errors import NkiTypeError, NkiValueError
from opennki.kernels import modes
from opennki.kernels.base import TraceKernel
from opennki.kernels.framework import FrameworkKernel, LegacyFrameworkKernel, UnifiedKernel
from opennki.kernels.generic import GenericKernel
from opennki.kernels.modes import Framework, _native_mode_map, compute_mode, register_framework, unregister_framework
from opennki.kernels.numpy_kernel import BaremetalKernel, BenchmarkKernel, NumpyKernel, ProfileKernel, SimulateKernel

A = np.ones((2, 4), np.float32)
WORDS = "' passed to nki.jit"


def double(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.load(x) * 2)
    return out


class Known(FrameworkKernel):
    """A kernel class whose calls tell that they were made."""

    def call(self, args, kwargs):
        return type(self).__name__, self.grid, args


@pytest.fixture
def frameworks(monkeypatch):
    """Two frameworks, first and second, each with a class of tensors."""
    made = []
    for name in ("first", "second"):
        module = types.ModuleType(name)
        module.Tensor = type("Tensor", (), {})
        module.Kernel = type(name.title(), (Known,), {})
        monkeypatch.setitem(sys.modules, name, module)
        register_framework(Framework(name, name, lambda module, value: isinstance(value, module.Tensor), f"{name}:Kernel"))
        made.append(module)
    yield made
    for name in ("first", "second"):
        unregister_framework(name)


# ---- compute_mode ------------------------------------------------------------------------------------------
def test_no_framework_tensor_is_baremetal(frameworks):
    assert compute_mode((A, 1, "x", None, [A]), {"k": (A,)}) is BaremetalKernel
    assert compute_mode((), {}) is BaremetalKernel


@pytest.mark.parametrize("place", ["argument", "keyword", "list", "dict in a tuple", "after others"])
def test_a_tensor_is_found_wherever_it_is(frameworks, place):
    t = frameworks[0].Tensor()
    args, kwargs = {"argument": ((t,), {}), "keyword": ((A,), {"k": t}), "list": (([1, [t]],), {}),
                    "dict in a tuple": ((({"k": t},),), {}), "after others": ((A, 1.0, t), {"k": A})}[place]
    assert compute_mode(args, kwargs) is frameworks[0].Kernel


def test_the_framework_registered_first_wins_whatever_the_order_of_arguments(frameworks):
    first, second = frameworks
    assert compute_mode((second.Tensor(), first.Tensor()), {}) is first.Kernel
    assert compute_mode((second.Tensor(),), {"k": first.Tensor()}) is first.Kernel
    assert compute_mode((second.Tensor(),), {}) is second.Kernel


def test_a_mode_by_name_wins_over_the_arguments(frameworks):
    first, second = frameworks
    assert compute_mode((first.Tensor(),), {}, "second") is second.Kernel
    assert compute_mode((first.Tensor(),), {}, "baremetal") is BaremetalKernel
    assert compute_mode((A,), {}, "first") is first.Kernel


def test_the_simulator_setting_wins_over_all(frameworks, monkeypatch):
    monkeypatch.setenv("NKI_SIMULATOR", "1")
    for args, mode in (((A,), "auto"), ((frameworks[0].Tensor(),), "auto"), ((A,), "first"), ((A,), "baremetal")):
        assert compute_mode(args, {}, mode) is SimulateKernel


def test_a_framework_outside_of_auto_is_taken_by_name_alone(frameworks):
    second = frameworks[1]
    register_framework(Framework("second", "second", lambda module, value: isinstance(value, module.Tensor), "second:Kernel", auto=False))
    assert compute_mode((second.Tensor(),), {}) is BaremetalKernel
    assert compute_mode((A,), {}, "second") is second.Kernel


def test_a_framework_that_was_never_imported_is_not_asked():
    def ask(module, value):
        raise AssertionError("asked")

    register_framework(Framework("absent", "absent_framework", ask, "absent_framework:Kernel"))
    try:
        assert compute_mode((A,), {}) is BaremetalKernel
        assert "absent_framework" not in sys.modules
    finally:
        unregister_framework("absent")


def test_jax_comes_before_torch():
    jax, torch = pytest.importorskip("jax"), pytest.importorskip("torch")
    from opennki.bind.jax import JAXKernel
    from opennki.bind.torch import PyTorchXLAKernel

    array, tensor = jax.numpy.ones((2, 4)), torch.ones(2, 4)
    assert compute_mode((tensor, array), {}) is compute_mode((array,), {"k": tensor}) is JAXKernel
    assert compute_mode((tensor,), {}) is compute_mode((A,), {"k": [tensor]}) is PyTorchXLAKernel
    kinds = []
    jax.jit(lambda x: kinds.append(compute_mode((A, x), {})) or x)(array)
    assert kinds == [JAXKernel], "a tracer counts as an array"


# ---- unknown names -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["fast", "", "JAX", "auto "])
def test_an_unknown_mode_has_the_vendors_words(mode):
    for call in (lambda: jit(double, mode=mode), lambda: jit(mode=mode)(double), lambda: compute_mode((A,), {}, mode),
                 lambda: jit(double).copy(mode=mode)):
        with pytest.raises(NkiValueError) as caught:
            call()
        assert caught.value.message.endswith(f"'{mode}{WORDS}")
        assert "simulation" in str(caught.value)


@pytest.mark.parametrize("mode", [None, 3, ("jax",), []])
def test_a_mode_is_text(mode):
    with pytest.raises(NkiTypeError, match="mode="):
        jit(double, mode=mode)


def test_a_framework_that_is_not_installed_is_unknown():
    register_framework(Framework("absent", "absent_framework", lambda *_: False, "absent_framework.nki:Kernel"))
    try:
        kernel = jit(double, mode="absent")
        for call in (lambda: kernel(A), lambda: compute_mode((A,), {}, "absent")):
            with pytest.raises(NkiValueError) as caught:
                call()
            assert caught.value.message.startswith("Unknown framework 'absent_framework'")
            assert isinstance(caught.value.__cause__, ModuleNotFoundError)
            assert caught.value.loc.file == __file__
    finally:
        unregister_framework("absent")


def test_a_binding_that_fails_for_another_reason_says_its_own(frameworks):
    """What is missing is not the framework."""
    register_framework(Framework("first", "first", lambda *_: False, "no_such_binding:Kernel"))
    with pytest.raises(ModuleNotFoundError, match="no_such_binding"):
        compute_mode((A,), {}, "first")


@pytest.mark.parametrize("mode", ["auto", "trace", "baremetal", "benchmark", "profile", "simulation"])
def test_a_framework_cannot_take_a_mode_of_opennki(mode):
    with pytest.raises(NkiValueError, match=f"mode '{mode}' is opennki's own"):
        register_framework(Framework(mode, "x", lambda *_: False, None))


# ---- the table of modes ------------------------------------------------------------------------------------
def test_the_table_of_modes(frameworks):
    assert list(_native_mode_map) == ["baremetal", "benchmark", "profile", "simulation", "jax", "torchxla", "first", "second"]
    assert len(_native_mode_map) == 8
    assert _native_mode_map["baremetal"] is BaremetalKernel and _native_mode_map["benchmark"] is BenchmarkKernel
    assert _native_mode_map["profile"] is ProfileKernel and _native_mode_map["simulation"] is SimulateKernel
    assert _native_mode_map["first"] is frameworks[0].Kernel
    assert "auto" not in _native_mode_map and "trace" not in _native_mode_map
    with pytest.raises(KeyError):
        _native_mode_map["fast"]
    assert set(modes.modes()) == {*_native_mode_map, "auto", "trace"}


def test_the_class_of_jax():
    pytest.importorskip("jax")
    from opennki.bind.jax import JAXKernel

    assert _native_mode_map["jax"] is JAXKernel


def test_the_class_tree():
    for kind in (UnifiedKernel, LegacyFrameworkKernel):
        assert issubclass(kind, FrameworkKernel)
    for kind in (BaremetalKernel, SimulateKernel):
        assert issubclass(kind, NumpyKernel)
    for kind in (BenchmarkKernel, ProfileKernel):
        assert issubclass(kind, (BaremetalKernel, NumpyKernel))
    assert issubclass(FrameworkKernel, TraceKernel) and issubclass(NumpyKernel, TraceKernel)
    assert not issubclass(FrameworkKernel, NumpyKernel)


# ---- memoisation -------------------------------------------------------------------------------------------
def test_a_kernel_is_made_once_for_each_class(frameworks):
    first, second = frameworks
    kernel = jit(double)
    assert isinstance(kernel, GenericKernel) and kernel._cached_kernel == {}
    assert kernel(first.Tensor())[0] == "First" and kernel(second.Tensor())[0] == "Second"
    assert set(kernel._cached_kernel) == {first.Kernel, second.Kernel}
    made = dict(kernel._cached_kernel)
    kernel(first.Tensor()), kernel(k=second.Tensor())
    assert all(kernel._cached_kernel[kind] is one for kind, one in made.items())
    assert kernel.build_cache_kernel(first.Kernel) is made[first.Kernel]


def test_another_grid_is_another_kernel_with_the_same_specialisations(frameworks):
    first = frameworks[0]
    kernel = jit(double)
    two = kernel[2]
    assert (kernel(first.Tensor())[1], two(first.Tensor())[1]) == (None, 2)
    mine, other = kernel.build_cache_kernel(first.Kernel), two.build_cache_kernel(first.Kernel)
    assert mine is not other
    assert mine.__neuron_kernel_interface_kernel_cache__ is other.__neuron_kernel_interface_kernel_cache__


# ---- type parameters ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [GenericKernel, TraceKernel, FrameworkKernel, UnifiedKernel, BaremetalKernel, SimulateKernel])
def test_classes_take_type_parameters(kind):
    assert kind[int] is kind and kind[...] is kind and kind[int, str] is kind


def test_jit_takes_type_parameters():
    assert jit[int] is jit and jit[...] is jit
    kernel = jit[int, ...](double, mode="simulation")
    assert isinstance(kernel, GenericKernel)
    np.testing.assert_array_equal(kernel(A), A * 2)
    np.testing.assert_array_equal(jit[int](mode="simulation")(double)(A), A * 2)


# ---- imports -----------------------------------------------------------------------------------------------
QUIET = """
import sys, warnings
warnings.simplefilter("ignore")
import numpy as np
import opennki, opennki.dropin
import neuronxcc.nki as nki, neuronxcc.nki.language as nl

@nki.jit
def double(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.load(x) * 2)
    return out

x = np.ones((2, 4), np.float32)
assert (double(x) == 2).all() and (nki.simulate_kernel(double, x) == 2).all()
from opennki.kernels.framework import UnifiedKernel
UnifiedKernel(double).dump_config(x)
from opennki.bind.host import run_payload
found = sorted({name.split(".")[0] for name in sys.modules} & {"jax", "jaxlib", "torch"})
assert not found, found
print("quiet")
"""


def test_a_numpy_call_imports_no_framework():
    root = opennki.__file__.rsplit("opennki", 1)[0]
    done = subprocess.run([sys.executable, "-c", f"import sys; sys.path.insert(0, {root!r})\n" + QUIET], capture_output=True, text=True)
    assert done.stdout == "quiet\n", done.stderr
