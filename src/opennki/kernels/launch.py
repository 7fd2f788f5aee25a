"""Distributed runs: one kernel on many ranks, each with arguments of its own.

A rank is a state, not a thread: it is computed until it waits for others, and its threads then compute another one. So 64 ranks on two
cores need no more than two threads, and no memory but that of their tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np

from opennki import settings
from opennki.errors import NkiError, NkiTypeError, NkiValueError
from opennki.interpret import simulate as sim
from opennki.interpret.blas import one_thread
from opennki.interpret.prepared import Prepared, ordered, stored
from opennki.interpret.schedule import run_all
from opennki.isa import dtypes
from opennki.isa.meeting import Member, World
from opennki.kernels.base import TraceKernel, adopt, finish
from opennki.kernels.generic import GenericKernel
from opennki.kernels.speckey import captured, return_shape_dtype_or_hashable
from opennki.trace.kernel import DeclTensor, array_dtype, arrays_of, bind_arguments, map_arrays, trace_bound

MOST_RANKS = 65536


class Rank:
    """One participant: its kernel for its arguments, its buffers, and how its result is made."""

    def __init__(self, plan: Prepared, arrays: list[Any], restore: Callable[[Any], Any], seed: int, out: Any) -> None:
        kernel = plan.kernel
        for alloc, array in zip(kernel.params, arrays, strict=True):
            if not isinstance(array, np.ndarray):
                raise NkiTypeError(f"argument {alloc.name!r} is {type(array).__name__}", rule="a rank takes NumPy arrays")
        sim.check_written(kernel, arrays)
        self.plan, self.arrays, self.restore = plan, arrays, restore
        inputs = [stored(array, alloc.dtype) for alloc, array in zip(kernel.params, arrays, strict=True)]
        places: list[Any] = [*kernel.outputs, *plan.extra]
        self.results = [np.empty(o.shape, dtypes.storage(o.dtype)) for o in places]
        self.machines, self.report = plan.begin(inputs, self.results, seed=seed, out=out)
        self.world = World(1, tuple(plan.grid), kernel.cores)

    def end(self) -> None:
        """Copy results to where they belong."""
        self.plan.finish(self.machines, self.results, self.report)

    def value(self) -> Any:
        """What the kernel returns; arrays that it wrote are updated in place."""
        kernel = self.plan.kernel
        outputs = [sim.dtypes_public(a, o.dtype) for a, o in zip(self.results, kernel.outputs, strict=False)]
        news = [self.results[self.plan.homes[a]] for a in kernel.params if a in self.plan.homes]
        return self.restore(finish(kernel, self.arrays, outputs, news))


class Specialisations:
    """Prepared kernels by the shapes, dtypes and constants of their arguments: ranks that differ in the values of arrays share one."""

    def __init__(self, kernel: TraceKernel, level: sim.Checks) -> None:
        self.kernel, self.level = kernel, level
        self.known: dict[Any, Prepared] = {}
        self.options = kernel.options()

    def rank(self, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int, out: Any) -> Rank:
        """A rank for these arguments."""
        (values, named), restore = adopt(args, kwargs)
        bound = bind_arguments(self.kernel.func, values, named)
        key = self._key(bound)
        plan = self.known.get(key) if key is not None else None
        if plan is not None:
            return Rank(plan, arrays_of(bound), restore, seed, out)
        traced, arrays = trace_bound(self.kernel.func, bound, self.options, self.kernel.func_name)
        plan = Prepared(traced, self.level)
        if key is not None:
            self.known[key] = plan
        return Rank(plan, arrays, restore, seed, out)

    def _key(self, bound: Any) -> Any:
        def described(value: Any, name: str) -> DeclTensor:
            return DeclTensor(tuple(value.shape), array_dtype(value, name))

        try:
            parts = [(n, return_shape_dtype_or_hashable(map_arrays(v, n, described), n)) for n, v in bound.arguments.items()]
        except NkiError:  # an argument that cannot be compared: each rank is traced
            return None
        return tuple(parts), captured(self.kernel.func)


def arguments(given: Any, rank: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a rank: a tuple, a dict, or a pair of both."""
    if isinstance(given, dict):
        return (), given
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], tuple) and isinstance(given[1], dict):
        return given
    if isinstance(given, (tuple, list)):
        return tuple(given), {}
    raise NkiTypeError(
        f"args_of({rank}) is {type(given).__name__}",
        rule="args_of(rank) gives a tuple of arguments, a dict of keywords, or a pair (tuple, dict)",
        fix="return (x,) for a single argument",
    )


