"""`opennki sweep`: points that fail, crash or hang are rows, what is done is not done again, and the tables say what was found."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree

import pytest

from opennki import settings
from opennki.errors import NkiError, NkiFileError, NkiValueError
from opennki.tools.sweep import tables
from opennki.tools.sweep.plan import Point, Setup, axes_of, points_of
from opennki.tools.sweep.run import Options, sweep
from opennki.tools.sweep.store import Store

KERNELS = """
import os, signal, sys, time
import neuronxcc.nki as nki
import neuronxcc.nki.language as nl

print("text of the script on standard output")


@nki.jit
def scale(x, factor=2.0, way="", tile=128):
    if os.environ.get("COUNT"):
        with open(os.environ["COUNT"], "a") as file:
            file.write(f"{x.shape[0]} {way}\\n")
    if way == "hang":
        while True:
            time.sleep(0.01)
    if way == "kill":
        print("what it said last")
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "leave":
        os._exit(7)
    if way == "exit":
        sys.exit("no")
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(x.shape[0] // tile):
        rows = nl.ds(i * tile, tile)
        nl.store(out[rows], nl.load(x[rows]) * factor)
    nl.device_print("x", nl.load(x[0:1, 0:1]))
    return out


@nki.jit
def scale_grid(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    rows = nl.ds(nl.program_id(0) * 128, 128)
    nl.store(out[rows], nl.load(x[rows]))
    return out
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "kernels.py"
    path.write_text(KERNELS, encoding="utf-8")
    return str(path)


def run(script, grid, *args, kernel="scale", target="trn2", **options):
    options = {"out": os.path.join(os.path.dirname(script), "out"), "jobs": 2, "limit": 60.0, "plot": False, **options}
    text, status = sweep(script, kernel, args, target, grid, Options(**options))
    with open(os.path.join(options["out"], "results.csv"), encoding="utf-8", newline="") as file:
        return text, status, list(csv.DictReader(file))


@pytest.mark.slow
def test_points_that_fail_crash_or_hang_are_rows(script):
    text, status, rows = run(script, ["way=a,hang,kill,leave,exit,b", "tile=128,256"], "256x64:float32", limit=4.0)
    assert status == 0 and len(rows) == 12 and [int(r["point"]) for r in rows] == list(range(12))
    ends = {(r["way"], r["tile"]): (r["status"], r["error"]) for r in rows}
    for tile in ("128", "256"):
        assert ends["hang", tile] == ("timeout", "took longer than 4 s")
        assert ends["kill", tile] == ("crashed", "the process was ended by SIGKILL: what it said last")
        assert ends["leave", tile] == ("crashed", "the process ended with status 7")
        assert ends["exit", tile][0] == "error" and "no" in ends["exit", tile][1]
    for way in ("a", "b"):
        assert ends[way, "128"] == ("ok", "")
        assert ends[way, "256"][0] == "error" and "kernels.py:28" in ends[way, "256"][1] and "256 partitions" in ends[way, "256"][1]
    good = next(r for r in rows if r["status"] == "ok")
    assert float(good["latency_us"]) > 1 and float(good["wall_s"]) > 0 and int(good["peak_bytes"]) > 1 << 20 and good["stage"] == "end"
    assert int(good["hbm_read_bytes"]) >= 256 * 64 * 4 and int(good["sbuf_bytes_per_partition"]) >= 256
    assert "2 ok" in text and "2 timeout" in text and "4 crashed" in text and "4 error" in text


def test_what_is_done_is_not_done_again(script, monkeypatch, tmp_path, capsys):
    count = tmp_path / "count"
    monkeypatch.setenv("COUNT", str(count))
    run(script, ["rows=128,256"], "{rows}x8:float32", jobs=1)
    assert count.read_text().split() == ["128", "256"]
    _, _, rows = run(script, ["rows=128..512+128"], "{rows}x8:float32", jobs=1)
    assert count.read_text().split() == ["128", "256", "384", "512"]
    assert "2 of 4 points are done already" in capsys.readouterr().err
    assert [r["rows"] for r in rows] == ["128", "256", "384", "512"] and all(r["status"] == "ok" for r in rows)
    with open(script, "a", encoding="utf-8") as file:  # another script: other results
        file.write("\n# changed\n")
    run(script, ["rows=128"], "{rows}x8:float32", jobs=1)
    assert count.read_text().split() == ["128", "256", "384", "512", "128"]


def test_points_are_tried_again_when_asked(script, monkeypatch, tmp_path):
    count = tmp_path / "count"
    monkeypatch.setenv("COUNT", str(count))
    for retry, times in ((False, 2), (False, 2), (True, 3)):
        _, status, rows = run(script, ["way=a,exit"], "128x8:float32", jobs=1, retry=retry)
        assert status == 0 and [r["status"] for r in rows] == ["ok", "error"]
        assert len(count.read_text().splitlines()) == times


@pytest.mark.slow
def test_a_sweep_that_is_killed_goes_on_where_it_was(script, tmp_path):
    count, out = tmp_path / "count", tmp_path / "out"
    command = [sys.executable, "-m", "opennki", "sweep", f"{script}:scale", "--grid", "rows=128..1280+128", "--arg", "{rows}x8:float32",
               "--target", "trn1", "--out", str(out), "-j", "1", "--no-plot", "--no-parquet"]  # fmt: skip
    environment = {**settings.own_environment(), "COUNT": str(count)}
    first = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    until = time.monotonic() + 60
    while not (out / "results.jsonl").exists() or len((out / "results.jsonl").read_bytes().splitlines()) < 3:
        assert time.monotonic() < until and first.poll() is None
        time.sleep(0.005)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    kept = len((out / "results.jsonl").read_bytes().splitlines())
    with open(out / "results.jsonl", "ab") as file:  # as if it had been killed while it wrote
        file.write(b'{"key":"torn')
    before = len(count.read_text().splitlines())
    again = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert again.returncode == 0, again.stderr
    assert f"{kept} of 10 points are done already" in again.stderr and "[10/10] 10 ok" in again.stderr
    assert before <= kept + 2 and len(count.read_text().splitlines()) - before <= 10 - kept + 1
    with open(out / "results.csv", encoding="utf-8", newline="") as file:
        assert [r["rows"] for r in csv.DictReader(file)] == [str(128 * n) for n in range(1, 11)]


def test_targets_grids_names_and_dtypes(script):
    _, status, rows = run(script, ["kind=_grid", "target=trn1,trn2", "launch=1,2", "dtype=float32,bfloat16"], "256x32:{dtype}",
                          kernel="scale{kind}", target=None, checks="off")  # fmt: skip
    assert status == 0 and [r["status"] for r in rows] == ["ok"] * 8
    assert {(r["target"], r["modelled_target"]) for r in rows} == {("trn1", "trn1"), ("trn2", "trn2")}
    half = {(r["target"], r["launch"]): int(r["hbm_read_bytes"]) for r in rows if r["dtype"] == "bfloat16"}
    assert half["trn1", "2"] == 2 * half["trn1", "1"] == 256 * 32 * 2


def test_without_a_run_nothing_is_run(script):
    _, _, rows = run(script, [], "128x8:float32", checks="none")
    assert rows[0]["status"] == "ok" and "run_s" not in rows[0] and float(rows[0]["latency_us"]) > 0


@pytest.mark.parametrize("text, rule", [("rows", "NAME=VALUE"), ("1x=2", "NAME=VALUE"), ("n=", "at least one"), ("n=4..8*1", "factor"),
                                        ("n=0..8*2", "factor"), ("n=1..9999999+1", "at most")])  # fmt: skip
def test_parameters_that_cannot_be(text, rule):
    with pytest.raises(NkiValueError, match=rule):
        axes_of([text])


def test_values():
    assert axes_of(["a=1,(2, 3),'x,y'", "n=2..17*2", "m=1..5+2"]) == {
        "a": ["1", "(2, 3)", "'x,y'"], "n": ["2", "4", "8", "16"], "m": ["1", "3", "5"]}  # fmt: skip
    with pytest.raises(NkiValueError, match="once"):
        axes_of(["a=1", "a=2"])


def test_points():
    setup = Setup("s.py", "digest")
    axes = axes_of(["n=1,2", "tile=8,16", "target=trn1", "launch=(2, 2),4"])
    points = points_of(setup, "k{n}", ["{n}x{n}:int8", "{0}"], None, axes)
    assert len(points) == 8 and len({p.key for p in points}) == 8
    last = points[-1]
    assert (last.attribute, last.args, last.target, last.grid) == ("k2", ("2x2:int8", "{0}", "tile=16"), "trn1", "4")
    assert points[0].grid == "2, 2"
    assert points_of(setup, "k{n}", ["{n}x{n}:int8", "{0}"], None, axes)[3].key == points[3].key
    assert points_of(Setup("s.py", "other"), "k{n}", ["{n}x{n}:int8", "{0}"], None, axes)[3].key != points[3].key
    with pytest.raises(NkiValueError, match=r"--grid m=\.\.\."):
        points_of(setup, "k", ["{m}"], None, axes)
    with pytest.raises(NkiValueError, match="target is given once"):
        points_of(setup, "k", [], "trn2", axes)


def test_a_script_that_cannot_be_loaded_ends_the_sweep(script):
    with open(script, "a", encoding="utf-8") as file:
        file.write("raise RuntimeError('not today')\n")
    with pytest.raises(NkiError, match="not today"):
        run(script, ["rows=128,256"], "{rows}x8:float32")


def test_a_folder_has_one_sweep_and_bad_lines_are_left_out(tmp_path):
    folder = str(tmp_path / "a")
    store = Store(folder)
    with pytest.raises(NkiFileError, match="another sweep"):
        Store(folder)
    store.add("one", {"status": "ok"})
    store.close()
    lines = [b"no json", b"[1]", b'{"key":1,"status":"ok"}', b'{"key":"x","status":"fine"}', b'{"key":"x","status":"ok","z":[]}',
             b"[" * 5000, b"x" * (3 << 20), b'{"key":"two","status":"error","error":"e"}', b'{"key":"three","status":"ok"']  # fmt: skip
    with open(store.path, "ab") as file:
        file.write(b"\n".join(lines))
    again = Store(folder)
    assert sorted(again.rows) == ["one", "two"]
    again.add("four", {"status": "timeout"})
    again.close()
    last = Store(folder)
    assert sorted(last.rows) == ["four", "one", "two"]
    last.close()
    (tmp_path / "file").touch()
    with pytest.raises(NkiError):
        Store(str(tmp_path / "file"))


ROWS = [{"status": "ok", "latency_us": 2.5, "macs": 7}, {"status": "ok", "latency_us": 9.0, "macs": 1 << 40},
        {"status": "crashed", "error": "gone, \"far\"\n away"}]  # fmt: skip
POINTS = [Point(n, {"n": str(8 << n), "dtype": "bf16"}, "k", (), None, "", str(n)) for n in range(3)]


def test_csv(tmp_path):
    rows = tables.rows_of(POINTS, {str(n): {"key": str(n), **row} for n, row in enumerate(ROWS)})
    tables.write_csv(tmp_path / "t.csv", tables.columns(POINTS, rows), rows)
    with open(tmp_path / "t.csv", encoding="utf-8", newline="") as file:
        got = list(csv.DictReader(file))
    assert list(got[0]) == ["point", "n", "dtype", "status", "latency_us", "macs", "warnings", "error"]
    assert [g["error"] for g in got] == ["", "", ROWS[2]["error"]] and got[1]["macs"] == str(1 << 40)


def needs(name):
    """CI installs the libraries: there, one that is missing fails."""
    missing = importlib.util.find_spec(name) is None
    return pytest.mark.skipif(missing and not os.environ.get("CI"), reason=f"{name} is not installed")


@needs("pyarrow")
def test_parquet(tmp_path):
    import pyarrow.parquet as parquet

    rows = tables.rows_of(POINTS, {str(n): {"key": str(n), **row} for n, row in enumerate(ROWS)})
    tables.write_parquet(tmp_path / "t.parquet", tables.columns(POINTS, rows), rows)
    table = parquet.read_table(tmp_path / "t.parquet")
    assert table.column("n").to_pylist() == [8, 16, 32] and table.column("latency_us").to_pylist() == [2.5, 9.0, None]
    assert table.column("error").to_pylist() == [None, None, ROWS[2]["error"]] and str(table.schema.field("macs").type) == "int64"


@needs("matplotlib")
def test_plot(tmp_path):
    rows = tables.rows_of(POINTS, {str(n): {"key": str(n), **row} for n, row in enumerate(ROWS)})
    axes = {"n": ["8", "16", "32"], "dtype": ["bf16"]}
    assert tables.write_plot(tmp_path / "a.svg", axes, rows, "a <title> & more")
    assert tables.write_plot(tmp_path / "b.svg", axes, rows, "a <title> & more")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    text = "".join(ElementTree.parse(tmp_path / "a.svg").getroot().itertext())
    assert "a <title> & more" in text and "latency (us, estimate)" in text and "16" in text
    assert tables.write_plot(tmp_path / "c.svg", {"dtype": ["bf16"]}, rows[:1], "t")
    assert not tables.write_plot(tmp_path / "d.svg", axes, rows[2:], "t") and not (tmp_path / "d.svg").exists()


@pytest.mark.parametrize("what, module, name", [("parquet", "pyarrow", "pyarrow"), ("plot", "matplotlib.figure", "matplotlib")])
def test_a_library_that_is_missing_is_named(monkeypatch, what, module, name):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(NkiValueError, match=f"{name} is not installed") as caught:
        tables.library(what, module)
    assert "opennki[sweep]" in caught.value.fix


def test_the_command(script, tmp_path):
    command = [sys.executable, "-m", "opennki", "sweep", f"{script}:scale", "--grid", "rows=128,256", "--arg", "{rows}x8:float32",
               "--target", "trn1", "--out", str(tmp_path / "out"), "--no-plot", "--no-parquet"]  # fmt: skip
    done = subprocess.run(command, env=settings.own_environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "2 points: 2 ok" in done.stdout and "[2/2] 2 ok" in done.stderr, done.stdout + done.stderr
    assert "rows=128" in done.stdout and "no device was measured" in done.stdout
    lines = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    assert [json.loads(line)["status"] for line in lines] == ["ok", "ok"]
    for bad, text in ((["--checks", "some"], "one of full"), (["--grid", "x"], "NAME=VALUE"), (["--parquet"], "pyarrow")):
        if bad == ["--parquet"] and tables.has("parquet"):
            continue
        done = subprocess.run([*command[:-1], *bad], env=settings.own_environment(), capture_output=True, text=True, timeout=100)
        assert done.returncode in (1, 2) and text in done.stderr, done.stderr
