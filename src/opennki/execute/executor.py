"""The executor: a planned kernel run by native code on the memory of an interpreter's instance."""

from __future__ import annotations

import ctypes as C
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from opennki import settings
from opennki.collector import collection_put_off
from opennki.errors import make
from opennki.execute import abi, tape_cache
from opennki.execute.build import library
from opennki.execute.instruction import Broken
from opennki.execute.lower import Lowering
from opennki.execute.record import Unsupported
from opennki.execute.tape import Image, Native
from opennki.execute.tape_file import Facts
from opennki.execute.watch import Unread
from opennki.interpret.machine import Instance, Tape, blank
from opennki.interpret.pointers import address
from opennki.interpret.shadow import tile_error
from opennki.ir.nodes import Alloc, Instr
from opennki.ir.verify import describe

_Wrong = C.c_int64 * 3


class _Table(NamedTuple):
    """Pointers of all threads, and the memory that is lent to the further ones."""

    rows: Any
    others: list[Instance]
    cells: np.ndarray | None  # of watched tensors; here so that it lives as long


class Executor:
    """Native code for one plan. `run` may be called from several threads, each with an instance of its own."""

    def __init__(self, tape: Tape, lowering: Lowering | None, lib: C.CDLL, kept: tuple[Image, Facts] | None = None) -> None:
        """`kept`: what lowering has made in another process; it is done again only where more is asked for than a run needs."""
        self.tape, self.lib = tape, lib
        self._lowering = lowering
        self.steps: list[Any] = []
        self._cells: dict[Alloc, tuple[int, int]] = {}
        if kept is not None:
            image, facts = kept
        else:
            assert lowering is not None
            native = Native(lowering)
            image, facts = native.image, _facts(tape, lowering)
            self.steps = [step for _, step, _ in lowering.fallbacks]
            self._cells = native.cells
        self.image, self.facts = image, facts
        self._struct, self._keep = image.laid()
        self._run = lib.nki_tape_serial
        self._run.restype = lib.nki_tape_programs.restype = C.c_int64
        self._run.argtypes = [C.c_void_p, C.c_void_p, C.c_int32, C.c_void_p, C.c_void_p, C.c_void_p]
        self._tape = C.addressof(self._struct)
        self._env = C.c_int64 * image.n_env
        self._pointers = C.c_void_p * max(1, image.n_buffers)
        self._used = facts.used
        self._idle: list[Instance] = []  # memory of further threads
        self._seed = facts.seed if facts.seed >= 0 else None
        self._most = facts.threads  # threads that there is work for
        allocs = list(tape.layout.allocs)
        # tensors that each thread, or each program, has for itself
        self._own = [(allocs[slot], slot) for slot in facts.own]
        self._programs = None if facts.programs is None else [(allocs[slot], slot) for slot in facts.programs]

    @property
    def lowering(self) -> Lowering:
        """What the tape was made from."""
        if self._lowering is None:
            self._lowering = Lowering(self.tape)
        return self._lowering

    def run(self, machine: Instance) -> None:
        """Run a program to its end. Raises what the interpreter would raise."""
        env = self._env(*machine.env[: self.image.n_env])
        if self._seed is not None:
            env[self._seed] = _signed(machine.seed)
        wrong = _Wrong()
        raised: list[BaseException] = []
        callback = self._callback(machine, env, raised) if self.steps else None
        threads = min(settings.current().num_threads, self._most) if self._most > 1 else 1
        table = self._table(machine, self._own, threads)
        error = self._run(self._tape, env, threads, table.rows, callback, wrong)
        self._give_back(table)
        if error:
            if raised:
                raise raised[0]
            raise wrong_at(self.lowering.broken[error - 1], wrong)

    def direct(self, slots: list[int], room: int) -> Any:
        """The shortest way to run a single program: a function of the addresses of the memory for these slots, in order. None where a run
        needs more than that. `room`: for how many calls at once it keeps memory for the other slots."""
        if self.steps or self._most > 1 or self._seed is not None or self._cells:
            return None
        own = [slot for slot in self._used if slot not in slots]
        call = self.lib["nki_tape_serial"]  # a function object of its own, without argtypes: ctypes objects pass in half the time
        call.restype = C.c_int64
        tape, one = C.c_void_p(self._tape), C.c_int32(1)
        idle: list[tuple[Any, Any, Any, Instance]] = []

        def run(places: list[int]) -> None:
            try:
                kept = idle.pop()  # atomic, so no lock
            except IndexError:
                machine, buffers = Instance(self.tape), self._pointers()
                for slot in own:
                    buffers[slot] = address(machine.buffers[slot])
                kept = buffers, self._env(), _Wrong(), machine
            buffers, env, wrong, _ = kept
            for slot, place in zip(slots, places):
                buffers[slot] = place
            error = call(tape, env, one, buffers, None, wrong)
            if len(idle) < room:
                idle.append(kept)
            if error:
                raise wrong_at(self.lowering.broken[error - 1], wrong)

        return run

    def _callback(self, machine: Instance, env: Any, raised: list[BaseException]) -> Any:
        """What native code calls for the interpreter's step of an instruction."""
        steps, count = self.steps, len(machine.env)

        def back(index: int) -> int:
            try:
                machine.env[:] = env[:count]
                steps[index](machine)
            except BaseException as exc:
                raised.append(exc)
                return 1
            return 0

        return abi.CALLBACK(back)

    def programs(self, machine: Instance, grid: list[tuple[int, ...]]) -> bool:
        """Run all programs of a grid on several threads; False where they have to run one after the other. `machine` is ready for the
        first one."""
        threads = min(settings.current().num_threads, len(grid), 64)
        own = self._programs
        if own is None or threads < 2:
            return False
        envs = (C.c_int64 * (self.image.n_env * len(grid)))()
        for number, program in enumerate(grid):
            for slot, value in zip(self.tape.program_slots, program, strict=True):
                envs[number * self.image.n_env + slot] = value
            if self._seed is not None:
                envs[number * self.image.n_env + self._seed] = _signed(machine.seed)
        wrong = _Wrong()
        table = self._table(machine, own, threads)
        error = self.lib.nki_tape_programs(C.c_void_p(self._tape), C.c_int64(len(grid)), envs, threads, table.rows, wrong)
        self._give_back(table)
        if error:
            raise wrong_at(self.lowering.broken[error - 1], wrong)
        return True

    def _table(self, machine: Instance, own: list[tuple[Alloc, int]], threads: int) -> _Table:
        """Pointers for each thread: the first one works on the memory of the program, the others on their own for the tensors `own`."""
        pointers: list[int | None] = [None] * self.image.n_buffers
        for slot in self._used:
            pointers[slot] = address(machine.buffers[slot])
        others = [self._idle.pop() if self._idle else Instance(self.tape) for _ in range(threads - 1)]
        rows = list(pointers)
        cells = None
        if self._cells:
            total = sum(size for _, size in self._cells.values())
            cells = np.zeros((threads, total), np.uint8)
            self._point(pointers, cells[0])
            rows = list(pointers)
        owned = {alloc for alloc, _ in own}
        for number, other in enumerate(others, 1):
            row = list(pointers)
            if cells is not None:
                self._point(row, cells[number], owned)
            for alloc, slot in own:
                if other.used and alloc in self.tape.unset:
                    blank(other.buffers[slot], alloc)
                row[slot] = address(other.buffers[slot])
            other.used = True
            rows += row
        return _Table((C.c_void_p * max(1, len(rows)))(*rows), others, cells)

    def _point(self, row: list[int | None], memory: np.ndarray, only: set[Alloc] | None = None) -> None:
        """Let a row of pointers have its own cells of the watched tensors, or of some of them."""
        at = address(memory)
        for alloc, (slot, size) in self._cells.items():
            if only is None or alloc in only:
                row[slot] = at
            at += size

    def _give_back(self, table: _Table) -> None:
        if len(self._idle) < 64:
            self._idle += table.others


