"""Texts of kernels that are damaged at random: refused with an error of the parser, or read and written again."""

from __future__ import annotations

import random
import re

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ir.build_random import random_kernel
from tests.ir.hostile import HEAD, OPS, _declared  # noqa: F401  the fixture declares the instructions

from opennki.errors import NkiParseError
from opennki.ir.parse import from_text
from opennki.ir.print import to_text


PIECES = [
    "(",
    ")",
    "[",
    "]",
    ",",
    " ",
    "    ",
    "\n",
    "'",
    '"',
    "\\",
    "#",
    "=",
    " = ",
    ">=",
    "//",
    "*",
    "-",
    "+",
    ".",
    ":",
    "t0",
    "t1",
    "d0",
    "d1",
    "i1",
    "p0",
    "0",
    "1",
    "99999999999999999999",
    "1e400",
    "nan",
    "inf",
    "None",
    "True",
    "at(t0)",
    "index(",
    "iota(",
    "pred(",
    "rank(2, ",
    ".tile(4)",
    ".view(2, 2)",
    ".where(",
    ".bitcast(int8)",
    "mask=[",
    "call=1",
    "for i9 in affine(3):",
    "while do():",
    "if 0 >= 0:",
    "else:",
    "pass",
    "outputs(",
    "lambda",
    "__class__",
    "\x00",
    "\t",
    "é",
    "\ud800",
    "'''",
    "{",
    "}",
    "@",
    ";",
    "f'",
    "b'",
    "0x",
    "1_0",
    "1j",
    "...",
    ":=",
    "**",
    "await ",
]


def mutate(r, text, other):
    kind = r.random()
    lines = text.split("\n")
    if kind < 0.2:
        i, j = r.randrange(len(lines)), r.randrange(len(lines))
        lines[i], lines[j] = lines[j], lines[i]
        return "\n".join(lines)
    if kind < 0.3:
        lines.insert(r.randrange(len(lines)), r.choice(other.split("\n")))
        return "\n".join(lines)
    if kind < 0.35:
        return text[: r.randrange(len(text))]
    if kind < 0.5:  # one token for another
        spans = [m.span() for m in re.finditer(r"\w+|[^\w\s]", text)]
        (a, b), (c, d) = r.choice(spans), r.choice(spans)
        return text[:a] + text[c:d] + text[b:]
    i = r.randrange(len(text))
    return text[:i] + (r.choice(PIECES) if kind < 0.8 else "") + text[i + r.choice((0, 1, 1, 2, 9)) :]


def check(text):
    """Both roads agree: one kernel, or a refusal at one line; what is accepted can be written and read."""
    results = []
    for quick in (True, False):
        try:
            results.append(to_text(from_text(text, quick=quick)))
        except NkiParseError as e:
            assert e.loc.file == "<ir>" and e.loc.line >= 0
            results.append(e.loc.line)
    assert results[0] == results[1], text
    if isinstance(results[0], str):
        assert to_text(from_text(results[0])) == results[0]
        return 1
    return 0


def test_fuzz():
    r = random.Random(7)
    texts = [to_text(random_kernel(seed, size=3, depth=2, ops=OPS)) for seed in range(40)]
    accepted = 0
    for _ in range(1000):
        text = r.choice(texts)
        for _ in range(r.choice((1, 1, 2, 4))):
            text = mutate(r, text, r.choice(texts)) or "\n"
        accepted += check(text)
    assert 50 < accepted < 950  # the mutations are neither harmless nor all fatal


@settings(deadline=None)
@given(st.text(max_size=200))
def test_any_text(text):
    check(text)
    check(HEAD + text + "\noutputs()\n")


@settings(deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=30))
def test_any_pieces(pieces):
    check(HEAD + "".join(pieces) + "\noutputs()\n")
