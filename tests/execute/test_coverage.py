"""Every example of every instruction, by native code and by the interpreter; and which instructions have no native form yet."""

from __future__ import annotations

import copy
import json
import warnings

import numpy as np
import pytest
from tests.execute.agree import exact
from tests.execute.native import assert_same
from typer.testing import CliRunner

from opennki.cli import app
from opennki.execute.examples import examples
from opennki.execute.executor import executor_of
from opennki.interpret import simulate as sim
from opennki.interpret.checks import Checks, tape_of
from opennki.isa.declare import ISA
from opennki.tools import coverage

REFUSED = {"builtin_custom_op"}  # always an error
LEFT = {"device_print"}  # which writes to a file of Python
MEETS = {name for name, decl in ISA.items() if decl.suspends}  # programs that wait for each other are interpreted


@pytest.mark.parametrize("op", sorted(set(ISA) - REFUSED))
def test_examples_agree(op):
    """Bit for bit, errors word for word."""
    checks = Checks.of("off")
    count = 0
    for example in examples(op):
        count += 1
        tape = tape_of(example.kernel, checks)
        executor = executor_of(tape)
        if executor is None:
            assert tape.suspends
            continue
        one, two = (result(example, checks, tape, native) for native in (None, lambda t: executor))  # noqa: B023
        if isinstance(one, Exception) or isinstance(two, Exception):
            assert type(one) is type(two) and str(one) == str(two), (example.what, one, two)
            continue
        for want, got in zip(one, two, strict=True):
            (assert_same if exact(example.kernel) else close)(got, want, f"{op}, {example.what}")
    assert count >= 25


def close(got, want, what):
    """Approximate functions, of operands among which some are hard: a difference of rounding, which grows along a scan, or none."""
    wide, got = np.asarray(want, np.float64), np.asarray(got, np.float64)
    if what.startswith("nc_matmul"):  # where a sum overflows, whether it ends as an infinity or as NaN depends on its order
        np.testing.assert_array_equal(np.isfinite(got), np.isfinite(wide), err_msg=what)
        got = np.where(np.isfinite(wide), got, wide)
    scale = np.abs(wide[np.isfinite(wide)]).max(initial=0)
    unit = {1: 2.0**-2, 2: 2.0**-7}.get(want.dtype.itemsize, 2.0**-10)
    np.testing.assert_allclose(got, wide, rtol=unit, atol=min(scale, 1e3) * 1e-6, err_msg=what)


def result(example, checks, tape, native):
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            outputs, news = sim.simulate(example.kernel, copy.deepcopy(example.arrays), checks, tape=tape, native=native, out=Nowhere())
        except Exception as error:
            return error
    return [*outputs, *news]


class Nowhere:
    def write(self, text):
        return len(text)

    def flush(self):
        pass


def test_what_is_left_to_the_interpreter():
    """An instruction that gets a native form is taken out of the list, and none comes back."""
    found = {row.name for row in coverage.rows() if row.native < row.examples}
    assert found == LEFT | MEETS


def test_the_command():
    run = CliRunner().invoke(app, ["ops", "tensor_copy", "--coverage", "--json"])
    assert run.exit_code == 0
    document = json.loads(run.stdout)
    (row,) = document["instructions"]
    assert row["name"] == "tensor_copy" and row["examples"] == document["examples"] > 50
    assert row["native"] + sum(w["examples"] for w in row["why"]) == row["examples"]
    run = CliRunner().invoke(app, ["ops", "--coverage", "--surface", "internal"], env={"COLUMNS": "200"})
    assert run.exit_code == 0 and "tensor_copy" not in run.stdout and "partition_broadcast" in run.stdout
