"""Kernels with collectives in programs of torch.distributed: each process is a rank."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from opennki import settings

HERE = Path(__file__).parent


def run(way, count=2):
    """Status and output of the processes, which are started as torchrun does; it would end the others as soon as one is gone."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    environment = settings.own_environment() | {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                                                "WORLD_SIZE": str(count)}  # fmt: skip
    started = [
        subprocess.Popen([sys.executable, str(HERE / "rank_process.py"), way], env=environment | {"RANK": str(rank)}, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE) for rank in range(count)
    ]  # fmt: skip
    try:
        done = [one.communicate(timeout=100) for one in started]
    finally:
        for one in started:
            one.kill()
    return [(one.returncode, out, err[-3000:]) for one, (out, err) in zip(started, done, strict=True)]


@pytest.mark.parametrize("way, count, texts", [
    ("plain", 3, []),
    ("late", 2, []),
    ("shapes", 2, ["src of rank 1 is (5, 2) float32 and that of another member is (4, 2) float32"]),
    ("kernels", 2, ["2 ranks wait for ever: rank 0 waits in rank_ring at", "rank 1 waits in rank_all_reduce at", "rank_process.py:"]),
])  # fmt: skip
def test_each_process_is_a_rank(way, count, texts):
    for rank, (status, out, err) in enumerate(run(way, count)):
        assert (status, out.splitlines()[-1:]) == (0, [f"{rank} ends"]), out + err
        for text in texts:
            assert text in out, out


@pytest.mark.parametrize("way, named, end", [("killed", "rank 1", -9), ("launch", "ranks 2, 3", -9), ("gone", "rank 1", 0)])
def test_a_process_that_is_gone_is_named_and_the_others_end(way, named, end):
    (status, out, err), (other, _, _) = run(way)
    assert f"the process of {named} has gone" in out, out + err
    assert (status, out.splitlines()[-1:], other) == (0, ["0 ends"], end), err


@pytest.mark.parametrize("way", ["ended", "ended launch"])
def test_a_report_comes_before_sigterm_has_its_effect(way):
    """A process is asked to end, and hears then that another one has gone: it says so, and ends by the signal all the same."""
    (status, out, err), (other, _, _) = run(way)
    assert "the process of rank 1 has gone" in out, out + err
    assert (status, other) == (-15, -9), err


def test_sigterm_ends_a_wait():
    (status, out, _), (other, theirs, err) = run("asked")
    assert (status, other) == (-15, 0) and not out and "the process of rank 0 has gone" in theirs, theirs + err


def test_ctrl_c_ends_a_wait():
    (status, out, err), (other, theirs, _) = run("interrupted")
    assert (status, other) == (0, 0) and "interrupted" in out, out + err
    assert "a rank of another process stopped: KeyboardInterrupt" in theirs, theirs
