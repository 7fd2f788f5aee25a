"""Operations of the language: random numbers and their keys, dropout, gathers, programs, reductions."""

from __future__ import annotations

import enum
import inspect
from types import SimpleNamespace

import numpy as np
import pytest

from opennki.errors import NkiTypeError, NkiValueError
from opennki.isa import language_ops as lo
from opennki.isa.declare import ISA, Plumbing, Register
from opennki.isa.target import TRN1

from .bodies import FLOATS, INTS, NUMPY, bits, call, check, operand, run, same

pytestmark = pytest.mark.oracle


def seeded(seed, *stream):
    return lo.random_seed(seed, stream=stream or (0, 0))


def draw(state=None, *stream, shape=(4, 64)):
    values, after = lo.rand(shape, stream=stream or (0, 0), seed_state=state)
    assert after is state
    return values


# ---- random numbers ------------------------------------------------------------------------------

def test_rand_is_uniform():
    u = draw(None, 7, 1, shape=(128, 2000)).astype(np.float64)
    assert u.dtype == np.float64 and u.min() >= 0 and u.max() < 1
    n = u.size
    counts = np.histogram(u, bins=64, range=(0, 1))[0]
    assert ((counts - n / 64) ** 2 / (n / 64)).sum() < 130  # 63 degrees of freedom: p is about 1e-6
    assert abs(u.mean() - 0.5) < 5 / np.sqrt(12 * n)
    flat = u.reshape(-1)
    assert abs(np.corrcoef(flat[:-1], flat[1:])[0, 1]) < 5 / np.sqrt(n)
    assert abs(np.corrcoef(u[0], u[1])[0, 1]) < 5 / np.sqrt(2000)


def test_without_a_seed_every_part_of_the_stream_counts():
    streams = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 0, 0)]
    draws = [draw(None, *s).tobytes() for s in streams]
    assert len(set(draws)) == len(streams)
    assert draw(None, 0, 1, 2).tobytes() == draw(None, 0, 1, 2).tobytes()
    blank = np.zeros((lo.STATE_ROWS, 1), np.float32)
    np.testing.assert_array_equal(draw(blank, 5, 1, 2), draw(None, 5, 1, 2))


def test_one_seed_gives_one_sequence_everywhere():
    """The same seed at another call site, in another program, loop or run: the n-th draw is the same."""
    want = [draw(seeded(42, 0, 3, 0, 1), 0, 3 + n, 0, 1) for n in (1, 2, 3)]
    for run_seed, call_site, where in [(9, 3, (0, 1)), (0, 100, (0, 1)), (0, 3, (7, 5)), (1, 8, (2, 3, 4, 5)),
                                       (0, 0, ())]:
        state = seeded(42, run_seed, call_site, *where)
        for n, values in enumerate(want, 1):
            np.testing.assert_array_equal(draw(state, run_seed, call_site + n, *where), values)
    assert len({w.tobytes() for w in want}) == 3
    assert draw(seeded(43, 0, 3, 0, 1), 0, 4, 0, 1).tobytes() != want[0].tobytes()


def test_iterations_after_the_seed_draw_anew():
    state = seeded(42, 0, 3, 1, 2)  # program 1, iteration 2
    inner = [draw(state, 0, 4, 1, 2, i).tobytes() for i in range(4)]  # a loop opened after the seed
    later = [draw(state, 0, 4, 1, i).tobytes() for i in (3, 4)]  # later iterations of the loop of the seed
    same_place = draw(state, 0, 4, 1, 2).tobytes()
    before = draw(state, 0, 2, 1, 3).tobytes()  # a call site before that of the seed, in the next iteration
    assert len({*inner, *later, same_place, before}) == 8


@pytest.mark.parametrize("seed,word", [
    (0, 0), (5, 5), (-1, 0xFFFFFFFF), (2**32 + 3, 3), (np.array([[2**31 - 1]], np.int32), 2**31 - 1),
    (np.array([[-2]], np.int32), 0xFFFFFFFE), (np.array([[4e9]], np.float32), int(np.float32(4e9))),
    (np.array([[7]], NUMPY["bfloat16"]), 7), (np.array([[np.nan]], np.float32), 0), (np.float32(12), 12)])
def test_seeds_are_32_bits(seed, word):
    assert lo.unpack_state(seeded(seed, 0, 11, 2, 3)) == [1, word, 11, 2, 2, 3]
    np.testing.assert_array_equal(draw(seeded(seed, 0, 11), 0, 12), draw(seeded(word, 0, 11), 0, 12))


