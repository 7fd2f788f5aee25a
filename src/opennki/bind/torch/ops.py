"""The custom ops that run payloads on torch tensors, and their rules: shapes, derivatives, vmap.

    opennki::call(Tensor[] operands, str payload) -> Tensor[]
    opennki::run(Tensor[] operands, str payload) -> Tensor[]
    opennki::call_printing(Tensor[] operands, str payload) -> Tensor[]
    opennki::call_into(Tensor[] operands, Tensor(a!)[] targets, str payload) -> ()

`call` gives every result of the payload as a tensor of its own; parameters that the kernel writes are not changed. `run` is the same
without a derivative, for calls of which nobody asks one: with it, torch runs Python code around each call, which takes longer than the
call. `call_printing` is `call` for kernels that print, so that no compiler drops or moves it. `call_into` stores the results into
`targets`: those that are new values of parameters into the tensors of these, which are not among the operands then. The payload is that
of every bridge, and all that a program needs: one saved by torch.export runs where this module is imported.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch.autograd import forward_ad

from opennki.bind import fpmode, xla_ffi
from opennki.bind.host import HostKernel, host_kernel
from opennki.bind.torch import dtypes, ranks
from opennki.errors import UNKNOWN, NkiDifferentiationError, NkiTypeError, NkiValueError
from opennki.isa.dtypes import storage

Tensors = Sequence[Any]
NAMESPACE = "opennki"
_KEPT_SITES = 1024
_KEPT_RULES = 4096

library = torch.library.Library(NAMESPACE, "DEF")
library.define("call(Tensor[] operands, str payload) -> Tensor[]")
library.define("run(Tensor[] operands, str payload) -> Tensor[]")
library.define("call_printing(Tensor[] operands, str payload) -> Tensor[]")
library.define("call_into(Tensor[] operands, Tensor(a!)[] targets, str payload) -> ()")

call = torch.ops.opennki.call.default
run = torch.ops.opennki.run.default
call_printing = torch.ops.opennki.call_printing.default
call_into = torch.ops.opennki.call_into.default


class _Spec:
    """Shape and dtypes of an operand or result."""

    __slots__ = ("dtype", "name", "numpy", "shape", "strides")

    def __init__(self, name: str, shape: tuple[int, ...], dtype: str) -> None:
        self.name, self.shape, self.numpy = name, torch.Size(shape), storage(dtype)
        self.dtype = dtypes.CONTAINER_OF.get(dtype)
        self.strides = tuple(prod(max(n, 1) for n in shape[i + 1:]) for i in range(len(shape)))


@lru_cache(maxsize=64)
def _maker(dtype: Any) -> Any:
    """new(shape, strides): a new CPU tensor. It takes half the time of torch.empty, and no notice of torch.set_default_device."""
    return torch.empty(0, dtype=dtype, device="cpu").new_empty_strided


class Plan:
    """A payload, ready to run on tensors: `written` has the operands that are parameters which the kernel writes, `homes` the result
    that is the new value of each. These are the `excluded_output_tensors` of the vendor's bridge: the call makes no tensors of
    them, they go into those of the parameters. `fresh` has the other results."""

    __slots__ = ("excluded_output_tensors", "fresh", "homes", "host", "makers", "operands", "payload", "rest", "results", "wanted",
                 "written")

    def __init__(self, payload: str) -> None:
        self.payload = payload
        self.makers: list[tuple[Any, Any, Any]] | None = None
        self.host: HostKernel = host_kernel(payload.encode("ascii", "replace"))
        decoded = self.host.payload
        self.operands = [_Spec(p.name, p.shape, p.dtype) for p in decoded.kernel.params]
        self.wanted = [(spec.shape, spec.dtype) for spec in self.operands]
        self.results = [_Spec(r.name, r.shape, r.dtype) for r in decoded.results]
        self.written = [operand for operand, _ in decoded.aliases]
        self.homes = [result for _, result in decoded.aliases]
        self.rest = [i for i in range(len(self.operands)) if i not in set(self.written)]
        self.excluded_output_tensors = frozenset(self.homes)
        self.fresh = [i for i in range(len(self.results)) if i not in self.excluded_output_tensors]
        for spec in self.results:
            if spec.dtype is None:
                raise NkiTypeError(f"{decoded.func_name}: torch has no dtype for the result {spec.name!r}", loc=UNKNOWN,
                                   rule="the results of a kernel in a PyTorch program are of dtypes that torch has")

    def merged(self, operands: Tensors, targets: Tensors) -> list[Any]:
        """All operands in the order of the kernel's parameters. Errors: NkiTypeError."""
        if len(operands) != len(self.rest) or len(targets) != len(self.results):
            raise self.unfit(len(operands) + len(self.written))
        merged: list[Any] = [None] * len(self.operands)
        for i, tensor in zip(self.rest, operands, strict=True):
            merged[i] = tensor
        for i, home in zip(self.written, self.homes, strict=True):
            merged[i] = targets[home]
        self.check(merged, self.operands)
        self.check([targets[i] for i in self.fresh], [self.results[i] for i in self.fresh])
        return merged

    def unfit(self, count: int) -> NkiTypeError:
        """The error of a call with another number of tensors."""
        return NkiTypeError(f"{self.host.payload.func_name}: the call has {count} operands, and the kernel in its payload "
                            f"{len(self.operands)}", loc=UNKNOWN, rule="a call has the operands that its payload names")

    def check(self, tensors: Tensors, specs: Sequence[_Spec]) -> None:
        """Shapes, dtypes and number of operands or results. Errors: NkiTypeError."""
        if len(tensors) != len(specs):
            raise self.unfit(len(tensors))
        for spec, tensor in zip(specs, tensors, strict=True):
            if tensor.shape != spec.shape or tensor.dtype is not spec.dtype:
                raise NkiTypeError(
                    f"{spec.name!r} is {tensor.dtype}{list(tensor.shape)}, and {spec.dtype}{list(spec.shape)} in the payload",
                    loc=UNKNOWN, rule="a call has the operands that its payload names",
                    fix="call the kernel again for these shapes: a payload is for one set of them")

    def empty_on(self, device: Any) -> list[Any]:
        """New tensors for the results on a device, real or not."""
        return [torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in self.results]

    def made(self) -> list[tuple[Any, Any, Any]]:
        """What makes new CPU tensors for the results. Not to be called inside of a mode or transformation of torch, which would change
        what is kept here."""
        self.makers = [(_maker(spec.dtype), spec.shape, spec.strides) for spec in self.results]
        return self.makers

    def apply(self, operands: Tensors) -> list[Any]:
        """The results for CPU tensors, as new tensors. Errors: NkiTypeError for others than the payload names; those of the kernel.

        One long function: calls of small kernels take as long as what is around them, and in a program of torch.compile, whose hook
        sees each Python function that is called, each costs more.
        """
        if len(operands) != len(self.wanted):
            raise self.unfit(len(operands))
        places = []
        for tensor, (shape, dtype) in zip(operands, self.wanted):
            if tensor.shape != shape or tensor.dtype is not dtype:
                self.check(operands, self.operands)
            if not tensor.is_contiguous():
                return self.apply([t.contiguous() for t in operands])
            places.append(tensor.data_ptr())
        results = []
        for new, shape, strides in self.makers or self.made():
            tensor = new(shape, strides)
            results.append(tensor)
            places.append(tensor.data_ptr())
        at = self.host.plan()[0].at
        if at is not None:  # native code, which sets the floating-point mode itself
            at(places)
        else:
            _run(self, operands, results)
        return results


