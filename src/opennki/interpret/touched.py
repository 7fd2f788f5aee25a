"""Which iteration of a loop touched each element, where independence is not proven (see `trace.independence`; for programs, `races`)."""
from __future__ import annotations

from typing import Any

import numpy as np

from opennki.interpret.views import View

Array = np.ndarray


def _table(machine: Any, view: View, table: Array, part: Any) -> tuple[Array, Any]:
    """(entries of a part of a tile, their places where the part has runtime indices) in a table with one entry per element."""
    if view.dynamic is not None:
        where = view.dynamic.flat(machine, *part)[0]
        return table[where], where
    return view.element_view(table, machine, *part), None


def wrote(machine: Any, view: View, slot: int, suspect: Any, part: Any, keep: Array | None) -> None:
    """Record which iteration wrote each element; report when another one wrote or read it before."""
    writers, readers = machine.owners_of(view, slot, suspect.var)
    me = machine.env[slot] + 1
    before, where = _table(machine, view, writers, part)
    seen, _ = _table(machine, view, readers, part)
    clash = (seen != 0) & (seen != me)
    if suspect.mode == "write":
        clash |= (before != 0) & (before != me)
    if keep is not None:
        clash = clash & keep
    if clash.any():
        machine.report(suspect.kind, machine.tape.dependency(suspect))
    if where is not None:
        writers[where] = me
    elif keep is None:
        before[...] = me
    else:
        before[keep] = me


def read(machine: Any, view: View, slot: int, suspect: Any, part: Any, keep: Array | None) -> None:
    """Record which iteration read each element; report when another one wrote it before."""
    writers, readers = machine.owners_of(view, slot, suspect.var)
    me = machine.env[slot] + 1
    written, _ = _table(machine, view, writers, part)
    before, where = _table(machine, view, readers, part)
    clash = (written != 0) & (written != me)
    if keep is not None and keep.shape == clash.shape:
        clash = clash & keep
    if clash.any():
        machine.report(suspect.kind, machine.tape.dependency(suspect))
    after = np.where((before == 0) | (before == me), me, -1)
    if where is not None:
        readers[where] = after
    elif keep is None or keep.shape != clash.shape:
        before[...] = after
    else:
        before[keep] = after[keep]
