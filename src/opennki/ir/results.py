"""What a call of a kernel returns as a function of arrays: its outputs, then the inputs that it changes.

A custom call has no pass by reference: an input that the kernel writes is a result, and shares its buffer with the
operand (an alias). Every bridge, the payload and the executor count results as here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from opennki.ir.nodes import Access, Kernel, whole


@dataclass(frozen=True, slots=True)
class CallResult:
    """One result: its name, shape, dtype (canonical name), the tile that it is, and the position of the input whose
    new value it is (None for a tensor of its own)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    access: Access
    operand: int | None = None


def call_results(kernel: Kernel) -> list[CallResult]:
    """The kernel's outputs in order, followed by the inputs that it writes and does not return whole."""
    position = {alloc: i for i, alloc in enumerate(kernel.params)}
    written = set(kernel.written_params)
    accesses = list(kernel.outputs)
    returned = {a.alloc for a in accesses if a.is_whole and a.alloc in written}
    accesses += [whole(p) for p in kernel.params if p in written and p not in returned]
    used: set[str] = {p.name for p in kernel.params}
    results, aliased = [], set()
    for i, access in enumerate(accesses):
        alloc = access.alloc
        own = access.is_whole and alloc in written and alloc not in aliased
        operand = position[alloc] if own else None
        if own:
            aliased.add(alloc)
            name = alloc.name
        else:
            name = alloc.name or f"output{i}"
            while name in used:
                name = f"{name}_{i}"
        used.add(name)
        results.append(CallResult(name, access.shape, access.dtype, access, operand))
    return results


def returns_outputs(kernel: Kernel) -> bool:
    """False for a kernel whose only results are inputs that it writes and does not return."""
    return bool(kernel.outputs)


def serialize_dims(kernel: Kernel, results: list[CallResult]) -> dict[str, Any]:
    """Name, shape and dtype of each operand and result of the call; a result that shares the buffer of an operand
    has its position as `operand`."""
    return {
        "inputs": [{"name": p.name, "shape": list(p.shape), "dtype": p.dtype} for p in kernel.params],
        "outputs": [
            {"name": r.name, "shape": list(r.shape), "dtype": r.dtype, **({} if r.operand is None else {"operand": r.operand})}
            for r in results
        ],
    }
