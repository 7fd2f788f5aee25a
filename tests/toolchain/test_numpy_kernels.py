"""baremetal and benchmark: every keyword, every file, every documented error; and that nothing is lost on the way."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import opennki.dialects.neuronxcc as nki
from opennki.dialects.neuronxcc import language as nl
from opennki.dialects.neuronxcc import typing as nt
from opennki.errors import NkiError, NkiFileError, NkiParseError, NkiTypeError, NkiValueError, NkiWarning
from opennki.kernels.numpy_kernel import BaremetalKernel, BenchmarkKernel
from opennki.toolchain import invoke, neff, ntff
from opennki.toolchain.invoke import CompileFailed
from tests.toolchain.kernels import A, B, add, compiled, halves, into


WORDS = ["compile", "--framework", "XLA", "penguin.py", "--internal-tensorizer-opt-level=nki", "--pipeline", "compile", "SaveTemps"]
WORDS += ["--target", "trn1"]


def shout(name, code):
    """A compiler command of one's own: a Python program."""
    path = Path(name).absolute()
    path.write_text(f"#!{sys.executable}\n{code}")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def runs(monkeypatch):
    """Counts the commands that are run."""
    seen = []
    real = subprocess.run
    monkeypatch.setattr(invoke.subprocess, "run", lambda command, **kwargs: (seen.append(command), real(command, **kwargs))[1])
    return seen


def test_baremetal_compiles_and_runs(runs):
    np.testing.assert_array_equal(nki.baremetal(add)(A, B, 3.0), A + B * 3)
    (command,) = runs
    start = command.index("compile")
    assert command[start:] == WORDS
    assert os.listdir() == []  # the work directory was elsewhere, and is gone
    assert [n for n in os.listdir(os.environ["TMPDIR"]) if not n.startswith(f"opennki-{os.getuid()}")] == []


def test_a_kernel_is_compiled_once(runs):
    kernel = nki.baremetal(add)
    for factor in (1, 2, 3):
        np.testing.assert_array_equal(kernel(A * factor, B), A * factor + B)
    assert len(runs) == 1
    nki.baremetal(add)(A, B)
    assert len(runs) == 1
    kernel(A, B, 2.0)
    nki.baremetal(add, additional_compile_opt="-O1")(A, B)
    assert len(runs) == 3


def test_nki_jit_on_numpy_arrays_is_baremetal(runs):
    np.testing.assert_array_equal(nki.jit(add)(A, B), A + B)
    assert len(runs) == 1


def test_simulation_compiles_nothing(runs, monkeypatch):
    np.testing.assert_array_equal(nki.jit(add, mode="simulation")(A, B), A + B)
    nki.simulate_kernel(nki.baremetal(add), A, B)
    monkeypatch.setenv("NKI_SIMULATOR", "1")
    np.testing.assert_array_equal(nki.baremetal(add)(A, B), A + B)
    assert runs == []


def test_outputs_that_are_parameters(runs):
    out = np.zeros_like(A)
    assert nki.baremetal(into)(A, out) is None
    np.testing.assert_array_equal(out, A * 2)


def test_written_arrays_of_any_layout_are_updated():
    big = np.zeros((128, 32), np.float32)
    view = big[:, ::2]
    assert nki.baremetal(into)(A[::-1], view) is None
    np.testing.assert_array_equal(view, A[::-1] * 2)
    assert (big[:, 1::2] == 0).all()


def test_a_mutable_parameter_that_is_returned_is_the_callers_array():
    @nki.baremetal
    def kernel(a, acc: nt.mutable_tensor):
        nl.store(acc, nl.load(a) + nl.load(acc))
        return acc

    acc = B.copy()
    assert kernel(A, acc) is acc
    np.testing.assert_array_equal(acc, A + B)