def _facts(tape: Tape, lowering: Lowering) -> Facts:
    """What the executor knows of a tape."""
    loops, slots = lowering.parallel, tape.layout.allocs
    return Facts(
        sorted(lowering.slots()),
        lowering.layout.var(lowering.seed) if lowering.draws else -1,
        min(64, max([loop.trips for loop in loops], default=1)),
        sorted({slots[a] for loop in loops for a in loop.own or ()}),
        None if lowering.programs is None else sorted({slot for _, slot in lowering.programs}),
        lowering.planned,
    )


class Spent(NamedTuple):
    """Time of one call of a tape: the instructions that it computes, its runs, and nanoseconds in all of them."""

    instrs: tuple[Instr, ...]
    runs: int
    ns: int


@contextmanager
def profiled(executor: Executor) -> Iterator[list[Spent]]:
    """Time each native call of the runs inside of the `with`; the list is filled at its end, in the order of the tape. One at a time in a
    process, and no other kernel may run natively meanwhile."""
    calls = executor.lowering.calls
    table = (C.c_int64 * (2 * max(1, len(calls))))()
    spent: list[Spent] = []
    executor.lib.nki_tape_profile(table)
    try:
        yield spent
    finally:
        executor.lib.nki_tape_profile(None)
        spent += [Spent(call.instrs, table[2 * i + 1], table[2 * i]) for i, call in enumerate(calls)]


