"""Every setting in one place: name, type, default, legal values. Nothing else reads the environment.

`current()` reads the environment at the time of the call, so that a test or a notebook can change a setting
between two calls. A value that is not legal raises `SettingsError`: variable, value, what is legal.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from opennki.errors import UNKNOWN, NkiValueError

Checks = Literal["full", "fast", "off"]

MAX_THREADS = 1024
MAX_SEED = 2**32 - 1
MAX_CORES = 4096
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


class SettingsError(NkiValueError):
    """An environment variable holds a value that is not legal.

    `env` is its name, `value` the text it holds, `legal` what it may hold.
    """

    def __init__(self, env: str, value: str, legal: str) -> None:
        self.env, self.value, self.legal = env, value, legal
        super().__init__(
            f"{env}={value!r} is not a legal value",
            loc=UNKNOWN,  # the place is the environment, not a line of the kernel
            rule=f"legal values of {env}: {legal}",
            fix=f"set {env} to a legal value, or unset it for the default",
        )

    def __reduce__(self) -> tuple[type[SettingsError], tuple[str, str, str]]:
        return type(self), (self.env, self.value, self.legal)


@dataclass(frozen=True, slots=True)
class _Kind:
    """How the text of an environment variable becomes a value; `parse` raises ValueError on illegal text."""

    parse: Callable[[str], Any]
    legal: str


def _parse_bool(text: str) -> bool:
    word = text.lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError(text)


def _flag() -> _Kind:
    return _Kind(_parse_bool, "1, true, yes, on or 0, false, no, off, in any case")


def _integer(low: int, high: int) -> _Kind:
    def parse(text: str) -> int:
        # int() alone would also take '1_0' and digits of other scripts.
        if not (text.isascii() and text.isdigit() and low <= int(text) <= high):
            raise ValueError(text)
        return int(text)

    return _Kind(parse, f"an integer from {low} to {high}")


def _choice(*words: str) -> _Kind:
    def parse(text: str) -> str:
        if text.lower() not in words:
            raise ValueError(text)
        return text.lower()

    return _Kind(parse, ", ".join(words[:-1]) + " or " + words[-1])


def _parse_command(text: str) -> tuple[str, ...]:
    words = tuple(shlex.split(text))
    if not words or not words[0]:
        raise ValueError(text)
    return words


def _parse_cores(text: str) -> tuple[int, ...]:
    cores: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        low, high = int(first), int(last or first)
        if not (first.isdigit() and (last or first).isdigit() and 0 <= low <= high < MAX_CORES):
            raise ValueError(text)
        cores += range(low, high + 1)
    return tuple(dict.fromkeys(cores))


def _parse_path(text: str) -> Path:
    if "\0" in text:
        raise ValueError(text)
    path = Path(text).expanduser() if text.startswith("~") else Path(text)
    if not path.is_absolute() or (path.exists() and not path.is_dir()):
        raise ValueError(text)
    return path


def _parse_pairs(text: str) -> tuple[str, ...]:
    pairs = tuple("".join(pair.split()) for pair in text.split(",") if pair.strip())
    if any(pair.count("=") != 1 or not all(word.isidentifier() for word in pair.split("=")) for pair in pairs):
        raise ValueError(text)
    return pairs


def _parse_target(text: str) -> str:
    # Which names exist is known to isa.target, a later layer; here only what can be a name at all.
    if not text.replace("_", "").isalnum():
        raise ValueError(text)
    return text.lower()


class Rendezvous(NamedTuple):
    """Where a process of `opennki launch` meets the others: its number, how many there are, the place, and a word that strangers do not
    know."""

    process: int
    processes: int
    host: str
    port: int
    token: str

    def text(self) -> str:
        """The value of OPENNKI_RENDEZVOUS."""
        return f"{self.process}/{self.processes}@{self.host}:{self.port}#{self.token}"


def _parse_rendezvous(text: str) -> Rendezvous:
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})@([^@#\s]+):(\d{1,5})#([0-9A-Za-z]+)", text)
    if not found or not int(found[1]) < int(found[2]) or int(found[4]) > 65535:
        raise ValueError(text)
    return Rendezvous(int(found[1]), int(found[2]), found[3], int(found[4]), found[5])


def _cores() -> int:
    """Cores this process may use: its affinity mask where the system has one."""
    affinity = getattr(os, "sched_getaffinity", None)
    return min(len(affinity(0)) if affinity else os.cpu_count() or 1, MAX_THREADS)


def _default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    if base.startswith(os.sep):
        return Path(base) / "opennki"
    # A process without a home directory (some containers) still gets an absolute path.
    home = os.path.expanduser("~")
    return Path(home if os.path.isabs(home) else os.path.abspath(os.sep)) / ".cache" / "opennki"


def _setting(env: str, kind: _Kind, doc: str, *, default: Any = None,
             factory: Callable[[], Any] | None = None, shown: str = "") -> Any:
    """A field of Settings; `shown` is the default as documented where the value itself says too little."""
    metadata = {"env": env, "kind": kind, "doc": doc, "shown": shown}
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings, each of its own type. `Settings()` holds the defaults; `current()` reads them."""

    num_threads: int = _setting(
        "OPENNKI_NUM_THREADS", _integer(1, MAX_THREADS), factory=_cores,
        shown="every core the process may use",
        doc="Threads of the host executor. Results do not depend on it.")
    checks: Checks = _setting(
        "OPENNKI_CHECKS", _choice("full", "fast", "off"), default="full",
        doc="Checks of the interpreter: full = all; fast = only those with no per-element state; off = none.")
    call_checks: Checks = _setting(
        "OPENNKI_CALL_CHECKS", _choice("full", "fast", "off"), default="fast",
        doc="Checks of kernels that a framework's program calls on the CPU: full, fast or off as for OPENNKI_CHECKS.")
    executor: Literal["auto", "native", "interpreter"] = _setting(
        "OPENNKI_EXECUTOR", _choice("auto", "native", "interpreter"), default="auto",
        doc="What runs kernels without full checks: auto = native code where there is a C compiler, else the interpreter.")
    cpu_level: str | None = _setting(
        "OPENNKI_CPU_LEVEL", _choice("v1", "v3", "v4", "v8"), default=None, shown="the best that this CPU has",
        doc="Level of x86-64 (or v8 for ARM) that native code is compiled for at most.")
    jax_inline: bool = _setting(
        "OPENNKI_JAX_INLINE", _flag(), default=False,
        doc="JAX: expand kernels into the program instead of calling them (cpu, gpu, tpu).")
    strict_platform: bool = _setting(
        "OPENNKI_STRICT_PLATFORM", _flag(), default=False,
        doc="JAX: accept the neuron platform only, as the vendor does, and refuse cpu.")
    xla_host: bool = _setting(
        "OPENNKI_XLA_HOST", _flag(), default=False,
        doc="PyTorch/XLA on the CPU: run kernels through the host, and not inside of XLA's programs.")
    torch_dtypes: tuple[str, ...] = _setting(
        "OPENNKI_TORCH_DTYPES", _Kind(_parse_pairs, "pairs such as float8_e4m3fn=float8_e4m3, with commas between them"), default=(),
        shown="each dtype is that of the same name",
        doc="PyTorch: dtypes of kernels for dtypes of torch, where they are not those of the same name.")
    cache_dir: Path = _setting(
        "OPENNKI_CACHE_DIR", _Kind(_parse_path, "an absolute path (or ~/...) that is not a file"),
        factory=_default_cache_dir, shown="$XDG_CACHE_HOME/opennki, else ~/.cache/opennki",
        doc="Folder of compiled artefacts. Safe to delete.")
    tape_cache_mb: int = _setting(
        "OPENNKI_TAPE_CACHE_MB", _integer(0, 1 << 20), default=256,
        doc="Megabytes of lowered kernels kept in the folder of compiled artefacts, for processes that run the same payloads; 0 = none.")
    neuronx_cc: tuple[str, ...] = _setting(
        "OPENNKI_NEURONX_CC", _Kind(_parse_command, "a command, quoted as for a shell"),
        default=(sys.executable or "python3", "-P", "-m", "opennki.toolchain.neuronx_cc"), shown="opennki-neuronx-cc, by this Python",
        doc="Compiler command of baremetal, benchmark, profile; the vendor's neuronx-cc may take its place.")
    neuron_profile: tuple[str, ...] = _setting(
        "OPENNKI_NEURON_PROFILE", _Kind(_parse_command, "a command, quoted as for a shell"),
        default=(sys.executable or "python3", "-P", "-m", "opennki.toolchain.neuron_profile"),
        shown="opennki-neuron-profile, by this Python",
        doc="Profiler command of nki.profile.")
    check_streams: bool = _setting(
        "OPENNKI_CHECK_STREAMS", _flag(), default=False,
        doc="Runtime: before a run, run the engines' streams with their semaphores one against the other, and report races and deadlocks.")
    visible_cores: tuple[int, ...] = _setting(
        "NEURON_RT_VISIBLE_CORES", _Kind(_parse_cores, "numbers and ranges with commas, such as 0 or 0-3,6"),
        factory=lambda: tuple(range(_cores())), shown="one for each core of this machine that the process may use",
        doc="Virtual NeuronCores that baremetal, benchmark and profile may use; a run locks one.")
    platform_target_override: str | None = _setting(
        "NEURON_PLATFORM_TARGET_OVERRIDE",
        _Kind(_parse_target, "the name of a target, such as trn1, trn2 or inf2"), default=None,
        shown="none: detect the chip, else trn1 with a warning",
        doc="Target that kernels are traced for when the call names none.")
    precise_fp: bool = _setting(
        "NKI_PRECISE_FP", _flag(), default=True,
        doc="1 = bf16, fp16 and fp8 tensors are stored as such; 0 = they are kept in float32.")
    bf16_dot: bool = _setting(
        "OPENNKI_BF16_DOT", _flag(), default=False,
        doc="1 = native products of bfloat16 and float8 take the CPU's dot instructions as they are: denormals are zero, other last bits.")
    simulator: bool = _setting(
        "NKI_SIMULATOR", _flag(), default=False,
        doc="Run every call of a jitted kernel in simulation, whatever its mode.")
    dont_cache_trace_for_jax_lowering: bool = _setting(
        "NKI_DONT_CACHE_TRACE_FOR_JAX_LOWERING", _flag(), default=False,
        doc="JAX: trace the kernel again at lowering and do not reuse the trace of abstract evaluation.")
    eager: bool = _setting(
        "OPENNKI_EAGER", _flag(), default=False,
        doc="Run loop bodies concretely, so that breakpoint() and print() work inside a kernel.")
    rendezvous: Rendezvous | None = _setting(
        "OPENNKI_RENDEZVOUS", _Kind(_parse_rendezvous, "PROCESS/PROCESSES@HOST:PORT#TOKEN, as `opennki launch` sets it"), default=None,
        shown="this process is alone",
        doc="Where the processes of a distributed run meet.")
    meeting_seconds: int = _setting(
        "OPENNKI_MEETING_SECONDS", _integer(1, 86400), default=600,
        doc="JAX and PyTorch programs: how long a rank waits in a collective of a kernel for one that has not called it, where it is not "
        "known that it cannot come. Where it is known, that is reported after a second.")
    seed: int = _setting(
        "OPENNKI_SEED", _integer(0, MAX_SEED), default=0,
        doc="Seed of rand and dropout where the kernel sets none.")