def test_state_survives_float32():
    words = [1, 0xDEADBEEF, 0xFFFFFFFF, 3, 0x7FC00000, 0xFF800001, 1]
    state = lo.pack_state(words)
    assert state.shape == (lo.STATE_ROWS, 1) and state.dtype == np.float32 and np.isfinite(state).all()
    assert lo.unpack_state(state * np.float32(1)) == words
    assert lo.unpack_state(None) == lo.unpack_state(np.zeros_like(state)) == []
    deep = seeded(1, 0, 0, *range(200))
    assert len(lo.unpack_state(deep)) == lo.STATE_ROWS // 2


def test_rand_rounds_to_its_dtype():
    u = lo.rand((16, 100), stream=(0, 3))[0]
    assert run("rand", shape=(16, 100), stream=(0, 3))[0].dtype == np.float32
    same(run("rand", shape=(16, 100), stream=(0, 3), dtype="bfloat16")[0], u.astype(NUMPY["bfloat16"]))


@pytest.mark.parametrize("shape,text",
                         [((), "shape is"), ((4, 0), "shape is"), ((4, 2.0), "shape is"), ((129, 2), "129")])
def test_what_rand_refuses(shape, text):
    check("rand", shape=(128, 512))
    check("rand", shape=[128, 4])
    with pytest.raises(NkiValueError, match=text):
        check("rand", shape=shape)


@pytest.mark.parametrize("seed,word", [(-2, 2**32 - 2), (-2.75, 2**32 - 2), (2.0**32 + 7, 7), (1e30, 0),
                                       (np.nan, 0), (np.inf, 0), (2**32 + 9, 9)])
def test_a_seed_is_taken_as_32_bits(seed, word):
    assert lo.unpack_state(lo.random_seed(seed, stream=(0, 0)))[1] == word


def test_what_random_seed_refuses():
    check("random_seed", seed=5)
    check("random_seed", seed=((1, 1), "int32"))
    with pytest.raises(NkiValueError, match="seed has shape"):
        check("random_seed", seed=((128, 1), "int32"))


# ---- dropout -------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", FLOATS + INTS)
@pytest.mark.parametrize("prob", [0.0, 0.25, 1.0])
def test_dropout_zeroes_or_keeps_bits(dtype, prob):
    data = operand((64, 500), dtype)
    got = run("dropout", data=data, prob=np.float32(prob), stream=(3, 1))[0]
    u = lo.rand((64, 500), stream=(3, 1))[0]
    want = data.copy()
    want[u < prob] = 0
    same(got, want)
    share = (u < prob).mean()
    assert abs(share - prob) < 5 * np.sqrt(prob * (1 - prob) / u.size) + 1e-12


def test_dropout_takes_a_probability_per_partition():
    data = np.ones((5, 4, 2000), np.float32)
    prob = np.array([0, 0.1, 0.5, 0.9, 1], np.float32).reshape(5, 1, 1)
    got = run("dropout", data=data, prob=prob, stream=(0, 1))[0]
    assert set(np.unique(got)) == {0, 1}
    np.testing.assert_allclose((got == 0).mean(axis=(1, 2)), prob[:, 0, 0], atol=0.02)
    same(run("dropout", data=data, prob=prob.astype(np.float16), stream=(0, 1))[0][0], data[0])


@pytest.mark.parametrize("prob", [np.nan, -0.5, 1.5, np.inf])
def test_dropout_keeps_everything_for_what_is_no_probability(prob):
    data = operand((4, 50))
    same(run("dropout", data=data, prob=np.float32(prob), stream=(0, 1))[0], data)


def test_dropout_follows_the_seed():
    data = np.ones((8, 200), np.float32)
    forward = lo.dropout(data, 0.5, stream=(0, 5, 0, 2), seed_state=seeded(3, 0, 4, 0, 2))
    backward = lo.dropout(data, 0.5, stream=(0, 91, 1), seed_state=seeded(3, 0, 90, 1))
    np.testing.assert_array_equal(forward[0], backward[0])
    assert forward[1] is not None


DATA = ((128, 512), "float32")


@pytest.mark.parametrize("given,kind,text", [
    ({"prob": ((128, 2), "float32")}, NkiValueError, "prob has shape"),
    ({"prob": ((128, 1), "int32")}, NkiTypeError, "prob is int32"),
    ({"data": ((128, 4), "int32"), "prob": ((128, 1), "bfloat16")}, NkiTypeError,
     "prob is bfloat16 and data int32"),
    ({"data": ((128, 4), "int32"), "prob": 0.5, "dtype": "float32"}, NkiTypeError,
     "dtype is float32 and data int32"),
])
def test_what_dropout_refuses(given, kind, text):
    check("dropout", data=DATA, prob=0.5, dtype="bfloat16")
    check("dropout", data=((128, 4), "int32"), prob=((128, 1), "float32"), dtype="int32")
    with pytest.raises(kind, match=text) as e:
        check("dropout", **{"data": DATA, **given})
    assert e.value.rule and e.value.why and e.value.fix


