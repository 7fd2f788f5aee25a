"""Who meets whom: the members that take part when an instruction waits for other programs or ranks.

A member is (rank, program): one process of a distributed run, and one program of its launch grid. An instruction that meets others
declares one of the functions below; it is asked with the attributes of the call and says either that a *group* comes together (each
member brings its operands, all of them go on when the last has come), or what the member *gives* to and *takes* from others, like
letters: giving never waits, taking waits for the letter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from opennki.errors import NkiValueError

Member = tuple[int, int]  # rank, number of the program in its grid


@dataclass(frozen=True, slots=True)
class World:
    """What a member knows of the run: the number of ranks, and of its own grid the position of each program and its physical core."""

    ranks: int = 1
    programs: tuple[tuple[int, ...], ...] = ((),)
    cores: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Meeting:
    """What an instruction needs to be complete. `group`: all of it comes together, in this order. Else `gives` names the receivers and
    `takes` the senders of letters; `address` marks letters that instructions of different kinds exchange, "" those of one source line.
    `found`: what the member learns of its own place in the run, for which it waits for nobody; the body gets it as the operand `found`."""

    group: tuple[Member, ...] = ()
    gives: tuple[Member, ...] = ()
    takes: tuple[Member, ...] = ()
    address: str = ""
    found: int | None = None


Meets = Callable[[Mapping[str, Any], Member, World], Meeting]


def programs_along(attributes: Mapping[str, Any], me: Member, world: World) -> Meeting:
    """The programs of this rank that differ from this one only along `program_axes` (all of them where there are none)."""
    axes = attributes.get("program_axes", ())
    axes = (axes,) if isinstance(axes, int) else tuple(axes)
    rank, mine = me[0], world.programs[me[1]]
    for axis in axes:
        if not 0 <= axis < len(mine):
            raise NkiValueError(f"program axis {axis} of a grid of {len(mine)} dimensions", rule="a program axis is one of the launch grid")
    same = [i for i, p in enumerate(world.programs) if not axes or all(a in axes or p[a] == mine[a] for a in range(len(mine)))]
    return Meeting(group=tuple((rank, i) for i in same))


def programs_on_cores(attributes: Mapping[str, Any], me: Member, world: World) -> Meeting:
    """The programs of this rank on the listed physical cores."""
    wanted = set(attributes["cores"])
    numbers = [i for i in range(len(world.programs)) if not world.cores or world.cores[i] in wanted]
    return Meeting(group=tuple((me[0], i) for i in numbers))


def core_exchange(attributes: Mapping[str, Any], me: Member, world: World) -> Meeting:
    """A letter to one program of this rank and one from another, through a numbered pipe."""
    rank, count = me[0], len(world.programs)
    to, source = int(attributes["send_to_rank"]), int(attributes["recv_from_rank"])
    for what, number in (("send_to_rank", to), ("recv_from_rank", source)):
        if not 0 <= number < count:
            raise NkiValueError(f"{what}={number} of {count} programs", rule="the peer is a program of the launch grid")
    return Meeting(gives=((rank, to),), takes=((rank, source),), address=f"pipe {attributes.get('pipe_id', 0)}")


def group_of(groups: Any, rank: int, ranks: int) -> tuple[int, ...]:
    """The group of a rank; all ranks where no groups are given. Raises NkiValueError where the rank or a member is not there."""
    if not groups:
        return tuple(range(ranks))
    for group in groups:
        for number in group:
            if not 0 <= number < ranks:
                raise NkiValueError(
                    f"replica_groups names rank {number} and there are {ranks}",
                    rule="a group consists of ranks of the run",
                    fix=f"launch {number + 1} ranks or more, or change the groups",
                )
    found = next((tuple(g) for g in groups if rank in g), None)
    if found is None:
        raise NkiValueError(
            f"rank {rank} is in none of the replica_groups",
            rule="every rank that runs the collective is in one group",
            fix="add the rank to a group",
        )
    return found


def ranks_in_groups(attributes: Mapping[str, Any], me: Member, world: World) -> Meeting:
    """The ranks of one of `replica_groups`, in the order of the group."""
    return Meeting(group=tuple((r, me[1]) for r in group_of(attributes.get("replica_groups"), me[0], world.ranks)))


def ranks_in_ring(attributes: Mapping[str, Any], me: Member, world: World) -> Meeting:
    """A letter to the successor in the group, and one from the predecessor."""
    group = group_of(attributes.get("replica_groups"), me[0], world.ranks)
    at = group.index(me[0])
    return Meeting(gives=((group[(at + 1) % len(group)], me[1]),), takes=((group[at - 1], me[1]),))


def place_in_ring(attributes: Mapping[str, Any], me: Member, world: World) -> Meeting:
    """The position in the group of the rank whose data has come to this one after `steps` // `per_step` steps around the ring."""
    group = group_of(attributes.get("replica_groups"), me[0], world.ranks)
    return Meeting(found=(group.index(me[0]) - int(attributes["steps"]) // int(attributes["per_step"])) % len(group))


def ranks_in_pairs(attributes: Mapping[str, Any], me: Member, world: World) -> Meeting:
    """Letters by (source, target) pairs of ranks."""
    pairs = attributes["source_target_pairs"]
    for pair in pairs:
        for number in pair:
            if not 0 <= number < world.ranks:
                raise NkiValueError(
                    f"source_target_pairs names rank {number} and there are {world.ranks}",
                    rule="pairs consist of ranks of the run",
                    fix=f"launch {number + 1} ranks or more, or change the pairs",
                )
    return Meeting(gives=tuple((t, me[1]) for s, t in pairs if s == me[0]), takes=tuple((s, me[1]) for s, t in pairs if t == me[0]))


def _peer(attributes: Mapping[str, Any], me: Member, world: World) -> Member:
    """`peer_id`: a rank, or a table with the peer of each rank."""
    peer = attributes["peer_id"]
    if isinstance(peer, tuple):
        if len(peer) != world.ranks:
            raise NkiValueError(f"peer_id is a table of {len(peer)} for {world.ranks} ranks", rule="a table has the peer of each rank")
        peer = peer[me[0]]
    if not 0 <= int(peer) < world.ranks:
        raise NkiValueError(f"peer_id={peer} of {world.ranks} ranks", rule="the peer is a rank of the run")
    return int(peer), me[1]


def to_peer(attributes: Mapping[str, Any], me: Member, world: World) -> Meeting:
    """A letter to one rank."""
    return Meeting(gives=(_peer(attributes, me, world),), address="send")


def from_peer(attributes: Mapping[str, Any], me: Member, world: World) -> Meeting:
    """A letter from one rank."""
    return Meeting(takes=(_peer(attributes, me, world),), address="send")


BETWEEN_RANKS: frozenset[Meets] = frozenset({ranks_in_groups, ranks_in_ring, place_in_ring, ranks_in_pairs, to_peer, from_peer})
