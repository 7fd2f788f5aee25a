"""Instruction streams: run in any order they give what the kernel gives, and every semaphore is needed."""
import json
import random

import numpy as np
import pytest

import opennki.dropin  # noqa: F401  isort: skip
import neuronxcc.nki as nki
import neuronxcc.nki.compiler as ncc
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import neuronxcc.nki.typing as nt
from opennki.errors import NkiError, NkiParseError, NkiValueError
from opennki.interpret.placed import PlacedLayout
from opennki.interpret.queues import run_streams
from opennki.ir.print import to_text
from opennki.passes.allocate import allocate
from opennki.passes.program import Issue, Signal, Stream, Streams, Wait
from opennki.passes.streams import streams

R = np.random.default_rng(0)
X = R.normal(size=(512, 64)).astype(np.float32)
A = R.normal(size=(512, 256)).astype(np.float32)
B = R.normal(size=(512, 512)).astype(np.float32)
ROWS = R.permutation(512)[:128].astype(np.int32).reshape(128, 1)


def scale(x):
    """Load, compute, store in a loop."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(4):
        tile = nl.load(x[nl.ds(i * 128, 128), :])
        nl.store(out[nl.ds(i * 128, 128), :], nl.exp(nl.multiply(tile, 0.5)))
    return out


def product(a, b):
    """A tiled matmul: accumulation in PSUM, loads in the innermost loop."""
    out = nl.ndarray((a.shape[1], b.shape[1]), dtype=nl.float32, buffer=nl.shared_hbm)
    for m in nl.affine_range(a.shape[1] // 128):
        for n in nl.affine_range(b.shape[1] // 128):
            acc = nl.zeros((128, 128), dtype=nl.float32, buffer=nl.psum)
            for k in nl.affine_range(a.shape[0] // 128):
                left = nl.load(a[nl.ds(k * 128, 128), nl.ds(m * 128, 128)])
                right = nl.load(b[nl.ds(k * 128, 128), nl.ds(n * 128, 128)])
                acc += nl.matmul(left, right, transpose_x=True)
            nl.store(out[nl.ds(m * 128, 128), nl.ds(n * 128, 128)], nl.copy(acc))
    return out


def running(x):
    """A value that sequential iterations hand on."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    total = nl.zeros((128, 64), dtype=nl.float32)
    for i in nl.sequential_range(4):
        tile = nl.load(x[nl.ds(i * 128, 128), :])
        total[...] = nl.add(total, tile)
        nl.store(out[nl.ds(i * 128, 128), :], nl.sqrt(nl.multiply(total, total)))
    return out


def guarded(x):
    """A branch on the parity of the loop index, with other engines on either side."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    kept = nl.zeros((128, 64), dtype=nl.float32)
    for i in nl.sequential_range(4):
        tile = nl.load(x[nl.ds(i * 128, 128), :])
        if i % 2 == 1:
            kept[...] = nl.add(tile, kept)
            part = nl.exp(kept)
            kept[...] = nl.multiply(part, 0.25)
        else:
            kept[...] = nl.exp(tile)
        nl.store(out[nl.ds(i * 128, 128), :], kept)
    return out


def unrolled(x):
    """Straight-line code: memory is used again and again."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.static_range(4):
        tile = nl.load(x[i * 128:(i + 1) * 128, :])
        wide = nl.ndarray((128, 12000), dtype=nl.float32, buffer=nl.sbuf)
        wide[:, 0:64] = nl.exp(tile)
        wide[:, 64:128] = nl.multiply(wide[:, 0:64], 2.0)
        nl.store(out[i * 128:(i + 1) * 128, :], wide[:, 64:128])
    return out


def direct(x):
    """Two buffers that the kernel places itself."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tiles = nl.ndarray((4, nl.par_dim(128), 64), dtype=x.dtype, buffer=ncc.sbuf.mod_alloc(base_addr=0, num_free_tiles=(2,)))
    results = nl.ndarray((4, nl.par_dim(128), 64), dtype=x.dtype, buffer=ncc.sbuf.mod_alloc(base_addr=4096, num_free_tiles=(2,)))
    for i in nl.affine_range(4):
        tiles[i] = nl.load(x[nl.ds(i * 128, 128), :])
        results[i] = nisa.activation(nl.exp, tiles[i], bias=None) if False else nl.multiply(tiles[i], 3.0)
        nl.store(out[nl.ds(i * 128, 128), :], results[i])
    return out


def two_passes(x):
    """A result in HBM that a second loop loads again."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    middle = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm)
    for i in nl.affine_range(4):
        nl.store(middle[nl.ds(i * 128, 128), :], nl.exp(nl.load(x[nl.ds(i * 128, 128), :])))
    for i in nl.affine_range(4):
        nl.store(out[nl.ds(i * 128, 128), :], nl.add(nl.load(middle[nl.ds(384 - i * 128, 128), :]), 1.0))
    return out


