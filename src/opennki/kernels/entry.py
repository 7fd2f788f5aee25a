"""The entry points: nki.jit, trace, simulate_kernel, baremetal, benchmark, profile. Source: seeds "NKI Entrypoints"."""

from __future__ import annotations

import functools
from typing import Any

from opennki.errors import NkiTypeError
from opennki.kernels.base import TraceKernel, adopt
from opennki.kernels.generic import GenericKernel
from opennki.kernels.modes import check_mode
from opennki.kernels.numpy_kernel import BaremetalKernel, BenchmarkKernel, NumpyKernel, ProfileKernel


class _Jit:
    """Decorator of a kernel: bare, with arguments, or as a call; `kernel[grid](*arrays)` runs it.

    mode: jax, torchxla, baremetal, benchmark, profile, simulation, trace (a sub-kernel) or auto (decided by
    the arguments of each call). platform_target ("trn1", "trn2", ...) picks the chip. A kernel that is jitted
    again takes the new mode and options. `nki.jit[...]`, the syntax of type parameters, is `nki.jit`.
    Raises NkiValueError for an unknown mode (`... passed to nki.jit`).
    """

    __name__ = "jit"

    def __call__(self, func: Any = None, mode: str = "auto", **kwargs: Any) -> Any:
        if func is None:
            return functools.partial(self, mode=mode, **kwargs)
        kind = {"baremetal": BaremetalKernel, "benchmark": BenchmarkKernel, "profile": ProfileKernel}.get(
            check_mode(mode), GenericKernel
        )
        return kind(func, mode, **kwargs)

    def __getitem__(self, item: Any) -> Any:
        return self

    def __repr__(self) -> str:
        return "<nki.jit>"

    def __reduce__(self) -> str:
        return "jit"


jit = _Jit()


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
    default: by element, on the interpreter; "fast": native code with indices and reads of unwritten tiles
    checked where they are not proven; "off": native code with indices only; or a dict of error / warn / off by
    kind; docs/executor.md says what each costs), `eager` (run loop bodies concretely, so
    that breakpoint() and print work), `order` of the programs of a grid ("program", "reversed", "shuffle:1"),
    `dump_file` for device_print, `progress(done, total)` by programs or outermost iterations. A parameter of
    the kernel with one of these names is the kernel's. Raises NkiError at the line of the kernel.
    """
    if not isinstance(kernel, TraceKernel):
        inner = getattr(kernel, "func", None)
        if isinstance(kernel, functools.partial) and isinstance(inner, TraceKernel):
            return simulate_kernel(inner, *kernel.args, *args, **{**kernel.keywords, **kwargs})
        kernel = GenericKernel(kernel, "simulation")
    values, restore = adopt(args, kwargs)
    return restore(TraceKernel.simulate(kernel, *values[0], **values[1]))


def _decorator(cls: type[NumpyKernel], first: Any, kwargs: dict[str, Any]) -> Any:
    if first is None:
        return lambda func: cls(func, **kwargs)
    if not callable(first):
        raise NkiTypeError(f"{first!r} is no function", rule="a kernel is a Python function")
    return cls(first, **kwargs)


def baremetal(kernel: Any = None, **kwargs: Any) -> Any:
    """Decorator, wrapper or factory: compile a kernel and run it on a virtual NeuronCore, without a framework. Keywords: save_neff_name,
    save_trace_name, additional_compile_opt, artifacts_dir (see `BaremetalKernel`)."""
    return _decorator(BaremetalKernel, kernel, kwargs)


def benchmark(kernel: Any = None, **kwargs: Any) -> Any:
    """Decorator, wrapper or factory: estimate the latency of a kernel. Keywords: warmup=10, iters=100, save_neff_name, save_trace_name,
    additional_compile_opt (see `BenchmarkKernel`)."""
    return _decorator(BenchmarkKernel, kernel, kwargs)


def profile(func: Any = None, **kwargs: Any) -> Any:
    """Decorator, wrapper or factory: profile a kernel. Keywords: working_directory (required), save_neff_name, save_trace_name,
    additional_compile_opt, overwrite, profile_nth, num_execs (see `ProfileKernel`)."""
    return _decorator(ProfileKernel, func, kwargs)
