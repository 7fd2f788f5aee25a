"""Elementwise programs, folds and scans of the native library against NumPy and `isa.reduce`."""

from __future__ import annotations

import ctypes as C
import itertools

import numpy as np
import pytest

from opennki.execute import abi
from opennki.execute.assemble import elementwise, uop
from opennki.isa import dtypes
from opennki.isa.dtype_names import STORAGE
from opennki.isa.reduce import reduce_free, reduce_partition, scan_free
from opennki.isa.scalar import SCALAR
from opennki.isa.vector_rules import apply_exact
from tests.execute import native

L, S = abi.LOAD, abi.STORE
REDUCIBLE = sorted(n for n, e in SCALAR.items() if e.reducible)
INTEGERS = ("int32", "uint32", "int16", "uint16", "int8", "uint8")


@pytest.fixture(params=native.LEVELS)
def lib(request):
    return native.at_level(request.param)


def run(lib, outer, inner, phases, arrays, shape=None, preds=(), indices=(), bases=((), ()), lo=None, hi=None):
    """A program over tiles given as (array, dtype); their strides are those of the arrays, which all have the shape."""
    shape = arrays[0][0].shape if shape is None else shape
    program = elementwise(outer, inner, shape, phases, [(a.strides, d) for a, d in arrays], preds, indices)
    program.run(lib, [a.ctypes.data for a, _ in arrays], *bases, lo, hi)


