"""Kernels on XLA tensors: the program that PyTorch/XLA makes, and its values on XLA's CPU client."""

from __future__ import annotations

import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm

from opennki.bind.host import host_kernel
from opennki.bind.torch import PyTorchXLAKernel, register_autograd
from opennki.bind.torch_xla import bridge, hlo as messages, register
from opennki.errors import NkiTypeError, NkiValueError, NkiWarning
from opennki.kernels.framework import UnifiedKernel
from opennki.kernels.payload import decode_backend_config
from opennki.tools.hlo_reader import find_calls
from tests.bind import kernels as k
from tests.bind.kernels import nki, nl
from tests.bind.torch_xla.helpers import DEVICE, X, Y, hlo, on, settle


def payload_of(kernel, *args):
    return kernel.build_cache_kernel(PyTorchXLAKernel).dump_config(*args).backend_config


@pytest.fixture(autouse=True)
def settled():
    yield
    settle()


# ---- the program ----------------------------------------------------------------------------------------------------
def test_xlas_cpu_client_runs_the_call_itself():
    assert bridge.handled()
    result = k.axpy(*on(X, Y))
    assert result.device.type == "xla" and torch.equal(result.cpu(), X * 2 + Y)


def test_the_call_in_the_program():
    text = hlo(k.axpy(*on(X, Y)))
    assert 'custom_call_target="AwsNeuronNkiKernel"' in text and 'nki.kernel="axpy"' in text and 'nki.has_collectives="false"' in text
    (call,) = find_calls(text.encode())[1]
    assert call.payload.decode() == payload_of(k.axpy, X, Y)


def test_the_payload_is_that_of_numpy_and_of_tensors_of_the_cpu():
    for kernel, tensors in ((k.axpy, (X, Y)), (k.rows[2], (X,)), (k.accumulate, (X, Y)), (k.several, (X,))):
        ours = payload_of(kernel, *on(*tensors) if len(tensors) > 1 else [on(*tensors)])
        assert ours == payload_of(kernel, *tensors)
        assert ours == UnifiedKernel(kernel).dump_config(*[t.numpy() for t in tensors]).backend_config


def test_the_module_for_the_vendors_compiler():
    payload = payload_of(k.accumulate, X, Y)
    (call,) = find_calls(bridge.module_of(payload, False))[1]
    assert call.target == messages.TARGET == "AwsNeuronNkiKernel" and call.payload.decode() == payload
    computation = torch_xla.core.xla_builder.computation_from_module_proto("f", bridge.module_of(payload, False))
    text = torch_xla.core.xla_builder.get_computation_hlo(computation)
    assert "output_to_operand_aliasing={{}: (1, {})}" in text and "API_VERSION_TYPED_FFI" not in text


def test_aliases_of_several_results():
    text = hlo(k.accumulate(*on(X, Y)))
    assert "output_to_operand_aliasing={{}: (1, {})}" in text

    @nki.jit
    def both(x, a: k.nt.mutable_tensor, b: k.nt.mutable_tensor):
        nl.store(b, nl.load(b) + nl.load(x))
        nl.store(a, nl.load(a) * 2)
        return b, a

    a, b = on(X.clone(), Y.clone())
    both(on(X), a, b)
    assert "output_to_operand_aliasing={{0}: (2, {}), {1}: (1, {})}" in hlo(a, b)
    assert torch.equal(a.cpu(), X * 2) and torch.equal(b.cpu(), Y + X)


def test_a_call_of_one_device_only():
    with pytest.raises(NkiValueError, match="tensors on cpu, xla:0"):
        k.axpy(on(X), Y)
    with pytest.raises(NkiTypeError, match="in the payload"):
        torch.ops.opennki.run([on(X), on(Y.bfloat16())], payload_of(k.axpy, X, Y))


# ---- values ---------------------------------------------------------------------------------------------------------
def test_values_in_a_longer_program():
    x, y = on(X, Y)
    result = torch.sin(k.axpy(x * 2, y, a=3.0)) + k.rows[2](x)
    torch.testing.assert_close(result.cpu(), torch.sin(X * 6 + Y) + X * 2)
    double, (narrow, total) = k.several(x)
    xm.mark_step()
    assert torch.equal(double.cpu(), X * 2) and torch.equal(narrow.cpu(), X.bfloat16())
    torch.testing.assert_close(total.cpu(), X.sum(1, keepdim=True), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8,
                                   torch.int16, torch.int32, torch.uint8, torch.bool], ids=str)
def test_dtypes(dtype):
    x = (X * 4).abs().to(torch.int32).to(dtype) if not dtype.is_floating_point else X.to(dtype)
    out = k.move(on(x)).cpu()
    assert out.dtype == dtype and torch.equal(out.float(), x.float())


@pytest.mark.parametrize("make", [lambda x: x.T.contiguous().T, lambda x: torch.cat([x, x], 1)[:, ::2][:, :16],
                                  lambda x: x[:, :1].expand(64, 16), lambda x: torch.cat([x, x])[64:]],
                         ids=["transposed", "strided", "expanded", "offset"])
def test_any_layout_is_read(make):
    x, y = on(X, Y)
    assert torch.equal(k.axpy(make(x), y).cpu(), make(X) * 2 + Y)


