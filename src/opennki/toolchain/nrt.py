"""The runtime: a virtual NeuronCore that one process at a time holds, on which a NEFF is loaded and run.

    with NrtClient() as client:
        client.try_lock_device()
        client.modelLoad("file.neff")
        results = client.modelExecute({"a": a, "b": b})
        client.update_outputs({"out": out})

Method names are those of the vendor's `neuronxcc.kra.kralib.NrtClient`. Execution is by native code where there is any.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import IO, Any

import numpy as np

from opennki import settings
from opennki.errors import UNKNOWN, NkiFileError, NkiValueError
from opennki.execute.executor import native
from opennki.interpret.checks import Checks
from opennki.interpret.prepared import Prepared, stored
from opennki.interpret.simulate import commit, dtypes_public
from opennki.ir.results import CallResult, call_results
from opennki.isa import dtypes
from opennki.toolchain import neff as neff_file
from opennki.toolchain.files import refuse
from opennki.toolchain.neff import Neff

_LOADED: OrderedDict[Any, Prepared] = OrderedDict()
_KEPT = 16
_lock = Lock()
_held: weakref.WeakSet[NrtClient] = weakref.WeakSet()
_WAIT = 0.02  # seconds between two looks at all cores
_SAY_AFTER = 0.2  # seconds after which a wait is announced


class NrtClient:
    """A client of one virtual core. `try_lock_device` takes it, `close` or the end of the process gives it back."""

    def __init__(self) -> None:
        self.core = -1
        self.neff: Neff | None = None
        self._file: IO[bytes] | None = None
        self._plan: Prepared | None = None
        self._root = ""
        self.outputs: list[CallResult] = []
        self._results: list[np.ndarray] | None = None

    def __enter__(self) -> NrtClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ---- the core ----
    def try_lock_device(self, wait: bool = True) -> int:
        """Lock one of the cores that the setting NEURON_RT_VISIBLE_CORES names; returns its number, -1 where all are busy, without `wait`.

        With `wait`, a busy core is waited for, with a line on standard error that names the process that holds it. The system releases the
        lock of a process that has ended, however it ended. Errors: NkiFileError where the folder of the locks cannot be written to.
        """
        if self._file is not None:
            return self.core
        cores = settings.current().visible_cores
        folder = _lock_folder()
        began, said = time.monotonic(), False
        while True:
            for core in cores:
                file = _open_lock(folder / f"core-{core}.lock")
                if _try_lock(file):
                    self._file, self.core = file, core
                    _held.add(self)
                    with contextlib.suppress(OSError):
                        file.seek(0)
                        file.write(f"{os.getpid():<20}".encode())
                        file.flush()
                    return core
                file.close()
            if not wait:
                return -1
            if not said and time.monotonic() - began > _SAY_AFTER:
                said = True
                names = f"core {cores[0]} is" if len(cores) == 1 else f"cores {', '.join(map(str, cores))} are"
                print(f"opennki: virtual {names} busy (process {_holder(folder, cores[0])}): waiting", file=sys.stderr, flush=True)
            time.sleep(_WAIT)

    def close(self) -> None:
        """Give the core back; the model is unloaded."""
        file, self._file, self.core = self._file, None, -1
        self.neff = self._plan = self._results = None
        _held.discard(self)
        if file is not None:
            _unlock(file)

    # ---- a model ----
    def modelLoad(self, neff: str | os.PathLike[str] | bytes | Neff, source_root: str = "") -> Neff:
        """Load a NEFF from a file, from bytes, or as it was read: checksums and version are checked, its kernel is planned.

        source_root: folder of the kernel's sources, for messages. Errors: NkiFileError, NkiParseError; NkiValueError without the lock.
        """
        self._locked()
        if not isinstance(neff, Neff):
            neff = neff_file.parse(neff) if isinstance(neff, bytes) else neff_file.load(neff)
        self._plan, self._root = _prepared(neff, source_root), source_root
        self.outputs = call_results(self._plan.kernel)
        self.neff, self._results = neff, None
        return neff

    def modelExecute(self, io_maps: Mapping[str, np.ndarray] | Sequence[np.ndarray], *, out: Any = None) -> dict[str, np.ndarray]:
        """Run the loaded model on arrays, by the names of its inputs or in their order; returns its results by name. No array of the caller
        is changed.

        A result that is the new value of an input has that input's name. `out` takes what device_print writes.
        Errors: NkiValueError for inputs that are missing, unknown or of another shape; what the kernel raises.
        """
        self._locked()
        plan = self._plan
        if plan is None:
            raise NkiValueError("no model is loaded", rule="modelLoad comes before modelExecute", loc=UNKNOWN)
        self._results = None
        inputs = self._inputs(plan, io_maps)
        seed = settings.current().seed or 0
        if settings.current().check_streams and self.neff is not None:
            self.neff.check_streams(inputs, self._root, seed=seed)
        arrays = [np.empty(r.shape, dtypes.storage(r.dtype)) for r in self.outputs]
        plan.run(inputs, arrays, seed=seed, out=out)
        self._results = [dtypes_public(a, r.dtype) for r, a in zip(self.outputs, arrays, strict=True)]
        return {r.name: a for r, a in zip(self.outputs, self._results, strict=True)}

    @property
    def results(self) -> list[np.ndarray]:
        """The results of the last execution, in order. Errors: NkiValueError where there was none that succeeded."""
        if self._results is None:
            raise NkiValueError("there are no results", rule="modelExecute comes before its results are used", loc=UNKNOWN)
        return self._results

    def update_outputs(self, outputs: Mapping[int | str, np.ndarray]) -> None:
        """Copy results of the last execution, which has succeeded, into arrays of the caller: by name, or by number.

        Errors: NkiValueError for an unknown name, another shape, or a read-only array; then no array is changed.
        """
        results = self.results
        known: dict[int | str, np.ndarray] = {r.name: a for r, a in zip(self.outputs, results, strict=True)}
        pairs = []
        for name, array in outputs.items():
            result = results[name] if isinstance(name, int) and 0 <= name < len(results) else known.get(name)
            if result is None:
                raise NkiValueError(f"there is no result {name!r}", rule=f"results: {', '.join(r.name for r in self.outputs)}", loc=UNKNOWN)
            if not isinstance(array, np.ndarray) or array.shape != result.shape or not array.flags.writeable:
                raise NkiValueError(f"the result {name!r} does not fit into {_shown(array)}", loc=UNKNOWN,
                                    rule=f"it goes into a writable array of shape {result.shape}")
            pairs.append((array, result))
        commit(pairs)

    def _locked(self) -> None:
        if self._file is None:
            raise NkiValueError("the virtual core is not locked", rule="try_lock_device comes first", loc=UNKNOWN)

    def _inputs(self, plan: Prepared, io_maps: Mapping[str, np.ndarray] | Sequence[np.ndarray]) -> list[np.ndarray]:
        params, name = plan.kernel.params, plan.kernel.name
        if isinstance(io_maps, Mapping):
            names = [param.name for param in params]
            for given in io_maps:
                if given not in names:
                    raise NkiValueError(f"{name} has no input {given!r}", rule=f"inputs: {', '.join(names) or 'none'}", loc=UNKNOWN)
            io_maps = [io_maps.get(param.name) for param in params]  # type: ignore[misc]
        if len(io_maps) != len(params):
            raise NkiValueError(f"{name} is run with {len(io_maps)} inputs", rule=f"it has {len(params)}", loc=UNKNOWN)
        inputs = []
        for param, array in zip(params, io_maps, strict=True):
            if not isinstance(array, np.ndarray) or array.shape != param.shape or not _is(array, param.dtype):
                raise NkiValueError(f"the input {param.name!r} of {name} is {_shown(array)}", loc=UNKNOWN,
                                    rule=f"it is an array of shape {param.shape} and dtype {param.dtype}")
            inputs.append(stored(array, param.dtype))
        return inputs


def _is(array: np.ndarray, dtype: str) -> bool:
    try:
        return bool(dtypes.canonical(array.dtype) == dtype)
    except TypeError:
        return False


def _shown(array: Any) -> str:
    return f"an array of shape {array.shape} and dtype {array.dtype}" if isinstance(array, np.ndarray) else type(array).__name__


def _prepared(neff: Neff, source_root: str) -> Prepared:
    """The plan of a NEFF's kernel, kept for the next load of the same content under the same settings."""
    checks = settings.current().call_checks
    key = neff.digest, source_root, settings.raw("call_checks", "executor", "cpu_level", "num_threads", *settings.NUMERICS)
    with _lock:
        found = _LOADED.get(key)
        if found is not None:
            _LOADED.move_to_end(key)
            return found
    kept = partial(native, payload=bytes.fromhex(neff.digest))  # what another process has lowered of it is read
    made = Prepared(neff.kernel(source_root), Checks.of(checks), None, kept if checks != "full" else None)
    with _lock:
        found = _LOADED.setdefault(key, made)
        while len(_LOADED) > _KEPT:
            _LOADED.popitem(last=False)
    return found


