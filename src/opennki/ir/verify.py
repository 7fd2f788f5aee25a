"""The verifier: every rule of a declaration, checked on an instruction.

`check_instr` runs when an instruction is traced (the error points at the user's line); `verify` walks a whole kernel, for
instance one that was parsed.
"""
from __future__ import annotations

from enum import IntEnum
from types import SimpleNamespace
from typing import Any

from opennki.errors import Loc, NkiError, NkiTypeError, NkiValueError, make
from opennki.ir.nodes import Access, Alloc, DoWhile, For, If, Instr, Kernel, Stmt
from opennki.isa.declare import ISA, Attr, Instruction, Op, Param, Register, Result, Tile
from opennki.isa.target import Target

_WIDE = frozenset({"float64", "int64", "uint64"})  # arrays of these exist in HBM, no instruction computes with them
MEMORY_NAMES = {"sbuf": "SBUF", "psum": "PSUM", "hbm": "HBM", "register": "a register"}


def describe(access: Access) -> str:
    """Name, shape, dtype and memory of an operand."""
    name = access.alloc.name or repr(access.alloc)
    return f"{name} {access.shape} {access.dtype} in {MEMORY_NAMES[access.space]}"


def call_view(decl: Instruction, operands: tuple[Any, ...], engine: str = "", dtype: str | None = None) -> SimpleNamespace:
    """The call as `check`, `raw`, `Result` and `choose_engine` functions see it; `dtype` is that of the result, if it is known."""
    view = SimpleNamespace()
    view.__dict__.update(zip(decl.index, operands, strict=True))
    view.engine = engine
    view.dtype = dtype
    return view


def _check_tile(decl: Instruction, param: Param, spec: Tile, value: Any, dims: dict[str, int], loc: Loc | None) -> None:
    what = f"{decl.name}: {param.name}"
    if value is None:
        if not spec.optional and param.required:
            raise NkiTypeError(f"{what} is missing", loc=loc, rule=f"the signature is {decl.name}{decl.signature}")
        return
    if not isinstance(value, Access):
        if spec.scalar:
            return
        raise NkiTypeError(f"{what} is {type(value).__name__} {value!r}, expected a tile", loc=loc,
                           rule=f"{param.name} is a tile in {' or '.join(MEMORY_NAMES[s] for s in spec.spaces)}")
    if value.space not in spec.spaces:
        raise make("err_unsupported_memory", f"{what} is in {MEMORY_NAMES[value.space]}, expected "
                   f"{' or '.join(MEMORY_NAMES[s] for s in spec.spaces)}", loc=loc, operand=describe(value))
    if value.dtype not in spec.dtypes:
        raise NkiTypeError(f"{what} is {value.dtype}", loc=loc, operand=describe(value),
                           rule=f"{param.name} is one of {', '.join(sorted(spec.dtypes))}",
                           fix="convert the array before the call, with .astype(np.float32) or np.int32" if value.dtype in _WIDE
                           else "convert the tile with nl.copy(tile, dtype=...)" if value.alloc.on_chip else "")
    if not spec.indirect and any(True for _ in value.dynamic()):
        raise make("err_indirect_indices_are_not_supported_with_nki_api", f"{what} has a runtime index", loc=loc,
                   operand=describe(value), fix="" if value.space == "hbm" else "copy it with nisa.tensor_copy_dynamic_src first")
    if spec.dims != ("*",):
        _bind(decl, param, spec.dims, value, dims, loc)


