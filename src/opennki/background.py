"""Threads that start at any time, also while the interpreter ends.

A framework's program may still call kernels when Python has begun to end: its last results are waited for there. From then on Python 3.12
and later start no thread (`RuntimeError: can't create new thread at interpreter shutdown`), and a rank whose thread does not start would
leave the others waiting for ever. The system still starts threads, and they may run Python until the exit functions are done.
"""

from __future__ import annotations

import contextlib
import ctypes as C
import threading
from collections.abc import Callable
from typing import Any, Protocol

_ENTRY = C.CFUNCTYPE(C.c_void_p, C.c_void_p)
_entries: list[Any] = []  # a thread returns through its entry: they stay until the process has ended, which is near


class Started(Protocol):
    """A thread that runs."""

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, or for so many seconds."""


class _Late:
    """A thread of the system that runs Python code."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.over = threading.Event()

        def enter(_: Any) -> None:
            try:
                work()
            finally:
                self.over.set()

        entry, thread, system = _ENTRY(enter), C.c_ulong(), C.CDLL(None)
        _entries.append(entry)
        if system.pthread_create(C.byref(thread), None, entry, None):
            raise RuntimeError("the system starts no thread")
        system.pthread_detach(thread)

    def join(self, timeout: float | None = None) -> None:
        self.over.wait(timeout)


def start(work: Callable[..., None], *args: Any, name: str) -> Started:
    """Run work(*args) on a thread of its own, for whose end the process does not wait."""
    thread = threading.Thread(target=work, args=args, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        with contextlib.suppress(OSError, AttributeError):  # no such function on this system
            return _Late(lambda: work(*args))
        raise error from None
    return thread
