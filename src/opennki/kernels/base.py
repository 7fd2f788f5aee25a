"""TraceKernel: a Python function as a kernel; its options, its tracing, and how it runs on the interpreter.

Every kernel class stands on it. Called inside another kernel it is inlined. Source: seeds "NKI Entrypoints",
design "What must be exact" (class tree).
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from opennki import settings
from opennki.errors import NkiTypeError, make
from opennki.execute.executor import native
from opennki.interpret import simulate as sim
from opennki.ir.build import maybe_current
from opennki.ir.nodes import Kernel
from opennki.isa import target as targets
from opennki.kernels import compiling
from opennki.kernels.pickling import reduced
from opennki.lang.loops import normalise_grid
from opennki.lang.placement import FORCE_AUTO
from opennki.trace.kernel import Options, rebuild, trace_kernel

COMPILE_OPTS = "compile_opts"  # keyword under which a kernel keeps what the decorators of nki.compiler set

# keywords of `simulate` and `nki.simulate_kernel` that are not arguments of the kernel
RUN_OPTIONS = ("checks", "eager", "order", "dump_file", "progress")


class TraceKernel:
    """A function that can be traced for arguments. Subscript it with a launch grid: `kernel[4, 2](a, b)`.

    `kwargs` are the keywords of the decorator: platform_target, experimental_flags, kernel_return and those that
    only a compiler reads. Wrapping a kernel again keeps its grid and keywords where no new ones are given.
    """

    func: Callable[..., Any]
    func_name: str
    mode = "trace"
    grid: Any
    kwargs: dict[str, Any]

    def __init__(self, func: Callable[..., Any], grid: Any = None, **kwargs: Any) -> None:
        if isinstance(func, TraceKernel):
            grid = func.grid if grid is None else grid
            kwargs = {**func.kwargs, **kwargs}
            func = func.func
        if not callable(func):
            raise NkiTypeError(f"{func!r} is no function", rule="a kernel is a Python function")
        functools.update_wrapper(self, func)
        self.func, self.grid, self.kwargs = func, grid, kwargs
        self.func_name = getattr(func, "__name__", "kernel")

    @classmethod
    def __class_getitem__(cls, item: Any) -> Any:
        return cls

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.func)

    def __set_name__(self, owner: type, name: str) -> None:
        # a method of the class in whose body it stands; with __get__ here, dynamo of torch before 2.10 takes the kernel that is an
        # attribute of a module for a descriptor
        setattr(owner, name, _Method(self))

    def __getitem__(self, grid: Any) -> Any:
        if compiling.in_dynamo():
            return functools.partial(self.call_in_graph, grid)
        normalise_grid(grid)  # errors at the place of the subscript
        return self.copy(grid=grid)

    def copy(self, **changes: Any) -> Any:
        """The same kernel with another grid, mode or keywords."""
        kernel = copy.copy(self)
        kernel.grid = changes.pop("grid", self.grid)
        kernel.mode = changes.pop("mode", self.mode)
        kernel.kwargs = {**self.kwargs, **changes}
        kernel.copied()
        return kernel

    def copied(self) -> None:
        """Called on a fresh copy: what must not be shared is replaced, what was changed is checked."""

    def __reduce__(self) -> tuple[Any, ...]:
        return reduced(self, type(self), {"mode": self.mode, "grid": self.grid, "kwargs": self.kwargs, "func_name": self.func_name})

    def __copy__(self) -> Any:
        kernel = type(self).__new__(type(self))
        kernel.__dict__.update(self.__dict__)
        return kernel

    def __deepcopy__(self, memo: Any) -> Any:
        return self.copy()

    @classmethod
    def of_state(cls, func: Callable[..., Any], state: dict[str, Any]) -> Any:
        """The kernel of a pickle."""
        kernel = cls(func, grid=state["grid"], **state["kwargs"])
        kernel.mode, kernel.func_name = state["mode"], state["func_name"]
        return kernel

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.func_name} mode={self.mode!r} grid={self.grid}>"

    # ---- calls ----
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if compiling.in_dynamo():
            return self.call_in_graph(None, *args, **kwargs)
        builder = maybe_current()
        if builder is not None:
            return self.inline(builder, args, kwargs)
        return self.call(args, kwargs)

    def call_in_graph(self, grid: Any, *args: Any, **kwargs: Any) -> Any:
        """A call in a function that torch.compile reads; `grid` is None for that of the kernel."""
        return compiling.trace_call(self, grid, args, kwargs)  # type: ignore[misc]

    @compiling.constant_result
    def plan_in_graph(self, grid: Any, *call: Any) -> Any:
        """What `compiling.trace_call` asks about a call, answered while the graph is made."""
        return compiling.plan(self, grid, *call)  # type: ignore[misc]

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call from outside of kernels."""
        values, restore = adopt(args, kwargs)
        return restore(self.execute(*values))

    def inline(self, builder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call inside another kernel: its body becomes part of that kernel."""
        if self.grid is not None:
            raise make(
                "err_nested_kernel_with_spmd_grid",
                f"{self.func_name}[{self.grid}] is called inside a kernel",
            )
        outer = builder.options.get("experimental_flags", frozenset())
        builder.depth += 1
        builder.options["experimental_flags"] = outer | self.flags  # in its own body, and in what that calls
        try:
            return self.func(*args, **kwargs)
        finally:
            builder.depth -= 1
            builder.options["experimental_flags"] = outer

    @property
    def old_style(self) -> bool:
        """True where outputs are parameters that the kernel writes, and it need not return them."""
        return self.mode == "trace" or self.kwargs.get("kernel_return") is False

    @property
    def flags(self) -> frozenset[str]:
        """The experimental flags of the decorator."""
        flags = self.kwargs.get("experimental_flags", "")
        return frozenset(f.strip() for f in str(flags).split(",") if f.strip())

    def platform_target(self) -> str | None:
        """The target that the call names; None where the process decides."""
        return self.kwargs.get("platform_target")

    def options(self) -> Options:
        """Target, grid and flags of a call."""
        name = self.platform_target()
        if name:
            target, fallback = targets.resolve(name), False
        else:
            target, fallback = targets.detect()
            name = target.name
        sizes, cores = normalise_grid(self.grid) if self.grid is not None else ((), ())
        forced = getattr(self.kwargs.get(COMPILE_OPTS), "allocator", "auto") == "forced"
        return Options(
            target,
            str(name),
            fallback,
            sizes,
            cores,
            self.flags,
            self.old_style,
            {FORCE_AUTO: True} if forced else {},
        )

    def trace(self, *args: Any, **kwargs: Any) -> Kernel:
        """The Kernel IR for these arguments (arrays count by shape and dtype)."""
        return self.specialize_and_call(args, kwargs)[0]

    def specialize_and_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Kernel, list[Any]]:
        """Trace the body for the arguments: the kernel, and the array arguments in the order of its parameters."""
        values, _ = adopt(args, kwargs)
        return trace_kernel(self.func, values[0], values[1], self.options(), self.func_name)

    def simulate(self, *args: Any, **kwargs: Any) -> Any:
        """Run on the interpreter. The keywords of `RUN_OPTIONS` are opennki's, unless the kernel has a parameter of that
        name; all others are arguments of the kernel."""
        own = inspect.signature(self.func).parameters
        options = {k: kwargs.pop(k) for k in RUN_OPTIONS if k in kwargs and k not in own}
        return self.execute(args, kwargs, **options)

    def execute(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        checks: Any = None,
        eager: bool | None = None,
        order: str = "program",
        dump_file: Any = None,
        progress: Any = None,
    ) -> Any:
        """Trace for the arguments and run on the interpreter; results as the kernel returns them, written
        inputs updated in place."""
        current = settings.current()
        options = self.options()
        level = sim.Checks.of(checks if checks is not None else current.checks)
        if eager if eager is not None else current.eager:
            from opennki.interpret.eager import run_eager

            return run_eager(self.func, args, kwargs, options, level, seed=current.seed or 0, out=dump_file)
        kernel, arrays = trace_kernel(self.func, args, kwargs, options, self.func_name)
        tape = sim.tape_of(kernel, level, level.level != "full")
        outputs, news = sim.simulate(
            kernel,
            arrays,
            level,
            seed=current.seed or 0,
            out=dump_file,
            order=order,
            tape=tape,
            progress=progress,
            native=native if level.level != "full" else None,
        )
        return finish(kernel, arrays, outputs, news)


class _Method:
    """A kernel in the body of a class: `object.kernel` passes the object as first argument, as for a function."""

    def __init__(self, kernel: TraceKernel) -> None:
        self.kernel = kernel

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self.kernel if instance is None else functools.partial(self.kernel, instance)


def finish(
    kernel: Kernel, arrays: list[np.ndarray], outputs: list[np.ndarray], news: list[np.ndarray]
) -> Any:
    """Commit written inputs to the caller's arrays, and build the return value."""
    by_param = dict(zip((a for a in kernel.params if a in kernel.written_params), news, strict=True))
    targets_ = [
        (array, by_param[alloc])
        for alloc, array in zip(kernel.params, arrays, strict=True)
        if alloc in by_param
    ]
    sim.commit(targets_)
    results: list[Any] = list(outputs)
    for i, access in enumerate(kernel.outputs):
        for alloc, array in zip(kernel.params, arrays, strict=True):
            if access.alloc is alloc and access.is_whole and alloc in by_param:
                results[i] = array
    return rebuild(kernel.returns, results)


def adopt(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[tuple[Any, ...], dict[str, Any]], Callable[[Any], Any]]:
    """Arguments with CPU torch tensors as NumPy arrays on the same memory, and the function that turns
    results back. Raises NkiTypeError for JAX arrays, which have no memory of their own to write into."""
    torch = False
    for leaf in leaves((args, kwargs)):
        home = type(leaf).__module__.split(".")[0]
        if home in ("jax", "jaxlib"):
            raise NkiTypeError(
                f"{type(leaf).__name__} in place of a NumPy array",
                rule="simulate_kernel, and kernels of mode simulation, take NumPy arrays",
                fix="pass numpy.asarray(x), or call a kernel of mode auto or jax with the JAX arrays",
            )
        torch = torch or home == "torch"
    if not torch:
        return (args, kwargs), lambda result: result
    from opennki.kernels import torch_arrays

    mapped = torch_arrays.to_numpy((args, kwargs))
    return mapped, torch_arrays.to_torch


def leaves(value: Any) -> Iterator[Any]:
    """What is inside nested lists, tuples and dicts."""
    if isinstance(value, (list, tuple)):
        for v in value:
            yield from leaves(v)
    elif isinstance(value, dict):
        yield from leaves(list(value.values()))
    else:
        yield value