def _bind(decl: Instruction, param: Param, words: tuple[str, ...], value: Access, dims: dict[str, int], loc: Loc | None) -> None:
    shape = value.shape
    free = 1
    for n in shape[1:]:
        free *= n
    sizes = [shape[0] if shape else 1, free]
    for word, size in zip(words, sizes, strict=False):
        name = word.rstrip("*")
        if name.isdigit():
            if size != int(name) and param.spec.shape_code:
                raise make(param.spec.shape_code,
                           f"{decl.name}: {param.name} is {value.dtype} of shape {shape}, expected [{', '.join(words)}]",
                           loc=loc, operand=describe(value))
            if size != int(name):
                unit = "partitions" if word is words[0] else "elements per partition"
                raise NkiValueError(f"{decl.name}: {param.name} has shape {shape}, expected {name} {unit}",
                                    loc=loc, operand=describe(value), rule=f"{param.name} has the form [{', '.join(words)}]")
            continue
        bound = dims.setdefault(name, size)
        if bound != size:
            if name == "P":
                raise make("err_num_partition_mismatch", f"{decl.name}: {param.name} has {size} partitions, "
                           f"the other operands {bound}", loc=loc, operand=describe(value))
            raise NkiValueError(f"{decl.name}: {param.name} of shape {shape} has {name}={size}, but {name}={bound} in the "
                                "other operands", loc=loc, operand=describe(value),
                                rule=f"{param.name} has the form [{', '.join(words)}]: equal names are equal sizes")


def _check_value(decl: Instruction, param: Param, value: Any, loc: Loc | None) -> None:
    spec = param.spec
    if isinstance(spec, Op):
        if value is None:
            if not spec.optional:
                raise NkiTypeError(f"{decl.name}: {param.name} is missing", loc=loc,
                                   rule=f"the signature is {decl.name}{decl.signature}")
        elif value not in spec.names:
            raise NkiTypeError(f"{decl.name}: {param.name} is {value}", loc=loc,
                               rule=f"{param.name} is one of {', '.join(sorted(spec.names))}")
    elif isinstance(spec, Attr):
        if value is None and (spec.optional or param.default is None):
            return
        if spec.choices and value not in spec.choices:
            raise NkiValueError(f"{decl.name}: {param.name} is {value!r}", loc=loc,
                                rule=f"{param.name} is one of {', '.join(map(repr, spec.choices))}")
        if not isinstance(value, spec.types) and not (isinstance(value, int) and any(issubclass(t, IntEnum) for t in spec.types)):
            raise NkiTypeError(f"{decl.name}: {param.name} is {type(value).__name__} {value!r}", loc=loc,
                               rule=f"{param.name} is {' or '.join(t.__name__ for t in spec.types)}")


def check_operands(decl: Instruction, operands: tuple[Any, ...], target: Target, engine: str = "", loc: Loc | None = None,
                   dtype: str | None = None) -> dict[str, int]:
    """Check the operands of a call against its declaration; returns the bound dimensions."""
    dims: dict[str, int] = {}
    for param, value in zip(decl.params, operands, strict=True):
        spec = param.spec
        if isinstance(spec, Tile):
            _check_tile(decl, param, spec, value, dims, loc)
        elif isinstance(spec, (Op, Attr)):
            _check_value(decl, param, value, loc)
        elif isinstance(spec, Register) and value is not None and not (
                isinstance(value, Access) and value.alloc.kind == "register" and value.alloc.shape == (target.partitions, 1)
                and value.alloc.dtype == "float32" and value.shape[1:] == (1,)
                and dims.get("P", 1) <= value.shape[0] <= target.partitions):  # those of a random number generator are taken whole
            raise NkiTypeError(f"{decl.name}: {param.name} is {describe(value) if isinstance(value, Access) else value!r}", loc=loc,
                               rule=f"{param.name} are the registers of an engine: float32, one for each partition of the tile at least")
    for limit in decl.limits:
        size = dims.get(limit.dim)
        most = getattr(target, limit.at_most)
        if size is not None and size > most:
            raise make(limit.code, f"{decl.name}: {limit.dim} is {size}, at most {most} ({limit.at_most}): {limit.why}", loc=loc,
                       operand="; ".join(describe(v) for v in operands if isinstance(v, Access)))
    if target.generation < decl.min_generation:
        raise NkiValueError(f"{decl.name} does not exist on {target.name}", loc=loc,
                            rule=f"it needs NeuronCore generation {decl.min_generation} or later",
                            fix="set platform_target or NEURON_PLATFORM_TARGET_OVERRIDE to a later chip")
    if engine and engine not in decl.engines:
        raise NkiValueError(f"{decl.name} does not run on the {engine} engine", loc=loc,
                            rule=f"it runs on {', '.join(decl.engines)}")
    if decl.check is not None:
        try:
            decl.check(call_view(decl, operands, engine, dtype), target)
        except NkiError as error:
            raise _placed(error, decl, operands, loc) from None
    return dims


