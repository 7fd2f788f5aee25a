"""A kernel that is planned once and run many times on the caller's buffers: what simulation and the bridges to frameworks stand on.

A call only puts the caller's buffers into their slots and runs the tape. Memory of the kernel's own tensors is kept between calls,
up to `KEPT` bytes; what a program might read without having written it is blanked before each run.
"""
from __future__ import annotations

import ctypes as C
import random
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np

from opennki.errors import NkiError, NkiValueError
from opennki.interpret.blas import one_thread
from opennki.interpret.checks import Checks, Reporter, tape_of
from opennki.interpret.machine import Instance, Tape, blank, fresh, room
from opennki.interpret.pointers import address
from opennki.interpret.races import Races
from opennki.interpret.schedule import run_all
from opennki.interpret.shadow import WRITTEN
from opennki.ir.nodes import Alloc, Kernel
from opennki.isa import dtypes
from opennki.isa.meeting import World

KEPT = 64 << 20  # bytes of scratch memory that a prepared kernel keeps between calls
_MOST = 8  # and the most calls at once for which it keeps any

Shared = list[tuple[int, Any, Any]]


class Prepared:
    """A kernel planned once and run many times on the caller's buffers.

    Several threads may run one object at the same time. `level`: the checks of a run, full, fast or off (see
    `opennki.interpret.checks`); a `Checks` object will do.
    """

    def __init__(self, kernel: Kernel, level: Any = "fast", tape: Tape | None = None,
                 native: Callable[[Tape], Any] | None = None) -> None:
        """`native(tape)`: an object that runs programs in the place of the interpreter, or None where there is no such: `run(instance)`
        one program, `programs(instance, grid)` all at once if it can, `direct(slots, room)` the short way for single ones (see
        `opennki.execute.executor`)."""
        self.kernel = kernel
        self.checks = Checks.of(level)
        self.tape = tape = tape if tape is not None else tape_of(kernel, self.checks, native is not None)
        slots = tape.layout.allocs
        written = set(kernel.written_params)
        # where a written parameter ends up: an output that is all of it, else one of the buffers after those of the outputs
        self.homes: dict[Alloc, int] = {}
        direct: dict[Alloc, int] = {}
        self.copies: list[tuple[Any, int]] = []
        for i, (access, view) in enumerate(zip(kernel.outputs, tape.outputs, strict=True)):
            alloc = access.alloc
            place = self.homes if alloc in written else direct if alloc.kind == "local" and alloc.space == "shared_hbm" else None
            if place is None or not access.is_whole or alloc in place:
                self.copies.append((view, i))
            else:
                place[alloc] = i
        self.extra = [a for a in kernel.params if a in written and a not in self.homes]
        for i, alloc in enumerate(self.extra):
            self.homes[alloc] = len(kernel.outputs) + i
        self._params = [(slots[a], self.homes.get(a, -1), a.size * dtypes.itemsize(a.dtype)) for a in kernel.params]
        self._direct = [(slots[a], i, a if a in tape.holes else None) for a, i in direct.items()]
        self._constants: Shared = [(slots[a], _bytes(stored(kernel.constants[a.id], a.dtype)), None) for a in kernel.constant_allocs]
        self._scratch = [(a, slot) for a, slot in slots.items() if a.space == "shared_hbm" and a.kind == "local" and a not in direct]
        self._out_sizes = [o.size * dtypes.itemsize(o.dtype) for o in kernel.outputs] + [
            a.size * dtypes.itemsize(a.dtype) for a in self.extra]
        self._grid = list(product(*(range(v.hi + 1) for v in kernel.grid)))
        self._policy = self.checks.policy
        self._certain = {**self._policy, "race": "error"} if self.checks.level == "fast" else self._policy
        # where nothing is warned about, a reporter has nothing to remember
        self._report = None if "warn" in self._policy.values() else Reporter(self._policy)
        self._room = 0 if tape.frees else min(_MOST, KEPT // max(1, tape.own_bytes))
        self._idle: list[Instance] = []
        found = native(tape) if native is not None else None
        self._go: Callable[[Instance], Any] = found.run if found is not None else lambda machine: machine.run()
        self.at: Callable[[list[int]], None] | None = self._shortest(found) if found is not None else None
        """A run on memory at addresses, inputs before outputs, for callers to whom microseconds matter and who vouch for what `run` checks:
        buffers as `run` takes them, alive, of the right sizes, contiguous. None where a run needs more than addresses."""
        self._many = found.programs if found is not None and not self.copies else None

    def _shortest(self, native: Any) -> Any:
        """The short way to run, where a call is one program with nothing to prepare: no tensors to blank, no results to copy."""
        tape = self.tape
        if (len(self._grid) != 1 or tape.problems or tape.renewed or self.copies or self._scratch or self._constants
                or tape.suspends or self._room == 0 or any(hole is not None for _, _, hole in self._direct)
                or not all([*self._out_sizes, *(size for _, _, size in self._params)])):
            return None
        # the slot of each buffer of a call, inputs before outputs: a parameter that is written is where its new value goes
        slots = [slot for slot, home, _ in self._params if home < 0]
        places = {i: slot for slot, i, _ in self._direct} | {home: slot for slot, home, _ in self._params if home >= 0}
        if sorted(places) != list(range(len(self._out_sizes))):
            return None
        direct = native.direct(slots + [places[i] for i in range(len(places))], self._room)
        if direct is None or not self.homes:
            return direct
        count = len(self._params)
        moved = [(i, count + home, size) for i, (_, home, size) in enumerate(self._params) if home >= 0]
        read = [i for i, (_, home, _) in enumerate(self._params) if home < 0]

        def run(addresses: list[int]) -> None:
            for source, target, size in moved:
                if addresses[source] != addresses[target]:
                    C.memmove(addresses[target], addresses[source], size)
            direct([*map(addresses.__getitem__, read), *addresses[count:]])

        return run

    def run(self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], *, seed: int = 0, out: Any = None,
            order: str = "program", progress: Callable[[int, int], None] | None = None) -> None:
        """Run the kernel on buffers of the caller.

        `inputs`: one array per parameter, C-contiguous, in its storage dtype (`isa.dtypes.storage`). They are read in place and never
        written. `outputs`: one such array per output of the kernel, then one per written parameter that no output returns whole, in the
        order of the parameters (`extra`). Outputs that are whole tensors are stored to directly, so they have no defined values after an
        error. An output may have the memory of an input only if it is where that written parameter goes; then nothing is copied, else the
        input is copied there first. `out` takes what device_print writes, `order` and `progress` are those of `simulate`.
        Raises NkiValueError for a buffer of another size, and what the kernel raises.
        """
        tape = self.tape
        if len(inputs) != len(self._params) or len(outputs) != len(self._out_sizes):
            raise NkiValueError(f"{self.kernel.name} is run with {len(inputs)} inputs and {len(outputs)} outputs",
                                rule=f"it takes {len(self._params)} inputs and {len(self._out_sizes)} outputs")
        for array, size in zip(outputs, self._out_sizes, strict=True):
            flags = array.flags
            if array.nbytes != size or not flags.c_contiguous or not flags.writeable:
                raise _unfit(self.kernel, "output", array, size)
        if self.at is not None and progress is None:
            for (_, _, size), array in zip(self._params, inputs, strict=True):
                if array.nbytes != size or not array.flags.c_contiguous:
                    raise _unfit(self.kernel, "input", array, size)
            self.at([*map(address, inputs), *map(address, outputs)])
            return
        shared, report = self._memory(inputs, outputs)
        if tape.multiplies:
            with one_thread():
                machines = self._programs(shared, seed, report, out, order, progress)
        else:
            machines = self._programs(shared, seed, report, out, order, progress)
        self.finish(machines, outputs, report)

    def begin(self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], *, seed: int = 0,
              out: Any = None) -> tuple[list[Instance], Reporter]:
        """All programs of the grid on buffers as in `run`, ready to run as members of a larger run (`interpret.ranks`), and what `finish`
        wants. Raises as `run` does."""
        shared, report = self._memory(inputs, outputs)
        owners: dict[Any, Any] = {}
        races = self._races()
        machines = [self._machine() for _ in self._grid]
        for machine, program in zip(machines, self._grid, strict=True):
            machine.begin(program, shared, seed, report, out, owners, races)
        return machines, report

    def _races(self) -> Races | None:
        """The record of who touched what, where programs are watched, or may order those of other ranks that are."""
        tape = self.tape
        if not tape.meeting and not (tape.suspends and tape.watches):
            return None
        return Races(self._grid, {tape.layout.allocs[a]: grain for a, grain in tape.meeting.items()})

    @property
    def grid(self) -> list[tuple[int, ...]]:
        """Positions of the programs, in order."""
        return self._grid

    def _memory(self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> tuple[Shared, Reporter]:
        """The memory that all programs share, and a reporter that has reported what is known without running."""
        tape = self.tape
        report = self._report or Reporter(self._policy)
        if tape.problems:
            certain = report if self._certain is self._policy else Reporter(self._certain)
            for kind, problem in tape.problems:
                certain(kind, problem)
        shared: Shared = self._constants.copy()
        for (slot, home, size), array in zip(self._params, inputs, strict=True):
            if array.nbytes != size or not array.flags.c_contiguous:
                raise _unfit(self.kernel, "input", array, size)
            shared.append((slot, _moved(array, outputs[home]) if home >= 0 else _buffer(array), None))
        for slot, i, hole in self._direct:
            if hole is None:
                shared.append((slot, _buffer(outputs[i]), None))
                continue
            data = _bytes(outputs[i])
            blank(data, hole)
            shared.append((slot, data, np.zeros(hole.size, np.uint8) if hole in tape.tracked else None))
        for alloc, slot in self._scratch:
            state = np.zeros(alloc.size, np.uint8) if alloc in tape.tracked else None
            shared.append((slot, fresh(alloc) if alloc in tape.holes else room(alloc), state))
        return shared, report

    def finish(self, machines: list[Instance], outputs: Sequence[np.ndarray], report: Reporter) -> None:
        """Copy results, check them, and give memory back. The program that ended last stands at the end."""
        tape, last = self.tape, machines[-1]
        if last.races is not None:
            last.races.settle(report)
        if tape.partial:
            _count_stored(tape, last, report)
        for view, i in self.copies:
            if outputs[i].size:
                target = outputs[i].view(view.dtype) if outputs[i].dtype != view.dtype else outputs[i]
                target[...] = view.get(last).reshape(target.shape)
        for machine in machines:
            machine.end()
            if len(self._idle) < self._room:
                self._idle.append(machine)

    def _machine(self) -> Instance:
        try:
            return self._idle.pop()  # atomic, so no lock
        except IndexError:
            return Instance(self.tape)

    def _programs(self, shared: Shared, seed: int, report: Reporter, out: Any, order: str,
                  progress: Callable[[int, int], None] | None) -> list[Instance]:
        """Run all programs; returns the machines, that of the program that ended last at the end."""
        races = self._races()
        try:
            return self._run(shared, seed, report, out, order, progress, races)
        except (NkiError, IndexError):
            if races is not None:
                races.settle(report)  # what was wrong first
            raise

    def _run(self, shared: Shared, seed: int, report: Reporter, out: Any, order: str, progress: Callable[[int, int], None] | None,
             races: Races | None) -> list[Instance]:
        grid, tape = self._grid, self.tape
        total = len(grid)
        owners: dict[Any, Any] = {}
        if total == 1 and not tape.suspends and order == "program":
            machine = self._machine()
            machine.begin(grid[0], shared, seed, report, out, owners)
            machine.progress = progress
            machine.run() if progress is not None else self._go(machine)
            return [machine]
        numbers = ordered(order, total)
        done = 0

        def step() -> None:
            nonlocal done
            done += 1
            if progress is not None and total > 1:
                progress(done, total)
        machines = [self._machine() for _ in (grid if tape.suspends else grid[:1])]
        if tape.suspends:
            for machine, program in zip(machines, grid, strict=True):
                machine.begin(program, shared, seed, report, out, owners, races)
            world = World(1, tuple(grid), self.kernel.cores)
            run_all({(0, i): m for i, m in enumerate(machines)}, [(0, i) for i in numbers], lambda rank: world, step)
            return machines
        if self._many is not None and order == "program" and progress is None:
            machines[0].begin(grid[0], shared, seed, report, out, owners)
            if self._many(machines[0], grid):
                return machines
        for number in numbers:
            machines[0].begin(grid[number], shared, seed, report, out, owners, races)
            if total == 1:
                machines[0].progress = progress
            machines[0].run() if total == 1 and progress is not None else self._go(machines[0])
            step()
        return machines


def _buffer(array: np.ndarray) -> np.ndarray:
    """An array as the buffer that views are made on; dtypes that are not NumPy's own cannot be one."""
    return array if array.dtype.isbuiltin == 1 and array.size else _bytes(array)


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8) if array.size else np.zeros(1, np.uint8)


