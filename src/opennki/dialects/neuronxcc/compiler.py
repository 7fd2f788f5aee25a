"""`neuronxcc.nki.compiler`: where tensors are placed, and how the compiler treats a kernel.

Source: api_legacy neuronxcc.nki.compiler; seeds "Alloc Decorators".
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from types import TracebackType
from typing import Any

from opennki.dialects.neuronxcc import dimensions
from opennki.dialects.neuronxcc._missing import missing
from opennki.errors import NkiTypeError, NkiValueError
from opennki.kernels.options import replace_fields
from opennki.lang.loops import Directive
from opennki.lang.memory import psum, sbuf

__all__ = [
    "allocation_scope",
    "enable_stack_allocator",
    "force_auto_alloc",
    "multi_buffer",
    "no_reorder",
    "psum",
    "sbuf",
    "skip_middle_end_transformations",
]


def skip_middle_end_transformations(func: Callable[..., Any] | None = None) -> Any:
    """Decorator: the compiler leaves out its middle-end optimisations. Values do not depend on it.

    func: a kernel or a plain function; the result is a copy as a kernel, the original stays as it is.
    """
    return _decorate(func, skip_middle_end_transformations, skip_middle_end=True)


def enable_stack_allocator(func: Callable[..., Any] | None = None, log_level: int = 50) -> Any:
    """Decorator: SBUF and PSUM are allocated like a stack, by the scopes of the kernel. Values do not depend
    on it.

    The vendor asks for skip_middle_end_transformations beside it. log_level: a level of `logging`.
    """
    return _decorate(
        func, enable_stack_allocator, allocator="stack", allocator_log_level=operator.index(log_level)
    )


def force_auto_alloc(func: Callable[..., Any] | None = None) -> Any:
    """Decorator: placements of `sbuf.alloc`, `mod_alloc` and so on are ignored, the compiler allocates
    everything."""
    return _decorate(func, force_auto_alloc, allocator="forced")


def _decorate(func: Any, decorator: Callable[..., Any], **changes: Any) -> Any:
    if func is None:
        return functools.partial(_decorate, decorator=decorator, **changes)
    if not callable(func):
        raise NkiTypeError(f"{decorator.__name__} of {func!r}", rule="it decorates a kernel or a function")
    return replace_fields(func, **changes)


def multi_buffer(factor: int = 2) -> Directive:
    """Directive of a loop: the tensors of its body get this many buffers, so that iterations overlap. Values
    do not depend on it."""
    if not hasattr(factor, "__index__") or isinstance(factor, bool) or operator.index(factor) < 1:
        raise NkiValueError(f"multi_buffer({factor!r})", rule="the number of buffers is a positive integer")
    return Directive(f"multi_buffer({operator.index(factor)})")


class _Guard(Directive):
    """A directive that also stands in a `with`."""

    def __enter__(self) -> _Guard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


def no_reorder() -> Directive:
    """Directive of a loop, or of a `with` block: the compiler keeps the program order. Values do not depend
    on it."""
    return _Guard("no_reorder()")


def allocation_scope() -> Directive:
    """Scope for the stack allocator, as directive of a loop or in a `with`: what is allocated in it is freed
    at its end."""
    return _Guard("allocation_scope()")


# `neuronxcc.nki.compiler.backends.neuron.dimensions`, reached by attribute in public code
class backends:
    """The vendor's package of this name, as far as kernels use it."""

    class neuron:
        """`backends.neuron`."""

        dimensions = dimensions


__getattr__ = missing("neuronxcc.nki.compiler")
