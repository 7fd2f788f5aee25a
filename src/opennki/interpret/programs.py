"""Programs and ranks that wait for each other.

A step that suspends hands over its operands (`Wait`). Its declaration says who takes part (`isa.meeting`): a group, which is complete when
its last member has come to the same source line, or letters, which go from one member to another in order. Members that other processes
run take part by what they send (`ranks`). `interpret.schedule` runs the members.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from opennki.errors import UNKNOWN, Loc, NkiError, NkiTypeError, NkiValueError
from opennki.interpret import races
from opennki.interpret.machine import Wait
from opennki.interpret.races import Clock
from opennki.interpret.steps import Plan, Step
from opennki.isa.declare import ISA
from opennki.isa.meeting import Meeting, Member, World

SHOWN = 8  # members that a report names
Key = tuple[Any, ...]


def waiting_step(plan: Plan) -> Step:
    """The step of an instruction that waits for others."""
    static, outputs, lazy, masker = plan.static, plan.outputs, plan.lazy, plan.masker
    brought = [o for o in plan.inputs if o.reads]
    kinds, raw = {o.name: o.view.access.dtype for o in brought}, plan.raw

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
        for o, what in plan.shared_reads:
            races.touch(machine, what, ((0,) * len(o.view.shape), o.view.shape), None)
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
                if raw and value.dtype != target.dtype:
                    raise NkiTypeError(
                        f"{plan.instr.op}: {name} is {target.dtype} and what arrives is {value.dtype}",
                        loc=plan.loc,
                        operand=name,
                        rule="what is copied between members keeps its dtype",
                    )
                watched = plan.shared_writes.get(view)
                before = races.bits(target) if watched is not None else None
                write(target, value)
                if watched is not None:
                    races.touch(machine, watched, ((0,) * len(view.shape), view.shape), None, races.bits(target) != before)
                if machine.shadows[view.slot] is not None:
                    view.shadow(machine)[...] = 1

        return Wait(plan.instr, plan.loc, attributes, values, kinds, finish)

    return step


@dataclass(slots=True)
class Brought:
    """What a member brings to a meeting: its operands, and what must be alike. `wait`: of a member that this process runs; `clock`: what it
    knows of other programs, or None where nobody watches them."""

    op: str
    loc: Loc
    operands: dict[str, np.ndarray]
    dtypes: dict[str, str]
    attributes: dict[str, str]
    wait: Wait | None = None
    clock: Clock | None = None

    @classmethod
    def of(cls, wait: Wait) -> Brought:
        """What a wait of this process brings."""
        shown = {name: repr(value) for name, value in wait.attributes.items()}
        return cls(wait.instr.op, wait.loc or UNKNOWN, wait.contribution, wait.dtypes, shown, wait, wait.clock)


@dataclass(slots=True)
class _Pending:
    """A member of this process that waits: for its group, or for letters."""

    brought: Brought
    meeting: Meeting
    key: Key
    letters: list[Key] = field(default_factory=list)

    @property
    def wait(self) -> Wait:
        assert self.brought.wait is not None
        return self.brought.wait


@dataclass(slots=True)
class Job:
    """A meeting that is complete: what `complete` computes and hands out. `members` (of this process) wait until that is done, `places` are
    their positions in a list of results."""

    waits: list[Wait]
    members: list[Member]
    places: list[int]
    brought: list[Brought]
    everyone: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Waiting:
    """A line of a report: who waits, in what, where, and for whom."""

    who: str
    op: str
    where: str
    missing: tuple[str, ...]


class Post(Protocol):
    """How what members bring reaches those that other processes run."""

    def here(self, member: Member) -> bool:
        """Whether this process runs a member."""

    def bring(self, key: Key, member: Member, group: tuple[Member, ...], brought: Brought) -> None:
        """Tell the other members of a group what a member brings."""

    def letter(self, key: Key, receiver: Member, brought: Brought) -> None:
        """Send a letter."""

    def throttle(self) -> None:
        """Called before a member of this process brings something; waits while too much of that is to be sent."""


class Exchange:
    """Who waits for whom. Not thread-safe: the scheduler's lock guards it."""

    def __init__(self, world_of: Callable[[int], World], post: Post | None = None) -> None:
        self.world_of, self.post = world_of, post
        self.pending: dict[Member, _Pending] = {}
        self.groups: dict[Key, dict[Member, deque[Brought]]] = {}
        self.letters: dict[Key, deque[Brought]] = {}

    def arrive(self, member: Member, wait: Wait) -> tuple[list[Job], list[Member]]:
        """A member has come to a wait: the meetings that are complete by that, and the members that need not wait."""
        decl = ISA[wait.instr.op]
        assert decl.meets is not None
        try:
            meeting = decl.meets(wait.attributes, member, self.world_of(member[0]))
        except NkiError as exc:
            exc.loc = wait.loc or UNKNOWN
            raise
        brought = Brought.of(wait)
        if meeting.found is not None:
            known = {"found": np.full((1, 1), meeting.found, np.int32)}
            return [Job([wait], [member], [0], [replace(brought, operands=known, dtypes={"found": "int32"})], (member,))], []
        site = (wait.instr.op, os.path.basename(brought.loc.file), brought.loc.line)
        if meeting.group:
            return self._group(member, brought, meeting, (*site, meeting.group)), []
        address = (meeting.address,) if meeting.address else site
        jobs: list[Job] = []
        for receiver in meeting.gives:
            jobs += self._give((*address, member, receiver), receiver, brought)
        if not meeting.takes and not decl.outputs:
            return jobs, [member]
        self.pending[member] = _Pending(brought, meeting, site, [(*address, sender, member) for sender in meeting.takes])
        return jobs + self._open(member), []

    def _group(self, member: Member, brought: Brought, meeting: Meeting, key: Key) -> list[Job]:
        if member not in meeting.group:
            raise NkiValueError(
                f"{brought.op}: {name_of(member)} does not take part in it",
                loc=brought.loc,
                rule="who calls it is one of the members that it names",
            )
        self.pending[member] = _Pending(brought, meeting, key)
        if self.post is not None and not all(map(self.post.here, meeting.group)):
            self.post.bring(key, member, meeting.group, brought)
        return self.bring(key, member, meeting.group, brought)

    def bring(self, key: Key, member: Member, group: tuple[Member, ...], brought: Brought) -> list[Job]:
        """A member, of this process or another, has come to its group. One of another process may be several meetings ahead."""
        here = self.groups.setdefault(key, {})
        here.setdefault(member, deque()).append(brought)
        if len(here) < len(group):
            return []
        all_of_it = [here[m].popleft() for m in group]
        for m in group:
            if not here[m]:
                del here[m]
        if not here:
            del self.groups[key]
        ours = [(m, place) for place, m in enumerate(group) if all_of_it[place].wait is not None]
        waits = [self.pending.pop(m).wait for m, _ in ours]
        return [Job(waits, [m for m, _ in ours], [place for _, place in ours], all_of_it, group)]

    def _give(self, key: Key, receiver: Member, brought: Brought) -> list[Job]:
        if self.post is not None and not self.post.here(receiver):
            self.post.letter(key, receiver, brought)
            return []
        copied = {name: np.array(array) for name, array in brought.operands.items()}
        return self.letter(key, receiver, replace(brought, operands=copied, wait=None))

    def letter(self, key: Key, receiver: Member, brought: Brought) -> list[Job]:
        """A letter for a member of this process."""
        self.letters.setdefault(key, deque()).append(brought)
        return self._open(receiver) if receiver in self.pending and key in self.pending[receiver].letters else []

    def _open(self, member: Member) -> list[Job]:
        """The letters of a member, if all that it waits for are there."""
        waiting = self.pending[member]
        if not all(self.letters.get(key) for key in waiting.letters):
            return []
        found = []
        for key in waiting.letters:
            found.append(self.letters[key].popleft())
            if not self.letters[key]:
                del self.letters[key]
        del self.pending[member]
        return [Job([waiting.wait], [member], [0], found, tuple(key[-2] for key in waiting.letters))]

    def unread(self) -> NkiError | None:
        """The error of letters that nobody took."""
        for key, letters in self.letters.items():
            sender, receiver = key[-2:]
            return NkiValueError(
                f"{name_of(receiver)} never received what {name_of(sender)} sent",
                loc=letters[0].loc,
                rule="what is sent is received",
                fix="receive it on the peer, in the same order",
            )
        return None

    def waiting(self) -> list[Waiting]:
        """The members of this process that wait."""
        out = []
        for member, one in sorted(self.pending.items()):
            there = self.groups.get(one.key, {})
            missing = [m for m in one.meeting.group if m not in there]
            missing += [key[-2] for key in one.letters if not self.letters.get(key)]
            named = tuple(self.named(m) for m in missing[:SHOWN])
            out.append(Waiting(self.named(member), one.wait.instr.op, str(one.wait.loc), named))
        return out

    def stuck(self, ended: Sequence[Member], absent: Sequence[int] = ()) -> NkiError:
        """The error of members that wait for ever; `absent`: ranks that have not come to the kernel."""
        names = [self.named(m) for m in sorted(ended)]
        return stuck(self.waiting(), names, next(iter(self.pending.values())).wait.loc, absent)

    def named(self, member: Member) -> str:
        """A member as users know it."""
        programs = self.world_of(member[0]).programs
        return name_of(member, programs[member[1]] if len(programs) > 1 else ())


