"""The canonical text of a kernel: valid Python syntax, one statement a line, the same on every machine.

    opennki_ir = 1                                           format version
    kernel('add', target='trn2', grid=(p0[4],), cores=(0, 1, 0, 1), has_collectives=True)
    t0 = param.shared_hbm(bfloat16, (512, 512), name='a')    inputs in call order
    c0 = data(float32, (2, 2), (1.0, -0.0, nan, inf))        constant data
    t1 = constant.shared_hbm(float32, (2, 2), name='w', data=c0)
    written(t0)                                              inputs that the kernel writes
    t5 = sbuf(float32, (4, 128, 512), pdim=1, name='acc')    an allocation
    for i0 in affine(32, 'no_reorder'):                      loop kind, trips, directives
        t5.tile(128, 512)[i0, d0, d1] = vector.tensor_copy(src=t0.tile(128, 512)[128*p0 + d0, d1])
        if 128*i0 - p0 >= 0:
            tensor.nc_matmul(dst=t7, stationary=t8, moving=t9, mask=[-d0 - 128*i0 + 99 >= 0])
        else:
            pass
    while do():                                              runs, and again while the element is not 0
        ...
        repeat_while(t6)
    outputs(t5)                                              always the last line

* A tensor has the name `t5` by its number, `x0`, `x1` ... where that is negative (the tracer's inputs). It is
  made by `memory(dtype, shape, pdim=, name=, placement=)`. The accumulator registers of an engine,
  which live from the start of the kernel to its end, are declared before the line that first uses them: `t3
  = register.register(float32, (128, 1), name='scalar')`.
* Constant data of at most 256 bytes are numbers, other data base64 of the little-endian bytes; equal data
  are written once.
* `engine.instruction(operand=value, ...)` has every operand that is not None, in declared order, then
  `mask` and `call`.
* Access: the bare name is the whole tensor. Otherwise
  `t.bitcast(dtype).view(shape).tile(shape).where(masks)[index, ...]`, where a part that is absent is the
  tensor's own dtype, its own shape, a tile of the viewed shape, no operand mask. `d0`, `d1` ... count along
  the dimensions of the tile. `+ at(t6)` adds the element of an integer tile (a dynamic index).
* Index expressions: `128*i0 - i1 + (i0//2) + d0 + 3`. As an operand a constant one is `index(3)`, so that
  it is not a number.
* `iota((128, 512), expr)` is a tile of index values, `pred((128, 512), expr >= 0, ...)` one of truth
  values.
* Masks count over as many dimensions as the first tile written has; `rank(n, expr >= 0)` says that a
  predicate has another number of them.
* Floats are exact (`inf`, `nan`, `-0.0`); enums are numbers.

Names of loop indices are kept where they are unique in the kernel, otherwise numbered. Source locations are
not in the text (`locations` has them beside it).
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import Any

from opennki.errors import UNKNOWN, Loc, NkiValueError
from opennki.ir import text as t
from opennki.ir.affine import Affine, FloorDiv, Pred, Var
from opennki.ir.nodes import Access, Alloc, Dim, DoWhile, For, If, IndexTile, Instr, Kernel, PredTile, Stmt
from opennki.isa.declare import ISA, Instruction, Plumbing, Tile

_BLOCK = 2048  # lines per write
_IDENTITY = tuple(", ".join(f"d{j}" for j in range(rank)) for rank in range(t.MAX_RANK + 1))


def to_text(kernel: Kernel, locations: bool = False) -> str:
    """Canonical text of a kernel.

    `locations` appends `# file:line` to the lines (for people; the reader skips comments).
    Errors: NkiValueError for a kernel that the text cannot hold (an unknown instruction, a constant of more
    than MAX_CONSTANT_BYTES ...).
    """
    out = io.StringIO()
    write_text(kernel, out.write, locations)
    return out.getvalue()


def write_text(kernel: Kernel, write: Callable[[str], Any], locations: bool = False) -> None:
    """Write the canonical text in blocks of lines, without holding all of it."""
    writer = _Writer(kernel, write)
    if locations:
        writer.comment = t.RelativeFiles(kernel)
    writer.kernel()


def text_and_locations(kernel: Kernel) -> tuple[str, list[Loc | None]]:
    """The text and the source location of each of its lines."""
    out = io.StringIO()
    writer = _Writer(kernel, out.write)
    writer.where = []
    writer.kernel()
    return out.getvalue(), writer.where


def mask_rank(declared: Instruction, results: tuple[Access, ...], operands: Iterable[Any]) -> int:
    """Number of dimensions that a mask counts over: those of the first tile written, else read."""
    if results:
        return len(results[0].shape)
    rank = -1
    for param, value in zip(declared.params, operands):
        if type(value) is Access and isinstance(param.spec, Tile):
            if param.spec.writes:
                return len(value.shape)
            if rank < 0:
                rank = len(value.shape)
    return max(rank, 0)


def _fail(message: str, fix: str = "") -> NkiValueError:
    return NkiValueError(message, loc=UNKNOWN, fix=fix)


class _Writer:
    def __init__(self, kernel: Kernel, write: Callable[[str], Any]) -> None:
        self.k = kernel
        self.write = write
        self.lines: list[str] = []
        self.indent = ""
        self.comment: t.RelativeFiles | None = None
        self.where: list[Loc | None] | None = None
        self.names: dict[Alloc, str] = {}
        self.owners: dict[int, Alloc] = {}
        self.vars: dict[Var, Var] = {}  # in scope -> as named in the text
        self.used: set[str] = set()
        self.renamed = False
        self.bytes = 0
        self.fixed: dict[tuple[Any, tuple[int, ...]], str] = {}  # index expressions without variables
        self.varying: dict[tuple[Any, tuple[int, ...]], str] = {}  # and with variables in scope
        self.shapes: dict[tuple[int, ...], str] = {}
        self.plans: dict[str, tuple[Instruction, tuple[str, ...]]] = {}
        self.writers: dict[type, Callable[[Any], str]] = {
            Access: self.access,
            Affine: self.affine_operand,
            IndexTile: self.index_tile,
            PredTile: self.pred_tile,
            tuple: self.sequence,
            list: self.sequence,
            bool: repr,
        }

    # statements

    def line(self, text: str, loc: Loc | None = None) -> None:
        if self.where is not None:
            self.where.append(loc)
        if self.comment is not None and loc is not None and loc.line > 0:
            text = f"{text}  # {self.comment(loc.file)}:{loc.line}"
        lines = self.lines
        lines.append(text)
        if len(lines) >= _BLOCK:
            self.flush()

    def flush(self) -> None:
        longest = max(map(len, self.lines))
        if longest > t.MAX_LINE_BYTES and any(
            len(s) > t.MAX_LINE_BYTES and " = data(" not in s for s in self.lines
        ):
            raise _fail(f"a statement is longer than {t.MAX_LINE_BYTES} bytes")
        self.lines.append("")
        text = "\n".join(self.lines)
        self.lines.clear()
        self.bytes += len(text)
        if self.bytes > t.MAX_TEXT_BYTES:
            raise _fail(f"the text of the kernel is longer than {t.MAX_TEXT_BYTES} bytes")
        self.write(text)

    def kernel(self) -> None:
        k = self.k
        self.line(f"opennki_ir = {t.FORMAT_VERSION}")
        head = [ascii(k.name), f"target={k.target!a}"]
        if k.grid:
            self.shape(tuple([v.hi + 1 for v in k.grid]))  # bounded
            head.append("grid=" + t.tuple_text([f"{self.bind(v, v.hi + 1)}[{v.hi + 1}]" for v in k.grid]))
        if k.cores:
            head.append(f"cores={t.literal_text(t.plain(k.cores))}")
        if k.has_collectives:
            head.append("has_collectives=True")
        self.line(f"kernel({', '.join(head)})")
        for param in k.params:
            self.header(param, "param")
        self.constants()
        if k.written_params:
            if any(a.kind != "param" for a in k.written_params):
                raise _fail("Kernel.written_params lists inputs")
            self.line(f"written({', '.join(self.name(a) for a in k.written_params)})")
        self.body(k.body, "")
        self.line(f"outputs({', '.join(self.access(a) for a in k.outputs)})")
        self.flush()

    def header(self, alloc: Alloc, kind: str, data: str = "") -> None:
        if alloc.kind != kind or alloc in self.names:
            raise _fail(f"{alloc} ({alloc.name}) is not a {kind} of its own")
        self.alloc(alloc, "", data)

    def constants(self) -> None:
        k = self.k
        seen: dict[str, str] = {}
        for alloc in k.constant_allocs:
            array = k.constants.get(alloc.id)
            data = ""
            if array is not None:
                text = t.data_text(array)
                data = seen.get(text, "")
                if not data:
                    if len(seen) >= t.MAX_CONSTANTS:
                        raise _fail(f"a kernel has at most {t.MAX_CONSTANTS} constants")
                    data = seen[text] = f"c{len(seen)}"
                    self.line(f"{data} = {text}")
            self.header(alloc, "constant", data)
        if not k.constants.keys() <= {a.id for a in k.constant_allocs}:
            raise _fail("Kernel.constants has data of no constant")

    def body(self, body: list[Stmt], indent: str) -> None:
        if len(indent) > 4 * t.MAX_NESTING:
            raise _fail(f"loops and branches nest deeper than {t.MAX_NESTING} levels")
        if not body:
            if indent:
                self.line(indent + "pass")
            return
        self.indent = indent
        located = self.where is not None or self.comment is not None
        for s in body:
            if isinstance(s, Instr):
                self.line(indent + self.instruction(s), self.k.loc(s.loc) if located else None)
            elif isinstance(s, Alloc):
                if s.kind != "local":
                    raise _fail(f"{s} is not a local tensor; a body allocates no others")
                self.alloc(s, indent)
            else:
                self.block(s, indent)
                self.indent = indent

    def block(self, s: For | If | DoWhile, indent: str) -> None:
        loc, inner = self.k.loc(s.loc), indent + "    "
        if isinstance(s, For):
            if s.kind not in ("affine", "sequential"):
                raise _fail(f"unknown kind of loop {s.kind!r}")
            trips = ", ".join([str(s.trips), *(ascii(str(d)) for d in s.directives)])
            self.line(f"{indent}for {self.bind(s.var, s.trips)} in {s.kind}({trips}):", loc)
            self.body(s.body, inner)
            del self.vars[s.var]
            self.varying.clear()
        elif isinstance(s, If):
            self.line(f"{indent}if {self.pred(s.pred, 0)}:", loc)
            self.body(s.then, inner)
            if s.orelse:
                self.line(indent + "else:", loc)
                self.body(s.orelse, inner)
        elif isinstance(s, DoWhile):
            self.line(indent + "while do():", loc)
            if s.body or s.cond is None:
                self.body(s.body, inner)
            if s.cond is not None:
                self.indent = inner
                self.line(f"{inner}repeat_while({self.access(s.cond)})", loc)
        else:
            raise _fail(f"a statement of type {type(s).__name__} cannot be written")

    def bind(self, var: Var, trips: int) -> str:
        if var in self.vars or var.lo != 0 or var.hi != trips - 1 or not 0 <= trips <= t.MAX_ELEMENTS:
            raise _fail(f"index {var} is bound twice or does not count from 0 to {trips - 1}")
        name = var.name
        if name in self.used or not t.is_variable(name):
            n = len(self.used)
            while f"i{n}" in self.used:
                n += 1
            name, self.renamed = f"i{n}", True
        self.used.add(name)
        self.vars[var] = var if name == var.name else Var(name, var.lo, var.hi, var.kind, var.site)
        return name

    def alloc(self, a: Alloc, indent: str, data: str = "") -> None:
        if self.owners.setdefault(a.id, a) is not a or not -(10**9) <= a.id < 10**9:
            raise _fail(f"two tensors have the number {a.id}, or it is out of range")
        if (
            not 0 <= a.pdim <= len(a.shape)
            or a.space not in t.SPACES
            or a.dtype not in t.DTYPES
            or a.kind not in t.KINDS
        ):
            raise _fail(
                f"{a} has unknown memory, dtype, kind or pdim: {a.space}, {a.dtype}, {a.kind}, {a.pdim}"
            )
        name = self.names[a] = t.tensor_name(a.id)
        more = [
            f", pdim={a.pdim}" if a.pdim else "",
            f", name={a.name!a}" if a.name else "",
            "" if a.placement is None else f", placement={t.literal_text(t.plain(a.placement))}",
            f", data={data}" if data else "",
        ]
        kind = "" if a.kind == "local" else a.kind + "."
        self.line(f"{indent}{name} = {kind}{a.space}({a.dtype}, {self.shape(a.shape)}{''.join(more)})", a.loc)

    def plan(self, op: str) -> tuple[Instruction, tuple[str, ...]]:
        declared = ISA.get(op)
        if declared is None or op in t.STATEMENTS or not t.is_name(op):
            raise _fail(f"there is no declaration of the instruction {op!r}")
        for p in declared.params:
            if p.name in t.ATTRIBUTES and not isinstance(p.spec, Plumbing):
                raise _fail(f"{op}: {p.name} is the name of an attribute of all instructions")
        plan = self.plans[op] = (declared, tuple(p.name + "=" for p in declared.params))
        return plan

    def instruction(self, s: Instr) -> str:
        op = s.op
        declared, keys = self.plans.get(op) or self.plan(op)
        operands = s.operands
        if len(operands) != len(keys):
            raise _fail(f"{op} has {len(operands)} operands for {len(keys)} parameters")
        writers = self.writers
        parts = []
        for key, value in zip(keys, operands):
            if value is not None:
                writer = writers.get(type(value))
                parts.append(key + (writer(value) if writer else t.literal_text(t.plain(value))))
        if s.mask or s.call or "mask" in declared.index or "engine" in declared.index:
            for name in t.ATTRIBUTES:
                at = declared.index.get(name)
                if at is not None and operands[at] is not None:
                    raise _fail(f"{op}: {name} is an attribute of the instruction, not an operand")
        if s.mask:
            rank = mask_rank(declared, s.results, operands)
            parts.append(f"mask=[{', '.join([self.pred(p, rank) for p in s.mask])}]")
        if s.call:
            if not 0 < s.call < t.MAX_INDEX:
                raise _fail(f"{op}: call number {s.call} is out of range")
            parts.append(f"call={s.call}")
        call = f"{op}({', '.join(parts)})"
        if s.engine:
            if not t.is_name(s.engine) or s.engine in t.KINDS:
                raise _fail(f"{op}: unknown engine {s.engine!r}")
            call = f"{s.engine}.{call}"
        results = s.results
        if not results:
            return call
        if len(results) == 1:
            return f"{self.access(results[0])} = {call}"
        return f"{', '.join([self.access(a) for a in results])} = {call}"

    # operands

    def name(self, alloc: Alloc) -> str:
        name = self.names.get(alloc)
        if (
            name is None and alloc.kind == "register"
        ):  # registers exist from the start of the kernel: declared where first used
            self.alloc(alloc, self.indent)
            return self.names[alloc]
        if name is None:
            raise _fail(f"tensor {alloc} ({alloc.name}) is used before it is allocated")
        return name

    def access(self, a: Access, depth: int = 0) -> str:
        alloc, shape = a.alloc, a.shape
        text = self.names.get(alloc) or self.name(alloc)
        parts = []
        for dim in a.dims:
            base = dim.base
            if base.terms:
                index = self.varying.get((base, dim.strides)) or self.index(base, dim.strides)
            else:
                index = self.fixed.get((base.const, dim.strides)) or self.index(base, dim.strides)
            parts.append(index if dim.dyn is None else self.dynamic(index, dim, depth))
        if len(parts) > t.MAX_RANK:
            raise _fail(f"tensors have at most {t.MAX_RANK} dimensions")
        inside = ", ".join(parts)
        view = a.view
        if view is None:
            view = alloc.shape
            if a.dtype == alloc.dtype and not a.mask and shape == view and inside == _IDENTITY[len(shape)]:
                return text
        if len(parts) != len(view):
            raise _fail(f"{alloc} ({alloc.name}) has {len(view)} dimensions, not {len(parts)}")
        if a.dtype != alloc.dtype:
            if a.dtype not in t.DTYPES:
                raise _fail(f"unknown dtype {a.dtype}")
            text += f".bitcast({a.dtype})"
        if a.view is not None:
            text += ".view" + self.call_shape(view)
        if shape != view:
            text += ".tile" + self.call_shape(shape)
        if a.mask:
            text += f".where({', '.join([self.pred(p, len(shape)) for p in a.mask])})"
        return f"{text}[{inside or '()'}]"

    def dynamic(self, index: str, dim: Dim, depth: int) -> str:
        if depth >= t.MAX_DYNAMIC:
            raise _fail(f"dynamic indices nest deeper than {t.MAX_DYNAMIC} levels")
        assert dim.dyn is not None
        tile = f"at({self.access(dim.dyn, depth + 1)})"
        return tile if index == "0" else f"{index} + {tile}"

    def shape(self, shape: tuple[int, ...]) -> str:
        text = self.shapes.get(shape)
        if text is None:
            size = 1
            for n in shape:
                size *= max(int(n), 1)
            if len(shape) > t.MAX_RANK or size > t.MAX_ELEMENTS or any(n < 0 for n in shape):
                raise _fail(
                    f"shape {shape} is out of bounds: at most {t.MAX_RANK} dimensions and 2**40 elements"
                )
            text = self.shapes[shape] = t.tuple_text([str(int(n)) for n in shape])
        return text

    def call_shape(self, shape: tuple[int, ...]) -> str:
        text = self.shapes.get(shape) or self.shape(shape)
        return text.replace(",)", ")")

    def index(self, base: Affine, strides: tuple[int, ...]) -> str:
        """Text of base + sum(strides[j] * d_j)."""
        cache, key = (self.varying, (base, strides)) if base.terms else (self.fixed, (base.const, strides))
        text = cache.get(key)
        if text is None:
            text = cache[key] = self.expression(base, strides, 0)
        return text

    def expression(self, base: Affine, strides: tuple[int, ...], depth: int) -> str:
        if depth > t.MAX_DIVISIONS:
            raise _fail(f"floor divisions nest deeper than {t.MAX_DIVISIONS} levels")
        atoms = []
        if base.terms:
            if depth == 0:
                base = self.in_scope(base)
            for atom, c in sorted(base.terms, key=lambda term: term[0].key):
                if isinstance(atom, Var):
                    atoms.append((c, atom.name))
                else:
                    inner = self.expression(atom.of, (), depth + 1)
                    atoms.append(
                        (c, f"({inner}//{atom.by})" if inner.isidentifier() else f"(({inner})//{atom.by})")
                    )
        for j, c in enumerate(strides):
            if c:
                atoms.append((int(c), f"d{j}"))
        if not atoms:
            return str(_bounded(base.const))
        text = ""
        for c, name in atoms:
            _bounded(c)
            if c < 0:
                text += " - " if text else "-"
                c = -c
            elif text:
                text += " + "
            text += name if c == 1 else f"{c}*{name}"
        if base.const:
            text += f" + {base.const}" if _bounded(base.const) > 0 else f" - {-base.const}"
        return text

    def in_scope(self, a: Affine) -> Affine:
        """Check that all variables are in scope, and give them their names in the text."""
        for v in a.variables():
            if v not in self.vars:
                raise _fail(f"index {v} is used outside its loop")
        return _substitute(a, self.vars) if self.renamed else a

    def pred(self, p: Pred, rank: int) -> str:
        text = f"{self.index(p.expr, p.strides)} >= 0"
        n = len(p.strides)
        if n > t.MAX_RANK:
            raise _fail(f"masks have at most {t.MAX_RANK} dimensions")
        return text if n == rank else f"rank({n}, {text})"

    def affine_operand(self, a: Affine) -> str:
        return self.index(a, ()) if a.terms else f"index({_bounded(a.const)})"

    def index_tile(self, tile: IndexTile) -> str:
        return f"iota({self.shape(tile.shape)}, {self.index(tile.base, tile.strides)})"

    def pred_tile(self, tile: PredTile) -> str:
        preds = [self.pred(p, len(tile.shape)) for p in tile.preds]
        return f"pred({', '.join([self.shape(tile.shape), *preds])})"

    def sequence(self, values: tuple[Any, ...], depth: int = 0) -> str:
        if depth > t.MAX_TUPLES:
            raise _fail(f"tuples nest deeper than {t.MAX_TUPLES} levels")
        parts = []
        for value in values:
            if isinstance(value, (tuple, list)):
                parts.append(self.sequence(value, depth + 1))  # type: ignore[arg-type]
                continue
            writer = self.writers.get(type(value))
            parts.append(writer(value) if writer else t.literal_text(t.plain(value)))
        return t.tuple_text(parts)


def _bounded(value: int) -> int:
    if not -t.MAX_INDEX < value < t.MAX_INDEX:
        raise _fail("numbers in index expressions have at most 64 bits")
    return value


def _substitute(a: Affine, names: dict[Var, Var]) -> Affine:
    out = Affine(a.const)
    for atom, c in a.terms:
        new = names[atom] if isinstance(atom, Var) else FloorDiv(_substitute(atom.of, names), atom.by)
        out = out.add(Affine(0, ((new, c),)))
    return out
