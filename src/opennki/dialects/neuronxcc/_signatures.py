"""What users see of a declaration: its signature without what the tracer fills in, and the instructions of
`nki.isa`."""

from __future__ import annotations

import inspect

from opennki.isa.declare import ISA, Instruction

_INTERNAL = {"dropout": {"stream"}, "nc_matmul": {"dst", "accumulate"}}
INSTRUCTIONS: tuple[str, ...] = tuple(name for name, decl in ISA.items() if decl.surface == "isa")


def signature_of(decl: Instruction) -> inspect.Signature:
    """The signature of an instruction of `nki.isa` as the vendor documents it."""
    hidden = _INTERNAL.get(decl.name, set())
    parameters = [p for n, p in decl.signature.parameters.items() if n not in hidden]
    return decl.signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)
