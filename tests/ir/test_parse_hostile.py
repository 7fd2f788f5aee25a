"""The reader of the IR text against text that no writer wrote: an NkiParseError with a line, or a kernel."""

from __future__ import annotations

import contextlib
import time
import tracemalloc

import pytest
from tests.ir.hostile import HEAD, OPS, _declared  # noqa: F401  the fixture declares the instructions

from opennki.errors import NkiParseError
from opennki.ir import text as bounds
from opennki.ir.parse import from_text
from opennki.ir.print import to_text

def fails(text, message="", line=None):
    for quick in (True, False):
        with pytest.raises(NkiParseError, match=message or None) as e:
            from_text(text, quick=quick)
        assert e.value.loc.file == "<ir>"
        if line is not None:
            assert e.value.loc.line == line
            assert f"<ir>:{line}: " in str(e.value)


@pytest.mark.parametrize(
    "text, message, line",
    [
        ("", "cut short", 1),
        ("hello", "this is not opennki IR", 1),
        ("opennki_ir = 2\n", "version 2 is unknown; this opennki reads version 1", 1),
        ("opennki_ir = 1\noutputs()\n", "second line is kernel", 2),
        ("opennki_ir = 1\nkernel(k, target='trn1')\n", "expected a string", 2),
        ("opennki_ir = 1\nkernel('k', target='trn1', no=1)\n", "no is not known", 2),
        ("opennki_ir = 1\nkernel('k', **x)\n", "not known", 2),
        ("opennki_ir = 1\nkernel('k', grid=(p0[4], p0[4]))\n", "used already", 2),
        ("opennki_ir = 1\nkernel('k', grid=(p0[1048576], p1[1048577]))\n", "2\\*\\*40", 2),
        (HEAD, "cut short", None),
        (HEAD + "outputs(t0)\nxt_none()\n", "last line", 5),
        (HEAD + "outputs(t9)\n", "t9 is used before it is allocated", 4),
        (HEAD + "outputs(\n", "not an IR statement", 4),
    ],
)
def test_frame(text, message, line):
    fails(text, message, line)