# ---- data movement -------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", FLOATS + INTS)
def test_partition_broadcast(dtype):
    src = operand((1, 3, 5), dtype)
    same(run("partition_broadcast", src=src, partitions=7), np.concatenate([src] * 7))


def test_what_partition_broadcast_refuses():
    check("partition_broadcast", src=((1, 5), "float32"), partitions=128)
    for n in (0, 129):
        with pytest.raises(NkiValueError, match=f"broadcast to {n} partitions"):
            check("partition_broadcast", src=((1, 5), "float32"), partitions=n)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e5m2", "int32", "uint8"])
@pytest.mark.parametrize("shape,picked",
                         [((32, 64), (32, 10)), ((3, 4, 5), (3, 2, 2, 2)), ((128, 9), (128, 1))])
def test_gather_flattened(dtype, shape, picked):
    data = operand(shape, dtype)
    flat = data.reshape(shape[0], -1)
    indices = np.random.default_rng(0).integers(0, flat.shape[1], picked).astype(np.uint32)
    want = np.array([[flat[p, i] for i in row] for p, row in enumerate(indices.reshape(picked[0], -1))])
    same(run("gather_flattened", data=data, indices=indices), want.reshape(picked))


def test_gather_outside_shows():
    data = np.arange(6, dtype=np.float32).reshape(2, 3)
    indices = np.array([[0, 3], [2**32 - 1, 2]], np.uint32)
    same(run("gather_flattened", data=data, indices=indices),
         np.array([[0, np.nan], [np.nan, 5]], np.float32))
    same(run("gather_flattened", data=data.astype(np.int32), indices=indices),
         np.array([[0, 2**31 - 1], [2**31 - 1, 5]], np.int32))


def test_what_gather_flattened_refuses():
    check("gather_flattened", data=((4, 2, 2, 2), "float32"), indices=((4, 2), "uint32"))
    for data, indices in [((4, 1, 1, 1, 1), (4, 1)), ((4, 1), (4, 1, 1, 1, 1)), ((4,), (4, 1))]:
        with pytest.raises(NkiValueError, match="takes 2 to 4"):
            check("gather_flattened", data=(data, "float32"), indices=(indices, "uint32"))


# ---- programs ------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op,fold", [("add", np.add), ("maximum", np.maximum), ("minimum", np.minimum),
                                     ("multiply", np.multiply)])
def test_all_reduce_folds_in_the_order_of_reductions(op, fold, dtype):
    tiles = [operand((4, 30), dtype, i).astype(np.float32) for i in range(5)]
    with np.errstate(all="ignore"):  # five lanes: 0 takes 4, then 0 and 1 take 2 and 3, then 0 takes 1
        want = fold(fold(fold(tiles[0], tiles[4]), tiles[2]), fold(tiles[1], tiles[3]))
    got = lo.all_reduce(tiles, op, (0,))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(np.nan_to_num(got), np.nan_to_num(want))
    assert got.dtype == np.float32
    one = lo.all_reduce(tiles[:1], op, 0)
    np.testing.assert_array_equal(bits(one), bits(tiles[0]))


def test_all_reduce_order_and_inputs():
    big = [np.full((1, 1), v, np.float32) for v in (1e8, 1, -1e8, 1)]
    assert lo.all_reduce(big, "add", 0)[0, 0] == 2  # (1e8 - 1e8) + (1 + 1)
    assert [b[0, 0] for b in big] == [np.float32(v) for v in (1e8, 1, -1e8, 1)]


def test_all_reduce_of_bits():
    tiles = [operand((4, 5), "int32", i) for i in range(3)]
    same(lo.all_reduce(tiles, "bitwise_xor", 0), tiles[0] ^ tiles[1] ^ tiles[2])
    assert ISA["all_reduce"].raw(call("all_reduce", x=tiles[0], op="bitwise_or"))
    assert not ISA["all_reduce"].raw(call("all_reduce", x=tiles[0], op="add"))
    check("all_reduce", x=((4, 5), "int32"), op="bitwise_or", program_axes=0)
    with pytest.raises(NkiTypeError, match="bitwise_or of float32"):
        check("all_reduce", x=((4, 5), "float32"), op="bitwise_or", program_axes=0)


