"""What a call of a kernel costs in a JAX program on the CPU: medians in one process, side by side with the same arithmetic
as a plain operation and through jax.pure_callback.

    python benchmarks/jax_call.py [--rounds 40] [--specialisations 1000]

Limits: the kernel takes at most 30 µs more than the plain operation, and pure_callback costs at least twice as much
over it. Then distinct specialisations are made, and the memory of the process before and after is printed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time

os.environ.setdefault("NEURON_PLATFORM_TARGET_OVERRIDE", "trn1")

try:
    import jax
except ImportError:
    sys.exit("jax_call: jax is not installed; nothing measured")

import jax.numpy as jnp

import opennki.dropin  # noqa: F401  isort: skip
import neuronxcc.nki as nki
import neuronxcc.nki.language as nl
import numpy as np

BURST = 50


@nki.jit
def add(x, value=1.0):
    """x + value."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.load(x) + value)
    return out


def resident():
    """Memory of this process in MiB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--specialisations", type=int, default=1000)
    args = parser.parse_args()
    x = jnp.ones((128, 4), jnp.float32)
    spec = jax.ShapeDtypeStruct(x.shape, x.dtype)
    programs = {
        "jit(x + 1)": jax.jit(lambda a: a + 1),
        "jit(kernel)": jax.jit(add),
        "jit(pure_callback)": jax.jit(lambda a: jax.pure_callback(lambda v: np.asarray(v) + np.float32(1), spec, a)),
        "kernel, outside of jit": add,
        "x + 1, outside of jit": lambda a: a + 1,
    }
    steps = 50
    loops = {
        f"{name}, of {steps} in a loop": jax.jit(lambda a, f=programs[name]: jax.lax.fori_loop(0, steps, lambda _, c: f(c), a))
        for name in list(programs)[:3]
    }
    times = {name: [] for name in [*programs, *loops]}
    for _ in range(args.rounds + 1):
        for name, program in {**programs, **loops}.items():
            for _ in range(BURST if name in programs else 2):
                start = time.perf_counter_ns()
                program(x).block_until_ready()
                times[name].append((time.perf_counter_ns() - start) / (1 if name in programs else steps))
    median = {name: statistics.median(t[len(t) // (args.rounds + 1):]) / 1e3 for name, t in times.items()}
    for name, value in median.items():
        print(f"{name:<40}{value:8.1f} µs")
    plain, kernel, callback = list(median.values())[:3]
    over, over_callback = kernel - plain, callback - plain
    print(f"kernel over the plain operation {over:.1f} µs (limit 30); pure_callback over it {over_callback:.1f} µs, "
          f"{over_callback / over:.1f} times as much (limit 2)")
    if args.specialisations:
        marks, kept = [], args.specialisations // 4
        for n in range(args.specialisations + 1):
            if n % kept == 0:
                marks.append(resident())
            add(x, float(n)).block_until_ready()
        print(f"{args.specialisations} specialisations outside of jit: " + ", ".join(f"{m:.0f}" for m in marks)
              + " MiB after each quarter")
    return int(over > 30 or over_callback < 2 * over)


if __name__ == "__main__":
    sys.exit(main())
