"""Random kernels for tests of the IR, from a seed: valid in form, not necessarily legal NKI."""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np

from opennki.errors import Loc
from opennki.ir.affine import Affine, FloorDiv, Pred, Var
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
    Stmt,
    whole,
)
from opennki.isa import declare
from opennki.isa.declare import ISA, T

DTYPES = ("float32", "bfloat16", "float16", "int32", "uint8", "bool", "float8_e4m3", "tfloat32")
STRINGS = (
    "",
    "add",
    "it's",
    'a "b"',
    "back\\slash",
    "line\nend",
    "# no comment",
    "a = b(c, d)",
    "é€😀",
    "x" * 90,
    "\x00\x7f\ud800",
)


class Mode(enum.IntEnum):
    """An enum as instructions have them."""

    A = 0
    B = 3


NUMBERS: tuple[Any, ...] = (
    0,
    1,
    -1,
    128,
    2**63,
    -(2**64) + 1,
    0.0,
    -0.0,
    1.0,
    -2.5,
    1e-45,
    1.7976931348623157e308,
    0.1,
    float("inf"),
    float("-inf"),
    float("nan"),
    True,
    False,
    np.float32(0.1),
    np.int16(-7),
    np.bool_(True),
    ml_dtypes.bfloat16(1.5),
    np.float64(3.0),
    Mode.B,
)


def xt_all(
    dst: T[Any, declare.Out("P F*")],
    data: T[Any, declare.In("P F*")],
    operand: T[Any, declare.In("P 1", scalar=True)],
    op: T[str, declare.Op(frozenset({"add"}))],
    index: T[Any, declare.Index()] = None,
    where: T[Any, declare.Predicate()] = None,
    offset: T[Any, declare.Affine()] = 0,
    offsets: T[Any, declare.Affine(many=True)] = (),
    attr: T[Any, declare.Attr((int, float, str, tuple))] = None,
    *,
    mask: T[Any, declare.Mask] = None,
    dtype: T[Any, declare.DType] = None,
    engine: T[Any, declare.EngineChoice] = None,
    acc: T[Any, declare.Register("vector")] = None,
) -> Any:
    """Has every kind of parameter."""


def xt_make(
    data: T[Any, declare.In("*")],
    scale: T[float, declare.Attr((float,))] = 1.0,
    mask: T[Any, declare.Mask] = None,
) -> Any:
    """Makes a tile."""


def xt_two(data: T[Any, declare.In("*")]) -> Any:
    """Makes two tiles."""


def xt_none() -> Any:
    """Has no operands."""


@contextmanager
def declared() -> Iterator[None]:
    """Declare the instructions above for the time of a test: the real instruction set stays as it is."""
    made = declare.Result("data", "data")
    for fn, results in ((xt_all, ()), (xt_make, (made,)), (xt_two, (made, made)), (xt_none, ())):
        declare.instruction(
            engine="vector scalar",
            cost=lambda d, hw: 1.0,
            family="elementwise",
            source="tests",
            results=results,
        )(fn)
    try:
        yield
    finally:
        for fn in (xt_all, xt_make, xt_two, xt_none):
            del ISA[fn.__name__]