def test_instructions_without_results():
    assert lo.barrier() == lo.core_barrier(cores=(0, 1)) == lo.device_print("x", np.zeros((2, 2))) == ()
    assert ISA["barrier"].suspends and ISA["core_barrier"].suspends and ISA["all_reduce"].suspends
    assert ISA["device_print"].family == "print" and not ISA["device_print"].results


def test_random_instructions_say_so():
    for name in ("rand", "dropout", "random_seed"):
        inst = ISA[name]
        assert inst.random
        assert any(p.spec == Plumbing("stream") and p.keyword_only for p in inst.params)
        assert any(p.spec == Register("rng") for p in inst.params)


def test_costs():
    d = SimpleNamespace(P=128, F=512, dtypes={"x": "float32"})
    assert ISA["dropout"].cost(d, TRN1) == ISA["rand"].cost(d, TRN1) == 512
    assert ISA["partition_broadcast"].cost(d, TRN1) == ISA["gather_flattened"].cost(d, TRN1) == 662
    assert ISA["all_reduce"].cost(d, TRN1) == pytest.approx(128 * 512 * 4 / 136 * 1.4)
    assert ISA["device_print"].cost(d, TRN1) == 0 and ISA["barrier"].cost(d, TRN1) == 64
    assert ISA["core_barrier"].cost(d, TRN1) == ISA["random_seed"].cost(d, TRN1) == 64


# ---- signatures ----------------------------------------------------------------------------------

# api_legacy. OWN are hidden parameters, and keywords that the vendor takes through **kwargs.
VENDOR = {
    "nc_matmul": """stationary, moving, *, is_stationary_onezero=False, is_moving_onezero=False,
        is_transpose=False, tile_position=(), tile_size=(), mask=None, **kwargs""",
    "nc_transpose": "data, *, mask=None, dtype=None, engine=0, **kwargs",
    "activation": """op, data, *, bias=None, scale=1.0, reduce_op=None, reduce_res=None, reduce_cmd=0,
        mask=None, dtype=None, **kwargs""",
    "activation_reduce": """op, data, *, reduce_op, reduce_res, bias=None, scale=1.0, mask=None, dtype=None,
        **kwargs""",
    "affine_select": "pred, on_true_tile, on_false_value, *, mask=None, dtype=None, **kwargs",
    "builtin_custom_op": """function_name, lib_file_name, ulib_to_ucode_version, ulib_to_isa_version, srcs,
        dsts, **kwargs""",
    "dma_copy": "*, dst, src, mask=None, dst_rmw_op=None, oob_mode=0, dge_mode=3",
    "dma_transpose": "src, *, axes=None, mask=None, dtype=None, **kwargs",
    "dropout": "data, prob, *, mask=None, dtype=None, **kwargs",
    "iota": "expr, dtype, *, mask=None, **kwargs",
    "local_gather": "src_buffer, index, num_elem_per_idx=1, num_valid_indices=None, *, mask=None",
    "sequence_bounds": "*, segment_ids, dtype=None",
    "tensor_partition_reduce": "op, data, *, mask=None, dtype=None, **kwargs",
    "rand": "shape, dtype=np.float32, **kwargs",
    "random_seed": "seed, *, mask=None, **kwargs",
    "gather_flattened": "data, indices, *, mask=None, dtype=None, **kwargs",
    "device_print": "prefix, x, *, mask=None, **kwargs",
    "all_reduce": """x, op, program_axes, *, dtype=None, mask=None, parallel_reduce=True, asynchronous=False,
        **kwargs""",
}
OWN = {"stream", "seed_state", "regs", "dst", "accumulate", "perf_mode", "dge_mode"}


@pytest.mark.parametrize("name", VENDOR)
def test_signature_is_the_vendors(name):
    own = OWN - {"dst", "dge_mode"} if name == "dma_copy" else OWN
    kept = [p for p in inspect.signature(ISA[name].body).parameters.values() if p.name not in own]
    shown = []
    for p in kept:
        if p.kind is p.KEYWORD_ONLY and "*" not in shown:
            shown.append("*")
        default = int(p.default) if isinstance(p.default, enum.IntEnum) else p.default
        default = "np.float32" if default is np.float32 else repr(default)
        shown.append("**kwargs" if p.kind is p.VAR_KEYWORD else
                     p.name if p.default is p.empty else f"{p.name}={default}")
    assert shown == VENDOR[name].replace("\n        ", " ").split(", ")
