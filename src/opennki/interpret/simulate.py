"""Simulation: run a traced kernel on NumPy arrays with the checks of the reference interpreter."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from opennki.errors import NkiTypeError, NkiValueError
from opennki.interpret.checks import POLICIES, Checks, tape_of
from opennki.interpret.machine import Tape
from opennki.interpret.prepared import Prepared, stored
from opennki.ir.nodes import Kernel
from opennki.isa import dtypes

__all__ = ["POLICIES", "Checks", "check_written", "commit", "dtypes_public", "simulate", "tape_of", "to_memory"]


def to_memory(array: np.ndarray, dtype: str, copy: bool) -> np.ndarray:
    """Bytes of an input array in the storage dtype, row-major; a copy where it will be written."""
    data = np.array(stored(array, dtype), copy=copy or None)
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
             tape: Tape | None = None, progress: Callable[[int, int], None] | None = None,
             native: Any = None) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Run a kernel. Returns (outputs, new values of the written inputs); the caller's arrays are never touched.

    `progress(done, total)` counts programs, or the iterations of the outermost loops where there is one program. `order` of the programs of
    the grid is program (by number), reversed, or shuffle:<seed>. `native`: see `Prepared`. Raises NkiError at the user's line.
    """
    for alloc, array in zip(kernel.params, arrays, strict=True):
        if not isinstance(array, np.ndarray):
            raise NkiTypeError(f"argument {alloc.name!r} is {type(array).__name__}", rule="a simulated kernel takes NumPy arrays")
    check_written(kernel, arrays)
    plan = Prepared(kernel, checks, tape, native)
    inputs = [stored(array, alloc.dtype) for alloc, array in zip(kernel.params, arrays, strict=True)]
    places: list[Any] = [*kernel.outputs, *plan.extra]
    results = [np.empty(o.shape, dtypes.storage(o.dtype)) for o in places]
    plan.run(inputs, results, seed=seed, out=out, order=order, progress=progress)
    outputs = [dtypes_public(array, access.dtype) for array, access in zip(results, kernel.outputs, strict=False)]
    return outputs, [results[plan.homes[a]] for a in kernel.params if a in plan.homes]


def dtypes_public(array: np.ndarray, dtype: str) -> np.ndarray:
    """A result in the dtype that users see."""
    if dtype == "bool" and array.dtype != np.bool_:
        return array.astype(np.bool_)
    return array
