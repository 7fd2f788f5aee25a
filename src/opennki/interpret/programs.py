"""Programs and ranks that wait for each other, and the scheduler that runs them.

A step that suspends hands over its operands (`Wait`). Its declaration says who takes part (`isa.meeting`): a group, which is complete when
its last member has come to the same source line, or letters, which go from one member to another in order. A member that waits holds no
thread: it is a state, and threads run the others. When nobody can run any more and some still wait, that is an error which names all.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from opennki.errors import UNKNOWN, NkiError, NkiValueError
from opennki.interpret.machine import Instance, Wait
from opennki.interpret.steps import Plan, Step
from opennki.isa.declare import ISA
from opennki.isa.meeting import Meeting, Member, World

SHOWN = 8  # members that a report names
Key = tuple[Any, ...]


def waiting_step(plan: Plan) -> Step:
    """The step of an instruction that waits for others."""
    static, outputs, lazy, masker = plan.static, plan.outputs, plan.lazy, plan.masker
    brought = [o for o in plan.inputs if o.reads]
    kinds = {o.name: o.view.access.dtype for o in brought}

    def step(machine: Any) -> Wait | None:
        if masker is not None:
            box = masker.box(machine.env)
            if box is None:
                return None
            if box != ((0,) * len(masker.shape), masker.shape) or masker.where(machine.env, *box) is not None:
                raise NkiValueError(
                    f"{plan.instr.op}: the mask holds for a part of the tensor",
                    loc=plan.loc,
                    rule="the mask of a collective holds for all of its elements or for none",
                    fix="compare loop indices only, and pass a slice of the tensor",
                )
        values: dict[str, np.ndarray] = {}
        for o in brought:
            array = o.view.get(machine)
            values[o.name] = array if o.read is None else o.read(array)
        attributes = {**static, **{name: compute(machine) for name, compute in lazy}} if lazy else static

        def finish(value: Any) -> None:
            for view, write, name in outputs:
                target = view.get(machine)
                if value is None:
                    value = np.zeros(target.shape, target.dtype)
                if value.shape != target.shape:
                    raise NkiValueError(
                        f"{plan.instr.op}: {name} is {tuple(target.shape)} and the members make {tuple(value.shape)}",
                        loc=plan.loc,
                        operand=name,
                        rule="the destination has the shape of the result",
                        fix="size it by the number of ranks that take part",
                    )
                write(target, value)
                if machine.shadows[view.slot] is not None:
                    view.shadow(machine)[...] = 1

        return Wait(plan.instr, plan.loc, attributes, values, kinds, finish)

    return step


@dataclass(slots=True)
class _Pending:
    """A member that waits: for its group, or for letters."""

    wait: Wait
    meeting: Meeting
    key: Key
    letters: list[Key] = field(default_factory=list)


@dataclass(slots=True)
class Job:
    """A meeting that is complete: what `complete` computes and hands out. Its members wait until that is done."""

    waits: list[Wait]
    members: list[Member]
    contributions: list[dict[str, np.ndarray]]


class Exchange:
    """Who waits for whom. Not thread-safe: the scheduler's lock guards it."""

    def __init__(self, world_of: Callable[[int], World]) -> None:
        self.world_of = world_of
        self.pending: dict[Member, _Pending] = {}
        self.groups: dict[Key, set[Member]] = {}
        self.letters: dict[Key, deque[tuple[dict[str, np.ndarray], Wait]]] = {}

    def arrive(self, member: Member, wait: Wait) -> tuple[list[Job], list[Member]]:
        """A member has come to a wait: the meetings that are complete by that, and the members that need not wait."""
        decl = ISA[wait.instr.op]
        assert decl.meets is not None
        try:
            meeting = decl.meets(wait.attributes, member, self.world_of(member[0]))
        except NkiError as exc:
            exc.loc = wait.loc or UNKNOWN
            raise
        loc = wait.loc or UNKNOWN
        site = (wait.instr.op, os.path.basename(loc.file), loc.line)
        if meeting.group:
            return self._group(member, wait, meeting, (*site, meeting.group)), []
        address = (meeting.address,) if meeting.address else site
        jobs: list[Job] = []
        for receiver in meeting.gives:
            letter = {name: np.array(array) for name, array in wait.contribution.items()}
            key = (*address, member, receiver)
            self.letters.setdefault(key, deque()).append((letter, wait))
            if receiver in self.pending and key in self.pending[receiver].letters:
                jobs += self._open(receiver)
        if not meeting.takes and not decl.outputs:
            return jobs, [member]
        self.pending[member] = _Pending(wait, meeting, site, [(*address, sender, member) for sender in meeting.takes])
        return jobs + self._open(member), []

    def _group(self, member: Member, wait: Wait, meeting: Meeting, key: Key) -> list[Job]:
        if member not in meeting.group:
            raise NkiValueError(
                f"{wait.instr.op}: {_name(member)} does not take part in it",
                loc=wait.loc,
                rule="who calls it is one of the members that it names",
            )
        self.pending[member] = _Pending(wait, meeting, key)
        here = self.groups.setdefault(key, set())
        here.add(member)
        if len(here) < len(meeting.group):
            return []
        del self.groups[key]
        waits = [self.pending.pop(m).wait for m in meeting.group]
        return [Job(waits, list(meeting.group), [w.contribution for w in waits])]

    def _open(self, member: Member) -> list[Job]:
        """The letters of a member, if all that it waits for are there."""
        waiting = self.pending[member]
        if not all(self.letters.get(key) for key in waiting.letters):
            return []
        found = []
        for key in waiting.letters:
            found.append(self.letters[key].popleft()[0])
            if not self.letters[key]:
                del self.letters[key]
        del self.pending[member]
        return [Job([waiting.wait], [member], found)]

    def unread(self) -> NkiError | None:
        """The error of letters that nobody took."""
        for key, letters in self.letters.items():
            sender, receiver = key[-2:]
            return NkiValueError(
                f"{_name(receiver)} never received what {_name(sender)} sent",
                loc=letters[0][1].loc,
                rule="what is sent is received",
                fix="receive it on the peer, in the same order",
            )
        return None

    def stuck(self, ended: Sequence[Member]) -> NkiError:
        """The error of members that wait for ever."""
        ranks = len({m[0] for m in (*self.pending, *ended)}) > 1
        what = "ranks" if ranks else "programs"
        lines = []
        for member, one in sorted(self.pending.items())[:SHOWN]:
            missing = [m for m in one.meeting.group if m not in self.pending or self.pending[m].key != one.key]
            missing += [key[-2] for key in one.letters if not self.letters.get(key)]
            absent = ", ".join(_name(m, self._position(m)) for m in missing[:SHOWN])
            lines.append(
                f"{_name(member, self._position(member))} waits in {one.wait.instr.op} at {one.wait.loc}"
                + (f" for {absent}" if absent and ranks else "")
            )
        more = f"; and {len(self.pending) - SHOWN} more" if len(self.pending) > SHOWN else ""
        over = ", ".join(_name(m, self._position(m)) for m in sorted(ended)[:SHOWN])
        return NkiError(
            f"{len(self.pending)} {what} wait for ever: {'; '.join(lines)}{more}" + (f"; ended: {over}" if over else ""),
            rule=f"every one of a group of {what} reaches the same barrier, reduction or collective",
            why="a member that has ended or waits elsewhere never arrives",
            fix=f"call it unconditionally, or on the same path for all {what}",
            loc=next(iter(self.pending.values())).wait.loc,
        )

    def _position(self, member: Member) -> tuple[int, ...]:
        programs = self.world_of(member[0]).programs
        return programs[member[1]] if len(programs) > 1 else ()


