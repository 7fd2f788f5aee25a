"""The processes of torch.distributed, introduced to each other by its store of keys, whatever its backend and whoever started it."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch.distributed as dist

from opennki import settings
from opennki.errors import UNKNOWN, NkiError
from opennki.ranks.hub import Hub, place_towards


class TorchStore:
    """The store of the default process group (`ranks.hub.Store`)."""

    def __init__(self) -> None:
        try:
            self.store: Any = dist.distributed_c10d._get_default_store()
        except (AttributeError, RuntimeError, ValueError) as exc:
            raise NkiError(f"torch.distributed has no store: {exc}", loc=UNKNOWN, rule="its processes are introduced to each other by it",
                           fix="call torch.distributed.init_process_group first") from None  # fmt: skip

    def host(self) -> str:
        """The machine that has the store, where it is a server."""
        store = self.store
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        return str(getattr(store, "host", "localhost"))

    def put(self, key: str, text: str) -> None:
        """Set a key."""
        self.store.set(key, text)

    def get(self, key: str) -> str | None:
        """The text of a key, if it is set."""
        return self.store.get(key).decode() if self.store.check([key]) else None


@cache
def hub() -> Hub:
    """This process among those of the default process group."""
    store = TorchStore()
    return Hub(dist.get_rank(), store, place_towards(store.host()), float(settings.current().meeting_seconds))
