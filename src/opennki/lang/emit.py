"""Emission: how a Python call of an instruction becomes a node of the IR.

One function for every instruction: arguments are bound to the declaration, tensors become accesses, the declaration is checked (the
error points at the user's line), result tiles are made, and the statement is appended to the current builder.
"""
from __future__ import annotations

import enum
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from opennki.errors import NkiTypeError, NkiValueError, make
from opennki.ir import affine as aff
from opennki.ir.affine import Pred
from opennki.ir.build import Builder, Forwarded, current
from opennki.ir.nodes import Access, IndexTile, Instr, PredTile
from opennki.ir.verify import call_view, check_operands, check_result, describe, result_shape, results_of
from opennki.isa import dtypes, scalar
from opennki.isa.declare import ISA, Affine, Attr, Index, Instruction, Op, Param, Plumbing, Predicate, Register, Result, Tile
from opennki.isa.enums import ENGINE_NAMES, engine
from opennki.lang import view
from opennki.lang.index import Condition, Mask
from opennki.lang.index import Index as IndexExpr
from opennki.lang.masks import aligned, contracted, mask_preds
from opennki.lang.ranges import Grid
from opennki.lang.tensor import Tensor


class Form:
    """What of a declaration does not change from call to call: the operands of arguments that are not given, and where things are."""

    __slots__ = ("decl", "defaults", "dtype", "masked", "positional", "registers", "required", "spread", "variadic")

    def __init__(self, decl: Instruction) -> None:
        self.decl = decl
        self.positional = tuple([p.name for p in decl.params if not p.keyword_only])
        self.required = tuple([p.name for p in decl.params if p.required and not isinstance(p.spec, Register)])
        self.variadic = any(p.kind is p.VAR_KEYWORD for p in decl.signature.parameters.values())
        self.registers = tuple([(i, p.spec.engine) for i, p in enumerate(decl.params) if isinstance(p.spec, Register)])
        self.spread = tuple([i for i, p in enumerate(decl.params) if isinstance(p.spec, Tile) and p.spec.spread])
        self.masked = sum(isinstance(p.spec, Tile) and p.spec.operand_mask for p in decl.params)
        self.dtype: str | None = None
        self.defaults = tuple([None if p.required else self._default(p) for p in decl.params])

    def _default(self, p: Param) -> Any:
        spec, value = p.spec, p.default
        if isinstance(spec, Op):
            return _operator(self.decl, p.name, spec, value)
        if isinstance(spec, Plumbing):
            if spec.kind == "dtype" and value is not None:
                self.dtype = dtype_name(value)
            return None
        if isinstance(spec, Register):
            return None
        return _affine(value, p.name) if isinstance(spec, Affine) else _constant(value)


_forms: dict[str, Form] = {}


def _form(decl: Instruction) -> Form:
    form = _forms.get(decl.name)
    if form is None or form.decl is not decl:
        form = _forms[decl.name] = Form(decl)
    return form


