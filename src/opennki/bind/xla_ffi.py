"""XLA's side of a custom call on CPU: handlers in pure Python, with no compiler and no framework imported.

XLA calls a C function with a call frame: pointers to typed, shaped buffers and attributes ("typed FFI", in XLA's
words api_version 4). `typed_handler` makes such a function of a Python callable

    run(payload, inputs, outputs)

where `payload` is the bytes of one attribute and the arrays are views of XLA's own buffers, nothing copied: inputs
are read-only, outputs are to be filled. The views are valid until `run` returns and must not outlive it. An
input that the program aliases to an output is the same memory as that output. What `run` raises becomes
the error of the program, see `failures`.

The structures below are those of xla/ffi/api/c_api.h, which jaxlib ships. They only say where things are: the frame
is read by `struct`, a few reads for each call, since a ctypes object for each field costs more than the
rest of the call. Everything here is for one process and one machine: native byte order, native pointers.
"""
from __future__ import annotations

import ctypes as C
import opcode
import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from opennki.bind import failures, fpmode
from opennki.errors import UNKNOWN, NkiTypeError, NkiValueError

Run = Callable[[bytes, list[np.ndarray], list[np.ndarray]], None]
RunUntyped = Callable[[bytes, Any, int], None]

MAJOR = 0                   # the ABI that the structures below describe
_EXECUTE = 3                # XLA_FFI_ExecutionStage_EXECUTE
_METADATA = 1               # XLA_FFI_Extension_Metadata
_STRING = 4                 # XLA_FFI_AttrType_STRING
_INTERNAL = 13              # XLA_FFI_Error_Code_INTERNAL
_KEPT_PAYLOADS = 1024


class _Extension(C.Structure):
    _fields_ = [("struct_size", C.c_size_t), ("type", C.c_int), ("next", C.c_void_p)]


class _Version(C.Structure):
    _fields_ = [("struct_size", C.c_size_t), ("extension", C.c_void_p), ("major", C.c_int), ("minor", C.c_int)]


class _Metadata(C.Structure):
    # A later `state_type_id` is left as XLA made it: we are stateless.
    _fields_ = [("struct_size", C.c_size_t), ("version", _Version), ("traits", C.c_uint32)]


class _MetadataExtension(C.Structure):
    _fields_ = [("base", _Extension), ("metadata", C.POINTER(_Metadata))]


class _Api(C.Structure):
    _fields_ = [("struct_size", C.c_size_t), ("extension", C.c_void_p), ("version", _Version),
                ("internal", C.c_void_p), ("error_create", C.c_void_p)]


class _ErrorCreate(C.Structure):
    _fields_ = [("struct_size", C.c_size_t), ("extension", C.c_void_p), ("message", C.c_char_p), ("code", C.c_int)]


class _Buffer(C.Structure):
    _fields_ = [("struct_size", C.c_size_t), ("extension", C.c_void_p), ("dtype", C.c_int), ("data", C.c_void_p),
                ("rank", C.c_int64), ("dims", C.c_void_p)]


class _Span(C.Structure):
    _fields_ = [("data", C.c_void_p), ("size", C.c_size_t)]


class _Buffers(C.Structure):        # XLA_FFI_Args and XLA_FFI_Rets
    _fields_ = [("struct_size", C.c_size_t), ("extension", C.c_void_p), ("size", C.c_int64),
                ("types", C.c_void_p), ("items", C.c_void_p)]


class _Attributes(C.Structure):
    _fields_ = [("struct_size", C.c_size_t), ("extension", C.c_void_p), ("size", C.c_int64),
                ("types", C.c_void_p), ("names", C.c_void_p), ("items", C.c_void_p)]


class _Frame(C.Structure):
    # A later `future` is for asynchronous handlers and stays untouched.
    _fields_ = [("struct_size", C.c_size_t), ("extension", C.c_void_p), ("api", C.c_void_p), ("context", C.c_void_p),
                ("stage", C.c_int), ("args", _Buffers), ("rets", _Buffers), ("attrs", _Attributes)]


_CODES = {C.c_int: "i", C.c_int64: "q", C.c_uint32: "I", C.c_size_t: "Q", C.c_void_p: "Q"}