@pytest.mark.parametrize(
    "line, message",
    [
        ("no_such_op()", "unknown instruction no_such_op"),
        ("xt_mke(data=t0)", "unknown instruction xt_mke; did you mean xt_make"),
        ("vector.no_such_op(data=t0)", "unknown instruction no_such_op"),
        ("xt_make(date=t0)", "xt_make has no operand date; it has data, scale"),
        ("xt_make(data=t0, engine='vector')", "no operand engine"),
        ("xt_make(data=t0, data=t0)", "not an IR statement|given twice"),
        ("xt_make(t0)", "operands of xt_make have names"),
        ("xt_make(data=1)", "data cannot be a int; it is a tile"),
        ("xt_make(data=None)", "data cannot be a NoneType"),
        ("xt_make(data='t0')", "data cannot be a str"),
        ("xt_make(data=t0, scale=t0)", "scale cannot be a Access; it is a constant"),
        ("xt_make(data=t0, scale=(1, t0))", "scale cannot be a tuple"),
        ("xt_make(data=t0, scale=index(1))", "scale cannot be a Affine"),
        ("xt_all(op=1)", "op cannot be a int; it is the name of a scalar function"),
        ("xt_all(index=1)", "index cannot be a int; it is iota"),
        ("xt_all(where=1)", "where cannot be a int; it is pred"),
        ("xt_all(where=iota((4,), d0))", "where cannot be a IndexTile"),
        ("xt_all(offset='1')", "offset cannot be a str"),
        ("xt_all(offset=1.0)", "offset cannot be a float"),
        ("xt_all(offset=(1, 2))", "offset cannot be a tuple"),
        ("xt_all(offsets=(1, 'x'))", "offsets cannot be a tuple"),
        ("xt_all(acc=t0)", "acc cannot be a Access; it is a register"),
        ("xt_all(offset=i0)", "i0 is not an index in scope"),
        ("xt_all(attr=18446744073709551616)", "64 bits"),
        ("xt_all(attr=" + "9" * 5000 + ")", ""),
        ("xt_all(attr=1j)", "cannot be an operand"),
        ("xt_all(attr=...)", ""),
        ("xt_all(attr=b'x')", "unexpected text"),
        ("xt_all(attr=f'{1}')", "unexpected text"),
        ("xt_all(attr='\\q')", "unexpected text"),
        ("xt_all(attr=[1])", ""),
        ("xt_all(attr={1: 2})", "unexpected text"),
        ("xt_all(attr=lambda: 1)", ""),
        ("xt_all(attr=__import__('os').system('x'))", "not known here"),
        ("xt_all(attr=(1).__class__)", ""),
        ("xt_all(attr=x if y else z)", ""),
        ("xt_all(attr=(x := 1))", ""),
        ("xt_all(attr=not 1)", ""),
        ("xt_all(attr=-'x')", "expected a number"),
        ("xt_all(attr=- - 1)", ""),
        ("xt_all(attr=1 + 1.0)", "expected an integer"),
        ("xt_all(attr=1 ** 9)", ""),
        ("xt_all(*t0)", "operands of xt_all have names"),
        ("xt_all(**t0)", "given twice"),
        ("xt_none()()", "not an IR statement"),
        ("xt_none(); xt_none()", "unexpected text"),
        ("xt_none() = xt_none()", "not an IR statement"),
        ("a = b = xt_none()", "not an IR statement"),
        ("import os", "not an IR statement"),
        ("def f():", "block is"),
        ("class A:", "block is"),
        ("return 1", "not an IR statement"),
        ("del t0", "not an IR statement"),
        ("t0", "not an IR statement"),
        ("xt_none(mask=1)", "list of predicates"),
        ("xt_none(mask=[1])", "expected a predicate"),
        ("xt_none(mask=[1 > 0])", ""),
        ("xt_none(mask=[1 >= 1])", "within bounds"),
        ("xt_none(mask=[0 >= 0 >= 0])", "expected a predicate"),
        ("xt_none(mask=[d0 >= 0])", "d0 is not an index in scope"),
        ("xt_none(mask=[rank(99, 0 >= 0)])", "within bounds"),
        ("xt_none(call=-1)", "within bounds"),
        ("param.xt_none()", "unknown engine param"),
        ("if.xt_none()", ""),
        ("t0[d0, d1, 0] = xt_make(data=t0)", "t0 has 2 dimensions, not 3"),
        (
            "t0.tile(4)[d0, d1] = xt_make(data=t0)",
            "d1 is not an index in scope \\(the tile has 1 dimensions\\)",
        ),
        ("t0[2*d0*d1, 0] = xt_make(data=t0)", "an index expression is"),
        ("t0[d0//2, 0] = xt_make(data=t0)", "not an index in scope"),
        ("t0[(0//0), 0] = xt_make(data=t0)", "within bounds"),
        ("t0[(0//-1), 0] = xt_make(data=t0)", "within bounds"),
        ("t0[d01, d00] = xt_make(data=t0)", "not an index in scope"),
        ("t0[0:1, 0] = xt_make(data=t0)", ""),
        ("t0[at(t0) + at(t0), 0] = xt_make(data=t0)", "an index expression is"),
        ("t0[2*at(t0), 0] = xt_make(data=t0)", "an index expression is"),
        ("t0[9223372036854775807 + 1, 0] = xt_make(data=t0)", "64 bits"),
        ("t0[4611686018427387904*d0 + 4611686018427387904*d0, 0] = xt_make(data=t0)", "64 bits"),
        ("t0.tile(1099511627776, 2)[d0, d1] = xt_make(data=t0)", "2\\*\\*40"),
        ("t0.tile(-1, 2)[d0, d1] = xt_make(data=t0)", "negative"),
        ("t0.tile(" + "1, " * 16 + "1)[d0, d1] = xt_make(data=t0)", "at most 16 dimensions"),
        ("t0.view(4).bitcast(int32)[d0] = xt_make(data=t0)", "in this order"),
        ("t0.tile(4).tile(4)[d0, 0] = xt_make(data=t0)", "in this order"),
        ("t0.bitcast(float31)[d0, d1] = xt_make(data=t0)", "unknown dtype float31"),
        ("t0.upper(1)[d0, d1] = xt_make(data=t0)", "upper is not known"),
        ("t0.tile(4) = xt_make(data=t0)", "not an IR statement"),
        ("t1 = sbuf(float32, (1048576, 1048577))", "2\\*\\*40"),
        ("t1 = sbuf(float32, (99999999999999999999,))", "within bounds"),
        ("t1 = sbuf(float99, (1,))", "unknown dtype"),
        ("t1 = sbuf(float32, (1,), pdim=2)", "wrong pdim"),
        ("t1 = sbuf(float32, (1,), size=2)", "pdim, name, placement and data only"),
        ("t1 = sbuf(float32, (1,), data=c0)", "wrong pdim, data"),
        ("t1 = sbuf(float32, (1,), placement=t0)", "expected a constant"),
        ("t01 = sbuf(float32, (1,))", "number"),
        ("t0 = sbuf(float32, (1,))", "t0 is a tensor already"),
        ("x = sbuf(float32, (1,))", "an allocation is"),
        ("odd.sbuf(float32, (1,))", "sbuf is not known in this form"),
        ("t1 = constant.shared_hbm(float32, (1,), data=c0)", "no data c0"),
        ("c0 = data(float32, (2,), (1.0,))", "c0 has 2 numbers"),
        ("c0 = data(float32, (1,), (1,))", "numbers of type float"),
        ("c0 = data(uint8, (1,), (256,))", "out of the range"),
        ("c0 = data(uint8, (1,), (True,))", "numbers of type int"),
        ("c0 = data(object, (1,), (1,))", "unknown dtype object"),
        ("c0 = data(float32, (1099511627776,), 'AAAA')", "16777216 bytes"),
        ("c0 = data(float32, (1,), 'AAAA')", "does not have 4 bytes"),
        ("c0 = data(float32, (1,), 'AAAAAAA=')", "not base64 of 4 bytes"),
        ("c0 = data(float32, (1,), '=AAAAAAA')", "not base64 of 4 bytes"),
        ("written(t9)", "t9 is used before"),
        ("written()", "wrong place"),
        ("repeat_while(t0)", "wrong place"),
        ("kernel('k')", "kernel is"),
        ("opennki_ir = 1", "not an IR statement"),
        ("else:", "else without if"),
        ("pass", "pass stands for an empty block only"),
        ("    xt_none()", "wrong indentation"),
        (" xt_none()", "wrong indentation"),
        ("\txt_none()", "unexpected character"),
        ("xt_none()\x0c", "unexpected character"),
        ("xt_none(a='é')", "unexpected character"),
        ("for i0 in affine(4):", "wrong indentation"),
        ("for i0 in range(4):", "block is"),
        ("for i0 in affine(-1):", "within bounds"),
        ("for i0 in affine(1099511627777):", "within bounds"),
        ("for i0 in affine(1e3):", "expected an integer"),
        ("for i0 in affine(t0):", "expected an integer"),
        ("for i0 in affine(4, 5):", "expected a string"),
        ("for i0, i1 in affine(4):", "cannot be the name of an index"),
        ("for t3 in affine(4):", "cannot be the name of an index"),
        ("for d0 in affine(4):", "cannot be the name of an index"),
        ("for inf in affine(4):", "cannot be the name of an index"),
        ("for i0 in affine(4): pass", "starts on the next line"),
        ("async for i0 in affine(4):", ""),
        ("while True:", "block is"),
        ("while do(1):", "block is"),
        ("if t0 >= 0:", "not an index in scope"),
        ("if 1:", "expected a predicate"),
        ("try:", ""),
        ("with x:", "block is"),
    ],
)
def test_statement(line, message):
    fails(
        HEAD + line + "\noutputs()\n",
        message,
        5 if "wrong indentation" in message and line.startswith("for") else 4,
    )


