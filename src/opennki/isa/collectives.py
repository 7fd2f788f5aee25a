"""Collectives: instructions in which ranks exchange tensors.

A rank is one participant of a distributed run (`opennki.launch`), with tensors of its own. A body gets the operands of all members of the
meeting, as lists in the order of the group (of letters: in the order of the senders), and returns the value for everyone, or a list with
the value of each member. Source: api_legacy neuronxcc.nki.nccl, call sites of public kernels; seeds "Collectives"; semantics of the
newer namespace's documents (api_nki section 6) where the legacy ones are silent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated as T
from typing import Any

import numpy as np

from opennki.errors import NkiTypeError, NkiValueError
from opennki.isa import cost, meeting, topology
from opennki.isa.declare import ANYWHERE, INTS, ON_CHIP, Affine, Array, Attr, In, Mask, Op, Out, instruction
from opennki.isa.reduce import reduce_list
from opennki.isa.scalar import SCALAR

REDUCIBLE = frozenset(name for name, f in SCALAR.items() if f.reducible)
Dst = T[Array, Out("*", ANYWHERE)]
Src = T[Array, In("*", ANYWHERE)]
Groups = T[Any, Attr((tuple, list), optional=True)]
Reduction = T[str, Op(REDUCIBLE)]
Masked = T[Any, Mask]
_SOURCE = "api_legacy: nccl.{}; seeds: Collectives"


def _bitwise(c: Any) -> bool:
    return SCALAR[c.op].group == "bitvec"


def check_groups(groups: Any) -> None:
    """Groups are lists of different ranks, of one size."""
    seen: set[int] = set()
    for group in groups or ():
        if not isinstance(group, (tuple, list)) or not group or not all(isinstance(r, int) and r >= 0 for r in group):
            raise NkiTypeError(f"replica_groups={groups!r}", operand="replica_groups", rule="replica_groups is a list of lists of ranks")
        if len(group) != len(groups[0]):
            raise NkiValueError(
                f"replica_groups has groups of {len(groups[0])} and of {len(group)} ranks",
                operand="replica_groups",
                rule="all groups have the same number of ranks",
                why="each rank runs the same program on shards of one size",
            )
        for rank in group:
            if rank in seen:
                rule = "a rank is in one group"
                raise NkiValueError(f"rank {rank} is in replica_groups twice", operand="replica_groups", rule=rule)
            seen.add(rank)


def _same_dtype(c: Any) -> None:
    if c.src.dtype != c.dst.dtype:
        raise NkiTypeError(
            f"src is {c.src.dtype} and dst is {c.dst.dtype}",
            operand="dst",
            rule="a collective that copies keeps the dtype",
            why="it moves bytes",
            fix="cast before or after it",
        )


def _same_shape(c: Any) -> None:
    if tuple(c.src.shape) != tuple(c.dst.shape):
        raise NkiValueError(
            f"src is {tuple(c.src.shape)} and dst is {tuple(c.dst.shape)}", operand="dst", rule="src and dst have one shape"
        )


def _axis(c: Any, name: str, what: str = "src") -> int:
    axis, rank = getattr(c, name), len(getattr(c, what).shape)
    if not isinstance(axis, int) or not -rank <= axis < rank:
        raise NkiValueError(f"{name}={axis!r} of a tensor of {rank} dimensions", operand=name, rule="it is one of the tensor's dimensions")
    return axis % rank


def _scaled(c: Any, name: str, grows: str, shrinks: str) -> None:
    """dst is src, times the size of the groups along one dimension: `grows` has the larger one."""
    axis = _axis(c, name)
    large, small = tuple(getattr(c, grows).shape), tuple(getattr(c, shrinks).shape)
    count = len(c.replica_groups[0]) if c.replica_groups else 0
    fits = len(large) == len(small) and all(a == b for i, (a, b) in enumerate(zip(large, small, strict=True)) if i != axis)
    if not fits or large[axis] % max(1, small[axis]) or (count and large[axis] != small[axis] * count):
        raise NkiValueError(
            f"src is {tuple(c.src.shape)} and dst is {tuple(c.dst.shape)}" + (f" with groups of {count}" if count else ""),
            operand="dst",
            rule=f"{grows} is {shrinks}, times the number of ranks of a group along {name}",
        )


def _check_reduce(c: Any) -> None:
    check_groups(c.replica_groups)
    if _bitwise(c) and (c.src.dtype not in INTS or c.dst.dtype != c.src.dtype):
        raise NkiTypeError(
            f"{c.op} of {c.src.dtype} data into {c.dst.dtype}",
            operand="src",
            rule="a bitwise reduction takes and makes integers",
            why="it works on bits",
            fix="view the data as an integer type of the same size",
        )


def _check_all_reduce(c: Any, target: Any) -> None:
    _check_reduce(c)
    _same_shape(c)


def _check_reduce_scatter(c: Any, target: Any) -> None:
    _check_reduce(c)
    _scaled(c, "reduce_scatter_dim", "src", "dst")


def _check_all_gather(c: Any, target: Any) -> None:
    check_groups(c.replica_groups)
    _same_dtype(c)
    _scaled(c, "all_gather_dim", "dst", "src")


def _check_all_to_all(c: Any, target: Any) -> None:
    check_groups(c.replica_groups)
    _same_dtype(c)
    split, joined = _axis(c, "split_dim"), _axis(c, "concat_dim")
    count = len(c.replica_groups[0]) if c.replica_groups else 0
    if count and c.src.shape[split] % count:
        raise NkiValueError(
            f"dimension {split} of src {tuple(c.src.shape)} in groups of {count}",
            operand="src",
            rule="the dimension that is split is a multiple of the number of ranks of a group",
        )
    if len(c.src.shape) != len(c.dst.shape) or int(np.prod(c.src.shape)) != int(np.prod(c.dst.shape)):
        raise NkiValueError(
            f"src is {tuple(c.src.shape)} and dst is {tuple(c.dst.shape)}",
            operand="dst",
            rule=f"dst is src with dimension {split} divided and dimension {joined} multiplied by the number of ranks",
        )


def _check_copy(c: Any, target: Any) -> None:
    check_groups(getattr(c, "replica_groups", None))
    _same_dtype(c)
    _same_shape(c)


def _check_pairs(c: Any, target: Any) -> None:
    _same_dtype(c)
    _same_shape(c)
    pairs = c.source_target_pairs
    if not all(isinstance(p, (tuple, list)) and len(p) == 2 and all(isinstance(r, int) and r >= 0 for r in p) for p in pairs):
        raise NkiTypeError(
            f"source_target_pairs={pairs!r}", operand="source_target_pairs", rule="it is a list of (source, target) pairs of ranks"
        )
    for what, column in (("source", [p[0] for p in pairs]), ("target", [p[1] for p in pairs])):
        twice = next((r for r in column if column.count(r) > 1), None)
        if twice is not None:
            raise NkiValueError(
                f"rank {twice} is a {what} twice", operand="source_target_pairs", rule=f"a rank is the {what} of at most one pair"
            )


def _check_channels(c: Any) -> None:
    if isinstance(c.num_channels, int) and (
        c.num_channels < 1 or (isinstance(c.channel_id, int) and not 0 <= c.channel_id < c.num_channels)
    ):
        raise NkiValueError(
            f"channel_id={c.channel_id} of num_channels={c.num_channels}",
            operand="channel_id",
            rule="a channel is one of 0 .. num_channels - 1",
        )


def _check_ring(c: Any, target: Any) -> None:
    _check_channels(c)
    _check_copy(c, target)


def _check_ring_reduce(c: Any, target: Any) -> None:
    _check_channels(c)
    _check_reduce(c)
    shapes = {tuple(t.shape) for t in (c.src, c.src1, c.dst)}
    if len(shapes) > 1:
        raise NkiValueError(f"operands of shapes {sorted(shapes)}", operand="dst", rule="src, src1 and dst have one shape")


def _rate(d: Any, hw: Any) -> float:
    return cost.dma(hw, d.P, cost.tile_bytes(d, "dst" if "dst" in d.dtypes else "src"), 0.5)


Declared = Callable[[Callable[..., Any]], Callable[..., Any]]


def collective(meets: meeting.Meets, *, nccl: str = "", source: str = "", **more: Any) -> Declared:
    """Declare a collective; `nccl`: its name in that module of the vendor's."""
    return instruction(engine="dma", family="collective", source=source or _SOURCE.format(nccl), surface="internal", limits=(), cost=_rate,
                       meets=meets, **more)  # fmt: skip


