"""What `opennki inspect` shows: the kernels in a file that a compiler reads or writes, by the payloads of its custom calls."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from opennki.errors import NkiError
from opennki.kernels.payload import NkiForeignPayload, Payload, decode_backend_config, digest
from opennki.tools.hlo_reader import Call, UnreadableFile, read_calls

MAX_SHOWN = 160  # characters of a value that is shown in one line
MAX_KEYS = 64  # of another compiler's payload
MAX_PLACES = 8  # of the calls of one kernel


@dataclass(slots=True)
class Found:
    """The calls of a file that have the same payload, and the kernel in it or why there is none."""

    payload: bytes
    calls: list[Call] = field(default_factory=list)
    decoded: Payload | None = None
    error: str = ""
    foreign: dict[str, Any] | None = None


def read(path: str) -> tuple[str, list[Found]]:
    """(kind of file, kernels in the order of their first calls) of a file, or of standard input for "-". Errors: UnreadableFile,
    OSError."""
    if path == "-":
        kind, calls = read_calls(sys.stdin.buffer)
    elif Path(path).is_dir():
        raise UnreadableFile("it is a directory")
    else:
        with open(path, "rb") as file:
            kind, calls = read_calls(file)
    found: dict[Any, Found] = {}
    for call in calls:
        key = digest(call.payload) if not call.problem else call.problem
        found.setdefault(key, Found(call.payload)).calls.append(call)
    for one in found.values():
        _decode(one)
    return kind, list(found.values())


def _decode(found: Found) -> None:
    found.error = found.calls[0].problem
    if found.error:
        return
    try:
        found.decoded = decode_backend_config(found.payload)
    except NkiForeignPayload as exc:
        found.foreign, found.error = exc.config, printable(str(exc))
    except NkiError as exc:
        found.error = printable(str(exc))


def show(path: str, *, ir: bool = True, as_json: bool = False, number: int | None = None, out: TextIO, err: TextIO) -> int:
    """Print the kernels of a file. Returns the exit status: 0; 1 where a call has no kernel of ours, or there is no call; 2 for a
    file that cannot be read, and for a number that no kernel has."""
    try:
        kind, kernels = read(path)
    except (UnreadableFile, OSError, ValueError, MemoryError) as exc:
        why = (exc.strerror if isinstance(exc, OSError) else "") or str(exc) or "there is not enough memory for it"
        print(f"opennki: {printable(path)}: {printable(why)}", file=err)
        return 2
    if not kernels:
        print(f"opennki: {printable(path)}: this {kind} has no call of an NKI kernel", file=err)
        return 1
    if number is not None and not 1 <= number <= len(kernels):
        print(f"opennki: --kernel {number}: {printable(path)} has the kernels 1 to {len(kernels)}", file=err)
        return 2
    chosen = [(i, k) for i, k in enumerate(kernels, 1) if number is None or i == number]
    if as_json:
        print(json.dumps({"kind": kind, "kernels": [as_dict(i, k, ir) for i, k in chosen]}, indent=2, allow_nan=False), file=out)
    else:
        for at, (i, found) in enumerate(chosen):
            print(("\n" if at else "") + text(i, found, ir), end="", file=out)
    return 1 if any(k.decoded is None for _, k in chosen) else 0


def as_dict(number: int, found: Found, ir: bool = True) -> dict[str, Any]:
    """One kernel for machines: the keys of the payload, what the calls of it are, and the error where it has no kernel."""
    shown: dict[str, Any] = {
        "number": number,
        "calls": [{"target": c.target, "place": c.place} for c in found.calls],
        "bytes": len(found.payload),
        "sha256": digest(found.payload).hex(),
    }
    if found.decoded is None:
        shown["error"] = found.error
        if found.foreign is not None:
            shown["keys"] = {key: brief(value) for key, value in found.foreign.items()}
        return shown
    config = dict(found.decoded.config)
    config.pop("source_locations", None)
    if not ir:
        config.pop("serialize_ir_string")
    return {**shown, **config, "aliases": [list(pair) for pair in found.decoded.aliases]}


def text(number: int, found: Found, ir: bool = True) -> str:
    """One kernel for people."""
    calls = found.calls
    places = ", ".join(printable(c.place) for c in calls[:MAX_PLACES] if c.place) + (", ..." if len(calls) > MAX_PLACES else "")
    targets = ", ".join(dict.fromkeys(c.target for c in calls if c.target))
    rows = [("calls", f"{targets} at {places}" if targets else ""), ("payload", _size(found.payload))]
    decoded = found.decoded
    name = printable(decoded.func_name) if decoded else "a call without a kernel"
    lines = [f"{number}: {name}" + (f" x {len(calls)}" if len(calls) > 1 else "")]
    if decoded is None:
        rows.append(("error", found.error))
        keys = list((found.foreign or {}).items())[:MAX_KEYS]
        rows.append(("its keys", "\n".join(f"{printable(key)[:60]} = {brief(value)}" for key, value in keys)))
    else:
        rows += _rows(decoded)
    width = 17
    for label, value in rows:
        first, *rest = (value or "").splitlines() or [""]
        if first:
            lines.append(f"  {label:<{width}}{first}")
            lines += [" " * (width + 2) + line for line in rest]
    if decoded is not None and ir:
        lines += ["", decoded.config["serialize_ir_string"].rstrip("\n")]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _rows(decoded: Payload) -> list[tuple[str, str]]:
    config = decoded.config
    dims = config["serialize_dims"]
    operands = [f"{i} {_tensor(t)}" for i, t in enumerate(dims["inputs"])]
    results = [
        f"{i} {_tensor(t)}" + (f", shares the buffer of operand {t['operand']}" if "operand" in t else "")
        for i, t in enumerate(dims["outputs"])
    ]
    fallback = " (fallback: no target was named)" if config["platform_target_is_fallback"] else ""
    returns = "one value" if config["kernel_return"] else "nothing: it writes operands"
    return [
        ("target", printable(config["platform_target"]) + fallback),
        ("grid", " x ".join(map(str, config["grid"])) or "one program"),
        ("operands", "\n".join(operands) or "none"),
        ("results", "\n".join(results) or "none"),
        ("returns", "a sequence" if config["result_is_sequence"] and config["kernel_return"] else returns),
        ("mac count", f"{config['mac_count']} of one program"),
        ("options", _pairs(config["opts"])),
        ("constants", _pairs(config["constant_values"]) or "none"),
        ("has collectives", "yes" if config["has_collectives"] else "no"),
    ]


def _tensor(tensor: dict[str, Any]) -> str:
    return f"{printable(tensor['name'])} {tensor['dtype']}{tensor['shape']}"


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{printable(key)}={brief(value)}" for key, value in values.items())


def _size(payload: bytes) -> str:
    return f"{len(payload)} bytes, sha256 {digest(payload).hex()[:16]}" if payload else ""


def brief(value: Any) -> str:
    """A JSON value in one line of ASCII, cut where it is long."""
    if isinstance(value, str) and len(value) > MAX_SHOWN:
        return f"{len(value)} characters"
    shown = json.dumps(value)
    return shown if len(shown) <= MAX_SHOWN else shown[:MAX_SHOWN] + f"... ({len(shown)} characters)"


_CONTROL = re.compile(r"[^\n -~]")


def printable(value: str) -> str:
    """Text of a file for a terminal: ASCII without control characters."""
    return _CONTROL.sub(lambda m: ascii(m[0])[1:-1], value)
