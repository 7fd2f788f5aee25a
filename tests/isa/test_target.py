"""Target records: values against the published figures, names, detection."""

from __future__ import annotations

import dataclasses
import re
import warnings

import pytest

from opennki.errors import NkiError
from opennki.isa import target as targets
from opennki.isa.target import MULTI_CORE_TARGETS, SOURCES, TARGETS, Target, detect, nc_version, resolve

RECORDS = {id(t): t for t in TARGETS.values()}.values()
record = pytest.mark.parametrize("t", RECORDS, ids=lambda t: t.name)


@pytest.fixture(autouse=True)
def no_override(monkeypatch):
    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE", raising=False)


@pytest.mark.parametrize("name, generation, kib, usable, clocks", [
    ("trn1", 2, 192, 180224, (2.8, 1.12, 1.4, 1.4)),
    ("inf2", 2, 192, 180224, (2.8, 1.12, 1.4, 1.4)),
    ("trn2", 3, 224, 212984, (2.4, 0.96, 1.2, 1.2)),
    ("trn3", 4, 256, 245752, (2.4, 1.2, 1.2, 1.2)),
])
def test_published_figures(name, generation, kib, usable, clocks):
    t = TARGETS[name]
    assert t.generation == generation and t.nc_version is nc_version(generation)
    assert t.sbuf_partition_bytes == kib * 1024
    assert t.sbuf_usable_bytes == usable
    assert tuple(t.clock_ghz(e) for e in ("tensor", "vector", "scalar", "gpsimd")) == clocks


@record
def test_numbers_every_generation_shares(t):
    assert (t.partitions, t.pe_rows, t.pe_cols) == (128, 128, 128)
    assert (t.gemm_stationary_fmax, t.gemm_moving_fmax, t.bn_stats_fmax) == (128, 512, 512)
    assert (t.psum_banks, t.psum_bank_bytes, t.psum_fmax, t.psum_partition_bytes) == (8, 2048, 512, 16384)
    assert (t.min_ii, t.min_ii_dynamic, t.gpsimd_start) == (64, 600, 150)


@record
def test_numbers_agree_with_each_other(t):
    assert t.psum_banks * t.psum_bank_bytes == t.psum_partition_bytes
    assert t.psum_fmax * 4 == t.psum_bank_bytes
    # A float32 result of the largest moving tile fills exactly one bank.
    assert t.gemm_moving_fmax == t.psum_fmax
    # Two operations per PE and cycle give the documented peak; fp32 takes four passes.
    peak = 2 * t.pe_rows * t.pe_cols * t.clock_tensor / 1000
    assert t.tensor_tflops_bf16 == pytest.approx(peak, rel=0.01)
    assert t.tensor_tflops_fp32 == pytest.approx(peak / t.pe_cycles_fp32, rel=0.02)
    assert t.dma_engines_core * t.dma_partitions == t.partitions
    assert t.dma_engines_core * t.dma_engine_gbps == t.dma_core_gbps
    assert t.dma_engines_core * t.cores_per_device == t.dma_engines_device
    assert t.hbm_core_gbps == pytest.approx(t.hbm_device_gbps / t.cores_per_device, rel=0.01)
    assert t.dma_engine_gbps < t.dma_engine_peak_gbps
    assert t.dma_small_bytes < t.dma_good_bytes < t.dma_full_bytes
    assert (t.hwdge_instances > 0) == (t.hwdge_issue_ns > 0)
    assert t.quadrant_partitions * 4 == t.partitions
    assert t.gather_core_partitions * t.gpsimd_processors == t.partitions


def test_every_field_has_a_source_and_a_meaning():
    for f in dataclasses.fields(Target):
        assert len(SOURCES[f.name]) > 10 and targets.DOCS[f.name], f.name
    assert set(SOURCES) == {f.name for f in dataclasses.fields(Target)}
    figures = [f.name for f in dataclasses.fields(Target) if f.name not in ("name", "device", "generation")]
    for name in figures:
        assert re.search(r"aws-neuron-sdk|KLR|inferred|assumed", SOURCES[name]), name


