"""The short way of eager calls, around torch's dispatcher: taken where nobody wants to see the call, and with the same results."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from opennki.bind.torch import PyTorchXLAKernel, ops, register_autograd
from tests.bind import kernels as k
from tests.bind.kernels import nki, nl

X, Y = torch.from_numpy(k.numbers(64, 16)), torch.from_numpy(k.numbers(64, 16, seed=1))


class Dispatched(TorchDispatchMode):
    """Notes each op below autograd."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    """Notes each op as it is called."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.fixture
def dispatched(monkeypatch):
    """How many calls went through the dispatcher."""
    calls = []

    def count(name):
        real = getattr(ops, name)
        monkeypatch.setattr(ops, name, lambda *args: (calls.append(name), real(*args))[1])

    for name in ("call", "run", "call_printing", "call_into"):
        count(name)
    return calls


def test_a_plain_call_goes_around_the_dispatcher(dispatched):
    assert ops.DENSE, "this torch does not have the functions that the short way asks"
    assert torch.equal(k.axpy(X, Y), X * 2 + Y)
    acc = Y.clone()
    assert k.accumulate(X, acc) is acc and torch.equal(acc, X + Y)
    k.shout(torch.ones(1, 2))
    with torch.no_grad():
        k.axpy(X.clone().requires_grad_(), Y)
    register_autograd(k.rows, lambda ctx, d: d * 2)
    k.rows[2](X.clone().requires_grad_()).sum().backward()
    assert dispatched == []


@pytest.mark.parametrize("mode", [Dispatched, Called])
def test_modes_see_the_op(mode, dispatched):
    with mode() as seen:
        k.axpy(X, Y)
    assert [name for name in seen.seen if "opennki" in name] == ["opennki.run.default"]
    with mode() as seen:
        k.accumulate(X, Y.clone())
    assert "opennki.call_into.default" in seen.seen


def test_the_profiler_sees_the_op():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        k.axpy(X, Y)
    assert "opennki::run" in [event.key for event in profile.key_averages()]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_tracer_sees_the_op():
    traced = torch.jit.trace(lambda x: k.axpy(x, Y), X)
    assert "opennki::run" in str(traced.graph) and torch.equal(traced(Y), Y * 2 + Y)


def test_autocast_leaves_the_dtypes_of_kernels():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(k.axpy(X, Y), X * 2 + Y)


def test_tensors_that_are_more_than_memory_go_through_the_dispatcher(dispatched):
    negative = torch._neg_view(X)
    assert negative.is_neg() and torch.equal(k.axpy(negative, Y), Y - X * 2)
    with torch.inference_mode():
        kept = X.clone()
        assert torch.equal(k.axpy(kept, Y), X * 2 + Y)
    assert dispatched == ["run", "run"]
    assert torch.equal(k.accumulate(Y, kept), X + Y) and dispatched[2:] == ["call_into"]


def test_a_default_device_does_not_matter():
    with torch.device("meta"):
        assert torch.equal(k.copy(X), X)
    torch.set_default_device("meta")
    try:
        assert k.several(X)[1][0].device.type == "cpu"
    finally:
        torch.set_default_device(None)


def test_forward_derivatives_are_refused_and_not_dropped():
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(X, Y)
        with pytest.raises(NotImplementedError, match=r"jvp|forward"):
            k.copy(dual)
    assert torch.equal(k.copy(X), X)


def test_gradients_are_those_of_the_op():
    register_autograd(k.several, lambda ctx, double, narrow, total: double * 2 + narrow.float() + total)
    seen = []
    for ask in (lambda x: k.several(x), lambda x: torch.ops.opennki.call([x], k.several.build_cache_kernel(
            PyTorchXLAKernel).dump_config(X).backend_config)):
        x = X.clone().requires_grad_()
        results = ask(x)
        double, narrow, total = results if len(results) == 3 else (results[0], *results[1])
        (double.sum() + narrow.float().sum() * 3 + (total * total).sum()).backward()
        seen.append(x.grad)
    assert torch.equal(*seen) and seen[0].std() > 0


def test_second_derivatives_through_a_rule_of_torch():
    register_autograd(k.copy, lambda ctx, d: d * ctx.saved_tensors[0])  # not the derivative of a copy, but one with a derivative
    x = X.clone().requires_grad_()
    (first,) = torch.autograd.grad(k.copy(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((first ** 2).sum(), x)
    assert torch.equal(first.detach(), X)
    torch.testing.assert_close(second, 2 * X)


def test_results_of_no_elements_and_of_other_sizes():
    @nki.jit
    def total(x):
        out = nl.ndarray((1, 1), nl.float32, buffer=nl.shared_hbm)
        nl.store(out, nl.sum(nl.load(x), axis=1, keepdims=True))
        return out

    for n in (1, 7, 512):
        x = torch.arange(float(n)).reshape(1, n)
        assert total(x).item() == x.sum().item()


def test_what_the_kernel_reads_from_around_it_may_change_and_so_may_the_rule():
    scale = 2.0

    @nki.jit
    def kernel(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.load(x) * scale)
        return out

    x = X.clone().requires_grad_()
    for scale in (2.0, 5.0):
        register_autograd(kernel, lambda ctx, d, scale=scale: d * scale)
        (gradient,) = torch.autograd.grad(kernel(x).sum(), x)
        assert torch.equal(gradient, torch.full_like(x, scale)) and torch.equal(kernel(X), X * scale)


def test_the_mode_of_simulation_is_asked_at_each_call(monkeypatch, dispatched):
    assert torch.equal(k.axpy(X, Y), X * 2 + Y)
    monkeypatch.setenv("NKI_SIMULATOR", "1")
    monkeypatch.setattr(PyTorchXLAKernel, "call", lambda *_: pytest.fail("the bridge was called"))
    assert torch.equal(k.axpy(X, Y), X * 2 + Y)


def test_the_class_that_is_remembered_by_types_is_that_of_the_arguments():
    from opennki.kernels import modes

    jax = pytest.importorskip("jax")
    from opennki.bind.jax import JAXKernel

    class Mine(torch.Tensor):
        """A subclass, whose objects are looked at each time."""

    array, mine = jax.numpy.ones(3), torch.ones(3).as_subclass(Mine)
    for _ in range(2):
        assert modes.compute_mode((X, 1), {}) is PyTorchXLAKernel
        assert modes.compute_mode((X,), {"k": array}) is JAXKernel and modes.compute_mode((array, X), {}) is JAXKernel
        assert modes.compute_mode((X, [array]), {}) is JAXKernel and modes.compute_mode((1, [X]), {}) is PyTorchXLAKernel
        assert modes.compute_mode((mine,), {}) is PyTorchXLAKernel
        assert modes.compute_mode((1,), {}) is modes.compute_mode((), {"a": X.numpy()}) is not PyTorchXLAKernel
