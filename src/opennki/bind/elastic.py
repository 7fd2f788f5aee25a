"""Threads for work that may block: as many as there is work, kept for a while.

A result that is handed to a runtime makes it go on with its program on the thread that hands it over, and that program may wait for another
one whose result is still to be handed over. So each gets a thread of its own.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

from opennki import background
from opennki.bind import fpmode

IDLE_SECONDS = 5.0  # after which a thread without work ends


class Elastic:
    """A pool without a limit. Work that raises prints a traceback, as any thread does."""

    def __init__(self) -> None:
        self._reset()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self.lock = threading.Lock()
        self.idle = 0
        self.busy = 0  # tasks that are not over
        self.work: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def submit(self, task: Callable[[], None]) -> None:
        """Run `task` on a thread that does nothing else meanwhile."""
        with self.lock:
            self.busy += 1
            if self.idle:
                self.idle -= 1
                self.work.put(task)
                return
        try:
            background.start(self._run, task, name="opennki-elastic")
        except BaseException:
            with self.lock:
                self.busy -= 1
            raise

    def _run(self, task: Callable[[], None]) -> None:
        fpmode.enter()  # a thread begins in the mode of the one that started it
        while True:
            try:
                task()
            finally:
                with self.lock:
                    self.busy -= 1
            del task  # and what it holds
            with self.lock:
                self.idle += 1
            try:
                task = self.work.get(timeout=IDLE_SECONDS)
            except Empty:
                with self.lock:
                    if self.work.empty():
                        self.idle -= 1
                        return
                task = self.work.get()  # given to this thread between the two


elastic = Elastic()
"""The pool of this process."""
