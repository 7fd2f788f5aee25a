"""`opennki compare`: a kernel by native code and by the interpreter, and the first instruction at which they differ."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import numpy as np

from opennki.execute import abi
from opennki.execute.executor import coverage, executor_of
from opennki.execute.show import text
from opennki.interpret.checks import Checks, tape_of
from opennki.interpret.simulate import simulate
from opennki.ir.nodes import Instr, Kernel
from opennki.isa import dtypes
from opennki.isa.declare import ISA
from opennki.trace.kernel import DeclTensor

EXPLAINED = 0.02  # relative L2 norm of what roundings, also of 8 bits of precision, bring about


class Comparison(NamedTuple):
    """Whether all results have the same bits, what there is to say, and what native code runs (see `execute.show`)."""

    equal: bool
    text: str
    tape: str = ""


def compare(kernel: Any, args: list[Any], kwargs: dict[str, Any], seed: int = 0) -> Comparison:
    """Run a kernel (a TraceKernel) both ways on random values of the described tensors.

    The first instruction that differs is found by running more and more of the kernel natively, in program order. Raises NkiError of
    the kernel.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ir, operands = kernel.specialize_and_call(tuple(args), kwargs)
        arrays = values(operands, seed)
        wanted = _results(ir, arrays, None)
        tape = tape_of(ir, Checks.of("off"), True)
        executor = executor_of(tape)
        if executor is None:
            return Comparison(True, f"{ir.name}: nothing of it runs natively (opennki doctor tells why where there is no compiler)")
        covered, shown = coverage(executor), text(executor.lowering)
        lines = [f"{ir.name}: {covered['native']} native programs, {covered['interpreted']} instructions interpreted"]
        lines += [f"  interpreted: {op}: {'; '.join(sorted(why))}" for op, why in sorted(covered["why"].items())]
        got = _results(ir, arrays, executor)
        found = [_difference(name, a, b) for name, a, b in zip(_names(ir), wanted, got, strict=True)]
        lines += [f"  {said}" for _, said in found]
        if all(same for same, _ in found):
            return Comparison(True, "\n".join([*lines, "same bits"]), shown)
        lines.append(_first(ir, arrays, wanted, len(executor.lowering.seen)))
        if "which is expected" in lines[-1] and (away := max(map(_away, wanted, got))) > EXPLAINED:
            lines.append(f"but that does not explain results that are {away:.1%} of their norm apart: please report it with this kernel")
        return Comparison(False, "\n".join(lines), shown)


def values(operands: list[Any], seed: int) -> list[np.ndarray]:
    """Random arrays for described tensors; arrays stay as they are."""
    rng = np.random.default_rng(seed)
    made = []
    for operand in operands:
        if not isinstance(operand, DeclTensor):
            made.append(np.asarray(operand))
            continue
        dtype = np.dtype(bool) if operand.dtype == "bool" else dtypes.storage(operand.dtype)
        if dtype.kind in "iub":
            made.append(rng.integers(0, 2 if dtype.kind == "b" else 100, operand.shape).astype(dtype))
        else:
            made.append(rng.standard_normal(operand.shape).astype(dtype))
    return made


def _results(ir: Kernel, arrays: list[np.ndarray], native: Any, limit: int | None = None) -> list[np.ndarray]:
    tape = native.tape if native is not None else tape_of(ir, Checks.of("off"), limit is not None)
    if limit is not None:
        executor = executor_of(tape, limit)
        native = executor
    copies = [a.copy() for a in arrays]
    outputs, news = simulate(ir, copies, Checks.of("off"), tape=tape,
                             native=None if native is None else lambda _: native)  # fmt: skip
    return [*outputs, *news]


def _names(ir: Kernel) -> list[str]:
    outputs = [o.alloc.name or f"output {i}" for i, o in enumerate(ir.outputs)]
    return [*outputs, *[p.name for p in ir.params if p in ir.written_params]]


def _same(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Elements with the same bits; any NaN is as good as another."""
    one, two = (np.ascontiguousarray(x).reshape(-1).view(np.uint8).reshape(-1, x.itemsize) for x in (a, b))
    equal = (one == two).all(axis=1)
    wide = [np.asarray(x, np.float64).reshape(-1) for x in (a, b)]
    return np.asarray(equal | (np.isnan(wide[0]) & np.isnan(wide[1])))


def _away(a: np.ndarray, b: np.ndarray) -> float:
    """How far results are apart, relative to the norm of the interpreter's; infinite where only one of them is finite."""
    x, y = (np.asarray(v, np.float64).reshape(-1) for v in (a, b))
    finite = np.isfinite(x)
    if (finite != np.isfinite(y)).any():
        return float("inf")
    with np.errstate(all="ignore"):
        return float(np.linalg.norm(x[finite] - y[finite]) / max(float(np.linalg.norm(x[finite])), 1e-30))


def _difference(name: str, a: np.ndarray, b: np.ndarray) -> tuple[bool, str]:
    shown = f"{name} {a.dtype.name}{list(a.shape)}"
    if not a.size:
        return True, f"{shown}: empty"
    same = _same(a, b)
    if same.all():
        return True, f"{shown}: equal"
    x, y = (np.asarray(v, np.float64).reshape(-1) for v in (a, b))
    with np.errstate(all="ignore"):
        gap = np.abs(x - y)
        relative = gap / np.abs(x)
    place = int(np.argmax(~same))
    where = tuple(map(int, np.unravel_index(place, a.shape)))
    return False, (
        f"{shown}: {int((~same).sum())} of {a.size} elements differ, by at most {np.nanmax(gap):.3g} "
        f"({np.nanmax(np.where(np.isfinite(relative), relative, 0)):.3g} relative); first at {where}: "
        f"interpreter {x[place]:.9g}, native {y[place]:.9g}"
    )


def _first(ir: Kernel, arrays: list[np.ndarray], wanted: list[np.ndarray], count: int) -> str:
    """The first instruction whose native form changes a result: the least number of native instructions with which they differ."""
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        got = _results(ir, arrays, None, middle)
        if all(_same(a, b).all() for a, b in zip(wanted, got, strict=True) if a.size):
            low = middle
        else:
            high = middle
    executor = executor_of(tape_of(ir, Checks.of("off"), True), high)
    if executor is None or not count:
        return "the first instruction that differs could not be found"
    instr = executor.lowering.seen[high - 1]
    loc = ir.loc(instr.loc)
    source = loc.source() if loc is not None else ""
    return f"first difference: {instr.op}, at {loc}" + (f"\n    {source}" if source else "") + _documented(instr)


def _documented(instr: Instr) -> str:
    """What docs/executor.md says of an instruction whose results need not be the same; empty where they have to be."""
    if ISA[instr.op].family == "matmul":
        return "\nwhich is expected: the products are added in another order than BLAS adds them in (docs/executor.md)"
    names = sorted({v for v in instr.operands if isinstance(v, str) and v in abi.APPROXIMATE})
    if names:
        return f"\nwhich is expected: {', '.join(names)} may differ in the last places (docs/executor.md has the bounds)"
    return "\nwhich is an error: please report it with this kernel"

