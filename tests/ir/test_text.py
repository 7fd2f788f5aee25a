"""The text of the IR: what it looks like, and that printing and parsing are inverse."""

from __future__ import annotations

import ast
import importlib
import io
import pkgutil
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ir.build_random import Mode, declared, large_kernel, random_kernel

import opennki.isa
from opennki.errors import NkiParseError, NkiValueError
from opennki.ir import text as bounds
from opennki.ir.affine import Affine, Pred, Var, variable
from opennki.ir.equal import difference, same
from opennki.ir.locations import locations_text, read_locations
from opennki.ir.nodes import (
    Access,
    Alloc,
    Dim,
    For,
    If,
    Instr,
    Kernel,
    statements,
    whole,
)
from opennki.ir.parse import from_text
from opennki.ir.print import to_text, write_text
from opennki.isa.declare import ISA
from tests.ir.sample import SAMPLE, round_trip, sample, xt_all

OPS = ["xt_all", "xt_make", "xt_none", "xt_two"]


@pytest.fixture(autouse=True, scope="module")
def _declared():
    with declared():
        yield


def test_sample():
    assert round_trip(sample()) == SAMPLE


def test_streaming_writes_the_same_text():
    blocks = []
    kernel = large_kernel(5000)
    write_text(kernel, blocks.append)
    assert len(blocks) > 3
    assert "".join(blocks) == to_text(kernel)


@settings(deadline=None)
@given(st.integers(0, 2**32))
def test_round_trip_of_random_kernels(seed):
    round_trip(random_kernel(seed, ops=OPS))


def test_round_trip_of_every_declared_instruction():
    for module in pkgutil.iter_modules(opennki.isa.__path__):
        importlib.import_module(f"opennki.isa.{module.name}")
    assert len(ISA) > 20 + len(OPS)
    for n, op in enumerate(sorted(ISA)):
        assert f"{op}(" in round_trip(random_kernel(n, size=20, depth=0, ops=[op], loose=False))


def test_random_kernels_cover_the_grammar():
    text = "".join(to_text(random_kernel(seed, ops=OPS)) for seed in range(60))
    for part in (
        "affine(",
        "sequential(",
        "else:",
        "while do():",
        "repeat_while(",
        " at(",
        "//",
        ".bitcast(",
        ".view(",
        ".tile(",
        ".where(",
        "iota(",
        "pred(",
        "index(",
        "rank(",
        "mask=[",
        "call=",
        "data(",
        "written(",
        "nan",
        "-inf",
        "-0.0",
        "placement=",
        "register.register(",
        "pass",
        "has_collectives=True",
        "cores=",
        "grid=",
        "[()]",
    ):
        assert part in text, part


def test_names_of_indices_are_kept_where_unique():
    loops = [
        For(v := Var(name, 0, 3), 4, "affine", [xt_all(whole(A), whole(A), offset=variable(v))])
        for name in ("row", "row", "d0", "i1", "for", "i1")
    ]
    text = round_trip(Kernel("k", [A], loops, []))
    names = [line.split()[1] for line in text.splitlines() if line.startswith("for")]
    assert names[0] == "row" and names[3] == "i3" and len(set(names)) == 6  # i1 was given to the second loop
    assert all(f"offset={name}," in text or f"offset={name})" in text for name in names)


A = Alloc(0, "a", (128, 512), "float32", "shared_hbm", "param")


def test_terms_have_one_order_whatever_the_names():
    def kernel(x, y):
        v, w = Var(x, 0, 3), Var(y, 0, 3)
        expr = Affine(0, ((v, 2), (w, 3)))
        return Kernel(
            "k",
            [A],
            [For(v, 4, "affine", [For(w, 4, "affine", [xt_all(whole(A), whole(A), offset=expr)])])],
            [],
        )

    one, other = kernel("i0", "i1"), kernel("i1", "i0")
    assert "offset=2*i0 + 3*i1" in round_trip(one)
    assert "offset=3*i0 + 2*i1" in round_trip(other)
    assert same(one, other)  # names of indices are no part of the structure
    assert not same(one, swapped(kernel("i0", "i1")))


def swapped(kernel):
    outer = kernel.body[0]
    inner = outer.body[0]
    inner.body[0] = xt_all(whole(A), whole(A), offset=Affine(0, ((outer.var, 3), (inner.var, 2))))
    return kernel