class Generator:
    """Random parts of a kernel. `loose` puts in what is rare in real kernels: odd strings, numbers, forms."""

    def __init__(self, seed: int, loose: bool = True) -> None:
        self.r = random.Random(seed)
        self.loose = loose
        self.ids = 0
        self.vars: list[Var] = []
        self.allocs: list[Alloc] = []
        self.registers: list[Alloc] = []
        self.names = 0

    def rare(self, chance: float = 0.1) -> bool:
        return self.loose and self.r.random() < chance

    def shape(self, rank: int | None = None) -> tuple[int, ...]:
        rank = self.r.choice((1, 2, 2, 2, 3, 4)) if rank is None else rank
        return tuple(self.r.choice((1, 2, 4, 128, 512, 0 if self.rare(0.05) else 3)) for _ in range(rank))

    def affine(self, depth: int = 0) -> Affine:
        r = self.r
        out = Affine(r.choice((0, 0, 0, 1, -1, 128, r.randrange(-9, 5000))))
        for _ in range(r.choice((0, 1, 1, 2, 3)) if self.vars else 0):
            c = r.choice((1, 1, -1, 2, 128, -512))
            if depth < 3 and self.rare(0.2):
                out = out.add(Affine(0, ((FloorDiv(self.affine(depth + 1), r.choice((2, 3, 128))), c),)))
            else:
                out = out.add(Affine(0, ((r.choice(self.vars), c),)))
        return out

    def strides(self, rank: int) -> tuple[int, ...]:
        return tuple(self.r.choice((0, 0, 1, 1, -1, 2, 64)) for _ in range(rank))

    def pred(self, rank: int) -> Pred:
        if self.rare(0.1):
            rank = self.r.randrange(4)
        return Pred(self.affine(), self.strides(rank))

    def preds(self, rank: int, least: int = 1) -> tuple[Pred, ...]:
        return tuple(self.pred(rank) for _ in range(self.r.randrange(least, 3)))

    def access(self, depth: int = 0) -> Access:
        r, alloc = self.r, self.r.choice(self.allocs)
        if r.random() < 0.4:
            return whole(alloc)
        view = self.shape() if self.rare() else None
        rank = len(alloc.shape if view is None else view)
        shape = (alloc.shape if view is None else view) if r.random() < 0.2 else self.shape()
        dims = [
            Dim(
                self.affine(),
                tuple(int(i == j) for j in range(len(shape)))
                if r.random() < 0.5
                else self.strides(len(shape)),
                self.access(depth + 1) if depth < 2 and self.rare() else None,
            )
            for i in range(rank)
        ]
        return Access(
            alloc,
            r.choice(DTYPES) if self.rare() else alloc.dtype,
            tuple(dims),
            shape,
            view,
            self.preds(len(shape)) if self.rare(0.05) else (),
        )

    def literal(self, depth: int = 0) -> Any:
        kind = self.r.random()
        if depth < 3 and kind < 0.2:
            values = [self.literal(depth + 1) for _ in range(self.r.randrange(4))]
            return values if self.rare(0.3) else tuple(values)
        return self.r.choice(STRINGS) if kind < 0.4 else None if kind < 0.5 else self.r.choice(NUMBERS)

    def number(self) -> Any:
        return self.r.choice(NUMBERS) if self.loose else self.r.choice((0, 1, 2.5, -1.0, 0.1))

    def register(self) -> Access:
        if not self.registers or self.rare(0.05):
            self.ids += 1
            self.registers.append(Alloc(self.ids, "vector", (128, 1), "float32", "register", "register"))
        return Access(
            self.r.choice(self.registers),
            "float32",
            (Dim(Affine(), (1, 0)), Dim(Affine(), (0, 1))),
            (self.r.choice((64, 128)), 1),
        )

    def operand(self, spec: Any) -> Any:
        r = self.r
        if isinstance(spec, declare.Tile):
            return self.number() if spec.scalar and r.random() < 0.5 else self.access()
        if isinstance(spec, declare.Op):
            return r.choice(STRINGS) if self.rare() else r.choice(sorted(spec.names) or ["add"])
        if isinstance(spec, declare.Affine):

            def one() -> Any:
                return self.affine() if r.random() < 0.5 else r.randrange(-5, 5000)

            return tuple(one() for _ in range(r.randrange(3))) if spec.many and r.random() < 0.7 else one()
        if isinstance(spec, declare.Index):
            shape = self.shape()
            return IndexTile(self.affine(), self.strides(len(shape)), shape)
        if isinstance(spec, declare.Predicate):
            shape = self.shape()
            return PredTile(self.preds(len(shape), 0), shape)
        if isinstance(spec, declare.Register):
            return self.register()
        return None if isinstance(spec, declare.Plumbing) else self.literal() if self.loose else self.number()

    def instr(self, ops: list[str]) -> Instr:
        r, op = self.r, self.r.choice(ops)
        decl = ISA[op]
        operands = tuple(
            None if not p.required and r.random() < 0.5 else self.operand(p.spec) for p in decl.params
        )
        mask = self.preds(2) if r.random() < 0.15 else ()
        return Instr(
            op,
            tuple(self.access() for _ in decl.results),
            operands,
            mask,
            r.choice((*decl.engines, "")),
            r.randrange(3),
            r.choice((0, 0, 0, r.randrange(99))),
        )

    def alloc(self, kind: str = "local", space: str = "") -> Alloc:
        r = self.r
        self.ids += r.choice((1, 1, 1, 5))
        shape = self.shape()
        space = space or r.choice(("sbuf", "sbuf", "psum", "shared_hbm", "private_hbm", "hbm", "register"))
        made = Alloc(
            -self.ids if kind == "param" and r.random() < 0.5 else self.ids,
            r.choice(STRINGS) if self.rare() else r.choice(("acc", "", "q")),
            shape,
            r.choice(DTYPES),
            space,
            kind,
            r.randrange(len(shape) + 1) if r.random() < 0.3 else 0,
            self.literal() if self.rare() else None,
            Loc("/k/kernel.py", r.randrange(1, 99), "f") if r.random() < 0.5 else None,
        )
        self.allocs.append(made)
        return made

    def var(self, trips: int, kind: str = "loop") -> Var:
        self.names += 1
        name = (
            f"i{self.names}"
            if not self.rare()
            else self.r.choice(("t1", "d0", "for", "i1", "i2", "inf", "a b", ""))
        )
        return Var(name, 0, trips - 1, kind)

    def loop(self, make: Callable[[], list[Stmt]]) -> For:
        trips = self.r.choice((0, 1, 4, 32, 2**40))
        var = self.var(trips)
        self.vars.append(var)
        made = For(
            var,
            trips,
            self.r.choice(("affine", "sequential")),
            make(),
            tuple(self.r.choice(STRINGS) for _ in range(2)) if self.rare() else (),
            1,
        )
        self.vars.remove(var)
        return made

    def body(self, size: int, depth: int, ops: list[str]) -> list[Stmt]:
        out: list[Stmt] = []
        for _ in range(size):
            kind = self.r.random()
            if depth and kind < 0.1:
                out.append(self.loop(lambda: self.body(self.r.randrange(size + 1), depth - 1, ops)))
            elif depth and kind < 0.2:
                shared = [self.alloc()] if self.rare() else []  # one tensor, allocated on both sides
                out.append(
                    If(
                        self.pred(0),
                        shared + self.body(self.r.randrange(size + 1), depth - 1, ops),
                        shared + self.body(self.r.choice((0, 2)), depth - 1, ops),
                        2,
                    )
                )
            elif depth and kind < 0.25:
                out.append(
                    DoWhile(
                        self.body(self.r.randrange(size + 1), depth - 1, ops),
                        self.r.choice((None, self.access())),
                        0,
                    )
                )
            else:
                out.append(self.alloc() if kind < 0.4 else self.instr(ops))
        return out

    def constant(self) -> tuple[Alloc, np.ndarray[Any, Any]]:
        r = self.r
        dtype = np.dtype(
            r.choice(
                (
                    "float32",
                    "int32",
                    "uint8",
                    "bool",
                    "float16",
                    "int64",
                    "float64",
                    ml_dtypes.bfloat16,
                    ml_dtypes.float8_e4m3,
                    ">f4",
                )
            )
        )
        shape = self.shape(r.randrange(3))
        raw = np.frombuffer(r.randbytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)
        if r.random() < 0.5 or dtype == np.bool_:
            raw = (np.arange(raw.size).reshape(shape) % 2).astype(dtype)
        self.ids += 1
        alloc = Alloc(self.ids, "", tuple(raw.shape), "float32", "shared_hbm", "constant")
        self.allocs.append(alloc)
        return alloc, raw


