"""SIGTERM while this process waits for ranks of others.

What starts the processes of a run, as torchrun does, ends all of them by SIGTERM as soon as one has failed. At that time the others are
about to hear why, and to say so. So during a run, and for a moment after one that has failed, SIGTERM is put off by GRACE_SECONDS, in which
the process may end by itself; then it has its usual effect. A handler of the program's own is left alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

GRACE_SECONDS = 2.0


class _PutOff:
    """Whether SIGTERM is put off. `turn` counts runs: what has been planned after one does not end another."""

    def __init__(self) -> None:
        self.turn = 0
        self.asked = False

    def begin(self) -> bool:
        """Put it off from here on; False where this is not possible, or not ours to do."""
        if os.name != "posix" or threading.current_thread() is not threading.main_thread():
            return False
        if signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, self._on):
            return False
        self.turn += 1
        signal.signal(signal.SIGTERM, self._on)
        return True

    def end(self) -> None:
        """It has its effect again, also where it has come meanwhile."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self.asked:
            os.kill(os.getpid(), signal.SIGTERM)

    def end_soon(self) -> None:
        """The same, when what has failed had time to be reported."""
        self._later(self.turn, False)

    def _on(self, number: int, frame: Any) -> None:
        if not self.asked:
            self.asked = True
            self._later(self.turn, True)

    def _later(self, turn: int, ask: bool) -> None:
        def wait() -> None:
            time.sleep(GRACE_SECONDS)
            if ask or turn == self.turn:
                _default()
            if ask:
                os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=wait, name="opennki-terminate", daemon=True).start()


def _default() -> None:
    """Let SIGTERM end the process, from any thread: Python's own function is for the main one, which may be in foreign code."""
    function = ctypes.CDLL(None).signal
    function.argtypes, function.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    function(int(signal.SIGTERM), None)


_process = _PutOff()


@contextlib.contextmanager
def reports_first() -> Iterator[None]:
    """Put SIGTERM off while the block runs."""
    if not _process.begin():
        yield
        return
    try:
        yield
    except BaseException:
        _process.end_soon()
        raise
    _process.end()
