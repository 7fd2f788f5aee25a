"""The key under which a traced kernel is kept: tensors by shape and dtype, everything else by type and bits.

1, True and 1.0 are equal in Python and different constants in a kernel. Source: seeds "The specialization cache key".
"""

from __future__ import annotations

import dataclasses
import inspect
import struct
from collections.abc import Callable
from types import CodeType
from typing import Any

import numpy as np

from opennki.errors import NkiError, make
from opennki.trace.kernel import DeclTensor


def return_shape_dtype_or_hashable(value: Any, name: str) -> Any:
    """Part of the key for one argument whose tensors are DeclTensors.

    Errors: err_nki_param_not_hashable (NkiTypeError) that names the argument.
    """
    if isinstance(value, DeclTensor):
        return value
    if type(value) in (list, dict) and _holds_tensor(value):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return type(value), tuple((k, return_shape_dtype_or_hashable(v, f"{name}[{k!r}]")) for k, v in items)
    try:
        return constant_key(value)
    except TypeError:
        raise _not_hashable(value, name) from None


def _not_hashable(value: Any, name: str) -> NkiError:
    return make("err_nki_param_not_hashable", f"the argument {name!r} is a {type(value).__name__}, which is not hashable", operand=name)


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_holds_tensor, value))
    if isinstance(value, dict):
        return any(map(_holds_tensor, value.values()))
    return isinstance(value, DeclTensor)


def constant_key(value: Any) -> Any:
    """A hashable that is equal for equal constants only: of the same type, with the same bits. TypeError for an
    unhashable one."""
    kind = type(value)
    if kind is float:
        return kind, struct.pack("<d", value)
    if value is None or kind in (str, bytes, bool, int) or isinstance(value, (type, CodeType)):
        return kind, value
    if isinstance(value, DeclTensor):
        return value
    if kind is complex:
        return kind, struct.pack("<2d", value.real, value.imag)
    if isinstance(value, np.generic):
        return kind, value.dtype.str, value.tobytes()
    if isinstance(value, tuple):
        return kind, tuple(map(constant_key, value))
    if isinstance(value, frozenset):
        return kind, frozenset(map(constant_key, value))
    if kind is slice:  # hashable from Python 3.12 on
        return kind, constant_key((value.start, value.stop, value.step))
    hash(value)
    if dataclasses.is_dataclass(value):
        return kind, tuple(constant_key(getattr(value, f.name)) for f in dataclasses.fields(value) if f.compare)
    return kind, value


def captured(func: Callable[..., Any]) -> Any:
    """What a kernel takes from around it and that can change between calls: numbers, text and tuples in its closure
    and among the globals that it names. Without it, a changed global would silently keep its old value."""
    inner = inspect.unwrap(func)
    code = getattr(inner, "__code__", None)
    if code is None:
        return ()
    names = getattr(inner, "__globals__", {})
    values = [(name, names[name]) for name in _global_names(code) if name in names]
    for name, cell in zip(code.co_freevars, inner.__closure__ or (), strict=True):
        try:
            values.append((name, cell.cell_contents))
        except ValueError:  # not set yet
            continue
    return tuple((name, constant_key(value)) for name, value in values if _is_plain(value))


def watcher(func: Callable[..., Any]) -> Callable[[], tuple[Any, ...]]:
    """A function that gives the objects that `captured` looks at. Where they are the same objects as before, `captured` gives the same
    key: numbers, text and tuples do not change. It takes a tenth of the time."""
    inner = inspect.unwrap(func)
    code = getattr(inner, "__code__", None)
    names = _global_names(code) if code is not None else ()
    get = getattr(inner, "__globals__", {}).get
    cells = getattr(inner, "__closure__", None) or ()
    if not cells:
        return lambda: tuple(map(get, names))
    return lambda: tuple(map(get, names)) + tuple(map(_contents, cells))


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


_NAMES: dict[CodeType, tuple[str, ...]] = {}


def _global_names(code: CodeType) -> tuple[str, ...]:
    known = _NAMES.get(code)
    if known is None:
        found = dict.fromkeys(code.co_names)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                found.update(dict.fromkeys(_global_names(constant)))
        if len(_NAMES) > 4096:
            _NAMES.clear()
        known = _NAMES[code] = tuple(found)
    return known


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return len(value) <= 64 and all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str, bytes) or isinstance(value, np.generic)
