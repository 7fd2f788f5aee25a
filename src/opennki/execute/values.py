"""Questions about the values of a program: their parts, their work, their dtypes."""

from __future__ import annotations

from opennki.execute.record import Sym, Unsupported, strides_of
from opennki.isa.scalar import SCALAR


def in_order(out: Sym, leaf: Sym) -> bool:
    """Whether an operand that has the place of a result is walked in the order of the result."""
    if out.size != leaf.size:
        return False
    try:
        walk = strides_of(out.shape, out.strides, leaf.shape)
    except Unsupported:
        return False
    return all(n == 1 or a == b for n, a, b in zip(leaf.shape, leaf.strides, walk, strict=True))


def leaves(value: Sym) -> list[Sym]:
    """The symbols without parts inside a value, each as often as it is there."""
    if not value.args:
        return [value]
    out: list[Sym] = []
    for a in value.args:
        if a.args:
            out += leaves(a)
        else:
            out.append(a)
    return out


# ---- what has a kernel of its own -----------------------------------------------------------------------------------


def effort(sym: Sym) -> int:
    """About how much work a value is: 1 for an operation of the CPU."""
    if sym.kind == "fold" or not sym.args:
        return 0
    own = 1
    if sym.kind == "call":
        text = SCALAR[sym.name].c
        own = 8 if "f(" in text or "exp(" in text or "nki_" in text else 4 if "/" in text or "sqrt" in text else 1
    return own + sum(effort(a) for a in sym.args)


def folds_of(sym: Sym) -> list[Sym]:
    """The folds in a value, outer before inner."""
    out = [sym] if sym.kind == "fold" else []
    for a in sym.args:
        if a.args:
            out += folds_of(a)
    return out


NUMBERS = {"float32": 0, "bfloat16": 1, "float16": 2, "float8_e4m3": 3, "float8_e4m3fn": 4, "float8_e5m2": 5, "int32": 7, "uint32": 8,
            "int16": 9, "uint16": 10, "int8": 11, "uint8": 12, "bool": 13}  # fmt: skip


def dtype_number(sym: Sym) -> int:
    """Number of a dtype. Raises Unsupported."""
    number = NUMBERS.get(sym.dtype.name)
    if number is None:
        raise Unsupported(f"bits of {sym.dtype}")
    return number


def converted(value: Sym, dtype: int) -> Sym:
    """A raw tile as numbers, where its conversion to another dtype goes through float32 without loss that shows."""
    if value.kind != "tile":
        raise Unsupported("bits stored as another dtype")
    if (dtype_number(value), dtype) in ((7, 8), (8, 7)):
        raise Unsupported("a conversion between 32-bit integers")
    return Sym("tile", value.shape, value.dtype, strides=value.strides, source=value.source)


def integer(value: float) -> int:
    """A constant operand of a function on bits."""
    if value != int(value) or abs(value) >= 1 << 24:
        raise Unsupported("an integer constant")
    return int(value)
