"""The top package `neuronxcc`: its version, and what importing it changes elsewhere."""

from __future__ import annotations

import logging

from opennki._version import __version__
from opennki.dialects.neuronxcc._missing import missing

# Public kernels read `logging.OFF`, which the vendor's package defines on import.
if not hasattr(logging, "OFF"):
    logging.OFF = logging.CRITICAL + 10  # type: ignore[attr-defined]

__all__ = ["__version__"]
__getattr__ = missing("neuronxcc")
