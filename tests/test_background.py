"""Threads that start while the interpreter ends."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from opennki import background


def test_a_thread_runs_and_is_joined():
    seen = []
    background.start(lambda *given: seen.append((given, threading.current_thread().name)), 1, 2, name="here").join(20)
    assert seen == [((1, 2), "here")]


def test_a_thread_of_the_system_where_python_starts_none(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    seen, go = [], threading.Event()
    started = background.start(lambda: (go.wait(20), seen.append(threading.get_ident())), name="late")
    started.join(0.01)
    assert not seen
    go.set()
    started.join(20)
    assert len(seen) == 1 and seen[0] != threading.get_ident()
    monkeypatch.setattr(background.C, "CDLL", lambda name: object())
    with pytest.raises(RuntimeError, match="interpreter shutdown"):
        background.start(print, name="never")


def test_at_the_end_of_the_process():
    code = """
import atexit
from opennki import background
atexit.register(lambda: background.start(print, "still", name="late").join(20))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "still\n"), done.stderr
