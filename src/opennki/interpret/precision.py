"""NKI_PRECISE_FP=0: low-precision tensors of the kernel kept in float32, as the vendor's simulator does.

A rewrite of the traced kernel: each local tensor of a 16- or 8-bit float type becomes float32, unless its bytes are also read as another
type. Inputs and outputs keep their dtypes.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any

from opennki.ir.nodes import Access, Alloc, DoWhile, For, If, Instr, Kernel, Stmt, statements
from opennki.ir.verify import accesses

LOW = frozenset({"bfloat16", "float16", "float8_e4m3", "float8_e4m3fn", "float8_e5m2"})


def widened(kernel: Kernel) -> Kernel:
    """The kernel with its local low-precision tensors in float32."""
    kept = {o.alloc for o in kernel.outputs}
    wide: dict[Alloc, Alloc] = {}
    for stmt in statements(kernel.body):
        if isinstance(stmt, Instr):
            kept |= {a.alloc for a, _, _ in accesses(stmt) if a.dtype != a.alloc.dtype}
        elif isinstance(stmt, Alloc) and stmt.dtype in LOW:
            wide.setdefault(stmt, replace(stmt, dtype="float32"))
    wide = {a: w for a, w in wide.items() if a not in kept and a.space != "shared_hbm"}
    return replace(kernel, body=[_stmt(s, wide) for s in kernel.body]) if wide else kernel


def _stmt(stmt: Stmt, wide: dict[Alloc, Alloc]) -> Stmt:
    if isinstance(stmt, Alloc):
        return wide.get(stmt, stmt)
    if isinstance(stmt, Instr):
        return replace(stmt, results=_operand(stmt.results, wide), operands=_operand(stmt.operands, wide))
    if isinstance(stmt, For):
        return replace(stmt, body=[_stmt(s, wide) for s in stmt.body])
    if isinstance(stmt, If):
        return replace(stmt, then=[_stmt(s, wide) for s in stmt.then], orelse=[_stmt(s, wide) for s in stmt.orelse])
    assert isinstance(stmt, DoWhile)
    return replace(stmt, body=[_stmt(s, wide) for s in stmt.body], cond=_operand(stmt.cond, wide))


def _operand(value: Any, wide: dict[Alloc, Alloc]) -> Any:
    if isinstance(value, tuple):
        return tuple(_operand(v, wide) for v in value)
    if isinstance(value, Access):
        dims = tuple(d if d.dyn is None else replace(d, dyn=_operand(d.dyn, wide)) for d in value.dims)
        if value.alloc in wide:
            return replace(value, alloc=wide[value.alloc], dtype="float32", dims=dims)
        return replace(value, dims=dims) if any(d.dyn is not None for d in dims) else value
    return value