def _name(member: Member, position: tuple[int, ...] = ()) -> str:
    if position:
        return f"program {position}" + (f" of rank {member[0]}" if member[0] else "")
    return f"rank {member[0]}"


def complete(job: Job) -> None:
    """Compute what a meeting gives, and hand it to its members."""
    first = job.waits[0]
    decl = ISA[first.instr.op]
    names = list(job.contributions[0]) if job.contributions else [o.name for o in decl.tiles if o.spec.reads]
    for number, (brought, wait) in enumerate(zip(job.contributions, job.waits, strict=False)):
        _alike(decl.name, first, wait, job.contributions[0], brought, job.members[number])
    operands: dict[str, Any] = {n: [c[n] for c in job.contributions] for n in names}
    with np.errstate(all="ignore"):
        value = decl.body(**{**first.attributes, **dict.fromkeys(p.name for p in decl.outputs if p.name not in operands), **operands})
    for number, wait in enumerate(job.waits):
        wait.finish(value[number] if isinstance(value, list) else value)


def _alike(op: str, first: Wait, wait: Wait, wanted: dict[str, np.ndarray], brought: dict[str, np.ndarray], member: Member) -> None:
    """Members of a meeting bring operands of one shape, for the same operation."""

    def fail(message: str) -> NkiError:
        return NkiValueError(
            f"{op}: {message}",
            loc=wait.loc,
            rule="all ranks of a group call it with the same attributes, shapes and dtypes",
            why="their results depend on all of them",
        )

    for name, array in brought.items():
        other = wanted[name]
        if (array.shape, wait.dtypes.get(name)) != (other.shape, first.dtypes.get(name)):
            raise fail(
                f"{name} of {_name(member)} is {array.shape} {wait.dtypes.get(name)} and that of another member is {other.shape} "
                f"{first.dtypes.get(name)}"
            )
    if wait is not first and wait.instr is not first.instr:
        for name, value in wait.attributes.items():
            if first.attributes.get(name) != value:
                raise fail(f"{_name(member)} calls it with {name}={value!r} and another member with {first.attributes.get(name)!r}")