def random(shape, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    if dtype in INTEGERS:
        info = np.iinfo(STORAGE[dtype])
        return rng.integers(info.min, info.max, shape, STORAGE[dtype], endpoint=True)
    x = (rng.standard_normal(shape) * 3).astype(np.float32)
    return np.array(dtypes.from_float32(x, dtype))


def views():
    """(name, function that makes a view of shape (4, 3, n) and what it is a part of)."""
    return {
        "whole": lambda n, t: np.zeros((4, 3, n), t),
        "part": lambda n, t: np.zeros((5, 4, n + 7), t)[1:, :3, 3 : n + 3],
        "every third": lambda n, t: np.zeros((4, 3, 3 * n), t)[:, :, ::3],
        "backwards": lambda n, t: np.zeros((4, 3, n), t)[::-1, :, ::-1],
        "transposed": lambda n, t: np.zeros((n, 3, 4), t).T,
        "middle first": lambda n, t: np.zeros((4, n, 3), t).transpose(0, 2, 1),
    }


@pytest.mark.parametrize("dims", [(0, 3), (1, 2), (2, 1), (3, 0)])
@pytest.mark.parametrize("n", [1, 4, 50, 300])
def test_strides(lib, dims, n):
    for (xa, a), (xb, b), dtype in itertools.product(views().items(), views().items(), ("float32", "bfloat16", "uint8")):
        x, out = a(n, STORAGE[dtype]), b(n, STORAGE["float16"])
        x[...] = random(x.shape, dtype)
        run(
            lib, *dims, [(False, [uop(L, 0, 0), uop(abi.FUNC, 1, 0, fn="multiply", imm=1.5), uop(S, 1, 1)])], [(x, dtype), (out, "float16")]
        )
        want = dtypes.from_float32(dtypes.to_float32(x, dtype) * np.float32(1.5), "float16")
        native.assert_same(out, want, (xa, xb, dtype))


@pytest.mark.parametrize(
    "name", sorted(n for n, e in SCALAR.items() if e.arity == 2 and e.group in ("arithmetic", "comparison", "logical"))
)
@np.errstate(all="ignore")
def test_forms_of_operands(lib, name):
    """Two tiles, a tile and a number on either side, a tile and one value per row on either side, two numbers."""
    if name == "power":
        assert SCALAR[name].arity == 2  # not exact: forms are compared with the two-tile form
    x, y, col = random((6, 300)), random((6, 300), seed=1), random((6, 1), seed=2)
    wide = np.broadcast_to(col, x.shape)
    fn = (lambda a, b: native.call(lib, name, np.array(a), np.array(b))) if name == "power" else SCALAR[name].numpy
    number = np.full_like(x, 1.25)
    cases = {
        "xy": ([uop(L, 0, 0), uop(L, 1, 1), uop(abi.FUNC, 2, 0, 1, fn=name)], fn(x, y)),
        "x1": ([uop(L, 0, 0), uop(abi.FUNC, 2, 0, fn=name, imm=1.25)], fn(x, number)),
        "1x": ([uop(L, 0, 0), uop(abi.FUNC, 2, -1, 0, fn=name, imm=1.25)], fn(number, x)),
        "xc": ([uop(L, 0, 0), uop(L, 1, 2), uop(abi.FUNC, 2, 0, 1, fn=name)], fn(x, wide)),
        "cx": ([uop(L, 0, 0), uop(L, 1, 2), uop(abi.FUNC, 2, 1, 0, fn=name)], fn(wide, x)),
        "cc": ([uop(L, 1, 2), uop(abi.FUNC, 2, 1, 1, fn=name)], fn(wide, wide)),
        "same register": (
            [uop(L, 0, 0), uop(L, 1, 1), uop(abi.FUNC, 0, 0, 1, fn=name), uop(abi.FUNC, 2, 0, 0, fn=name)],
            fn(fn(x, y), fn(x, y)),
        ),
    }
    for what, (ops, want) in cases.items():
        out = np.zeros_like(x)
        before = x.copy(), y.copy()
        run(lib, 1, 1, [(False, [*ops, uop(S, 3, 2)])], [(x, "float32"), (y, "float32"), (wide, "float32"), (out, "float32")])
        native.assert_same(out, want.astype(np.float32), what)
        native.assert_same(x, before[0])
        native.assert_same(y, before[1])


def test_in_place_and_what_reads_the_old_values(lib):
    x = random((3, 700))
    # x = x + 1, and z = old x * 2, which is computed after the store
    a, z = x.copy(), np.zeros_like(x)
    run(
        lib,
        0,
        2,
        [
            (
                False,
                [uop(L, 0, 0), uop(abi.FUNC, 1, 0, fn="add", imm=1), uop(S, 0, 1), uop(abi.FUNC, 2, 0, fn="multiply", imm=2), uop(S, 1, 2)],
            )
        ],
        [(a, "float32"), (z, "float32")],
    )
    native.assert_same(a, x + 1)
    native.assert_same(z, x * 2)
    # the store comes after an operation that reads the old values
    a = x.copy()
    run(
        lib,
        0,
        2,
        [
            (
                False,
                [uop(L, 0, 0), uop(abi.FUNC, 1, 0, fn="add", imm=1), uop(abi.FUNC, 2, 0, fn="multiply", imm=2), uop(S, 0, 1), uop(S, 1, 2)],
            )
        ],
        [(a, "float32"), (z, "float32")],
    )
    native.assert_same(a, x + 1)
    native.assert_same(z, x * 2)
    # one value goes to two tiles, and is read again after the stores
    a, b = np.zeros_like(x), np.zeros_like(x)
    run(
        lib,
        0,
        2,
        [
            (
                False,
                [
                    uop(L, 0, 0),
                    uop(abi.FUNC, 1, 0, fn="add", imm=1),
                    uop(S, 1, 1),
                    uop(S, 2, 1),
                    uop(abi.FUNC, 2, 1, 0, fn="add"),
                    uop(S, 3, 2),
                ],
            )
        ],
        [(x, "float32"), (a, "float32"), (b, "float32"), (z, "float32")],
    )
    native.assert_same(a, x + 1)
    native.assert_same(b, x + 1)
    native.assert_same(z, (x + 1) + x)
    # a swap
    a, b = x.copy(), random(x.shape, seed=4)
    want = b.copy(), a.copy()
    run(lib, 0, 2, [(False, [uop(L, 0, 0), uop(L, 1, 1), uop(S, 0, 1), uop(S, 1, 0)])], [(a, "float32"), (b, "float32")])
    native.assert_same(a, want[0])
    native.assert_same(b, want[1])
    # parts that overlap within a chunk: all of a chunk is read before any of it is written
    a = random((1, 200))
    old = a.copy()
    run(
        lib,
        0,
        2,
        [(False, [uop(L, 0, 0), uop(abi.FUNC, 1, 0, fn="add", imm=1), uop(S, 1, 1)])],
        [(a[:, :-1], "float32"), (a[:, 1:], "float32")],
    )
    native.assert_same(a, np.concatenate([old[:, :1], old[:, :-1] + 1], 1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3", "int32", "int8", "bool", "tfloat32"])
@pytest.mark.parametrize("n", [3, 64, 513])
def test_masked_stores(lib, dtype, n):
    x, mask = random((5, 4, n)), (np.random.default_rng(1).random((5, 4, n)) < 0.5).astype(np.float32)
    mask[0, 0, 0] = -0.0
    for name, view in {"whole": lambda a: a, "backwards": lambda a: a[..., ::-1], "rows": lambda a: a}.items():
        out = np.array(random(x.shape, dtype if dtype != "bool" else "uint8", seed=2))
        want = out.copy()
        stored = dtypes.from_float32(x, dtype)
        view(want)[...] = np.where(mask != 0, stored, view(want))
        run(
            lib,
            1 if name == "rows" else 0,
            2 if name == "rows" else 3,
            [(False, [uop(L, 0, 0), uop(L, 1, 1), uop(S, 2, 0, c=1)])],
            [(x, "float32"), (mask, "float32"), (view(out), dtype)],
        )
        native.assert_same(out, want, name)
    # a mask of one value per row
    out, column = np.array(dtypes.from_float32(np.zeros_like(x), dtype)), np.broadcast_to(mask[:, :1, :1], x.shape)
    run(lib, 1, 2, [(False, [uop(L, 0, 0), uop(L, 1, 1), uop(S, 2, 0, c=1)])], [(x, "float32"), (column, "float32"), (out, dtype)])
    native.assert_same(out, np.where(column != 0, dtypes.from_float32(x, dtype), np.zeros_like(out)))


def test_predicates_indices_and_select(lib):
    rng = np.random.default_rng(0)
    for shape in [(3, 5, 700), (2, 40, 6), (4, 1, 256), (1, 1, 1)]:
        i = np.indices(shape).astype(np.int64)
        for _ in range(40):
            stride = [int(s) for s in rng.integers(-3, 4, 3)]
            base = int(rng.integers(-600, 600))
            value = base + sum(s * k for s, k in zip(stride, i))
            outs = [np.zeros(shape, np.float32) for _ in range(3)] + [np.zeros(shape, np.int32)]
            x = random(shape)
            ops = [
                uop(abi.PRED, 0, 0),
                uop(S, 1, 0),
                uop(abi.INDEX, 1, 0),
                uop(S, 2, 1),
                uop(L, 2, 0),
                uop(abi.SELECT, 3, 2, 1, 0),
                uop(S, 3, 3),
                uop(abi.INDEX, 4, 0, 1),
                uop(abi.STORE_RAW, 4, 4),
            ]
            tiles = [(x, "float32"), *((o, "float32") for o in outs[:3]), (outs[3], "int32")]
            outer = int(rng.integers(0, 4))
            run(lib, outer, 3 - outer, [(False, ops)], tiles, preds=[stride], indices=[stride], bases=([base], [base]))
            native.assert_same(outs[0], (value >= 0).astype(np.float32), (shape, stride, base))
            native.assert_same(outs[1], value.astype(np.float32))
            native.assert_same(outs[2], np.where(value >= 0, x, value.astype(np.float32)))
            native.assert_same(outs[3], value.astype(np.int32))


@pytest.mark.parametrize("inner", [1, 2, 3])
def test_boxes(lib, inner):
    shape = (6, 9, 280)
    x, i = random(shape), np.indices(shape)
    for lo, hi in [
        ((0, 0, 0), shape),
        ((1, 2, 3), (5, 9, 279)),
        ((2, 3, 4), (3, 4, 5)),
        ((0, 4, 250), (6, 5, 280)),
        ((2, 2, 2), (2, 3, 3)),
    ]:
        out = np.zeros(shape, np.float32)
        ops = [uop(L, 0, 0), uop(abi.PRED, 1, 0), uop(abi.INDEX, 2, 0), uop(abi.FUNC, 3, 0, 2, fn="add"), uop(S, 1, 3, c=1)]
        run(
            lib,
            3 - inner,
            inner,
            [(False, ops)],
            [(x, "float32"), (out, "float32")],
            preds=[(1, 1, -1)],
            indices=[(100, 0, 1)],
            bases=([200], [-7]),
            lo=lo,
            hi=hi,
        )
        box = np.zeros(shape, bool)
        box[tuple(slice(a, b) for a, b in zip(lo, hi))] = True
        want = np.where(box & (200 + i[0] + i[1] - i[2] >= 0), x + (-7 + 100 * i[0] + i[2]).astype(np.float32), 0).astype(np.float32)
        native.assert_same(out, want, (lo, hi))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_bits(lib, dtype):
    signed, width = int(dtype.startswith("i")), 8 * STORAGE[dtype].itemsize
    x, y = random((7, 300), dtype), random((7, 300), dtype, seed=1)
    y[:, ::2] = np.arange(150) % (width + 4)  # counts of shifts
    for name in sorted(n for n, e in SCALAR.items() if e.group == "bitvec"):
        for form in ("xy", "number"):
            out, wide = np.zeros_like(x), np.zeros(x.shape, np.float32)
            if SCALAR[name].arity == 1:
                op, want = uop(abi.FUNC, 2, 0, c=width, fn=name, pad=signed), SCALAR[name].numpy(x)
            elif form == "xy":
                op, want = uop(abi.FUNC, 2, 0, 1, c=width, fn=name, pad=signed), SCALAR[name].numpy(x, y)
            else:
                op, want = uop(abi.FUNC, 2, 0, c=width, fn=name, bits=5, pad=signed), SCALAR[name].numpy(x, STORAGE[dtype].type(5))
            ops = [uop(abi.LOAD_RAW, 0, 0), uop(abi.LOAD_RAW, 1, 1), op, uop(abi.STORE_RAW, 2, 2), uop(abi.STORE_RAW, 3, 2)]
            run(lib, 1, 1, [(False, ops)], [(x, dtype), (y, dtype), (out, dtype), (wide, "float32")])
            native.assert_same(out, want, name)
            native.assert_same(
                wide.view(np.int32 if signed else np.uint32), want.astype(np.int32 if signed else np.uint32), "lanes are extended"
            )


@pytest.mark.parametrize("name", ["add", "subtract", "multiply"])
def test_exact_integers(lib, name):
    for a, b, c in itertools.product(("int32", "uint32", "int16"), ("int32", "uint32"), (*INTEGERS, "bool", "float32", "bfloat16")):
        x, y = random((3, 400), a), random((3, 400), b, seed=1)
        y[:, ::3] %= 50
        x[:, ::4] //= 1 << 12
        out = np.zeros(x.shape, STORAGE[c])
        exact = apply_exact(name, x.astype(a if a != "int16" else "int32"), y)
        want = dtypes.convert(exact, exact.dtype.name, c)
        pad = int(a.startswith("i")) + 2 * int(b.startswith("i"))
        ops = [uop(abi.LOAD_RAW, 0, 0), uop(abi.LOAD_RAW, 1, 1), uop(abi.EXACT, 2, 0, 1, abi.DTYPES[c], fn=name, pad=pad)]
        ops.append(uop(abi.STORE if dtypes.is_float(c) else abi.STORE_RAW, 2, 2))
        run(lib, 1, 1, [(False, ops)], [(x, a), (y, b), (out, c)])
        native.assert_same(out, want, (a, b, c))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e5m2", "tfloat32", "int8", "float32"])
def test_rounding_in_a_register(lib, dtype):
    x, out = np.concatenate([native.random_bits(5000), random((5000,))]), np.zeros(10000, np.float32)
    run(lib, 0, 1, [(False, [uop(L, 0, 0), uop(abi.ROUND, 1, 0, abi.DTYPES[dtype]), uop(S, 1, 1)])], [(x, "float32"), (out, "float32")])
    native.assert_same(out, dtypes.round_to(x, dtype))


# ---- folds -------------------------------------------------------------------------------------------------------------


def operand_of(name, shape, seed=0):
    if SCALAR[name].group == "bitvec":
        return random(shape, "int32", seed), "int32"
    x = random(shape, "float32", seed)
    if name == "multiply":
        x = np.exp(x / 8).astype(np.float32)
    if SCALAR[name].group == "logical":
        x[np.random.default_rng(seed).random(shape) < (0.02 if name == "logical_and" else 0.9)] = 0
    x[(np.random.default_rng(seed + 1).random(shape) < 0.1) & (name in ("maximum", "minimum", "add"))] *= 0
    return x, "float32"


@pytest.mark.parametrize("name", REDUCIBLE)
def test_fold_along_rows(lib, name):
    raw = SCALAR[name].group == "bitvec"
    for n in (*range(1, 201), 256, 257, 1000, 4096, 5001):
        x, dtype = operand_of(name, (3, n), n)
        out = np.zeros((3, 1), x.dtype)
        phases = [
            (False, [uop(abi.LOAD_RAW if raw else L, 0, 0), uop(abi.FOLD, 1, 0, fn=name)]),
            (True, [uop(abi.STORE_RAW if raw else S, 1, 1)]),
        ]
        run(lib, 1, 1, phases, [(x, dtype), (np.broadcast_to(out, x.shape), dtype)])
        native.assert_same(out, reduce_free(x, name, 1, keepdims=True), (name, n))


@pytest.mark.parametrize("name", REDUCIBLE)
@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 7, 40), (3, 5, 129), (2, 6, 300), (2, 100, 1), (3, 32, 31)])
def test_fold_over_several_dimensions(lib, name, shape):
    raw = SCALAR[name].group == "bitvec"
    x, dtype = operand_of(name, shape)
    x = np.ascontiguousarray(x.transpose(0, 2, 1)).transpose(0, 2, 1)  # not contiguous
    out = np.zeros((shape[0], 1, 1), x.dtype)
    phases = [
        (False, [uop(abi.LOAD_RAW if raw else L, 0, 0), uop(abi.FOLD, 1, 0, fn=name)]),
        (True, [uop(abi.STORE_RAW if raw else S, 1, 1)]),
    ]
    run(lib, 1, 2, phases, [(x, dtype), (np.broadcast_to(out, shape), dtype)])
    native.assert_same(out, reduce_free(x, name, (1, 2), keepdims=True), name)


