"""Memories as kernels name them: nl.sbuf, nl.psum, nl.hbm, nl.private_hbm, nl.shared_hbm, and direct allocation.

`ncc.sbuf` and `ncc.psum` are the same objects with `alloc`, `mod_alloc` and `auto_alloc` (source: api_legacy neuronxcc.nki.compiler).
"""
from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from opennki.errors import NkiTypeError, NkiValueError


@dataclass(frozen=True, slots=True)
class Buffer:
    """A memory, with the placement of tensors in it (None: the compiler chooses)."""

    space: str
    placement: Callable[..., Any] | None = None

    def __repr__(self) -> str:
        return f"nl.{self.space}"


@dataclass(frozen=True, slots=True)
class OnChip(Buffer):
    """SBUF or PSUM: also the namespace `ncc.sbuf` / `ncc.psum`."""

    def alloc(self, func: Callable[..., Any]) -> OnChip:
        """Place each tile by `func(idx, pdim_size, fdim_size)`: (start_partition, byte_addr) in SBUF, (bank, start_partition, byte_addr)
        in PSUM; idx is the tuple of block indices, fdim_size is in bytes."""
        if not callable(func):
            raise NkiTypeError(f"alloc of {func!r}", rule="a placement is a function (idx, pdim_size, fdim_size)")
        return OnChip(self.space, func)

    def auto_alloc(self) -> OnChip:
        """The compiler chooses the place (the default)."""
        return OnChip(self.space)

    def mod_alloc(self, *, base_addr: int = 0, base_bank: int = 0, base_partition: int = 0, num_bank_tiles: tuple[int, ...] = (),
                  num_par_tiles: tuple[int, ...] = (), num_free_tiles: tuple[int, ...] = ()) -> OnChip:
        """Modulo placement: block index modulo the tile counts, linearised row-major, times the tile's size."""
        if base_partition != 0 or (self.space == "psum" and base_addr != 0):
            raise NkiValueError("mod_alloc with a base_partition, or in PSUM a base_addr, other than 0",
                                rule="both must be 0 in this release")
        if self.space == "psum" and any(n != 1 for n in (*num_par_tiles, *num_free_tiles)):
            raise NkiValueError("psum.mod_alloc with num_par_tiles or num_free_tiles",
                                rule="a PSUM tile fills whole banks: both are () or all ones")
        return OnChip(self.space, Modulo(self.space, operator.index(base_addr), operator.index(base_bank), tuple(num_bank_tiles),
                                         tuple(num_par_tiles), tuple(num_free_tiles)))


@dataclass(frozen=True, slots=True)
class Modulo:
    """The placement function that mod_alloc generates."""

    space: str
    base_addr: int
    base_bank: int
    banks: tuple[int, ...]
    pars: tuple[int, ...]
    frees: tuple[int, ...]

    def __call__(self, idx: tuple[int, ...], pdim_size: int, fdim_size: int) -> tuple[int, ...]:
        def place(tiles: tuple[int, ...], scale: int, base: int) -> int:
            counts = tiles or (1,) * len(idx)
            if not idx:  # public kernels give counts to tensors without block dimensions as well
                return base
            if len(counts) != len(idx):
                raise NkiValueError(f"{len(counts)} tile counts for {len(idx)} block dimensions",
                                    rule="the tile counts of mod_alloc are () or one per block dimension")
            linear = sum(i % n * prod(counts[d + 1:]) for d, (i, n) in enumerate(zip(idx, counts, strict=True)))
            return base + linear * scale
        address = (place(self.pars, pdim_size, 0), place(self.frees, fdim_size, self.base_addr))
        return (place(self.banks, 1, self.base_bank), *address) if self.space == "psum" else address


sbuf = OnChip("sbuf")
psum = OnChip("psum")
private_hbm = Buffer("private_hbm")
hbm = private_hbm
shared_hbm = Buffer("shared_hbm")
BUFFERS: dict[str, Buffer] = {"sbuf": sbuf, "psum": psum, "private_hbm": private_hbm, "hbm": private_hbm, "shared_hbm": shared_hbm}


def buffer_of(value: Any) -> Buffer:
    """The memory that a user names: a Buffer, None (SBUF) or its name."""
    if value is None:
        return sbuf
    if isinstance(value, Buffer):
        return value
    if isinstance(value, str) and value in BUFFERS:
        return BUFFERS[value]
    raise NkiTypeError(f"buffer={value!r}",
                       rule="a buffer is nl.sbuf, nl.psum, nl.hbm, nl.private_hbm, nl.shared_hbm, or a placement of ncc.sbuf / ncc.psum")
