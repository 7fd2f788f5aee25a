"""The kernels of neuronxcc.nki.kernels.vision against PyTorch."""

from __future__ import annotations

import warnings

import numpy as np
import opennki.dropin  # noqa: F401  isort: skip
import pytest

from neuronxcc import nki
from neuronxcc.nki.kernels import vision
from neuronxcc.nki.kernels.vision import adaptive_avg_pool2d_kernel as adaptive
from neuronxcc.nki.kernels.vision import resize_nearest_fixed_dma_kernel as resize
from neuronxcc.nki.kernels.vision import select_and_scatter_kernel as scatter
from opennki.errors import NkiError, NkiTypeError, NkiValueError
from opennki.ir.nodes import Instr, statements
from opennki.timing import estimate
from tests.kernels.library.attention_oracle import BF16, normal

torch = pytest.importorskip("torch", reason="PyTorch is the oracle of these kernels")


def simulate(*args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return nki.simulate_kernel(*args, **kwargs)


def float_tensor(x):
    return torch.tensor(np.asarray(x).astype(np.float32))


def pooled_gradient(x, seed=5):
    """The pooled image's gradient, and by PyTorch that of the image."""
    leaf = float_tensor(x).requires_grad_()
    pooled = torch.nn.functional.max_pool2d(leaf, 3, 2, 1)
    gradient = normal(seed, *pooled.shape, dtype=x.dtype)
    pooled.backward(float_tensor(gradient))
    return gradient, leaf.grad.numpy()


@pytest.mark.parametrize("shape", [(2, 64, 8, 8), (2, 3, 9, 11), (1, 130, 7, 6), (1, 1, 1, 1), (1, 2, 2, 30)])
@pytest.mark.parametrize("checks", ["full", "off"])
def test_scatter(shape, checks):
    x = normal(1, *shape)
    gradient, expected = pooled_gradient(x)
    np.testing.assert_allclose(simulate(scatter, x, gradient, checks=checks), expected, rtol=0, atol=2e-6)


def test_scatter_in_bands():
    x = normal(1, 1, 4, 23, 600)
    gradient, expected = pooled_gradient(x)
    moves = sum(isinstance(s, Instr) and s.op == "dma_copy" for s in statements(scatter.trace(x, gradient).body))
    assert moves >= 2 * 3  # two loads and a store for each band
    np.testing.assert_allclose(simulate(scatter, x, gradient), expected, rtol=0, atol=2e-6)


def test_scatter_gives_the_first_of_equal_elements_and_never_the_padding():
    x = -np.ones((1, 1, 6, 6), np.float32)
    gradient, expected = pooled_gradient(x)
    np.testing.assert_allclose(simulate(scatter, x, gradient), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [BF16, np.float16])
def test_scatter_sums_in_float32(dtype):
    x = normal(1, 1, 64, 16, 16, dtype=dtype)
    gradient, expected = pooled_gradient(x)
    got = simulate(scatter, x, gradient)
    assert got.dtype == dtype
    assert np.array_equal(got, expected.astype(dtype))


def test_scatter_into_a_tensor_as_older_programs_do():
    x = normal(1, 2, 64, 8, 8)
    gradient, expected = pooled_gradient(x)
    with pytest.warns(DeprecationWarning):
        from torch_neuronx.xla_impl.ops import nki_jit

        call = nki_jit()(scatter)
    out = torch.zeros(2, 64, 8, 8)
    call(torch.tensor(x), torch.tensor(gradient), out)
    np.testing.assert_allclose(out.numpy(), expected, rtol=0, atol=2e-6)
    np.testing.assert_allclose(scatter(torch.tensor(x), torch.tensor(gradient)).numpy(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("batch, h, w, c, out_h, out_w, grid", [
    (2, 30, 20, 128, 59, 38, True), (1, 5, 7, 16, 13, 6, False), (3, 4, 4, 8, 9, 30, False), (1, 1, 1, 3, 2, 2, True),
    (2, 9, 9, 4, 3, 2, True)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16, np.int32])
def test_resize(batch, h, w, c, out_h, out_w, grid, dtype):
    x = (normal(1, batch, h, w, c) * 100).astype(dtype)
    got = simulate(resize[batch] if grid else resize, x, (batch, out_h, out_w, c))
    image = torch.tensor(x.astype(np.float64)).permute(0, 3, 1, 2)
    expected = torch.nn.functional.interpolate(image, (out_h, out_w), mode="nearest").permute(0, 2, 3, 1)
    assert got.dtype == dtype and np.array_equal(got.astype(np.float64), expected.numpy())


def test_resize_into_a_tensor_as_older_programs_do():
    x = normal(1, 2, 5, 4, 8)
    with pytest.warns(DeprecationWarning):
        from torch_neuronx import nki_jit

        call = nki_jit(resize)
    out = torch.empty(2, 9, 6, 8)
    call[2](torch.tensor(x), out)
    assert np.array_equal(out.numpy(), simulate(resize[2], x, (2, 9, 6, 8)))


@pytest.mark.parametrize("shape, size", [
    ((1, 64, 56, 56), 7), ((1, 3, 13, 13), 6), ((2, 70, 16, 16), (4, 2)), ((1, 1, 1, 1), 1), ((1, 130, 7, 7), 7), ((1, 8, 37, 41), (5, 9)),
    ((1, 2, 300, 300), (3, 7)), ((1, 2, 256, 256), [1, 1]), ((1, 4, 6, 8), (6, 8))])
@pytest.mark.parametrize("checks", ["full", "off"])
def test_adaptive_pooling(shape, size, checks):
    x = normal(1, *shape)
    expected = torch.nn.functional.adaptive_avg_pool2d(torch.tensor(x), size).numpy()
    np.testing.assert_allclose(simulate(adaptive, x, size, checks=checks), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [BF16, np.float16])
def test_adaptive_pooling_sums_in_float32(dtype):
    x = normal(1, 3, 96, 24, 24, dtype=dtype)
    got = simulate(adaptive, x, (6, 5))
    expected = torch.nn.functional.adaptive_avg_pool2d(float_tensor(x), (6, 5)).numpy()
    assert got.dtype == dtype
    np.testing.assert_allclose(got.astype(np.float32), expected, rtol=8e-3, atol=1e-3)


def test_in_jax_and_torch():
    import jax

    x = normal(1, 1, 4, 9, 10)
    gradient, expected = pooled_gradient(x)
    pooled = torch.nn.functional.adaptive_avg_pool2d(torch.tensor(x), 3).numpy()
    image = np.ascontiguousarray(x.transpose(0, 2, 3, 1))
    wide = simulate(resize[1], image, (1, 12, 17, 4))
    np.testing.assert_allclose(jax.jit(scatter)(x, gradient), expected, rtol=0, atol=2e-6)
    np.testing.assert_allclose(jax.jit(lambda x: adaptive(x, 3))(x), pooled, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(adaptive(torch.tensor(x), 3), pooled, rtol=1e-5, atol=1e-6)
    assert np.array_equal(jax.jit(lambda x: resize[1](x, (1, 12, 17, 4)))(image), wide)
    assert np.array_equal(resize[1](torch.tensor(image), (1, 12, 17, 4)), wide)


IMAGE, POOLED = np.zeros((2, 4, 8, 8), np.float32), np.zeros((2, 4, 4, 4), np.float32)


@pytest.mark.parametrize("kernel, args, kind, operand", [
    (scatter, (IMAGE, IMAGE), NkiValueError, "source_tensor"),
    (scatter, (IMAGE[0], POOLED), NkiValueError, "operand_tensor"),
    (scatter, (IMAGE, POOLED.astype(BF16)), NkiTypeError, "source_tensor"),
    (resize, (IMAGE, (1, 9, 9, 8)), NkiValueError, "out_shape"),
    (resize, (IMAGE, (2, 0, 9, 8)), NkiValueError, "out_shape"),
    (resize[3], (IMAGE, (2, 9, 9, 8)), NkiValueError, "grid"),
    (adaptive, (IMAGE, 9), NkiValueError, "output_size"),
    (adaptive, (IMAGE, 0), NkiValueError, "output_size"),
    (adaptive, (IMAGE, (1, 2, 3)), NkiValueError, "output_size"),
    (adaptive, (IMAGE, 2.5), NkiValueError, "output_size"),
    (adaptive, (IMAGE[0], 2), NkiValueError, "in_tensor"),
])
def test_bad_arguments_are_errors_at_the_call(kernel, args, kind, operand):
    with pytest.raises(NkiError) as caught:
        nki.simulate_kernel(kernel, *args)
    assert isinstance(caught.value, kind) and caught.value.operand == operand
    assert caught.value.rule and caught.value.fix and caught.value.loc.file == __file__


@pytest.mark.parametrize("target", ["trn1", "trn2"])
@pytest.mark.parametrize("name, grid, args, documented", [
    ("select_and_scatter_kernel", None, (np.empty((8, 64, 112, 112), np.float32), np.empty((8, 64, 56, 56), np.float32)), 4500),
    ("resize_nearest_fixed_dma_kernel", 10, (np.empty((10, 30, 20, 1280), np.float32), (10, 59, 38, 1280)), 1740),
    ("adaptive_avg_pool2d_kernel", None, (np.empty((2, 2048, 32, 32), np.float32), 3), 564),
    ("adaptive_avg_pool2d_kernel", None, (np.empty((2, 64, 256, 256), np.float32), 1), 255),
])
def test_memory_and_documented_latencies(target, name, grid, args, documented, monkeypatch):
    from opennki.passes.allocate import allocate

    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", target)
    kernel = getattr(vision, name)
    made = (kernel if grid is None else kernel[grid]).trace(*args)
    allocate(made)
    found = estimate(made)
    assert not found.warnings
    assert found.latency_us < documented
