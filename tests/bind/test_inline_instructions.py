"""Every instruction of the registry, expanded into JAX: either it agrees with the interpreter, or the error says why it cannot."""
from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("jax")

import opennki.dropin  # noqa: F401  isort: skip
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
from neuronxcc.nki._private.private_api import core_barrier
from opennki.bind.inline import CannotInline, first_unsupported, inline
from opennki.ir.nodes import Instr, statements
from opennki.isa.declare import ISA
from tests.bind.compare import agree, close, exact, integers, kernel_of, normal

BF16 = np.dtype(ml_dtypes.bfloat16)
P, F = 32, 48


def stored(*tiles):
    """Outputs with the values of tiles."""
    outs = []
    for t in tiles:
        out = nl.ndarray(t.shape, dtype=t.dtype, buffer=nl.shared_hbm)
        nl.store(out, t)
        outs.append(out)
    return tuple(outs) if len(outs) > 1 else outs[0]


SAMPLES = {}


def sample(*arrays, check=close):
    """Register a kernel with its inputs."""
    def register(fn):
        SAMPLES[fn.__name__] = fn, arrays, check
        return fn
    return register


X, Y, COLUMN = normal(P, F), normal(P, F, seed=1), normal(P, 1, seed=2)


@sample(X, Y, COLUMN)
def elementwise(x, y, c):
    a, b, s = nl.load(x), nl.load(y), nl.load(c)
    return stored(
        nisa.tensor_tensor(a, b, np.add), nisa.tensor_tensor(a, b, np.maximum, dtype=nl.bfloat16), nisa.tensor_tensor(a, b, nl.greater),
        nisa.tensor_scalar(a, np.multiply, s, op1=np.subtract, operand1=0.5, reverse1=True), nisa.tensor_scalar(a, nl.rsqrt, 0.0),
        nisa.scalar_tensor_tensor(data=a, op0=np.subtract, operand0=s, op1=np.multiply, operand1=b), nisa.reciprocal(a),
        nl.sin(a), nl.floor(a), nl.divide(a, b), nl.where(a > b, a, 0.25), nl.negative(a), nl.mod(a, b))


@sample(integers(P, F, low=-2**31, high=2**31 - 1), integers(P, F, low=-2**31, high=2**31 - 1, seed=1), check=exact)
def exact_integers(x, y):
    a, b = nl.load(x), nl.load(y)
    return stored(nisa.tensor_tensor(a, b, np.add), nisa.tensor_tensor(a, b, np.multiply), nisa.tensor_tensor(a, b, np.subtract),
                  nisa.tensor_tensor(a, b, np.bitwise_xor), nisa.tensor_scalar(a, nl.left_shift, 3, op1=nl.right_shift, operand1=1),
                  nisa.tensor_copy(a, dtype=nl.int16), nisa.tensor_copy(a, dtype=nl.uint32), nisa.tensor_copy(a, dtype=nl.float32))


@sample(integers(P, F, high=2**32 - 1, dtype=np.uint32), integers(P, F, high=2**32 - 1, dtype=np.uint32, seed=1), check=exact)
def unsigned_integers(x, y):
    a, b = nl.load(x), nl.load(y)
    return stored(nisa.tensor_tensor(a, b, np.add), nisa.tensor_tensor(a, b, np.multiply), nisa.tensor_tensor(a, b, np.subtract),
                  nl.where(nisa.tensor_tensor(a, b, nl.greater, dtype=nl.uint8), a, b))


@sample(X, COLUMN)
def activations(x, c):
    a, bias = nl.load(x), nl.load(c)
    total, more = nl.ndarray((P, 1), dtype=nl.float32), nl.ndarray((P, 1), dtype=nl.float32)
    p = nisa.activation_reduce(op=nl.exp, data=a, bias=bias, scale=0.5, reduce_op=np.add, reduce_res=total)
    q = nisa.activation(op=nl.tanh, data=a, reduce_op=np.add, reduce_res=more, reduce_cmd=nisa.reduce_cmd.reduce)
    return stored(p, q, total, more, nisa.activation(op=nl.gelu, data=a), nl.erf(a), nl.silu(a), nl.softplus(a), nl.mish(a))


@sample(X, COLUMN)
def masked_activation(x, c):
    a, bias = nl.load(x), nl.load(c)
    total, out = nl.zeros((P, 1), dtype=nl.float32), nl.zeros((P, F), dtype=nl.float32)
    ip, ix = nl.mgrid[0:P, 0:F]
    out[ip, ix] = nisa.activation_reduce(op=nl.exp, data=a[ip, ix], bias=bias, reduce_op=np.add, reduce_res=total,
                                         mask=(ip < 20) & (ix + ip < 40))
    return stored(out, total)