@pytest.mark.parametrize(
    "value",
    [
        0,
        -1,
        2**64 - 1,
        0.0,
        -0.0,
        1.0,
        5e-324,
        1.7976931348623157e308,
        0.1,
        float("inf"),
        float("-inf"),
        True,
        False,
        "",
        'it\'s "q" \\ \n\t\x00 é€😀\ud800 # = (',
        (),
        (1,),
        ("a", (1.5, None)),
        ((),),
    ],
)
def test_literals_come_back_with_type_and_bits(value):
    kernel = Kernel("k", [A], [xt_all(whole(A), whole(A), attr=value)], [])
    back = from_text(round_trip(kernel)).body[0].operands[8]
    assert type(back) is type(value) and repr(back) == repr(value)


@pytest.mark.parametrize(
    "value, text",
    [
        (np.float32(0.1), "0.10000000149011612"),
        (np.int8(-3), "-3"),
        (np.bool_(True), "True"),
        (Mode.B, "3"),
        ([1, [2]], "(1, (2,))"),
        (np.str_("x"), "'x'"),
        (float("nan"), "nan"),
        (np.float64(-0.0), "-0.0"),
        (-float("nan"), "nan"),
    ],
)
def test_values_are_normalised(value, text):
    assert f"attr={text})" in round_trip(Kernel("k", [A], [xt_all(whole(A), whole(A), attr=value)], []))


def test_constant_index_is_not_a_number():
    for offset, text in ((3, "offset=3"), (Affine(3), "offset=index(3)"), (Affine(-3), "offset=index(-3)")):
        kernel = Kernel("k", [A], [xt_all(whole(A), whole(A), offset=offset)], [])
        assert text + ")" in round_trip(kernel)
        assert type(from_text(to_text(kernel)).body[0].operands[6]) is type(offset)


def test_strides_along_dimensions_of_one_are_kept():
    shape = (1, 512)
    for strides in ((0, 0), (1, 0), (7, 0)):
        access = Access(A, "float32", (Dim(Affine(), strides), Dim(Affine(), (0, 1))), shape)
        back = from_text(round_trip(Kernel("k", [A], [], [access]))).outputs[0]
        assert back.dims[0].strides == strides and back.shape == shape


def test_registers_are_declared_where_first_used_and_are_no_statement():
    kernel = from_text(SAMPLE)
    allocs = [s for s in statements(kernel.body) if isinstance(s, Alloc)]
    assert [a.id for a in allocs] == [2, 3]
    assert [
        i.operands[-1].alloc.kind
        for i in statements(kernel.body)
        if isinstance(i, Instr) and i.op == "xt_all" and i.operands[-1] is not None
    ] == ["register"]


def test_a_tensor_on_both_sides_of_a_branch_stays_one():
    t = Alloc(5, "t", (128, 512), "float32", "sbuf")
    kernel = Kernel("k", [A], [If(Pred(Affine(0)), [t], [t]), xt_all(whole(t), whole(A))], [])
    branch, use = from_text(round_trip(kernel)).body
    assert branch.then[0] is branch.orelse[0] is use.operands[0].alloc


# constants


def constant(*arrays):
    allocs = [Alloc(n, "", a.shape, "float32", "shared_hbm", "constant") for n, a in enumerate(arrays)]
    return Kernel("k", [], [], [], constants=dict(enumerate(arrays)), constant_allocs=allocs)


def test_constants_are_numbers_up_to_256_bytes_and_are_deduplicated():
    small, large = np.arange(64, dtype=np.float32), np.arange(65, dtype=np.float32)
    text = round_trip(constant(small, large, small.copy(), large.copy(), small.astype(np.int32)))
    assert text.count(" = data(") == 3 and text.count("data=c0") == 2 and text.count("data=c1") == 2
    assert "(0.0, 1.0, 2.0, " in text and "'AAAAAAAAgD8" in text
    assert len({id(a) for a in from_text(text).constants.values()}) == 3


