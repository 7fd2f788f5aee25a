"""The command line, as a user calls it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from opennki import settings
from opennki._version import __version__
from opennki.isa.declare import ISA
from opennki.isa.scalar import SCALAR
from opennki.tools import reference
from opennki.tools.arguments import parse_argument, parse_arguments
from opennki.trace.kernel import DeclTensor

SRC = Path(__file__).parent.parent / "src"
SCRIPT = """
import sys
import numpy as np
import neuronxcc.nki as nki
import neuronxcc.nki.language as nl


@nki.jit
def add(a, b, scale=1.0):
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(a.shape[0] // 128):
        rows = nl.ds(i * 128, 128)
        nl.store(out[rows], nl.load(a[rows]) + nl.load(b[rows]) * scale)
    return out


@nki.jit
def bad(a):
    x = nl.load(a)  # HERE
    return x


def crash(a):
    return a.no_such_attribute  # HERE


if __name__ == "__main__":
    a = np.ones((256, 8), np.float32)
    what = sys.argv[1]
    if what == "args":
        print(sys.argv[1:], sys.path[0], __name__)
    elif what == "add":
        print(nki.simulate_kernel(add, a, a, 2.0).sum())
    elif what == "exit":
        sys.exit(int(sys.argv[2]))
    elif what == "message":
        sys.exit("that is all")
    elif what == "cause":
        try:
            nki.simulate_kernel(crash, a)
        except AttributeError as exc:
            raise RuntimeError("the run failed") from exc
    else:
        nki.simulate_kernel({"bad": bad, "crash": crash}[what], a)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "kernels.py"
    path.write_text(SCRIPT)
    return path


def opennki(*args, cwd=None, **env):
    """(exit status, stdout, stderr) of a command."""
    done = subprocess.run(
        [sys.executable, "-m", "opennki", *map(str, args)],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(SRC), "PYTHONWARNINGS": "ignore", **env},
    )
    return done.returncode, done.stdout, done.stderr


def test_version():
    assert opennki("--version") == (0, f"opennki {__version__}\n", "")


# ---- run ----


def test_run_gives_the_script_its_own_arguments(script, tmp_path):
    status, out, err = opennki("run", script, "args", "--help", "-x", "--module")
    assert (status, err) == (
        0,
        "",
    ) and out.strip() == f"['args', '--help', '-x', '--module'] {tmp_path} __main__"


def test_run_runs_kernels_that_import_the_vendors_names(script):
    assert opennki("run", script, "add") == (0, f"{256 * 8 * 3.0}\n", "")


def test_an_error_of_a_kernel_is_its_report_alone(script):
    status, out, err = opennki("run", script, "bad")
    assert status == 1 and out == ""
    first, *rest = err.splitlines()
    assert first.startswith(f"NkiValueError: {script}:") and "err_num_partition_exceed_arch_limit" in first
    assert rest[0].strip() == "x = nl.load(a)  # HERE" and any(
        line.strip().startswith("fix:") for line in rest
    )
    assert "Traceback" not in err and str(SRC) not in err


@pytest.mark.parametrize("what", ["crash", "cause"])
def test_other_exceptions_show_the_users_frames_only(script, what):
    status, _, err = opennki("run", script, what)
    assert status == 1 and "AttributeError" in err and "# HERE" in err and "in <module>" in err
    assert str(SRC) not in err and "runpy" not in err
    assert ("RuntimeError: the run failed" in err) is (what == "cause")


def test_full_traceback_shows_all_frames(script):
    for what in ("bad", "crash"):
        assert str(SRC) in opennki("run", "--full-traceback", script, what)[2]


@pytest.mark.parametrize(
    "args, status, text", [(("exit", "0"), 0, ""), (("exit", "7"), 7, ""), (("message",), 1, "that is all\n")]
)
def test_exit_status(script, args, status, text):
    assert opennki("run", script, *args) == (status, "", text)


def test_run_a_module(tmp_path):
    (tmp_path / "mod.py").write_text(
        "import sys, neuronxcc.nki as nki\nprint(sys.argv[1:], nki.jit.__name__, __name__)"
    )
    assert opennki("run", "-m", "mod", "a", "-b", cwd=tmp_path) == (0, "['a', '-b'] jit __main__\n", "")


def test_run_without_a_file():
    status, _, err = opennki("run", "no_such_file.py")
    assert status == 2 and "no_such_file.py" in err and "Traceback" not in err


# ---- trace ----


def test_trace_prints_ir_that_names_the_target(script):
    status, out, err = opennki(
        "trace", f"{script}:add", "--args", "256x8:float32, 256x8:bfloat16, 2.0", "--target", "trn2"
    )
    assert (status, err) == (0, "")
    assert (
        "target='trn2'" in out
        and "bfloat16, (256, 8)" in out
        and "for i1 in affine(2):" in out
        and "kernels.py" not in out
    )


def test_trace_keeps_what_the_script_prints_out_of_the_ir(tmp_path):
    (tmp_path / "loud.py").write_text(
        "import neuronxcc.nki.language as nl\nprint('hello')\n"
        "def copy(x):\n    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)\n"
        "    nl.store(out, nl.load(x))\n    return out\n"
    )
    status, out, err = opennki("trace", f"{tmp_path}/loud.py:copy", "--args", "8x8:float32")
    assert status == 0 and out.startswith("opennki_ir = 1\n") and err == "hello\n"


