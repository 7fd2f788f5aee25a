"""`neuronxcc.nki.distributed`: collectives over the tensor-parallel group, which is all ranks of the run.

Source: seeds "Collectives" (names, order of arguments). Kernels with collectives run by `opennki.launch`.
"""

from __future__ import annotations

from typing import Any

from opennki.dialects.neuronxcc._missing import missing
from opennki.lang import collectives as c

__all__ = ["all_gather", "all_reduce", "all_to_all", "broadcast", "collective_permute", "reduce_scatter"]


def all_reduce(srcs: Any, dsts: Any, op: Any = None, **kwargs: Any) -> None:
    """dsts[i] = op over the srcs[i] of all ranks. srcs, dsts: lists of tensors of one shape in HBM or SBUF."""
    c.all_reduce("all_reduce", srcs, dsts, op, (), kwargs)


def all_gather(srcs: Any, dsts: Any, op: Any = None, all_gather_dim: int = 0, **kwargs: Any) -> None:
    """dsts[i] = the srcs[i] of all ranks, joined along all_gather_dim. The operator means nothing."""
    c.all_gather("all_gather", srcs, dsts, op, all_gather_dim, (), kwargs)


def reduce_scatter(srcs: Any, dsts: Any, op: Any = None, reduce_scatter_dim: int = 0, **kwargs: Any) -> None:
    """dsts[i] = op over the srcs[i] of all ranks, of which each keeps its shard along reduce_scatter_dim."""
    c.reduce_scatter("reduce_scatter", srcs, dsts, op, reduce_scatter_dim, (), kwargs)


def all_to_all(srcs: Any, dsts: Any, op: Any = None, split_dim: int = 0, concat_dim: int = 0, **kwargs: Any) -> None:
    """Each rank splits srcs[i] along split_dim, and joins the parts it gets along concat_dim. The operator means nothing."""
    c.all_to_all("all_to_all", srcs, dsts, op, split_dim, concat_dim, (), kwargs)


def broadcast(srcs: Any, dsts: Any, op: Any = None, broadcast_sizes: Any = None, **kwargs: Any) -> None:
    """dsts[i] = the srcs[i] of rank 0. broadcast_sizes: the shape of the dsts, checked. The operator means nothing."""
    c.broadcast("broadcast", srcs, dsts, op, broadcast_sizes, (), kwargs)


def collective_permute(srcs: Any, dsts: Any, source_target_pairs: Any, **kwargs: Any) -> None:
    """dsts[i] = the srcs[i] of the rank that stands before this one in a pair (source, target); zeros where there is none."""
    c.permute("collective_permute", srcs, dsts, source_target_pairs, kwargs)


__getattr__ = missing("neuronxcc.nki.distributed")
