"""Simulation: run a traced kernel on NumPy arrays with the checks of the reference interpreter."""
from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

from opennki import settings
from opennki.errors import NkiError, NkiTypeError, NkiValueError
from opennki.interpret.blas import one_thread
from opennki.interpret.capacity import over_capacity
from opennki.interpret.contract import contracted
from opennki.interpret.machine import Instance, Reporter, Tape, fresh
from opennki.interpret.precision import widened
from opennki.interpret.programs import run_all
from opennki.interpret.shadow import WRITTEN
from opennki.ir.nodes import Alloc, Kernel
from opennki.isa import dtypes
from opennki.isa import target as targets

POLICIES: dict[str, dict[str, str]] = {
    "full": {"read": "error", "masked": "warn", "race": "error", "repeated": "warn", "carried": "warn", "accumulate": "warn",
             "unwritten": "warn", "capacity": "warn"},
}
# both keep the checks that cost nothing at run time
POLICIES["fast"] = POLICIES["off"] = dict.fromkeys(POLICIES["full"], "off")


@dataclass(slots=True)
class Checks:
    """Which checks run and what each does: error, warn or off, by kind (read, masked, race, repeated, carried,
    accumulate, unwritten, capacity)."""

    level: str = "full"
    policy: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, value: Any) -> Checks:
        """From a level name, or a dict of actions by kind on top of the full level."""
        if isinstance(value, Checks):
            return value
        if isinstance(value, dict):
            unknown = set(value) - set(POLICIES["full"])
            if unknown or any(v not in ("error", "warn", "off") for v in value.values()):
                raise NkiValueError(f"checks={value!r}", rule=f"kinds are {', '.join(POLICIES['full'])}, actions error, warn or off")
            return cls("full", {**POLICIES["full"], **value})
        if value not in POLICIES:
            raise NkiValueError(f"checks={value!r}", rule=f"a level is one of {', '.join(POLICIES)}")
        return cls(value, dict(POLICIES[value]))


def tape_of(kernel: Kernel, checks: Checks) -> Tape:
    """Plan a kernel (the plan can be run many times); with NKI_PRECISE_FP=0 its low-precision tensors are in float32."""
    if not settings.current().precise_fp:
        kernel = widened(kernel)
    full = [("capacity", e) for e in over_capacity(contracted(kernel, 0), targets.resolve(kernel.target))] if (
        checks.policy.get("capacity", "warn") != "off") else []
    kernel = contracted(kernel)
    tape = Tape(kernel, track=any(checks.policy.get(k, "error") != "off" for k in ("read", "masked", "accumulate")),
                races=any(checks.policy.get(k, "error") != "off" for k in ("race", "carried")),
                partial=checks.policy.get("unwritten", "warn") != "off",
                certain=checks.level != "off")  # what is known without running costs nothing
    tape.problems += full
    return tape


def to_memory(array: np.ndarray, dtype: str, copy: bool) -> np.ndarray:
    """Bytes of an input array in the storage dtype, row-major; a copy where it will be written."""
    storage = dtypes.storage(dtype)
    if array.dtype != storage and array.dtype.itemsize == storage.itemsize and array.dtype.kind in "V?b":
        array = np.ascontiguousarray(array).view(storage)
    data = np.array(array, dtype=storage, order="C", copy=True) if copy else np.ascontiguousarray(array, dtype=storage)
    return data.reshape(-1).view(np.uint8) if data.size else np.zeros(1, np.uint8)


def check_written(kernel: Kernel, arrays: list[np.ndarray]) -> None:
    """What is written is writable, and shares no memory with another argument."""
    written = {a: i for i, a in enumerate(kernel.params) if a in kernel.written_params}
    for alloc, i in written.items():
        if isinstance(arrays[i], np.ndarray) and not arrays[i].flags.writeable:
            raise NkiValueError(f"the array for {alloc.name!r}, which the kernel writes, is read-only",
                                rule="outputs go into writable arrays", fix="pass a copy, or return a new tensor from the kernel")
        for j, other in enumerate(arrays):
            if i != j and isinstance(other, np.ndarray) and isinstance(arrays[i], np.ndarray) and np.shares_memory(arrays[i], other):
                names = f"{alloc.name!r} and {kernel.params[j].name!r}"
                raise NkiValueError(f"the arrays for {names} share memory, and {alloc.name!r} is written",
                                    rule="an array that the kernel writes is passed once", fix="pass a copy")