def stuck(waiting: Sequence[Waiting], ended: Sequence[str], loc: Loc | None, absent: Sequence[int] = ()) -> NkiError:
    """The error of members that wait for ever."""
    what = "ranks" if any(w.who.startswith("rank") for w in waiting) else "programs"
    lines = []
    for one in waiting[:SHOWN]:
        missing = f" for {', '.join(one.missing)}" if one.missing and what == "ranks" else ""
        lines.append(f"{one.who} waits in {one.op} at {one.where}{missing}")
    more = f"; and {len(waiting) - SHOWN} more" if len(waiting) > SHOWN else ""
    over = f"; {what} that have ended: {', '.join(ended[:SHOWN])}" + (", ..." if len(ended) > SHOWN else "") if ended else ""
    never = f"; ranks that have not called the kernel here: {', '.join(map(str, absent[:SHOWN]))}" if absent else ""
    never += ", ..." if len(absent) > SHOWN else ""
    return NkiError(
        f"{len(waiting)} {what} wait for ever: {'; '.join(lines)}{more}{over}{never}",
        rule=f"every one of a group of {what} reaches the same barrier, reduction or collective",
        why="a member that has ended or waits elsewhere never arrives",
        fix=f"call it unconditionally, or on the same path for all {what}"
        + ("; not in a branch (lax.cond, if) or a loop that only some of them take" if absent else ""),
        loc=loc,
    )


