"""`neuronxcc.kra.profiler`: profiles of a NEFF."""

from __future__ import annotations

from opennki.dialects.neuronxcc._missing import missing
from opennki.toolchain.profiler import Profiler

__all__ = ["Profiler"]
__getattr__ = missing("neuronxcc.kra.profiler")
