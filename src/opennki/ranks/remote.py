"""The protocol of a run in several processes.

Each process runs some of the ranks. What a member brings is sent, when it comes to a meeting, to the processes of the others, so nobody
ever asks. A process that has nothing left to run tells process 0 how many messages it has sent and received. When all rest and the numbers
agree, process 0 asks once more; if nothing has changed, nothing ever will: those that still wait, wait for ever, and every process
raises the same report. A process that ends says so; one that vanishes is named. Messages carry the number of the run.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from opennki import background
from opennki.errors import UNKNOWN, Loc, NkiError, NkiIndexError, NkiParseError, NkiReadError, NkiTypeError, NkiValueError
from opennki.interpret.programs import Brought, Exchange, Job, Waiting, stuck
from opennki.interpret.schedule import Scheduler, report_of
from opennki.isa.meeting import Member
from opennki.ranks import wire
from opennki.ranks.mesh import Channel

FLUSH_SECONDS = 2.0  # in which what a failing process has to say is sent
MOST_QUEUED = 4 << 20  # bytes that wait to be sent, above which no member goes on to bring more

_KINDS: dict[str, type[NkiError]] = {k.__name__: k for k in (NkiError, NkiTypeError, NkiValueError, NkiIndexError, NkiReadError)}


class RemoteError(NkiError):
    """A rank of another process failed, or its process is gone."""


def gone(ranks: list[int]) -> RemoteError:
    """The error of a process that has vanished."""
    named = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''}"
    why = "it was killed, or has ended without finishing the run"
    return RemoteError(f"the process of {named} has gone", loc=UNKNOWN, why=why, fix="look at what it printed last")


class Run:
    """One run of a kernel, seen from one of its processes (`interpret.schedule.Link`).

    owner(rank): the process that runs it. `number`: which run of this channel it is, the same in all processes.
    """

    def __init__(self, channel: Channel, owner: Callable[[int], int], ranks: int, number: int | str = 0) -> None:
        self.channel, self.owner, self.number = channel, owner, number
        self.ranks_of = {p: [r for r in range(ranks) if owner(r) == p] for p in range(channel.processes)}
        self.peers = [p for p in range(channel.processes) if p != channel.process]
        self.outgoing: dict[int, queue.SimpleQueue[bytes | None]] = {p: queue.SimpleQueue() for p in self.peers}
        self.sent = self.received = 0
        self.told: Any = None  # the state that process 0 knows
        self.gone: set[int] = set()  # peers that have said goodbye
        self.lock = threading.Condition()
        self.queued = 0  # bytes
        self.stopping = self.stopped = False  # an error has come; the scheduler has it
        self.senders: list[background.Started] = []
        self.receivers: list[background.Started] = []
        self.scheduler: Scheduler | None = None
        self.states: dict[int, dict[str, Any]] = {}  # of process 0: what the others have told
        self.round = 0
        self.answers: dict[int, dict[str, Any]] | None = None

    # ---- what the scheduler calls ----
    def here(self, member: Member) -> bool:
        """Whether this process runs a member."""
        return self.owner(member[0]) == self.channel.process

    def bring(self, key: Any, member: Member, group: tuple[Member, ...], brought: Brought) -> None:
        """Tell the processes of the group what a member brings."""
        frame = self._frame({"kind": "bring", "key": key, "member": member, "group": group, **_described(brought)}, brought.operands)
        for process in sorted({self.owner(m[0]) for m in group} - {self.channel.process}):
            self._post(process, frame)

    def letter(self, key: Any, receiver: Member, brought: Brought) -> None:
        """Send a letter."""
        frame = self._frame({"kind": "letter", "key": key, "receiver": receiver, **_described(brought)}, brought.operands)
        self._post(self.owner(receiver[0]), frame)

    def throttle(self) -> None:
        """Wait until what members have brought before is sent, but for a little: it is a copy, and there may be one for every rank. Others
        receive it whatever they wait for, so that this ends."""
        with self.lock:
            while self.queued > MOST_QUEUED and not self.stopped:
                self.lock.wait()

    def start(self, scheduler: Scheduler) -> None:
        """Begin to receive and to send."""
        self.scheduler = scheduler
        for peer in self.peers:
            for work, threads in ((self._send, self.senders), (self._receive, self.receivers)):
                threads.append(background.start(work, peer, name=f"opennki-peer-{peer}"))

    def idle(self, scheduler: Scheduler) -> None:
        """Nothing can run here now: process 0 is told, once for each state."""
        state = self._state()
        if state != self.told:
            self.told = state
            self._tell(state, 0)

    def finish(self) -> None:
        """Say goodbye, and wait until all others have. Until then messages are answered."""
        self._everyone({"kind": "bye"})
        with self.lock:
            while not self.stopped and self.gone != set(self.peers):
                self.lock.wait()
        self._everyone({"kind": "end"}, last=True)
        for thread in (*self.senders, *(self.receivers if not self.stopped else ())):
            thread.join(timeout=None if not self.stopped else FLUSH_SECONDS)

    def fail(self, error: BaseException) -> None:
        """Tell the others why this process stops; also where another one has told it, as they may see first that this one is gone."""
        with self.lock:
            self.stopping = self.stopped = True
            self.lock.notify_all()
        self._everyone({"kind": "failed", **_of_error(error)}, last=True)
        until = time.monotonic() + FLUSH_SECONDS
        for thread in self.senders:
            thread.join(timeout=max(0.0, until - time.monotonic()))

    # ---- threads ----
    def _everyone(self, header: dict[str, Any], last: bool = False) -> None:
        frame = self._frame(header)
        for peer, queued in self.outgoing.items():
            self._put(peer, frame)
            if last:
                queued.put(None)

    def _frame(self, header: dict[str, Any], arrays: dict[str, np.ndarray] | None = None) -> bytes:
        return wire.encode({**header, "run": self.number}, arrays)

    def _post(self, process: int, frame: bytes) -> None:
        """A message that counts."""
        self.sent += 1  # under the scheduler's lock
        self._put(process, frame)

    def _put(self, process: int, frame: bytes) -> None:
        with self.lock:
            self.queued += len(frame)
        self.outgoing[process].put(frame)

    def _send(self, peer: int) -> None:
        while (frame := self.outgoing[peer].get()) is not None:
            try:
                self.channel.send(peer, frame)
            except OSError:
                return  # the thread that receives says what it means
            with self.lock:
                self.queued -= len(frame)
                self.lock.notify_all()
            del frame

    def _receive(self, peer: int) -> None:
        try:
            while True:
                header, arrays = self.channel.receive(peer)
                if header.get("run") != self.number:
                    raise NkiParseError(f"process {peer} is in run {header.get('run')!r} and this one in run {self.number}",
                                        rule="all processes make the same calls of launch, in the same order")
                if header["kind"] == "bye":
                    with self.lock:
                        self.gone.add(peer)
                        self.lock.notify_all()
                    continue
                if header["kind"] == "end":
                    return
                self._handle(peer, header, arrays)
                if header["kind"] in ("failed", "stuck"):
                    return
        except (EOFError, OSError):
            error = gone(self.ranks_of[peer])
            if self._stop(error):  # before others see that this process is gone too, and blame it
                self._everyone({"kind": "failed", **_of_error(error)}, last=True)
        except (NkiError, KeyError, TypeError, ValueError) as exc:
            self._stop(exc if isinstance(exc, NkiError) else NkiParseError(f"a message of process {peer} that is not understood: {exc!r}"))

    def _stop(self, error: NkiError) -> bool:
        """End this process's part of the run; False where that has been done. Who waits for the others goes on after the scheduler has the
        error, not before: without one it would take the run for a success."""
        with self.lock:
            if self.stopping:
                return False
            self.stopping = True
        assert self.scheduler is not None
        self.scheduler.failed((-1, 0), error)
        with self.lock:
            self.stopped = True
            self.lock.notify_all()
        return True

    def _handle(self, peer: int, header: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        scheduler, kind = self.scheduler, header["kind"]
        assert scheduler is not None
        if kind in ("bring", "letter"):
            brought, key = _brought(header, arrays), wire.tuples(header["key"])

            def put(exchange: Exchange) -> list[Job]:
                self.received += 1
                if kind == "letter":
                    return exchange.letter(key, _member(header["receiver"]), brought)
                return exchange.bring(key, _member(header["member"]), tuple(map(_member, header["group"])), brought)

            scheduler.deliver(put)
        elif kind == "state":
            self._consider(peer, header)
        elif kind == "ask":
            with scheduler.changed:
                self._tell(self._state(), int(header["round"]))
        elif kind == "failed":
            self._stop(_error(header))
        elif kind == "stuck":
            self._stop(_stuck(header))
        else:
            raise NkiParseError(f"a message of kind {kind!r}")

    # ---- is it stuck? ----
    def _state(self) -> dict[str, Any]:
        """What this process is doing; under the scheduler's lock."""
        scheduler = self.scheduler
        assert scheduler is not None
        exchange = scheduler.exchange
        waits = [[w.who, w.op, w.where, list(w.missing)] for w in exchange.waiting()]
        first = next(iter(exchange.pending.values())).wait.loc if exchange.pending else None
        return {"rests": scheduler.still and not scheduler.failures, "sent": self.sent, "received": self.received, "waits": waits,
                "ended": [exchange.named(m) for m in sorted(scheduler.ended)], "absent": scheduler.absent(),
                "loc": [first.file, first.line, first.function] if first is not None else None}  # fmt: skip

    def _tell(self, state: dict[str, Any], round_: int) -> None:
        if self.channel.process == 0:
            self._consider(0, {**state, "round": round_})
        else:
            self._put(0, self._frame({"kind": "state", "round": round_, **state}))

    def _consider(self, peer: int, state: dict[str, Any]) -> None:
        """Process 0: what a process has told. Two rounds of equal numbers with all at rest mean that nothing is under way."""
        verdict = None
        with self.lock:
            if state["round"] and (self.answers is None or state["round"] != self.round):
                return
            book = self.states if not state["round"] else self.answers
            assert book is not None
            book[peer] = state
            if len(book) < self.channel.processes or not _settled(book) or not any(s["waits"] for s in book.values()):
                if state["round"] and self.answers is not None and len(self.answers) == self.channel.processes:
                    self.answers = None
                return
            if state["round"]:
                same = all(_numbers(book[p]) == _numbers(self.states[p]) for p in book)
                self.answers = None
                if not same:
                    return
                verdict = dict(self.states)
            else:
                self.round += 1
                self.answers = {}
                number = self.round
        if verdict is None:
            self._ask(number)
        else:
            self._decide(verdict)

    def _ask(self, number: int) -> None:
        self._everyone({"kind": "ask", "round": number})
        # the lock of the scheduler may be held by a thread that waits for ours
        background.start(self._answer, number, name="opennki-answer")

    def _answer(self, number: int) -> None:
        assert self.scheduler is not None
        with self.scheduler.changed:
            state = self._state()
        self._tell(state, number)

    def _decide(self, states: dict[int, dict[str, Any]]) -> None:
        header = {"kind": "stuck", "waits": [w for p in sorted(states) for w in states[p]["waits"]],
                  "ended": [e for p in sorted(states) for e in states[p]["ended"]],
                  "absent": [r for p in sorted(states) for r in states[p]["absent"]],
                  "loc": next((states[p]["loc"] for p in sorted(states) if states[p]["loc"]), None)}  # fmt: skip
        if self._stop(_stuck(header)):
            self._everyone(header, last=True)


