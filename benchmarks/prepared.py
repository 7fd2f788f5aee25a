"""What a call of a prepared kernel costs beside its NumPy calls: load 128 x 4 float32, add 1, store.

    python benchmarks/prepared.py [--repeat 7]

Limit: 15 microseconds a call beyond NumPy. Measured side by side, in turns; medians of the rounds, and the best ones.
"""
import argparse
import os
import statistics
import sys
import timeit

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

import opennki.dropin  # noqa: F401  isort: skip
import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl

from opennki.interpret.prepared import Prepared
from opennki.interpret.simulate import Checks, simulate, tape_of

CALLS = 2000


def increment(x):
    """Three instructions on one tile."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.add(nl.load(x), 1.0))
    return out


def product(x):
    """A matrix product, which limits BLAS to one thread."""
    out = nl.ndarray((x.shape[1], x.shape[1]), dtype=nl.float32, buffer=nl.shared_hbm)
    tile = nl.load(x)
    nl.store(out, nl.copy(nisa.nc_matmul(tile, tile)))
    return out


def rows(name, kernel, numpy, x, repeat):
    """Print the microseconds of one kernel: NumPy, prepared, simulated."""
    ir = nki.jit(kernel, mode="simulation", platform_target="trn1").trace(x)
    plan, checks = Prepared(ir), Checks.of("fast")
    tape = tape_of(ir, checks)
    out = np.empty(ir.outputs[0].shape, np.float32)
    calls = {"numpy": lambda: numpy(x, out), "prepared": lambda: plan.run([x], [out]),
             "simulate": lambda: simulate(ir, [x], checks, tape=tape)}
    times = {what: [] for what in calls}
    for _ in range(repeat):
        for what, call in calls.items():
            times[what].append(timeit.timeit(call, number=CALLS) / CALLS * 1e6)
    plain, prepared, simulated = (statistics.median(times[what]) for what in calls)
    print(f"{name:10} {plain:9.1f} {prepared:12.1f} {prepared - plain:9.1f} {simulated:12.1f} "
          f"{min(times['prepared']) - min(times['numpy']):12.1f}", flush=True)


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=7)
    repeat = parser.parse_args().repeat
    tile, sum_ = np.empty((128, 4), np.float32), np.empty((128, 4), np.float32)

    def add(x, out):
        np.copyto(tile, x)
        np.add(tile, np.float32(1), out=sum_)
        np.copyto(out, sum_)

    a, b = np.empty((128, 4), np.float32), np.empty((4, 4), np.float32)

    def multiply(x, out):
        np.copyto(a, x)
        np.matmul(a.T, a, out=b)
        np.copyto(out, b)
    print(f"{'kernel':10} {'numpy us':>9} {'prepared us':>12} {'beyond us':>9} {'simulate us':>12} {'beyond, best':>12}")
    x = np.random.default_rng(0).standard_normal((128, 4)).astype(np.float32)
    rows("add", increment, add, x, repeat)
    rows("matmul", product, multiply, x, repeat)
    return 0


if __name__ == "__main__":
    sys.exit(main())
