"""Programs that wait for each other: barriers and reductions across the launch grid, and the scheduler.

A step that suspends hands its operands to the scheduler. When every program of its group waits at the same place, the instruction is
completed for all of them in program order. Programs run in a given order (shuffled on request): a kernel must not depend on it.
"""
from __future__ import annotations

from typing import Any

import numpy as np

from opennki.errors import NkiError
from opennki.interpret.machine import Instance, Wait
from opennki.interpret.steps import Plan, Step


def waiting_step(plan: Plan) -> Step:
    """The step of an instruction that waits for other programs."""
    body, static = plan.decl.body, plan.static
    outputs = plan.outputs

    def step(machine: Any) -> Wait:
        values: dict[str, Any] = {}
        for o in plan.inputs:
            array = np.array(o.view.get(machine))
            values[o.name] = array if o.read is None else o.read(array)

        def complete(contributions: list[dict[str, Any]]) -> None:
            if not outputs:
                return
            kw = dict(static)
            for o in plan.inputs:
                kw[o.name] = [c[o.name] for c in contributions]
            result = body(**kw)
            for (view, write, _), value in zip(outputs, result if isinstance(result, tuple) else (result,), strict=True):
                write(view.get(machine), value)
                if machine.shadows[view.slot] is not None:
                    view.shadow(machine)[...] = 1
        return Wait(plan.instr, plan.loc, values, complete)
    return step


def group_of(wait: Wait, machine: Instance, programs: list[Instance], cores: tuple[int, ...]) -> list[int]:
    """Numbers of the programs that take part in what a program waits for."""
    decl_index = {name: value for name, value in _attributes(wait)}
    if "cores" in decl_index and cores:
        wanted = set(decl_index["cores"])
        return [i for i in range(len(programs)) if cores[i] in wanted]
    axes = decl_index.get("program_axes", ())
    axes = (axes,) if isinstance(axes, int) else tuple(axes)
    if not axes:
        return list(range(len(programs)))
    rank = len(machine.program)
    for axis in axes:
        if not 0 <= axis < rank:
            raise NkiError(f"{wait.instr.op}: program axis {axis} of a grid of {rank} dimensions", loc=wait.loc,
                           rule="a program axis is one of the launch grid")
    return [i for i, p in enumerate(programs)
            if all(a in axes or p.program[a] == machine.program[a] for a in range(rank))]


def _attributes(wait: Wait) -> list[tuple[str, Any]]:
    from opennki.isa.declare import ISA
    decl = ISA[wait.instr.op]
    return [(p.name, v) for p, v in zip(decl.params, wait.instr.operands, strict=True)]


def run_all(programs: list[Instance], order: list[int], cores: tuple[int, ...], progress: Any = None) -> None:
    """Run all programs to their end; raises when some wait for ever."""
    waiting: dict[int, Wait] = {}
    ready = list(order)
    while ready:
        number = ready.pop(0)
        wait = programs[number].run()
        if wait is None:
            if progress is not None:
                progress()
            continue
        waiting[number] = wait
        members = group_of(wait, programs[number], programs, cores)
        if all(m in waiting and waiting[m].instr is wait.instr for m in members):
            contributions = [waiting[m].contribution for m in members]
            # what was written before a meeting of the programs is ordered with what comes after it
            for key, table in programs[number].owners.items():
                if len(key) == 2:
                    table.fill(0)
            for m in members:
                waiting.pop(m).complete(contributions)
                ready.append(m)
    if waiting:
        lines = "; ".join(f"program {programs[n].program} waits in {w.instr.op} at {w.loc}" for n, w in sorted(waiting.items())[:8])
        ended = [p.program for p in programs if p.done][:8]
        raise NkiError(f"{len(waiting)} programs wait for ever: {lines}" + (f"; programs that have ended: {ended}" if ended else ""),
                       rule="every program of a group reaches the same barrier or reduction",
                       why="a program that has ended or waits elsewhere never arrives",
                       fix="call it unconditionally, or on the same path for all programs", loc=next(iter(waiting.values())).loc)
