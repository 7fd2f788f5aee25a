"""Enumerations of `nki.isa`: engines, accumulator commands, DMA descriptor generation and out-of-bound
policy.

Names and numbers are those of the vendor's 2.26 API stub (api_legacy: isa.engine, isa.reduce_cmd,
isa.dge_mode, isa.oob_mode).
"""
from __future__ import annotations

from enum import IntEnum


class engine(IntEnum):
    """The engine that runs an instruction; `unknown` leaves the choice to the compiler."""

    tensor = 1
    vector = 5
    scalar = 2
    gpsimd = 3
    sync = 6
    unknown = 0


class reduce_cmd(IntEnum):
    """What an instruction does to the accumulator registers of its engine before and while it runs.

    `idle` leaves them, `reset` sets them to 0, `reduce` accumulates into them, `reset_reduce` sets them to 0
    and accumulates, `load_reduce` starts from a value that the instruction is given (the number is that of
    the 2.27 tests' enumeration, which the 2.26 stub lacks).
    """

    idle = 0
    reset = 1
    reduce = 2
    reset_reduce = 3
    load_reduce = 4


class dge_mode(IntEnum):
    """Who makes the descriptors of a DMA: nobody at run time, GpSimd software, hardware (gen3 and later),
    or the compiler chooses."""

    none = 0
    swdge = 1
    hwdge = 2
    unknown = 3


class oob_mode(IntEnum):
    """What an indirect DMA does with an index outside the tensor: raise an error, or leave that row."""

    error = 0
    skip = 1


tensor_engine = engine.tensor
vector_engine = engine.vector
scalar_engine = engine.scalar
gpsimd_engine = engine.gpsimd
# The enumeration has no DMA member; the queues of the Sync Engine are the ones that issue plain DMAs.
dma_engine = engine.sync
unknown_engine = engine.unknown

# Names of the engines as declarations write them, by enumeration member.
ENGINE_NAMES = {engine.tensor: "tensor", engine.vector: "vector", engine.scalar: "scalar",
                engine.gpsimd: "gpsimd",
                engine.sync: "dma", engine.unknown: ""}
