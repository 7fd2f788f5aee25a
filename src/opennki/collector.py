"""The cyclic garbage collector, put off while many objects are made that all stay."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_users = 0
_was_on = False
_kept = 0  # objects that were made since the last collection of all

MOST = 2_000_000  # of them


@contextmanager
def collection_put_off() -> Iterator[None]:
    """No cyclic collection meanwhile, in any thread: tracing and planning make a graph of objects, over which the collector would go again
    and again. Where it was off before, it stays off. What was made is old afterwards, so that it is not looked at just then; after
    `MOST` objects all are."""
    global _users, _was_on, _kept
    with _lock:
        if not _users:
            _was_on = gc.isenabled()
            gc.disable()
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users and _was_on:
                if not gc.get_freeze_count():  # else the program keeps objects apart itself
                    _kept += gc.get_count()[0]
                    gc.freeze()
                    gc.unfreeze()
                gc.enable()
                if _kept > MOST:
                    _kept = 0
                    gc.collect()
