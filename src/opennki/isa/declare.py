"""One declaration per instruction; every consumer reads the same record.

A declaration is an annotated NumPy function with the user-facing signature of the instruction:

* parameters annotated with `In`, `Out` or `InOut` are tiles; the annotation states the memories, the dimensions and the
  dtypes (`Annotated[Array, In("P F*")]`);
* `Op` parameters name a scalar function (`isa.scalar.SCALAR`), `Index` and `Predicate` take affine expressions,
  `Attr` is a compile-time constant, `Affine` a constant that may depend on loop indices;
* `mask`, `dtype`, `engine` and `**kwargs` are plumbing (`Mask`, `DType`, `EngineChoice`): the tracer uses them, the body
  does not (except `mask` where `mask_on` names an operand);
* the body is the reference meaning: it gets arrays and returns the values of the results, then of the `Out` and `InOut`
  parameters, in this order (one value or a tuple; None where an optional output is absent);
* the docstring is the documentation.

The decorator adds what Python cannot say: engine, results, limits with reasons, cost, executor family, source.

Dimensions of a tile are written as words: `P F*` is partition and any free dimensions (the array arrives in the shape of the
instruction's iteration space), `P 1` one element per partition (arrives as (P, 1, ...) so that it broadcasts), `K M` two
dimensions (free dimensions arrive flattened), `*` anything, as it is. A name binds the size wherever it occurs; `F*` binds `F`,
the number of elements per partition.

Values: a tile arrives as float32 unless the instruction is `raw` (then in its storage dtype); a result is rounded once to the dtype
of its tile (`isa.dtypes.writer`). A body never changes its inputs.
"""
from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, get_type_hints

import numpy as np

from opennki.isa.meeting import BETWEEN_RANKS, Meets

Array = np.ndarray
FLOATS = frozenset({"float32", "float16", "bfloat16", "float8_e4m3", "float8_e4m3fn", "float8_e5m2", "tfloat32", "float32r"})
INTS = frozenset({"int32", "uint32", "int16", "uint16", "int8", "uint8", "bool"})
NUMERIC = FLOATS | INTS
SBUF, PSUM = ("sbuf",), ("psum",)
ON_CHIP = ("sbuf", "psum")
ANYWHERE = ("sbuf", "psum", "hbm")


@dataclass(frozen=True, slots=True)
class Tile:
    """What a tile operand must be. `spaces` are memories (hbm stands for every kind of HBM); `scalar`: a number will do;
    `optional`: None will do; `indirect`: runtime indices are allowed; `operand_mask`: `t[mask]` is allowed; `when`: an InOut tile is
    read only when this parameter is given and not False, or when this function of the call is true; `shape_code`: documented error
    code of a tile of another form.
    """

    role: str
    dims: tuple[str, ...]
    spaces: tuple[str, ...] = ON_CHIP
    dtypes: frozenset[str] = NUMERIC
    scalar: bool = False
    optional: bool = False
    indirect: bool = False
    operand_mask: bool = False
    when: Any = ""
    spread: bool = False
    shape_code: str = ""

    @property
    def reads(self) -> bool:
        """True when the instruction reads the tile."""
        return self.role in ("in", "inout")

    @property
    def writes(self) -> bool:
        """True when the instruction writes the tile."""
        return self.role in ("out", "inout")


def _tile(role: str, dims: str, spaces: tuple[str, ...], dtypes: Any, options: dict[str, Any]) -> Tile:
    kinds = frozenset(dtypes.split()) if isinstance(dtypes, str) else frozenset(dtypes)
    return Tile(role, tuple(dims.split()), spaces, kinds, **options)


def In(dims: str, spaces: tuple[str, ...] = ON_CHIP, dtypes: Any = NUMERIC, **options: Any) -> Tile:
    """A tile that the instruction reads."""
    return _tile("in", dims, spaces, dtypes, options)


def Out(dims: str, spaces: tuple[str, ...] = ON_CHIP, dtypes: Any = NUMERIC, **options: Any) -> Tile:
    """A tile that the instruction overwrites."""
    return _tile("out", dims, spaces, dtypes, options)


def InOut(dims: str, spaces: tuple[str, ...] = ON_CHIP, dtypes: Any = NUMERIC, **options: Any) -> Tile:
    """A tile that the instruction reads and writes."""
    return _tile("inout", dims, spaces, dtypes, options)


@dataclass(frozen=True, slots=True)
class Op:
    """A scalar function, named as in `isa.scalar.SCALAR`. `names` are those allowed; `optional`: None will do."""

    names: frozenset[str]
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Attr:
    """A compile-time constant. `types` are Python types, `choices` (if any) the legal values."""

    types: tuple[type, ...]
    choices: tuple[Any, ...] = ()
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Affine:
    """An integer that may be an affine expression of loop indices; `many`: a tuple of them."""

    many: bool = False


@dataclass(frozen=True, slots=True)
class Index:
    """An index expression over a tile; the body gets its int64 values."""


@dataclass(frozen=True, slots=True)
class Predicate:
    """A comparison of index expressions over a tile; the body gets its truth values."""


