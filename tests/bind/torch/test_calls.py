"""Kernels called with torch tensors: values, results, dtypes, memory, constants, errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from opennki import settings
from opennki.bind.torch import PyTorchXLAKernel
from opennki.bind.torch import ops
from opennki.errors import NkiError, NkiParseError, NkiTypeError, NkiValueError
from opennki.kernels.framework import UnifiedKernel
from opennki.kernels.modes import compute_mode
from tests.bind import kernels as k
from tests.bind.kernels import nki, nl, nt

X, Y = torch.from_numpy(k.numbers(64, 16)), torch.from_numpy(k.numbers(64, 16, seed=1))
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
OTHERS = [torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16, torch.uint32, torch.bool]


def bits(t):
    return t.contiguous().view(torch.uint8) if t.dtype != torch.bool else t


def sample(dtype, *shape, seed=0):
    values = torch.from_numpy(k.numbers(*shape, seed=seed)) * 4
    if dtype == torch.bool:
        return values > 0
    return values.abs().to(torch.int32).to(dtype) if not dtype.is_floating_point else values.to(dtype)


def test_the_class_is_chosen_by_the_arguments():
    assert compute_mode((X,), {}) is PyTorchXLAKernel
    assert compute_mode((np.ones(3),), {"k": [X]}) is PyTorchXLAKernel
    assert k.axpy.build_cache_kernel(PyTorchXLAKernel).mode == "torchxla"


def test_values():
    assert torch.equal(k.axpy(X, Y), X * 2 + Y)
    assert torch.equal(k.axpy(X, Y, a=-0.5), X * -0.5 + Y)
    assert torch.equal(k.axpy(y=Y, x=X), X * 2 + Y)
    assert torch.equal(k.axpy(a=3.0, y=Y, x=X), X * 3 + Y)
    assert torch.equal(k.rows[2](X), X * 2)
    torch.testing.assert_close(k.matmul(X, Y), X.T @ Y, rtol=1e-5, atol=1e-5)


def test_one_tensor_may_be_several_operands_and_that_is_not_remembered():
    assert torch.equal(k.axpy(X, X), X * 3)
    assert torch.equal(k.axpy(y=X, x=Y), Y * 2 + X)
    assert torch.equal(k.axpy(y=Y, x=Y), Y * 3)
    assert torch.equal(k.axpy(y=Y, x=X), X * 2 + Y)


def test_results_keep_their_structure():
    double, rest = k.several(X)
    assert isinstance(rest, list) and torch.equal(double, X * 2) and torch.equal(rest[0], X.bfloat16())
    torch.testing.assert_close(rest[1], X.sum(1, keepdim=True), rtol=1e-5, atol=1e-6)


def test_arguments_in_containers():
    @nki.jit
    def total(parts, named, factor=1.0):
        out = nl.ndarray(parts[0].shape, parts[0].dtype, buffer=nl.shared_hbm)
        nl.store(out, (nl.load(parts[0]) + nl.load(parts[1]) + nl.load(named["z"])) * factor)
        return out

    assert torch.equal(total([X, Y], {"z": X}, factor=2.0), (X + Y + X) * 2)
    assert torch.equal(total((X, X), {"z": Y}), X + X + Y)


def test_numpy_arrays_beside_tensors_are_tensors():
    acc = Y.numpy().copy()
    assert torch.equal(k.axpy(X, Y.numpy()), X * 2 + Y)
    k.accumulate(X, acc)
    np.testing.assert_array_equal(acc, X.numpy() + Y.numpy())


@pytest.mark.parametrize("dtype", FLOATS + OTHERS, ids=str)
def test_dtypes_arrive_and_return_as_they_are(dtype):
    x = sample(dtype, 32, 16)
    out = k.move(x)
    assert out.dtype == dtype and torch.equal(bits(out), bits(x))
    assert out.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_arithmetic_in_each_float_dtype_is_that_of_simulation(dtype):
    from opennki.kernels.torch_arrays import to_numpy

    x, y = sample(dtype, 64, 16), sample(dtype, 64, 16, seed=3)
    expected = nki.simulate_kernel(k.axpy, to_numpy(x), to_numpy(y))
    np.testing.assert_array_equal(to_numpy(k.axpy(x, y)).view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64], ids=str)
def test_64_bit_tensors_are_refused_with_the_way_out(dtype):
    with pytest.raises(NkiTypeError, match=r"convert the array before the call"):
        k.move(torch.zeros(4, 4, dtype=dtype))


def test_a_dtype_that_kernels_do_not_have_says_which_there_are():
    with pytest.raises(NkiTypeError, match=r"a tensor of dtype torch\.complex64") as caught:
        k.move(torch.zeros(4, 4, dtype=torch.complex64))
    assert "bfloat16" in str(caught.value)


def test_a_result_that_torch_cannot_hold_says_so_and_the_setting_keeps_its_bits(monkeypatch):
    @nki.jit
    def narrow(x):
        out = nl.ndarray(x.shape, nl.float8_e4m3, buffer=nl.shared_hbm)
        nl.store(out, nl.load(x))
        return out

    with pytest.raises(NkiTypeError, match="float8_e4m3, which torch does not have"):
        narrow(X)
    monkeypatch.setenv("OPENNKI_TORCH_DTYPES", "float8_e4m3fn=float8_e4m3")
    kept = narrow(X)
    assert kept.dtype == torch.float8_e4m3fn
    expected = nki.simulate_kernel(narrow, X.numpy())
    np.testing.assert_array_equal(kept.view(torch.uint8).numpy(), expected.view(np.uint8))
    assert k.move.build_cache_kernel(PyTorchXLAKernel).translate_to_neuron_dtype(torch.float8_e4m3fn) == "float8_e4m3"
    torch.testing.assert_close(k.axpy(kept, kept, a=0.0).view(torch.uint8), kept.view(torch.uint8))


@pytest.mark.parametrize("text", ["float8_e4m3fn", "a=b", "float32=float16"])
def test_a_wrong_override_is_an_error(monkeypatch, text):
    monkeypatch.setenv("OPENNKI_TORCH_DTYPES", text)
    with pytest.raises((settings.SettingsError, NkiTypeError), match="OPENNKI_TORCH_DTYPES"):
        k.move(sample(torch.float32, 4, 4))


@pytest.mark.parametrize("make", [
    lambda x: x.T.contiguous().T, lambda x: torch.cat([x, x], 1)[:, ::2][:, :16], lambda x: x[:, :1].expand(64, 16),
    lambda x: torch.cat([x, x])[64:], lambda x: x.flip(0).flip(0)], ids=["transposed", "strided", "expanded", "offset", "copy"])
def test_any_layout_is_read(make):
    x = make(X)
    assert torch.equal(k.axpy(x, Y), x * 2 + Y)


@pytest.mark.parametrize("shape", [(1,), (3, 1, 5), (2, 3, 4, 5)], ids=str)
def test_any_shape_moves(shape):
    x = torch.arange(float(np.prod(shape))).reshape(shape)
    assert torch.equal(k.move(x), x)


def test_a_module_parameter_and_a_tensor_that_requires_a_gradient_are_tensors():
    w = torch.nn.Parameter(X.clone())
    with torch.no_grad():
        assert torch.equal(k.axpy(w, Y), X * 2 + Y)
    with torch.inference_mode():
        assert torch.equal(k.axpy(X.clone(), Y), X * 2 + Y)


# ---- parameters that the kernel writes ------------------------------------------------------------------------------
def test_a_written_parameter_is_changed_in_place_and_returned():
    acc = Y.clone()
    version = acc._version
    result = k.accumulate(X, acc)
    assert result is acc and torch.equal(acc, X + Y) and acc._version > version
    assert torch.equal(k.accumulate(acc=acc, x=X), X + Y + X) and torch.equal(acc, X + Y + X)


def test_a_kernel_of_the_older_style_writes_into_its_arguments():
    out = torch.zeros(64, 16)
    result = nki.jit(k.scale_into, mode="torchxla", kernel_return=False)(X, out)
    assert result is out and torch.equal(out, X * 3)
    out.zero_()
    k.scale_into(X, out)  # nki.trace
    assert torch.equal(out, X * 3)


@pytest.mark.parametrize("make", [lambda: torch.zeros(16, 64).T, lambda: torch.zeros(64, 32)[:, ::2], lambda: torch.zeros(128, 16)[64:]],
                         ids=["transposed", "strided", "offset"])
def test_a_written_parameter_may_have_any_layout(make):
    acc = make()
    acc.copy_(Y)
    whole = acc._base.clone()
    assert k.accumulate(X, acc) is acc
    assert torch.equal(acc, X + Y)
    changed = (acc._base != whole).sum()
    assert 0 < changed <= acc.numel()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32, torch.float8_e5m2], ids=str)
def test_written_parameters_of_other_dtypes(dtype):
    x, acc = torch.ones(32, 8).to(dtype), torch.full((32, 8), 2.0).to(dtype)
    k.accumulate(x, acc)
    assert torch.equal(acc.float(), torch.full((32, 8), 3.0))


@pytest.mark.parametrize("arguments", [
    lambda a: (a[:64], a[:64]), lambda a: (a[32:96], a[:64]), lambda a: (torch.ones(64, 16), torch.ones(1, 16).expand(64, 16))],
    ids=["same", "overlapping", "expanded"])
def test_a_written_parameter_shares_memory_with_nothing(arguments):
    whole = torch.ones(128, 16)
    with pytest.raises(NkiValueError, match=r"writes 'acc', which (shares memory with 'x'|holds several of its elements)"):
        k.accumulate(*arguments(whole))
    assert torch.equal(whole, torch.ones(128, 16))


# ---- constants ------------------------------------------------------------------------------------------------------
def test_constants_differ_by_type_and_bits():
    seen = []

    @nki.jit
    def kernel(x, c):
        seen.append(c)
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.load(x) * c)
        return out

    for constant in (1, 1.0, True, 0.0, -0.0, 1, 1.0, True, 0.0, -0.0):
        kernel(X, constant)
    assert list(map(repr, seen)) == ["1", "1.0", "True", "0.0", "-0.0"]


FACTOR = 2.0


@nki.jit
def by_global(x):
    """x * FACTOR."""
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.load(x) * FACTOR)
    return out


def test_a_changed_global_traces_again(monkeypatch):
    assert torch.equal(by_global(X), X * 2)
    monkeypatch.setitem(by_global.func.__globals__, "FACTOR", 5.0)
    assert torch.equal(by_global(X), X * 5)


def test_a_changed_closure_traces_again():
    factor = 2.0

    @nki.jit
    def kernel(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.load(x) * factor)
        return out

    assert torch.equal(kernel(X), X * 2)
    factor = 7.0
    assert torch.equal(kernel(X), X * 7)


def test_a_changed_setting_traces_again(monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    k.copy(X)
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "no_chip")
    with pytest.raises(NkiError, match="no_chip"):
        k.copy(X)


def test_a_constant_that_cannot_be_a_key_has_the_documented_code():
    with pytest.raises(NkiTypeError) as caught:
        k.axpy(X, Y, a=[2.0])
    assert caught.value.code == "err_nki_param_not_hashable"


def test_a_kernel_is_traced_once_for_a_set_of_shapes():
    traced = []

    @nki.jit
    def kernel(x):
        traced.append(x.shape)
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.load(x))
        return out

    for _ in range(3):
        kernel(X)
        kernel(X[:32])
        kernel(X.T)
    assert len(traced) == 3


# ---- the payload ----------------------------------------------------------------------------------------------------
def test_the_payload_is_that_of_the_other_bridges():
    concrete = k.axpy.build_cache_kernel(PyTorchXLAKernel)
    ours = concrete.dump_config(X, Y, 3.0)
    assert ours == UnifiedKernel(k.axpy).dump_config(X.numpy(), Y.numpy(), 3.0)
    jax = pytest.importorskip("jax")
    from opennki.bind.jax import JAXKernel

    jnp = jax.numpy
    for kernel, tensors in ((k.axpy, (X, Y)), (k.rows[2], (X,)), (k.accumulate, (X, Y)), (k.several, (X,)), (k.move, (X.bfloat16(),)),
                            (k.move, (X > 0,)), (k.move, (X.to(torch.float8_e5m2),))):
        arrays = [jnp.asarray(t.float().numpy()).astype(str(t.dtype).partition(".")[2]) for t in tensors]
        assert (kernel.build_cache_kernel(PyTorchXLAKernel).dump_config(*tensors)
                == kernel.build_cache_kernel(JAXKernel).dump_config(*arrays))


def test_new_values_of_parameters_are_no_tensors_of_their_own():
    plan = ops.plan_of(payload_of(k.accumulate, X, Y))
    assert plan.excluded_output_tensors == {0} and plan.written == [1] and plan.fresh == []
    assert not ops.plan_of(payload_of(k.several, X)).excluded_output_tensors


def payload_of(kernel, *args):
    return kernel.build_cache_kernel(PyTorchXLAKernel).dump_config(*args).backend_config


def test_the_ops_take_any_payload_and_check_their_operands():
    payload = payload_of(k.axpy, X, Y)
    assert torch.equal(torch.ops.opennki.call([X, Y], payload)[0], X * 2 + Y)
    functional = torch.ops.opennki.call([X, Y], payload_of(k.accumulate, X, Y))
    assert torch.equal(functional[0], X + Y)
    for operands in ([X], [X, Y, Y], [X, Y.bfloat16()], [X, Y[:32]], [X, Y.T]):
        with pytest.raises(NkiTypeError, match=r"in its payload|in the payload"):
            torch.ops.opennki.call(operands, payload)
    for targets in ([], [Y[:32]], [Y.half()]):
        with pytest.raises(NkiTypeError, match=r"in its payload|in the payload"):
            torch.ops.opennki.call_into([X], targets, payload_of(k.accumulate, X, Y))
    for text in ("", "no payload", "é", payload[:-8]):
        with pytest.raises(NkiParseError):
            torch.ops.opennki.call([X, Y], text)


def test_payloads_of_the_same_length_and_end_are_told_apart():
    first, second = payload_of(k.axpy, X, Y, 2.0), payload_of(k.axpy, X, Y, 3.0)
    assert (len(first), first[-64:-32]) == (len(second), second[-64:-32]), "what plan_of looks at first"
    for _ in range(2):
        assert torch.equal(torch.ops.opennki.call([X, Y], first)[0], X * 2 + Y)
        assert torch.equal(torch.ops.opennki.call([X, Y], second)[0], X * 3 + Y)


# ---- errors ---------------------------------------------------------------------------------------------------------
def test_a_kernel_error_is_the_exception_itself_and_the_next_call_is_right():
    index = torch.tensor([[1], [999]], dtype=torch.int32)
    for _ in range(2):
        with pytest.raises(IndexError) as caught:
            k.pick(X, index)
        assert "err_tensor_access_out_of_bound" in str(caught.value.__cause__) and "kernels.py" in str(caught.value.__cause__)
        assert torch.equal(k.pick(X, index.clamp(max=63)), X[[1, 63]])


def test_an_error_while_tracing_is_at_the_kernels_line():
    with pytest.raises(NkiError, match=r"kernels\.py:\d+"):
        k.axpy(torch.zeros(256, 16), torch.zeros(256, 16))


def test_tensors_elsewhere_are_refused(monkeypatch):
    meta = k.axpy(X.to("meta"), Y.to("meta"))
    assert meta.device.type == "meta" and meta.shape == (64, 16)
    with pytest.raises(NotImplementedError, match=r"sparse|Sparse"):
        k.copy(torch.eye(4).to_sparse())


def test_denormals_are_kept_where_torch_flushes_them():
    tiny = torch.full((4, 4), 1e-40)
    three = int(np.float32(1e-40).view(np.int32)) * 3
    assert torch.set_flush_denormal(True)
    try:
        assert (k.axpy(tiny, tiny).view(torch.int32) == three).all()
        assert (tiny * 1.0 == 0).all(), "the mode of the thread is what it was"
    finally:
        torch.set_flush_denormal(False)


def test_simulation_and_eager_debugging_take_torch_tensors(monkeypatch, capsys):
    assert torch.equal(nki.simulate_kernel(k.axpy, X, Y), X * 2 + Y)
    monkeypatch.setenv("OPENNKI_EAGER", "1")

    @nki.jit
    def kernel(x):
        tile = nl.load(x)
        print("value", tile)
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nl.store(out, tile * 2)
        return out

    assert torch.equal(kernel(torch.ones(2, 2)), torch.full((2, 2), 2.0))
    assert "[[1. 1.]" in capsys.readouterr().out


def test_printing():
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        k.shout(torch.ones(1, 2))
    assert "shout" in out.getvalue()
    assert ops.plan_of(payload_of(k.shout, torch.ones(1, 2))).payload


def test_unused_keyword_types(monkeypatch):
    """A mutable tensor annotation and a default may stand together."""

    @nki.jit
    def kernel(x, acc: nt.mutable_tensor, factor=2.0, kind="a"):
        nl.store(acc, nl.load(acc) + nl.load(x) * factor)
        return acc

    acc = torch.zeros(4, 4)
    kernel(torch.ones(4, 4), acc, kind="b", factor=3.0)
    assert torch.equal(acc, torch.full((4, 4), 3.0))
