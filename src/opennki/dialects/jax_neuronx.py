"""`jax_neuronx`: the older call of a kernel from JAX, which nki.jit has replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opennki.dialects.neuronxcc._missing import missing

__all__ = ["nki_call"]


def nki_call(func: Callable[..., Any], *args: Any, grid: Any = None, out_shape: Any, **kwargs: Any) -> Any:
    """Call a kernel whose outputs are its last positional parameters.

    args: the inputs, JAX arrays. out_shape: a jax.ShapeDtypeStruct, or a tuple or list of them, for the outputs. grid:
    the launch grid. Returns an array, or a tuple of them. Errors: NkiError at the kernel's line.
    """
    import jax.numpy as jnp

    from opennki.bind.jax import JAXKernel

    several = isinstance(out_shape, (tuple, list))
    shapes = tuple(out_shape) if several else (out_shape,)
    kernel = JAXKernel(func, grid=grid if grid not in ((), None) else None, kernel_return=False)
    results = kernel(*args, *[jnp.zeros(s.shape, s.dtype) for s in shapes], **kwargs)
    return (results if isinstance(results, tuple) else (results,)) if several else results


__getattr__ = missing("jax_neuronx")
