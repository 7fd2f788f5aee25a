"""The payload of a custom call: base64 of JSON, with the whole kernel as IR text inside.

Keys, in order: kernel_version, func_name, grid, has_collectives, matmul_mac_count, platform_target,
platform_target_is_fallback, opts, serialize_dims, serialize_ir_string, tiled, constant_values, kernel_return,
result_is_sequence, mac_count, source_locations. The same kernel gives the same bytes whatever bridge asks, on every
machine. The decoder trusts nothing: bounded sizes, a schema, no pickle, no eval. Source: seeds
"encode_backend_config"; public tools read `mac_count`.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import enum
import json
import os
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import sha256
from threading import Lock
from typing import Any, NoReturn

import numpy as np

from opennki.errors import UNKNOWN, Loc, NkiParseError
from opennki.ir.locations import locations_text, read_locations
from opennki.ir.nodes import Kernel
from opennki.ir.parse import from_text
from opennki.ir.print import to_text
from opennki.ir.results import CallResult, call_results
from opennki.ir.text import RelativeFiles
from opennki.isa import dtypes

KERNEL_VERSION = 1
"""Version of the payload; a reader refuses a newer one."""

MAX_PAYLOAD_BYTES = 512 << 20
MAX_TENSOR_BYTES = 1 << 44  # of all tensors of a kernel together
_FOLDERS: OrderedDict[bytes, str] = OrderedDict()  # of payloads made in this process: where their sources are
_FOLDERS_KEPT = 4096
_lock = Lock()

KEYS: dict[str, type | tuple[type, ...]] = {
    "kernel_version": int,
    "func_name": str,
    "grid": list,
    "has_collectives": bool,
    "matmul_mac_count": int,
    "platform_target": str,
    "platform_target_is_fallback": bool,
    "opts": dict,
    "serialize_dims": dict,
    "serialize_ir_string": str,
    "tiled": bool,
    "constant_values": dict,
    "kernel_return": bool,
    "result_is_sequence": bool,
    "mac_count": int,
}
OPTIONAL: dict[str, type | tuple[type, ...]] = {"source_locations": str}


@dataclass(frozen=True, slots=True)
class Payload:
    """A decoded payload: the values of its keys, the kernel, and what a call of it returns."""

    config: dict[str, Any]
    kernel: Kernel
    results: tuple[CallResult, ...]

    @property
    def func_name(self) -> str:
        """Name of the kernel function."""
        return str(self.config["func_name"])

    @property
    def aliases(self) -> tuple[tuple[int, int], ...]:
        """(operand, output) of results that share the buffer of an operand."""
        return tuple((r.operand, i) for i, r in enumerate(self.results) if r.operand is not None)


def digest(payload: bytes) -> bytes:
    """Key of a payload in caches and tables."""
    return sha256(payload).digest()


def serialize_dims(kernel: Kernel, results: list[CallResult]) -> dict[str, Any]:
    """Name, shape and dtype of each operand and result of the call; a result that shares the buffer of an operand
    has its position as `operand`."""
    return {
        "inputs": [{"name": p.name, "shape": list(p.shape), "dtype": p.dtype} for p in kernel.params],
        "outputs": [
            {"name": r.name, "shape": list(r.shape), "dtype": r.dtype, **({} if r.operand is None else {"operand": r.operand})}
            for r in results
        ],
    }


def constant_json(value: Any, depth: int = 0) -> Any:
    """A compile-time constant of a call for people and tools; never an address, the same in every process."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, int):
        return value if abs(value) < 1 << 63 else str(value)
    if isinstance(value, float):
        return value if np.isfinite(value) else repr(value)
    if depth < 8:
        if isinstance(value, (tuple, list)):
            return [constant_json(v, depth + 1) for v in value]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {f.name: constant_json(getattr(value, f.name), depth + 1) for f in dataclasses.fields(value)}
            return {"type": type(value).__qualname__, **fields}
        if isinstance(value, dict):
            return {str(k): constant_json(v, depth + 1) for k, v in value.items()}
    if isinstance(value, np.generic):
        return {"dtype": value.dtype.name, "value": str(value)}
    try:
        return {"dtype": dtypes.canonical(value)}
    except (TypeError, ValueError):
        pass
    named = value if hasattr(value, "__qualname__") else type(value)
    return {"object": f"{named.__module__}.{named.__qualname__}"}


def encode_backend_config(
    kernel: Kernel,
    *,
    func_name: str,
    grid: tuple[int, ...],
    matmul_mac_count: int,
    platform_target: str,
    platform_target_is_fallback: bool,
    opts: dict[str, Any],
    constant_values: dict[str, Any],
    result_is_sequence: bool,
    tiled: bool = True,
) -> str:
    """The payload of a traced kernel, as ASCII text.

    matmul_mac_count: multiply-accumulates of one program. constant_values: arguments that are no tensors. tiled: the
    program is in tiles already. Errors: NkiValueError for a kernel that the text cannot hold.
    """
    results = call_results(kernel)
    config = {
        "kernel_version": KERNEL_VERSION,
        "func_name": func_name,
        "grid": list(grid),
        "has_collectives": kernel.has_collectives,
        "matmul_mac_count": matmul_mac_count,
        "platform_target": platform_target,
        "platform_target_is_fallback": platform_target_is_fallback,
        "opts": opts,
        "serialize_dims": serialize_dims(kernel, results),
        "serialize_ir_string": to_text(kernel),
        "tiled": tiled,
        "constant_values": {name: constant_json(value) for name, value in constant_values.items()},
        "kernel_return": bool(kernel.outputs),
        "result_is_sequence": result_is_sequence,
        "mac_count": matmul_mac_count,
        "source_locations": locations_text(kernel),
    }
    raw = base64.b64encode(json.dumps(config, separators=(",", ":"), allow_nan=False).encode())
    folder = RelativeFiles(kernel).folder
    if folder:
        with _lock:
            _FOLDERS[digest(raw)] = folder
            while len(_FOLDERS) > _FOLDERS_KEPT:
                _FOLDERS.popitem(last=False)
    return raw.decode("ascii")


