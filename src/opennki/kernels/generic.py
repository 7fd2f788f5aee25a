"""GenericKernel: what `nki.jit` returns. It finds out at each call, by the arguments, which kernel class runs it.

Source: seeds "NKI Entrypoints" (compute_mode, build_cache_kernel, _cached_kernel).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opennki.kernels.base import TraceKernel
from opennki.kernels.modes import check_mode, compute_mode


class GenericKernel(TraceKernel):
    """A kernel that resolves to a concrete class at each call. Subscript it with a launch grid.

    `mode` is one of jax, torchxla, baremetal, benchmark, profile, simulation, trace, auto. Raises NkiValueError for
    another one.
    """

    def __init__(self, func: Callable[..., Any], mode: str = "auto", grid: Any = None, **kwargs: Any) -> None:
        super().__init__(func, grid, **kwargs)
        self.mode = check_mode(mode)
        self._cached_kernel: dict[Any, Any] = {}
        # specialisations by class; copies with another grid share them, as the grid is part of their keys
        self._specialisations: dict[Any, Any] = {}

    def copied(self) -> None:
        check_mode(self.mode)
        self._cached_kernel = {}

    def build_cache_kernel(self, kind: Any) -> Any:
        """The concrete kernel of a class, made once for this grid and these options."""
        kernel = self._cached_kernel.get(kind)
        if kernel is None:
            kernel = kind.of_generic(self, self._specialisations.setdefault(kind, kind.new_cache()))
            kernel = self._cached_kernel.setdefault(kind, kernel)
        return kernel

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.mode == "trace":
            return super().call(args, kwargs)
        return self.build_cache_kernel(compute_mode(args, kwargs, self.mode)).call(args, kwargs)