def name_of(member: Member, position: tuple[int, ...] = ()) -> str:
    """A member as users know it."""
    if position:
        return f"program {position}" + (f" of rank {member[0]}" if member[0] else "")
    return f"rank {member[0]}"


def complete(job: Job) -> None:
    """Compute what a meeting gives, and hand it to its members."""
    wait = job.waits[0]
    decl = ISA[wait.instr.op]
    for member, brought in zip(job.everyone, job.brought, strict=True):
        _alike(job.brought[0], brought, member)
    names = list(job.brought[0].operands) if job.brought else [o.name for o in decl.tiles if o.spec.reads]
    operands: dict[str, Any] = {n: [b.operands[n] for b in job.brought] for n in names}
    with np.errstate(all="ignore"):
        value = decl.body(**{**wait.attributes, **dict.fromkeys(p.name for p in decl.outputs if p.name not in operands), **operands})
    for place, one in zip(job.places, job.waits, strict=True):
        one.finish(value[place] if isinstance(value, list) else value)


def _alike(first: Brought, other: Brought, member: Member) -> None:
    """Members of a meeting bring operands of one shape, for the same operation."""

    def fail(message: str) -> NkiError:
        return NkiValueError(
            f"{other.op}: {message}",
            loc=other.loc,
            rule="all ranks of a group call it with the same attributes, shapes and dtypes",
            why="their results depend on all of them",
        )

    for name, array in other.operands.items():
        wanted = first.operands[name]
        if (array.shape, other.dtypes.get(name)) != (wanted.shape, first.dtypes.get(name)):
            raise fail(
                f"{name} of {name_of(member)} is {array.shape} {other.dtypes.get(name)} and that of another member is {wanted.shape} "
                f"{first.dtypes.get(name)}"
            )
    for name, value in other.attributes.items():
        if first.attributes.get(name) != value:
            raise fail(f"{name_of(member)} calls it with {name}={value} and another member with {first.attributes.get(name)}")
