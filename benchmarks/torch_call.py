"""What a call of a kernel costs in a PyTorch program on the CPU: bursts of calls in turns in one process, side by side with the same
arithmetic as a plain operation and as a round trip through NumPy.

    python benchmarks/torch_call.py [--rounds 40] [--columns 4]

Limits: the kernel takes at most 25 µs more than the plain operation eagerly, and at most 40 µs more in a program of torch.compile
(backend inductor, fullgraph; its guards are checked at each call, for the plain operation too). The limits are for the median of the
thread's CPU time, which other programs on the machine disturb less than the time on the wall, printed beside it. The round trip is
`torch.from_numpy(x.numpy() + 1)`, and in compiled programs and under autograd a
torch.library.custom_op around that, which is the usual way to have NumPy in such programs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time

os.environ.setdefault("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")

try:
    import torch
except ImportError:
    sys.exit("torch_call: torch is not installed; nothing measured")

import opennki.dropin  # noqa: F401  isort: skip
import neuronxcc.nki as nki
import neuronxcc.nki.language as nl
import neuronxcc.nki.typing as nt
import numpy as np

BURST = 50
LIMITS = {"eager": 25.0, "compiled": 40.0}


@nki.jit
def add(x):
    """x + 1."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.load(x) + 1.0)
    return out


@nki.jit
def add_into(x: nt.mutable_tensor):
    """x += 1."""
    nl.store(x, nl.load(x) + 1.0)
    return x


def round_trip(x):
    """x + 1 by NumPy."""
    return torch.from_numpy(x.numpy() + np.float32(1))


@torch.library.custom_op("torch_call::by_numpy", mutates_args=())
def by_numpy(x: torch.Tensor) -> torch.Tensor:
    """The same as an op of torch.library."""
    return round_trip(x)


by_numpy.register_fake(torch.empty_like)
by_numpy.register_autograd(lambda ctx, gradient: gradient)


def compiled(function):
    """The program of torch.compile. Functions get programs of their own: dynamo keeps them by their code."""
    return torch.compile(lambda x: function(x), fullgraph=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--columns", type=int, default=4, help="of the tensors, which have 128 rows")
    args = parser.parse_args()
    torch.set_num_threads(1)
    give_derivative()
    x = torch.ones(128, args.columns)
    leaf = x.clone().requires_grad_()
    programs = {
        "eager": {"x + 1": lambda x: x + 1, "NumPy round trip": round_trip, "NumPy in a custom_op": by_numpy, "kernel": add,
                  "kernel, in place": add_into},
        "with autograd": {"x + 1": lambda x: x + 1, "NumPy in a custom_op": by_numpy, "kernel": add},
        "compiled": {"x + 1": compiled(lambda x: x + 1), "NumPy in a custom_op": compiled(by_numpy), "kernel": compiled(add)},
    }
    operands = {"with autograd": leaf}
    times = {(kind, name): [] for kind, group in programs.items() for name in group}
    for _ in range(args.rounds + 1):
        for kind, name in times:
            program, operand = programs[kind][name], operands.get(kind, x)
            start = time.perf_counter_ns(), time.thread_time_ns()
            for _ in range(BURST):
                program(operand)
            end = time.perf_counter_ns(), time.thread_time_ns()
            times[kind, name].append([(e - s) / BURST / 1e3 for s, e in zip(start, end)])
    print(f"a call on float32 [128, {args.columns}], µs: {args.rounds} bursts of {BURST}\n"
          f"{'':<40}{'CPU':>8} {'least':>8} {'wall':>8} {'least':>8}")
    over = 0
    for (kind, name), values in times.items():
        wall, cpu = zip(*values[1:])
        middle = statistics.median(cpu)
        if name == "x + 1":
            plain = middle
        limit = LIMITS.get(kind) if name == "kernel" else None
        over += limit is not None and middle - plain > limit
        print(f"{kind:<16}{name:<24}{middle:8.1f} {min(cpu):8.1f} {statistics.median(wall):8.1f} {min(wall):8.1f}"
              + (f"   {middle - plain:.1f} over x + 1 (limit {limit:.0f})" if limit else ""))
    return int(over > 0)


def give_derivative():
    """The derivative of `add`, for the rows with autograd."""
    from opennki.bind.torch import register_autograd

    register_autograd(add, lambda ctx, gradient: gradient)


if __name__ == "__main__":
    sys.exit(main())
