"""Reads the instructions of the IR text, and checks operands against their declarations."""

from __future__ import annotations

import ast
import difflib
import re
from typing import Any

from opennki.ir import text as t
from opennki.ir.affine import Affine, Pred
from opennki.ir.expressions import Expressions, is_literal
from opennki.ir.nodes import Access, IndexTile, Instr, PredTile
from opennki.ir.print import mask_rank
from opennki.isa import declare
from opennki.isa.declare import ISA, Instruction

_ATOM = r"[^,()\[\]'\"#]"
_G1 = r"[(\[][^()\[\]'\"#]*+[)\]]"
_G2 = rf"[(\[](?:[^()\[\]'\"#]++|{_G1})*+[)\]]"
_G3 = rf"[(\[](?:[^()\[\]'\"#]++|{_G2})*+[)\]]"
_VALUE = rf"(?:{_ATOM}++|{_G3})++"
# A match starts only at an argument: scanning stays linear in the length of a hostile line.
_ARG = re.compile(rf"(?:^|(?<=, ))([A-Za-z_]\w*+)=({_VALUE}|'[^'\\]*+')(?:, |\Z)", re.ASCII)
_PART = re.compile(rf"(?:^|(?<=, ))({_VALUE})(?:, |\Z)", re.ASCII)
_CALL = re.compile(r"(?:([A-Za-z_]\w*)\.)?([A-Za-z_]\w*)\((.*)\)", re.ASCII)


