"""The kernels that run on NumPy arrays: baremetal, benchmark, profile, simulation.

The first three trace, write the IR into a work directory, run the compiler there as a command, and take the NEFF that it writes to the
runtime, the latency model or the profiler. Simulation runs the traced IR itself. The toolchain is imported by the first call
that needs it: programs of a framework do not. Source: seeds "NKI Entrypoints", "The Numpy Execution Family".
"""

from __future__ import annotations

import operator
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from opennki import settings
from opennki.errors import NkiError, NkiFileError, NkiTypeError, NkiValueError, NkiWarning, caller, user_frame
from opennki.interpret.simulate import check_written
from opennki.ir.nodes import Kernel
from opennki.ir.text import RelativeFiles
from opennki.isa import dtypes
from opennki.kernels.base import TraceKernel, adopt, leaves
from opennki.kernels.options import compile_opts
from opennki.lang.annotations import TensorType
from opennki.lang.emit import dtype_name
from opennki.toolchain import NEFF_NAME
from opennki.toolchain.files import read_file, work_folder, write_file
from opennki.trace.kernel import rebuild

if TYPE_CHECKING:
    from opennki.toolchain.bench import BenchmarkResult
    from opennki.toolchain.neff import Neff
    from opennki.toolchain.profiler import Profiler


class NumpyKernel(TraceKernel):
    """Kernels that run on NumPy arrays on this machine. `mode` is there for nki.jit and is that of the class."""

    mode = "baremetal"

    def __init__(self, func: Callable[..., Any], mode: str = "", grid: Any = None, **kwargs: Any) -> None:
        super().__init__(func, grid, **kwargs)
        self.copied()

    @staticmethod
    def new_cache() -> Any:
        """Nothing is kept between calls."""
        return None

    @classmethod
    def of_generic(cls, kernel: TraceKernel, cache: Any) -> NumpyKernel:
        """The kernel of this class for a kernel of nki.jit."""
        return cls(kernel.func, "", kernel.grid, **kernel.kwargs)

    def write_tensorizer_ir(self, folder: str | os.PathLike[str], kernel: Kernel) -> None:
        """Write the IR of a traced kernel into a folder, as `penguin.py`."""
        from opennki.toolchain.compile import write_tensorizer_ir

        write_tensorizer_ir(folder, kernel)


class SimulateKernel(NumpyKernel):
    """`mode="simulation"`: run the traced IR on the interpreter, with all checks. Nothing is compiled."""

    mode = "simulation"


