"""The kernels that run on NumPy arrays: baremetal, benchmark, profile, simulation.

Until the toolchain exists, baremetal, benchmark and profile construct, nest and subscript, and a call runs
the interpreter and says so. Source: seeds "NKI Entrypoints".
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from opennki.errors import NkiNotYet, NkiTypeError, NkiValueError, NkiWarning, caller
from opennki.isa import dtypes
from opennki.kernels.base import TraceKernel
from opennki.lang.annotations import TensorType
from opennki.lang.emit import dtype_name


class NumpyKernel(TraceKernel):
    """Kernels that run on NumPy arrays on this machine. `mode` is there for nki.jit and is that of the class."""

    mode = "baremetal"

    def __init__(self, func: Callable[..., Any], mode: str = "", grid: Any = None, **kwargs: Any) -> None:
        super().__init__(func, grid, **kwargs)
        self.copied()

    @staticmethod
    def new_cache() -> Any:
        """Nothing is kept between calls."""
        return None

    @classmethod
    def of_generic(cls, kernel: TraceKernel, cache: Any) -> NumpyKernel:
        """The kernel of this class for a kernel of nki.jit."""
        return cls(kernel.func, "", kernel.grid, **kernel.kwargs)

    def copied(self) -> None:
        if self.kwargs.get("save_trace_name") and self.kwargs.get("save_neff_name") not in (
            None,
            "file.neff",
        ):
            raise NkiValueError(
                'save_trace_name is given and save_neff_name is not "file.neff"',
                rule='if save_trace_name is specified, save_neff_name must be set to "file.neff"',
            )

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.say_where()
        return super().call(tuple(map(_filled, args)), {name: _filled(value) for name, value in kwargs.items()})

    def say_where(self) -> None:
        """A warning that no device runs the kernel."""
        loc = caller()
        warnings.warn_explicit(
            NkiWarning(f"{self.func_name}: {type(self).__name__} runs on the opennki interpreter, not on a device"),
            None,
            loc.file,
            max(loc.line, 1),
        )


class SimulateKernel(NumpyKernel):
    """`mode="simulation"`: run on the interpreter, with all checks."""

    mode = "simulation"

    def say_where(self) -> None:
        """Nothing to say: simulation was asked for."""


def _filled(value: Any) -> Any:
    """An array of zeros for an argument that is only described, `nt.tensor[[250, 512], nl.float32]`: timing
    needs no values."""
    if not isinstance(value, TensorType) or value.shape is None:
        return value
    if len(value.shape) != 2 or not isinstance(value.shape[0], (list, tuple)):
        raise NkiTypeError(
            f"the argument {value!r} describes no array",
            rule="an argument without values is nt.tensor[[sizes], dtype]",
        )
    return np.zeros(tuple(map(operator.index, value.shape[0])), dtypes.storage(dtype_name(value.shape[1])))


class BaremetalKernel(NumpyKernel):
    """`nki.baremetal`: compile and run without a framework."""


class BenchmarkKernel(NumpyKernel):
    """`nki.benchmark`: run, and measure the latency."""

    mode = "benchmark"

    @property
    def benchmark_result(self) -> Any:
        """Latency of the kernel; needs the timing model."""
        raise NkiNotYet("benchmark_result (the timing model)")


class ProfileKernel(NumpyKernel):
    """`nki.profile`: run, and write a profile into a directory."""

    mode = "profile"

    def copied(self) -> None:
        if self.kwargs.get("working_directory") is None:
            raise NkiValueError(
                "Please specify working directory", rule="nki.profile needs working_directory="
            )
