"""What a kernel call costs in a JAX program on CPU, apart from the kernel: medians over an (8,) float32 array in one process.

    python benchmarks/xla_handler.py [--rounds 60]

Limit: the typed handler takes at most half of the time of jax.pure_callback. Its cost over `a + 1` alone is printed; it was 8 to 9 µs on
an idle x86-64 machine and 14 µs on a busy one, of which 1 to 2 µs go to the floating-point mode.
"""
import argparse
import ctypes
import statistics
import sys
import time
import timeit

try:
    import jax
except ImportError:
    sys.exit("xla_handler: jax is not installed; nothing measured")

import numpy as np

from opennki.bind import fpmode, xla_ffi

BURST = 50                  # calls in a row, so that each kind runs with warm caches, as in a loop
PAYLOAD = "x" * 4000        # about the payload of a small kernel
version = xla_ffi.version_from_header(jax.ffi.include_dir())


def register(name, handler):
    jax.ffi.register_ffi_target(name, xla_ffi.capsule(handler), platform="cpu", api_version=1)
    return handler


def bare(frame):
    """The least that a ctypes handler can do."""
    extension = xla_ffi._Frame.from_address(frame).extension
    if extension:
        xla_ffi._fill_metadata(extension, version)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    rounds = parser.parse_args().rounds
    handlers = [   # noqa: F841  kept alive
        register("bare", ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(bare)),
        register("nothing", xla_ffi.typed_handler(lambda payload, inputs, outputs: None, version=version)),
        register("add1", xla_ffi.typed_handler(lambda payload, inputs, outputs: np.add(inputs[0], 1, out=outputs[0]), version=version))]
    x = jax.numpy.ones(8, jax.numpy.float32)
    spec = jax.ShapeDtypeStruct(x.shape, x.dtype)
    plain, nothing, callback = "jit(a + 1)", "typed handler, no-op", "jax.pure_callback, no-op"
    programs = {
        plain: jax.jit(lambda a: a + 1),
        "bare ctypes handler": jax.jit(lambda a: jax.ffi.ffi_call("bare", spec)(a, opaque=PAYLOAD)),
        nothing: jax.jit(lambda a: jax.ffi.ffi_call("nothing", spec)(a, opaque=PAYLOAD)),
        "typed handler, np.add": jax.jit(lambda a: jax.ffi.ffi_call("add1", spec)(a, opaque=PAYLOAD)),
        callback: jax.jit(lambda a: jax.pure_callback(lambda v: v, spec, a))}
    times = {name: [] for name in programs}
    for _ in range(rounds + 1):
        for name, program in programs.items():
            for _ in range(BURST):
                start = time.perf_counter_ns()
                program(x).block_until_ready()
                times[name].append(time.perf_counter_ns() - start)
    median = {name: statistics.median(t[BURST:]) / 1e3 for name, t in times.items()}
    print(f"jax {jax.__version__}, Python {sys.version.split()[0]}, XLA FFI {version[0]}.{version[1]}")
    for name, value in median.items():
        print(f"{name:<26}{value:8.1f} µs")
    mode = statistics.median(timeit.repeat(lambda: fpmode.leave(fpmode.enter()), number=100, repeat=200)) / 100 * 1e6
    print(f"{'of it fpmode':<26}{mode:8.1f} µs")
    over, ratio = median[nothing] - median[plain], median[callback] / median[nothing]
    print(f"no-op over plain {over:.1f} µs, pure_callback / no-op {ratio:.1f} (limit 2)")
    return int(ratio < 2)


if __name__ == "__main__":
    sys.exit(main())
