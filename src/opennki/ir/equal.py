"""Structural equality of kernels: the same program, whatever the objects, names of indices and locations."""

from __future__ import annotations

from typing import Any

import numpy as np

from opennki.ir import text as t
from opennki.ir.affine import Affine, Pred, Var
from opennki.ir.nodes import Access, Alloc, Dim, DoWhile, For, If, IndexTile, Instr, Kernel, PredTile
from opennki.isa.declare import ISA


def same(a: Kernel, b: Kernel) -> bool:
    """True when two kernels are the same program; `returns`, locations and names of indices do not count."""
    return not difference(a, b)


def difference(a: Kernel, b: Kernel) -> str:
    """Where two kernels differ first; empty if they are the same program."""
    try:
        _Comparison().kernel(a, b)
    except _Differ as e:
        return str(e)
    return ""


class _Differ(Exception):
    pass


class _Comparison:
    def __init__(self) -> None:
        self.vars: dict[Var, Var] = {}
        self.allocs: dict[Alloc, Alloc] = {}
        self.taken: set[Alloc | Var] = set()

    def equal(self, a: Any, b: Any, where: str) -> None:
        if type(a) is not type(b) or a != b:
            raise _Differ(f"{where}: {a!r} and {b!r}")

    def kernel(self, a: Kernel, b: Kernel) -> None:
        for name in ("name", "target", "cores", "has_collectives"):
            self.equal(t.plain(getattr(a, name)), t.plain(getattr(b, name)), name)
        for name in ("grid", "params", "constant_allocs", "written_params", "outputs"):
            self.equal(len(getattr(a, name)), len(getattr(b, name)), f"number of {name}")
        for v, w in zip(a.grid, b.grid):
            self.bind(v, w, "grid")
        for name in ("params", "constant_allocs", "written_params"):
            for x, y in zip(getattr(a, name), getattr(b, name)):
                self.alloc(x, y, name)
        for x in a.constant_allocs:
            c, d = a.constants.get(x.id), b.constants.get(x.id)
            self.equal(c is None, d is None, f"data of {x}")
            if c is not None and d is not None:
                self.equal((c.dtype.name, c.shape), (d.dtype.name, d.shape), f"data of {x}")
                if np.ascontiguousarray(c, c.dtype.newbyteorder("<")).tobytes() != d.tobytes():
                    raise _Differ(f"data of {x}")
        self.body(a.body, b.body, "body")
        for o, p in zip(a.outputs, b.outputs):
            self.access(o, p, "outputs")

    def bind(self, v: Var, w: Var, where: str) -> None:
        self.equal((v.lo, v.hi), (w.lo, w.hi), where)
        if v in self.vars or w in self.taken:
            raise _Differ(f"{where}: index {v} or {w} is bound twice")
        self.vars[v] = w
        self.taken.add(w)

    def alloc(self, a: Alloc, b: Alloc, where: str) -> None:
        known = self.allocs.get(a)
        if known is None:
            for name in ("id", "name", "shape", "dtype", "space", "kind", "pdim"):
                self.equal(getattr(a, name), getattr(b, name), f"{where}: {name} of {a}")
            self.value(a.placement, b.placement, f"{where}: placement of {a}")
            if b in self.taken:
                raise _Differ(f"{where}: {b} stands for two tensors")
            self.taken.add(b)
            self.allocs[a] = known = b
        if known is not b:
            raise _Differ(f"{where}: {a} and {b} are other tensors")

    def body(self, a: list[Any], b: list[Any], where: str) -> None:
        self.equal(len(a), len(b), f"length of {where}")
        for n, (x, y) in enumerate(zip(a, b)):
            here = f"{where}[{n}]"
            if type(x) is not type(y):
                raise _Differ(f"{here}: {type(x).__name__} and {type(y).__name__}")
            if isinstance(x, Instr):
                self.instr(x, y, here)
            elif isinstance(x, Alloc):
                self.alloc(x, y, here)
            elif isinstance(x, For):
                self.equal(
                    (x.trips, x.kind, tuple(map(str, x.directives))), (y.trips, y.kind, y.directives), here
                )
                self.bind(x.var, y.var, here)
                self.body(x.body, y.body, here + ".body")
            elif isinstance(x, If):
                self.pred(x.pred, y.pred, here)
                self.body(x.then, y.then, here + ".then")
                self.body(x.orelse, y.orelse, here + ".orelse")
            elif isinstance(x, DoWhile):
                self.body(x.body, y.body, here + ".body")
                self.value(x.cond, y.cond, here + ".cond")

    def instr(self, x: Instr, y: Instr, where: str) -> None:
        self.equal(
            (x.op, x.engine, x.call, len(x.results), len(x.operands), len(x.mask)),
            (y.op, y.engine, y.call, len(y.results), len(y.operands), len(y.mask)),
            where,
        )
        for p, q in zip(x.results, y.results):
            self.access(p, q, f"{where}: result")
        for param, p, q in zip(ISA[x.op].params, x.operands, y.operands):
            if p is not q:
                self.value(p, q, f"{where}: {x.op}.{param.name}")
        for m, n in zip(x.mask, y.mask):
            self.pred(m, n, f"{where}: mask")

    def value(self, p: Any, q: Any, where: str) -> None:
        if isinstance(p, Access):
            self.access(p, q, where)
        elif isinstance(p, Affine) and isinstance(q, Affine):
            self.affine(p, q, where)
        elif isinstance(p, IndexTile) and isinstance(q, IndexTile):
            self.affine(p.base, q.base, where)
            self.equal((p.strides, p.shape), (q.strides, q.shape), where)
        elif isinstance(p, PredTile) and isinstance(q, PredTile):
            self.equal((p.shape, len(p.preds)), (q.shape, len(q.preds)), where)
            for m, n in zip(p.preds, q.preds):
                self.pred(m, n, where)
        elif isinstance(p, (tuple, list)) and isinstance(q, (tuple, list)):
            self.equal(len(p), len(q), where)
            for v, w in zip(p, q):
                self.value(v, w, where)
        else:
            v, w = (x if isinstance(x, (Access, Affine, IndexTile, PredTile)) else t.plain(x) for x in (p, q))
            if not (type(v) is type(w) is float and t.literal_text(v) == t.literal_text(w)):
                self.equal(v, w, where)
                if type(v) is float:  # 0.0 == -0.0
                    self.equal(repr(v), repr(w), where)

    def access(self, a: Access, b: Access, where: str) -> None:
        if not isinstance(b, Access):
            raise _Differ(f"{where}: a tile and {b!r}")
        self.alloc(a.alloc, b.alloc, where)
        self.equal(
            (a.dtype, a.shape, a.view, len(a.dims), len(a.mask)),
            (b.dtype, b.shape, b.view, len(b.dims), len(b.mask)),
            where,
        )
        for d, e in zip(a.dims, b.dims):
            self.dim(d, e, where)
        for m, n in zip(a.mask, b.mask):
            self.pred(m, n, where)

    def dim(self, d: Dim, e: Dim, where: str) -> None:
        self.affine(d.base, e.base, where)
        self.equal(d.strides, e.strides, where)
        if d.dyn is not None and e.dyn is not None:
            self.access(d.dyn, e.dyn, where)
        else:
            self.equal(d.dyn is None, e.dyn is None, f"{where}: dynamic index")

    def pred(self, m: Pred, n: Pred, where: str) -> None:
        self.affine(m.expr, n.expr, where)
        self.equal(m.strides, n.strides, where)

    def affine(self, p: Affine, q: Affine, where: str) -> None:
        if (
            p.const != q.const
            or bool(p.terms) != bool(q.terms)
            or (p.terms and _key(p, self.vars) != _key(q, None))
        ):
            raise _Differ(f"{where}: {p} and {q}")


def _key(a: Affine, names: dict[Var, Var] | None) -> Any:
    """Identity of an expression in the variables of the second kernel, in any order of terms."""
    terms = []
    for atom, c in a.terms:
        if isinstance(atom, Var):
            terms.append((id(names.get(atom) if names is not None else atom), 0, c))
        else:
            terms.append((hash(_key(atom.of, names)), atom.by, c))
    return (a.const, *sorted(terms))
