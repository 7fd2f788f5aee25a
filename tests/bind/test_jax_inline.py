"""Kernels that are expanded into the JAX program in the place of a call."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opennki.bind import host
from opennki.bind.inline import CannotInline
from tests.bind import kernels as k

X, Y = k.numbers(64, 16), k.numbers(64, 16, seed=1)
axpy = k.nki.jit(k.axpy.func, inline=True)


@pytest.fixture
def no_handler(monkeypatch):
    def refuse(*args):
        raise AssertionError("the handler was called")

    monkeypatch.setattr(host, "host_kernel", refuse)


def test_a_keyword_of_the_kernel_expands_it(no_handler):
    x, y = jnp.asarray(X), jnp.asarray(Y)
    for wrap in (lambda f: f, jax.jit):
        np.testing.assert_allclose(wrap(lambda a, b: axpy(a, b))(x, y), X * 2 + Y, rtol=1e-6)
    assert "custom_call" not in jax.jit(axpy).lower(x, y).as_text()
    np.testing.assert_array_equal(jax.vmap(axpy, in_axes=(0, None))(jnp.stack([x, x]), y)[1], axpy(x, y))


def test_a_setting_expands_all(monkeypatch, no_handler):
    monkeypatch.setenv("OPENNKI_JAX_INLINE", "1")
    got = jax.jit(lambda a: k.several(a))(jnp.asarray(X))
    np.testing.assert_array_equal(got[0], X * 2)
    np.testing.assert_allclose(got[1][1], X.sum(1, keepdims=True), rtol=1e-5, atol=1e-6)
    new = jax.jit(lambda a, b: k.accumulate(a, b))(jnp.asarray(X), jnp.asarray(Y))
    np.testing.assert_array_equal(new, X + Y)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_platforms_without_a_handler_get_the_expansion_when_it_is_asked_for(monkeypatch, platform):
    x = jnp.asarray(X)
    call = jax.jit(lambda a: k.copy(a)).trace(x).lower(lowering_platforms=(platform,)).as_text()
    assert "AwsNeuronCustomNativeKernel" in call
    monkeypatch.setenv("OPENNKI_JAX_INLINE", "1")
    text = jax.jit(lambda a: k.copy(a)).trace(x).lower(lowering_platforms=(platform,)).as_text()
    assert "AwsNeuron" not in text


def test_an_expanded_kernel_has_derivatives():
    x, y = jnp.asarray(X), jnp.asarray(Y)
    gx, gy = jax.jit(jax.grad(lambda a, b: (axpy(a, b) ** 2).sum(), argnums=(0, 1)))(x, y)
    np.testing.assert_allclose(gx, 4 * (X * 2 + Y), rtol=1e-5)
    np.testing.assert_allclose(gy, 2 * (X * 2 + Y), rtol=1e-5)
    _, tangent = jax.jvp(lambda a: axpy(a, y), (x,), (jnp.ones_like(x),))
    np.testing.assert_allclose(tangent, np.full_like(X, 2))


def test_what_cannot_be_expanded_names_instruction_and_line():
    @k.nki.jit(inline=True)
    def meets(x):
        from neuronxcc.nki.language import iterators

        out = k.nl.ndarray(x.shape, dtype=x.dtype, buffer=k.nl.shared_hbm)
        row = k.nl.program_id(0)
        tile = k.nl.load(x[k.nl.ds(row, 1)])
        with iterators.sync_program(0):
            k.nl.store(out[k.nl.ds(row, 1)], tile)
        return out

    with pytest.raises(CannotInline, match="barrier") as caught:
        jax.jit(meets[2])(jnp.zeros((2, 4)))
    assert "test_jax_inline.py" in str(caught.value)
