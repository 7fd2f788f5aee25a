"""Direct allocation that overwrites what is read later: an error with both tensors; what is meant to share bytes is silent."""
import numpy as np
import pytest

import opennki.dropin  # noqa: F401  isort: skip
import neuronxcc.nki as nki
import neuronxcc.nki.compiler as ncc
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
from opennki.errors import NkiValueError
from opennki.passes.allocate import allocate

X = np.zeros((512, 64), np.float32)


def traced(kernel, *args):
    return nki.jit(kernel, mode="simulation", platform_target="trn1").trace(*args)


def sbuf(address, partition=0):
    return ncc.sbuf.alloc(lambda idx, pdim_size, fdim_size: (partition, address))


def two(first, second, late):
    def kernel(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        a = nl.ndarray((32, 64), dtype=x.dtype, buffer=sbuf(*first), name="alpha")
        b = nl.ndarray((32, 64), dtype=x.dtype, buffer=sbuf(*second), name="beta")
        a[...] = nl.load(x[0:32, :])
        if not late:
            nl.store(out[0:32, :], a)
        b[...] = nl.load(x[32:64, :])
        if late:
            nl.store(out[0:32, :], a)
        nl.store(out[32:64, :], b)
        return out
    return traced(kernel, X)


@pytest.mark.parametrize("first, second, late, lost", [
    ((0, 0), (0, 0), True, True), ((0, 0), (252, 0), True, True), ((128, 0), (0, 0), True, True),
    ((0, 0), (0, 0), False, False), ((0, 0), (256, 0), True, False), ((0, 0), (0, 32), True, False)])
def test_two_tensors_in_one_place(first, second, late, lost):
    kernel = two(first, second, late)
    if not lost:
        allocate(kernel)
        return
    with pytest.raises(NkiValueError) as caught:
        allocate(kernel)
    text = str(caught.value)
    assert "beta (32, 64) overwrites alpha (32, 64), which is read later" in text and "test_clobber.py:" in text
    allocate(kernel, allocator="forced")


def pipelined(buffers, distance, trips=6):
    """Each iteration loads its block and stores the one that was loaded `distance` iterations before."""
    def kernel(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        tiles = nl.ndarray((trips, nl.par_dim(64), 64), dtype=x.dtype, name="tiles",
                           buffer=ncc.sbuf.mod_alloc(base_addr=0, num_free_tiles=(buffers,)))
        for i in nl.sequential_range(trips):
            tiles[i] = nl.load(x[nl.ds(i * 64, 64), :])
            if i >= distance:
                nl.store(out[nl.ds((i - distance) * 64, 64), :], tiles[i - distance])
        return out
    return traced(kernel, X)


@pytest.mark.parametrize("buffers, distance, lost", [(1, 0, False), (1, 1, True), (2, 1, False), (2, 2, True), (3, 2, False), (3, 3, True)])
def test_blocks_that_share_buffers(buffers, distance, lost):
    kernel = pipelined(buffers, distance)
    if lost:
        with pytest.raises(NkiValueError, match=rf"block \[{distance}\] of tiles \(6, 64, 64\) overwrites block \[0\]"):
            allocate(kernel)
    else:
        allocate(kernel)


def test_banks_of_psum_that_take_turns():
    def kernel(banks, late):
        def run(x):
            out = nl.ndarray((2, 128, 64), dtype=x.dtype, buffer=nl.shared_hbm)
            a = nl.ndarray((128, 128), dtype=x.dtype, buffer=sbuf(0))
            a[...] = nl.load(x[0:128, 0:128])
            t = nl.ndarray((2, nl.par_dim(128), 64), dtype=nl.float32, buffer=ncc.psum.mod_alloc(base_bank=3, num_bank_tiles=(banks,)))
            r = nl.ndarray((2, nl.par_dim(128), 64), dtype=x.dtype, buffer=ncc.sbuf.mod_alloc(base_addr=1024, num_free_tiles=(2,)))
            for i in nl.affine_range(2):
                t[i] = nisa.nc_matmul(a, a[:, 0:64])
                if not late:
                    r[i] = nl.copy(t[i])
                    nl.store(out[i], r[i])
            if late:
                for i in nl.affine_range(2):
                    r[i] = nl.copy(t[i])
                    nl.store(out[i], r[i])
            return out
        return traced(run, np.zeros((128, 128), np.float32))
    allocate(kernel(1, False))
    allocate(kernel(2, True))
    with pytest.raises(NkiValueError, match=r"block \[1\] of .* overwrites block \[0\]"):
        allocate(kernel(1, True))


