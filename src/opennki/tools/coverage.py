"""How much of each instruction the native executor has: every example of every declaration is lowered, and what is not native is said."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table
from rich.text import Text

from opennki.execute.examples import Example, examples
from opennki.execute.executor import coverage, executor_of
from opennki.interpret.checks import Checks, tape_of
from opennki.isa.declare import ISA
from opennki.tools.reference import HOMES, grid


@dataclass
class Coverage:
    """One instruction: the number of its examples, of those that are native, and for the others (reason, number, one of them)."""

    name: str
    surface: str
    examples: int = 0
    native: int = 0
    why: list[tuple[str, int, str]] = field(default_factory=list)


def lowered(example: Example) -> list[str]:
    """Why an example is not native; empty where it is."""
    found = executor_of(tape_of(example.kernel, Checks.of("off")))
    if found is None:
        return ["the whole kernel is interpreted"]
    return sorted({reason for reasons in coverage(found)["why"].values() for reason in reasons})


def of(op: str) -> Coverage:
    """The coverage of an instruction."""
    made = Coverage(op, ISA[op].surface)
    why: Counter[str] = Counter()
    first: dict[str, str] = {}
    for example in examples(op):
        made.examples += 1
        reasons = lowered(example)
        made.native += not reasons
        for reason in reasons:
            why[reason] += 1
            first.setdefault(reason, example.what)
    made.why = [(reason, count, first[reason]) for reason, count in why.most_common()]
    return made


def rows(surface: str = "all") -> list[Coverage]:
    """The coverage of all instructions of a surface."""
    return [of(d.name) for d in sorted(ISA.values(), key=lambda d: (d.surface, d.name)) if surface in ("all", d.surface)]


def document(found: list[Coverage]) -> dict[str, Any]:
    """The same as JSON."""
    return {
        "instructions": [
            {**asdict(row), "why": [{"reason": r, "examples": n, "first": what} for r, n, what in row.why]} for row in found
        ],
        "examples": sum(row.examples for row in found),
        "native": sum(row.native for row in found),
    }


def table(found: list[Coverage]) -> Table:
    """The same for people."""
    native, total = sum(row.native for row in found), sum(row.examples for row in found)
    made = grid("name", "home", "native", "why not (examples; the first of them)", title=f"native: {native} of {total} examples")
    for row in found:
        why = "; ".join(f"{reason} ({count}; {what})" for reason, count, what in row.why)
        share = f"{row.native} of {row.examples}" if row.examples else "no call is accepted"
        made.add_row(Text(row.name), HOMES[row.surface], share, Text(why))
    return made
