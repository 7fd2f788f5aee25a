"""One BLAS thread inside tiles: a matrix product of 128 x 128 x 512 is too small for a thread pool, whose spinning threads then take the
cores from everybody else."""
from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Any

from threadpoolctl import ThreadpoolController


@cache
def _controller() -> Any:
    # finding the libraries takes milliseconds, so it is done once; NumPy's BLAS is loaded by then
    return ThreadpoolController().select(user_api="blas")


def one_thread() -> AbstractContextManager[Any]:
    """Limit BLAS to one thread in a `with` block."""
    return _controller().limit(limits=1)  # type: ignore[no-any-return]
