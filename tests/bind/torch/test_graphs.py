"""Kernels under torch.compile, torch.export, make_fx, torch.func, autograd; opcheck."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from opennki.bind.torch import PyTorchXLAKernel, nki_op, register_autograd, wrap_nki
from opennki.errors import NkiDifferentiationError
from opennki.errors import NkiError, NkiTypeError, NkiValueError
from tests.bind import kernels as k
from tests.bind.kernels import nki, nl

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
X, Y = torch.from_numpy(k.numbers(64, 16)), torch.from_numpy(k.numbers(64, 16, seed=1))


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


@pytest.fixture(params=["eager", "aot_eager"])
def compiled(request):
    """torch.compile with a backend, no graph breaks."""
    return lambda f, **kwargs: torch.compile(f, backend=request.param, fullgraph=True, **kwargs)


@pytest.mark.timeout(400)
def test_inductor(differentiable):
    """One program for the backend that compiles C++, which takes seconds: values, a written tensor, a gradient, an error."""

    def f(x, y, acc, table, index):
        k.accumulate(x * 2, acc)
        picked = k.pick(table, index)
        return torch.sin(silu(k.rows[2](x) + y)).sum() + picked.sum()

    def plain(x, y, acc, table, index):
        acc += x.detach() * 2
        return torch.sin(torch.nn.functional.silu(x * 2 + y)).sum() + table[index[:, 0]].sum()

    register_autograd(k.rows, lambda ctx, d: d * 2)
    register_autograd(k.accumulate, lambda ctx, d: (d, d))
    g = torch.compile(f, fullgraph=True)
    index = torch.tensor([[1], [2]], dtype=torch.int32)
    seen = []
    for run in (g, plain):
        x, acc = X.clone().requires_grad_(), Y.clone()
        value = run(x, Y, acc if run is plain else acc.clone(), X, index)
        value.backward()
        seen.append((value.detach(), x.grad))
    torch.testing.assert_close(seen[0], seen[1])
    with torch.no_grad():
        acc = Y.clone()
        torch.testing.assert_close(g(X, Y, acc, X, index), seen[1][0])
        torch.testing.assert_close(acc, Y + X * 2)
        with pytest.raises(IndexError) as caught:
            g(X, Y, acc, X, index + 999)
        assert "kernels.py" in str(caught.value.__cause__)


def graphs_of(f, *args):
    """The graphs that dynamo makes of a function."""
    found = []

    def backend(graph, inputs):
        found.append(graph)
        return graph.forward

    torch.compile(f, backend=backend)(*args)
    return found


def payload_of(kernel, *args):
    return kernel.build_cache_kernel(PyTorchXLAKernel).dump_config(*args).backend_config


@nki.jit
def silu(x):
    """x * sigmoid(x)."""
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x)
    nl.store(out, tile * nl.sigmoid(tile))
    return out


@nki.jit
def silu_backward(x, d_out):
    """The gradient of silu."""
    d_x = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x)
    s = nl.sigmoid(tile)
    nl.store(d_x, nl.load(d_out) * (s * (tile * (1.0 - s) + 1.0)))
    return d_x


@pytest.fixture
def differentiable():
    register_autograd(silu, lambda ctx, d_out: silu_backward(ctx.saved_tensors[0], d_out))


# ---- torch.compile --------------------------------------------------------------------------------------------------
def test_values(compiled):
    f = compiled(lambda x, y: torch.sin(k.axpy(x, y, a=3.0)) + k.rows[2](x))
    torch.testing.assert_close(f(X, Y), torch.sin(X * 3 + Y) + X * 2)
    assert torch.equal(compiled(lambda x, y: k.axpy(y=y, x=x))(X, Y), X * 2 + Y)
    double, (narrow, total) = compiled(k.several.__call__)(X)
    assert torch.equal(double, X * 2) and narrow.dtype == torch.bfloat16 and total.shape == (64, 1)


def test_written_parameters(compiled):
    acc = Y.clone()
    result = compiled(lambda x, acc: k.accumulate(x * 2, acc) + 1)(X, acc)
    torch.testing.assert_close(acc, Y + X * 2)
    torch.testing.assert_close(result, acc + 1)
    same = compiled(lambda x, acc: k.accumulate(x, acc))(X, acc)
    assert same is acc or torch.equal(same, acc)


@nki.jit
def add_and_count(x, acc: k.nt.mutable_tensor):
    """acc += x; returns acc and the number of positive elements in each row."""
    count = nl.ndarray((x.shape[0], 1), nl.float32, buffer=nl.shared_hbm)
    tile = nl.load(x)
    nl.store(acc, nl.load(acc) + tile)
    nl.store(count, nl.sum(nl.greater(tile, 0.0, dtype=nl.float32), axis=1, keepdims=True))
    return acc, count


def test_written_and_new_results_together(compiled):
    for f in (add_and_count, compiled(lambda x, acc: add_and_count(x, acc))):
        acc = Y.clone()
        same, count = f(X, acc)
        assert torch.equal(acc, Y + X) and torch.equal(same, acc)
        assert torch.equal(count, (X > 0).sum(1, keepdim=True).float())


def test_one_op_with_the_payload_is_in_the_graph():
    (graph,) = graphs_of(lambda x, y: k.axpy(x, y).sum(), X, Y)
    (call,) = [n for n in graph.graph.nodes if "opennki" in str(n.target)]
    assert call.target is torch.ops.opennki.run.default
    assert call.args[1] == payload_of(k.axpy, X, Y)


def test_arguments_in_containers_and_constants_of_many_kinds(compiled):
    @dataclass(frozen=True)
    class Options:
        factor: float = 2.0

    @nki.jit
    def kernel(parts, named, dtype=nl.bfloat16, name="a", sizes=(1, 2), options=None):
        out = nl.ndarray(parts[0].shape, dtype, buffer=nl.shared_hbm)
        nl.store(out, (nl.load(parts[0]) + nl.load(named["y"])) * (options.factor if options else sizes[1]))
        return out

    options = Options(3.0)
    assert torch.equal(compiled(lambda x, y: kernel([x, x], {"y": y}, sizes=(1, 4)))(X, Y), ((X + Y) * 4).bfloat16())
    if VERSION < (2, 10):
        return  # dynamo of older versions takes no frozen dataclass for a constant
    f = compiled(lambda x, y: kernel((x,), {"y": y}, dtype=nl.float32, options=options))
    assert torch.equal(f(X, Y), (X + Y) * 3)


def test_another_shape_is_another_payload_also_where_sizes_are_open(compiled):
    f = compiled(lambda x: k.copy(x) + 1)
    for n in (4, 5, 6, 7, 5, 4):
        assert torch.equal(f(X[:n]), X[:n] + 1)
    g = compiled(lambda x: k.copy(x * 2), dynamic=True)
    for n in (3, 9):
        assert torch.equal(g(X[:n]), X[:n] * 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.float8_e4m3fn], ids=str)
def test_dtypes_under_compile(dtype):
    x = (X > 0).to(dtype)
    out = torch.compile(lambda x: k.move(x), backend="aot_eager", fullgraph=True)(x)
    assert out.dtype == dtype and torch.equal(out.float(), x.float())


def test_a_compiled_module_with_a_kernel(compiled):
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(16, 16)
            self.kernel = k.rows[2]

        def forward(self, x):
            return self.kernel(self.linear(x)) + x

    block = Block()
    with torch.no_grad():
        expected = block.linear(X) * 2 + X
        torch.testing.assert_close(block(X), expected)
        torch.testing.assert_close(compiled(block)(X), expected)


def test_a_kernel_that_prints_is_neither_dropped_nor_merged(compiled, capfd):
    f = compiled(lambda x: (k.shout(x), k.shout(x), x + 1)[2])
    f(torch.ones(1, 2))
    sys.stdout.flush()
    assert capfd.readouterr().out.count("shout") == 2


def test_a_kernel_of_another_mode_leaves_the_graph():
    simulated = nki.jit(k.copy, mode="simulation")
    f = torch.compile(lambda x: simulated(x * 2) + 1, backend="eager")
    assert torch.equal(f(X), X * 2 + 1)
    assert len(graphs_of(lambda x: simulated(x * 2) + 1, X)) == 2


def test_an_error_while_tracing_is_the_kernels():
    with pytest.raises(Exception, match=r"kernels\.py") as caught:
        torch.compile(lambda x: k.axpy(x, x), backend="eager", fullgraph=True)(torch.zeros(256, 16))
    chain, error = [], caught.value
    while error is not None:
        chain.append(error)
        error = error.__cause__ or error.__context__
    assert any(isinstance(e, NkiError) for e in chain)


def test_an_error_of_a_running_kernel_is_the_exception_itself(compiled):
    f = compiled(lambda table, index: k.pick(table, index) * 2)
    index = torch.tensor([[1], [2]], dtype=torch.int32)
    assert torch.equal(f(X, index), X[[1, 2]] * 2)
    with pytest.raises(IndexError) as caught:
        f(X, index + 999)
    assert "kernels.py" in str(caught.value.__cause__)
    assert torch.equal(f(X, index), X[[1, 2]] * 2)


# ---- derivatives ----------------------------------------------------------------------------------------------------
def expected_gradient(x):
    x = x.clone().requires_grad_()
    (torch.nn.functional.silu(x) ** 2).sum().backward()
    return x.grad


def test_a_backward_kernel(differentiable):
    x = X.clone().requires_grad_()
    (silu(x) ** 2).sum().backward()
    torch.testing.assert_close(x.grad, expected_gradient(X))
    assert silu(X).grad_fn is None and silu(x).requires_grad


def test_a_backward_kernel_under_compile(differentiable, compiled):
    x = X.clone().requires_grad_()
    (compiled(lambda x: silu(x * 1.0) ** 2)(x)).sum().backward()
    torch.testing.assert_close(x.grad, expected_gradient(X))


def test_a_rule_with_its_own_context_constants_and_several_results():
    @nki.jit
    def scaled(x, y, factor=2.0):
        a = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        b = nl.ndarray(x.shape, nl.int32, buffer=nl.shared_hbm)
        nl.store(a, nl.load(x) * factor)
        nl.store(b, nl.load(y))
        return a, b

    seen = []

    def setup(ctx, inputs, output):
        seen.append((len(inputs), len(output)))
        ctx.save_for_backward(inputs[0])

    register_autograd(scaled, lambda ctx, d_a, d_b: (d_a * ctx.constants["factor"], None), setup_context=setup)
    x = X.clone().requires_grad_()
    a, b = scaled(x, Y, factor=5.0)
    assert b.dtype == torch.int32 and not b.requires_grad
    a.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 5.0)) and seen == [(2, 2)]
    for f in (torch.compile(lambda x: scaled(x, Y, factor=5.0)[0], backend="aot_eager", fullgraph=True),):
        x.grad = None
        f(x).sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, 5.0))


def test_a_rule_may_be_replaced(differentiable):
    x = X.clone().requires_grad_()
    silu(x).sum().backward()
    register_autograd(silu, lambda ctx, d_out: d_out * 0 + 7)
    x.grad = None
    silu(x).sum().backward()
    assert torch.equal(x.grad, torch.full_like(X, 7.0))


def test_without_a_rule_the_backward_pass_says_so():
    x = X.clone().requires_grad_()
    with pytest.raises(NkiDifferentiationError, match="Differentiation rule for 'copy' not implemented") as caught:
        k.copy(x).sum().backward()
    assert "kernels.py" in str(caught.value) and "register_autograd" in str(caught.value)
    with pytest.raises(Exception, match="Differentiation rule for 'copy' not implemented"):
        torch.compile(lambda x: k.copy(x).sum(), backend="aot_eager", fullgraph=True)(x).backward()


def test_a_rule_with_another_number_of_gradients_is_refused():
    register_autograd(silu, lambda ctx, d: (d, d))
    with pytest.raises(NkiValueError, match="1 operands gives 2 gradients"):
        silu(X.clone().requires_grad_()).sum().backward()
    with pytest.raises(NkiTypeError, match="no kernel"):
        register_autograd(lambda x: x, lambda ctx, d: d)


def test_a_written_tensor_has_a_history():
    register_autograd(k.accumulate, lambda ctx, d: (d, d))
    x, start = X.clone().requires_grad_(), Y.clone().requires_grad_()
    acc = start * 2
    result = k.accumulate(x * 3, acc)
    assert result is acc
    (acc ** 2).sum().backward()
    torch.testing.assert_close(x.grad, 2 * (X * 3 + Y * 2) * 3)
    torch.testing.assert_close(start.grad, 2 * (X * 3 + Y * 2) * 2)
    with pytest.raises(RuntimeError, match="leaf"):
        k.accumulate(X, start)


def test_gradcheck_and_torch_func(differentiable):
    torch.testing.assert_close(torch.func.grad(lambda x: (silu(x) ** 2).sum())(X), expected_gradient(X))
    _, pullback = torch.func.vjp(silu, X)
    torch.testing.assert_close(pullback(torch.ones_like(X))[0], silu_backward(X, torch.ones_like(X)))
    x = X.clone().requires_grad_()
    out = torch.utils.checkpoint.checkpoint(lambda x: silu(silu(x)), x, use_reentrant=False)
    out.sum().backward()
    again = X.clone().requires_grad_()
    torch.nn.functional.silu(torch.nn.functional.silu(again)).sum().backward()
    torch.testing.assert_close(x.grad, again.grad)


# ---- vmap -----------------------------------------------------------------------------------------------------------
def test_vmap():
    batch = torch.stack([X, Y, X + Y])
    f = lambda x: k.axpy(x, Y)
    assert torch.equal(torch.vmap(f)(batch), batch * 2 + Y)
    assert torch.equal(torch.vmap(k.axpy, in_dims=(None, 0))(X, batch), X * 2 + batch)
    assert torch.equal(torch.vmap(f, in_dims=2, out_dims=1)(batch.permute(1, 2, 0)), (batch * 2 + Y).transpose(0, 1))
    nested = torch.vmap(torch.vmap(f))(torch.stack([batch, batch]))
    assert torch.equal(nested[1], batch * 2 + Y)
    torch.testing.assert_close(torch.compile(torch.vmap(f), backend="aot_eager", fullgraph=True)(batch), batch * 2 + Y)


def test_vmap_of_a_gradient_and_of_several_results(differentiable):
    batch = torch.stack([X, Y])
    grads = torch.vmap(torch.func.grad(lambda x: (silu(x) ** 2).sum()))(batch)
    torch.testing.assert_close(grads[1], expected_gradient(Y))
    double, (narrow, total) = torch.vmap(k.several)(batch)
    assert double.shape == batch.shape and narrow.dtype == torch.bfloat16 and total.shape == (2, 64, 1)
    x = batch.clone().requires_grad_()
    (torch.vmap(silu)(x) ** 2).sum().backward()
    torch.testing.assert_close(x.grad[0], expected_gradient(X))


def test_vmap_of_a_kernel_that_writes():
    acc = torch.stack([Y, X])
    count = torch.vmap(lambda x, acc: add_and_count(x, acc)[1])(torch.stack([X, Y]), acc)
    assert torch.equal(acc, torch.stack([X + Y, Y + X]))
    assert torch.equal(count[1], (Y > 0).sum(1, keepdim=True).float())
    with pytest.raises(NkiValueError, match="writes 'acc', which is not batched"):
        torch.vmap(lambda x: k.accumulate(x, Y))(torch.stack([X, Y]))


# ---- export, make_fx, opcheck ---------------------------------------------------------------------------------------
class Model(torch.nn.Module):
    """A module with a kernel on a grid and one that writes a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(64, 16))

    def forward(self, x):
        k.accumulate(x, self.total)
        return k.rows[2](x) + self.total


