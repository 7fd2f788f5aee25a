"""Kernels with collectives in JAX programs of several devices: each device is a rank."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import opennki
import opennki.dropin
import neuronxcc.nki as nki
import neuronxcc.nki.distributed as dist
import neuronxcc.nki.language as nl
import neuronxcc.nki.nccl as nccl
from neuronxcc.nki._private.private_api import cc_div
import neuronxcc.nki.typing as nt
from opennki import settings
from opennki.bind import failures
from opennki.bind.elastic import Elastic
from opennki.bind.gathering import gatherings
from opennki.errors import NkiError, NkiValueError

N = 4
DEVICES = jax.devices()[:N]
X = np.random.default_rng(0).standard_normal((N * 8, 16), np.float32)
MESH = Mesh(np.array(DEVICES), ("d",))


@nki.jit(platform_target="trn2")
def total(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    dist.all_reduce([x], [out], np.add)
    return out


@nki.jit(platform_target="trn2")
def total_of(x, groups):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nccl.all_reduce(op=np.add, srcs=[x], dsts=[out], replica_groups=[list(g) for g in groups])
    return out


@nki.jit(platform_target="trn2")
def mixed(x):
    total, ring, sent = (nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm) for _ in range(3))
    gathered = nl.ndarray((x.shape[0] * 2, x.shape[1]), dtype=x.dtype, buffer=nl.shared_hbm)
    for _ in nl.sequential_range(3):
        dist.all_reduce([x], [total], np.add)
        nccl.collective_permute_implicit(dst=ring, src=x)
    nccl.all_gather([x], [gathered], None, [[0, 3], [1, 2]], 0)
    nccl.send([x], peer_id=[1, 2, 3, 0])
    nccl.recv([sent], peer_id=[3, 0, 1, 2])
    return total, ring, gathered, sent


@nki.jit(platform_target="trn2")
def product(a, b):
    out = nl.ndarray((a.shape[1], b.shape[1]), dtype=a.dtype, buffer=nl.shared_hbm)
    part = nl.ndarray((a.shape[1], b.shape[1]), dtype=a.dtype, buffer=nl.shared_hbm)
    nl.store(part, nl.matmul(nl.load(a), nl.load(b), transpose_x=True))
    dist.all_reduce([part], [out], np.add)
    return out


def sharded(f, mesh=MESH, spec=P("d"), out=None, **options):
    return jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec if out is None else out, **options)


def parts(x=X, n=N):
    return np.split(np.asarray(x), n)


def summed(x=X):
    return np.concatenate([np.asarray(part) for part in opennki.launch(total, N, lambda r: (np.ascontiguousarray(parts(x)[r]),))])


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    until = time.monotonic() + 20
    while gatherings.by_key and time.monotonic() < until:  # results are there a moment before
        time.sleep(0.01)
    assert not gatherings.by_key


def message(error):
    text = str(error.value)
    assert isinstance(failures.cause_of(text), NkiError)
    return text


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_the_bits_are_those_of_launch(wrap):
    np.testing.assert_array_equal(wrap(sharded(total))(X), summed())
    got = wrap(sharded(mixed))(X)
    wanted = opennki.launch(mixed, N, lambda r: (parts()[r],))
    for i, value in enumerate(got):
        np.testing.assert_array_equal(value, np.concatenate([one[i] for one in wanted]))


@nki.jit(platform_target="trn2")
def by_ring(x):
    out = nl.ndarray((N, *x.shape), dtype=x.dtype, buffer=nl.shared_hbm)
    moving = nl.ndarray((2, *x.shape), dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(moving[0], nl.load(x))
    rows, columns = nl.mgrid[0 : x.shape[0], 0 : x.shape[1]]
    for i in nl.sequential_range(N):
        tile = nl.load(moving[0, rows, columns])
        nl.store(out[cc_div(i, 1, [list(range(N))]), rows, columns], value=tile)
        nccl.collective_permute_implicit(dst=moving[1], src=moving[0])
        nl.store(moving[0], nl.load(moving[1]))
    return out


def test_places_in_a_ring():
    got = jax.jit(sharded(by_ring, out=P("d")))(X)
    np.testing.assert_array_equal(got, np.tile(X.reshape(N, 8, 16), (N, 1, 1)))


def test_pmap():
    np.testing.assert_array_equal(np.concatenate(list(jax.pmap(total, axis_name="d")(X.reshape(N, 8, 16)))), summed())


def test_ranks_are_positions_in_the_mesh():
    reordered = Mesh(np.array(DEVICES)[[2, 0, 3, 1]], ("d",))
    got = jax.jit(sharded(mixed, reordered))(jax.device_put(X, NamedSharding(reordered, P("d"))))
    wanted = opennki.launch(mixed, N, lambda r: (parts()[r],))
    np.testing.assert_array_equal(got[1], np.concatenate([one[1] for one in wanted]))
    few = Mesh(np.array(DEVICES[2:]), ("d",))
    got = jax.jit(sharded(total, few))(X)
    np.testing.assert_array_equal(got, np.tile(X[:16] + X[16:], (2, 1)))


def test_groups_on_a_mesh_of_two_axes():
    mesh = Mesh(np.array(DEVICES).reshape(2, 2), ("data", "tensor"))
    got = jax.jit(sharded(lambda x: total_of(x, ((0, 1), (2, 3))), mesh, P(("data", "tensor"))))(X)
    a, b, c, d = parts()
    np.testing.assert_array_equal(got, np.concatenate([a + b, a + b, c + d, c + d]))


def test_loops_and_several_calls():
    def f(x):
        def body(c, _):
            return total(c) / N, total(2 * c)

        y, ys = jax.lax.scan(body, x, None, length=5)
        z = jax.lax.fori_loop(0, 3, lambda i, c: total(c) / N, y)
        return y + total(x) + jax.lax.psum(z, "d"), ys[-1]

    def g(x):
        def sums(x):
            return jax.lax.psum(x, "d")

        def body(c, _):
            return sums(c) / N, sums(2 * c)

        y, ys = jax.lax.scan(body, x, None, length=5)
        z = jax.lax.fori_loop(0, 3, lambda i, c: sums(c) / N, y)
        return y + sums(x) + sums(z), ys[-1]

    run = jax.jit(sharded(f, out=(P("d"), P("d"))))
    for got, wanted in zip(run(X), jax.jit(sharded(g, out=(P("d"), P("d")), check_vma=False))(X), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_independent_calls_are_not_mixed_up():
    """XLA starts calls that do not depend on each other in any order, on each device in another."""
    big = jnp.tile(X, (16, 8))

    @jax.jit
    def inner(x):  # one function in the program, with two call sites and one lowering
        return total(x)

    def f(x):
        return [inner(x * k) if k % 2 else total(x * k) for k in range(1, 9)]

    run = jax.jit(sharded(f, out=[P("d")] * 8))
    whole = np.asarray(big).reshape(N, -1, big.shape[1]).sum(0)
    for _ in range(3):
        for k, value in enumerate(run(big), 1):
            np.testing.assert_allclose(np.asarray(value)[: len(whole)], whole * k, rtol=1e-4, atol=1e-4)


def test_many_launches_in_flight():
    run = jax.jit(sharded(lambda x: total(x) / N))
    y = jnp.asarray(X)
    for _ in range(100):
        y = run(y)
    np.testing.assert_allclose(y, np.tile(sum(parts()) / N, (N, 1)), rtol=1e-5, atol=1e-6)


def test_matrices_vmap_and_written_parameters():
    a, b = X[:, :8], X[:, 4:12]
    got = jax.jit(sharded(product, out=P(None), spec=P("d"), check_vma=False))(a, b)
    np.testing.assert_allclose(got, a.T @ b, rtol=1e-5, atol=1e-5)
    batch = np.stack([X, 2 * X])
    got = jax.jit(sharded(jax.vmap(total), spec=P(None, "d")))(batch)
    np.testing.assert_array_equal(got, np.stack([summed(), summed(2 * X)]))

    @nki.jit(platform_target="trn2")
    def into(x: nt.mutable_tensor):
        dist.all_reduce([x], [x], np.add)
        return x

    y = jnp.asarray(X)
    np.testing.assert_array_equal(jax.jit(sharded(into))(y), summed())
    np.testing.assert_array_equal(y, X)
    np.testing.assert_array_equal(jax.jit(sharded(into), donate_argnums=0)(jnp.array(X)), summed())


def test_a_derivative_with_collectives():
    @jax.custom_vjp
    def everywhere(x):
        return total(x)

    everywhere.defvjp(lambda x: (total(x), None), lambda _, g: (total(g),))
    grad = jax.jit(sharded(jax.grad(lambda x: (everywhere(x) ** 2).sum())))(X)
    np.testing.assert_allclose(grad, 2 * N * summed(), rtol=1e-5, atol=1e-5)


def diverging(branch):
    def f(x):
        return jax.lax.cond(jax.lax.axis_index("d") == 1, branch, total, x)

    return jax.jit(sharded(f))


def test_a_device_that_does_not_call_is_named():
    run = diverging(lambda x: x)
    began = time.monotonic()
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(run(X))
    text = message(caught)
    assert "3 ranks wait for ever: rank 0 waits in rank_all_reduce at" in text
    assert "ranks that have not called the kernel here: 1" in text and text.count("test_jax_ranks.py:") >= 4
    assert "lax.cond" in text and time.monotonic() - began < 60
    np.testing.assert_array_equal(jax.jit(sharded(total))(X), summed())


def test_devices_that_wait_in_different_kernels():
    run = diverging(lambda x: total_of(x, ((0, 1, 2, 3),)))
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(run(X))
    assert "in other calls of the same run:" in message(caught)
    for _ in range(2):
        np.testing.assert_array_equal(jax.jit(sharded(total))(X), summed())


def test_loops_of_different_length():
    def f(x):
        return jax.lax.fori_loop(0, 3 + (jax.lax.axis_index("d") == 2), lambda i, c: total(c) / N, x)

    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(jax.jit(sharded(f))(X))
    assert "1 ranks wait for ever: rank 2" in message(caught) and "have not called the kernel here: 0, 1, 3" in str(caught.value)


def test_a_group_may_call_alone():
    def f(x):
        return jax.lax.cond(jax.lax.axis_index("d") < 2, lambda x: total_of(x, ((0, 1), (2, 3))), lambda x: x, x)

    run = jax.jit(sharded(f))
    a, b, c, d = parts()
    for _ in range(3):
        np.testing.assert_array_equal(run(X), np.concatenate([a + b, a + b, c, d]))
    jax.jit(sharded(total))(X).block_until_ready()


def test_kernels_that_are_wrong_on_one_rank():
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(jax.jit(sharded(lambda x: total_of(x, ((0, 1, 2), ))))(X))
    assert "rank 3 is in none of the replica_groups" in message(caught)

    @nki.jit(platform_target="trn2")
    def alone(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.load(x))
        nccl.send([x], peer_id=[1, 0, 3, 2])
        return out

    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(jax.jit(sharded(alone))(X))
    assert "never received what" in message(caught)
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(jax.jit(sharded(lambda x: total_of(x, ((0, 7),))))(X))
    assert "replica_groups names rank 7 and there are 4" in message(caught)
    np.testing.assert_array_equal(jax.jit(sharded(total))(X), summed())


def test_a_callback_that_sleeps_is_waited_for():
    def slow(x):
        time.sleep(2.5)
        return np.asarray(x)

    def f(x):
        late = jax.lax.cond(jax.lax.axis_index("d") == 3, lambda x: jax.pure_callback(slow, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
                            lambda x: x, x)  # fmt: skip
        return total(late)

    np.testing.assert_array_equal(jax.jit(sharded(f, check_vma=False))(X), summed())


def test_a_device_that_computes_for_long_is_waited_for():
    """The others wait for seconds, while a program of XLA alone runs on one device."""
    def slow(x):
        return x + 0 * jax.lax.fori_loop(0, 150_000_000, lambda i, c: jnp.sin(c) + 1e-3, jnp.float32(0.3))

    def f(x):
        return total(jax.lax.cond(jax.lax.axis_index("d") == 3, slow, lambda x: x, x))

    np.testing.assert_array_equal(jax.jit(sharded(f, check_vma=False))(X), summed())


def test_a_busy_process_waits_as_long_as_the_setting_says(monkeypatch):
    monkeypatch.setenv("OPENNKI_MEETING_SECONDS", "2")
    assert settings.current().meeting_seconds == 2
    code = """
        import threading
        def spin():
            while True: pass
        threading.Thread(target=spin, daemon=True).start()
        try:
            jax.block_until_ready(diverging(lambda x: x)(X))
        except jax.errors.JaxRuntimeError as error:
            print(error)
    """
    assert "nothing has come for 2 s (OPENNKI_MEETING_SECONDS)" in script(code, N)


def test_where_ranks_are_not_known():
    with pytest.raises(NkiValueError, match="outside of shard_map"):
        jax.jit(total)(jax.device_put(X, NamedSharding(MESH, P("d"))))
    mesh = Mesh(np.array(DEVICES).reshape(2, 2), ("data", "tensor"))
    f = jax.shard_map(total, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
    with pytest.raises(NkiValueError, match="all axes of the mesh manual"):
        jax.jit(f)(X)
    np.testing.assert_array_equal(jax.jit(total)(X), X)
    np.testing.assert_array_equal(total(jnp.asarray(X)), X)


HEAD = """
    import os, sys
    import opennki
    import jax
    sys.path.insert(0, os.getcwd())
    from tests.bind.test_jax_ranks import *
