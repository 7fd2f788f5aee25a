"""`neuronxcc.nki.kernels.tutorial`: the first kernel of the vendor's tutorial, opennki's own."""

from __future__ import annotations

from typing import Any

import numpy as np

import opennki.dialects.neuronxcc.language as nl
from opennki.dialects.neuronxcc._missing import missing
from opennki.dialects.neuronxcc.kernels import _tools as t
from opennki.kernels.entry import jit

_M = "neuronxcc.nki.kernels.tutorial"
_BLOCK = (8, t.ROWS, t.BANK)


@jit
def add_kernel_nx8x128x512(a_ptr: Any, b_ptr: Any, n_elements: int) -> Any:
    """The first n_elements of a + b, tensors of n blocks of 8 x 128 x 512 elements.

    a_ptr, b_ptr: (n, 8, 128, 512) of one dtype. n_elements: at most all; what comes after them in the result is not
    written. Grid: none, or [n], one block for each program. Returns the sum, of the dtype and shape of a_ptr. Errors:
    NkiValueError and NkiTypeError for other arguments.
    """
    t.require_rank("a_ptr", a_ptr, 4, "(n, 8, 128, 512)")
    blocks = a_ptr.shape[0]
    for name, tensor in (("a_ptr", a_ptr), ("b_ptr", b_ptr)):
        t.require_rank(name, tensor, 4, "(n, 8, 128, 512)")
        t.require_shape(name, tensor, (blocks, *_BLOCK), "(n, 8, 128, 512)")
    t.require_one_dtype(a_ptr=a_ptr, b_ptr=b_ptr)
    most = blocks * int(np.prod(_BLOCK))
    t.require(
        isinstance(n_elements, int | np.integer) and 0 < n_elements <= most,
        f"n_elements is {n_elements} for tensors {tuple(a_ptr.shape)}",
        operand="n_elements",
        rule="n_elements is at most the number of elements of a_ptr",
        fix=f"pass {most}",
    )
    if nl.program_ndim():
        t.require_grid((blocks,), "n")
    out = nl.ndarray(a_ptr.shape, dtype=a_ptr.dtype, buffer=nl.shared_hbm)
    row, column = nl.mgrid[0 : _BLOCK[1], 0 : _BLOCK[2]]
    for block in [nl.program_id(0)] if nl.program_ndim() else nl.affine_range(blocks):
        for i in nl.affine_range(_BLOCK[0]):
            number = ((block * _BLOCK[0] + i) * _BLOCK[1] + row) * _BLOCK[2] + column
            mask = None if n_elements == most else number < n_elements
            a, b = (nl.load(x[block, i, row, column], mask=mask) for x in (a_ptr, b_ptr))
            nl.store(out[block, i, row, column], nl.add(a, b, mask=mask), mask=mask)
    return out


__all__ = ["add_kernel_nx8x128x512"]
__getattr__ = missing(_M)
