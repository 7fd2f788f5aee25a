"""Profiles of a compiled kernel: traces (NTFF files) and JSON summaries, and `Profiler`, which asks the profiler command for them.

Names as in the vendor's `neuronxcc.kra.profiler.Profiler`. Source: seeds "nki.profile".
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

from opennki import settings
from opennki.errors import UNKNOWN, NkiFileError, NkiValueError
from opennki.timing import Timeline, estimate
from opennki.toolchain import NEFF_NAME, ntff
from opennki.toolchain.files import make_folder, write_file
from opennki.toolchain.invoke import CompileFailed
from opennki.toolchain.neff import Neff

REPORTS = "json_reports"
MAX_EXECS = 10_000


def timeline_of(neff: Neff, folder: str = "") -> Timeline:
    """The estimate for a NEFF's kernel, with its rows. `folder`: where its sources are."""
    return estimate(neff.kernel(folder), record=True)


def capture(neff: Neff, execution: int = 1, executions: int = 1) -> bytes:
    """The bytes of an NTFF file for one execution of a NEFF."""
    return ntff.encode(timeline_of(neff), neff.digest, execution, executions)


def kept(executions: int, nth: int) -> list[int]:
    """Numbers (from 1) of the executions whose traces are kept: each n-th, so that at least the n-th is run."""
    return list(range(nth, max(executions, nth) + 1, nth))


def trace_name(name: str | os.PathLike[str], execution: int) -> str:
    """File name of the trace of an execution: name.ntff for the first, name_exec_N.ntff for the N-th."""
    base, suffix = os.path.splitext(os.fspath(name))
    return f"{base}{suffix or '.ntff'}" if execution == 1 else f"{base}_exec_{execution}{suffix or '.ntff'}"


def summary_json(profiles: list[ntff.Ntff]) -> str:
    """JSON text {name of the profile: {metric: value}}, as `neuron-profile view --output-format summary-json` prints it."""
    return json.dumps({p.name: p.summary() for p in profiles}, indent=1) + "\n"


class ProfilerFailed(CompileFailed):
    """The profiler command ended with an error; also a subprocess.CalledProcessError."""

    WHAT = "profiling"


