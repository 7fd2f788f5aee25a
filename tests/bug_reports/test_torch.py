"""Reports on kernels inside PyTorch programs: the same kernel in models of any depth, next to another one, on a grid of experts.

`make test-xla` runs them on the lazy tensors of PyTorch/XLA too; elsewhere its device is a stand-in, the CPU.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from tests.bug_reports.test_kernels import rms_norm
from tests.lang.harness import sample

import opennki.dropin  # noqa: F401
import torch_xla.core.xla_model as xm
from opennki import jit
from opennki.dialects.neuronxcc import compiler as ncc
from opennki.dialects.neuronxcc import isa as nisa
from opennki.dialects.neuronxcc import language as nl

torch = pytest.importorskip("torch")
CHUNK = 128


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


# ---- BR036 ----------------------------------------------------------------------------------------------------------
@jit(platform_target="trn2")
def linear_attention(q, k, v):
    """Causal attention without softmax, chunk by chunk: what earlier chunks give is kept as their sum of products k.T v."""
    tokens, d = q.shape
    out = nl.ndarray(q.shape, q.dtype, buffer=nl.shared_hbm)
    state = nl.zeros((d, d), nl.float32)
    row, column = nl.mgrid[0:CHUNK, 0:CHUNK]
    for i in nl.sequential_range(tokens // CHUNK):
        part = nl.ds(i * CHUNK, CHUNK)
        queries, keys, values = nl.load(q[part]), nl.load(k[part]), nl.load(v[part])
        turned = nl.copy(nisa.nc_transpose(queries))
        scores = nisa.nc_matmul(nl.copy(nisa.nc_transpose(keys)), turned)  # of a key and a query
        scores = nisa.affine_select(pred=(column >= row), on_true_tile=nl.copy(scores), on_false_value=0.0)
        result = nl.zeros((CHUNK, d), nl.float32, buffer=nl.psum)
        result += nisa.nc_matmul(scores, values)
        result += nisa.nc_matmul(turned, state)
        nl.store(out[part], result)
        state += nisa.nc_matmul(keys, values)
    return out


class Layers(torch.nn.Module):
    """Layers around a kernel; the first one gets its operands as they are."""

    def __init__(self, count):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(64, 64) for _ in range(count - 1)])

    def forward(self, q, k, v):
        first = x = linear_attention(q, k, v)
        for layer in self.layers:
            x = x + linear_attention(torch.tanh(layer(x)), k, v) * 0.1
        return first, x


@pytest.mark.parametrize("tokens", [128, 768])
def test_BR036_a_kernel_gives_the_same_alone_and_in_large_models(tokens):
    """Kernel alone fine, out of bounds inside a big model: bit-equal alone and in modules of 1, 4 and 40 layers, eager and compiled."""
    device = xm.xla_device()
    q, k, v = (torch.from_numpy(sample((tokens, 64), seed=n)) / 8 for n in range(3))
    alone = linear_attention(q, k, v)
    wide = [t.double() for t in (q, k, v)]
    torch.testing.assert_close(alone.double(), torch.tril(wide[0] @ wide[1].T) @ wide[2], rtol=1e-5, atol=1e-5)
    operands = [t.to(device) for t in (q, k, v)]
    for layers in (1, 4, 40):
        model = Layers(layers).to(device)
        with torch.no_grad():
            first, last = model(*operands)
            xm.mark_step()
            assert torch.equal(first.cpu(), alone)
            if layers == 4:
                backend = "aot_eager" if device.type == "cpu" else "openxla"
                compiled = torch.compile(model, backend=backend, fullgraph=True)(*operands)
                assert torch.equal(compiled[0].cpu(), alone)
                torch.testing.assert_close(compiled[1].cpu(), last.cpu())
            assert last.cpu().isfinite().all()


# ---- BR050 ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layers", [1, 4])
def test_BR050_an_allocated_rms_norm_runs_inside_a_torch_model(layers):
    """allocated RMSNorm kernel fails inside a model: bf16 (1, 128, 2048) as an op between others, eager and compiled."""
    from opennki.kernels.torch_arrays import to_torch

    kernel = jit(ncc.skip_middle_end_transformations(rms_norm), platform_target="trn1")
    bf16 = np.dtype(ml_dtypes.bfloat16)
    x, gamma = to_torch((sample((1, 128, 2048), bf16, seed=5), sample((1, 2048), bf16, seed=6)))

    def model(norm, x, gamma):
        for _ in range(layers):
            x = norm(x * 0.5, gamma) + x
        return x

    def reference(x, gamma):
        wide = x.float()
        return (wide / torch.sqrt((wide**2).mean(-1, keepdim=True) + 1e-6) * gamma.float()).to(x.dtype)

    want = model(reference, x, gamma).double()
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        got = run(kernel, x, gamma)
        assert got.dtype == torch.bfloat16 and (got.double() - want).norm() / want.norm() < 2e-2


# ---- BR075 ----------------------------------------------------------------------------------------------------------
@jit(platform_target="trn2")
def experts(x, gates, up, down):
    """sum over the experts e of gates[:, e] * (silu(x @ up[e]) @ down[e]), each expert's part by a program of the grid."""
    count, width, _ = up.shape
    out = nl.ndarray((count, x.shape[0], width), x.dtype, buffer=nl.shared_hbm)
    e = nl.program_id(0)
    turned = nl.copy(nisa.nc_transpose(nl.load(x)))
    inner = nisa.nc_matmul(turned, nl.load(up[e]))
    inner = nl.multiply(inner, nl.sigmoid(inner))
    result = nisa.nc_matmul(nl.copy(nisa.nc_transpose(inner)), nl.load(down[e]))
    nl.store(out[e], nl.multiply(result, nl.load(gates[:, nl.ds(e, 1)])))
    return out


