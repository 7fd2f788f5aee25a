"""Bodies of the collectives against NumPy, and what their declarations refuse."""

from __future__ import annotations

import numpy as np
import pytest

from opennki.errors import NkiError, NkiTypeError, NkiValueError
from opennki.isa import collectives as c
from opennki.isa import meeting
from opennki.isa.declare import ISA
from opennki.isa.reduce import reduce_list, reduce_partition
from tests.isa.bodies import check


def shards(count, shape=(4, 6), dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal(shape) * 8).astype(dtype) for _ in range(count)]


@pytest.mark.parametrize("op, oracle", [("add", np.sum), ("maximum", np.max), ("minimum", np.min), ("multiply", np.prod)])
@pytest.mark.parametrize("count", [1, 2, 5, 32, 33, 64, 100])
def test_reductions(op, oracle, count):
    x = [1 + one / 256 for one in shards(count)]  # products stay within float32
    got = c.rank_all_reduce(dst=None, src=x, op=op)
    want = oracle(np.stack(x).astype(np.float64), axis=0)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(got, reduce_partition(np.stack(x), op)[0], "the order is that of every reduction")
    parts = c.rank_reduce_scatter(dst=None, src=x, op=op, reduce_scatter_dim=1) if 6 % count == 0 else []
    for number, part in enumerate(parts):
        np.testing.assert_array_equal(part, np.split(got, count, axis=1)[number])


def test_reduce_list_of_special_values_and_bits():
    x = [np.array([[np.nan, -0.0, np.inf]], np.float32), np.array([[1.0, -0.0, -np.inf]], np.float32)]
    got = reduce_list(x, "add")
    assert np.isnan(got[0, 0]) and np.signbit(got[0, 1]) and np.isnan(got[0, 2])
    bits = [np.array([[5, 3]], np.int32), np.array([[1, 6]], np.int32), np.array([[7, 7]], np.int32)]
    np.testing.assert_array_equal(reduce_list(bits, "bitwise_xor"), bits[0] ^ bits[1] ^ bits[2])
    np.testing.assert_array_equal(reduce_list([np.float32([[2, 0]]), np.float32([[0, 0]])], "logical_or"), [[1, 0]])
    np.testing.assert_array_equal(reduce_list([np.float32([[9]]), np.float32([[2]]), np.float32([[3]])], "subtract"), [[4]])


@pytest.mark.parametrize("op, dtype", [("add", "float32"), ("subtract", "float32"), ("logical_and", "float32"), ("bitwise_or", "int32")])
@pytest.mark.parametrize("shape", [(70000,), (33, 4001), (3, 2, 40000), ()])
def test_blocks_of_rows_do_not_show(op, dtype, shape):
    whole = [(1000 * one).astype(dtype) for one in shards(40, (2, *shape), np.float32)]
    x = [one[..., ::-1][1] if shape else one[1, ...] for one in whole]
    want = reduce_partition(np.stack([a.reshape(-1) for a in x]), op)[0].reshape(shape)
    np.testing.assert_array_equal(reduce_list(x, op), want)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_gather_and_exchange(axis):
    x = shards(4, (8, 12), np.int32)
    np.testing.assert_array_equal(c.rank_all_gather(dst=None, src=x, all_gather_dim=axis), np.concatenate(x, axis))
    for concat in (0, 1):
        got = c.rank_all_to_all(dst=None, src=x, split_dim=axis, concat_dim=concat)
        for to in range(4):
            np.testing.assert_array_equal(got[to], np.concatenate([np.split(s, 4, axis)[to] for s in x], concat))


def test_copies():
    x = shards(3)
    got = c.rank_broadcast(dst=None, src=x)
    np.testing.assert_array_equal(got, x[0])
    assert not np.shares_memory(got, x[0]), "a destination may be the source of another member"
    assert c.rank_permute(dst=None, src=[], source_target_pairs=()) is None
    assert c.rank_permute(dst=None, src=x[:1], source_target_pairs=()) is x[0]
    assert c.rank_ring(dst=None, src=x[1:2]) is x[1]
    assert c.core_sendrecv(send_to_rank=1, recv_from_rank=0, src=x[:1], dst=None) is x[0]
    assert c.rank_send(src=x[:1], peer_id=0) == ()
    assert c.rank_recv(dst=None, peer_id=0, src=x[2:]) is x[2]
    assert c.rank_ring_place(dst=None, steps=3, found=x[:1]) is x[0]
    np.testing.assert_array_equal(c.rank_ring_reduce(dst=None, src=x[:1], src1=x[1:2], op="maximum"), np.maximum(x[0], x[1]))


WORLD = meeting.World(6, ((0, 0), (0, 1), (1, 0), (1, 1)), (0, 1, 0, 1))


