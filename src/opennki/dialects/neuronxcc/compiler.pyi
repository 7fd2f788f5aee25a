# Made by `python -m opennki.tools.stubs` from signatures and docstrings; do not edit.
"""`neuronxcc.nki.compiler`: where tensors are placed, and how the compiler treats a kernel.

Source: api_legacy neuronxcc.nki.compiler; seeds "Alloc Decorators".
"""
from typing import Any

from collections.abc import Callable
from opennki.lang.loops import Directive
from opennki.lang.memory import OnChip

psum: OnChip
sbuf: OnChip


def allocation_scope() -> Directive:
    """Scope for the stack allocator, as directive of a loop or in a `with`: what is allocated in it is freed
    at its end.
    """


def enable_stack_allocator(func: Callable[..., Any] | None = None, log_level: int = 50) -> Any:
    """Decorator: SBUF and PSUM are allocated like a stack, by the scopes of the kernel. Values do not depend
    on it.

    The vendor asks for skip_middle_end_transformations beside it. log_level: a level of `logging`.
    """


def force_auto_alloc(func: Callable[..., Any] | None = None) -> Any:
    """Decorator: placements of `sbuf.alloc`, `mod_alloc` and so on are ignored, the compiler allocates
    everything.
    """


def multi_buffer(factor: int = 2) -> Directive:
    """Directive of a loop: the tensors of its body get this many buffers, so that iterations overlap. Values
    do not depend on it.
    """


def no_reorder() -> Directive:
    """Directive of a loop, or of a `with` block: the compiler keeps the program order. Values do not depend
    on it.
    """


def skip_middle_end_transformations(func: Callable[..., Any] | None = None) -> Any:
    """Decorator: the compiler leaves out its middle-end optimisations. Values do not depend on it.

    func: a kernel or a plain function; the result is a copy as a kernel, the original stays as it is.
    """