def decode_backend_config(payload: str | bytes) -> Payload:
    """The kernel of a payload. Errors: NkiParseError that says what is wrong: not base64, not JSON, a key that is
    missing or of the wrong kind, a newer version, IR text that is not well formed, keys that disagree with the IR.
    """
    raw = payload.encode("ascii", "replace") if isinstance(payload, str) else bytes(payload)
    config = read_config(raw)
    table = config.get("source_locations")
    kernel = from_text(config["serialize_ir_string"], _places(table, raw) if table else None)
    results = call_results(kernel)
    _agree(config, kernel, results)
    return Payload(config, kernel, tuple(results))


def read_config(raw: bytes) -> dict[str, Any]:
    """The checked keys of a payload, without reading the IR. Errors: NkiParseError."""
    if len(raw) > MAX_PAYLOAD_BYTES:
        _fail(f"it has {len(raw)} bytes, more than {MAX_PAYLOAD_BYTES}")
    try:
        text = base64.b64decode(raw, validate=True)
    except (binascii.Error, ValueError):
        _fail("it is not base64")
    try:
        config = json.loads(text)
    except (ValueError, RecursionError, MemoryError):
        _fail("what is inside is not JSON")
    if type(config) is not dict:
        _fail("what is inside is not a JSON object")
    version = config.get("kernel_version")
    if type(version) is not int or version < 1:
        _fail(f"kernel_version is {_short(version)}, and not a positive number")
    if version > KERNEL_VERSION:
        _fail(f"kernel_version is {version}: it was written by a newer opennki",
              rule=f"this opennki reads payloads up to version {KERNEL_VERSION}", fix="upgrade opennki")
    for key, kind in KEYS.items():
        if key not in config:
            _fail(f"the key {key} is missing")
        _kind(key, config[key], kind)
    for key, value in config.items():
        if key in OPTIONAL:
            _kind(key, value, OPTIONAL[key])
        elif key not in KEYS:
            _fail(f"the key {_short(key)} is not known")
    if any(type(n) is not int or not 0 <= n < 1 << 40 for n in config["grid"]):
        _fail("grid is not a list of sizes")
    if config["matmul_mac_count"] < 0 or config["mac_count"] != config["matmul_mac_count"]:
        _fail("mac_count and matmul_mac_count are not the same count")
    return config


def _kind(key: str, value: Any, kind: type | tuple[type, ...]) -> None:
    if type(value) is not kind:
        _fail(f"the key {key} is a {type(value).__name__}, and not a {getattr(kind, '__name__', kind)}")


def _agree(config: dict[str, Any], kernel: Kernel, results: list[CallResult]) -> None:
    """The keys that repeat what the IR says, say the same."""
    said = {
        "grid": [v.hi + 1 for v in kernel.grid],
        "has_collectives": kernel.has_collectives,
        "platform_target": kernel.target,
        "kernel_return": bool(kernel.outputs),
    }
    for key, value in said.items():
        if config[key] != value:
            _fail(f"{key} is {_short(config[key])}, and {_short(value)} in the IR")
    if config["serialize_dims"] != serialize_dims(kernel, results):
        _fail("serialize_dims and the IR disagree about the operands or results")
    total = sum(alloc.size * dtypes.itemsize(alloc.dtype) for alloc in kernel.params)
    if total > MAX_TENSOR_BYTES:
        _fail(f"its inputs have {total} bytes")


def _places(table: str, raw: bytes) -> tuple[list[Loc], list[int]]:
    """The source locations; those of a payload made in this process with the folder that they are in."""
    locs, lines = read_locations(table)
    with _lock:
        folder = _FOLDERS.get(digest(raw), "")
    return [Loc(_file(loc.file, folder), loc.line, loc.function) for loc in locs], lines


def _file(name: str, folder: str) -> str:
    """A source file of a payload. One made elsewhere names no file outside of the current folder, so that an error
    message cannot be made to show a line of it."""
    if name.startswith("<"):
        return name
    if folder:
        return os.path.normpath(os.path.join(folder, name))
    parts = name.replace("\\", "/").split("/")
    return parts[-1] if os.path.isabs(name) or ".." in parts else name


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _fail(what: str, rule: str = "a payload is base64 of the JSON that encode_backend_config writes", fix: str = "") -> NoReturn:
    raise NkiParseError(f"this is no payload of a kernel: {what}", loc=UNKNOWN, rule=rule, fix=fix)
