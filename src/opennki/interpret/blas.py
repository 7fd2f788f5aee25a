"""One BLAS thread inside tiles: a matrix product of 128 x 128 x 512 is too small for a thread pool, whose spinning threads then take the
cores from everybody else."""
from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from functools import cache
from types import TracebackType
from typing import Any

from threadpoolctl import ThreadpoolController


@cache
def _libraries() -> tuple[Any, ...]:
    # finding the libraries takes milliseconds, so it is done once; NumPy's BLAS is loaded by then
    return tuple(ThreadpoolController().select(user_api="blas").lib_controllers)


class _OneThread:
    """The limit while at least one `with` block is open, in any thread: the number of threads is that of the whole process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.depth = 0
        self.before: list[tuple[Any, int]] = []

    def __enter__(self) -> None:
        with self.lock:
            self.depth += 1
            if self.depth == 1:
                self.before = [(lib, n) for lib in _libraries() if (n := lib.get_num_threads()) not in (1, None)]
                for lib, _ in self.before:
                    lib.set_num_threads(1)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self.lock:
            self.depth -= 1
            if not self.depth:
                for lib, n in self.before:
                    lib.set_num_threads(n)


_limit = _OneThread()


def one_thread() -> AbstractContextManager[Any]:
    """Limit BLAS to one thread in a `with` block; blocks may nest and overlap. Some microseconds."""
    return _limit
