"""Capacity of SBUF and PSUM: what is alive together has to fit; and contraction, which shrinks block tensors first."""
import numpy as np
import pytest

import opennki.dropin  # noqa: F401  isort: skip
import neuronxcc.nki as nki
import neuronxcc.nki.language as nl
from opennki.errors import NkiValueError, NkiWarning
from opennki.passes.contract import contracted
from opennki.ir.nodes import Alloc, statements
from opennki.passes.allocate import allocate

X = np.random.default_rng(0).normal(size=(512, 64)).astype(np.float32)


def jitted(kernel):
    return nki.jit(kernel, mode="simulation", platform_target="trn1")


def wide(n):
    def kernel(x):
        out = nl.ndarray((128, 64), dtype=x.dtype, buffer=nl.shared_hbm)
        big = nl.zeros((128, n), dtype=nl.float32, name="big")
        also = nl.zeros((128, n), dtype=nl.float32, name="also")
        nl.store(out, nl.add(big[:, 0:64], also[:, 0:64]))
        return out
    return jitted(kernel)


def test_two_large_tiles_are_reported_with_their_sizes():
    with pytest.warns(NkiWarning, match="alive at once") as seen:
        wide(24642)(X)
    text = str(seen[0].message)
    assert "big (128, 24642) float32: 98,568 at line" in text and "also" in text and "180,224 are there" in text
    with pytest.raises(NkiValueError, match="alive at once"):
        nki.simulate_kernel(wide(24642), X, checks={"capacity": "error"})


def test_what_fits_is_silent(recwarn):
    wide(20000)(X)
    assert not [w for w in recwarn if issubclass(w.category, NkiWarning)]


def test_tensors_that_do_not_live_together_share_the_room(recwarn):
    def kernel(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        for i in nl.static_range(4):
            big = nl.zeros((128, 30000), dtype=nl.float32)
            big[:, 0:64] = nl.load(x[i * 128:(i + 1) * 128, :])
            nl.store(out[i * 128:(i + 1) * 128, :], big[:, 0:64])
        return out
    np.testing.assert_array_equal(jitted(kernel)(X), X)
    assert not [w for w in recwarn if issubclass(w.category, NkiWarning)]


def blocks(x):
    """A block tensor of which an iteration uses its own block only, filled with zeros first."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    t = nl.ndarray((512, 4, nl.par_dim(128), 64), dtype=nl.float32, buffer=nl.sbuf)
    z = nl.zeros((512, 4, nl.par_dim(128), 64), dtype=nl.float32, buffer=nl.sbuf)
    for i in nl.affine_range(4):
        for j in nl.sequential_range(3):
            t[j, i] = nl.load(x[nl.ds(i * 128, 128), :])
            z[j, i] += t[j, i]
            nl.store(out[nl.ds(i * 128, 128), :], nl.multiply(z[j, i], j + 1.0 if isinstance(j, int) else 1.0))
    return out


def test_contraction_keeps_what_an_iteration_uses():
    kernel = jitted(blocks).trace(X)
    small = contracted(kernel, 0)
    shapes = {s.name or s.id: s.shape for s in statements(small.body) if isinstance(s, Alloc) and s.space == "sbuf"}
    assert all(np.prod(shape) <= 128 * 64 for shape in shapes.values() if len(shape) == 4), shapes
    assert allocate(kernel).peaks["sbuf"].size < 4096
    with pytest.raises(NkiValueError, match="alive at once"):
        allocate(kernel, skip_middle_end=True)
    np.testing.assert_array_equal(jitted(blocks)(X), X)


def test_a_slice_that_two_loops_use_is_not_contracted_away():
    def kernel(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        t = nl.ndarray((4, nl.par_dim(128), 4096), dtype=nl.float32, buffer=nl.sbuf)
        for i in nl.affine_range(4):
            t[i, :, 0:64] = nl.load(x[nl.ds(i * 128, 128), :])
        for j in nl.affine_range(4):
            nl.store(out[nl.ds(j * 128, 128), :], t[3 - j, :, 0:64])
        return out
    np.testing.assert_array_equal(jitted(kernel)(X), X.reshape(4, 128, 64)[::-1].reshape(512, 64))