@sample(normal(64, 96), normal(64, 80, seed=1))
def matmuls(x, y):
    a, b = nl.load(x), nl.load(y)
    acc = nl.zeros((96, 80), dtype=nl.float32, buffer=nl.psum)
    for _ in nl.affine_range(3):
        acc += nisa.nc_matmul(a, b)
    return stored(nl.copy(acc), nl.copy(nisa.nc_transpose(a)), nisa.dma_transpose(x), nl.copy(nl.matmul(a, b, transpose_x=True)))


@sample(normal(64, 96))
def transposing_matmul(x):
    a = nl.load(x)
    eye = nl.load(nl.shared_constant(np.eye(64, dtype=np.float32)))
    return stored(nl.copy(nisa.nc_matmul(a, eye, is_transpose=True)))


@sample(X, integers(P, F, high=2, dtype=np.uint8))
def copies(x, predicate):
    a, p = nl.load(x), nl.load(predicate)
    dst = nl.zeros((P, F), dtype=nl.float32)
    nisa.tensor_copy_predicated(src=a, dst=dst, predicate=p)
    other = nl.ones((P, F), dtype=nl.float32)
    nisa.tensor_copy_predicated(src=-2.0, dst=other, predicate=p, reverse_pred=True)
    return stored(dst, other, nisa.tensor_copy(a, dtype=nl.bfloat16), nisa.tensor_copy(a, dtype=nl.int8),
                  nisa.memset((P, 8), 3, dtype=nl.int16), nisa.memset((P, 8), float("inf"), dtype=nl.bfloat16))


@sample(X, np.array([[7, 3]], np.int32))
def dynamic_copies(x, at):
    a, offset = nl.load(x), nl.load(at)
    ip, ix = nl.mgrid[0:P, 0:8]
    dst = nl.zeros((P, F), dtype=nl.float32)
    nisa.tensor_copy_dynamic_dst(dst=dst[ip, offset[0, 1] + ix], src=a[ip, ix])
    return stored(nisa.tensor_copy_dynamic_src(a[ip, offset[0, 0] + ix]), dst)


@sample(normal(64, 40))
def shuffles(x):
    a = nl.load(x)
    dst = nl.ones((64, 40), dtype=nl.float32)
    nisa.nc_stream_shuffle(a, dst, [*range(16, 32), *range(12), 255, 255, 255, 255])
    return stored(dst, nl.add(a, a[0:1, :]))


@sample(X)
def reductions(x):
    a = nl.load(x)
    ip, ix = nl.mgrid[0:P, 0:F]
    each = nl.ndarray((P, 1), dtype=nl.float32)
    scaled = nisa.tensor_scalar_reduce(data=a, op0=np.multiply, operand0=3.0, reduce_op=np.maximum, reduce_res=each)
    return stored(
        nisa.tensor_reduce(np.add, a, axis=[1]), nisa.tensor_reduce(np.max, a[ip, ix], axis=[1], mask=ix < 17, negate=True),
        nisa.tensor_reduce(np.subtract, a, axis=[1]), nisa.tensor_reduce(np.multiply, a, axis=[1], keepdims=True), scaled, each,
        nisa.tensor_partition_reduce(np.add, a), nisa.tensor_reduce(nl.logical_or, a, axis=[1], dtype=nl.uint8),
        nisa.tensor_partition_reduce(np.max, a[ip, ix], mask=ip < 9))


@sample(integers(P, F, high=2**16, dtype=np.uint16), check=exact)
def bit_reductions(x):
    a = nl.load(x)
    return stored(nisa.tensor_reduce(np.bitwise_and, a, axis=[1]), nisa.tensor_reduce(np.bitwise_xor, a, axis=[1]),
                  nisa.tensor_partition_reduce(np.bitwise_or, a))


@sample(X, Y, COLUMN)
def scans(x, y, c):
    a, b, s = nl.load(x), nl.load(y), nl.load(c)
    ip, ix = nl.mgrid[0:P, 0:F]
    running = nl.ndarray((P, F), dtype=nl.float32)
    nisa.tensor_scalar_cumulative(src=a, dst=running, op0=np.multiply, op1=np.add, imm0=0.5)
    part = nl.zeros((P, F), dtype=nl.float32)
    part[ip, ix] = nisa.tensor_tensor_scan(a[ip, ix], b[ip, ix], s, np.multiply, np.subtract, reverse1=True, mask=ix < 30)
    return stored(nisa.tensor_tensor_scan(a, b, s, np.multiply, np.add), running, part,
                  nisa.tensor_tensor_scan(a, b, 0.0, np.subtract, np.maximum, reverse0=True))