@collective(meeting.ranks_in_groups, nccl="all_reduce", travel=topology.reduced, raw=_bitwise, check=_check_all_reduce)
def rank_all_reduce(*, dst: Dst, src: Src, op: Reduction, replica_groups: Groups = (), mask: Masked = None) -> Array:
    """dst = op over the src of all ranks of the group, the same on each of them.

    dst, src: tensors of one shape in any memory. op: a reducible operator. Ranks are folded in the order of the group, as elements of a
    reduction are: in float32, 32 lanes and a tree, rounded once to the dtype of dst. replica_groups: lists of ranks of one size; none
    for all ranks. Cost: the bytes of dst at half the DMA rate (assumed), and at
    the same time steps and bytes on the links between chips, as the topology of the instance has them (docs/timing.md).
    """
    return reduce_list(list(src), op)


@collective(meeting.ranks_in_groups, nccl="reduce_scatter", travel=topology.gathered, raw=_bitwise, check=_check_reduce_scatter)
def rank_reduce_scatter(*, dst: Dst, src: Src, op: Reduction, reduce_scatter_dim: T[int, Attr((int,))], replica_groups: Groups = (),
                        mask: Masked = None) -> list[Array]:
    """dst = this rank's shard, along a dimension, of op over the src of all ranks of the group.

    src: the shape of dst, times the size of the group along reduce_scatter_dim. The first rank of the group gets the first shard. Order and
    rounding as in rank_all_reduce, cost too.
    """
    return np.split(reduce_list(list(src), op), len(src), axis=reduce_scatter_dim)


