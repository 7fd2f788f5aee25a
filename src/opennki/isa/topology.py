"""How the chips of an instance are joined, and what a collective sends over their links.

Ranks are logical NeuronCores in the order of the chips: rank r is on chip r // (ranks of a chip). Chips stand in a torus, a ring (a torus
of one dimension), or around switches that join any two. A declaration says how its data travel (`Travel`), in one or several ways as the
vendor's runtime has them; the timing model takes the fastest (`timing.links`).

Sources: aws-neuron-sdk about-neuron/arch/neuron-hardware (trn1-arch, inf2-arch, trn2-arch, trn3-arch) for the joints, and
neuron-runtime/explore/intranode-collective-comm for the algorithms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import log2, prod

from opennki.errors import NkiValueError
from opennki.isa.target import Target


@dataclass(frozen=True, slots=True)
class Topology:
    """The largest instance of a kind of chip. `shape`: chips in each dimension of a torus, of which each line is a ring; `switched`: every
    two chips are one step apart; `source`: public page, or what is assumed."""

    instance: str
    shape: tuple[int, ...]
    source: str
    switched: bool = False

    @property
    def chips(self) -> int:
        """All chips."""
        return prod(self.shape)

    def distance(self, a: int, b: int) -> int:
        """Links between two chips."""
        if self.switched:
            return int(a != b)
        steps = 0
        for size in reversed(self.shape):
            apart = abs(a % size - b % size)
            steps += min(apart, size - apart)
            a, b = a // size, b // size
        return steps

    def describe(self) -> str:
        """The joint in words: `4 x 4 torus of trn2.48xlarge`."""
        kind = "chips around switches" if self.switched else "ring" if len(self.shape) == 1 else "torus"
        return f"{' x '.join(map(str, self.shape))} {kind} of {self.instance}"


_ARCH = "aws-neuron-sdk about-neuron/arch/neuron-hardware/"
_TRN1 = Topology("trn1.32xlarge", (4, 4), f"{_ARCH}trn1-arch.rst: 16 chips in a 2D torus")
_TRN2 = Topology("trn2.48xlarge", (4, 4), f"{_ARCH}trn2-arch.rst: 16 chips in a 4x4 2D torus")
TOPOLOGIES: dict[str, Topology] = {
    "trn1": _TRN1,
    "trn1n": Topology("trn1n.32xlarge", (4, 4), _TRN1.source),
    "inf2": Topology("inf2.48xlarge", (12,), f"{_ARCH}inf2-arch.rst: 12 chips with two links each; a ring is what these make"),
    "trn2": _TRN2,
    "trn2n": Topology("trn2u.48xlarge UltraServer", (4, 4, 4), f"{_ARCH}trn2-arch.rst: four instances, chips of one place in a ring"),
    "trn3": Topology("Trn3 Gen1 UltraServer", (64,), f"{_ARCH}trn3-arch.rst: 64 chips, all-to-all by switches", switched=True),
}


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks of a collective on their chips. `each`: ranks of it on a chip, at most; `mean` and `far`: links between the chips of two
    ranks on different chips, on average and at most."""

    ranks: int
    chips: int
    each: int
    mean: float
    far: int

    @property
    def leaving(self) -> float:
        """The share of what the ranks of a chip send all to all that leaves the chip, in units of one rank's part for one other."""
        return self.each * (self.ranks - self.each)


def group_on(topology: Topology, target: Target, ranks: Sequence[int], cores: int = 1) -> Group:
    """Ranks on their chips, each on `cores` physical cores. Raises NkiValueError for ranks beyond the instance."""
    per_chip = max(1, target.cores_per_device // cores)
    chips = [rank // per_chip for rank in ranks]
    if max(chips, default=0) >= topology.chips:
        raise NkiValueError(
            f"rank {max(ranks)} on {topology.chips} chips of {per_chip} ranks", operand="ranks",
            rule=f"the model knows the links of one {topology.instance}, that is {topology.chips * per_chip} ranks",
            fix="estimate it for fewer ranks")  # fmt: skip
    there = sorted(set(chips))
    pairs = [topology.distance(a, b) for a, b in product(there, there) if a != b]
    mean = sum(pairs) / len(pairs) if pairs else 0.0
    return Group(len(chips), len(there), max(map(chips.count, there), default=1), mean, max(pairs, default=0))


Way = tuple[float, float]
"""One algorithm: steps that follow each other, and bytes that leave the busiest chip, each counted once for every link that it takes."""

Travel = Callable[[float, Group], list[Way]]
"""The ways in which a collective of so many bytes (of its larger side, on one rank) may travel."""


def gathered(size: float, group: Group) -> list[Way]:
    """Every rank gets a part from every other: round rings that use all links, or from each to each at once."""
    n = group.ranks
    whole = size * (n - 1) / n if group.chips > 1 else 0.0
    return [(n - 1, whole), (1, size / n * group.leaving * group.mean)]


def reduced(size: float, group: Group) -> list[Way]:
    """Parts are reduced on the way and gathered again; or by halving and doubling where the number of ranks is a power of two."""
    ways = [(2 * steps, 2 * moved) for steps, moved in gathered(size, group)]
    n = group.ranks
    if n > 1 and n & (n - 1) == 0:
        ways.append((2 * log2(n), 2 * size * (n - 1) / n * group.each if group.chips > 1 else 0.0))
    return ways


def exchanged(size: float, group: Group) -> list[Way]:
    """Every rank has a part for every other, and the parts go straight there."""
    return [(1, size / group.ranks * group.leaving * group.mean)]


def spread(size: float, group: Group) -> list[Way]:
    """One rank's tensor reaches all others, from chip to chip in pieces that follow each other."""
    return [(max(1, group.far), size if group.chips > 1 else 0.0)]


def passed(size: float, group: Group) -> list[Way]:
    """Ranks send to neighbours or to each other: the farthest pair, over one way of links while others use theirs."""
    return [(max(1, group.far), size * group.far)]
