"""nki_call_p: the primitive that stands for a call of a kernel in a JAX program, and its rules but for lowering."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.interpreters import ad, batching

from opennki.bind.jax import compat
from opennki.bind.jax.eager import nki_call_impl
from opennki.errors import UNKNOWN, NkiDifferentiationError, NkiTypeError
from opennki.kernels.framework import TraceResult

NOT_CACHED = (
    "NKI trace is not properly cached, use ``export NKI_DONT_CACHE_TRACE_FOR_JAX_LOWERING=TRUE`` to workaround the issue"
)

nki_call_p = compat.make_primitive("nki_call")


class JaxTraceResult:
    """A traced kernel as parameter of the primitive: equal to another one with the same payload, so that JAX finds
    what it has lowered and compiled before.

    result: the specialisation. retrace: makes it again (NKI_DONT_CACHE_TRACE_FOR_JAX_LOWERING). inline: expand the
    kernel into the program instead of calling it. site: 0, or a number that other calls of the same kernel do not have.
    """

    __slots__ = ("_hash", "inline", "payload", "result", "retrace", "site")

    def __init__(self, result: TraceResult, retrace: Callable[[], TraceResult], inline: bool = False, site: int = 0) -> None:
        self.result, self.retrace, self.inline, self.site = result, retrace, inline, site
        self.payload = result.payload  # the same bytes object at each call: its hash is known
        self._hash = hash((result.dumped_config, inline, site))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, JaxTraceResult)
            and self._hash == other._hash
            and self.inline == other.inline
            and self.site == other.site
            and self.result.dumped_config == other.result.dumped_config
        )

    def __repr__(self) -> str:
        grid = [v.hi + 1 for v in self.result.ir.grid]
        return f"{self.result.func_name}{grid or ''}"


def check_operands(avals: Any, trace: JaxTraceResult) -> None:
    """The operands are those that the kernel was traced for. Errors: NkiTypeError with the vendor's words."""
    operands = trace.result.operands
    given = [(tuple(a.shape), np.dtype(a.dtype).name) for a in avals]
    if len(given) != len(operands) or any(
        shape != o.shape or dtype != r for (shape, dtype), o, r in zip(given, operands, _names(trace), strict=True)
    ):
        raise NkiTypeError(
            f"{trace.result.func_name} was traced for {[(o.shape, o.dtype) for o in operands]} and is called with {given}. {NOT_CACHED}",
            loc=UNKNOWN, rule="a traced kernel is for one set of shapes and dtypes",
        )


def _names(trace: JaxTraceResult) -> list[str]:
    from opennki.kernels.framework import public_dtype

    return [public_dtype(o.dtype).name for o in trace.result.operands]


def nki_call_eval(*avals: Any, trace: JaxTraceResult) -> Any:
    """Abstract evaluation: shapes and dtypes of the results, and an effect for kernels that print."""
    check_operands(avals, trace)
    outs = [compat.shaped(rt.shape, rt.dtype, avals) for rt in trace.result.return_types]
    effect = compat.effect()
    return outs, ({effect} if effect is not None and trace.result.has_prints else set())


nki_call_p.def_effectful_abstract_eval(nki_call_eval)

@nki_call_p.def_impl
def _impl(*args: Any, trace: JaxTraceResult) -> list[Any]:
    check_operands(args, trace)
    return nki_call_impl(*args, primitive=nki_call_p, trace=trace)


def _batch(args: Any, dims: Any, *, trace: JaxTraceResult) -> Any:
    """vmap: the kernel once for each element of the batch, in order. A batched kernel would be another kernel."""
    moved = [x if d is None else jax.numpy.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)]
    mapped = [x for x, d in zip(moved, dims, strict=True) if d is not None]

    def one(parts: Any) -> Any:
        rest = iter(parts)
        return nki_call_p.bind(*[x if d is None else next(rest) for x, d in zip(moved, dims, strict=True)], trace=trace)

    return jax.lax.map(one, mapped), [0] * len(trace.result.return_types)


batching.primitive_batchers[nki_call_p] = _batch


def _jvp(primals: Any, tangents: Any, *, trace: JaxTraceResult) -> Any:
    if trace.inline:
        from opennki.bind.inline import inline

        full = [ad.instantiate_zeros(t) for t in tangents]
        return jax.jvp(inline(trace.result.ir), tuple(primals), tuple(full))
    name = trace.result.func_name
    raise NkiDifferentiationError(
        f"Differentiation rule for '{name}' not implemented: the derivative of an NKI kernel is not known",
        loc=trace.result.ir.locs[0] if trace.result.ir.locs else UNKNOWN,
        rule="a kernel that is differentiated has a rule of its own",
        fix="wrap the call in jax.custom_vjp with a backward pass, as docs/jax.md shows, stop_gradient its inputs, "
        "or let JAX differentiate the expanded kernel (inline=True)",
    )


ad.primitive_jvps[nki_call_p] = _jvp