def _placed(error: NkiError, decl: Instruction, operands: tuple[Any, ...], loc: Loc | None) -> NkiError:
    """The error of a declaration's own check, with what only we know: the place, the instruction, and the operand it names."""
    if loc is not None:
        error.loc = loc
    if not error.message.startswith(decl.name):
        error.message = f"{decl.name}: {error.message}"
    value = operands[decl.index[error.operand]] if error.operand in decl.index else None
    if isinstance(value, Access):
        error.operand = f"{error.operand}, {describe(value)}"
    return error


def check_result(decl: Instruction, spec: Result, access: Access, target: Target, loc: Loc | None = None) -> None:
    """Check a result tile: memory and partitions."""
    if access.space not in spec.spaces and not (access.space == "hbm" and decl.family in ("dma", "copy")):
        raise make("err_unsupported_memory", f"{decl.name} writes to {MEMORY_NAMES[access.space]}, expected "
                   f"{' or '.join(MEMORY_NAMES[s] for s in spec.spaces)}", loc=loc, operand=describe(access))
    if access.alloc.on_chip and access.shape and access.shape[0] > target.partitions:
        raise make("err_num_partition_exceed_arch_limit", f"{decl.name}: the result has {access.shape[0]} partitions", loc=loc,
                   operand=describe(access))


def check_instr(instr: Instr, target: Target, loc: Loc | None = None) -> dict[str, int]:
    """Check an instruction: operands, number and shapes of its results; returns the bound dimensions (for cost)."""
    decl = ISA[instr.op]
    dtype = instr.results[0].dtype if instr.results else None
    dims = check_operands(decl, instr.operands, target, instr.engine, loc, dtype)
    view = call_view(decl, instr.operands, instr.engine, dtype)
    specs = results_of(decl, view)
    if len(specs) != len(instr.results):
        raise NkiValueError(f"{decl.name}: {len(instr.results)} results are written, and it makes {len(specs)}", loc=loc,
                            rule="an instruction writes each of its results, in order")
    for spec, access in zip(specs, instr.results, strict=True):
        shape = result_shape(spec, view)
        if access.shape != shape:
            raise NkiValueError(f"{decl.name}: the result has shape {shape}, the destination {access.shape}", loc=loc,
                                operand=describe(access), rule="an instruction writes a tile of the shape of its result")
        check_result(decl, spec, access, target, loc)
    return dims


def results_of(decl: Instruction, view: Any) -> tuple[Result, ...]:
    """The results that a call makes as tiles: none where it is given a destination."""
    return () if "dst" in decl.index and getattr(view, "dst", None) is not None else decl.results


def result_shape(spec: Result, view: Any) -> tuple[int, ...]:
    """Shape of a result, from the operands of the call."""
    return tuple(getattr(view, spec.shape).shape if isinstance(spec.shape, str) else spec.shape(view))


def reads_of(decl: Instruction, param: Param, operands: tuple[Any, ...]) -> bool:
    """True when a call reads the tile of a parameter."""
    spec = param.spec
    if isinstance(spec, Register):
        return True
    if not spec.reads or not spec.when:
        return bool(spec.reads)
    if callable(spec.when):
        return bool(spec.when(call_view(decl, operands)))
    return operands[decl.index[spec.when]] not in (None, False)