def test_dtypes_and_structures():
    @nki.baremetal
    def kernel(a):
        outs = [nl.ndarray(a.shape, dtype=d, buffer=nl.shared_hbm) for d in (nl.float32, nl.bfloat16, nl.int32)]
        for out in outs:
            nl.store(out, nl.load(a))
        return outs[0], [outs[1], {"third": outs[2]}]

    first, (second, third) = kernel(A.astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(first, A.astype(ml_dtypes.bfloat16).astype(np.float32))
    assert second.dtype == ml_dtypes.bfloat16 and third["third"].dtype == np.int32


def test_a_failing_kernel_leaves_the_arrays_alone():
    @nki.baremetal
    def kernel(a, index, out: nt.mutable_tensor):
        nl.store(out, nl.load(a))
        where = nl.load(index)
        nl.store(out[where, nl.arange(16)[None, :]], nl.load(a))
        return out

    out = np.full_like(A, 7)
    index = np.full((128, 1), 500, np.int32)
    with pytest.raises(IndexError):
        kernel(A, index, out)
    assert (out == 7).all()
    index[:] = np.arange(128)[:, None]
    np.testing.assert_array_equal(kernel(A, index, out), A)


def test_an_error_of_a_run_is_at_the_users_line():
    @nki.baremetal
    def kernel(a, index):
        out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
        where = nl.load(index)
        nl.store(out, nl.load(a[where, nl.arange(16)[None, :]]))
        return out

    with pytest.raises(IndexError, match="out of bounds") as caught:  # a plain one, as the vendor's, with the report as its cause
        kernel(A, np.full((128, 1), 500, np.int32))
    report = caught.value.__cause__
    assert report.loc.file == __file__ and "nl.load(a[where" in str(report)


def test_arrays_that_overlap_or_are_read_only_are_refused_before_anything_runs(runs):
    with pytest.raises(NkiValueError, match="share memory"):
        nki.baremetal(into)(x := A.copy(), x)
    fixed = A.copy()
    fixed.flags.writeable = False
    with pytest.raises(NkiValueError, match="read-only"):
        nki.baremetal(into)(A, fixed)
    assert runs == []


def test_arguments_without_values(runs):
    described = nt.tensor[[128, 16], nl.float32]
    with pytest.raises(NkiTypeError, match="has no values"):
        nki.baremetal(add)(described, described)
    assert nki.benchmark(add)(described, described).shape == (128, 16)


def test_it_says_that_there_is_no_device():
    with pytest.warns(NkiWarning, match=r"add: BaremetalKernel runs on a virtual NeuronCore of this machine, not on a device"):
        nki.baremetal(add)(A, B)


# ---- files ----


def test_saved_files(alone):
    nki.baremetal(add, save_neff_name="file.neff", save_trace_name="t.ntff")(A, B)
    assert neff.load("file.neff").digest == ntff.load("t.ntff").neff
    nki.baremetal(add, save_neff_name="other.neff")(A, B)
    nki.baremetal(add, save_trace_name=str(alone / "abs.ntff"))(A, B)
    assert sorted(os.listdir()) == ["abs.ntff", "file.neff", "other.neff", "t.ntff"]


def test_a_trace_needs_the_standard_neff_name():
    for wrap in (nki.baremetal, nki.benchmark):
        for name in ("other.neff", "/tmp/file.neff", "FILE.NEFF"):
            with pytest.raises(NkiValueError, match=r'save_neff_name must be set to "file\.neff"'):
                wrap(save_neff_name=name, save_trace_name="t.ntff")(add)


def test_artifacts_stay(runs):
    nki.baremetal(add, artifacts_dir="debug")(A, B)
    assert {"add.TensorizerBIR.json", "file.neff", "log-neuron-cc.txt", "penguin.py"} <= set(os.listdir("debug"))
    os.mkdir("empty")
    nki.baremetal(add, artifacts_dir="empty")(A, B)
    assert "file.neff" in os.listdir("empty") and "penguin.py" in os.listdir("empty")


def test_an_artifacts_dir_that_is_not_empty_is_refused(runs):
    os.mkdir("full")
    Path("full/mine").write_text("precious")
    with pytest.raises(NkiFileError, match="not empty"):
        nki.baremetal(add, artifacts_dir="full")(A, B)
    assert os.listdir("full") == ["mine"] and Path("full/mine").read_text() == "precious" and runs == []


@pytest.mark.parametrize("make", [
    lambda: nki.baremetal(add, save_neff_name="missing/file.neff"), lambda: nki.baremetal(add, save_trace_name="missing/t.ntff"),
    lambda: nki.baremetal(add, artifacts_dir="file/inside"), lambda: nki.profile(add, working_directory="file/inside"),
    lambda: nki.baremetal(add, save_neff_name="folder"),
])
def test_places_that_cannot_be_written_to(make):
    Path("file").write_text("mine")
    os.mkdir("folder")
    with pytest.raises(NkiFileError, match="cannot"):
        make()(A, B)
    assert Path("file").read_text() == "mine" and os.listdir("folder") == []
    assert not [n for n in os.listdir() if n not in ("file", "folder")]


def test_a_temporary_folder_that_cannot_be_made(monkeypatch):
    import tempfile

    Path("file").write_text("")
    monkeypatch.setattr(tempfile, "tempdir", os.path.abspath("file"))
    with pytest.raises(NkiFileError, match="TMPDIR"):
        nki.baremetal(add)(A, B)


# ---- the compiler command ----


def test_a_missing_compiler(monkeypatch):
    monkeypatch.setenv("OPENNKI_NEURONX_CC", "/nowhere/neuronx-cc --quiet")
    with pytest.raises(NkiFileError, match=r"'/nowhere/neuronx-cc' is not there") as caught:
        nki.baremetal(add)(A, B)
    assert "OPENNKI_NEURONX_CC" in str(caught.value) and isinstance(caught.value, OSError)


def test_a_compiler_that_fails_is_a_called_process_error(monkeypatch):
    monkeypatch.setenv("OPENNKI_NEURONX_CC", shout("cc", "import sys; print('hidden'); print('the reason', file=sys.stderr); sys.exit(3)"))
    with pytest.raises(subprocess.CalledProcessError, match="the reason") as caught:
        nki.baremetal(add, additional_compile_opt="--one 'two three'")(A, B)
    error = caught.value
    assert error.returncode == 3 and error.cmd[-2:] == ["--one", "two three"] and error.stderr == "the reason\n"
    assert isinstance(error, NkiError) and "hidden" not in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (again.returncode, again.cmd, str(again)) == (error.returncode, error.cmd, str(error))


def test_a_compiler_that_is_killed(monkeypatch):
    monkeypatch.setenv("OPENNKI_NEURONX_CC", shout("cc", "import os; os.kill(os.getpid(), 9)"))
    with pytest.raises(CompileFailed, match="SIGKILL"):
        nki.baremetal(add)(A, B)


def test_a_compiler_that_writes_nothing_or_nonsense(monkeypatch):
    monkeypatch.setenv("OPENNKI_NEURONX_CC", shout("cc", "pass"))
    with pytest.raises(NkiFileError, match=r"wrote no file\.neff"):
        nki.baremetal(add)(A, B)
    monkeypatch.setenv("OPENNKI_NEURONX_CC", shout("cc2", "open('file.neff', 'w').write('x')"))
    with pytest.raises(NkiParseError, match="NEFF"):
        nki.baremetal(add)(A, B)
    aws = "import struct; open('file.neff', 'wb').write(struct.pack('<5Q', 2, 1024, 5, 2, 0).ljust(2000, b'0'))"
    monkeypatch.setenv("OPENNKI_NEURONX_CC", shout("cc3", aws))
    with pytest.raises(NkiParseError, match="AWS Neuron compiler"):
        nki.baremetal(add)(A, B)


def test_another_compiler_gets_the_documented_command_and_always_runs(monkeypatch):
    code = (f"import sys, shutil; open({os.path.abspath('seen')!r}, 'a').write(repr(sys.argv[1:]) + chr(10))\n"
            f"shutil.copy({os.path.abspath('made')!r}, 'file.neff')")
    Path("made").write_bytes(compiled().neff)
    monkeypatch.setenv("OPENNKI_NEURONX_CC", shout("cc", code))
    for _ in range(2):
        np.testing.assert_array_equal(nki.baremetal(add)(A, B), A + B)
    line = repr(WORDS)
    assert Path("seen").read_text() == f"{line}\n{line}\n"


def test_an_unknown_option_of_the_compiler(monkeypatch):
    with pytest.raises(CompileFailed, match="--no-such-option"):
        nki.baremetal(add, additional_compile_opt="--no-such-option")(A, B)
    for text in ("'", 3):
        with pytest.raises(NkiValueError, match="additional_compile_opt"):
            nki.baremetal(add, additional_compile_opt=text)(A, B)


def held(buffer, columns):
    @nki.baremetal
    def kernel(a):
        out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
        tiles = []
        for i in range(16):
            tile = nl.ndarray((128, columns), dtype=a.dtype, buffer=buffer)
            tile[...] = nl.copy(nl.load(a[:, nl.ds(i * columns, columns)]))
            tiles.append(tile)
        for i, tile in enumerate(tiles):
            nl.store(out[:, nl.ds(i * columns, columns)], nl.copy(tile))
        return out

    return kernel


def test_a_kernel_that_does_not_fit_psum_is_an_error_of_the_compiler_with_the_users_line():
    with pytest.raises(subprocess.CalledProcessError) as caught:
        held(nl.psum, 512)(np.zeros((128, 16 * 512), np.float32))
    assert caught.value.returncode == 1 and os.path.basename(__file__) in str(caught.value)


def test_a_kernel_that_does_not_fit_sbuf_runs_with_a_warning_as_the_compiler_spills(capfd):
    a = np.arange(128 * 16 * 8192, dtype=np.float32).reshape(128, -1)
    np.testing.assert_array_equal(held(nl.sbuf, 8192)(a), a)
    err = capfd.readouterr().err
    assert "would be spilled to HBM" in err and "alive, in bytes per partition" in err and "shrink" in err
    assert os.path.basename(__file__) in err


# ---- the cache ----


def entries():
    return sorted(Path(os.environ["OPENNKI_CACHE_DIR"], "neff").glob("*"))


def test_a_damaged_cache_is_made_again(runs):
    nki.baremetal(add)(A, B)
    (entry,) = entries()
    whole = entry.read_bytes()
    for data in (b"", whole[:500], whole[:-1], whole.replace(b"opennki-compiled", b"opennki-compilex")):
        entry.write_bytes(data)
        np.testing.assert_array_equal(nki.baremetal(add)(A, B), A + B)
        assert entry.read_bytes() == whole
    assert len(runs) == 5


def test_a_cache_entry_under_another_key_is_not_used(runs):
    nki.baremetal(add)(A, B)
    (entry,) = entries()
    nki.baremetal(add)(A, B, 2.0)
    (other,) = (e for e in entries() if e != entry)
    other.write_bytes(entry.read_bytes())
    np.testing.assert_array_equal(nki.baremetal(add)(A, B, 2.0), A + B * 2)


def test_without_a_cache_it_works(monkeypatch, runs):
    Path("file").write_text("")
    monkeypatch.setenv("OPENNKI_CACHE_DIR", os.path.abspath("file/inside"))
    for _ in range(2):
        np.testing.assert_array_equal(nki.baremetal(add)(A, B), A + B)
    assert len(runs) == 2


def test_the_cache_is_bounded(alone):
    for number in range(10):
        path = alone / f"{number}.bin"
        path.write_bytes(bytes(1000))
        os.utime(path, (number, number))
    invoke.trim(alone, 4500)
    assert sorted(p.name for p in alone.glob("*.bin")) == ["6.bin", "7.bin", "8.bin", "9.bin"]


# ---- benchmark ----


def test_benchmark_has_a_latency(capsys):
    kernel = nki.benchmark(warmup=2, iters=5)(add)
    assert isinstance(kernel, BenchmarkKernel) and isinstance(kernel, BaremetalKernel)
    with pytest.raises(NkiValueError, match="benchmark_result"):
        _ = kernel.benchmark_result
    result = kernel(A, B)
    assert result.shape == A.shape and result.dtype == A.dtype and np.isnan(result).all()
    latency = kernel.benchmark_result.nc_latency
    values = {latency.get_latency_percentile(p) for p in (0, 1, 10, 25, 50, 90, 99, 100)}
    assert len(values) == 1 and values.pop() > 0
    with pytest.raises(NkiValueError, match="percentile"):
        latency.get_latency_percentile(75)
    text = str(latency)
    assert all(word in text for word in ("min", "p25", "p50", "p90", "max", "estimate", "every percentile is the same"))
    assert text in capsys.readouterr().out


def test_a_copy_has_a_result_of_its_own():
    kernel = nki.benchmark(halves)
    two = kernel[2]
    two(A)
    assert two.benchmark_result.nc_latency is not None
    with pytest.raises(NkiValueError):
        _ = kernel.benchmark_result


def test_too_few_iterations_have_no_latency(capsys):
    kernel = nki.benchmark(add, iters=1)
    kernel(A, B)
    assert kernel.benchmark_result.nc_latency is None
    assert "too low" in capsys.readouterr().out


@pytest.mark.parametrize("keywords", [{"iters": -1}, {"warmup": "x"}, {"iters": 2.5}, {"iters": True}])
def test_numbers_of_runs(keywords):
    with pytest.raises(NkiValueError, match="number of runs"):
        nki.benchmark(add, **keywords)


def test_benchmark_refuses_collectives_with_the_documented_words(monkeypatch, runs):
    from opennki.kernels.base import TraceKernel

    real = TraceKernel.specialize_and_call

    def marked(self, args, kwargs):
        kernel, arrays = real(self, args, kwargs)
        kernel.has_collectives = True
        return kernel, arrays

    monkeypatch.setattr(TraceKernel, "specialize_and_call", marked)
    with pytest.raises(NkiError, match="NKI not yet supports collective compute"):
        nki.benchmark(add)(A, B)
    assert runs == []


def test_the_values_of_the_inputs_are_not_used():
    """Arrays that the kernel writes keep their values; results have the value that says nothing."""
    out = np.full_like(A, 7)
    assert nki.benchmark(into)(A, out) is None
    assert (out == 7).all()

    def ints(a):
        out = nl.ndarray(a.shape, dtype=nl.int32, buffer=nl.shared_hbm)
        nl.store(out, nl.load(a))
        return out

    assert (nki.benchmark(ints)(A) == 0).all()


def test_wrong_types_of_arguments():
    with pytest.raises(NkiTypeError):
        nki.baremetal(add)(A, object())
