"""`torch_neuronx.xla_impl.ops` on the CPU: where older drivers import `nki_jit` from."""

from __future__ import annotations

from opennki.dialects.neuronxcc._missing import missing
from opennki.dialects.torch_shims.torch_neuronx import nki_jit

__all__ = ["nki_jit"]
__getattr__ = missing("torch_neuronx.xla_impl.ops")
