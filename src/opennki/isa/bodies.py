"""Bodies of instructions with another `np`: the declared code over other arrays.

A function of `isa/` is made again from its code object, with globals in which NumPy is exchanged and the functions of `isa/` that it calls
are made again likewise. So the meaning of an instruction stays declared once, and a compiler reads it by running it.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from opennki.isa.declare import ISA

_PACKAGE = "opennki.isa."


def bare(value: Any) -> Any:
    """A function without its decorators: caches hold NumPy arrays, and guards against warnings have nothing to guard."""
    while hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    return value


class Translator:
    """Bodies over the arrays of another module in the place of NumPy.

    namespace: has the attributes of NumPy that bodies use, `ndarray` among them. stands_in: functions of `isa/` that are replaced as
    they are (reductions, scans: what the other side has its own form of). scalar(name, function): what stands for the callables of
    the table of scalar functions; None: they are translated like everything else.
    """

    def __init__(
        self,
        namespace: Any,
        stands_in: dict[Any, Any],
        scalar: Callable[[str, Callable[..., Any]], Any] | None = None,
    ) -> None:
        self.namespace = namespace
        self.stands_in = {bare(of): value for of, value in stands_in.items()}
        self.scalar = scalar
        self._start()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._start)

    def _start(self) -> None:
        """Know nothing yet; also in a forked process, where another thread may have been in the middle of it."""
        self._lock = threading.RLock()  # what is made refers to itself, and others see it when it is complete
        self._globals: dict[str, dict[str, Any]] = {}
        self._made: dict[Any, Any] = {}
        self._bodies: dict[str, Callable[..., Any]] = {}

    def body(self, op: str) -> Callable[..., Any]:
        """The body of an instruction."""
        found = self._bodies.get(op)
        if found is None:
            with self._lock:
                found = self._bodies[op] = self._of(ISA[op].body)
        return found

    def __call__(self, value: Any) -> Any:
        """A global of a module of `isa/` (function, table, module) with NumPy exchanged; everything else as it is."""
        with self._lock:
            return self._of(value)

    def _of(self, value: Any) -> Any:
        if value is np:
            return self.namespace
        if value is np.ndarray:
            return self.namespace.ndarray
        if isinstance(value, dict):
            return self._table(value)
        value = bare(value)
        if not isinstance(value, types.FunctionType) or not value.__module__.startswith(_PACKAGE):
            return value
        if value in self.stands_in:
            return self.stands_in[value]
        return self._made.get(value) or self._function(value)

    def _table(self, table: dict[Any, Any]) -> dict[Any, Any]:
        if id(table) not in self._made:
            new: dict[Any, Any] = {}
            self._made[id(table)] = new
            for key, entry in table.items():
                if dataclasses.is_dataclass(entry) and not isinstance(entry, type):
                    called = {f.name: v for f in dataclasses.fields(entry) if callable(v := getattr(entry, f.name))}
                    name = getattr(entry, "name", None)
                    if self.scalar is not None and isinstance(name, str):
                        made = {field: self.scalar(name, fn) for field, fn in called.items() if field != "exact_int"}
                    else:
                        made = {field: self._of(fn) for field, fn in called.items()}
                    entry = dataclasses.replace(entry, **made)
                new[key] = self._of(entry) if callable(entry) else entry
        return self._made[id(table)]  # type: ignore[no-any-return]

    def _function(self, fn: types.FunctionType) -> types.FunctionType:
        space = self._globals.setdefault(fn.__module__, {"__builtins__": __builtins__, "__name__": fn.__module__})
        cells = tuple(types.CellType() for _ in fn.__closure__ or ())
        new = types.FunctionType(fn.__code__, space, fn.__name__, fn.__defaults__, cells or None)
        new.__kwdefaults__ = fn.__kwdefaults__
        self._made[fn] = new
        for cell, old in zip(cells, fn.__closure__ or (), strict=True):
            cell.cell_contents = self._of(old.cell_contents)
        for name in _names(fn.__code__):
            if name in fn.__globals__ and name not in space:
                space[name] = None  # a function that calls itself finds itself below
                space[name] = self._of(fn.__globals__[name])
        return new


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
