"""A kernel with everything that the text has, and its text."""

from __future__ import annotations

import ast

import numpy as np

from opennki.errors import Loc
from opennki.ir.affine import Affine, FloorDiv, Pred, Var, variable
from opennki.ir.equal import difference
from opennki.ir.nodes import (
    Access,
    Alloc,
    Dim,
    DoWhile,
    For,
    If,
    IndexTile,
    Instr,
    Kernel,
    PredTile,
    whole,
)
from opennki.ir.parse import from_text
from opennki.ir.print import to_text


def round_trip(kernel):
    text = to_text(kernel)
    ast.parse(text)
    for quick in (True, False):  # both roads of the reader
        back = from_text(text, quick=quick)
        assert difference(kernel, back) == ""
        assert to_text(back) == text
    return text


def xt_all(dst, data, operand=1.0, op="add", mask=(), acc=None, engine="vector", **more):
    operands = [
        dst,
        data,
        operand,
        op,
        *(more.get(k) for k in ("index", "where", "offset", "offsets", "attr")),
        None,
        None,
        None,
        acc,
    ]
    return Instr("xt_all", (), tuple(operands), mask, engine, 0, more.get("call", 0))


def sample():
    p0, i0 = Var("p0", 0, 3, "pid"), Var("i0", 0, 31)
    a = Alloc(0, "a", (512, 512), "bfloat16", "shared_hbm", "param", loc=Loc("/k/kernel.py", 3))
    w = Alloc(1, "w", (2, 2), "float32", "shared_hbm", "constant")
    acc = Alloc(2, "acc", (4, 128, 512), "float32", "sbuf", pdim=1, loc=Loc("/k/kernel.py", 4))
    index = Alloc(3, "", (128, 1), "int32", "sbuf", placement=(0, 1024))
    register = Alloc(4, "vector", (128, 1), "float32", "register", "register")
    base = Affine(0, ((i0, 1), (p0, 128)))
    load = Access(
        a,
        "bfloat16",
        (Dim(Affine(3, ((p0, 128),)), (1, 0)), Dim(Affine(-1), (0, 2), whole(index))),
        (128, 512),
    )
    tile = Access(
        acc, "float32", (Dim(variable(i0), (0, 0)), Dim(Affine(), (1, 0)), Dim(Affine(), (0, 1))), (128, 512)
    )
    mask = (Pred(Affine(99, ((i0, -128),)), (-1, 0)), Pred(Affine(0), (0, 1)))
    half = Affine(1, ((FloorDiv(variable(i0), 2), 4), (FloorDiv(Affine(3, ((i0, 2),)), 128), -1)))
    bits = Access(
        acc,
        "int32",
        (Dim(Affine(), (1, 0)), Dim(half, (0, 1))),
        (128, 512),
        (512, 512),
        (Pred(Affine(5), (-1, 0)),),
    )
    body = [
        acc,
        index,
        For(
            i0,
            32,
            "affine",
            [
                Instr("xt_make", (tile,), (load, 1.0, None), mask, "scalar", 0),
                If(
                    Pred(Affine(0, ((i0, 128), (p0, -1)))),
                    [xt_all(tile, bits, -0.0, acc=whole(register))],
                    [
                        xt_all(
                            tile,
                            tile,
                            float("inf"),
                            "it's",
                            offset=Affine(3),
                            offsets=(1, base),
                            attr=(1, (2.0, None, "x")),
                            call=7,
                        )
                    ],
                    1,
                ),
            ],
            ("no_reorder", "multi_buffer(2)"),
            0,
        ),
        DoWhile(
            [
                xt_all(
                    whole(acc),
                    whole(acc),
                    index=IndexTile(variable(p0), (1, -1), (4, 4)),
                    where=PredTile((Pred(variable(p0), (0, 1)),), (4, 4)),
                )
            ],
            whole(index),
            2,
        ),
    ]
    values = np.array([[1.0, -0.0], [np.nan, np.inf]], np.float32)
    return Kernel(
        "sample",
        [a],
        body,
        [whole(acc)],
        (p0,),
        (0, 1, 0, 1),
        "trn2",
        {1: values},
        [w],
        [a],
        [Loc("/k/kernel.py", 5, "f"), Loc("/k/lib/help.py", 9, "g"), Loc("<cell 1>", 2)],
        True,
    )


SAMPLE = """\
opennki_ir = 1
kernel('sample', target='trn2', grid=(p0[4],), cores=(0, 1, 0, 1), has_collectives=True)
t0 = param.shared_hbm(bfloat16, (512, 512), name='a')
c0 = data(float32, (2, 2), (1.0, -0.0, nan, inf))
t1 = constant.shared_hbm(float32, (2, 2), name='w', data=c0)
written(t0)
t2 = sbuf(float32, (4, 128, 512), pdim=1, name='acc')
t3 = sbuf(int32, (128, 1), placement=(0, 1024))
for i0 in affine(32, 'no_reorder', 'multi_buffer(2)'):
    t2.tile(128, 512)[i0, d0, d1] = scalar.xt_make(data=t0.tile(128, 512)[128*p0 + d0 + 3, 2*d1 - 1 + \
at(t3)], scale=1.0, mask=[-128*i0 - d0 + 99 >= 0, d1 >= 0])
    if 128*i0 - p0 >= 0:
        t4 = register.register(float32, (128, 1), name='vector')
        vector.xt_all(dst=t2.tile(128, 512)[i0, d0, d1], data=t2.bitcast(int32).view(512, 512).tile(128, \
512).where(-d0 + 5 >= 0)[d0, -((2*i0 + 3)//128) + 4*(i0//2) + d1 + 1], operand=-0.0, op='add', acc=t4)
    else:
        vector.xt_all(dst=t2.tile(128, 512)[i0, d0, d1], data=t2.tile(128, 512)[i0, d0, d1], operand=inf, \
op="it's", offset=index(3), offsets=(1, i0 + 128*p0), attr=(1, (2.0, None, 'x')), call=7)
while do():
    vector.xt_all(dst=t2, data=t2, operand=1.0, op='add', index=iota((4, 4), p0 + d0 - d1), where=pred((4, \
4), p0 + d1 >= 0))
    repeat_while(t3)
outputs(t2)
"""
