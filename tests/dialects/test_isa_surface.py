"""nki.isa: the functions are the declarations, with the vendor's signatures."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from opennki.dialects.neuronxcc import isa as nisa
from opennki.dialects.neuronxcc import isa_constants
from opennki.dialects.neuronxcc import language as nl
from opennki.errors import NkiError, NkiNotYet, NkiTypeError
from opennki.isa.declare import ISA
from opennki.kernels.entry import jit, simulate_kernel

A = np.linspace(1, 2, 128 * 8, dtype=np.float32).reshape(128, 8)
# Source: api_legacy neuronxcc.nki.isa (36 functions), and tensor_scalar_cumulative of the 2.27 tests
DOCUMENTED = [
    "nc_matmul",
    "nc_transpose",
    "activation",
    "activation_reduce",
    "affine_select",
    "bn_stats",
    "bn_aggr",
    "builtin_custom_op",
    "dma_copy",
    "dma_transpose",
    "dropout",
    "iota",
    "local_gather",
    "max8",
    "memset",
    "nc_find_index8",
    "nc_match_replace8",
    "nc_stream_shuffle",
    "range_select",
    "reciprocal",
    "scalar_tensor_tensor",
    "select_reduce",
    "sequence_bounds",
    "tensor_copy",
    "tensor_copy_dynamic_src",
    "tensor_copy_dynamic_dst",
    "tensor_copy_predicated",
    "tensor_partition_reduce",
    "tensor_reduce",
    "tensor_scalar",
    "tensor_scalar_reduce",
    "tensor_tensor",
    "tensor_tensor_scan",
    "tensor_scalar_cumulative",
    "get_nc_version",
]
SIGNATURES = {
    "nc_matmul": "(stationary, moving, *, is_stationary_onezero=False, is_moving_onezero=False, "
    "is_transpose=False, tile_position=(), tile_size=(), mask=None, perf_mode=None, **kwargs)",
    "tensor_scalar": "(data, op0, operand0, reverse0=False, op1=None, operand1=None, reverse1=False, *, "
    "dtype=None, mask=None, engine=<engine.unknown: 0>, **kwargs)",
    "dropout": "(data, prob, *, mask=None, dtype=None, **kwargs)",
    "sequence_bounds": "(*, segment_ids, dtype=None)",
    "dma_copy": "(*, dst, src, mask=None, dst_rmw_op=None, oob_mode=<oob_mode.error: 0>, "
    "dge_mode=<dge_mode.unknown: 3>)",
}


def on(fn, *arrays, target="trn1"):
    """The tile fn(*loaded arrays), stored."""

    def kernel(*inputs):
        tile = fn(*[nl.load(x) for x in inputs])
        out = nl.ndarray(tile.shape, tile.dtype, buffer=nl.shared_hbm)
        nl.store(out, tile)
        return out

    return simulate_kernel(jit(kernel, platform_target=target), *arrays)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_every_documented_function_exists_with_documentation(name):
    fn = getattr(nisa, name)
    assert fn.__name__ == name and len(inspect.getdoc(fn)) > 40 and name in nisa.__all__


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_the_vendors(name):
    assert str(inspect.signature(getattr(nisa, name))) == SIGNATURES[name]


def test_what_the_tracer_fills_in_is_not_shown():
    for name in nisa.__all__:
        if name in ISA:
            assert not {"stream", "accumulate", "registers", "regs"} & set(
                inspect.signature(getattr(nisa, name)).parameters
            )


def test_internal_instructions_are_not_names_of_the_module():
    for name, decl in ISA.items():
        assert hasattr(nisa, name) is (decl.surface == "isa")


def test_a_function_emits_its_instruction():
    np.testing.assert_array_equal(on(lambda x, y: nisa.tensor_tensor(x, y, op=np.add), A, A), A + A)
    np.testing.assert_array_equal(
        on(lambda x: nisa.tensor_scalar(x, np.multiply, 2.0, op1=np.add, operand1=1.0), A), A * 2 + 1
    )


def test_reciprocal_is_a_function_and_an_operator():
    np.testing.assert_array_equal(on(nisa.reciprocal, A), 1 / A)
    np.testing.assert_allclose(on(lambda x: nisa.activation(nisa.reciprocal, x), A), 1 / A, rtol=1e-6)


@pytest.mark.parametrize("target, version", [("trn1", 2), ("inf2", 2), ("trn2", 3), ("trn3", 4)])
def test_nc_version_is_that_of_the_target(target, version):
    seen = []

    def fn(x):
        seen.append(nisa.get_nc_version())
        return nisa.tensor_copy(x)

    on(fn, A, target=target)
    assert seen == [version] and isinstance(seen[0], nisa.nc_version)
    assert (seen[0] >= nisa.nc_version.gen3) is (version >= 3)


def test_outside_of_a_kernel_is_an_error():
    for call in (nisa.get_nc_version, lambda: nisa.memset((128, 4), 0, np.float32)):
        with pytest.raises(NkiError) as caught:
            call()
        assert caught.value.code == "err_nki_api_outside_of_nki_kernel"


def test_enumerations_and_aliases():
    assert {e.name: int(e) for e in nisa.engine} == {
        "tensor": 1,
        "vector": 5,
        "scalar": 2,
        "gpsimd": 3,
        "sync": 6,
        "unknown": 0,
    }
    assert {c.name: int(c) for c in nisa.reduce_cmd} == {
        "idle": 0,
        "reset": 1,
        "reduce": 2,
        "reset_reduce": 3,
        "load_reduce": 4,
    }
    for name in ("tensor", "vector", "scalar", "gpsimd", "unknown"):
        assert getattr(nisa, f"{name}_engine") is nisa.engine[name]
    assert nisa.constants is isa_constants and nisa.constants.oob_mode is nisa.oob_mode
    assert np.float32(nisa.fp32.min).view(np.uint32) == 0xFF7FFFFF


def test_private_dma_functions():
    def kernel(a, b):
        out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
        copy = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
        nisa._tiled_offloaded_memcpy(src=a, dst=copy)
        nisa._tiled_offloaded_fma(copy, b, dst=out, scales=[2.0, -0.5])
        return out

    b = np.flipud(A).copy()
    np.testing.assert_array_equal(
        simulate_kernel(jit(kernel, platform_target="trn1"), A, b), A * 2 + b * np.float32(-0.5)
    )


def test_wrong_arguments_are_named():
    with pytest.raises(NkiTypeError, match="no argument 'opp'"):
        on(lambda x: nisa.tensor_tensor(x, x, opp=np.add), A)
    with pytest.raises(NkiTypeError, match="needs 'op'"):
        on(lambda x: nisa.tensor_tensor(x, x), A)


def test_a_name_that_does_not_exist_says_so():
    with pytest.raises(NkiNotYet, match=r"neuronxcc\.nki\.isa\.nc_matmul_mx is not in opennki yet"):
        nisa.nc_matmul_mx
    assert not hasattr(nisa, "nc_matmul_mx")


def test_tensor_tensor_reads_one_element_per_partition_again():
    """Public kernels multiply a tile by a [P, 1] tile with tensor_tensor; free dimensions of other sizes stay an error."""
    column = np.arange(128, dtype=np.float32).reshape(128, 1)
    np.testing.assert_array_equal(on(lambda x, c: nisa.tensor_tensor(x, c, op=np.multiply), A, column), A * column)
    np.testing.assert_array_equal(on(lambda x, c: nisa.tensor_tensor(c, x, op=np.subtract), A, column), column - A)
    with pytest.raises(ValueError, match="F="):
        on(lambda x: nisa.tensor_tensor(x, x[:, 0:2], op=np.add), A)
