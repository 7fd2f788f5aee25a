"""Reads the operands of the IR text: accesses, index expressions, predicates and literals.

The general road is `ast` with a whitelist, after a bound on tokens and brackets. Short common forms take a
quick road with regular expressions and a cache by text; both give the same nodes.
"""

from __future__ import annotations

import ast
import re
import warnings
from typing import Any, NoReturn

from opennki.errors import Loc, NkiParseError
from opennki.ir import text as t
from opennki.ir.affine import ZERO, Affine, Atom, FloorDiv, Pred, Var
from opennki.ir.nodes import Access, Alloc, Dim, IndexTile, PredTile, whole

MISSING: Any = object()
Shape = tuple[int, ...]

_TOKEN = re.compile(
    r"""[ ]*+(?:([A-Za-z_][A-Za-z0-9_]*+(?!['"]))|[0-9][0-9A-Za-z_.]*+(?!['"])|([(\[])|([)\]])|(,)|(\#.*+)
    |'(?:[^'\\]|\\(?:['"\\nrt]|x[0-9a-f]{2}|u[0-9a-f]{4}|U000[0-9a-f]{5}|U0010[0-9a-f]{4}))*+'
    |>=|//|[.=+:*-]|"(?:[^"\\]|\\['"\\nrt])*+")""",
    re.VERBOSE,
)
_NUMBER = r"(?:0|[1-9][0-9]{0,18})"
_ITEM = rf"(?:{_NUMBER}\*[A-Za-z_]\w*+|[A-Za-z_]\w*+|{_NUMBER}(?!\*))"
_SIMPLE = re.compile(rf"-?{_ITEM}(?: [+-] {_ITEM})*+", re.ASCII)
_SIMPLE_PRED = re.compile(rf"(-?{_ITEM}(?: [+-] {_ITEM})*+) >= 0", re.ASCII)
_ACCESS = re.compile(r"([tx][0-9]{1,9})(?:\.tile\(([0-9, ]+)\))?\[([A-Za-z0-9_,*+ -]+)\]")
_SIZES = re.compile(r"(?:0|[1-9][0-9]{0,13})(?:, (?:0|[1-9][0-9]{0,13}))*+")
_TENSOR = re.compile(r"[tx][0-9]{1,9}")
_INT = re.compile(rf"-?{_NUMBER}")
_STRING = re.compile(r"'[^'\\]*'")
_CHAIN = {"bitcast": 0, "view": 1, "tile": 2, "where": 3}


