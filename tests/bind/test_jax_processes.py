"""Kernels with collectives in programs of jax.distributed: two processes with two devices each."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from opennki import settings

HERE = Path(__file__).parent


def run(way):
    """What the two processes print, and their status."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    environment = settings.own_environment()
    environment["PYTHONPATH"] = f"{HERE.parent.parent}:{environment['PYTHONPATH']}"
    environment |= {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(HERE / "jax_process.py")]
    both = [subprocess.Popen([*command, str(process), str(port), way], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             text=True) for process in range(2)]  # fmt: skip
    try:
        done = [one.communicate(timeout=60) for one in both]
    finally:
        for one in both:
            one.kill()
    return [(one.returncode, out, err[-3000:]) for one, (out, err) in zip(both, done, strict=True)]


@pytest.mark.parametrize("way, texts", [
    ("plain", []),
    ("absent", ["3 ranks wait for ever: rank 0 waits in rank_all_reduce at", "ranks that have not called the kernel here: 1"]),
    ("elsewhere", ["2 ranks wait for ever", "ranks that have not called the kernel here"]),
])  # fmt: skip
def test_two_processes(way, texts):
    for status, out, err in run(way):
        assert (status, out.splitlines()[-1:]) == (0, ["end"]), err
        for text in texts:
            assert text in out


def test_a_rank_that_is_in_no_group():
    """The other three may have met before they hear of it."""
    first, second = run("wrong")
    for (status, out, err), others in ((first, "no error"), (second, "rank 2 is in none of the replica_groups")):
        assert (status, out.splitlines()[-1:]) == (0, ["end"]), err
        assert "rank 2 is in none of the replica_groups" in out or others in out


def test_a_process_that_is_killed_is_named():
    (_, out, err), (status, _, _) = run("killed")
    assert status == -9
    assert "the process of ranks 2, 3 has gone" in out, err
