"""The IR of small kernels as text: what the tracer makes of loops, branches, masks, accumulation and programs."""
import importlib.util
from pathlib import Path

import numpy as np
import pytest

import opennki.dropin  # noqa: F401  isort: skip
import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
from opennki.ir.equal import difference
from opennki.ir.parse import from_text
from opennki.ir.print import to_text

F32 = np.float32


def matmul(lhs_t, rhs):
    k, m = lhs_t.shape
    out = nl.ndarray((m, rhs.shape[1]), dtype=lhs_t.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(m // 128):
        acc = nl.zeros((128, 512), dtype=nl.float32, buffer=nl.psum)
        for c in nl.affine_range(k // 128):
            acc += nisa.nc_matmul(nl.load(lhs_t[nl.ds(c * 128, 128), nl.ds(i * 128, 128)]), nl.load(rhs[nl.ds(c * 128, 128), :]))
        nl.store(out[nl.ds(i * 128, 128), :], acc)
    return out


def edge(x):
    n, m = x.shape
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    ip, ix = nl.mgrid[0:128, 0:m]
    for i in nl.affine_range((n + 127) // 128):
        t = nl.load(x[i * 128 + ip, ix], mask=i * 128 + ip < n)
        nl.store(out[i * 128 + ip, ix], nl.exp(t), mask=i * 128 + ip < n)
    return out


def branches(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.sequential_range(4):
        t = nl.load(x[nl.ds(i * 128, 128), :])
        if i % 2 == 0:
            t[...] = nl.multiply(t, 2.0)
        nl.store(out[nl.ds(i * 128, 128), :], t)
    return out


def programs(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    p = nl.program_id(0)
    t = nl.load(x[nl.ds(p * 128, 128), :])
    if p == 0:
        t[...] = nl.negative(t)
    nl.store(out[nl.ds(p * 128, 128), :], t)
    return out


def gather(x, idx):
    out = nl.ndarray((64, x.shape[1]), dtype=x.dtype, buffer=nl.shared_hbm)
    rows = nl.load(idx)
    nl.store(out, nl.load(x[rows, nl.arange(x.shape[1])[None, :]]))
    return out


def flash_attention(q, k, v):
    path = Path(__file__).parents[2] / "examples" / "flash_attention.py"
    spec = importlib.util.spec_from_file_location("flash_attention_example", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.flash_attention.func(q, k, v)


CASES = {
    "matmul": (matmul, [np.zeros((256, 256), F32), np.zeros((256, 512), F32)], None),
    "edge": (edge, [np.zeros((300, 64), F32)], None),
    "branches": (branches, [np.zeros((512, 64), F32)], None),
    "programs": (programs, [np.zeros((384, 64), F32)], 3),
    "gather": (gather, [np.zeros((1000, 64), F32), np.zeros((64, 1), np.int32)], None),
    "flash_attention": (flash_attention, [np.zeros((128, 1024), F32), np.zeros((128, 1024), F32), np.zeros((1024, 128), F32)], None),
}


@pytest.mark.parametrize("name", CASES)
def test_text(name, golden):
    func, arrays, grid = CASES[name]
    kernel = nki.jit(func, platform_target="trn2")
    traced = (kernel[grid] if grid else kernel).trace(*arrays)
    text = to_text(traced)
    golden(text, name)
    again = from_text(text)
    assert not difference(traced, again) and to_text(again) == text
