"""Unrolled kernels: lines of instructions that are alike become what the first of them became, at other addresses."""

from __future__ import annotations

import concurrent.futures
import random

import numpy as np
import pytest
from tests.bind import kernels as k
from tests.execute import differ
from tests.execute.agree import both
from tests.execute.test_passes import traced

from opennki.execute import abi, tape_file, templates
from opennki.execute.executor import executor_of
from opennki.execute.group import MAX_GROUP
from opennki.execute.instruction import Instruction
from opennki.execute.places import reach_of
from opennki.interpret.checks import Checks, tape_of
from opennki.ir.parse import from_text

nki, nl, nisa = k.nki, k.nl, k.nisa


def mixed(x, seed, count, unit):
    """`count` random instructions on parts of tensors, at multiples of `unit` elements: parts that are the same, meet, or do not."""
    out = nl.ndarray((32, 256), dtype=nl.float32, buffer=nl.shared_hbm)
    draw = random.Random(seed)
    one = nl.ndarray((32, 256), dtype=nl.float32, buffer=nl.sbuf)
    two = nl.ndarray((32, 256), dtype=nl.bfloat16, buffer=nl.sbuf)
    thin = nl.ndarray((32, 16), dtype=nl.float32, buffer=nl.sbuf)
    one[...] = nl.load(x)
    two[...] = nl.load(x)
    thin[...] = nl.load(x[:, 0:16])

    def at(tensor, n):
        return tensor[:, nl.ds(draw.randrange((tensor.shape[1] - n) // unit + 1) * unit, n)]

    def place(tensor, n):
        return slice(None), nl.ds(draw.randrange((tensor.shape[1] - n) // unit + 1) * unit, n)

    for _ in range(count):
        n = draw.choice((16, 16, 32))
        a, b = draw.choice((one, two)), draw.choice((one, two))
        kind = draw.randrange(9)
        if kind == 0:
            a[place(a, n)] = nisa.tensor_tensor(at(one, n), at(two, n), draw.choice((np.add, np.maximum)))
        elif kind == 1:
            a[place(a, n)] = nisa.tensor_scalar(at(b, n), np.multiply, draw.choice((0.5, -1.0)), op1=np.add, operand1=0.25)
        elif kind == 2:
            thin[place(thin, 1)] = nisa.tensor_reduce(np.max, at(b, n), axis=(1,))
        elif kind == 3:
            a[place(a, n)] = nisa.tensor_copy(at(b, n))
        elif kind == 4:
            tile = nl.multiply(at(b, n), at(thin, 1))  # which nobody else uses
            a[place(a, n)] = nl.subtract(tile, at(one, n))
        elif kind == 5:
            a[place(a, n)] = nl.load(x[:, nl.ds(draw.randrange(256 - n), n)])
        elif kind == 6:
            nl.store(out[place(out, n)], at(one, n))
        elif kind == 7:
            a[place(a, n)] = nisa.tensor_tensor_scan(at(one, n), at(two, n), initial=0.0, op0=np.multiply, op1=np.add)
        else:
            a[place(a, 32)] = nisa.nc_transpose(at(one, 32))
    nl.store(out, one)
    return out


X = (np.random.default_rng(3).integers(-8, 9, (32, 256)) / 8).astype(np.float32)


@pytest.mark.parametrize("unit", [16, 1])
@pytest.mark.parametrize("seed", range(6))
def test_the_same_bits_as_the_interpreter(seed, unit):
    assert both(traced(mixed, X, seed, 150, unit), [X])


def lowered(kernel):
    executor = executor_of(tape_of(kernel, Checks.of("off"), roll=True))
    assert executor is not None and not executor.lowering.fallbacks
    return executor.lowering


def chains(x, count):
    """Chains of four instructions at places in no order."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    here, there = (random.Random(n).sample(range(count), count) for n in (1, 2))
    for i in range(count):
        a = nl.load(x[:, nl.ds(here[i] * 4, 4)])
        nl.store(out[:, nl.ds(there[i] * 4, 4)], nl.add(nl.multiply(a, 0.5), a))
    return out


def test_one_chain_is_compiled_for_all():
    made = lowered(traced(chains, np.zeros((32, 800), np.float32), 200))
    assert len(made.calls) == 200
    assert len({id(call.what) for call in made.calls}) == 1
    assert len(made.views) < 40  # of the few that were looked at by themselves
    assert [len(call.instrs) for call in made.calls] == [4] * 200


def kept(x):
    """Two chains of one form, of which one result is used again."""
    out = nl.ndarray((3, 16, x.shape[1]), dtype=x.dtype, buffer=nl.shared_hbm)
    for i in range(2):
        middle = nl.multiply(nl.load(x[nl.ds(i * 16, 16)]), 0.5)
        nl.store(out[i], nl.add(middle, 1.0))
        if i == 1:
            nl.store(out[2], nisa.tensor_tensor_scan(middle, middle, initial=0.0, op0=np.multiply, op1=np.add))
    return out


def test_what_is_used_again_is_stored():
    kernel = traced(kept, X)
    assert both(kernel, [X])
    made = lowered(kernel)
    stores = [sum(written for _, written in touches) for touches in ([t for t in n.touches] for n in made.nodes if hasattr(n, "touches"))]
    assert stores == [1, 2, 1]


@pytest.mark.parametrize("seed", range(200))
def test_places_that_are_apart_share_no_byte(seed):
    draw = random.Random(seed)

    def tile():
        inner, outer = draw.randint(1, 6), draw.randint(1, 4)
        return (outer, inner), (draw.choice((8, 12, 16, 24, 0)), draw.choice((1, 2, 4))), draw.choice((1, 2))

    def covered(shape, strides, item, start):
        return {start + i * strides[0] + j * strides[1] + b for i in range(shape[0]) for j in range(shape[1]) for b in range(item)}

    found = set()
    for _ in range(40):
        one, two, delta = tile(), tile(), draw.randint(-40, 40)
        if reach_of(*one).apart(reach_of(*two), delta):
            assert not covered(*one, delta) & covered(*two, 0)
            found.add(delta)
    assert found


def masked(x, seed, count):
    """Masked instructions, and index and truth tiles, at places and with limits in no order."""
    out = nl.ndarray((32, 256), dtype=nl.float32, buffer=nl.shared_hbm)
    draw = random.Random(seed)
    tile = nl.ndarray((32, 256), dtype=nl.float32, buffer=nl.sbuf)
    tile[...] = nl.load(x)
    rows, columns = nl.arange(32)[:, None], nl.arange(16)[None, :]
    for _ in range(count):
        a, b = (draw.randrange(16) * 16 for _ in range(2))
        few, kind = draw.randrange(1, 32), draw.randrange(4)
        if kind == 0:
            tile[rows, columns + a] = nl.multiply(tile[rows, columns + b], 0.5, mask=rows < few)
        elif kind == 1:
            tile[rows, columns + a] = nl.load(x[rows, columns + b], mask=(rows < few) & (columns < 9))
        elif kind == 2:
            index = nisa.iota(rows * 2 + columns + draw.randrange(100), dtype=nl.float32)
            tile[rows, columns + a] = nl.add(index, tile[rows, columns + b])
        else:
            tile[rows, columns + a] = nisa.affine_select(rows + few > columns + draw.randrange(3), tile[rows, columns + b], -1.0)
    nl.store(out, tile)
    return out


@pytest.mark.parametrize("seed", range(6))
def test_masks_and_index_tiles_are_of_the_instruction(seed):
    kernel = traced(masked, X, seed, 120)
    assert both(kernel, [X])
    made = lowered(kernel)
    assert len({id(call.what) for call in made.calls}) < len(made.calls) / 2


def many_dimensions(x):
    """Two lines, together too long for one, of what native code has not enough dimensions for; an instruction meets both."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    one, two = (nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf) for _ in range(2))
    some = (slice(None), *[slice(0, 2)] * (len(x.shape) - 1))
    one[...] = nl.load(x)
    two[...] = nl.load(x)
    nl.store(out, one)
    for i in range(MAX_GROUP - 1):
        one[some] = nisa.tensor_scalar(one[some], np.add, float(i))
    two[some] = nisa.tensor_scalar(two[some], np.multiply, 2.0)
    one[some] = nisa.tensor_tensor(one[some], two[some], np.add)
    nl.store(out[some], one[some])
    return out


def test_a_line_that_the_interpreter_gets_while_another_is_open():
    x = np.random.default_rng(0).standard_normal((4, *[3] * 8)).astype(np.float32)
    made = traced(many_dimensions, x)
    left = executor_of(tape_of(made, Checks.of("off"))).lowering.fallbacks
    assert {instr.op for instr, _, _ in left} >= {"tensor_scalar", "tensor_tensor"}
    assert both(made, [x])


def outside(x, count, past):
    """Instructions on windows that a loop moves, and that may leave their tensor."""
    out = nl.ndarray((32, 256), dtype=nl.float32, buffer=nl.shared_hbm)
    draw = random.Random(count)
    tile = nl.ndarray((32, 256), dtype=nl.float32, buffer=nl.sbuf)
    tile[...] = nl.load(x)
    rows, columns = nl.arange(32)[:, None], nl.arange(16)[None, :]
    for i in nl.sequential_range(8):
        for _ in range(count):
            start = draw.randrange(112, 128 + past)
            there = columns + i * 16 + start  # up to 15 + 112 + start
            few = nl.add(nl.load(x[rows, there], mask=there < 256), 1.0, mask=there < 256)
            tile[rows, there] = nl.multiply(few, 0.5, mask=there < 256)
            tile[rows, columns + i * 16 + start - 112] = nl.exp(tile[rows, columns + draw.randrange(128) + i * 16])
    nl.store(out, tile)
    return out


def test_indices_that_are_not_proven_are_of_the_instruction():
    kernel = traced(outside, X, 40, 40)
    made = lowered(kernel)
    bounded = [call for call in made.calls if call.bounds]
    assert len(bounded) > 40 and len({id(call.what) for call in bounded}) < 20
    assert sorted(bound[-1] for call in bounded for bound in call.bounds) == list(range(1, len(made.broken) + 1))
    assert both(kernel, [X])


def gathered(x, rows, count):
    """Rows of one tensor, named at run time, put into windows of another one, and some of them back."""
    out = nl.ndarray((64, 256), dtype=nl.float32, buffer=nl.shared_hbm)
    draw = random.Random(count)
    nl.store(out, nl.load(x[0:64]))
    named = nl.load(rows)
    these, columns = nl.arange(16)[:, None], nl.arange(32)[None, :]
    for _ in range(count):
        which, start, there = draw.randrange(rows.shape[1]), draw.randrange(224), draw.randrange(224)
        tile = nl.load(x[named[these, which], columns + start])
        if draw.randrange(2):
            nl.store(out[named[these, which], columns + there], nl.multiply(tile, 0.5))
        else:
            nl.store(out[these, columns + there], tile)
    return out


def test_runtime_indices_are_of_the_instruction():
    x = np.random.default_rng(4).standard_normal((64, 256)).astype(np.float32)
    rows = np.stack([np.random.default_rng(n).permutation(64)[:16] for n in range(8)], 1).astype(np.int32)
    kernel = traced(gathered, x, rows, 80)
    made = lowered(kernel)
    steps = [call for call in made.calls if call.kind == abi.K_STEPS]
    assert len(steps) > 100 and len({id(call.what) for call in steps}) < 8
    assert [call.errors for call in steps] == list(range(len(steps))) and len(made.broken) == len(steps)
    assert both(kernel, [x, rows])
    rows[3, 5] = 64  # the first instruction that meets it says so
    errors = []
    for checks in ("full", "off"):
        with pytest.raises(IndexError) as info:
            nki.simulate_kernel(nki.jit(gathered, platform_target="trn2"), x, rows, 80, checks=checks)
        errors.append((str(info.value), str(info.value.__cause__)))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("rank", [7, 8])
def test_dimensions_that_native_code_has(rank):
    x = np.random.default_rng(0).standard_normal((4, *[3] * (rank - 1))).astype(np.float32)
    made = traced(many_dimensions, x)
    assert not executor_of(tape_of(made, Checks.of("off"))).lowering.fallbacks
    assert both(made, [x])


def tape_bytes(kernel):
    executor = executor_of(tape_of(kernel, Checks.of("off")))
    return tape_file.written(executor.image, executor.facts) if not executor.steps else None


def looped(x):
    """A loop of a normalisation."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(x.shape[0] // 32):
        tile = nl.load(x[i * 32 : (i + 1) * 32])
        nl.store(out[i * 32 : (i + 1) * 32], tile * nl.rsqrt(nl.mean(nl.square(tile), axis=1, keepdims=True) + 1e-6))
    return out


def test_forms_that_a_kernel_before_had_are_not_recorded_again(monkeypatch):
    recorded = []
    plain = Instruction.record
    monkeypatch.setattr(Instruction, "record", lambda self: recorded.append(self.plan.instr.op) or plain(self))
    templates.forget()
    before = tape_bytes(traced(looped, np.zeros((64, 256), np.float32)))
    first = len(recorded)
    assert first > 4
    assert tape_bytes(traced(looped, np.zeros((64, 256), np.float32))) == before
    assert len(recorded) == first
    tape_bytes(traced(looped, np.zeros((96, 256), np.float32)))  # tensors of another shape: what is on chip is the same
    assert len(recorded) == first + 2


@pytest.mark.parametrize("turn", range(4))
def test_a_tape_does_not_depend_on_the_kernels_before(turn):
    kernels = [from_text(differ.program(turn * 12 + n)[0]) for n in range(12)]
    kernels += [traced(masked, X, turn, 90), traced(mixed, X, turn, 90, 16), traced(chains, np.zeros((32, 800), np.float32), 60)]
    alone = []
    for kernel in kernels:
        templates.forget()
        alone.append(tape_bytes(kernel))
    assert [tape_bytes(kernel) for kernel in kernels] == alone
    assert [tape_bytes(kernel) for kernel in reversed(kernels)] == alone[::-1]
    assert sum(made is not None for made in alone) > 8


def test_lowerings_at_the_same_time_have_tables_of_their_own():
    kernel = traced(mixed, X, 1, 60, 16)
    wanted = tape_bytes(kernel)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: tape_bytes(kernel), range(16))) == {wanted}
    table = templates.take("a level")
    assert templates.take("a level") is not table
    templates.give_back(table)
    assert templates.take("a level") is table
    templates.give_back(table)
    assert templates.take("another level") is not table
