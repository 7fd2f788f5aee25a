"""The archive that NEFF and NTFF files are: a ZIP of stored files, the same bytes for the same content, read without trust.

The first file is `manifest.json`: an object with `format`, `version` and, for each other file in order, `name`, `size` and `sha256`. No
compression, no folders, no times, no comments, no extra fields: any ZIP tool can list and unpack it, and there is one way to write each
content. The reader does not search: it walks the files from the first byte, and then compares the directory at the end with the one that
belongs to them. So nothing in a file of hostile origin can grow, point elsewhere, or be read in two ways.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from opennki.errors import UNKNOWN, NkiParseError

MANIFEST = "manifest.json"
MAX_BYTES = 1 << 30
"""Largest archive, in bytes."""
MAX_FILES = 64
MAX_MANIFEST_BYTES = 4 << 20
MAX_ITEMS = 1 << 23
"""Most elements of a JSON file: bounds the number of Python objects that it becomes."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_HEX = re.compile(r"[0-9a-f]{64}")
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_DATE = 0x21  # 1 January 1980, the first day that the format has
_AWS_VERSIONS = (1, 2)
_AWS_HEADER_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of archive. format: its name in the manifest. version: the newest that is read. what: "NEFF"."""

    format: str
    version: int
    what: str

    def fail(self, why: str, rule: str = "", fix: str = "") -> NoReturn:
        """Refuse a file. Errors: NkiParseError, always."""
        raise NkiParseError(f"this is not an opennki {self.what} file: {why}", loc=UNKNOWN,
                            rule=rule or f"{self.what} files are what opennki writes, unchanged (docs/{self.what.lower()}.md)", fix=fix)


@dataclass(frozen=True, slots=True)
class Archive:
    """What is in an archive: its manifest without the list of files, the files in order, and the SHA-256 of the manifest, its name."""

    manifest: dict[str, Any]
    files: dict[str, bytes]
    digest: str


def dump(value: Any) -> bytes:
    """JSON as it is written into archives. Errors: ValueError for numbers that are not finite."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


