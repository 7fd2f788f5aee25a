"""The checks of the interpreter bite on seeded faults, at the element, and stay silent on the corrected kernels."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from tests.errors.harness import SMALL, A, check_report, failure

from opennki import jit, simulate_kernel
from opennki.dialects.neuronxcc import isa as nisa
from opennki.dialects.neuronxcc import language as nl
from opennki.dialects.neuronxcc.iterators import sync_program
from opennki.errors import NkiError, NkiReadError, NkiWarning
from opennki.lang.data import barrier


def copied(tile, like):
    out = nl.ndarray(like.shape, dtype=like.dtype, buffer=nl.shared_hbm)
    nl.store(out, tile)
    return out


def silent(kernel, *args, grid=None, **options):
    """Result of a kernel that must raise and warn nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", NkiWarning)
        run = jit(kernel, mode="simulation", platform_target="trn1")
        return simulate_kernel(run if grid is None else run[grid], *args, **options)


# ---- reads of what was never written -----------------------------------------------------------------------
def one_element_missing(x):
    t = nl.ndarray((3, 4), dtype=x.dtype, buffer=nl.sbuf)
    t[0:2, 0:4] = nl.load(x[0:2])
    t[2:3, 0:2] = nl.load(x[2:3, 0:2])
    t[2:3, 3:4] = nl.load(x[2:3, 3:4])
    return copied(t * 2, x)  # HERE


def row_missing_in_a_loop(x):
    t = nl.ndarray((128, 512), dtype=x.dtype, buffer=nl.sbuf)
    for i in nl.affine_range(3):
        t[:, nl.ds(i * 128, 128)] = nl.load(x[:, nl.ds(i * 128, 128)])
    return copied(nl.exp(t), x)  # HERE


def branch_that_writes_too_little(x):
    t = nl.ndarray((128, 512), dtype=x.dtype, buffer=nl.sbuf)
    for i in nl.affine_range(4):
        if i < 3:
            t[:, nl.ds(i * 128, 128)] = nl.load(x[:, nl.ds(i * 128, 128)])
    return copied(nl.exp(t), x)  # HERE


def never_written(x):
    t = nl.ndarray((3, 4), dtype=x.dtype, buffer=nl.sbuf)
    return copied(nl.exp(t), x)  # HERE


def read_of_private_hbm(x):
    t = nl.ndarray((3, 4), dtype=x.dtype, buffer=nl.private_hbm)
    nl.store(t[0:2], nl.load(x[0:2]))
    return copied(nl.load(t), x)  # HERE


