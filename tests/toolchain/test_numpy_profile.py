"""nki.profile: every keyword, every file, every documented error."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

import opennki.dialects.neuronxcc as nki
from opennki.errors import NkiFileError, NkiValueError
from opennki.toolchain import neff, ntff
from tests.toolchain.kernels import A, B, add
from tests.toolchain.test_numpy_kernels import shout


def test_profile_writes_all_its_files(capsys):
    folder = Path("reports").absolute()
    result = nki.profile(add, working_directory=folder, save_neff_name="mine.neff", save_trace_name="mine.ntff", num_execs=20,
                         profile_nth=10)(A, B)
    np.testing.assert_array_equal(result, A + B)
    assert sorted(os.listdir(folder)) == ["json_reports", "mine.neff", "mine_exec_10.ntff", "mine_exec_20.ntff"]
    assert sorted(os.listdir(folder / "json_reports")) == ["mine_exec_10.json", "mine_exec_20.json"]
    assert f"Profile results are written to {folder}" in capsys.readouterr().out
    second = ntff.load(folder / "mine_exec_20.ntff")
    assert (second.execution, second.executions) == (20, 20) and second.neff == neff.load(folder / "mine.neff").digest
    import json

    (metrics,) = json.loads((folder / "json_reports" / "mine_exec_20.json").read_text()).values()
    assert metrics["total_time"] == pytest.approx(second.timeline.latency_us * 1e-6)


@pytest.mark.parametrize("keywords, traces", [
    ({}, ["profile.ntff"]), ({"profile_nth": 2}, ["profile_exec_2.ntff"]), ({"num_execs": 3}, ["profile.ntff", "profile_exec_2.ntff",
     "profile_exec_3.ntff"]), ({"num_execs": 2, "profile_nth": 5}, ["profile_exec_5.ntff"]),
    ({"num_execs": 7, "profile_nth": 3, "save_trace_name": "x"}, ["x_exec_3.ntff", "x_exec_6.ntff"]),
])
def test_which_executions_are_kept(keywords, traces):
    nki.profile(add, working_directory="reports", **keywords)(A, B)
    assert sorted(n for n in os.listdir("reports") if n.endswith(".ntff")) == traces


def test_profile_replaces_nothing_unless_it_is_told_to():
    nki.profile(add, working_directory="reports", num_execs=3)(A, B)
    Path("reports/notes.txt").write_text("mine")
    before = {p: p.read_bytes() for p in Path("reports").rglob("*") if p.is_file()}
    with pytest.raises(NkiFileError, match="overwrite=True"):
        nki.profile(add, working_directory="reports")(A, B)
    assert {p: p.read_bytes() for p in Path("reports").rglob("*") if p.is_file()} == before
    nki.profile(add, working_directory="reports", overwrite=True)(A * 2, B)
    assert sorted(os.listdir("reports")) == ["file.neff", "json_reports", "notes.txt", "profile.ntff"]
    assert os.listdir("reports/json_reports") == ["profile.json"]


def test_profile_needs_a_directory():
    for form in (lambda: nki.profile(add), lambda: nki.profile()(add), lambda: nki.profile(add, working_directory=None)):
        with pytest.raises(ValueError, match="Please specify working directory"):
            form()


@pytest.mark.parametrize("keywords", [{"profile_nth": 0}, {"num_execs": -1}, {"profile_nth": True}, {"num_execs": 1.5},
                                      {"save_neff_name": "../up.neff"}, {"save_trace_name": "/abs.ntff"}, {"save_trace_name": ".."}])
def test_profile_keywords_that_are_wrong(keywords):
    with pytest.raises(NkiValueError):
        nki.profile(add, working_directory="reports", **keywords)


def test_a_profiler_command_that_fails(monkeypatch):
    monkeypatch.setenv("OPENNKI_NEURON_PROFILE", shout("np", "import sys; print('no device', file=sys.stderr); sys.exit(4)"))
    with pytest.raises(subprocess.CalledProcessError, match="no device"):
        nki.profile(add, working_directory="reports")(A, B)
    monkeypatch.setenv("OPENNKI_NEURON_PROFILE", "/nowhere/neuron-profile")
    with pytest.raises(NkiFileError, match="OPENNKI_NEURON_PROFILE"):
        nki.profile(add, working_directory="reports2")(A, B)


def test_the_profiler_command_is_the_vendors(monkeypatch):
    seen = os.path.abspath("seen")
    code = (f"import sys; open({seen!r}, 'a').write(' '.join(sys.argv[1:]) + chr(10))\n"
            "if sys.argv[1] == 'capture': open('profile_exec_2.ntff', 'w').write('x')")
    monkeypatch.setenv("OPENNKI_NEURON_PROFILE", shout("np", code))
    nki.profile(add, working_directory="reports", profile_nth=2)(A, B)
    first, second = Path(seen).read_text().splitlines()
    assert first.startswith("capture -n file.neff -s profile.ntff --num-exec 2")
    assert second == "view -n file.neff --output-format summary-json -s profile_exec_2.ntff --output-file json_reports/profile_exec_2.json"
