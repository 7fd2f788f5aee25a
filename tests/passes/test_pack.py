"""Packing of rectangles: nothing that is alive together meets, and what fits by the sum of the sizes is mostly found."""
import random

import pytest
from hypothesis import given, settings, strategies as st

from opennki.passes.liveness import Interval
from opennki.passes.pack import Item, pack, stack


def apart(items):
    for n, a in enumerate(items):
        for b in items[:n]:
            if (a.interval.meets(b.interval) and a.address < b.address + b.width and b.address < a.address + a.width
                    and a.start < b.start + b.partitions and b.start < a.start + a.partitions):
                return False
    return True


def peak(items):
    return max(sum(i.width for i in items if i.interval.meets(Interval(t, t))) for t in range(64))


@st.composite
def rectangles(draw):
    out = []
    for n in range(draw(st.integers(1, 24))):
        start = draw(st.integers(0, 40))
        size = draw(st.sampled_from([1, 3, 4, 8, 12, 64]))
        partitions = draw(st.sampled_from([1, 32, 64, 128]))
        starts = {128: (0,), 64: (0, 64)}.get(partitions, (0, 32, 64, 96)) if draw(st.booleans()) else (0,)
        out.append(Item(n, Interval(start, start + draw(st.integers(0, 20))), size, partitions, draw(st.sampled_from([1, 4])), starts,
                        draw(st.sampled_from([0, 64]))))
    return out


@settings(max_examples=150, deadline=None)
@given(rectangles(), st.integers(64, 400), st.booleans())
def test_what_is_alive_together_does_not_meet(items, room, as_stack):
    if (stack if as_stack else pack)(items, room):
        assert apart(items)
        for i in items:
            assert 0 <= i.address and i.address + i.width <= room and i.address % i.align == 0 and i.start in i.starts
            assert not i.window or i.address // i.window == (i.address + i.width - 1) // i.window


def test_half_again_of_the_peak_is_enough_for_random_sets():
    draw = random.Random(1)
    for _ in range(40):
        items = []
        for n in range(60):
            start = draw.randrange(60)
            items.append(Item(n, Interval(start, min(63, start + draw.randrange(1, 9))), draw.choice([4, 8, 16, 20, 64]), 128))
        assert pack(items, int(peak(items) * 1.5))


def test_fixed_items_stay_and_are_avoided():
    stay = Item("fixed", Interval(0, 9), 16, 128, address=8, fixed=True)
    low, high = Item("low", Interval(2, 3), 8, 128), Item("high", Interval(3, 4), 12, 128)
    assert pack([stay, low, high], 64)
    assert stay.address == 8 and apart([stay, low, high])
    assert not pack([stay, Item("wide", Interval(9, 9), 41, 128)], 64)
    assert pack([stay, Item("wide", Interval(9, 9), 40, 128)], 64)


def test_a_stack_reuses_only_what_is_on_top():
    items = [Item("a", Interval(0, 9), 10, 128), Item("b", Interval(1, 2), 10, 128), Item("c", Interval(2, 9), 10, 128),
             Item("d", Interval(4, 5), 10, 128)]
    assert stack(items, 40)
    assert [i.address for i in items] == [0, 10, 20, 30], "the hole that b leaves under c is not used"
    assert not stack(items, 39)


@pytest.mark.parametrize("room, fits", [(20, True), (19, False)])
def test_later_quadrants_are_used_where_they_are_allowed(room, fits):
    everywhere = (0, 32, 64, 96)
    items = [Item(n, Interval(0, 1), 10, 32, starts=everywhere) for n in range(8)]
    assert pack(items, room) is fits
    if fits:
        assert apart(items) and {i.start for i in items} == set(everywhere)
