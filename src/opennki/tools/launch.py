"""What `opennki launch` does: start the processes of a distributed run, introduce them to each other, and watch over them."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from opennki.errors import NkiError
from opennki.ranks.mesh import MeetingPoint
from opennki.settings import Rendezvous, environment_of

PATIENCE = 5.0  # seconds in which processes end by themselves after one has failed


def launch(script: str, args: list[str], processes: int) -> int:
    """Run a script in several processes; returns the exit status. When one fails, the others get some seconds to say what they know and
    are stopped then."""
    point = MeetingPoint(processes, secrets.token_hex(16))
    host, port = point.address
    threading.Thread(target=_introduce, args=(point,), daemon=True).start()
    threads = max(1, (os.cpu_count() or 1) // processes)
    started: list[subprocess.Popen[bytes]] = []
    before = signal.signal(signal.SIGTERM, _ended) if threading.current_thread() is threading.main_thread() else None
    try:
        for number in range(processes):
            place = Rendezvous(number, processes, host, port, point.token)
            command = [sys.executable, "-m", "opennki", "run", script, *args]
            started.append(subprocess.Popen(command, env=environment_of(place, threads)))
        return _watch(started)
    except KeyboardInterrupt:
        return 130
    except _Ended:  # with all that it has started
        return 128 + signal.SIGTERM
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)
        for one in started:
            if one.poll() is None:
                one.kill()
        for one in started:
            one.wait()


class _Ended(BaseException):
    """Someone has asked this process to end."""


def _ended(number: int, frame: Any) -> None:
    raise _Ended


def _introduce(point: MeetingPoint) -> None:
    try:
        point.serve()
    except NkiError as exc:  # a script need not call launch
        print(f"opennki: {exc.message}", file=sys.stderr)
    except OSError:
        return


def _watch(started: list[subprocess.Popen[bytes]]) -> int:
    until = None
    while True:
        states = [one.poll() for one in started]
        bad = [(number, state) for number, state in enumerate(states) if state]
        if all(state is not None for state in states):
            for number, state in bad:
                if state < 0:
                    print(f"opennki: process {number} was ended by {signal.Signals(-state).name}", file=sys.stderr)
            return 1 if bad else 0
        if bad:
            until = until or time.monotonic() + PATIENCE
            if time.monotonic() > until:
                late = [number for number, state in enumerate(states) if state is None]
                print(f"opennki: process {bad[0][0]} failed; stopping {late}", file=sys.stderr)
                return 1
        time.sleep(0.01)
