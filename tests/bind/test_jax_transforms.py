"""Kernels under the transformations of JAX."""

from __future__ import annotations

import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax import export
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from opennki.bind import host
from opennki.bind.jax import JAXKernel, export_checks
from opennki.errors import NkiDifferentiationError
from opennki.kernels import framework
from tests.bind import kernels as k

X, Y = k.numbers(64, 16), k.numbers(64, 16, seed=1)


@pytest.fixture
def calls(monkeypatch):
    """Counts the runs of the CPU handler."""
    made = []
    run = host.HostKernel.run

    def counted(self, *args):
        made.append(self.payload.func_name)
        return run(self, *args)

    monkeypatch.setattr(host.HostKernel, "run", counted)
    return made


# ---- vmap ----


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0), (1, None), (2, 0), (-1, 1)])
def test_vmap_over_each_axis(axes):
    xs, ys = k.numbers(3, 64, 16), k.numbers(3, 64, 16, seed=5)
    expected = (xs if axes[0] is not None else X) * 2 + (ys if axes[1] is not None else Y)
    x = X if axes[0] is None else np.moveaxis(xs, 0, axes[0])
    y = Y if axes[1] is None else np.moveaxis(ys, 0, axes[1])
    for wrap in (lambda f: f, jax.jit):
        got = wrap(jax.vmap(k.axpy, in_axes=axes))(jnp.asarray(x), jnp.asarray(y))
        np.testing.assert_array_equal(got, expected)


def test_vmap_in_vmap_and_out_axes():
    xs = k.numbers(2, 3, 64, 16)
    np.testing.assert_array_equal(jax.vmap(jax.vmap(k.copy))(jnp.asarray(xs)), xs)
    got = jax.vmap(k.copy, out_axes=1)(jnp.asarray(xs[0]))
    np.testing.assert_array_equal(got, np.moveaxis(xs[0], 0, 1))


def test_vmap_of_an_in_place_kernel_with_a_shared_operand():
    xs = k.numbers(3, 64, 16)
    np.testing.assert_array_equal(jax.vmap(k.accumulate, in_axes=(0, None))(jnp.asarray(xs), jnp.asarray(Y)), xs + Y)
    many = jax.vmap(k.several)(jnp.asarray(xs))
    np.testing.assert_array_equal(many[0], xs * 2)
    assert many[1][1].shape == (3, 64, 1)


# ---- derivatives ----


@jax.custom_vjp
def twice_plus(x, y):
    return k.axpy(x, y)


twice_plus.defvjp(lambda x, y: (k.axpy(x, y), None), lambda _, g: (k.axpy(g, jnp.zeros_like(g)), g))


def loss(x, y):
    return (twice_plus(x, y) ** 2).sum()


def test_a_kernel_without_a_rule_says_so():
    with pytest.raises(NkiDifferentiationError, match="Differentiation rule for 'axpy' not implemented") as caught:
        jax.grad(lambda x: k.axpy(x, x).sum())(jnp.asarray(X))
    assert "custom_vjp" in str(caught.value)
    # where nothing is differentiated there is nothing to say
    np.testing.assert_array_equal(jax.grad(lambda x: (k.copy(jax.lax.stop_gradient(x)) * x).sum())(jnp.asarray(X)), X)


@pytest.mark.parametrize(
    "wrap", [lambda f: f, jax.jit, lambda f: jax.jit(jax.checkpoint(f)), jax.checkpoint], ids=["eager", "jit", "jit-remat", "remat"]
)
def test_custom_vjp(wrap):
    gx, gy = jax.grad(wrap(loss), argnums=(0, 1))(jnp.asarray(X), jnp.asarray(Y))
    out = X * 2 + Y
    np.testing.assert_allclose(gx, 4 * out, rtol=1e-6)
    np.testing.assert_allclose(gy, 2 * out, rtol=1e-6)


def test_per_example_gradients():
    xs = k.numbers(3, 64, 16)
    got = jax.vmap(jax.grad(loss), in_axes=(0, None))(jnp.asarray(xs), jnp.asarray(Y))
    np.testing.assert_allclose(got, 4 * (xs * 2 + Y), rtol=1e-6)


