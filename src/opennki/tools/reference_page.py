"""The instruction reference as one Markdown page: `opennki ops --markdown > docs/instructions.md`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from rich.table import Table

from opennki.isa.declare import ISA, Instruction
from opennki.isa.scalar import SCALAR
from opennki.tools import reference

HEAD = """\
# Instructions

Generated from the declarations in `src/opennki/isa/` by `opennki ops --markdown`; a test holds it current.
Costs are cycles of the engine: `d` are the dimensions of the call, `hw` is the target. `opennki ops NAME` shows one
instruction, `opennki ops --scalar` the scalar functions.
"""


def page() -> str:
    """The whole page: a section for each surface, an entry for each instruction, the table of scalar functions."""
    parts = [HEAD]
    for surface, home in reference.HOMES.items():
        found = sorted((d for d in ISA.values() if d.surface == surface), key=lambda d: d.name)
        if found:
            parts.append(f"## {home}\n")
            parts += [entry(decl, home) for decl in found]
    parts.append(f"## Scalar functions\n\n{len(SCALAR)} operators and activation functions.\n")
    parts.append(markdown(reference.scalar_table()))
    return "\n".join(parts)


def entry(decl: Instruction, home: str) -> str:
    """Signature, documentation, operands, limits, cost and source of an instruction."""
    name = decl.name if home == "internal" else f"{home}.{decl.name}"
    facts = [f"* engines: {', '.join(decl.engines)}" + (" (chosen by the operands)" if decl.choose_engine else ""),
             f"* results: {reference.results(decl)}", f"* source: {decl.source}"]
    if decl.min_generation > 2:
        facts.append(f"* needs gen{decl.min_generation} or later")
    if decl.suspends:
        facts.append("* waits for other programs")
    parts = [f"### {decl.name}\n", _code(f"{name}{reference.public_signature(decl)}"), _prose(inspect.cleandoc(decl.doc)) + "\n",
             "\n".join(facts) + "\n", markdown(reference.operands(decl))]
    if decl.limits:
        parts.append(markdown(reference.limits(decl)))
    parts.append("Cost:\n\n" + _code(reference.source_of(decl.cost)))
    return "\n".join(parts)


def markdown(table: Table) -> str:
    """A table of the reference as a Markdown table."""
    columns = [[str(c.header), *map(str, c.cells)] for c in table.columns]
    rows = [[_prose(cell).replace("\n", " ").replace("|", "\\|") for cell in row] for row in zip(*columns, strict=True)]
    return "\n".join(_lines(rows)) + "\n"


def _lines(rows: list[list[str]]) -> Iterator[str]:
    for number, row in enumerate(rows):
        yield f"| {' | '.join(row)} |"
        if number == 0:
            yield "|" + "---|" * len(row)


def _prose(text: str) -> str:
    return text.replace("*", "\\*")


def _code(text: str) -> str:
    return f"```text\n{text}\n```\n"
