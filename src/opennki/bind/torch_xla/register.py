"""Registers our handler with the XLA that is inside PyTorch/XLA, for programs that its CPU client runs.

PyTorch/XLA has a function for that, which its CPU client does not implement. The table of XLA's FFI (`XLA_FFI_Api` of
xla/ffi/api/c_api.h) is in its library, though, and describes itself: its size, its version, and pointers to functions of that library.
It is looked for in the library's own data. Exactly one place may fit, and its version must be the one that is known; else
nothing is called, and kernels go through the host.
"""

from __future__ import annotations

import ctypes as C
import re
import sys
from typing import Any

import numpy as np

from opennki.bind import xla_ffi
from opennki.bind.host import run_payload
from opennki.bind.torch_xla.hlo import TARGET

ATTRIBUTE = "opaque"
LIBRARY = "_XLAC"
PLATFORM = b"Host"
_VERSION_SIZE = 24
_FUNCTIONS = 5  # words in front of the first function: size, extension, version (3)
_ERROR_MESSAGE, _REGISTER = 1, 3  # which of the functions after `internal_api` and XLA_FFI_Error_Create

_registered: list[Any] = []  # XLA keeps the address: the handler lives as long as the process


class CannotRegister(Exception):
    """The table was not found, or is not the one that is known."""


class _Span(C.Structure):
    _fields_ = [("data", C.c_char_p), ("size", C.c_size_t)]


class _Bundle(C.Structure):
    _fields_ = [("instantiate", C.c_void_p), ("prepare", C.c_void_p), ("initialize", C.c_void_p), ("execute", C.c_void_p)]


class _Register(C.Structure):
    _fields_ = [("struct_size", C.c_size_t), ("extension", C.c_void_p), ("name", _Span), ("platform", _Span), ("bundle", _Bundle),
                ("traits", C.c_uint32)]


class _Message(C.Structure):
    _fields_ = [("struct_size", C.c_size_t), ("extension", C.c_void_p), ("error", C.c_void_p), ("message", C.c_char_p)]


def _mappings() -> list[tuple[int, int, str, str]]:
    """(start, end, permissions, file) of the parts of this process's memory. Errors: OSError where the system does not say."""
    found = []
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            part = re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \S+ *(.*)", line)
            if part:
                found.append((int(part[1], 16), int(part[2], 16), part[3], part[4]))
    return found


def tables(library: str = LIBRARY) -> list[tuple[int, int, list[int]]]:
    """(minor version, address, functions) of everything in the library's data that looks like XLA's table."""
    every = _mappings()
    own = [m for m in every if library in m[3]]
    ends = {m[1] for m in own}
    # zero-initialised data has no file, and follows the last part that has one
    data = [m for m in own if m[2].startswith("r") and "x" not in m[2]] + [m for m in every if not m[3] and m[0] in ends and "r" in m[2]]
    code = [(m[0], m[1]) for m in own if "x" in m[2]]

    def is_code(address: int) -> bool:
        return any(low <= address < high for low, high in code)

    found = []
    for low, high, _, _ in data:
        words = np.frombuffer(memoryview((C.c_char * (high - low)).from_address(low)), np.uint64)
        if len(words) < 64:
            continue
        size, extension, version, nothing, numbers = (words[i: len(words) - 48 + i] for i in range(5))
        fits = ((size >= 80) & (size <= 512) & (extension == 0) & (version == _VERSION_SIZE) & (nothing == 0)
                & ((numbers & np.uint64(0xFFFFFFFF)) == xla_ffi.MAJOR) & ((numbers >> np.uint64(32)) < 32))
        for i in map(int, np.nonzero(fits)[0]):
            pointers = [int(p) for p in words[i + _FUNCTIONS: i + int(size[i]) // 8]]
            if len(pointers) >= 8 and all(map(is_code, pointers[1:])):
                found.append((int(numbers[i]) >> 32, low + 8 * i, pointers[1:]))
    return found


def register_handler() -> None:
    """Tell PyTorch/XLA's XLA about the handler; a second call does nothing. Errors: CannotRegister."""
    if _registered:
        return
    if not sys.platform.startswith("linux") or C.sizeof(C.c_void_p) != 8:
        raise CannotRegister("the memory of a process is read as 64-bit Linux shows it")
    try:
        found = tables()
    except OSError as exc:
        raise CannotRegister(str(exc)) from exc
    if len(found) != 1:
        raise CannotRegister(f"{len(found)} places in {LIBRARY} look like XLA's table of its FFI, and not one")
    minor, _, functions = found[0]
    handler = xla_ffi.typed_handler(run_payload, version=(xla_ffi.MAJOR, minor), attribute=ATTRIBUTE)
    register = C.CFUNCTYPE(C.c_void_p, C.POINTER(_Register))(functions[_REGISTER])
    name = TARGET.encode()
    error = register(C.byref(_Register(C.sizeof(_Register), None, _Span(name, len(name)), _Span(PLATFORM, len(PLATFORM)),
                                       _Bundle(None, None, None, C.cast(handler, C.c_void_p)), 0)))
    if error:
        message = _Message(C.sizeof(_Message), None, error, None)
        C.CFUNCTYPE(None, C.POINTER(_Message))(functions[_ERROR_MESSAGE])(C.byref(message))
        raise CannotRegister((message.message or b"").decode("utf-8", "replace"))
    _registered.append(handler)
