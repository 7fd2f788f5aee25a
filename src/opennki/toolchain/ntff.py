"""NTFF files of opennki: the trace of one execution of a NEFF, as one archive (docs/ntff.md).

Files in it: `timeline.json`, the estimate without its rows; `rows.json`, the columns of the rows with their texts and places; `rows.bin`,
the numbers of the columns one after the other, little-endian. What the rows and the timeline are is declared in
`opennki.timing.timeline`; this module follows its dataclasses, so that a field added there is a field of the file.
"""

from __future__ import annotations

import dataclasses
import math
import os
import types
import typing
from dataclasses import dataclass
from typing import Any

import numpy as np

from opennki._version import __version__
from opennki.errors import Loc, NkiParseError
from opennki.ir.text import MAX_STATEMENTS
from opennki.isa.target import TARGETS
from opennki.timing import Row, Timeline
from opennki.toolchain.container import MAX_BYTES, Kind, dump, load_json, pack, unpack
from opennki.toolchain.files import read_file

NTFF = Kind("opennki-ntff", 1, "NTFF")
NOTICE = "This file holds an estimate by opennki's timing model; no device was measured. It is not a trace of AWS Neuron hardware."
TIMELINE, COLUMNS, NUMBERS = "timeline.json", "rows.json", "rows.bin"
MAX_ROWS = MAX_STATEMENTS
_MAX_TEXT = 4096


@dataclass(frozen=True, slots=True)
class Ntff:
    """A trace: of which NEFF (its digest), which execution (1-based) of how many, the timeline, and its own digest."""

    neff: str
    execution: int
    executions: int
    timeline: Timeline
    digest: str

    @property
    def name(self) -> str:
        """Name of the profile in summaries: n_ and a hash."""
        return f"n_{self.digest[:40]}"

    def summary(self) -> dict[str, Any]:
        """The metrics under the vendor's names, in seconds, bytes, counts and fractions of 1, and what they are."""
        return {**self.timeline.metrics(), "nc_idx": 0, "nd_idx": 0, "estimate": self.timeline.is_estimate}


def encode(timeline: Timeline, neff: str, execution: int = 1, executions: int = 1) -> bytes:
    """The bytes of an NTFF file; the same for the same timeline."""
    columns, numbers = _rows(timeline.rows)
    manifest = {"notice": NOTICE, "producer": f"opennki {__version__}", "neff": neff, "execution": execution, "executions": executions}
    rest = {f.name: _plain(getattr(timeline, f.name)) for f in dataclasses.fields(timeline) if f.name != "rows"}
    return pack(NTFF, manifest, {TIMELINE: dump(rest), COLUMNS: dump(columns), NUMBERS: numbers})


def parse(data: bytes, folder: str = "") -> Ntff:
    """A trace from its bytes, checked: form, checksums, version, every number. `folder`: where the kernel's sources are, if they are here.

    Errors: NkiParseError that says what is wrong.
    """
    archive = unpack(NTFF, data)
    manifest = archive.manifest
    for key, kind in (("neff", str), ("execution", int), ("executions", int)):
        if type(manifest.get(key)) is not kind:
            NTFF.fail(f"its manifest has no {key}")
    if tuple(archive.files) != (TIMELINE, COLUMNS, NUMBERS):
        NTFF.fail("it does not hold the files of an NTFF")
    rest = load_json(NTFF, TIMELINE, archive.files[TIMELINE])
    try:
        rows = _read_rows(load_json(NTFF, COLUMNS, archive.files[COLUMNS]), archive.files[NUMBERS], folder)
        if type(rest) is not dict or "rows" in rest:
            raise _Bad("the timeline is not an object")
        timeline = _build(Timeline, {**rest, "rows": []}, folder)
        if timeline.target.strip().lower() not in TARGETS or not timeline.latency_us > 0:
            raise _Bad("its target or latency")
        timeline = dataclasses.replace(timeline, rows=rows)
        timeline.metrics()
    except (_Bad, ValueError, KeyError, ArithmeticError) as exc:
        NTFF.fail(f"what it holds is not a timeline: {exc}"[:300])
    return Ntff(manifest["neff"], manifest["execution"], manifest["executions"], timeline, archive.digest)


def load(path: str | os.PathLike[str], folder: str = "") -> Ntff:
    """A trace from a file. Errors: NkiFileError, NkiParseError."""
    try:
        return parse(read_file(path, MAX_BYTES, "the NTFF"), folder)
    except NkiParseError as error:
        error.message = f"{os.fspath(path)}: {error.message}"
        raise


class _Bad(Exception):
    """What is in the file does not fit the dataclass."""


# ---- dataclasses as JSON ----


def _name(loc: Loc) -> list[Any]:
    """A source location without what is of this machine."""
    file = loc.file[1:-1] if loc.file.startswith("<") and loc.file.endswith(">") else loc.file
    return [os.path.basename(file) if os.path.isabs(file) else file, loc.line, loc.function]


def _plain(value: Any) -> Any:
    if isinstance(value, Loc):
        return _name(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, (np.integer, np.floating)):
        return value.item()
    return value