def test_who_meets_whom():
    meets = {name: decl.meets for name, decl in ISA.items() if decl.meets is not None}
    groups = {"replica_groups": ((0, 2, 4), (5, 3, 1))}
    assert meets["rank_all_reduce"](groups, (3, 1), WORLD).group == ((5, 1), (3, 1), (1, 1))
    assert meets["rank_all_gather"]({}, (3, 0), WORLD).group == tuple((r, 0) for r in range(6))
    ring = meets["rank_ring"](groups, (5, 0), WORLD)
    assert (ring.gives, ring.takes) == (((3, 0),), ((1, 0),))
    places = [meets["rank_ring_place"]({**groups, "steps": n, "per_step": 2}, (5, 0), WORLD) for n in (0, 1, 2, 3, 4, 6)]
    assert [one.found for one in places] == [0, 0, 2, 2, 1, 0] and not any(one.group or one.gives or one.takes for one in places)
    pairs = meets["rank_permute"]({"source_target_pairs": ((0, 1), (1, 2))}, (1, 2), WORLD)
    assert (pairs.gives, pairs.takes) == (((2, 2),), ((0, 2),))
    assert meets["rank_send"]({"peer_id": (1, 2, 3, 4, 5, 0)}, (5, 0), WORLD).gives == ((0, 0),)
    assert meets["rank_recv"]({"peer_id": 4}, (5, 0), WORLD).takes == ((4, 0),)
    assert meets["barrier"]({"program_axes": (1,)}, (2, 2), WORLD).group == ((2, 2), (2, 3))
    assert meets["core_barrier"]({"cores": (1,)}, (0, 1), WORLD).group == ((0, 1), (0, 3))
    assert meets["core_sendrecv"]({"send_to_rank": 3, "recv_from_rank": 0, "pipe_id": 1}, (0, 1), WORLD).takes == ((0, 0),)


@pytest.mark.parametrize(
    "name, attributes, text",
    [
        ("rank_all_reduce", {"replica_groups": ((0, 1),)}, "rank 3 is in none"),
        ("rank_all_reduce", {"replica_groups": ((3, 6),)}, "names rank 6 and there are 6"),
        ("rank_ring_place", {"replica_groups": ((0, 1),), "steps": 0, "per_step": 1}, "rank 3 is in none"),
        ("rank_permute", {"source_target_pairs": ((0, 7),)}, "names rank 7"),
        ("rank_send", {"peer_id": 6}, "peer_id=6 of 6"),
        ("rank_recv", {"peer_id": (0, 1)}, "a table of 2 for 6"),
        ("barrier", {"program_axes": (2,)}, "program axis 2"),
        ("core_sendrecv", {"send_to_rank": 4, "recv_from_rank": 0}, "send_to_rank=4 of 4"),
    ],
)
def test_members_that_are_not_there(name, attributes, text):
    with pytest.raises(NkiError, match=text):
        ISA[name].meets(attributes, (3, 1), WORLD)


F = ((8, 4), "float32")


@pytest.mark.parametrize(
    "name, operands, kind, text",
    [
        ("rank_all_reduce", {"src": F, "dst": ((4, 8), "float32"), "op": "add"}, NkiValueError, "one shape"),
        ("rank_all_reduce", {"src": F, "dst": F, "op": "bitwise_or"}, NkiTypeError, "bitwise_or of float32"),
        ("rank_all_reduce", {"src": F, "dst": F, "op": "add", "replica_groups": ((0, 1), (2,))}, NkiValueError, "same number of ranks"),
        ("rank_all_reduce", {"src": F, "dst": F, "op": "add", "replica_groups": ((0, 1), (1, 2))}, NkiValueError, "rank 1 is in"),
        ("rank_all_reduce", {"src": F, "dst": F, "op": "add", "replica_groups": (0, 1)}, NkiTypeError, "lists of ranks"),
        ("rank_all_gather", {"src": F, "dst": ((8, 4), "float16"), "all_gather_dim": 0}, NkiTypeError, "keeps the dtype"),
        ("rank_all_gather", {"src": F, "dst": ((16, 8), "float32"), "all_gather_dim": 0}, NkiValueError, "times the number of ranks"),
        (
            "rank_all_gather",
            {"src": F, "dst": ((24, 4), "float32"), "all_gather_dim": 0, "replica_groups": ((0, 1),)},
            NkiValueError,
            "groups of 2",
        ),
        ("rank_all_gather", {"src": F, "dst": F, "all_gather_dim": 2}, NkiValueError, "all_gather_dim=2"),
        (
            "rank_reduce_scatter",
            {"src": F, "dst": ((3, 4), "float32"), "op": "add", "reduce_scatter_dim": 0},
            NkiValueError,
            "times the number",
        ),
        (
            "rank_all_to_all",
            {"src": F, "dst": F, "split_dim": 0, "concat_dim": 1, "replica_groups": ((0, 1, 2),)},
            NkiValueError,
            "multiple",
        ),
        ("rank_all_to_all", {"src": F, "dst": ((8, 8), "float32"), "split_dim": 0, "concat_dim": 1}, NkiValueError, "multiplied"),
        ("rank_permute", {"src": F, "dst": F, "source_target_pairs": ((0, 1), (0, 2))}, NkiValueError, "source twice"),
        ("rank_permute", {"src": F, "dst": F, "source_target_pairs": ((0, 1), (2, 1))}, NkiValueError, "target twice"),
        ("rank_permute", {"src": F, "dst": F, "source_target_pairs": (1, 2)}, NkiTypeError, "pairs of ranks"),
        ("rank_ring", {"src": F, "dst": F, "channel_id": 2, "num_channels": 2}, NkiValueError, "channel_id=2"),
        ("rank_ring_place", {"dst": ((1, 1), "int32"), "per_step": 0}, NkiValueError, "num_channels=0"),
        ("rank_ring_reduce", {"src": F, "src1": ((4, 4), "float32"), "dst": F, "op": "add"}, NkiValueError, "one shape"),
        ("core_sendrecv", {"src": F, "dst": ((8, 5), "float32"), "send_to_rank": 0, "recv_from_rank": 0}, NkiValueError, "one shape"),
        ("rank_broadcast", {"src": F, "dst": ((8, 4), "int32")}, NkiTypeError, "keeps the dtype"),
    ],
)
def test_what_declarations_refuse(name, operands, kind, text):
    with pytest.raises(kind, match=text):
        check(name, **operands)
