"""Races between the programs of a grid: found whatever the order of the run, with both lines; none where programs are ordered."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import opennki
import opennki.dropin  # isort: skip
import neuronxcc.nki as nki
import neuronxcc.nki.language as nl
import neuronxcc.nki.nccl as nccl
from neuronxcc.nki._private.private_api import core_barrier, sendrecv
from neuronxcc.nki.language.iterators import sync_program
from opennki.errors import NkiError, NkiWarning
from opennki.interpret.checks import Checks, tape_of
from opennki.lang.emit import call

ORDERS = ["program", "reversed", "shuffle:1", "shuffle:5"]
X = np.arange(4 * 8, dtype=np.float32).reshape(4, 8)


def jitted(body):
    return nki.jit(body, mode="simulation", platform_target="trn2")


def lines(error, *marks):
    """The report names the source line of every mark."""
    with open(__file__, encoding="utf-8") as file:
        numbers = [n for n, line in enumerate(file, 1) if line.rstrip().endswith(f"# {marks[0]}") or (
            len(marks) > 1 and line.rstrip().endswith(f"# {marks[1]}"))]
    assert len(numbers) == len(marks)
    for n in numbers:
        assert f"test_races.py:{n}" in error.message and f"test_races.py:{n}:" in error.operand, (n, error.message, error.operand)


def race(kernel, *args, marks, order="program", **options):
    with pytest.raises(NkiError, match="err_unexpected_output_dependencies: different programs") as caught:
        nki.simulate_kernel(kernel, *args, order=order, **options)
    lines(caught.value, *marks)
    return caught.value


def shared(x):
    return nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)


@pytest.mark.parametrize("order", ORDERS)
def test_two_statements_that_write_one_place(order):
    def kernel(x):
        out = shared(x)
        p, n = nl.program_id(0), nl.num_programs(0)
        nl.store(out[nl.ds(p, 1)], nl.load(x[nl.ds(p, 1)]))  # FIRST
        nl.store(out[nl.ds((p + 1) % n, 1)], nl.load(x[nl.ds(p, 1)]))  # SECOND
        return out

    race(jitted(kernel)[4], X, marks=("FIRST", "SECOND"), order=order)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("away", [1, 3])
def test_a_read_of_what_another_program_writes(order, away):
    def kernel(x):
        board, out = shared(x), shared(x)
        p, n = nl.program_id(0), nl.num_programs(0)
        nl.store(board[nl.ds(p, 1)], nl.load(x[nl.ds(p, 1)]))  # WRITES
        nl.store(out[nl.ds(p, 1)], nl.load(board[nl.ds((p + away) % n, 1)]))  # READS
        return out

    error = race(jitted(kernel)[4], X, marks=("WRITES", "READS"), order=order)
    assert "reads it" in error.message and "writes it" in error.message


def test_what_nobody_writes_is_still_an_unwritten_read():
    def kernel(x):
        board, out = shared(x), shared(x)
        p = nl.program_id(0)
        nl.store(board[nl.ds(0, 1)], nl.load(x[nl.ds(0, 1)])) if p == 0 else None
        nl.store(out[nl.ds(p, 1)], nl.load(board[nl.ds(3 - p, 1)]))
        return out

    with pytest.raises(NkiError, match="never written"):
        nki.simulate_kernel(jitted(kernel)[3], X)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("meet", ["barrier", "core_barrier", "sync_program", "all_reduce"])
def test_a_meeting_orders(order, meet):
    def kernel(x):
        board, out = shared(x), shared(x)
        p, n = nl.program_id(0), nl.num_programs(0)
        nl.store(board[nl.ds(p, 1)], nl.load(x[nl.ds(p, 1)]))
        if meet == "barrier":
            call("barrier", (), {})
        elif meet == "core_barrier":
            core_barrier(board, (0, 1))
        elif meet == "all_reduce":
            nl.all_reduce(nl.load(x[nl.ds(p, 1)]), op=np.add, program_axes=[0])
        else:
            with sync_program([0]):
                pass
        nl.store(out[nl.ds(p, 1)], nl.load(board[nl.ds((p + 1) % n, 1)]))
        return out

    got = nki.simulate_kernel(jitted(kernel)[nl.nc(2)], X[:2], order=order)
    np.testing.assert_array_equal(got, X[[1, 0]])


@pytest.mark.parametrize("order", ORDERS)
def test_a_meeting_of_some_does_not_order_the_others(order):
    def kernel(x):
        board, out = shared(x), shared(x)
        p, q = nl.program_id(0), nl.program_id(1)
        nl.store(board[nl.ds(p * 2 + q, 1)], nl.load(x[nl.ds(p * 2 + q, 1)]))  # MINE
        call("barrier", (), {"program_axes": [1]})
        nl.store(out[nl.ds(p * 2 + q, 1)], nl.load(board[nl.ds(p * 2 + 1 - q, 1)]))
        if across:
            nl.store(out[nl.ds(p * 2 + q, 1)], nl.load(board[nl.ds((1 - p) * 2 + q, 1)]))  # THEIRS
        return out

    across = False
    np.testing.assert_array_equal(nki.simulate_kernel(jitted(kernel)[2, 2], X, order=order), X[[1, 0, 3, 2]])
    across = True
    race(jitted(kernel)[2, 2], X, marks=("MINE", "THEIRS"), order=order)


@pytest.mark.parametrize("order", ORDERS)
def test_an_exchange_orders_what_was_done_before_it_was_sent(order):
    def kernel(x):
        board, out, letter = shared(x), shared(x), shared(x)
        p = nl.program_id(0)
        nl.store(board[nl.ds(p, 1)], nl.load(x[nl.ds(p, 1)]))
        sendrecv(send_to_rank=1 - p, recv_from_rank=1 - p, src=x[nl.ds(p, 1)], dst=letter[nl.ds(p, 1)])
        nl.store(out[nl.ds(p, 1)], nl.load(board[nl.ds(1 - p, 1)]))  # EARLY
        if late:
            nl.store(board[nl.ds(p, 1)], nl.load(letter[nl.ds(p, 1)]))  # LATE
        return out

    late = False
    np.testing.assert_array_equal(nki.simulate_kernel(jitted(kernel)[nl.nc(2)], X[:2], order=order), X[[1, 0]])
    late = True
    race(jitted(kernel)[nl.nc(2)], X[:2], marks=("EARLY", "LATE"), order=order)


@pytest.mark.parametrize("order", ORDERS)
def test_collectives_touch_memory_too(order):
    def kernel(x):
        board = shared(x)
        p = nl.program_id(0)
        sendrecv(send_to_rank=1 - p, recv_from_rank=1 - p, src=x[nl.ds(p, 1)], dst=board[nl.ds(0, 1)])  # BOTH
        return board

    race(jitted(kernel)[nl.nc(2)], X[:2], marks=("BOTH",), order=order)


@pytest.mark.parametrize("order", ORDERS)
def test_a_write_is_ordered_after_every_reader(order):
    """Programs 1 and 2 read; program 0, which has heard from one of them only, writes."""
    def kernel(x):
        board, out, letter = shared(x), shared(x), shared(x)
        p = nl.program_id(0)
        if p == 0:
            nl.store(board, nl.load(x))
        call("barrier", (), {})
        if p > 0:
            nl.store(out[nl.ds(p, 1)], nl.load(board[nl.ds(0, 1)]))  # READER
        for k in nl.static_range(3):
            if p == k:
                peer = {0: heard, heard: 0, 3 - heard: 3 - heard}[k]
                sendrecv(send_to_rank=peer, recv_from_rank=peer, src=x[nl.ds(k, 1)], dst=letter[nl.ds(k, 1)], pipe_id=0)
        if p == 0:
            nl.store(board[nl.ds(0, 1)], nl.load(x[nl.ds(1, 1)]))  # WRITER
        return out, letter

    for heard in (1, 2):
        error = race(jitted(kernel)[3], X[:3], marks=("READER", "WRITER"), order=order)
        assert f"program ({3 - heard},)" in error.message and f"program ({heard},)" not in error.message


def test_the_same_values_get_a_warning_that_names_both():
    def kernel(x):
        out = shared(x)
        nl.store(out, nl.load(x))  # SAME
        return out

    with pytest.warns(NkiWarning, match="with the same values") as caught:
        nki.simulate_kernel(jitted(kernel)[3], X)
    assert "program (1,) writes it" in str(caught[0].message) and "program (0,) writes it" in str(caught[0].message)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("same", [True, False])
def test_the_same_values_at_places_that_an_index_names(same, order):
    def kernel(x, rows):
        out = shared(x)
        own = nl.load(x)
        if not same:
            own = nl.multiply(own, nl.load(x[0:1, nl.ds(nl.program_id(0), 1)]))
        nl.store(out[nl.load(rows), nl.arange(x.shape[1])[None, :]], own)  # HERE
        return out

    x = np.arange(1, 33, dtype=np.float32).reshape(4, 8)
    rows = np.array([[2], [0], [3], [1]], np.int32)
    if same:
        with pytest.warns(NkiWarning, match="with the same values"):
            got = jitted(kernel)[2].simulate(x, rows, order=order)
        np.testing.assert_array_equal(got[rows[:, 0]], x)
    else:
        with pytest.raises(NkiError, match="write the same elements"):
            jitted(kernel)[2].simulate(x, rows, order=order)


def test_a_grid_of_one_costs_nothing_and_proofs_neither():
    def kernel(x):
        out = shared(x)
        p, n = nl.program_id(0), nl.num_programs(0)
        nl.store(out[nl.ds(p, 1)], nl.load(x[nl.ds(p, 1)]))
        if twice:
            nl.store(out[nl.ds((p + 1) % n, 1)], nl.load(x[nl.ds(p, 1)]))
        return out

    for twice, grid, watched in ((True, 1, 0), (False, 4, 0), (True, 4, 1)):
        traced, _ = jitted(kernel)[grid].specialize_and_call((X,), {})
        assert len(tape_of(traced, Checks.of("full")).meeting) == watched


@pytest.mark.parametrize("order", ORDERS)
def test_programs_that_are_ordered_through_another_rank(order):
    """Program 0 of rank 0 tells program 0 of rank 1, whose programs meet; program 1 of rank 1 tells program 1 of rank 0."""
    def kernel(x, me):
        board, out, letter = shared(x), shared(x), shared(x)
        p = nl.program_id(0)
        if me == 0:
            if p == 0:
                nl.store(board[nl.ds(0, 1)], nl.load(x[nl.ds(0, 1)]))  # TOLD
                nccl.send([x[nl.ds(0, 1)]], peer_id=1)
            if p == 1:
                if told:
                    nccl.recv([letter[nl.ds(1, 1)]], peer_id=1)
                nl.store(out[nl.ds(1, 1)], nl.load(board[nl.ds(0, 1)]))  # HEARD
                if not told:
                    nccl.recv([letter[nl.ds(1, 1)]], peer_id=1)
        else:
            if p == 0:
                nccl.recv([letter[nl.ds(0, 1)]], peer_id=0)
            call("barrier", (), {})
            if p == 1:
                nccl.send([x[nl.ds(1, 1)]], peer_id=0)
            nl.store(out[nl.ds(p, 1)], nl.load(x[nl.ds(p, 1)]))
        return out

    told = True
    for processes in (None, 2):
        opennki.launch(jitted(kernel)[2], 2, lambda r: (X[:2], r), order=order, processes=processes, checks={"unwritten": "off"})
    told = False
    with pytest.raises(NkiError, match=r"rank 0: .*different programs") as caught:
        opennki.launch(jitted(kernel)[2], 2, lambda r: (X[:2], r), order=order, checks={"unwritten": "off"})
    lines(caught.value, "TOLD", "HEARD")


def test_views_of_another_size():
    def kernel(x):
        out = nl.ndarray((8, 4), dtype=nl.int32, buffer=nl.shared_hbm)
        p = nl.program_id(0)
        half = out.view(nl.int16)
        nl.store(half[nl.ds(p, 1), nl.ds(0, 3)], nl.load(x[nl.ds(p, 1), nl.ds(0, 3)]))  # HALVES
        nl.store(out[nl.ds(apart * (1 - p) + (1 - apart) * p, 1), nl.ds(2, 2)], 7)
        nl.store(out[nl.ds((p + 1) % 2, 1), nl.ds(1, 1)], 7) if not apart else None  # WORDS
        return out

    x = np.ones((8, 8), np.int16)
    apart = 1
    nki.simulate_kernel(jitted(kernel)[2], x, checks={"unwritten": "off"})
    apart = 0
    race(jitted(kernel)[2], x, marks=("HALVES", "WORDS"), checks={"unwritten": "off"})


# ---- random programs against reachability ----
@st.composite
def plans(draw):
    """For a grid of 2 x 2: steps that are a meeting of all, of rows or of columns, or accesses of some programs."""
    steps = []
    for number in range(draw(st.integers(2, 7))):
        if draw(st.integers(0, 2)) == 0:
            steps.append(("meet", draw(st.sampled_from([(0, 1), (0,), (1,)]))))
        else:
            who = draw(st.sets(st.integers(0, 3), min_size=1))
            steps.append(("touch", draw(st.sampled_from("rw")), draw(st.integers(0, 1)), who, number))
    return steps


def races_of(steps):
    """Whether two accesses of one cell by different programs, one of them a write, are not ordered by meetings."""
    programs = list(itertools.product(range(2), range(2)))
    clocks = [[0] * 4 for _ in range(4)]  # how many steps of each program each one knows to be done
    seen = []
    for number, step in enumerate(steps, 1):
        if step[0] == "touch":
            _, kind, cell, who, _ = step
            for p in sorted(who):
                for q, other, other_kind, at in seen:
                    if other == cell and q != p and "w" in (kind, other_kind) and clocks[p][q] < at:
                        return True
                seen.append((p, cell, kind, number))
        else:
            before = [list(c) for c in clocks]
            for p in range(4):
                before[p][p] = number
            for p in range(4):
                group = [q for q in range(4) if all(a in step[1] or programs[q][a] == programs[p][a] for a in range(2))]
                clocks[p] = [max(before[q][k] for q in group) for k in range(4)]
    return False


@settings(max_examples=80, deadline=None)
@given(plans(), st.sampled_from(ORDERS))
def test_random_programs(steps, order):
    def kernel(x):
        board, out = shared(x), shared(x)
        me = nl.program_id(0) * 2 + nl.program_id(1)
        for step in steps:
            if step[0] == "meet":
                call("barrier", (), {"program_axes": list(step[1])})
                continue
            _, kind, cell, who, number = step
            for k in sorted(who):
                if me == k:
                    if kind == "w":
                        nl.store(board[nl.ds(cell, 1)], nl.full((1, 8), 10.0 * number + k, dtype=nl.float32))
                    else:
                        nl.store(out[nl.ds(k, 1)], nl.load(board[nl.ds(cell, 1)]))
        nl.store(out[nl.ds(me, 1)], nl.load(x[nl.ds(me, 1)]))
        return out

    checks = {"read": "off", "masked": "off", "unwritten": "off"}
    if races_of(steps):
        with pytest.raises(NkiError, match="different programs"):
            nki.simulate_kernel(jitted(kernel)[2, 2], X, order=order, checks=checks)
    else:
        nki.simulate_kernel(jitted(kernel)[2, 2], X, order=order, checks=checks)