@record
def test_fields_are_plain_scalars(t):
    # Limits and costs compute with them; a NumPy scalar or a dict would leak into messages and cache keys.
    for f in dataclasses.fields(t):
        assert type(getattr(t, f.name)) in (int, float, bool, str, nc_version), f.name
    hash(t)
    with pytest.raises(dataclasses.FrozenInstanceError):
        t.partitions = 64


def test_features_come_with_generations():
    trn1, trn2, trn3 = (TARGETS[n] for n in ("trn1", "trn2", "trn3"))
    assert (trn1.pe_double_row_k, trn2.pe_double_row_k, trn3.pe_double_row_k) == (0, 256, 256)
    assert (trn1.pe_mx_k, trn2.pe_mx_k, trn3.pe_mx_k) == (0, 0, 512)
    assert not trn1.pe_tile_32x32 and trn2.pe_tile_32x32
    assert (trn1.hwdge_instances, trn2.hwdge_instances) == (0, 2)
    assert TARGETS["inf2"] == dataclasses.replace(
        trn1, name="inf2", device="Inferentia2", link_gbps=trn1.link_gbps / 2)


def test_pe_cycles():
    t = TARGETS["trn1"]
    assert [t.pe_cycles(d) for d in ("float32", "bfloat16", "float16", "float8_e4m3", "float8_e5m2")] == [
        4, 1, 1, 1, 1]
    assert t.pe_cycles("float32", onezero=True) == 2 and t.pe_cycles("bfloat16", onezero=True) == 1
    with pytest.raises(KeyError, match="int32"):
        t.pe_cycles("int32")
    with pytest.raises(KeyError, match="dma"):
        t.clock_ghz("dma")


@pytest.mark.parametrize("alias, name", [
    ("trn1", "trn1"), ("trn1n", "trn1n"), ("inf2", "inf2"), ("trn2", "trn2"), ("trn2n", "trn2n"),
    ("trn3", "trn3"), ("gen2", "trn1"), ("gen3", "trn2"), ("gen4", "trn3"), ("core_v2", "trn1"),
    ("core_v3", "trn2"), ("core_v4", "trn3"), (" TRN2 ", "trn2"),
])
def test_resolve(alias, name):
    assert resolve(alias).name == name
    assert resolve(resolve(alias)) is resolve(alias)


def test_every_alias_is_tested_above():
    marks = test_resolve.pytestmark[0].args[1]
    assert {alias for alias, _ in marks} >= set(TARGETS)


@pytest.mark.parametrize("bad", ["trn9", "", "trn", None, 2])
def test_unknown_target_lists_the_known_ones(bad):
    with pytest.raises(NkiError) as caught:
        resolve(bad)
    report = str(caught.value)
    assert repr(bad) in report
    for name in TARGETS:
        assert name in report


def test_multi_core_targets():
    assert MULTI_CORE_TARGETS == {"trn2", "trn2n", "trn3", "core_v4", "gen3"}
    assert {n for n, t in TARGETS.items() if t.multi_core} == {n for n, t in TARGETS.items() if t.max_lnc > 1}
    assert not resolve("trn1").multi_core and resolve("trn2n").multi_core


def test_nc_version_values():
    assert [(v.name, int(v)) for v in nc_version] == [("gen2", 2), ("gen3", 3), ("gen4", 4)]
    assert nc_version.gen3 >= nc_version.gen2


def test_detect_uses_the_override_without_a_warning(monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert detect() == (TARGETS["trn2"], False)


def test_detect_falls_back_with_the_vendors_words():
    with pytest.warns(UserWarning) as caught:
        assert detect() == (TARGETS["trn1"], True)
    assert [str(w.message) for w in caught] == ["Unable to read MLA target. Assuming cross compile to trn1."]
    assert caught[0].filename == __file__


def test_detect_refuses_an_unknown_override(monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn9")
    with pytest.raises(NkiError, match="trn9"):
        detect()
