"""The native executor against the limits of the CPU: copies of the same bytes, OpenBLAS, PyTorch; medians of interleaved runs.

    python benchmarks/executor.py [--rounds 12] [--only NAME] [--interpreter]

Each kernel is a loop of tiles as a user writes it. The ratio is to the limit in the last column; `interpreter` is the same kernel without
native code.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time

os.environ.setdefault("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import ml_dtypes

import opennki.dropin  # noqa: F401  isort: skip
import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import numpy as np
from threadpoolctl import threadpool_limits

from opennki.execute.executor import coverage, executor_of
from opennki.interpret.prepared import Prepared
from opennki.isa import dtypes

BF16 = np.dtype(ml_dtypes.bfloat16)
P = 128


def matmul(lhs_t, rhs):
    """lhs_t.T @ rhs with tiles of 128 x 128 and 128 x 512."""
    (k, m), n = lhs_t.shape, rhs.shape[1]
    out = nl.ndarray((m, n), dtype=lhs_t.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(m // P):
        for j in nl.affine_range(n // 512):
            acc = nl.zeros((P, 512), nl.float32, buffer=nl.psum)
            for q in nl.affine_range(k // P):
                a = nl.load(lhs_t[q * P : (q + 1) * P, i * P : (i + 1) * P])
                b = nl.load(rhs[q * P : (q + 1) * P, j * 512 : (j + 1) * 512])
                acc += nisa.nc_matmul(a, b)
            nl.store(out[i * P : (i + 1) * P, j * 512 : (j + 1) * 512], acc)
    return out


def rows(body):
    """A kernel that maps tiles of 128 rows."""

    def kernel(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        for i in nl.affine_range(x.shape[0] // P):
            nl.store(out[i * P : (i + 1) * P], body(nl.load(x[i * P : (i + 1) * P])))
        return out

    return kernel


def rms_norm(t):
    """Rows divided by their root mean square."""
    return t * nl.rsqrt(nl.mean(nl.square(t), axis=1, keepdims=True) + 1e-6)


def layer_norm(t):
    """Rows less their mean, divided by their deviation."""
    mean = nl.mean(t, axis=1, keepdims=True)
    centred = t - mean
    return centred * nl.rsqrt(nl.mean(nl.square(centred), axis=1, keepdims=True) + 1e-5)


def softmax(t):
    """Softmax of rows."""
    e = nl.exp(t - nl.max(t, axis=1, keepdims=True))
    return e / nl.sum(e, axis=1, keepdims=True)


def add(a, b):
    """a + b."""
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(a.shape[0] // P):
        part = slice(i * P, (i + 1) * P)
        nl.store(out[part], nl.load(a[part]) + nl.load(b[part]))
    return out


def scan(a, b):
    """r[i] = a[i] r[i-1] + b[i]."""
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    nl.store(out, nisa.tensor_tensor_scan(nl.load(a), nl.load(b), 0.0, np.multiply, np.add))
    return out


def pool(op):
    """A kernel that pools windows of 3 x 3 with stride 2."""

    def kernel(x):
        planes, h, w = x.shape
        ho, wo = (h - 3) // 2 + 1, (w - 3) // 2 + 1
        out = nl.ndarray((planes, ho, wo), dtype=x.dtype, buffer=nl.shared_hbm)
        ip, iy, ix, ky, kx = nl.mgrid[0:P, 0:ho, 0:wo, 0:3, 0:3]
        for i in nl.affine_range(planes // P):
            windows = nl.load(x[nl.ds(i * P, P), :, :])[ip, 2 * iy + ky, 2 * ix + kx]
            pooled = nl.max(windows, axis=[3, 4]) if op == "max" else nl.multiply(nl.sum(windows, axis=[3, 4]), 1.0 / 9)
            nl.store(out[nl.ds(i * P, P), :, :], pooled)
        return out

    return kernel


def tiny(x):
    """Four instructions on each tile of 128 x 4."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(x.shape[1] // 4):
        t = nl.load(x[:, i * 4 : (i + 1) * 4])
        nl.store(out[:, i * 4 : (i + 1) * 4], t * 2.5 + t)
    return out


def flash(q, k, v):
    """The example of the repository: causal, d = 128."""
    sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "examples"))
    from flash_attention import flash_attention

    return flash_attention.func(q, k, v)


