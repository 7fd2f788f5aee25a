"""Maximum and minimum of two zeros."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opennki.isa.reduce import reduce_free
from opennki.isa.scalar import SCALAR
from opennki.isa.zeros import MAXIMUM, MINIMUM, SecondZero

VALUES = [0.0, -0.0, 1.0, -1.0, np.nan, np.inf, -np.inf]


def select(name, a, b):
    """What the table of scalar functions says, written out: (a > b or a != a) ? a : b."""
    return np.where((a > b if name == "maximum" else a < b) | (a != a), a, b)


def same(got, want):
    nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(np.where(nan, 0, got).view(np.uint32), np.where(nan, 0, want).view(np.uint32))


@pytest.mark.parametrize("name, ours", [("maximum", MAXIMUM), ("minimum", MINIMUM), ("maximum", SecondZero(np.maximum)),
                                        ("minimum", SecondZero(np.minimum))])  # fmt: skip
@given(pairs=st.lists(st.tuples(st.sampled_from(VALUES), st.sampled_from(VALUES)), min_size=1, max_size=70))
def test_as_the_table_says(name, ours, pairs):
    a, b = np.array(pairs, np.float32).T.copy()
    same(ours(a, b), select(name, a, b))
    same(ours(a, np.float32(b[0])), select(name, a, np.full_like(a, b[0])))
    out = a.copy()
    ours(out, b, out=out)
    same(out, select(name, a, b))
    rows = np.array(pairs, np.float32)
    want = np.full(2, SCALAR[name].identity, np.float32)
    for row in rows:
        want = select(name, want, row)
    same(np.asarray(ours.reduce(rows, axis=0, initial=SCALAR[name].identity)), want)


@pytest.mark.parametrize("name", ["maximum", "minimum"])
def test_folds_take_the_second_of_two_zeros(name):
    x = np.zeros((2, 64), np.float32)
    x[0, 32:] = x[1, :32] = -0.0
    assert np.signbit(reduce_free(x, name, 1)).tolist() == [True, False]
