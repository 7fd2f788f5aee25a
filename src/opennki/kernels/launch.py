"""Distributed runs: one kernel on many ranks, each with arguments of its own.

A rank is a state, not a thread: it is computed until it waits for others, and its threads then compute another one. So 64 ranks on two
cores need no more than two threads, and no memory but that of their tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from opennki import settings
from opennki.errors import NkiError, NkiTypeError, NkiValueError
from opennki.execute.executor import native
from opennki.interpret import simulate as sim
from opennki.interpret.blas import one_thread
from opennki.interpret.machine import Instance
from opennki.interpret.prepared import Prepared, ordered, stored
from opennki.interpret.schedule import Link, run_all
from opennki.isa import dtypes
from opennki.isa.meeting import World
from opennki.kernels.base import TraceKernel, adopt, finish
from opennki.kernels.generic import GenericKernel
from opennki.kernels.speckey import captured, return_shape_dtype_or_hashable
from opennki.trace.kernel import DeclTensor, array_dtype, arrays_of, bind_arguments, map_arrays, trace_bound

MOST_RANKS = 65536


class Rank:
    """One participant: its kernel for its arguments, its buffers, and how its result is made. `room(shape, dtype)` makes an array."""

    def __init__(self, plan: Prepared, arrays: list[Any], restore: Callable[[Any], Any], room: Callable[..., np.ndarray]) -> None:
        kernel = plan.kernel
        for alloc, array in zip(kernel.params, arrays, strict=True):
            if not isinstance(array, np.ndarray):
                raise NkiTypeError(f"argument {alloc.name!r} is {type(array).__name__}", rule="a rank takes NumPy arrays")
        sim.check_written(kernel, arrays)
        self.plan, self.arrays, self.restore = plan, arrays, restore
        places: list[Any] = [*kernel.outputs, *plan.extra]
        self.results = [room(o.shape, dtypes.storage(o.dtype)) for o in places]
        self.machines: list[Instance] = []

    def world(self, ranks: int) -> World:
        """What its members know of the run."""
        return World(ranks, tuple(self.plan.grid), self.plan.kernel.cores)

    def begin(self, seed: int, out: Any) -> list[Instance]:
        """Its programs, ready to run."""
        inputs = [stored(array, alloc.dtype) for alloc, array in zip(self.plan.kernel.params, self.arrays, strict=True)]
        self.machines, self.report = self.plan.begin(inputs, self.results, seed=seed, out=out)
        return self.machines

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

    def __init__(self, kernel: TraceKernel, level: sim.Checks, room: Callable[..., np.ndarray] = np.empty) -> None:
        self.kernel, self.level, self.room = kernel, level, room
        self.known: dict[Any, Prepared] = {}
        self.options = kernel.options()

    def rank(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Rank:
        """A rank for these arguments."""
        (values, named), restore = adopt(args, kwargs)
        bound = bind_arguments(self.kernel.func, values, named)
        key = self._key(bound)
        plan = self.known.get(key) if key is not None else None
        if plan is not None:
            return Rank(plan, arrays_of(bound), restore, self.room)
        traced, arrays = trace_bound(self.kernel.func, bound, self.options, self.kernel.func_name)
        plan = Prepared(traced, self.level, native=native)
        if key is not None:
            self.known[key] = plan
        return Rank(plan, arrays, restore, self.room)

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


def _check_apart(members: dict[int, Rank]) -> None:
    """An array that a rank writes has no memory that another rank uses."""
    spans = []
    for number, member in members.items():
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


def run_ranks(members: dict[int, Rank], worlds: list[World], *, threads: int, seed: int, order: str, out: Any, link: Link | None) -> None:
    """Run the ranks of this process to their end."""
    instances = {(r, p): machine for r, m in members.items() for p, machine in enumerate(m.begin(seed, out))}
    here = sorted(members)
    numbers = [(here[i], p) for i in ordered(order, len(here)) for p in range(len(members[here[i]].machines))]
    with one_thread() if any(m.plan.tape.multiplies for m in members.values()) else nullcontext():
        run_all(instances, numbers, worlds.__getitem__, threads=threads, link=link)
    for member in members.values():
        member.end()


def launch(
    kernel: Any, ranks: int, args_of: Callable[[int], Any], *, engine: str = "auto", processes: int | None = None, checks: Any = None,
    threads: int | None = None, seed: int | None = None, order: str = "program", dump_file: Any = None,
) -> list[Any]:  # fmt: skip
    """Run a kernel on `ranks` ranks. Returns the results in the order of the ranks.

    kernel: jitted, traced or plain, also with a launch grid. args_of(rank): the arguments of a rank, as a tuple, a dict of keywords, or a
    pair of both; NumPy arrays or CPU torch tensors.

    engine: `threads`, all ranks in this process; `processes`, in `processes` (default: OPENNKI_NUM_THREADS) forked ones that give their
    results back through shared memory; `tcp`, in the processes that `opennki launch -n N` has started, each of which calls this function
    alike and runs its share; `gloo`, the same in those of torch.distributed, however started; `ray`, in `processes` tasks of a
    Ray cluster. `auto`: gloo where torch.distributed is initialised, tcp under `opennki launch`, processes where `processes` is given,
    else threads. With tcp and gloo the result of a rank that another process runs is None.

    checks: as in simulate_kernel. threads: how many compute in each process (default: OPENNKI_NUM_THREADS; 1 in each of several
    processes). order: in which order ranks are started, program, reversed or shuffle:<seed>. Results depend neither on it, nor on the
    engine, nor on threads. Arrays that the kernel writes are updated in place once all ranks have succeeded. Raises NkiError at the line
    of the kernel, with the rank, and with the line of every rank where they wait for each other for ever.
    """
    if not isinstance(ranks, int) or isinstance(ranks, bool) or not 1 <= ranks <= MOST_RANKS:
        raise NkiValueError(f"ranks={ranks!r}", rule=f"the number of ranks is between 1 and {MOST_RANKS}")
    ordered(order, ranks)
    if not isinstance(kernel, TraceKernel):
        kernel = GenericKernel(kernel, "simulation")
    current = settings.current()
    task = Task(kernel, ranks, args_of, sim.Checks.of(checks if checks is not None else current.checks), threads,
                seed if seed is not None else current.seed or 0, order, dump_file)  # fmt: skip
    from opennki.kernels import processes as engines

    run = engines.engine(engine, processes)
    return run(task) if run is not None else _threads(task)


@dataclass(frozen=True, slots=True)
class Task:
    """What `launch` was asked for."""

    kernel: TraceKernel
    ranks: int
    args_of: Callable[[int], Any]
    level: sim.Checks
    threads: int | None
    seed: int
    order: str
    out: Any

    def members(self, wanted: Iterable[int], room: Callable[..., np.ndarray] = np.empty) -> dict[int, Rank]:
        """The ranks by number, checked."""
        made = Specialisations(self.kernel, self.level, room)
        members = {r: made.rank(*arguments(self.args_of(r), r)) for r in wanted}
        _check_apart(members)
        return members

    def run(self, members: dict[int, Rank], worlds: list[World], link: Link | None = None, threads: int | None = None) -> None:
        """Run the ranks of this process."""
        count = self.threads or threads or settings.current().num_threads
        run_ranks(members, worlds, threads=count, seed=self.seed, order=self.order, out=self.out, link=link)


def _threads(task: Task) -> list[Any]:
    members = task.members(range(task.ranks))
    task.run(members, [m.world(task.ranks) for m in members.values()])
    return [member.value() for member in members.values()]
