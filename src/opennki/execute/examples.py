"""Small calls of every instruction, made from its declaration: what `opennki ops --coverage` lowers, and the tests run both ways.

An example is a kernel of one instruction whose operands are the parameters of the kernel, so that nothing but the instruction is in it.
From a first call that the declaration accepts, the others differ in one thing each: a dtype, an operator, an attribute, an optional
operand, the dimensions, a mask, a runtime index, a loop. No instruction is named; calls that a declaration refuses are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import Any

import numpy as np

from opennki.errors import NkiError
from opennki.ir.affine import Affine, Pred, Var, constant, variable
from opennki.ir.nodes import Access, Alloc, Dim, For, IndexTile, Instr, Kernel, PredTile, whole
from opennki.ir.verify import call_view, check_instr, iteration_shape
from opennki.isa import declare, dtypes
from opennki.isa.declare import ISA, Instruction, Param
from opennki.isa.scalar import SCALAR
from opennki.isa.target import resolve

TARGET = "trn2"
SIZES = {"P": 32, "F": 24, "S": 24, "I": 2, "V": 8, "K": 32, "M": 16, "N": 24, "R": 16, "C": 24}
_FIRST = ("float32", "uint32", "uint16", "int32", "uint8", "bfloat16")
_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3", "float8_e4m3fn", "float8_e5m2", "tfloat32", "int32", "uint32", "int16",
           "uint16", "int8", "uint8", "bool")  # fmt: skip
_REFUSED = (NkiError, ValueError, TypeError, AttributeError, IndexError, ZeroDivisionError, NotImplementedError)
ROWS = 40  # of a tensor that is indexed at run time


@dataclass(frozen=True)
class Call:
    """What varies between the examples of an instruction. dtypes: of the tile parameters; values: of the others, and of tiles that are
    numbers or left out; free: the free dimensions of tiles that may have several; mask, dynamic, zero, window: see `_mask`, `_tile`."""

    decl: Instruction
    what: str = ""
    dtypes: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    result: str = ""
    space: str = ""
    free: tuple[int, ...] = ()
    mask: str = ""
    dynamic: dict[str, str] = field(default_factory=dict)
    zero: str = ""
    window: bool = False
    loop: bool = False


@dataclass(frozen=True)
class Example:
    """A kernel of one instruction, and arrays for it."""

    op: str
    what: str
    kernel: Kernel
    arrays: list[np.ndarray]


class _Builder:
    def __init__(self, call: Call) -> None:
        self.call, self.decl = call, call.decl
        self.allocs: list[Alloc] = []
        self.params: list[Alloc] = []
        self.roles: dict[Alloc, tuple[Param, str]] = {}
        self.registers: list[Alloc] = []
        self.written: list[Alloc] = []
        self.var = Var("i", 0, 2)

    def alloc(self, shape: tuple[int, ...], dtype: str, space: str, kind: str) -> Alloc:
        made = Alloc(len(self.allocs) + 1, "", shape, dtype, space, kind)
        self.allocs.append(made)
        return made

    def shape(self, spec: declare.Tile) -> tuple[int, ...]:
        words = ("P", "F*") if spec.dims == ("*",) else spec.dims
        sizes: list[int] = []
        for word in words:
            name = word.rstrip("*")
            size = int(name) if name.isdigit() else SIZES[name]
            several = word.endswith("*") and self.call.free and prod(self.call.free) == size
            sizes += self.call.free if several else [size]
        return tuple(sizes)

    def tile(self, param: Param) -> Access:
        spec, call = param.spec, self.call
        shape = self.shape(spec)
        dtype = call.dtypes.get(param.name) or first_dtype(spec)
        space = next((s for s in (call.space, "sbuf", "psum", "hbm") if s in spec.spaces), spec.spaces[0])
        space = {"hbm": "shared_hbm"}.get(space, space)
        index = call.dynamic.get(param.name, "")
        if index.startswith("rows"):
            made = self.param(param, (ROWS, *shape[1:]), dtype, space)
            tile = whole(self.param(param, (shape[0], 1), "int32", "sbuf", index))
            dims = (Dim(Affine(), (0,) * len(shape), tile), *whole(made).dims[1:])
            return Access(made, dtype, dims, shape)
        if index.startswith("offset"):
            made = self.param(param, (*shape[:-1], shape[-1] + 8), dtype, space)
            tile = whole(self.param(param, (1, 1), "int32", "sbuf", index))
            last = whole(made).dims[-1]
            return Access(made, dtype, (*whole(made).dims[:-1], Dim(last.base, last.strides, tile)), shape)
        if call.window and len(shape) > 1:
            made = self.param(param, tuple(n + 2 if j else n for j, n in enumerate(shape)), dtype, space)
            dims = tuple(Dim(constant(1 if j else 0), d.strides) for j, d in enumerate(whole(made).dims))
            return Access(made, dtype, dims, shape)
        access = whole(self.param(param, shape, dtype, space))
        if call.zero == param.name:
            access = replace(access, mask=(Pred(constant(shape[0] - 4), (-1,) + (0,) * (len(shape) - 1)),))
        return access

    def param(self, param: Param, shape: tuple[int, ...], dtype: str, space: str, role: str = "") -> Alloc:
        made = self.alloc(shape, dtype, space, "param")
        self.params.append(made)
        self.roles[made] = param, role
        if param.spec.writes and not role:
            self.written.append(made)
        return made

    def operand(self, param: Param) -> Any:
        spec, call = param.spec, self.call
        if isinstance(spec, declare.Tile):
            if param.name not in call.values:
                return self.tile(param)
            value = call.values[param.name]
            return variable(self.var) if value == "i" else value
        if isinstance(spec, declare.Register):
            rows = max([SIZES["P"], *(p.shape[0] for p in self.params)]) if spec.engine != "rng" else 128
            made = self.alloc((128, 1), "float32", "register", "register")
            self.registers.append(made)
            return Access(made, "float32", (Dim(Affine(), (1, 0)), Dim(Affine(), (0, 1))), (rows, 1))
        if isinstance(spec, declare.Plumbing):
            return None
        grid = (SIZES["P"], *(call.free or (SIZES["F"],)))
        strides = tuple(7 - 5 * j for j in range(len(grid)))
        if isinstance(spec, declare.Index):
            return IndexTile(constant(-20).add(variable(self.var).scale(50)) if call.loop else constant(-20), strides, grid)
        if isinstance(spec, declare.Predicate):
            return PredTile((Pred(constant(-5), strides), Pred(constant(150), tuple(-s for s in strides))), grid)
        value = call.values.get(param.name)
        return variable(self.var) if isinstance(value, str) and value == "i" and isinstance(spec, declare.Affine) else value

    def example(self) -> Example:
        """The kernel. Raises one of `_REFUSED` where the declaration does not accept the call."""
        decl, call = self.decl, self.call
        operands = tuple(self.operand(p) for p in decl.params)
        view = call_view(decl, operands, "", call.result or None)
        results = []
        if decl.results and any(p.spec.kind == "dtype" and p.required for p in decl.params if isinstance(p.spec, declare.Plumbing)):
            view.dtype = call.result or "float32"
        for rule in decl.results:
            shape = rule.shape(view) if callable(rule.shape) else getattr(view, rule.shape).shape
            dtype = rule.dtype(view) if callable(rule.dtype) else getattr(view, rule.dtype).dtype
            if getattr(view, "dst", None) is not None and "dst" in decl.index:
                continue
            results.append(whole(self.alloc(tuple(shape), call.result or str(dtype), rule.space, "local")))
        instr = Instr(decl.name, tuple(results), operands, (), "", 0, 3)
        instr = replace(instr, mask=_mask(call.mask, iteration_shape(decl, instr)))
        masked = tuple(instr.mask or None if p.name == "mask" else v for p, v in zip(decl.params, operands, strict=True))
        check_instr(replace(instr, operands=masked), resolve(TARGET))  # some masks are refused
        body: list[Any] = [r.alloc for r in results]
        body.append(For(self.var, 3, "sequential", [instr]) if call.loop else instr)
        outputs = [*results, *(whole(a) for a in self.registers)]
        kernel = Kernel(decl.name, self.params, body, outputs, target=TARGET, written_params=self.written)
        rng = np.random.default_rng([len(call.what), len(decl.name)])
        return Example(decl.name, call.what, kernel, [self.data(a, rng) for a in self.params])

    def data(self, alloc: Alloc, rng: np.random.Generator) -> np.ndarray:
        param, role = self.roles[alloc]
        if role:
            low, high = (-4, ROWS + 4) if role.endswith("outside") else (0, ROWS if role.startswith("rows") else 9)
            found = rng.integers(low, high, alloc.shape)
            return (rng.permutation(ROWS)[: alloc.shape[0], None] if role == "rows once" else found).astype(np.int32)
        return values_of(alloc.dtype, alloc.shape, rng, bool(param.spec.dtypes <= {"uint16", "uint32"}))


_HARD = (np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-40, -1e-45, 3e38, -3e38, 65504.0, 1e-8)


def values_of(dtype: str, shape: tuple[int, ...], rng: np.random.Generator, small: bool = False) -> np.ndarray:
    """An array of a dtype: numbers that often meet each other, and among floats what is hard; `small`: positions."""
    storage = dtypes.storage(dtype)
    if dtype in declare.INTS:
        if dtype == "bool" or small:
            return rng.integers(0, 2 if dtype == "bool" else 28, shape).astype(storage)
        info = np.iinfo(storage)
        wide = rng.integers(info.min, info.max, shape, endpoint=True)
        return np.where(rng.random(shape) < 0.5, rng.integers(0, 5, shape), wide).astype(storage)
    made = np.where(rng.random(shape) < 0.5, rng.integers(-6, 7, shape) / 2, rng.standard_normal(shape) * 3)
    hard = rng.choice(_HARD, shape)
    made = np.where(rng.random(shape) < 0.03, hard, made).astype(np.float32)
    return dtypes.from_float32(made, dtype)


def first_dtype(spec: declare.Tile) -> str:
    """The dtype that a tile has in the first call."""
    return next((d for d in _FIRST if d in spec.dtypes), min(spec.dtypes))


def _mask(kind: str, shape: tuple[int, ...]) -> tuple[Pred, ...]:
    """A mask of the iteration space: of its first or last axis, of both at once (diagonal), always or never true."""
    rank = len(shape)
    if not kind or not rank:
        return ()

    def along(axis: int, step: int) -> tuple[int, ...]:
        return tuple(step if j == axis % rank else 0 for j in range(rank))

    diagonal = tuple(1 if j == 0 else -1 if j == rank - 1 else 0 for j in range(rank))
    return {
        "rows": (Pred(constant(shape[0] - 6), along(0, -1)), Pred(constant(-2), along(0, 1))),
        "columns": (Pred(constant(shape[-1] - 4), along(-1, -1)),),
        "columns inside": (Pred(constant(shape[-1] - 4), along(-1, -1)), Pred(constant(-3), along(-1, 1))),
        "middle": (Pred(constant(-1), along(1, 1)),),
        "diagonal": (Pred(constant(2), diagonal),),
        "diagonal of rows": (Pred(constant(2), diagonal), Pred(constant(shape[0] - 6), along(0, -1))),
        "never": (Pred(constant(-1), (0,) * rank),),
        "nothing": (Pred(constant(-1), along(0, -1)),),
    }[kind]


MASKS = ("rows", "columns", "columns inside", "diagonal", "diagonal of rows", "never", "nothing")


# ---- calls --------------------------------------------------------------------------------------------------------------


def _candidates(spec: Any) -> list[Any]:
    """Values of a parameter that has to be given."""
    if isinstance(spec, declare.Op):
        return sorted(spec.names, key=lambda n: (n not in ("add", "exp", "maximum"), n))
    if isinstance(spec, declare.Affine):
        return [(3, *range(31))] if spec.many else [0]
    if isinstance(spec, declare.Attr):
        if spec.choices:
            return list(spec.choices)
        grid = (SIZES["P"], SIZES["F"])
        found: list[Any] = []
        if tuple in spec.types or list in spec.types:
            found += [grid, (1,), (0.5,), ()]
        found += [v for t, v in ((int, SIZES["P"]), (int, 1), (float, 0.5), (bool, True), (str, "x")) if t in spec.types]
        return found or [None]
    return [None]


def _first(decl: Instruction) -> Call | None:
    """A call that the declaration accepts."""
    fixed: dict[str, Any] = {}
    open_: dict[str, list[Any]] = {}
    for p in decl.params:
        spec = p.spec
        if isinstance(spec, declare.Tile):
            if not p.required and not spec.writes and (spec.optional or spec.scalar):
                fixed[p.name] = p.default
            elif spec.optional and not p.required:
                fixed[p.name] = None
            elif spec.scalar:
                open_[p.name] = [0.5, 3]
        elif not isinstance(spec, (declare.Register, declare.Plumbing, declare.Index, declare.Predicate)):
            if p.required:
                open_[p.name] = _candidates(spec)
            else:
                fixed[p.name] = int(p.default) if isinstance(p.default, int) and not isinstance(p.default, bool) else p.default
                if callable(p.default):
                    fixed[p.name] = next(iter(sorted(spec.names)), None)
    integers = {p.name: "int32" for p in decl.params if isinstance(p.spec, declare.Tile) and "int32" in p.spec.dtypes}
    for choice in product(*open_.values()):
        for kinds in ({}, integers):
            call = Call(decl, "plain", kinds, {**fixed, **dict(zip(open_, choice, strict=True))})
            if accepted(call):
                return call
    return None


def accepted(call: Call) -> Example | None:
    """The example of a call, None where the declaration refuses it."""
    try:
        return _Builder(call).example()
    except _REFUSED:
        return None


def calls(decl: Instruction) -> Iterator[Call]:
    """The calls of an instruction: a first one, and those that differ from it in one thing."""
    base = _first(decl)
    if base is None:
        return
    yield base
    tiles = [p for p in decl.params if isinstance(p.spec, declare.Tile)]
    present = [p for p in tiles if p.name not in base.values]

    def but(what: str, **changes: Any) -> Call:
        return replace(base, what=what, **changes)

    def given(**values: Any) -> dict[str, Any]:
        return {**base.values, **values}

    def without(name: str) -> dict[str, Any]:
        return {k: v for k, v in base.values.items() if k != name}

    integers = {p.name: "int32" for p in tiles if "int32" in p.spec.dtypes}
    for p in decl.params:
        if isinstance(p.spec, declare.Op):
            for name in sorted(p.spec.names):
                unit = {o.name: 5 for o in tiles if o.name in base.values and o.spec.scalar and isinstance(base.values[o.name], float)}
                yield but(f"{p.name}={name}", values=given(**{p.name: name}))
                for o in tiles:
                    if base.values.get(o.name, 0) is None and o.spec.scalar:
                        yield but(f"{p.name}={name}, {o.name}=0.5", values=given(**{p.name: name, o.name: 0.5}))
                        kept = {k: v for k, v in given(**{p.name: name}).items() if k != o.name}
                        yield but(f"{p.name}={name}, {o.name} tile", values=kept)
                        yield but(f"{p.name}={name}, {o.name} tile, int32", values=kept, dtypes=integers)
                if SCALAR[name].group == "bitvec" or SCALAR[name].exact_int is not None:
                    yield but(f"{p.name}={name} int32", values=given(**{p.name: name}, **unit), dtypes=integers)
                    yield but(f"{p.name}={name} uint8", values=given(**{p.name: name}, **unit), dtypes=dict.fromkeys(integers, "uint8"))
        elif isinstance(p.spec, declare.Attr):
            for value in [v for v in (p.spec.choices or _candidates(p.spec)) if v != base.values.get(p.name)]:
                yield but(f"{p.name}={value}", values=given(**{p.name: value}))
        elif isinstance(p.spec, declare.Affine):
            if not p.spec.many:
                yield but(f"{p.name}=i", values=given(**{p.name: "i"}), loop=True)
    for dtype in _DTYPES:
        yield but(f"all {dtype}", dtypes={**base.dtypes, **{p.name: dtype for p in tiles if dtype in p.spec.dtypes}})
        yield but(f"result {dtype}", result=dtype)
        yield but(f"all int32, result {dtype}", result=dtype, dtypes=integers)
        yield but(f"all uint32, result {dtype}", result=dtype, dtypes=dict.fromkeys(integers, "uint32"))
        for p in present:
            if dtype in p.spec.dtypes and len(present) > 1:
                yield but(f"{p.name} {dtype}", dtypes={**base.dtypes, p.name: dtype})
    for p in tiles:
        if p.name in base.values:
            yield but(f"{p.name} tile", values=without(p.name))
            yield but(f"{p.name} bfloat16 tile", values=without(p.name), dtypes={**base.dtypes, p.name: "bfloat16"})
            yield but(f"{p.name}=i", values=given(**{p.name: "i"}), loop=True)
        if p.spec.operand_mask:
            yield but(f"{p.name} masked", zero=p.name)
        if p.spec.indirect:
            for kind in ("rows", "rows once", "offset", "rows outside"):
                yield but(f"{p.name} by {kind}", dynamic={p.name: kind})
                for q in decl.params:
                    if isinstance(q.spec, declare.Op) and q.spec.optional:
                        yield but(f"{p.name} by {kind}, {q.name}", dynamic={p.name: kind}, values=given(**{q.name: min(q.spec.names)}))
                    if isinstance(q.spec, declare.Attr) and len(q.spec.choices) == 2 and kind.endswith("outside"):
                        yield but(f"{p.name} by {kind}, {q.name}", dynamic={p.name: kind}, values=given(**{q.name: q.spec.choices[1]}))
                for mask in ("rows", "columns", "diagonal"):
                    yield but(f"{p.name} by {kind}, mask of {mask}", dynamic={p.name: kind}, mask=mask)
    yield but("window", window=True)
    yield but("loop", loop=True)
    yield but("three dimensions", free=(2, 12))
    yield but("four dimensions", free=(2, 3, 4))
    yield but("psum", space="psum")
    yield but("hbm", space="hbm")
    if any(isinstance(p.spec, declare.Plumbing) and p.spec.kind == "mask" for p in decl.params):
        forms = [("", base), (" three dimensions", but("", free=(2, 12))), (" window", but("", window=True))]
        forms += [(f" {p.name} tile", but("", values=without(p.name))) for p in tiles if p.name in base.values]
        forms += [(f" {p.name}={v}", but("", values=given(**{p.name: v}))) for p in decl.params if isinstance(p.spec, declare.Attr)
                  for v in p.spec.choices]  # fmt: skip
        for mask in MASKS:
            for what, form in forms:
                yield replace(form, what=f"mask of {mask}{what}", mask=mask)
        yield replace(forms[1][1], what="mask of middle three dimensions", mask="middle")


def examples(op: str) -> Iterator[Example]:
    """The examples of an instruction that its declaration accepts."""
    for call in calls(ISA[op]):
        found = accepted(call)
        if found is not None:
            yield found