class Instructions:
    """Instructions of one text, with the operands that `e` reads."""

    def __init__(self, e: Expressions) -> None:
        self.e = e
        self.plans: dict[str, tuple[Instruction, list[frozenset[type]]]] = {}
        self.engines = set[str]()
        # predicates by text and rank: without variables, and with variables in scope
        self.preds: tuple[dict[tuple[str, int], Pred], dict[tuple[str, int], Pred]] = ({}, {})

    def leave(self) -> None:
        """End the scope of a loop index."""
        self.preds[1].clear()

    def plan(self, op: str) -> tuple[Instruction, list[frozenset[type]]]:
        declared = ISA.get(op)
        if declared is None or op in t.STATEMENTS:
            near = difflib.get_close_matches(op[:64], ISA, 1)
            self.e.error(f"unknown instruction {op[:64]}" + (f"; did you mean {near[0]}?" if near else ""))
        plan = self.plans[op] = (declared, [_kinds(p.spec) for p in declared.params])
        return plan

    def quick(self, line: str, place: int) -> Instr | None:
        """Read an instruction of the common form; None leaves it to the general road."""
        left, equals, right = line.partition(" = ")
        if not equals:
            left, right = "", line
        m = _CALL.fullmatch(right)
        if m is None:
            return None
        engine, op, inner = m.groups()
        plan = self.plans.get(op)
        if plan is None:
            if op not in ISA or op in t.STATEMENTS:
                return None
            plan = self.plan(op)
        declared, kinds = plan
        pairs = _ARG.findall(inner)
        if inner and sum([len(n) + len(v) for n, v in pairs]) + 3 * len(pairs) != len(inner) + 2:
            return None  # something lies between the arguments that were found
        e = self.e
        operands: list[Any] = [None] * len(kinds)
        index, fixed, read = declared.index, e.fixed, e.operand
        last, mask_text, call = -1, "", 0
        for name, text in pairs:
            at = index.get(name)
            if at is None or name in t.ATTRIBUTES or at <= last or mask_text or call:
                if name == "mask" and not mask_text and text[0] == "[":
                    mask_text = text
                elif name == "call" and not call and text.isdigit() and len(text) < 19:
                    call = int(text)
                else:
                    return None  # the general road says what is wrong
                continue
            last = at
            value = fixed.get(text, e)  # e stands for none
            if value is e:
                value = read(text)
            if type(value) not in kinds[at]:
                self.check(declared, at, value)
            operands[at] = value
        done: tuple[Access, ...] = ()
        if left:
            parts = _PART.findall(left)
            if sum(map(len, parts)) + 2 * len(parts) != len(left) + 2:
                return None
            done = tuple([read(part) for part in parts])
            if not all([type(access) is Access for access in done]):
                return None
        values = tuple(operands)
        mask = self.mask(mask_text, mask_rank(declared, done, values)) if mask_text else ()
        if engine and engine not in self.engines:
            self.engine(engine)
        return Instr(op, done, values, mask, engine or "", place, call)

    def mask(self, text: str, rank: int) -> tuple[Pred, ...]:
        e = self.e
        preds = []
        for part in text[1:-1].split(", ") if text[-1] == "]" else ():
            pred = self.preds[0].get((part, rank)) or self.preds[1].get((part, rank))
            if pred is None:
                e.varies = False
                pred = e.short_pred(part, rank)
                if pred is None:
                    return self.general_mask(e.tree(text), rank)
                self.preds[e.varies][part, rank] = pred
            preds.append(pred)
        return tuple(preds)

    def general_mask(self, node: ast.expr, rank: int) -> tuple[Pred, ...]:
        if not isinstance(node, ast.List):
            self.e.error("a mask is a list of predicates")
        return tuple([self.e.pred(p, rank) for p in node.elts])

    def engine(self, name: str) -> str:
        if not t.is_name(name) or name in t.KINDS:
            self.e.error(f"unknown engine {name}")
        self.engines.add(name)
        return name

    def general(
        self,
        engine: str,
        op: str,
        results: list[ast.expr],
        args: list[ast.expr],
        words: dict[str | None, ast.expr],
        place: int,
    ) -> Instr:
        """Read an instruction from its syntax tree."""
        e = self.e
        declared, kinds = self.plans.get(op) or self.plan(op)
        if args:
            e.error(f"the operands of {op} have names: {op}(name=value)")
        operands: list[Any] = [None] * len(kinds)
        for name, node in words.items():
            at = declared.index.get(name or "")
            if name in ("mask", "call"):
                continue
            if at is None or name == "engine":
                known = ", ".join(p.name for p in declared.params if p.name not in t.ATTRIBUTES)
                e.error(f"{op} has no operand {name}; it has {known}")
            value = e.value(node)
            if type(value) not in kinds[at]:
                self.check(declared, at, value)
            operands[at] = value
        call = e.integer(words["call"], 0) if "call" in words else 0
        done, values = tuple([e.access(r) for r in results]), tuple(operands)
        mask = self.general_mask(words["mask"], mask_rank(declared, done, values)) if "mask" in words else ()
        return Instr(op, done, values, mask, self.engine(engine) if engine else "", place, call)

    def check(self, declared: Instruction, at: int, value: Any) -> None:
        """Check the kind of an operand."""
        param = declared.params[at]
        spec = param.spec
        if isinstance(spec, (declare.Attr, declare.Plumbing)):
            if is_literal(value):
                return
        elif isinstance(spec, declare.Affine) and spec.many and type(value) is tuple:
            if all(type(v) in (int, Affine) for v in value):
                return
        elif isinstance(spec, declare.Register) and type(value) is Access and value.alloc.space == "register":
            return
        kind = type(value).__name__
        self.e.error(f"{declared.name}: {param.name} cannot be a {kind}; it is {_WHAT[type(spec)]}")


def _kinds(spec: Any) -> frozenset[type]:
    """Types that an operand can have at once; others need `check`."""
    if isinstance(spec, declare.Tile):
        return frozenset({Access, int, float, bool, Affine} if spec.scalar else {Access})
    if isinstance(spec, declare.Op):
        return frozenset({str})
    if isinstance(spec, declare.Affine):
        return frozenset({int, Affine})
    if isinstance(spec, declare.Index):
        return frozenset({IndexTile})
    if isinstance(spec, declare.Predicate):
        return frozenset({PredTile})
    if isinstance(spec, declare.Register):
        return frozenset()
    return frozenset({int, float, bool, str, type(None)})


_WHAT: dict[type, str] = {
    declare.Tile: "a tile (or a number where the declaration allows it)",
    declare.Op: "the name of a scalar function",
    declare.Attr: "a constant",
    declare.Affine: "an integer or index expression",
    declare.Index: "iota(shape, index)",
    declare.Predicate: "pred(shape, predicates)",
    declare.Register: "a register",
    declare.Plumbing: "a constant",
}