_sites: dict[tuple[int, str], Plan] = {}


def plan_of(payload: str) -> Plan:
    """The plan of a payload. Errors: NkiParseError for what is no payload.

    torch hands a new string to each call. It is compared with the payload of the same length and end that came last, which
    takes no time; hashing kilobytes would.
    """
    site = len(payload), payload[-64:-32]
    plan = _sites.get(site)
    if plan is None or plan.payload != payload:
        plan = Plan(payload)
        if len(_sites) >= _KEPT_SITES:
            _sites.clear()
        _sites[site] = plan
    return plan


# ---- on the CPU -----------------------------------------------------------------------------------------------------
_view = xla_ffi.view


def _run(plan: Plan, tensors: Tensors, results: Tensors) -> None:
    """Run on contiguous CPU tensors that were checked."""
    prepared, seed = plan.host.plan()
    if prepared.at is not None:
        prepared.at([t.data_ptr() for t in (*tensors, *results)])
        return
    inputs = [_view(t.data_ptr(), spec.shape, spec.numpy, False) for t, spec in zip(tensors, plan.operands, strict=True)]
    outputs = [_view(t.data_ptr(), spec.shape, spec.numpy) for t, spec in zip(results, plan.results, strict=True)]
    mode = fpmode.enter()
    try:
        if plan.host.meets and ranks.several():
            ranks.run(plan.host, inputs, outputs)
        else:
            prepared.run(inputs, outputs, seed=seed)
    finally:
        fpmode.leave(mode)


