"""Address counters: Python integers that a loop body advances and uses for nothing but the addresses of tensors.

Kernels that allocate directly count bytes as they go (`tile = nl.ndarray(..., buffer=ncc.sbuf.mod_alloc(base_addr=at)); at += size`), in
loop bodies too. The body of a symbolic loop runs once: the tensors of all iterations have the address of that one run, and the counter
goes on from there. So such a counter is no state that would make iterations differ.
"""
from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType

from opennki.lang.bytecode import instructions, positions

ADDRESSES = frozenset({"base_addr", "base_bank", "base_partition"})  # keywords of mod_alloc


@lru_cache(maxsize=1024)
def is_address_counter(code: CodeType, offset: int, name: str) -> bool:
    """True when the body of the loop whose GET_ITER or FOR_ITER is at an offset uses an integer variable only as an address. Without
    its source, nothing is known."""
    loop = _loop(code, offset)
    if loop is None:
        return False
    uses = [parents for node, parents in _walk(loop.body, ()) if isinstance(node, ast.Name) and node.id == name
            and isinstance(node.ctx, ast.Load)]
    return any(_is_address(parents) for parents in uses) and all(_is_address(p) or _is_update(p, name) for p in uses)


def _is_address(parents: tuple[ast.AST, ...]) -> bool:
    return any(isinstance(p, ast.keyword) and p.arg in ADDRESSES for p in parents)


def _is_update(parents: tuple[ast.AST, ...], name: str) -> bool:
    """In the statement that gives the variable its own next value."""
    for p in parents:
        targets = p.targets if isinstance(p, ast.Assign) else [p.target] if isinstance(p, ast.AugAssign) else []
        if targets:
            return all(isinstance(t, ast.Name) and t.id == name for t in targets)
    return False


def _walk(nodes: list[ast.stmt], parents: tuple[ast.AST, ...]) -> Iterator[tuple[ast.AST, tuple[ast.AST, ...]]]:
    stack: list[tuple[ast.AST, tuple[ast.AST, ...]]] = [(n, parents) for n in nodes]
    while stack:
        node, above = stack.pop()
        yield node, above
        stack += [(child, (*above, node)) for child in ast.iter_child_nodes(node)]


def _loop(code: CodeType, offset: int) -> ast.For | None:
    position = positions(code).get(offset)
    if position is None:
        return None
    place = instructions(code)[position].positions
    tree = _tree(code.co_filename, "".join(linecache.getlines(code.co_filename)))
    if tree is None or place is None:
        return None
    here = place.lineno, place.col_offset  # of the statement, or of what it iterates over: that depends on the version of Python
    for node in ast.walk(tree):
        if isinstance(node, ast.For) and here in ((node.lineno, node.col_offset), (node.iter.lineno, node.iter.col_offset)):
            return node
    return None


@lru_cache(maxsize=16)
def _tree(filename: str, source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
