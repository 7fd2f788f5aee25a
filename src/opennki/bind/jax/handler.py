"""The CPU handler: XLA calls it with the payload and the buffers of a custom call, and it runs the kernel on them.

It is registered once per process under the target name, as a typed FFI handler: the payload is the attribute
`opaque`. Source: XLA's c_api.h of the installed jaxlib; reference/bindings.md has the measurements.
"""

from __future__ import annotations

from typing import Any

import jax

from opennki.bind import xla_ffi
from opennki.bind.host import run_payload

TARGET = "AwsNeuronCustomNativeKernel"
ATTRIBUTE = "opaque"

_registered: list[Any] = []  # XLA keeps the address of the handler: it lives as long as the process


def register_handler() -> None:
    """Tell XLA:CPU about the handler; a second call does nothing."""
    if _registered:
        return
    version = xla_ffi.version_from_header(jax.ffi.include_dir())
    handler = xla_ffi.typed_handler(run_payload, version=version, attribute=ATTRIBUTE)
    _registered.append(handler)
    jax.ffi.register_ffi_target(TARGET, xla_ffi.capsule(handler), platform="cpu", api_version=1)
