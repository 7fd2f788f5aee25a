"""Tapes as bytes: what lowering has made, without pointers, for other processes to use.

A file has a mark, a checksum, a header (JSON: sizes, what the executor knows of the tape, and the descriptors of its calls) and tables of
numbers. Reading trusts nothing but the checksum's word that the bytes are those that were written: sizes are bounded, every number that
counts or points is checked, and whatever does not fit is a ValueError. Tapes with steps of the interpreter, or with cells of watched
tensors, are not written.
"""

from __future__ import annotations

import ctypes as C
import hashlib
import json
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from opennki.execute import abi
from opennki.execute import abi_steps as S
from opennki.execute.assemble import Program
from opennki.execute.calls import kept_bytes, product_scratch
from opennki.execute.step_layout import Made, What
from opennki.execute.tape import CALL, Image

MARK = b"ONKItape"
FORMAT = 4
MOST = 256 << 20  # bytes of a file
_HEAD = struct.Struct("<8s32sII")  # mark, checksum of what follows it, format, bytes of the header
_TABLES = ("addresses", "bounds", "clips", "exprs", "affines", "tests", "terms", "keeps")
_FLAT = {kind.__name__: kind for kind in (
    abi.Matmul, abi.Copy, abi.Scan, abi.PartitionFold, S.Fetch, S.Take, S.Random, S.Search, S.Segments,
)}  # fmt: skip
_NEEDS = {abi.K_EW: "ew", abi.K_MM: "Matmul", abi.K_COPY: "Copy", abi.K_SCAN: "Scan", abi.K_PFOLD: "PartitionFold", abi.K_STEPS: "steps"}
_OPERANDS = {"Matmul": 3, "Copy": 2, "Scan": 3, "PartitionFold": 2}
_COUNT, _PARTS = 1 << 12, 1 << 16  # parts of one descriptor, and steps of all


@dataclass
class Facts:
    """What the executor knows of a tape besides it: slots of the tensors that it uses; the slot of the seed, -1 where nothing is drawn; the
    most threads that there is work for; slots of the tensors that each thread, and each program of the grid, has for itself (None: programs
    run one after the other); how many variables and tensors the plan had."""

    used: list[int]
    seed: int
    threads: int
    own: list[int]
    programs: list[int] | None
    planned: tuple[int, int]


# ---- writing ----------------------------------------------------------------------------------------------------------------
class _Blob:
    def __init__(self) -> None:
        self.data = bytearray()

    def put(self, made: Any) -> list[int]:
        """Where the bytes of a structure are."""
        data = bytes(made)
        self.data += data
        return [len(self.data) - len(data), len(data)]

    def rows(self, pointer: Any, count: int) -> list[int]:
        """Where the first `count` structures behind a pointer are."""
        return self.put((pointer._type_ * count)(*pointer[:count]))


def _without(made: Any, *pointers: str) -> Any:
    """A structure without its pointers."""
    made = type(made).from_buffer_copy(made)
    for name in pointers:
        setattr(made, name, None)
    return made


def _written(what: Any, blob: _Blob, indices: int = 0) -> list[Any]:
    """A descriptor. Raises ValueError for one that has no form in files."""
    if isinstance(what, Program):
        s = what.structure
        arrays = [(s.phases, s.n_phases), (s.uops, s.n_uops), (s.tiles, s.n_tiles), (s.preds, s.n_preds), (s.indices, s.n_indices)]
        return ["ew", blob.put(_without(s, "phases", "uops", "tiles", "preds", "indices")), [blob.rows(*one) for one in arrays]]
    if isinstance(what, What):
        steps = [[m.kind, _written(m.what, blob, len(m.indices)), m.operands, m.extent, m.axes, m.preds, m.indices, m.error, m.again]
                 for m in what.steps]  # fmt: skip
        rows, rank, constants, room = what.made_of
        return ["steps", [rows, rank, room], blob.put(constants), steps]
    if isinstance(what, S.Wide):
        arrays = [(what.ops, what.n_ops), (what.tiles, what.n_tiles), (what.indices, indices)]
        return ["Wide", blob.put(_without(what, "ops", "tiles", "indices")), [blob.rows(*one) for one in arrays]]
    if type(what).__name__ not in _FLAT:
        raise ValueError(f"a descriptor {type(what).__name__}")
    return [type(what).__name__, blob.put(what)]


