"""One of two processes of a jax.distributed program, with two devices each: run by test_jax_processes.py."""

import os
import signal
import sys

import opennki
import jax

process, port, way = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)

from tests.bind.test_jax_ranks import (  # noqa: E402
    N, Mesh, NamedSharding, P, X, mixed, np, parts, sharded, summed, total, total_of)

mesh = Mesh(np.array(jax.devices()), ("d",))
x = jax.make_array_from_callback(X.shape, NamedSharding(mesh, P("d")), lambda index: X[index])


def check(got, wanted):
    for shard in got.addressable_shards:
        np.testing.assert_array_equal(shard.data, wanted[shard.index])


def works():
    check(jax.jit(sharded(total, mesh))(x), summed())
    wanted = opennki.launch(mixed, N, lambda r: (parts()[r],))
    for i, value in enumerate(jax.jit(sharded(mixed, mesh))(x)):
        check(value, np.concatenate([one[i] for one in wanted]))

    def several(x):
        y, _ = jax.lax.scan(lambda c, _: (total(c), total(c) + 0 * jax.lax.psum(c, "d")), x, None, length=3)
        return [total(x * 2**k) for k in range(4)] + [y]

    run = jax.jit(sharded(several, mesh, out=[P("d")] * 5))
    for _ in range(5):
        *scaled, y = run(x)
    for k, value in enumerate(scaled):
        check(value, summed() * 2**k)
    check(y, summed() * N * N)


def fails(f):
    try:
        jax.block_until_ready(jax.jit(sharded(f, mesh))(x))
    except jax.errors.JaxRuntimeError as error:
        print(error)
    else:
        print("no error")


def differs(condition, other):
    return lambda x: jax.lax.cond(condition(jax.lax.axis_index("d")), total, other, x)


works()
if way == "absent":
    fails(differs(lambda i: i != 1, lambda x: x))
elif way == "elsewhere":
    fails(differs(lambda i: i < 2, lambda x: total_of(x, ((0, 1, 2, 3),))))
elif way == "wrong":
    fails(lambda x: total_of(x, ((0, 1, 3),)))
elif way == "killed":
    if process == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    fails(total)
    os._exit(0)  # JAX would wait for the process that is gone
works()
print("end")
