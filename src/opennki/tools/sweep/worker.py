"""A process that measures points of a sweep: it is told them on its standard input, as lines of JSON, and answers in the same way.

It loads the script once. What the script and its kernels print is kept out of the answers. It ends when its input does, also in the middle
of a point: so it never outlives what started it.
"""

from __future__ import annotations

import io
import json
import os
import queue
import sys
import threading
import time
import warnings
from types import ModuleType
from typing import Any

from opennki.errors import NkiError
from opennki.tools.sweep.plan import digest_of

MOST_TEXT = 4000  # characters of an error that are kept


def main() -> None:
    """Answer requests until there are no more."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            requests.put(json.loads(line))
        os._exit(0)

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    threading.Thread(target=read, daemon=True).start()
    setup = requests.get()
    try:
        module = _load(setup)
    except BaseException as exc:
        answer({"failed": text_of(exc)})
        return
    answer({"ready": True})
    while True:
        answer(measure(module, setup, requests.get()))


def _load(setup: dict[str, Any]) -> ModuleType:
    from opennki.tools.run_script import load_module

    script = setup["script"]
    if not os.path.isfile(script):
        raise LookupError(f"there is no file {script} on this machine")
    if digest_of(script) != setup["digest"]:
        raise LookupError(f"{script} is not what it was when the sweep began")
    return load_module(script)


def text_of(exc: BaseException) -> str:
    """An error as `opennki run` shows it."""
    from opennki.tools.run_script import report

    out = io.StringIO()
    try:
        report(exc, out)
    except Exception:  # an exception whose text cannot be made
        return type(exc).__name__
    return out.getvalue().strip()[:MOST_TEXT]


def measure(module: ModuleType, setup: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """The result of a point: how it ended, how far it got (`stage`), and what is known by then."""
    row: dict[str, Any] = {"status": "ok", "stage": "load"}
    before = _reset_peak()
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            _stages(module, setup, request, row)
        except (Exception, SystemExit) as exc:
            row["status"], row["error"] = "error", text_of(exc)
    row["wall_s"] = round(time.perf_counter() - start, 6)
    peak = _peak()
    if peak is not None:
        row["peak_bytes"] = peak
        row["grown_bytes"] = max(0, peak - before)
    row["warnings"] = "; ".join(dict.fromkeys(str(w.message).splitlines()[0] for w in heard))[:MOST_TEXT] or None
    return row


def _stages(module: ModuleType, setup: dict[str, Any], request: dict[str, Any], row: dict[str, Any]) -> None:
    from opennki.execute.executor import native
    from opennki.interpret import simulate as sim
    from opennki.kernels.options import compile_opts
    from opennki.passes.allocate import allocate
    from opennki.timing import estimate
    from opennki.tools.arguments import kernel_for, parse_arguments
    from opennki.tools.compare import values
    from opennki.tools.run_script import found

    positional, named = parse_arguments(request["args"])
    kernel = kernel_for(found(module, request["attribute"], setup["script"]), request["target"], request["grid"])

    start = time.perf_counter()

    def stage(name: str) -> None:
        nonlocal start
        now = time.perf_counter()
        row[f"{row['stage']}_s"] = round(now - start, 6)
        row["stage"], start = name, now

    row["stage"] = "trace"
    made, operands = kernel.specialize_and_call(tuple(positional), named)
    stage("estimate")
    timeline = estimate(made)
    row |= {"latency_us": timeline.latency_us, "bound_by": timeline.bound_by, "modelled_target": timeline.target,
            "hbm_read_bytes": timeline.traffic.hbm_read_bytes, "hbm_write_bytes": timeline.traffic.hbm_write_bytes,
            "macs": timeline.work.macs, "instructions": timeline.instructions}  # fmt: skip
    stage("allocate")
    options = compile_opts(kernel)
    memory = allocate(made, allocator=options.allocator, skip_middle_end=options.skip_middle_end, spill=True)
    row |= {f"{name}_bytes_per_partition": peak.size for name, peak in memory.peaks.items()}
    if setup["checks"] != "none":
        stage("run")
        level = sim.Checks.of(setup["checks"])
        tape = sim.tape_of(made, level, level.level != "full")
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            sim.simulate(made, values(operands, setup["seed"]), level, seed=setup["seed"], out=nowhere, tape=tape,
                         native=native if level.level != "full" else None)  # fmt: skip
    stage("end")


def _reset_peak() -> int:
    """Make the peak of resident memory start anew, where the system can; returns the bytes that are resident now."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        pass
    return _status("VmRSS") or 0


def _peak() -> int | None:
    """The peak of resident memory in bytes, None where the system does not say."""
    found = _status("VmHWM")
    if found is not None:
        return found
    try:
        import resource
    except ImportError:
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _status(name: str) -> int | None:
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            return next((int(line.split()[1]) * 1024 for line in file if line.startswith(name + ":")), None)
    except (OSError, ValueError, IndexError):
        return None


if __name__ == "__main__":
    try:
        main()
    except (NkiError, OSError) as exc:  # nobody listens any more
        print(exc, file=sys.stderr)
        os._exit(1)
