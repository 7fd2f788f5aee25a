"""The way from Python to native code: µs per instruction of tracing, verifying, planning and lowering.

    python benchmarks/lowering.py [--instructions 5000] [--repeat 3] [--only NAME]

`plan` is the interpreter's plan without steps (rolling, proofs, slots), `lower` what makes native code of it. Instructions of forms that a
kernel before has had are lowered by templates (`execute.templates`), so there are two numbers: `lower` where nothing is known of any form,
`known` where a kernel of the same forms has been lowered before. For looped kernels the times are of the whole kernel, in ms, as their
instructions are few. Times are CPU seconds (`time.process_time`) of the best run. Expected (issue "Near the limit of the CPU"): plan and
lower under 2 ms for a looped kernel, under 50 µs per instruction of an unrolled one. Nothing is asserted here.
"""
from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent.parent)]

import ml_dtypes
import numpy as np

import opennki.dropin  # noqa: F401  isort: skip
import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
from examples.flash_attention import flash_attention

from opennki.execute import templates
from opennki.execute.executor import executor_of
from opennki.interpret.checks import Checks, tape_of
from opennki.ir.nodes import Instr, Kernel, statements
from opennki.ir.verify import verify
from opennki.isa.target import TRN2


def looped_norm(x):
    """A loop of a normalisation."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(x.shape[0] // 128):
        tile = nl.load(x[i * 128 : (i + 1) * 128])
        scale = nl.rsqrt(nl.mean(nl.square(tile), axis=1, keepdims=True) + 1e-6)
        nl.store(out[i * 128 : (i + 1) * 128], tile * scale)
    return out


def looped_matmul(a, b):
    """A loop nest of products: a is [K, M], b is [K, N]."""
    k, m = a.shape
    n = b.shape[1]
    out = nl.ndarray((m, n), dtype=nl.float32, buffer=nl.shared_hbm)
    for i in nl.affine_range(m // 128):
        for j in nl.affine_range(n // 512):
            total = nl.zeros((128, 512), nl.float32, buffer=nl.psum)
            for p in nl.affine_range(k // 128):
                left = nl.load(a[p * 128 : (p + 1) * 128, i * 128 : (i + 1) * 128])
                right = nl.load(b[p * 128 : (p + 1) * 128, j * 512 : (j + 1) * 512])
                total += nl.matmul(left, right, transpose_x=True)
            nl.store(out[i * 128 : (i + 1) * 128, j * 512 : (j + 1) * 512], nl.copy(total, dtype=nl.float32))
    return out


def regular(x, count):
    """A Python loop over adjacent tiles, four instructions each."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for i in range(count // 4):
        a = nl.load(x[:, nl.ds(i % (x.shape[1] // 4) * 4, 4)])
        nl.store(out[:, nl.ds(i % (x.shape[1] // 4) * 4, 4)], nl.add(nl.multiply(a, 2.5), a))
    return out


def chains(x, count):
    """A Python loop over tiles at random places, of short chains that differ at random."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    draw, left = random.Random(1), count
    while left > 0:
        a = first = nl.load(x[:, nl.ds(draw.randrange(x.shape[1] - 64), 64)])
        left -= 2
        for _ in range(draw.randrange(1, 7)):
            kind = draw.randrange(6)
            a = nl.multiply(a, 2.5) if kind == 0 else nl.add(a, first) if kind == 1 else (nl.exp, nl.rsqrt, nl.square, nl.tanh)[kind - 2](a)
            left -= 1
        nl.store(out[:, nl.ds(draw.randrange(x.shape[1] - 64), 64)], a)
    return out


def mixed(x, count):
    """Instructions of a dozen kinds on tiles of a pool, in random order."""
    out = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    pool = nl.ndarray((128, 64 * 128), dtype=nl.bfloat16, buffer=nl.sbuf)
    wide = nl.ndarray((128, 16 * 128), dtype=nl.float32, buffer=nl.sbuf)
    thin = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.sbuf)
    sums = nl.ndarray((128, 4 * 128), dtype=nl.float32, buffer=nl.psum)
    for tile in (pool, wide, thin, sums):
        tile[...] = nisa.memset(tile.shape, 0.5, tile.dtype)
    draw = random.Random(2)

    def at(tensor, n=128):
        return tensor[:, nl.ds(draw.randrange(tensor.shape[1] // n) * n, n)]

    def place(tensor, n=128):
        start = draw.randrange(tensor.shape[1] // n) * n
        return (slice(None), nl.ds(start, n))

    for _ in range(count):
        kind = draw.randrange(12)
        if kind == 0:
            pool[place(pool)] = nl.load(x[:, nl.ds(draw.randrange(x.shape[1] - 128), 128)])
        elif kind == 1:
            nl.store(out[:, nl.ds(draw.randrange(x.shape[1] - 128), 128)], at(wide))
        elif kind == 2:
            wide[place(wide)] = nisa.tensor_tensor(at(pool), at(wide), nl.add)
        elif kind == 3:
            wide[place(wide)] = nisa.activation(nl.exp, at(wide), bias=at(thin, 1), scale=-1.0)
        elif kind == 4:
            thin[place(thin, 1)] = nisa.tensor_reduce(nl.max, at(wide), axis=(1,))
        elif kind == 5:
            sums[place(sums)] += nisa.nc_matmul(at(pool), at(pool))
        elif kind == 6:
            sums[place(sums)] = nisa.nc_transpose(at(wide))
        elif kind == 7:
            wide[place(wide)] = nisa.tensor_copy(at(sums))
        elif kind == 8:
            pool[place(pool)] = nisa.tensor_scalar(at(wide), nl.multiply, at(thin, 1), op1=nl.add, operand1=0.5)
        elif kind == 9:
            wide[place(wide)] = nisa.tensor_tensor_scan(at(wide), at(pool), initial=0.0, op0=nl.multiply, op1=nl.add)
        elif kind == 10:
            pool[place(pool)] = nisa.memset((128, 128), draw.choice((0.0, 1.0)), nl.bfloat16)
        else:
            wide[place(wide)] = nl.where(nl.greater(at(wide), at(wide)), at(wide), at(pool))
    return out


def array(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    """An array of this shape that takes no memory; tracing reads no values."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def kernels(count: int) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...], bool]]:
    """By name: kernel, arguments, and whether it is looped."""
    bf16 = ml_dtypes.bfloat16
    return {
        "norm, looped": (looped_norm, (array(4096, 2048),), True),
        "matmul, looped": (looped_matmul, (array(2048, 2048), array(2048, 2048)), True),
        "flash attention, looped": (
            flash_attention.func, (array(128, 2048, dtype=bf16), array(128, 2048, dtype=bf16), array(2048, 128, dtype=bf16)), True,
        ),
        "regular, unrolled": (regular, (array(128, 4096), count), False),
        "chains at random places": (chains, (array(128, 4096), count), False),
        "mixed, in random order": (mixed, (array(128, 4096), count), False),
    }  # fmt: skip


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds, result."""
    start = time.process_time()
    made = run()
    return time.process_time() - start, made


def stages(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[list[float], Kernel, Any]:
    """CPU seconds of tracing, verifying, planning and lowering, first and again; the IR; the native code."""
    traced, kernel = timed(lambda: nki.jit(function, platform_target="trn2").trace(*arguments))
    verified, _ = timed(lambda: verify(kernel, TRN2))
    planned, tape = timed(lambda: tape_of(kernel, Checks.of("off"), True))
    templates.forget()
    lowered, executor = timed(lambda: executor_of(tape))
    again = tape_of(kernel, Checks.of("off"), True)
    known, _ = timed(lambda: executor_of(again))
    return [traced, verified, planned, lowered, known], kernel, executor


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--instructions", type=int, default=5000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    stages(looped_norm, (array(256, 512),))  # what is loaded or made once
    print(f"{'':<26}{'instrs':>8}{'calls':>8}{'trace':>9}{'verify':>9}{'plan':>9}{'lower':>9}{'known':>9}{'plan + lower':>14}")
    for name, (function, arguments, looped) in kernels(args.instructions).items():
        if args.only not in name:
            continue
        rows = [stages(function, arguments) for _ in range(args.repeat)]
        _, kernel, executor = rows[0]
        count = sum(isinstance(s, Instr) for s in statements(kernel.body))
        best = [min(times) for times in zip(*(row[0] for row in rows), strict=True)]
        scale = 1e3 if looped else 1e6 / count
        unit = " ms" if looped else " µs each"
        calls = len(executor.lowering.calls) if executor is not None else 0
        both = min(row[0][2] + row[0][3] for row in rows)
        print(f"{name:<26}{count:>8}{calls:>8}" + "".join(f"{t * scale:>9.2f}" for t in best) + f"{both * scale:>14.2f}{unit}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
