"""Annotations: nt.tensor[...], nt.mutable_tensor, and the check of local annotations at trace.

Python does not evaluate the annotation of a local variable. Those of a kernel are found in its source, and
checked when the next instruction is emitted from the same frame. Source: api_legacy neuronxcc.nki.typing,
err_annotation_shape_mismatch.
"""

from __future__ import annotations

import ast
import inspect
import operator
import textwrap
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from opennki.errors import Loc, make
from opennki.ir import build
from opennki.lang.tensor import Tensor


class Mutable:
    """The qualifier `nt.mutable`."""

    def __repr__(self) -> str:
        return "nt.mutable"


mutable = Mutable()


@dataclass(frozen=True)
class TensorType:
    """The annotation of a tensor: `tensor`, `tensor[dim, ...]`, `tensor[mutable]`. `nki_mutable`: the
    kernel may write the parameter.
    """

    shape: tuple[Any, ...] | None = None
    nki_mutable: bool = False

    def __getitem__(self, items: Any) -> TensorType:
        given = items if isinstance(items, tuple) else (items,)
        dims = tuple(d for d in given if not isinstance(d, Mutable))
        return TensorType(dims or self.shape, self.nki_mutable or len(dims) < len(given))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("nt.tensor is an annotation; nl.ndarray makes a tensor")

    def __repr__(self) -> str:
        return (
            "nt.mutable_tensor"
            if self.nki_mutable and not self.shape
            else f"nt.tensor{list(self.shape) if self.shape else ''}"
        )


tensor = TensorType()
mutable_tensor = TensorType(nki_mutable=True)


@dataclass(frozen=True, slots=True)
class _Local:
    """An annotated assignment: its lines, the annotation, and whether it is the variable's only
    assignment.
    """

    name: str
    first: int
    last: int
    annotation: ast.Subscript
    only: bool


_locals: dict[CodeType, tuple[_Local, ...]] = {}


def _find(code: CodeType) -> tuple[_Local, ...]:
    """The annotated assignments of a function whose annotation is a subscript; none where the source is
    not available.
    """
    try:
        lines, start = inspect.getsourcelines(code)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError, TypeError, IndentationError):
        return ()
    body = tree.body[0] if tree.body else None
    if not isinstance(body, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return ()
    own = [node for statement in body.body for node in _walk(statement)]
    stores: dict[str, int] = {}
    for node in own:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            stores[node.id] = stores.get(node.id, 0) + 1
    return tuple(
        _Local(
            node.target.id,
            node.lineno + start - 1,
            (node.end_lineno or node.lineno) + start - 1,
            node.annotation,
            stores.get(node.target.id) == 1,
        )
        for node in own
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and node.value is not None
        and isinstance(node.annotation, ast.Subscript)
    )


def _walk(node: ast.AST) -> Any:
    """The nodes of a function body without those of inner functions."""
    yield node
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
        return
    for child in ast.iter_child_nodes(node):
        yield from _walk(child)


_OPERATORS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


class _UnknownError(Exception):
    """An expression that is not evaluated."""


def _value(node: ast.AST, frame: FrameType, names: dict[str, Any]) -> Any:
    """Value of names, attributes, integers and their arithmetic; nothing is called."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        for scope in (names, frame.f_globals):
            if node.id in scope:
                return scope[node.id]
        raise _UnknownError
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, frame, names)
        found = getattr(owner, node.attr, _UnknownError)
        if found is _UnknownError:
            raise _UnknownError
        return found
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _int(
            _OPERATORS[type(node.op)], _value(node.left, frame, names), _value(node.right, frame, names)
        )
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _int(_OPERATORS[type(node.op)], _value(node.operand, frame, names))
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):  # x.shape[0]
        owner = _value(node.value, frame, names)
        if (
            isinstance(owner, tuple)
            and isinstance(node.slice.value, int)
            and -len(owner) <= node.slice.value < len(owner)
        ):
            return owner[node.slice.value]
    raise _UnknownError


def _int(op: Any, *values: Any) -> int:
    if any(not isinstance(v, int) for v in values) or (
        op in (operator.floordiv, operator.mod) and values[1] == 0
    ):
        raise _UnknownError
    return int(op(*values))


def _stated_shape(local: _Local, frame: FrameType, names: dict[str, Any]) -> tuple[int, ...] | None:
    try:
        if not isinstance(_value(local.annotation.value, frame, names), TensorType):
            return None
        items = (
            local.annotation.slice.elts
            if isinstance(local.annotation.slice, ast.Tuple)
            else [local.annotation.slice]
        )
        dims = [_value(item, frame, names) for item in items]
    except _UnknownError:
        return None
    dims = [d for d in dims if not isinstance(d, Mutable)]
    return tuple(int(d) for d in dims) if dims and all(isinstance(d, int) for d in dims) else None


def _same(stated: tuple[int, ...], real: tuple[int, ...]) -> bool:
    """Equal, but for trailing dimensions of size 1 (a row of one element per partition is (P, 1) on chip)."""
    short, long = sorted((stated, real), key=len)
    return long[: len(short)] == short and all(n == 1 for n in long[len(short) :])


def on_line(builder: build.Builder, frame: FrameType) -> None:
    """Check the annotated locals of a frame, each tensor once; functions without any are not asked again."""
    code = frame.f_code
    found = _locals.get(code)
    if found is None:
        found = _locals[code] = _find(code)
    if not found:
        build.quiet_codes.add(code)
        return
    checked = builder.options.setdefault("annotations", {})
    names = frame.f_locals
    for local in found:
        value = names.get(local.name)
        if (
            not isinstance(value, Tensor)
            or local.first <= frame.f_lineno <= local.last
            or checked.get((code, local.first)) is value
        ):
            continue
        made = value.access.alloc.loc
        here = made is not None and made.file == code.co_filename and local.first <= made.line <= local.last
        if not here and not local.only:
            continue
        checked[(code, local.first)] = value
        stated = _stated_shape(local, frame, names)
        if stated is not None and not _same(stated, value.shape):
            raise make(
                "err_annotation_shape_mismatch",
                f"{local.name} is annotated as {stated} and has shape {value.shape}",
                operand=value.describe(),
                loc=Loc(code.co_filename, local.first, code.co_name),
            )


build.line_hook = on_line