def _cpu_call(operands: Tensors, payload: str) -> list[Any]:
    return plan_of(payload).apply(operands)


def _cpu_call_into(operands: Tensors, targets: Tensors, payload: str) -> None:
    plan = plan_of(payload)
    apply_into(plan, plan.merged(operands, targets), targets)


def apply_into(plan: Plan, tensors: list[Any], targets: Tensors) -> None:
    """Store the results into `targets`, for all operands, which are those in the places of written parameters. They are CPU tensors that
    were checked. Errors: NkiValueError where they share memory; those of the kernel."""
    _apart(plan, tensors)
    places = [t if t.is_contiguous() else t.contiguous() for t in targets]
    for i, home in zip(plan.written, plan.homes, strict=True):
        tensors[i] = places[home]
    _run(plan, [t if t.is_contiguous() else t.contiguous() for t in tensors], places)
    for tensor, place in zip(targets, places, strict=True):
        if place is not tensor:
            tensor.copy_(place)
    torch.autograd.graph.increment_version(list(targets))


def extent(tensor: Any) -> tuple[int, int]:
    """First and last byte address, the last one not included, of what a tensor may touch."""
    if not tensor.numel():
        return 0, 0
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _apart(plan: Plan, tensors: Tensors) -> None:
    """Refuse a written parameter that shares memory with another operand, or with itself. Errors: NkiValueError."""
    for i in plan.written:
        written = tensors[i]
        low, high = extent(written)
        for j, other in enumerate(tensors):
            if j == i:
                overlaps = not written.is_contiguous() and any(
                    s == 0 and n > 1 for s, n in zip(written.stride(), written.shape, strict=True))
            else:
                start, end = extent(other)
                overlaps = start < high and low < end
            if overlaps:
                names = [plan.operands[k].name for k in (i, j)]
                raise NkiValueError(
                    f"{plan.host.payload.func_name} writes {names[0]!r}, which "
                    + (f"shares memory with {names[1]!r}" if i != j else "holds several of its elements in one place"), loc=UNKNOWN,
                    operand=names[0], rule="a tensor that a kernel writes shares no memory with its other tensors",
                    why="the result would depend on the order of the kernel's instructions", fix="pass a clone of one of them")


for _name in ("call", "run", "call_printing"):
    library.impl(_name, _cpu_call, "CPU")
library.impl("call_into", _cpu_call_into, "CPU")


# ---- shapes ---------------------------------------------------------------------------------------------------------
def _fake_call(operands: Tensors, payload: str) -> list[Any]:
    plan = plan_of(payload)
    plan.check(operands, plan.operands)
    return plan.empty_on(operands[0].device if operands else None)


def _fake_call_into(operands: Tensors, targets: Tensors, payload: str) -> None:
    plan_of(payload).merged(operands, targets)


