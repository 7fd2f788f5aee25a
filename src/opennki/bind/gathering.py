"""Ranks that come one by one: calls of one kernel by the devices of a framework's program, or by its processes.

A call of a kernel with collectives is a rank. It waits for the others not in the thread that made it, but as a state, until its members
have ended; then it is told so. Calls that belong together have one key: (run of the program, call site, how often this rank has come
there), so it does not matter in which order they come. `Gathering` is one such meeting of calls, `Gatherings` all of a process.

When every rank has come and nobody can run, those that wait, wait for ever, which is known at once. When some have not come they may still
be on their way: `watch` decides.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np

from opennki import settings
from opennki.bind.elastic import elastic
from opennki.bind.host import HostKernel
from opennki.bind.watch import nothing_happens, watch
from opennki.errors import NkiError
from opennki.interpret.blas import one_thread
from opennki.interpret.programs import SHOWN, Exchange, Job
from opennki.interpret.schedule import Link, Scheduler
from opennki.isa.meeting import Member, World

Key = tuple[Any, ...]  # (run, site, occurrence)
Done = Callable[[BaseException | None], None]

MOST_BEGUN = 256  # runs of which it is remembered that they have begun
LATE_SECONDS = 10.0  # in which a rank that comes late still gets the report of those that have failed


class RankCall:
    """One rank's call: the kernel, its buffers, and whom to tell that it has ended.

    `done(error)` is called once, on a thread of its own. Buffers are used until then."""

    def __init__(self, rank: int, kernel: HostKernel, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], done: Done) -> None:
        self.rank, self.done, self.kernel = rank, done, kernel
        self.plan, seed = kernel.plan()
        self.outputs = kernel.fitted("result", kernel.outputs, outputs)
        self.machines, self.report = self.plan.begin(kernel.fitted("operand", kernel.inputs, inputs), self.outputs, seed=seed)

    def finish(self) -> None:
        """Copy results to where they belong."""
        self.plan.finish(self.machines, self.outputs, self.report)


class Gathering(Scheduler):
    """The calls of one key. `local`: the ranks that this process runs. `link`: what reaches the others."""

    def __init__(self, home: Gatherings, key: Key, ranks: int, local: frozenset[int]) -> None:
        super().__init__({}, [], self._world, None, None)
        self.home, self.key, self.ranks, self.local = home, key, ranks, local
        self.calls: dict[int, RankCall] = {}
        self.worlds: dict[int, World] = {}
        self.open: set[int] = set()  # ranks whose calls have not ended
        self.active = 0  # threads that work here
        self.threads = max(1, min(settings.current().num_threads, len(local)))
        self.quiet = False  # nothing happens in this process that could bring those that are missing
        self.link_: Link | None = None
        self.hang_up: Callable[[], None] | None = None  # once the link has been left
        self.error: BaseException | None = None
        self.since = time.monotonic()  # of the last thing that happened
        self.closed = False

    # ---- what ranks do ----
    def arrive(self, call: RankCall) -> None:
        """A rank has come."""
        with self.changed:
            error = self.error
            if error is None:
                self.calls[call.rank] = call
                self.open.add(call.rank)
                self.worlds[call.rank] = World(self.ranks, tuple(call.plan.grid), call.plan.kernel.cores)
                members = [(call.rank, p) for p in range(len(call.machines))]
                self.instances = {**self.instances, **dict(zip(members, call.machines, strict=True))}
                self.ready += members
                self._go_on()
        if error is not None:
            elastic.submit(partial(call.done, error))

    def refuse(self, rank: int, error: BaseException) -> None:
        """A rank has failed before it could come: so have all."""
        with self.changed:
            if self.error is None:
                self.failures.append(((rank, 0), error))
            self._go_on()

    def look(self) -> None:
        """Nobody has come here yet: say so to the other processes."""
        with self.changed:
            self._go_on()

    def deliver(self, handle: Callable[[Exchange], list[Job]]) -> None:
        """Something has arrived from another process."""
        with self.changed:
            if self.error is not None:
                return
            self.ready += handle(self.exchange)
            self._go_on()

    def failed(self, member: Member, error: BaseException) -> None:
        """Stop: a member, or with rank -1 something else, has failed."""
        with self.changed:
            self.failures.append((member, error))
            self.changed.notify_all()
            self._go_on()

    @property
    def here(self) -> bool:
        """All ranks of this process have come."""
        return len(self.calls) == len(self.local)

    @property
    def over(self) -> bool:
        """All ranks of this process have come and ended."""
        return self.here and len(self.ended) == len(self.instances)

    @property
    def still(self) -> bool:
        """Nothing can run here, and nothing will."""
        return self.resting and (self.here or self.quiet)

    # ---- threads ----
    def _world(self, rank: int) -> World:
        world = self.worlds.get(rank)
        return world if world is not None else next(iter(self.worlds.values()))

    def _go_on(self) -> None:
        """Under the lock: let threads work where there is something to do, or look at what it means that there is nothing."""
        self.since = time.monotonic()
        self.quiet = False
        wanted = min(self.threads - self.active, len(self.ready)) if not self.failures else 0
        for _ in range(wanted):
            self.active += 1
            elastic.submit(self._turn)
        if not self.active and not self.closed:
            self._settle()
        elif self.closed and self.link_ is not None:
            self.link_.idle(self)

    def _turn(self) -> None:
        with one_thread() if any(c.plan.tape.multiplies for c in list(self.calls.values())) else nullcontext():
            self._work()
        with self.changed:
            self.active -= 1
            if not self.active:
                self._go_on()

    def _advance(self, member: Member) -> None:
        super()._advance(member)
        rank = member[0]
        call = self.calls[rank]
        with self.changed:
            if sum(m[0] == rank for m in self.ended) < len(call.machines) or self.failures:
                return
            self._no_letters_left()
        call.finish()
        with self.changed:
            if not self.failures:
                self.open.discard(rank)
                elastic.submit(partial(call.done, None))

    def _no_letters_left(self) -> None:
        """Raise the error of a letter whose receiver has ended."""
        over = set(self.ended)
        if any(key[-1] in over for key in self.exchange.letters):
            error = self.exchange.unread()
            assert error is not None
            raise error

    # ---- when nothing runs ----
    def _settle(self) -> None:
        """Under the lock, with no thread at work."""
        if self.failures or (self.link_ is None and self.here and self.exchange.pending):
            self._fail()
        elif self.over:
            self._close()
            if self.link_ is not None:
                self.link_.idle(self)
                elastic.submit(self._finish_link)
        else:
            if self.link_ is not None:
                self.link_.idle(self)
            if self.exchange.pending or self.link_ is not None:
                watch.add(self)

    def _fail(self) -> None:
        try:
            self._end()
            raise AssertionError("a gathering that has not failed")
        except BaseException as exc:  # Ctrl-C too
            self.error = exc
        if isinstance(self.error, NkiError) and not self.failures:
            self.home.explain(self, self.error)
        for rank in sorted(self.open):
            elastic.submit(partial(self.calls[rank].done, self.error))
        self.open.clear()
        self.ready.clear()
        self._close()
        if self.link_ is not None:
            elastic.submit(self._finish_link)

    def _finish_link(self) -> None:
        """Answer the other processes until they have ended too, or tell them why this one stops."""
        assert self.link_ is not None and self.hang_up is not None
        if self.error is None:
            self.link_.finish()
        else:
            self.link_.fail(self.error)
        self.hang_up()

    def _close(self) -> None:
        self.closed = True
        watch.remove(self)
        self.home.closed(self)

    def leave(self) -> None:
        """No more ranks of this process will come, and nobody here waits for them."""
        watch.remove(self)
        self.closed = True
        if self.link_ is not None:
            elastic.submit(self._finish_link)

    def absent(self) -> list[int]:
        """Ranks of this process that have not come."""
        return sorted(self.local - set(self.calls))

    def nobody_comes(self, why: str = "") -> None:
        """Those that are missing will not come: by `watch`."""
        with self.changed:
            if self.closed or self.active:
                return
            if self.link_ is not None and not why:
                if not self.home.has_begun(self.key[0]):
                    return  # it is begun by the user's own code, which may do anything before it does
                self.quiet = True
                self.link_.idle(self)  # the processes decide together
                return
            if not self.exchange.pending:
                return
            self.reason = why
            self._fail()

    reason = ""


class Gatherings:
    """All gatherings of this process, by key, and how often each rank has come to a call site in a run. `advice()`: what else may keep
    ranks from coming, from the framework; `finish()`: waits, at the end of the process, for results that the framework still computes."""

    advice: Callable[[], str] = staticmethod(lambda: "")
    finish: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all; in a forked process, those of its parent."""
        self.lock = threading.RLock()
        self.by_key: dict[Key, Gathering] = {}
        self.counts: dict[Key, dict[int, int]] = {}
        self.late: dict[Key, tuple[float, Gathering]] = {}
        self.begun: OrderedDict[Any, None] = OrderedDict()  # runs in which a rank of this process has come somewhere
        self.last = 0.0  # when a rank came

    def enter(
        self, run: Any, site: Any, rank: int, ranks: int, local: frozenset[int], link: Callable[[Gathering], Link] | None = None
    ) -> Gathering:
        """The gathering that a rank's call belongs to. `link`: makes what reaches other processes, where there are some."""
        with self.lock:
            self.last = time.monotonic()
            self.begun[run] = None
            self.begun.move_to_end(run)
            if len(self.begun) > MOST_BEGUN:
                self.begun.popitem(last=False)
            self._forget(run)
            counts = self.counts.setdefault((run, site), {})
            key = run, site, counts.get(rank, 0)
            counts[rank] = key[2] + 1
            found = self.by_key.get(key)
            if found is None and key in self.late:
                return self.late[key][1]
            return found if found is not None else self.open(key, ranks, local, link)

    def open(self, key: Key, ranks: int, local: frozenset[int], link: Callable[[Gathering], Link] | None) -> Gathering:
        """A new gathering."""
        with self.lock:
            made = self.by_key[key] = Gathering(self, key, ranks, local)
            if link is not None:
                made.link_ = made.exchange.post = link(made)
                made.link_.start(made)
        return made

    def _forget(self, run: Any) -> None:
        """Earlier runs are over, as a device runs one program of several devices at a time; their numbers may come again."""
        now = time.monotonic()
        for key, (when, _) in list(self.late.items()):
            if key[0] != run or now > when + LATE_SECONDS:
                del self.late[key]
        for key in [k for k, g in self.by_key.items() if k[0] != run and g.calls and not g.open]:  # nobody needed the others
            self.by_key.pop(key).leave()
        for place in [p for p in self.counts if p[0] != run]:
            if not any(key[:2] == place for key in self.by_key):
                del self.counts[place]

    def has_begun(self, run: Any) -> bool:
        """Whether a rank of this process has come anywhere in a run."""
        return run in self.begun

    def closed(self, one: Gathering) -> None:
        """A gathering has come to its end; ranks that come later get its error."""
        with self.lock:
            self.by_key.pop(one.key, None)
            if one.error is not None and not one.here:
                self.late[one.key] = time.monotonic(), one

    def explain(self, one: Gathering, error: NkiError) -> None:
        """Say in a report where those are that wait elsewhere in the same run."""
        with self.lock:
            known = [*self.by_key.values(), *(g for _, g in self.late.values())]  # and those whose wait has just ended with a report
        others = [g for g in known if g.key[0] == one.key[0] and g is not one]
        where = [f"{w.who} waits in {w.op} at {w.where}" for g in others for w in g.exchange.waiting()]
        if where:
            error.message += f"; in other calls of the same run: {'; '.join(where[:SHOWN])}" + ("; ..." if len(where) > SHOWN else "")
        if one.reason:
            error.why = one.reason
        advice = self.advice() if one.absent() else ""
        if advice:
            error.fix += f"; or {advice}"


gatherings = Gatherings()
"""Those of this process."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=gatherings.reset)


BETWEEN_SECONDS = 1.0  # in which a program that is under way comes from one kernel to the next
QUIET = 20  # looks at which nothing happened, after which nothing is expected any more


@atexit.register
def _wait_at_exit() -> None:
    """Let programs that are under way come to their end: a framework waits for them when Python's threads are gone. Those with kernels
    to come have a second for what is between two of them."""
    if gatherings.last:
        gatherings.finish()
    quiet = 0
    while gatherings.last:
        quiet = quiet + 1 if nothing_happens() else 0
        waiting = elastic.busy or any(one.open for one in list(gatherings.by_key.values()))
        if not waiting and (quiet > QUIET or time.monotonic() - gatherings.last > BETWEEN_SECONDS):
            return
        time.sleep(0.005)
