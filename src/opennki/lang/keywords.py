"""Keywords that vendor kernels pass through **kwargs."""

from __future__ import annotations

from typing import Any

from opennki.errors import NkiTypeError

# accepted, and without influence on what is computed: names, scheduling and layout hints
HINTS = frozenset(
    {
        "name",
        "lazy_initialization",
        "max_free_vec_size",
        "no_reorder",
        "loc",
        "dge_mode",
        "perf_mode",
        "lowering",
        "nki_name",
        "buffer",
        "precise_schedule",
        "engine",
    }
)


def check_extra(api: str, kwargs: dict[str, Any]) -> None:
    """Raise for a keyword that is neither documented nor a hint."""
    for name in kwargs:
        if name not in HINTS:
            raise NkiTypeError(
                f"{api} has no argument {name!r}",
                rule="arguments are those of the documented signature",
                fix=f"see help({api})",
            )