@dataclass(frozen=True, slots=True)
class Plumbing:
    """A parameter for the tracer: `mask`, `dtype`, `engine` or `shape` (of the result)."""

    kind: str


@dataclass(frozen=True, slots=True)
class Register:
    """The accumulator registers of an engine, one float32 per partition: read and written, kept between instructions,
    zero at kernel start. The parameter is keyword-only, default None, hidden from users; the body gets (P, 1, ...) and
    returns the new values after those of all other outputs.
    """

    engine: str


Mask, DType, EngineChoice = Plumbing("mask"), Plumbing("dtype"), Plumbing("engine")
Spec = Tile | Op | Attr | Affine | Index | Predicate | Plumbing | Register


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter of a declaration."""

    name: str
    spec: Any
    default: Any
    keyword_only: bool

    @property
    def required(self) -> bool:
        """True when there is no default."""
        return self.default is inspect.Parameter.empty


@dataclass(frozen=True, slots=True)
class Limit:
    """A bound on a dimension: `at_most` names a field of `isa.target.Target`; `why` is shown to the user."""

    dim: str
    at_most: str
    why: str
    code: str = "err_size_of_dimension_exceed_arch_limit"


PARTITIONS = Limit("P", "partitions", "SBUF and PSUM have 128 partitions", "err_num_partition_exceed_arch_limit")


@dataclass(frozen=True, slots=True)
class Result:
    """A tile that the instruction makes. `shape` and `dtype` are functions of the call (attributes are the arguments:
    tiles with `.shape`, `.dtype`, `.space`, others as given) or the name of the tile parameter to be like.
    `space` is where it is made by default.
    """

    shape: str | Callable[[Any], tuple[int, ...]]
    dtype: str | Callable[[Any], str]
    space: str = "sbuf"
    spaces: tuple[str, ...] = ON_CHIP


@dataclass(frozen=True, slots=True)
class PeWork:
    """What an instruction does in the PE array. `stationary` names the operand that the array holds; `load` are the cycles of
    LoadStationary, `hidden`: they overlap the MultiplyMoving before; `macs`: multiply-accumulates, of a transpose where `transpose`;
    `weight`: their cost in units of those of bfloat16.
    """

    stationary: str
    load: float
    hidden: bool
    macs: int
    transpose: bool
    weight: float


@dataclass(frozen=True, slots=True)
class Instruction:
    """The record of one instruction."""

    name: str
    engines: tuple[str, ...]
    params: tuple[Param, ...]
    results: tuple[Result, ...]
    body: Callable[..., Any]
    limits: tuple[Limit, ...]
    cost: Callable[[Any, Any], float]
    family: str
    raw: Callable[[Any], bool]
    mask_on: str
    mask_dims: Mapping[str, Any]
    check: Callable[[Any, Any], None] | None
    choose_engine: Callable[[Any, Any], str] | None
    meets: Meets | None
    positional: bool
    random: bool
    min_generation: int
    source: str
    doc: str
    signature: inspect.Signature
    surface: str
    index: Mapping[str, int] = field(default_factory=dict)
    pe: Callable[[Any, Any], PeWork] | None = None
    dma_share: Callable[[Any, Any], float] | None = None
    moves: Callable[[Any], tuple[str, ...]] | None = None
    folds: Callable[[Any], str] | None = None
    folding: Callable[[Any, str, Any], Mapping[str, Any]] | None = None
    travel: Callable[[float, Any], list[tuple[float, float]]] | None = None

    @property
    def suspends(self) -> bool:
        """True when a program waits here for others."""
        return self.meets is not None

    @property
    def collective(self) -> bool:
        """True when ranks exchange tensors here."""
        return self.meets in BETWEEN_RANKS

    @property
    def tiles(self) -> tuple[Param, ...]:
        """The tile parameters in declared order."""
        return tuple(p for p in self.params if isinstance(p.spec, Tile))

    def masked_dims(self, name: str, call: Any) -> tuple[int | None, ...] | None:
        """The mask dimension of each dimension of an operand in a call; None where they are the same."""
        found = self.mask_dims.get(name)
        return found(call) if callable(found) else found

    @property
    def outputs(self) -> tuple[Param, ...]:
        """The tile parameters that the instruction writes, in declared order."""
        return tuple(p for p in self.params if isinstance(p.spec, Tile) and p.spec.writes)


ISA: dict[str, Instruction] = {}

_PLAIN = frozenset({type(None), bool, str})  # operands that are themselves, whatever the parameter, unless it is plumbing or a register,
_NUMBERS = _PLAIN | {int, float}  # and where it is no tile
_NONE: frozenset[type] = frozenset()

Arrivals = tuple[bool, list[tuple[int, Param, str, frozenset[type]]]]


def arrivals(decl: Instruction) -> Arrivals:
    """How operands arrive: whether it is the same in every call if tiles are raw and what a mask narrows; and of each parameter that the
    body may get something for (number, parameter, name, types of operands that are themselves)."""
    known = _ARRIVALS.get(decl.name)
    if known is None or known[0] is not decl:
        uniform = decl.raw in (_never, _always) and not any(callable(dims) for dims in decl.mask_dims.values())
        out: list[tuple[int, Param, str, frozenset[type]]] = []
        for number, param in enumerate(decl.params):
            spec = param.spec
            if not isinstance(spec, Plumbing) or spec.kind == "stream" or param.required:
                own = _NONE if isinstance(spec, (Plumbing, Register)) else _PLAIN if isinstance(spec, Tile) else _NUMBERS
                out.append((number, param, param.name, own))
        known = _ARRIVALS[decl.name] = decl, (uniform, out)
    return known[1]


_ARRIVALS: dict[str, tuple[Instruction, Arrivals]] = {}


def _never(_call: Any) -> bool:
    return False


def _always(_call: Any) -> bool:
    return True


def instruction(*, engine: str, cost: Callable[[Any, Any], float], family: str, source: str,
                results: tuple[Result, ...] = (), limits: tuple[Limit, ...] = (PARTITIONS,),
                raw: bool | Callable[[Any], bool] = False, mask_on: str = "",
                mask_dims: Mapping[str, Any] | None = None,
                check: Callable[[Any, Any], None] | None = None,
                choose_engine: Callable[[Any, Any], str] | None = None, meets: Meets | None = None,
                random: bool = False, positional: bool = False, min_generation: int = 2,
                surface: str = "isa", pe: Callable[[Any, Any], PeWork] | None = None,
                dma_share: Callable[[Any, Any], float] | None = None,
                moves: Callable[[Any], tuple[str, ...]] | None = None, folds: Callable[[Any], str] | None = None,
                folding: Callable[[Any, str, Any], Mapping[str, Any]] | None = None,
                travel: Callable[[float, Any], list[tuple[float, float]]] | None = None,
                ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register an annotated NumPy function as an instruction.

    `engine` lists the engines that can run it, the default first; `choose_engine(call, target)` picks one when the user does
    not. `cost(d, hw)` gives cycles of that engine; `d` has the bound dimensions, `d.engine`, `d.dtypes` (by operand).
    `raw(call)` says whether tiles arrive in their storage dtype. `mask_on` names the operand whose dimensions a mask counts
    (default: the iteration space, written elements only); the body then gets `mask` as truth values or None. `positional`: the place of
    an element in that operand has a meaning, so a mask does not narrow it but arrives as truth values.
    `mask_dims` maps an operand to the mask dimension of each of its own (None: not narrowed) where they are not the same, or to a function
    of the call that gives them.
    `meets`: who takes part when a program waits here for others (see `isa.meeting`); the body gets the operands of all members as lists,
    and gives the value for everyone, a list with that of each member, or None for zeros.
    `check(call, target)` raises for rules that the vocabulary cannot say. `surface` is isa, language or internal.
    `pe(d, hw)` says what the instruction does in the PE array, `dma_share(d, hw)` at which share of their rate the DMA engines run it,
    `moves(call)` to which other engines the compiler moves it where the user does not choose (timing only, values do not depend on it).
    `folds(call)`: the operator with which it makes one number of each partition, "" for none; `folding(call, op, tile)`: the operands
    with which an instruction folds its own result into a tile on the way, none where it cannot (timing only, too). `travel`: the ways in
    which a collective's data go over the links between chips (`isa.topology`).
    """
    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        hints = get_type_hints(fn, include_extras=True)
        signature = inspect.signature(fn)
        params = []
        for p in signature.parameters.values():
            if p.kind is inspect.Parameter.VAR_KEYWORD:
                continue
            hint = hints.get(p.name)
            spec = next((m for m in getattr(hint, "__metadata__", ()) if isinstance(m, _SPECS)), None)
            if spec is None:
                raise TypeError(f"{fn.__name__}: parameter {p.name} has no operand annotation")
            params.append(Param(p.name, spec, p.default, p.kind is inspect.Parameter.KEYWORD_ONLY))
        if not fn.__doc__:
            raise TypeError(f"{fn.__name__}: an instruction needs a docstring")
        if fn.__name__ in ISA:
            raise TypeError(f"{fn.__name__} is declared twice")
        rawness = raw if callable(raw) else (_always if raw else _never)
        ISA[fn.__name__] = Instruction(
            fn.__name__, tuple(engine.split()), tuple(params), results, fn, limits, cost, family, rawness, mask_on,
            dict(mask_dims or {}), check, choose_engine, meets, positional, random, min_generation, source,
            textwrap.dedent(fn.__doc__).strip(), _public(signature, params), surface,
            {p.name: i for i, p in enumerate(params)}, pe, dma_share, moves, folds, folding, travel)
        return fn
    return register


def _public(signature: inspect.Signature, params: list[Param]) -> inspect.Signature:
    hidden = {p.name for p in params if isinstance(p.spec, Register) or (isinstance(p.spec, Plumbing) and p.spec.kind == "stream")}
    shown = [p.replace(annotation=inspect.Parameter.empty) for n, p in signature.parameters.items() if n not in hidden]
    return signature.replace(parameters=shown)


_SPECS = (Tile, Op, Attr, Affine, Index, Predicate, Plumbing, Register)

# shorthands for annotations
T = Annotated
Any_ = Any
