"""The entry points: nki.jit, trace, simulate_kernel, baremetal, benchmark, profile.

Until the toolchain exists, baremetal, benchmark and profile construct, nest and subscript, and a call runs
the interpreter and says so. Source: seeds "NKI Entrypoints".
"""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from opennki.errors import NkiNotYet, NkiTypeError, NkiValueError, NkiWarning
from opennki.isa import dtypes
from opennki.kernels.generic import GenericKernel, adopt
from opennki.lang.annotations import TensorType
from opennki.lang.emit import dtype_name


def jit(func: Any = None, mode: str = "auto", **kwargs: Any) -> Any:
    """Decorator of a kernel: bare, with arguments, or as a call; `kernel[grid](*arrays)` runs it.

    mode: jax, torchxla, baremetal, benchmark, profile, simulation, trace (a sub-kernel) or auto (decided by
    the arguments of each call). platform_target ("trn1", "trn2", ...) picks the chip. A kernel that is jitted
    again takes the new mode and options. Raises NkiValueError for an unknown mode (`... passed to nki.jit`).
    """
    if func is None:
        return functools.partial(jit, mode=mode, **kwargs)
    kind = {"baremetal": BaremetalKernel, "benchmark": BenchmarkKernel, "profile": ProfileKernel}.get(
        mode, GenericKernel
    )
    return kind(func, mode, **kwargs)


def trace(func: Any = None, **kwargs: Any) -> Any:
    """Decorator of traceable code that is bound to no framework: sub-kernels, and kernels that write into
    their arguments."""
    if func is None:
        return functools.partial(trace, **kwargs)
    return GenericKernel(func, "trace", **kwargs)


def simulate_kernel(kernel: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a kernel on the CPU with NumPy arrays and return its results; arrays that the kernel writes are
    updated in place.

    kernel: jitted, traced or plain, also with a launch grid. Extra keywords of opennki: `checks` ("full" by
    default, "fast", "off", or a dict of error / warn / off by kind), `eager` (run loop bodies concretely, so
    that breakpoint() and print work), `order` of the programs of a grid ("program", "reversed", "shuffle:1"),
    `dump_file` for device_print, `progress(done, total)` by programs or outermost iterations. A parameter of
    the kernel with one of these names is the kernel's. Raises NkiError at the line of the kernel.
    """
    if not isinstance(kernel, GenericKernel):
        inner = getattr(kernel, "func", None)
        if isinstance(kernel, functools.partial) and isinstance(inner, GenericKernel):
            return simulate_kernel(inner, *kernel.args, *args, **{**kernel.keywords, **kwargs})
        kernel = GenericKernel(kernel, "simulation")
    values, restore = adopt(args, kwargs)
    return restore(GenericKernel.simulate(kernel, *values[0], **values[1]))


class NumpyKernel(GenericKernel):
    """Kernels that run on NumPy arrays on this machine."""

    _known: frozenset[str] = frozenset(
        {"save_neff_name", "save_trace_name", "additional_compile_opt", "artifacts_dir"}
    )
    _mode = "baremetal"

    def __init__(self, func: Callable[..., Any], mode: str = "", grid: Any = None, **kwargs: Any) -> None:
        super().__init__(func, self._mode, grid, **kwargs)
        self._check()

    def _check(self) -> None:
        if self.kwargs.get("save_trace_name") and self.kwargs.get("save_neff_name") not in (
            None,
            "file.neff",
        ):
            raise NkiValueError(
                'save_trace_name is given and save_neff_name is not "file.neff"',
                rule='if save_trace_name is specified, save_neff_name must be set to "file.neff"',
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from opennki.ir.build import maybe_current

        if maybe_current() is None:
            warnings.warn(
                NkiWarning(
                    f"{getattr(self.func, '__name__', 'kernel')}: {type(self).__name__} runs on the opennki interpreter, not on a device"
                ),
                stacklevel=2,
            )
        return super().__call__(
            *map(_filled, args), **{name: _filled(value) for name, value in kwargs.items()}
        )


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

    _mode = "benchmark"

    @property
    def benchmark_result(self) -> Any:
        """Latency of the kernel; needs the timing model."""
        raise NkiNotYet("benchmark_result (the timing model)")


class ProfileKernel(NumpyKernel):
    """`nki.profile`: run, and write a profile into a directory."""

    _mode = "profile"

    def _check(self) -> None:
        if self.kwargs.get("working_directory") is None:
            raise NkiValueError(
                "Please specify working directory", rule="nki.profile needs working_directory="
            )


def _decorator(cls: type[NumpyKernel], first: Any, kwargs: dict[str, Any]) -> Any:
    if first is None:
        return lambda func: cls(func, **kwargs)
    if not callable(first):
        raise NkiTypeError(f"{first!r} is no function", rule="a kernel is a Python function")
    return cls(first, **kwargs)


def baremetal(kernel: Any = None, **kwargs: Any) -> Any:
    """Decorator, wrapper or factory: run a kernel without a framework. Keywords: save_neff_name,
    save_trace_name, additional_compile_opt, artifacts_dir."""
    return _decorator(BaremetalKernel, kernel, kwargs)


def benchmark(kernel: Any = None, **kwargs: Any) -> Any:
    """Decorator, wrapper or factory: measure a kernel. Keywords: warmup=10, iters=100, save_neff_name,
    save_trace_name, additional_compile_opt."""
    return _decorator(BenchmarkKernel, kernel, kwargs)


def profile(func: Any = None, **kwargs: Any) -> Any:
    """Decorator, wrapper or factory: profile a kernel. Keywords: working_directory (required),
    save_neff_name, save_trace_name, additional_compile_opt, overwrite, profile_nth."""
    return _decorator(ProfileKernel, func, kwargs)