@pytest.mark.parametrize(
    "body, message, line",
    [
        ("for i0 in affine(4):\n    xt_none()\nxt_all(offset=i0)", "i0 is not an index in scope", 6),
        ("for i0 in affine(4):\n    xt_all(offset=i0)\nxt_all(offset=i0)", "i0 is not an index in scope", 6),
        (
            "for i0 in affine(4):\n    t0[i0, d0] = xt_make(data=t0)\nt0[i0, d0] = xt_make(data=t0)",
            "i0 is not an index in scope",
            6,
        ),
        (
            "for i0 in affine(4):\n    xt_make(data=t0, mask=[i0 >= 0])\nxt_make(data=t0, mask=[i0 >= 0])",
            "i0 is not",
            6,
        ),
        ("for i0 in affine(4):\n    pass\nfor i0 in affine(4):\n    pass", "it is used already", 6),
        ("for i0 in affine(4):\n        xt_none()", "wrong indentation", 5),
        ("for i0 in affine(4):\n    pass\n    xt_none()", "nothing can follow", 6),
        ("for i0 in affine(4):\n    xt_none()\n    pass", "pass stands for", 6),
        ("for i0 in affine(4):\n    pass\nelse:\n    pass", "else without if", 6),
        ("if 0 >= 0:\n    pass\nelse:\n    pass\nelse:\n    pass", "else without if", 8),
        ("while do():\n    repeat_while(t0)\n    xt_none()", "nothing can follow", 6),
        ("while do():\n    repeat_while(t0)\n    repeat_while(t0)", "nothing can follow|wrong place", 6),
        ("while do():\n    if 0 >= 0:\n        repeat_while(t0)", "wrong place", 6),
        ("for i0 in affine(4):\n    outputs()", "wrong place", 5),
        ("xt_none()\nt1 = param.shared_hbm(float32, (1,))", "before the body", 5),
        ("t1 = sbuf(float32, (1,))\nt1 = sbuf(float32, (2,))", "t1 is a tensor already", 5),
    ],
)
def test_block(body, message, line):
    fails(HEAD + body + "\noutputs()\n", message, line)


def test_unknown_instructions_are_named_after_a_good_line():
    fails(HEAD + "xt_none()\nvector.xt_nope(data=t0)\noutputs()\n", "unknown instruction xt_nope", 5)


