"""nc_stream_shuffle of the Vector Engine."""
from __future__ import annotations


import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.isa.vector_calls import F32, fails, passes, tile

from opennki.errors import NkiError
from opennki.isa import vector_elementwise as v


INT_DTYPES = ("int8", "uint8", "int16", "uint16", "int32", "uint32")
rng = np.random.default_rng(7)


def _shuffle_loop(src, dst, pattern):
    out = dst.copy()
    for p in range(dst.shape[0]):
        if pattern[p % 32] != 255:
            out[p] = src[p // 32 * 32 + pattern[p % 32]].reshape(dst.shape[1:])
    return out


@pytest.mark.oracle
@given(st.sampled_from([32, 64, 96, 128]),
       st.lists(st.one_of(st.integers(0, 31), st.just(255)), min_size=32, max_size=32))
def test_shuffle_as_a_loop(partitions, pattern):
    src = np.arange(partitions * 3, dtype=np.int32).reshape(partitions, 3)
    dst = -src - 1
    np.testing.assert_array_equal(v.nc_stream_shuffle(src, dst, pattern), _shuffle_loop(src, dst, pattern))


def test_shuffle_spreads_one_partition_in_place_and_across_shapes():
    src, dst = rng.normal(size=(1, 8)).astype(F32), np.zeros((32, 2, 4), F32)
    got = v.nc_stream_shuffle(src, dst, [0] * 32)
    np.testing.assert_array_equal(got, np.broadcast_to(src.reshape(1, 2, 4), (32, 2, 4)))
    assert not dst.any()
    x = np.arange(32, dtype=np.uint8)[:, None]
    np.testing.assert_array_equal(v.nc_stream_shuffle(x, x, tuple((i - 1) % 32 for i in range(32)))[:, 0],
                                  np.roll(np.arange(32), 1))


@pytest.mark.parametrize("shape", [(32, 4), (32, 2, 2), (32, 1, 2, 2)])
def test_shuffle_leaves_partitions_of_tiles_of_any_rank(shape):
    src, dst = np.arange(128, dtype=np.int32).reshape(shape), -np.ones(shape, np.int32)
    pattern = [5, 255, *range(30)]
    np.testing.assert_array_equal(v.nc_stream_shuffle(src, dst, pattern), _shuffle_loop(src, dst, pattern))


def test_shuffle_mask_leaves_the_rest_of_dst():
    src, dst = np.arange(64 * 4).reshape(64, 4).astype(np.int32), np.full((64, 4), -1, np.int32)
    part, free = np.arange(64)[:, None], np.arange(4)[None]
    got = v.nc_stream_shuffle(src, dst, [31, *[0] * 30, 255], mask=(part >= 32) & (free < 3))
    for p, f in np.ndindex(64, 4):
        want = src[63 if p == 32 else 32, f] if 32 <= p < 63 and f < 3 else -1
        assert got[p, f] == want


def test_shuffle_refuses():
    a, ring = tile(32, 4), [(i - 1) % 32 for i in range(32)]
    passes("nc_stream_shuffle", src=a, dst=a, shuffle_mask=ring)
    passes("nc_stream_shuffle", src=tile(1, 4), dst=a, shuffle_mask=[0] * 31 + [255])
    passes("nc_stream_shuffle", src=tile(1, 4), dst=a,
           shuffle_mask=[object()] * 32)  # affine: known when it runs
    assert fails("nc_stream_shuffle", src=tile(1, 4), dst=a,
                 shuffle_mask=ring).code == "err_tensor_access_out_of_bound"
    assert fails("nc_stream_shuffle", src=tile(32, 4), dst=tile(64, 4),
                 shuffle_mask=ring).code == "err_tensor_access_out_of_bound"
    fails("nc_stream_shuffle", src=a, dst=a, shuffle_mask=ring[:31])
    fails("nc_stream_shuffle", src=a, dst=a, shuffle_mask=[32] * 32)
    fails("nc_stream_shuffle", src=a, dst=a, shuffle_mask=[-1] * 32)
    fails("nc_stream_shuffle", src=a, dst=tile(32, 4, dtype="bfloat16"), shuffle_mask=ring)
    fails("nc_stream_shuffle", src=a, dst=tile(32, 5), shuffle_mask=ring)
    with pytest.raises(NkiError):
        v.nc_stream_shuffle(np.zeros((1, 2)), np.zeros((32, 2)), ring)
