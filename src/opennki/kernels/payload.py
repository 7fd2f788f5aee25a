"""The payload of a custom call: base64 of JSON, with the whole kernel as IR text inside.

Keys, in order: kernel_version, func_name, grid, has_collectives, matmul_mac_count, platform_target,
platform_target_is_fallback, opts, serialize_dims, serialize_ir_string, tiled, constant_values, kernel_return,
result_is_sequence, mac_count, source_locations. The same kernel gives the same bytes whatever bridge asks, on every
machine. The decoder trusts nothing: bounded sizes, a schema, no pickle, no eval. Every fault is an NkiParseError that
names the key. Source: seeds "encode_backend_config"; public tools read `mac_count`. docs/payload.md describes it.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import enum
import json
import math
import re
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import sha256
from threading import Lock
from typing import Any, NoReturn

import numpy as np

from opennki.errors import UNKNOWN, Loc, NkiParseError, NkiValueError
from opennki.ir.admit import admit
from opennki.ir.locations import locations_text, placed_file, read_locations
from opennki.ir.nodes import Kernel
from opennki.ir.parse import from_text
from opennki.ir.print import to_text
from opennki.ir.results import CallResult, call_results, serialize_dims
from opennki.ir.sizes import too_large
from opennki.ir.text import RelativeFiles
from opennki.isa import dtypes

KERNEL_VERSION = 1
"""Version of the payload; a reader refuses a newer one."""

MAX_PAYLOAD_BYTES = 512 << 20
MAX_OTHER_BYTES = 8 << 20  # of the JSON outside of its strings: bounds the number of Python objects it becomes
MAX_NESTING = 32  # of the JSON
MAX_MACS = 1 << 128
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
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)


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


class NkiForeignPayload(NkiParseError):
    """A payload that another compiler wrote: JSON without a kernel in opennki IR. `config` is the JSON object."""

    config: dict[str, Any]


def digest(payload: bytes) -> bytes:
    """Key of a payload in caches and tables."""
    return sha256(payload).digest()


def constant_json(value: Any, depth: int = 0) -> Any:
    """A compile-time constant of a call for people and tools; never an address, the same in every process."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return value if abs(value) < 1 << 63 else str(value) if value.bit_length() < 1024 else hex(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else repr(float(value))
    if depth < 8:
        if isinstance(value, (tuple, list)):
            return [constant_json(v, depth + 1) for v in value]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {f.name: constant_json(getattr(value, f.name, None), depth + 1) for f in dataclasses.fields(value)}
            return {"type": type(value).__qualname__, **fields}
        if isinstance(value, dict):
            items = [(constant_json(k, depth + 1), constant_json(v, depth + 1)) for k, v in value.items()]
            # only text is a key in JSON: other keys could collide with it, or with each other
            return dict(items) if all(isinstance(k, str) for k in value) else {"items": [list(item) for item in items]}
    if isinstance(value, np.generic):
        return {"dtype": value.dtype.name, "value": str(value)}
    try:
        return {"dtype": dtypes.canonical(value)}
    except (TypeError, ValueError):
        pass
    named = value if isinstance(getattr(value, "__qualname__", None), str) else type(value)
    return {"object": f"{getattr(named, '__module__', None) or 'builtins'}.{named.__qualname__}"}


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
    program is in tiles already. Errors: NkiValueError for a kernel that the text cannot hold, or that is larger than a
    payload can be.
    """
    large = too_large(kernel)
    if large:
        raise NkiValueError(f"{func_name}: {large[0]}", loc=UNKNOWN, rule=large[1])
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
            _FOLDERS.move_to_end(digest(raw))
            while len(_FOLDERS) > _FOLDERS_KEPT:
                _FOLDERS.popitem(last=False)
    return raw.decode("ascii")


def decode_backend_config(payload: str | bytes) -> Payload:
    """The kernel of a payload. Errors: NkiParseError that says what is wrong: not base64, not JSON, a key that is
    missing or of the wrong kind, a newer version, IR text that is not well formed, keys that disagree with the IR, a kernel
    larger than a kernel can be; the NkiError of a rule that an instruction breaks.
    """
    raw = payload.encode("ascii", "replace") if isinstance(payload, str) else bytes(payload)
    config = read_config(raw)
    table = config.get("source_locations")
    kernel = from_text(config["serialize_ir_string"], _places(table, raw) if table else None)
    results = call_results(kernel)
    _agree(config, kernel, results)
    admit(kernel, "this payload")
    return Payload(config, kernel, tuple(results))


def read_config(raw: bytes) -> dict[str, Any]:
    """The checked keys of a payload, without reading the IR. Errors: NkiParseError."""
    if len(raw) > MAX_PAYLOAD_BYTES:
        _fail(f"it has {len(raw)} bytes, more than {MAX_PAYLOAD_BYTES}")
    try:
        text = base64.b64decode(raw, validate=True)
    except (binascii.Error, ValueError):
        _fail("it is not base64")
    config = _json(text)
    ir = config.get("serialize_ir_string")
    if ir is None or (type(ir) is str and "opennki_ir" not in ir[:4096]):
        _foreign(config)
    version = config.get("kernel_version")
    if type(version) is not int or version < 1:
        _fail(f"kernel_version is {_short(version)}, and not a positive number" if "kernel_version" in config
              else "the key kernel_version is missing")
    if version > KERNEL_VERSION:
        _fail(f"kernel_version is {_short(version)}: it was written by a newer opennki",
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
    if not 0 <= config["matmul_mac_count"] < MAX_MACS:
        _fail("matmul_mac_count is not a count")
    if config["mac_count"] != config["matmul_mac_count"]:
        _fail("mac_count and matmul_mac_count are not the same count")
    return config


def _json(text: bytes) -> dict[str, Any]:
    """The JSON object of a payload: UTF-8, finite numbers, no key twice, bounded."""
    try:
        source = text.decode("utf-8")
        if len(source) > MAX_OTHER_BYTES and len(_STRING.sub("", source)) > MAX_OTHER_BYTES:
            _fail(f"its JSON has more than {MAX_OTHER_BYTES} bytes outside of strings")
        config = json.loads(source, object_pairs_hook=_unique, parse_constant=_number, parse_float=_number)
        if "\\ud" in source or "\\uD" in source:  # half of a surrogate pair is no text, and fails where it is printed
            json.dumps(config, ensure_ascii=False).encode("utf-8")
    except NkiParseError:
        raise
    except (ValueError, RecursionError, MemoryError):
        _fail("what is inside is not JSON")
    if type(config) is not dict:
        _fail("what is inside is not a JSON object")
    level, depth = [config], 0
    while level:
        depth += 1
        if depth > MAX_NESTING:
            _fail(f"its JSON nests deeper than {MAX_NESTING} levels")
        level = [v for x in level for v in (x.values() if type(x) is dict else x) if type(v) in (dict, list)]
    return config


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        _fail(f"the key {_short(twice)} is there twice")
    return made


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        _fail(f"{_short(text)} is not a finite number")
    return value


def _foreign(config: dict[str, Any]) -> NoReturn:
    """Refuse a payload without a kernel of ours."""
    keys = ", ".join(_short(key)[1:-1] for key in list(config)[:24])
    error = NkiForeignPayload(
        "this payload has no kernel in opennki IR (the key serialize_ir_string): it was written by another compiler"
        + (f"; its keys: {keys}" if keys else ""),
        loc=UNKNOWN, rule="opennki reads payloads that opennki has written",
        why="the intermediate representation of another compiler is not published",
        fix="call the kernel's source file through opennki",
    )
    error.config = config
    raise error


def _kind(key: str, value: Any, kind: type | tuple[type, ...]) -> None:
    if type(value) is not kind:
        _fail(f"the key {key} is a {type(value).__name__}, and not a {getattr(kind, '__name__', kind)}")


def _agree(config: dict[str, Any], kernel: Kernel, results: list[CallResult]) -> None:
    """The keys that repeat what the IR says, say the same."""
    said = {
        "func_name": kernel.name,
        "grid": [v.hi + 1 for v in kernel.grid],
        "has_collectives": kernel.has_collectives,
        "platform_target": kernel.target,
        "kernel_return": bool(kernel.outputs),
    }
    for key, value in said.items():
        if config[key] != value:
            _fail(f"{key} is {_short(config[key])}, and {_short(value)} in the IR")
    # as text: True, 1 and 1.0 are equal in Python, and not the same shape in JSON
    if json.dumps(config["serialize_dims"], sort_keys=True) != json.dumps(serialize_dims(kernel, results), sort_keys=True):
        _fail("serialize_dims and the IR disagree about the operands or results")


def _places(table: str, raw: bytes) -> tuple[list[Loc], list[int]]:
    """The source locations; those of a payload made in this process with the folder that they are in."""
    locs, lines = read_locations(table)
    with _lock:
        folder = _FOLDERS.get(digest(raw), "")
    return [Loc(placed_file(loc.file, folder), loc.line, loc.function) for loc in locs], lines


def _short(value: Any) -> str:
    if type(value) in (dict, list):
        return f"a {type(value).__name__} of {len(value)}"
    if type(value) is int and value.bit_length() > 128:
        return "a number of more than 128 bits"
    text = ascii(value[:60] if type(value) is str else value)
    return text if len(text) <= 60 else text[:57] + "..."


def _fail(what: str, rule: str = "a payload is base64 of the JSON that encode_backend_config writes", fix: str = "") -> NoReturn:
    raise NkiParseError(f"this is no payload of a kernel: {what}", loc=UNKNOWN, rule=rule, fix=fix)
