"""nki_call outside of jit on the CPU: the payload runs on the arrays at once, as the handler would run it.

XLA would compile a program for each specialisation and keep it; a kernel that is called with a thousand different
constants would hold gigabytes. Arrays that are not on one CPU device, and the debugging modes of JAX, go through XLA.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from opennki.bind.host import run_payload
from opennki.bind.jax import compat


def device_of(arrays: Sequence[Any]) -> tuple[Any, bool] | None:
    """(the one CPU device that holds the arrays, whether they are bound to it); None where there is no such device."""
    found: Any = None
    committed = False
    for x in arrays:
        if not isinstance(x, jax.Array):
            continue
        devices = x.devices()
        if len(devices) != 1 or not x.is_fully_addressable or x.is_deleted():
            return None
        (device,) = devices
        if device.platform != "cpu" or (found is not None and device != found):
            return None
        found, committed = device, committed or compat.committed(x)
    if found is None or (not committed and jax.config.jax_default_device is not None):
        return None
    return found, committed


def nki_call_impl(*args: Any, primitive: Any, trace: Any) -> list[Any]:
    """The results of a call with concrete arrays. Errors: the kernel's NkiError."""
    config = jax.config
    place = None if trace.inline or config.jax_debug_nans or config.jax_debug_infs else device_of(args)
    if place is None:
        return list(compat.apply_primitive(primitive, *args, trace=trace))
    inputs = [np.asarray(x) for x in args]
    outputs = [np.empty(rt.shape, rt.dtype) for rt in trace.result.return_types]
    run_payload(trace.payload, inputs, outputs)
    device, committed = place
    return [jax.device_put(out, device if committed else None) for out in outputs]