class MoE(torch.nn.Module):
    """A mixture of experts that takes the best two of sixteen for each token."""

    def __init__(self, count=16, width=64, hidden=128):
        super().__init__()
        torch.manual_seed(1)
        self.router = torch.nn.Linear(width, count)
        self.up = torch.nn.Parameter(torch.randn(count, width, hidden) / 8)
        self.down = torch.nn.Parameter(torch.randn(count, hidden, width) / 8)

    def gates(self, x):
        values, chosen = self.router(x).topk(2)
        return torch.zeros(len(x), len(self.up), device=x.device).scatter(1, chosen, values.softmax(-1))

    def forward(self, x):
        return experts[len(self.up)](x, self.gates(x), self.up, self.down).sum(0)


def test_BR075_experts_on_a_grid_inside_a_model():
    """Fused MoE kernel crash: top-2 of 16 experts on a grid, as an op of a model, eager and compiled; other sizes say what is wrong."""
    x, model = torch.from_numpy(sample((32, 64), seed=3)) / 4, MoE()
    with torch.no_grad():
        gates = model.gates(x)
        inner = torch.nn.functional.silu(torch.einsum("tw,ewh->eth", x, model.up))
        want = torch.einsum("te,eth,ehw->tw", gates, inner, model.down)
        for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
            torch.testing.assert_close(run(x), want, rtol=1e-4, atol=1e-5)
        with pytest.raises(Exception, match=r"test_torch\.py:\d+"):
            model(torch.ones(256, 64))  # more tokens than a tile has partitions


# ---- BR076 ----------------------------------------------------------------------------------------------------------
@jit(platform_target="trn1")
def double(x):
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.load(x) * 2)
    return out


@jit(platform_target="trn1")
def transpose(x):
    out = nl.ndarray((x.shape[1], x.shape[0]), x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nisa.nc_transpose(nl.load(x)))
    return out


@pytest.mark.parametrize("step", [True, False], ids=["with a step between", "without"])
def test_BR076_two_kernels_next_to_each_other(step):
    """two adjacent kernels fused into illegal program: with and without a step between two calls on lazy tensors, in any number."""
    x = torch.from_numpy(sample((64, 32)))
    y = x.to(xm.xla_device())
    for _ in range(3):
        y = double(y)
        if step:
            xm.mark_step()
        y = transpose(y)
        if step:
            xm.mark_step()
    assert torch.equal(y.cpu(), (x * 8).T)