# ---- control flow ----


def test_scan_loops_and_branches():
    x, y = jnp.asarray(X), jnp.asarray(Y)
    carried, stacked = jax.jit(lambda a: jax.lax.scan(lambda c, _: (k.axpy(c, y), k.copy(c)), a, None, length=3))(x)
    want = X
    for step in range(3):
        np.testing.assert_allclose(stacked[step], want, rtol=1e-6)
        want = want * 2 + Y
    np.testing.assert_allclose(carried, want, rtol=1e-6)
    got = jax.jit(lambda a, n: jax.lax.fori_loop(0, n, lambda _, c: k.axpy(c, y, a=0.5), a))(x, 2)
    np.testing.assert_allclose(got, (X * 0.5 + Y) * 0.5 + Y, rtol=1e-6)
    got = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, k.copy(c[1])), (0, x))[1]
    np.testing.assert_array_equal(got, X)
    branch = jax.jit(lambda a, p: jax.lax.cond(p, lambda v: k.axpy(v, v), lambda v: v, a))
    np.testing.assert_array_equal(branch(x, True), X * 3)
    np.testing.assert_array_equal(branch(x, False), X)
    switch = jax.jit(lambda a, i: jax.lax.switch(i, [k.copy, lambda v: k.rows[2](v)], a))
    np.testing.assert_array_equal(switch(x, 1), X * 2)


def test_a_gradient_through_a_scan_of_kernels():
    y = jnp.asarray(Y)
    f = jax.jit(jax.grad(lambda a: jax.lax.scan(lambda c, _: (twice_plus(c, y), None), a, None, length=3)[0].sum()))
    np.testing.assert_allclose(f(jnp.asarray(X)), np.full_like(X, 8), rtol=1e-6)


def test_disable_jit():
    with jax.disable_jit():
        np.testing.assert_array_equal(jax.jit(k.axpy)(jnp.asarray(X), jnp.asarray(Y)), X * 2 + Y)
        got = jax.lax.fori_loop(0, 2, lambda _, c: k.copy(c), jnp.asarray(X))
    np.testing.assert_array_equal(got, X)


# ---- printing ----


def test_a_kernel_that_prints_is_neither_dropped_nor_merged(capfd):
    f = jax.jit(lambda a: (k.shout(a), k.shout(a), a + 1)[2])
    np.testing.assert_array_equal(f(jnp.asarray(X)), X + 1)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("shout") == 2


def test_a_kernel_that_prints_runs_in_loops_branches_and_remat(capfd):
    x = jnp.asarray(X)
    jax.jit(lambda a: jax.lax.fori_loop(0, 3, lambda _, c: k.shout(c), a))(x).block_until_ready()
    jax.jit(lambda a: jax.lax.cond(True, k.shout, lambda v: v, a))(x).block_until_ready()
    jax.jit(jax.checkpoint(lambda a: k.shout(a)))(x).block_until_ready()
    jax.effects_barrier()
    assert capfd.readouterr().out.count("shout") == 5


def test_a_silent_kernel_that_nobody_uses_is_dropped(calls):
    jax.jit(lambda a: (k.copy(a), a + 1)[1])(jnp.asarray(X)).block_until_ready()
    assert calls == []


# ---- devices ----

def test_the_tests_have_their_devices():
    """tests/conftest.py asks for four before anything imports JAX."""
    assert len(jax.devices()) >= 4


def sharded(f, mesh, specs, out, **kwargs):
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out, **kwargs))


@pytest.mark.parametrize("check", [True, False])
def test_shard_map(calls, check):
    mesh = Mesh(np.array(jax.devices()[:4]), ("d",))
    f = sharded(k.axpy, mesh, (P("d"), P("d")), P("d"), check_vma=check)
    x, y = k.numbers(64, 8), k.numbers(64, 8, seed=2)
    np.testing.assert_array_equal(f(x, y), x * 2 + y)
    assert len(calls) == 4
    # an operand that every device has
    f = sharded(k.axpy, mesh, (P("d"), P()), P("d"), check_vma=check)
    np.testing.assert_array_equal(f(x, y[:16]), x * 2 + np.tile(y[:16], (4, 1)))


