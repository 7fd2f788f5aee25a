"""The program instances of a launch grid, one after the other on a core; those that do as the ones before are added and not run."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from opennki.timing.lower import BRANCH, LOOP, OP
from opennki.timing.machine import Machine
from opennki.timing.terms import slots_of

PERIODS = 3
"""So many times a period of programs must have taken the same, before the rest of the grid is added."""
LONGEST = 4
"""Programs of the longest period: tensors change among at most four buffers."""


def run_programs(machine: Machine, instances: Sequence[tuple[int, ...]]) -> None:
    """Run instances, given by their positions in the grid. Where no condition and no mask depends on the position, and the last ones moved
    the end by the same time with the same work on each engine, the others are taken to go on like that."""
    program = machine.program
    recording = machine.record is not None
    alike = not recording and len(instances) > PERIODS and not _guarded(program.body, set(program.grid))
    deltas: list[tuple[int, ...]] = []
    before = _totals(machine) if alike else []
    for done, instance in enumerate(instances, 1):
        for slot, at in zip(program.grid, instance, strict=True):
            machine.env[slot] = at
        machine.run(program.body)
        if not alike:
            continue
        after = _totals(machine)
        if len(after) != len(before):  # a mask left a part that it had not left before
            deltas.clear()
        else:
            deltas.append(tuple(a - b for a, b in zip(after, before, strict=True)))
        before = after
        del deltas[:-PERIODS * LONGEST]
        for p in range(1, len(deltas) // PERIODS + 1):
            last = deltas[-PERIODS * p:]
            if all(last[i] == last[i - p] for i in range(p, len(last))):
                _add(machine, last[-p:], len(instances) - done)
                return


def _guarded(nodes: list[Any], grid: set[int]) -> bool:
    """Whether a condition or a mask depends on the position in the grid."""
    for node in nodes:
        if node.kind == OP:
            if node.clip is not None and any(slots_of(terms) & grid for terms, _, _ in node.clip.expressions()):
                return True
        elif node.kind == LOOP:
            if _guarded(node.body, grid):
                return True
        elif node.kind == BRANCH and (slots_of(node.terms) & grid or _guarded(node.then, grid) or _guarded(node.orelse, grid)):
            return True
    return False


def _counters(machine: Machine) -> list[tuple[Any, Any]]:
    """(container, key) of everything that a run adds to, but the end of the timeline."""
    found: list[tuple[Any, Any]] = []
    for counter in (machine.count, machine.busy, machine.critical, machine.waited, *(h for h in machine.masked if h is not None)):
        found += [(counter, key) for key in (counter if isinstance(counter, dict) else range(len(counter)))]
    return found


def _lines(machine: Machine) -> list[Any]:
    return [*machine.lines, *machine.lanes]


def _totals(machine: Machine) -> list[int]:
    return [machine.front, *(line.busy for line in _lines(machine)), *(counter[key] for counter, key in _counters(machine))]


def _add(machine: Machine, period: list[tuple[int, ...]], times: int) -> None:
    """Go on for so many programs as the last period did."""
    whole, rest = divmod(times, len(period))
    sums = [sum(column) * whole + sum(column[:rest]) for column in zip(*period, strict=True)]
    machine.front += sums[0]
    lines = _lines(machine)
    for line, value in zip(lines, sums[1:], strict=False):
        line.busy += value
    for (counter, key), value in zip(_counters(machine), sums[1 + len(lines):], strict=True):
        counter[key] += value