# ---- derivatives ----------------------------------------------------------------------------------------------------
class Rule:
    """The derivative of a kernel: `backward(ctx, *gradients)` and `setup(ctx, inputs, outputs)`, as torch.library has them."""

    __slots__ = ("backward", "setup")

    def __init__(self, backward: Callable[..., Any], setup: Callable[..., None] | None) -> None:
        self.backward, self.setup = backward, setup


_rules: OrderedDict[str, tuple[Rule, dict[str, Any]]] = OrderedDict()


def use_rule(payload: str, rule: Rule, constants: dict[str, Any]) -> None:
    """Make a kernel's rule that of a payload of it."""
    known = _rules.get(payload)
    if known is None or known[0] is not rule:
        _rules[payload] = rule, constants
        while len(_rules) > _KEPT_RULES:
            _rules.popitem(last=False)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    operands, payload = inputs
    ctx.nki_payload, ctx.nki_count = payload, len(operands)
    ctx.nki_rule, ctx.constants = _rules.get(payload, (None, {}))
    if ctx.nki_rule is None:
        return
    if ctx.nki_rule.setup is None:
        ctx.save_for_backward(*operands, *output)
    else:
        ctx.nki_rule.setup(ctx, tuple(operands), tuple(output))


def _backward(ctx: Any, gradients: Any) -> tuple[Any, None]:
    return _gradients(ctx, gradients), None


def _gradients(ctx: Any, gradients: Any) -> list[Any]:
    if ctx.nki_rule is None:
        kernel = plan_of(ctx.nki_payload).host.payload.kernel
        raise NkiDifferentiationError(
            f"Differentiation rule for '{kernel.name}' not implemented: the derivative of an NKI kernel is not known",
            loc=kernel.locs[0] if kernel.locs else UNKNOWN, rule="a kernel that is differentiated has a rule of its own",
            fix="give it one with opennki.bind.torch.register_autograd, as docs/pytorch.md shows, or detach its inputs")
    given = ctx.nki_rule.backward(ctx, *gradients)
    given = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    if len(given) != ctx.nki_count:
        raise NkiValueError(f"the rule of a kernel with {ctx.nki_count} operands gives {len(given)} gradients", loc=UNKNOWN,
                            rule="the backward function of a kernel returns a gradient, or None, for each operand")
    return list(given)


class _Call(torch.autograd.Function):
    """`call` inside the transformations of torch.func, which do not take the derivatives of custom ops."""

    @staticmethod
    def forward(op: Any, payload: str, *operands: Any) -> Any:
        return tuple(op(list(operands), payload))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, payload, *operands = inputs
        _setup(ctx, (operands, payload), output)
        ctx.mark_non_differentiable(*[t for t in output if not t.dtype.is_floating_point])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None, *_gradients(ctx, gradients)

    @staticmethod
    def vmap(info: Any, in_dims: Any, op: Any, payload: str, *operands: Any) -> Any:
        def inner(parts: list[Any], payload: str) -> Any:
            return invoke(parts, payload, op is call_printing)

        outputs, dims = _each(info.batch_size, inner, in_dims[2:], operands, payload)
        return tuple(outputs), tuple(dims)


