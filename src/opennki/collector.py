"""The cyclic garbage collector, put off while many objects are made that all stay."""

from __future__ import annotations

import gc
import threading
from contextlib import ContextDecorator
from typing import Any

_lock = threading.Lock()
_users = 0
_was_on = False
_kept = 0  # objects that were made old without having been looked at

MOST = 4_000_000  # of them


class collection_put_off(ContextDecorator):
    """No cyclic collection meanwhile, in any thread: tracing and planning make a graph of objects, over which the collector would go again
    and again. Where it was off before, it stays off. What was made counts as old afterwards, so that it is not looked at just then, up to
    `MOST` objects."""
    __slots__ = ()

    def __enter__(self) -> None:
        global _users, _was_on
        with _lock:
            if not _users:
                _was_on = gc.isenabled()
                gc.disable()
            _users += 1

    def __exit__(self, *raised: Any) -> None:
        global _users, _kept
        with _lock:
            _users -= 1
            if not _users and _was_on:
                young = gc.get_count()[0]
                if _kept + young > MOST:
                    _kept = 0
                elif not gc.get_freeze_count():  # else the program keeps objects apart itself
                    _kept += young
                    gc.freeze()
                    gc.unfreeze()
                gc.enable()
