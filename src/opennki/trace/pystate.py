"""What a loop body does to Python: where its `for` stands, and whether an iteration changes state that the next one sees."""
from __future__ import annotations

import dis
import types
from functools import lru_cache
from typing import Any

from opennki.ir.affine import Affine
from opennki.lang.bytecode import instructions, positions
from opennki.lang.index import Condition, Index, Mask
from opennki.lang.tensor import Tensor

_COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})
_SCALARS = (int, float, complex, str, bytes, bool, type(None))
_LIMIT = 4096


def site(frame: types.FrameType | None) -> Any:
    """Identity of a loop statement: code object and offset."""
    return None if frame is None else (frame.f_code, frame.f_lasti)


def plain_for(frame: types.FrameType | None) -> bool:
    """True when the iterator is asked for by a `for` statement itself: not by a comprehension, enumerate, zip or list."""
    if frame is None or frame.f_code.co_name in _COMPREHENSIONS:
        return False
    code = frame.f_code
    position = positions(code).get(frame.f_lasti)
    if position is None or instructions(code)[position].opname != "GET_ITER":
        return False
    if instructions(code)[position + 1].opname != "FOR_ITER":
        return False  # a comprehension: its iterator is made here and consumed in a frame of its own
    region = _region(frame.f_code, frame.f_lasti)
    # comprehensions inlined by Python 3.12 build their value inside the loop
    return not any(ins.opname in ("LIST_APPEND", "SET_ADD", "MAP_ADD", "YIELD_VALUE") for ins in region)


@lru_cache(maxsize=4096)
def _region(code: types.CodeType, offset: int) -> tuple[dis.Instruction, ...]:
    """The instructions of the loop body whose GET_ITER or FOR_ITER is at an offset."""
    found, start = instructions(code), positions(code)[offset]
    while start < len(found) and found[start].opname != "FOR_ITER":
        start += 1
    if start == len(found):
        return ()
    end = found[start].argval
    return tuple([ins for ins in found[start + 1:] if ins.offset < end])


@lru_cache(maxsize=4096)
def _read_first(code: types.CodeType, offset: int) -> frozenset[str]:
    """Variables that the loop body may read before it writes them: they carry state into the next iteration."""
    written: set[str] = set()
    carried: set[str] = set()
    barrier = -1
    for ins in _region(code, offset):
        if ins.opname.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE", "LOAD_NAME")):
            names = ins.argval if isinstance(ins.argval, tuple) else (ins.argval,)
            carried |= {n for n in names if n not in written}
        elif ins.opname.startswith(("STORE_FAST", "STORE_DEREF", "STORE_NAME")):
            names = ins.argval if isinstance(ins.argval, tuple) else (ins.argval,)
            if ins.opname == "STORE_FAST_LOAD_FAST":
                written.add(names[0])
                carried |= {n for n in names[1:] if n not in written}
            elif ins.offset >= barrier:
                written |= set(names)
        elif "JUMP" in ins.opname and isinstance(ins.argval, int) and ins.argval > ins.offset:
            barrier = max(barrier, ins.argval)  # what is stored before the target may not have been stored
        elif ins.opname == "FOR_ITER":
            barrier = max(barrier, ins.argval)
    return frozenset(carried)


def snapshot(frame: types.FrameType) -> Any:
    """State of the locals that a loop body could change."""
    carried = _read_first(frame.f_code, frame.f_lasti)
    return {name: _state(value, 0, name in carried) for name, value in frame.f_locals.items()}


def changed(frame: types.FrameType, before: dict[str, Any]) -> str:
    """Name of a variable that the body has changed and the next iteration sees, else ''."""
    carried = _read_first(frame.f_code, frame.f_lasti)
    now = frame.f_locals
    for name, old in before.items():
        if name in now and not _equal(old, _state(now[name], 0, name in carried)):
            return name
    return ""


def _state(value: Any, depth: int, carried: bool) -> Any:
    """Comparable state of a value: scalars count when the body reads them first, containers always."""
    if isinstance(value, _SCALARS):
        return value if carried or depth else None
    if isinstance(value, (Tensor, types.ModuleType, types.FunctionType, type, types.BuiltinFunctionType, types.MethodType)):
        # a rebound tensor is scoped to the body; inside a container its identity counts
        return value if depth else None
    if isinstance(value, Index):
        return ("index", value.base.key(), value.strides, value.shape) if carried or depth else None
    if isinstance(value, (Mask, Condition, Affine)):
        return None
    if depth > 3:
        return None
    if isinstance(value, (list, tuple)):
        # the container itself may be rebound in the body without harm unless it is read first
        if isinstance(value, tuple) and not carried and not depth:
            return None
        return (type(value), id(value) if isinstance(value, list) and carried else 0, len(value),
                [_state(v, depth + 1, True) for v in value[:_LIMIT]])
    if isinstance(value, dict):
        return (dict, 0, len(value), [(k if isinstance(k, _SCALARS) else 0, _state(v, depth + 1, True))
                                      for k, v in list(value.items())[:_LIMIT]])
    if isinstance(value, (set, frozenset)):
        return (set, 0, len(value), None)
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict) and attributes:
        return ("object", id(value) if carried else 0, len(attributes),
                [(k, _state(v, depth + 2, True)) for k, v in list(attributes.items())[:64] if not k.startswith("__")])
    return None


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, (tuple, list)) and type(a) is type(b):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, _SCALARS) and isinstance(b, _SCALARS):
        return type(a) is type(b) and (a == b or (a != a and b != b))
    return False
