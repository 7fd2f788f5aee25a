"""Masks of calls: which dimensions they count."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from opennki.errors import make
from opennki.ir import affine as aff
from opennki.ir.affine import Pred
from opennki.ir.nodes import Access
from opennki.isa.declare import Instruction, Tile
from opennki.lang.index import Condition, Mask
from opennki.lang.tensor import Tensor, align


def mask_preds(mask: Any) -> tuple[tuple[Pred, ...], int] | None:
    """(predicates, rank) of a mask argument; None for no mask; an always-false mask has one false predicate."""
    if mask is None or mask is True:
        return None
    if isinstance(mask, Mask):
        return mask.preds, len(mask.shape)
    if isinstance(mask, Condition):
        preds = mask.as_preds()
        if preds is not None:
            return preds, 0
        mask = bool(mask)
    if isinstance(mask, (bool, np.bool_)):
        return None if mask else ((Pred(aff.constant(-1)),), 0)
    raise make("err_unsupported_expression_in_mask", f"mask is {mask.describe() if isinstance(mask, Tensor) else repr(mask)}")


def aligned(decl: Instruction, operands: Sequence[Any], mask: Any, conditions: tuple[Pred, ...], info: Any,
            iteration: tuple[int, ...]) -> tuple[Pred, ...]:
    """The predicates of a call over the dimensions of its iteration space. A mask counts those, or the dimensions of an operand whose own
    it is: one that has the same mask, or the only one whose shape it has; `conditions` count none."""
    under = tuple(align(Pred(p.expr), 0, len(iteration)) for p in conditions)
    found = mask_preds(mask)
    if found is None:
        return under
    preds, rank = found
    for i, param in enumerate(decl.params):
        order, access = decl.masked_dims(param.name, info), operands[i]
        if order is None or not isinstance(access, Access) or not isinstance(mask, Mask):
            continue
        own = tuple(align(p, rank, len(access.shape)) for p in preds) if rank <= len(access.shape) else ()
        if not own or not ((_fits(mask.shape, access.shape) and not _fits(mask.shape, iteration)) or _within(own, access.mask)):
            continue
        if any(stride and order[j] is None for p in own for j, stride in enumerate(p.strides)):
            continue
        return under + tuple(Pred(p.expr, _strides(p, order, len(iteration))) for p in own)
    return under + tuple(align(p, rank, len(iteration)) for p in preds)


def contracted(decl: Instruction, operands: list[Any]) -> None:
    """Let operands that share a dimension by name, as the contracted one of a product, share the masks of it: what one of them leaves out
    of a sum, the others do not bring either."""
    found = [(i, p.spec.dims, operands[i]) for i, p in enumerate(decl.params)
             if isinstance(p.spec, Tile) and p.spec.operand_mask and isinstance(operands[i], Access)]
    for i, dims, masked in found:
        for pred in masked.mask:
            along = [j for j, stride in enumerate(pred.strides) if stride]
            if len(along) != 1 or (along[0] and len(dims) != len(masked.shape)):
                continue
            for other, names, _ in found:
                access = operands[other]
                at = names.index(dims[along[0]]) if other != i and dims[along[0]] in names else -1
                if at < 0 or (at and len(names) != len(access.shape)):
                    continue
                shared = Pred(pred.expr, tuple(pred.strides[along[0]] if j == at else 0 for j in range(len(access.shape))))
                if not _within((shared,), access.mask):
                    operands[other] = replace(access, mask=(*access.mask, shared))


def _fits(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    return len(shape) == len(wanted) and all(n in (1, m) for n, m in zip(shape, wanted, strict=True))


def _within(preds: tuple[Pred, ...], others: tuple[Pred, ...]) -> bool:
    known = {p.key() for p in others}
    return all(p.key() in known for p in preds)


def _strides(pred: Pred, order: tuple[int | None, ...], rank: int) -> tuple[int, ...]:
    out = [0] * rank
    for stride, place in zip(pred.strides, order, strict=False):
        if stride and place is not None:
            out[place] = stride
    return tuple(out)