def _reader(kind: type[C.Structure], *fields: str) -> Callable[[Any, int], tuple[Any, ...]]:
    """A function (memory, offset) -> the values of these fields, in their order in memory. `a.b` is b of the part a."""
    form, at = "=", 0
    for field in fields:
        offset, here = 0, kind
        for name in field.split("."):
            offset += getattr(here, name).offset
            here = dict(here._fields_)[name]  # type: ignore[assignment,arg-type,misc]
        form += f"{offset - at}x{_CODES[here]}"  # type: ignore[index]
        at = offset + C.sizeof(here)
    return struct.Struct(form).unpack_from


_read_frame = _reader(_Frame, "struct_size", "extension", "stage", "args.size", "args.items", "rets.size", "rets.items",
                      "attrs.size", "attrs.types", "attrs.names", "attrs.items")
_read_buffer = _reader(_Buffer, "dtype", "data", "rank", "dims")
_read_span = _reader(_Span, "data", "size")
_read_pointer = struct.Struct("=Q").unpack_from
_read_int = struct.Struct("=i").unpack_from
_read_pointers = [struct.Struct(f"={n}Q").unpack_from for n in range(33)]
_read_dims = [struct.Struct(f"={n}q").unpack_from for n in range(65)]   # NumPy has at most 64 dimensions

# The whole address space as one buffer, so that reads and arrays need an offset and no ctypes object. It starts
# one byte up, because NumPy takes a buffer at address 0 for none.
_BASE = 1
_MEMORY: Any = (C.c_ubyte * (sys.maxsize - _BASE)).from_address(_BASE)

# XLA_FFI_DataType, which is xla::PrimitiveType. Complex numbers are no NKI dtype but pass as arrays.
_DTYPES: dict[int, np.dtype] = {code: np.dtype(kind) for code, kind in {
    1: np.bool_, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.uint8, 7: np.uint16, 8: np.uint32, 9: np.uint64,
    10: np.float16, 11: np.float32, 12: np.float64, 16: ml_dtypes.bfloat16, 15: np.complex64, 18: np.complex128,
    19: ml_dtypes.float8_e5m2, 20: ml_dtypes.float8_e4m3fn, 28: ml_dtypes.float8_e4m3}.items()}
_REFUSED = {17: "token", 21: "int4", 22: "uint4", 23: "float8_e4m3b11fnuz", 24: "float8_e5m2fnuz", 25: "float8_e4m3fnuz",
            26: "int2", 27: "uint2", 29: "float8_e3m4", 30: "int1", 31: "uint1", 32: "float4_e2m1fn", 33: "float8_e8m0fnu"}


def _refuse(what: str, code: int) -> NkiTypeError:
    return NkiTypeError(
        f"{what} has XLA's element type {_REFUSED.get(code, 'number ' + str(code))}, which kernels do not have",
        loc=UNKNOWN, rule="a kernel's tensors are of " + ", ".join(sorted(str(d) for d in _DTYPES.values())),
        fix="convert the array before the call and the result after it")


def _arrays(size: int, items: int, writable: bool) -> list[np.ndarray]:
    """Arrays on the buffers of one side of a frame."""
    found: list[np.ndarray] = []
    pointers = (_read_pointers[size] if size < 33 else struct.Struct(f"={size}Q").unpack_from)(_MEMORY, items - _BASE)
    for pointer in pointers:
        code, data, rank, dims = _read_buffer(_MEMORY, pointer - _BASE)
        dtype = _DTYPES.get(code)
        if dtype is None:
            raise _refuse(f"{'output' if writable else 'operand'} {len(found)}", code)
        shape = _read_dims[rank](_MEMORY, dims - _BASE) if rank else ()
        if data and 0 not in shape:
            array = np.ndarray(shape, dtype, _MEMORY, data - _BASE)
        else:
            array = np.empty(shape, dtype)      # XLA gives empty arrays no memory
        if not writable:
            array.setflags(False)  # type: ignore[call-arg]    # write=False, without the cost of a keyword
        found.append(array)
    return found


