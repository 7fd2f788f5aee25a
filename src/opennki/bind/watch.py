"""Whether anybody can still come: what is known of a process in which ranks wait for others that have not called.

A rank that has not come may still be computing, or its program may have ended without the call; XLA tells nobody. So while ranks wait, one
thread looks at the process ten times a second. The missing will not come when, at six looks in a row, no thread of the process runs, is
ready to, waits for a disk or has used a processor since the look before, and none of a framework's own threads is inside of Python (a
callback that sleeps): then nothing happens that could bring them, however busy the machine is. In a process that is busy with other
things this is never so, and there the setting OPENNKI_MEETING_SECONDS ends the wait. It does so too where another process has not begun
the program.

Source: proc(5), /proc/[pid]/stat; elsewhere than on Linux only the setting counts.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Protocol

from opennki import background, settings

INTERVAL = 0.1  # seconds between two looks
LOOKS = 6  # in a row at which nothing happens
LITTLE = 0.002  # seconds of a processor that threads take which only see whether there is something to do
_FRAMEWORKS = ("jax", "torch", "opennki")


class Watched(Protocol):
    """What waits."""

    since: float

    def nobody_comes(self, why: str = "") -> None:
        """Those that are missing will not come; `why` where that is not certain."""


class Watch:
    """The thread that looks, while there is something to look after."""

    def __init__(self) -> None:
        self._reset()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self.lock = threading.Lock()
        self.waiting: dict[int, Watched] = {}
        self.running = False

    def add(self, one: Watched) -> None:
        """Look after something that waits."""
        with self.lock:
            self.waiting[id(one)] = one
            if not self.running:
                self.running = True
                background.start(self._look, name="opennki-watch")

    def remove(self, one: Watched) -> None:
        """It waits no more."""
        with self.lock:
            self.waiting.pop(id(one), None)

    def _look(self) -> None:
        quiet, used = 0, _used()
        while True:
            time.sleep(INTERVAL)
            with self.lock:
                waiting = list(self.waiting.values())
                if not waiting:
                    self.running = False
                    return
            now, before, used = time.monotonic(), used, _used()
            quiet = quiet + 1 if used - before < LITTLE and nothing_happens() else 0
            limit = settings.current().meeting_seconds
            for one in waiting:
                if quiet >= LOOKS and now - one.since >= INTERVAL * LOOKS:
                    one.nobody_comes()
                elif now - one.since >= limit:
                    one.nobody_comes(f"nothing has come for {limit:g} s (OPENNKI_MEETING_SECONDS)")


def _used() -> float:
    """Seconds of a processor that the other threads of the process have used."""
    return time.process_time() - time.thread_time()


def nothing_happens() -> bool:
    """No thread but this one runs, waits for a processor or a disk, or is a framework's that has called into Python."""
    if _callbacks():
        return False
    me = str(threading.get_native_id())
    try:
        for thread in os.listdir("/proc/self/task"):
            if thread != me and _state(thread) in "RD":
                return False
    except FileNotFoundError:
        return False  # another system
    return True


def _callbacks() -> bool:
    """Whether a thread that Python did not start is in a callback: its first frame is one of the framework's."""
    started = {t.ident for t in threading.enumerate() if not isinstance(t, threading._DummyThread)}
    homes = tuple(os.path.dirname(file) + os.sep for name in _FRAMEWORKS if (file := getattr(sys.modules.get(name), "__file__", None)))
    for ident, frame in sys._current_frames().items():
        if ident not in started:
            while frame.f_back is not None:
                frame = frame.f_back
            if frame.f_code.co_filename.startswith(homes):
                return True
    return False


def _state(thread: str) -> str:
    try:
        with open(f"/proc/self/task/{thread}/stat", "rb") as file:
            return chr(file.read().rpartition(b")")[2].split()[0][0])
    except (OSError, IndexError):
        return "X"  # it has ended


watch = Watch()
"""That of this process."""
