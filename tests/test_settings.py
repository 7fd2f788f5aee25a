"""Settings: defaults, parsing, errors, and that the environment is read at call time."""

from __future__ import annotations

import ast
import copy
import dataclasses
import os
from pathlib import Path

import pytest

from opennki import settings
from opennki.errors import NkiError
from opennki.settings import Settings, SettingsError

SRC = Path(settings.__file__).parent
ENVS = {f.name: f.metadata["env"] for f in dataclasses.fields(Settings)}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for env in ENVS.values():
        monkeypatch.delenv(env, raising=False)


def test_environment_names_are_the_documented_ones():
    assert set(ENVS.values()) == {
        "OPENNKI_NUM_THREADS", "OPENNKI_CHECKS", "OPENNKI_STRICT_PLATFORM", "OPENNKI_CACHE_DIR",
        "OPENNKI_NEURONX_CC", "OPENNKI_EAGER", "OPENNKI_SEED", "NEURON_PLATFORM_TARGET_OVERRIDE",
        "NKI_PRECISE_FP", "NKI_SIMULATOR", "NKI_DONT_CACHE_TRACE_FOR_JAX_LOWERING", "OPENNKI_CALL_CHECKS", "OPENNKI_JAX_INLINE",
        "OPENNKI_TORCH_DTYPES", "OPENNKI_XLA_HOST", "OPENNKI_NEURON_PROFILE", "NEURON_RT_VISIBLE_CORES", "OPENNKI_CHECK_STREAMS",
        "OPENNKI_EXECUTOR", "OPENNKI_CPU_LEVEL", "OPENNKI_RENDEZVOUS", "OPENNKI_MEETING_SECONDS", "OPENNKI_TAPE_CACHE_MB",
        "OPENNKI_BF16_DOT",
    }


def test_defaults(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    now = settings.current()
    assert now == Settings()
    assert (now.checks, now.strict_platform, now.platform_target_override) == ("full", False, None)
    assert (now.precise_fp, now.simulator, now.eager, now.seed) == (True, False, False, 0)
    assert now.dont_cache_trace_for_jax_lowering is False
    assert now.cache_dir == tmp_path / "opennki"
    assert now.neuronx_cc[-1] == "opennki.toolchain.neuronx_cc"
    assert len(now.visible_cores) == now.num_threads
    assert 1 <= now.num_threads <= (os.cpu_count() or 1)


def test_default_cache_dir_follows_home(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "a"))
    assert settings.current().cache_dir == tmp_path / "a" / ".cache" / "opennki"
    monkeypatch.setenv("HOME", str(tmp_path / "b"))
    assert settings.current().cache_dir == tmp_path / "b" / ".cache" / "opennki"
    # The XDG specification: a relative path is to be ignored.
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert settings.current().cache_dir == tmp_path / "b" / ".cache" / "opennki"


@pytest.mark.parametrize("name, text, value", [
    ("num_threads", "3", 3),
    ("num_threads", " 7 ", 7),
    ("checks", "fast", "fast"),
    ("checks", "OFF", "off"),
    ("strict_platform", "1", True),
    ("strict_platform", "no", False),
    ("neuronx_cc", "neuronx-cc", ("neuronx-cc",)),
    ("neuronx_cc", "env 'A B=1' neuronx-cc", ("env", "A B=1", "neuronx-cc")),
    ("platform_target_override", "trn2", "trn2"),
    ("platform_target_override", "CORE_V4", "core_v4"),
    ("precise_fp", "0", False),
    ("simulator", "1", True),
    ("dont_cache_trace_for_jax_lowering", "TRUE", True),
    ("eager", "on", True),
    ("seed", "4294967295", 2**32 - 1),
    ("visible_cores", "0", (0,)),
    ("visible_cores", "4-6, 1,4", (4, 5, 6, 1)),
])
def test_value_is_read_at_call_time(monkeypatch, name, text, value):
    before = getattr(settings.current(), name)
    monkeypatch.setenv(ENVS[name], text)
    assert getattr(settings.current(), name) == value
    monkeypatch.delenv(ENVS[name])
    assert getattr(settings.current(), name) == before


def test_setting_changes_nothing_else(monkeypatch):
    monkeypatch.setenv("OPENNKI_SEED", "5")
    assert settings.current() == dataclasses.replace(Settings(), seed=5)


def test_empty_means_unset(monkeypatch):
    for env in ENVS.values():
        monkeypatch.setenv(env, "  ")
    assert settings.current() == Settings()


