"""`neuronxcc.kra.kralib`: the runtime client."""

from __future__ import annotations

from opennki.dialects.neuronxcc._missing import missing
from opennki.toolchain.nrt import NrtClient

__all__ = ["NrtClient"]
__getattr__ = missing("neuronxcc.kra.kralib")
