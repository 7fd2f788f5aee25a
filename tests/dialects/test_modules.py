"""The smaller modules of the dialect: collectives, kernels, private and support modules, grid dimensions."""

from __future__ import annotations

import dataclasses
import logging

import ml_dtypes
import numpy as np
import pytest

import opennki.dialects.neuronxcc as nki
from opennki.dialects.neuronxcc import (
    dimensions,
    distributed,
    nccl,
    package,
    private_api,
    support_dtype,
    support_util,
)
from opennki.dialects.neuronxcc import language as nl
from opennki.dialects.neuronxcc.kernels.attention import FlashConfig
from opennki.errors import NkiError, NkiNotYet
from opennki.ir.nodes import Instr, statements
from opennki.lang.loops import normalise_grid

# Source: api_legacy neuronxcc.nki._private.private_api
LATER = [(private_api, n) for n in ("row_tiled_mm_kernel", "column_tiled_mm_kernel")]


@pytest.mark.parametrize("module, name", LATER, ids=lambda v: getattr(v, "__name__", v).rpartition(".")[2])
def test_a_name_that_comes_later_says_so_when_it_is_called(module, name):
    fn = getattr(module, name)
    assert fn.__name__ == name and name in module.__all__ and fn.__doc__
    with pytest.raises(NkiNotYet, match=rf"{name} is not in opennki yet") as caught:
        fn(1, op=np.add)
    assert "github.com" in str(caught.value)


def test_unknown_names_of_every_module_say_so():
    for module in (
        nki,
        nccl,
        distributed,
        private_api,
        support_dtype,
        support_util,
        dimensions,
        package,
        nki.kernels,
    ):
        with pytest.raises(NkiNotYet, match="nothing_like_it"):
            module.nothing_like_it
        with pytest.raises(AttributeError):
            module.__nothing__


def test_a_misspelt_name_is_offered_the_right_one():
    with pytest.raises(NkiNotYet, match=r"did you mean affine_range"):
        nl.affine_rnage
    with pytest.raises(NkiNotYet) as caught:
        nl.nothing_like_it
    assert "did you mean" not in str(caught.value)


def test_the_package_has_the_entry_points():
    for name in (
        "jit",
        "baremetal",
        "benchmark",
        "profile",
        "simulate_kernel",
        "trace",
        "tensor",
        "language",
        "isa",
        "compiler",
        "typing",
        "nccl",
        "distributed",
        "kernels",
        "compile",
    ):
        assert getattr(nki, name) is not None
    with pytest.raises(NotImplementedError, match="is_framework_tensor"):  # the first hook of an integrator
        nki.FrameworkKernel(func_name="f", func=lambda x: x, grid=()).dump_config(np.zeros(2))


def test_flash_config():
    assert dataclasses.asdict(FlashConfig()) == {
        "seq_tile_size": 2048,
        "attn_core_tile_size": 256,
        "training": True,
        "should_transpose_v": False,
        "lse_dtype": "",
    }
    assert hash(FlashConfig(seq_tile_size=512)) != hash(FlashConfig())
    with pytest.raises(dataclasses.FrozenInstanceError):
        FlashConfig().training = False


def test_logging_off_is_above_every_level():
    assert logging.OFF > logging.CRITICAL
    assert package.__version__


# ---- grid dimensions ----


def test_dimensions_of_a_launch_grid():
    assert normalise_grid(dimensions.VNC(2)) == ((2,), (0, 1))
    assert normalise_grid((dimensions.CCPipeline(3), 2)) == ((3, 2), ())
    assert (
        normalise_grid(dimensions.CCPipeline(2) * dimensions.nc(2))
        == normalise_grid(2 * nl.nc(2))
        == ((4,), (0, 1, 0, 1))
    )
    assert normalise_grid(dimensions.VNC(2) * dimensions.CCPipeline(2)) == ((4,), (0, 0, 1, 1))


# ---- private api ----


def exchange(barrier):
    def kernel(a):
        core = nl.program_id(0)
        half = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
        out = nl.ndarray((2, 1, a.shape[1]), dtype=a.dtype, buffer=nl.shared_hbm)
        nl.store(half[nl.ds(core, 1)], nl.load(a[nl.ds(core, 1)]) * 2.0)
        if barrier:
            private_api.core_barrier(half, (0, 1))
        nl.store(out[core], nl.load(half[nl.ds(1 - core, 1)]))
        return out

    return nki.jit(kernel, platform_target="trn2")[nl.nc(2)]


