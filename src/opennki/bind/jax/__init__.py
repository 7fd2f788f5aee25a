"""NKI kernels in JAX programs: the primitive nki_call, its rules, and the kernel class that binds it.

Importing this package imports JAX and registers the CPU handler. Source: seeds "JAX bridge".
"""

from opennki.bind.jax.handler import TARGET, register_handler
from opennki.bind.jax.kernel import JAXKernel, export_checks
from opennki.bind.jax.lowering import nki_call_lowering_rule
from opennki.bind.jax.primitive import JaxTraceResult, nki_call_eval, nki_call_p

__all__ = [
    "JAXKernel",
    "JaxTraceResult",
    "TARGET",
    "export_checks",
    "nki_call_eval",
    "nki_call_lowering_rule",
    "nki_call_p",
    "register_handler",
]

register_handler()
