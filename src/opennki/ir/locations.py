"""The table of source locations beside the IR text: file, line and function for each line of the text.

It is kept apart so that the text, and what is hashed from it, does not change with comments, folders or
machines. Files are relative to the folder of the kernel's own file. Form: JSON `{"opennki_locations": 1,
"places": [[file, line, function], ...], "lines": [index of the place or -1, ...]}`.
"""

from __future__ import annotations

import json
import os
from typing import Any, NoReturn

from opennki.errors import Loc, NkiParseError
from opennki.ir import text as t
from opennki.ir.nodes import Kernel
from opennki.ir.print import text_and_locations

MAX_FIELD = 4096  # characters of a file or function name


def locations_text(kernel: Kernel) -> str:
    """Table of the source locations of `to_text(kernel)`."""
    _, where = text_and_locations(kernel)
    relative = t.RelativeFiles(kernel)
    places: dict[tuple[str, int, str], int] = {}
    lines = [
        -1
        if loc is None or loc.line <= 0
        else places.setdefault((relative(loc.file), loc.line, loc.function), len(places))
        for loc in where
    ]
    while lines and lines[-1] < 0:
        lines.pop()
    return json.dumps(
        {"opennki_locations": t.FORMAT_VERSION, "places": list(places), "lines": lines}, separators=(",", ":")
    )


def read_locations(text: str) -> tuple[list[Loc], list[int]]:
    """A table for `from_text(text, locations)`. Errors: NkiParseError if it is not well formed."""
    if type(text) is not str or len(text) > t.MAX_TEXT_BYTES:
        _fail("it is not a string, or too long")
    if text.count(",") > 4 * t.MAX_STATEMENTS or text.count("[") + text.count("{") > t.MAX_STATEMENTS:
        _fail("it has too many entries")  # each becomes a Python object, of many times the size of its text
    try:
        table: Any = json.loads(text)
    except (ValueError, RecursionError, MemoryError):
        _fail("it is not JSON")
    if type(table) is not dict or table.get("opennki_locations") != t.FORMAT_VERSION:
        _fail("its version is unknown")
    places, lines = table.get("places"), table.get("lines")
    if type(places) is not list or type(lines) is not list:
        _fail("it has no places or lines")
    locs = []
    for place in places:
        if (
            type(place) is not list
            or list(map(type, place)) != [str, int, str]
            or not 0 < place[1] < 1 << 31
            or max(len(place[0]), len(place[2])) > MAX_FIELD
        ):
            _fail("a place is [file, line, function]")
        locs.append(Loc(*place))
    if any(type(n) is not int or not -1 <= n < len(locs) for n in lines):
        _fail("a line has no place")
    return locs, lines


def placed_file(name: str, folder: str) -> str:
    """A source file of a table: below `folder`, where it is known that the table was made there.

    One made elsewhere gives the name of a file and no path to one, in brackets as Python names what is no file: an
    error message shows the name, and cannot be made to show a line of a file of this machine.
    """
    if folder:
        return name if name.startswith("<") else os.path.normpath(os.path.join(folder, name))
    if name.startswith("<") and name.endswith(">"):
        name = name[1:-1]
    parts = [part for part in name.replace("\\", "/").split("/") if part not in ("", ".")]
    shown = parts[-1:] if ".." in parts or name[:1] in ("/", "\\") or ":" in name else parts
    return "<" + ascii("/".join(shown))[1:-1].replace("<", "").replace(">", "") + ">"


def _fail(why: str) -> NoReturn:
    raise NkiParseError(f"this is not a table of source locations: {why}", loc=Loc("<locations>", 0))
