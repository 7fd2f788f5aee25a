"""The JAX example: its kernels against float64, its gradients against JAX alone, and that it trains and notices when it does not."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

import opennki.dropin  # noqa: F401
from opennki import simulate_kernel
from opennki.interpret.simulate import POLICIES

jax = pytest.importorskip("jax")

EXAMPLE = Path(__file__).parents[2] / "examples" / "jax_transformer.py"
STRICT = dict.fromkeys(POLICIES["full"], "error")
SMALL = ["--width", "64", "--heads", "2", "--blocks", "1", "--sequences", "1", "--steps", "3"]


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("jax_transformer", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    path = sys.path.copy()
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


def float64_attention(q, k, v, g):
    """Result and gradients, written out for one head after the other."""
    out = []
    for qh, kh, vh, gh in zip(*(x.astype(np.float64) for x in (q, k, v, g))):
        scale = qh.shape[1] ** -0.5
        s = np.where(np.tri(len(qh), dtype=bool), qh @ kh.T * scale, -np.inf)
        p = np.exp(s - s.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        jacobians = [np.diag(row) - np.outer(row, row) for row in p]  # of the softmax, row by row
        ds = np.stack([j @ row for j, row in zip(jacobians, gh @ vh.T)])
        out.append((p @ vh, ds @ kh * scale, ds.T @ qh * scale, p.T @ gh))
    return [np.stack(x) for x in zip(*out)]


def close(found, expected, tolerance=2e-6):
    error = np.linalg.norm(np.asarray(found, np.float64) - expected) / np.linalg.norm(expected)
    assert error < tolerance


@pytest.mark.oracle
@pytest.mark.parametrize(("tokens", "d"), [(128, 32), (256, 64), (384, 128)])
@pytest.mark.parametrize("order", ["program", "reversed"])
def test_attention_kernels(example, tokens, d, order):
    rng = np.random.default_rng(tokens)
    q, k, v, g = (rng.standard_normal((2, tokens, d)).astype(np.float32) for _ in range(4))
    blocks = example.blocks
    forward = simulate_kernel(blocks.attention_forward[2], q, k, v, checks=STRICT, order=order)
    backward = simulate_kernel(blocks.attention_backward[2], q, k, v, g, checks=STRICT, order=order)
    for found, expected in zip((forward, *backward), float64_attention(q, k, v, g), strict=True):
        close(found, expected)


@pytest.mark.oracle
def test_attention_of_large_scores(example):
    """The largest score is subtracted before the exponential, in the rows where it is masked out too."""
    q = np.full((1, 128, 16), 40.0, np.float32)
    k = np.linspace(-40, 40, 128, dtype=np.float32)[None, :, None].repeat(16, axis=2)
    v, g = np.random.default_rng(0).standard_normal((2, 1, 128, 16)).astype(np.float32)
    found = simulate_kernel(example.blocks.attention_forward[1], q, k, v, checks=STRICT)
    close(found, float64_attention(q, k, v, g)[0])


@pytest.mark.oracle
@pytest.mark.parametrize("rows", [128, 384])
def test_rms_norm_kernels(example, rows):
    rng = np.random.default_rng(rows)
    x, g = (rng.standard_normal((rows, 96)).astype(np.float32) for _ in range(2))
    w = rng.standard_normal((1, 96)).astype(np.float32)
    blocks = example.blocks
    forward = simulate_kernel(blocks.rms_norm_forward, x, w, checks=STRICT)
    d_x, d_w = simulate_kernel(blocks.rms_norm_backward, x, w, g, checks=STRICT)
    x, w, g = (a.astype(np.float64) for a in (x, w, g))
    rms = np.sqrt((x * x).mean(axis=1, keepdims=True) + blocks.EPS)
    jacobians = [np.eye(96) / r - np.outer(row, row) / (96 * r**3) for row, r in zip(x, rms[:, 0])]
    close(forward, x / rms * w)
    close(d_w, (g * x / rms).sum(axis=0, keepdims=True))
    close(d_x, np.stack([j @ row for j, row in zip(jacobians, g * w)]))


@pytest.mark.slow
def test_gradients_match_and_the_loss_falls(example, capsys):
    assert example.main(SMALL) == 0
    shown = capsys.readouterr().out
    assert "gradients of 10 parameters" in shown
    rows = [line.split() for line in shown.replace("│", " ").splitlines()]
    losses = [(float(r[1]), float(r[2])) for r in rows if len(r) == 3 and r[0].isdigit()]
    assert len(losses) == 3 and losses[-1][0] < losses[0][0] - 0.1
    np.testing.assert_allclose(*zip(*losses), rtol=1e-3)


@pytest.mark.slow
def test_a_loss_that_rises_is_noticed(example, capsys):
    assert example.main([*SMALL, "--rate", "-0.01"]) == 1
    assert "the loss does not fall" in capsys.readouterr().out


@pytest.mark.slow
def test_a_wrong_gradient_is_noticed(example, capsys, monkeypatch):
    """A backward pass that leaves the change of the norm out: each value is plausible, and the loss would fall."""
    norm = jax.custom_vjp(example.blocks.rms_norm_jax)
    norm.defvjp(lambda x, w: (norm(x, w), (x, w)), lambda saved, g: (g * saved[1], (g * saved[0]).sum(axis=(0, 1))))
    monkeypatch.setitem(example.OPERATIONS, "NKI", (norm, example.blocks.attention_jax))
    example.loss_and_gradients.clear_cache()
    try:
        assert example.main(SMALL) == 1
    finally:
        example.loss_and_gradients.clear_cache()
    assert "the gradients differ by more than 1e-05" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", ["--tokens 100", "--width 100 --heads 3", "--width 256 --heads 1", "--steps 1"])
def test_sizes_that_the_kernels_cannot_do(example, wrong, capsys):
    with pytest.raises(SystemExit) as stopped:
        example.main(wrong.split())
    assert stopped.value.code == 2 and "--" in capsys.readouterr().err.splitlines()[-1]
