"""`neuronxcc.nki.nccl` and `neuronxcc.nki.nccl.collectives`: collectives over explicit groups of ranks. Not
in opennki yet."""

from __future__ import annotations

from opennki.dialects.neuronxcc._later import later
from opennki.dialects.neuronxcc._missing import missing

_M = "neuronxcc.nki.nccl"
all_reduce = later(_M, "all_reduce", "dsts[i] = op over the srcs[i] of the ranks of each group.")
all_gather = later(_M, "all_gather", "The shards of a group, concatenated along all_gather_dim.")
reduce_scatter = later(
    _M, "reduce_scatter", "op over a group, of which each rank keeps its shard along reduce_scatter_dim."
)
all_to_all = later(_M, "all_to_all", "Exchange of shards within a group.")
broadcast = later(_M, "broadcast", "The tensor of one rank on all ranks of its group.")
send = later(_M, "send", "Send tensors to a rank.")
recv = later(_M, "recv", "Receive tensors from a rank.")
collective_permute = later(_M, "collective_permute", "Copies by pairs of (source, target) ranks.")
collective_permute_implicit = later(
    _M, "collective_permute_implicit", "Exchange with the neighbours of a ring, per channel."
)
collective_permute_reduce_implicit = later(
    _M,
    "collective_permute_reduce_implicit",
    "Exchange with the neighbours of a ring and reduction, per channel.",
)

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "collective_permute",
    "collective_permute_implicit",
    "collective_permute_reduce_implicit",
    "recv",
    "reduce_scatter",
    "send",
]
__getattr__ = missing(_M)
