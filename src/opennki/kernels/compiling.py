"""Calls of kernels in functions that torch.compile reads.

torch.compile's front end, dynamo, follows the bytecode of the caller, through `kernel(x)` and `kernel[grid]` too. What is
behind them (signatures, tracing, caches, locks) is not for it: it would give up, or compile what must not be compiled. So
the two methods ask `in_dynamo()` first, and take the road of a framework that knows how to put a kernel into a graph.

Nothing here imports torch. A function that dynamo is to run while it traces, and whose result is a constant of the graph,
is marked by an attribute, which `torch.compiler.assume_constant_result` sets and `constant_result` sets here.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from opennki.ir.build import maybe_current

# trace_call(kernel, grid, args, kwargs), with grid None for that of the kernel: set when dynamo first meets a kernel.
trace_call: Callable[..., Any] | None = None
# plan(kernel, grid, count, names, *specs): what `trace_call` asks about a call, run while dynamo traces.
plan: Callable[..., Any] | None = None


def constant_result(function: Callable[..., Any]) -> Any:
    """Mark a function or method: dynamo runs it while it traces, and its result is a constant."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_result
def in_dynamo() -> bool:
    """Whether a graph is made of the caller. Inside the body of a kernel none is: sub-kernels become part of the kernel.

    Also true for Python code that runs while a graph is made (rules of derivatives, export); the road of `trace_call`
    serves it as well.
    """
    guards = sys.modules.get("torch._guards")
    if guards is None or guards.TracingContext.try_get() is None or maybe_current() is not None:
        return False
    return trace_call is not None or _find()


def _find() -> bool:
    global trace_call, plan
    from opennki.kernels.modes import frameworks

    for framework in frameworks():
        if framework.compiled and framework.module in sys.modules:
            module = importlib.import_module(framework.compiled)
            trace_call, plan = module.trace_call, module.plan
    return trace_call is not None
