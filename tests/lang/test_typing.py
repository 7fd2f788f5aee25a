"""nki.typing: annotations that are checked at trace, mutable parameters, runtime scalars."""

from __future__ import annotations

import numpy as np
import pytest

from opennki.dialects.neuronxcc import language as nl
from opennki.dialects.neuronxcc import typing as nt
from opennki.dialects.neuronxcc.private_api import do_while
from opennki.dialects.neuronxcc.typing import tensor

from opennki.errors import NkiError

from .harness import FP32, close, fails, kernel_of, run, sample

X = sample((16, 8))
WIDTH = 8


def stored(tile):
    out = nl.ndarray(tile.shape, tile.dtype, buffer=nl.shared_hbm)
    nl.store(out, tile)
    return out


def test_forms_of_annotations():
    assert nt.tensor[3, 4].shape == (3, 4) and not nt.tensor[3, 4].nki_mutable
    assert (
        nt.tensor[nt.mutable].nki_mutable and nt.mutable_tensor.nki_mutable and nt.tensor[128].shape == (128,)
    )
    assert repr(nt.tensor[3, 4]) == "nt.tensor[3, 4]" and repr(nt.mutable_tensor) == "nt.mutable_tensor"
    with pytest.raises(TypeError, match=r"nl\.ndarray"):
        nt.tensor((3, 4))


