"""What is done: one line of JSON for each point in a file that is only appended to, so that a sweep goes on where it was stopped."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from opennki.errors import UNKNOWN, NkiFileError
from opennki.toolchain.files import make_folder, refuse

RESULTS = "results.jsonl"
STATUSES = ("ok", "error", "crashed", "timeout")
MOST_LINE = 1 << 20


class Store:
    """The results of a folder, by the keys of points.

    A line is written by one call and then forced to disk: a sweep that is killed loses at most the points under way. A line that is not
    whole, or no result, is left out, and its point is run again. One sweep at a time has the folder. Raises NkiFileError.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(make_folder(folder, "the folder of the sweep"))
        self.path = self.folder / RESULTS
        self.rows: dict[str, dict[str, Any]] = {}
        try:
            self.fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
        except OSError as exc:
            raise refuse(exc, self.path, "write the results of a sweep to") from None
        try:
            self._lock()
            self._read()
        except BaseException:
            self.close()
            raise

    def _lock(self) -> None:
        try:
            import fcntl
        except ImportError:  # not on this system: results are whole lines all the same
            return
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise NkiFileError(f"another sweep is writing to {self.path}", loc=UNKNOWN, fix="wait for it, or use another --out") from None

    def _read(self) -> None:
        whole = True
        with open(self.path, "rb") as file:
            while line := file.readline(MOST_LINE):
                whole = line.endswith(b"\n")
                row = _row(line) if whole else None
                if row is not None:
                    self.rows[row["key"]] = row
        if not whole:  # what comes next stands on a line of its own
            os.write(self.fd, b"\n")

    def add(self, key: str, row: dict[str, Any]) -> None:
        """Keep a result. `row` has a status of STATUSES."""
        kept = {"key": key, **row}
        try:
            os.write(self.fd, (json.dumps(kept, separators=(",", ":")) + "\n").encode())
            os.fsync(self.fd)
        except OSError as exc:
            raise refuse(exc, self.path, "write the results of a sweep to") from None
        self.rows[key] = kept

    def close(self) -> None:
        """Let go of the folder."""
        with contextlib.suppress(OSError):
            os.close(self.fd)


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    good = isinstance(row, dict) and isinstance(row.get("key"), str) and row.get("status") in STATUSES and all(
        value is None or isinstance(value, (str, int, float)) for value in row.values())
    return row if good else None
