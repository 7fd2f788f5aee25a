"""Reads the IR text of `print` back. The text is data: it is never executed, and everything is bounded.

Lines are read one by one, so that memory stays in proportion to the text; `instructions` and `expressions`
read what is inside. Every fault is an NkiParseError at a line of the text. The reader checks form (names,
kinds of operands, scopes of indices, sizes); whether the kernel is legal is for `verify`.
"""

from __future__ import annotations

import ast
import base64
import binascii
import gc
import re
from math import prod
from typing import Any

import numpy as np

from opennki.errors import Loc
from opennki.ir import text as t
from opennki.ir.affine import Var
from opennki.ir.expressions import Expressions
from opennki.ir.instructions import Instructions
from opennki.ir.nodes import Alloc, DoWhile, For, If, Kernel, Stmt

_ALLOC = re.compile(
    r"([tx][0-9]{1,9}) = (?:([a-z]+)\.)?([a-z_]+)\((\w+), (\([0-9, ]*\))(?:, pdim=([0-9]{1,2}))?"
    r"(?:, name='([^'\\]*)')?(?:, data=(c[0-9]{1,9}))?\)",
    re.ASCII,
)
_DATA = re.compile(
    r"(c[0-9]{1,9}) = data\((\w+), (\([0-9, ]*\)), (?:'([A-Za-z0-9+/=]*)'|(\(.*\)))\)", re.ASCII
)
_FOREIGN = re.compile(r"[^\n -~]")
_LARGE = 1 << 20
_DATA_LINE = t.MAX_CONSTANT_BYTES * 4 // 3 + 4096


class _Frame:
    """An open block: its statements, the loop index it binds, whether it has ended (pass, repeat_while)."""

    __slots__ = ("body", "branch", "ended", "repeat", "var")

    def __init__(
        self, body: list[Stmt], var: str = "", branch: If | None = None, repeat: DoWhile | None = None
    ) -> None:
        self.body, self.var, self.branch, self.repeat, self.ended = body, var, branch, repeat, False


def from_text(
    text: str, locations: tuple[list[Loc], list[int]] | None = None, *, quick: bool = True
) -> Kernel:
    """The kernel of a canonical text (comments and empty lines are skipped).

    `locations` is a table of source locations: the places, and for each line of the text the index of its
    place or -1 (`locations.read_locations`). `quick=False` reads everything through `ast`; the result is
    the same.
    Errors: NkiParseError with the line for anything that is not a kernel of this format version.
    """
    collect = gc.isenabled() and type(text) is str and len(text) > _LARGE
    if collect:
        gc.disable()  # the nodes hold no cycles; looking for them again and again costs a third of the time
    try:
        return _Parser(text, locations, quick).run()
    finally:
        if collect:
            gc.enable()


