"""What the decorators of `nki.compiler` set on a kernel: an immutable record, replaced on a copy of the
kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from opennki.kernels.base import COMPILE_OPTS, TraceKernel
from opennki.kernels.generic import GenericKernel


@dataclass(frozen=True, slots=True)
class CompileOpts:
    """Options of the compiler: middle-end passes, and who allocates SBUF and PSUM (stack: the stack
    allocator; forced: the automatic one, whatever the kernel asks for).
    """

    skip_middle_end: bool = False
    allocator: Literal["auto", "stack", "forced"] = "auto"
    allocator_log_level: int = 50


def compile_opts(kernel: TraceKernel) -> CompileOpts:
    """The options of a kernel."""
    opts: CompileOpts = kernel.kwargs.get(COMPILE_OPTS, CompileOpts())
    return opts


def replace_fields(kernel: Callable[..., Any], **changes: Any) -> TraceKernel:
    """A copy of a kernel, or of a plain function as a kernel, with some options changed; the original keeps
    its own."""
    made: TraceKernel = kernel if isinstance(kernel, TraceKernel) else GenericKernel(kernel, "trace")
    return made.copy(**{COMPILE_OPTS: dataclasses.replace(compile_opts(made), **changes)})
