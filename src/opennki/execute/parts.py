"""Native code for kernels that wait for others: what is between two meetings is one step of the interpreter's plan.

The interpreter keeps the places where a program waits and goes on, and the loops around them. Statements next to each other that meet
nobody are lowered together, with the slots of the whole plan, and run on the instance's own memory. What they leave behind for others, or
for their own next execution, counts as an output of theirs, so that no pass takes it away.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from opennki import settings
from opennki.execute.build import library
from opennki.execute.executor import Executor
from opennki.execute.lower import Lowering
from opennki.execute.record import Unsupported
from opennki.interpret.machine import Instance, Tape
from opennki.ir.affine import Range, Var
from opennki.ir.nodes import Alloc, DoWhile, Instr, Stmt, statements, whole
from opennki.ir.verify import accesses


class _Plan:
    """The plan of a part, as lowering sees one (`interpret.machine.Tape`)."""

    def __init__(self, tape: Tape, body: list[Stmt], ranges: dict[Var, Range], outputs: list[Any]) -> None:
        self.kernel = replace(tape.kernel, body=body, outputs=outputs)
        self.layout, self.seed, self.counters, self.restarted = tape.layout, tape.seed, tape.counters, tape.restarted
        self.ranges, self.loops = dict(ranges), list(tape.loops)
        self.renewed: list[Any] = []
        self.watch: set[Alloc] = set()  # a part does not see what others wrote


class Parts:
    """Makes native steps of the parts of one plan."""

    def __init__(self, tape: Tape, lib: Any) -> None:
        self.tape, self.lib = tape, lib
        self.uses = _uses(tape.kernel.body)
        self.made: list[Executor] = []

    def __call__(self, body: list[Stmt], ranges: dict[Var, Range]) -> Callable[[Instance], None] | None:
        """The step that runs a part; None where the interpreter runs it."""
        if not any(isinstance(s, Instr) for s in statements(body)):
            return None
        here, own = _uses(body), {s for s in statements(body) if isinstance(s, Alloc)}
        kept = [whole(a) for a, count in here.items() if a not in own or count < self.uses[a]]
        try:
            lowering = Lowering(_Plan(self.tape, body, ranges, [*self.tape.kernel.outputs, *kept]))  # type: ignore[arg-type]
        except Unsupported:
            return None
        executor = Executor(self.tape, lowering, self.lib)
        self.made.append(executor)
        return executor.run


def _uses(body: list[Stmt]) -> Counter[Alloc]:
    """How often each tensor is used."""
    found: Counter[Alloc] = Counter()
    for stmt in statements(body):
        if isinstance(stmt, Instr):
            found.update(access.alloc for access, _, _ in accesses(stmt))
        elif isinstance(stmt, DoWhile) and stmt.cond is not None:
            found[stmt.cond.alloc] += 1
    return found


def by_parts(tape: Tape) -> None:
    """Let a plan that waits for others have native steps, where a plan that does not would be native as a whole."""
    if settings.current().executor == "interpreter" or tape.tracked or tape.suspects or tape.frees or tape.meeting:
        return
    lib = library().lib
    if lib is not None:
        tape.part = Parts(tape, lib)
