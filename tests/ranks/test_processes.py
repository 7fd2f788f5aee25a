"""Ranks in several processes: the same bits as in one, and what happens when they wait for ever, fail or are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

import opennki
import opennki.dropin
import neuronxcc.nki as nki
import neuronxcc.nki.distributed as dist
import neuronxcc.nki.language as nl
import neuronxcc.nki.nccl as nccl
from opennki import settings
from opennki.errors import NkiError, NkiValueError
from opennki.interpret import schedule
from opennki.ranks import mesh


@nki.jit(platform_target="trn2")
def mixed(x, way):
    total, ring, sent = (nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm) for _ in range(3))
    gathered = nl.ndarray((x.shape[0] * 2, x.shape[1]), dtype=x.dtype, buffer=nl.shared_hbm)
    for _ in nl.sequential_range(3):
        if way != "skip":
            dist.all_reduce([x], [total], np.add)
        nccl.collective_permute_implicit(dst=ring, src=x)
    nccl.all_gather([x], [gathered], None, [[0, 5], [1, 4], [2, 3]], 0)
    nccl.send([x], peer_id=[1, 2, 3, 4, 5, 0])
    nccl.recv([sent], peer_id=[5, 0, 1, 2, 3, 4])
    if way == "skip":
        nl.store(total, nl.load(x))
    if way == "wrong":
        nccl.send([x], peer_id=9)
    return total, ring, gathered, sent


X = [np.random.default_rng(r).standard_normal((8, 16), np.float32) for r in range(6)]


def run(way="", at=4, **options):
    return opennki.launch(mixed, 6, lambda r: (X[r], way if r == at else ""), **options)


@pytest.mark.parametrize("processes", [2, 3, 6, 9])
def test_results_do_not_depend_on_processes(processes):
    for one, many in zip(run(), run(processes=processes), strict=True):
        for a, b in zip(one, many, strict=True):
            np.testing.assert_array_equal(a, b)


def test_arrays_that_are_written_come_back():
    def kernel(x: "nt.mutable_tensor"):  # noqa: F821, UP037
        dist.all_reduce([x], [x], np.add)
        return x

    x = [np.full((4, 4), float(r), np.float32) for r in range(4)]
    opennki.launch(nki.jit(kernel, platform_target="trn2"), 4, lambda r: (x[r],), processes=2)
    assert all((a == 6).all() for a in x)


@pytest.mark.parametrize("processes", [2, 6])
def test_a_wait_for_ever_ends_with_the_lines_of_all(processes):
    with pytest.raises(NkiError) as caught:
        run("skip", processes=processes)
    text = str(caught.value)
    assert "6 ranks wait for ever" in text
    assert "rank 0 waits in rank_all_reduce" in text and "rank 4 waits in rank_ring" in text and "for rank 4" in text
    assert text.count("test_processes.py:") == 7


@pytest.mark.parametrize("at", [0, 5])
def test_an_error_of_one_rank_ends_all(at):
    with pytest.raises(NkiValueError, match=rf"rank {at}: peer_id=9") as caught:
        run("wrong", at, processes=3)
    assert "test_processes.py:" in str(caught.value)


@pytest.mark.parametrize("options", [{}, {"processes": 3}, {"processes": 3, "checks": "off"}], ids=str)
@pytest.mark.parametrize("at", [0, 2])
def test_an_index_outside_of_its_tensor_is_one_in_any_process(at, options):
    def kernel(x, rows):
        out, mine = (nl.ndarray((2, 2), dtype=x.dtype, buffer=nl.shared_hbm) for _ in range(2))
        nl.store(mine, nl.load(x[nl.load(rows), nl.arange(2)[None, :]]))
        dist.all_reduce([mine], [out], np.add)
        return out

    rows = [np.array([[0], [9 if r == at else 1]], np.int32) for r in range(3)]
    with pytest.raises(IndexError) as caught:
        opennki.launch(nki.jit(kernel, platform_target="trn2"), 3, lambda r: (np.ones((4, 2), np.float32), rows[r]), **options)
    report = caught.value if isinstance(caught.value, NkiError) else caught.value.__cause__
    assert report.code == "err_tensor_access_out_of_bound" and f"rank {at}: " in str(report), report
    assert "test_processes.py:" in str(report) and "index is 9" in str(report)


def test_an_error_that_comes_when_all_else_is_done(monkeypatch):
    """The first process has ended its ranks and waits for the others; it must not go on before it knows what their message says."""
    failed = schedule.Scheduler.failed

    def late(self, member, error):
        if member[0] < 0:
            time.sleep(0.3)
        failed(self, member, error)

    monkeypatch.setattr(schedule.Scheduler, "failed", late)
    with pytest.raises(NkiValueError, match="rank 5: peer_id=9"):
        run("wrong", 5, processes=3)


def test_a_process_that_is_killed_is_named(monkeypatch):
    advance = schedule.Scheduler._advance
    parent = os.getpid()

    def dying(self, member):
        if member[0] == 5 and os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        advance(self, member)

    monkeypatch.setattr(schedule.Scheduler, "_advance", dying)
    with pytest.raises(NkiError, match="the process of ranks 4, 5 has gone"):
        run(processes=3)
    monkeypatch.undo()
    run(processes=3)


@pytest.mark.parametrize("options, text", [
    ({"engine": "mpi"}, "engine='mpi'"), ({"processes": 0}, "processes=0"), ({"engine": "tcp"}, "outside of `opennki launch`"),
    ({"engine": "gloo"}, "not initialised"), ({"order": "random"}, "order"),
])  # fmt: skip
def test_options_that_cannot_be(options, text):
    with pytest.raises(NkiError, match=text):
        run(**options)


SCRIPT = """
    import os, signal, sys
    import numpy as np
    import opennki
    import neuronxcc.nki as nki, neuronxcc.nki.language as nl, neuronxcc.nki.distributed as dist
    from opennki import settings

    @nki.jit(platform_target="trn2")
    def kernel(x, way):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        if way == "skip":
            nl.store(out, nl.load(x))
        else:
            dist.all_reduce([x], [out], np.add)
        return out

    way, me = sys.argv[1], settings.current().rendezvous.process
    for step in range(2):
        if way == "die" and me == 1 and step:
            os.kill(os.getpid(), signal.SIGKILL)
        got = opennki.launch(kernel, 5, lambda r: (np.full((2, 2), r, np.float32), way if r == 3 and step else ""))
        for rank, value in enumerate(got):
            assert value is None or (value == 10).all()
    sys.stdout.write(f"process {me} has {[r for r, g in enumerate(got) if g is not None]}\\n")
