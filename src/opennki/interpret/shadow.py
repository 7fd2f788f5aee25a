"""Shadow state: which elements of a tensor were written.

State 0: never written; 1: written; 2: left undefined by a mask, or computed from such an element. Reading state 0 is an error at once.
State 2 spreads through arithmetic like NaN and is an error where it gets out: into HBM, or as an index; so that a masked load followed by
unmasked arithmetic and a masked store is no false alarm. Exact by element; kept only for tensors that are not proven
(`passes.initialised`).
"""
from __future__ import annotations

from typing import Any

import numpy as np

from opennki.errors import NkiReadError
from opennki.interpret.views import View
from opennki.ir.verify import describe

NEVER, WRITTEN, MASKED = 0, 1, 2
# families whose result element depends on the operand elements at the same place
_ELEMENTWISE = frozenset({"elementwise", "tensor_scalar", "activation", "copy", "dma", "random"})


def read_error(view: View, state: np.ndarray, loc: Any) -> NkiReadError:
    """The error of a read of elements that were never written."""
    bad = np.argwhere(state == NEVER)
    return tile_error(view, tuple(int(i) for i in bad[0]), loc, f"{len(bad)} ")


def tile_error(view: View, first: tuple[int, ...], loc: Any, count: str = "") -> NkiReadError:
    """The error of a read of elements that were never written, of which one is known."""
    made = view.alloc.loc
    return NkiReadError(f"{view.what} reads {count}elements that were never written, first {first} of the tile {view.shape}", loc=loc,
                        operand=f"{describe(view.access)}" + (f", made at {made}" if made else ""),
                        rule="every element is written before it is read", why="its value on the device is whatever was there before",
                        fix="initialise the tensor (nl.zeros, or t[...] = 0), or read only what was written")


def accumulate_error(view: View, state: np.ndarray, loc: Any) -> NkiReadError:
    """The warning about the first accumulation into elements that were never written."""
    made = view.alloc.loc
    return NkiReadError(f"the first accumulation into {int((state == NEVER).sum())} elements that were never written", loc=loc,
                        operand=f"{describe(view.access)}" + (f", made at {made}" if made else ""),
                        rule="an accumulation starts from a value", why="it starts from zero here and where the compiler sees that it is "
                        "the first of its group; otherwise PSUM holds whatever was there before",
                        fix="make the tile with nl.zeros(..., buffer=nl.psum), or assign the first product instead of adding it")


def masked_error(view: View, origin: Any, loc: Any) -> NkiReadError:
    """The error of elements undefined by a mask that get out."""
    return NkiReadError(f"{view.what} stores or uses elements that a mask left undefined", loc=loc,
                        operand=describe(view.access) + (f"; left undefined at {origin}" if origin else ""),
                        rule="what a mask excludes has no value and does not reach HBM or an index",
                        why="the excluded elements of a new tile are whatever was in memory before",
                        fix="give the store the same mask, or fill the tile first (nl.zeros) and load into it with the mask")


def spread(family: str, taints: list[tuple[np.ndarray, bool | None]], shape: tuple[int, ...]) -> np.ndarray | None:
    """Where results are undefined, None for nowhere. `taints` are the undefined elements of each operand, and for a matmul whether it
    gives the columns of the result (True), the rows (False), or is the accumulator (None)."""
    out: np.ndarray | None = None
    if family == "select":
        return None  # choosing is how undefined elements are replaced; which were chosen is not looked at
    for taint, columns in taints:
        if not taint.any():
            continue
        if family in _ELEMENTWISE or columns is None:
            part = _fit(taint, shape)
        elif family == "matmul":
            flags = np.asarray(taint.reshape(taint.shape[0], -1).any(axis=0))
            part = _fit(flags[:, None] if not columns else flags.reshape((1, *shape[1:])), shape) if (
                flags.size in (shape[0], int(np.prod(shape[1:])))) else np.ones(shape, bool)
        elif family == "transpose":
            part = _fit(taint.reshape(taint.shape[0], -1).T, shape)
        elif taint.shape and taint.shape[0] == shape[0]:
            rows = np.asarray(taint.reshape(taint.shape[0], -1).any(axis=1))
            part = np.broadcast_to(rows.reshape((-1,) + (1,) * (len(shape) - 1)), shape)
        else:
            part = np.ones(shape, bool)
        out = part if out is None else out | part
    return out


def _fit(taint: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if taint.shape == shape:
        return taint
    if taint.size == int(np.prod(shape)):
        return taint.reshape(shape)
    if taint.ndim < len(shape):
        taint = taint.reshape(taint.shape + (1,) * (len(shape) - taint.ndim))
    try:
        return np.broadcast_to(taint, shape)
    except ValueError:
        return np.ones(shape, bool)