@pytest.mark.parametrize("env, text", [
    ("OPENNKI_NUM_THREADS", "0"), ("OPENNKI_NUM_THREADS", "-1"), ("OPENNKI_NUM_THREADS", "two"),
    ("OPENNKI_NUM_THREADS", "1_0"), ("OPENNKI_NUM_THREADS", "1025"), ("OPENNKI_NUM_THREADS", "\uff12"),
    ("OPENNKI_CHECKS", "some"), ("OPENNKI_STRICT_PLATFORM", "2"), ("OPENNKI_CACHE_DIR", "relative/path"),
    ("OPENNKI_CACHE_DIR", __file__), ("OPENNKI_NEURONX_CC", "neuronx-cc 'unclosed"),
    ("OPENNKI_NEURONX_CC", "''"),
    ("NEURON_PLATFORM_TARGET_OVERRIDE", "trn 1"), ("NKI_PRECISE_FP", "maybe"), ("NKI_SIMULATOR", "cpu"),
    ("NKI_DONT_CACHE_TRACE_FOR_JAX_LOWERING", "TRUEE"), ("OPENNKI_EAGER", "eager"), ("OPENNKI_SEED", "-1"),
    ("OPENNKI_SEED", "4294967296"), ("NEURON_RT_VISIBLE_CORES", "3-1"), ("NEURON_RT_VISIBLE_CORES", "-1"),
    ("NEURON_RT_VISIBLE_CORES", "0-99999999"), ("NEURON_RT_VISIBLE_CORES", "all"),
])
def test_illegal_value_names_variable_value_and_legal_values(monkeypatch, env, text):
    monkeypatch.setenv(env, text)
    with pytest.raises(SettingsError) as caught:
        settings.current()
    error = caught.value
    assert (error.env, error.value) == (env, text)
    assert isinstance(error, ValueError) and isinstance(error, NkiError)
    report = str(error)
    assert env in report and repr(text) in report and error.legal in report and len(error.legal) > 5
    row = next(row for row in settings.describe() if row.name == env)
    assert error.legal in row.value and repr(text) in row.value


def test_cache_dir_expands_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OPENNKI_CACHE_DIR", "~/artefacts")
    assert settings.current().cache_dir == tmp_path / "artefacts"


def test_describe_has_a_row_per_setting(monkeypatch):
    monkeypatch.setenv("OPENNKI_CHECKS", "off")
    rows = {row.name: row for row in settings.describe()}
    assert list(rows) == list(ENVS.values())
    assert rows["OPENNKI_CHECKS"].value == "off" and rows["OPENNKI_CHECKS"].default == "full"
    assert rows["NKI_PRECISE_FP"].value == "1"
    assert rows["NEURON_PLATFORM_TARGET_OVERRIDE"].value == "not set"
    for row in rows.values():
        assert row.default and row.doc.endswith(".")


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.current().seed = 1


def test_error_survives_a_copy():
    # Worker processes send exceptions back by copying them.
    error = copy.copy(SettingsError("OPENNKI_SEED", "x", "an integer"))
    assert (error.env, error.value, error.legal) == ("OPENNKI_SEED", "x", "an integer")


def test_nothing_else_reads_the_environment():
    readers = []
    for path in SRC.rglob("*.py"):
        if path == SRC / "settings.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb")
                     and isinstance(node.value, ast.Name) and node.value.id == "os")
            imported = (isinstance(node, ast.ImportFrom) and node.module == "os"
                        and any(a.name in ("environ", "getenv", "environb") for a in node.names))
            if named or imported:
                readers.append(f"{path.relative_to(SRC)}:{node.lineno}")
    assert not readers, f"settings belong in settings.py: {readers}"


def test_a_key_of_some_settings_follows_the_environment(monkeypatch):
    monkeypatch.delenv("OPENNKI_SEED", raising=False)
    before = settings.raw("seed", "checks")
    assert settings.raw("seed", "checks") == before and settings.current().seed == 0
    monkeypatch.setenv("OPENNKI_SEED", "7")
    assert settings.raw("seed", "checks") != before and settings.current().seed == 7
    monkeypatch.delenv("OPENNKI_SEED")
    assert settings.raw("seed", "checks") == before and settings.current().seed == 0


@pytest.mark.parametrize(("env", "threads"), [
    ({}, None),
    ({"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}, None),
    ({"XLA_FLAGS": "--xla_a=1 --xla_force_host_platform_device_count=600"}, "2400"),
    ({"JAX_NUM_CPU_DEVICES": "600"}, "2400"),
    ({"JAX_NUM_CPU_DEVICES": "600", "PJRT_NPROC": "3"}, "3"),
    ({"JAX_NUM_CPU_DEVICES": "x"}, None),
])
def test_several_cpu_devices_of_xla_get_a_larger_pool(monkeypatch, env, threads):
    for name in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "PJRT_NPROC", "NPROC"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    settings.widen_xla_pool()
    assert os.environ.get("PJRT_NPROC") == threads
    monkeypatch.delenv("PJRT_NPROC", raising=False)
