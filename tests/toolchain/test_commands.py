"""The commands neuron-bench and neuron-profile, and `opennki bench` and `opennki profile`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from opennki import settings
from opennki.cli import app
from opennki.toolchain import bench, neuron_profile, ntff
from tests.toolchain.kernels import A, B, compiled

KERNEL = '''
import neuronxcc.nki.language as nl


def add(a, b):
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.load(a) + nl.load(b))
    return out
'''


@pytest.fixture(autouse=True)
def file_neff(alone):
    (alone / "file.neff").write_bytes(compiled().neff)


def profile(*words):
    return neuron_profile.main(list(words))


def test_bench_prints_the_latency(capsys):
    assert bench.main(["exec", "file.neff"]) == 0
    out = capsys.readouterr().out
    assert "add on trn1" in out and "p50" in out and "estimate" in out
    assert bench.main(["exec", "file.neff", "--iters", "20", "-w", "3", "--output-format", "json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["warmup"] == 3 and made["iters"] == 20 and set(made["nc_latency_us"]) == {f"p{p}" for p in bench.PERCENTILES}
    assert bench.main(["exec", "file.neff", "--iters", "1", "--output-format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["nc_latency_us"] is None


@pytest.mark.parametrize("words, status", [([], 2), (["exec"], 2), (["exec", "file.neff", "--iters", "x"], 2),
                                           (["exec", "missing.neff"], 1), (["--help"], 0),
                                           (["exec", "--help"], 0), (["--version"], 0), (["run"], 2)])
def test_bench_says_no(words, status, capsys):
    assert bench.main(words) == status
    out, err = capsys.readouterr()
    assert (out if status == 0 else err) and "Traceback" not in err


def test_capture_and_view(capsys):
    assert profile("capture", "-n", "file.neff") == 0
    assert profile("capture", "-n", "file.neff", "-s", "many.ntff", "--num-exec", "6", "--profile-nth-exec", "3") == 0
    assert sorted(n for n in os.listdir() if n.endswith("ntff")) == ["many_exec_3.ntff", "many_exec_6.ntff", "profile.ntff"]
    capsys.readouterr()
    assert profile("view", "-n", "file.neff", "-s", "profile.ntff", "--output-format", "summary-json") == 0
    (name, metrics), = json.loads(capsys.readouterr().out).items()
    assert name == ntff.load("profile.ntff").name and metrics["total_time"] > 0 and "hfu_estimated_percent" in metrics
    assert profile("view", "-s", "profile.ntff", "--output-format", "summary-text") == 0
    assert "total_time" in capsys.readouterr().out
    assert profile("view", "-s", "profile.ntff", "--output-format", "json", "--output-file", "p.json") == 0
    made = json.loads(Path("p.json").read_text())
    assert made["summary"][0] == metrics and len(made["instruction"]) == len(ntff.load("profile.ntff").timeline.rows)
    assert profile("view", "-d", ".", "--output-format", "summary-json") == 0
    assert len(json.loads(capsys.readouterr().out.partition("\n")[2])) == 3


def test_view_writes_a_report_and_a_trace_for_perfetto(capsys):
    profile("capture", "-n", "file.neff")
    assert profile("view", "-n", "file.neff", "-s", "profile.ntff") == 0
    text = Path("profile.html").read_text()
    assert "add on trn1" in text and "http://" not in text.replace("http://www.w3.org", "")
    assert profile("view", "-s", "profile.ntff", "--output-format", "perfetto") == 0
    assert json.loads(Path("profile.trace.json").read_text())["traceEvents"]
    assert profile("view", "-s", "profile.ntff", "--output-format", "db", "--output-file", "x.html") == 0
    assert Path("x.html").read_text() == text


def test_capture_runs_on_inputs_that_are_given():
    np.save("a.npy", A)
    np.save("b.npy", B)
    assert profile("capture", "-n", "file.neff", "--save-output-npy", "a", "a.npy", "b", "b.npy") == 0
    np.testing.assert_array_equal(np.load("output0.npy"), A + B)
    assert profile("capture", "-n", "file.neff", "--save-output") == 0
    assert Path("output0.npy").read_bytes() == bytes(A.nbytes)


def test_capture_on_wrong_inputs(capsys):
    np.save("a.npy", A[:3])
    Path("text.npy").write_text("hello")
    np.save("objects.npy", np.array([{}]), allow_pickle=True)
    for words, message in ((["a", "a.npy"], "shape"), (["c", "a.npy"], "no input"), (["a", "text.npy"], "NumPy"),
                           (["a", "missing"], "No such"), (["a", "objects.npy"], "NumPy")):
        assert profile("capture", "-n", "file.neff", *words) == 1
        assert message in capsys.readouterr().err and not os.path.exists("profile.ntff")
    assert profile("capture", "-n", "file.neff", "--ignore-exec-errors", "a", "a.npy") == 0
    assert "warning: the run failed" in capsys.readouterr().err and os.path.exists("profile.ntff")


def test_a_trace_of_another_neff_is_refused(capsys):
    Path("other.ntff").write_bytes(ntff.encode(ntff.parse(ntff.encode(_timeline(), "0" * 64)).timeline, "0" * 64))
    assert profile("view", "-n", "file.neff", "-s", "other.ntff") == 1
    assert "another NEFF" in capsys.readouterr().err


def _timeline():
    from tests.toolchain.test_ntff import timeline

    return timeline(3)


@pytest.mark.parametrize("words, status", [
    ([], 2), (["capture"], 2), (["view"], 2), (["capture", "-n", "missing.neff"], 1), (["view", "-s", "missing.ntff"], 1),
    (["view", "-s", "file.neff"], 1), (["capture", "-n", "file.neff", "--num-exec", "0"], 2), (["capture", "-n", "file.neff", "a"], 2),
    (["capture", "-n", "file.neff", "-s", "no/such/folder.ntff"], 1), (["view", "-s", "file.neff", "--output-format", "pdf"], 2),
    (["capture", "-n", "file.neff", "--no-such-option"], 2), (["--help"], 0), (["capture", "--help"], 0), (["view", "--help"], 0),
    (["--version"], 0), (["view", "--terminology"], 0), (["view", "-s", "a", "-s", "b", "--output-file", "c"], 2),
])
def test_profile_says_no(words, status, capsys):
    assert profile(*words) == status
    out, err = capsys.readouterr()
    assert (out if status == 0 else err) and "Traceback" not in err


def test_an_internal_error_has_its_own_status(monkeypatch, capsys):
    monkeypatch.setattr(neuron_profile, "timeline_of", lambda neff: 1 / 0)
    assert profile("capture", "-n", "file.neff") == 70
    assert "internal error: ZeroDivisionError" in capsys.readouterr().err


def test_the_console_scripts_are_there():
    for module, words in (("bench", ["exec", "file.neff"]), ("neuron_profile", ["capture", "-n", "file.neff"])):
        done = subprocess.run([sys.executable, "-m", f"opennki.toolchain.{module}", *words], env=settings.own_environment(),
                              capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for name in ("opennki-neuronx-cc", "opennki-neuron-bench", "opennki-neuron-profile"):
        module, _, function = text.partition(f'{name} = "')[2].partition('"')[0].partition(":")
        assert callable(getattr(__import__(module, fromlist=[function]), function))


def invoke(*words):
    return CliRunner().invoke(app, list(words))


def test_opennki_bench():
    Path("k.py").write_text(KERNEL)
    done = invoke("bench", "k.py:add", "--args", "128x512:float32, 128x512:float32", "--target", "trn2")
    assert done.exit_code == 0, done.output
    assert "add on trn2" in done.output and "bound by" in done.output and "estimate" in done.output
    done = invoke("bench", "k.py:add", "--args", "128x512:float32, 128x512:float32", "--json")
    assert json.loads(done.stdout)["latency_us"] > 0


def test_opennki_profile():
    Path("k.py").write_text(KERNEL)
    done = invoke("profile", "k.py:add", "--args", "128x512:float32, 128x512:float32", "-o", "out")
    assert done.exit_code == 0, done.output
    assert sorted(os.listdir("out")) == ["file.neff", "profile.ntff", "report.html", "summary.json", "trace.json"]
    assert "nl.load(a)" in Path("out/report.html").read_text()
    assert profile("view", "-n", "out/file.neff", "-s", "out/profile.ntff", "--output-format", "summary-json") == 0


def test_opennki_bench_of_a_wrong_call():
    Path("k.py").write_text(KERNEL)
    assert invoke("bench", "k.py:add", "--args", "128x512:float32").exit_code == 1
    assert invoke("bench", "k.py:nothing").exit_code == 2
    Path("blocked").write_text("mine")
    done = invoke("profile", "k.py:add", "--args", "4x4:float32, 4x4:float32", "-o", "blocked")
    assert done.exit_code == 1 and Path("blocked").read_text() == "mine"