class _Payloads:
    """Reads one string attribute of a frame, and gives equal bytes as the same object.

    A payload of many kilobytes is compared with the one that this call site had before, which is cheap, so that
    whoever looks it up by value hashes it once and not for each call. The address that tells call sites apart
    may come to another program later. What is remembered is therefore a guess, right if the bytes are equal.
    """

    def __init__(self, attribute: str) -> None:
        self.name = attribute.encode()
        self.read_name = struct.Struct(f"{len(self.name)}s").unpack_from
        self.sites: dict[int, tuple[int, int, bytes, Any]] = {}

    def read(self, size: int, types: int, names: int, items: int) -> bytes:
        """The payload of a frame with these attributes."""
        site = self.sites.get(names)
        if site is not None:
            i, length, payload, read = site
            if i < size and _read_int(_MEMORY, types + 4 * i - _BASE)[0] == _STRING:
                data, now = _read_span(_MEMORY, _read_pointer(_MEMORY, items + 8 * i - _BASE)[0] - _BASE)
                if now == length and (not length or read(_MEMORY, data - _BASE)[0] == payload):
                    return payload
        return self.find(size, types, names, items)

    def find(self, size: int, types: int, names: int, items: int) -> bytes:
        """The same by looking at every name; remembers the place."""
        for i in range(size):
            data, length = _read_span(_MEMORY, _read_pointer(_MEMORY, names + 8 * i - _BASE)[0] - _BASE)
            if length != len(self.name) or self.read_name(_MEMORY, data - _BASE)[0] != self.name:
                continue
            if _read_int(_MEMORY, types + 4 * i - _BASE)[0] != _STRING:
                break
            data, length = _read_span(_MEMORY, _read_pointer(_MEMORY, items + 8 * i - _BASE)[0] - _BASE)
            read = struct.Struct(f"{length}s").unpack_from
            payload = read(_MEMORY, data - _BASE)[0] if length else b""
            if len(self.sites) >= _KEPT_PAYLOADS:
                self.sites.clear()
            self.sites[names] = i, length, payload, read
            return payload
        raise NkiValueError(f"the custom call has no string attribute {self.name.decode()!r}", loc=UNKNOWN,
                            rule="the payload of a kernel is one string attribute of the custom call",
                            fix="the program was not emitted by this version of opennki; emit it again")


def _fill_metadata(extension: int, version: tuple[int, int]) -> bool:
    """Answer XLA's question, asked at registration, which version of the interface the handler has."""
    while extension:
        base = _Extension.from_address(extension)
        if base.type == _METADATA:
            metadata = _MetadataExtension.from_address(extension).metadata.contents
            metadata.version.struct_size = C.sizeof(_Version)
            metadata.version.major, metadata.version.minor = version
            metadata.traits = 0
            return True
        extension = base.next
    return False


_create_prototype = C.CFUNCTYPE(C.c_void_p, C.POINTER(_ErrorCreate))


def new_error(api: int, text: str) -> int | None:
    """The address of a new XLA_FFI_Error, which XLA will own. `api` is the address of XLA's table of functions."""
    message = text.encode("utf-8", "backslashreplace").replace(b"\0", b"\\0")
    create = _create_prototype(_Api.from_address(api).error_create)
    return create(C.byref(_ErrorCreate(C.sizeof(_ErrorCreate), None, message, _INTERNAL)))


def _enter_quietly(function: Any) -> Any:
    """The function with no check for signals before its first line, so that its own `try` sees every exception.

    CPython runs signal handlers, which raise KeyboardInterrupt, also at the RESUME instruction by which a function
    starts, before any `try` of it. In a callback from C that loses the result: after a Ctrl-C during a program,
    XLA takes what is left on the stack for an error and crashes. RESUME 2 means "after a `yield from`", where
    CPython makes no such check; the next one comes with the first call inside.
    """
    code = bytearray(function.__code__.co_code)
    for at in range(0, len(code), 2):
        if code[at] == opcode.opmap.get("RESUME"):
            code[at + 1] |= 2
            function.__code__ = function.__code__.replace(co_code=bytes(code))
            break
    return function


def typed_handler(run: Run, *, version: tuple[int, int], attribute: str = "opaque") -> Any:
    """A typed-FFI handler of XLA, for the execute stage, as a ctypes function. Keep it alive for ever.

    version     (major, minor) of the interface of the XLA it is registered with, see `version_from_header`
    attribute   the string attribute whose bytes `run` gets as its payload; others are not read

    `run` runs in the default floating-point mode, with the GIL, on any thread, on several at a time.
    Raises NkiValueError if that XLA's interface is another than the one written down here.
    """
    check_version(version)
    payloads = _Payloads(attribute)

    def execute(frame: int) -> None:
        size, extension, stage, ins, in_items, outs, out_items, *attributes = _read_frame(_MEMORY, frame - _BASE)
        if (extension and _fill_metadata(extension, version)) or stage != _EXECUTE:
            return
        if size < C.sizeof(_Frame):
            raise NkiValueError(f"XLA's call frame has {size} bytes, not {C.sizeof(_Frame)}", loc=UNKNOWN,
                                fix="use a newer jaxlib")
        payload = payloads.read(*attributes)
        inputs, outputs = _arrays(ins, in_items, False), _arrays(outs, out_items, True)
        mode = fpmode.enter()
        try:
            run(payload, inputs, outputs)
        finally:
            fpmode.leave(mode)

    return guarded(execute)


