"""Reports on kernels inside JAX programs: the cache of traces, gather and scatter beside a kernel, batching, placement."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from tests.bug_reports.test_kernels import rms_norm
from tests.lang.harness import sample

from opennki import jit
from opennki.dialects.neuronxcc import compiler as ncc
from opennki.dialects.neuronxcc import isa as nisa
from opennki.dialects.neuronxcc import language as nl

BF16 = np.dtype(ml_dtypes.bfloat16)


# ---- BR022: traces that are kept ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Config:
    """Options of a kernel."""

    factor: float = 3.0
    tile: int = 16


@pytest.mark.parametrize("option", [None, Config(), (1, None), "mean", nl.bfloat16], ids=["none", "dataclass", "tuple", "str", "dtype"])
def test_BR022_an_optional_argument_does_not_defeat_the_cache(option):
    """None arguments defeat the kernel cache: the second and third call find the trace of the first, eager and in one jitted program."""
    traces = []

    @jit
    def kernel(x, how=None):
        traces.append(how)
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.load(x) * (how.factor if isinstance(how, Config) else 2.0))
        return out

    x = jnp.asarray(sample((8, 16)))
    for _ in range(3):
        kernel(x, option)
    jax.jit(lambda v: kernel(v, option))(x)
    assert len(traces) == 1
    kernel(x, Config(tile=32))  # another constant is another kernel
    kernel(x.astype(jnp.bfloat16), option)
    assert len(traces) == 3


def test_BR022_a_grid_does_not_defeat_the_cache():
    """Each `kernel[grid]` is a new object, and finds the traces of the others with the same grid."""
    traces = []

    @jit
    def kernel(x):
        traces.append(1)
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        row = nl.program_id(0)
        nl.store(out[nl.ds(row, 1)], nl.load(x[nl.ds(row, 1)]))
        return out

    x = jnp.asarray(sample((4, 16)))
    for _ in range(3):
        np.testing.assert_array_equal(kernel[4](x), x)
    assert len(traces) == 1


# ---- BR024 ----------------------------------------------------------------------------------------------------------
def test_BR024_a_bool_output_stays_bool_in_jax():
    """bool outputs become uint8: a comparison returned by a kernel is bool in a jitted program, and usable as a mask."""

    @jit
    def positive(x):
        out = nl.ndarray(x.shape, nl.bool_, buffer=nl.shared_hbm)
        nl.store(out, nl.greater(nl.load(x), 0))
        return out

    x = sample((4, 16))
    got = jax.jit(positive)(jnp.asarray(x))
    assert got.dtype == jnp.bool_
    np.testing.assert_array_equal(got, x > 0)
    np.testing.assert_array_equal(jax.jit(lambda v: jnp.where(positive(v), v, 0))(jnp.asarray(x)), np.maximum(x, 0))


# ---- BR034: fill and drop -------------------------------------------------------------------------------------------
@jit
def skipping_gather(table, index, fill):
    """Rows of a table by index; rows that do not exist are taken from `fill`."""
    out = nl.ndarray((index.shape[0], table.shape[1]), table.dtype, buffer=nl.shared_hbm)
    ids, rows = nl.load(index), nl.load(fill)
    nisa.dma_copy(dst=rows, src=table[ids[:, 0:1], nl.arange(table.shape[1])[None, :]], oob_mode=nisa.oob_mode.skip)
    nl.store(out, rows)
    return out


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_BR034_gather_fill_and_scatter_drop_beside_a_kernel(rank):
    """JAX fill/drop sentinel touches memory: in one jitted graph with a kernel, sentinel lanes read the fill and write nothing."""
    index = np.array([3, 2**31 - 1, 0, 2**31 - 1, 7, 8], np.int64).astype(np.int32)
    table = sample((8, 16), seed=1).reshape(8, *{1: (16,), 2: (16,), 3: (4, 4), 4: (2, 2, 4)}[rank])
    if rank == 1:
        table = table[:, 0]
    rows = sample((6, *table.shape[1:]), seed=2)
    fill = np.full((6, 16), -5, np.float32)

    def program(table, rows, flat):
        gathered = table.at[index].get(mode="fill", fill_value=-5.0)
        scattered = table.at[index].set(rows, mode="drop")
        return gathered, scattered, skipping_gather(flat, jnp.asarray(index).reshape(-1, 1), jnp.asarray(fill))

    flat = sample((8, 16), seed=1)
    gathered, scattered, mine = jax.jit(program)(jnp.asarray(table), jnp.asarray(rows), jnp.asarray(flat))
    want, want_mine, kept = np.full(rows.shape, -5, np.float32), fill.copy(), table.copy()
    for lane, i in enumerate(index):
        if i < 8:
            want[lane], want_mine[lane], kept[i] = table[i], flat[i], rows[lane]
    np.testing.assert_array_equal(gathered, want)
    np.testing.assert_array_equal(scattered, kept)
    np.testing.assert_array_equal(mine, want_mine)


# ---- BR050, BR080 ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layers", [1, 4])
def test_BR050_an_allocated_rms_norm_runs_inside_a_model(layers):
    """allocated RMSNorm kernel fails inside a model: bf16 (1, 128, 2048) as a custom call between other operations."""
    kernel = jit(ncc.skip_middle_end_transformations(rms_norm), platform_target="trn1")
    x, gamma = sample((1, 128, 2048), BF16, seed=5), sample((1, 2048), BF16, seed=6)

    def model(norm, x, gamma):
        for _ in range(layers):
            x = norm(x * 0.5, gamma) + x
        return x

    def reference(x, gamma):
        wide = x.astype(jnp.float32)
        return (wide / jnp.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * gamma.astype(jnp.float32)).astype(x.dtype)

    got = jax.jit(lambda a, b: model(kernel, a, b))(jnp.asarray(x), jnp.asarray(gamma))
    want = jax.jit(lambda a, b: model(reference, a, b))(jnp.asarray(x), jnp.asarray(gamma))
    assert got.dtype == jnp.bfloat16
    error = np.linalg.norm(np.asarray(got, np.float64) - np.asarray(want, np.float64)) / np.linalg.norm(np.asarray(want, np.float64))
    assert error < 2e-2


@jit
def softmax(x):
    """Softmax along the rows."""
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.softmax(nl.load(x), axis=-1))
    return out


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_BR080_vmap_of_a_softmax_kernel(axis):
    """Custom call lacks batching rule: vmap over axis 0, 1 and 2, and over nothing that the kernel sees."""
    xs = sample((3, 8, 16))
    want = np.asarray(jax.nn.softmax(xs, axis=-1))
    moved = jnp.asarray(np.moveaxis(xs, 0, axis))
    got = jax.jit(jax.vmap(softmax, in_axes=axis, out_axes=axis))(moved)
    np.testing.assert_allclose(np.moveaxis(np.asarray(got), axis, 0), want, rtol=1e-5, atol=1e-6)
    got = jax.vmap(lambda x, scale: softmax(x) * scale, in_axes=(None, 0))(jnp.asarray(xs[0]), jnp.arange(2.0))
    np.testing.assert_allclose(got[1], want[0], rtol=1e-5, atol=1e-6)
