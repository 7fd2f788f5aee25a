"""FrameworkKernel: the record of a specialisation, and the key under which it is kept."""

from __future__ import annotations

import enum
import functools
import threading
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from opennki import jit
from opennki.bind.host import run_payload
from opennki.dialects.neuronxcc import compiler
from opennki.dialects.neuronxcc import language as nl
from opennki.dialects.neuronxcc import typing as nt
from opennki.errors import NkiTypeError
from opennki.kernels import framework
from opennki.kernels.framework import DumpedConfig, FrameworkKernel, LegacyFrameworkKernel, UnifiedKernel
from opennki.kernels.payload import decode_backend_config
from opennki.trace.kernel import DeclTensor, Output

A = np.arange(8, dtype=np.float32).reshape(2, 4)
CACHE = "__neuron_kernel_interface_kernel_cache__"


class Counting(UnifiedKernel):
    """Counts its traces."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.traces = 0

    def _trace(self, mapped, options):
        self.traces += 1
        return super()._trace(mapped, options)


def scaled(x, factor=2.0):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.load(x) * 2.0)
    return out


def accumulate(total: nt.mutable_tensor, x):
    nl.store(total, nl.load(total) + nl.load(x))
    return total


def traces(fn, *calls, kind=Counting, **kwargs):
    """How often a kernel is traced for calls, each a dict of arguments."""
    kernel = kind(fn, **kwargs)
    for call in calls:
        kernel.dump_config(**call)
    return kernel.traces


# ---- dump_config -------------------------------------------------------------------------------------------
def test_dump_config_is_a_tuple_of_three():
    found = UnifiedKernel(scaled).dump_config(A, factor=3.0)
    assert type(found) is DumpedConfig and isinstance(found, tuple) and len(found) == 3
    assert DumpedConfig._fields == ("backend_config", "input_names", "output_names")
    config, inputs, outputs = found
    assert (inputs, outputs) == (["x"], ["output0"])
    decoded = decode_backend_config(config)
    assert decoded.func_name == "scaled" and decoded.config["constant_values"] == {"factor": 3.0}


def record_of(fn, *args, kind=UnifiedKernel, grid=None, **kwargs):
    kernel = kind(fn, grid=grid)
    return kernel.dump_config_with_boundargs(kernel.bind(args, kwargs))


def test_the_record_of_one_result():
    record = record_of(scaled, A)
    assert record.input_names == ("x",) and record.output_names == ("output0",)
    assert record.operand_output_aliases == () and record.constant_values == {"factor": 2.0}
    assert record.return_types == ((np.dtype(np.float32), (2, 4)),)
    assert record.return_types[0].dtype == np.float32 and record.return_types[0].shape == (2, 4)
    assert record.has_collectives is False and record.result_is_sequence is False
    assert record.kernel_return == Output(0) and record.func_name == "scaled"
    assert record.operands == (DeclTensor((2, 4), "float32"),)
    assert record.dumped_config == UnifiedKernel(scaled).dump_config(A).backend_config
    assert record.assemble(["r"]) == "r"


def test_the_record_of_several_results():
    def several(x, y, n):
        a = nl.ndarray(x.shape, dtype=nl.bfloat16, buffer=nl.shared_hbm)
        b = nl.ndarray((2, 1), dtype=nl.int32, buffer=nl.shared_hbm)
        tile = nl.load(x) + nl.load(y)
        nl.store(a, tile)
        nl.store(b, nl.sum(tile, axis=1, keepdims=True))
        return [b, (a, n)]

    record = record_of(several, A, n=7, y=A)
    assert record.input_names == ("x", "y") and len(record.output_names) == len(set(record.output_names)) == 2
    assert [rt.dtype for rt in record.return_types] == [np.int32, np.dtype(ml_dtypes.bfloat16)]
    assert [rt.shape for rt in record.return_types] == [(2, 1), (2, 4)]
    assert record.result_is_sequence is True and record.constant_values == {"n": 7}
    assert record.assemble(["b", "a"]) == ["b", ("a", 7)]


def test_bool_results_are_bool():
    def positive(x):
        out = nl.ndarray(x.shape, dtype=nl.bool_, buffer=nl.shared_hbm)
        nl.store(out, nl.greater(nl.load(x), 1.0))
        return out

    assert record_of(positive, A).return_types[0].dtype == np.dtype(bool)


# ---- aliases -----------------------------------------------------------------------------------------------
def test_a_mutable_parameter_aliases_its_result():
    record = record_of(accumulate, A, A)
    assert record.operand_output_aliases == ((0, 0),) and record.input_names == ("total", "x")
    assert decode_backend_config(record.dumped_config).aliases == ((0, 0),)


def test_the_pairs_are_operand_then_output():
    def both(x, a: nt.mutable_tensor, y, b: nt.mutable_tensor):
        fresh = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nl.store(fresh, nl.load(y))
        nl.store(a, nl.load(x))
        nl.store(b, nl.load(y))
        return b, fresh, a

    record = record_of(both, A, A, A, A)
    assert record.operand_output_aliases == ((3, 0), (1, 2))
    assert record.assemble([0, 1, 2]) == (0, 1, 2)


def test_what_is_written_and_not_returned_is_a_result_as_well():
    def into(x, out, more):
        nl.store(out, nl.load(x) * 2)
        nl.store(more, nl.load(x) * 3)

    record = record_of(into, A, A, A, kind=LegacyFrameworkKernel)
    assert record.operand_output_aliases == ((1, 0), (2, 1)) and record.result_is_sequence is True
    assert record.kernel_return == (Output(0), Output(1)) and record.assemble(["o", "m"]) == ("o", "m")
    out, more = np.zeros_like(A), np.zeros_like(A)
    run_payload(record.dumped_config.encode(), [A, out, more], [out, more])
    np.testing.assert_array_equal(out, 2 * A)
    np.testing.assert_array_equal(more, 3 * A)


def test_a_legacy_kernel_may_return_what_it_writes_or_not():
    """The older style: the output parameter is neither declared mutable nor returned, or there is a result beside it."""
    def beside(x, out):
        fresh = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.load(x))
        nl.store(fresh, nl.load(x) * 2)
        return fresh

    legacy = record_of(beside, A, A, kind=LegacyFrameworkKernel)
    assert legacy.input_names == ("x", "out") and (1, 1) in legacy.operand_output_aliases
    assert legacy.assemble(["fresh", "out"]) == "fresh"
    with pytest.raises(Exception, match="err_cannot_update_immutable_parameter"):
        record_of(beside, A, A)


# ---- UnifiedKernel -----------------------------------------------------------------------------------------
def test_anything_with_shape_and_dtype_is_a_tensor():
    class Described:
        shape, dtype = (2, 4), np.dtype(np.float32)

    expected = UnifiedKernel(scaled).dump_config(A)
    for value in (Described(), DeclTensor((2, 4), "float32"), A.T.copy().T):
        assert UnifiedKernel(scaled).dump_config(value) == expected
    record = record_of(scaled, A, np.float32(3))
    assert record.input_names == ("x",) and record.constant_values == {"factor": np.float32(3)}


def test_a_grid_is_in_the_payload():
    def each(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        row = nl.ds(nl.program_id(0), 1)
        nl.store(out[row, :], nl.load(x[row, :]))
        return out

    kernel = UnifiedKernel(jit(each)[2])
    assert decode_backend_config(kernel.dump_config(A).backend_config).config["grid"] == [2]
    assert kernel[2].dump_config(A) == kernel.dump_config(A)
    assert UnifiedKernel(each, "other", (2,)).func_name == "other"


# ---- the key -----------------------------------------------------------------------------------------------
class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Point(NamedTuple):
    x: float
    y: float


@dataclass(frozen=True)
class Tiling:
    rows: Any
    note: str = field(default="", compare=False)


@dataclass(frozen=True)
class OtherTiling:
    rows: Any


NAN2 = np.array([0x7FF8000000000001], np.uint64).view(np.float64)[0]
DIFFERENT = [
    1, True, 1.0, 0, False, 0.0, -0.0, float("nan"), float(NAN2), float("inf"), "1", b"1", None, 1j, complex(0.0, -0.0), 0j,
    np.float32(1), np.float64(1), np.int32(1), np.int64(1), np.bool_(True), np.float32(0), np.float32(-0.0), np.float16(1),
    ml_dtypes.bfloat16(1), (1,), (True,), (1.0,), (1, 2), (), (0.0,), (-0.0,), ((1,),), frozenset({1}), frozenset({1.0}), Point(1, 2),
    Point(1.0, 2), Tiling(1), Tiling(1.0), Tiling(True), Tiling((0.0,)), Tiling((-0.0,)), OtherTiling(1), Colour.RED, Colour.BLUE, range(3),
    slice(0, 1), slice(0, True), np.float32, np.dtype(np.float32), nl.bfloat16, len,
]


def test_every_constant_is_a_kernel_of_its_own():
    """Also those that compare equal. Each is found again, a NaN too."""
    kernel = Counting(scaled)
    for i, value in enumerate(DIFFERENT):
        kernel.dump_config(A, value)
        assert kernel.traces == i + 1, f"{value!r} was taken for another one"
    for value in DIFFERENT:
        kernel.dump_config(A, value)
    assert kernel.traces == len(DIFFERENT) == len(getattr(kernel, CACHE))


@pytest.mark.parametrize(("one", "other"), [
    (float("nan"), float("nan")), ((1, 2.0), (1, 2.0)), (Tiling((1, 2)), Tiling((1, 2))), (Tiling(1, "a"), Tiling(1, "b")),
    (np.float32(1), np.float32(1)), ("ab", "".join("ab")), (1 << 70, 1 << 70), (Point(1, 2), Point(1, 2))], ids=repr)
def test_equal_constants_are_one_kernel(one, other):
    assert traces(scaled, {"x": A, "factor": one}, {"x": A, "factor": other}) == 1


def test_tensors_count_by_shape_and_dtype():
    same = [A, A + 1, np.asfortranarray(A)]
    assert traces(scaled, *({"x": x} for x in same)) == 1
    others = [A, A.reshape(4, 2), A[:1], A.astype(np.int32), A.astype(ml_dtypes.bfloat16), A.astype(np.float16)]
    assert traces(scaled, *({"x": x} for x in others)) == len(others)


def test_a_default_is_the_value_given():
    assert traces(scaled, {"x": A}, {"x": A, "factor": 2.0}) == 1


def test_which_argument_has_a_value_counts():
    def two(x, a=1, b=2):
        return scaled(x)

    assert traces(two, {"x": A, "a": 2, "b": 1}, {"x": A}) == 2


def test_structures_of_tensors():
    def first(x):
        while not hasattr(x, "shape"):
            x = next(iter(x.values())) if isinstance(x, dict) else x[0]
        return scaled(x)

    forms = [[A], (A,), [A, 1], [A, 1.0], [A, A], {"a": A}, {"b": A}, [[A]]]
    assert traces(first, *({"x": f} for f in forms)) == len(forms)
    assert traces(first, {"x": [A, 1]}, {"x": [A + 1, 1]}) == 1


FACTOR = 2.0
SHAPE = (1, 2)


def test_a_global_that_changes_is_traced_again(monkeypatch):
    def kernel(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nl.store(out, (lambda t: t * FACTOR)(nl.load(x)))
        return out

    counting = Counting(kernel)
    two = counting.dump_config(A)
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    three = counting.dump_config(A)
    assert counting.traces == 2 and two != three
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    assert counting.dump_config(A) == two and counting.traces == 2
    monkeypatch.setitem(globals(), "SHAPE", (3,))
    counting.dump_config(A)
    assert counting.traces == 2, "a global that it does not name"


def test_a_closure_that_changes_is_traced_again():
    factor = 2.0

    def kernel(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.load(x) * factor)
        return out

    counting = Counting(kernel)
    found = [counting.dump_config(A)]
    for factor in (3.0, 3, 2.0):
        found.append(counting.dump_config(A))
    assert counting.traces == 3 and found[0] == found[3] != found[1]


def test_target_fallback_and_precision_are_in_the_key(monkeypatch):
    kernel = Counting(scaled)
    kernel.dump_config(A)
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    trn2 = kernel.dump_config(A)
    assert kernel.traces == 2 and decode_backend_config(trn2.backend_config).config["platform_target"] == "trn2"
    monkeypatch.setenv("NKI_PRECISE_FP", "0")
    kernel.dump_config(A)
    assert kernel.traces == 3
    monkeypatch.delenv("NKI_PRECISE_FP")
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn1")
    kernel.dump_config(A)
    assert kernel.traces == 3
    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE")
    with pytest.warns(UserWarning, match="trn1"):
        fallback = kernel.dump_config(A)
    assert kernel.traces == 4, "trn1 for want of a chip is not trn1 that was asked for"
    assert decode_backend_config(fallback.backend_config).config["platform_target_is_fallback"] is True


def test_grid_and_options_are_in_the_key():
    kernel = Counting(scaled)
    cache = getattr(kernel, CACHE)
    for changed in (kernel, kernel[2], kernel[2, 1], kernel.copy(platform_target="trn2"), kernel.copy(experimental_flags="skip-x"),
                    kernel.copy(kernel_return=False), compiler.skip_middle_end_transformations(kernel), kernel[2]):
        changed.dump_config(A)
        assert getattr(changed, CACHE) is cache
    assert len(cache) == 7


# ---- the cache ---------------------------------------------------------------------------------------------
def test_without_a_cache_each_call_traces():
    assert traces(scaled, {"x": A}, {"x": A}, {"x": A}, enable_cache=False) == 3
    assert traces(scaled, {"x": A, "factor": [1]}, enable_cache=False) == 1, "a constant is no key then"


def test_an_error_is_not_kept():
    fail = [True]

    def moody(x):
        return nl.exp(x) if fail else scaled(x)

    kernel = Counting(moody)
    for _ in range(2):
        with pytest.raises(NkiTypeError):
            kernel.dump_config(A)
    assert not getattr(kernel, CACHE)
    fail.clear()
    kernel.dump_config(A)
    assert kernel.traces == 3 and len(getattr(kernel, CACHE)) == 1


def test_the_least_recently_used_is_forgotten(monkeypatch):
    monkeypatch.setattr(framework, "MAX_SPECIALISATIONS", 3)
    kernel = Counting(scaled)
    for factor in (1, 2, 3, 1, 4):  # 2 goes
        kernel.dump_config(A, factor)
    assert kernel.traces == 4 and len(getattr(kernel, CACHE)) == 3
    for factor in (1, 3, 4):
        kernel.dump_config(A, factor)
    assert kernel.traces == 4
    kernel.dump_config(A, 2)
    assert kernel.traces == 5 and len(getattr(kernel, CACHE)) == 3


def test_threads_share_one_trace():
    started = threading.Barrier(8)

    class Slow(Counting):
        def _trace(self, mapped, options):
            time.sleep(0.02)  # long enough for the others to ask
            return super()._trace(mapped, options)

    kernel, found = Slow(scaled), []

    def ask(factor):
        started.wait()
        found.append((factor, kernel.dump_config_with_boundargs(kernel.bind((A, factor), {}))))

    threads = [threading.Thread(target=ask, args=(i % 2,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kernel.traces == 2 and len(found) == 8
    assert len({(factor, id(record)) for factor, record in found}) == 2


# ---- wrong calls -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("args", [(), (A, 1, 2)])
def test_a_call_that_does_not_bind_is_at_the_call(args):
    with pytest.raises(NkiTypeError, match="scaled: ") as caught:
        UnifiedKernel(scaled).dump_config(*args)
    assert caught.value.loc.file == __file__ and "factor=2.0" in str(caught.value)


def test_a_partial_is_a_kernel_with_a_constant():
    record = record_of(functools.partial(scaled, factor=5.0), A)
    assert record.constant_values == {"factor": 5.0}


def test_a_base_class_is_no_binding():
    with pytest.raises(NotImplementedError, match="is_framework_tensor"):
        FrameworkKernel(scaled).dump_config(A)