class SettingRow(NamedTuple):
    """One setting as `opennki doctor` shows it; all four are text."""

    name: str
    value: str
    default: str
    doc: str


_FIELDS = tuple(fields(Settings))
_ENVS: tuple[str, ...] = tuple(f.metadata["env"] for f in _FIELDS)
# What defaults and ~ depend on besides the settings' own variables.
_AMBIENT = ("XDG_CACHE_HOME", "HOME")


@lru_cache(maxsize=16)
def _build(raw: tuple[str | None, ...], ambient: tuple[str | None, ...], cores: int) -> Settings:
    """Parse one state of the environment; `ambient` and `cores` put what defaults depend on into the key."""
    values: dict[str, Any] = {}
    for f, text in zip(_FIELDS, raw, strict=True):
        text = (text or "").strip()
        if not text:  # an empty variable is an unset one, as in most tools
            continue
        kind = cast(_Kind, f.metadata["kind"])
        try:
            values[f.name] = kind.parse(text)
        except (ValueError, OSError, RuntimeError):
            raise SettingsError(f.metadata["env"], text, kind.legal) from None
    return Settings(**values)


_ENV_OF: dict[str, str] = {f.name: f.metadata["env"] for f in _FIELDS}


def _texts(names: tuple[str, ...]) -> Callable[[], tuple[Any, ...]]:
    """A function that reads variables, as a key for what depends on them: None for one that is not set.

    os.environ encodes each name at each look-up; calls that take microseconds read what it stands on, where this Python
    has it (bytes on POSIX).
    """
    data = getattr(os.environ, "_data", None)
    encode = getattr(os.environ, "encodekey", None)
    if type(data) is dict and encode is not None:
        keys = [encode(name) for name in names]
        return lambda: tuple(map(data.get, keys))
    return lambda: tuple(map(os.environ.get, names))


