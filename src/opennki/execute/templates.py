"""What lowering has found out about forms, for the kernels that come later in the process.

A form is what an instruction is but for where its operands are (`execute.sites`), and nothing that becomes of it depends on the kernel that
it is in: tiles have few shapes, so kernels share forms. A table has the forms, and the tree of the lines of them (`execute.lines`), with
what came out. One lowering has it at a time; another one meanwhile begins with an empty table. What a lowering makes does not depend on
what was in its table.
"""

from __future__ import annotations

from typing import Any

from opennki.execute.sites import Form, Tile

MOST = 1 << 13  # forms, and nodes of the tree, above which a table is not kept
ASIS = object()  # in the place of a template: lines of this form are lowered one by one


class Node:
    """Where a line is in the tree: what comes next by form and relations, and what came out by the results that are needed: a template,
    and the number of the last lowering that met it. `joins`: whether an instruction may be here at all; `met`: as for templates."""

    __slots__ = ("joins", "made", "met", "next")

    def __init__(self, joins: bool, met: int) -> None:
        self.joins, self.met = joins, met
        self.next: dict[Any, Node] = {}
        self.made: dict[Any, tuple[Any, int]] = {}


class Table:
    """Forms and lines by what makes them equal. level: the level of CPU that they are lowered for."""

    def __init__(self, level: str) -> None:
        self.level = level
        self.tiles: dict[Any, Tile] = {}
        self.kinds: dict[Any, int] = {}
        self.names: dict[Any, int] = {}  # of what places have besides where they begin
        self.forms: dict[Any, Form | None] = {}
        self.plain: dict[str, bool] = {}
        self.root = Node(True, 0)
        self.nodes = 0
        self.turn = 0  # number of the lowering that has it


_idle: list[Table] = []


def take(level: str) -> Table:
    """The table, for a lowering: nobody else has it until it is given back."""
    try:
        table = _idle.pop()  # atomic, so no lock
    except IndexError:
        table = Table(level)
    if table.level != level:
        table = Table(level)
    table.turn += 1
    return table


def give_back(table: Table) -> None:
    """The end of a lowering that went well."""
    if len(table.forms) + table.nodes <= MOST and not _idle:
        _idle.append(table)


def forget() -> None:
    """Let the next lowering begin with an empty table."""
    _idle.clear()
