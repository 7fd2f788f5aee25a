"""Tracing a Python function into a `Kernel`: bind the arguments, run the body, collect the outputs.

Arrays become inputs of the kernel; everything else is a compile-time constant. Source: api_legacy section 1 "Outputs and aliasing",
design "Tracing rules".
"""
from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from opennki.collector import collection_put_off
from opennki.errors import Loc, NkiTypeError, NkiValueError, make
from opennki.ir.affine import Var
from opennki.ir.build import activate, deactivate
from opennki.ir.nodes import Access, Alloc, DoWhile, For, If, Instr, Kernel, Stmt, statements
from opennki.ir.verify import accesses
from opennki.isa import dtypes
from opennki.isa.target import MULTI_CORE_TARGETS, Target
from opennki.lang.tensor import Tensor
from opennki.trace.tracer import Tracer, retrace


@dataclass(frozen=True, slots=True)
class DeclTensor:
    """A tensor argument by shape and dtype (canonical name)."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Output:
    """Place of the n-th output in the structure of a return value."""

    index: int


@dataclass(slots=True)
class Options:
    """How to trace: target, launch grid, and the keywords that harnesses pass to the decorators."""

    target: Target
    target_name: str
    is_fallback: bool = False
    grid: tuple[int, ...] = ()
    cores: tuple[int, ...] = ()
    flags: frozenset[str] = frozenset()
    old_style: bool = False
    extra: dict[str, Any] = field(default_factory=dict)


def is_array(value: Any) -> bool:
    """True for what becomes an input: arrays and declared tensors (NumPy scalars are constants)."""
    return isinstance(value, (np.ndarray, DeclTensor))


_PLAIN = frozenset({int, float, str, bool, type(None)})


def map_arrays(value: Any, name: str, fn: Callable[[Any, str], Any], wanted: Callable[[Any], bool] = is_array) -> Any:
    """The value with each array in it (also inside lists, tuples and dicts) replaced by fn(array, name); containers without any stay the
    same objects. `wanted` says what an array is."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, dict):
        mapped = {k: map_arrays(v, f"{name}_{k}", fn, wanted) for k, v in value.items()}
        return value if all(mapped[k] is v for k, v in value.items()) else mapped
    if isinstance(value, (list, tuple)):
        items = [map_arrays(v, f"{name}_{i}", fn, wanted) for i, v in enumerate(value)]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        return kind(*items) if hasattr(value, "_fields") else list(items) if isinstance(value, list) else tuple(items)
    return fn(value, name) if wanted(value) else value