def nested(x):
    """An inner loop whose buffers go around in fewer iterations than there are buffers."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(4):
        sums = nl.zeros((128, 64), dtype=nl.float32)
        for j in nl.sequential_range(2, directives=ncc.multi_buffer(3)):
            tile = nl.load(x[nl.ds(i * 128, 128), nl.ds(j * 32, 32)])
            sums[:, nl.ds(j * 32, 32)] = nl.exp(tile)
        nl.store(out[nl.ds(i * 128, 128), :], sums)
    return out


def accumulated(x):
    """PSUM tensors whose accumulation starts from zero without an instruction that says so, in banks that take turns."""
    out = nl.ndarray((3, 128, 64), dtype=nl.float32, buffer=nl.shared_hbm)
    left = nl.load(x[0:128, 0:64])
    for i in nl.sequential_range(3):
        first = nl.ndarray((64, 2048), dtype=nl.float32, buffer=nl.psum)
        second = nl.ndarray((64, 2048), dtype=nl.float32, buffer=nl.psum)
        third = nl.ndarray((64, 2048), dtype=nl.float32, buffer=nl.psum)
        for part in (first, second, third):
            for k in nl.affine_range(2):
                part[:, 0:64] += nisa.nc_matmul(left, nl.load(x[nl.ds(k * 128, 128), 0:64]))
            nl.store(out[i, 0:64, :], nl.copy(part[:, 0:64]))
        nl.store(out[i, 64:128, :], nl.exp(left[0:64, :]))
    return out


def gathered(x, rows):
    """Indices that are read at run time, on chip and in HBM."""
    out = nl.ndarray((128, 64), dtype=x.dtype, buffer=nl.shared_hbm)
    first = nl.load(x[0:128, :])
    index = nl.load(rows)
    picked = nl.load(x[index, nl.arange(64)[None, :]])
    nl.store(out, nl.add(first, nl.exp(picked)))
    return out


def counted(x):
    """A loop that ends when a value read at run time is zero; the value is computed by another engine."""
    out = nl.ndarray((128, 64), dtype=x.dtype, buffer=nl.shared_hbm)
    left = nl.full((1, 1), 3, dtype=nl.int32)
    total = nl.load(x[0:128, :])
    going = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    going[...] = nl.copy(left)
    cond = nt.scalar(True)
    while cond:
        total[...] = nl.exp(nl.multiply(total, 0.1))
        going[...] = nl.subtract(going, 1)
        cond = nt.scalar(going)
    nl.store(out, total)
    return out


CASES = {f.__name__: (f, args) for f, args in [
    (scale, (X,)), (product, (A, B[:, :256])), (running, (X,)), (guarded, (X,)), (unrolled, (X,)), (direct, (X,)), (two_passes, (X,)),
    (nested, (X,)), (accumulated, (X,)),
    (gathered, (X, ROWS)), (counted, (X,))]}


def compiled(name):
    kernel, args = CASES[name]
    jitted = nki.jit(kernel, mode="simulation", platform_target="trn1")
    made = jitted.trace(*args)
    memory = allocate(made)
    return made, memory, streams(made, memory), args, jitted(*args)


@pytest.mark.parametrize("name", CASES)
def test_any_order_gives_the_same_result(name):
    kernel, memory, made, args, expected = compiled(name)
    for order in range(6):
        result, = run_streams(kernel, memory, made, list(args), order=order)
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("name", CASES)
def test_every_semaphore_is_needed(name):
    kernel, memory, made, args, _ = compiled(name)
    assert made.semaphores
    for semaphore in made.semaphores:
        with pytest.raises(NkiError, match=r"a race|a deadlock") as caught:
            run_streams(kernel, memory, made.without(semaphore.number), list(args))
        assert str(caught.value).count("test_streams.py:") >= 2, "both lines"


@pytest.mark.parametrize("start", [1 << 30, -5])
def test_a_race_shows_in_spite_of_a_loop_that_does_not_end(start, monkeypatch):
    """Without its semaphore the loop counts down from whatever the memory holds, here from a large number."""
    kernel, memory, made, args, _ = compiled("counted")
    room = PlacedLayout.room

    def filled(self):
        out = room(self)
        for data in out.values():
            data.view(np.int32)[...] = start
        return out

    monkeypatch.setattr(PlacedLayout, "room", filled)
    for semaphore in made.semaphores:
        for order in range(6):
            with pytest.raises(NkiError, match=r"a race|a deadlock"):
                run_streams(kernel, memory, made.without(semaphore.number), list(args), order=order)


def waits(body):
    """Places of the waits in a body: paths of indices."""
    for i, node in enumerate(body):
        if isinstance(node, Wait):
            yield (i,)
        for part in ("body", "then", "orelse"):
            if hasattr(node, part):
                yield from ((i, part, *rest) for rest in waits(getattr(node, part)))


def cut(body, path):
    """A body without the node at a path."""
    import dataclasses
    i, *rest = path
    if not rest:
        return body[:i] + body[i + 1:]
    part, *rest = rest
    return (*body[:i], dataclasses.replace(body[i], **{part: cut(getattr(body[i], part), rest)}), *body[i + 1:])


@pytest.mark.parametrize("name", CASES)
def test_every_wait_is_needed(name):
    kernel, memory, made, args, _ = compiled(name)
    for n, stream in enumerate(made.streams):
        for path in waits(stream.body):
            less = [*made.streams]
            less[n] = Stream(stream.name, stream.engine, cut(stream.body, path))
            with pytest.raises(NkiError, match="a race"):
                run_streams(kernel, memory, Streams(made.kernel, made.target, tuple(less), made.semaphores), list(args))


def test_a_signal_that_is_missing_is_a_deadlock():
    kernel, memory, made, args, _ = compiled("scale")
    def silent(body):
        out = []
        for node in body:
            if isinstance(node, Signal):
                continue
            if hasattr(node, "body"):
                import dataclasses
                node = dataclasses.replace(node, body=silent(node.body))
            out.append(node)
        return tuple(out)
    mute = Streams(made.kernel, made.target, tuple(Stream(s.name, s.engine, silent(s.body)) for s in made.streams), made.semaphores)
    with pytest.raises(NkiError, match=r"a deadlock: stream .* waits until s0 of "):
        run_streams(kernel, memory, mute, list(args))


@pytest.mark.parametrize("name", ["product", "guarded", "unrolled", "accumulated"])
def test_the_streams_as_text(name, golden):
    _, memory, made, _, _ = compiled(name)
    golden(to_text(memory.kernel), "before")
    golden(made.text(), "after")


@pytest.mark.parametrize("name", CASES)
def test_json_and_back(name):
    _, _, made, _, _ = compiled(name)
    assert Streams.from_json(json.loads(json.dumps(made.to_json()))) == made


def test_every_instruction_is_issued_once_and_streams_of_another_kernel_are_refused():
    kernel, memory, made, args, _ = compiled("product")
    issued = sorted(n.number for s in made.streams for n in s.nodes() if isinstance(n, Issue))
    assert len(issued) == len(set(issued)) == 6
    other = compiled("scale")[2]
    with pytest.raises(NkiValueError, match="not those of this kernel"):
        run_streams(kernel, memory, other, list(args))


def test_hostile_json_is_refused():
    data = json.loads(json.dumps(compiled("guarded")[2].to_json()))
    draw = random.Random(3)
    junk = [None, -1, 1 << 70, 1.5, True, "", "x" * 99, "i1", [], {}, [[]], ["issue"], ["loop", 0, "i1", 3, []],
            ["wait", 0, 0, [["zz", 1]]]]

    def mutate(value):
        places = []
        def walk(v):
            items = list(enumerate(v)) if isinstance(v, list) else list(v.items()) if isinstance(v, dict) else []
            for k, inner in items:
                places.append((v, k))
                walk(inner)
        walk(value)
        where, key = draw.choice(places)
        if draw.random() < 0.3:
            del where[key]
        else:
            where[key] = draw.choice(junk)
    refused = 0
    for _ in range(400):
        broken = json.loads(json.dumps(data))
        mutate(broken)
        try:
            made = Streams.from_json(broken)
            assert Streams.from_json(json.loads(json.dumps(made.to_json()))) == made
        except NkiParseError:
            refused += 1
    assert refused > 200
    deep = ["issue", 0]
    for n in range(100):
        deep = ["loop", n, f"k{n}", 2, [deep]]
    with pytest.raises(NkiParseError, match="levels"):
        Streams.from_json({**data, "streams": [{"name": "vector", "engine": "vector", "body": [deep]}], "semaphores": []})