def cases():
    """name, kernel, arrays, name of the limit, the limit as a call."""
    rng = np.random.default_rng(0)

    def normal(*shape, dtype=np.float32):
        return rng.standard_normal(shape).astype(dtype)

    def copy_of(*arrays):
        total = sum(a.nbytes for a in arrays) // 2
        src, dst = np.full(total, 2, np.uint8), np.ones(total, np.uint8)  # both written: untouched zeros are one page
        return lambda: np.copyto(dst, src)

    a, b = normal(2048, 2048), normal(2048, 2048)
    c = np.empty((2048, 2048), np.float32)
    yield "matmul f32 2048", matmul, (a, b), "sgemm", lambda: np.matmul(a.T, b, out=c)
    try:
        import torch

        torch.set_num_threads(1)
        ta, tb = (torch.from_numpy(x).bfloat16() for x in (a, b))
        yield "matmul bf16 2048", matmul, (a.astype(BF16), b.astype(BF16)), "torch bf16", lambda: ta.T @ tb
        q = torch.randn(1, 1, 2048, 128).bfloat16()
        sdpa = torch.nn.functional.scaled_dot_product_attention
        heads = tuple(normal(128, 2048, dtype=BF16) for _ in range(2)) + (normal(2048, 128, dtype=BF16),)
        yield "flash 2048 causal bf16", flash, heads, "torch SDPA", lambda: sdpa(q, q, q, is_causal=True)
    except ImportError:
        pass
    x = normal(4096, 2048)
    for name, body in (("rmsnorm", rms_norm), ("layernorm", layer_norm), ("softmax", softmax)):
        yield f"{name} 4096x2048", rows(body), (x,), "copy", copy_of(x, x)
    s = normal(4096, 4096, dtype=BF16)
    yield "add bf16 4096", add, (s, s.copy()), "copy", copy_of(s, s, s)
    d = normal(P, 8192)
    yield "scan 128x8192", scan, (d, d.copy()), "copy", copy_of(d, d, d)
    y = normal(1024, 113, 113)
    pooled = np.empty((1024, 56, 56), np.float32)
    for op, name in (("max", "max"), ("sum", "average")):
        yield f"{name} pool 3x3/2", pool(op), (y,), "copy", copy_of(y, pooled)
    t = normal(P, 16384)
    yield "tiny, 16k instructions", tiny, (t,), "copy", copy_of(t, t)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", default="")
    parser.add_argument("--interpreter", action="store_true")
    args = parser.parse_args()
    print(f"{'kernel':<26}{'native ms':>10}{'limit ms':>10}{'ratio':>8}{'interpreter':>12}{'lowering':>10}  limit")
    for name, kernel, arrays, limit_name, limit in cases():
        if args.only not in name:
            continue
        ir = nki.jit(kernel).trace(*arrays)
        made = Prepared(ir, "off")
        start = time.perf_counter()
        executor = executor_of(made.tape)
        lowering = time.perf_counter() - start
        if executor is None:
            print(f"{name:<26} no native code")
            continue
        plan = Prepared(ir, "off", tape=made.tape, native=lambda tape, e=executor: e)
        outs = [np.zeros(o.shape, dtypes.storage(o.dtype)) for o in ir.outputs]
        runs = {"native": lambda p=plan, a=arrays, o=outs: p.run(a, o), "limit": limit}
        if args.interpreter:
            runs["interpreter"] = lambda p=made, a=arrays, o=outs: p.run(a, o)
        times = {n: [] for n in runs}
        with threadpool_limits(1):
            for r in range(args.rounds + 2):
                for n, run in runs.items():
                    start = time.perf_counter()
                    run()
                    if r > 1:
                        times[n].append(time.perf_counter() - start)
        median = {n: statistics.median(v) * 1e3 for n, v in times.items()}
        cover = coverage(executor)
        print(f"{name:<26}{median['native']:10.2f}{median['limit']:10.2f}{median['native'] / median['limit']:8.2f}"
              f"{median.get('interpreter', float('nan')):12.2f}{lowering * 1e3:10.1f}  {limit_name}"
              + (f"  {cover['interpreted']} instructions interpreted: {cover['why']}" if cover["interpreted"] else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