@pytest.mark.parametrize("dtype", sorted(bounds.ARRAY_DTYPES))
@pytest.mark.parametrize("size", [0, 1, 7, 300])
def test_constants_keep_every_bit(dtype, size):
    kind = bounds.ARRAY_DTYPES[dtype]
    raw = np.random.default_rng(size).integers(
        0, 2 if dtype == "bool" else 256, size * kind.itemsize, np.uint8
    )
    array = np.frombuffer(raw.tobytes(), kind)
    back = from_text(round_trip(constant(array))).constants[0]
    assert back.dtype == kind and back.tobytes() == array.tobytes() and back.flags.writeable


def test_constants_in_any_layout():
    array = np.arange(600, dtype=">f4").reshape(20, 30).T[::2]
    back = from_text(round_trip(constant(array))).constants[0]
    np.testing.assert_array_equal(back, array)


def test_a_constant_over_the_maximum_is_an_error():
    with pytest.raises(NkiValueError, match="larger than 16777216 bytes"):
        to_text(constant(np.zeros(bounds.MAX_CONSTANT_BYTES + 1, np.uint8)))


def test_the_largest_constant_comes_back():
    array = np.random.default_rng(0).integers(0, 256, bounds.MAX_CONSTANT_BYTES, np.uint8)
    np.testing.assert_array_equal(from_text(to_text(constant(array))).constants[0], array)


# what cannot be written


V = Var("i0", 0, 3)


@pytest.mark.parametrize(
    "statement, message",
    [
        (Instr("no_such_op", (), ()), "no declaration of the instruction 'no_such_op'"),
        (Instr("xt_none", (), (1,)), "1 operands for 0 parameters"),
        (xt_all(whole(A), whole(A), attr={1: 2}), "type dict"),
        (xt_all(whole(A), whole(A), attr=np.zeros(3)), "type ndarray"),
        (xt_all(whole(A), whole(A), attr=2**64), "64 bits"),
        (xt_all(whole(A), whole(A), offset=Affine(2**63)), "64 bits"),
        (xt_all(whole(A), whole(A), offset=variable(V)), "outside its loop"),
        (xt_all(whole(A), whole(Alloc(9, "x", (1,), "float32", "sbuf"))), "before it is allocated"),
        (Alloc(0, "b", (1,), "float32", "sbuf"), "two tensors have the number 0"),
        (Alloc(1, "b", (1,), "float31", "sbuf"), "float31"),
        (Alloc(1, "b", (2**30, 2**30), "float32", "sbuf"), "out of bounds"),
        (Alloc(1, "b", (1,), "float32", "sbuf", placement=len), "type builtin_function"),
        (For(V, 5, "affine"), "does not count from 0 to 4"),
        (For(V, 4, "static"), "unknown kind of loop"),
        (For(V, 4, "affine", [For(V, 4, "affine")]), "bound twice"),
        (xt_all(whole(A), whole(A), engine="not one"), "unknown engine"),
    ],
)
def test_what_cannot_be_written(statement, message):
    with pytest.raises(NkiValueError, match=message):
        to_text(Kernel("k", [A], [statement], []))


def test_an_index_is_not_written_after_its_loop():
    v = Var("i0", 0, 3)
    use = xt_all(whole(A), whole(A), offset=variable(v))  # one object: a cache must not hide the fault
    with pytest.raises(NkiValueError, match="outside its loop"):
        to_text(Kernel("k", [A], [For(v, 4, "affine", [use]), use], []))


def test_nesting_is_bounded():
    body = []
    for n in range(bounds.MAX_NESTING):
        body = [For(Var(f"i{n}", 0, 1), 2, "affine", body)]
    round_trip(Kernel("k", [A], body, []))
    with pytest.raises(NkiValueError, match="nest deeper"):
        to_text(Kernel("k", [A], [For(Var("x", 0, 1), 2, "affine", body)], []))


# comparison