def pack(kind: Kind, manifest: Mapping[str, Any], files: Mapping[str, bytes]) -> bytes:
    """The bytes of an archive. `manifest`: keys besides format, version and files. Errors: ValueError for what no archive can hold."""
    listed = [{"name": name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()]
    head = dump({"format": kind.format, "version": kind.version, **manifest, "files": listed})
    parts = [(MANIFEST, head), *files.items()]
    total = sum(len(data) + 256 for _, data in parts)
    if len(parts) > MAX_FILES or total > MAX_BYTES or len(head) > MAX_MANIFEST_BYTES or not all(_NAME.fullmatch(name) for name, _ in parts):
        raise ValueError(f"a {kind.what} file of {len(parts)} files and {total} bytes")
    out, central, at = [], [], 0
    for name, data in parts:
        local, entry = _headers(name, data, at)
        out += [local, data]
        central.append(entry)
        at += len(local) + len(data)
    return b"".join([*out, *central, _end(central, at)])


def unpack(kind: Kind, data: bytes) -> Archive:
    """What is in the bytes of an archive. Errors: NkiParseError that says what is wrong."""
    if len(data) > MAX_BYTES:
        kind.fail(f"it has {len(data)} bytes, more than {MAX_BYTES}")
    aws = aws_header(data)
    if aws:
        raise NkiParseError(
            f"this is a NEFF file of the AWS Neuron compiler ({aws}), not one of opennki", loc=UNKNOWN,
            rule="opennki loads the NEFF files that opennki has written", why="it holds machine code of a NeuronCore, whose format is not "
            "published; opennki runs kernels from their intermediate representation",
            fix="compile the kernel with opennki, or run this file with the Neuron runtime on an AWS instance")
    files: dict[str, bytes] = {}
    central, at = [], 0
    while data[at : at + 4] == b"PK\x03\x04":
        if len(files) >= MAX_FILES:
            kind.fail(f"it holds more than {MAX_FILES} files")
        if len(data) - at < _LOCAL.size:
            kind.fail("it is cut short")
        header = _LOCAL.unpack_from(data, at)
        crc, stored, size, name_size = header[6:10]
        begin = at + _LOCAL.size + name_size
        name = data[at + _LOCAL.size : begin].decode("latin-1")
        if not _NAME.fullmatch(name):
            kind.fail(f"the name of a file, {name[:80]!a}, is not allowed")
        if stored != size or size > len(data) - begin:
            kind.fail(f"the file {name} is cut short, or compressed")
        if name in files:
            kind.fail(f"the file {name} is there twice")
        files[name] = part = data[begin : begin + size]
        if zlib.crc32(part) != crc:
            kind.fail(f"the file {name} is damaged (its CRC-32 does not agree)")
        local, entry = _headers(name, part, at)
        if data[at : at + len(local)] != local:
            kind.fail(f"the header of the file {name} is not as opennki writes it")
        central.append(entry)
        at = begin + size
    if not files:
        kind.fail("it does not begin as one" if data else "it is empty")
    if data[at:] != b"".join([*central, _end(central, at)]):
        kind.fail("its directory does not agree with its files, or it is cut short")
    return _checked(kind, files)


def aws_header(data: bytes) -> str:
    """What the header of a NEFF of the AWS compiler says about it; empty for other data.

    Such a file begins with a header of 1,024 bytes: version of the package (1 or 2) and size of the header, both as 64-bit little-endian
    numbers; a tar archive follows. Source: aws-neuron-sdk neuron-runtime/explore/work-with-neff-files.rst.
    """
    if len(data) < 40:
        return ""
    package, header, _, major, minor = struct.unpack_from("<5Q", data)
    if package in _AWS_VERSIONS and header == _AWS_HEADER_BYTES:
        return f"package version {package}, NEFF version {major}.{minor}" if max(major, minor) < 1000 else f"package version {package}"
    return ""


def load_json(kind: Kind, name: str, data: bytes) -> Any:
    """A JSON file of an archive: bounded, finite numbers. Errors: NkiParseError."""
    if data.count(b",") + data.count(b"[") + data.count(b"{") > MAX_ITEMS:
        kind.fail(f"{name} has more than {MAX_ITEMS} elements")
    try:
        return json.loads(data.decode("ascii"), parse_constant=_not_finite)
    except (ValueError, RecursionError, MemoryError):
        kind.fail(f"{name} is not JSON")


def _not_finite(text: str) -> NoReturn:
    raise ValueError(text)


def _headers(name: str, data: bytes, at: int) -> tuple[bytes, bytes]:
    """The header before a file, and its entry in the directory."""
    raw = name.encode("ascii")
    crc, size = zlib.crc32(data), len(data)
    local = _LOCAL.pack(b"PK\x03\x04", 20, 0, 0, 0, _DATE, crc, size, size, len(raw), 0) + raw
    return local, _CENTRAL.pack(b"PK\x01\x02", 20, 20, 0, 0, 0, _DATE, crc, size, size, len(raw), 0, 0, 0, 0, 0, at) + raw


def _end(central: list[bytes], at: int) -> bytes:
    return _END.pack(b"PK\x05\x06", 0, 0, len(central), len(central), sum(map(len, central)), at, 0)


def _checked(kind: Kind, files: dict[str, bytes]) -> Archive:
    """The archive, where manifest and files agree."""
    first = next(iter(files))
    if first != MANIFEST or len(files[first]) > MAX_MANIFEST_BYTES:
        kind.fail(f"it does not begin with {MANIFEST}")
    raw = files.pop(MANIFEST)
    manifest = load_json(kind, MANIFEST, raw)
    if type(manifest) is not dict or manifest.get("format") != kind.format:
        kind.fail(f"its format is {ascii(manifest.get('format'))[:60]}" if type(manifest) is dict else "its manifest is not an object",
                  rule=f"the format of a {kind.what} file is {kind.format!r}")
    version = manifest.get("version")
    if type(version) is not int or version < 1:
        kind.fail("its version is no number")
    if version > kind.version:
        kind.fail(f"its version is {version}: a newer opennki wrote it", rule=f"this opennki reads versions up to {kind.version}",
                  fix="upgrade opennki, or compile again")
    listed = manifest.get("files")
    if type(listed) is not list or len(listed) != len(files):
        kind.fail("its manifest does not list its files")
    for entry, (name, data) in zip(listed, files.items(), strict=True):
        if type(entry) is not dict or entry.get("name") != name or type(entry.get("size")) is not int or entry["size"] != len(data):
            kind.fail(f"its manifest does not agree with the file {name}")
        wanted = entry.get("sha256")
        if type(wanted) is not str or not _HEX.fullmatch(wanted) or hashlib.sha256(data).hexdigest() != wanted:
            kind.fail(f"the file {name} is damaged (its SHA-256 does not agree with the manifest)")
    said = {key: value for key, value in manifest.items() if key not in ("format", "version", "files")}
    return Archive(said, files, hashlib.sha256(raw).hexdigest())
