"""Files: read with a bound, written whole or not at all; folders made, used and cleaned up.

What is written appears under its name complete (a temporary file beside it is renamed). Whatever the system refuses is an NkiFileError that
names the path and what was to be done with it.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from opennki.errors import UNKNOWN, NkiFileError

STALE = 3600.0
"""Seconds after which a temporary file that nobody finished is removed."""
_TEMPORARY = ".opennki-tmp-"


def refuse(error: OSError, path: str | os.PathLike[str], what: str, fix: str = "") -> NkiFileError:
    """The error for a file that the system refuses. `what` completes "cannot ...": "read the NEFF"."""
    reason = error.strerror or str(error)
    made = NkiFileError(f"cannot {what} {os.fspath(path)!r}: {reason}", loc=UNKNOWN, fix=fix)
    made.errno, made.filename = error.errno, os.fspath(path)
    return made


def read_file(path: str | os.PathLike[str], limit: int, what: str) -> bytes:
    """The bytes of a regular file of at most `limit` bytes. Errors: NkiFileError, also for what is no regular file."""
    try:
        # O_NONBLOCK: opening a pipe that nobody writes to would wait for ever
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with os.fdopen(fd, "rb") as file:
            state = os.fstat(fd)
            if not stat.S_ISREG(state.st_mode):
                raise NkiFileError(f"cannot read {what} {os.fspath(path)!r}: it is no regular file", loc=UNKNOWN)
            data = file.read(limit + 1)
    except NkiFileError:
        raise
    except (OSError, ValueError) as exc:
        raise refuse(exc if isinstance(exc, OSError) else OSError(0, str(exc)), path, f"read {what}") from None
    if len(data) > limit:
        raise NkiFileError(f"cannot read {what} {os.fspath(path)!r}: it has more than {limit} bytes", loc=UNKNOWN)
    return data


def write_file(path: str | os.PathLike[str], data: bytes, what: str) -> None:
    """Write a file whole: under its name there is the old content or the new, never a part. Errors: NkiFileError."""
    target = Path(path)
    temporary = None
    try:
        fd, temporary = tempfile.mkstemp(prefix=_TEMPORARY, dir=target.parent)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except (OSError, ValueError) as exc:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise refuse(exc if isinstance(exc, OSError) else OSError(0, str(exc)), target, f"write {what}",
                     "choose a folder that exists and can be written to") from None


def _umask() -> int:
    """The process's umask, which can only be read by setting it: from /proc where there is one, so that no other thread sees a change."""
    with contextlib.suppress(OSError, ValueError), open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0o022


def make_folder(path: str | os.PathLike[str], what: str) -> Path:
    """A folder, made if it is not there. Errors: NkiFileError."""
    try:
        os.makedirs(path, exist_ok=True)
    except (OSError, ValueError) as exc:
        raise refuse(exc if isinstance(exc, OSError) else OSError(0, str(exc)), path, f"make {what}",
                     "choose a folder that can be made and written to") from None
    return Path(path)


@contextlib.contextmanager
def work_folder(keep: str | os.PathLike[str] | None = None) -> Iterator[Path]:
    """A folder for the files of one compilation: `keep`, which stays, or a temporary one. Errors: NkiFileError."""
    if keep is not None:
        yield make_folder(keep, "the folder").resolve()
        return
    try:
        folder = tempfile.TemporaryDirectory(prefix="opennki-", ignore_cleanup_errors=True)
    except OSError as exc:
        raise refuse(exc, tempfile.gettempdir(), "make a work directory in", "set TMPDIR to a folder that can be written to") from None
    with folder as name:
        yield Path(name).resolve()


def remove_stale(folder: Path) -> None:
    """Remove temporary files that a process which was killed has left."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if entry.name.startswith(_TEMPORARY):
                with contextlib.suppress(OSError):
                    if time.time() - entry.stat(follow_symlinks=False).st_mtime > STALE:
                        os.unlink(entry.path)
