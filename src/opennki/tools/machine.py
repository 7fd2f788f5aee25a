"""What `opennki doctor` shows: versions, settings, machine."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.text import Text

from opennki import settings
from opennki._version import __version__
from opennki.tools import reference

PACKAGES = ("numpy", "ml_dtypes", "jax", "torch", "torch-xla", "ray", "typer", "rich", "neuronx-cc")


def versions() -> list[tuple[str, str]]:
    """Installed versions, by metadata: nothing is imported."""
    rows = [("opennki", __version__), ("python", f"{platform.python_version()} ({sys.executable})")]
    for name in PACKAGES:
        try:
            rows.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            rows.append((name, "not installed"))
    return rows


def vendor() -> str:
    """Who answers `import neuronxcc.nki`."""
    from opennki import dropin

    return "the vendor's package, which is installed" if dropin._real() else "opennki, under the drop-in"


def executor() -> str:
    """What runs kernels without full checks, and why."""
    from opennki.execute.build import library

    try:
        found = library()
    except settings.SettingsError as exc:
        return f"not known: {exc.message}"
    return f"native, level {found.level}, {found.origin}" if found.lib is not None else f"interpreter: {found.origin}"


def machine() -> list[tuple[str, str]]:
    """System, processor, cores that this process may use, memory."""
    model = platform.processor() or platform.machine()
    memory = "unknown"
    cpuinfo, meminfo = Path("/proc/cpuinfo"), Path("/proc/meminfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(errors="replace").splitlines()
        model = next(
            (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model
        )
    if meminfo.exists():
        total = next(
            (line.split()[1] for line in meminfo.read_text().splitlines() if line.startswith("MemTotal")), ""
        )
        memory = f"{int(total) / 2**20:.1f} GiB" if total else memory
    affinity = getattr(os, "sched_getaffinity", None)
    usable = len(affinity(0)) if affinity else os.cpu_count() or 1
    return [
        ("system", platform.platform()),
        ("processor", model),
        ("cores", f"{usable} usable of {os.cpu_count()}"),
        ("memory", memory),
        ("executor", executor()),
    ]


def show(console: Console | None = None) -> None:
    """Print everything."""
    console = console or reference.console()
    for title, rows in (("versions", [*versions(), ("neuronxcc.nki", vendor())]), ("machine", machine())):
        table = reference.grid("", "", title=title)
        for label, value in rows:
            table.add_row(Text(label), Text(value))
        console.print(table)
    table = reference.grid("setting", "value", "default", "meaning", title="settings")
    for row in settings.describe():
        table.add_row(Text(row.name), Text(row.value), Text(row.default), Text(row.doc))
    console.print(table)