@pytest.mark.parametrize("name", REDUCIBLE)
def test_fold_of_a_constant_and_of_nothing(lib, name):
    raw = SCALAR[name].group == "bitvec"
    for n in (0, 1, 5, 40, 600):
        x = np.full((2, n), 3, np.int32 if raw else np.float32)
        out = np.zeros((2, 1), x.dtype)
        constant = uop(abi.CONST, 0, bits=3) if raw else uop(abi.CONST, 0, imm=3.0)
        phases = [(False, [constant, uop(abi.FOLD, 1, 0, fn=name)]), (True, [uop(abi.STORE_RAW if raw else S, 0, 1)])]
        run(lib, 1, 1, phases, [(np.broadcast_to(out, (2, 1)), "int32" if raw else "float32")], shape=(2, n))
        native.assert_same(out, reduce_free(x, name, 1, keepdims=True), (name, n))


def pfold(lib, x, dtype, name, out_dtype):
    out = np.zeros(x.shape[1], STORAGE[out_dtype])
    k = abi.PartitionFold(
        *x.shape, (C.c_int64 * 2)(*x.strides), out.itemsize, abi.DTYPES[dtype], abi.DTYPES[out_dtype], abi.FUNCTIONS[name], 0
    )
    lib.nki_pfold_run(C.byref(k), native.pointer(x), native.pointer(out))
    return out


