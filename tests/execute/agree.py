"""The same kernel by native code and by the interpreter: used by the tests of the language, so that each of them tests both."""

from __future__ import annotations

import copy
import warnings

import numpy as np

from opennki.execute import abi
from opennki.execute.executor import executor_of
from opennki.interpret import simulate as sim
from opennki.interpret.checks import Checks, tape_of
from opennki.isa.declare import ISA
from opennki.ir.nodes import Instr, statements

# What need not be the same bit for bit: sums of products, which BLAS adds in an order of its own, and functions whose last bits differ.
RELATIVE = 3e-5


def exact(kernel):
    """Whether a kernel has nothing but instructions whose results are defined to the last bit."""
    for s in statements(kernel.body):
        if isinstance(s, Instr):
            decl = ISA[s.op]
            if decl.family in ("matmul", "activation", "random") or any(
                isinstance(v, str) and v in _APPROXIMATE for v in s.operands
            ):
                return False
    return True


_APPROXIMATE = abi.APPROXIMATE | {"rsqrt"}


def compare(kernel, want, got):
    """Equal bits; or close, where the kernel has approximate functions or products of matrices."""
    assert len(want) == len(got)
    for a, b in zip(want, got, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        if exact(kernel):
            one, two = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (a, b))
            wide_a, wide_b = (np.asarray(x, np.float64) if x.dtype.kind != "V" else x for x in (a, b))
            nan = np.isnan(wide_a) & np.isnan(wide_b) if wide_a.dtype.kind == "f" else np.zeros(a.shape, bool)
            same = (one == two).reshape(*a.shape, -1).all(-1) if a.size else np.ones(a.shape, bool)
            assert (same | nan).all(), f"{kernel.name}: {int((~(same | nan)).sum())} elements differ"
        else:
            wide = np.asarray(a, np.float64)
            scale = max(1e-6, float(np.abs(wide[np.isfinite(wide)]).max(initial=0)))
            unit = 2.0**-7 if a.dtype.itemsize == 2 else 2.0**-2 if a.dtype.itemsize == 1 else 0
            np.testing.assert_allclose(
                np.asarray(b, np.float64), np.asarray(a, np.float64), rtol=max(RELATIVE, unit), atol=scale * max(1e-6, unit / 16)
            )


def both(kernel, arrays, seed=0, order="program"):
    """Run a traced kernel both ways on copies of the arrays and compare; False where it has no native form at all."""
    checks = Checks.of("off")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tapes = tape_of(kernel, checks), tape_of(kernel, checks, roll=True)
        executor = executor_of(tapes[1])
        if executor is None:
            return False
        ways = []
        for tape, native in zip(tapes, (None, lambda t: executor), strict=True):
            outputs, news = sim.simulate(
                kernel, copy.deepcopy(arrays), checks, seed=seed, order=order, tape=tape, native=native, out=_Nowhere()
            )
            ways.append([*outputs, *news])
    compare(kernel, *ways)
    return True


class _Nowhere:
    def write(self, text):
        return len(text)

    def flush(self):
        pass