def test_a_replicated_result_is_known_to_be_replicated():
    mesh = Mesh(np.array(jax.devices()[:4]), ("d",))
    f = sharded(k.axpy, mesh, (P(), P()), P())
    np.testing.assert_array_equal(f(X, Y), X * 2 + Y)
    with pytest.raises(ValueError, match="out_specs"):
        sharded(k.axpy, mesh, (P("d"), P("d")), P())(X, Y)


def test_sharded_steps_with_a_reduction_between_kernels():
    mesh = Mesh(np.array(jax.devices()[:4]), ("d",))

    def step(a, b):
        total = jax.lax.psum(k.copy(a), "d")
        return k.axpy(total, b, a=0.25)

    f = sharded(step, mesh, (P("d"), P("d")), P("d"), check_vma=False)
    x, y = k.numbers(64, 8), k.numbers(64, 8, seed=2)
    want = np.tile(x.reshape(4, 16, 8).sum(0) * 0.25, (4, 1)) + y
    for _ in range(200):
        got = f(x, y)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_jit_on_sharded_inputs_is_right():
    mesh = Mesh(np.array(jax.devices()[:4]), ("d",))
    x = jax.device_put(X, NamedSharding(mesh, P("d")))
    np.testing.assert_array_equal(jax.jit(k.copy)(x), X)


def test_pmap():
    xs = k.numbers(4, 16, 8)
    np.testing.assert_array_equal(jax.pmap(k.copy)(xs), xs)


# ---- programs kept for later ----


def test_aot():
    compiled = jax.jit(k.axpy).lower(jax.ShapeDtypeStruct((64, 16), jnp.float32), jax.ShapeDtypeStruct((64, 16), jnp.float32)).compile()
    np.testing.assert_array_equal(compiled(X, Y), X * 2 + Y)


def test_export_runs_here_and_in_another_process(tmp_path):
    exported = export.export(jax.jit(k.axpy), disabled_checks=export_checks())(jnp.asarray(X), jnp.asarray(Y))
    data = exported.serialize()
    np.testing.assert_array_equal(export.deserialize(data).call(X, Y), X * 2 + Y)
    (tmp_path / "f.bin").write_bytes(bytes(data))
    np.savez(tmp_path / "in.npz", x=X, y=Y)
    program = (
        "import sys, numpy as np, opennki.bind.jax\nfrom jax import export\n"
        "d = np.load('in.npz'); f = export.deserialize(bytearray(open('f.bin', 'rb').read()))\n"
        "assert (np.asarray(f.call(d['x'], d['y'])) == d['x'] * 2 + d['y']).all()\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=120)


def test_export_for_the_neuron_platform():
    exported = export.export(jax.jit(k.axpy), platforms=["neuron"], disabled_checks=export_checks())(jnp.asarray(X), jnp.asarray(Y))
    assert "api_version = 0" in exported.mlir_module()


# ---- many threads, many kernels ----


def test_threads():
    f = jax.jit(k.axpy)
    wrong = []

    def work(seed):
        x, y = k.numbers(64, 16, seed=seed), k.numbers(64, 16, seed=seed + 1)
        for _ in range(500):
            got = f(x, y)
        if not np.array_equal(got, x * 2 + y):
            wrong.append(seed)

    threads = [threading.Thread(target=work, args=(10 * n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(240)
    assert not any(t.is_alive() for t in threads) and not wrong


def test_a_thousand_specialisations_stay_within_bounds(monkeypatch):
    monkeypatch.setattr(framework, "MAX_SPECIALISATIONS", 64)
    monkeypatch.setattr(host, "MAX_KERNELS", 32)
    kernel = JAXKernel(k.axpy.func)
    x = np.ones((2, 2), np.float32)
    for n in range(1000):
        result = kernel.dump_config_with_boundargs(kernel.bind((x, x), {"a": float(n)}))
        out = np.empty_like(x)
        host.run_payload(result.dumped_config.encode(), [x, x], [out])
        assert out[0, 0] == n + 1
    assert len(kernel.__neuron_kernel_interface_kernel_cache__) == 64
    assert len(host._kernels) <= 32