def bind_arguments(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
    """Bind a call to the signature of the kernel, defaults applied."""
    signature = inspect.signature(func)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as exc:
        raise NkiTypeError(f"{getattr(func, '__name__', 'kernel')}: {exc}", rule=f"the signature is {signature}") from None
    bound.apply_defaults()
    return bound


def arrays_of(bound: inspect.BoundArguments) -> list[Any]:
    """The array arguments of a call in the order of `kernel.params`: what a kernel that was traced for such a call is run on."""
    return _Params(bound).values


def is_mutable(annotation: Any) -> bool:
    """True for nt.mutable_tensor and nt.tensor[nt.mutable], also as text."""
    if isinstance(annotation, str):
        return "mutable" in annotation
    return bool(getattr(annotation, "nki_mutable", False))


def array_dtype(value: Any, name: str) -> str:
    """Canonical dtype of an array argument; raises for objects, text and dates."""
    if isinstance(value, DeclTensor):
        return value.dtype
    try:
        kind = dtypes.canonical(value.dtype)
    except TypeError as exc:
        raise NkiTypeError(f"argument {name!r} is an array of {value.dtype}", why=str(exc),
                           rule="a kernel takes arrays of numbers", fix="convert it with .astype(np.float32)") from None
    return kind


class _Params:
    """The input tensors of a call, the same at each retrace."""

    def __init__(self, bound: inspect.BoundArguments) -> None:
        self.allocs: list[Alloc] = []
        self.mutable: list[bool] = []
        self.values: list[Any] = []
        parameters = bound.signature.parameters
        self.args: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            self._mutable = is_mutable(parameters[name].annotation)
            self.args[name] = map_arrays(value, name, self._declare)
        self.bound = inspect.BoundArguments(bound.signature, bound.arguments.copy())

    def _declare(self, value: Any, name: str) -> Tensor:
        dtype = array_dtype(value, name)
        alloc = Alloc(-len(self.allocs) - 1, name, tuple(int(n) for n in value.shape), dtype, "shared_hbm", "param")
        self.allocs.append(alloc)
        self.mutable.append(self._mutable)
        self.values.append(value)
        return Tensor.of(alloc)

    def call(self, func: Callable[..., Any]) -> Any:
        """Call the kernel function with tensors in place of arrays."""
        self.bound.arguments.update(self.args)
        return func(*self.bound.args, **self.bound.kwargs)


def trace_kernel(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: Options,
                 name: str = "") -> tuple[Kernel, list[Any]]:
    """Trace a call: `trace_bound` for its bound arguments."""
    return trace_bound(func, bind_arguments(func, args, kwargs), options, name)


@collection_put_off()
def trace_bound(func: Callable[..., Any], bound: inspect.BoundArguments, options: Options, name: str = "") -> tuple[Kernel, list[Any]]:
    """Trace for bound arguments, which stay as they are. Returns the kernel and the array arguments in the order of `kernel.params`.

    `kernel.returns` is the structure of the return value with `Output` places. Raises NkiError with the user's line.
    """
    if options.cores and options.target_name not in MULTI_CORE_TARGETS and options.target.name not in MULTI_CORE_TARGETS:
        raise make("err_multi_cores_spmd_not_supported",
                   f"a grid over {max(options.cores) + 1} physical cores on {options.target_name}")
    params = _Params(bound)
    grid = tuple(Var(f"pid{axis}", 0, size - 1, "pid") for axis, size in enumerate(options.grid))

    def attempt(unrolled: frozenset[Any]) -> Kernel:
        tracer = new_tracer(options, grid, unrolled)
        token = activate(tracer)
        try:
            body, values = tracer.run(lambda: params.call(func))
            return _finish(tracer, params, name or getattr(func, "__name__", "kernel"), options, body, values)
        finally:
            deactivate(token)
            tracer.options.clear()
    return retrace(attempt), params.values


def new_tracer(options: Options, grid: tuple[Var, ...], unrolled: frozenset[Any], **kwargs: Any) -> Tracer:
    """A tracer for a kernel with these options."""
    tracer = Tracer(options.target, options.target_name, options.is_fallback, unrolled, **kwargs)
    tracer.grid = grid
    tracer.options["experimental_flags"] = options.flags
    tracer.options.update(options.extra)
    return tracer


def _finish(tracer: Tracer, params: _Params, name: str, options: Options, body: list[Any], values: list[Any]) -> Kernel:
    outputs, returns = collect_outputs(tracer, values)
    body = without_unused(body, outputs, tracer.temporaries)
    kernel = Kernel(name, params.allocs, body, outputs, tracer.grid, options.cores, options.target_name, dict(tracer.constants),
                    list(tracer.constant_allocs), [p for p in params.allocs if p.id in tracer.writes], tracer.locs,
                    tracer.has_collectives, returns)
    check_outputs(tracer, params.allocs, params.mutable, kernel, options)
    return kernel


def without_unused(body: list[Stmt], outputs: list[Access], temporaries: set[int]) -> list[Stmt]:
    """The statements without temporaries that nothing uses, because their maker was made to write elsewhere."""
    used = {o.alloc for o in outputs}
    for stmt in statements(body):
        if isinstance(stmt, Instr):
            used.update([a.alloc for a, _, _ in accesses(stmt)])
        elif isinstance(stmt, DoWhile) and stmt.cond is not None:
            used.add(stmt.cond.alloc)

    def keep(stmts: list[Stmt]) -> list[Stmt]:
        out = [s for s in stmts if not isinstance(s, Alloc) or s in used or s.id not in temporaries]
        for s in out:
            if isinstance(s, (For, DoWhile)):
                s.body = keep(s.body)
            elif isinstance(s, If):
                s.then, s.orelse = keep(s.then), keep(s.orelse)
        return out
    return keep(body)


def collect_outputs(tracer: Tracer, values: list[Any]) -> tuple[list[Access], Any]:
    """The returned tensors, and the structure of the return value; the same on every path."""
    first: tuple[list[Access], Any] | None = None
    for value in values:
        outputs: list[Access] = []

        def place(item: Any, outputs: list[Access] = outputs) -> Any:
            if isinstance(item, Tensor):
                if item.access.alloc.id in tracer.forwarded:
                    tracer.keep(item.access.alloc)
                for i, known in enumerate(outputs):
                    if known is item.access or (known.alloc is item.access.alloc and known.is_whole and item.access.is_whole):
                        return Output(i)
                outputs.append(item.access)
                return Output(len(outputs) - 1)
            if isinstance(item, (list, tuple)):
                return type(item)(*map(place, item)) if hasattr(item, "_fields") else type(item)(map(place, item))
            if isinstance(item, dict):
                return {k: place(v) for k, v in item.items()}
            return item
        returns = place(value)
        if first is None:
            first = outputs, returns
        elif ([(o.shape, o.dtype) for o in outputs] != [(o.shape, o.dtype) for o in first[0]]
              or [o.alloc for o in outputs] != [o.alloc for o in first[0]]):
            a, b = _made_at(first[0]), _made_at(outputs)
            raise NkiValueError(f"the paths through the kernel return different tensors: made at {a}, and at {b}",
                                rule="a kernel returns the same tensors whatever the program id",
                                fix="make the outputs before the branch and store into them on each side")
    assert first is not None
    return first


def _made_at(outputs: list[Access]) -> str:
    return ", ".join(str(o.alloc.loc) for o in outputs) or "nothing"


def check_outputs(tracer: Tracer, params: list[Alloc], mutable: list[bool], kernel: Kernel, options: Options) -> None:
    """Every output is stored to; parameters are written and returned by the rules."""
    returned = {o.alloc for o in kernel.outputs}
    for output in kernel.outputs:
        alloc = output.alloc
        if alloc.kind == "local" and alloc.id not in tracer.writes and alloc.space in ("shared_hbm", "private_hbm"):
            raise make("err_tensor_output_not_written_to",
                       f"the output {alloc.name or alloc!r} {alloc.shape} {alloc.dtype} is never stored to", loc=alloc.loc)
    written = [(p, m) for p, m in zip(params, mutable, strict=True) if p.id in tracer.writes]
    if not kernel.outputs and not written:
        raise make("err_tensor_output_not_written_to", f"the kernel {kernel.name} has no output",
                   fix="return a tensor made with nl.ndarray(..., buffer=nl.shared_hbm)", loc=_kernel_loc(tracer))
    for p, m in written:
        where = tracer.loc(tracer.writes[p.id])
        if m and p not in returned and "skip-mutable-return-check" not in options.flags and not options.old_style:
            raise make("err_mutable_parameter_not_returned", f"the mutable parameter {p.name!r} is written and not returned", loc=where)
        if not m and kernel.outputs and not options.old_style and "enable-mutable-parameter" not in options.flags:
            raise make("err_cannot_update_immutable_parameter", f"a write to the parameter {p.name!r}", loc=where)


def _kernel_loc(tracer: Tracer) -> Loc | None:
    return tracer.locs[0] if tracer.locs else None


def rebuild(returns: Any, values: list[Any]) -> Any:
    """The return value of a kernel, with the results in their places."""
    if isinstance(returns, Output):
        return values[returns.index]
    if isinstance(returns, (list, tuple)):
        items = [rebuild(v, values) for v in returns]
        return type(returns)(*items) if hasattr(returns, "_fields") else type(returns)(items)
    if isinstance(returns, dict):
        return {k: rebuild(v, values) for k, v in returns.items()}
    return returns
