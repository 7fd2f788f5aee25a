"""Runs the compiler as a command in a work directory, and keeps what opennki's own compiler has made.

A compilation costs the start of a process, so results are kept in the cache folder under the hash of everything that they depend on.
Another compiler (`OPENNKI_NEURONX_CC`) always runs.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from opennki import settings
from opennki._version import __version__
from opennki.errors import UNKNOWN, NkiError, NkiFileError, NkiParseError, NkiValueError
from opennki.ir.nodes import Kernel
from opennki.toolchain import NEFF_NAME
from opennki.toolchain.compile import PENGUIN, SIDECAR, Compiled, write_tensorizer_ir
from opennki.toolchain.container import Kind, pack, unpack
from opennki.toolchain.files import make_folder, read_file, remove_stale, write_file

COMPILED = Kind("opennki-compiled", 1, "NEFF")
FIXED = ("compile", "--framework", "XLA", PENGUIN, "--internal-tensorizer-opt-level=nki", "--pipeline", "compile", "SaveTemps", "--target")
MAX_CACHE_BYTES = 512 << 20
"""Size of the compiler's cache above which the entries that were not used for longest are removed."""
_MAX_ENTRY = 256 << 20
_SHOWN = 16000  # characters of the compiler's messages in an error
# What the compiler's result depends on, besides its input.
_SOURCES = ("isa", "ir", "passes", "timing", "toolchain")


class CompileFailed(NkiError, subprocess.CalledProcessError):
    """The compiler ended with an error: returncode, cmd, stdout (not kept) and stderr are those of subprocess.CalledProcessError."""

    WHAT = "compiling"

    def __init__(self, returncode: int, cmd: list[str], stderr: str, func_name: str) -> None:
        how = f"was ended by signal {_signal(-returncode)}" if returncode < 0 else f"returned exit status {returncode}"
        messages = stderr.strip()[-_SHOWN:]
        NkiError.__init__(self, f"{self.WHAT} {func_name}: the command {shlex.join(cmd)} {how}" + (f"\n{messages}" if messages else ""),
                          loc=UNKNOWN)
        self.returncode, self.cmd, self.output, self.stderr = returncode, cmd, None, stderr
        self.func_name = func_name

    def __reduce__(self) -> tuple[type[CompileFailed], tuple[int, list[str], str, str]]:
        return type(self), (self.returncode, list(self.cmd), str(self.stderr), self.func_name)