def _check_apart(members: list[Rank]) -> None:
    """An array that a rank writes has no memory that another rank uses."""
    spans = []
    for number, member in enumerate(members):
        written = set(member.plan.kernel.written_params)
        for alloc, array in zip(member.plan.kernel.params, member.arrays, strict=True):
            if array.size:
                low, high = _bounds(array)
                spans.append((low, high, number, alloc in written, alloc.name))
    if not any(writes for _, _, _, writes, _ in spans):
        return
    spans.sort(key=lambda span: span[:2])
    reaching: list[Any] = []  # those before that reach to here
    for span in spans:
        reaching = [other for other in reaching if other[1] > span[0]]
        for other in reaching:
            if other[2] != span[2] and (other[3] or span[3]):
                writer, user = (other, span) if other[3] else (span, other)
                raise NkiValueError(
                    f"rank {writer[2]} writes {writer[4]!r}, whose memory is {user[4]!r} of rank {user[2]}",
                    rule="each rank has arrays of its own where one is written", fix="pass a copy to each rank",
                )  # fmt: skip
        reaching.append(span)


def _bounds(array: np.ndarray) -> tuple[int, int]:
    """Addresses of the first byte of an array, and of the one after its last."""
    home: Any = np.lib.array_utils if hasattr(np.lib, "array_utils") else np
    low, high = home.byte_bounds(array)
    return int(low), int(high)


def launch(
    kernel: Any, ranks: int, args_of: Callable[[int], Any], *, checks: Any = None, threads: int | None = None, seed: int | None = None,
    order: str = "program", dump_file: Any = None,
) -> list[Any]:  # fmt: skip
    """Run a kernel on `ranks` ranks in this process. Returns the results in the order of the ranks.

    kernel: jitted, traced or plain, also with a launch grid. args_of(rank): the arguments of a rank, as a tuple, a dict of keywords, or a
    pair of both; NumPy arrays or CPU torch tensors. checks: as in simulate_kernel. threads: how many compute (default: the setting
    OPENNKI_NUM_THREADS). order: in which order ranks are started, program, reversed or shuffle:<seed>; results do not depend on it, nor on
    threads. Arrays that the kernel writes are updated in place once all ranks have succeeded. Raises NkiError at the line of the kernel,
    with the rank, and with the line of every rank where they wait for each other for ever.
    """
    if not isinstance(ranks, int) or isinstance(ranks, bool) or not 1 <= ranks <= MOST_RANKS:
        raise NkiValueError(f"ranks={ranks!r}", rule=f"the number of ranks is between 1 and {MOST_RANKS}")
    if not isinstance(kernel, TraceKernel):
        kernel = GenericKernel(kernel, "simulation")
    current = settings.current()
    level = sim.Checks.of(checks if checks is not None else current.checks)
    made = Specialisations(kernel, level)
    members = [made.rank(*arguments(args_of(r), r), seed if seed is not None else current.seed or 0, dump_file) for r in range(ranks)]
    _check_apart(members)
    worlds = [World(ranks, m.world.programs, m.world.cores) for m in members]
    instances: dict[Member, Any] = {(r, p): machine for r, m in enumerate(members) for p, machine in enumerate(m.machines)}
    numbers = [(r, p) for r in ordered(order, ranks) for p in range(len(members[r].machines))]
    with one_thread() if any(m.plan.tape.multiplies for m in members) else nullcontext():
        run_all(instances, numbers, worlds.__getitem__, threads=threads or current.num_threads)
    for member in members:
        member.end()
    return [member.value() for member in members]
