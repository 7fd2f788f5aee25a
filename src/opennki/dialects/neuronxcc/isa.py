"""`neuronxcc.nki.isa`: one function per instruction, made from the declarations in `opennki.isa`.

`help(nisa.tensor_tensor)` or `opennki ops tensor_tensor` shows operands, memories, dtypes, limits and cost.
"""
from __future__ import annotations

import inspect
from typing import Any

from opennki.dialects.neuronxcc import isa_constants as constants
from opennki.dialects.neuronxcc._missing import missing
from opennki.ir.build import current
from opennki.isa.declare import ISA, Instruction
from opennki.isa.enums import (
    dge_mode,
    dma_engine,
    engine,
    gpsimd_engine,
    oob_mode,
    reduce_cmd,
    scalar_engine,
    tensor_engine,
    unknown_engine,
    vector_engine,
)
from opennki.isa.scalar import SCALAR
from opennki.isa.target import nc_version
from opennki.lang.data import fp32
from opennki.lang.emit import call

# parameters of a declaration that only the tracer fills in
_INTERNAL = {"dropout": {"stream"}, "nc_matmul": {"dst", "accumulate"}}


def signature_of(decl: Instruction) -> inspect.Signature:
    """The signature that users see: that of the declaration without what the tracer fills in."""
    hidden = _INTERNAL.get(decl.name, set())
    parameters = [p for n, p in decl.signature.parameters.items() if n not in hidden]
    return decl.signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)


def _surface(decl: Instruction) -> Any:
    """The function of an instruction."""
    name = decl.name

    def function(*args: Any, **kwargs: Any) -> Any:
        return call(name, args, kwargs)
    function.__name__ = function.__qualname__ = name
    function.__module__ = "neuronxcc.nki.isa"
    function.__doc__ = decl.doc
    function.__signature__ = signature_of(decl)  # type: ignore[attr-defined]
    if name in SCALAR:  # it can stand as an operator as well
        function.nki_op = name  # type: ignore[attr-defined]
    return function


INSTRUCTIONS: tuple[str, ...] = tuple(name for name, decl in ISA.items() if decl.surface == "isa")
globals().update({name: _surface(ISA[name]) for name in INSTRUCTIONS})


def get_nc_version() -> nc_version:
    """Generation of the NeuronCore that the kernel is traced for: gen2 (trn1, inf2), gen3 (trn2) or gen4 (trn3).

    Raises err_nki_api_outside_of_nki_kernel.
    """
    return nc_version(current().target.generation)


def _tiled_offloaded_memcpy(*, src: Any, dst: Any, **kwargs: Any) -> None:
    """dst = src by DMA, in HBM or SBUF (private to the vendor, used by public kernels)."""
    call("tiled_offloaded_memcpy", (), {"src": src, "dst": dst, **kwargs})


def _tiled_offloaded_fma(*srcs: Any, dst: Any, scales: Any) -> None:
    """dst = sum of scales[k] * srcs[k] by DMA, for up to 8 sources (private to the vendor, used by public kernels)."""
    call("tiled_offloaded_fma", tuple(srcs), {"dst": dst, "scales": tuple(scales)})


__all__ = [*INSTRUCTIONS, "constants", "dge_mode", "dma_engine", "engine", "fp32", "get_nc_version", "gpsimd_engine", "nc_version",  # noqa: PLE0604
           "oob_mode", "reduce_cmd", "scalar_engine", "tensor_engine", "unknown_engine", "vector_engine"]
__getattr__ = missing("neuronxcc.nki.isa")