class _Parser:
    def __init__(self, text: str, locations: tuple[list[Loc], list[int]] | None, quick: bool) -> None:
        self.e = Expressions(quick)
        self.i = Instructions(self.e)
        self.text, self.quick = text, quick
        self.locs, self.lines = locations or ([], [])
        self.kernel = Kernel("", [], [], [], locs=list(self.locs))
        self.stack = [_Frame(self.kernel.body)]
        self.declared: dict[str, str] = {}
        self.used = set[str]()
        self.data: dict[str, np.ndarray[Any, Any]] = {}
        self.stage = 0  # 0 version, 1 kernel, 2 header, 3 body, 4 end

    # lines

    def run(self) -> Kernel:
        e, text = self.e, self.text
        if type(text) is not str or len(text) > t.MAX_TEXT_BYTES:
            e.error(f"the text of a kernel is a string of at most {t.MAX_TEXT_BYTES} bytes")
        foreign = _FOREIGN.search(text)
        if foreign:
            e.line = text.count("\n", 0, foreign.start()) + 1
            e.error(f"unexpected character {foreign[0]!a}")
        if text.count("\n") > t.MAX_STATEMENTS:
            e.error(f"a kernel has at most {t.MAX_STATEMENTS} statements")
        expected = False  # a block must follow
        stack = self.stack
        for line in text.split("\n"):
            e.line += 1
            stripped = line.lstrip(" ")
            if not stripped or stripped[0] == "#":
                continue
            if len(line) > t.MAX_LINE_BYTES and (len(line) > _DATA_LINE or not stripped.startswith("c")):
                e.error(f"a line has at most {t.MAX_LINE_BYTES} bytes")
            if "#" in stripped:
                stripped = e.scan(stripped)
            depth = len(stack) - 1
            if len(line) - len(stripped) != 4 * depth or "#" in line:
                depth, odd = divmod(len(line) - len(line.lstrip(" ")), 4)
                if odd or depth >= len(stack) or (expected and depth != len(stack) - 1):
                    e.error("wrong indentation: four spaces for each open block, none skipped")
                self.close(depth, stripped == "else:")
            if stripped == "else:":
                expected = self.orelse()
            else:
                expected = self.statement(stripped)
        if self.stage != 4 or expected:
            e.error("the text is cut short: it has no outputs(...) line at its end")
        return self.kernel

    def close(self, depth: int, orelse: bool) -> None:
        """Close blocks down to a depth; the last one stays for its else."""
        while len(self.stack) > depth + (2 if orelse else 1):
            frame = self.stack.pop()
            if frame.var:
                self.e.leave(frame.var)
                self.i.leave()

    def orelse(self) -> bool:
        frame = self.stack.pop() if len(self.stack) > 1 else None
        if frame is None or frame.branch is None or frame.body is frame.branch.orelse:
            self.e.error("else without if")
        self.stack.append(_Frame(frame.branch.orelse, branch=frame.branch))
        return True

    def place(self) -> int:
        """Index of the location of this line."""
        n = self.e.line - 1
        return self.lines[n] if n < len(self.lines) else -1

    def statement(self, line: str) -> bool:
        """Read a statement; returns whether a block must follow."""
        e, stage = self.e, self.stage
        if 2 <= stage <= 3 and self.quick:
            m = _ALLOC.fullmatch(line) if line[0] in "tx" else None
            if m is not None and m[3] in t.SPACES:
                self.alloc(
                    m[1],
                    m[2] or "local",
                    m[3],
                    m[4],
                    e.shape_of(m[5]),
                    int(m[6] or 0),
                    m[7] or "",
                    None,
                    m[8],
                    line,
                )
                return False
            if stage == 3:
                frame = self.stack[-1]
                if frame.ended:
                    e.error("nothing can follow here in the same block")
                instr = self.i.quick(line, self.place() if self.lines else -1)
                if instr is not None:
                    frame.body.append(instr)
                    return False
        if stage == 4:
            e.error("outputs(...) is the last line")
        if stage == 0:
            self.version(line)
            return False
        if stage == 1:
            self.head(line)
            return False
        if line.startswith("c"):
            m = _DATA.fullmatch(line)
            if m is not None:
                self.constant(m[1], m[2], m[3], m[4], m[5])
                return False
        return self.general(line)

    def version(self, line: str) -> None:
        m = re.fullmatch(r"opennki_ir = ([0-9]{1,9})", line)
        if m is None:
            self.e.error("this is not opennki IR: the first line is `opennki_ir = <version>`")
        if int(m[1]) != t.FORMAT_VERSION:
            self.e.error(
                f"IR format version {m[1]} is unknown; this opennki reads version {t.FORMAT_VERSION}"
            )
        self.stage = 1

    def general(self, line: str) -> bool:
        """Read a statement through `ast`."""
        e, line = self.e, line.rstrip(" ")
        block = line.endswith(":")
        module: ast.Module = e.parse(e.scan(line) + (" pass" if block else ""), "exec")
        if len(module.body) != 1:
            e.error("a line has one statement")
        s = module.body[0]
        if block or isinstance(s, (ast.For, ast.While, ast.If)):
            self.enter_body()
            return self.block(line, s)
        if isinstance(s, ast.Pass):
            frame = self.stack[-1]
            if len(self.stack) == 1 or frame.body or frame.ended:
                e.error("pass stands for an empty block only")
            frame.ended = True
            return False
        if isinstance(s, ast.Assign) and len(s.targets) == 1 and isinstance(s.value, ast.Call):
            target = s.targets[0]
            call, results = s.value, target.elts if isinstance(target, ast.Tuple) else [target]
        elif isinstance(s, ast.Expr) and isinstance(s.value, ast.Call):
            call, results = s.value, []
        else:
            e.error("this is not an IR statement")
        engine, func = "", call.func
        if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name):
            engine, op = func.value.id, func.attr
        else:
            op = e.name(func) or e.error("this is not an IR statement")
        keywords = {k.arg: k.value for k in call.keywords}
        if len(keywords) != len(call.keywords) or None in keywords:
            e.error("an operand is given twice")
        if op in t.SPACES and (not engine or engine in t.KINDS):
            self.general_alloc(engine or "local", op, results, call.args, keywords, line)
        elif op in t.STATEMENTS:
            self.other(op, engine, results, call.args, keywords)
        else:
            self.enter_body()
            if self.stack[-1].ended:
                e.error("nothing can follow here in the same block")
            self.stack[-1].body.append(self.i.general(engine, op, results, call.args, keywords, self.place()))
        return False

    # header

    def head(self, line: str) -> None:
        e, k = self.e, self.kernel
        call = e.tree(line)
        if not isinstance(call, ast.Call) or e.name(call.func) != "kernel" or len(call.args) != 1:
            e.error("the second line is kernel('name', target=...)")
        k.name = e.string(call.args[0])
        for word in call.keywords:
            if word.arg == "target":
                k.target = e.string(word.value)
            elif word.arg == "grid" and not k.grid:
                grid = []
                for item in e.items(word.value):
                    if not isinstance(item, ast.Subscript):
                        e.error("a dimension of the grid is name[size]")
                    grid.append(self.bind(e.name(item.value), e.integer(item.slice), "pid"))
                k.grid = tuple(grid)
                e.checked([v.hi + 1 for v in grid])
            elif word.arg == "cores":
                k.cores = tuple([e.integer(item, 0) for item in e.items(word.value)])
            elif (
                word.arg == "has_collectives"
                and isinstance(word.value, ast.Constant)
                and word.value.value is True
            ):
                k.has_collectives = True
            else:
                e.error(f"{word.arg} is not known in kernel(...)")
        self.stage = 2

    def bind(self, name: str, trips: int, kind: str = "loop") -> Var:
        e = self.e
        if not t.is_variable(name) or name in self.used:
            e.error(
                f"{name!r} cannot be the name of an index"
                + (": it is used already" if name in self.used else "")
            )
        if not 0 <= trips <= t.MAX_ELEMENTS:
            e.error("a loop or grid has at most 2**40 steps")
        self.used.add(name)
        var = e.scope[name] = Var(name, 0, trips - 1, kind)
        return var

    def constant(
        self, name: str, dtype: str, shape_text: str, encoded: str | None, numbers: str | None
    ) -> None:
        e = self.e
        kind, shape = t.ARRAY_DTYPES.get(dtype), e.shape_of(shape_text)
        if self.stage != 2 or name in self.data or len(self.data) >= t.MAX_CONSTANTS:
            e.error(f"constant data {name} is given twice, in the wrong place, or is one too many")
        if kind is None:
            e.error(f"unknown dtype {dtype}")
        size = prod(shape)
        if size * kind.itemsize > t.MAX_CONSTANT_BYTES:
            e.error(f"a constant has at most {t.MAX_CONSTANT_BYTES} bytes")
        if encoded is None:
            values = e.literal(e.tree(numbers or ""))
            if type(values) is not tuple or len(values) != size:
                e.error(f"{name} has {size} numbers")
            self.data[name] = self.numbers(values, kind).reshape(shape)
            return
        if len(encoded) != (size * kind.itemsize + 2) // 3 * 4:
            e.error(f"{name} does not have {size * kind.itemsize} bytes")
        try:
            raw = base64.b64decode(encoded, validate=True)
            self.data[name] = np.frombuffer(bytearray(raw), kind).reshape(shape)
        except (binascii.Error, ValueError):
            e.error(f"{name} is not base64 of {size * kind.itemsize} bytes")

    def numbers(self, values: tuple[Any, ...], kind: np.dtype[Any]) -> np.ndarray[Any, Any]:
        e = self.e
        wanted = {"b": bool, "i": int, "u": int}.get(kind.kind, float)
        if any(type(v) is not wanted for v in values):
            e.error(f"{kind.name} data is written in numbers of type {wanted.__name__}")
        if wanted is int:
            info = np.iinfo(kind)
            if any(not info.min <= v <= info.max for v in values):
                e.error(f"a number is out of the range of {kind.name}")
            return np.array(values, kind)
        with np.errstate(over="ignore", invalid="ignore"):
            return np.array(values, bool if wanted is bool else np.float64).astype(kind)

    def alloc(
        self,
        key: str,
        kind: str,
        space: str,
        dtype: str,
        shape: tuple[int, ...],
        pdim: int,
        name: str,
        placement: Any,
        data: str | None,
        line: str,
    ) -> None:
        e, k = self.e, self.kernel
        number = int(key[1:])
        number = number if key[0] == "t" else -1 - number
        place = self.place()
        if kind == "local" and self.stack[-1].ended:
            e.error("nothing can follow here in the same block")
        if key in self.declared:
            if self.declared[key] != line or kind != "local" or self.stage < 3:
                e.error(f"{key} is a tensor already")
            self.stack[-1].body.append(e.allocs[key])  # one tensor, allocated on both sides of a branch
            return
        if (
            kind not in t.KINDS
            or pdim > len(shape)
            or (data is not None and kind != "constant")
            or t.tensor_name(number) != key
        ):
            e.error(f"{key} is not a tensor: unknown kind {kind}, or wrong pdim, data or number")
        made = Alloc(
            number,
            name,
            shape,
            e.dtype(dtype),
            space,
            kind,
            pdim,
            placement,
            k.locs[place] if place >= 0 else None,
        )
        if kind == "local":
            self.enter_body()
            self.stack[-1].body.append(made)
        elif kind == "register":
            self.enter_body()
        else:
            if self.stage != 2:
                e.error("inputs and constants come before the body")
            (k.params if kind == "param" else k.constant_allocs).append(made)
        if data is not None:
            if data not in self.data:
                e.error(f"there is no data {data}")
            k.constants[made.id] = self.data[data]
        self.declared[key] = line
        e.allocs[key] = made

    def general_alloc(
        self,
        kind: str,
        space: str,
        results: list[ast.expr],
        args: list[ast.expr],
        words: dict[str | None, ast.expr],
        line: str,
    ) -> None:
        e = self.e
        key = e.name(results[0]) if len(results) == 1 else ""
        if not re.fullmatch("[tx][0-9]{1,9}", key) or len(args) != 2:
            e.error("an allocation is t<number> = memory(dtype, shape, ...)")
        if not words.keys() <= {"pdim", "name", "placement", "data"}:
            e.error("a tensor has pdim, name, placement and data only")
        pdim = e.integer(words["pdim"], 0, 1 + t.MAX_RANK) if "pdim" in words else 0
        name = e.string(words["name"]) if "name" in words else ""
        placement = e.literal(words["placement"]) if "placement" in words else None
        data = e.name(words["data"]) if "data" in words else None
        self.alloc(key, kind, space, e.name(args[0]), e.shape(args[1]), pdim, name, placement, data, line)

    def enter_body(self) -> None:
        if self.stage < 3:
            self.stage = 3

    # statements

    def other(
        self,
        op: str,
        engine: str,
        results: list[ast.expr],
        args: list[ast.expr],
        words: dict[str | None, ast.expr],
    ) -> None:
        e, k, frame = self.e, self.kernel, self.stack[-1]
        if engine or results or words:
            e.error(f"{op} is not known in this form")
        if op == "written" and self.stage == 2 and not k.written_params and args:
            k.written_params = [e.alloc(e.name(a)) for a in args]
            if any(a.kind != "param" for a in k.written_params):
                e.error("written(...) lists inputs")
        elif op == "outputs" and len(self.stack) == 1:
            k.outputs = [e.access(a) for a in args]
            self.stage = 4
        elif op == "repeat_while" and frame.repeat is not None and len(args) == 1 and not frame.ended:
            frame.repeat.cond = e.access(args[0])
            frame.ended = True
        else:
            e.error(f"{op} is in the wrong place")

    def block(self, line: str, s: ast.stmt) -> bool:
        e, body = self.e, self.stack[-1].body
        if not line.endswith(":"):
            e.error("a block starts on the next line")
        if self.stack[-1].ended or len(self.stack) > t.MAX_NESTING:
            e.error(
                "nothing can follow here in the same block"
                if self.stack[-1].ended
                else f"loops and branches nest deeper than {t.MAX_NESTING} levels"
            )
        if (
            isinstance(s, ast.For)
            and isinstance(s.iter, ast.Call)
            and e.name(s.iter.func) in ("affine", "sequential")
            and s.iter.args
        ):
            args = s.iter.args
            directives = tuple([e.string(a) for a in args[1:]])
            if s.iter.keywords:
                e.error("a loop is: for i0 in affine(trips, directives):")
            var = self.bind(e.name(s.target), e.integer(args[0], 0, t.MAX_ELEMENTS + 1))
            loop = For(var, var.hi + 1, e.name(s.iter.func), [], directives, self.place())
            body.append(loop)
            self.stack.append(_Frame(loop.body, var=var.name))
        elif isinstance(s, ast.If):
            branch = If(e.pred(s.test, 0), [], [], self.place())
            body.append(branch)
            self.stack.append(_Frame(branch.then, branch=branch))
        elif (
            isinstance(s, ast.While)
            and isinstance(s.test, ast.Call)
            and e.name(s.test.func) == "do"
            and not s.test.args
            and not s.test.keywords
        ):
            repeat = DoWhile([], None, self.place())
            body.append(repeat)
            self.stack.append(_Frame(repeat.body, repeat=repeat))
        else:
            e.error(
                "a block is: for i0 in affine(n): or sequential(n):, if expr >= 0:, else: or while do():"
            )
        return True