def test_numpy_arrays_and_constants():
    with pytest.raises(NkiValueError, match="tensors on cpu, xla:0"):
        k.axpy(on(X), Y.numpy())
    for constant in (1, 1.0, -0.5):
        assert torch.equal(k.axpy(*on(X, Y), a=constant).cpu(), X * constant + Y)


def test_denormals_are_kept():
    tiny = torch.full((4, 4), 1e-40)
    assert (k.axpy(*on(tiny, tiny)).cpu().view(torch.int32) == 3 * tiny.view(torch.int32)).all()


def test_a_written_parameter():
    x, acc = on(X, Y.clone())
    assert k.accumulate(x, acc) is acc
    k.accumulate(x, acc)
    assert torch.equal(acc.cpu(), Y + X + X)
    out = on(torch.zeros(64, 16))
    assert nki.jit(k.scale_into, mode="torchxla", kernel_return=False)(x, out) is out and torch.equal(out.cpu(), X * 3)
    part = on(torch.zeros(128, 16))
    k.accumulate(x, part[64:])
    assert torch.equal(part.cpu(), torch.cat([torch.zeros(64, 16), X]))


def test_the_callers_tensor_is_not_changed_by_the_functional_op():
    x, y = on(X, Y)
    (result,) = torch.ops.opennki.run([x, y], payload_of(k.accumulate, X, Y))
    assert torch.equal(result.cpu(), X + Y) and torch.equal(y.cpu(), Y)


def test_the_op_that_stores_into_tensors():
    """It is in programs that were exported on the CPU."""
    x, y = on(X, Y)
    torch.ops.opennki.call_into([x], [y], payload_of(k.accumulate, X, Y))
    assert torch.equal(y.cpu(), X + Y) and torch.equal(x.cpu(), X)
    with pytest.raises(NkiTypeError, match="in the payload"):
        torch.ops.opennki.call_into([x], [y[:32]], payload_of(k.accumulate, X, Y))


def test_an_exported_program_on_the_device():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(64, 16))

        def forward(self, x):
            k.accumulate(x, self.total)
            return k.rows[2](x) + self.total

    module = torch.export.export(Model(), (X,)).module().to(DEVICE)
    assert torch.equal(module(on(X)).cpu(), X * 3)
    assert torch.equal(module(on(X)).cpu(), X * 4)


def test_derivatives():
    register_autograd(k.rows, lambda ctx, d: k.rows[2](d))
    x = on(X).requires_grad_()
    (k.rows[2](x) ** 2).sum().backward()
    torch.testing.assert_close(x.grad.cpu(), 8 * X)


def test_a_training_step():
    register_autograd(k.rows, lambda ctx, d: k.rows[2](d))
    losses = {}
    for device, double in ((DEVICE, k.rows[2]), (torch.device("cpu"), lambda t: t * 2)):
        torch.manual_seed(0)
        model = torch.nn.Linear(16, 16).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss = (double(model(X.to(device))) ** 2).mean()
            loss.backward()
            xm.optimizer_step(optimizer) if device is DEVICE else optimizer.step()
            xm.mark_step()
            losses.setdefault(device.type, []).append(loss.item())
    assert losses["xla"] == pytest.approx(losses["cpu"], rel=1e-5) and losses["cpu"][0] > losses["cpu"][-1]


def test_prints_happen_once_for_each_step(capfd):
    result = k.shout(on(torch.ones(1, 2)))
    xm.mark_step()
    xm.wait_device_ops()
    assert torch.equal(result.cpu(), torch.ones(1, 2))
    assert capfd.readouterr().out.count("shout") == 1


# ---- the way through the host ---------------------------------------------------------------------------------------
def test_through_the_host(monkeypatch):
    monkeypatch.setenv("OPENNKI_XLA_HOST", "1")
    assert not bridge.handled()
    x, acc = on(X, Y.clone())
    result = k.axpy(x, acc)
    assert "AwsNeuronNkiKernel" not in hlo(result) and torch.equal(result.cpu(), X * 2 + Y)
    k.accumulate(x, acc)
    assert torch.equal(acc.cpu(), X + Y)


def test_where_the_table_is_not_found_kernels_go_through_the_host(monkeypatch):
    found = register.tables()
    assert len(found) == 1 and found[0][0] >= 0
    monkeypatch.setattr(bridge, "_state", [])
    monkeypatch.setattr(register, "_registered", [])
    monkeypatch.setattr(register, "tables", lambda: found * 2)
    with pytest.warns(NkiWarning, match="2 places in _XLAC look like XLA's table"):
        result = k.axpy(*on(X, Y))
    assert "AwsNeuronNkiKernel" not in hlo(result) and torch.equal(result.cpu(), X * 2 + Y)
    assert not bridge.handled()


def test_xlas_refusal_is_the_reason(monkeypatch):
    assert bridge.handled()
    monkeypatch.setattr(register, "_registered", [])
    with pytest.raises(register.CannotRegister, match="AwsNeuronNkiKernel"):  # there is a handler of this name already
        register.register_handler()


def test_the_kernel_is_decoded_once():
    payload = payload_of(k.axpy, X, Y)
    for _ in range(3):
        k.axpy(*on(X, Y)).cpu()
    assert host_kernel(payload.encode()) is host_kernel(decode_backend_config(payload) and payload.encode())
