"""Cost of an instruction in cycles of its engine: the declaration's formula on the sizes of its operands."""
from __future__ import annotations

from math import prod
from types import SimpleNamespace
from typing import Any

from opennki.ir.nodes import Access, Instr
from opennki.ir.verify import check_operands
from opennki.isa.declare import ISA, Plumbing, Register
from opennki.isa.target import Target


def cost_view(instr: Instr, target: Target) -> SimpleNamespace:
    """What a cost formula sees: bound dimensions (P, F, K, M, N ...), attributes by name, `dtypes` and `spaces` by operand ("result" for
    the first result), `engine`. P and F come from the result where no operand binds them.
    """
    decl = ISA[instr.op]
    dims: dict[str, Any] = dict(check_operands(decl, instr.operands, target, instr.engine))
    dtypes: dict[str, str] = {}
    spaces: dict[str, str] = {}
    attributes: dict[str, Any] = {}
    for param, value in zip(decl.params, instr.operands, strict=True):
        if isinstance(value, Access):
            if not isinstance(param.spec, Register):
                dtypes[param.name], spaces[param.name] = value.dtype, value.space
                attributes[param.name] = value
        elif not isinstance(param.spec, Plumbing):
            attributes[param.name] = value
    shape = next((a.shape for a in instr.results), None) or next((v.shape for v in instr.operands if isinstance(v, Access)), (1, 1))
    dims.setdefault("P", shape[0] if shape else 1)
    dims.setdefault("F", prod(shape[1:]))
    if instr.results:
        dtypes.setdefault("result", instr.results[0].dtype)
        spaces.setdefault("result", instr.results[0].space)
    return SimpleNamespace(**{**attributes, **dims}, dtypes=dtypes, spaces=spaces, engine=instr.engine)


def cycles(instr: Instr, target: Target) -> float:
    """Cycles of the instruction's engine (base-clock cycles for DMA). An estimate from documented formulas, see `isa_costs`."""
    return float(ISA[instr.op].cost(cost_view(instr, target), target))
