"""Which iteration of a loop touched each element, where independence is not proven (see `trace.independence`; for programs, `races`)."""
from __future__ import annotations

from typing import Any

import numpy as np

from opennki.interpret.views import View

Array = np.ndarray


def _table(machine: Any, view: View, table: Array, part: Any) -> tuple[Array, Any, Any]:
    """(entries of a part of a tile, their places where the part has runtime indices, truth of the rows that are not left out) in a table
    with one entry per element."""
    if view.dynamic is not None:
        where, inside = view.dynamic.flat(machine, *part)
        return table[where], where, inside
    return view.element_view(table, machine, *part), None, None


def _kept(keep: Array | None, inside: Array | None) -> Array | None:
    return keep if inside is None else inside if keep is None else keep & inside


def wrote(machine: Any, view: View, slot: int, suspect: Any, part: Any, keep: Array | None) -> None:
    """Record which iteration wrote each element; report when another one wrote or read it before."""
    writers, readers = machine.owners_of(view, slot, suspect.var)
    me = machine.env[slot] + 1
    before, where, inside = _table(machine, view, writers, part)
    seen = _table(machine, view, readers, part)[0]
    keep = _kept(keep, inside)
    clash = (seen != 0) & (seen != me)
    if suspect.mode == "write":
        clash |= (before != 0) & (before != me)
    if keep is not None:
        clash = clash & keep
    if clash.any():
        machine.report(suspect.kind, machine.tape.dependency(suspect))
    if where is not None:
        writers[where if keep is None else where[keep]] = me
    elif keep is None:
        before[...] = me
    else:
        before[keep] = me


def read(machine: Any, view: View, slot: int, suspect: Any, part: Any, keep: Array | None) -> None:
    """Record which iteration read each element; report when another one wrote it before."""
    writers, readers = machine.owners_of(view, slot, suspect.var)
    me = machine.env[slot] + 1
    written = _table(machine, view, writers, part)[0]
    before, where, inside = _table(machine, view, readers, part)
    clash = (written != 0) & (written != me)
    keep = _kept(keep if keep is not None and keep.shape == clash.shape else None, inside)
    if keep is not None:
        clash = clash & keep
    if clash.any():
        machine.report(suspect.kind, machine.tape.dependency(suspect))
    after = np.where((before == 0) | (before == me), me, -1)
    if where is not None:
        readers[where if keep is None else where[keep]] = after if keep is None else after[keep]
    elif keep is None:
        before[...] = after
    else:
        before[keep] = after[keep]