def commit(pairs: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """Copy new values into the caller's arrays, once everything has succeeded."""
    for array, new in pairs:
        array[...] = new.view(array.dtype) if array.dtype != new.dtype and array.dtype.itemsize == new.dtype.itemsize else new


def simulate(kernel: Kernel, arrays: list[np.ndarray], checks: Checks, *, seed: int = 0, out: Any = None, order: str = "program",
             tape: Tape | None = None, progress: Callable[[int, int], None] | None = None) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Run a kernel. Returns (outputs, new values of the written inputs); the caller's arrays are never touched.

    `progress(done, total)` counts programs, or the iterations of the outermost loops where there is one program. `order` of the programs of
    the grid is program (by number), reversed, or shuffle:<seed>. Raises NkiError at the user's line.
    """
    for alloc, array in zip(kernel.params, arrays, strict=True):
        if not isinstance(array, np.ndarray):
            raise NkiTypeError(f"argument {alloc.name!r} is {type(array).__name__}", rule="a simulated kernel takes NumPy arrays")
    check_written(kernel, arrays)
    tape = tape or tape_of(kernel, checks)
    shared: dict[int, tuple[Any, Any]] = {}
    written = set(kernel.written_params)
    for alloc, array in zip(kernel.params, arrays, strict=True):
        shared[tape.layout.alloc(alloc)] = (to_memory(array, alloc.dtype, alloc in written), None)
    for alloc in kernel.constant_allocs:
        shared[tape.layout.alloc(alloc)] = (to_memory(kernel.constants[alloc.id], alloc.dtype, False), None)
    for alloc, slot in tape.layout.allocs.items():
        if alloc.space == "shared_hbm" and slot not in shared:
            shared[slot] = (fresh(alloc), np.zeros(alloc.size, np.uint8) if alloc in tape.tracked else None)
    reporter = Reporter(checks.policy)
    certain = Reporter({**checks.policy, "race": "error"}) if checks.level == "fast" else reporter
    for kind, problem in tape.problems:
        certain(kind, problem)
    grid = list(product(*(range(v.hi + 1) for v in kernel.grid)))
    made: dict[int, Instance] = {}
    owners: dict[Any, Any] = {}
    programs = _Programs(lambda n: Instance(tape, grid[n], shared, seed, reporter, out, owners), len(grid), made)
    numbers = _order(order, len(grid))
    total = len(grid)
    done = [0]

    def step() -> None:
        done[0] += 1
        if progress is not None and total > 1:
            progress(done[0], total)
    with one_thread():
        if _suspends(tape):
            run_all([programs[i] for i in range(total)], numbers, kernel.cores, step)
            last = programs[total - 1]
        else:
            last = None  # type: ignore[assignment]
            for number in numbers:
                last = programs.make(number)
                if total == 1:
                    last.progress = progress
                last.run()
                step()
    _count_stored(tape, last, reporter)
    outputs = [_result(view, last) for view in tape.outputs]
    news = [_array(shared[tape.layout.alloc(a)][0], a) for a in kernel.params if a in written]
    return outputs, news


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


def dtypes_public(array: np.ndarray, dtype: str) -> np.ndarray:
    """A result in the dtype that users see."""
    if dtype == "bool" and array.dtype != np.bool_:
        return array.astype(np.bool_)
    return array


def _array(data: np.ndarray, alloc: Alloc) -> np.ndarray:
    storage = dtypes.storage(alloc.dtype)
    return np.ndarray(alloc.shape, storage, data) if alloc.size else np.zeros(alloc.shape, storage)


def _result(view: Any, machine: Any) -> np.ndarray:
    """A returned tensor: its own memory where it is all of a tensor made in this run, else a copy."""
    array = dtypes_public(view.get(machine), view.access.dtype)
    own = view.access.is_whole and view.alloc.kind == "local"
    return array if own else np.array(array)


class _Programs:
    """Instances made when they are needed, so that a large grid does not hold the memory of all programs."""

    def __init__(self, make: Callable[[int], Instance], count: int, made: dict[int, Instance]) -> None:
        self.make, self.count, self.made = make, count, made

    def __getitem__(self, number: int) -> Instance:
        if number not in self.made:
            self.made[number] = self.make(number)
        return self.made[number]


def _suspends(tape: Tape) -> bool:
    from opennki.ir.nodes import Instr, statements
    from opennki.isa.declare import ISA
    return any(isinstance(s, Instr) and ISA[s.op].suspends for s in statements(tape.kernel.body))


def _order(order: str, count: int) -> list[int]:
    numbers = list(range(count))
    if order == "reversed":
        return numbers[::-1]
    if order.startswith("shuffle"):
        random.Random(order).shuffle(numbers)
        return numbers
    if order != "program":
        raise NkiError(f"program order {order!r}", rule="program, reversed or shuffle:<seed>")
    return numbers
