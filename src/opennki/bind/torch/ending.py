"""The end of the process while other threads call kernels.

A daemon thread that comes back from torch's C++ code while Python ends aborts the process; a loop of torch.add in such a thread does
that too. So calls of kernels are waited for at the end, and later ones of other threads stop where they begin.
"""

from __future__ import annotations

import atexit
import threading
import time

PATIENCE = 5.0  # seconds that calls get to end
SETTLED = 20  # looks in a row that find no call: one that has just ended is still on its way out of torch, or into its last wait

_inside: list[None] = []  # an element for each call; list operations are atomic
_over = False


def enter() -> None:
    """A call begins."""
    _inside.append(None)
    if _over and threading.current_thread() is not threading.main_thread():
        _inside.pop()
        threading.Event().wait()  # never set: the thread ends with the process


def leave() -> None:
    """A call has ended."""
    _inside.pop()


@atexit.register
def _wait() -> None:
    global _over
    _over = True
    until = time.monotonic() + PATIENCE
    quiet = 0
    while threading.active_count() > 1 and quiet < SETTLED and time.monotonic() < until:
        time.sleep(0.001)  # the others run meanwhile
        quiet = 0 if _inside else quiet + 1