@collective(meeting.ranks_in_groups, nccl="all_gather", travel=topology.gathered, raw=True, check=_check_all_gather)
def rank_all_gather(*, dst: Dst, src: Src, all_gather_dim: T[int, Attr((int,))], replica_groups: Groups = (), mask: Masked = None) -> Array:
    """dst = the src of all ranks of the group, joined along a dimension in the order of the group.

    dst: the shape of src, times the size of the group along all_gather_dim, of the same dtype; bits are kept. Cost as in rank_all_reduce.
    """
    return np.concatenate(src, axis=all_gather_dim)


@collective(meeting.ranks_in_groups, nccl="all_to_all", travel=topology.exchanged, raw=True, check=_check_all_to_all)
def rank_all_to_all(*, dst: Dst, src: Src, split_dim: T[int, Attr((int,))], concat_dim: T[int, Attr((int,))], replica_groups: Groups = (),
                    mask: Masked = None) -> list[Array]:
    """Each rank splits src along split_dim into a part for each rank of the group; dst = the parts for this rank, joined along concat_dim
    in the order of the group.

    dst: src with split_dim divided and concat_dim multiplied by the size of the group, of the same dtype; bits are kept. Cost as in
    rank_all_reduce.
    """
    parts = [np.split(one, len(src), axis=split_dim) for one in src]
    return [np.concatenate([row[to] for row in parts], axis=concat_dim) for to in range(len(src))]


@collective(meeting.ranks_in_groups, nccl="broadcast", travel=topology.spread, raw=True, check=_check_copy)
def rank_broadcast(*, dst: Dst, src: Src, replica_groups: Groups = (), mask: Masked = None) -> Array:
    """dst = the src of the first rank of the group, on all of them.

    dst, src: tensors of one shape and dtype; bits are kept. Cost as in rank_all_reduce.
    """
    return np.array(src[0])


@collective(meeting.ranks_in_pairs, nccl="collective_permute", travel=topology.passed, raw=True, check=_check_pairs)
def rank_permute(*, dst: Dst, src: Src, source_target_pairs: T[Any, Attr((tuple, list))], mask: Masked = None) -> Array | None:
    """dst = the src of the rank that is paired with this one as its source; zeros where there is none, as in XLA's collective permute.

    dst, src: tensors of one shape and dtype; bits are kept. A rank is the source of at most one pair and the target of at most one.
    Cost as in rank_all_reduce.
    """
    return np.asarray(src[0]) if len(src) else None


