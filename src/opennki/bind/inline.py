"""Kernels as JAX functions: expanded into the program around them, instead of called.

`inline(kernel)` is a function of the kernel's inputs that JAX can trace, compile for any platform, vectorise and differentiate. Its
operations fuse with those around it, and no handler is needed to run it. It computes what `simulate_kernel` computes, without its checks;

* sums and matrix products are in the order of XLA, so float32 results differ in their last bits;
* exp, tanh and other transcendental functions are XLA's;
* memory that was never written holds zeros, and a runtime index outside its tensor reads the nearest element and writes nothing;
* 8-byte tensors, programs that wait for each other, and instructions whose bodies need numbers are refused (`CannotInline`).
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import prod
from typing import Any

import jax
import numpy as np
from jax import lax

from opennki import settings
from opennki.bind.inline_machine import UNROLL_TRIPS, CannotInline, Machine, draws, written
from opennki.bind.inline_memory import Memory, margins
from opennki.bind.inline_values import to_jax
from opennki.errors import Loc, NkiTypeError, NkiValueError
from opennki.interpret.precision import widened
from opennki.ir.nodes import Alloc, If, Instr, Kernel, Stmt, statements
from opennki.ir.verify import accesses
from opennki.isa import dtypes
from opennki.passes.contract import contracted

__all__ = ["CannotInline", "first_unsupported", "inline"]

UNROLL_PROGRAMS = 64  # of a kernel that draws random numbers; else as the trips of a loop


def inline(kernel: Kernel, seed: int = 0) -> Callable[..., list[jax.Array]]:
    """A JAX function of the kernel's inputs, in the order of `kernel.params`.

    It returns `kernel.outputs`, then the new value of each written parameter that no output returns whole, in the order of the parameters.
    Arrays have the shapes and storage dtypes of the parameters (bool as bool). `seed` is that of random numbers. The function raises
    CannotInline when it is traced and an instruction cannot be expanded, NkiTypeError for an argument of another shape or dtype.
    """
    return jax.jit(_Expansion(kernel, seed).run)  # type: ignore[no-any-return]


def first_unsupported(kernel: Kernel) -> tuple[str, Loc] | None:
    """The first instruction that cannot be expanded, as (message, place), or None. Nothing is computed."""
    shapes = [jax.ShapeDtypeStruct(p.shape, _public(p.dtype)) for p in kernel.params]
    try:
        jax.eval_shape(_Expansion(kernel, 0).run, *shapes)
    except CannotInline as error:
        return error.message, error.loc
    return None


class _Expansion:
    """A kernel, planned for expansion."""

    def __init__(self, kernel: Kernel, seed: int) -> None:
        self.returned = [a for a in kernel.written_params if not any(o.alloc is a and o.is_whole for o in kernel.outputs)]
        if not settings.current().precise_fp:
            kernel = widened(kernel)
        self.kernel = kernel = contracted(kernel)
        self.seed = seed
        self.margin = margins(kernel)
        local = [s for s in statements(kernel.body) if isinstance(s, Alloc)]
        shared = [a for a in local if a.space == "shared_hbm"]
        outputs = [o.alloc for o in kernel.outputs if o.alloc not in kernel.params]
        self.kept = list(dict.fromkeys([*shared, *outputs, *_leaving(kernel)]))
        self.used = {access.alloc for s in statements(kernel.body) if isinstance(s, Instr) for access, _, _ in accesses(s)}
        self.used |= {o.alloc for o in kernel.outputs}
        self.registers = [a for a in self.used if a.kind == "register"]

    def run(self, *arrays: Any) -> list[jax.Array]:
        """The kernel on arrays."""
        kernel = self.kernel
        if len(arrays) != len(kernel.params):
            raise NkiTypeError(f"{kernel.name} has {len(kernel.params)} inputs, {len(arrays)} are given")
        memory = Memory(self.margin)
        for alloc, array in zip(kernel.params, arrays, strict=True):
            if alloc in self.used:
                memory.put(alloc, _storage(alloc, array))
        for alloc in kernel.constant_allocs:
            memory.put(alloc, np.asarray(kernel.constants[alloc.id], dtypes.storage(alloc.dtype)).reshape(alloc.shape))
        for alloc in self.kept:
            _only_narrow(alloc)
            memory.clear(alloc)
        self._programs(memory)
        results = [_public_array(memory.read(o, {}, {}), o.dtype) for o in kernel.outputs]
        return results + [_public_array(memory.whole(a), a.dtype) for a in self.returned]

    def _programs(self, memory: Memory) -> None:
        grid = self.kernel.grid
        sizes = [v.hi + 1 for v in grid]
        count = prod(sizes)
        if count <= (UNROLL_PROGRAMS if draws(self.kernel.body) else UNROLL_TRIPS):
            for n in range(count):
                self._program(memory, n, sizes)
            return
        changed = written(self.kernel.body)
        state = [a for a in memory.arrays if a in changed]
        rest = dict(memory.arrays)

        def step(n: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            inner = Memory(self.margin)
            inner.arrays = {**rest, **dict(zip(state, carry, strict=True))}
            self._program(inner, n, sizes)
            return tuple(to_jax(inner.arrays[a]) for a in state)
        start = tuple(to_jax(memory.arrays[a]) for a in state)
        last = lax.fori_loop(0, count, step, start)
        memory.arrays.update(zip(state, last, strict=True))

    def _program(self, memory: Memory, number: Any, sizes: list[int]) -> None:
        grid = self.kernel.grid
        env, ranges = {}, {}
        for k, var in enumerate(grid):
            place = number // prod(sizes[k + 1:]) % sizes[k]
            env[var] = place
            ranges[var] = (place, place) if isinstance(place, int) else (var.lo, var.hi)
        for alloc in self.registers:
            memory.clear(alloc)
        Machine(self.kernel, memory, env, ranges, set(self.kept), self.seed).run(self.kernel.body)


def _leaving(kernel: Kernel) -> list[Alloc]:
    """Tensors made in a branch that statements outside of it use."""
    def uses(body: list[Stmt]) -> Counter[Alloc]:
        return Counter(a.alloc for s in statements(body) if isinstance(s, Instr) for a, _, _ in accesses(s))
    everywhere = uses(kernel.body)
    out = []
    for branch in [s for s in statements(kernel.body) if isinstance(s, If)]:
        for body in (branch.then, branch.orelse):
            inside = uses(body)
            out += [s for s in statements(body) if isinstance(s, Alloc) and inside[s] < everywhere[s]]
    return out


def _only_narrow(alloc: Alloc) -> None:
    if dtypes.itemsize(alloc.dtype) > 4:
        raise CannotInline(f"{alloc.name or alloc} is {alloc.dtype}: 8-byte tensors are not expanded", loc=alloc.loc,
                           rule="an expanded kernel has tensors of at most 4 bytes per element",
                           why="JAX has no 8-byte elements unless it is told to", fix="use a 4-byte dtype")


def _public(dtype: str) -> np.dtype[Any]:
    return np.dtype(np.bool_) if dtype == "bool" else dtypes.storage(dtype)


def _public_array(array: Any, dtype: str) -> jax.Array:
    result = to_jax(array)
    return result.astype(np.bool_) if dtype == "bool" else result


def _storage(alloc: Alloc, array: Any) -> jax.Array:
    _only_narrow(alloc)
    array = to_jax(array)
    storage = dtypes.storage(alloc.dtype)
    if tuple(array.shape) != alloc.shape:
        raise NkiValueError(f"{alloc.name} has shape {tuple(array.shape)}, the kernel was traced for {alloc.shape}")
    if array.dtype == np.bool_ and alloc.dtype == "bool":
        return array.astype(storage)
    if array.dtype != storage:
        raise NkiTypeError(f"{alloc.name} is {array.dtype}, the kernel was traced for {alloc.dtype}")
    return array
