"""`neuronxcc.nki._jax`: the JAX bridge. Importing it imports JAX."""

from __future__ import annotations

from opennki.bind.jax import JAXKernel, JaxTraceResult, nki_call_eval, nki_call_lowering_rule, nki_call_p
from opennki.dialects.neuronxcc._missing import missing

__all__ = ["JAXKernel", "JaxTraceResult", "nki_call_eval", "nki_call_lowering_rule", "nki_call_p"]
__getattr__ = missing("neuronxcc.nki._jax")