class BaremetalKernel(NumpyKernel):
    """`nki.baremetal`: compile, and run once on a virtual NeuronCore.

    Keywords: save_neff_name and save_trace_name, files that get the NEFF and the trace of the run (NTFF); additional_compile_opt, more
    words for the compiler; artifacts_dir, an empty folder in which the compiler works and whose files stay. Returns what the kernel
    returns, None for a kernel that only writes into its arguments. Errors: CompileFailed, which is a subprocess.CalledProcessError;
    NkiFileError.
    """

    WHERE = "runs on a virtual NeuronCore of this machine"

    def copied(self) -> None:
        if self.kwargs.get("save_trace_name") and self.kwargs.get("save_neff_name") not in (None, NEFF_NAME):
            raise NkiValueError(
                f'save_trace_name is given and save_neff_name is not "{NEFF_NAME}"',
                rule=f'if save_trace_name is specified, save_neff_name must be set to "{NEFF_NAME}"',
            )

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from opennki.toolchain.invoke import split_options

        if settings.current().simulator and type(self) is BaremetalKernel:
            return super().call(args, kwargs)
        for value in leaves((args, kwargs)):
            if isinstance(value, TensorType) and value.shape is not None:
                raise NkiTypeError(f"the argument {value!r} has no values", rule=f"{self.func_name} runs on NumPy arrays")
        values, restore = adopt(args, kwargs)
        kernel, arrays = self.specialize_and_call(*values)
        self.accept(kernel, arrays)
        split_options(self.kwargs.get("additional_compile_opt"))
        self.say_where()
        with work_folder(self._artifacts()) as folder:
            neff = self._compile(folder, kernel)
            result = self.execute_neff(neff, kernel, arrays, folder)
            self.save(neff, folder)
        return restore(result)

    def say_where(self) -> None:
        """A warning at the user's line that no device runs the kernel; once for each line unless filters say otherwise."""
        text = f"{self.func_name}: {type(self).__name__} {self.WHERE}, not on a device"
        frame = user_frame()
        registry = None if frame is None else frame.f_globals.setdefault("__warningregistry__", {})
        loc = caller()
        warnings.warn_explicit(text, NkiWarning, loc.file, max(loc.line, 1), registry=registry)

    def accept(self, kernel: Kernel, arrays: list[Any]) -> None:
        """Refuse what cannot run, before anything is written."""
        for alloc, array in zip(kernel.params, arrays, strict=True):
            if not isinstance(array, np.ndarray):
                raise NkiTypeError(f"the argument {alloc.name!r} has no values", rule=f"{self.func_name} runs on NumPy arrays")
        check_written(kernel, arrays)

    def _artifacts(self) -> str | os.PathLike[str] | None:
        """The folder of artifacts_dir. Errors: NkiFileError where it holds anything."""
        folder: str | os.PathLike[str] | None = self.kwargs.get("artifacts_dir")
        if folder is None or not os.path.isdir(folder):
            return folder
        if os.listdir(folder):
            raise NkiFileError(f"artifacts_dir={os.fspath(folder)!r} is not empty", rule="artifacts_dir must be empty",
                               why="files of another compilation would be mixed with those of this one",
                               fix="name another folder, or empty it")
        return folder

    def _compile(self, folder: Path, kernel: Kernel) -> Neff:
        """Write the IR, run the compiler, read the NEFF."""
        from opennki.toolchain import neff as neff_file
        from opennki.toolchain.invoke import compile_in, split_options

        opts = compile_opts(self)
        words: list[str] = [*(["--internal-nki-allocator", opts.allocator] if opts.allocator != "auto" else []),
                 *(["--internal-nki-skip-middle-end"] if opts.skip_middle_end else [])]
        return neff_file.load(compile_in(folder, kernel, [*words, *split_options(self.kwargs.get("additional_compile_opt"))]))

    def execute_neff(self, neff: Neff, kernel: Kernel, arrays: list[Any], folder: Path) -> Any:
        """Run the NEFF, update the caller's arrays, return what the kernel returns."""
        from opennki.toolchain.nrt import NrtClient

        with NrtClient() as client:
            client.try_lock_device()
            client.modelLoad(neff, RelativeFiles(kernel).folder)
            client.modelExecute(arrays)
            changed: dict[int | str, np.ndarray] = {i: arrays[r.operand] for i, r in enumerate(client.outputs) if r.operand is not None}
            client.update_outputs(changed)
            return rebuild(kernel.returns, [changed.get(i, result) for i, result in enumerate(client.results)])

    def save(self, neff: Neff, folder: Path) -> None:
        """Write the files that the keywords name."""
        from opennki.toolchain.profiler import capture

        name, trace = self.kwargs.get("save_neff_name"), self.kwargs.get("save_trace_name")
        if name:
            write_file(os.path.abspath(name), read_file(folder / NEFF_NAME, 1 << 30, "the NEFF"), "the NEFF (save_neff_name)")
        if trace:
            write_file(os.path.abspath(trace), capture(neff), "the trace (save_trace_name)")


class BenchmarkKernel(BaremetalKernel):
    """`nki.benchmark`: compile, and estimate the latency. Keywords: warmup=10, iters=100, and those of baremetal.

    `benchmark_result.nc_latency.get_latency_percentile(p)` in microseconds. The values of the inputs are not used: results have the right
    shapes and dtypes and no meaning (NaN, or 0 where the dtype has none), and arrays that the kernel writes keep their values.
    """

    mode = "benchmark"
    WHERE = "estimates the latency by a timing model"
    _result: BenchmarkResult | None = None

    def copied(self) -> None:
        super().copied()
        self._result = None
        for name, default in (("warmup", 10), ("iters", 100)):
            value = self.kwargs.get(name, default)
            try:
                count = operator.index(value)
            except TypeError:
                count = -1
            if isinstance(value, bool) or count < 0:
                raise NkiValueError(f"{name}={value!r}", rule=f"{name} is a number of runs")

    @property
    def benchmark_result(self) -> BenchmarkResult:
        """Latency of the last call. Errors: NkiValueError before the first one."""
        if self._result is None:
            raise NkiValueError(f"{self.func_name} has no benchmark_result yet", rule="it is there after a call of the benchmarked kernel")
        return self._result

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return super().call(tuple(map(_filled, args)), {name: _filled(value) for name, value in kwargs.items()})

    def accept(self, kernel: Kernel, arrays: list[Any]) -> None:
        if kernel.has_collectives:
            raise NkiError("NKI not yet supports collective compute", rule="nki.benchmark runs on a single NeuronCore",
                           fix="time it with opennki.launch, or leave the collectives out")
        super().accept(kernel, arrays)

    def execute_neff(self, neff: Neff, kernel: Kernel, arrays: list[Any], folder: Path) -> Any:
        from opennki.toolchain.bench import NeuronBench
        from opennki.toolchain.nrt import NrtClient

        with NrtClient() as client:
            client.try_lock_device()
            self._result = NeuronBench(neff, self.kwargs.get("warmup", 10), self.kwargs.get("iters", 100)).run()
        print(self._result)
        by_param = dict(zip(kernel.params, arrays, strict=True))
        return rebuild(kernel.returns, [by_param[a.alloc] if a.alloc in by_param and a.is_whole else _undefined(a.shape, a.dtype)
                                        for a in kernel.outputs])


