"""Kernels with collectives in programs of torch.distributed: each process is a rank, that of the default process group.

Calls meet by their order: the first of each process, the second, and so on, as collectives of torch.distributed do. A program calls them
from one thread. Source: torch.distributed; reference/bindings.md.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache
from itertools import count

import numpy as np
import torch.distributed as dist

from opennki.bind.gathering import RankCall
from opennki.bind.host import HostKernel
from opennki.bind.joined import Joined
from opennki.ranks.terminate import reports_first

_calls = count()


def several() -> bool:
    """Whether this process is one of several."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@cache
def joined() -> Joined:
    """This process among the others of the default process group."""
    from opennki.ranks.torch_store import hub

    return Joined(hub())


def run(kernel: HostKernel, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> None:
    """Run this process's rank, and wait until it has ended. Raises what the kernel raises, in one rank or another."""
    rank, ended, errors = dist.get_rank(), threading.Event(), list[BaseException]()

    def done(error: BaseException | None) -> None:
        if error is not None:
            errors.append(error)
        ended.set()

    gathering = joined().enter(f"call {next(_calls)}", 0, rank, [(process, 1) for process in range(dist.get_world_size())])
    try:
        gathering.arrive(RankCall(rank, kernel, inputs, outputs, done))
    except BaseException as exc:
        gathering.refuse(rank, exc)
        raise
    with reports_first():
        while not ended.is_set():
            try:
                ended.wait()
            except BaseException as exc:  # Ctrl-C: the buffers are used until the others know
                gathering.failed((rank, 0), exc)
        if errors:
            raise errors[0]
