"""The reference interpreter with all checks on, against the lean NumPy interpreter: ratios in one process.

    python benchmarks/interpreter.py [kernel ...] [--repeat 5]

Limit (issue "A kernel runs"): at most 3 in geometric mean over the kernels, at most 8 on `tiny`. Tracing and planning are measured apart:
the lean interpreter gets its IR ready-made, so the ratio compares execution with execution.
"""
import argparse
import os
import statistics
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import lean_ir
import numpy as np

import opennki.dropin  # noqa: F401  isort: skip
import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl

from opennki.interpret.simulate import Checks, simulate, tape_of
from opennki.trace.kernel import trace_kernel


def matmul(lhs_t, rhs):
    """PSUM-tiled matmul, one load per use."""
    k, m = lhs_t.shape
    n = rhs.shape[1]
    out = nl.ndarray((m, n), dtype=lhs_t.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(m // 128):
        for j in nl.affine_range(n // 512):
            acc = nl.zeros((128, 512), dtype=nl.float32, buffer=nl.psum)
            for c in nl.affine_range(k // 128):
                a = nl.load(lhs_t[nl.ds(c * 128, 128), nl.ds(i * 128, 128)])
                b = nl.load(rhs[nl.ds(c * 128, 128), nl.ds(j * 512, 512)])
                acc += nisa.nc_matmul(a, b)
            nl.store(out[nl.ds(i * 128, 128), nl.ds(j * 512, 512)], nl.copy(acc, dtype=lhs_t.dtype))
    return out


def flash(q, k, v):
    """Flash attention forward without mask, as in the lean IR."""
    d, tokens = q.shape
    out = nl.ndarray((tokens, d), dtype=q.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(tokens // 128):
        qt = nl.load(q[:, nl.ds(i * 128, 128)])
        m = nl.full((128, 1), -1e30, dtype=nl.float32)
        s = nl.zeros((128, 1), dtype=nl.float32)
        acc = nl.zeros((128, d), dtype=nl.float32)
        for j in nl.sequential_range(tokens // 512):
            kt = nl.load(k[:, nl.ds(j * 512, 512)])
            scores = nisa.activation(op=nl.copy, data=nisa.nc_matmul(qt, kt), scale=d**-0.5)
            top = nl.maximum(m, nl.max(scores, axis=1))
            minus = nisa.tensor_scalar(top, np.multiply, -1.0)
            shrink = nisa.activation(op=nl.exp, data=m, bias=minus)
            rows = nl.ndarray((128, 1), dtype=nl.float32)
            p = nisa.activation_reduce(op=nl.exp, data=scores, bias=minus, reduce_op=nl.add, reduce_res=rows, dtype=nl.bfloat16)
            pv = nl.zeros((128, d), dtype=nl.float32, buffer=nl.psum)
            for b in nl.static_range(4):
                pt = nl.ndarray((128, 128), dtype=nl.bfloat16)
                pt[...] = nisa.nc_transpose(p[:, b * 128:(b + 1) * 128])
                vt = nl.load(v[nl.ds(j * 512 + b * 128, 128), :])
                pv += nisa.nc_matmul(pt, vt)
            acc[...] = nl.add(nl.multiply(acc, shrink), pv)
            s[...] = nl.add(nl.multiply(s, shrink), rows)
            m[...] = nl.copy(top)
        nl.store(out[nl.ds(i * 128, 128), :], nl.multiply(acc, nl.reciprocal(s), dtype=q.dtype))
    return out


def rmsnorm(x, g):
    """Row-wise RMS norm with a gain tile."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    gain = nl.load(g)
    c = x.shape[1]
    for i in nl.affine_range(x.shape[0] // 128):
        t = nl.load(x[nl.ds(i * 128, 128), :])
        total = nl.ndarray((128, 1), dtype=nl.float32)
        nisa.activation_reduce(op=nl.square, data=t, reduce_op=nl.add, reduce_res=total)
        r = nl.rsqrt(nisa.tensor_scalar(total, np.multiply, 1.0 / c, op1=np.add, operand1=1e-6))
        nl.store(out[nl.ds(i * 128, 128), :], nl.multiply(nl.multiply(t, r), gain))
    return out


def layernorm(x, g, b):
    """Row-wise layer norm with gain and bias tiles."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    gain, bias = nl.load(g), nl.load(b)
    c = x.shape[1]
    for i in nl.affine_range(x.shape[0] // 128):
        t = nl.load(x[nl.ds(i * 128, 128), :])
        mean = nisa.tensor_scalar(nl.sum(t, axis=1), np.multiply, -1.0 / c)
        centred = nl.add(t, mean)
        total = nl.ndarray((128, 1), dtype=nl.float32)
        nisa.activation_reduce(op=nl.square, data=centred, reduce_op=nl.add, reduce_res=total)
        r = nl.rsqrt(nisa.tensor_scalar(total, np.multiply, 1.0 / c, op1=np.add, operand1=1e-5))
        nl.store(out[nl.ds(i * 128, 128), :], nl.add(nl.multiply(nl.multiply(centred, r), gain), bias))
    return out


def softmax(x):
    """Row-wise softmax."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(x.shape[0] // 128):
        t = nl.load(x[nl.ds(i * 128, 128), :])
        minus = nisa.tensor_scalar(nl.max(t, axis=1), np.multiply, -1.0)
        e = nisa.activation(op=nl.exp, data=t, bias=minus)
        nl.store(out[nl.ds(i * 128, 128), :], nl.multiply(e, nl.reciprocal(nl.sum(e, axis=1))))
    return out


def add(x, y):
    """Elementwise add on 128 x 512 tiles."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(x.shape[0] // 128):
        for j in nl.affine_range(x.shape[1] // 512):
            a = nl.load(x[nl.ds(i * 128, 128), nl.ds(j * 512, 512)])
            b = nl.load(y[nl.ds(i * 128, 128), nl.ds(j * 512, 512)])
            nl.store(out[nl.ds(i * 128, 128), nl.ds(j * 512, 512)], nl.add(a, b))
    return out


def scan(a, b):
    """First-order recurrence along rows."""
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(a.shape[0] // 128):
        x = nl.load(a[nl.ds(i * 128, 128), :])
        y = nl.load(b[nl.ds(i * 128, 128), :])
        nl.store(out[nl.ds(i * 128, 128), :], nisa.tensor_tensor_scan(x, y, 0.0, np.multiply, np.add))
    return out


def pool(op):
    """Pooling 3 x 3, stride 2, by an access pattern with overlapping windows."""
    def kernel(x):
        p, h, w = x.shape
        ho, wo = (h - 3) // 2 + 1, (w - 3) // 2 + 1
        out = nl.ndarray((p, ho, wo), dtype=x.dtype, buffer=nl.shared_hbm)
        for i in nl.affine_range(p // 128):
            t = nl.load(x[nl.ds(i * 128, 128), :, :])
            ip, iy, ix, ky, kx = nl.mgrid[0:128, 0:ho, 0:wo, 0:3, 0:3]
            windows = t[ip, 2 * iy + ky, 2 * ix + kx]
            if op == "max":
                r = nl.max(windows, axis=[3, 4])
            else:
                r = nl.multiply(nl.sum(windows, axis=[3, 4]), 1.0 / 9)
            nl.store(out[nl.ds(i * 128, 128), :, :], r)
        return out
    return kernel


def tiny(x):
    """4096 x 4 instructions on 128 x 4 tiles."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(x.shape[1] // 4):
        a = nl.load(x[:, nl.ds(i * 4, 4)])
        b = nisa.tensor_scalar(a, np.multiply, 2.5)
        nl.store(out[:, nl.ds(i * 4, 4)], nl.add(b, a))
    return out


KERNELS = {"matmul_f32": matmul, "matmul_bf16": matmul, "flash": flash, "rmsnorm": rmsnorm, "softmax": softmax,
           "layernorm": layernorm, "add_bf16": add, "scan": scan, "maxpool": pool("max"), "avgpool": pool("avg"), "tiny": tiny}


def once(function):
    """Seconds of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(name, repeat):
    """(lean seconds, our seconds, trace seconds, plan seconds) and the largest difference of the results."""
    lean = lean_ir.KERN[name]()
    data = lean_ir.data(lean)
    machine = lean_ir.Interp(lean)
    used = {"rmsnorm": ("x", "g"), "softmax": ("x",), "matmul_f32": ("lhsT", "rhs"), "matmul_bf16": ("lhsT", "rhs")}
    names = used.get(name) or tuple(n for n, b in lean.hbm.items() if not getattr(b, "out", False))
    arrays = [data[n] for n in names]
    jitted = nki.jit(KERNELS[name], mode="simulation", platform_target="trn1")
    start = time.perf_counter()
    kernel, inputs = trace_kernel(jitted.func, tuple(arrays), {}, jitted.options())
    traced = time.perf_counter() - start
    checks = Checks.of("full")
    start = time.perf_counter()
    tape = tape_of(kernel, checks)
    planned = time.perf_counter() - start
    result = simulate(kernel, inputs, checks, tape=tape)[0][0].astype(np.float32)
    machine.run(dict(data))
    expected = machine.m["out"].astype(np.float32)
    difference = np.abs(result - expected).max() / max(np.abs(expected).max(), 1e-30)
    theirs, ours = [], []
    for _ in range(repeat):
        theirs.append(once(lambda: machine.run(dict(data))))
        ours.append(once(lambda: simulate(kernel, inputs, checks, tape=tape)))
    return statistics.median(theirs), statistics.median(ours), traced, planned, difference


def main():
    """Print the table of ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernels", nargs="*", default=list(KERNELS))
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    ratios = []
    print(f"{'kernel':12} {'lean ms':>9} {'ours ms':>9} {'ratio':>6} {'trace ms':>9} {'plan ms':>8} {'max diff':>9}")
    for name in args.kernels:
        lean, ours, traced, planned, difference = measure(name, args.repeat)
        ratios.append(ours / lean)
        print(f"{name:12} {lean * 1e3:9.1f} {ours * 1e3:9.1f} {ratios[-1]:6.2f} {traced * 1e3:9.1f} {planned * 1e3:8.1f} {difference:9.1e}",
              flush=True)
    print(f"geometric mean {np.exp(np.mean(np.log(ratios))):.2f} (limit 3), all checks on")
    return 0


if __name__ == "__main__":
    sys.exit(main())