class ProfileKernel(BaremetalKernel):
    """`nki.profile`: compile, run, and write NEFF, traces (NTFF) and JSON summaries into a folder.

    Keywords: working_directory (required), save_neff_name="file.neff", save_trace_name="profile.ntff", additional_compile_opt,
    overwrite=False, profile_nth=1 (keep the trace of each n-th execution), num_execs (executions, at least profile_nth).
    Errors: ValueError without working_directory; NkiFileError for files that are there and may not be overwritten.
    """

    mode = "profile"
    WHERE = "estimates the profile by a timing model"

    def copied(self) -> None:
        if self.kwargs.get("working_directory") is None:
            raise NkiValueError("Please specify working directory", rule="nki.profile needs working_directory=")
        for name in ("profile_nth", "num_execs"):
            value = self.kwargs.get(name)
            if value is not None and (type(value) is bool or not isinstance(value, int) or value < 1):
                raise NkiValueError(f"{name}={value!r}", rule=f"{name} is a positive number")
        for name in ("save_neff_name", "save_trace_name"):
            value = self.kwargs.get(name)
            if value is not None and (not isinstance(value, str) or os.path.basename(value) != value or value in ("", ".", "..")):
                raise NkiValueError(f"{name}={value!r}", rule=f"{name} is the name of a file in working_directory")

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.profiler().check()
        return super().call(tuple(map(_filled, args)), {name: _filled(value) for name, value in kwargs.items()})

    def profiler(self) -> Profiler:
        """The profiler for the keywords of this kernel."""
        from opennki.toolchain.profiler import Profiler

        get = self.kwargs.get
        return Profiler(get("save_trace_name") or "profile.ntff", self.kwargs["working_directory"], get("num_execs"),
                        get("profile_nth") or 1, bool(get("overwrite", False)), neff_name=get("save_neff_name") or NEFF_NAME)

    def execute_neff(self, neff: Neff, kernel: Kernel, arrays: list[Any], folder: Path) -> Any:
        profiler = self.profiler()
        profiler.save_neff(read_file(folder / NEFF_NAME, 1 << 30, "the NEFF"))
        profiler.generate_profile()
        profiler.extract_ntff_json_from_profile()
        print(f"Profile results are written to {profiler.work_dir}")
        return super().execute_neff(neff, kernel, arrays, folder)

    def save(self, neff: Neff, folder: Path) -> None:
        """Nothing: everything is in working_directory."""


def _filled(value: Any) -> Any:
    """An array of zeros for an argument that is only described, `nt.tensor[[250, 512], nl.float32]`: timing
    needs no values."""
    if not isinstance(value, TensorType) or value.shape is None:
        return value
    if len(value.shape) != 2 or not isinstance(value.shape[0], (list, tuple)):
        raise NkiTypeError(
            f"the argument {value!r} describes no array",
            rule="an argument without values is nt.tensor[[sizes], dtype]",
        )
    return np.zeros(tuple(map(operator.index, value.shape[0])), dtypes.storage(dtype_name(value.shape[1])))


def _undefined(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """A result without meaning."""
    array = np.zeros(shape, np.bool_ if dtype == "bool" else dtypes.storage(dtype))
    if dtype.startswith(("float", "bfloat")):
        array[...] = np.nan
    return array