def accesses(instr: Instr) -> tuple[tuple[Access, bool, bool], ...]:
    """(access, read, written) of each tile of an instruction, index tiles included."""
    found: tuple[tuple[Access, bool, bool], ...] | None = instr.touched
    if found is None:
        found = _accesses(instr)
        object.__setattr__(instr, "touched", found)  # an instruction never changes, and every pass asks
    return found


def _accesses(instr: Instr) -> tuple[tuple[Access, bool, bool], ...]:
    decl, operands = ISA[instr.op], instr.operands
    out: list[tuple[Access, bool, bool]] = []
    for param, fixed, writes in _roles(decl):
        value = operands[param]
        if value.__class__ is Access:
            out.append((value, reads_of(decl, decl.params[param], operands) if fixed is None else fixed, writes))
            out += [(d.dyn, True, False) for d in value.dims if d.dyn is not None]
    for access in instr.results:
        out.append((access, False, True))
        out += [(d.dyn, True, False) for d in access.dims if d.dyn is not None]
    return tuple(out)


def _roles(decl: Instruction) -> list[tuple[int, bool | None, bool]]:
    """(number of the parameter, whether its tile is read or None where the call decides, whether it is written) of each parameter that may
    be a tile."""
    known = _ROLES.get(decl.name)
    if known is not None and known[0] is decl:
        return known[1]
    out: list[tuple[int, bool | None, bool]] = []
    for number, param in enumerate(decl.params):
        spec = param.spec
        if isinstance(spec, Register):
            out.append((number, True, True))
        elif isinstance(spec, Tile):
            out.append((number, None if spec.reads and spec.when else spec.reads, spec.writes))
    _ROLES[decl.name] = decl, out
    return out


_ROLES: dict[str, tuple[Instruction, list[tuple[int, bool | None, bool]]]] = {}


def leaves_out(instr: Instr) -> bool:
    """True where an instruction may leave elements of its tiles as they are: those that a mask excludes, and rows whose runtime index is
    outside of the tensor under oob_mode.skip."""
    if instr.mask:
        return True
    place = ISA[instr.op].index.get("oob_mode")
    return place is not None and bool(instr.operands[place]) and any(any(True for _ in a.dynamic()) for a, _, _ in accesses(instr))


def iteration_shape(decl: Instruction, instr: Instr) -> tuple[int, ...]:
    """The shape of an instruction's iteration space, which its mask counts: of the operand that the declaration names, else of the first
    tile written, else of the first one read."""
    if decl.mask_on:
        value = instr.operands[decl.index[decl.mask_on]]
        if isinstance(value, Access):
            return value.shape
    if instr.results:
        return instr.results[0].shape
    for param, value in zip(decl.params, instr.operands, strict=True):
        if isinstance(param.spec, Tile) and param.spec.writes and isinstance(value, Access):
            return value.shape
    return next((v.shape for v in instr.operands if isinstance(v, Access)), ())


def verify(kernel: Kernel, target: Target) -> None:
    """Check every instruction, and that every tensor is used inside the scope that it is made in."""
    known = {a for a in (*kernel.params, *kernel.constant_allocs)}
    _walk(kernel.body, set(known), kernel, target)


def _walk(body: list[Stmt], scope: set[Alloc], kernel: Kernel, target: Target) -> None:
    for stmt in body:
        if isinstance(stmt, Alloc):
            scope.add(stmt)
        elif isinstance(stmt, Instr):
            loc = kernel.loc(stmt.loc)
            check_instr(stmt, target, loc)
            for access, _, _ in accesses(stmt):
                if access.alloc not in scope and access.alloc.kind != "register":
                    raise make("err_local_variable_used_out_of_scope", f"{stmt.op} uses {describe(access)}", loc=loc)
        elif isinstance(stmt, (For, DoWhile)):
            _walk(stmt.body, set(scope), kernel, target)
        elif isinstance(stmt, If):
            _walk(stmt.then, scope, kernel, target)
            _walk(stmt.orelse, scope, kernel, target)
        else:
            raise NkiError(f"{type(stmt).__name__} is no statement")