@pytest.mark.parametrize("name", REDUCIBLE)
def test_fold_over_partitions(lib, name):
    for p, f in [*((p, 3) for p in range(1, 130)), (128, 513), (1, 300), (40, 129), (0, 5)]:
        x, dtype = operand_of(name, (p, f), p)
        native.assert_same(pfold(lib, x, dtype, name, dtype), reduce_partition(x, name)[0], (name, p, f))
        wide = np.repeat(x, 2, 1)[:, ::2]
        native.assert_same(pfold(lib, wide, dtype, name, dtype), reduce_partition(x, name)[0], (name, p, f))
    if SCALAR[name].group != "bitvec":
        x = random((77, 200), "bfloat16")
        want = dtypes.from_float32(reduce_partition(dtypes.to_float32(x, "bfloat16"), name)[0], "float16")
        native.assert_same(pfold(lib, x, "bfloat16", name, "float16"), want)


# ---- scans -------------------------------------------------------------------------------------------------------------


def scan(lib, x, y, initial, op0, op1, reverse0=False, reverse1=False, dtypes_=("float32", "float32", "float32"), out=None):
    out = np.zeros(x.shape, STORAGE[dtypes_[2]]) if out is None else out
    tile = isinstance(initial, np.ndarray)
    k = abi.Scan(
        *x.shape,
        *((C.c_int64 * 2)(*a.strides) for a in (x, y, out)),
        initial.strides[0] if tile else 0,
        *(abi.DTYPES[d] for d in dtypes_),
        0,
        abi.FUNCTIONS[op0],
        abi.FUNCTIONS[op1],
        int(reverse0),
        int(reverse1),
        int(tile),
        0,
        0.0 if tile else initial,
        0,
    )
    lib.nki_scan_run(C.byref(k), native.pointer(x), native.pointer(y), native.pointer(initial if tile else x), native.pointer(out))
    return out