NUMERICS = ("precise_fp", "bf16_dot")  # what results depend on; caches of what runs kernels have them in their keys


@lru_cache(maxsize=64)
def reader(*names: str) -> Callable[[], tuple[Any, ...]]:
    """A function that gives what `raw` gives, for callers that ask often."""
    return _texts((*[_ENV_OF[name] for name in names], *(_AMBIENT if "cache_dir" in names else ())))


def raw(*names: str) -> tuple[Any, ...]:
    """The state of some settings' variables, as a key for what depends on them. `names` are fields of Settings."""
    return reader(*names)()


_state = _texts((*_ENVS, *_AMBIENT))
_latest: tuple[Any, Settings] | None = None


def current() -> Settings:
    """The settings as the environment has them now.

    Cheap (a few microseconds): parsing happens once per state of the environment. Raises SettingsError.
    """
    global _latest
    key = (_state(), _cores())
    latest = _latest
    if latest is not None and latest[0] == key:
        return latest[1]
    get = os.environ.get
    made = _build(tuple(get(env) for env in _ENVS), tuple(get(env) for env in _AMBIENT), key[1])
    _latest = key, made
    return made


def _show(value: object) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, Rendezvous):
        return value.text()
    if isinstance(value, tuple):
        return shlex.join(value) if all(isinstance(v, str) for v in value) else ",".join(map(str, value))
    return str(value)