def check_version(version: tuple[int, int]) -> None:
    """Raise NkiValueError for an interface with other structures than those here."""
    if version[0] != MAJOR or C.sizeof(C.c_void_p) != 8:
        raise NkiValueError(
            f"XLA's FFI {version[0]}.{version[1]} in a {8 * C.sizeof(C.c_void_p)}-bit process is not known", loc=UNKNOWN,
            rule=f"the handler is for FFI {MAJOR}.x and 64-bit processes",
            why="another major version has other structures in memory", fix="update opennki, or use an older jaxlib")


def guarded(execute: Callable[[int], None]) -> Any:
    """The ctypes function that calls `execute` with the address of the call frame, and makes what it raises an error of XLA's."""

    def handler(frame: int) -> int | None:
        # Two layers: the second is for a Ctrl-C that comes while the first reports another error. An exception
        # that left this function would leave a random pointer as its result.
        try:
            try:
                return execute(frame)   # type: ignore[func-returns-value]
            except BaseException as exc:
                return new_error(_Frame.from_address(frame).api, failures.keep(exc))
        except BaseException as exc:
            return new_error(_Frame.from_address(frame).api, f"{type(exc).__name__} while an error of a kernel was reported")

    return C.CFUNCTYPE(C.c_void_p, C.c_void_p)(_enter_quietly(handler))


def untyped_handler(run: RunUntyped, on_error: Callable[[BaseException], None]) -> Any:
    """A handler for custom calls of api_version 3, whose payload is the raw backend_config, as a ctypes function.

    `run(payload, inputs, output)` gets addresses, because the call carries no shapes and no counts, which the payload
    has to give: `inputs[i]` is the address of operand i; `output` that of the result, or with several
    results that of an array of their addresses (`view(output, (n,), np.uint64)`). `view` makes arrays of them.

    There is no way to fail: what `run` raises goes to `on_error`, the program goes on with outputs that `run`
    did not fill, and what `on_error` itself raises is lost. Prefer `typed_handler`. Keep the result alive for ever.
    """
    def handler(output: int, inputs: Any, opaque: int, size: int, status: int) -> None:
        try:
            mode = fpmode.enter()
            try:
                run(C.string_at(opaque, size), inputs, output)
            finally:
                fpmode.leave(mode)
        except BaseException as exc:
            on_error(exc)

    return C.CFUNCTYPE(None, C.c_void_p, C.POINTER(C.c_void_p), C.c_void_p, C.c_size_t, C.c_void_p)(_enter_quietly(handler))


def view(pointer: int, shape: tuple[int, ...], dtype: Any, writable: bool = True) -> np.ndarray:
    """The array at an address: row-major, not copied, valid as long as that memory is."""
    array = np.ndarray(shape, dtype, _MEMORY, pointer - _BASE) if pointer and 0 not in shape else np.empty(shape, dtype)
    array.setflags(write=writable)
    return array


def capsule(function: Any, name: bytes | None = None) -> Any:
    """A PyCapsule of a handler's address, as registries of custom calls take it.

    `name` is None for jax.ffi.register_ffi_target with api_version=1, b"xla._CUSTOM_CALL_TARGET" with api_version=0
    (an untyped handler). The name must stay alive as long as the capsule: give a constant.
    """
    new = C.pythonapi.PyCapsule_New
    new.restype, new.argtypes = C.py_object, [C.c_void_p, C.c_char_p, C.c_void_p]
    return new(C.cast(function, C.c_void_p), name, None)


def version_from_header(include_dir: str) -> tuple[int, int]:
    """(major, minor) of XLA's FFI in its headers, such as those below `jax.ffi.include_dir()`.

    Raises NkiValueError if the header is missing or says no version.
    """
    header = Path(include_dir, "xla", "ffi", "api", "c_api.h")
    try:
        text = header.read_text(encoding="utf-8", errors="replace")
        major, minor = (int(re.findall(rf"^#define XLA_FFI_API_{part} (\d+)", text, re.M)[0]) for part in ("MAJOR", "MINOR"))
    except (OSError, IndexError) as exc:
        raise NkiValueError(f"no version of XLA's FFI in {header}", loc=UNKNOWN, why=str(exc) or "it has no such line",
                            fix="install jaxlib again; its wheels bring the headers") from exc
    return major, minor
