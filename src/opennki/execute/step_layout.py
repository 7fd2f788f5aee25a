"""Steps laid out in memory for C."""

from __future__ import annotations

import ctypes as C
from dataclasses import dataclass
from typing import Any

from opennki.execute import abi
from opennki.execute import abi_steps as S
from opennki.execute.calls import product_scratch
from opennki.execute.shapes import Axes

ALIGN = 64


@dataclass
class Made:
    """A step before it is laid out. axes: what narrows each dimension of the kernel."""

    kind: int
    what: Any
    operands: list[tuple[int, int]]
    extent: tuple[int, ...]
    axes: Axes
    preds: list[int]
    indices: list[int]
    error: int = 0
    again: int = 0


class What:
    """The descriptor of a call of steps (`structure`), with everything that it points at."""

    def __init__(self, steps: list[Made], rows: int, rank: int, constants: bytes, room: int) -> None:
        keep: list[Any] = []
        self.made_of = rows, rank, constants, room

        def array(kind: Any, items: list[Any]) -> Any:
            made = (kind * max(1, len(items)))(*items)
            keep.append(made)
            return made

        laid = []
        for m in steps:
            keep.append(m.what)
            what = C.addressof(getattr(m.what, "structure", m.what))
            extent = (C.c_int64 * abi.RANK)(*m.extent)
            axis = (C.c_int32 * abi.RANK)(*m.axes)  # type: ignore[misc]
            operands = array(S.Operand, [(which, 0, offset) for which, offset in m.operands])
            laid.append(S.Step(m.kind, len(m.extent), what, extent, axis, len(m.operands), len(m.preds), len(m.indices), m.again, m.error,
                               operands, array(C.c_int32, m.preds), array(C.c_int32, m.indices)))  # fmt: skip
        products = max([product_scratch(m.what) for m in steps if m.kind in (abi.K_MM, S.S_ROUTE)], default=0)
        blob = C.create_string_buffer(constants, len(constants) + ALIGN)
        first = -C.addressof(blob) % ALIGN
        C.memmove(C.addressof(blob) + first, constants, len(constants))
        room = -(-room // ALIGN) * ALIGN
        self.steps, self.scratch = steps, room + products
        self.structure = S.Steps(len(laid), rank, rows, array(S.Step, laid), C.addressof(blob) + first, room)
        self._keep = [*keep, blob]