# ---- locks between processes ----


def _lock_folder() -> Path:
    """Folder of the locks: one for each user on this machine, not in the cache folder, which may be on a network file system."""
    name = f"opennki-{os.getuid()}" if hasattr(os, "getuid") else "opennki"
    folder = Path(tempfile.gettempdir()) / name
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as exc:
        raise refuse(exc, folder, "make the folder of the core locks", "set TMPDIR to a folder that can be written to") from None
    if hasattr(os, "getuid") and (folder.is_symlink() or folder.stat().st_uid != os.getuid()):
        raise NkiFileError(f"the folder of the core locks, {str(folder)!r}, belongs to another user", loc=UNKNOWN,
                           fix="remove it, or set TMPDIR to a folder of your own")
    return folder


def _open_lock(path: Path) -> IO[bytes]:
    try:
        return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600), "r+b")
    except OSError as exc:
        raise refuse(exc, path, "open the lock of a virtual core", "set TMPDIR to a folder that can be written to") from None


def _holder(folder: Path, core: int) -> str:
    with contextlib.suppress(OSError):
        text = (folder / f"core-{core}.lock").read_bytes()[:20].decode("ascii", "replace").strip()
        if text.isdigit():
            return text
    return "unknown"


if sys.platform == "win32":
    import msvcrt

    def _try_lock(file: IO[bytes]) -> bool:
        try:
            file.seek(64)  # beyond the number of the process, which others read
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

    def _unlock(file: IO[bytes]) -> None:
        with contextlib.suppress(OSError):
            file.seek(64)
            msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)
        file.close()
else:
    import fcntl

    def _try_lock(file: IO[bytes]) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _unlock(file: IO[bytes]) -> None:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)
        file.close()


def _after_fork() -> None:
    """A child process holds no core: its copy of the file would keep the lock after the parent has ended."""
    global _lock
    _lock = Lock()
    for client in list(_held):
        file, client._file, client.core = client._file, None, -1
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