def test_right_annotations_pass():
    def kernel(x: nt.tensor):
        n, rows = 4, x.shape[0]
        t: nt.tensor[16, WIDTH] = nl.load(x)
        u: tensor[n * 4, x.shape[1]] = nl.exp(t)
        v: nt.tensor[rows, 2 * n - WIDTH // 8 * 0] = nl.add(u, 1.0)
        total: nt.tensor[rows] = nl.sum(v, axis=1)
        unknown: nt.tensor[max(rows, n), 8] = nl.add(v, total)  # not evaluated: no function is called
        plain: object = nl.copy(unknown)
        return stored(plain)

    want = np.exp(X.astype(np.float64)) + 1
    np.testing.assert_allclose(run(kernel, X), want + want.sum(1, keepdims=True), rtol=1e-5)


def test_wrong_annotation_points_at_its_line():
    def kernel(x):
        t = nl.load(x)
        u: nt.tensor[16, WIDTH + 1] = nl.exp(t)
        w = nl.add(u, 1.0)
        return stored(w)

    error = fails("err_annotation_shape_mismatch", kernel, X)
    assert (
        "nt.tensor[16, WIDTH + 1]" in error.loc.source()
        and "(16, 9)" in str(error)
        and "(16, 8)" in str(error)
    )


def test_wrong_annotation_in_a_loop_and_of_a_rebound_name():
    def in_loop(x):
        out = nl.ndarray((16, 8), x.dtype, buffer=nl.shared_hbm)
        for _i in nl.affine_range(1):
            t: nt.tensor[8, 16] = nl.load(x)
            nl.store(out, t)
        return out

    fails("err_annotation_shape_mismatch", in_loop, X)

    def rebound(x):
        t: nt.tensor[16, 8] = nl.load(x)
        t = nl.load(x[0:4])
        u = nl.exp(t)
        return stored(u)

    close(run(rebound, X), np.exp(X[:4].astype(np.float64)), steps=8)

    def rebound_wrong(x):
        t = nl.load(x)
        t: nt.tensor[4, 8] = nl.exp(t)
        u = nl.exp(t)
        return stored(u)

    fails("err_annotation_shape_mismatch", rebound_wrong, X)


def test_functions_without_source_are_not_checked():
    scope = {"nl": nl, "nt": nt, "stored": stored}
    exec("def kernel(x):\n    t: nt.tensor[1, 1] = nl.load(x)\n    return stored(nl.copy(t))", scope)
    close(run(scope["kernel"], X), X)


def test_mutable_parameters():
    def kernel(x: nt.tensor[nt.mutable], y: nt.mutable_tensor):
        nl.store(x, nl.load(x) + 1.0)
        nl.store(y, nl.load(y) * 2.0)
        return x, y

    a, b = X.copy(), X.copy()
    x, y = run(kernel, a, b)
    close(x, X + 1)
    close(y, X * 2)
    close(a, X + 1)


# ---- runtime scalars ----
@pytest.mark.parametrize("where", [0, 4])
@pytest.mark.parametrize("form", range(7))
def test_index_of_hbm(where, form):
    x, index = sample((5, 16, 8), FP32, 1), np.array([[where]], np.int32)
    ip, jf = nl.arange(16)[:, None], nl.arange(8)[None, :]

    def kernel(x, index):
        i = nl.load(index)
        s = nt.scalar(i)
        part = (
            lambda: x[s],
            lambda: x[i],
            lambda: x[s, :, 0:8],
            lambda: x[s, ip, jf],
            lambda: x[i[0, 0], ip, jf],
            lambda: x[nt.scalar(nt.scalar(i[0, 0]))],
            lambda: x[nt.scalar(where)],
        )[form]()
        return stored(nl.load(part))

    close(run(kernel, x, index), x[where])


def test_index_tile_with_slices_selects_rows():
    x, index = sample((9, 4, 6), FP32, 2), np.array([[7], [0], [3]], np.int32)

    def kernel(x, index):
        i = nl.load(index)
        a, b = nl.load(x[i]), nl.load(x[i, 1:3, :])
        assert a.shape == (3, 4, 6) and b.shape == (3, 2, 6)
        return stored(a), stored(b)

    a, b = run(kernel, x, index)
    close(a, x[index[:, 0]])
    close(b, x[index[:, 0], 1:3])


def test_offset_plus_runtime_scalar():
    x, index = sample((4, 40), FP32, 3), np.array([[13]], np.int32)

    def kernel(x, index):
        s = nt.scalar(nl.load(index))
        return stored(nl.load(x[nl.arange(4)[:, None], s + nl.arange(5)[None, :]]))

    close(run(kernel, x, index), x[:, 13:18])


def test_do_while():
    def kernel(x):
        out = nl.ndarray((1, 1), nl.int32, buffer=nl.shared_hbm)
        n = nl.load(x)
        total = nl.zeros((1, 1), nl.int32)
        cond = nt.scalar(True)
        while cond:
            total += n
            n -= 1
            cond = nt.scalar(nl.greater(n, 0))
        nl.store(out, total)
        return out

    assert run(kernel, np.array([[10]], np.int32)).item() == 55


def counted(n, values, space=nl.hbm):
    """The sum of the first elements of values, as many as the loop runs; n: after how many it ends."""
    out = nl.ndarray((2, 1), nl.int32, buffer=nl.shared_hbm)
    cond, index = nl.ndarray((1, 1), np.uint8, buffer=space), nl.ndarray((1, 1), np.int32, buffer=nl.hbm)
    total = nl.zeros((1, 1), nl.int32)
    nl.store(index, nl.zeros((1, 1), nl.int32))
    with do_while(cond):
        i = nl.load(index)
        total += nl.load(values[i])
        i = nl.add(i, 1)
        nl.store(index, i)
        more = nl.less(i, nl.load(n), dtype=np.uint8)
        if space is nl.hbm:
            nl.store(cond, more)
        else:
            cond[...] = nl.copy(more)
        nl.store(out[0:1], total)
        nl.store(out[1:2], i)
        return out


@pytest.mark.parametrize("checks", ["full", "fast", "off"])
@pytest.mark.parametrize("space", [nl.hbm, nl.sbuf], ids=lambda s: str(s))
def test_do_while_of_a_tensor(space, checks):
    values = np.arange(1, 9, dtype=np.int32)[:, None] ** 2
    for n, rounds in ((0, 1), (1, 1), (5, 5), (8, 8)):
        kernel = kernel_of(lambda n, values: counted(n, values, space))
        got = kernel.simulate(np.array([[n]], np.int32), values, checks=checks)
        np.testing.assert_array_equal(got[:, 0], [values[:rounds].sum(), rounds])
    with pytest.raises(IndexError):  # the condition never ends the loop: the index runs out of the values
        kernel.simulate(np.array([[100]], np.int32), values, checks=checks)


def test_errors_of_do_while():
    fails("", lambda x: do_while(nl.load(x)), X)
    fails("", lambda x: do_while(True), X)

    def within(x):
        cond = nl.zeros((1, 1), np.uint8)
        with do_while(cond):
            tile = nl.load(x)
        return stored(tile)

    def broken(x):
        with do_while(nl.zeros((1, 1), np.uint8)):
            nl.load(x[400:500])

    fails("err_local_variable_used_out_of_scope", within, X)
    fails("err_tensor_access_out_of_bound", broken, X)
    with pytest.raises(NkiError, match="eager"):
        kernel_of(counted).simulate(np.array([[2]], np.int32), np.ones((8, 1), np.int32), eager=True)


def test_reading_outside_at_run_time_is_an_error():
    x, index = sample((5, 16, 8), FP32, 4), np.array([[5]], np.int32)

    def kernel(x, index):
        return stored(nl.load(x[nt.scalar(nl.load(index))]))

    with pytest.raises(IndexError):
        run(kernel, x, index)