@sample(X)
def statistics(x):
    a = nl.load(x)
    ip, ix = nl.mgrid[0:P, 0:F]
    stats = nl.ndarray((P, 12), dtype=nl.float32)
    stats[:, 0:6] = nisa.bn_stats(a)
    stats[:, 6:12] = nisa.bn_stats(a[ip, ix], mask=ix < 31)
    return stored(stats, nisa.bn_aggr(stats))


@sample(X, integers(P, F, high=2, dtype=np.uint8), COLUMN)
def selections(x, predicate, c):
    a, p, s = nl.load(x), nl.load(predicate), nl.load(c)
    dst, largest = nl.ndarray((P, F), dtype=nl.float32), nl.ndarray((P, 1), dtype=nl.float32)
    nisa.select_reduce(dst=dst, predicate=p, on_true=a, on_false=s, reduce_res=largest, reduce_cmd=nisa.reduce_cmd.reset_reduce)
    ip, ix = nl.mgrid[0:P, 0:F]
    low, high = nisa.tensor_scalar(s, np.multiply, 3.0), nisa.tensor_scalar(s, np.add, 20.0)
    most = nl.ndarray((P, 1), dtype=nl.float32)
    inside = nisa.range_select(on_true_tile=a, comp_op0=nl.greater_equal, comp_op1=nl.less, bound0=low, bound1=high, reduce_res=most,
                               reduce_cmd=nisa.reduce_cmd.reset_reduce, range_start=4)
    return stored(dst, largest, inside, most, nisa.affine_select(pred=ip * 2 > ix + 3, on_true_tile=a, on_false_value=-1.5),
                  nisa.iota(ip * 100 - ix, dtype=nl.int32))


@sample(np.round(X * 2), check=exact)
def top_eight(x):
    a = nl.load(x)
    ip, ix = nl.mgrid[0:P, 0:F]
    best = nisa.max8(src=a)
    where = nl.ndarray((P, 8), dtype=nl.uint32)
    rest = nisa.nc_match_replace8(data=a, vals=best, imm=-100.0, dst_idx=where)
    return stored(best, nisa.max8(src=a[ip, ix], mask=ix < 12), nisa.nc_find_index8(data=a, vals=best), rest, where)


@sample(np.round(X * 2))
def masked_rows(x):
    """A mask on rows, and one that excludes everything."""
    a = nl.load(x)
    ip, ix = nl.mgrid[0:P, 0:F]
    best = nisa.max8(src=a)
    where, stats, sums = (nl.zeros((P, n), dtype=kind) for n, kind in ((8, nl.uint32), (6, nl.float32), (1, nl.float32)))
    rest = nisa.nc_match_replace8(data=a[ip, ix], vals=best, imm=-100.0, dst_idx=where, mask=ip < 9)
    stats[...] = nisa.bn_stats(a[ip, ix], mask=(ip < 11) & (ix < 30))
    sums[...] = nisa.tensor_reduce(np.max, a[ip, ix], axis=[1], mask=(ip < 12) & (ix < 5))
    for i in nl.sequential_range(6):
        sums[...] = nisa.tensor_reduce(np.max, a[ip, ix], axis=[1], mask=(ip >= 4 * i) & (ip < 4 * i + 2) & (ix + 10 < 5 * i))
    out = nl.zeros((P, F), dtype=nl.float32)
    out[ip, ix] = nl.copy(rest[ip, ix], mask=ip < 9)
    return stored(where, stats, sums, out)


@sample(X, integers(P, 4, high=F, dtype=np.uint16), integers(P, 8, high=F, dtype=np.uint32), check=exact)
def gathers(x, index, flat):
    a = nl.load(x)
    return stored(nisa.local_gather(a, nl.load(index), 1), nl.gather_flattened(a, nl.load(flat)))


@sample(np.array([[0, 0, 3, 3, 3, 1, 0, 2, 2]], np.int32), check=exact)
def segments(ids):
    return stored(nisa.sequence_bounds(segment_ids=nl.load(ids)))


@sample(X, integers(16, 1, high=P), check=exact)
def rows_by_index(x, at):
    index = nl.load(at)
    row, ix = nl.arange(16)[:, None], nl.arange(F)[None, :]
    return stored(nl.load(x[index[row, 0], ix]))


