"""The native library: found in the package, or compiled on first use, or not there.

Wheels carry it prebuilt, for each level of CPU (`lib/`, made by `python -m opennki.execute.build FOLDER` when the wheel is built). From a
checkout it is compiled once by the C compiler that is there, into the cache folder, under a name made of the sources, the flags, the
compiler and the level of the CPU. Without a compiler everything runs on the interpreter.
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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from opennki import settings
from opennki.execute import abi
from opennki.isa.scalar import C_PRELUDE, SCALAR

SOURCES = Path(__file__).parent / "native"
PREBUILT = Path(__file__).parent / "lib"
FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra",
         "-Wno-unknown-pragmas", "-pthread")
LEVELS = {"x86_64": (("v4", ("-march=x86-64-v4", "-mprefer-vector-width=512")), ("v3", ("-march=x86-64-v3",)), ("v1", ())),
          "aarch64": (("v8", ()),)}  # fmt: skip
NEEDS = {"v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}, "v3": {"avx2", "fma", "bmi2", "f16c"}, "v1": set[str]()}
"""What a CPU has to have for a level, as /proc/cpuinfo names it."""


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
    levels = levels_here()
    if len(levels) == 1:
        return levels[0]
    have = cpu_features()
    wanted = settings.current().cpu_level
    for name, flags in levels:
        if NEEDS[name] <= have and (wanted is None or name <= wanted):
            return name, flags
    return levels[-1]


def machine() -> str:
    """The architecture of this machine, under one name."""
    name = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


def levels_here() -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Names and compiler flags of the levels of this architecture, the best one first."""
    return LEVELS.get(machine(), (("generic", ()),))


@functools.cache
def cpu_features() -> frozenset[str]:
    """What the system says that the CPU has."""
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
    return _load(*_wanted(_state()))


def level() -> str:
    """The level of CPU that kernels are compiled for, whether there is a library or not."""
    return _wanted(_state())[0]


_state = settings.reader("cpu_level", "cache_dir")


@functools.lru_cache(maxsize=8)
def _wanted(state: tuple[Any, ...]) -> tuple[str, tuple[str, ...], str]:
    """What `_load` gets in a state of the settings."""
    return *cpu_level(), str(settings.current().cache_dir)


@functools.lru_cache(maxsize=8)
def _load(level: str, flags: tuple[str, ...], cache: str) -> Library:
    prebuilt = PREBUILT / file_name(level)
    if prebuilt.exists():
        try:
            return _opened(prebuilt, "in the package", level)
        except OSError as exc:  # for another system: the compiler may help
            print(f"opennki: {prebuilt} cannot be loaded: {exc}", file=sys.stderr)
    cc = compiler()
    if cc is None:
        why = "no C compiler found (gcc or clang, or a wheel with the native code, helps): kernels run on the interpreter"
        return Library(None, why, level)
    try:
        path = compile_library(cc, flags, Path(cache) / "native", level)
        return _opened(path, f"compiled by {cc}", level)
    except (OSError, subprocess.SubprocessError) as exc:
        return Library(None, f"the native library could not be built: {exc}", level)


def _opened(path: Path, origin: str, level: str) -> Library:
    """The library of a file. Raises OSError."""
    lib = C.CDLL(str(path))
    try:
        found = int(lib.nki_abi())
    except AttributeError as exc:
        raise OSError(str(exc)) from None
    if found != abi.ABI:
        return Library(None, f"the library {path} has ABI {found}, and {abi.ABI} is wanted", level)
    return Library(lib, origin, level)


def file_name(level: str) -> str:
    """Name of a prebuilt library."""
    return f"nki-{machine()}-{level}.so"


def build_all(folder: Path) -> list[Path]:
    """Compile the library for every level of this architecture into a folder: what a wheel carries. Raises OSError."""
    cc = compiler()
    if cc is None:
        raise OSError("no C compiler found")
    made = []
    with tempfile.TemporaryDirectory() as work:
        for level, flags in levels_here():
            target = folder / file_name(level)
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(compile_library(cc, flags, Path(work), level), target)
            made.append(target)
    return made


def compile_library(cc: str, flags: tuple[str, ...], folder: Path, level: str, extra: tuple[str, ...] = ()) -> Path:
    """Compile the sources, unless that has been done; returns the library. Of several processes that want it at once, one compiles."""
    header = functions_header()
    # the large ones first, so that no processor waits for the last of them
    sources = sorted(SOURCES.glob("*.c"), key=lambda path: -path.stat().st_size)
    digest = hashlib.sha256(repr((FLAGS, flags, extra, cc, _version(cc), header)).encode())
    for path in sorted(SOURCES.glob("*.[ch]")):
        digest.update(path.name.encode() + path.read_bytes())
    target = folder / f"nki-{level}-{digest.hexdigest()[:24]}.so"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder / f"{target.stem}.lock"):
        if not target.exists():
            _compile(cc, (*FLAGS, *flags, *extra), header, sources, target)
    return target


def _compile(cc: str, flags: tuple[str, ...], header: str, sources: list[Path], target: Path) -> None:
    folder = target.parent
    if sys.stderr.isatty():  # it takes some seconds, and happens once
        print(f"opennki: compiling native code for this CPU into {folder} (once, some 10 s)", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        (Path(work) / "functions.h").write_text(header, encoding="ascii")
        out = Path(work) / "lib.so"
        includes = (f"-I{work}", f"-I{SOURCES}")
        objects = [Path(work) / f"{path.stem}.o" for path in sources]
        with ThreadPoolExecutor(min(len(sources), os.cpu_count() or 1)) as pool:  # one source after the other takes 15 s
            jobs = [(cc, *flags, *includes, "-c", str(c), "-o", str(o)) for c, o in zip(sources, objects, strict=True)]
            list(pool.map(_run, jobs))
        _run((cc, *flags, "-shared", *map(str, objects), "-lm", "-o", str(out)))
        os.replace(out, target)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One process at a time; without locks on this system, all of them."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # let go when the file is closed, or its process ends
        yield


def _run(command: tuple[str, ...]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise OSError(f"{' '.join(command)}\n{done.stderr[-2000:]}")


@functools.cache
def _version(cc: str) -> str:
    return subprocess.run([cc, "--version"], capture_output=True, text=True, timeout=30).stdout.partition("\n")[0]


if __name__ == "__main__":
    for path in build_all(Path(sys.argv[1])):
        print(path)
