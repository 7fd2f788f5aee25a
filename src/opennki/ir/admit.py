"""Kernels from outside: what is read from a payload, an IR text or a NEFF is held to every rule before anything is done with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opennki.errors import UNKNOWN, Loc, NkiError, NkiParseError
from opennki.ir.nodes import Kernel
from opennki.ir.sizes import too_large
from opennki.ir.verify import verify
from opennki.isa.target import TARGETS, resolve


@contextmanager
def legal(name: str, what: str) -> Iterator[None]:
    """Report what the rules of an instruction stumble over as a fault of what was read (`what`: "this payload"): they are written for
    operands that the tracer makes, and IR from elsewhere may have any. Errors: NkiParseError."""
    try:
        yield
    except (NkiError, MemoryError):
        raise
    except Exception as exc:
        raise NkiParseError(f"{name}: the IR in {what} is not legal ({type(exc).__name__}: {exc})", loc=UNKNOWN,
                            rule="the operands of an instruction are as its declaration says") from exc


def admit(kernel: Kernel, what: str, loc: Loc = UNKNOWN) -> Kernel:
    """A kernel that was read, if it is one that may run: no larger than a kernel can be, for a target that there is, and legal in each
    instruction. `what`: where it was read; `loc`: the place of errors that belong to no instruction.

    Errors: NkiParseError; the NkiError of a rule that an instruction breaks.
    """
    large = too_large(kernel)
    if large:
        raise NkiParseError(large[0], loc=loc, rule=large[1])
    if kernel.target.strip().lower() not in TARGETS:
        raise NkiParseError(f"the target {kernel.target[:40]!r} is not known", loc=loc, rule="a target is one of " + ", ".join(TARGETS))
    with legal(kernel.name, what):
        verify(kernel, resolve(kernel.target))
    return kernel
