"""The native executor against the limits of the CPU and other ways to compute the same: one table, on one thread and on two.

    python benchmarks/run.py [--rounds 12] [--only NAME] [--threads 1 2] [--long] [--json FILE]

The kernels, and the limit of each, are those of executor.py; `wanted` is the multiple of the limit that the project allows itself. Every
number of threads is measured in a process of its own that has as many cores: medians of runs that take turns, in blocks, with the limit and
the peers. Peers are ratios too (peer / limit), where they are installed. --long adds a causal attention over 32 768 tokens, end to end.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

WANTED = {  # first word(s) of the name of a case: multiple of its limit
    "matmul f32": 1.15, "matmul bf16": 2.0, "flash": 0.7, "rmsnorm": 2.0, "layernorm": 2.0, "softmax": 3.0, "add": 1.5, "scan": 1.5,
    "max pool": 1.5, "average pool": 1.5, "avg pool": 1.5, "pool": 1.5, "tiny": 10.0, "long attention": 1.2,
}  # fmt: skip
PEERS = ("NumPy", "torch", "JAX")


def wanted(name):
    """The multiple of the limit that a case may take, None where there is none."""
    return next((WANTED[key] for key in sorted(WANTED, key=len, reverse=True) if name.startswith(key)), None)


# ---- one process with some threads -------------------------------------------------------------------------------------
def numpy_peer(name, np, arrays):
    """The same by NumPy, as one writes it there."""
    x = arrays[0]
    if name.startswith("matmul f32"):
        return lambda: arrays[0].T @ arrays[1]
    if name.startswith("rmsnorm"):
        return lambda: x * (1 / np.sqrt(np.mean(np.square(x), axis=1, keepdims=True) + 1e-6))
    if name.startswith("layernorm"):

        def layer_norm():
            centred = x - x.mean(axis=1, keepdims=True)
            return centred * (1 / np.sqrt(np.mean(np.square(centred), axis=1, keepdims=True) + 1e-5))

        return layer_norm
    if name.startswith("softmax"):

        def softmax():
            e = np.exp(x - x.max(axis=1, keepdims=True))
            return e / e.sum(axis=1, keepdims=True)

        return softmax
    if name.startswith("add"):
        return lambda: arrays[0] + arrays[1]
    if name.startswith("tiny"):
        return lambda: x * 2.5 + x
    return None


def torch_peer(name, torch, arrays):
    """The same by PyTorch, eagerly."""
    f = torch.nn.functional

    def tensor(a):
        return torch.from_numpy(a.view("u2").copy()).view(torch.bfloat16) if a.dtype.itemsize == 2 else torch.from_numpy(a)

    t = [tensor(a) for a in arrays]
    x = t[0]
    if name.startswith("matmul"):
        return lambda: x.T @ t[1]
    if name.startswith("rmsnorm"):
        return lambda: f.rms_norm(x, x.shape[1:], eps=1e-6)
    if name.startswith("layernorm"):
        return lambda: f.layer_norm(x, x.shape[1:])
    if name.startswith("softmax"):
        return lambda: torch.softmax(x, 1)
    if name.startswith("add"):
        return lambda: x + t[1]
    if name.startswith("tiny"):
        return lambda: x * 2.5 + x
    if "pool" in name:
        pooled = f.max_pool2d if name.startswith("max") else f.avg_pool2d
        return lambda: pooled(x[None], 3, 2)
    return None


def jax_peer(name, jax, arrays):
    """The same by JAX, under jit."""
    jnp = jax.numpy
    given = [jax.device_put(a) for a in arrays]

    def layer_norm(x):
        centred = x - x.mean(axis=1, keepdims=True)
        return centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=1, keepdims=True) + 1e-5)

    def scan(a, b):
        def both(left, right):
            return left[0] * right[0], left[1] * right[0] + right[1]

        return jax.lax.associative_scan(both, (a, b), axis=1)[1]

    functions = {
        "matmul": lambda a, b: a.T @ b, "rmsnorm": lambda x: x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=1, keepdims=True) + 1e-6),
        "layernorm": layer_norm, "softmax": lambda x: jax.nn.softmax(x, axis=1), "add": lambda a, b: a + b,
        "tiny": lambda x: x * 2.5 + x, "scan": scan,
    }  # fmt: skip
    function = next((fn for key, fn in functions.items() if name.startswith(key)), None)
    if function is None:
        return None
    compiled = jax.jit(function)
    return lambda: compiled(*given).block_until_ready()


def copies(np, arrays, outputs, threads):
    """A copy of as many bytes as a kernel reads and writes, by some threads."""
    total = (sum(a.nbytes for a in arrays) + sum(o.nbytes for o in outputs)) // 2
    source, target = np.full(total, 2, np.uint8), np.ones(total, np.uint8)  # both written: untouched zeros are one page
    if threads == 1:
        return lambda: np.copyto(target, source)
    pool = ThreadPoolExecutor(threads)
    edges = [total * i // threads for i in range(threads + 1)]
    parts = [(target[a:b], source[a:b]) for a, b in itertools.pairwise(edges)]
    return lambda: list(pool.map(lambda part: np.copyto(*part), parts))


def timed(runs, rounds, blocks=3, pause=0.15):
    """Medians in ms. Calls take turns in blocks, each after a pause and a call that does not count: the threads of a library spin for a
    while after its last call, and would take the processor from the next one."""
    times = {name: [] for name in runs}
    for _ in range(blocks):
        for name, run in runs.items():
            time.sleep(pause)
            run()
            for _ in range(max(1, rounds // blocks)):
                start = time.perf_counter()
                run()
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) * 1e3 for name, values in times.items()}


def measure(threads, rounds, only, long):
    """One line of JSON for each case."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    import executor as bench
    import numpy as np
    from threadpoolctl import threadpool_limits

    from opennki.execute.executor import coverage, executor_of
    from opennki.interpret.prepared import Prepared
    from opennki.isa import dtypes

    peers = {}
    try:
        import torch

        peers["torch"] = lambda name, arrays: torch_peer(name, torch, arrays)
    except ImportError:
        torch = None
    try:
        import jax

        peers["JAX"] = lambda name, arrays: jax_peer(name, jax, arrays)
    except ImportError:
        pass
    peers["NumPy"] = lambda name, arrays: numpy_peer(name, np, arrays)
    for name, kernel, arrays, limit_name, limit in bench.cases():
        if only not in name:
            continue
        if torch is not None:
            torch.set_num_threads(threads)  # cases() sets one
        ir = bench.nki.jit(kernel).trace(*arrays)
        made = Prepared(ir, "off")
        start = time.perf_counter()
        executor = executor_of(made.tape)
        lowering = time.perf_counter() - start
        outs = [np.zeros(o.shape, dtypes.storage(o.dtype)) for o in ir.outputs]
        row = {"name": name, "limit_name": limit_name, "threads": threads, "lowering": lowering * 1e3}
        if executor is None:
            print(json.dumps({**row, "error": "no native code"}), flush=True)
            continue
        plan = Prepared(ir, "off", tape=made.tape, native=lambda tape, e=executor: e)
        if limit_name == "copy":
            limit = copies(np, arrays, outs, threads)
        runs = {"native": lambda p=plan, a=arrays, o=outs: p.run(list(a), o), "limit": limit}
        for peer, make in peers.items():
            run = make(name, arrays)
            if run is not None:
                runs[peer] = run
        with threadpool_limits(threads):
            row.update(timed(runs, rounds))
        row["interpreted"] = coverage(executor)["interpreted"]
        print(json.dumps(row), flush=True)
    if long and torch is not None and only in "long attention 32k":
        print(json.dumps(attention(bench, np, torch, threads)), flush=True)