"""


@pytest.mark.slow
@pytest.mark.parametrize("way, status, text", [
    ("", 0, "process 1 has [3, 4]"), ("skip", 1, "4 ranks wait for ever"), ("die", 1, "process 1 was ended by SIGKILL"),
])  # fmt: skip
def test_a_script_in_several_processes(tmp_path, way, status, text):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    command = [sys.executable, "-m", "opennki", "launch", "-n", "2", str(script), way]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, text in done.stdout + done.stderr) == (status, True), done.stdout + done.stderr
    if way == "die":
        assert "the process of ranks 3, 4 has gone" in done.stderr


def test_processes_end_with_what_started_them(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, time\nos.write(1, f'{os.getpid()}\\n'.encode())\ntime.sleep(100)\n", encoding="utf-8")
    command = [sys.executable, "-m", "opennki", "launch", "-n", "2", str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        started = [int(launcher.stdout.readline()) for _ in range(2)]
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(timeout=60) == 143
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_strangers_are_kept_out():
    point = mesh.MeetingPoint(2, "secret")
    threading.Thread(target=point.serve, daemon=True).start()
    with pytest.raises(NkiError, match="could not reach"):
        mesh.join(0, 2, point.address, "guess")
    made = {}
    other = threading.Thread(target=lambda: made.update({1: mesh.join(1, 2, point.address, "secret")}))
    other.start()
    first = mesh.join(0, 2, point.address, "secret")
    other.join()
    first.close()
    made[1].close()


@pytest.mark.parametrize("text", ["1/2@host:1#x y", "2/2@host:1#x", "0/2@host:99999#x", "0/2@:1#x", "x"])
def test_meeting_points_that_cannot_be(monkeypatch, text):
    monkeypatch.setenv("OPENNKI_RENDEZVOUS", text)
    with pytest.raises(settings.SettingsError):
        settings.current()
