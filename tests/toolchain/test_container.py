"""The archive of NEFF and NTFF files: one way to write each content, and a reader that trusts nothing."""

from __future__ import annotations

import io
import json
import random
import struct
import zipfile
import zlib

import pytest

from opennki.errors import NkiParseError
from opennki.toolchain import container
from opennki.toolchain.container import Kind, pack, unpack

KIND = Kind("opennki-test", 2, "NEFF")
FILES = {"a.txt": b"alpha" * 50, "b.bin": bytes(range(256)), "empty": b""}
DATA = pack(KIND, {"who": "me", "n": 3}, FILES)


def zipped(entries, method=zipfile.ZIP_STORED):
    """A ZIP as Python's own module writes it."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as file:
        for name, data in entries:
            file.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), data, method)
    return out.getvalue()


def refused(data, words):
    with pytest.raises(NkiParseError, match=words):
        unpack(KIND, data)


def test_what_is_packed_is_unpacked():
    archive = unpack(KIND, DATA)
    assert archive.manifest == {"who": "me", "n": 3}
    assert archive.files == FILES and list(archive.files) == list(FILES)
    assert len(archive.digest) == 64


def test_the_bytes_depend_on_the_content_alone():
    assert pack(KIND, {"who": "me", "n": 3}, dict(FILES)) == DATA
    assert pack(KIND, {"who": "me", "n": 4}, FILES) != DATA
    assert unpack(KIND, pack(KIND, {"who": "me", "n": 4}, FILES)).digest != unpack(KIND, DATA).digest


def test_any_zip_tool_can_read_it():
    with zipfile.ZipFile(io.BytesIO(DATA)) as file:
        assert file.testzip() is None
        assert file.namelist() == ["manifest.json", *FILES]
        assert {name: file.read(name) for name in FILES} == FILES
        assert json.loads(file.read("manifest.json"))["format"] == "opennki-test"


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "a\\b", "", "C:x", ".hidden", "x" * 200, "ü", "nul\0"])
def test_names_that_lead_elsewhere_are_not_written(name):
    with pytest.raises(ValueError):
        pack(KIND, {}, {name: b""})


def test_every_cut_is_found():
    for end in range(len(DATA)):
        with pytest.raises(NkiParseError):
            unpack(KIND, DATA[:end])


def test_every_changed_bit_is_found():
    rng = random.Random(1)
    for _ in range(3000):
        at, bit = rng.randrange(len(DATA)), 1 << rng.randrange(8)
        with pytest.raises(NkiParseError):
            unpack(KIND, DATA[:at] + bytes([DATA[at] ^ bit]) + DATA[at + 1 :])


def test_random_bytes_are_refused():
    rng = random.Random(2)
    for _ in range(2000):
        kind = rng.randrange(3)
        data = rng.randbytes(rng.randrange(200))
        data = (b"", b"PK\x03\x04", DATA[: rng.randrange(len(DATA))])[kind] + data
        with pytest.raises(NkiParseError):
            unpack(KIND, data)


def test_bytes_around_it_are_refused():
    for data in (DATA + b"\0", b"\0" + DATA, DATA + DATA):
        with pytest.raises(NkiParseError):
            unpack(KIND, data)


@pytest.mark.parametrize("name", ["../../escape", "/absolute", "folder/inside", ".."])
def test_paths_in_a_foreign_archive_are_refused(name):
    refused(zipped([("manifest.json", b"{}"), (name, b"x")]), "not allowed")


def test_compressed_files_are_refused_so_that_nothing_can_grow():
    bomb = zipped([("manifest.json", b"{}"), ("bomb", bytes(1 << 24))], zipfile.ZIP_DEFLATED)
    assert len(bomb) < 1 << 16
    with pytest.raises(NkiParseError):
        unpack(KIND, bomb)


def test_a_size_that_lies_allocates_nothing():
    head = struct.pack("<4s5H3I2H", b"PK\x03\x04", 20, 0, 0, 0, 0x21, 0, 0xFFFFFFF0, 0xFFFFFFF0, 5, 0) + b"a.txt"
    refused(head, "cut short")


def test_too_many_files_are_refused():
    refused(zipped([(f"f{i}", b"") for i in range(100)]), "more than 64")


def test_a_file_twice_is_refused():
    part = struct.pack("<4s5H3I2H", b"PK\x03\x04", 20, 0, 0, 0, 0x21, zlib.crc32(b"x"), 1, 1, 1, 0) + b"ax"
    refused(part * 2, "twice")


def remade(manifest, files=FILES):
    """An archive with a manifest of one's own making, everything else right."""
    return zipped_like(manifest, files)


def zipped_like(manifest, files):
    made = pack(KIND, {}, {})  # only to be sure that the writer is the one under test
    assert made
    parts = [("manifest.json", manifest if isinstance(manifest, bytes) else json.dumps(manifest).encode()), *files.items()]
    out, central, at = [], [], 0
    for name, data in parts:
        local, entry = container._headers(name, data, at)
        out += [local, data]
        central.append(entry)
        at += len(local) + len(data)
    return b"".join([*out, *central, container._end(central, at)])


GOOD = json.loads(zipfile.ZipFile(io.BytesIO(DATA)).read("manifest.json"))


def test_the_helper_makes_good_archives():
    assert unpack(KIND, remade(GOOD)).files == FILES


@pytest.mark.parametrize("change, words", [
    ({"version": 3}, "newer opennki"), ({"version": 0}, "version"), ({"version": "1"}, "version"), ({"version": True}, "version"),
    ({"format": "opennki-other"}, "format"), ({"files": []}, "list"), ({"files": None}, "list"), ({"files": GOOD["files"][::-1]}, "agree"),
    ({"files": [{**f, "sha256": "0" * 64} for f in GOOD["files"]]}, "SHA-256"),
    ({"files": [{**f, "size": f["size"] + 1} for f in GOOD["files"]]}, "agree"),
    ({"files": [{**f, "size": float(f["size"])} for f in GOOD["files"]]}, "agree"),
    ({"files": [{**f, "sha256": None} for f in GOOD["files"]]}, "SHA-256"), ({"files": [1, 2, 3]}, "agree"),
])
def test_manifests_that_do_not_agree_are_refused(change, words):
    refused(remade({**GOOD, **change}), words)


@pytest.mark.parametrize("manifest", [b"", b"[]", b"null", b"{", b"\xff", b'{"a": NaN}', b"[" * 100000, b'"x"', b"{}" * 2,
                                      b"[" + b"1," * (1 << 20) + b"1]"])
def test_manifests_that_are_none_are_refused(manifest):
    with pytest.raises(NkiParseError):
        unpack(KIND, remade(manifest))


def test_a_neff_of_the_aws_compiler_is_recognised():
    header = struct.pack("<5Q", 2, 1024, 5, 2, 0).ljust(1024, b"\0") + b"\x1f\x8b\x08\0\0"
    with pytest.raises(NkiParseError, match="AWS Neuron compiler") as caught:
        unpack(KIND, header)
    text = str(caught.value)
    assert "NEFF version 2.0" in text and "not" in text and "compile the kernel with opennki" in text
    assert not container.aws_header(DATA)
