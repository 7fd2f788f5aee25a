"""Ranks as tasks of a Ray cluster: Ray places and starts the processes, which then meet over TCP."""

from __future__ import annotations

import secrets
import sys
import threading
from typing import Any

from opennki.errors import NkiValueError
from opennki.interpret import simulate as sim
from opennki.kernels.launch import Task
from opennki.ranks import mesh
from opennki.ranks.remote import Run, gone
from opennki.settings import own_environment


def on_ray(task: Task, processes: int | None) -> list[Any]:
    """Run a task on the cluster that this process is connected to, or on one that Ray starts on this machine.

    processes: how many tasks, of one CPU each (default: one for each CPU of the cluster, at most one for each rank). Kernel and args_of
    travel by Ray's serialiser to machines that have opennki installed. Raises NkiValueError where Ray is not installed or the cluster
    has too few CPUs for all tasks at once, which they need: they wait for each other.
    """
    try:
        import ray
    except ImportError:
        raise NkiValueError("engine='ray' and Ray is not installed", rule="it needs Ray", fix="pip install 'opennki[ray]'") from None
    from opennki.kernels.processes import share

    connect()
    cpus = int(ray.cluster_resources().get("CPU", 1))
    count = min(task.ranks, processes or cpus)
    if count > cpus:
        raise NkiValueError(f"processes={count} on a cluster of {cpus} CPUs", rule="all processes of a run are there at once")
    members = task.members(range(task.ranks))  # what is wrong with the arguments shows here, and written arrays are updated here
    point = mesh.MeetingPoint(count, secrets.token_hex(16), ray.util.get_node_ip_address())
    threading.Thread(target=point.serve, daemon=True).start()
    names = getattr(sys.modules.get("opennki.dropin"), "install", None)  # the vendor's module names, where they are opennki's here
    first = ray.cloudpickle.dumps(names)
    code = ray.cloudpickle.dumps((task.kernel.func, task.kernel.grid, task.kernel.kwargs, task.args_of))
    plain = (task.ranks, task.level.level, task.threads, task.seed, task.order)
    remote = ray.remote(num_cpus=1, max_retries=0)(_run)
    pending = [remote.remote(first, code, plain, number, count, point.address, point.token) for number in range(count)]
    error: BaseException | None = None
    for number, one in enumerate(pending):
        try:
            for rank, results in ray.get(one).items():
                for target, array in zip(members[rank].results, results, strict=True):
                    target[...] = array
        except ray.exceptions.RayTaskError as exc:
            error = error or exc.cause
        except ray.exceptions.RayError as exc:
            lost = gone([rank for rank in range(task.ranks) if share(task.ranks, count)(rank) == number])
            lost.fix = f"look at Ray's logs ({type(exc).__name__})"
            error = error or lost
    if error is not None:
        raise error
    return [member.value() for member in members.values()]


def connect(address: str | None = None) -> None:
    """Connect to a Ray cluster, where that has not been done: at `address`, else where Ray finds one, else one that it starts on this
    machine. Its processes find the opennki of this one where they run on this machine."""
    import ray

    if not ray.is_initialized():
        ray.init(address=address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": own_environment()["PYTHONPATH"]}})


def _run(
    first: bytes, code: bytes, plain: tuple[Any, ...], number: int, count: int, address: tuple[str, int], token: str
) -> dict[int, list[Any]]:  # fmt: skip
    """A process on the cluster: the results of its ranks."""
    import ray

    from opennki.kernels.generic import GenericKernel
    from opennki.kernels.processes import share

    names = ray.cloudpickle.loads(first)
    if names is not None:
        names()
    func, grid, kwargs, args_of = ray.cloudpickle.loads(code)
    ranks, level, threads, seed, order = plain
    kernel = GenericKernel(func, "simulation", **kwargs).copy(grid=grid)
    task = Task(kernel, ranks, args_of, sim.Checks.of(level), threads, seed, order, None)
    owner = share(ranks, count)
    members = task.members(range(ranks))
    channel = mesh.join(number, count, address, token, ray.util.get_node_ip_address())
    try:
        mine = {r: m for r, m in members.items() if owner(r) == number}
        task.run(mine, [m.world(ranks) for m in members.values()], Run(channel, owner, ranks), threads=1)
    finally:
        channel.close()
    return {r: m.results for r, m in mine.items()}