@pytest.mark.parametrize(
    "value",
    [
        "(" * 10**5,
        "(" * 100 + ")" * 100,
        "-" * 10**5 + "1",
        "1" + "+1" * 10**5,
        "i0" * 10**5,
        "[" * 40 + "]" * 40,
        "at(" * 30 + "t0" + ")" * 30,
        "(" * 45 + "0" + "//2)" * 45,
        "1," * 10**5,
        "'" + "a" * 2**20 + "'",
        "'" + "a",
        "a" * 2**20,
        "0x" + "f" * 10**5,
        "t0" + ".tile(4)" * 10**4,
        "t0" + "[0]" * 1000,
        "not " * 10**4 + "1",
        "a=(, " * 10**5,
        "a=a" * 10**5 + ")",
        "\\" * 1000,
        "a.b" * 10**4,
        "'" + "a=(b, " * 10**5 + "\\n'",
        "1 if 1 else " * 1000 + "1",
        "lambda: " * 1000 + "1",
        "*" * 1000,
        "x[" * 40 + "]" * 40,
        "1e999999",
        "-" + "(-" * 40 + "1" + ")" * 40,
    ],
)
def test_deep_and_long_lines_are_refused_in_bounded_time(value):
    for line in (
        f"xt_all(attr={value})",
        f"t0[{value}, 0] = xt_make(data=t0)",
        f"{value} = xt_make(data=t0)",
        f"if {value} >= 0:",
        value,
        f"outputs({value})",
        f"t1 = sbuf(float32, ({value}))",
        f"xt_none(mask=[{value} >= 0])",
        f"for i0 in affine({value}):",
        f"xt_make(data=t0.tile({value})[0, 0])",
    ):
        start = time.process_time()
        try:
            from_text(HEAD + line + "\noutputs()\n")
        except NkiParseError as e:
            assert e.loc.line in (1, 4, 5)
        assert time.process_time() - start < 20  # microseconds, or for ever


def test_small_texts_cannot_take_much_memory():
    lines = [
        "t1 = sbuf(float32, (1048576, 1048576))",
        "t1 = sbuf(float32, (1099511627776,))\nt2 = shared_hbm(int8, (1, 1099511627776))",
        "t0.tile(1048576, 1048576)[d0, d1] = xt_make(data=t0)",
        "xt_all(index=iota((1048576, 1048576), d0))",
        "for i0 in affine(1099511627776):\n    xt_none()",
        "c0 = data(uint8, (16777216,), 'AAAA')",
        "xt_none(mask=[rank(16, d15 >= 0)])",
        "xt_all(attr=" + "(" * 40 + ")" * 40 + ")",
        "xt_all(attr='" + "\\x00" * 1000 + "')",
    ]
    tracemalloc.start()
    for line in lines:
        with contextlib.suppress(NkiParseError):
            from_text(HEAD + line + "\noutputs()\n")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20, line
    tracemalloc.stop()


def test_nesting_of_blocks_is_bounded():
    def nested(n):
        return (
            HEAD
            + "".join(f"{'    ' * i}for i{i} in affine(2):\n" for i in range(n))
            + "    " * n
            + "pass\noutputs()\n"
        )

    from_text(nested(bounds.MAX_NESTING))
    fails(nested(bounds.MAX_NESTING + 1), "nest deeper", 4 + bounds.MAX_NESTING)
    fails(nested(5000))


def test_size_of_texts_is_bounded(monkeypatch):
    text = HEAD + "xt_none()\n" * 50 + "outputs()\n"
    from_text(text)
    for name, value in (("MAX_TEXT_BYTES", len(text) - 1), ("MAX_STATEMENTS", 50), ("MAX_LINE_BYTES", 30)):
        with monkeypatch.context() as m:
            m.setattr(bounds, name, value)
            fails(text, "at most")
    with monkeypatch.context() as m:
        m.setattr(bounds, "MAX_CONSTANTS", 2)
        fails(
            HEAD + "".join(f"c{n} = data(bool, (1,), (True,))\n" for n in range(3)) + "outputs()\n",
            "one too many",
            6,
        )


@pytest.mark.parametrize("text", [None, b"opennki_ir = 1", 1, ["opennki_ir = 1"], ("a",)])
def test_what_is_not_text(text):
    fails(text, "is a string")


def test_comments_and_empty_lines_are_skipped():
    text = (
        "# c\n\n"
        + HEAD.replace("\n", "  # c 'x\n")
        + "if 0 >= 0:  # c\n    # c\n\n    pass# c\n# c\nelse:  # c\n    xt_none()   \noutputs()#\n# end\n\n"
    )
    plain = HEAD + "if 0 >= 0:\n    pass\nelse:\n    xt_none()\noutputs()\n"
    assert to_text(from_text(text)) == to_text(from_text(text, quick=False)) == plain


# fuzz: a fixed budget of mutations of valid texts
