"""Programs of jax.distributed: ranks whose devices belong to several processes.

The processes find each other by the key-value store of the coordinator. A run has the same number in all of them, as JAX gives it by the
program and how often that was launched. Source: jax.distributed; XLA's RunId.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import jax

from opennki import settings
from opennki.bind.gathering import Gathering
from opennki.bind.jax import compat
from opennki.bind.joined import Joined
from opennki.errors import UNKNOWN, NkiError, NkiValueError
from opennki.ranks.hub import Hub, place_towards

WAIT_MS = 50  # of a question to the store


class CoordinatorStore:
    """The key-value store of jax.distributed (`ranks.hub.Store`)."""

    def __init__(self, client: Any) -> None:
        self.client = client

    def put(self, key: str, text: str) -> None:
        """Set a key."""
        self.client.key_value_set(key, text)

    def get(self, key: str) -> str | None:
        """The text of a key, if it is set."""
        try:
            return str(self.client.blocking_key_value_get(key, WAIT_MS))
        except Exception as exc:  # its own type of error is not public
            if "DEADLINE_EXCEEDED" in str(exc) or "NOT_FOUND" in str(exc):
                return None
            raise


class Sites:
    """Which call of the program is under way under a number: two at once would be mixed up."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.at: dict[Any, tuple[int, int]] = {}

    def enter(self, key: Any, site: int, name: str) -> Callable[[], None]:
        """A rank has come to a call. Returns what is called when that has ended. Errors: NkiValueError."""
        with self.lock:
            there, count = self.at.get(key, (site, 0))
            if there != site:
                raise NkiValueError(
                    f"{name} is called at two places that are one function of the program, and both calls are under way", loc=UNKNOWN,
                    rule="in a program of several processes, calls that may run at once have numbers of their own",
                    why="the processes would not know which of them meets which",
                    fix="call it directly, not in an inner function of jax.jit that is called twice, or let one call depend on the other",
                )
            self.at[key] = site, count + 1

        def leave() -> None:
            with self.lock:
                there, count = self.at[key]
                if count == 1:
                    del self.at[key]
                else:
                    self.at[key] = there, count - 1

        return leave


sites = Sites()


@cache
def joined() -> Joined:
    """This process among the others. Errors: NkiError where jax.distributed was not initialised."""
    found = compat.coordinator()
    if found is None:
        raise NkiError("jax.distributed has no store", loc=UNKNOWN, rule="processes are introduced to each other by its coordinator",
                       fix="call jax.distributed.initialize first")  # fmt: skip
    client, address = found
    host = place_towards(address.rpartition(":")[0].strip("[]") or "localhost")
    return Joined(Hub(jax.process_index(), CoordinatorStore(client), host, float(settings.current().meeting_seconds)))


def enter(run: int, rank: int, words: list[int]) -> Gathering:
    """The gathering of a rank; `words` as `compat.rank_words` has them after the number of ranks."""
    pairs = words[1:]
    owners = [(pairs[i], pairs[i + 1]) for i in range(0, len(pairs), 2)]
    return joined().enter(run, words[0], rank, owners)