class Expressions:
    """Operands of one text. `allocs` are the tensors so far, `scope` the indices and program ids in scope."""

    def __init__(self, quick: bool = True) -> None:
        self.quick = quick
        self.line = 0
        self.allocs: dict[str, Alloc] = {}
        self.scope: dict[str, Var] = {}
        self.varies = False  # whether the text being read has used a variable
        self.wholes: dict[str, Access] = {}
        self.shapes: dict[str, Shape] = {}
        self.sizes: dict[str, Shape] = {}
        # by text: operands, and indices for each rank of a tile; without and with variables in scope
        self.fixed: dict[str, Any] = {"True": True, "False": False}
        self.varying: dict[str, Any] = {}
        self.fixed_dims: list[dict[str, Dim]] = [{} for _ in range(t.MAX_RANK + 1)]
        self.varying_dims: list[dict[str, Dim]] = [{} for _ in range(t.MAX_RANK + 1)]

    def error(self, message: str) -> NoReturn:
        raise NkiParseError(message, loc=Loc(t.TEXT_FILE, self.line))

    def leave(self, name: str) -> None:
        """End the scope of a loop index."""
        del self.scope[name]
        self.varying.clear()
        for dims in self.varying_dims:
            dims.clear()

    # the quick road

    def operand(self, text: str) -> Any:
        """Value of the text of an operand."""
        value = self.fixed.get(text, MISSING)
        if value is not MISSING:
            return value
        value = self.varying.get(text, MISSING)
        if value is not MISSING:
            self.varies = True
            return value
        outer, self.varies = self.varies, False
        value = self.short(text) if self.quick else MISSING
        if value is MISSING:
            value = self.value(self.tree(text))
        if self.varies:
            self.varying[text] = value
        else:
            self.fixed[text] = value
            self.varies = outer
        return value

    def short(self, text: str) -> Any:
        """Value of a common form, else MISSING."""
        alloc = self.allocs.get(text)
        if alloc is not None:
            return self.tensor(text)
        m = _ACCESS.fullmatch(text)
        if m is not None:
            name, tile, inside = m.groups()
            alloc = self.allocs.get(name) or self.alloc(name)
            shape = (self.sizes.get(tile) or self.sizes_of(tile)) if tile else alloc.shape
            if shape is None:
                return MISSING
            rank = len(shape)
            fixed, varying = self.fixed_dims[rank], self.varying_dims[rank]
            dims = []
            for part in inside.split(", "):
                dim = fixed.get(part)
                if dim is None:
                    dim = varying.get(part)
                    if dim is not None:
                        self.varies = True
                    else:
                        dim = self.short_dim(part, rank)
                        if dim is None:
                            return MISSING
                dims.append(dim)
            if len(dims) != len(alloc.shape):
                self.error(f"{name} has {len(alloc.shape)} dimensions, not {len(dims)}")
            return Access(alloc, alloc.dtype, tuple(dims), shape)
        if _STRING.fullmatch(text):
            return text[1:-1]
        return int(text) if len(text) < 19 and _INT.fullmatch(text) else MISSING

    def short_dim(self, text: str, rank: int) -> Dim | None:
        if not _SIMPLE.fullmatch(text):
            return None
        outer, self.varies = self.varies, False
        base, strides = self.simple(text, rank)
        dim = (self.varying_dims if self.varies else self.fixed_dims)[rank][text] = Dim(base, strides)
        self.varies |= outer
        return dim

    def simple(self, text: str, rank: int) -> tuple[Affine, Shape]:
        """A sum of numbers, variables and multiples of variables."""
        const, strides = 0, [0] * rank
        terms: dict[Atom, int] = {}
        for part in text.replace(" - ", " + -").split(" + "):
            sign = 1
            if part[0] == "-":
                sign, part = -1, part[1:]
            number, star, name = part.rpartition("*")
            if star:
                const += self.add(name, sign * int(number), terms, strides)
            elif part[0].isdigit():
                const += sign * int(part)
            else:
                const += self.add(name, sign, terms, strides)
        return self.affine(const, terms), self.bounded(strides)

    def short_pred(self, text: str, rank: int) -> Pred | None:
        """A predicate without floor divisions, else None."""
        m = _SIMPLE_PRED.fullmatch(text) if self.quick else None
        return Pred(*self.simple(m[1], rank)) if m else None

    # names and shapes

    def alloc(self, name: str) -> Alloc:
        alloc = self.allocs.get(name)
        if alloc is None:
            self.error(f"{name} is used before it is allocated")
        return alloc

    def tensor(self, name: str) -> Access:
        access = self.wholes.get(name)
        if access is None:
            access = self.wholes[name] = whole(self.alloc(name))
        return access

    def add(self, name: str, coefficient: int, terms: dict[Atom, int], strides: list[int]) -> int:
        """Add coefficient * name to the terms of an expression."""
        var = self.scope.get(name)
        if var is not None:
            self.varies = True
            terms[var] = terms.get(var, 0) + coefficient
        elif (
            name[0] == "d"
            and name[1:].isdigit()
            and len(name) <= 3
            and int(name[1:]) < len(strides)
            and name[1] != "0"
        ):
            strides[int(name[1:])] += coefficient
        elif name == "d0" and strides:
            strides[0] += coefficient
        else:
            self.error(
                f"{name} is not an index in scope"
                + (f" (the tile has {len(strides)} dimensions)" if strides else "")
            )
        return 0

    def affine(self, const: int, terms: dict[Atom, int]) -> Affine:
        self.bounded([const, *terms.values()])
        if not terms:
            return Affine(const) if const else ZERO
        kept = [(a, c) for a, c in terms.items() if c]
        return Affine(const, tuple(sorted(kept, key=_by_key) if len(kept) > 1 else kept))

    def bounded(self, values: list[int]) -> Shape:
        for v in values:
            if not -t.MAX_INDEX < v < t.MAX_INDEX:
                self.error("numbers in index expressions have at most 64 bits")
        return tuple(values)

    def shape_of(self, text: str) -> Shape:
        """Shape from its text."""
        shape = self.shapes.get(text)
        if shape is None:
            inner = text[1:-1]
            known = (
                self.sizes_of(inner[:-1] if inner.count(",") == 1 and inner[-1] == "," else inner)
                if "," in inner
                else None
            )
            shape = self.shapes[text] = self.shape(self.tree(text)) if known is None else known
        return shape

    def sizes_of(self, text: str) -> Shape | None:
        """Shape from its numbers; None if they are not in the common form."""
        shape = self.sizes.get(text)
        if shape is None and _SIZES.fullmatch(text):
            shape = self.sizes[text] = self.checked([int(n) for n in text.split(", ")])
        return shape

    def checked(self, shape: list[int]) -> Shape:
        size = 1
        for n in shape:
            if n < 0:
                self.error("a dimension is negative")
            size *= n or 1
        if len(shape) > t.MAX_RANK or size > t.MAX_ELEMENTS:
            self.error(f"a shape has at most {t.MAX_RANK} dimensions and 2**40 elements")
        return tuple(shape)

    def dtype(self, name: str) -> str:
        if name not in t.DTYPES:
            self.error(f"unknown dtype {name}")
        return name

    # the general road

    def scan(self, text: str) -> str:
        """Check tokens and brackets, and cut a comment off."""
        if len(text) > t.MAX_LINE_BYTES:
            self.error(f"a line has at most {t.MAX_LINE_BYTES} bytes")
        pos = count = run = depth = 0
        end = len(text.rstrip(" "))
        while pos < end:
            m = _TOKEN.match(text, pos)
            if m is None:
                self.error(f"unexpected text at column {pos + 1}")
            pos = m.end()
            count, run = count + 1, run + 1
            kind = m.lastindex
            if kind == 2:
                depth += 1
            elif kind == 3:
                depth -= 1
            elif kind == 4:
                run = 0
            elif kind == 5:
                return text[: m.start(5)].rstrip(" ")
            if count > t.MAX_LINE_TOKENS or run > t.MAX_RUN_TOKENS or depth > t.MAX_BRACKETS:
                self.error("a statement has too many tokens or brackets")
        return text

    def tree(self, text: str) -> ast.expr:
        """Syntax tree of an expression."""
        tree: ast.Expression = self.parse(self.scan(text), "eval")
        return tree.body

    def parse(self, text: str, mode: str) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return ast.parse(text, mode=mode)
        except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as e:
            message = e.msg if isinstance(e, SyntaxError) else "the expression is too large"
        return self.error(f"this is not an IR statement: {message}")

    def name(self, node: ast.expr | None) -> str:
        return node.id if isinstance(node, ast.Name) else ""

    def integer(self, node: ast.expr | None, least: int = -t.MAX_INDEX + 1, below: int = t.MAX_INDEX) -> int:
        value = None
        if (
            isinstance(node, ast.UnaryOp)
            and isinstance(node.op, ast.USub)
            and isinstance(node.operand, ast.Constant)
        ):
            value = node.operand.value
            value = -value if type(value) is int else None
        elif isinstance(node, ast.Constant):
            value = node.value
        if type(value) is not int or not least <= value < below:
            self.error("expected an integer" + ("" if type(value) is not int else " within bounds"))
        return value

    def string(self, node: ast.expr) -> str:
        if not isinstance(node, ast.Constant) or type(node.value) is not str:
            self.error("expected a string")
        return node.value

    def items(self, node: ast.expr) -> list[ast.expr]:
        if not isinstance(node, ast.Tuple):
            self.error("expected a tuple")
        return node.elts

    def shape(self, node: ast.expr) -> Shape:
        return self.checked([self.integer(e) for e in self.items(node)])

    def value(self, node: ast.expr) -> Any:
        """Any operand."""
        if isinstance(node, ast.Constant):
            v = node.value
            if type(v) is int and not -t.MAX_INT < v < t.MAX_INT:
                self.error("integers have at most 64 bits")
            if v is not None and type(v) not in (int, float, bool, str):
                self.error("this literal cannot be an operand")
            return v
        if isinstance(node, ast.Tuple):
            return tuple([self.value(e) for e in node.elts])
        if isinstance(node, ast.Name):
            name = node.id
            if name == "inf" or name == "nan":
                return float(name)
            return self.tensor(name) if _TENSOR.fullmatch(name) else self.sum(node, 0)[0]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            inner = node.operand
            if isinstance(inner, ast.Constant) or self.name(inner) in ("inf", "nan"):
                v = self.value(inner)
                if type(v) not in (int, float):
                    self.error("expected a number after -")
                return -v if v == v else v
        if isinstance(node, ast.Subscript):
            return self.access(node)
        if isinstance(node, ast.Call):
            return self.tile(node)
        return self.sum(node, 0)[0]

    def literal(self, node: ast.expr) -> Any:
        """A compile-time constant."""
        value = self.value(node)
        if not is_literal(value):
            self.error("expected a constant")
        return value

    def tile(self, node: ast.Call) -> IndexTile | PredTile | Affine:
        kind, args = self.name(node.func), node.args
        if node.keywords or not args or kind not in ("index", "iota", "pred"):
            self.error(f"{kind or 'this call'} is not known here")
        if kind == "index":
            return Affine(self.integer(args[0])) if len(args) == 1 else self.error("index(n) has one number")
        shape = self.shape(args[0])
        if kind == "pred":
            return PredTile(tuple([self.pred(a, len(shape)) for a in args[1:]]), shape)
        if len(args) != 2:
            self.error("iota(shape, index) has two arguments")
        base, strides, _ = self.sum(args[1], len(shape))
        return IndexTile(base, strides, shape)

    def access(self, node: ast.expr, depth: int = 0) -> Access:
        """A tensor, or a part of one."""
        if isinstance(node, ast.Name):
            return (
                self.tensor(node.id)
                if _TENSOR.fullmatch(node.id)
                else self.error(f"{node.id} is not a tensor")
            )
        if not isinstance(node, ast.Subscript) or depth > t.MAX_DYNAMIC:
            self.error("expected a tensor, or a part of one: t1.tile(shape)[indices]")
        index = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        calls: dict[str, list[ast.expr]] = {}
        at, last = node.value, len(_CHAIN)
        while isinstance(at, ast.Call) and isinstance(at.func, ast.Attribute):
            order = _CHAIN.get(at.func.attr, last)
            if order >= last or at.keywords:
                self.error(f"{at.func.attr} is not known here: bitcast, view, tile and where, in this order")
            calls[at.func.attr], last, at = at.args, order, at.func.value
        alloc = self.alloc(self.name(at)) if isinstance(at, ast.Name) else self.error("expected a tensor")
        dtype, view = alloc.dtype, None
        mask: tuple[Pred, ...] = ()
        if "bitcast" in calls:
            dtype = self.dtype(self.name(calls["bitcast"][0]) if len(calls["bitcast"]) == 1 else "")
        if "view" in calls:
            view = self.checked([self.integer(e) for e in calls["view"]])
        whole_shape = alloc.shape if view is None else view
        shape = self.checked([self.integer(e) for e in calls["tile"]]) if "tile" in calls else whole_shape
        if "where" in calls:
            mask = tuple([self.pred(e, len(shape)) for e in calls["where"]])
        if len(index) != len(whole_shape):
            self.error(f"{alloc} has {len(whole_shape)} dimensions, not {len(index)}")
        dims = tuple([Dim(*self.sum(e, len(shape), depth)) for e in index])
        return Access(alloc, dtype, dims, shape, view, mask)

    def pred(self, node: ast.expr, rank: int) -> Pred:
        """A predicate over `rank` dimensions."""
        if (
            isinstance(node, ast.Call)
            and self.name(node.func) == "rank"
            and len(node.args) == 2
            and not node.keywords
        ):
            rank, node = self.integer(node.args[0], 0, t.MAX_RANK + 1), node.args[1]
        if not isinstance(node, ast.Compare) or len(node.ops) != 1 or not isinstance(node.ops[0], ast.GtE):
            self.error("expected a predicate: index expression >= 0")
        self.integer(node.comparators[0], 0, 1)
        expr, strides, _ = self.sum(node.left, rank)
        return Pred(expr, strides)

    def sum(
        self, node: ast.expr, rank: int, dynamic: int = -1, divisions: int = 0
    ) -> tuple[Affine, Shape, Access | None]:
        """An index expression. `dynamic` is the nesting level of dynamic indices (-1: not allowed)."""
        const, terms, strides = 0, {}, [0] * rank  # type: int, dict[Atom, int], list[int]
        dyn: Access | None = None
        stack: list[tuple[ast.expr, int]] = [(node, 1)]
        while stack:
            node, c = stack.pop()
            if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
                stack.append((node.right, c if isinstance(node.op, ast.Add) else -c))
                stack.append((node.left, c))
                continue
            if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
                node, c = node.operand, -c
            elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
                factor, node = node.left, node.right
                if isinstance(factor, (ast.Name, ast.BinOp)):
                    self.error(_NOT_AFFINE)
                c *= self.integer(factor)
            if isinstance(node, ast.Name):
                self.add(node.id, c, terms, strides)
            elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv):
                if divisions >= t.MAX_DIVISIONS:
                    self.error(f"floor divisions nest deeper than {t.MAX_DIVISIONS} levels")
                atom = FloorDiv(self.sum(node.left, 0, -1, divisions + 1)[0], self.integer(node.right, 1))
                terms[atom] = terms.get(atom, 0) + c
            elif isinstance(node, ast.Constant):
                const += c * self.integer(node)
            elif (
                dynamic >= 0
                and dyn is None
                and c == 1
                and isinstance(node, ast.Call)
                and self.name(node.func) == "at"
                and len(node.args) == 1
                and not node.keywords
            ):
                dyn = self.access(node.args[0], dynamic + 1)
            else:
                self.error(_NOT_AFFINE)
        return self.affine(const, terms), self.bounded(strides), dyn


_NOT_AFFINE = "an index expression is a sum of numbers, indices, multiples (2*i0) and floor divisions (i0//2)"


def is_literal(value: Any) -> bool:
    """True for numbers, strings, booleans, None and tuples of them."""
    return (
        all(map(is_literal, value))
        if type(value) is tuple
        else value is None or isinstance(value, (int, float, str))
    )


def _by_key(term: tuple[Atom, int]) -> str:
    return term[0].key
