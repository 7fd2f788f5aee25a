"""JAXKernel: a call of a kernel with JAX arrays becomes the primitive nki_call."""

from __future__ import annotations

from itertools import count
from typing import Any

import jax
import numpy as np

from opennki import settings
from opennki.bind.jax import compat
from opennki.bind.jax.handler import RANKS_TARGET, TARGET
from opennki.bind.jax.lowering import INLINED
from opennki.bind.jax.primitive import JaxTraceResult, nki_call_p
from opennki.errors import NkiValueError
from opennki.kernels.framework import FrameworkKernel

_sites = count(1)


class JAXKernel(FrameworkKernel):
    """A kernel in JAX programs: eager, under jit, in every transformation.

    Arrays are functional: an input that the kernel writes is not changed, its new value is a result. A kernel that
    returns nothing gives the new values of the inputs that it writes. NumPy arrays among the arguments are
    tensors too. `inline=True` among the keywords of nki.jit expands the kernel into the program.
    """

    mode = "jax"

    def is_framework_tensor(self, t: Any) -> bool:
        return isinstance(t, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))

    def map_framework_tensor(self, t: Any) -> tuple[tuple[int, ...], Any]:
        return t.shape, jax.dtypes.canonicalize_dtype(t.dtype) if isinstance(t, np.ndarray) else t.dtype

    def translate_to_neuron_dtype(self, dtype: Any) -> Any:
        return dtype

    @property
    def inline_expansion(self) -> bool:
        """Whether calls are expanded into the program."""
        return bool(self.kwargs.get("inline", settings.current().jax_inline))

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Bind the primitive. Errors: NkiError at the kernel's line while tracing; while running, a JAX error whose
        text is that of the NkiError."""
        inline = self.inline_expansion
        check_platform(inline)
        mapped, tensors = self._map_args(self.bind(args, kwargs))
        result = self.specialise(mapped)
        arrays = [jax.numpy.asarray(t) if isinstance(t, np.ndarray) else t for t in tensors]
        # the processes of a program tell its calls apart by numbers, so JAX must not lower two of them as one
        site = next(_sites) if result.has_collectives and jax.process_count() > 1 else 0
        trace = JaxTraceResult(result, lambda: self._trace(mapped, self.options()), inline, site)
        with jax.named_scope(result.func_name):
            return result.assemble(list(nki_call_p.bind(*compat.equal_varying(arrays), trace=trace)))


def check_platform(inline: bool) -> None:
    """Refuse a backend that runs neither the custom call nor our handler. Errors: NkiValueError with the vendor's
    words."""
    platform = jax.default_backend()
    if platform == "neuron" or (not settings.current().strict_platform and (platform == "cpu" or (inline and platform in INLINED))):
        return
    raise NkiValueError(
        f"nki only support on neuron, current target: {platform}",
        rule="the custom call runs on the neuron platform, and with opennki's handler on cpu",
        fix="unset OPENNKI_STRICT_PLATFORM"
        if platform == "cpu"
        else "set OPENNKI_JAX_INLINE=1 to expand kernels into the program, or use JAX_PLATFORMS=cpu",
    )


def export_checks() -> list[Any]:
    """What jax.export wants to hear about the custom call: `jax.export.export(f, disabled_checks=export_checks())`."""
    from jax import export

    return [export.DisabledSafetyCheck.custom_call(target) for target in (TARGET, RANKS_TARGET)]
