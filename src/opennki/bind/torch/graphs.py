"""Calls of kernels in functions that torch.compile reads: an op with the payload in the graph.

`trace_call` is followed by dynamo, statement by statement, so it keeps to what dynamo knows. What it must know about the call it asks
`plan`, which runs as ordinary Python while the graph is made; its answers are constants of the graph. See `opennki.kernels.compiling`.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from opennki.bind.torch.dtypes import checked_name
from opennki.bind.torch.kernel import Launch, PyTorchXLAKernel
from opennki.kernels.compiling import constant_result
from opennki.trace.kernel import DeclTensor, Output

TENSOR, ITEMS, CONSTANT = "opennki.tensor", "opennki.items", "opennki.constant"
_MODES = ("auto", "torchxla")


def trace_call(kernel: Any, grid: Any, args: Any, kwargs: Any) -> Any:
    """A call in the graph. A call without tensors, or of a kernel of another mode, is no part of it."""
    tensors: list[Any] = []
    specs = [_spec(value, tensors) for value in args]
    named = [_spec(value, tensors) for value in kwargs.values()]
    if not tensors or kernel.mode not in _MODES or (tensors[0].device.type == "xla" and not _xla_is_handled()):
        return _outside(kernel, grid, args, kwargs)
    payload, printing, order, written, homes, rest, fresh, count, returns = kernel.plan_in_graph(
        grid, len(specs), tuple(kwargs), *specs, *named)
    operands = [tensors[i] for i in order]
    values: list[Any] = [None] * count
    graded = torch.is_grad_enabled() and any([t.requires_grad for t in operands])
    if not written or graded or operands[0].device.type == "xla":
        if printing:
            values = torch.ops.opennki.call_printing.default(operands, payload)
        elif graded:
            values = torch.ops.opennki.call.default(operands, payload)
        else:
            values = torch.ops.opennki.run.default(operands, payload)
        if written:
            values = list(values)
            for i, home in zip(written, homes):
                values[home] = operands[i].copy_(values[home])
    else:
        for i, home in zip(written, homes):
            values[home] = operands[i]
        for i, shape, dtype in fresh:
            values[i] = operands[written[0]].new_empty(shape, dtype=dtype)
        torch.ops.opennki.call_into.default([operands[i] for i in rest], values, payload)
    return _assembled(returns, values)


def _spec(value: Any, tensors: list[Any]) -> Any:
    """An argument as a constant: its tensors by shape and dtype. operator.index makes a number of a size that dynamo
    keeps open, as a kernel is for one set of sizes."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return (TENSOR, tuple([operator.index(n) for n in value.shape]), value.dtype)
    if isinstance(value, (list, tuple)):
        before = len(tensors)
        items = [_spec(v, tensors) for v in value]
        if len(tensors) > before:
            return (ITEMS, isinstance(value, list), *items)
    elif isinstance(value, dict):
        before = len(tensors)
        items = [_spec(v, tensors) for v in value.values()]
        if len(tensors) > before:
            return (ITEMS, tuple(value), *items)
    return value


def _assembled(returns: Any, values: Any) -> Any:
    """What the kernel returns, from its structure as `_structure` writes it."""
    kind = returns[0]
    if kind == "output":
        return values[returns[1]]
    if kind == "dict":
        return {key: _assembled(item, values) for key, item in zip(returns[1], returns[2:])}
    if kind == "constant":
        return returns[1]
    items = [_assembled(item, values) for item in returns[1:]]
    return items if kind == "list" else tuple(items)


@constant_result
def _xla_is_handled() -> bool:
    """Whether kernels on XLA tensors can be part of a graph."""
    from opennki.bind.torch_xla import bridge

    return bridge.handled()


@torch._disable_dynamo
def _outside(kernel: Any, grid: Any, args: Any, kwargs: Any) -> Any:
    """A call that is made when the program runs, between two graphs."""
    return (kernel if grid is None else kernel[grid])(*args, **kwargs)


# ---- run while the graph is made ------------------------------------------------------------------------------------
def plan(kernel: Any, grid: Any, count: int, names: tuple[str, ...], *specs: Any) -> Any:
    """What `trace_call` puts into the graph for arguments by `_spec`: payload, whether it prints, order of the operands, positions of
    written operands and of their results, of the other operands, the other results with their shapes and dtypes, the number of
    results, and the structure of the return value. Errors: as of a call."""
    values = [_value(spec) for spec in specs]
    kernel = kernel if grid is None else kernel.copy(grid=grid)
    concrete = kernel.build_cache_kernel(PyTorchXLAKernel)
    launch: Launch = concrete.launch(tuple(values[:count]), dict(zip(names, values[count:], strict=True)))
    made = launch.plan
    order = launch.order if launch.order is not None else range(len(made.operands))
    returns = launch.result.kernel_return
    if not launch.result.ir.outputs and len(returns) == 1:
        returns = returns[0]
    return (launch.payload, launch.result.has_prints, tuple(order), tuple(made.written), tuple(made.homes), tuple(made.rest),
            tuple((i, tuple(made.results[i].shape), made.results[i].dtype) for i in made.fresh), len(made.results), _structure(returns))


def _value(spec: Any) -> Any:
    if isinstance(spec, (tuple, list)) and spec:
        if spec[0] == TENSOR:
            return DeclTensor(tuple(spec[1]), checked_name(spec[2]))
        if spec[0] == ITEMS:
            items = [_value(item) for item in spec[2:]]
            return dict(zip(spec[1], items, strict=True)) if isinstance(spec[1], tuple) else items if spec[1] else tuple(items)
    return spec


def _structure(returns: Any) -> tuple[Any, ...]:
    if isinstance(returns, Output):
        return "output", returns.index
    if isinstance(returns, dict):
        return "dict", tuple(returns), *map(_structure, returns.values())
    if isinstance(returns, (list, tuple)):
        return "list" if isinstance(returns, list) else "tuple", *map(_structure, returns)
    return "constant", returns