def test_comparison_sees_every_difference():
    text = SAMPLE
    changes = [
        ("trn2", "trn1"),
        ("'sample'", "'other'"),
        ("p0[4]", "p0[8]"),
        ("0, 1, 0, 1", "0, 1, 1, 1"),
        (", has_collectives=True", ""),
        ("-0.0, nan", "0.0, nan"),
        ("written(t0)\n", ""),
        ("pdim=1", "pdim=2"),
        ("(0, 1024)", "(0, 2048)"),
        ("affine(32", "affine(31"),
        ("affine(32", "sequential(32"),
        ("'no_reorder', ", ""),
        ("[i0, d0, d1] = ", "[i0, d0, d1 + 1] = "),
        ("2*d1 - 1", "3*d1 - 1"),
        (" + at(t3)", ""),
        ("scale=1.0", "scale=2.0"),
        ("scalar.xt", "vector.xt"),
        ("+ 99 >= 0", "+ 98 >= 0"),
        (", d1 >= 0]", "]"),
        ("if 128*i0", "if 64*i0"),
        ("bitcast(int32)", "bitcast(uint32)"),
        (".where(-d0 + 5 >= 0)", ""),
        ("(i0//2)", "(i0//3)"),
        ("view(512, 512)", "view(512, 511)"),
        ("operand=-0.0", "operand=0.0"),
        (", acc=t4", ""),
        ("operand=inf", "operand=1"),
        ("index(3)", "3"),
        ("(1, i0", "(2, i0"),
        ("None, 'x'", "None, 'y'"),
        ("call=7", "call=8"),
        ("p0 + d0 - d1", "p0 + d0"),
        ("p0 + d1 >= 0", "d1 >= 0"),
        ("    repeat_while(t3)\n", ""),
        ("outputs(t2)", "outputs()"),
        ("name='acc'", "name='b'"),
        ("operand=1.0", "operand=1"),
        ("operand=1.0", "operand=True"),
    ]
    kernel = sample()
    for old, new in changes:
        assert old in text
        assert difference(kernel, from_text(text.replace(old, new, 1))) != "", (old, new)
        assert difference(from_text(text.replace(old, new, 1)), kernel) != "", (old, new)


# locations


def test_locations_as_comments_are_relative_and_skipped():
    kernel = sample()
    text = to_text(kernel, locations=True)
    assert "for i0 in affine(32, 'no_reorder', 'multi_buffer(2)'):  # kernel.py:5" in text
    assert "  # lib/help.py:9" in text and "  # <cell 1>:2" in text and "/k/" not in text
    assert "\nt2 = sbuf(float32, (4, 128, 512), pdim=1, name='acc')  # kernel.py:4\n" in text
    ast.parse(text)
    assert to_text(from_text(text)) == SAMPLE


def test_text_does_not_depend_on_locations():
    kernel = sample()
    kernel.locs.clear()
    assert to_text(kernel) == SAMPLE


def test_table_of_locations_comes_back():
    kernel = sample()
    table = locations_text(kernel)
    assert "/k/" not in table
    back = from_text(to_text(kernel), read_locations(table))
    assert difference(kernel, back) == ""
    for a, b in zip(statements(kernel.body), statements(back.body), strict=True):
        if isinstance(a, Alloc):
            assert (a.loc and a.loc.line) == (b.loc and b.loc.line)
        else:
            assert kernel.loc(a.loc).line == back.loc(b.loc).line
            assert back.loc(b.loc).file in ("kernel.py", "lib/help.py", "<cell 1>")
    assert locations_text(back) == table


@pytest.mark.parametrize(
    "table",
    [
        "",
        "[]",
        "{}",
        '{"opennki_locations":2,"places":[],"lines":[]}',
        '{"opennki_locations":1}',
        "[" * 10**5,
        '{"opennki_locations":1,"places":[["f",0,""]],"lines":[]}',
        '{"opennki_locations":1,"places":[["f","1",""]],"lines":[]}',
        '{"opennki_locations":1,"places":[],"lines":[0]}',
        '{"opennki_locations":1,"places":[["f",1,""]],"lines":[true]}',
    ],
)
def test_bad_tables_of_locations(table):
    with pytest.raises(NkiParseError):
        read_locations(table)


# size


@pytest.mark.slow
def test_a_large_kernel():
    kernel = large_kernel(10_000)
    back = from_text(to_text(kernel))
    assert sum(isinstance(s, Instr) for s in statements(back.body)) >= 10_000
    assert same(kernel, back), difference(kernel, back)


def test_no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(100):
            text = to_text(random_kernel(seed, ops=OPS))
            from_text(text, quick=False)


def test_write_needs_no_more_than_a_writer():
    out = io.StringIO()
    write_text(sample(), out.write)
    assert out.getvalue() == SAMPLE
