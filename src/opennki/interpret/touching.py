"""Who touched each place of memory, and when: the shadow of a run of concurrent streams."""
from __future__ import annotations

from typing import Any

import numpy as np

from opennki.errors import Loc
from opennki.interpret.steps import Plan
from opennki.interpret.views import View, value_of

Array = np.ndarray


class Touch:
    """An access as the shadow sees it: all elements of a tile, masks left aside."""

    __slots__ = ("offsets", "view", "writes")

    def __init__(self, view: View, writes: bool) -> None:
        self.view, self.writes = view, writes
        self.offsets: Array | None = None

    def units(self, machine: Any, grain: int, size: int) -> Array:
        """The grains of memory that the access reaches now."""
        view = self.view
        if view.dynamic is not None:
            skip, view.dynamic.skip = view.dynamic.skip, True
            first = view.dynamic.flat(machine, (0,) * len(view.shape), view.shape)[0].reshape(-1).astype(np.int64) * view.itemsize
            view.dynamic.skip = skip
        else:
            if self.offsets is None:
                total = np.zeros(view.shape, np.int64)
                for axis, stride in enumerate(view.strides):
                    if stride:
                        total += (stride * np.arange(view.shape[axis])).reshape([-1 if k == axis else 1 for k in range(total.ndim)])
                self.offsets = np.unique(total)
            first = self.offsets + value_of(view.base, machine.env)
        first = first[(first >= 0) & (first + view.itemsize <= size)]
        if view.itemsize == grain:
            return first // grain
        return (first[:, None] + np.arange(0, view.itemsize, grain)).reshape(-1) // grain


def touches_of(plan: Plan) -> list[Touch]:
    """The accesses of an instruction: index tiles, what it reads, then what it writes."""
    out = []
    for operand in plan.inputs:
        out += _indices(operand.view)
        if operand.reads:
            out.append(Touch(operand.view, False))
    for view, _, _ in plan.outputs:
        out += _indices(view)
        out.append(Touch(view, True))
    return out


def _indices(view: View) -> list[Touch]:
    return [Touch(t, False) for t in view.dynamic.tiles if t is not None] if view.dynamic is not None else []


class Memory:
    """For each grain of each buffer: stream, time and place of the last write, and of the last read of each stream."""

    def __init__(self, buffers: list[Any], touches: list[Touch], streams: int) -> None:
        self.sizes = [0 if b is None else b.nbytes for b in buffers]
        self.grain = [8] * len(buffers)
        for t in touches:
            base = t.view.base if isinstance(t.view.base, int) else 0
            grain = int(np.gcd.reduce([8, t.view.itemsize, base, *t.view.strides]))
            self.grain[t.view.slot] = min(self.grain[t.view.slot], grain, t.view.itemsize)
        self.streams = streams
        self.places: list[tuple[Any, Loc | None]] = [(None, None)]
        self.numbers: dict[Any, int] = {}
        self.shadows: dict[int, tuple[Array, ...]] = {}

    def touch(self, lane: Any, touch: Touch, loc: Loc | None) -> tuple[int, Any, Loc | None, bool] | None:
        """Record an access; (stream, tensor, place, whether it wrote) of an earlier one that nothing orders before it."""
        slot = touch.view.slot
        grain, size = self.grain[slot], self.sizes[slot]
        shadow = self.shadows.get(slot)
        if shadow is None:
            n = -(-size // grain)
            shadow = self.shadows[slot] = (np.zeros(n, np.int16), np.zeros(n, np.int64), np.zeros(n, np.int32),
                                           np.zeros((self.streams, n), np.int64), np.zeros((self.streams, n), np.int32))
        writer, write_time, write_place, read_time, read_place = shadow
        units = touch.units(lane, grain, size)
        me = lane.number
        by = writer[units]
        late = (write_time[units] > lane.clock[by]) & (by != me)
        if late.any():
            at = units[int(np.argmax(late))]
            return (int(writer[at]), *self.places[write_place[at]], True)
        if touch.writes:
            for other in range(self.streams):
                if other != me:
                    late = read_time[other, units] > lane.clock[other]
                    if late.any():
                        return (other, *self.places[read_place[other, units[int(np.argmax(late))]]], False)
        number = self.numbers.get((touch, loc))
        if number is None:
            number = self.numbers[touch, loc] = len(self.places)
            self.places.append((touch.view.alloc, loc))
        if touch.writes:
            writer[units], write_time[units], write_place[units] = me, lane.clock[me], number
        else:
            read_time[me, units], read_place[me, units] = lane.clock[me], number
        return None
