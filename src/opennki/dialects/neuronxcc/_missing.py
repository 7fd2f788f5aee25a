"""What a dialect module says about a name that it does not have."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any

from opennki.errors import NkiNotYet

# attributes that Python, notebooks and test runners look for on every module
_PROBES = ("__", "_repr_", "_ipython_", "_pytest", "pytest")


class MissingName(NkiNotYet, AttributeError):
    """A documented name that opennki does not have; an AttributeError, so that hasattr answers.

    `known` are the names that the module has: one that is close is offered, as the name may be misspelt.
    """

    def __init__(self, module: str, name: str, known: list[str]) -> None:
        super().__init__(f"{module}.{name}")
        close = get_close_matches(name, known, 3, 0.75)
        if close:
            self.fix = f"did you mean {' or '.join(close)}? Otherwise {self.fix}"


def missing(module: str, known: Iterable[str] | None = None) -> Callable[[str], Any]:
    """A module's `__getattr__`: MissingName for a name that the vendor's module may have, AttributeError
    for Python's own probes. `known` are the names that it has, by default those of the caller's module.
    """
    names = sys._getframe(1).f_globals if known is None else known

    def __getattr__(name: str) -> Any:
        if name.startswith(_PROBES):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        raise MissingName(module, name, [n for n in names if not n.startswith("_")])

    return __getattr__
