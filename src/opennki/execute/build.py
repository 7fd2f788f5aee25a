"""The native library: found in the package, or compiled on first use, or not there.

Wheels carry it prebuilt. From a checkout it is compiled once by the C compiler that is there, into the cache folder, under a name made of
the sources, the flags, the compiler and the level of the CPU. Without a compiler everything runs on the interpreter.
"""

from __future__ import annotations

import ctypes as C
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from opennki import settings
from opennki.execute import abi
from opennki.isa.scalar import C_PRELUDE, SCALAR

SOURCES = Path(__file__).parent / "native"
FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra",
         "-Wno-unknown-pragmas", "-pthread")
LEVELS = {"x86_64": (("v4", ("-march=x86-64-v4", "-mprefer-vector-width=512")), ("v3", ("-march=x86-64-v3",)), ("v1", ())),
          "aarch64": (("v8", ()),)}  # fmt: skip


class Library(NamedTuple):
    """The loaded library, or why there is none."""

    lib: C.CDLL | None
    origin: str  # "package", "compiled", or the reason
    level: str


def functions_header() -> str:
    """Numbers of the scalar functions, and, for the source that defines NKI_1 and NKI_2, their C expressions.

    NKI_1(name, e) and NKI_2(name, e) get the expression `e` in `a` (and `b`); NKI_EACH_1(X) and NKI_EACH_2(X) list the names. Functions on
    bits are not among them: see bits.h of the sources.
    """
    lines = ["/* generated from isa/scalar.py */"]
    lines += [f"#define NKI_FN_{name.upper()} {i}" for name, i in abi.FUNCTIONS.items()]
    lines += [f"#define NKI_FUNCTIONS {len(SCALAR)}", "#ifdef NKI_1", C_PRELUDE]
    for arity in (1, 2):
        entries = [(name, entry.c) for name, entry in sorted(SCALAR.items()) if entry.arity == arity and entry.group != "bitvec"]
        lines += [f"NKI_{arity}({name}, {c})" for name, c in entries]
        lines.append(f"#define NKI_EACH_{arity}(X) " + " ".join(f"X({name}, {abi.FUNCTIONS[name]})" for name, _ in entries))
    return "\n".join([*lines, "#endif"]) + "\n"


def cpu_level() -> tuple[str, tuple[str, ...]]:
    """Name and compiler flags of the best level that this CPU has."""
    machine = platform.machine().lower()
    levels = LEVELS.get({"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine), (("generic", ()),))
    if len(levels) == 1:
        return levels[0]
    have = _cpu_flags()
    needs = {"v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}, "v3": {"avx2", "fma", "bmi2", "f16c"}, "v1": set[str]()}
    wanted = settings.current().cpu_level
    for name, flags in levels:
        if needs[name] <= have and (wanted is None or name <= wanted):
            return name, flags
    return levels[-1]


@functools.cache
def _cpu_flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return frozenset()
    line = next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")
    return frozenset(line.partition(":")[2].split())


@functools.cache
def compiler() -> str | None:
    """The C compiler, None where there is none."""
    return next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)


def library() -> Library:
    """The library for the settings as they are now; loaded once for each level. Never raises."""
    level, flags = cpu_level()
    return _load(level, flags, str(settings.current().cache_dir))


@functools.lru_cache(maxsize=8)
def _load(level: str, flags: tuple[str, ...], cache: str) -> Library:
    cc = compiler()
    if cc is None:
        return Library(None, "no C compiler found: kernels run on the interpreter", level)
    try:
        path = compile_library(cc, flags, Path(cache) / "native", level)
        lib = C.CDLL(str(path))
        if lib.nki_abi() != abi.ABI:
            return Library(None, f"the library has ABI {lib.nki_abi()}, and {abi.ABI} is wanted", level)
    except (OSError, subprocess.SubprocessError, AttributeError) as exc:
        return Library(None, f"the native library could not be built: {exc}", level)
    return Library(lib, f"compiled by {cc}", level)


def compile_library(cc: str, flags: tuple[str, ...], folder: Path, level: str, extra: tuple[str, ...] = ()) -> Path:
    """Compile the sources, unless that has been done; returns the library. Safe when several processes do it at once."""
    header = functions_header()
    sources = sorted(SOURCES.glob("*.c"))
    digest = hashlib.sha256(repr((FLAGS, flags, extra, cc, _version(cc), header)).encode())
    for path in sorted(SOURCES.glob("*.[ch]")):
        digest.update(path.name.encode() + path.read_bytes())
    target = folder / f"nki-{level}-{digest.hexdigest()[:24]}.so"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    if sys.stderr.isatty():  # it takes some seconds, and happens once
        print(f"opennki: compiling native code for this CPU into {folder} (once)", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        (Path(work) / "functions.h").write_text(header, encoding="ascii")
        out = Path(work) / "lib.so"
        includes = (f"-I{work}", f"-I{SOURCES}")
        objects = [Path(work) / f"{path.stem}.o" for path in sources]
        with ThreadPoolExecutor(min(len(sources), os.cpu_count() or 1)) as pool:  # one source after the other takes 15 s
            jobs = [(cc, *FLAGS, *flags, *extra, *includes, "-c", str(c), "-o", str(o)) for c, o in zip(sources, objects, strict=True)]
            list(pool.map(_run, jobs))
        _run((cc, *FLAGS, "-shared", *flags, *extra, *map(str, objects), "-lm", "-o", str(out)))
        os.replace(out, target)
    return target


def _run(command: tuple[str, ...]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise OSError(f"{' '.join(command)}\n{done.stderr[-2000:]}")


@functools.cache
def _version(cc: str) -> str:
    return subprocess.run([cc, "--version"], capture_output=True, text=True, timeout=30).stdout.partition("\n")[0]
