"""Outputs: what is never stored to is counted and reported; complete outputs cost nothing."""
import numpy as np
import pytest

import opennki.dropin  # noqa: F401  isort: skip
import neuronxcc.nki as nki
import neuronxcc.nki.language as nl
from opennki.errors import NkiValueError, NkiWarning
from opennki.passes.initialised import partly_written

X = np.random.default_rng(0).normal(size=(300, 32)).astype(np.float32)


def copy(x, tiles, rows):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm, name="result")
    ip, ix = nl.mgrid[0:128, 0:x.shape[1]]
    for i in nl.affine_range(tiles):
        t = nl.load(x[i * 128 + ip, ix], mask=i * 128 + ip < x.shape[0])
        nl.store(out[i * 128 + ip, ix], t, mask=i * 128 + ip < rows)
    return out


def run(tiles, rows, **options):
    return nki.simulate_kernel(nki.jit(copy, platform_target="trn1"), X, tiles, rows, **options)


def test_a_forgotten_edge_tile_is_reported():
    with pytest.warns(NkiWarning, match=r"1408 of 9600 elements of result .* first \(256, 0\)"):
        result = run(2, 300)
    np.testing.assert_array_equal(result[:256], X[:256])
    with pytest.raises(NkiValueError, match="never stored to"):
        run(2, 300, checks={"unwritten": "error"})


def test_a_complete_output_is_silent(recwarn):
    np.testing.assert_array_equal(run(3, 300), X)
    run(2, 300, checks={"unwritten": "off"})
    assert not [w for w in recwarn if issubclass(w.category, NkiWarning)]


@pytest.mark.parametrize("grid", [None, 4])
def test_what_loops_and_programs_cover_is_proven(grid):
    def kernel(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        p, n = nl.program_id(0), nl.num_programs(0)
        for i in nl.affine_range(8 // n):
            rows = nl.ds(p * (8 // n * 16) + i * 16, 16)
            nl.store(out[rows, :], nl.load(x[rows, :]))
        return out
    jitted = nki.jit(kernel, platform_target="trn1")
    x = np.ones((128, 8), np.float32)
    assert not partly_written((jitted if grid is None else jitted[grid]).trace(x))


def test_parts_stored_by_different_statements_add_up(recwarn):
    def kernel(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nl.store(out[0:100, :], nl.load(x[0:100, :]))
        nl.store(out[100:200, :], nl.load(x[100:200, :]))
        nl.store(out[200:300, :], nl.load(x[200:300, :]))
        return out
    np.testing.assert_array_equal(nki.simulate_kernel(nki.jit(kernel, platform_target="trn1"), X), X)
    assert not [w for w in recwarn if issubclass(w.category, NkiWarning)]