def _moved(array: np.ndarray, home: np.ndarray) -> np.ndarray:
    """The bytes of a written parameter in its output buffer; they are copied unless they are there already."""
    data, target = _bytes(array), _bytes(home)
    if home.size and data.__array_interface__["data"][0] != target.__array_interface__["data"][0]:
        target[...] = data
    return target


def _unfit(kernel: Kernel, what: str, array: np.ndarray, size: int) -> NkiValueError:
    kind = "" if array.flags.c_contiguous else ", not contiguous"
    kind += "" if what == "input" or array.flags.writeable else ", read-only"
    return NkiValueError(f"{kernel.name}: an {what} is an array of {array.nbytes} bytes{kind}",
                         rule=f"it has the {size} bytes of the tensor, contiguous in row-major order" + (
                             "" if what == "input" else ", and is writable"))


def stored(array: np.ndarray, dtype: str) -> np.ndarray:
    """An array in the storage dtype, row-major; the array itself where it is that already."""
    storage = dtypes.storage(dtype)
    if array.dtype != storage and array.dtype.itemsize == storage.itemsize and array.dtype.kind in "V?b":
        array = np.ascontiguousarray(array).view(storage)
    return np.ascontiguousarray(array, dtype=storage)


def ordered(order: str, count: int) -> list[int]:
    """Numbers of the programs in an order: program (by number), reversed, or shuffle:<seed>."""
    numbers = list(range(count))
    if order == "reversed":
        return numbers[::-1]
    if order.startswith("shuffle"):
        random.Random(order).shuffle(numbers)
        return numbers
    if order != "program":
        raise NkiError(f"program order {order!r}", rule="program, reversed or shuffle:<seed>")
    return numbers


def _count_stored(tape: Tape, machine: Any, report: Reporter) -> None:
    """Report returned tensors of which a part was never stored to."""
    for alloc in tape.partial:
        missing = machine.shadows[tape.layout.alloc(alloc)].reshape(alloc.shape) != WRITTEN
        if missing.any():
            first = tuple(int(i) for i in np.argwhere(missing)[0])
            name = alloc.name or "the output"
            report("unwritten", NkiValueError(
                f"{int(missing.sum())} of {alloc.size} elements of {name} {alloc.shape} {alloc.dtype} were never stored to, first {first}",
                loc=alloc.loc, rule="every element of an output is stored to", why="on the device it holds whatever was in memory before",
                fix="look for a store that is missing, masked out, or in a branch or loop that does not run"))
