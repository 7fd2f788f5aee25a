"""`neuronxcc.nki.nccl` and `neuronxcc.nki.nccl.collectives`: collectives over explicit groups of ranks.

Source: seeds "Collectives" (names, order of arguments); api_legacy neuronxcc.nki.nccl. The operator may also stand first, as public
kernels write it. Kernels with collectives run by `opennki.launch`.
"""

from __future__ import annotations

from typing import Any

from opennki.dialects.neuronxcc._missing import missing
from opennki.lang import collectives as c
from opennki.lang.emit import call

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


def all_reduce(srcs: Any, dsts: Any, op: Any = None, replica_groups: Any = (), **kwargs: Any) -> None:
    """dsts[i] = op over the srcs[i] of the ranks of each group.

    srcs, dsts: lists of tensors of one shape in HBM or SBUF. replica_groups: lists of ranks of one size, none for all ranks.
    """
    c.all_reduce("all_reduce", srcs, dsts, op, replica_groups, kwargs)


def all_gather(srcs: Any, dsts: Any, op: Any = None, replica_groups: Any = (), all_gather_dim: int = 0, **kwargs: Any) -> None:
    """dsts[i] = the srcs[i] of the ranks of each group, joined along all_gather_dim. The operator means nothing."""
    c.all_gather("all_gather", srcs, dsts, op, all_gather_dim, replica_groups, kwargs)


def reduce_scatter(srcs: Any, dsts: Any, op: Any = None, replica_groups: Any = (), reduce_scatter_dim: int = 0, **kwargs: Any) -> None:
    """dsts[i] = op over the srcs[i] of a group, of which each rank keeps its shard along reduce_scatter_dim."""
    c.reduce_scatter("reduce_scatter", srcs, dsts, op, reduce_scatter_dim, replica_groups, kwargs)


def all_to_all(
    srcs: Any, dsts: Any, op: Any = None, replica_groups: Any = (), split_dim: int = 0, concat_dim: int = 0, **kwargs: Any
) -> None:
    """Each rank of a group splits srcs[i] along split_dim, and joins the parts it gets along concat_dim. The operator means nothing."""
    c.all_to_all("all_to_all", srcs, dsts, op, split_dim, concat_dim, replica_groups, kwargs)


def broadcast(srcs: Any, dsts: Any, op: Any = None, replica_groups: Any = (), broadcast_sizes: Any = None, **kwargs: Any) -> None:
    """dsts[i] = the srcs[i] of the first rank of each group. The operator means nothing."""
    c.broadcast("broadcast", srcs, dsts, op, broadcast_sizes, replica_groups, kwargs)


def collective_permute(dst: Any, src: Any, source_target_pairs: Any, **kwargs: Any) -> None:
    """dst = the src of the rank that stands before this one in a pair (source, target); zeros where there is none."""
    c.permute("collective_permute", src, dst, source_target_pairs, kwargs)


def send(srcs: Any, op: Any = None, peer_id: Any = None, **kwargs: Any) -> None:
    """Send tensors to a rank, which receives them with recv. peer_id: a rank, or a table with the peer of each rank."""
    for src in c.tensors("send", "srcs", srcs):
        call("rank_send", (), {"src": src, "peer_id": peer_id, **c.keywords("send", kwargs)})


def recv(dsts: Any, op: Any = None, peer_id: Any = None, replica_groups: Any = (), **kwargs: Any) -> None:
    """Receive tensors from a rank. peer_id: a rank, or a table with the peer of each rank."""
    for dst in c.tensors("recv", "dsts", dsts):
        call("rank_recv", (), {"dst": dst, "peer_id": peer_id, **c.keywords("recv", kwargs)})


def collective_permute_implicit(
    dst: Any, src: Any, replica_groups: Any = (), channel_id: Any = 0, num_channels: int = 1, mask: Any = None, **kwargs: Any
) -> None:
    """Send src to the successor in the ring of the group; dst = the src of the predecessor. HBM or SBUF tensors."""
    c.pairs("collective_permute_implicit", "rank_ring", c.tensors("collective_permute_implicit", "src", src),
            c.tensors("collective_permute_implicit", "dst", dst), {**kwargs, "mask": mask}, replica_groups=replica_groups,
            channel_id=channel_id, num_channels=num_channels)  # fmt: skip


def collective_permute_reduce_implicit(
    dst: Any, src0: Any, src1: Any, op: Any, replica_groups: Any = (), channel_id: Any = 0, num_channels: int = 1, mask: Any = None,
    **kwargs: Any,
) -> None:  # fmt: skip
    """Send op(src0, src1) to the successor in the ring of the group; dst = that of the predecessor."""
    call("rank_ring_reduce", (), {
        "dst": dst, "src": src0, "src1": src1, "op": op, "replica_groups": replica_groups, "channel_id": channel_id,
        "num_channels": num_channels, **c.keywords("collective_permute_reduce_implicit", {**kwargs, "mask": mask}),
    })  # fmt: skip


__getattr__ = missing("neuronxcc.nki.nccl")
