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


def cpu() -> str:
    """The levels of CPU that native code is made for and that this one has, and what else of it native code asks for."""
    from opennki.execute import build

    have = build.cpu_features()
    levels = [name for name, _ in build.levels_here() if build.NEEDS.get(name, set()) <= have]
    best = build.NEEDS.get(levels[0], set()) if levels else set()
    extra = {name for name in have if name.startswith(("amx", "avx512_bf16", "avx512_fp16", "avx_vnni"))}
    return f"{build.machine()}, levels {', '.join(levels) or 'none'}; {', '.join(sorted(best | extra)) or 'no features known'}"


def threads() -> str:
    """Threads that native code uses."""
    try:
        return f"{settings.current().num_threads} for native code (OPENNKI_NUM_THREADS)"
    except settings.SettingsError as exc:
        return f"not known: {exc.message}"


def caches() -> str:
    """Where compiled code is kept, and how much there is."""
    try:
        folder = settings.current().cache_dir
    except settings.SettingsError as exc:
        return f"not known: {exc.message}"
    files = [path.stat().st_size for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    return f"{folder}: {len(files)} files, {sum(files) / 2**20:.1f} MiB"


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
        ("features", cpu()),
        ("executor", executor()),
        ("threads", threads()),
        ("cache", caches()),
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
