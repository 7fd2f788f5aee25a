"""Runs of several processes: forked ones, those of `opennki launch` and of torch.distributed, and tasks of Ray."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from opennki import settings
from opennki.errors import NkiError, NkiValueError
from opennki.interpret.schedule import report_of
from opennki.kernels.launch import Rank, Task
from opennki.ranks import mesh
from opennki.ranks.remote import Run
from opennki.ranks.terminate import reports_first

ENGINES = ("auto", "threads", "processes", "tcp", "gloo", "ray")
PATIENCE = 5.0  # seconds that a process which has been told to stop gets to do so

# of this process under `opennki launch` or torch.distributed: what gives the channel of a run, and how many there were
_channel: tuple[Callable[[int], mesh.Channel] | None, int] | None = None


def engine(name: str, processes: int | None) -> Callable[[Task], list[Any]] | None:
    """What runs a task; None for threads of this process. Raises NkiValueError for an unknown name, or one that is not possible here."""
    if name not in ENGINES:
        raise NkiValueError(f"engine={name!r}", rule=f"an engine is one of {', '.join(ENGINES)}")
    if processes is not None and (not isinstance(processes, int) or isinstance(processes, bool) or processes < 1):
        raise NkiValueError(f"processes={processes!r}", rule="the number of processes is a positive integer")
    if name == "auto":
        name = "gloo" if _gloo_runs() else "tcp" if settings.current().rendezvous else "processes" if (processes or 1) > 1 else "threads"
    if name == "threads":
        return None
    if name == "processes":
        return lambda task: forked(task, processes or settings.current().num_threads)
    if name == "ray":
        from opennki.kernels.ray_engine import on_ray

        return lambda task: on_ray(task, processes)
    if name == "tcp" and not settings.current().rendezvous:
        raise NkiValueError("engine='tcp' outside of `opennki launch`", rule="its processes are started by `opennki launch -n N script.py`")
    if name == "gloo" and not _gloo_runs():
        raise NkiValueError(
            "engine='gloo' and torch.distributed is not initialised",
            rule="torch.distributed carries the messages",
            fix='call torch.distributed.init_process_group("gloo") first',
        )
    return lambda task: joined(task, name)


def share(ranks: int, processes: int) -> Callable[[int], int]:
    """Which process runs a rank: neighbours are together."""
    return lambda rank: rank * processes // ranks


def forked(task: Task, processes: int) -> list[Any]:
    """Run a task in this process and forked ones. Results come back through shared memory."""
    processes = min(processes, task.ranks)
    if not hasattr(os, "fork"):
        raise NkiValueError("engine='processes'", rule="it forks, which this system cannot", fix="use engine='threads'")
    members = task.members(range(task.ranks), shared)
    worlds = [m.world(task.ranks) for m in members.values()]
    owner, mine = share(task.ranks, processes), mesh.pairs(processes)
    children: list[int] = []
    sys.stdout.flush()
    for process in range(1, processes):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about threads: the child uses none of them
            pid = os.fork()
        if not pid:
            _child(task, members, worlds, mine(process), owner)
        children.append(pid)
    channel = mine(0)
    try:
        task.run({r: m for r, m in members.items() if owner(r) == 0}, worlds, Run(channel, owner, task.ranks), threads=1)
    finally:
        channel.close()
        bad = _reap(children)
    if bad:
        raise NkiError(f"a process of this run ended with status {bad[0]}", fix="look at what it printed last")
    return [member.value() for member in members.values()]


def _child(task: Task, members: dict[int, Rank], worlds: list[Any], channel: mesh.Mesh, owner: Callable[[int], int]) -> None:
    """A forked process: it never returns."""
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the run
        ours = {r: m for r, m in members.items() if owner(r) == channel.process}
        task.run(ours, worlds, Run(channel, owner, task.ranks), threads=1)
        status = 0
    except BaseException as exc:
        if report_of(exc) is not None:
            status = 0  # the parent has it
        else:
            print(f"opennki: process {channel.process}: {type(exc).__name__}: {exc}", file=sys.stderr)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        channel.close()
        os._exit(status)


def _reap(children: list[int]) -> list[int]:
    """Wait for the children; those that do not end in time are killed. Returns statuses other than 0."""
    until, bad = time.monotonic() + PATIENCE, []
    for pid in children:
        while True:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                break
            if time.monotonic() > until:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)
        if status:
            bad.append(status)
    return bad


def shared(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array in memory that forked processes share; it is freed with its last view."""
    size = max(1, prod(shape) * np.dtype(dtype).itemsize)
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)[: prod(shape) * np.dtype(dtype).itemsize].view(dtype).reshape(shape)


def joined(task: Task, name: str) -> list[Any]:
    """Run this process's share of a task whose other processes call this function too."""
    global _channel
    if _channel is None:
        _channel = (_connect(name), 0)
    open_channel, number = _channel
    if open_channel is None:
        raise NkiError("an earlier run of these processes failed", rule="after a failure their connections are closed",
                       fix="start the processes again")  # fmt: skip
    channel = open_channel(number)
    owner = share(task.ranks, channel.processes)
    members = task.members(range(task.ranks))
    worlds = [m.world(task.ranks) for m in members.values()]
    ours = {r: m for r, m in members.items() if owner(r) == channel.process}
    _channel = (None, number)
    try:
        with reports_first():
            task.run(ours, worlds, Run(channel, owner, task.ranks, getattr(channel, "number", number)), threads=1)
    except BaseException:
        channel.close()
        raise
    if name == "gloo":
        channel.close()  # that of this run; the connections stay
    _channel = (open_channel, number + 1)
    return [ours[r].value() if r in ours else None for r in range(task.ranks)]


def _connect(name: str) -> Callable[[int], mesh.Channel]:
    if name == "gloo":
        import torch.distributed as dist

        from opennki.ranks.torch_store import hub

        return lambda number: hub().line(f"launch {number}", range(dist.get_world_size()))
    place = settings.current().rendezvous
    assert place is not None
    joined = mesh.join(place.process, place.processes, (place.host, place.port), place.token)
    return lambda number: joined


def _gloo_runs() -> bool:
    """torch.distributed is initialised with several processes."""
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    return bool(distributed is not None and distributed.is_available() and distributed.is_initialized()
                and distributed.get_world_size() > 1)  # fmt: skip