def run_all(
    instances: Mapping[Member, Instance],
    order: Sequence[Member],
    world_of: Callable[[int], World],
    progress: Callable[[], None] | None = None,
    threads: int = 1,
) -> None:
    """Run all members to their end, on up to `threads` threads. Raises what a member raises, with its rank named where there are several,
    and an NkiError when some wait for ever. Results do not depend on the order or the number of threads."""
    _Scheduler(instances, order, world_of, progress).run(max(1, min(threads, len(order))))


class _Scheduler:
    """Members that can run, and the threads that run them."""

    def __init__(
        self,
        instances: Mapping[Member, Instance],
        order: Sequence[Member],
        world_of: Callable[[int], World],
        progress: Callable[[], None] | None,
    ) -> None:
        self.instances, self.progress = instances, progress
        self.ready: deque[Member] = deque(order)
        self.exchange = Exchange(world_of)
        self.changed = threading.Condition()
        self.busy: set[int] = set()
        self.ended: list[Member] = []
        self.failures: list[tuple[Member, BaseException]] = []

    def run(self, threads: int) -> None:
        others = [threading.Thread(target=self._work, name=f"opennki-rank-{i}", daemon=True) for i in range(threads - 1)]
        for thread in others:
            thread.start()
        try:
            self._work()
        except BaseException as exc:  # Ctrl-C: the others end too
            with self.changed:
                self.failures.append(((-1, 0), exc))
                self.changed.notify_all()
        for thread in others:
            thread.join()
        if self.failures:
            member, error = min(self.failures, key=lambda f: f[0])
            if isinstance(error, NkiError) and len({m[0] for m in self.instances}) > 1 and member[0] >= 0:
                error.message = f"rank {member[0]}: {error.message}"
            raise error
        if self.exchange.pending:
            raise self.exchange.stuck(self.ended)
        unread = self.exchange.unread()
        if unread is not None:
            raise unread

    def _work(self) -> None:
        while True:
            with self.changed:
                member = self._next()
                while member is None and self.busy and not self.failures:
                    self.changed.wait()
                    member = self._next()
                if self.failures or member is None:
                    self.changed.notify_all()
                    return
                self.busy.add(member[0])
            try:
                self._advance(member)
            except Exception as exc:
                with self.changed:
                    self.failures.append((member, exc))
            finally:
                with self.changed:
                    self.busy.discard(member[0])
                    self.changed.notify_all()

    def _next(self) -> Member | None:
        """A member that can run. Programs of one rank share memory and the record of who touched it, so they run one at a time."""
        for _ in range(len(self.ready)):
            member = self.ready.popleft()
            if member[0] not in self.busy:
                return member
            self.ready.append(member)
        return None

    def _advance(self, member: Member) -> None:
        """Run a member until it waits or ends, and complete the meetings that it was the last to come to."""
        wait = self.instances[member].run()
        if wait is None:
            with self.changed:
                self.ended.append(member)
                if self.progress is not None:
                    self.progress()
            return
        with self.changed:
            jobs, free = self.exchange.arrive(member, wait)
            self.ready += free
            self.changed.notify_all()
        for job in jobs:
            complete(job)
            with self.changed:
                if len(job.members) > 1:
                    self._order(job.members)
                self.ready += job.members
                self.changed.notify_all()

    def _order(self, members: list[Member]) -> None:
        """What was written before a meeting of the programs of a rank is ordered with what comes after it."""
        for key, table in self.instances[members[0]].owners.items():
            if len(key) == 2:
                table.fill(0)
