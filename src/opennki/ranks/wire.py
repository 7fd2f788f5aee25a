"""Messages between the processes of a run: a JSON header and the bytes of arrays.

A frame is the length of the header (4 bytes) and of the body (8 bytes), little-endian, then both. The reader trusts nothing: lengths are
bounded, dtypes come from a table, the sizes of arrays must add up to the body, and nothing is executed.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import ml_dtypes
import numpy as np

from opennki.errors import NkiParseError

HEAD = struct.Struct("<IQ")
MOST_HEADER = 8 << 20
MOST_BODY = 1 << 40
MOST_RANK = 32

DTYPES: dict[str, np.dtype[Any]] = {
    str(np.dtype(t)): np.dtype(t)
    for t in (
        np.float32, np.float16, np.float64, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2,
        np.int64, np.uint64, np.int32, np.uint32, np.int16, np.uint16, np.int8, np.uint8, np.bool_,
    )
}  # fmt: skip


def encode(header: dict[str, Any], arrays: dict[str, np.ndarray] | None = None) -> bytes:
    """A frame. Arrays are copied into it."""
    parts = {name: np.asarray(array, order="C") for name, array in (arrays or {}).items()}
    described = [[name, str(array.dtype), list(array.shape)] for name, array in parts.items()]
    text = json.dumps({**header, "arrays": described}, separators=(",", ":")).encode()
    body = b"".join(array.tobytes() for array in parts.values())
    return HEAD.pack(len(text), len(body)) + text + body


def lengths(head: bytes) -> tuple[int, int]:
    """Sizes of header and body of a frame. Raises NkiParseError where they are out of bounds."""
    text, body = HEAD.unpack(head)
    if text > MOST_HEADER or body > MOST_BODY:
        raise NkiParseError(f"a message of {text} + {body} bytes", rule="messages between ranks have bounded sizes")
    return text, body


def decode(text: bytes, body: bytes | bytearray | memoryview) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Header and arrays of a frame; the arrays are views of `body`. Raises NkiParseError for anything else than what `encode` makes."""
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise NkiParseError(f"a message whose header is no JSON: {exc}") from None
    if not isinstance(header, dict) or not isinstance(header.get("arrays"), list) or not isinstance(header.get("kind"), str):
        raise NkiParseError("a message without a kind or arrays")
    arrays: dict[str, np.ndarray] = {}
    at, whole = 0, memoryview(body)
    for item in header.pop("arrays"):
        if not isinstance(item, list) or len(item) != 3 or not isinstance(item[0], str) or not isinstance(item[1], str):
            raise NkiParseError("an array of a message that is not described")
        name, kind, shape = item
        dtype = DTYPES.get(kind)
        if dtype is None or not isinstance(shape, list) or len(shape) > MOST_RANK:
            raise NkiParseError(f"an array of {kind!r} in a message")
        size = dtype.itemsize
        for n in shape:
            if not isinstance(n, int) or isinstance(n, bool) or n < 0:
                raise NkiParseError("an array of a message without a shape")
            size *= n
            if size > MOST_BODY:
                raise NkiParseError("an array of a message that is too large")
        if at + size > len(whole):
            raise NkiParseError(f"a message of {len(whole)} bytes whose arrays have more")
        arrays[name] = np.frombuffer(whole[at : at + size], np.uint8).view(dtype).reshape(shape) if size else np.zeros(shape, dtype)
        at += size
    if at != len(whole):
        raise NkiParseError(f"a message of {len(whole)} bytes whose arrays have {at}")
    return header, arrays


def tuples(value: Any, depth: int = 0) -> Any:
    """Lists of a decoded header as tuples, as keys of meetings have them. Raises NkiParseError where it is nested too deep."""
    if depth > 16:
        raise NkiParseError("a message that is nested too deep")
    return tuple(tuples(v, depth + 1) for v in value) if isinstance(value, list) else value
