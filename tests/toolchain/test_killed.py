"""Processes that are killed at the worst moment: the next run works, nothing is corrupt, two processes take turns."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import opennki.dialects.neuronxcc as nki
from opennki import settings
from opennki.toolchain import neff, ntff
from tests.toolchain.kernels import A, B, add

ROOT = str(Path(__file__).parents[2])
SCRIPT = """
import sys, time
import numpy as np
sys.path.insert(0, {root!r})
import opennki.dialects.neuronxcc as nki
from tests.toolchain.kernels import A, B, add, into
{body}
"""


def start(body, name="child"):
    """A process of its own that runs a program."""
    path = Path(f"{name}.py")
    path.write_text(SCRIPT.format(root=ROOT, body=body))
    env = {**settings.own_environment(), "PYTHONWARNINGS": "ignore", "NEURON_PLATFORM_TARGET_OVERRIDE": "trn1"}
    return subprocess.Popen([sys.executable, str(path)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            start_new_session=True)


def kill(process):
    """Kill a process and what it has started, with no chance to clean up."""
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def works():
    """A run in this process after all that."""
    np.testing.assert_array_equal(nki.baremetal(add, save_neff_name="file.neff", save_trace_name="t.ntff")(A, B), A + B)
    assert neff.load("file.neff").digest == ntff.load("t.ntff").neff


SLOW_WRITE = """
import os
from opennki.toolchain import files
real = os.replace
def slow(a, b):
    print("at", os.path.basename(b), flush=True)
    time.sleep(60)
os.replace = slow
"""


@pytest.mark.parametrize("where", ["penguin.py", "the cache"])
def test_killed_while_a_file_is_written(where):
    """Stopped between the writing of a file and its name: what is under the name is the old content or nothing."""
    if where == "the cache":
        body = SLOW_WRITE.replace('print("at"', 'if not str(b).endswith(".bin"): return real(a, b)\n    print("at"')
    else:
        body = SLOW_WRITE
    process = start(body + "nki.baremetal(add)(A, B)")
    assert process.stdout.readline().startswith("at "), process.stderr.read()
    kill(process)
    cache = Path(os.environ["OPENNKI_CACHE_DIR"], "neff")
    assert not list(cache.glob("*.bin"))
    works()
    assert len(list(cache.glob("*.bin"))) == 1


def test_killed_while_it_compiles(monkeypatch):
    hold = Path("hold").absolute()
    hold.write_text(f"#!{sys.executable}\nimport time\nopen('file.neff', 'w').write('half')\nopen({str(hold)!r} + '.started', 'w')\n"
                    "time.sleep(60)")
    hold.chmod(0o755)
    monkeypatch.setenv("OPENNKI_NEURONX_CC", str(hold))
    process = start("nki.baremetal(add)(A, B)")
    until(lambda: Path(f"{hold}.started").exists(), process)
    kill(process)
    monkeypatch.delenv("OPENNKI_NEURONX_CC")
    works()


def until(what, process, seconds=60):
    ends = time.monotonic() + seconds
    while not what():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < ends
        time.sleep(0.02)


def test_killed_while_it_executes(monkeypatch):
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0")
    body = """
from opennki.interpret.prepared import Prepared
def slow(*args, **kwargs):
    print("running", flush=True)
    time.sleep(60)
Prepared.run = slow
nki.baremetal(add, save_neff_name="file.neff")(A, B)
"""
    process = start(body)
    assert process.stdout.readline() == "running\n"
    kill(process)
    assert not Path("file.neff").exists()
    works()


def test_killed_at_any_moment():
    """Fixed budget: a process that compiles, runs and saves again and again is killed after a random time."""
    rng = random.Random(3)
    body = """
print("ready", flush=True)
n = 0
while True:
    n += 1
    nki.baremetal(add, save_neff_name="file.neff", save_trace_name="t.ntff")(A, B, float(n % 3))
    print(n, flush=True)
"""
    for _ in range(4):
        process = start(body)
        assert process.stdout.readline() == "ready\n", process.stderr.read()
        time.sleep(rng.uniform(0, 3))
        kill(process)
        for name, load in (("file.neff", neff.load), ("t.ntff", ntff.load)):
            if os.path.exists(name):
                load(name)
    works()


def test_two_processes_on_one_core_take_turns_and_are_both_right(monkeypatch):
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0")
    nki.baremetal(add)(A, B)
    body = """
from opennki.toolchain import nrt
real = nrt.Prepared.run
def slow(self, *args, **kwargs):
    began = time.time()
    time.sleep(0.05)
    real(self, *args, **kwargs)
    print(began, time.time(), flush=True)
nrt.Prepared.run = slow
kernel = nki.baremetal(add)
for i in range(10):
    assert np.array_equal(kernel(A + i, B), A + i + B)
"""
    processes = [start(body, f"child{n}") for n in range(2)]
    spans = []
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        spans += [tuple(map(float, line.split())) for line in out.splitlines()]
    assert len(spans) == 20
    spans.sort()
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))


def test_processes_that_compile_the_same_kernel_at_once():
    processes = [start("assert np.array_equal(nki.baremetal(add)(A, B), A + B)", f"child{n}") for n in range(4)]
    for process in processes:
        _, err = process.communicate(timeout=180)
        assert process.returncode == 0, err
    assert len(list(Path(os.environ["OPENNKI_CACHE_DIR"], "neff").glob("*"))) == 1
    works()


def test_leftovers_of_killed_processes_are_removed():
    from opennki.toolchain import files

    cache = Path(os.environ["OPENNKI_CACHE_DIR"], "neff")
    cache.mkdir()
    old, new = cache / ".opennki-tmp-old", cache / ".opennki-tmp-new"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    works()
    assert not old.exists() and new.exists()
    files.remove_stale(cache / "missing")