@pytest.mark.parametrize("strict", [True, False])
def test_export_and_its_file_in_another_process(tmp_path, strict):
    exported = torch.export.export(Model(), (X,), strict=strict)
    assert payload_of(k.rows[2], X) in [a for n in exported.graph.nodes for a in n.args if isinstance(a, str)]
    file = tmp_path / "model.pt2"
    torch.export.save(exported, file)
    assert torch.equal(exported.module()(X), X * 3)
    torch.save(X, tmp_path / "x.pt")
    code = (f"import torch, opennki.bind.torch\nm = torch.export.load({str(file)!r}).module()\nx = torch.load({str(tmp_path / 'x.pt')!r})\n"
            "print(torch.equal(m(x), x * 3))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "True", done.stderr


def test_export_refuses_an_open_size():
    class One(torch.nn.Module):
        def forward(self, x):
            return k.copy(x)

    with pytest.raises(Exception, match=r"Constraints violated|specialized|constant"):
        torch.export.export(One(), (X,), dynamic_shapes=({0: torch.export.Dim("n", min=2, max=100)},))


def test_make_fx_and_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(lambda x: k.axpy(x, x * 2))(X)
    assert torch.equal(graph(Y), Y * 4)
    with FakeTensorMode():
        _, (narrow, total) = k.several(torch.empty(64, 16))
        assert narrow.dtype == torch.bfloat16 and total.shape == (64, 1)


def test_opcheck(differentiable):
    silu(X.clone().requires_grad_()).sum().backward()
    check = torch.library.opcheck
    check(torch.ops.opennki.call.default, ([X.clone().requires_grad_()], payload_of(silu, X)))
    check(torch.ops.opennki.call.default, ([X, Y], payload_of(k.axpy, X, Y)))
    check(torch.ops.opennki.run.default, ([X, Y], payload_of(k.axpy, X, Y)))
    check(torch.ops.opennki.call_printing.default, ([torch.ones(1, 2)], payload_of(k.shout, torch.ones(1, 2))))
    check(torch.ops.opennki.call_into.default, ([X], [Y.clone()], payload_of(k.accumulate, X, Y)))


# ---- the API of current Neuron releases -----------------------------------------------------------------------------
def test_nki_op_and_wrap_nki(compiled):
    name = f"opennki_tests::scaled_{id(compiled)}"

    @nki_op(name, mutates_args={})
    def scaled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return wrap_nki(k.rows)[2](k.axpy(x, y))

    scaled.register_autograd(lambda ctx, g: (g * 4, g * 2))
    assert torch.equal(scaled(X, Y), (X * 2 + Y) * 2)
    assert torch.equal(compiled(lambda x, y: scaled(x, y) + 1)(X, Y), (X * 2 + Y) * 2 + 1)
    x = X.clone().requires_grad_()
    scaled(x, Y).sum().backward()
    assert torch.equal(x.grad, torch.full_like(X, 4.0))
    assert torch.equal(compiled(lambda x: wrap_nki(k.rows)[2](x))(X), X * 2)
    assert torch.equal(wrap_nki(k.copy.func)(X), X)
    with pytest.raises(NkiTypeError, match="namespace::op"):
        nki_op("scaled", mutates_args={})


def test_nki_op_that_mutates():
    @nki_op("opennki_tests::accumulate", mutates_args={"acc"})
    def accumulate(x: torch.Tensor, acc: torch.Tensor) -> None:
        k.accumulate(x, acc)

    acc = Y.clone()
    torch.compile(lambda x, acc: accumulate(x, acc), backend="aot_eager", fullgraph=True)(X, acc)
    assert torch.equal(acc, X + Y)


def test_the_numbers_are_those_of_numpy():
    np.testing.assert_array_equal(torch.compile(lambda x: k.axpy(x, x), backend="aot_eager")(X).numpy(), k.axpy(X.numpy(), X.numpy()))