def describe() -> list[SettingRow]:
    """One row per setting, in order of declaration. An illegal value is shown as such and does not raise."""
    rows = []
    defaults = Settings()
    for f in _FIELDS:
        env, kind = f.metadata["env"], cast(_Kind, f.metadata["kind"])
        text = os.environ.get(env, "").strip()
        default = getattr(defaults, f.name)
        try:
            value = _show(kind.parse(text) if text else default)
        except (ValueError, OSError, RuntimeError):
            value = f"{text!r} is not legal: {kind.legal}"
        rows.append(SettingRow(env, value, f.metadata["shown"] or _show(default), f.metadata["doc"]))
    return rows


def environment_of(place: Rendezvous, threads: int) -> dict[str, str]:
    """The environment of a process of `opennki launch`: that of this one, with a meeting point, and a number of threads where none is
    set."""
    return {_ENV_OF["num_threads"]: str(threads), **os.environ, _ENV_OF["rendezvous"]: place.text()}


def worker_environment(threads: int) -> dict[str, str]:
    """The environment of a worker of `opennki sweep`: that of a command of opennki's own, with a number of threads."""
    return {**own_environment(), _ENV_OF["num_threads"]: str(threads)}


def own_environment() -> dict[str, str]:
    """The environment for a command of opennki's own: it finds this very package, also where that is not installed."""
    here = str(Path(__file__).resolve().parents[1])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))}


XLA_POOL = "PJRT_NPROC"
"""Environment variable with the size of XLA:CPU's thread pool, read when JAX starts its CPU client."""


def _xla_threads(devices: int) -> int:
    """Threads that XLA:CPU needs for programs sharded over so many devices of its own."""
    return 4 * devices


def widen_xla_pool() -> None:
    """Ask for a larger thread pool where several CPU devices are asked for, and nothing is said about the pool.

    By default it has a thread for each device. A thread is held by each device that waits in a reduction, and by
    each launch that waits because 32 steps are in flight: from then on nothing moves, with or without kernels of
    ours (seen with jaxlib 0.10.2, any sharded program with a psum whose steps are slower than their launch).
    """
    environ = os.environ
    flag = re.findall(r"--xla_force_host_platform_device_count=(\d{1,4})\b", environ.get("XLA_FLAGS", ""))
    text = environ.get("JAX_NUM_CPU_DEVICES", "")
    config = getattr(getattr(sys.modules.get("jax"), "config", None), "jax_num_cpu_devices", None)  # where it was set in the program
    asked = [int(n) for n in flag] + ([int(text)] if text.isascii() and text.isdigit() else []) + ([config] if config else [])
    devices = max(asked, default=1)
    if devices > 1 and XLA_POOL not in environ and "NPROC" not in environ and _xla_threads(devices) > (os.cpu_count() or 1):
        environ[XLA_POOL] = str(_xla_threads(devices))


def narrow_xla_pool(devices: int) -> str:
    """What to do where XLA's pool may be too small for programs on so many devices; nothing where it is as `widen_xla_pool` asks for."""
    size = os.environ.get(XLA_POOL, "")
    if devices < 2 or (size.isascii() and size.isdigit() and int(size) >= _xla_threads(devices)):
        return ""
    return (f"set {XLA_POOL}={_xla_threads(devices)} before JAX starts (importing opennki does, once XLA_FLAGS or jax_num_cpu_devices "
            "is set), as launches that wait for earlier ones may have taken all of XLA's threads")  # fmt: skip
