"""Worker processes, on this machine or on a Ray cluster: a point that crashes its worker, or takes too long, costs that worker alone."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Sequence
from typing import Any

from opennki import settings
from opennki.errors import NkiError, NkiValueError
from opennki.tools.sweep.plan import Point

LOAD_SECONDS = 120.0  # that loading the script may take, where a point may not take longer
_MOST_TAIL = 1000  # bytes of what a worker that crashed has printed last

Result = dict[str, Any]
_END = None


class Worker:
    """A worker process, started when it is needed."""

    def __init__(self, setup: Result, limit: float, threads: int) -> None:
        self.setup, self.limit, self.threads = setup, limit, threads
        self.process: subprocess.Popen[str] | None = None
        self.answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.printed: Any = None
        self.lock = threading.Lock()
        self.closed = False

    def measure(self, request: Result) -> Result:
        """The result of a point. Raises NkiError where the script cannot be loaded."""
        if self.process is None:
            self._start()
        self.printed.truncate(0)
        self._say(request)
        answer = self._hear(self.limit)
        if isinstance(answer, dict):
            return answer
        row = self._gone(answer)
        return {"status": "timeout" if answer == "late" else "crashed", "stage": None, **row}

    def _start(self) -> None:
        with self.lock:
            if self.closed:
                raise NkiError("the sweep has been stopped")
            self.printed = tempfile.TemporaryFile()  # noqa: SIM115  (it lives as long as the process)
            command = [sys.executable, "-P", "-m", "opennki.tools.sweep.worker"]
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.printed, text=True,
                                            env=settings.worker_environment(self.threads), start_new_session=True)  # fmt: skip
        self.answers = queue.SimpleQueue()
        threading.Thread(target=_listen, args=(self.process.stdout, self.answers), daemon=True).start()
        self._say(self.setup)
        answer = self._hear(max(LOAD_SECONDS, self.limit))
        if not isinstance(answer, dict) or "ready" not in answer:
            why = answer["failed"] if isinstance(answer, dict) else self._gone(answer)["error"]
            self.stop()
            raise NkiError(f"{self.setup['script']} cannot be loaded: {why}")

    def _say(self, value: Result) -> None:
        assert self.process is not None and self.process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended: its answer says so
            self.process.stdin.write(json.dumps(value) + "\n")
            self.process.stdin.flush()

    def _hear(self, seconds: float) -> Result | str:
        """An answer, "late" or "ended"."""
        try:
            line = self.answers.get(timeout=seconds)
        except queue.Empty:
            return "late"
        try:
            value = json.loads(line) if line is not None else None
        except ValueError:
            value = None
        return value if isinstance(value, dict) else "ended"

    def _gone(self, how: str) -> Result:
        """End the process; the error of a point that crashed it or took too long."""
        process = self.process
        assert process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            if how == "ended":
                process.wait(2.0)
        state = process.poll()
        self.stop()
        if how == "late":
            return {"error": f"took longer than {self.limit:g} s", "wall_s": self.limit}
        if state is not None and state < 0:
            error = f"the process was ended by {_signal(-state)}"
        else:
            error = f"the process ended with status {state}"
        said = self._tail()
        return {"error": f"{error}: {said}" if said else error}

    def _tail(self) -> str:
        with contextlib.suppress(OSError, ValueError):
            size = self.printed.seek(0, os.SEEK_END)
            self.printed.seek(max(0, size - _MOST_TAIL))
            return str(self.printed.read().decode("utf-8", "replace").replace("\0", "").strip())
        return ""

    def stop(self) -> None:
        """End the process and all that it has started."""
        with self.lock:
            process, self.process = self.process, None
        if process is None:
            return
        with contextlib.suppress(OSError):
            if hasattr(os, "killpg"):
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
        process.wait()
        with contextlib.suppress(OSError):
            if process.stdin is not None:
                process.stdin.close()

    def close(self) -> None:
        """Stop, for good."""
        with self.lock:
            self.closed = True
        self.stop()


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _listen(source: Any, answers: queue.SimpleQueue[str | None]) -> None:
    with contextlib.suppress(OSError, ValueError), source:
        for line in source:
            answers.put(line)
    answers.put(_END)


def on_this_machine(setup: Result, points: Sequence[Point], jobs: int, limit: float) -> Generator[tuple[Point, Result], None, None]:
    """Points and their results as they come, from up to `jobs` workers. Raises NkiError where the script cannot be loaded."""
    threads = max(1, settings.current().num_threads // jobs)
    todo: queue.SimpleQueue[Point] = queue.SimpleQueue()
    for point in points:
        todo.put(point)
    done: queue.SimpleQueue[tuple[Point | None, Any]] = queue.SimpleQueue()
    workers = [Worker(setup, limit, threads) for _ in range(min(jobs, len(points)))]

    def work(worker: Worker) -> None:
        try:
            while True:
                point = todo.get_nowait()
                done.put((point, worker.measure(point.request())))
        except queue.Empty:
            pass
        except BaseException as exc:
            done.put((None, exc))
        finally:
            worker.close()

    running = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in workers]
    for thread in running:
        thread.start()
    try:
        for _ in points:
            which, result = done.get()
            if which is None:
                raise result
            yield which, result
    finally:
        for worker in workers:
            worker.close()


def on_ray(setup: Result, points: Sequence[Point], limit: float, address: str | None) -> Generator[tuple[Point, Result], None, None]:
    """The same on a Ray cluster: a task of one CPU for each point, in which the point has a worker process as it has here.

    The script is at the same path on all machines. Raises NkiError where Ray is not installed, or a machine cannot load the script.
    """
    try:
        import ray
    except ImportError:
        raise NkiValueError("--ray and Ray is not installed", rule="it needs Ray", fix="pip install 'opennki[ray]'") from None
    from opennki.kernels.ray_engine import connect

    connect(address)
    task = ray.remote(num_cpus=1, max_retries=0)(_on_a_node)
    left = iter(points)
    pending: dict[Any, Point] = {}
    most = 2 * max(1, int(ray.cluster_resources().get("CPU", 1)))

    def submit() -> None:
        point = next(left, None)
        if point is not None:
            pending[task.remote(setup, point.request(), limit)] = point

    for _ in range(most):
        submit()
    try:
        while pending:
            ready, _ = ray.wait(list(pending), num_returns=1)
            for one in ready:
                point = pending.pop(one)
                try:
                    result = ray.get(one)
                except ray.exceptions.RayTaskError as exc:
                    raise exc.cause if isinstance(exc.cause, NkiError) else NkiError(str(exc)) from None
                except ray.exceptions.RayError as exc:
                    result = {"status": "crashed", "error": f"its process on Ray has gone: {type(exc).__name__}"}
                submit()
                yield point, result
    finally:
        for one in pending:
            ray.cancel(one, force=True)


_workers: dict[str, Worker] = {}  # of this process of Ray's, by what they were set up for


def _on_a_node(setup: Result, request: Result, limit: float) -> Result:
    key = json.dumps([setup, limit], sort_keys=True)
    if key not in _workers:
        for other in _workers.values():
            other.close()
        _workers.clear()
        _workers[key] = Worker(setup, limit, 1)
    return _workers[key].measure(request)