def _signed(seed: int) -> int:
    """The low 64 bits of a seed."""
    low = int(seed) & ((1 << 64) - 1)
    return low - (1 << 64) if low >> 63 else low


def wrong_at(broken: Broken | Unread, wrong: Any) -> Exception:
    """The error of an index outside of its tensor, or of a read of what was never written."""
    view = broken.view
    first, last = wrong[0], wrong[1]
    if isinstance(broken, Unread):
        index = np.unravel_index(first, broken.shape)
        return tile_error(view, tuple(int(i) * s for i, s in zip(index, broken.step, strict=True)), view.loc)
    if broken.axis is None:
        assert view.dynamic is not None
        return view.dynamic.outside((first, last, view.access.view_shape[first]), wrong[2])
    size = view.access.view_shape[broken.axis]
    return make(
        "err_tensor_access_out_of_bound",
        f"{view.what}: dimension {broken.axis} has {size} elements and is indexed from {first} to {last}",
        loc=view.loc,
        operand=describe(view.access),
    )


@collection_put_off()
def executor_of(tape: Tape, limit: int | None = None, payload: bytes = b"") -> Executor | None:
    """Native code for a plan (of its first `limit` instructions), None where the interpreter runs it: there is no library, the setting
    says so, or the plan keeps state of elements (full checks), waits for other programs, or gives memory back while it runs."""
    wanted = settings.current().executor
    if wanted == "interpreter" or tape.tracked or tape.suspects or tape.suspends or tape.frees:
        return None
    lib = library().lib
    if lib is None:
        return None
    planned = len(tape.layout.vars), len(tape.layout.allocs)
    place = tape_cache.place(payload, lib) if payload and limit is None and not tape.watch else None
    kept = tape_cache.read(place) if place is not None else None
    if kept is not None and kept[1].planned == planned:
        return Executor(tape, None, lib, kept)
    try:
        lowering = Lowering(tape, limit)
    except Unsupported:
        return None
    made = Executor(tape, lowering, lib)
    if place is not None and not made.steps:
        tape_cache.write(place, made.image, made.facts)
    return made


def native(tape: Tape, payload: bytes = b"") -> Executor | None:
    """What runs a program of a plan natively, or None: what `interpret.prepared.Prepared` takes. A plan that waits for others gets native
    steps. payload: the digest of the payload that the kernel comes from; what is lowered is kept for other processes under it."""
    if tape.suspends:
        from opennki.execute.parts import by_parts

        by_parts(tape)
    return executor_of(tape, payload=payload)


def coverage(executor: Executor) -> dict[str, Any]:
    """How much of a kernel is native: numbers of calls, and for each instruction that is not, the reasons."""
    why: dict[str, set[str]] = {}
    for instr, _, reason in executor.lowering.fallbacks:
        why.setdefault(instr.op, set()).add(reason)
    return {"native": len(executor.lowering.calls), "interpreted": len(executor.lowering.fallbacks), "why": why}