@collective(meeting.ranks_in_ring, nccl="collectives.collective_permute_implicit", travel=topology.passed, raw=True, check=_check_ring)
def rank_ring(*, dst: Dst, src: Src, replica_groups: Groups = (), channel_id: T[int, Affine()] = 0, num_channels: T[int, Attr((int,))] = 1,
              mask: Masked = None) -> Array:
    """Sends src to the successor in the ring of the group; dst = the src of the predecessor.

    dst, src: tensors of one shape and dtype; bits are kept. channel_id, num_channels: the channel of the ring that carries it, of how many;
    values do not depend on it. Cost as in rank_all_reduce.
    """
    return np.asarray(src[0])


@collective(meeting.ranks_in_ring, nccl="collective_permute_reduce_implicit", travel=topology.passed, raw=_bitwise,
            check=_check_ring_reduce)
def rank_ring_reduce(*, dst: Dst, src: Src, src1: Src, op: Reduction, replica_groups: Groups = (), channel_id: T[int, Affine()] = 0,
                     num_channels: T[int, Attr((int,))] = 1, mask: Masked = None) -> Array:
    """Sends op(src, src1) to the successor in the ring of the group; dst = that of the predecessor.

    dst, src, src1: tensors of one shape. The operator is in float32, rounded once to the dtype of dst. Channels as in rank_ring. Cost as in
    rank_all_reduce.
    """
    return reduce_list([src[0], src1[0]], op)


def _check_place(c: Any, target: Any) -> None:
    check_groups(c.replica_groups)
    if c.per_step < 1:
        raise NkiValueError(f"num_channels={c.per_step}", operand="num_channels", rule="a ring has one channel or more")


@collective(meeting.place_in_ring, source="api_legacy: _private.private_api.cc_div", raw=True, check=_check_place)
def rank_ring_place(*, dst: T[Array, Out("1 1", ON_CHIP, ("int32",))], steps: T[int, Affine()], per_step: T[int, Attr((int,))] = 1,
                    replica_groups: Groups = (), **known: Any) -> Array:
    """dst = the position in the group of the rank whose data this one holds after steps // per_step steps of rank_ring.

    dst: int32 (1, 1) in SBUF or PSUM. After no step it is the position of the rank itself, after one that of its predecessor. Waits for
    nobody. Cost as in rank_all_reduce.
    """
    return np.asarray(known["found"][0])


@collective(meeting.to_peer, nccl="send", raw=True)
def rank_send(*, src: Src, peer_id: T[Any, Affine(many=True)], mask: Masked = None) -> tuple[()]:
    """Sends src to a rank, which receives it with rank_recv. Does not wait for it.

    peer_id: a rank, or a table with the peer of each rank. Messages between two ranks keep their order. Cost as in rank_all_reduce.
    """
    return ()


@collective(meeting.from_peer, nccl="recv", travel=topology.passed, raw=True)
def rank_recv(*, dst: Dst, peer_id: T[Any, Affine(many=True)], mask: Masked = None, **letters: Any) -> Array:
    """dst = the next tensor that a rank has sent to this one; waits for it.

    dst: of the shape and dtype of what was sent. peer_id as in rank_send. Cost as in rank_all_reduce.
    """
    return np.asarray(letters["src"][0])


@collective(meeting.core_exchange, source="api_legacy: _private.private_api.sendrecv", raw=True, check=_check_copy)
def core_sendrecv(*, send_to_rank: T[int, Affine()], recv_from_rank: T[int, Affine()], src: Src, dst: Dst, pipe_id: T[int, Affine()] = 0,
                  mask: Masked = None) -> Array:
    """Sends src to one core of the logical NeuronCore and receives dst from another.

    send_to_rank, recv_from_rank: programs of the launch grid, one on each core. dst, src: tensors of one shape and dtype; bits are kept.
    pipe_id: exchanges of different pipes do not meet. Cost as in rank_all_reduce.
    """
    return np.asarray(src[0])