def bind(decl: Instruction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by parameter name; unknown names of plumbing-free extras are errors."""
    form = _form(decl)
    positional = form.positional
    if len(args) > len(positional):
        raise NkiTypeError(f"{decl.name} takes {len(positional)} positional arguments, {len(args)} were given",
                           rule=f"the signature is {decl.name}{decl.signature}")
    given = dict(zip(positional, args, strict=False))
    index = decl.index
    for name, value in kwargs.items():
        if name not in index:
            if form.variadic and name in _IGNORED:
                continue
            raise NkiTypeError(f"{decl.name} has no argument {name!r}", rule=f"the signature is {decl.name}{decl.signature}")
        if name in given:
            raise NkiTypeError(f"{decl.name} got {name!r} twice", rule=f"the signature is {decl.name}{decl.signature}")
        given[name] = value
    for name in form.required:
        if name not in given:
            raise NkiTypeError(f"{decl.name} needs {name!r}", rule=f"the signature is {decl.name}{decl.signature}")
    return given


# keywords that vendor kernels pass through **kwargs and that change nothing in what is computed
_IGNORED = frozenset({"name", "lazy_initialization", "no_reorder", "loc", "dge_mode", "perf_mode", "lowering", "nki_name", "buffer"})


def tile_access(value: Tensor, what: str, builder: Builder) -> Access:
    """The access of a tensor operand: scope, block dimensions and forwarded temporaries are dealt with."""
    access = value.access
    alloc = access.alloc
    if alloc.id in builder.forwarded:
        builder.keep(alloc)
    if not builder.open_allocs(alloc):
        raise make("err_local_variable_used_out_of_scope", f"{what} uses {value.describe()}, made at {alloc.loc}")
    if value.block:
        raise make("err_failed_to_infer_tile_from_local_tensor",
                   f"{what} is {value.describe()}, whose dimension {value.block} is the partition dimension")
    if value.on_chip and len(access.shape) < 2:
        access = view.reshape(access, access.shape + (1,) * (2 - len(access.shape)))
    return access


def _constant(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, enum.IntEnum):
        return int(value)
    if isinstance(value, np.ndarray) and value.ndim == 0:
        return value.item()
    if isinstance(value, list):
        return tuple(_constant(v) for v in value)
    if isinstance(value, tuple):
        return tuple(_constant(v) for v in value)
    if isinstance(value, IndexExpr):
        return value.__index__()
    return value


def _affine(value: Any, what: str) -> Any:
    if isinstance(value, IndexExpr):
        if value.shape:
            raise NkiTypeError(f"{what} is an nl.arange expression", rule=f"{what} is an integer or a loop index expression")
        return value.base if value.base.terms else value.base.const
    if isinstance(value, (tuple, list)):
        return tuple(_affine(v, what) for v in value)
    return _constant(value)


def dtype_name(value: Any) -> str:
    """Canonical name of a dtype argument."""
    try:
        return dtypes.canonical(value)
    except TypeError as exc:
        raise NkiTypeError(str(exc), rule="a dtype is one of nl.float32, nl.bfloat16, ..., or its NumPy equivalent") from None


def engine_name(value: Any, decl: Instruction) -> str:
    """Engine that a user asks for ('' for unknown)."""
    if value is None:
        return ""
    if isinstance(value, int):
        return ENGINE_NAMES.get(engine(int(value)), "")
    name = getattr(value, "name", str(value))
    if name in ("unknown", ""):
        return ""
    if name not in ("tensor", "vector", "scalar", "gpsimd", "sync", "dma"):
        raise NkiTypeError(f"{decl.name}: engine is {value!r}", rule="an engine is a member of nisa.engine")
    return name


class Arguments:
    """The arguments of one call as operands, bound one by one."""

    __slots__ = ("bounds", "builder", "decl", "dtype", "engine", "loc", "mask", "operands", "partitions", "under")

    def __init__(self, form: Form, builder: Builder, loc: int) -> None:
        self.decl, self.builder, self.loc = form.decl, builder, loc
        self.operands: list[Any] = list(form.defaults)
        self.bounds: list[tuple[Tensor, str]] = []
        self.mask: Any = None  # what was passed
        self.under: tuple[Pred, ...] = ()  # conditions on operands, t[i < n], that narrow the whole instruction
        self.dtype = form.dtype
        self.engine = ""
        self.partitions = 1

    def bind(self, name: str, value: Any) -> None:
        """Bind one argument."""
        i = self.decl.index[name]
        spec = self.decl.params[i].spec
        if isinstance(spec, Tile):
            self.operands[i] = self._tile(name, spec, value)
        elif isinstance(spec, Op):
            self.operands[i] = _operator(self.decl, name, spec, value)
        elif isinstance(spec, Attr):
            self.operands[i] = _constant(value)
        elif isinstance(spec, Plumbing):
            self._plumbing(spec.kind, value)
        elif isinstance(spec, Affine):
            self.operands[i] = _affine(value, name)
        elif isinstance(spec, Index):
            self.operands[i] = _index_tile(self.decl.name, name, value)
        elif isinstance(spec, Predicate):
            self.operands[i] = _pred_tile(self.decl.name, name, value)

    def _tile(self, name: str, spec: Tile, value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.access.alloc.id in self.builder.turned and "psum" not in spec.spaces and not spec.writes:
                value = _in_sbuf(value)
            access = tile_access(value, f"{self.decl.name}: {name}", self.builder)
            if access.mask and not spec.operand_mask and not any(any(p.strides) for p in access.mask):
                self.under += access.mask
                access = replace(access, mask=())
            if access.shape and access.shape[0] > self.partitions:
                self.partitions = access.shape[0]
            if value.bounds:
                self.bounds.append((value, name))
            if spec.writes:
                _record_write(self.builder, value, self.loc)
            return access
        if value is None or isinstance(value, (int, float)):
            return value
        if isinstance(value, IndexExpr) and spec.scalar:
            return _affine(value, name)
        if spec.scalar and _constant(value) is not value:
            return _constant(value)
        if isinstance(value, np.ndarray):
            raise NkiTypeError(f"{self.decl.name}: {name} is a NumPy array", rule="an operand is a tile",
                               fix="pass the array as an argument of the kernel, or embed it with nl.shared_constant, and nl.load it")
        return value  # the verifier says what is wrong with it

    def _plumbing(self, kind: str, value: Any) -> None:
        if kind == "mask":
            self.mask = value
        elif kind == "dtype":
            self.dtype = None if value is None else dtype_name(value)
        elif kind == "engine":
            self.engine = engine_name(value, self.decl)

    def finish(self, form: Form) -> tuple[Any, ...]:
        """The operands, with registers and broadcast vectors."""
        if form.masked > 1:
            contracted(self.decl, self.operands)
        if len(form.spread) > 1:
            _spread(form.spread, self.operands)
        for i, file in form.registers:
            lanes = self.builder.target.partitions if file == "rng" else self.partitions
            self.operands[i] = self.builder.register(file, lanes)
        return tuple(self.operands)


def call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], into: Tensor | None = None, temporary: bool = True) -> Any:
    """Append one instruction. Returns its result tensor (a tuple of several, None of none). `into` is a tensor that receives the result
    instead of a new tile.
    """
    builder = current()
    decl = ISA[name]
    form = _form(decl)
    given = bind(decl, args, kwargs)
    loc = builder.here()
    bound = Arguments(form, builder, loc)
    for argument, value in given.items():
        bound.bind(argument, value)
    frozen = bound.finish(form)
    dtype, engine, bounds = bound.dtype, bound.engine, bound.bounds
    where = builder.loc(loc)
    check_operands(decl, frozen, builder.target, engine, where, dtype)
    call_info = call_view(decl, frozen, engine, dtype)
    if not engine:
        engine = decl.choose_engine(call_info, builder.target) if decl.choose_engine else decl.engines[0]
        call_info.engine = engine
    _check_explicit(decl, frozen, engine, builder, where)
    iteration = _iteration_shape(decl, call_info, frozen)
    given_mask = aligned(decl, bound.operands, bound.mask, bound.under, call_info, iteration)
    preds = builder.undecided(given_mask, iteration)
    for value, what in bounds:
        if given_mask or builder.guarded or value.access.mask:
            continue
        view.outside(value.bounds, value.name, f"{name}: {what}, {value.describe()}", where)
    results = _results(decl, call_info, builder, dtype, into, loc, where)
    instr = Instr(name, tuple(r.access for r in results), frozen, preds, engine, loc,
                  builder.call_number(loc) if decl.random else 0)
    builder.instr(instr)
    if decl.collective:
        builder.has_collectives = True
    if preds:
        for r in results:
            if into is None:
                r.mask = _result_mask(decl, call_info, preds, r.shape)
    if not results:
        return None
    return results[0] if len(results) == 1 else tuple(results)


def _check_explicit(decl: Instruction, operands: tuple[Any, ...], engine: str, builder: Builder, where: Any) -> None:
    """Whoever places tensors directly also makes the tiles that the compiler would add: the zero bias of an activation, and the identity
    of a transposition on the Tensor Engine.
    """
    code = ""
    if decl.family == "activation" and operands[decl.index["bias"]] is None and (
            operands[decl.index["op"]] != "reciprocal" or builder.target.generation > 2):
        code = "err_bias_tensor_must_be_specified_in_allocation"
    elif decl.family == "transpose" and engine == "tensor":
        code = "err_transpose_on_tensor_engine_not_allowed_in_allocated_kernel"
    if code:
        builder.not_allocated_directly(code, f"{decl.name} in a directly allocated kernel", where)


def _in_sbuf(value: Tensor) -> Tensor:
    """A transposed tile that no instruction has moved yet, as operand of one that does not read PSUM: the compiler copies it."""
    if value.access.space != "psum":
        return value
    a = value.access
    plain = Tensor(Access(a.alloc, a.dtype, a.dims, a.shape, a.view), value.block, value.bounds, value.mask)
    copied = call("tensor_copy", (plain,), {"mask": Mask(value.mask, a.shape) if value.mask else None})
    if not a.mask:
        return copied  # type: ignore[no-any-return]
    b = copied.access
    return Tensor(Access(b.alloc, b.dtype, b.dims, b.shape, b.view, a.mask))


def _spread(candidates: tuple[int, ...], operands: list[Any]) -> None:
    """Give `spread` operands of one element per partition the shape of the others."""
    places = [i for i in candidates if isinstance(operands[i], Access)]
    if len(places) < 2:
        return
    shape = max((operands[i].shape for i in places), key=prod)
    for i in places:
        tile = operands[i]
        if tile.shape != shape and tile.size == tile.shape[0] == shape[0]:
            column = view.reshape(tile, (shape[0],) + (1,) * (len(shape) - 1))
            operands[i] = view.broadcast(column, shape)


def _operator(decl: Instruction, what: str, spec: Op, value: Any) -> str | None:
    if value is None:
        return None
    try:
        resolved = scalar.resolve(value)
    except TypeError as exc:
        raise NkiTypeError(f"{decl.name}: {what}: {exc}",
                           rule="an operator is a function of nl or the NumPy ufunc of the same meaning") from None
    return resolved


def _index_tile(name: str, what: str, value: Any) -> IndexTile:
    if isinstance(value, Grid) and len(value) == 1:
        value = value[0]
    if not isinstance(value, IndexExpr):
        raise NkiTypeError(f"{name}: {what} is {type(value).__name__}", rule=f"{what} is an expression of nl.arange and loop indices")
    if len(value.shape) == 1:
        raise make("err_1d_arange_not_supported", f"{name}: {what} has one dimension")
    shape = value.shape or (1, 1)
    return IndexTile(value.base, value.strides or (0,) * len(shape), shape)


def _pred_tile(name: str, what: str, value: Any) -> PredTile:
    if isinstance(value, Condition):
        preds = value.as_preds()
        value = Mask(preds, ()) if preds is not None else bool(value)
    if isinstance(value, (bool, np.bool_)):
        value = Mask((Pred(aff.constant(0 if value else -1)),), ())
    if not isinstance(value, Mask):
        raise NkiTypeError(f"{name}: {what} is {type(value).__name__}", rule=f"{what} is a comparison of index expressions")
    return PredTile(value.preds, value.shape)


def _iteration_shape(decl: Instruction, info: Any, operands: tuple[Any, ...]) -> tuple[int, ...]:
    if decl.mask_on:
        value = getattr(info, decl.mask_on)
        return value.shape if value is not None else ()
    for r in decl.results:
        if getattr(info, "dst", None) is None:
            return result_shape(r, info)
    for p, value in zip(decl.params, operands, strict=True):
        if isinstance(p.spec, Tile) and p.spec.writes and isinstance(value, Access):
            return value.shape
    return next((v.shape for v in operands if isinstance(v, Access)), ())


def _result_mask(decl: Instruction, info: Any, preds: tuple[Pred, ...], shape: tuple[int, ...]) -> tuple[Pred, ...]:
    """Predicates under which the elements of a result are defined."""
    order = decl.masked_dims("result", info)
    out = []
    for p in preds:
        if order is None and not decl.mask_on:
            out.append(p)
            continue
        order_ = order if order is not None else (0, *(None for _ in shape[1:]))
        kept = {i for i in order_ if i is not None}
        if any(s for i, s in enumerate(p.strides) if s and i not in kept):
            continue
        strides = tuple(p.strides[i] if i is not None and i < len(p.strides) else 0 for i in order_)
        out.append(Pred(p.expr, (strides + (0,) * len(shape))[:len(shape)]))
    return tuple(out)


def _results(decl: Instruction, info: Any, builder: Builder, dtype: str | None, into: Tensor | None, loc: int,
             where: Any) -> list[Tensor]:
    made: list[Tensor] = []
    for number, spec in enumerate(results_of(decl, info)):
        shape = result_shape(spec, info)
        if into is not None and number == 0:
            if into.shape != shape:
                raise NkiValueError(f"{decl.name}: the result has shape {shape}, the destination {into.shape}", loc=where,
                                    rule="an instruction writes a tile of the shape of its result")
            access = tile_access(into, f"{decl.name}: destination", builder)
            check_result(decl, spec, access, builder.target, where)
            _record_write(builder, into, loc)
            made.append(into)
            continue
        kind = dtype if dtype is not None and number == 0 else _dtype_of(spec, info)
        alloc = builder.alloc(shape, kind, spec.space, loc=loc, temporary=True)
        tensor = Tensor.of(alloc)
        if decl.family == "transpose":
            builder.turned.add(alloc.id)
        check_result(decl, spec, tensor.access, builder.target, where)
        made.append(tensor)
    return made


def _dtype_of(spec: Result, info: Any) -> str:
    return getattr(info, spec.dtype).dtype if isinstance(spec.dtype, str) and hasattr(info, spec.dtype) else (
        spec.dtype if isinstance(spec.dtype, str) else spec.dtype(info))


def _record_write(builder: Builder, value: Tensor, loc: int) -> None:
    alloc = value.access.alloc
    if alloc.kind == "constant":
        raise make("err_cannot_update_immutable_parameter", f"a write to the constant {value.describe()}",
                   fix="copy it to a tensor of your own")
    builder.writes.setdefault(alloc.id, loc)


def redirect(source: Tensor, into: Tensor) -> bool:
    """Let the instruction that has just made the temporary `source` write to `into` instead; True if that is the same thing.

    The temporary stays available: if it is used later, it is made again and copied.
    """
    builder = current()
    if not builder.forwarding:
        return False
    instr = builder.last_instr()
    access, target = source.access, into.access
    if instr is not None and instr.op == "dma_copy":
        return _redirect_load(builder, instr, source, into)
    if instr is None or len(instr.results) != 1:
        return False
    made = instr.results[0]
    if made is not access and not (made.alloc is access.alloc and access.is_whole):
        return False
    decl = ISA[instr.op]
    spec = decl.results[0]
    same_dtype = made.dtype == target.dtype or (made.dtype == "float32" and not decl.raw(call_view(decl, instr.operands, instr.engine)))
    if (made.alloc.kind != "local" or not made.is_whole or made.alloc.name or made.shape != target.shape or not same_dtype
            or target.space not in spec.spaces or target.mask or made.alloc.id in builder.forwarded
            or (instr.engine == "gpsimd" and target.space == "psum") or into.block):
        return False
    copied = Instr("tensor_copy", (target,), _copy_operands(made), instr.mask if not decl.mask_on else source.mask, "vector", instr.loc)
    nodes, index = builder.replace_last(Instr(instr.op, (target,), instr.operands, instr.mask, instr.engine, instr.loc, instr.call))
    builder.forwarded[made.alloc.id] = Forwarded(nodes, index, lambda: [instr, copied])
    return True


def _redirect_load(builder: Builder, instr: Instr, source: Tensor, into: Tensor) -> bool:
    """Let the DMA of an nl.load write to `into`: the DMA engines cast as a copy of the tile would."""
    index = ISA["dma_copy"].index
    made, loaded, target = instr.operands[index["dst"]], instr.operands[index["src"]], into.access
    if (made.alloc is not source.access.alloc or made.alloc.kind != "local" or made.alloc.name or made.alloc.space != "sbuf"
            or not made.is_whole or not source.access.is_whole or made.shape != target.shape or target.space != "sbuf" or target.mask
            or made.dtype not in (target.dtype, loaded.dtype) or made.alloc.id in builder.forwarded or into.block):
        return False
    copied = Instr("tensor_copy", (target,), _copy_operands(made), instr.mask, "vector", instr.loc)
    operands = list(instr.operands)
    operands[index["dst"]] = target
    nodes, place = builder.replace_last(Instr(instr.op, (), tuple(operands), instr.mask, instr.engine, instr.loc))
    builder.forwarded[made.alloc.id] = Forwarded(nodes, place, lambda: [instr, copied])
    return True


def _copy_operands(source: Access) -> tuple[Any, ...]:
    decl = ISA["tensor_copy"]
    operands: list[Any] = [None] * len(decl.params)
    operands[decl.index["src"]] = source
    return tuple(operands)


__all__ = ["bind", "call", "describe", "dtype_name", "engine_name", "mask_preds", "redirect", "tile_access"]
