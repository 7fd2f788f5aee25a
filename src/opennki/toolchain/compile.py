"""What the compiler driver does with a kernel: read and verify, place, schedule, time; the files that come out."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from opennki.errors import UNKNOWN, Loc, NkiFileError, NkiParseError, NkiValueError
from opennki.ir.locations import locations_text
from opennki.ir.nodes import Kernel
from opennki.ir.print import to_text
from opennki.ir.results import call_results, serialize_dims
from opennki.ir.text import MAX_TEXT_BYTES, TEXT_FILE, RelativeFiles
from opennki.isa.target import resolve
from opennki.passes.allocate import allocate
from opennki.passes.streams import streams
from opennki.timing import estimate
from opennki.toolchain import neff
from opennki.toolchain.container import dump
from opennki.toolchain.files import read_file, write_file

PENGUIN = "penguin.py"
SIDECAR = "penguin.locations.json"
BIR_VERSION = 1
_MAX_SIDECAR = 64 << 20


@dataclass(frozen=True, slots=True)
class Source:
    """A kernel as it was written for the driver: its text, its table of locations and the folder that they are in."""

    kernel: Kernel
    text: str
    locations: str


@dataclass(frozen=True, slots=True)
class Compiled:
    """What the driver makes of a kernel: name of the function, bytes of the NEFF and of the BIR, and what its user should know."""

    func_name: str
    neff: bytes
    bir: bytes
    warnings: tuple[str, ...] = ()

    @property
    def bir_name(self) -> str:
        """Name of the BIR file: that of the function, with what no file name should have as `_`."""
        return f"{re.sub(r'[^A-Za-z0-9_]', '_', self.func_name)[:100]}.TensorizerBIR.json"


def write_tensorizer_ir(folder: str | os.PathLike[str], kernel: Kernel) -> str:
    """Write `penguin.py`, the IR text of a kernel, and beside it the table of its source locations; returns the text.

    Errors: NkiFileError; NkiValueError for a kernel that the text cannot hold.
    """
    text = to_text(kernel)
    write_file(Path(folder) / PENGUIN, text.encode("ascii"), PENGUIN)
    sidecar = {"folder": RelativeFiles(kernel).folder, "locations": locations_text(kernel)}
    write_file(Path(folder) / SIDECAR, json.dumps(sidecar).encode("ascii"), "the source locations")
    return text


def read_tensorizer_ir(path: str | os.PathLike[str]) -> Source:
    """A kernel from its IR text, with the locations that stand beside it, where there are any. The text is data and is never executed.
    Errors: NkiFileError, NkiParseError at a line of the text, the NkiError of a rule that an instruction breaks."""
    raw = read_file(path, MAX_TEXT_BYTES, "the IR text")
    folder, table = "", None
    beside = Path(path).parent / SIDECAR
    if Path(path).name == PENGUIN and os.path.lexists(beside):
        try:
            sidecar = json.loads(read_file(beside, _MAX_SIDECAR, "the source locations"))
            folder, table = sidecar["folder"], sidecar["locations"]
            if type(folder) is not str or type(table) is not str or "\0" in folder:
                raise ValueError("not text")
        except NkiFileError:
            raise
        except (ValueError, KeyError, TypeError, RecursionError) as exc:
            raise NkiParseError(f"{beside} is not a table of source locations: {exc}", loc=UNKNOWN,
                                fix=f"delete it: {PENGUIN} is compiled without locations then") from None
    try:
        kernel = neff.read_kernel(raw, None if table is None else table.encode("ascii", "replace"), folder)
    except NkiParseError as error:
        if error.loc is not None and error.loc.file in (TEXT_FILE, PENGUIN):
            error.loc = Loc(os.fspath(path), error.loc.line)
        error.fix = error.fix or "write it again, with nki.baremetal(kernel, artifacts_dir=...)"
        raise
    return Source(kernel, to_text(kernel), locations_text(kernel))


def compile_kernel(source: Source, target: str = "", note: Callable[[str], Any] = lambda text: None, *,
                   allocator: str = "auto", skip_middle_end: bool = False) -> Compiled:
    """Compile a kernel. `target`: that of the command line. `note` takes a line about each pass. allocator, skip_middle_end: see
    `passes.allocate`.

    Errors: NkiError at the line of the kernel: memory that does not suffice, another target than the traced one.
    """
    kernel = source.kernel
    traced = resolve(kernel.target)
    if target and resolve(target).name != traced.name:
        raise NkiValueError(f"{kernel.name} was traced for {kernel.target}, and the target is {target}", loc=UNKNOWN,
                            rule="a kernel is compiled for the target that it was traced for",
                            why="tile sizes and the rules of instructions depend on it",
                            fix=f"pass --target {kernel.target}, or trace it with platform_target={target!r}")

    def timed(what: str, work: Callable[[], Any]) -> Any:
        began = perf_counter()
        result = work()
        note(f"{what}: {(perf_counter() - began) * 1e3:.1f} ms")
        return result

    memory = timed("allocate", lambda: allocate(kernel, allocator=allocator, skip_middle_end=skip_middle_end, spill=True))
    engines = timed("schedule", lambda: streams(kernel, memory))
    timing = timed("time", lambda: _timing(kernel))
    names = RelativeFiles(kernel)
    placement, program = _relative(memory.to_json(), names), _relative(engines.to_json(), names)
    bir = {"tensorizer_bir": BIR_VERSION, "func_name": kernel.name, "target": kernel.target,
           "signature": serialize_dims(kernel, call_results(kernel)), "placement": placement, "streams": program}
    return Compiled(kernel.name, neff.make(kernel, source.text, source.locations, placement, program, timing,
                                           allocator=allocator, skip_middle_end=skip_middle_end), dump(bir) + b"\n", tuple(memory.notes))


def _timing(kernel: Kernel) -> dict[str, Any]:
    """What a NEFF says about the latency of its kernel."""
    timeline = estimate(kernel)
    return {"latency_us": float(timeline.latency_us), "bound_by": timeline.bound_by, "bounds_ns": timeline.bounds,
            "metrics": timeline.metrics(), "estimate": timeline.is_estimate}


def _relative(value: Any, names: RelativeFiles) -> Any:
    """Records without what is of this machine: files relative to the kernel's own, as in its table of locations."""
    if isinstance(value, dict):
        return {k: names(v) if k == "file" and isinstance(v, str) else _relative(v, names) for k, v in value.items()}
    return [_relative(v, names) for v in value] if isinstance(value, (list, tuple)) else value