def _signal(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return str(number)


def split_options(text: str | None) -> list[str]:
    """The words of additional_compile_opt. Errors: NkiValueError for what is no text, or quotes that do not match."""
    if text is not None and not isinstance(text, str):
        raise NkiValueError(f"additional_compile_opt={text!r}", rule="it is text as for a shell")
    try:
        return shlex.split(text or "")
    except ValueError as exc:
        raise NkiValueError(f"additional_compile_opt={text!r}: {exc}", rule="it is text as for a shell") from None


def command_line(target: str, extra: Sequence[str] = ()) -> list[str]:
    """The compiler command for a target: that of the setting, the fixed part, and further options."""
    return [*settings.current().neuronx_cc, *FIXED, target, *extra]


def compile_in(folder: Path, kernel: Kernel, extra: Sequence[str] = ()) -> Path:
    """Compile a kernel in a folder, with further options: writes penguin.py into it, and the compiler its files; returns the NEFF.

    Errors: CompileFailed (a CalledProcessError) where the compiler fails, NkiFileError where it cannot be started or the folder not be
    written to.
    """
    text = write_tensorizer_ir(folder, kernel)
    command = command_line(kernel.target, extra)
    own = settings.current().neuronx_cc == settings.Settings().neuronx_cc
    key = ""
    # with an option that names a file, the files that the compiler writes are not those that are kept
    if own and not any(word.startswith(("--output", "--logfile", "--verbose", "--pipeline")) for word in extra):
        key = _key(text, read_file(folder / SIDECAR, _MAX_ENTRY, "the source locations"), command)
        if _restore(key, folder):
            return folder / NEFF_NAME
    _run(command, folder, kernel.name, own)
    result = folder / NEFF_NAME
    if not result.is_file():
        raise NkiFileError(f"compiling {kernel.name}: the command {shlex.join(command)} succeeded and wrote no {NEFF_NAME}", loc=UNKNOWN,
                           rule=f"the compiler writes {NEFF_NAME} into its folder", fix="look at the setting OPENNKI_NEURONX_CC")
    if key:
        _keep(key, folder, Compiled(kernel.name, b"", b"").bir_name)
    return result


def _run(command: list[str], folder: Path, name: str, own: bool) -> None:
    try:
        done = subprocess.run(command, cwd=folder, env=settings.own_environment() if own else None, stdin=subprocess.DEVNULL,
                              stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
    except OSError as exc:
        missing = shutil.which(command[0]) is None
        error = NkiFileError(f"compiling {name}: the compiler command {command[0]!r} " + (
            "is not there" if missing else f"cannot be started: {exc.strerror or exc}"), loc=UNKNOWN,
            rule="the setting OPENNKI_NEURONX_CC names the compiler command",
            fix="unset OPENNKI_NEURONX_CC for opennki's own compiler, or give the path of the vendor's neuronx-cc")
        error.errno, error.filename = exc.errno, command[0]
        raise error from None
    messages = done.stderr.decode("utf-8", "replace")
    if done.returncode:
        raise CompileFailed(done.returncode, command, messages, name)
    if messages.strip():
        print(messages.rstrip(), file=sys.stderr)


# ---- the cache ----


def _key(text: str, locations: bytes, command: list[str]) -> str:
    made = hashlib.sha256()
    for part in (__version__, *_fingerprint(), *command[len(settings.current().neuronx_cc) :], text):
        made.update(f"{len(part)}:{part}".encode("utf-8", "surrogateescape"))
    made.update(locations)
    return made.hexdigest()


@functools.cache
def _fingerprint() -> tuple[str, ...]:
    """The state of the compiler's sources: from a checkout, a change of them is a change of the compiler."""
    package = Path(__file__).resolve().parents[1]
    rows = []
    for name in _SOURCES:
        for path in sorted((package / name).rglob("*.py")):
            with contextlib.suppress(OSError):
                state = path.stat()
                rows.append(f"{path.relative_to(package)} {state.st_size} {state.st_mtime_ns}")
    return tuple(rows)


def _place(key: str) -> Path:
    return settings.current().cache_dir / "neff" / f"{key}.bin"


def _restore(key: str, folder: Path) -> bool:
    """Write the kept files of a compilation into a folder; False where there are none that are whole."""
    place = _place(key)
    if not os.path.lexists(place):
        return False
    try:
        archive = unpack(COMPILED, read_file(place, _MAX_ENTRY, "the cache"))
        bir = archive.manifest["bir_name"]
        if type(bir) is not str or os.path.basename(bir) != bir or archive.manifest.get("key") != key:
            raise ValueError(bir)
        files = archive.files[NEFF_NAME], archive.files["bir.json"]
    except (NkiParseError, NkiFileError, KeyError, ValueError):
        with contextlib.suppress(OSError):  # damaged: it is made again
            place.unlink()
        return False
    write_file(folder / bir, files[1], "the BIR")
    write_file(folder / NEFF_NAME, files[0], "the NEFF")
    with contextlib.suppress(OSError):
        os.utime(place)
    return True


def _keep(key: str, folder: Path, bir_name: str) -> None:
    """Put the files of a compilation into the cache. A cache that cannot be written to is no error."""
    try:
        files = {NEFF_NAME: read_file(folder / NEFF_NAME, _MAX_ENTRY, "the NEFF"),
                 "bir.json": read_file(folder / bir_name, _MAX_ENTRY, "the BIR")}
        data = pack(COMPILED, {"key": key, "bir_name": bir_name}, files)
        if len(data) > _MAX_ENTRY // 2:
            return
        place = _place(key)
        make_folder(place.parent, "the cache folder")
        write_file(place, data, "the cache")
        remove_stale(place.parent)
        trim(place.parent)
    except (NkiFileError, ValueError):
        pass


def trim(folder: Path, limit: int = MAX_CACHE_BYTES) -> None:
    """Remove the entries of a cache folder that were not used for longest, down to `limit` bytes."""
    with contextlib.suppress(OSError):
        entries = [(state.st_mtime, state.st_size, path) for path in folder.glob("*.bin") if (state := path.stat())]
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries, key=lambda entry: entry[0]):
            if total <= limit:
                break
            with contextlib.suppress(OSError):
                path.unlink()
                total -= size
