"""Instruction set of the NeuronCore: data types, scalar functions, reduction order, targets, instructions.

Importing the package declares every instruction, so that `declare.ISA` is complete.
"""
from opennki.isa import (
    collectives,
    dma,
    gpsimd_engine,
    language_elementwise,
    language_ops,
    scalar_engine,
    tensor_engine,
    vector_elementwise,
    vector_reduce,
    vector_topk,
)
