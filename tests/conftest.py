"""Fixtures for every test: the target, golden text."""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
from pathlib import Path

import pytest

# A deadline measures the machine, not the code. Under CI Hypothesis has a profile of its own, without one too. The environment of the tests
# on Ray goes without it.
if "CI" not in os.environ and importlib.util.find_spec("hypothesis"):
    import hypothesis

    hypothesis.settings.register_profile("without deadlines", deadline=None)
    hypothesis.settings.load_profile("without deadlines")

pytest_plugins = ["pytester"]

# Before any test imports JAX: four CPU devices, so that sharded programs have something to be sharded over.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("PJRT_NPROC", "16")  # what opennki sets itself when it is imported before JAX starts

GOLDEN = Path(__file__).parent / "golden"
_owners = {}  # file -> the test and text that it belongs to


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true",
                     help="accept: write what the tests produce to tests/golden instead of comparing")


@pytest.fixture(autouse=True)
def trn1(monkeypatch):
    """Calls that name no target are for trn1, without the warning about the fallback."""
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn1")


@pytest.fixture(autouse=True)
def no_tapes(monkeypatch):
    """Every test lowers what it runs, whatever earlier ones have left in the cache folder."""
    monkeypatch.setenv("OPENNKI_TAPE_CACHE_MB", "0")


@pytest.fixture(scope="module")
def ray_cluster():
    """A Ray cluster of three CPUs on this machine, whose processes find the opennki and the tests of this one."""
    ray = pytest.importorskip("ray", reason="Ray is not installed; make test-ray brings it")
    import opennki

    paths = [str(Path(opennki.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    ray.init(num_cpus=3, log_to_driver=False, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(paths)}})
    yield
    ray.shutdown()


@pytest.fixture
def golden(request):
    """Compare a text with tests/golden/<test file stem>/<test name>.txt; --update-golden accepts it.

    `golden(text)`, or `golden(text, "name")` where one test has several texts. A missing file is a failure.
    """
    update = request.config.getoption("--update-golden")

    def check(text, name=None):
        __tracebackhide__ = True
        # Parameters reach the test name; keep it one plain file name on every system.
        plain = [re.sub(r"[^A-Za-z0-9_.=+-]+", "-", s).strip("-") for s in (request.node.name, name) if s]
        path = GOLDEN / request.path.stem / ("-".join(plain) + ".txt")
        me = (request.node.nodeid, name)
        assert _owners.setdefault(path, me) == me, f"{path.name} already belongs to {_owners[path]}"
        if not text.endswith("\n"):
            text += "\n"
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="\n")
            return
        shown = path.relative_to(GOLDEN.parent.parent)
        if not path.exists():
            pytest.fail(f"{shown} is missing; --update-golden accepts the text:\n{text}", pytrace=False)
        expected = path.read_bytes().decode("utf-8")
        if text != expected:
            diff = difflib.unified_diff(expected.splitlines(), text.splitlines(), str(shown), "this run",
                                        lineterm="")
            pytest.fail("golden text differs; if that is meant, --update-golden accepts it\n"
                        + "\n".join(diff), pytrace=False)

    return check