def written(image: Image, facts: Facts) -> bytes:
    """The bytes of a tape. Raises ValueError where it has no form in files, or is too large."""
    if image.watches:
        raise ValueError("watched tensors")
    blob = _Blob()
    whats = [_written(what, blob) for what in image.whats]
    parts = [bytes(image.ops), bytes(image.calls), *(getattr(image, name).tobytes() for name in _TABLES), bytes(blob.data)]
    header = json.dumps({
        "sizes": [len(p) for p in parts], "env": image.n_env, "buffers": image.n_buffers, "scratch": image.scratch, "whats": whats,
        "facts": [facts.used, facts.seed, facts.threads, facts.own, facts.programs, facts.planned],
    }, separators=(",", ":")).encode()  # fmt: skip
    body = header + b"".join(parts)
    if len(body) > MOST:
        raise ValueError("a tape of that size")
    return _HEAD.pack(MARK, hashlib.blake2b(body, digest_size=32).digest(), FORMAT, len(header)) + body


# ---- reading ----------------------------------------------------------------------------------------------------------------
def _need(truth: Any, what: str) -> None:
    if not truth:
        raise ValueError(what)


def _ints(values: Any, low: int, high: int, most: int) -> list[int]:
    _need(isinstance(values, list) and len(values) <= most, "a list")
    _need(all(type(v) is int and low <= v <= high for v in values), "a number")
    return values  # type: ignore[no-any-return]


class _Reader:
    def __init__(self, blob: bytes) -> None:
        self.blob, self.steps = blob, 0

    def bytes(self, place: Any) -> bytes:
        first, size = _ints(place, 0, len(self.blob), 2)
        _need(first + size <= len(self.blob), "bytes outside of the file")
        return self.blob[first : first + size]

    def one(self, kind: Any, place: Any) -> Any:
        data = self.bytes(place)
        _need(len(data) == C.sizeof(kind), f"the size of {kind.__name__}")
        return kind.from_buffer_copy(data)

    def array(self, kind: Any, place: Any, count: int) -> Any:
        data = self.bytes(place)
        _need(0 <= count <= _COUNT and len(data) == count * C.sizeof(kind), f"the number of {kind.__name__}")
        return (kind * max(1, count)).from_buffer_copy(data.ljust(C.sizeof(kind), b"\0"))

    def what(self, made: Any, indices: int = 0) -> Any:
        """A descriptor."""
        _need(isinstance(made, list) and 2 <= len(made) <= 4 and isinstance(made[0], str), "a descriptor")
        name, place, *rest = made
        if name == "ew":
            return self.elementwise(self.one(abi.Elementwise, place), *rest)
        if name == "Wide":
            return self.wide(self.one(S.Wide, place), indices, *rest)
        if name == "steps":
            return self.several(place, *rest)
        _need(name in _FLAT and not rest, "a descriptor")
        one = self.one(_FLAT[name], place)
        for field, *_ in one._fields_:
            if field == "rank" or field == "n_axes":
                _need(0 <= getattr(one, field) <= abi.RANK, "a rank")
        return one

    def elementwise(self, s: Any, places: Any) -> Program:
        _need(isinstance(places, list) and len(places) == 5, "an elementwise program")
        counts = s.n_phases, s.n_uops, s.n_tiles, s.n_preds, s.n_indices
        kinds = abi.Phase, abi.Uop, abi.Tile, abi.AffineTile, abi.AffineTile
        arrays = [self.array(kind, place, n) for kind, place, n in zip(kinds, places, counts, strict=True)]
        _need(s.outer >= 0 and s.inner >= 0 and s.outer + s.inner <= abi.RANK and 0 < s.n_registers <= _COUNT, "a rank")
        phases, uops, tiles = arrays[0][: s.n_phases], arrays[1][: s.n_uops], arrays[2][: s.n_tiles]
        _need(all(p.first >= 0 and p.count >= 0 and p.first + p.count <= s.n_uops for p in phases), "a phase")
        _need(all(0 <= t.dtype <= S.I64 for t in tiles), "a dtype")
        most = max(s.n_registers, s.n_tiles, s.n_preds, s.n_indices, s.n_kept)
        _need(all(0 <= u.code < 64 and 0 <= u.fn < len(abi.FUNCTIONS) and -1 <= u.d < most for u in uops), "an operation")
        s.phases, s.uops, s.tiles, s.preds, s.indices = arrays
        return Program(s, tuple(arrays))

    def wide(self, s: Any, indices: int, places: Any) -> Any:
        _need(isinstance(places, list) and len(places) == 3 and 0 <= s.rank <= abi.RANK, "a program of integers")
        s.ops = self.array(S.WideOp, places[0], s.n_ops)
        s.tiles = self.array(abi.Tile, places[1], s.n_tiles)
        s.indices = self.array(abi.AffineTile, places[2], indices)
        return s

    def several(self, sizes: Any, constants: Any, steps: Any) -> What:
        rows, rank, room = _ints(sizes, 0, 1 << 31, 3)
        _need(isinstance(steps, list) and len(steps) <= _COUNT and rank <= abi.RANK, "steps")
        made = []
        for step in steps:
            self.steps += 1
            _need(isinstance(step, list) and len(step) == 9 and self.steps <= _PARTS, "a step")
            kind, what, operands, extent, axes, preds, indices, error, again = step
            _need(isinstance(operands, list) and len(operands) <= _COUNT and all(len(o) == 2 for o in operands), "operands")
            _ints([kind, error, again], 0, 1 << 31, 3)
            for operand in operands:
                which, _ = _ints(operand, -(1 << 40), 1 << 40, 2)
                _need(S.CONSTANTS <= which < abi.MAX_ADDRESSES, "an operand")
            _ints(extent, 0, 1 << 40, abi.RANK)
            _ints(axes, -1, abi.RANK - 1, abi.RANK)
            _ints(preds, 0, abi.MAX_EXPRESSIONS, 8)
            _ints(indices, 0, abi.MAX_EXPRESSIONS, _COUNT)
            _need(isinstance(what, list) and what and what[0] != "steps", "a step")
            made.append(Made(kind, self.what(what, len(indices)), operands, tuple(extent), tuple(axes), preds, indices, error, again))
        return What(made, rows, rank, self.bytes(constants), room)


