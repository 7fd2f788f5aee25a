"""`neuronxcc.nki.language.iterators`: loops, and the synchronisation of programs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opennki.dialects.neuronxcc._missing import missing
from opennki.dialects.neuronxcc.language import affine_range, sequential_range, static_range
from opennki.lang import data

__all__ = ["affine_range", "sequential_range", "static_range", "sync_program"]


@contextmanager
def sync_program(program_axes: Any) -> Iterator[None]:
    """`with sync_program(axes):` - the programs along the grid axes wait for each other before and after
    the block.

    The vendor runs the block in one program only; here every program runs it on its own SBUF, which gives the
    same values.
    """
    data.barrier(program_axes)
    yield
    data.barrier(program_axes)


__getattr__ = missing("neuronxcc.nki.language.iterators")