def _numbers(state: dict[str, Any]) -> tuple[Any, ...]:
    return bool(state["rests"]), int(state["sent"]), int(state["received"])


def _settled(states: dict[int, dict[str, Any]]) -> bool:
    """All rest, and every message that was sent has been received."""
    return all(s["rests"] for s in states.values()) and sum(int(s["sent"]) - int(s["received"]) for s in states.values()) == 0


def _described(brought: Brought) -> dict[str, Any]:
    loc = brought.loc
    return {"op": brought.op, "loc": [loc.file, loc.line, loc.function], "dtypes": brought.dtypes, "attributes": brought.attributes,
            "clock": None if brought.clock is None else [[rank, times.tolist()] for rank, times in brought.clock.items()]}  # fmt: skip


def _brought(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> Brought:
    dtypes, attributes = header["dtypes"], header["attributes"]
    for table in (dtypes, attributes):
        if not isinstance(table, dict) or not all(isinstance(v, str) for v in table.values()):
            raise NkiParseError("a message whose operands are not described")
    return Brought(str(header["op"]), _loc(header["loc"]), arrays, dtypes, attributes, clock=_clock(header["clock"]))


def _clock(value: Any) -> dict[int, np.ndarray] | None:
    if value is None:
        return None
    if not all(isinstance(rank, int) and all(isinstance(t, int) and 0 <= t < 1 << 31 for t in times) for rank, times in value):
        raise NkiParseError("a message whose clock is none")
    return {rank: np.asarray(times, np.int32) for rank, times in value}


def _loc(value: Any) -> Loc:
    return Loc(str(value[0]), int(value[1]), str(value[2])) if value else UNKNOWN


def _member(value: Any) -> Member:
    rank, program = value
    if not isinstance(rank, int) or not isinstance(program, int):
        raise NkiParseError("a message whose member has no number")
    return rank, program


def _of_error(error: BaseException) -> dict[str, Any]:
    report = report_of(error)
    if report is not None:
        kind = next((k.__name__ for k in type(report).__mro__ if k.__name__ in _KINDS), "NkiError")
        place = [report.loc.file, report.loc.line, report.loc.function]
        return {"error": kind, "message": report.message, "code": report.code, "loc": place,
                "operand": report.operand, "rule": report.rule, "why": report.why, "fix": report.fix}  # fmt: skip
    return {"error": "NkiError", "message": f"a rank of another process stopped: {type(error).__name__}: {error}", "code": "",
            "loc": None, "operand": "", "rule": "", "why": "", "fix": ""}  # fmt: skip


def _error(header: dict[str, Any]) -> NkiError:
    kind = _KINDS.get(str(header["error"]), NkiError)
    texts = {name: str(header[name]) for name in ("operand", "rule", "why", "fix")}
    error = kind(str(header["message"]), loc=_loc(header["loc"]), **texts)
    error.code = str(header["code"])
    return error


def _stuck(header: dict[str, Any]) -> NkiError:
    waits = [Waiting(str(w[0]), str(w[1]), str(w[2]), tuple(map(str, w[3]))) for w in header["waits"]]
    return stuck(waits, [str(e) for e in header["ended"]], _loc(header["loc"]), [int(r) for r in header["absent"]])