def test_trace_with_a_grid_locations_and_named_arguments(script):
    status, out, _ = opennki(
        "trace",
        f"{script}:add",
        "--arg",
        "256x8:float32",
        "--arg",
        "b=256x8:float32",
        "--arg",
        "scale=3.0",
        "--grid",
        "2,2",
        "--locations",
    )
    assert status == 0 and "kernels.py:10" in out and "3.0" in out and "grid" in out


@pytest.mark.parametrize(
    "args, status, text",
    [
        (["{}:ad", "--args", "8x8:float32"], 2, "it has add, bad, crash"),
        (["{}:add", "--args", "8x8:float33"], 2, "float33"),
        (["{}", "--args", "8x8:float32"], 2, "write script.py:kernel"),
        (["nothing.py:add"], 2, "no file"),
        (["{}:add", "--args", "8x8:float32", "--grid", "a"], 2, "integers"),
        (["{}:add", "--args", "8x8:float32"], 1, "missing a required argument: 'b'"),
        (["{}:bad", "--args", "256x8:float32"], 1, "err_num_partition_exceed_arch_limit"),
        (["{}:crash", "--args", "256x8:float32"], 1, "AttributeError"),
        (["{}:add", "--args", "8x8:float32, 8x8:float32", "--target", "trn9"], 1, "trn9"),
    ],
)
def test_trace_explains_what_is_wrong(script, args, status, text):
    code, out, err = opennki("trace", *[a.format(script) for a in args])
    assert code == status and out == "" and text in err
    assert str(SRC) not in err and "typer" not in err


def test_arguments_of_trace():
    assert parse_argument("128x512:bf16") == DeclTensor((128, 512), "bfloat16")
    assert parse_argument("7:int32") == DeclTensor((7,), "int32")
    for text in ("{[]: 1}", "-" * 100_000 + "1", "(" * 1000, "1 +"):
        assert parse_argument(text) == text
    assert [parse_argument(t) for t in ("3", "2.5", "True", "None", "(1, 2)", "'8x8:float32'", "word")] == [
        3,
        2.5,
        True,
        None,
        (1, 2),
        "8x8:float32",
        "word",
    ]
    assert parse_arguments(["1", "b=2x2:uint8", "c=d"]) == ([1], {"b": DeclTensor((2, 2), "uint8"), "c": "d"})


# ---- ops ----


def test_ops_lists_every_instruction_and_scalar_function():
    status, out, _ = opennki("ops", COLUMNS="200")
    assert status == 0 and all(f"\n {name} " in out for name in ISA)
    assert all(f"\n {name} " in opennki("ops", "--scalar", COLUMNS="200")[1] for name in ("exp", "add"))
    assert "nc_matmul" not in opennki("ops", "--surface", "language")[1]


def test_the_page_of_an_instruction_has_what_is_declared():
    _, out, _ = opennki("ops", "nisa.tensor_tensor", COLUMNS="200")
    for text in (
        "nki.isa.tensor_tensor(data1, data2, op, *, dtype=None, mask=None, engine=engine.unknown, **kwargs)",
        "vector, gpsimd",
        "SBUF, PSUM",
        "P <= partitions",
        "err_num_partition_exceed_arch_limit",
        "cost",
        "min_ii",
        "api_legacy",
    ):
        assert text in out


@pytest.mark.parametrize("name", ISA)
def test_every_instruction_has_a_page(name, capsys):
    decl = ISA[name]
    reference.page(decl, reference.Console(width=200, highlight=False))
    out = capsys.readouterr().out
    assert name in out and decl.engines[0] in out and "..." not in out.split("\n\n")[0]
    cost = out.split("hw: target)\n")[1].strip()
    assert cost and "lambda" not in cost and cost != name


@pytest.mark.parametrize("name", SCALAR)
def test_every_scalar_function_has_a_page(name, capsys):
    reference.scalar_page(SCALAR[name], reference.Console(width=200, highlight=False))
    assert SCALAR[name].c in capsys.readouterr().out


def test_a_name_that_is_both_has_both_pages():
    _, out, _ = opennki("ops", "reciprocal")
    assert "nki.isa.reciprocal(" in out and "scalar function" in out


def test_ops_suggests_names():
    status, out, err = opennki("ops", "tensor_tenser")
    assert status == 2 and out == "" and "tensor_tensor" in err


# ---- doctor ----


def test_doctor_shows_versions_settings_and_machine():
    status, out, _ = opennki("doctor", COLUMNS="200", OPENNKI_CHECKS="fast", OPENNKI_SEED="x")
    assert status == 0 and __version__ in out and "numpy" in out and "cores" in out
    assert all(row.name in out for row in settings.describe())
    assert "fast" in out and "'x' is not legal" in out
    status, out, _ = opennki("doctor", COLUMNS="200")
    assert status == 0 and "levels" in out and "for native code (OPENNKI_NUM_THREADS)" in out and " files, " in out and "executor" in out