def read(data: bytes) -> tuple[Image, Facts]:
    """A tape from bytes. Raises ValueError."""
    _need(_HEAD.size <= len(data) <= MOST + _HEAD.size, "the size")
    mark, digest, version, size = _HEAD.unpack_from(data)
    body = memoryview(data)[_HEAD.size :]
    _need(mark == MARK and version == FORMAT and size <= len(body), "another format")
    _need(hashlib.blake2b(body, digest_size=32).digest() == digest, "the checksum")
    try:
        header = json.loads(bytes(body[:size]))
        sizes, n_env, n_buffers, scratch, whats = (header[name] for name in ("sizes", "env", "buffers", "scratch", "whats"))
        used, seed, threads, own, programs, planned = header["facts"]
    except (ValueError, TypeError, KeyError, RecursionError) as exc:
        raise ValueError(f"the header: {exc}") from None
    _ints(sizes, 0, MOST, 3 + len(_TABLES))
    _need(len(sizes) == 3 + len(_TABLES) and sum(sizes) == len(body) - size, "the sizes")
    _ints([n_env, n_buffers, scratch], 0, 1 << 31, 3)
    parts, at = [], size
    for n in sizes:
        parts.append(bytes(body[at : at + n]))
        at += n
    ops, calls, *tables, blob = parts
    image = Image(n_env, n_buffers, scratch, bytearray(ops), bytearray(calls))
    for name, table in zip(_TABLES, tables, strict=True):
        _need(len(table) % 8 == 0, "a table")
        getattr(image, name).frombytes(table)
    _need(isinstance(whats, list), "descriptors")
    reader = _Reader(blob)
    try:
        image.whats = [reader.what(what) for what in whats]
    except (TypeError, OverflowError, RecursionError) as exc:
        raise ValueError(str(exc)) from None
    image.scratch = max([_scratch(what) for what in image.whats], default=0)
    _checked(image, [what[0] for what in whats])
    slots = n_buffers - 1
    _ints([seed], -1, n_env - 1, 1)
    _ints([threads], 1, 64, 1)
    _need(len(_ints(planned, 0, 1 << 31, 2)) == 2, "the plan")
    facts = Facts(_ints(used, 0, slots, n_buffers), seed, threads, _ints(own, 0, slots, _PARTS), programs, (planned[0], planned[1]))
    if programs is not None:
        _ints(programs, 0, slots, _PARTS)
    return image, facts


def _scratch(what: Any) -> int:
    return product_scratch(what) if isinstance(what, abi.Matmul) else int(what.scratch) if isinstance(what, What) else 0


