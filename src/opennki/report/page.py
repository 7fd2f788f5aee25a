"""The report: one HTML file that needs nothing from anywhere."""

from __future__ import annotations

import html
import json
import re
from importlib import resources
from typing import Any

from opennki.report.data import document
from opennki.timing import Timeline

SCRIPTS = ("data.js", "timeline.js", "charts.js", "main.js")


def page(timeline: Timeline, occupancy: dict[str, Any] | None = None) -> str:
    """The HTML text of a report.

    Engine timeline with zoom, hover and source lines; engine use; SBUF and PSUM over time (where `occupancy` is given); roofline; what
    bounds the kernel; source lines by cost. It loads nothing, and its content policy forbids that it does.
    """
    files = resources.files("opennki.report") / "assets"
    text = (files / "page.html").read_text(encoding="utf-8")
    # "</" would end the script element inside a string of the data, "<!--" would hide it
    data = json.dumps(document(timeline, occupancy), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    parts = {
        "TITLE": html.escape(f"{timeline.kernel} on {timeline.target}"),
        "STYLE": (files / "page.css").read_text(encoding="utf-8"),
        "DATA": data,
        "SCRIPT": "\n".join((files / name).read_text(encoding="utf-8") for name in SCRIPTS),
    }
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda found: parts[found[1]], text)
