"""Time of collectives on the links between chips: steps and bytes of `isa.topology`, with rates of the target record.

All of it is an estimate: no measurement of a collective is among the published rows that the rest of the model is compared with.
"""
from __future__ import annotations

from typing import Any

from opennki.ir.affine import Affine
from opennki.ir.nodes import Access, Instr, Kernel, statements
from opennki.isa.declare import ISA
from opennki.isa.dtypes import itemsize
from opennki.isa.target import Target
from opennki.isa.topology import TOPOLOGIES, Group, Topology, group_on
from opennki.timing import constants


class Links:
    """The ranks of a run on an instance. `ranks`: how many; None for those that the kernel names, or else all of the instance. `cores`:
    physical cores of a rank."""

    def __init__(self, kernel: Kernel, target: Target, ranks: int | None = None) -> None:
        self.target = target
        self.topology: Topology = TOPOLOGIES[target.name]
        self.cores = min(target.max_lnc, max(1, len(set(kernel.cores)))) if kernel.cores else 1
        called = [s for s in statements(kernel.body) if isinstance(s, Instr) and ISA[s.op].travel is not None]
        self.used = bool(called)
        named = max((max(_named(_values(i)), default=-1) for i in called), default=-1)
        self.ranks = ranks or (named + 1 if named > 0 else self.topology.chips * max(1, target.cores_per_device // self.cores))
        if self.used:
            group_on(self.topology, target, [self.ranks - 1], self.cores)  # too many are an error, whichever of them meet
        self.groups: dict[Any, Group] = {}

    def group(self, values: dict[str, Any]) -> Group:
        """The slowest group of a collective with these attributes: the one that is spread farthest."""
        groups = values.get("replica_groups") or ()
        pairs = values.get("source_target_pairs") or ()
        peer = values.get("peer_id")
        if isinstance(peer, tuple) and all(isinstance(p, int) for p in peer):
            pairs = tuple(enumerate(peer))
        elif isinstance(peer, int):
            pairs = ((0 if peer else self.ranks - 1, peer),)
        members = tuple(tuple(g) for g in groups or pairs) or (tuple(range(self.ranks)),)
        if members not in self.groups:
            made = [group_on(self.topology, self.target, g, self.cores) for g in members]
            self.groups[members] = max(made, key=lambda g: (g.far, g.ranks))
        return self.groups[members]

    def time(self, instr: Instr, share: float) -> tuple[float, float]:
        """(ns on the links, bytes that leave a chip) of a collective; zeros for anything else."""
        travel = ISA[instr.op].travel
        if travel is None:
            return 0.0, 0.0
        values = _values(instr)
        size = max((v.size * itemsize(v.dtype) for v in values.values() if isinstance(v, Access)), default=0) * share
        group = self.group(values)
        if group.ranks < 2:
            return 0.0, 0.0
        rate = self.target.link_gbps * constants.LINK_ONE_WAY.value
        return min((steps * constants.LINK_STEP.value * 1e3 + moved / rate, moved) for steps, moved in travel(size, group))

    def describe(self) -> str:
        """The ranks and the joint in words."""
        per_chip = max(1, self.target.cores_per_device // self.cores)
        return f"{self.ranks} ranks, {per_chip} on a chip, {self.topology.describe()}"


def _values(instr: Instr) -> dict[str, Any]:
    values = {p.name: v for p, v in zip(ISA[instr.op].params, instr.operands, strict=True)}
    return {n: v.const if isinstance(v, Affine) and v.is_const else v for n, v in values.items()}


def _named(values: dict[str, Any]) -> list[int]:
    found = [r for name in ("replica_groups", "source_target_pairs") for g in values.get(name) or () for r in g]
    peer = values.get("peer_id")
    if isinstance(peer, tuple):
        found.append(len(peer) - 1)
    return found + ([peer] if isinstance(peer, int) else [])