SCANNED = ["add", "subtract", "multiply", "maximum", "minimum", "divide", "logical_and", "greater", "mod"]


@pytest.mark.parametrize("op0", SCANNED)
@np.errstate(all="ignore")
def test_scans(lib, op0):
    for op1, (r0, r1), (rows, n) in itertools.product(
        SCANNED, itertools.product((False, True), repeat=2), [(3, 5), (8, 256), (13, 300), (1, 1)]
    ):
        x, y = random((rows, n)) / 3, random((rows, n), seed=1)
        init = random((rows, 1), seed=2)
        for initial in (0.75, init):
            want = scan_free(x, y, initial, op0, op1, r0, r1)
            native.assert_same(scan(lib, x, y, initial, op0, op1, r0, r1), want, (op0, op1, r0, r1, rows, n))


def test_scans_of_other_dtypes_and_strides(lib):
    x, y = random((20, 500), "bfloat16"), random((20, 1000), "float16", seed=1)[:, ::2]
    want = scan_free(dtypes.to_float32(x, "bfloat16") / 1, dtypes.to_float32(np.ascontiguousarray(y), "float16"), 0.0, "multiply", "add")
    got = scan(lib, x, y, 0.0, "multiply", "add", dtypes_=("bfloat16", "float16", "bfloat16"))
    native.assert_same(got, dtypes.from_float32(want, "bfloat16"))


@pytest.mark.parametrize("pitch", [1024, 1536, 1040, 999])
@np.errstate(all="ignore")
def test_scans_of_rows_where_they_are(lib, pitch):
    """Rows of float32 in place or not, near to each other and a power of two apart, from any column to any other."""
    for (op0, op1), (rows, n), first, in_place in itertools.product(
        [("multiply", "add"), ("maximum", "subtract")],
        [(16, 1), (16, 4), (17, 95), (16, 286), (33, 288), (48, 291), (32, 640), (16, 950)],
        (0, 3, 16),
        (False, True),
    ):
        whole = random((3, rows, pitch))
        x, y, out = whole[:, :, first : first + n]
        out = x if in_place else out
        init = random((rows, 1), seed=2)
        want = whole.copy()
        want[0 if in_place else 2, :, first : first + n] = scan_free(x.copy(), y, init, op0, op1, False, False)
        scan(lib, x, y, init, op0, op1, out=out)
        native.assert_same(whole, want, (op0, op1, rows, n, first, in_place))
