"""`neuronxcc.nki.distributed`: collectives over the tensor-parallel group. Not in opennki yet."""

from __future__ import annotations

from opennki.dialects.neuronxcc._later import later
from opennki.dialects.neuronxcc._missing import missing

_M = "neuronxcc.nki.distributed"
all_reduce = later(_M, "all_reduce", "dsts[i] = op over the srcs[i] of all ranks of the group.")
all_gather = later(_M, "all_gather", "The shards of the group, concatenated along all_gather_dim.")
reduce_scatter = later(_M, "reduce_scatter", "op over the group, of which each rank keeps its shard.")
all_to_all = later(
    _M, "all_to_all", "Exchange of shards: split along one dimension, concatenated along another."
)
broadcast = later(_M, "broadcast", "The tensor of one rank on all ranks.")
collective_permute = later(_M, "collective_permute", "Copies between ranks.")

__all__ = ["all_gather", "all_reduce", "all_to_all", "broadcast", "collective_permute", "reduce_scatter"]
__getattr__ = missing(_M)
