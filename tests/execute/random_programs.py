"""Random kernels that run: IR from a seed, of every instruction that computes, with loops, branches, masks, strides and block dimensions.

Unlike `tests.ir.build_random`, whose kernels only have the right form, these pass the verifier, stay inside of their tensors, and end. They
do read elements that nobody has written now and then, which the reference finds out (see `tests.execute.differ`).
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from opennki.errors import NkiError
from opennki.ir.affine import Affine, FloorDiv, Pred, Var
from opennki.ir.nodes import Access, Alloc, Dim, DoWhile, For, If, IndexTile, Instr, Kernel, PredTile, Stmt, whole
from opennki.ir.verify import call_view, check_instr, check_operands
from opennki.isa import declare, dtypes
from opennki.isa import target as targets
from opennki.isa.declare import ISA

TARGET = "trn3"  # the generation that has every instruction
FAMILIES_LEFT_OUT = frozenset({"print", "sync", "collective", "custom"})
OPS = sorted(n for n, d in ISA.items() if d.family not in FAMILIES_LEFT_OUT and not d.suspends)
FLOATS = ("float32", "float32", "float32", "bfloat16", "bfloat16", "float16", "float8_e4m3", "float8_e5m2", "tfloat32")
INTS = ("int32", "int32", "uint32", "int16", "uint16", "int8", "uint8", "bool")
_INF = float("inf")
NUMBERS = (0, 1, -1, 2, 3, 0.5, -2.5, 7, 0.1, -0.0, 1e-45, -1e-40, 1e38, -3e38, 1e10, 255, 65504.0, _INF, -_INF, _INF - _INF)
PARTITIONS = (1, 2, 3, 8, 16, 32, 33, 64, 128)
FREE = (1, 2, 3, 4, 7, 8, 16, 31, 32, 33, 40, 64, 65, 96, 128, 200, 257, 300)
_SPACE = {"hbm": ("shared_hbm", "private_hbm"), "sbuf": ("sbuf",), "psum": ("psum",)}
STYLES = ("normal", "normal", "normal", "small", "bits", "special", "ramp")


class Programs:
    """One random kernel. `styles`: how the values of each parameter are made (see `differ.values`)."""

    def __init__(self, seed: int, ops: list[str] | None = None) -> None:
        self.r = random.Random(seed)
        self.ops = ops or OPS
        self.target = targets.resolve(TARGET)
        self.ids = 0
        self.params: list[Alloc] = []
        self.styles: dict[str, str] = {}
        self.outputs: list[Alloc] = []
        self.registers: dict[str, Alloc] = {}
        self.scopes: list[tuple[list[Stmt], list[Alloc]]] = [([], [])]
        self.vars: list[Var] = []
        self.top = self.scopes[0][0]
        self.left = self.r.randint(1, 14)
        self.again = seed % 3 == 2

    # ---- parts -------------------------------------------------------------------------------------------------------------
    def rare(self, chance: float) -> bool:
        return self.r.random() < chance

    def new(self, shape: tuple[int, ...], dtype: str, space: str, kind: str = "local", name: str = "", pdim: int = 0) -> Alloc:
        self.ids += 1
        return Alloc(self.ids, name, shape, dtype, space, kind, pdim)

    def param(self, shape: tuple[int, ...], dtype: str, style: str = "") -> Alloc:
        made = self.new(shape, dtype, "shared_hbm", "param", f"p{len(self.params)}")
        self.params.append(made)
        self.styles[made.name] = style or self.r.choice(STYLES)
        return made

    def index(self, most: int, step: int = 1) -> Affine:
        """An expression of loop indices with values in 0 .. most."""
        r, out, left = self.r, Affine(), most
        for var in r.sample(self.vars, min(len(self.vars), r.choice((0, 1, 1, 2)))):
            kind, h = r.random(), var.hi
            atom: Affine = Affine(0, ((var, 1),))
            if kind < 0.1 and h > 1:
                by = r.choice((2, 3))
                atom, h = Affine(0, ((FloorDiv(atom, by), 1),)), h // by
            elif kind < 0.2 and h > 1:
                by = r.choice((2, 3))
                atom, h = atom.add(Affine(0, ((FloorDiv(atom, by), -by),))), min(h, by - 1)
            elif kind < 0.25:
                atom = Affine(h).add(atom, -1)
            fits = [c for c in (step, step, step, 1, left // h if h else 1, r.randint(1, 9)) if 0 < c * h <= left or h == 0]
            if fits and h >= 0:
                c = r.choice(fits)
                out, left = out.add(atom.scale(c)), left - c * h
        return out.add(r.choice((0, 0, left, r.randint(0, left)))) if left > 0 else out

    def dim(self, size: int, extents: list[int], rank: int, places: list[int], write: bool) -> Dim | None:
        """The index of one dimension of a tensor by the tile dimensions `places`; None where they do not fit."""
        r, strides, step, span, low = self.r, [0] * rank, 1, 1, 0
        if self.rare(0.15):
            step = r.choice((2, 3))
        for place, n in reversed(list(zip(places, extents, strict=True))):
            s = step
            if not write and n > 1 and self.rare(0.04):
                strides[place] = 0
                continue
            if n > 1 and self.rare(0.04):
                low += s * (n - 1)
                s = -s
            strides[place] = s
            span += abs(s) * (n - 1)
            step *= n
        if span > size:
            return None
        return Dim(self.index(size - span, span).add(low), tuple(strides))

    def access(self, alloc: Alloc, shape: tuple[int, ...], write: bool, dtype: str = "") -> Access | None:
        """A tile of a tensor, None where it does not fit."""
        r, first = self.r, alloc.pdim if alloc.on_chip else 0
        rank, sizes = len(shape), list(alloc.shape[first:])
        if not sizes:
            return None
        if alloc.on_chip:
            where = [0] + sorted(r.randrange(1, len(sizes)) for _ in shape[1:]) if len(sizes) > 1 else [0] * (rank > 0)
            if len(where) != rank:
                return None
        else:
            where = sorted(r.randrange(len(sizes)) for _ in shape)
            if rank == len(sizes) and r.random() < 0.9:
                where = list(range(rank))
            if self.rare(0.1):
                r.shuffle(where)
        dims = [Dim(self.index(n - 1), (0,) * rank) for n in alloc.shape[:first]]
        for axis, size in enumerate(sizes):
            places = [i for i, w in enumerate(where) if w == axis]
            made = self.dim(size, [shape[i] for i in places], rank, places, write)
            if made is None:
                return None
            dims.append(made)
        return Access(alloc, dtype or alloc.dtype, tuple(dims), shape)

    # ---- tensors -----------------------------------------------------------------------------------------------------------
    def visible(self) -> list[Alloc]:
        return [a for _, allocs in self.scopes for a in allocs] + self.params

    def tile(self, shape: tuple[int, ...], kinds: list[str], spaces: list[str], write: bool, filled: bool = True) -> Access:
        """A tile to read or to write, of a tensor that is there or of a new one."""
        r = self.r
        sorts = [s for s in spaces for s in _SPACE[s]]
        if not self.rare(0.3):
            there = [a for a in self.visible() if a.dtype in kinds and a.space in sorts and not (write and a.kind == "param")]
            r.shuffle(there)
            for alloc in there[:6]:
                found = self.access(alloc, shape, write)
                if found is not None:
                    return found
        if not write and self.rare(0.05):  # the bits of another dtype
            for alloc in r.sample(self.visible(), min(4, len(self.visible()))):
                kind = r.choice(kinds)
                if alloc.space in sorts and dtypes.itemsize(alloc.dtype) == dtypes.itemsize(kind) and "bool" not in (kind, alloc.dtype):
                    found = self.access(alloc, shape, write, kind)
                    if found is not None:
                        return found
        alloc = self.made(shape, r.choice(kinds), r.choice(sorts), write, filled)
        for _ in range(8):
            found = self.access(alloc, shape, write)
            if found is not None:
                return found
        first, rank = alloc.pdim, len(shape)
        own = alloc.shape[first:]
        plain = [Dim(self.index(n - shape[i], shape[i]), tuple(int(i == j) for j in range(rank))) for i, n in enumerate(own)]
        return Access(alloc, alloc.dtype, (*(Dim(self.index(n - 1), (0,) * rank) for n in alloc.shape[:first]), *plain), shape)

    def made(self, shape: tuple[int, ...], dtype: str, space: str, write: bool, filled: bool) -> Alloc:
        """A new tensor in which a tile fits: larger than it now and then, with block dimensions, in this scope or one around it."""
        r = self.r
        grown = list(shape)
        pdim = 0
        if space in ("sbuf", "psum"):
            if len(grown) < 2:
                grown += [1] * (2 - len(grown))
            if self.rare(0.3):
                grown[-1] = min(1024, grown[-1] + r.choice((1, 3, grown[-1])))
            if self.rare(0.15):
                grown[0] = r.choice([p for p in PARTITIONS if p >= grown[0]] or [grown[0]])
            if self.rare(0.15):
                grown, pdim = [r.choice((1, 2, 4)), *grown], 1
        elif not write or self.rare(0.4):
            grown[0] = min(1024, grown[0] * r.choice((1, 1, 2, 4)) + r.choice((0, 0, 5)))
            grown[-1] = min(1024, grown[-1] + r.choice((0, 0, 3, grown[-1])))
            if not write:
                return self.param(tuple(grown), dtype)
        alloc = self.new(tuple(grown), dtype, space, pdim=pdim)
        body, allocs = self.scopes[-1] if not self.rare(0.3) else r.choice(self.scopes)
        body.append(alloc)
        allocs.append(alloc)
        if space == "shared_hbm" and body is self.top and len(self.outputs) < 6:
            self.outputs.append(alloc)
        if not write or filled or grown[pdim:] != list(shape):
            self.fill(alloc, body)
        return alloc

    def fill(self, alloc: Alloc, body: list[Stmt]) -> None:
        """Give every element a value."""
        blocks = alloc.shape[: alloc.pdim]
        shape = alloc.shape[alloc.pdim :]
        fit = [p for p in self.params if p.dtype == alloc.dtype and p.shape == shape and not self.styles[p.name].startswith("below")]
        source = self.r.choice(fit) if fit else self.param(shape, alloc.dtype)
        index: list[Dim] = []
        target = body
        for n in blocks:
            loop = self.loop_of(n)
            target.append(loop)
            target = loop.body
            index.append(Dim(Affine(0, ((loop.var, 1),)), (0,) * len(shape)))
        rank = len(shape)
        dims = [Dim(Affine(), tuple(int(i == j) for j in range(rank))) for i in range(rank)]
        target.append(Instr("dma_copy", (), (Access(alloc, alloc.dtype, (*index, *dims), shape), whole(source), None, None, 0, 3)))

    def loop_of(self, trips: int, kind: str = "") -> For:
        self.ids += 1
        return For(Var(f"i{self.ids}", 0, trips - 1), trips, kind or self.r.choice(("affine", "sequential")))

    # ---- operands ----------------------------------------------------------------------------------------------------------
    def size(self, word: str, dims: dict[str, int], limits: dict[str, int]) -> int:
        name = word.rstrip("*")
        if name.isdigit():
            return int(name)
        if name not in dims:
            bound = limits.get(name, 512)
            choices = [*(PARTITIONS if name in "PKR" else FREE), *(dims.values() if self.rare(0.5) else ()), 8]
            dims[name] = self.r.choice([n for n in choices if n <= bound])
        return dims[name]

    def shape(self, words: tuple[str, ...], dims: dict[str, int], limits: dict[str, int], forms: dict[str, Any]) -> tuple[int, ...]:
        """A shape for the words of a declaration; operands of one size mostly have one form."""
        if words == ("*",):
            return (self.size("P", dims, limits), self.size("F", dims, limits))
        out = [self.size(words[0], dims, limits)]
        for word in words[1:]:
            n = self.size(word, dims, limits)
            if not word.endswith("*"):
                out.append(n)
                continue
            if word not in forms or (not forms.get("fixed") and self.rare(0.05)):
                parts = [(n,)] * 3 + [(a, n // a) for a in (2, 3, 4, 8) if n % a == 0 and n > a]
                forms[word] = self.r.choice(parts)
            out += forms[word]
        return tuple(out)

    def number(self, integer: bool) -> Any:
        return self.r.choice((0, 1, 2, 3, 5, 7, 15, 31, 255, -1)) if integer else self.r.choice(NUMBERS)

    def pred(self, shape: tuple[int, ...]) -> Pred:
        r = self.r
        strides = [0] * len(shape)
        for axis in r.sample(range(len(shape)), min(len(shape), r.choice((0, 1, 1, 1, 2)))):
            strides[axis] = r.choice((1, -1, -1, 2, -3))
        low = sum(min(0, s * (n - 1)) for s, n in zip(strides, shape, strict=True))
        high = sum(max(0, s * (n - 1)) for s, n in zip(strides, shape, strict=True))
        expr = Affine(-r.randint(low, max(low, high)))
        for var in self.vars:
            if self.rare(0.4):
                expr = expr.add(Affine(0, ((var, r.choice((1, -1, 4, -8))),)))
        return Pred(expr, tuple(strides))

    def attr(self, spec: declare.Attr, shape: tuple[int, ...]) -> Any:
        r = self.r
        if spec.choices:
            value = r.choice(spec.choices)
            return int(value) if isinstance(value, int) and not isinstance(value, bool) else value
        if spec.optional and self.rare(0.5):
            return None
        kind = r.choice(spec.types)
        if kind is bool:
            return r.random() < 0.5
        if kind in (tuple, list):
            rank = len(shape)
            return r.choice((shape, tuple(range(r.randint(1, max(1, rank - 1)), rank)), (1,), (rank - 1,)))
        if issubclass(kind, float):
            return float(self.number(False))
        return self.r.choice((0, 1, 2, 3, 4, 8, 16, len(shape) - 1, shape[0]))

    def operand(self, p: declare.Param, main: str, dims: dict[str, int], limits: dict[str, int], forms: dict[str, Any]) -> Any:
        r, spec = self.r, p.spec
        if isinstance(spec, declare.Tile):
            if spec.optional and self.rare(0.5):
                return None
            if spec.scalar and self.rare(0.5):
                if self.vars and self.rare(0.1):
                    return self.index(1 << 12).add(-r.choice((0, 0, 100)))
                return self.number(main in INTS)
            kinds = [main] if main in spec.dtypes and not self.rare(0.3) else sorted(spec.dtypes & {*FLOATS, *INTS})
            shape = self.shape(spec.dims, dims, limits, forms)
            found = self.tile(shape, kinds, list(spec.spaces), spec.writes, spec.reads)
            return self.dynamic(found) if spec.indirect and self.rare(0.15) else found
        if isinstance(spec, declare.Op):
            return None if spec.optional and self.rare(0.4) else r.choice(sorted(spec.names))
        if isinstance(spec, declare.Attr):
            if not p.required and self.rare(0.4):
                value = p.default
                return value if value is None or isinstance(value, (bool, float, str, tuple)) else int(value)
            return self.attr(spec, self.shape(("P", "F*"), dims, limits, forms))
        if isinstance(spec, declare.Affine):
            if spec.many:
                return r.choice(((), tuple(r.randrange(32) for _ in range(32)), (0, 0), (32, 32)))
            return self.index(200) if self.rare(0.5) else r.randrange(200)
        if isinstance(spec, declare.Index):
            shape = self.shape(("P", "F*"), dims, limits, forms)
            return IndexTile(self.index(3000, 7).add(r.choice((0, -1000))), tuple(r.choice((0, 1, 1, -1, 5)) for _ in shape), shape)
        if isinstance(spec, declare.Predicate):
            shape = self.shape(("P", "F*"), dims, limits, forms)
            return PredTile(tuple(self.pred(shape) for _ in range(r.choice((1, 1, 2)))), shape)
        if isinstance(spec, declare.Register):
            if spec.engine not in self.registers:
                self.registers[spec.engine] = self.new((128, 1), "float32", "register", "register", f"{spec.engine}_acc")
            rows = self.target.partitions if spec.engine == "rng" else self.size("P", dims, limits)
            return Access(self.registers[spec.engine], "float32", (Dim(Affine(), (1, 0)), Dim(Affine(), (0, 1))), (rows, 1))
        return None

    def dynamic(self, access: Access) -> Access:
        """The tile with an index that is read from memory: one for all of it, or one for each of its first positions."""
        axis = self.r.randrange(len(access.dims))
        dim = access.dims[axis]
        each = any(dim.strides)
        if each and (axis != access.alloc.pdim * access.alloc.on_chip or any(dim.strides[1:])):
            return access
        rows = access.shape[0] if each else 1
        if rows > 128:
            return access
        held = self.new((rows, 1), "int32", "sbuf")
        source = self.param((rows, 1), "int32", f"below {access.alloc.shape[axis]}")
        self.scopes[-1][0].extend((held, Instr("dma_copy", (), (whole(held), whole(source), None, None, 0, 3))))
        dims = list(access.dims)
        dims[axis] = Dim(Affine(), (0,) * len(access.shape), whole(held))
        return Access(access.alloc, access.dtype, tuple(dims), access.shape)

    # ---- instructions ------------------------------------------------------------------------------------------------------
    def instr(self) -> None:
        """Append an instruction that the verifier takes."""
        for _ in range(40):
            decl = ISA[self.r.choice(self.ops)]
            try:
                made = self.attempt(decl)
                check_instr(made, self.target)
            except NkiError:
                continue
            self.scopes[-1][0].append(made)
            return

    def attempt(self, decl: declare.Instruction) -> Instr:
        r = self.r
        dims: dict[str, int] = {}
        forms: dict[str, Any] = {"fixed": any(isinstance(p.spec, declare.Predicate) for p in decl.params)}
        limits = {limit.dim: getattr(self.target, limit.at_most) for limit in decl.limits}
        main = r.choice(FLOATS if self.rare(0.65) else INTS)
        plumbing = {p.spec.kind: p for p in decl.params if isinstance(p.spec, declare.Plumbing)}
        masked = "mask" in plumbing and self.rare(0.25)
        forms["fixed"] |= masked  # a mask counts the dimensions of one form
        operands = tuple([self.operand(p, main, dims, limits, forms) for p in decl.params])
        engine = r.choice(("", *decl.engines)) if "engine" in plumbing else ""
        free = plumbing.get("dtype")
        wanted = r.choice((main, main, *FLOATS, *INTS)) if free and (free.required or self.rare(0.7)) else None
        check_operands(decl, operands, self.target, engine, None, wanted)
        call = call_view(decl, operands, engine, wanted)
        if not engine:
            engine = decl.choose_engine(call, self.target) if decl.choose_engine else decl.engines[0]
            call.engine = engine
        results = []
        for spec in decl.results:
            shape = getattr(call, spec.shape).shape if isinstance(spec.shape, str) else tuple(spec.shape(call))
            kind = wanted or (getattr(call, spec.dtype).dtype if isinstance(spec.dtype, str) else spec.dtype(call))
            if len(shape) < 2:
                shape = (*shape, *(1,) * (2 - len(shape)))
            results.append(self.tile(shape, [kind], list(spec.spaces), True, masked or self.rare(0.2)))
        mask: tuple[Pred, ...] = ()
        if masked:
            over = operands[decl.index[decl.mask_on]] if decl.mask_on else results[0] if results else next(
                (o for o, p in zip(operands, decl.params, strict=True) if isinstance(o, Access) and getattr(p.spec, "writes", False)), None)
            if isinstance(over, Access):
                mask = tuple(self.pred(over.shape) for _ in range(r.choice((1, 1, 2))))
        return Instr(decl.name, tuple(results), operands, mask, engine, -1, r.randrange(100))

    # ---- control flow --------------------------------------------------------------------------------------------------------
    def inside(self, body: list[Stmt], size: int) -> None:
        """Statements into a body of its own scope; what it makes is stored where it can be seen."""
        self.scopes.append((body, []))
        self.statements(size)
        for alloc in self.scopes[-1][1]:
            if alloc.on_chip and self.rare(0.6):
                self.keep(alloc)
        self.scopes.pop()

    def keep(self, alloc: Alloc) -> None:
        """Store a tensor in an output, at a place for these values of all loop indices."""
        if len(self.outputs) >= 8:
            return
        shape = alloc.shape[alloc.pdim :]
        around = [v for v in self.vars if v.hi > 0]
        out = self.new((*(v.hi + 1 for v in around), *shape), alloc.dtype, "shared_hbm")
        self.outputs.append(out)
        self.top.insert(0, out)
        rank = len(shape)
        plain = [Dim(Affine(), tuple(int(i == j) for j in range(rank))) for i in range(rank)]
        dims = [Dim(Affine(0, ((v, 1),)), (0,) * rank) for v in around]
        blocks = [Dim(self.index(n - 1), (0,) * rank) for n in alloc.shape[: alloc.pdim]]
        place, source = Access(out, out.dtype, (*dims, *plain), shape), Access(alloc, alloc.dtype, (*blocks, *plain), shape)
        self.scopes[-1][0].append(Instr("dma_copy", (), (place, source, None, None, 0, 3)))

    def statements(self, size: int) -> None:
        r = self.r
        for _ in range(size):
            if self.left <= 0:
                return
            kind, body = r.random(), self.scopes[-1][0]
            if kind < 0.18 and len(self.scopes) < 4:
                loop = self.loop_of(r.choice((1, 2, 3, 4, 4, 0 if self.rare(0.1) else 2)))
                self.vars.append(loop.var)
                self.inside(loop.body, r.randint(1, 5))
                self.vars.pop()
                self.scopes[-1][0].append(loop)
            elif kind < 0.26 and self.vars:
                branch = If(self.pred(()))
                self.inside(branch.then, r.randint(1, 3))
                if self.rare(0.4):
                    self.inside(branch.orelse, r.randint(1, 3))
                body.append(branch)
            elif kind < 0.28 and len(self.scopes) < 3:
                self.repeat()
            else:
                self.left -= 1
                self.instr()

    def repeat(self) -> None:
        """A do-while loop that counts down."""
        body = self.scopes[-1][0]
        count = self.new((1, 1), "int32", "sbuf")
        body += [count, Instr("memset", (whole(count),), ((1, 1), self.r.choice((1, 2, 3)), None, None, None), engine="vector")]
        loop = DoWhile([], whole(count))
        self.inside(loop.body, self.r.randint(1, 3))
        loop.body.append(Instr("tensor_scalar", (whole(count),), (whole(count), "subtract", 1, False, None, None, False, None, None, None)))
        body.append(loop)

    def repeated(self, body: list[Stmt]) -> None:
        """Instructions again after themselves, at other places of their tensors: lowering makes them by the template of the first one."""
        made: list[Stmt] = []
        seen: list[Instr] = []
        for stmt in body:
            made.append(stmt)
            if isinstance(stmt, For):
                self.repeated(stmt.body)
            elif isinstance(stmt, If):
                self.repeated(stmt.then)
                self.repeated(stmt.orelse)
            elif isinstance(stmt, Instr):
                seen.append(stmt)
                made += [self.moved(self.r.choice(seen[-8:])) for _ in range(self.r.choice((0, 0, 1, 3, 6)))]
        body[:] = made

    def moved(self, instr: Instr) -> Instr:
        def place(value: Any) -> Any:
            if not isinstance(value, Access) or not self.rare(0.5):
                return value
            dims = []
            for dim, size in zip(value.dims, value.view_shape, strict=True):
                reach = [s * (n - 1) for s, n in zip(dim.strides, value.shape, strict=True)]
                low, high = -sum(min(0, x) for x in reach), size - 1 - sum(max(0, x) for x in reach)
                free = dim.dyn is None and not dim.base.terms and low <= high
                dims.append(replace(dim, base=Affine(self.r.randint(low, high))) if free else dim)
            return replace(value, dims=tuple(dims))

        return replace(instr, results=tuple(map(place, instr.results)), operands=tuple(map(place, instr.operands)))

    def kernel(self) -> Kernel:
        r = self.r
        grid = tuple(Var(f"g{i}", 0, r.choice((1, 2, 3, 4)) - 1, "pid") for i in range(r.choice((0, 0, 0, 1, 1, 2))))
        self.vars = list(grid)
        while self.left > 0:
            self.statements(r.randint(1, 6))
        if self.again:
            self.repeated(self.top)
        for alloc in self.scopes[0][1]:
            if alloc.on_chip:
                self.keep(alloc)
        return Kernel("random", self.params, self.top, [whole(o) for o in self.outputs], grid, (), TARGET)