"""


def script(code, devices, status=0, head=""):
    """What a program on so many devices prints; they are no matter of the environment where none are given."""
    environment = settings.own_environment() | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "JAX_PLATFORMS": "cpu"}
    for name in ("PJRT_NPROC", *(() if devices else ("XLA_FLAGS",))):
        environment.pop(name, None)
    text = head + textwrap.dedent(HEAD) + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == status, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("devices", [8, 16])
def test_more_devices_than_cores(devices):
    code = """
        n = len(jax.devices())
        mesh = Mesh(np.array(jax.devices()), ("d",))
        x = jnp.tile(jnp.arange(n, dtype=jnp.float32)[:, None, None], (1, 128, 64)).reshape(-1, 64)
        def f(x):
            y, _ = jax.lax.scan(lambda c, _: (total(c) / n, None), x, None, length=3)
            return [total(x * k) + jax.lax.psum(y, "d") / n for k in range(4)]
        run = jax.jit(sharded(f, mesh, out=[P("d")] * 4))
        for _ in range(5):
            out = run(x)
        mean = (n - 1) / 2
        print(all((np.asarray(o) == mean * n * k + mean).all() for k, o in enumerate(out)))
    """
    assert script(code, devices) == "True\n"


def test_a_pool_that_launches_have_filled_is_reported():
    """XLA's own weakness: each launch above 32 in flight holds threads of its pool. There is a report, and what to do."""
    code = """
        mesh = Mesh(np.array(jax.devices()), ("d",))
        run = jax.jit(sharded(lambda x: total(x) / 8, mesh))
        x = jnp.ones((64, 512))
        try:
            for _ in range(300):
                x = run(x)
            print((np.asarray(x) == 1).all())
        except jax.errors.JaxRuntimeError as error:
            print("set PJRT_NPROC=32" in str(error))
    """
    devices = "import jax\njax.config.update('jax_num_cpu_devices', 8)\n"
    assert script(code, None, head="import opennki\n" + devices) == "True\n"  # too late for opennki to ask for a larger pool
    assert script(code.replace('print("set PJRT_NPROC=32" in str(error))', "raise"), None, head=devices) == "True\n"


def test_the_process_may_end_with_work_in_flight():
    code = """
        run = jax.jit(sharded(lambda x: total(x) / N))
        y = run(X)
        for _ in range(20):
            y = run(y)
        print("end")
    """
    assert script(code, N) == "end\n"


def test_work_has_threads_of_its_own():
    import threading

    pool, barrier, seen = Elastic(), threading.Barrier(20, timeout=30), []

    def meet():
        barrier.wait()
        seen.append(threading.current_thread())

    for _ in range(3):
        seen.clear()
        for _ in range(20):
            pool.submit(meet)
        until = time.monotonic() + 30
        while len(seen) < 20 and time.monotonic() < until:
            time.sleep(0.01)
        assert len(set(seen)) == 20
