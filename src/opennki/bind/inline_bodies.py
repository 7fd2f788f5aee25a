"""Bodies of instructions with another `np`: the same code, with the module of `inline_values` in the place of NumPy.

A function of `isa/` is made again from its code object, with globals in which NumPy is exchanged and the functions of `isa/` that it calls
are made again likewise. So the meaning of an instruction stays declared once.
"""
from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np

from opennki.bind.inline_numbers import STANDS_IN, scan_free
from opennki.bind.inline_values import numpy_like
from opennki.isa import reduce, scalar
from opennki.isa.declare import ISA

_PACKAGE = "opennki.isa."
_globals: dict[str, dict[str, Any]] = {}
_made: dict[Any, Any] = {}


def _bare(value: Any) -> Any:
    """A function without its decorators: caches hold NumPy arrays, and guards against warnings have nothing to guard."""
    while hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    return value


_STANDS_IN = {_bare(of): value for of, value in STANDS_IN.items()}


@cache
def body_of(op: str) -> Callable[..., Any]:
    """The body of an instruction, for operands that are `Value`s."""
    return translated(ISA[op].body)  # type: ignore[no-any-return]


def _scalar_function(op: Any) -> Callable[..., Any]:
    return _scalars()[scalar.resolve(op)].raw  # type: ignore[no-any-return]


@cache
def _scalars() -> dict[str, Any]:
    return translated(scalar.SCALAR)  # type: ignore[no-any-return]


def translated(value: Any) -> Any:
    """A global of a module of `isa/` (function, table, module) with NumPy exchanged; everything else as it is."""
    if value is np:
        return numpy_like
    if value is np.ndarray:
        return numpy_like.ndarray
    if isinstance(value, dict):
        return _table(value)
    value = _bare(value)
    if not isinstance(value, types.FunctionType) or not value.__module__.startswith(_PACKAGE):
        return value
    if value in _STANDS_IN:
        return _STANDS_IN[value]
    if value is _bare(reduce.scan_free):
        return partial(scan_free, _scalar_function)
    return _made.get(value) or _function(value)


def _table(table: dict[Any, Any]) -> dict[Any, Any]:
    if id(table) not in _made:
        new: dict[Any, Any] = {}
        _made[id(table)] = new
        for key, entry in table.items():
            if dataclasses.is_dataclass(entry) and not isinstance(entry, type):
                called = {f.name: translated(v) for f in dataclasses.fields(entry) if callable(v := getattr(entry, f.name))}
                entry = dataclasses.replace(entry, **called)
            new[key] = translated(entry) if callable(entry) else entry
    return _made[id(table)]  # type: ignore[no-any-return]


def _function(fn: types.FunctionType) -> types.FunctionType:
    space = _globals.setdefault(fn.__module__, {"__builtins__": __builtins__, "__name__": fn.__module__})
    cells = tuple(types.CellType() for _ in fn.__closure__ or ())
    new = types.FunctionType(fn.__code__, space, fn.__name__, fn.__defaults__, cells or None)
    new.__kwdefaults__ = fn.__kwdefaults__
    _made[fn] = new
    for cell, old in zip(cells, fn.__closure__ or (), strict=True):
        cell.cell_contents = translated(old.cell_contents)
    for name in _names(fn.__code__):
        if name in fn.__globals__ and name not in space:
            space[name] = None  # a function that calls itself finds itself below
            space[name] = translated(fn.__globals__[name])
    return new


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
