"""Kernels with collectives in a JAX program of several devices, compared with JAX alone: a tensor-parallel MLP and ring attention.

    python examples/distributed_jax.py                        8 CPU devices of this process
    python examples/distributed_jax.py --process 0 --processes 2 --coordinator 127.0.0.1:9876   ... and the same with --process 1:
                                                              8 devices of two processes, which run the same program

Inside of shard_map each device is a rank. The kernels are those that examples/distributed.py runs by opennki.launch.
"""
import argparse
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).parent))
from distributed_kernels import ring_attention, tensor_parallel_mlp

HIDDEN, TOKENS, HEAD = 512, 64, 64


def mlp(x, up, down):
    """The MLP in JAX."""
    return jnp.dot(jax.nn.gelu(x.T @ up, approximate=False), down)


def attention(q, k, v):
    """Attention over all tokens in JAX."""
    return jax.nn.softmax(q.T @ k / HEAD**0.5) @ v


def cases(ranks):
    """(name, the program with kernels on a mesh, the one of JAX, arguments, their shardings, that of the result)."""
    random = np.random.default_rng(0)

    def numbers(*shape):
        return (random.standard_normal(shape) / shape[0] ** 0.5).astype(np.float32)

    yield ("mlp", tensor_parallel_mlp, mlp, (numbers(HIDDEN, TOKENS), numbers(HIDDEN, 128 * ranks), numbers(128 * ranks, HIDDEN)),
           (P(), P(None, "tensor"), P("tensor")), P())  # fmt: skip
    q, k, v = numbers(HEAD, 128 * ranks), numbers(HEAD, 128 * ranks), numbers(128 * ranks, HEAD)
    yield ("attention", lambda *tensors: ring_attention(*tensors, ranks), attention, (q, k, v),
           (P(None, "tensor"), P(None, "tensor"), P("tensor")), P("tensor"))  # fmt: skip


def main():
    """Run the cases and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--coordinator")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--process", type=int, default=0)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.ranks // args.processes)
    if args.processes > 1:
        jax.distributed.initialize(args.coordinator, args.processes, args.process)
    mesh = Mesh(np.array(jax.devices()), ("tensor",))
    worst = 0.0
    for name, kernel, alone, tensors, specs, out in cases(args.ranks):
        placed = [jax.make_array_from_callback(t.shape, NamedSharding(mesh, spec), lambda index, t=t: t[index])
                  for t, spec in zip(tensors, specs, strict=True)]  # fmt: skip
        run = jax.jit(jax.shard_map(kernel, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False))
        jax.block_until_ready(run(*placed))
        start = time.perf_counter()
        result = jax.block_until_ready(run(*placed))
        seconds = time.perf_counter() - start
        wanted = np.asarray(jax.jit(alone)(*tensors))
        error = max(np.linalg.norm(np.asarray(s.data) - wanted[s.index]) / np.linalg.norm(wanted[s.index])
                    for s in result.addressable_shards)  # fmt: skip
        worst = max(worst, error)
        here = len(result.addressable_shards)
        sys.stdout.write(f"{name:10} {args.ranks} devices, {here} of them here, {seconds:.2f} s, relative L2 error {error:.1e}\n")
    return 0 if worst < 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main())
