"""`neuronxcc.nki.isa.constants`: the enumerations of nki.isa."""

from __future__ import annotations

from opennki.dialects.neuronxcc._missing import missing
from opennki.isa.enums import dge_mode, engine, oob_mode, reduce_cmd
from opennki.isa.target import nc_version

__all__ = ["dge_mode", "engine", "nc_version", "oob_mode", "reduce_cmd"]
__getattr__ = missing("neuronxcc.nki.isa.constants")
