"""Flash attention forward, simulated: 4096 tokens, d=128, bfloat16, causal, compared with a float64 reference.

    make demo                                  (or: python examples/flash_attention.py --tokens 1024)

The kernel is written for `neuronxcc.nki` and would run unchanged on a device. For each block of 128 queries it walks over blocks of 512
keys, keeps the running row maximum and row sum, and rescales the accumulator when the maximum grows (online softmax).
"""
import argparse
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np

import opennki.dropin  # noqa: F401  isort: skip  (provides neuronxcc; not needed under `opennki run`)
import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl

Q_BLOCK, K_BLOCK = 128, 512


@nki.jit
def flash_attention(q, k, v):
    """out = softmax(q.T k / sqrt(d), causal) v for q, k of shape (d, tokens) and v of shape (tokens, d)."""
    d, tokens = q.shape
    scale = d ** -0.5
    out = nl.ndarray((tokens, d), dtype=q.dtype, buffer=nl.shared_hbm)

    for i in nl.affine_range(tokens // Q_BLOCK):
        q_tile = nl.load(q[:, nl.ds(i * Q_BLOCK, Q_BLOCK)])
        row_max = nl.full((Q_BLOCK, 1), nl.fp32.min, dtype=nl.float32)
        row_sum = nl.zeros((Q_BLOCK, 1), dtype=nl.float32)
        acc = nl.zeros((Q_BLOCK, d), dtype=nl.float32)

        for j in nl.sequential_range(tokens // K_BLOCK):
            # blocks of keys that lie wholly in the future of this block of queries are skipped
            if j * K_BLOCK < (i + 1) * Q_BLOCK:
                k_tile = nl.load(k[:, nl.ds(j * K_BLOCK, K_BLOCK)])
                scores = nl.ndarray((Q_BLOCK, K_BLOCK), dtype=nl.float32)
                scores[...] = nl.multiply(nisa.nc_matmul(q_tile, k_tile), scale)
                if (j + 1) * K_BLOCK > i * Q_BLOCK:  # the diagonal crosses this block
                    row, column = nl.mgrid[0:Q_BLOCK, 0:K_BLOCK]
                    scores[...] = nisa.affine_select(pred=(i * Q_BLOCK + row >= j * K_BLOCK + column),
                                                     on_true_tile=scores, on_false_value=nl.fp32.min)

                new_max = nl.maximum(row_max, nl.max(scores, axis=1, keepdims=True))
                minus_max = nl.negative(new_max)
                shrink = nisa.activation(op=nl.exp, data=row_max, bias=minus_max)
                block_sum = nl.ndarray((Q_BLOCK, 1), dtype=nl.float32)
                p = nisa.activation_reduce(op=nl.exp, data=scores, bias=minus_max, reduce_op=nl.add,
                                           reduce_res=block_sum, dtype=nl.bfloat16)

                product = nl.zeros((Q_BLOCK, d), dtype=nl.float32, buffer=nl.psum)
                for b in nl.affine_range(K_BLOCK // 128):
                    p_t = nl.copy(nisa.nc_transpose(p[:, nl.ds(b * 128, 128)]), dtype=nl.bfloat16)
                    v_tile = nl.load(v[nl.ds(j * K_BLOCK + b * 128, 128), :])
                    product += nisa.nc_matmul(p_t, v_tile)

                acc[...] = nl.add(nl.multiply(acc, shrink), product)
                row_sum[...] = nl.add(nl.multiply(row_sum, shrink), block_sum)
                row_max[...] = nl.copy(new_max)

        nl.store(out[nl.ds(i * Q_BLOCK, Q_BLOCK), :], nl.multiply(acc, nl.reciprocal(row_sum), dtype=q.dtype))
    return out


def reference(q, k, v):
    """The same in float64."""
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    scores = q.T @ k / np.sqrt(q.shape[0])
    scores[np.triu_indices(scores.shape[0], 1)] = -np.inf
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    return (p / p.sum(axis=1, keepdims=True)) @ v


def main():
    """Trace, simulate, compare, and write the IR text."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--head", type=int, default=128)
    parser.add_argument("--ir", type=Path, default=Path("build/flash_attention.ir.py"))
    args = parser.parse_args()

    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from opennki.ir.print import to_text
    from opennki.trace.mac import matmul_mac_count
    console = Console(force_terminal=sys.stdout.isatty(), width=100)
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((args.head, args.tokens)).astype(ml_dtypes.bfloat16) for _ in range(2))
    v = rng.standard_normal((args.tokens, args.head)).astype(ml_dtypes.bfloat16)

    console.print(f"flash attention forward: {args.tokens} tokens, d={args.head}, bfloat16, causal")
    start = time.perf_counter()
    kernel = flash_attention.trace(q, k, v)
    traced = time.perf_counter() - start
    args.ir.parent.mkdir(parents=True, exist_ok=True)
    args.ir.write_text(to_text(kernel))
    console.print(f"traced in {traced * 1e3:.0f} ms, IR text in {args.ir}")

    start = time.perf_counter()
    with Progress(*Progress.get_default_columns(), console=console, transient=True) as bar:
        task = bar.add_task("simulating with all checks on", total=None)
        result = nki.simulate_kernel(flash_attention, q, k, v,
                                     progress=lambda done, total: bar.update(task, completed=done, total=total))
    simulated = time.perf_counter() - start
    console.print(f"simulated in {simulated:.2f} s")
    with console.status("float64 reference ..."):
        expected = reference(q, k, v)
    error = np.abs(result.astype(np.float64) - expected)
    relative = np.linalg.norm(result.astype(np.float64) - expected) / np.linalg.norm(expected)

    table = Table(title="result")
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_row("output", f"{result.shape} {result.dtype}")
    table.add_row("largest absolute error", f"{error.max():.2e}")
    table.add_row("relative L2 error", f"{relative:.2e}")
    table.add_row("IR statements", str(sum(1 for _ in to_text(kernel).splitlines())))
    table.add_row("multiply-accumulates", f"{matmul_mac_count(kernel):,}")
    table.add_row("trace / simulation", f"{traced:.3f} s / {simulated:.2f} s")
    console.print(table)
    if not relative < 5e-3:
        console.print("the result does not agree with the reference")
        return 1
    console.print("agrees with the reference (bfloat16 has 8 bits of precision, so about 4e-3 is expected)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
