"""XLA handlers that answer later: while a kernel waits for other devices, the thread that called the handler goes on.

`later_handler` is to `xla_ffi.typed_handler` what a promise is to a value: `begin(call, payload, inputs, outputs)` returns at once, and
`call.done(error)` ends the call, on any thread. XLA keeps the buffers until then. The program goes on in the thread that says `done`, and
may block there (see `elastic`).

The call frame is read before `begin` returns, as XLA uses it for the next call. Source: xla/ffi/api/c_api.h of the installed jaxlib.
"""

from __future__ import annotations

import ctypes as C
from collections.abc import Callable
from typing import Any

import numpy as np

from opennki.bind import failures, fpmode, xla_ffi
from opennki.errors import UNKNOWN, NkiValueError

_FUNCTIONS = (
    "error_create", "error_message", "error_destroy", "handler_register", "stream_get", "type_register", "context_get", "state_set",
    "state_get", "memory_allocate", "memory_free", "pool_schedule", "pool_threads", "future_create", "future_available", "future_error",
    "run_id", "device_ordinal",
)  # fmt: skip


class _Api(C.Structure):
    _fields_ = [("struct_size", C.c_size_t), ("extension", C.c_void_p), ("version", xla_ffi._Version), ("internal", C.c_void_p),
                *((name, C.c_void_p) for name in _FUNCTIONS)]  # fmt: skip


class _Frame(C.Structure):
    _fields_ = [*xla_ffi._Frame._fields_, ("future", C.c_void_p)]


class _RunId(C.Structure):
    _fields_ = [("struct_size", C.c_size_t), ("extension", C.c_void_p), ("context", C.c_void_p), ("run", C.c_int64)]


class _Future(C.Structure):
    _fields_ = [("struct_size", C.c_size_t), ("extension", C.c_void_p), ("future", C.c_void_p)]


class _FutureError(C.Structure):
    _fields_ = [*_Future._fields_, ("error", C.c_void_p)]


_function = C.CFUNCTYPE(C.c_void_p, C.c_void_p)  # without the GIL: XLA goes on inside


class Call:
    """A call that has not ended. run: the execution of the program, the same number on all of its devices. site: which call of the
    program it is, a number that this process gives to it while the program exists."""

    __slots__ = ("_available", "_error", "_frame_api", "_future", "_mode", "run", "site")

    def __init__(self, frame: _Frame, api: _Api) -> None:
        asked = _RunId(C.sizeof(_RunId), None, frame.context, 0)
        _function(api.run_id)(C.byref(asked))
        made = _Future(C.sizeof(_Future), None, None)
        _function(api.future_create)(C.byref(made))
        self.run, self.site = int(asked.run), int(frame.attrs.names or 0)
        self._future, self._available, self._error = made.future, api.future_available, api.future_error
        self._frame_api = frame.api
        self._mode: Any = None

    def done(self, error: BaseException | None = None) -> None:
        """End the call, once: its outputs are filled, or it has failed. The program goes on in this thread."""
        mode = fpmode.enter()
        fpmode.leave(self._mode)
        try:
            if error is None:
                _function(self._available)(C.byref(_Future(C.sizeof(_Future), None, self._future)))
            else:
                made = xla_ffi.new_error(self._frame_api, failures.keep(error))
                _function(self._error)(C.byref(_FutureError(C.sizeof(_FutureError), None, self._future, made)))
        finally:
            fpmode.leave(mode)


Begin = Callable[[Call, bytes, list[np.ndarray], list[np.ndarray]], None]


def later_handler(begin: Begin, *, version: tuple[int, int], attribute: str = "opaque") -> Any:
    """A typed-FFI handler as of `xla_ffi.typed_handler`, whose calls end when `begin` or somebody later says so. What `begin` raises
    becomes the error of the call, which it must not end then. Raises NkiValueError as `typed_handler` does."""
    xla_ffi.check_version(version)
    payloads = xla_ffi._Payloads(attribute)

    def execute(address: int) -> None:
        frame = _Frame.from_address(address)
        if (frame.extension and xla_ffi._fill_metadata(frame.extension, version)) or frame.stage != xla_ffi._EXECUTE:
            return
        api = _Api.from_address(frame.api)
        if api.struct_size < C.sizeof(_Api):  # the size of the frame does not count its future
            raise NkiValueError("this XLA has no futures in its FFI", loc=UNKNOWN, rule="kernels with collectives wait in them",
                                fix="use a newer jaxlib")  # fmt: skip
        at = frame.attrs
        payload = payloads.read(at.size, at.types, at.names, at.items)
        inputs = xla_ffi._arrays(frame.args.size, frame.args.items, False)
        outputs = xla_ffi._arrays(frame.rets.size, frame.rets.items, True)
        call = Call(frame, api)
        call._mode = fpmode.enter()
        try:
            begin(call, payload, inputs, outputs)
        finally:
            fpmode.leave(call._mode)
        frame.future = call._future

    return xla_ffi.guarded(execute)
