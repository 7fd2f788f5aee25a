"""The profiler as a command, `opennki-neuron-profile`: `capture` writes traces (NTFF files) of a NEFF, `view` shows one.

The command line is that of the vendor's `neuron-profile` as far as it concerns one core. A trace is an estimate of the timing model, and
says so wherever it is shown. Exit status: 0; 1 a file cannot be read, written or run; 2 the command line is wrong; 70 an internal error.
Source: aws-neuron-sdk tools/profiler/neuron-profile-user-guide.rst.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from opennki._version import __version__
from opennki.errors import ISSUES, UNKNOWN, NkiError, NkiFileError, NkiValueError, render
from opennki.isa import dtypes
from opennki.toolchain import neff as neff_file
from opennki.toolchain import ntff
from opennki.toolchain.files import read_file, write_file
from opennki.toolchain.neff import Neff
from opennki.toolchain.nrt import NrtClient
from opennki.toolchain.ntff import Ntff
from opennki.toolchain.profiler import MAX_EXECS, kept, rows_json, summary_json, timeline_of, trace_name

OK, FAILED, USAGE, INTERNAL = 0, 1, 2, 70
FORMATS = ("summary-text", "summary-json", "json", "perfetto", "html", "db")
_MAX_INPUT = 1 << 34
_TERMS = {
    "NEFF": "Neuron Executable File Format: a compiled kernel. opennki writes and reads a form of its own (docs/neff.md).",
    "NTFF": "Neuron Trace File Format: the trace of an execution. opennki writes and reads a form of its own (docs/ntff.md).",
    "estimate": "what opennki's timing model gives; no device was measured.",
    "total_time": "seconds from the start of the execution to its end.",
    "*_percent": "fractions of 1.",
    "HFU": "hardware_flops over what the Tensor Engine could do in total_time; MFU counts model_flops, without transposes.",
    "MBU": "bytes read from and written to HBM over what its bandwidth allows in total_time.",
    "active time": "time in which an engine worked, without waits for semaphores.",
}


class _Usage(Exception):
    """A wrong command line."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise _Usage(message)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MAX_EXECS):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to {MAX_EXECS}")
    return int(text)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = _Parser(prog="neuron-profile", allow_abbrev=False, description="Profiles of NEFF files of opennki: estimates of a timing model.",
                   epilog="Exit status: 0; 1 a file cannot be read, written or run; 2 wrong command line; 70 internal error.")
    made.add_argument("--version", action="version", version=f"opennki-neuron-profile {__version__}")
    commands = made.add_subparsers(dest="command", metavar="<command>", parser_class=_Parser)
    one = commands.add_parser("capture", allow_abbrev=False, help="write the trace of a NEFF", description="Write traces of a NEFF. Where "
                              "inputs are given it is also run on them; the estimate does not depend on values.")
    one.add_argument("-n", "--neff", required=True, metavar="<file.neff>", help="the NEFF file")
    one.add_argument("-s", "--session-file", default="profile.ntff", metavar="<file.ntff>", help="the trace (default: %(default)s)")
    one.add_argument("--num-exec", type=_count, default=1, metavar="<n>", help="executions (default: %(default)s)")
    one.add_argument("--profile-nth-exec", type=_count, default=1, metavar="<n>",
                     help="keep the trace of each n-th execution, as <file>_exec_<n>.ntff from the second on (default: %(default)s)")
    one.add_argument("--ignore-exec-errors", action="store_true", help="write the trace also where the run on the inputs fails")
    one.add_argument("--save-output", action="store_true", help="write the results of the run as output<n>.npy, raw bytes")
    one.add_argument("--save-output-npy", action="store_true", help="write the results of the run as output<n>.npy, NumPy files")
    one.add_argument("--single-io", action="store_true", help="accepted, no effect: there is no memory of a device")
    one.add_argument("--enable-dge-notifs", action="store_true", help="accepted, no effect: the trace has all transfers")
    one.add_argument("inputs", nargs="*", metavar="<name> <file.npy>", help="inputs by name (default: zeros)")
    two = commands.add_parser("view", allow_abbrev=False, help="show a trace", description="Show a trace.")
    two.add_argument("-n", "--neff-path", metavar="<file.neff>", help="the NEFF file; the trace has to be one of it")
    two.add_argument("-s", "--session-file", action="append", metavar="<file.ntff>",
                     help="the trace; may be repeated, each with its --output-file")
    two.add_argument("-d", "--session-dir", metavar="<folder>", help="show all traces in a folder")
    two.add_argument("--output-format", default="html", metavar="<format>", help="summary-text, summary-json, json, perfetto (a trace that "
                     "ui.perfetto.dev opens), html (a report in one file; default); db, the vendor's default, is html here")
    two.add_argument("--output-file", action="append", metavar="<file>", help="where to write it (default: standard output; for html and "
                     "perfetto beside the trace)")
    two.add_argument("--source-root", "--nki-source-root", "--framework-source-root", default="", metavar="<folder>",
                     help="folder of the kernel's sources, to show their lines")
    two.add_argument("--terminology", action="store_true", help="explain the terms")
    two.add_argument("--force", action="store_true", help="accepted, no effect: files are replaced")
    two.add_argument("--enable-memory-tracker", action="store_true", help="accepted, no effect: the report has the use of SBUF and PSUM")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script. Returns the exit status."""
    try:
        options = parser().parse_args(argv)
        if options.command is None:
            raise _Usage("a command is missing: capture or view")
        return _capture(options) if options.command == "capture" else _view(options)
    except _Usage as exc:
        _say(f"{exc}\nSee: neuron-profile capture --help, neuron-profile view --help")
        return USAGE
    except SystemExit as exc:  # --help, --version
        return int(exc.code or 0)
    except NkiError as error:
        _say(render(error))
        return FAILED
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as exc:  # of opennki itself
        traceback.print_exc()
        _say(f"internal error: {type(exc).__name__}: {exc}; please report it: {ISSUES}")
        return INTERNAL


def _say(text: str) -> None:
    print("neuron-profile: " + text, file=sys.stderr, flush=True)


# ---- capture ----


def _capture(options: argparse.Namespace) -> int:
    neff = neff_file.load(options.neff)
    inputs = _inputs(neff, options.inputs)
    with NrtClient() as client:
        client.try_lock_device()
        if inputs is not None or options.save_output or options.save_output_npy:
            try:
                _execute(client, neff, inputs or {}, options)
            except (NkiError, IndexError) as exc:
                error = exc if isinstance(exc, NkiError) else exc.__cause__  # a runtime index outside is a plain IndexError
                if not isinstance(error, NkiError) or isinstance(error, NkiFileError):
                    raise
                if not options.ignore_exec_errors:
                    raise error from None
                _say(f"warning: the run failed: {render(error)}")
        timeline = timeline_of(neff)
    for execution in kept(options.num_exec, options.profile_nth_exec):
        name = trace_name(options.session_file, execution)
        write_file(name, ntff.encode(timeline, neff.digest, execution, options.num_exec), "the trace")
        print(f"wrote {name}")
    return OK


def _inputs(neff: Neff, words: list[str]) -> dict[str, np.ndarray] | None:
    """Arrays by name from `<name> <file>` pairs."""
    if not words:
        return None
    if len(words) % 2:
        raise _Usage("inputs are pairs of a name and a file")
    arrays = {}
    for name, path in zip(words[::2], words[1::2], strict=True):
        data = read_file(path, _MAX_INPUT, "the input")
        try:
            array = np.load(io.BytesIO(data), allow_pickle=False)
        except (ValueError, OSError, EOFError, MemoryError) as exc:
            raise NkiFileError(f"{path} is no NumPy file: {exc}", loc=UNKNOWN, rule="an input is a .npy file without objects") from None
        if not isinstance(array, np.ndarray):
            raise NkiFileError(f"{path} holds several arrays", loc=UNKNOWN, rule="an input is one .npy file")
        arrays[name] = array
    return arrays


def _execute(client: NrtClient, neff: Neff, given: dict[str, np.ndarray], options: argparse.Namespace) -> None:
    client.modelLoad(neff)
    params = {p.name: p for p in neff.kernel().params}
    unknown = [name for name in given if name not in params]
    if unknown:
        raise NkiValueError(f"{neff.func_name} has no input {unknown[0]!r}", loc=UNKNOWN, rule=f"inputs: {', '.join(params) or 'none'}")
    arrays = []
    for param in params.values():
        array = given.get(param.name)
        storage = dtypes.storage(param.dtype)
        if array is None:
            array = np.zeros(param.shape, storage)
        elif array.dtype.kind in "Vui" and array.dtype.itemsize == storage.itemsize and array.dtype != storage:
            array = np.ascontiguousarray(array).view(storage)  # dtypes that NumPy files do not have, such as bfloat16
        arrays.append(array)
    client.modelExecute(arrays)
    for number, result in enumerate(client.results):
        if options.save_output_npy:
            if not result.dtype.isbuiltin == 1:
                raise NkiFileError(f"failed to save output{number}: unsupported type for npy output: {result.dtype}", loc=UNKNOWN,
                                   fix="use --save-output, which writes raw bytes")
            buffer = io.BytesIO()
            np.save(buffer, result, allow_pickle=False)
            write_file(f"output{number}.npy", buffer.getvalue(), "the output")
        elif options.save_output:
            write_file(f"output{number}.npy", np.ascontiguousarray(result).tobytes(), "the output")


# ---- view ----


def _view(options: argparse.Namespace) -> int:
    if options.terminology:
        width = max(map(len, _TERMS))
        print("\n".join(f"{term:<{width}}  {meaning}" for term, meaning in _TERMS.items()))
        return OK
    if options.output_format not in FORMATS:
        raise _Usage(f"--output-format {options.output_format}: one of {', '.join(FORMATS)}")
    paths = list(options.session_file or [])
    if options.session_dir:
        paths += sorted(str(p) for p in Path(options.session_dir).glob("*.ntff"))
    if not paths:
        raise _Usage("a trace is missing: -s <file.ntff>")
    files = list(options.output_file or [])
    if files and len(files) != len(paths):
        raise _Usage(f"{len(paths)} traces and {len(files)} output files: one for each")
    neff = neff_file.load(options.neff_path) if options.neff_path else None
    profiles = []
    for path in paths:
        profile = ntff.load(path, options.source_root)
        if neff is not None and profile.neff != neff.digest:
            raise NkiValueError(f"{path} is a trace of another NEFF than {options.neff_path}", loc=UNKNOWN,
                                fix="capture it again, or name the NEFF that it was captured from")
        profiles.append(profile)
    form = "html" if options.output_format == "db" else options.output_format
    if not files and form in ("summary-json", "summary-text", "json"):
        sys.stdout.write(summary_json(profiles) if form == "summary-json" else "".join(_shown(p, neff, form) for p in profiles))
        sys.stdout.flush()
        return OK
    ends = {"html": ".html", "perfetto": ".trace.json"}
    for profile, file in zip(profiles, files or [os.path.splitext(p)[0] + ends[form] for p in paths], strict=True):
        write_file(file, _shown(profile, neff, form).encode("utf-8"), "the view")
        print(f"wrote {file}")
    return OK


def _shown(profile: Ntff, neff: Neff | None, form: str) -> str:
    if form == "summary-json":
        return summary_json([profile])
    if form == "summary-text":
        rows = profile.summary()
        width = max(map(len, rows))
        return "".join(f"{name:<{width}}  {value if isinstance(value, str) else f'{value:.6g}'}\n" for name, value in rows.items())
    if form == "json":
        made: dict[str, Any] = {"summary": [profile.summary()], "instruction": rows_json(profile.timeline)}
        return json.dumps(made, indent=1) + "\n"
    from opennki.report.page import page
    from opennki.report.trace_events import chrome_trace

    return page(profile.timeline) if form == "html" else chrome_trace(profile.timeline)


def run() -> None:
    """The console script."""
    sys.exit(main())


if __name__ == "__main__":
    run()
