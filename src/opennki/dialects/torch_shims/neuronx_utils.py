"""`torch_neuronx.utils` on the CPU: what kernels and drivers ask there."""

from __future__ import annotations

from typing import Any

from opennki.dialects.neuronxcc._missing import missing
from opennki.isa import target as targets

__all__ = ["get_platform_target"]


def get_platform_target(compiler_args: Any = None) -> str:
    """The name of the target: NEURON_PLATFORM_TARGET_OVERRIDE, else the fallback, with the warning that it is one."""
    return targets.detect()[0].name


__getattr__ = missing("torch_neuronx.utils")
