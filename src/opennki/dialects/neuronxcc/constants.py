"""`neuronxcc.nki.language.constants`."""

from __future__ import annotations

from typing import Any

from opennki.dialects.neuronxcc._missing import missing
from opennki.isa import dtypes
from opennki.isa.target import TRN1
from opennki.lang.emit import dtype_name

__all__ = ["sbuf_min_align", "sizeinbytes"]

# the same on every target
sbuf_min_align: int = TRN1.sbuf_min_align


def sizeinbytes(dtype: Any) -> int:
    """Bytes of one element of a dtype."""
    return dtypes.itemsize(dtype_name(dtype))


__getattr__ = missing("neuronxcc.nki.language.constants")