def attention(bench, np, torch, threads, tokens=32768, rounds=2):
    """Causal attention of one head over many tokens: traced, lowered and run, against scaled_dot_product_attention."""
    rng = np.random.default_rng(0)
    shapes = ((128, tokens), (128, tokens), (tokens, 128))
    q, k, v = (rng.standard_normal(s).astype(np.float32).astype(bench.BF16) for s in shapes)
    torch.set_num_threads(threads)
    t = torch.randn(1, 1, tokens, 128).bfloat16()
    native, limit = [], []
    for _ in range(rounds):
        start = time.perf_counter()
        bench.nki.simulate_kernel(bench.nki.jit(bench.flash), q, k, v, checks="fast")
        native.append(time.perf_counter() - start)
        start = time.perf_counter()
        torch.nn.functional.scaled_dot_product_attention(t, t, t, is_causal=True)
        limit.append(time.perf_counter() - start)
    return {"name": "long attention 32k", "limit_name": "torch SDPA", "threads": threads, "native": min(native) * 1e3,
            "limit": min(limit) * 1e3, "lowering": math.nan, "interpreted": 0}  # fmt: skip


def lowering(bench, np):
    """(name, instructions, ms) of lowering kernels whose loops are unrolled."""
    from opennki.execute.executor import executor_of
    from opennki.interpret.prepared import Prepared
    from opennki.ir.nodes import Instr, statements

    nl = bench.nl

    def unrolled(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        for i in range(x.shape[1] // 4):
            t = nl.load(x[:, i * 4 : (i + 1) * 4])
            nl.store(out[:, i * 4 : (i + 1) * 4], t * 2.5 + t)
        return out

    for name, kernel in (("looped", bench.tiny), ("unrolled", unrolled)):
        x = np.zeros((128, 4 * 5000), np.float32)
        start = time.perf_counter()
        ir = bench.nki.jit(kernel).trace(x)
        traced = time.perf_counter()
        made = Prepared(ir, "off")
        planned = time.perf_counter()
        executor_of(made.tape)
        done = time.perf_counter()
        count = sum(isinstance(s, Instr) for s in statements(ir.body))
        yield name, count, (traced - start) * 1e3, (planned - traced) * 1e3, (done - planned) * 1e3


# ---- the table -----------------------------------------------------------------------------------------------------------
def table(rows, threads):
    """Print the rows of all numbers of threads side by side."""
    by = {(r["name"], r["threads"]): r for r in rows}
    names = list(dict.fromkeys(r["name"] for r in rows))
    head = f"{'kernel':<24}{'limit':<12}{'wanted':>7}"
    for n in threads:
        head += f" |{f'{n} thr ms':>9}{'limit':>9}{'ratio':>7}"
    print(head + f" |{'scaling':>8}{'lowering ms':>12} | " + "".join(f"{p:>7}" for p in PEERS))
    ratios = {n: [] for n in threads}
    for name in names:
        first = next(by[name, n] for n in threads if (name, n) in by)
        want = wanted(name)
        line = f"{name:<24}{first['limit_name']:<12}{'' if want is None else want:>7}"
        for n in threads:
            row = by.get((name, n), {})
            if "native" not in row:
                line += f" | {row.get('error', 'not run'):<24}"
                continue
            ratio = row["native"] / row["limit"]
            ratios[n].append(ratio)
            over = "*" if want is not None and ratio > want * 1.1 else " "
            line += f" |{row['native']:9.2f}{row['limit']:9.2f}{ratio:6.2f}{over}"
        ends = [by.get((name, n), {}).get("native") for n in (threads[0], threads[-1])]
        line += f" |{ends[0] / ends[1]:8.2f}" if all(ends) else f" |{'':8}"
        line += f"{first['lowering']:12.1f} | "
        line += "".join(f"{first[p] / first['limit']:7.2f}" if p in first else f"{'-':>7}" for p in PEERS)
        print(line + (f"  {first['interpreted']} instructions interpreted" if first.get("interpreted") else ""))
    for n in threads:
        if ratios[n]:
            mean = math.exp(statistics.fmean(map(math.log, ratios[n])))
            print(f"geometric mean, {n} thread{'s' if n > 1 else ''}: {mean:.2f} (wanted 1.8)")
    print("* over what is wanted by more than the 10 % left to noise; peers are multiples of the limit, on the first number of threads")
    try:
        import importlib.metadata

        version = importlib.metadata.version("triton-viz")
        print(f"triton-viz {version} is installed, but not measured here")
    except importlib.metadata.PackageNotFoundError:
        print("triton-viz is not installed")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", default="")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--long", action="store_true", help="also attention over 32 768 tokens")
    parser.add_argument("--json", type=Path, help="write the rows there too")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args.measure, args.rounds, args.only, args.long)
        return 0
    rows, status = [], 0
    for n in args.threads:
        env = {**os.environ, **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OPENNKI_NUM_THREADS"), str(n))}
        command = [sys.executable, __file__, "--measure", str(n), "--rounds", str(args.rounds), "--only", args.only]
        done = subprocess.run(command + ["--long"] * args.long, env=env, stdout=subprocess.PIPE, text=True, check=False)
        status = status or done.returncode
        rows += [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    table(rows, args.threads)
    if not args.only:
        import executor as bench
        import numpy as np

        for name, count, traced, planned, lowered in lowering(bench, np):
            print(f"{name}: {count} instructions: traced in {traced:.0f} ms, planned in {planned:.0f}, lowered in {lowered:.1f} "
                  f"({lowered / count * 1e3:.0f} µs each)")  # fmt: skip
    return status


if __name__ == "__main__":
    sys.exit(main())
