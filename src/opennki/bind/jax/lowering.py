"""Lowering rules of nki_call: the canonical custom call for the Neuron compiler, the typed FFI call for the CPU, and
the inline expansion.

Both calls carry the same payload. The canonical form has it as a string, with API_VERSION_UNSPECIFIED, as the seeds
show; XLA:CPU runs only the typed form (reference/bindings.md A1).
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from opennki import settings
from opennki.bind.jax import compat, processes
from opennki.bind.jax.handler import ATTRIBUTE, RANKS_TARGET, TARGET
from opennki.bind.jax.primitive import NOT_CACHED, JaxTraceResult, check_operands, nki_call_p
from opennki.errors import UNKNOWN, NkiValueError
from opennki.kernels.framework import TraceResult, between_ranks

INLINED = frozenset({"cuda", "rocm", "gpu", "tpu", "METAL"})  # platforms without a handler of ours


def traced(ctx: Any, trace: JaxTraceResult) -> TraceResult:
    """The trace to lower: that of abstract evaluation, or a new one where the setting asks for it."""
    check_operands(ctx.avals_in, trace)
    if not settings.current().dont_cache_trace_for_jax_lowering:
        return trace.result
    result = trace.retrace()
    if [tuple(rt) for rt in result.return_types] != [tuple(rt) for rt in trace.result.return_types]:
        raise NkiValueError(
            f"{trace.result.func_name} returns {list(result.return_types)} when it is traced again, and {list(trace.result.return_types)}"
            " before: the kernel depends on something that has changed",
            loc=UNKNOWN, rule="a kernel traced twice for the same arguments is the same kernel",
        )
    return result


def frontend_attributes(result: TraceResult) -> ir.DictAttr:
    """What HLO tools see of a call without decoding its payload."""
    return ir.DictAttr.get(
        {
            "nki.kernel": ir.StringAttr.get(result.func_name),
            "nki.has_collectives": ir.StringAttr.get(str(result.has_collectives).lower()),
        }
    )


def nki_call_lowering_rule(ctx: Any, *args: Any, trace: JaxTraceResult) -> Any:
    """The canonical custom call, for the neuron platform and for reading; on platforms that run neither it nor our
    handler the kernel is expanded where that was asked for."""
    platforms = ctx.platforms or ctx.module_context.platforms
    if trace.inline or (settings.current().jax_inline and any(p in INLINED for p in platforms)):
        return inline_rule(ctx, *args, trace=trace)
    result = traced(ctx, trace)
    types = [ir.RankedTensorType.get(a.shape, mlir.dtype_to_ir_type(np.dtype(a.dtype))) for a in ctx.avals_out]
    op = stablehlo.CustomCallOp(
        types,
        args,
        call_target_name=ir.StringAttr.get(TARGET),
        has_side_effect=ir.BoolAttr.get(result.has_prints),
        backend_config=ir.StringAttr.get(result.dumped_config),
        api_version=ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 0),
        called_computations=ir.ArrayAttr.get([]),
        operand_layouts=_layouts(ctx.avals_in),
        result_layouts=_layouts(ctx.avals_out),
        output_operand_aliases=ir.ArrayAttr.get(
            [
                stablehlo.OutputOperandAlias.get(
                    output_tuple_indices=[] if len(types) == 1 else [output], operand_index=operand, operand_tuple_indices=[]
                )
                for operand, output in result.operand_output_aliases
            ]
        ),
    )
    op.operation.attributes["mhlo.frontend_attributes"] = frontend_attributes(result)
    return op.results


def _layouts(avals: Any) -> ir.ArrayAttr:
    """Row-major layouts: the kernel counts on them."""
    index = ir.IndexType.get()
    return ir.ArrayAttr.get(
        [
            ir.DenseIntElementsAttr.get(np.arange(len(a.shape) - 1, -1, -1, dtype=np.int64), type=index, shape=[len(a.shape)])
            for a in avals
        ]
    )


def cpu_rule(ctx: Any, *args: Any, trace: JaxTraceResult) -> Any:
    """The typed FFI call with the same payload, which our handler runs."""
    if trace.inline:
        return inline_rule(ctx, *args, trace=trace)
    result = traced(ctx, trace)
    target = TARGET
    if between_ranks(result.ir):
        rank = compat.rank_words(ctx, result.func_name)
        if rank is not None:
            words, word_aval = rank
            if jax.process_count() > 1:
                processes.joined()  # before the program runs anywhere, this process can be found
            target, args, ctx = RANKS_TARGET, (*args, words), ctx.replace(avals_in=[*ctx.avals_in, word_aval])
    return jax.ffi.ffi_lowering(
        target,
        backend_config={ATTRIBUTE: ir.StringAttr.get(result.dumped_config)},
        operand_output_aliases=dict(result.operand_output_aliases) or None,
        has_side_effect=result.has_prints,
        extra_attributes={"mhlo.frontend_attributes": frontend_attributes(result)},
    )(ctx, *args)


def inline_rule(ctx: Any, *args: Any, trace: JaxTraceResult) -> Any:
    """The kernel expanded into the program."""
    from opennki.bind.inline import inline

    return mlir.lower_fun(inline(traced(ctx, trace).ir), multiple_results=True)(ctx, *args)


mlir.register_lowering(nki_call_p, nki_call_lowering_rule)
mlir.register_lowering(nki_call_p, cpu_rule, platform="cpu")

__all__ = ["NOT_CACHED", "nki_call_lowering_rule"]
