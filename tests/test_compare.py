"""`opennki compare`."""

from __future__ import annotations

import numpy as np
import pytest
from typer.testing import CliRunner

from opennki.cli import app
from opennki.execute import abi, build
from opennki.tools import compare as tool

SCRIPT = """
import neuronxcc.nki as nki
import neuronxcc.nki.language as nl

@nki.jit
def add(a, b):
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.load(a) + nl.load(b))
    return out

@nki.jit
def powers(a):
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    tile = nl.load(a) * 2.0
    grown = nl.exp(tile)
    nl.store(out, grown)
    return out
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn1")
    path = tmp_path / "k.py"
    path.write_text(SCRIPT)
    return path


def run(*words):
    return CliRunner().invoke(app, ["compare", *words])


def test_equal_results_are_exit_status_0(script):
    done = run(f"{script}:add", "--args", "128x64:bfloat16, 128x64:bfloat16")
    assert done.exit_code == 0, done.output
    assert "output 0 bfloat16[128, 64]: equal" in done.output and "same bits" in done.output


def test_what_native_code_runs_is_shown(script):
    done = run(f"{script}:add", "--args", "128x512:float32, 128x512:float32", "--tape")
    assert done.exit_code == 0 and done.stdout.endswith("same bits\new [65536] (add) t1*@0 [4]; a@0 [4]; b@0 [4]\n")


def test_the_first_instruction_that_differs_is_named(script):
    done = run(f"{script}:powers", "--args", "128x512:float32")
    assert done.exit_code == 1
    assert "first difference: activation" in done.output and "grown = nl.exp(tile)" in done.output
    assert "which is expected: exp may differ" in done.output


def test_a_difference_that_nothing_explains_is_called_an_error(script, monkeypatch):
    assert build.library().lib is not None  # its functions have the right numbers
    monkeypatch.setitem(abi.FUNCTIONS, "add", abi.FUNCTIONS["subtract"])
    done = run(f"{script}:add", "--args", "128x64:float32, 128x64:float32")
    assert done.exit_code == 1 and "which is an error" in done.output and "nl.load(a) + nl.load(b)" in done.output


def test_wrong_words(script):
    assert run("nothing.py:add").exit_code == 2
    assert run(f"{script}:missing").exit_code == 2
    assert run(f"{script}:add", "--args", "200x4:float32, 200x4:float32").exit_code == 1


def test_results_that_roundings_do_not_explain_are_an_error():
    near, far = np.full((4, 4), 1.001), np.full((4, 4), 2.0)
    assert tool._away(np.ones((4, 4)), near) < tool.EXPLAINED < tool._away(np.ones((4, 4)), far)
    assert tool._away(np.ones((4, 4)), np.full((4, 4), np.inf)) == float("inf")
    assert tool._away(np.zeros((4, 4)), np.zeros((4, 4))) == 0
