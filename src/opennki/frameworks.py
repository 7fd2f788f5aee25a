"""The frameworks whose tensors opennki knows: where they come from, and where their kernel classes live.

Only names stand here: a framework is imported by its own program, its kernel class when a tensor shows up.
"""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping

from opennki.kernels.modes import Framework, register_framework

POOL = "PJRT_NPROC"
"""Environment variable with the size of XLA:CPU's thread pool, read when JAX starts its CPU client."""


def threads_for(devices: int) -> int:
    """Threads that XLA:CPU needs for programs sharded over so many devices of its own."""
    return 4 * devices


def widen_pool(environ: MutableMapping[str, str]) -> None:
    """Ask for a larger thread pool where several CPU devices are asked for, and nothing is said about the pool.

    By default it has a thread for each device. A thread is held by each device that waits in a reduction, and by
    each launch that waits because 32 steps are in flight: from then on nothing moves, with or without kernels of
    ours (seen with jaxlib 0.10.2, any sharded program with a psum whose steps are slower than their launch).
    """
    flag = re.findall(r"--xla_force_host_platform_device_count=(\d{1,4})\b", environ.get("XLA_FLAGS", ""))
    text = environ.get("JAX_NUM_CPU_DEVICES", "")
    devices = max([int(n) for n in flag] + ([int(text)] if text.isascii() and text.isdigit() else []), default=1)
    if devices > 1 and POOL not in environ and "NPROC" not in environ and threads_for(devices) > (os.cpu_count() or 1):
        environ[POOL] = str(threads_for(devices))


def register() -> None:
    """Register the frameworks, in the order in which arguments are asked."""
    widen_pool(os.environ)
    register_framework(
        Framework(
            "jax",
            "jax",
            # a program that is still importing jax has no arrays yet
            lambda jax, value: isinstance(value, getattr(jax, "Array", ())),
            "opennki.bind.jax:JAXKernel",
        )
    )
    register_framework(
        Framework(
            "torchxla",
            "torch",
            lambda torch, value: isinstance(value, getattr(torch, "Tensor", ())),
            None,  # not there yet: torch tensors on the CPU run as NumPy arrays
            auto=False,
        )
    )
