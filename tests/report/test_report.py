"""Reports: the data of the page, the trace for Perfetto, and the page in a browser."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import re
import shutil
import subprocess
import zlib
from pathlib import Path

import numpy as np
import pytest
from tests.report.timelines import OCCUPANCY, SOURCE, made_up

from opennki.report import chrome_trace, page
from opennki.report.data import document

BROWSER = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update",
         "--disable-sync", "--virtual-time-budget=4000", "--hide-scrollbars", "--window-size=1200,1400")


def column(part):
    return np.frombuffer(base64.b64decode(part["data"]), np.dtype(part["dtype"]).newbyteorder("<"))


def test_the_data_hold_every_row_by_lane_and_start():
    timeline = made_up(300)
    data = document(timeline)
    rows, lanes = data["rows"], column(data["rows"]["lane"])
    start, first, iteration = column(rows["start"]), column(rows["first"]), column(rows["iteration"])
    assert rows["count"] == 300 and sorted(column(rows["id"])) == list(range(300))
    assert all(a < b or (a == b and s <= t) for a, b, s, t in zip(lanes, lanes[1:], start, start[1:], strict=False))
    for at, number in enumerate(column(rows["id"])):
        row = timeline.rows[number]
        assert data["lanes"][lanes[at]] == row.queue and start[at] == row.start_ns
        assert data["ops"][column(rows["op"])[at]] == row.op
        assert tuple(iteration[first[at] : first[at + 1]]) == row.iteration
    place = data["places"][column(rows["place"])[0]]
    assert place["text"] == SOURCE.read_text(encoding="utf-8").splitlines()[place["line"] - 1].strip()
    assert place["file"] == "report/timelines.py", "the path of this machine is not in it"


def test_lanes_stand_in_the_order_of_the_engines():
    data = document(made_up(400))
    assert data["lanes"] == ["tensor", "vector", "scalar", "gpsimd", "sync", *(f"dma{n}" for n in range(16))]


def test_text_of_a_kernel_cannot_leave_its_place_in_the_page():
    text = "</script><script>alert(1)</script> {{SCRIPT}} <!-- & '\""
    made = page(dataclasses.replace(made_up(5, text), kernel="<b>{{DATA}}</b>"))
    assert made.count("<script") == 2 and made.count("</script") == 2
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', made, re.S)[1])
    assert data["texts"] == [text] and data["kernel"] == "<b>{{DATA}}</b>"


def test_the_page_loads_nothing():
    made = page(made_up(5))
    assert not re.search(r"\b(src|href)\s*=|@import|url\(|https?://(?!www\.w3\.org/2000/svg)", made)


def test_a_report_without_rows_or_lines():
    bare = dataclasses.replace(made_up(5), rows=(), lines=(), bounds={})
    assert document(bare)["rows"]["count"] == 0
    assert json.loads(chrome_trace(bare))["otherData"]["bound_by"] == "tensor"


def test_the_trace_has_an_event_for_each_row():
    timeline = dataclasses.replace(made_up(120), truncated=7)
    trace = json.loads(chrome_trace(timeline, OCCUPANCY))
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(events) == 120
    for event in events:
        row = timeline.rows[event["args"]["id"]]
        assert (event["name"], names[event["tid"]], event["ts"] * 1e3) == (row.op, row.queue, pytest.approx(row.start_ns))
        assert event["args"]["nki_source_location"] == f"report/timelines.py:{row.location.line}"
    assert [e["args"]["bytes"] for e in trace["traceEvents"] if e["ph"] == "C"] == [4096, 0, 2048]
    assert "7 further" in trace["otherData"]["truncated"]


# ---- in a browser ----
needs_browser = pytest.mark.skipif(BROWSER is None and not os.environ.get("CI"), reason="there is no Chromium here; CI installs it")


def browse(folder, timeline, *flags, part="", occupancy=OCCUPANCY):
    """Standard output of the browser on the report of a timeline."""
    assert BROWSER, "Chromium is needed here"
    path = folder / "report.html"
    path.write_text(page(timeline, occupancy), encoding="utf-8")
    command = [BROWSER, *FLAGS, f"--user-data-dir={folder / 'profile'}", *flags, path.as_uri() + part]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, cwd=folder).stdout


def pixels(path):
    """The colours of a PNG of 8-bit samples, as an array."""
    raw = Path(path).read_bytes()
    width, height, _, kind = *np.frombuffer(raw[16:24], ">u4"), raw[24], raw[25]
    body, at = b"", 8
    while at < len(raw):
        size, name = int.from_bytes(raw[at : at + 4], "big"), raw[at + 4 : at + 8]
        if name == b"IDAT":
            body += raw[at + 8 : at + 8 + size]
        at += size + 12
    samples = {2: 3, 6: 4}[kind]
    data = np.frombuffer(zlib.decompress(body), np.uint8).reshape(height, 1 + width * samples)
    lines = np.zeros((height + 1, width + 1, samples), np.uint8)
    for y, line in enumerate(data):
        now, above, got = lines[y + 1], lines[y], line[1:].reshape(width, samples)
        if line[0] == 0:
            now[1:] = got
        elif line[0] == 1:
            now[1:] = np.cumsum(got, axis=0, dtype=np.uint64)
        elif line[0] == 2:
            now[1:] = got + above[1:]
        else:
            for x in range(width):
                a, b, c = now[x].astype(int), above[x + 1].astype(int), above[x].astype(int)
                if line[0] == 3:
                    guess = (a + b) // 2
                else:
                    pa, pb, pc = abs(b - c), abs(a - c), abs(a + b - 2 * c)
                    guess = np.where((pa <= pb) & (pa <= pc), a, np.where(pb <= pc, b, c))
                now[x + 1] = (got[x] + guess) % 256
    return lines[1:, 1:, :3]


@needs_browser
def test_the_page_in_a_browser(tmp_path):
    browse(tmp_path, made_up(2000), f"--screenshot={tmp_path / 'shot.png'}")
    image = pixels(tmp_path / "shot.png")
    for engine in ((0x2F, 0x6F, 0xDE), (0x2B, 0x93, 0x48), (0xB8, 0x86, 0x0B), (0x0F, 0x8B, 0x8D)):  # those of page.css
        assert (np.abs(image.astype(int) - engine).max(axis=2) < 3).sum() > 200, engine


@needs_browser
def test_an_address_shows_a_part_of_the_timeline(tmp_path):
    text = browse(tmp_path, made_up(2000), "--dump-dom", part="#t=3000,3500")
    assert 'data-ready="yes"' in text
    assert "3 µs to 3.5 µs (500 ns)" in text
    drawn = int(re.search(r'data-drawn="(\d+)"', text)[1])
    assert 0 < drawn < 300, "rows outside of the part are not drawn"


@needs_browser
def test_an_address_shows_a_row(tmp_path):
    timeline = made_up(2000)
    assert timeline.rows[40].start_ns > 3500
    text = browse(tmp_path, timeline, "--dump-dom", part="#t=3000,3500&id=40")
    assert "timelines.py:" in text and "waited for" in text, "the details of the row are shown"
    assert "(500 ns)" in text and "3 µs to 3.5 µs" not in text, "the part moves to the row, as long as it was"


@needs_browser
@pytest.mark.slow
def test_a_hundred_thousand_rows(tmp_path):
    timeline = made_up(100_000)
    text = browse(tmp_path, timeline, "--dump-dom")
    assert (tmp_path / "report.html").stat().st_size < 15e6
    assert 'data-ready="yes"' in text
    assert int(re.search(r'data-drawn="(\d+)"', text)[1]) < 20_000, "what falls into one pixel is drawn once"
