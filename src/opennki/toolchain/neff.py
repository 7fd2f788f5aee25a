"""NEFF files of opennki: a compiled kernel as one archive (docs/neff.md).

Files in it, in order: `kernel.py`, the IR text; `locations.json`, the source line of each of its lines; `placement.json`, where each tensor
lives in SBUF and PSUM; `streams.json`, the instructions of each engine with their semaphores; `timing.json`, the estimate of its latency.
It is not loadable by AWS hardware, and says so in its manifest.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np

from opennki._version import __version__
from opennki.errors import Loc, NkiParseError
from opennki.interpret.queues import run_streams
from opennki.ir.admit import admit
from opennki.ir.locations import placed_file, read_locations
from opennki.ir.nodes import Kernel
from opennki.ir.parse import from_text
from opennki.ir.results import call_results, serialize_dims
from opennki.passes.allocate import allocate
from opennki.passes.program import Streams
from opennki.toolchain.container import MAX_BYTES, Archive, Kind, dump, load_json, pack, unpack
from opennki.toolchain.files import read_file

NEFF = Kind("opennki-neff", 1, "NEFF")
NOTICE = "This file holds a kernel for the opennki runtime. It is not loadable by AWS Neuron hardware or its runtime."
IR, LOCATIONS, PLACEMENT, STREAMS, TIMING = "kernel.py", "locations.json", "placement.json", "streams.json", "timing.json"
_FILES = (IR, LOCATIONS, PLACEMENT, STREAMS, TIMING)
_PARSED: OrderedDict[tuple[str, str], Kernel] = OrderedDict()
_KEPT = 32
_lock = Lock()


@dataclass(frozen=True, slots=True)
class Neff:
    """A compiled kernel. `digest` names its content (hex SHA-256)."""

    archive: Archive

    @property
    def digest(self) -> str:
        """Hex SHA-256 of the manifest, which holds those of all files."""
        return self.archive.digest

    @property
    def func_name(self) -> str:
        """Name of the kernel function."""
        return str(self.archive.manifest["func_name"])

    @property
    def target(self) -> str:
        """Name of the target that it was compiled for."""
        return str(self.archive.manifest["target"])

    @property
    def signature(self) -> dict[str, Any]:
        """Name, shape and dtype of inputs and outputs (`ir.results.serialize_dims`)."""
        return dict(self.archive.manifest["signature"])

    @property
    def timing(self) -> dict[str, Any]:
        """The estimate: latency_us, metrics (vendor's names, seconds and bytes), bound_by, estimate (what the numbers are)."""
        timing: dict[str, Any] = load_json(NEFF, TIMING, self.archive.files[TIMING])
        return timing

    def part(self, name: str) -> Any:
        """Placement or streams as JSON values. Errors: NkiParseError."""
        return load_json(NEFF, name, self.archive.files[name])

    def kernel(self, folder: str = "") -> Kernel:
        """The kernel, parsed and held to all limits and rules. `folder`: where the sources are, for a kernel that was compiled from there.
        Errors: NkiParseError; the NkiError of a rule that an instruction breaks."""
        key = self.digest, folder
        with _lock:
            found = _PARSED.get(key)
        if found is None:
            found = read_kernel(self.archive.files[IR], self.archive.files[LOCATIONS], folder)
            self._agrees(found)
            with _lock:
                _PARSED[key] = found
                while len(_PARSED) > _KEPT:
                    _PARSED.popitem(last=False)
        return found

    def check_streams(self, arrays: Sequence[np.ndarray], folder: str = "", order: int = 0, seed: int = 0) -> None:
        """Run the streams of the file on arrays, engine against engine, held together by their semaphores alone; results are dropped.

        `order` seeds the order in which the engines go on. Errors: NkiError for a race (with both lines), for a deadlock (with the line
        that each engine waits at), and for a kernel whose programs wait for each other; NkiParseError for streams that are none.
        """
        options = self.archive.manifest["options"]
        allocator, skip = options.get("allocator"), options.get("skip_middle_end")
        if allocator not in ("auto", "stack", "forced") or type(skip) is not bool:
            NEFF.fail("its options are not known")
        memory = allocate(self.kernel(folder), allocator=allocator, skip_middle_end=skip, spill=True)
        run_streams(self.kernel(folder), memory, Streams.from_json(self.part(STREAMS)), list(arrays), order=order, seed=seed)

    def _agrees(self, kernel: Kernel) -> None:
        said = {"func_name": kernel.name, "target": kernel.target, "signature": serialize_dims(kernel, call_results(kernel)),
                "has_collectives": kernel.has_collectives}
        for key, value in said.items():
            if dump(self.archive.manifest[key]) != dump(value):
                NEFF.fail(f"its manifest and its kernel disagree about {key}")


def make(kernel: Kernel, ir: str, locations: str, placement: Any, streams: Any, timing: Mapping[str, Any], *, allocator: str = "auto",
         skip_middle_end: bool = False) -> bytes:
    """The bytes of a NEFF file; the same for the same kernel and options on every machine."""
    manifest = {"notice": NOTICE, "producer": f"opennki {__version__}", "func_name": kernel.name, "target": kernel.target,
                "has_collectives": kernel.has_collectives, "signature": serialize_dims(kernel, call_results(kernel)),
                "options": {"allocator": allocator, "skip_middle_end": skip_middle_end}}
    parts = (ir.encode("ascii"), locations.encode("ascii"), dump(placement), dump(streams), dump(dict(timing)))
    return pack(NEFF, manifest, dict(zip(_FILES, parts, strict=True)))


def parse(data: bytes) -> Neff:
    """A NEFF from its bytes, checked: form, checksums, version, keys. The kernel is checked when it is asked for.

    Errors: NkiParseError that says what is wrong, also for a NEFF of the AWS compiler.
    """
    archive = unpack(NEFF, data)
    kinds: dict[str, type] = {"func_name": str, "target": str, "signature": dict, "has_collectives": bool, "options": dict}
    for key, kind in kinds.items():
        if type(archive.manifest.get(key)) is not kind:
            NEFF.fail(f"its manifest has no {key}")
    if tuple(archive.files) != _FILES:
        NEFF.fail("it does not hold the files of a NEFF")
    neff = Neff(archive)
    timing = load_json(NEFF, TIMING, archive.files[TIMING])
    latency = timing.get("latency_us") if type(timing) is dict else None
    if type(latency) is not float or not 0 < latency < 1e12 or type(timing.get("metrics")) is not dict:
        NEFF.fail("its timing has no latency")
    return neff


def load(path: str | os.PathLike[str]) -> Neff:
    """A NEFF from a file. Errors: NkiFileError, NkiParseError."""
    try:
        return parse(read_file(path, MAX_BYTES, "the NEFF"))
    except NkiParseError as error:
        error.message = f"{os.fspath(path)}: {error.message}"
        raise


def read_kernel(ir: bytes, locations: bytes | None, folder: str) -> Kernel:
    """A kernel from the bytes of its text and of its table of locations, held to all limits and rules. Errors: NkiParseError; the NkiError
    of a rule that an instruction breaks."""
    table: tuple[list[Loc], list[int]] | None = None
    if locations is not None:
        locs, lines = read_locations(locations.decode("ascii", "replace"))
        table = [Loc(placed_file(loc.file, folder), loc.line, loc.function) for loc in locs], lines
    return admit(from_text(ir.decode("ascii", "replace"), table), "this file", Loc("penguin.py", 1))