def second_iteration_reads_a_fresh_tile(x):
    out = nl.ndarray((128, 512), dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.sequential_range(4):
        t = nl.ndarray((128, 128), dtype=x.dtype, buffer=nl.sbuf)
        if i == 0:
            t[...] = nl.load(x[:, 0:128])
        nl.store(out[:, nl.ds(i * 128, 128)], t)  # HERE
    return out


def reduction_over_a_hole(x):
    t = nl.ndarray((3, 8), dtype=x.dtype, buffer=nl.sbuf)
    t[:, 0:4] = nl.load(x)
    total = nl.sum(t, axis=1, keepdims=True)  # HERE
    return copied(total + nl.load(x), x)


def matmul_of_a_hole(x):
    t = nl.ndarray((3, 4), dtype=x.dtype, buffer=nl.sbuf)
    t[0:2] = nl.load(x[0:2])
    nisa.nc_matmul(t, nl.load(x))  # HERE
    return copied(nl.load(x), x)


READS = [(one_element_missing, SMALL, 1, (2, 2)), (row_missing_in_a_loop, A, 128 * 128, (0, 384)),
         (branch_that_writes_too_little, A, 128 * 128, (0, 384)), (never_written, SMALL, 12, (0, 0)),
         (read_of_private_hbm, SMALL, 4, (2, 0)),
         (second_iteration_reads_a_fresh_tile, A, 128 * 128, (0, 0)), (reduction_over_a_hole, SMALL, 12, (0, 4)),
         (matmul_of_a_hole, SMALL, 4, (2, 0))]
READ_IDS = [case[0].__name__ for case in READS]


@pytest.mark.parametrize(("kernel", "x", "count", "first"), READS, ids=READ_IDS)
def test_reads_of_what_was_never_written(kernel, x, count, first):
    error = failure(kernel, x, kind=NkiReadError)
    check_report(error, kernel, "", (f"{count} elements", f"first {first}", "made at", "fix: "))


@pytest.mark.parametrize(("kernel", "x", "count", "first"), READS, ids=READ_IDS)
@pytest.mark.parametrize("checks", ["off", {"read": "off"}], ids=str)
def test_reads_are_not_checked_where_it_is_off(kernel, x, count, first, checks):
    if isinstance(checks, dict):
        checks = {**checks, "masked": "off", "accumulate": "off"}
    simulate_kernel(kernel, x, checks=checks)


@pytest.mark.parametrize(("kernel", "x", "count", "first"), READS, ids=READ_IDS)
def test_reads_as_warnings(kernel, x, count, first):
    with pytest.warns(NkiWarning, match=f"{count} elements") as caught:
        simulate_kernel(kernel, x, checks={"read": "warn"})
    own = [w for w in caught if f"{count} elements" in str(w.message)]
    assert own[0].filename == __file__ and len(own) == 1  # once for each place


@pytest.mark.parametrize("value", range(12))
def test_the_missing_element_is_exact(value):
    """Each single hole is found where it is, and nowhere else."""
    row, column = divmod(value, 4)

    def kernel(x):
        t = nl.ndarray((3, 4), dtype=x.dtype, buffer=nl.sbuf)
        for i in nl.static_range(3):
            for j in nl.static_range(4):
                if (i, j) != (row, column):
                    t[i:i + 1, j:j + 1] = nl.load(x[i:i + 1, j:j + 1])
        return copied(t * 2, x)
    error = failure(kernel, SMALL, kind=NkiReadError)
    assert f"reads 1 elements that were never written, first {(row, column)} " in str(error)


def test_reads_that_are_fine():
    def pieces(x):
        t = nl.ndarray((3, 4), dtype=x.dtype, buffer=nl.sbuf)
        t[0:2, 0:4] = nl.load(x[0:2])
        t[2:3, 0:2] = nl.load(x[2:3, 0:2])
        t[2:3, 2:4] = nl.load(x[2:3, 2:4])
        return copied(t * 2, x)
    np.testing.assert_array_equal(silent(pieces, SMALL), SMALL * 2)

    def only_the_written_part(x):
        t = nl.ndarray((128, 512), dtype=x.dtype, buffer=nl.sbuf)
        out = nl.ndarray((128, 384), dtype=x.dtype, buffer=nl.shared_hbm)
        for i in nl.affine_range(3):
            t[:, nl.ds(i * 128, 128)] = nl.load(x[:, nl.ds(i * 128, 128)])
        nl.store(out, t[:, 0:384])
        return out
    np.testing.assert_array_equal(silent(only_the_written_part, A), A[:, :384])

    def both_branches(x):
        out = nl.ndarray((128, 512), dtype=x.dtype, buffer=nl.shared_hbm)
        for i in nl.affine_range(4):
            t = nl.ndarray((128, 128), dtype=x.dtype, buffer=nl.sbuf)
            if i < 3:
                t[...] = nl.load(x[:, nl.ds(i * 128, 128)])
            else:
                t[...] = nl.zeros((128, 128), dtype=x.dtype)
            nl.store(out[:, nl.ds(i * 128, 128)], t)
        return out
    np.testing.assert_array_equal(silent(both_branches, A), np.where(np.arange(512) < 384, A, 0))

    def product_into_psum(x):
        acc = nl.zeros((4, 4), dtype=nl.float32, buffer=nl.psum)
        tile = nl.load(x)
        for _ in nl.affine_range(3):
            acc += nisa.nc_matmul(tile, tile)
        out = nl.ndarray((4, 4), dtype=nl.float32, buffer=nl.shared_hbm)
        nl.store(out, acc)
        return out
    np.testing.assert_allclose(silent(product_into_psum, SMALL), 3 * SMALL.T @ SMALL, rtol=1e-6)


# ---- what a mask left undefined ----------------------------------------------------------------------------
def masked_load_stored_whole(x):
    i, j = nl.arange(3)[:, None], nl.arange(4)[None, :]
    t = nl.load(x[i, j], mask=j < 3)
    return copied(t, x)


def masked_load_computed_and_stored_whole(x):
    i, j = nl.arange(3)[:, None], nl.arange(4)[None, :]
    t = nl.load(x[i, j], mask=i < 2)
    y = nl.exp(t) + t * 2
    return copied(y, x)


MASKED = [masked_load_stored_whole, masked_load_computed_and_stored_whole]


@pytest.mark.parametrize("kernel", MASKED)
def test_masked_elements_that_reach_hbm(kernel):
    error = failure(kernel, SMALL, kind=NkiReadError, checks={"masked": "error"})
    text = str(error)
    assert error.loc.function == "copied" and "nl.store(out, tile)" in text
    assert "mask left undefined" in text and "left undefined at" in text and "same mask" in text and "rule: " in text


@pytest.mark.parametrize("kernel", MASKED)
def test_masked_elements_warn_by_default(kernel):
    with pytest.warns(NkiWarning, match="mask left undefined"):
        simulate_kernel(kernel, SMALL)


def test_masks_that_are_fine():
    i, j = np.arange(3)[:, None], np.arange(4)[None, :]

    def same_mask(x):
        out = nl.ndarray((3, 3), dtype=x.dtype, buffer=nl.shared_hbm)
        i, j = nl.arange(3)[:, None], nl.arange(4)[None, :]
        t = nl.exp(nl.load(x[i, j], mask=j < 3))
        nl.store(out[i, j], t, mask=j < 3)
        return out
    np.testing.assert_allclose(silent(same_mask, SMALL, checks={"masked": "error"}), np.exp(SMALL[:, :3]), rtol=1e-6)

    def filled_first(x):
        i, j = nl.arange(3)[:, None], nl.arange(4)[None, :]
        t = nl.zeros((3, 4), dtype=x.dtype)
        t[...] = nl.load(x[i, j], mask=j < 3)
        return copied(t, x)
    np.testing.assert_array_equal(silent(filled_first, SMALL, checks={"masked": "error"}), np.where(j < 3, SMALL, 0))

    def reduced_under_the_mask(x):
        i, j = nl.arange(3)[:, None], nl.arange(4)[None, :]
        t = nl.load(x[i, j], mask=j < 3)
        out = nl.ndarray((3, 1), dtype=x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.sum(t, axis=1, mask=j < 3))
        return out
    diagonal = np.where(i + j < 4, SMALL, 0)

    def selected(x):
        i, j = nl.arange(3)[:, None], nl.arange(4)[None, :]
        t = nl.exp(nl.load(x[i, j], mask=i + j < 4))
        return copied(nl.where(i + j < 4, t, 0), x)
    np.testing.assert_allclose(silent(selected, SMALL, checks={"masked": "error"}), np.where(i + j < 4, np.exp(SMALL), 0), rtol=1e-6)

    def reduced_under_a_slanted_mask(x):
        i, j = nl.arange(3)[:, None], nl.arange(4)[None, :]
        t = nl.load(x[i, j], mask=i + j < 4) * 1.0
        out = nl.ndarray((3, 1), dtype=x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.sum(t, axis=1, mask=i + j < 4))
        return out
    np.testing.assert_array_equal(silent(reduced_under_a_slanted_mask, SMALL, checks={"masked": "error"})[:, 0], diagonal.sum(1))
    np.testing.assert_array_equal(silent(reduced_under_the_mask, SMALL, checks={"masked": "error"})[:, 0], SMALL[:, :3].sum(1))


# ---- dependences between iterations and programs -----------------------------------------------------------
def rows_by_index_twice(x, idx):
    out = nl.ndarray((3, 4), dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.load(x))
    for i in nl.affine_range(3):
        row = nl.load(idx[nl.ds(i, 1)])
        nl.store(out[row, nl.arange(4)[None, :]], nl.load(x[nl.ds(i, 1)]))  # HERE
    return out


def test_iterations_that_meet_at_run_time():
    apart, twice = np.array([[2], [0], [1]], np.int32), np.array([[2], [0], [2]], np.int32)
    np.testing.assert_array_equal(silent(rows_by_index_twice, SMALL, apart), SMALL[[1, 2, 0]])
    error = failure(rows_by_index_twice, SMALL, twice, kind=ValueError)
    check_report(error, rows_by_index_twice, "err_unexpected_output_dependencies", ("affine loop",))
    simulate_kernel(rows_by_index_twice, SMALL, twice, checks={"race": "off"})
    simulate_kernel(rows_by_index_twice, SMALL, twice, checks="off")
    with pytest.warns(NkiWarning, match="err_unexpected_output_dependencies"):
        simulate_kernel(rows_by_index_twice, SMALL, twice, checks={"race": "warn"})


def rows_of_programs_by_index(x, idx):
    out = nl.ndarray((3, 4), dtype=x.dtype, buffer=nl.shared_hbm)
    p = nl.program_id(0)
    row = nl.load(idx[nl.ds(p, 1)])
    nl.store(out[row, nl.arange(4)[None, :]], nl.load(x[nl.ds(p, 1)]))  # HERE
    return out


@pytest.mark.parametrize("order", ["program", "reversed", "shuffle:3"])
def test_programs_that_meet_at_run_time(order):
    apart, twice = np.array([[2], [0], [1]], np.int32), np.array([[2], [0], [2]], np.int32)
    np.testing.assert_array_equal(silent(rows_of_programs_by_index, SMALL, apart, grid=(3,), order=order), SMALL[[1, 2, 0]])
    run = jit(rows_of_programs_by_index, platform_target="trn1")[3]
    error = failure(None, SMALL, twice, kernel=run, kind=ValueError, order=order)
    check_report(error, rows_of_programs_by_index, "err_unexpected_output_dependencies", ("grid",))


def one_place_for_all(x):
    out = nl.ndarray((128, 128), dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(4):
        nl.store(out, nl.load(x[:, nl.ds(i * 128, 128)]))  # HERE
    return out


def test_certain_dependences_by_level():
    """What is known without running the kernel is an error at the fast level as well: it costs nothing."""
    for checks in ("full", "fast", {"race": "error"}):
        check_report(failure(one_place_for_all, A, checks=checks), one_place_for_all, "err_unexpected_output_dependencies", ("i ",))
    for checks in ("off", {"race": "off"}):
        np.testing.assert_array_equal(simulate_kernel(one_place_for_all, A, checks=checks), A[:, 384:])
    with pytest.warns(NkiWarning, match="err_unexpected_output_dependencies"):
        simulate_kernel(one_place_for_all, A, checks={"race": "warn"})


def test_loops_whose_iterations_are_apart():
    def interleaved(x):
        out = nl.ndarray((128, 512), dtype=x.dtype, buffer=nl.shared_hbm)
        for i in nl.affine_range(4):
            for j in nl.affine_range(2):
                at = nl.arange(64)[None, :] * 8 + i * 2 + j
                p = nl.arange(128)[:, None]
                nl.store(out[p, at], nl.load(x[p, at]) * 2)
        return out
    np.testing.assert_array_equal(silent(interleaved, A), A * 2)

    def guarded(x):
        out = nl.ndarray((128, 128), dtype=x.dtype, buffer=nl.shared_hbm)
        for i in nl.affine_range(4):
            if i == 2:
                nl.store(out, nl.load(x[:, nl.ds(i * 128, 128)]))
        return out
    np.testing.assert_array_equal(silent(guarded, A), A[:, 256:384])

    def ordered(x):
        out = nl.ndarray((128, 128), dtype=x.dtype, buffer=nl.shared_hbm)
        for i in nl.sequential_range(4):
            nl.store(out, nl.load(x[:, nl.ds(i * 128, 128)]))
        return out
    np.testing.assert_array_equal(silent(ordered, A), A[:, 384:])


# ---- programs that wait ------------------------------------------------------------------------------------
def barrier_on_one_side(x):
    out = nl.ndarray((3, 1, 4), dtype=x.dtype, buffer=nl.shared_hbm)
    p = nl.program_id(0)
    if p == 1:
        barrier((0,))  # HERE
    nl.store(out[p], nl.load(x[nl.ds(p, 1)]))
    return out


def one_barrier_more(x):
    out = nl.ndarray((3, 1, 4), dtype=x.dtype, buffer=nl.shared_hbm)
    p = nl.program_id(0)
    barrier((0,))
    nl.store(out[p], nl.load(x[nl.ds(p, 1)]))
    if p == 0:
        barrier((0,))  # HERE
    return out


@pytest.mark.parametrize(("kernel", "words"), [(barrier_on_one_side, ("1 programs", "(1,)", "have ended", "(0,)")),
                                               (one_barrier_more, ("1 programs", "(0,)", "have ended", "(1,)", "(2,)"))])
@pytest.mark.parametrize("order", ["program", "reversed"])
def test_barriers_that_never_end(kernel, words, order):
    error = failure(None, SMALL, kernel=jit(kernel, platform_target="trn1")[3], order=order)
    check_report(error, kernel, "", ("wait for ever", "barrier", "fix: ", *words))


@pytest.mark.parametrize("order", ["program", "reversed", "shuffle:1", "shuffle:2"])
def test_barriers_that_end(order):
    def kernel(x):
        exchange = nl.ndarray((3, 4), dtype=x.dtype, buffer=nl.shared_hbm)
        out = nl.ndarray((3, 4), dtype=x.dtype, buffer=nl.shared_hbm)
        p = nl.program_id(0)
        nl.store(exchange[nl.ds(p, 1)], nl.load(x[nl.ds(p, 1)]))
        with sync_program((0,)):
            nl.store(out[nl.ds(p, 1)], nl.load(exchange[nl.ds(2 - p, 1)]))
        return out
    np.testing.assert_array_equal(silent(kernel, SMALL, grid=(3,), order=order), SMALL[::-1])


# ---- levels ------------------------------------------------------------------------------------------------
def test_levels_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("OPENNKI_CHECKS", "off")
    simulate_kernel(never_written, SMALL)
    monkeypatch.setenv("OPENNKI_CHECKS", "full")
    failure(never_written, SMALL, kind=NkiReadError)
    simulate_kernel(never_written, SMALL, checks="off")  # the argument wins


@pytest.mark.parametrize(("fn", "ulp"), [(nl.square, 0), (nl.exp, 4)], ids=["square", "exp"])
def test_values_do_not_depend_on_the_level(fn, ulp):
    """But for the last bits of transcendental functions, which native code computes in its own way (docs/executor.md)."""
    def kernel(x):
        i, j = nl.arange(3)[:, None], nl.arange(4)[None, :]
        t = nl.zeros((3, 4), dtype=x.dtype)
        t[...] = nl.load(x[i, j], mask=i + j < 4)
        return copied(fn(t), x)
    full, fast, off = (simulate_kernel(kernel, SMALL, checks=c) for c in ("full", "fast", "off"))
    np.testing.assert_array_equal(fast, off)
    np.testing.assert_array_max_ulp(full, fast, ulp)


@pytest.mark.parametrize("kernel", [never_written, one_element_missing, reduction_over_a_hole])
def test_eager_mode_checks_reads(kernel):
    check_report(failure(kernel, SMALL, kind=NkiReadError, eager=True), kernel, "", ("never written",))


def test_errors_are_plain_python_errors_too():
    """A report can be caught as the built-in class that Python code expects."""
    for kernel, kind in ((never_written, ValueError), (one_place_for_all, ValueError)):
        with pytest.raises(kind):
            simulate_kernel(kernel, A if kernel is one_place_for_all else SMALL)
    assert issubclass(NkiReadError, NkiError)
