"""NTFF files: every field comes back, the bytes are those of the timeline, damage is found."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest

from opennki.errors import Loc, NkiError, NkiFileError, NkiParseError
from opennki.timing import ENGINES, EngineUse, LineCost, Row, Timeline, Traffic, Work
from opennki.toolchain import ntff
from opennki.toolchain.container import pack, unpack
from opennki.toolchain.profiler import rows_json, timeline_of
from opennki.toolchain.neff import parse as parse_neff
from tests.toolchain.kernels import compiled


def timeline(count=50, seed=0):
    """A timeline with something in every field."""
    rng = random.Random(seed)
    places = [None, Loc("k.py", 3, "k"), Loc("sub/other.py", 70, "<listcomp>")]
    rows = tuple(
        Row(i, rng.choice(["tensor_tensor", "nc_matmul", "dma_copy"]), rng.choice(ENGINES), f"dma{i % 16}", i * 10.25, rng.random() * 100,
            i * 10.25 + 130.5, rng.choice(places), tuple(rng.randrange(1 << 40) for _ in range(i % 4)), rng.randrange(1 << 50), i, 2 * i,
            f"t{i % 7}", rng.random(), i - 1, i % 3)
        for i in range(count)
    )  # fmt: skip
    use = {name: EngineUse(rng.random() * 1e4, rng.randrange(1000), rng.random(), rng.random()) for name in ENGINES}
    return Timeline("kernel_λ"[:6], "trn2", 123.4567, 2.5, use, (EngineUse(3.0, 4, 0.5, 0.25),) * 16, Traffic(*range(1, 12), 99.5),
                    Work(1 << 90, 5, 6.5, 7, 8, 9), {"tensor": 100.0, "dma": 3.5}, "dma", 10_000_000, 500,
                    (LineCost(places[1], 55.5, {"dma": 4.0}, 3, 4096, 0), LineCost(None, 1.0, {}, 1, 0, 0)), rows, 17, (3, 1), 8, 2,
                    ("indices are not known",))


LINE = timeline()
DATA = ntff.encode(LINE, "ab" * 32, 10, 20)


def shown(loc):
    return None if loc is None else Loc(f"<{loc.file}>", loc.line, loc.function)


def test_every_field_comes_back():
    back = ntff.parse(DATA)
    assert (back.neff, back.execution, back.executions) == ("ab" * 32, 10, 20)
    rows = tuple(dataclasses.replace(r, location=shown(r.location)) for r in LINE.rows)
    lines = tuple(dataclasses.replace(c, location=shown(c.location)) for c in LINE.lines)
    assert back.timeline == dataclasses.replace(LINE, rows=rows, lines=lines)


def test_every_field_of_the_dataclasses_is_in_the_file():
    """A field that is added to them is a column of the file without a change here."""
    assert [name for name, _ in ntff._row_columns()] == [f.name for f in dataclasses.fields(Row)]
    stored = json.loads(unpack(ntff.NTFF, DATA).files[ntff.TIMELINE])
    assert set(stored) == {f.name for f in dataclasses.fields(Timeline)} - {"rows"}


def test_the_bytes_are_those_of_the_timeline():
    assert ntff.encode(timeline(), "ab" * 32, 10, 20) == DATA
    assert ntff.encode(timeline(seed=1), "ab" * 32, 10, 20) != DATA
    assert ntff.parse(DATA).name.startswith("n_") and len(ntff.parse(DATA).name) == 42


def test_places_of_this_machine_are_not_in_it(tmp_path):
    row = dataclasses.replace(LINE.rows[0], location=Loc(str(tmp_path / "secret" / "k.py"), 4, "f"))
    data = ntff.encode(dataclasses.replace(LINE, rows=(row,)), "")
    assert b"secret" not in data
    assert ntff.parse(data).timeline.rows[0].location == Loc("<k.py>", 4, "f")
    assert ntff.parse(data, str(tmp_path)).timeline.rows[0].location == Loc(str(tmp_path / "k.py"), 4, "f")


@pytest.mark.parametrize("name", ["../up.py", "/etc/passwd", "C:\\x", "a\0b", "sub/../../x"])
def test_a_place_cannot_lead_out_of_the_source_folder(tmp_path, name):
    archive = unpack(ntff.NTFF, DATA)
    columns = json.loads(archive.files[ntff.COLUMNS])
    columns["places"][0][0] = name
    data = pack(ntff.NTFF, archive.manifest, {**archive.files, ntff.COLUMNS: json.dumps(columns).encode()})
    try:
        rows = ntff.parse(data, str(tmp_path)).timeline.rows
    except NkiParseError:
        return
    assert all(r.location is None or r.location.file.startswith((f"{tmp_path}/sub", f"{tmp_path}/k.py", "<")) for r in rows)
    assert any(r.location is not None and r.location.file == f"<{name}>" for r in rows)


def test_no_rows():
    empty = dataclasses.replace(LINE, rows=())
    assert ntff.parse(ntff.encode(empty, "x")).timeline.rows == ()


def test_a_hundred_thousand_rows_stay_small():
    data = ntff.encode(timeline(100_000), "x")
    assert len(data) < 20 << 20
    assert len(ntff.parse(data).timeline.rows) == 100_000


def test_every_cut_and_changed_bit_is_found():
    rng = random.Random(4)
    for _ in range(600):
        at = rng.randrange(len(DATA))
        for data in (DATA[:at], DATA[:at] + bytes([DATA[at] ^ 1 << rng.randrange(8)]) + DATA[at + 1 :]):
            with pytest.raises(NkiParseError):
                ntff.parse(data)


def test_no_content_gets_further_than_an_error():
    """Fixed budget: damage under right checksums is an error, or a timeline that can be shown."""
    rng = random.Random(5)
    archive = unpack(ntff.NTFF, DATA)
    refused = 0
    for _ in range(600):
        name = rng.choice(list(archive.files))
        data = bytearray(archive.files[name])
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(data))
            kind = rng.randrange(4)
            if kind == 0:
                data[at] = rng.randrange(256)
            elif kind == 1:
                del data[at : at + rng.randrange(1, 9)]
            elif kind == 2:
                data[at:at] = rng.choice([b"1e999", b"NaN", b"-1", b"null", b'"', b"[", b"9" * 400, b"1e308", b"true", b"0.0"])
            else:
                data[at : at + 8] = rng.choice([b"\xff" * 8, bytes(8), b"\x7f" * 8])
        try:
            made = ntff.parse(pack(ntff.NTFF, archive.manifest, {**archive.files, name: bytes(data)}))
            json.dumps(made.summary(), allow_nan=False)
            json.dumps(rows_json(made.timeline), allow_nan=False)
        except NkiError:
            refused += 1
    assert refused > 300


@pytest.mark.parametrize("change", [{"target": "trn9"}, {"latency_us": 0.0}, {"latency_us": float("1e308")}, {"engines": {}}, {"extra": 1},
                                    {"rows": []}, {"programs": 1.5}, {"kernel": None}, {"lines": [{}]}, {"warnings": "x"}, {"target": ""}])
def test_timelines_that_are_none_are_refused(change):
    archive = unpack(ntff.NTFF, DATA)
    stored = {**json.loads(archive.files[ntff.TIMELINE]), **change}
    with pytest.raises(NkiParseError):
        ntff.parse(pack(ntff.NTFF, archive.manifest, {**archive.files, ntff.TIMELINE: json.dumps(stored).encode()}))


def test_files(tmp_path):
    (tmp_path / "t.ntff").write_bytes(DATA)
    assert ntff.load(tmp_path / "t.ntff").timeline.latency_us == LINE.latency_us
    (tmp_path / "n.ntff").write_bytes(compiled().neff)
    with pytest.raises(NkiParseError, match="opennki-neff"):
        ntff.load(tmp_path / "n.ntff")
    with pytest.raises(NkiFileError):
        ntff.load(tmp_path / "missing.ntff")


def test_rows_under_the_vendors_names():
    (first, *_) = rows_json(timeline_of(parse_neff(compiled().neff)))
    for key in ("start_ts", "end_ts", "duration_ns", "engine", "opcode", "operands", "pcore_idx", "evt_wait_time_ns", "nki_source_location",
                "tensor_elements", "raw_flops"):
        assert key in first
    assert first["nki_source_location"].startswith("kernels.py:")
