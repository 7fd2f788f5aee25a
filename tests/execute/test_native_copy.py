"""Copies of bits in C against NumPy: every width, any strides, boxes, and tiles that overlap."""

from __future__ import annotations

import ctypes as C

import numpy as np
import pytest

from opennki.execute import abi

WIDTHS = (1, 2, 4, 8)
Box = C.c_int64 * abi.RANK


def copy(lib, dst, src, lo=None, hi=None):
    """Run a copy between views of one shape and dtype."""
    k = abi.Copy(dst.ndim, dst.itemsize)
    k.shape[:dst.ndim], k.d_stride[:dst.ndim], k.s_stride[:dst.ndim] = dst.shape, dst.strides, src.strides
    lib.nki_copy_run(C.byref(k), C.c_void_p(dst.ctypes.data), C.c_void_p(src.ctypes.data),
                     None if lo is None else Box(*lo), None if hi is None else Box(*hi))


def check(lib, dst, src, owner, box=None):
    """The copy does in `dst` what NumPy does, and nothing elsewhere in its owner. The source is read first."""
    before, value = owner.copy(), src.copy()
    part = (..., *(slice(*b) for b in zip(*box, strict=True))) if box else ...
    dst[part] = value[part]
    expected = owner.copy()
    owner[...] = before
    copy(lib, dst, src, *(box or (None, None)))
    np.testing.assert_array_equal(owner, expected)


def filled(rng, shape, width):
    return rng.integers(0, 256, (*shape, width), np.uint8).view(f"u{width}")[..., 0]


def random_view(rng, owner, shape):
    """A view of a vector with no element twice, of this shape: dimensions in any order, gaps, either direction."""
    strides, reach, size = [0] * len(shape), 1, owner.itemsize
    rest = int(np.prod(shape))
    for i in rng.permutation(len(shape)):
        gap = int(rng.choice([1, 1, 2, 3]))
        strides[i] = reach * (gap if reach * gap * rest <= len(owner) else 1)
        reach = strides[i] * shape[i]
        rest //= shape[i]
    spare = len(owner) - reach
    view = np.lib.stride_tricks.as_strided(owner[rng.integers(0, spare + 1):], shape, [s * size for s in strides])
    return view[(..., *(slice(None, None, int(rng.choice([1, 1, -1]))) for _ in shape))]


@pytest.mark.parametrize("width", WIDTHS)
def test_random_strides_and_boxes(native_levels, width):
    rng = np.random.default_rng(width)
    for lib in native_levels.values():
        for _ in range(300):
            rank = int(rng.integers(0, abi.RANK + 1))
            shape = tuple(int(n) for n in rng.integers(1, [0, 500, 40, 12, 7, 5, 4, 3, 3][rank] + 1, rank)) if rank else ()
            src, owner = (filled(rng, (30_000,), width) for _ in "ab")
            dst = random_view(rng, owner, shape)
            source = random_view(rng, src, shape)
            if rank and rng.random() < 0.3:  # one value along a dimension
                at = int(rng.integers(rank))
                source = np.broadcast_to(np.take(source, [0], at), shape)
            box = None
            if rng.random() < 0.5:
                ends = [sorted(rng.integers(0, n + 1, 2)) for n in shape]
                box = ([int(a) for a, _ in ends], [int(b) for _, b in ends])
            check(lib, dst, source, owner, box)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("shape", [(1, 40), (16, 16), (33, 65), (128, 128), (7, 130), (130, 7), (64, 48)])
def test_transposes(native_levels, shape, width):
    rng = np.random.default_rng(7)
    src = filled(rng, (shape[0] + 3, shape[1] + 5), width)[1:shape[0] + 1, 2:shape[1] + 2]
    owner = filled(rng, (shape[1] + 2, shape[0] + 9), width)
    for lib in native_levels.values():
        check(lib, owner[1:-1, 4:4 + shape[0]], src.T, owner)
        check(lib, owner[1:-1, 4:4 + shape[0]], src.T[::-1, ::-1], owner)


@pytest.mark.parametrize("width", WIDTHS)
def test_transposes_of_pairs_and_between_other_dimensions(native_levels, width):
    rng = np.random.default_rng(8)
    src = filled(rng, (5, 18, 21, 2), width)
    for lib in native_levels.values():
        for order in ((0, 2, 1, 3), (2, 0, 1, 3), (3, 2, 1, 0), (1, 3, 0, 2), (2, 1, 3, 0)):
            view = src.transpose(order)
            owner = filled(rng, view.shape, width)
            check(lib, owner, view, owner)


@pytest.mark.parametrize("width", WIDTHS)
def test_unaligned(native_levels, width):
    rng = np.random.default_rng(9)
    raw, other = rng.integers(0, 256, 4000, np.uint8), rng.integers(0, 256, 4000, np.uint8)
    for lib in native_levels.values():
        for source in ("rows", "transpose", "reversed"):
            dst = np.ndarray((20, 20), f"u{width}", raw, offset=3)
            src = np.ndarray((20, 20), f"u{width}", other, offset=5)
            src = {"rows": src, "transpose": src.T, "reversed": src[:, ::-1]}[source]
            copy(lib, dst, src)
            np.testing.assert_array_equal(dst, src)


@pytest.mark.parametrize("width", WIDTHS)
def test_overlap_reads_the_source_first(native_levels, width):
    rng = np.random.default_rng(10)
    for lib in native_levels.values():
        row = filled(rng, (100,), width)
        for dst, src in ((row[1:], row[:-1]), (row[:-1], row[1:]), (row, row[::-1]), (row, row), (row[::2], row[:50]),
                         (row, np.broadcast_to(row[3:4], 100))):  # fmt: skip
            check(lib, dst, src, row)
        square = filled(rng, (48, 48), width)
        for dst, src in ((square, square.T), (square[:, 1:], square[:, :-1]), (square[8:], square[:-8]), (square[::-1], square)):
            check(lib, dst, src, square)
        memory = filled(rng, (16, 400), width)  # two tiles in the columns of one memory: no overlap, and a partial one
        for a, b in ((0, 100), (100, 0), (0, 99), (0, 60), (300, 0), (250, 200)):
            check(lib, memory[:, a:a + 100], memory[:, b:b + 100], memory)
            check(lib, memory[2:12, a:a + 100], memory[5:15, b:b + 100], memory)
            check(lib, memory[2:12, a:a + 100], memory[5:15, b:b + 100][::-1], memory)
        for _ in range(300):
            shape = tuple(int(n) for n in rng.integers(1, 6, 3))
            memory = filled(rng, (2000,), width)
            check(lib, random_view(rng, memory, shape), random_view(rng, memory, shape), memory)


def test_the_last_of_several_elements_for_one_place_stays(native_levels):
    for lib in native_levels.values():
        dst, src = np.zeros((3, 1), np.int32), np.arange(15, dtype=np.int32).reshape(3, 5)
        copy(lib, np.lib.stride_tricks.as_strided(dst, (3, 5), (4, 0)), src)
        np.testing.assert_array_equal(dst, src[:, -1:])


def test_an_empty_box_copies_nothing(native_levels):
    for lib in native_levels.values():
        dst, src = np.zeros((4, 4), np.int16), np.ones((4, 4), np.int16)
        copy(lib, dst, src, [2, 0], [2, 4])
        assert not dst.any()
