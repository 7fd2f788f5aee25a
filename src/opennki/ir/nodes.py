"""The nodes of the Kernel IR.

A `Kernel` is a body of statements for one program instance of a grid: `Alloc`, `Instr`, `For`, `If` and `DoWhile`.
An `Access` addresses a tile of a tensor: one `Dim` per dimension of the tensor, affine in loop indices and program ids,
with a stride for each dimension of the tile and, if the index is read from memory, a dynamic part.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from opennki.errors import Loc
from opennki.ir.affine import Affine, Pred, Var

ON_CHIP = frozenset({"sbuf", "psum"})
HBM = frozenset({"hbm", "private_hbm", "shared_hbm"})


@dataclass(frozen=True, slots=True, eq=False)
class Alloc:
    """A tensor: where it lives, its shape and dtype, and where the user made it.

    `space` is sbuf, psum, private_hbm, shared_hbm or register. `kind` is local, param (an input of the kernel) or
    constant (data in `Kernel.constants`). `pdim` is the position of the partition dimension, that is the number of
    block dimensions before it (0 in HBM).
    """

    id: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    space: str
    kind: str = "local"
    pdim: int = 0
    placement: Any = None
    loc: Loc | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def on_chip(self) -> bool:
        """True in SBUF and PSUM."""
        return self.space in ON_CHIP

    def __repr__(self) -> str:
        return f"t{self.id}"


@dataclass(frozen=True, slots=True, eq=False)
class Dim:
    """Index along one dimension of a tensor: base + sum(strides[j] * iota_j) [+ the element of `dyn`].

    `dyn` is an integer tile: of one element (a scalar offset), or of shape [N, 1] whose element p belongs to
    position p of the tile's first dimension.
    """

    base: Affine
    strides: tuple[int, ...]
    dyn: Access | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Access:
    """A tile of a tensor. `view` is the shape as which the tensor's memory is indexed (None: its own shape), `dtype` the
    element type as which it is read, `shape` the shape of the tile (first the partition dimension on chip).
    `mask` are operand masks: elements outside it read as zero (matmul operands only).
    """

    alloc: Alloc
    dtype: str
    dims: tuple[Dim, ...]
    shape: tuple[int, ...]
    view: tuple[int, ...] | None = None
    mask: tuple[Pred, ...] = ()

    @property
    def view_shape(self) -> tuple[int, ...]:
        """Shape as which the memory is indexed."""
        return self.alloc.shape if self.view is None else self.view

    @property
    def size(self) -> int:
        """Number of elements of the tile."""
        return prod(self.shape)

    @property
    def space(self) -> str:
        """Memory: sbuf, psum, hbm (every kind of HBM) or register."""
        space = self.alloc.space
        return "hbm" if space in HBM else space

    @property
    def is_whole(self) -> bool:
        """True when the tile is the whole tensor in its own order."""
        shape = self.view_shape
        if self.shape != shape or self.mask:
            return False
        rank = len(shape)
        for i, dim in enumerate(self.dims):
            if dim.dyn is not None or dim.base.terms or dim.base.const:
                return False
            for j in range(rank):
                if shape[j] > 1 and dim.strides[j] != (i == j):
                    return False
        return True

    def dynamic(self) -> Iterator[Access]:
        """The index tiles that this access reads."""
        for dim in self.dims:
            if dim.dyn is not None:
                yield dim.dyn


@dataclass(frozen=True, slots=True, eq=False)
class IndexTile:
    """A tile of index values: base + sum(strides[j] * iota_j) over `shape` (operand of iota)."""

    base: Affine
    strides: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PredTile:
    """A tile of truth values, the conjunction of predicates over `shape` (operand of affine_select)."""

    preds: tuple[Pred, ...]
    shape: tuple[int, ...]


Operand = Any  # Access | IndexTile | PredTile | Affine | int | float | bool | str | tuple | None


@dataclass(frozen=True, slots=True, eq=False)
class Instr:
    """One instruction. `operands` follow the order of the declaration's parameters (`isa.declare.ISA[op].params`),
    `results` are the tiles that it makes. `mask` narrows it: over the dimensions of its iteration space. `loc` is an
    index into `Kernel.locs`; `call` is the number of the call site, frozen at trace (the stream of random numbers).
    """

    op: str
    results: tuple[Access, ...]
    operands: tuple[Operand, ...]
    mask: tuple[Pred, ...] = ()
    engine: str = ""
    loc: int = -1
    call: int = 0
    touched: Any = field(default=None, init=False, repr=False)  # what `ir.verify.accesses` has found


@dataclass(slots=True, eq=False)
class For:
    """A loop: `var` counts 0 .. trips-1. `kind` is affine (iterations are independent) or sequential."""

    var: Var
    trips: int
    kind: str
    body: list[Stmt] = field(default_factory=list)
    directives: tuple[str, ...] = ()
    loc: int = -1


@dataclass(slots=True, eq=False)
class If:
    """A branch on a scalar affine predicate."""

    pred: Pred
    then: list[Stmt] = field(default_factory=list)
    orelse: list[Stmt] = field(default_factory=list)
    loc: int = -1


@dataclass(slots=True, eq=False)
class DoWhile:
    """A loop that runs its body and repeats it while the element of `cond` is not zero."""

    body: list[Stmt] = field(default_factory=list)
    cond: Access | None = None
    loc: int = -1


Stmt = Alloc | Instr | For | If | DoWhile


@dataclass(slots=True, eq=False)
class Kernel:
    """A traced kernel. `grid` holds one Var per dimension of the launch grid; `cores` maps a flat program number to a
    physical core. `params` are the inputs in call order, `outputs` the returned tensors, `written_params` the inputs that the kernel
    writes. `returns` is the structure of the Python return value (see `kernels`), not part of the text.
    """

    name: str
    params: list[Alloc]
    body: list[Stmt]
    outputs: list[Access]
    grid: tuple[Var, ...] = ()
    cores: tuple[int, ...] = ()
    target: str = "trn1"
    constants: dict[int, np.ndarray] = field(default_factory=dict)
    constant_allocs: list[Alloc] = field(default_factory=list)
    written_params: list[Alloc] = field(default_factory=list)
    locs: list[Loc] = field(default_factory=list)
    has_collectives: bool = False
    returns: Any = None

    def loc(self, index: int) -> Loc | None:
        """Source location of a node."""
        return self.locs[index] if 0 <= index < len(self.locs) else None


def whole(alloc: Alloc) -> Access:
    """The access of a whole tensor."""
    rank = len(alloc.shape)
    dims = tuple(Dim(_ZERO, tuple(int(i == j) for j in range(rank))) for i in range(rank))
    return Access(alloc, alloc.dtype, dims, alloc.shape)


def statements(body: list[Stmt]) -> Iterator[Stmt]:
    """All statements of a body, outer before inner, in program order."""
    stack: list[Iterator[Stmt]] = [iter(body)]
    while stack:
        for stmt in stack[-1]:
            yield stmt
            kind = stmt.__class__
            if kind is Instr or kind is Alloc:
                continue
            if isinstance(stmt, (For, DoWhile)):
                stack.append(iter(stmt.body))
                break
            if isinstance(stmt, If):
                stack.append(iter([*stmt.then, *stmt.orelse]))
                break
        else:
            stack.pop()


_ZERO = Affine()
