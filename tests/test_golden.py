"""The golden fixture: missing and differing text fail, --update-golden accepts, names stay plain."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def suite(pytester):
    """A test suite of its own with our conftest.py and one golden test."""
    pytester.makepyprojecttoml("[tool.pytest.ini_options]\naddopts = '-p no:cacheprovider'\n")
    tests = pytester.mkdir("tests")
    conftest = Path(__file__).with_name("conftest.py").read_text(encoding="utf-8")
    conftest = conftest.replace('pytest_plugins = ["pytester"]', "")
    (tests / "conftest.py").write_text(conftest, encoding="utf-8")

    def run(body, *args):
        (tests / "test_it.py").write_text(body, encoding="utf-8")
        return pytester.runpytest_subprocess("tests", *args)

    run.golden = tests / "golden" / "test_it"
    return run


def test_missing_differing_and_accepted(suite):
    one = "def test_one(golden):\n    golden('a × b')\n"
    result = suite(one)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*is missing; --update-golden*"])
    suite(one, "--update-golden").assert_outcomes(passed=1)
    assert (suite.golden / "test_one.txt").read_bytes() == "a × b\n".encode()
    suite(one).assert_outcomes(passed=1)
    result = suite(one.replace("a ×", "c ×"))
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["-a × b", "+c × b"])


def test_names(suite):
    body = (
        "import pytest\n@pytest.mark.parametrize('p', ['x/y', 'a.b'])\n"
        "def test_p(golden, p):\n    golden(p)\n    golden(p, 'after pass')\n")
    suite(body, "--update-golden").assert_outcomes(passed=2)
    assert sorted(p.name for p in suite.golden.iterdir()) == [
        "test_p-a.b-after-pass.txt", "test_p-a.b.txt", "test_p-x-y-after-pass.txt", "test_p-x-y.txt"]


def test_a_file_belongs_to_one_test(suite):
    body = (
        "import pytest\n@pytest.mark.parametrize('p', ['x/y', 'x-y'])\n"
        "def test_p(golden, p):\n    golden('same')\n")
    result = suite(body, "--update-golden")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*already belongs to*"])
