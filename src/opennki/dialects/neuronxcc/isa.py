"""`neuronxcc.nki.isa`: one function per instruction, made from the declarations in `opennki.isa`.

`help(nisa.tensor_tensor)` or `opennki ops tensor_tensor` shows operands, memories, dtypes, limits and cost.
"""

from __future__ import annotations

import inspect
from typing import Any

from opennki.dialects.neuronxcc import isa_constants as constants
from opennki.dialects.neuronxcc._missing import missing
from opennki.dialects.neuronxcc._signatures import INSTRUCTIONS, signature_of
from opennki.errors import NkiTypeError
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


def _surface(decl: Instruction) -> Any:
    """The function of an instruction."""
    name, shown = decl.name, signature_of(decl)
    hidden = frozenset(decl.index) - frozenset(shown.parameters)

    def function(*args: Any, **kwargs: Any) -> Any:
        if kwargs and not hidden.isdisjoint(kwargs):
            raise NkiTypeError(f"{name} has no argument {min(hidden & kwargs.keys())!r}",
                               rule=f"the signature is {name}{shown}")
        return call(name, args, kwargs)

    function.__name__ = function.__qualname__ = name
    function.__module__ = "neuronxcc.nki.isa"
    function.__doc__ = inspect.cleandoc(decl.doc)
    function.__signature__ = shown  # type: ignore[attr-defined]
    if name in SCALAR:  # it can stand as an operator as well
        function.nki_op = name  # type: ignore[attr-defined]
    return function


globals().update({name: _surface(ISA[name]) for name in INSTRUCTIONS})


def get_nc_version() -> nc_version:
    """Generation of the NeuronCore that the kernel is traced for: gen2 (trn1, inf2), gen3 (trn2) or gen4
    (trn3).

    Raises err_nki_api_outside_of_nki_kernel.
    """
    return nc_version(current().target.generation)


def _tiled_offloaded_memcpy(*, src: Any, dst: Any, **kwargs: Any) -> None:
    """dst = src by DMA, in HBM or SBUF (private to the vendor, used by public kernels)."""
    call("tiled_offloaded_memcpy", (), {"src": src, "dst": dst, **kwargs})


def _tiled_offloaded_fma(*srcs: Any, dst: Any, scales: Any) -> None:
    """dst = sum of scales[k] * srcs[k] by DMA, for up to 8 sources (private to the vendor, used by public
    kernels)."""
    call("tiled_offloaded_fma", tuple(srcs), {"dst": dst, "scales": tuple(scales)})


__all__ = [
    *INSTRUCTIONS,
    "constants",
    "dge_mode",
    "dma_engine",
    "engine",
    "fp32",
    "get_nc_version",
    "gpsimd_engine",
    "nc_version",
    "oob_mode",
    "reduce_cmd",
    "scalar_engine",
    "tensor_engine",
    "unknown_engine",
    "vector_engine",
]
__getattr__ = missing("neuronxcc.nki.isa")