def test_core_barrier_lets_cores_see_what_the_others_stored():
    a = np.arange(16, dtype=np.float32).reshape(2, 8)
    for order in ("program", "reversed"):
        result = nki.simulate_kernel(exchange(True), a, order=order)
        np.testing.assert_array_equal(result[:, 0], a[::-1] * 2)
    assert [s.op for s in statements(exchange(True).trace(a).body) if isinstance(s, Instr)].count(
        "core_barrier"
    ) == 1
    with pytest.raises(NkiError):
        nki.simulate_kernel(exchange(False), a)


# ---- neuronxcc.starfish.support ----


def test_dtype_helpers():
    d = support_dtype
    assert [d.dtype2str(t) for t in (np.float32, d.bfloat16, "bf16", d.float8_e4m3, np.dtype("int8"))] == [
        "float32",
        "bfloat16",
        "bfloat16",
        "float8_e4m3",
        "int8",
    ]
    assert d.str2dtype("bfloat16") == np.dtype(ml_dtypes.bfloat16)
    assert [d.sizeinbytes(t) for t in (np.float32, d.bfloat16, d.float8_e5m2)] == [4, 2, 1]
    assert [d.is_float_type(t) for t in (d.bfloat16, d.tfloat32, np.int32, np.uint8)] == [
        True,
        True,
        False,
        False,
    ]
    assert [d.is_int_type(t) for t in (d.bfloat16, np.int32, np.uint8)] == [False, True, True]


@pytest.mark.parametrize(
    "dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fn, np.float16]
)
def test_static_cast_rounds_as_ml_dtypes(dtype):
    x = np.concatenate([np.linspace(-3, 3, 1001, dtype=np.float32), np.float32([0.0, -0.0, 1e-30])]).reshape(
        4, 251
    )
    got = support_dtype.static_cast(x, np.dtype(dtype))
    assert got.dtype == dtype and got.shape == x.shape
    np.testing.assert_array_equal(got.astype(np.float32), x.astype(dtype).astype(np.float32))
    back = support_dtype.static_cast(got, np.float32)
    assert back.dtype == np.float32
    np.testing.assert_array_equal(back, x.astype(dtype).astype(np.float32))
    np.testing.assert_array_equal(support_dtype.as_native_type(got), back)


def test_static_cast_to_its_own_type_and_of_integers():
    x = np.arange(6, dtype=np.int32).reshape(2, 3)[:, ::2]
    assert support_dtype.static_cast(x, np.int32) is x
    np.testing.assert_array_equal(support_dtype.static_cast(x, np.float32), x.astype(np.float32))


def test_allclose_is_relative_to_the_range_of_the_reference(capsys):
    b = np.float32([100.0, 0.001])
    a = b + np.float32([0.0, 0.5])
    assert support_util.allclose(a, b, atol=1e-5, rtol=0.05, verbose=1)
    assert capsys.readouterr().out == ""
    assert not support_util.allclose(a, b, atol=1e-5, rtol=0.05, mode="elementwise", verbose=1)
    assert "1 of 2 elements" in capsys.readouterr().out
    assert not support_util.allclose(a, b, rtol=1e-5)
    assert support_util.allclose(a, b, rtol=1e-5, error_threshold=0.5)
    assert not support_util.allclose(a, b, rtol=1e-5, error_threshold=0.4)


def test_allclose_and_special_values():
    close = support_util.allclose
    inf, nan = np.float32([np.inf, 1]), np.float32([np.nan, 1])
    assert close(inf, inf) and not close(inf, -inf) and not close(np.float32([3, 1]), inf)
    assert not close(nan, nan) and close(nan, nan, equal_nan=True) and not close(nan, inf, equal_nan=True)
    x = np.float32([1, 2]).astype(ml_dtypes.bfloat16)
    assert close(x, np.float32([1, 2])) and close(np.zeros(0), np.zeros(0))
    for call in (lambda: close(np.zeros(2), np.zeros(3)), lambda: close(inf, inf, mode="mean")):
        with pytest.raises(NkiError):
            call()
