"""The distributed example in JAX: devices of one process, and of two."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from opennki import settings

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "distributed_jax.py"


def start(*options):
    environment = settings.own_environment()
    for name in ("XLA_FLAGS", "PJRT_NPROC"):  # those of the tests
        environment.pop(name, None)
    return subprocess.Popen([sys.executable, str(EXAMPLE), *options], env=environment, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)  # fmt: skip


def end(*processes):
    try:
        done = [one.communicate(timeout=150) for one in processes]
    finally:
        for one in processes:
            one.kill()
    for one, (out, err) in zip(processes, done, strict=True):
        assert one.returncode == 0, out + err[-3000:]
    return [out for out, _ in done]


def test_the_example():
    (out,) = end(start())
    assert out.count("8 devices, 8 of them here") == 2


@pytest.mark.slow
def test_the_example_in_two_processes():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        place = "127.0.0.1:" + str(probe.getsockname()[1])
    options = ("--ranks", "4", "--processes", "2", "--coordinator", place, "--process")
    for out in end(start(*options, "0"), start(*options, "1")):
        assert out.count("4 devices, 2 of them here") == 2
