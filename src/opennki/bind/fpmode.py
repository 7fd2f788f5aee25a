"""The floating-point mode of a thread: kernels need denormals, XLA's threads flush them to zero.

XLA sets flush-to-zero and denormals-are-zero around its programs. A handler that runs there would compute
other bits than the same kernel on the user's thread, so it runs in the default mode and puts XLA's back:

    mode = fpmode.enter()
    try:
        ...
    finally:
        fpmode.leave(mode)

`with fpmode.precise():` is the same for code where a microsecond does not matter. The mode belongs to one
thread; threads that the body starts or wakes (a BLAS pool) are not changed.

It goes through the C library's fegetenv and fesetenv: Linux (glibc and musl) on x86-64, AArch64 and RISC-V, and
macOS. Elsewhere `AVAILABLE` is False and everything here does nothing: the mode stays what it was.
"""
from __future__ import annotations

import ctypes as C
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# More than any fenv_t: 32 bytes on x86-64 Linux, 16 on macOS, 8 on AArch64 Linux. A multiple of its alignment.
_Environment = C.c_uint64 * 16
_MACHINES = ("x86_64", "amd64", "aarch64", "arm64", "riscv64")
_TINY, _ONE = 5e-324, 1.0


def _functions() -> tuple[Any, Any, Any] | None:
    """(fegetenv, fesetenv, FE_DFL_ENV), or None where we do not know the C library."""
    if not sys.platform.startswith(("linux", "darwin")) or platform.machine().lower() not in _MACHINES:
        return None
    for name in (None, "libm.so.6"):
        try:
            # PyDLL keeps the GIL: giving it up and taking it back costs more than the call.
            library = C.PyDLL(name)
            get, set_ = library.fegetenv, library.fesetenv
            # A macro of <fenv.h>: the address of a constant on macOS, (const fenv_t *)-1 in glibc and musl.
            default = (C.c_void_p(C.addressof(C.c_char.in_dll(library, "_FE_DFL_ENV"))) if sys.platform == "darwin"
                       else C.c_void_p(-1))
        except (OSError, AttributeError, ValueError):
            continue
        get.restype = set_.restype = None       # and no argtypes: both only pass ctypes objects, in half the time
        return get, set_, default
    return None


_get: Any
_set: Any
_get, _set, _DEFAULT = _functions() or (None, None, None)
AVAILABLE = _get is not None


def enter() -> Any:
    """Set the default mode on this thread: denormals kept, round to nearest, no traps. Returns what `leave` takes."""
    if _get is None:
        return None
    mode = _Environment()
    _get(mode)
    _set(_DEFAULT)
    return mode


def leave(mode: Any) -> None:
    """Put back the mode that `enter` found, on the same thread."""
    if mode is not None:
        _set(mode)


@contextmanager
def precise() -> Iterator[None]:
    """The default mode for the body, the thread's own mode after it."""
    mode = enter()
    try:
        yield
    finally:
        leave(mode)


def flushes_denormals() -> bool:
    """Whether this thread takes denormal numbers for zero now (inputs, results, or both)."""
    return _TINY * _ONE == 0.0