def _place(value: Any, folder: str) -> Loc:
    if type(value) is not list or list(map(type, value)) != [str, int, str] or not 0 <= value[1] < 1 << 31:
        raise _Bad("a place is [file, line, function]")
    file, line, function = value
    inside = not os.path.isabs(file) and ".." not in file.replace("\\", "/").split("/") and ":" not in file and "\0" not in file
    if len(file) > _MAX_TEXT or len(function) > _MAX_TEXT or not file.isprintable():
        raise _Bad("the name of a source file")
    return Loc(os.path.join(folder, file) if folder and inside else f"<{file}>", line, function)


def _build(kind: Any, value: Any, folder: str) -> Any:
    """A value of a declared type from JSON. Raises _Bad for anything else."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return None if value is None and type(None) in inner else _build(next(t for t in inner if t is not type(None)), value, folder)
    if kind is Loc:
        return _place(value, folder)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        if type(value) is not dict or set(value) != set(hints):
            raise _Bad(f"the keys of {getattr(kind, '__name__', kind)}")
        return kind(**{k: _build(hints[k], v, folder) for k, v in value.items()})  # type: ignore[operator]
    if origin is tuple:
        if type(value) is not list:
            raise _Bad("a list")
        return tuple(_build(inner[0], v, folder) for v in value)
    if origin is dict:
        if type(value) is not dict:
            raise _Bad("an object")
        return {k: _build(inner[1], v, folder) for k, v in value.items()}
    if kind is float and type(value) in (int, float) and math.isfinite(value) and abs(value) < 1e300:
        return float(value)
    if kind is int and type(value) is int and abs(value) < 1 << 127:
        return value
    if kind is str and type(value) is str and len(value) <= _MAX_TEXT:
        return value
    raise _Bad(f"a value that is no {getattr(kind, '__name__', kind)}")


# ---- rows as columns ----

# type of a field -> (kind in rows.json, dtype of its numbers)
_KINDS: dict[Any, tuple[str, str]] = {str: ("text", "<u4"), int: ("int", "<i8"), float: ("float", "<f8"), Loc: ("place", "<i4"),
                                      tuple: ("ints", "<u4")}
_DTYPES = dict(_KINDS.values())


def _row_columns() -> list[tuple[str, str]]:
    """(name, kind) of each column, from the dataclass."""
    made = []
    for name, hint in typing.get_type_hints(Row).items():
        inner = [t for t in typing.get_args(hint) if t is not type(None)]
        base = tuple if typing.get_origin(hint) is tuple else inner[0] if inner else hint
        made.append((name, _KINDS[base][0]))
    return made


def _rows(rows: tuple[Row, ...]) -> tuple[dict[str, Any], bytes]:
    texts: dict[str, int] = {}
    places: dict[tuple[Any, ...], int] = {}
    out = []
    for name, kind in _row_columns():
        values: list[Any] = [getattr(row, name) for row in rows]
        if kind == "text":
            values = [texts.setdefault(v, len(texts)) for v in values]
        elif kind == "place":
            values = [-1 if v is None else places.setdefault(tuple(_name(v)), len(places)) for v in values]
        elif kind == "ints":
            out.append(np.array([len(v) for v in values], "<u4").tobytes())
            out.append(np.array([i for v in values for i in v], "<i8").tobytes())
            continue
        out.append(np.array(values, _DTYPES[kind]).tobytes())
    columns = {"count": len(rows), "columns": _row_columns(), "texts": list(texts), "places": list(places)}
    return columns, b"".join(out)


def _read_rows(head: Any, data: bytes, folder: str) -> tuple[Row, ...]:
    if type(head) is not dict or set(head) != {"count", "columns", "texts", "places"}:
        raise _Bad("the keys of the rows")
    count = head["count"]
    if type(count) is not int or not 0 <= count <= MAX_ROWS or head["columns"] != [list(c) for c in _row_columns()]:
        raise _Bad("the columns of the rows")
    texts: tuple[str, ...] = _build(tuple[str, ...], head["texts"], folder)
    places: tuple[Loc, ...] = _build(tuple[Loc, ...], head["places"], folder)
    at = 0

    def take(dtype: str, number: int) -> np.ndarray:
        nonlocal at
        size = number * np.dtype(dtype).itemsize
        if size > len(data) - at:
            raise _Bad("the numbers of the rows are cut short")
        at += size
        return np.frombuffer(data, dtype, number, at - size)

    columns: list[list[Any]] = []
    for _, kind in _row_columns():
        values = take(_DTYPES[kind], count)
        if kind == "text":
            if count and int(values.max()) >= len(texts):
                raise _Bad("the number of a text")
            columns.append([texts[i] for i in values.tolist()])
        elif kind == "place":
            if count and not -1 <= int(values.min()) <= int(values.max()) < len(places):
                raise _Bad("the number of a place")
            columns.append([None if i < 0 else places[i] for i in values.tolist()])
        elif kind == "ints":
            ends = np.cumsum(values, dtype=np.int64)
            flat = take("<i8", int(ends[-1]) if count else 0).tolist()
            columns.append([tuple(flat[e - n : e]) for e, n in zip(ends.tolist(), values.tolist(), strict=True)])
        else:
            if kind == "float" and not np.isfinite(values).all():
                raise _Bad("a time is not finite")
            columns.append(values.tolist())
    if at != len(data):
        raise _Bad("there are more numbers than rows")
    return tuple(Row(*values) for values in zip(*columns, strict=True))