class _Plain(torch.autograd.Function):
    """`call` where nothing but autograd wants to see it: half the time of what torch.library does for an op with a derivative."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, *operands: Any) -> Any:
        results = tuple(plan.apply(operands))
        _setup(ctx, (operands, plan.payload), results)
        ctx.mark_non_differentiable(*[t for t in results if not t.dtype.is_floating_point])
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, *_gradients(ctx, gradients)


_transformed = torch._C._functorch.peek_interpreter_stack  # not None inside of vmap, grad and other functions of torch.func


def invoke(operands: list[Any], payload: str, printing: bool) -> Any:
    """The op for a call: with a derivative only where somebody asks for one. All results, as new tensors."""
    op = call_printing if printing else call
    if (_transformed() is not None and torch.is_grad_enabled()) or forward_ad._current_level >= 0:
        return _Call.apply(op, payload, *operands)
    if not torch.is_grad_enabled():
        return (op if printing else run)(operands, payload)
    return (op if printing or any(t.requires_grad for t in operands) else run)(operands, payload)


# ---- the short way --------------------------------------------------------------------------------------------------
# An eager call on plain tensors, which no mode, transformation, tracer or profiler wants to see, needs no dispatcher: what would find
# the implementation for the CPU takes as long as a small kernel.
_sights: tuple[Any, ...] = ()
keys_of: Any = None
DENSE: frozenset[int] = frozenset()
try:
    _sights = (torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack, torch._C._get_tracing_state,
               torch.autograd._profiler_enabled)
    keys_of = torch._C._dispatch_keys
    DENSE = frozenset({keys_of(torch.empty(0, device="cpu")).raw_repr()})
except AttributeError:  # names that are torch's own may go
    pass
"""keys_of(tensor).raw_repr() is in DENSE for CPU tensors with memory of their own and nothing else to them: not sparse, nested, quantised,
wrapped by a transformation, negated by a view, made in inference mode."""


def unseen() -> bool:
    """Whether an eager call may take the short way."""
    for sight in _sights:
        if sight():
            return False
    return _transformed() is None and forward_ad._current_level < 0


def invoke_plain(plan: Plan, operands: list[Any]) -> Any:
    """`invoke` for tensors of DENSE, where `unseen()`."""
    if torch.is_grad_enabled():
        for t in operands:
            if t.requires_grad:
                return _Plain.apply(plan, *operands)
    return plan.apply(operands)


# ---- vmap -----------------------------------------------------------------------------------------------------------
def _slice(tensor: Any, dim: int | None, i: int) -> Any:
    return tensor if dim is None else tensor.select(dim, i)


def _each(size: int, op: Any, dims: Any, operands: Tensors, payload: str) -> tuple[list[Any], list[int]]:
    """The kernel once for each element of the batch: a batched kernel would be another kernel."""
    each = [op([_slice(t, d, i) for t, d in zip(operands, dims, strict=True)], payload) for i in range(size)]
    if not each:
        made = [torch.empty((0, *spec.shape), dtype=spec.dtype) for spec in plan_of(payload).results]
        return made, [0] * len(made)
    return [torch.stack(list(parts)) for parts in zip(*each, strict=True)], [0] * len(each[0])


def _vmap_call(op: Any) -> Callable[..., Any]:
    def rule(info: Any, in_dims: Any, operands: Tensors, payload: str) -> Any:
        return _each(info.batch_size, op, in_dims[0], operands, payload)

    return rule


def _vmap_into(info: Any, in_dims: Any, operands: Tensors, targets: Tensors, payload: str) -> Any:
    dims, places, _ = in_dims
    plan = plan_of(payload)
    for dim, spec in zip(places, plan.results, strict=True):
        if dim is None:
            raise NkiValueError(
                f"vmap: {plan.host.payload.func_name} writes {spec.name!r}, which is not batched", loc=UNKNOWN,
                rule="in vmap, a tensor that a kernel writes has the dimension of the batch",
                why="each element of the batch would write into the same tensor", fix="give it the dimension, with in_dims")
    for i in range(info.batch_size):
        call_into([_slice(t, d, i) for t, d in zip(operands, dims, strict=True)],
                  [_slice(t, d, i) for t, d in zip(targets, places, strict=True)], payload)
    return None, None


def _register() -> None:
    for op in (call, run, call_printing):
        torch.library.register_fake(op._name, _fake_call, lib=library)
        if op is not run:
            torch.library.register_autograd(op._name, _backward, setup_context=_setup, lib=library)
        torch.library.register_vmap(op._name, _vmap_call(op), lib=library)
    torch.library.register_fake(call_into._name, _fake_call_into, lib=library)
    torch.library.register_vmap(call_into._name, _vmap_into, lib=library)
    try:    # kernels that print run in order, whether or not anyone uses their results
        from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
    except ImportError:
        torch.fx.node.has_side_effect(call_printing)
    else:
        _register_effectful_op(call_printing, _EffectType.ORDERED)


_register()
