"""Ranks on two hosts, through torch.distributed (gloo) and through Ray: the bits are those of threads; a host that goes is named.

The hosts are network namespaces, or where those are not possible two loopback addresses; each test says which.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import opennki
from tests.ranks.hosts import say, two_hosts

HERE = Path(__file__).parent
SCRIPT = HERE / "host_script.py"


@pytest.fixture
def hosts(capsys):
    with two_hosts() as (what, *both):
        say(capsys, what)
        yield both


@pytest.fixture
def kernels(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE.parent.parent / "examples"))
    import distributed_kernels

    return distributed_kernels


def environment(**more):
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(opennki.__file__).parent.parent), **more}


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def gloo(hosts, folder, way):
    """A process on each host; their exit statuses and what they printed."""
    port, running = free_port(), []
    for number, host in enumerate(hosts):
        places = environment(MASTER_ADDR=hosts[0].address, MASTER_PORT=port, WORLD_SIZE="2", RANK=str(number),
                             GLOO_SOCKET_IFNAME=host.interface)  # fmt: skip
        running.append(subprocess.Popen([*host.prefix, sys.executable, str(SCRIPT), str(folder), way], env=places, text=True,
                                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT))  # fmt: skip
    try:
        said = [one.communicate(timeout=150)[0] for one in running]
    finally:
        for one in running:
            one.kill()
            one.wait()
    return [one.returncode for one in running], said


def same_as_threads(kernels, folder, processes):
    for name, case in kernels.CASES.items():
        kernel, args_of, _ = case(8)
        want = opennki.launch(kernel, 8, args_of)
        got = {}
        for process in range(processes):
            with np.load(folder / f"{name}-{process}.npz") as found:
                assert not set(got) & set(found)
                got.update(found)
        assert sorted(map(int, got)) == list(range(8))
        for rank, value in enumerate(want):
            assert got[str(rank)].tobytes() == value.tobytes(), (name, rank)


@pytest.mark.slow
def test_gloo_on_two_hosts(hosts, kernels, tmp_path):
    pytest.importorskip("torch")
    statuses, said = gloo(hosts, tmp_path, "gloo")
    assert statuses == [0, 0], said
    same_as_threads(kernels, tmp_path, 2)


@pytest.mark.slow
def test_a_gloo_process_that_is_killed_is_named(hosts, tmp_path):
    pytest.importorskip("torch")
    start = time.monotonic()
    statuses, said = gloo(hosts, tmp_path, "die")
    assert statuses == [1, -9] or statuses == [1, 137], said  # 137: as `ip netns exec` may say it
    assert "the process of ranks 4, 5, 6, 7 has gone" in said[0]
    assert time.monotonic() - start < 100


@pytest.fixture
def ray_folder():
    """Ray's sockets need a short path."""
    folder = Path(f"/tmp/onki-ray-{os.getpid()}")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
def test_ray_on_two_hosts(hosts, kernels, tmp_path, ray_folder):
    pytest.importorskip("ray", reason="Ray is not installed; make test-ray brings it")
    first, second = hosts
    # a token of this cluster's own: newer versions of Ray want one
    places = environment(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32), RAY_TMPDIR=str(ray_folder))
    address = f"{first.address}:{free_port()}"
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--num-cpus=1", "--disable-usage-stats", "--block",
             "--object-store-memory=100000000"]  # fmt: skip
    commands = [[*first.prefix, *start, "--head", f"--node-ip-address={first.address}", f"--port={address.rpartition(':')[2]}",
                 "--include-dashboard=false", f"--temp-dir={ray_folder}"],
                [*second.prefix, *start, f"--address={address}", f"--node-ip-address={second.address}"]]  # fmt: skip
    nodes = []
    try:
        for number, command in enumerate(commands):
            log = tmp_path / f"ray-{number}.log"
            with open(log, "w", encoding="utf-8") as out:
                node = subprocess.Popen(command, env=places, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
            nodes.append(node)
            until = time.monotonic() + 60
            while "Ray runtime started" not in log.read_text(encoding="utf-8"):
                assert node.poll() is None and time.monotonic() < until, log.read_text(encoding="utf-8")
                time.sleep(0.1)
        driver = [*first.prefix, sys.executable, str(SCRIPT), str(tmp_path), "ray", address]
        done = subprocess.run(driver, env=places, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, (done.stdout, done.stderr)
    finally:
        for node in reversed(nodes):
            stop(node)
    addresses = (tmp_path / "nodes").read_text(encoding="utf-8").split()
    assert len(addresses) == 2 and second.address in addresses  # for 127.0.0.1 Ray takes the address of this machine
    same_as_threads(kernels, tmp_path, 1)


def stop(node):
    """End a Ray node and what it has started."""
    node.send_signal(signal.SIGTERM)
    try:
        node.wait(timeout=20)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(OSError):
            os.killpg(node.pid, signal.SIGKILL)
        node.wait()