def random_kernel(
    seed: int, size: int = 8, depth: int = 3, ops: list[str] | None = None, loose: bool = True
) -> Kernel:
    """A random kernel of instructions `ops` (default: all declared)."""
    g = Generator(seed, loose)
    grid = tuple(g.var(g.r.choice((1, 2, 8)), "pid") for _ in range(g.r.randrange(3)))
    g.vars.extend(grid)
    params = [g.alloc("param", "shared_hbm") for _ in range(g.r.randrange(1, 4))]
    constants = dict(g.constant() for _ in range(g.r.randrange(4)))
    body = g.body(size, depth, ops or sorted(ISA))
    return Kernel(
        g.r.choice(STRINGS) if g.rare() else "kernel",
        params,
        body,
        [g.access() for _ in range(g.r.randrange(3))],
        grid,
        (0, 1) if g.rare() else (),
        g.r.choice(("trn1", "trn2")),
        {a.id: c for a, c in constants.items()},
        list(constants),
        params[: g.r.randrange(2)],
        [Loc("/k/kernel.py", 3, "f"), Loc("/k/lib/help.py", 9, "g"), Loc("<ipython>", 1)],
        g.rare(),
    )


def large_kernel(instructions: int, seed: int = 0) -> Kernel:
    """A kernel as tracing makes them: unrolled loops of tile loads, arithmetic and stores."""
    g = Generator(seed, False)
    hbm = [Alloc(n, f"x{n}", (4096, 4096), "bfloat16", "shared_hbm", "param") for n in range(3)]
    body: list[Stmt] = []
    target, ids = body, 3
    zero = Affine()
    while instructions > 0:
        if g.r.random() < 0.02:
            var = g.var(32)
            loop = For(var, 32, "affine")
            g.vars = [var]
            body.append(loop)
            target = loop.body
        base = Affine(g.r.randrange(32) * 128, ((g.vars[0], 128),) if g.vars else ())
        column = Affine(g.r.randrange(4096))
        tile = Access(hbm[g.r.randrange(3)], "bfloat16", (Dim(base, (1, 0)), Dim(column, (0, 1))), (128, 512))
        a = Alloc(ids, "a", (128, 512), "bfloat16", "sbuf")
        b = Alloc(ids + 1, "b", (4, 128, 512), "float32", "sbuf", pdim=1)
        ids += 2
        part = Access(
            b,
            "float32",
            (Dim(Affine(g.r.randrange(4)), (0, 0)), Dim(zero, (1, 0)), Dim(zero, (0, 1))),
            (128, 512),
        )
        mask = (Pred(Affine(4095 - base.const, tuple((v, -c) for v, c in base.terms)), (-1, 0)),)
        target += [a, b]
        for n in range(4):
            operands = [part, whole(a), 0.5, "add", None, None, None, None, 1, None, None, None, None]
            if n == 0:
                operands[1] = tile
            elif n == 3:
                operands[0] = tile
            elif n == 2:
                operands[2] = Access(
                    a, "bfloat16", (Dim(zero, (1, 0)), Dim(Affine(g.r.randrange(512)), (0, 1))), (128, 1)
                )
            target.append(Instr("xt_all", (), tuple(operands), mask if n == 3 else (), "vector"))
        instructions -= 4
    return Kernel("large", hbm, body, [])
