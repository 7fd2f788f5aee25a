"""The scheduler: members that run, wait and go on, on some threads.

A member that waits holds no thread: it is a state, and threads run the others. When nobody can run any more and some still wait, that is
an error which names all of them; where other processes run members too, they decide together whether it is one (`ranks`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from opennki.errors import NkiError
from opennki.interpret.machine import Instance
from opennki.interpret.programs import Exchange, Job, Post, complete
from opennki.interpret.races import learn, snapshot
from opennki.isa.meeting import Member, World


class Link(Post, Protocol):
    """The other processes of a run, which deliver what their members bring by `Scheduler.deliver`."""

    def start(self, scheduler: Scheduler) -> None:
        """Begin to receive."""

    def idle(self, scheduler: Scheduler) -> None:
        """Called under the scheduler's lock whenever nothing can run here: its members wait, or have all ended."""

    def finish(self) -> None:
        """Wait until all processes have ended their members."""

    def fail(self, error: BaseException) -> None:
        """Tell the others that this process stops."""


def run_all(
    instances: Mapping[Member, Instance],
    order: Sequence[Member],
    world_of: Callable[[int], World],
    progress: Callable[[], None] | None = None,
    threads: int = 1,
    link: Link | None = None,
) -> None:
    """Run all members to their end, on up to `threads` threads. Raises what a member raises, with its rank named where there are several,
    and an NkiError when some wait for ever. Results do not depend on the order or the number of threads. `link`: the processes that run
    the other ranks."""
    Scheduler(instances, order, world_of, progress, link).run(max(1, min(threads, len(order))))


def report_of(error: BaseException) -> NkiError | None:
    """What an error says of the kernel: itself, or its cause, as of the IndexError of a runtime index outside of its tensor."""
    return error if isinstance(error, NkiError) else error.__cause__ if isinstance(error.__cause__, NkiError) else None


class Scheduler:
    """Members that can run and meetings that can be completed, and the threads that do it."""

    def __init__(
        self,
        instances: Mapping[Member, Instance],
        order: Sequence[Member],
        world_of: Callable[[int], World],
        progress: Callable[[], None] | None,
        link: Link | None,
    ) -> None:
        self.instances, self.progress, self.link = instances, progress, link
        self.ready: deque[Member | Job] = deque(order)
        self.exchange = Exchange(world_of, link)
        self.changed = threading.Condition()
        self.busy: set[int] = set()  # ranks whose members run
        self.completing = 0
        self.ended: list[Member] = []
        self.failures: list[tuple[Member, BaseException]] = []

    def run(self, threads: int) -> None:
        """Run to the end."""
        if self.link is not None:
            self.link.start(self)
        others = [threading.Thread(target=self._work, name=f"opennki-rank-{i}", daemon=True) for i in range(threads - 1)]
        for thread in others:
            thread.start()
        try:
            self._work()
        except BaseException as exc:  # Ctrl-C: the others end too
            self.failed((-1, 0), exc)
        for thread in others:
            thread.join()
        try:
            self._end()
        except BaseException as exc:
            if self.link is not None:
                self.link.fail(exc)
            raise
        if self.link is not None:
            self.link.finish()
            if self.failures:
                raise self.failures[0][1]

    def _end(self) -> None:
        if self.failures:
            member, error = min(self.failures, key=lambda f: f[0])
            several = self.exchange.post is not None or len({m[0] for m in self.instances}) > 1
            report = report_of(error)
            if report is not None and several and member[0] >= 0:
                report.message = f"rank {member[0]}: {report.message}"
            raise error
        if self.exchange.pending:
            raise self.exchange.stuck(self.ended, self.absent())
        unread = self.exchange.unread()
        if unread is not None:
            raise unread

    @property
    def over(self) -> bool:
        """All members of this process have ended."""
        return len(self.ended) == len(self.instances)

    @property
    def resting(self) -> bool:
        """Nothing runs or can run here."""
        return not self.ready and not self.busy and not self.completing

    def absent(self) -> list[int]:
        """Ranks of this process that have not come yet, where they come one by one."""
        return []

    @property
    def still(self) -> bool:
        """Nothing runs or can run here, and nobody is on the way: what other processes are told."""
        return self.resting

    def failed(self, member: Member, error: BaseException) -> None:
        """Stop: a member, or with rank -1 something else, has failed."""
        with self.changed:
            self.failures.append((member, error))
            self.changed.notify_all()

    def deliver(self, handle: Callable[[Exchange], list[Job]]) -> None:
        """Something has arrived from another process: `handle` puts it into the exchange."""
        with self.changed:
            self.ready += handle(self.exchange)
            if self.link is not None and self.resting:  # nobody works here any more who would say so
                self.link.idle(self)
            self.changed.notify_all()

    def _work(self) -> None:
        while True:
            with self.changed:
                item = self._next()
                while item is None and not self.failures and (not self.resting or (self.link is not None and not self.over)):
                    if self.link is not None and self.resting:
                        self.link.idle(self)
                    self.changed.wait()
                    item = self._next()
                if self.failures or item is None:
                    if self.link is not None and not self.failures:
                        self.link.idle(self)
                    self.changed.notify_all()
                    return
                self._claim(item, True)
            try:
                if isinstance(item, Job):
                    self._order(item)
                    complete(item)
                    with self.changed:
                        self.ready += item.members
                else:
                    self._advance(item)
            except Exception as exc:
                self.failed(item.members[0] if isinstance(item, Job) else item, exc)
            finally:
                with self.changed:
                    self._claim(item, False)
                    self.changed.notify_all()

    def _claim(self, item: Member | Job, on: bool) -> None:
        if isinstance(item, Job):
            self.completing += 1 if on else -1
        elif on:
            self.busy.add(item[0])
        else:
            self.busy.discard(item[0])

    def _next(self) -> Member | Job | None:
        """What can be done. Programs of one rank share memory and the record of who touched it, so they run one at a time."""
        for _ in range(len(self.ready)):
            item = self.ready.popleft()
            if isinstance(item, Job) or item[0] not in self.busy:
                return item
            self.ready.append(item)
        return None

    def _advance(self, member: Member) -> None:
        """Run a member until it waits or ends."""
        wait = self.instances[member].run()
        if wait is not None:
            if self.exchange.post is not None:
                self.exchange.post.throttle()
            wait.clock = snapshot(self.instances[member], member[0])
        with self.changed:
            if wait is None:
                self.ended.append(member)
                if self.progress is not None:
                    self.progress()
                return
            jobs, free = self.exchange.arrive(member, wait)
            self.ready += jobs
            self.ready += free

    def _order(self, job: Job) -> None:
        """Who takes part in a meeting knows afterwards what those who came to it knew."""
        clocks = [one.clock for one in job.brought]
        for member in job.members:
            learn(self.instances[member], member[0], clocks)
        races = self.instances[job.members[0]].races
        if races is not None and len(job.members) == len(races.grid) > 1 and len({m[0] for m in job.members}) == 1:
            races.all_met()
