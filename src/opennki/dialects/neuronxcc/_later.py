"""Documented functions that do not exist yet: importable, and clear when they are called."""

from __future__ import annotations

from typing import Any

from opennki.errors import NkiNotYet


def later(module: str, name: str, doc: str) -> Any:
    """A function that raises NkiNotYet."""

    def function(*args: Any, **kwargs: Any) -> Any:
        raise NkiNotYet(f"{module}.{name}")

    function.__name__ = function.__qualname__ = name
    function.__module__ = module
    function.__doc__ = f"{doc} Not in opennki yet: calling it raises NkiNotYet."
    return function