@sample(X, np.array([[3], [40], [-1], [7]], np.int32), check=exact)
def skipped_rows(x, at):
    index = nl.load(at)
    row, ix = nl.arange(4)[:, None], nl.arange(F)[None, :]
    t = nl.ones((4, F), dtype=x.dtype)
    nisa.dma_copy(dst=t, src=x[index[row, 0], ix], oob_mode=nisa.oob_mode.skip)
    out = nl.ndarray((P, F), dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.zeros((P, F), dtype=x.dtype))
    nisa.dma_copy(dst=out[index[row, 0], ix], src=t, oob_mode=nisa.oob_mode.skip)
    return stored(t), out


@sample(X, Y)
def bulk(x, y):
    from neuronxcc.nki.isa import _tiled_offloaded_fma, _tiled_offloaded_memcpy
    total, copy = (nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm) for _ in range(2))
    _tiled_offloaded_fma(x, y, dst=total, scales=[2.0, -0.5])
    _tiled_offloaded_memcpy(src=x, dst=copy)
    nisa.dma_copy(dst=total, src=y, dst_rmw_op=np.add)
    return total, copy


@sample(X, check=exact)
def random_numbers(x):
    return stored(nl.dropout(nl.load(x), 0.4), nl.rand((P, F)))


@sample(X, check=exact)
def random_in_a_loop(x):
    out = nl.ndarray((9, P, F), dtype=nl.float32, buffer=nl.shared_hbm)
    for i in nl.sequential_range(9):
        if i == 4:
            nl.random_seed(11)
        nl.store(out[i], nl.rand((P, F)))
    return out


@sample(X)
def loop_reduction(x):
    total = nl.ndarray((P, F), dtype=nl.float32)
    for i in nl.affine_range(6):
        total = nl.loop_reduce(nl.multiply(nl.load(x), i), op=np.add, loop_indices=[i])
    return stored(total)


@sample(X, check=exact)
def printed(x):
    a = nl.load(x)
    nl.device_print("a{}", a)
    return stored(a)


@pytest.mark.parametrize("name", SAMPLES)
def test_agrees_with_the_interpreter(name):
    fn, arrays, check = SAMPLES[name]
    agree(fn, *arrays, check=check)


# ---- what cannot be expanded -------------------------------------------------------------------------------


def seeded(x):
    nl.random_seed(nl.load(x)[0, 0])
    return stored(nl.rand((P, F)))


def random_in_a_long_loop(x):
    out = nl.ndarray((2048, P, F), dtype=nl.float32, buffer=nl.shared_hbm)
    for i in nl.sequential_range(2048):
        nl.store(out[i], nl.rand((P, F)))
    return out


def meeting(x):
    core_barrier(x, (0, 1))
    return stored(nl.load(x))


def summed_over_programs(x):
    return stored(nl.all_reduce(nl.load(x), op=np.add, program_axes=[0]))


UNSUPPORTED = {
    "random_seed": (seeded, None, "known only when the kernel runs"),
    "rand": (random_in_a_long_loop, None, "known only when the kernel runs"),
    "core_barrier": (meeting, nl.nc(2), "wait for each other"),
    "all_reduce": (summed_over_programs, (2,), "wait for each other"),
}
# always an error when traced; a barrier is made by sync_program alone
NO_SAMPLE = {"builtin_custom_op", "barrier"}


@pytest.mark.parametrize("op", UNSUPPORTED)
def test_what_cannot_be_expanded_is_named_with_its_line(op):
    fn, grid, why = UNSUPPORTED[op]
    kernel = kernel_of(fn)
    kernel = kernel if grid is None else kernel[grid]
    traced = kernel.trace(X)
    message, loc = first_unsupported(traced)
    assert message.startswith(f"{op} cannot be expanded")
    assert loc.file == __file__ and op.split("_")[0] in loc.source()
    with pytest.raises(CannotInline, match=why) as caught:
        inline(traced)(X)
    assert caught.value.loc == loc and f"{loc.line}" in str(caught.value)


def test_every_instruction_has_a_sample():
    seen = set()
    for fn, arrays, _ in SAMPLES.values():
        kernel = kernel_of(fn).trace(*arrays)
        assert first_unsupported(kernel) is None
        seen |= {s.op for s in statements(kernel.body) if isinstance(s, Instr)}
    meetings = {name for name, decl in ISA.items() if decl.suspends}  # of programs and ranks: there are none in a program of XLA
    assert seen | set(UNSUPPORTED) | NO_SAMPLE | meetings == set(ISA)