def _checked(image: Image, names: list[str]) -> None:
    """Raise ValueError where a number of a tape points outside of what there is."""
    terms = np.array(image.terms, np.int64).reshape(-1, 2)
    _need(((terms[:, 1] >= 0) & (terms[:, 1] < image.n_env)).all(), "a variable")

    def rows(name: str, width: int) -> np.ndarray:
        table = np.array(getattr(image, name), np.int64)
        _need(len(table) % width == 0, "a table")
        table = table.reshape(-1, width)
        first, count = table[:, 1] & 0xFFFFFFFF, table[:, 1] >> 32
        _need(((count >= 0) & (first + count <= len(terms))).all(), "an expression")
        return table

    addresses, tests, affines = rows("addresses", 3), rows("tests", 3), rows("affines", 2)
    places = {"addresses": (addresses, 24), "bounds": (rows("bounds", abi.RANK + 6), 8 * (abi.RANK + 6)), "clips": (rows("clips", 4), 32)}
    exprs = rows("exprs", 2)
    for table in (addresses, tests):
        _need(((table[:, 2] >= 0) & (table[:, 2] < image.n_buffers)).all(), "a slot")
    _need(len(image.keeps) % 2 == 0 and all(0 <= n < 1 << 40 for n in image.keeps), "what is kept")
    _need(len(image.calls) % CALL.itemsize == 0 and len(image.ops) % 24 == 0, "records")
    calls = np.frombuffer(bytes(image.calls), CALL)
    n_keeps = len(image.keeps) // 2
    _need(((calls["rank"] >= 0) & (calls["rank"] <= abi.RANK)).all() and (calls["counts"] >= 0).all(), "a call")
    most = np.where(calls["kind"] == abi.K_STEPS, 1 << 31, n_keeps)[:, None]
    _need((calls["what"] < len(names)).all() and ((calls["keep"] >= -1) & (calls["keep"] < most)).all(), "a call")
    _need((calls["counts"][:, 0] <= abi.MAX_ADDRESSES).all() and (calls["counts"][:, 3:] <= abi.MAX_EXPRESSIONS).all(), "a call")
    for n, (name, (table, size)) in enumerate(places.items()):
        ends = calls[name] // size + calls["counts"][:, n].astype(np.uint64)
        _need(((calls[name] % size == 0) & (ends <= len(table))).all(), "a call")
    for n, name in ((3, "preds"), (4, "indices")):
        _need(((calls[name] % 16 == 0) & (calls[name] // 16 + calls["counts"][:, n].astype(np.uint64) <= len(exprs))).all(), "a call")
    for call in calls:
        what, name = image.whats[call["what"]], names[call["what"]]
        _need(_NEEDS.get(int(call["kind"])) == name, "a call of another kind")
        given = call["counts"]
        if name == "ew":
            s = what.structure
            _need(s.n_tiles <= given[0] and s.n_preds <= given[3] and s.n_indices <= given[4], "operands")
        elif name == "steps":
            _need(all(which < given[0] for m in what.steps for which, _ in m.operands), "operands")
            _need(all(p < given[3] for m in what.steps for p in m.preds), "operands")
            _need(all(i < given[4] for m in what.steps for i in m.indices), "operands")
        else:
            _need(name != "Matmul" or 0 <= what.n_where <= min(abi.WHERES, given[3]), "operands")
            for operand, number in enumerate(call["keep"]):
                _need(number < 0 or (name == "Matmul" and image.keeps[2 * number + 1] == kept_bytes(what, operand)), "what is kept")
            _need(given[0] >= _OPERANDS[name] + (name == "Scan" and what.has_initial_tile != 0), "operands")
    _ops(image, len(calls), len(affines), len(tests))


def _ops(image: Image, calls: int, affines: int, tests: int) -> None:
    """Raise ValueError where the ops of a tape go somewhere else than to its end."""
    ops = np.frombuffer(bytes(image.ops), np.dtype([("code", "i4"), ("a", "i4"), ("b", "i4"), ("c", "i4"), ("n", "i8")]))
    count = len(ops)
    _need(count and ops["code"][-1] == abi.OP_END, "its end")
    allowed = {  # what a, b of each op are below
        abi.OP_END: (1, 1), abi.OP_FOR: (image.n_env, count), abi.OP_NEXT: (image.n_env, count), abi.OP_IF: (affines, count),
        abi.OP_JUMP: (1, count), abi.OP_DIV: (image.n_env, affines), abi.OP_RUN: (calls, 1), abi.OP_ZERO: (image.n_buffers, 1),
        abi.OP_TEST: (tests, count),
    }  # fmt: skip
    _need(set(ops["code"].tolist()) <= set(allowed), "an op")
    for code, (a, b) in allowed.items():
        some = ops[ops["code"] == code]
        _need(((some["a"] >= 0) & (some["a"] < a) & (some["b"] >= 0) & (some["b"] < b)).all(), "an op")
    _need((ops["n"][ops["code"] == abi.OP_DIV] > 0).all() and (ops["n"][ops["code"] == abi.OP_ZERO] >= 0).all(), "an op")
