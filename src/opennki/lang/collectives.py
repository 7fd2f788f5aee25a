"""Collectives as both layers of the language spell them: lists of tensors, one instruction for each pair of them.

Source: seeds "Collectives"; call sites of public kernels, which pass the operator first or everything by keyword (api_legacy
neuronxcc.nki.nccl).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from opennki.errors import NkiTypeError, NkiValueError
from opennki.lang.emit import call
from opennki.lang.tensor import Tensor

_IGNORED = frozenset({"name", "priority", "dtype"})


def lists(name: str, srcs: Any, dsts: Any, op: Any = None) -> tuple[list[Tensor], list[Tensor], Any]:
    """(srcs, dsts, op), each tensor alone made a list; also where the operator stands first."""
    if not isinstance(srcs, (Tensor, list, tuple)):
        srcs, dsts, op = dsts, op, srcs
    return tensors(name, "srcs", srcs), tensors(name, "dsts", dsts), op


def tensors(name: str, what: str, value: Any) -> list[Tensor]:
    """A list of tensors. Raises NkiTypeError for anything else."""
    found = [value] if isinstance(value, Tensor) else value
    if not isinstance(found, (list, tuple)) or not found or not all(isinstance(t, Tensor) for t in found):
        raise NkiTypeError(f"{name}: {what} is {type(value).__name__}", operand=what, rule=f"{what} is a list of tensors in HBM or SBUF")
    return list(found)


def pairs(name: str, instruction: str, srcs: list[Tensor], dsts: list[Tensor], extra: dict[str, Any], **attributes: Any) -> None:
    """One instruction for each source and destination. `extra`: keywords of the caller, of which `mask` counts."""
    if len(srcs) != len(dsts):
        raise NkiValueError(f"{name}: {len(srcs)} srcs and {len(dsts)} dsts", rule="there is a destination for each source")
    more = keywords(name, extra)
    for src, dst in zip(srcs, dsts, strict=True):
        call(instruction, (), {"src": src, "dst": dst, **attributes, **more})


def keywords(name: str, extra: dict[str, Any]) -> dict[str, Any]:
    """The further keywords that count. Raises NkiTypeError for an unknown one."""
    unknown = next((k for k in extra if k != "mask" and k not in _IGNORED), None)
    if unknown is not None:
        raise NkiTypeError(f"{name} has no argument {unknown!r}", rule="it takes the documented arguments")
    return {"mask": extra["mask"]} if extra.get("mask") is not None else {}


def all_reduce(name: str, srcs: Any, dsts: Any, op: Any, groups: Any, extra: dict[str, Any]) -> None:
    """dsts[i] = op over the srcs[i] of the group."""
    sources, targets, op = lists(name, srcs, dsts, op)
    pairs(name, "rank_all_reduce", sources, targets, extra, op=op, replica_groups=groups)


def all_gather(name: str, srcs: Any, dsts: Any, op: Any, dim: int, groups: Any, extra: dict[str, Any]) -> None:
    """dsts[i] = the srcs[i] of the group, joined; the operator means nothing."""
    sources, targets, _ = lists(name, srcs, dsts, op)
    targets = [_in_a_row(large, small, dim, groups) for large, small in zip(targets, sources, strict=False)] + targets[len(sources) :]
    pairs(name, "rank_all_gather", sources, targets, extra, all_gather_dim=dim, replica_groups=groups)


def reduce_scatter(name: str, srcs: Any, dsts: Any, op: Any, dim: int, groups: Any, extra: dict[str, Any]) -> None:
    """dsts[i] = this rank's shard of op over the srcs[i] of the group."""
    sources, targets, op = lists(name, srcs, dsts, op)
    sources = [_in_a_row(large, small, dim, groups) for large, small in zip(sources, targets, strict=False)] + sources[len(targets) :]
    pairs(name, "rank_reduce_scatter", sources, targets, extra, op=op, reduce_scatter_dim=dim, replica_groups=groups)


def _in_a_row(large: Tensor, small: Tensor, dim: int, groups: Any) -> Tensor:
    """The large tensor of a collective along dimension 0 as the small ones of a group one after the other, where it has as many elements in
    another shape: public kernels pass (1, n * rows, columns) for n times (1, rows, columns)."""
    count = len(groups[0]) if groups and hasattr(groups[0], "__len__") else 0
    wanted = (small.shape[0] * count, *small.shape[1:]) if small.shape else ()
    if dim != 0 or not count or tuple(large.shape) == wanted or prod(large.shape) != prod(wanted):
        return large
    return large.reshape(wanted)


def all_to_all(name: str, srcs: Any, dsts: Any, op: Any, split: int, concat: int, groups: Any, extra: dict[str, Any]) -> None:
    """Exchange of parts of the srcs[i]; the operator means nothing."""
    sources, targets, _ = lists(name, srcs, dsts, op)
    pairs(name, "rank_all_to_all", sources, targets, extra, split_dim=split, concat_dim=concat, replica_groups=groups)


def broadcast(name: str, srcs: Any, dsts: Any, op: Any, sizes: Sequence[int] | None, groups: Any, extra: dict[str, Any]) -> None:
    """dsts[i] = the srcs[i] of the first rank of the group; the operator means nothing. `sizes`: the shape of the dsts, for a check."""
    sources, targets, _ = lists(name, srcs, dsts, op)
    for dst in targets if sizes else ():
        if tuple(sizes or ()) != tuple(dst.shape):
            raise NkiValueError(f"{name}: broadcast_sizes is {tuple(sizes or ())} and the destination is {tuple(dst.shape)}",
                                operand="broadcast_sizes", rule="broadcast_sizes is the shape of the destinations")
    pairs(name, "rank_broadcast", sources, targets, extra, replica_groups=groups)


def permute(name: str, srcs: Any, dsts: Any, source_target_pairs: Any, extra: dict[str, Any]) -> None:
    """dsts[i] = the srcs[i] of the rank that the pairs give this one as source."""
    pairs(name, "rank_permute", tensors(name, "src", srcs), tensors(name, "dst", dsts), extra, source_target_pairs=source_target_pairs)
