"""The bytecode around a running call: how its result is used decides a few things that Python does not tell a function."""
from __future__ import annotations

import dis
from functools import lru_cache
from types import CodeType

_NOISE = frozenset({"CACHE", "EXTENDED_ARG"})


@lru_cache(maxsize=4096)
def instructions(code: CodeType) -> tuple[dis.Instruction, ...]:
    """The instructions of a code object, without caches and argument prefixes."""
    return tuple([ins for ins in dis.get_instructions(code) if ins.opname not in _NOISE])


@lru_cache(maxsize=4096)
def positions(code: CodeType) -> dict[int, int]:
    """Index into `instructions` by offset."""
    return {ins.offset: i for i, ins in enumerate(instructions(code))}


def following(code: CodeType, offset: int, skip: frozenset[str] = frozenset()) -> dis.Instruction | None:
    """The first instruction after an offset that is not one of `skip`."""
    found = instructions(code)
    index = positions(code).get(offset)
    start = index + 1 if index is not None else next((i for i, ins in enumerate(found) if ins.offset > offset), len(found))
    return next((ins for ins in found[start:] if ins.opname not in skip), None)
