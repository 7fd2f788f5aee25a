"""The registry is complete: every instruction has what its consumers need, and every one is used in a traced kernel test."""
import inspect
import re
from pathlib import Path

import numpy as np
import pytest

import opennki.dropin  # noqa: F401  isort: skip
import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
from opennki.ir.cost import cycles
from opennki.ir.nodes import Instr, statements
from opennki.isa import target as targets
from opennki.isa.declare import ISA, Op, Plumbing, Register
from opennki.isa.scalar import SCALAR

TESTS = Path(__file__).parent
FAMILIES = {"elementwise", "tensor_scalar", "reduce", "scan", "activation", "matmul", "transpose", "shuffle", "select", "iota", "gather",
            "copy", "dma", "random", "stats", "topk", "print", "sync", "collective", "custom", "accumulate"}
ENGINES = {"tensor", "vector", "scalar", "gpsimd", "dma", "sync"}


@pytest.mark.parametrize("name", sorted(ISA))
def test_record(name):
    decl = ISA[name]
    assert len(decl.doc.splitlines()[0]) > 15
    assert set(decl.engines) <= ENGINES and decl.engines
    assert decl.family in FAMILIES
    assert decl.source
    assert callable(decl.cost)
    for p in decl.params:
        if isinstance(p.spec, Op):
            assert p.spec.names <= set(SCALAR), p.name
    hidden = {p.name for p in decl.params if isinstance(p.spec, Register) or (isinstance(p.spec, Plumbing) and p.spec.kind == "stream")}
    assert not hidden & set(decl.signature.parameters)
    for limit in decl.limits:
        assert hasattr(targets.resolve("trn1"), limit.at_most) and limit.why


@pytest.mark.parametrize("name", sorted(ISA))
def test_has_an_oracle_test(name):
    """Some test file under tests/isa calls the body of the instruction."""
    text = "\n".join(p.read_text() for p in TESTS.glob("test_*.py") if p.name != Path(__file__).name)
    assert re.search(rf"\b{name}\b", text), f"no test of {name}"


def every_kind(x, y, g):
    """A kernel with an instruction of most kinds."""
    out = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.shared_hbm)
    a, b, c = nl.load(x), nl.load(y), nl.load(g)
    p = nisa.nc_matmul(a, b)
    t = nl.copy(nisa.nc_transpose(a[:, 0:64]), dtype=nl.float32)
    s = nisa.activation(op=nl.exp, data=b, bias=c, scale=0.5)
    r = nisa.tensor_reduce(np.add, s, axis=[1])
    q = nisa.tensor_scalar(s, np.multiply, c, op1=np.add, operand1=1.0)
    u = nisa.tensor_tensor(q, p, np.maximum)
    v = nisa.tensor_tensor_scan(q, u, 0.0, np.multiply, np.add)
    st = nisa.bn_aggr(nisa.bn_stats(v))
    m = nisa.max8(src=v)
    i = nisa.iota(nl.arange(128)[:, None] + nl.arange(64)[None, :], dtype=nl.int32)
    w = nisa.affine_select(pred=nl.arange(128)[:, None] > nl.arange(64)[None, :], on_true_tile=v, on_false_value=0.0)
    z = nl.add(nl.add(w, r), nl.add(st[:, 0:1], m[:, 0:1]))
    nl.store(out, nl.add(z, nl.add(i, nl.copy(nisa.nc_matmul(t, t)[0:1, 0:1]))))
    return out


@pytest.mark.parametrize("chip", ["trn1", "trn2", "trn3"])
def test_costs_of_traced_instructions(chip):
    rng = np.random.default_rng(0)
    kernel = nki.jit(every_kind, platform_target=chip).trace(
        rng.normal(size=(128, 128)).astype(np.float32), rng.normal(size=(128, 64)).astype(np.float32), np.ones((128, 1), np.float32))
    target = targets.resolve(chip)
    found = {}
    for stmt in statements(kernel.body):
        if isinstance(stmt, Instr):
            found[stmt.op] = cycles(stmt, target)
    assert len(found) >= 14
    assert all(np.isfinite(c) and c > 0 for c in found.values()), found
    # documented: max(MIN_II, N) at N = 64 on the Vector and Scalar Engines, four passes of the PE array for float32 (N = 128)
    assert found["activation"] == 64 and found["nc_matmul"] == 4 * 128


def test_signatures_are_the_vendors():
    """Names and defaults of a few frozen signatures (all of them are compared with the stubs in their own tests)."""
    assert str(inspect.signature(nisa.tensor_tensor)).startswith("(data1, data2, op, *, dtype=None, mask=None")
    assert list(inspect.signature(nisa.activation).parameters)[:4] == ["op", "data", "bias", "scale"]


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
def test_masked_dropout_draws_the_same_numbers(rate):
    """A mask takes elements out; it does not shift the numbers that the others draw."""
    @nki.jit(mode="simulation", platform_target="trn1")
    def kernel(x, low, high):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nl.random_seed(7)
        ip, ix = nl.mgrid[0:128, 0:32]
        t = nl.load(x)
        full = nl.zeros((128, 32), dtype=x.dtype)
        full[ip, ix] = nl.dropout(t[ip, ix], rate, mask=(ip >= low) & (ip < high))
        nl.store(out, full)
        return out
    x = np.random.default_rng(1).normal(size=(128, 32)).astype(np.float32)
    whole, part = kernel(x, 0, 128), kernel(x, 31, 100)
    np.testing.assert_array_equal(part[31:100], whole[31:100])
    assert not part[:31].any() and not part[100:].any()
    assert abs((whole == 0).mean() - rate) < 0.05
