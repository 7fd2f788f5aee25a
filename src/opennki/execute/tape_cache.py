"""Lowered tapes in the cache folder, for processes that run the same payload later.

A file is named by all that its tape depends on: the payload, the format, this version of opennki and of its sources, the native library and
the CPU, and the settings that change tapes. It appears whole or not at all, so processes may read and write at the same time, and may be
ended at any time; what is damaged is written again. A folder that is full, read-only or not there is no error. Files are as trusted as the
compiled library that lies beside them: the checksum finds damage, not malice.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import stat
import tempfile
import time
from pathlib import Path
from typing import Any

from opennki import settings
from opennki._version import __version__
from opennki.execute import abi, build, tape_file

SUFFIX, TEMPORARY = ".tape", ".writing-"
STALE = 3600.0  # seconds after which a temporary file that nobody finished is removed


def folder() -> Path:
    """Where tapes are."""
    return settings.current().cache_dir / "tapes"


@functools.cache
def _sources() -> bytes:
    """What tells the sources of opennki from others of the same version: their names, sizes and times."""
    rows = []
    for part in ("execute", "interpret", "ir", "isa", "kernels", "passes", "trace"):
        with os.scandir(Path(__file__).parents[1] / part) as entries:
            for entry in entries:
                if entry.name.endswith(".py"):
                    state = entry.stat()
                    rows.append((part, entry.name, state.st_size, state.st_mtime_ns))
    return hashlib.sha256(repr(sorted(rows)).encode()).digest()


@functools.lru_cache(8)
def _library(name: str, level: str) -> bytes:
    """What tells a native library, and the CPU that it is for, from others."""
    state = os.stat(name)
    text = (name, state.st_size, state.st_mtime_ns, level, build.machine(), sorted(build.cpu_features()))
    return hashlib.sha256(repr(text).encode()).digest()


def place(payload: bytes, lib: Any) -> Path | None:
    """The file of the tape of a payload; None where tapes are not kept. payload: its digest."""
    if not settings.current().tape_cache_mb:
        return None
    try:
        parts = (payload, _sources(), _library(str(lib._name), build.cpu_level()[0]))
    except OSError:
        return None
    text = repr((parts, tape_file.FORMAT, __version__, abi.ABI, settings.raw(*settings.NUMERICS)))
    return folder() / (hashlib.sha256(text.encode()).hexdigest()[:40] + SUFFIX)


def read(path: Path) -> tuple[Any, tape_file.Facts] | None:
    """A tape and what the executor knows of it; None where there is none that is whole."""
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(fd, "rb") as file:
            state = os.fstat(fd)
            if not stat.S_ISREG(state.st_mode) or state.st_size > tape_file.MOST:
                return None
            data = file.read(tape_file.MOST + 1)
        found = tape_file.read(data)
    except (OSError, ValueError):
        return None
    if time.time() - state.st_mtime > 60:
        with contextlib.suppress(OSError):
            os.utime(path)  # used just now: others go first
    return found


def write(path: Path, image: Any, facts: tape_file.Facts) -> None:
    """Keep a tape, if it has a form in files and the folder takes it. Never raises."""
    most = settings.current().tape_cache_mb << 20
    try:
        data = tape_file.written(image, facts)
        if len(data) > most // 4:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, temporary = tempfile.mkstemp(prefix=TEMPORARY, dir=path.parent)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(data)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        _tidy(path, most)
    except (OSError, ValueError):
        return


def _tidy(new: Path, most: int) -> None:
    """Remove the files that were used longest ago, where all of them are too large, and what nobody finished."""
    files, total, now = [], 0, time.time()
    with os.scandir(new.parent) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # another process may have removed it
                state = entry.stat(follow_symlinks=False)
                if entry.name.startswith(TEMPORARY):
                    if now - state.st_mtime > STALE:
                        os.unlink(entry.path)
                elif entry.name.endswith(SUFFIX):
                    total += state.st_size
                    files.append((state.st_mtime, state.st_size, entry.path))
    if total <= most:
        return
    for _, size, path in sorted(files):
        if path != str(new):
            with contextlib.suppress(OSError):
                os.unlink(path)
            total -= size
            if total <= most * 3 // 4:
                break
