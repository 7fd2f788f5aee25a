"""What a dialect module says about a name that it does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opennki.errors import NkiNotYet

# attributes that Python, notebooks and test runners look for on every module
_PROBES = ("__", "_repr_", "_ipython_", "_pytest", "pytest")


class MissingName(NkiNotYet, AttributeError):
    """A documented name that opennki does not have; an AttributeError, so that hasattr answers."""


def missing(module: str) -> Callable[[str], Any]:
    """A module's `__getattr__`: MissingName for a name that the vendor's module may have, AttributeError
    for Python's own probes.
    """

    def __getattr__(name: str) -> Any:
        if name.startswith(_PROBES):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        raise MissingName(f"{module}.{name}")

    return __getattr__
