"""The CPU handler: XLA calls it with the payload and the buffers of a custom call, and it runs the kernel on them.

It is registered once per process under the target name, as a typed FFI handler: the payload is the attribute
`opaque`. Source: XLA's c_api.h of the installed jaxlib; reference/bindings.md has the measurements.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import jax
import numpy as np

from opennki import settings
from opennki.bind import xla_async, xla_ffi
from opennki.bind.gathering import RankCall, gatherings
from opennki.bind.host import host_kernel, run_payload
from opennki.bind.jax import processes

TARGET = "AwsNeuronCustomNativeKernel"
RANKS_TARGET = TARGET + "OnRanks"
"""The call of a kernel with collectives in a program of several devices: its last operand is that of `compat.rank_words`."""
ATTRIBUTE = "opaque"

_registered: list[Any] = []  # XLA keeps the address of the handler: it lives as long as the process


def register_handler() -> None:
    """Tell XLA:CPU about the handlers; a second call does nothing."""
    if _registered:
        return
    version = xla_ffi.version_from_header(jax.ffi.include_dir())
    one = xla_ffi.typed_handler(run_payload, version=version, attribute=ATTRIBUTE)
    many = xla_async.later_handler(begin_rank, version=version, attribute=ATTRIBUTE)
    _registered.extend((one, many))
    gatherings.advice = lambda: settings.narrow_xla_pool(jax.local_device_count())
    gatherings.finish = _finish
    jax.ffi.register_ffi_target(TARGET, xla_ffi.capsule(one), platform="cpu", api_version=1)
    jax.ffi.register_ffi_target(RANKS_TARGET, xla_ffi.capsule(many), platform="cpu", api_version=1)


def _finish() -> None:
    """Wait for results that are still computed; their programs may have more kernels to come. What fails has said so."""
    for array in jax.live_arrays():
        with suppress(Exception):
            array.block_until_ready()


def begin_rank(call: xla_async.Call, payload: bytes, inputs: list[np.ndarray], outputs: list[np.ndarray]) -> None:
    """A device has come to a call of a kernel with collectives. The words of its last operand: see `compat.rank_words`."""
    rank, ranks, *more = map(int, inputs.pop())
    kernel, done = host_kernel(payload), call.done
    if more:
        leave = processes.sites.enter((call.run, more[0], rank), call.site, kernel.payload.func_name)
        gathering = processes.enter(call.run, rank, more)

        def done(error: BaseException | None = None) -> None:
            leave()
            call.done(error)
    else:
        gathering = gatherings.enter(call.run, call.site, rank, ranks, frozenset(range(ranks)))
    try:
        gathering.arrive(RankCall(rank, kernel, inputs, outputs, done))
    except BaseException as exc:
        gathering.refuse(rank, exc)
        raise
