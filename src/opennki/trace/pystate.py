"""What a loop body does to Python: where its `for` stands, and whether an iteration changes state that the next one sees."""
from __future__ import annotations

import dis
import types
from bisect import bisect_left
from functools import lru_cache
from typing import Any

from opennki.ir.affine import Affine
from opennki.lang.bytecode import instructions, positions
from opennki.lang.index import Condition, Index, Mask
from opennki.lang.tensor import Tensor
from opennki.trace.counters import is_address_counter

_COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})
_ADDS = frozenset({"LIST_APPEND", "SET_ADD", "MAP_ADD"})
_JUMPS = frozenset(dis.hasjrel) | frozenset(dis.hasjabs)
_LEAVES = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE", "RETURN_", "RAISE_VARARGS", "RERAISE")  # nothing falls through these
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
    return not _builds(code, frame.f_lasti)


@lru_cache(maxsize=4096)
def _builds(code: types.CodeType, offset: int) -> bool:
    """True for the loop of a generator, or of a comprehension that Python 3.12 has inlined.

    Such a loop adds to a container below its iterator on the stack. The same instructions build the arguments of a call with many keywords,
    a long display, or a comprehension inside of the body: there the container lies above the iterator.
    """
    ends: list[int] = []  # where the inner loops end that are open: each has an iterator on the stack
    for ins in _region(code, offset):
        while ends and ins.offset >= ends[-1]:
            ends.pop()
        if ins.opname == "FOR_ITER":
            ends.append(ins.argval)
        elif ins.opname == "YIELD_VALUE" or (ins.opname in _ADDS and (ins.arg or 0) - 1 > len(ends)):
            return True
    return False


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
    """Variables that the loop body may read before it writes them: they carry state into the next iteration.

    A walk over every path through the body, with the variables that are certainly written when an instruction is reached.
    """
    region = _region(code, offset)
    places = [ins.offset for ins in region]
    handlers = [(e.start, e.end, e.target) for e in dis.Bytecode(code).exception_entries]  # type: ignore[attr-defined]
    written: dict[int, frozenset[str]] = {}
    carried: set[str] = set()
    work: list[tuple[int, frozenset[str]]] = [(0, frozenset())]
    while work:
        i, known = work.pop()
        if i >= len(region) or (i in written and written[i] <= known):
            continue  # out of this iteration, or nothing new
        written[i] = known = known & written.get(i, known)
        ins = region[i]
        ways = [target for first, end, target in handlers if first <= ins.offset < end]
        work += [(bisect_left(places, target), known) for target in ways]
        for effect, name in _effects(ins):
            if effect == "read" and name not in known:
                carried.add(name)
            elif effect != "read":
                known = known | {name} if effect == "write" else known - {name}
        if ins.opcode in _JUMPS and ins.argval >= places[0]:
            work.append((bisect_left(places, ins.argval), known))
        if not ins.opname.startswith(_LEAVES):
            work.append((i + 1, known))
    return frozenset(carried)


def _effects(ins: dis.Instruction) -> list[tuple[str, str]]:
    """What an instruction does to variables, in order: (read, write or drop; name)."""
    op, names = ins.opname, ins.argval if isinstance(ins.argval, tuple) else (ins.argval,)
    if op == "STORE_FAST_LOAD_FAST":
        return [("write", names[0]), ("read", names[1])]
    if op == "LOAD_FAST_AND_CLEAR":
        return [("read", names[0]), ("drop", names[0])]
    if op.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE", "LOAD_NAME")):
        return [("read", n) for n in names]
    if op.startswith(("STORE_FAST", "STORE_DEREF", "STORE_NAME")):
        return [("write", n) for n in names]
    if op.startswith(("DELETE_FAST", "DELETE_DEREF", "DELETE_NAME")):
        return [("drop", n) for n in names]
    return []


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
            if type(old) is type(now[name]) is int and is_address_counter(frame.f_code, frame.f_lasti, name):
                continue
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
