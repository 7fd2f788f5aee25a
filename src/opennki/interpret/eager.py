"""Eager mode: run the kernel body as ordinary Python, each instruction at once, so that breakpoint() and print(tile) work inside it.

Loops run with Python ints and every program of the grid runs the body again. Values are those of the interpreter; a kernel whose programs
wait for each other cannot run this way.
"""
from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

from opennki.errors import NkiValueError
from opennki.interpret.checks import Reporter
from opennki.interpret.machine import fresh
from opennki.interpret.simulate import Checks, check_written, commit, dtypes_public, to_memory
from opennki.interpret.steps import Plan, compile_step
from opennki.interpret.views import Layout, View
from opennki.ir.affine import Var
from opennki.ir.build import activate, current, deactivate
from opennki.ir.nodes import Alloc, Instr, Kernel
from opennki.isa import dtypes
from opennki.isa.declare import ISA
from opennki.lang.tensor import Tensor
from opennki.trace.kernel import Options, _Params, bind_arguments, check_outputs, collect_outputs, new_tracer, rebuild


class EagerMachine:
    """Memory and state of one program that is run statement by statement."""

    def __init__(self, checks: Checks, seed: int, out: Any) -> None:
        self.layout = Layout()
        self.env: list[int] = [0] * 16
        self.buffers: list[Any] = []
        self.shadows: list[Any] = []
        self.views: list[Any] = []
        self.origins: dict[int, Any] = {}
        self.inside: Any = None
        self.seed, self.out = seed, out
        self.report = Reporter(checks.policy)
        self.track = checks.level == "full"
        self.tracked: set[Any] = set()
        self.shared: dict[Any, Any] = {}  # memory of shared_hbm tensors by place and occurrence
        self.made: dict[Any, int] = {}  # how many of each place the running program has made

    def put(self, alloc: Alloc, data: np.ndarray, state: np.ndarray | None) -> None:
        """Give a tensor its memory."""
        slot = self.layout.alloc(alloc)
        while len(self.buffers) <= slot:
            self.buffers.append(None)
            self.shadows.append(None)
        self.buffers[slot], self.shadows[slot] = data, state

    def allocate(self, alloc: Alloc) -> None:
        """Memory of a tensor; what is in shared_hbm is the same for all programs, found by its place in the kernel."""
        if self.track:
            self.tracked.add(alloc)
        if alloc.space != "shared_hbm":
            self.put(alloc, fresh(alloc), np.zeros(alloc.size, np.uint8) if self.track else None)
            return
        place = (alloc.loc, alloc.shape, alloc.dtype, alloc.name)
        self.made[place] = number = self.made.get(place, 0) + 1
        known = self.shared.get((*place, number))
        if known is None:
            known = fresh(alloc), np.zeros(alloc.size, np.uint8) if self.track else None
            self.shared[(*place, number)] = known
        self.put(alloc, *known)

    def statement(self, stmt: Any, tracer: Any) -> None:
        """Run one statement."""
        if isinstance(stmt, Alloc):
            self.allocate(stmt)
            return
        assert isinstance(stmt, Instr)
        if ISA[stmt.op].suspends:
            raise NkiValueError(f"{stmt.op} waits for other programs", rule="eager mode runs one program at a time",
                                fix="run without eager, or with one program")
        for register in tracer.registers():
            if register not in self.layout.allocs:
                self.put(register, fresh(register), None)
        for constant in tracer.constant_allocs:
            if constant not in self.layout.allocs:
                self.put(constant, to_memory(tracer.constants[constant.id], constant.dtype, False), None)
        plan = Plan(stmt, self.layout, {}, tracer.loc(stmt.loc), self.tracked, [], self.seed)
        self.views += [None] * (self.layout.views - len(self.views))
        compile_step(plan)(self)

    def values(self, tensor: Tensor) -> Any:
        """Values of a tensor, for its repr."""
        if tensor.access.alloc not in self.layout.allocs:
            return None
        view = View(tensor.access, self.layout, {}, "print", None)
        self.views += [None] * (self.layout.views - len(self.views))
        return np.array2string(dtypes.to_float32(view.get(self), tensor.access.dtype), threshold=1000)

    check_defined = None
    print = None


def run_eager(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options, checks: Checks, seed: int = 0,
              out: Any = None) -> Any:
    """Run a kernel on arrays statement by statement; returns what it returns."""
    from opennki.interpret.machine import Instance
    params = _Params(bind_arguments(func, args, kwargs))
    grid = tuple(Var(f"pid{axis}", 0, size - 1, "pid") for axis, size in enumerate(options.grid))
    machine = EagerMachine(checks, seed, out)
    machine.check_defined = Instance.check_defined.__get__(machine)  # type: ignore[assignment]
    machine.print = Instance.print.__get__(machine)  # type: ignore[assignment]
    for alloc, array in zip(params.allocs, params.values, strict=True):
        machine.put(alloc, to_memory(array, alloc.dtype, True), None)
    result: Any = None
    for program in product(*(range(n) for n in options.grid)):
        tracer = new_tracer(options, grid, frozenset(), eager=lambda stmt: machine.statement(stmt, current()), program=program)
        machine.made.clear()
        tracer.options["values"] = machine.values
        token = activate(tracer)
        try:
            _, values = tracer.run(lambda: params.call(func))
            outputs, returns = collect_outputs(tracer, values)
            kernel = Kernel(getattr(func, "__name__", "kernel"), params.allocs, [], outputs, grid, options.cores, options.target_name,
                            written_params=[p for p in params.allocs if p.id in tracer.writes], locs=tracer.locs, returns=returns)
            check_outputs(tracer, params.allocs, params.mutable, kernel, options)
            result = kernel, [np.array(dtypes_public(_view(o, machine), o.dtype)) for o in outputs]
        finally:
            deactivate(token)
            tracer.options.clear()
    kernel, outputs_ = result
    check_written(kernel, params.values)
    commit([(array, np.ndarray(alloc.shape, dtypes.storage(alloc.dtype), machine.buffers[machine.layout.alloc(alloc)]))
            for alloc, array in zip(kernel.params, params.values, strict=True) if alloc in kernel.written_params])
    return rebuild(kernel.returns, outputs_)


def _view(access: Any, machine: EagerMachine) -> np.ndarray:
    view = View(access, machine.layout, {}, "output", None)
    machine.views += [None] * (machine.layout.views - len(machine.views))
    return view.get(machine)