class Profiler:
    """Profiles the NEFF in a folder.

    ntff_name: name of the trace. work_dir: the folder. num_execs: executions (default: as many as profile_nth needs). profile_nth: keep the
    trace of each n-th. overwrite: replace files of an earlier profile. neff_name: the NEFF's name in the folder.
    """

    def __init__(self, ntff_name: str, work_dir: str | os.PathLike[str], num_execs: int | None = None, profile_nth: int = 1,
                 overwrite: bool = False, *, neff_name: str = NEFF_NAME) -> None:
        self.ntff_name, self.neff_name = ntff_name, neff_name
        self.work_dir = Path(os.path.abspath(os.path.expanduser(work_dir)))
        self.num_execs, self.profile_nth = max(num_execs or 1, profile_nth), profile_nth
        self.overwrite = overwrite
        if self.num_execs > MAX_EXECS:
            raise NkiValueError(f"num_execs={self.num_execs}", rule=f"a profile has at most {MAX_EXECS} executions")

    def _get_specific_ntff(self, execution: int) -> Path:
        """File of the trace of an execution."""
        return self.work_dir / trace_name(self.ntff_name, execution)

    def _get_all_ntffs(self) -> list[Path]:
        """Files of the traces that are kept, in order."""
        return [self._get_specific_ntff(execution) for execution in kept(self.num_execs, self.profile_nth)]

    def _report(self, trace: Path) -> Path:
        return self.work_dir / REPORTS / f"{trace.stem}.json"

    def _earlier(self) -> list[Path]:
        """Files of a profile under these names that are there already, also of one with other executions."""
        base, suffix = os.path.splitext(self._get_specific_ntff(1).name)
        found = [self.work_dir / self.neff_name]
        for folder, end in ((self.work_dir, suffix), (self.work_dir / REPORTS, ".json")):
            with contextlib.suppress(OSError):
                found += [folder / name for name in sorted(os.listdir(folder)) if name == base + end or (
                    name.startswith(f"{base}_exec_") and name.endswith(end) and name[len(base) + 6 : len(name) - len(end)].isdigit())]
        return [path for path in found if os.path.lexists(path)]

    def check(self) -> None:
        """Errors: NkiFileError where files of an earlier profile are in the folder and may not be replaced."""
        there = [] if self.overwrite else self._earlier()
        if there:
            raise NkiFileError(f"{there[0]} is there already" + (f", and {len(there) - 1} more files of a profile" if there[1:] else ""),
                               rule="nki.profile replaces no files unless overwrite=True", fix="pass overwrite=True, or another directory")

    def save_neff(self, data: bytes) -> None:
        """Put the NEFF into the folder, which is made if it is not there. Errors: NkiFileError."""
        self.check()
        make_folder(self.work_dir, "the working directory")
        write_file(self.work_dir / self.neff_name, data, "the NEFF")

    def generate_profile(self) -> None:
        """Run `neuron-profile capture`, which writes a trace for each kept execution; older traces of the same name go.

        Errors: ProfilerFailed (a CalledProcessError), NkiFileError.
        """
        _command(["capture", "-n", self.neff_name, "-s", self.ntff_name, "--num-exec", str(self.num_execs),
                  "--profile-nth-exec", str(self.profile_nth)], self.work_dir)
        wanted = self._get_all_ntffs()
        for path in wanted:
            if not path.is_file():
                raise NkiFileError(f"the profiler command succeeded and wrote no {path.name}", loc=UNKNOWN,
                                   fix="look at the setting OPENNKI_NEURON_PROFILE")
        for path in self._earlier():
            if path not in wanted and path != self.work_dir / self.neff_name:
                with contextlib.suppress(OSError):
                    path.unlink()

    def extract_ntff_json_from_profile(self) -> list[Path]:
        """Run `neuron-profile view`, which writes a JSON summary for each trace into the folder json_reports; returns its files.

        Errors: ProfilerFailed, NkiFileError.
        """
        make_folder(self.work_dir / REPORTS, "the folder of the reports")
        traces = self._get_all_ntffs()
        words = [["-s", trace.name, "--output-file", str(Path(REPORTS) / self._report(trace).name)] for trace in traces]
        if settings.current().neuron_profile == settings.Settings().neuron_profile:  # ours takes many at once
            words = [[word for part in words for word in part]]
        for part in words:
            _command(["view", "-n", self.neff_name, "--output-format", "summary-json", *part], self.work_dir)
        return [self._report(trace) for trace in traces]


def _command(words: list[str], folder: Path) -> None:
    own = settings.current().neuron_profile == settings.Settings().neuron_profile
    command = [*settings.current().neuron_profile, *words]
    try:
        done = subprocess.run(command, cwd=folder, env=settings.own_environment() if own else None, stdin=subprocess.DEVNULL,
                              stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
    except OSError as exc:
        error = NkiFileError(f"the profiler command {shlex.join(command)} cannot be started: {exc.strerror or exc}", loc=UNKNOWN,
                             rule="the setting OPENNKI_NEURON_PROFILE names the profiler command",
                             fix="unset OPENNKI_NEURON_PROFILE for opennki's own")
        error.errno, error.filename = exc.errno, command[0]
        raise error from None
    if done.returncode:
        raise ProfilerFailed(done.returncode, command, done.stderr.decode("utf-8", "replace"), words[0])


def rows_json(timeline: Timeline) -> list[dict[str, Any]]:
    """The rows of a timeline under the vendor's names (perf_model.md section 4): times in ns."""
    out = []
    for row in timeline.rows:
        where = row.location
        out.append({
            "id": row.id, "opcode": row.op, "engine": row.engine, "queue_name": row.queue, "start_ts": row.start_ns,
            "end_ts": row.start_ns + row.duration_ns, "duration_ns": row.duration_ns, "evt_wait_time_ns": row.wait_ns,
            "operands": row.operands, "tensor_elements": row.elements, "raw_flops": row.flops, "transfer_bytes": row.bytes,
            "pcore_idx": 0, "nki_source_location": "" if where is None else f"{where.file.strip('<>')}:{where.line}",
        })  # fmt: skip
    return out
