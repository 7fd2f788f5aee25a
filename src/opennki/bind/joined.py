"""Gatherings whose ranks are in several processes of a framework's program.

A gathering has the same key in all of them. Which process runs which ranks is part of its number on the wire, so that a process that hears
of a gathering before its own ranks come to it can take part in it: it says whether any of them can still come.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from opennki.bind.gathering import Gathering, Key, gatherings
from opennki.ranks.hub import Hub
from opennki.ranks.remote import Run

MOST_RANKS = 65536

Owners = Sequence[Sequence[int]]  # (process, how many ranks it runs), in the order of the ranks


class Joined:
    """The gatherings of one hub."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        hub.opened = self._opened

    def enter(self, run: Any, site: Any, rank: int, owners: Owners) -> Gathering:
        """The gathering that a rank's call belongs to; `run` and `site` are numbers or words that all processes give alike."""
        table = _table(owners)
        local = frozenset(r for r, process in enumerate(table) if process == self.hub.process)
        return gatherings.enter(run, site, rank, len(table), local, self._link(owners, table))

    def _link(self, owners: Owners, table: list[int]) -> Callable[[Gathering], Run]:
        def link(gathering: Gathering) -> Run:
            number = json.dumps([*gathering.key, [list(pair) for pair in owners]])
            members = sorted(set(table))
            place = {process: i for i, process in enumerate(members)}
            line = self.hub.line(number, members)
            gathering.hang_up = line.close
            return Run(line, lambda rank: place[table[rank]], len(table), number)

        return link

    def _opened(self, number: str) -> None:
        """Another process is in a gathering that this one has not come to."""
        try:
            run, site, occurrence, owners = json.loads(number)
            table = _table(owners)
        except (ValueError, TypeError):
            return
        local = frozenset(r for r, process in enumerate(table) if process == self.hub.process)
        key: Key = (run, site, occurrence)
        if not local or not all(isinstance(part, (int, str)) for part in key):
            return
        with gatherings.lock:
            if key in gatherings.by_key:
                return
            made = gatherings.open(key, len(table), local, self._link(owners, table))
        made.look()


def _table(owners: Owners) -> list[int]:
    """The process of each rank. Raises ValueError for what says no such."""
    table: list[int] = []
    for process, count in owners:
        if not isinstance(process, int) or not isinstance(count, int) or not 0 < count <= MOST_RANKS - len(table):
            raise ValueError("ranks of processes")
        table += [process] * count
    return table
