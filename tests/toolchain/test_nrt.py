"""The runtime: locks between processes, models, results that reach the caller only after success."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import ml_dtypes
import numpy as np
import pytest

from opennki import settings
from opennki.errors import NkiError, NkiFileError, NkiValueError
from opennki.toolchain.nrt import NrtClient
from tests.toolchain.kernels import A, B, compiled

HOLD = """
import sys, time
from opennki.toolchain.nrt import NrtClient
client = NrtClient()
client.try_lock_device()
print("held", client.core, flush=True)
time.sleep(float(sys.argv[1]))
"""


def holder(seconds=60):
    command = [sys.executable, "-c", HOLD, str(seconds)]
    process = subprocess.Popen(command, env=settings.own_environment(), stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline().startswith("held")
    return process


@pytest.fixture
def one_core(monkeypatch):
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "3")


def test_the_lock_comes_first():
    client = NrtClient()
    for call in (lambda: client.modelLoad(compiled().neff), lambda: client.modelExecute([A, B])):
        with pytest.raises(NkiValueError, match="not locked"):
            call()
    client.try_lock_device()
    with pytest.raises(NkiValueError, match="no model"):
        client.modelExecute([A, B])
    with pytest.raises(NkiValueError, match="no results"):
        client.update_outputs({})
    client.close()
    client.close()


def test_a_core_has_one_holder(one_core):
    with NrtClient() as first, NrtClient() as second:
        assert first.try_lock_device() == 3 == first.try_lock_device()
        assert second.try_lock_device(wait=False) == -1
        first.close()
        assert second.try_lock_device(wait=False) == 3


def test_further_cores_are_used_first(monkeypatch):
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "2,5")
    with NrtClient() as first, NrtClient() as second, NrtClient() as third:
        assert [c.try_lock_device(wait=False) for c in (first, second, third)] == [2, 5, -1]


def test_a_busy_core_is_waited_for_with_a_message(one_core, capsys):
    process = holder(1.5)
    with NrtClient() as client:
        assert client.try_lock_device() == 3
    process.wait()
    assert f"virtual core 3 is busy (process {process.pid}): waiting" in capsys.readouterr().err


def test_the_lock_of_a_dead_process_is_free(one_core):
    process = holder()
    with NrtClient() as client:
        assert client.try_lock_device(wait=False) == -1
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert client.try_lock_device() == 3


def test_a_child_does_not_keep_the_lock(one_core):
    client = NrtClient()
    client.try_lock_device()
    there, here = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(here, b"1")
        time.sleep(60)
        os._exit(0)
    try:
        assert os.read(there, 1) == b"1"  # it runs, so what happens after a fork has happened
        client._file.close()  # as at the end of a process: without unlocking
        client._file = None
        with NrtClient() as other:
            assert other.try_lock_device(wait=False) == 3
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_threads_take_turns(one_core):
    wrong, running = [], []

    def work(number):
        with NrtClient() as client:
            client.try_lock_device()
            running.append(number)
            if len(running) > 1:
                wrong.append(list(running))
            client.modelLoad(compiled().neff)
            result = client.modelExecute([A + number, B])
            if not np.array_equal(next(iter(result.values())), A + number + B):
                wrong.append(number)
            running.remove(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and not running


def test_results_reach_the_caller_by_name_or_number():
    with NrtClient() as client:
        client.try_lock_device()
        client.modelLoad(compiled().neff)
        results = client.modelExecute({"b": B, "a": A})
        (name,) = results
        for key in (name, 0):
            out = np.zeros_like(A)
            client.update_outputs({key: out})
            np.testing.assert_array_equal(out, A + B)


@pytest.mark.parametrize("io_maps", [
    {"a": A}, {"a": A, "b": B, "c": B}, {"a": A, "b": B[:64]}, {"a": A, "b": B.astype(np.float64)}, {"a": A, "b": None}, [A], [A, B, B],
    {"a": A, "b": B.astype(ml_dtypes.bfloat16)}, {"a": A, "b": B.astype(np.int32)}, {"a": A, "b": A.tolist()},
])
def test_inputs_that_do_not_fit_are_refused(io_maps):
    with NrtClient() as client:
        client.try_lock_device()
        client.modelLoad(compiled().neff)
        with pytest.raises(NkiValueError):
            client.modelExecute(io_maps)


@pytest.mark.parametrize("outputs", [{"nothing": A.copy()}, {0: A[:64].copy()}, {1: A.copy()}, {0: A.tolist()}])
def test_outputs_that_do_not_fit_change_nothing(outputs):
    fine = np.full_like(A, 7)
    read_only = A.copy()
    read_only.flags.writeable = False
    with NrtClient() as client:
        client.try_lock_device()
        client.modelLoad(compiled().neff)
        (name,) = client.modelExecute([A, B])
        for bad in (outputs, {0: read_only}):
            with pytest.raises(NkiValueError):
                client.update_outputs({name: fine, **bad})
    assert (fine == 7).all() and (read_only == A).all()


def test_an_execution_that_fails_has_no_results():
    with NrtClient() as client:
        client.try_lock_device()
        client.modelLoad(compiled().neff)
        client.modelExecute([A, B])
        with pytest.raises(NkiError):
            client.modelExecute([A])
        with pytest.raises(NkiValueError, match="no results"):
            client.update_outputs({0: A.copy()})


def test_a_folder_for_locks_that_cannot_be_made(monkeypatch, alone):
    import tempfile

    (alone / "file").write_text("")
    monkeypatch.setattr(tempfile, "tempdir", str(alone / "file"))
    with pytest.raises(NkiFileError, match="TMPDIR"):
        NrtClient().try_lock_device()
