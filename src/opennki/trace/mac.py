"""matmul_mac_count: the multiply-accumulates that one program instance executes."""
from __future__ import annotations

from itertools import product
from math import prod

from opennki.ir.affine import Affine, Var
from opennki.ir.nodes import DoWhile, For, If, Instr, Kernel, Stmt
from opennki.isa.declare import ISA

EXACT_LIMIT = 1 << 20


def matmul_mac_count(kernel: Kernel) -> int:
    """Executed multiply-accumulates of program 0 .. averaged over the grid where guards depend on the program id, weighted by trip counts
    and guards; a do-while body counts once. Source: design "Numerics".
    """
    programs = prod(v.hi + 1 for v in kernel.grid) or 1
    return _count(kernel.body, [(v, v.hi + 1) for v in kernel.grid], []) // programs


def _count(body: list[Stmt], loops: list[tuple[Var, int]], guards: list[Affine]) -> int:
    total = 0
    for stmt in body:
        if isinstance(stmt, Instr):
            if ISA[stmt.op].family == "matmul":
                total += _macs(stmt) * _executions(loops, guards)
        elif isinstance(stmt, For):
            total += _count(stmt.body, [*loops, (stmt.var, stmt.trips)], guards)
        elif isinstance(stmt, If):
            total += _count(stmt.then, loops, [*guards, stmt.pred.expr])
            total += _count(stmt.orelse, loops, [*guards, stmt.pred.negated().expr])
        elif isinstance(stmt, DoWhile):
            total += _count(stmt.body, loops, guards)
    return total


def _macs(instr: Instr) -> int:
    decl = ISA[instr.op]
    stationary, moving = instr.operands[decl.index["stationary"]], instr.operands[decl.index["moving"]]
    pair = 2 if instr.operands[decl.index["perf_mode"]] else 1
    return stationary.shape[0] * pair * (prod(stationary.shape[1:]) // pair) * (prod(moving.shape[1:]) // pair)


def _executions(loops: list[tuple[Var, int]], guards: list[Affine]) -> int:
    """Number of iterations of a loop nest on which all guards hold."""
    used = {v for g in guards for v in g.variables()}
    free = prod(n for v, n in loops if v not in used)
    bound = [(v, n) for v, n in loops if v in used]
    if not guards:
        return free
    if len(bound) == 1 and all(len(g.terms) == 1 and isinstance(g.terms[0][0], Var) for g in guards):
        (var, n), = bound
        lo, hi = 0, n - 1
        for g in guards:
            c = g.coefficient(var)
            if c > 0:
                lo = max(lo, -(g.const // c))
            else:
                hi = min(hi, g.const // -c)
        return free * max(0, hi - lo + 1)
    if prod(n for _, n in bound) > EXACT_LIMIT and len(bound) > 1:
        # the innermost variable by interval, the others one by one
        *outer, (var, n) = bound
        return free * sum(_last(var, n, guards, dict(zip((v for v, _ in outer), values, strict=True)))
                          for values in product(*(range(m) for _, m in outer)))
    total = 0
    names = [v for v, _ in bound]
    for values in product(*(range(n) for _, n in bound)):
        env = dict(zip(names, values, strict=True))
        total += all(g.evaluate(env) >= 0 for g in guards)
    return free * total


def _last(var: Var, n: int, guards: list[Affine], env: dict[Var, int]) -> int:
    count = 0
    lo, hi = 0, n - 1
    for g in guards:
        c = g.coefficient(var)
        if any(a is not var and var in a.variables() for a, _ in g.terms):
            return sum(all(x.evaluate({**env, var: i}) >= 0 for x in guards) for i in range(n))
        rest = g.evaluate({**env, var: 0})
        if c == 0:
            if rest < 0:
                return 0
        elif c > 0:
            lo = max(lo, -(rest // c))
        else:
            hi = min(hi, rest // -c)
    count += max(0, hi - lo + 1)
    return count
