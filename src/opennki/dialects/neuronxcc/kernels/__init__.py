"""`neuronxcc.nki.kernels`: the vendor's kernel library. The names exist; the kernels are not in opennki
yet."""

from __future__ import annotations

from opennki.dialects.neuronxcc._missing import missing

__getattr__ = missing("neuronxcc.nki.kernels")
