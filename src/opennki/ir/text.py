"""What the writer and the reader of the IR text share: version, bounds, names, literals, constant data.

The grammar is in `print`.
"""

from __future__ import annotations

import base64
import enum
import keyword
import math
import os.path
import re
from typing import Any

import ml_dtypes
import numpy as np

from opennki.errors import UNKNOWN, NkiValueError
from opennki.ir.nodes import Kernel
from opennki.isa import dtypes

FORMAT_VERSION = 1

# Bounds of a text. The writer refuses what the reader would.
TEXT_FILE = "<ir>"
"""The file that errors in an IR text name, where its reader does not know better."""
MAX_TEXT_BYTES = 256 << 20
MAX_LINE_BYTES = 1 << 20
MAX_LINE_TOKENS = 1 << 16
MAX_RUN_TOKENS = (
    1024  # tokens between two commas: bounds the length of an operator chain, so the depth of the tree
)
MAX_BRACKETS = 48
MAX_NESTING = 90  # blocks; Python itself stops at 100 levels of indentation
MAX_STATEMENTS = 1 << 22
MAX_CONSTANTS = 1 << 16
MAX_CONSTANT_BYTES = 16 << 20
"""Largest constant array of a kernel, in bytes. A larger one is an error: pass it to the kernel as input."""
MAX_LITERAL_BYTES = 256  # constants up to here are written as numbers, larger ones in base64
MAX_ELEMENTS = 1 << 40  # of a tensor, tile or grid; also the longest loop
MAX_RANK = 16
MAX_INT = 1 << 64  # operands; exclusive, both signs
MAX_INDEX = 1 << 63  # numbers in index expressions; exclusive, both signs
MAX_DIVISIONS = 12  # floor divisions inside each other
MAX_TUPLES = 12  # tuples inside each other
MAX_DYNAMIC = 4  # dynamic indices inside each other

SPACES = frozenset({"sbuf", "psum", "hbm", "private_hbm", "shared_hbm", "register"})
KINDS = frozenset({"local", "param", "constant", "register"})
DTYPES = frozenset(dtypes.NAMES)
STATEMENTS = SPACES | {"opennki_ir", "kernel", "data", "written", "outputs", "repeat_while"}
ATTRIBUTES = ("mask", "engine", "call")  # of an instruction; no operand has these names except plumbing

_ARRAYS = (
    "bool",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
)
_ML = ("bfloat16", "float8_e4m3", "float8_e4m3fn", "float8_e5m2")
ARRAY_DTYPES: dict[str, np.dtype[Any]] = {
    **{n: np.dtype(n).newbyteorder("<") for n in _ARRAYS},
    **{n: np.dtype(getattr(ml_dtypes, n)) for n in _ML},
}

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_TAKEN = re.compile(r"[txcd][0-9]+")
_WORDS = (
    frozenset(
        {
            "inf",
            "nan",
            "at",
            "index",
            "iota",
            "pred",
            "rank",
            "param",
            "constant",
            "affine",
            "sequential",
            "do",
        }
    )
    | STATEMENTS
)
Literal = Any  # int | float | bool | str | None | tuple of these


def is_name(name: str) -> bool:
    """True for the name of an instruction, engine or keyword argument."""
    return _NAME.fullmatch(name) is not None and not keyword.iskeyword(name)


def is_variable(name: str) -> bool:
    """True for a name that a loop index or program id can have in the text."""
    return is_name(name) and name not in _WORDS and not _TAKEN.fullmatch(name)


def tensor_name(number: int) -> str:
    """Name of a tensor: t0, t1 ... by its number; x0, x1 ... for the numbers -1, -2 ... (inputs)."""
    return f"t{number}" if number >= 0 else f"x{-1 - number}"


def plain(value: Any, depth: int = 0) -> Literal:
    """A compile-time constant as plain Python: NumPy scalars and enums become numbers, lists become tuples.

    Errors: NkiValueError for anything that the text cannot hold.
    """
    kind = type(value)
    if kind in _PLAIN:
        if kind is int and not -MAX_INT < value < MAX_INT:
            raise NkiValueError("integer operands have at most 64 bits", loc=UNKNOWN)
        return value
    if isinstance(value, enum.Enum):
        return plain(value.value, depth)
    if isinstance(value, (tuple, list)) and depth <= MAX_TUPLES:
        return tuple([plain(v, depth + 1) for v in value])
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, (np.integer, int)):
        return plain(int(value))
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float) or (isinstance(value, np.generic) and value.dtype.name in ARRAY_DTYPES):
        return float(value)
    raise NkiValueError(
        f"a value of type {kind.__name__} cannot be an operand of the IR",
        loc=UNKNOWN,
        fix="use numbers, strings, booleans, None and tuples of them",
    )


_PLAIN = frozenset({int, float, bool, str, type(None)})


def literal_text(value: Literal) -> str:
    """Python literal of a plain value; exact (inf and nan are names)."""
    if type(value) is str:
        return ascii(value)
    if type(value) is tuple:
        return tuple_text([literal_text(v) for v in value])
    if type(value) is float and not math.isfinite(value):
        return "nan" if value != value else "inf" if value > 0 else "-inf"
    return repr(value)


def tuple_text(items: list[str]) -> str:
    """Tuple of texts."""
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def data_text(array: np.ndarray[Any, Any]) -> str:
    """Text of a constant array: numbers if it is small and they keep every bit, else base64 of its bytes."""
    name = array.dtype.name
    if array.nbytes > MAX_CONSTANT_BYTES:
        raise NkiValueError(
            f"a constant of {array.nbytes} bytes is larger than {MAX_CONSTANT_BYTES} bytes",
            loc=UNKNOWN,
            fix="pass the array to the kernel as an input",
        )
    kind = ARRAY_DTYPES.get(name)
    if kind is None:
        raise NkiValueError(f"a constant cannot have dtype {name}", loc=UNKNOWN)
    flat = np.ascontiguousarray(array, dtype=kind).reshape(-1)
    raw = flat.tobytes()
    body = ""
    if len(raw) <= MAX_LITERAL_BYTES:
        with np.errstate(invalid="ignore"):
            wide = flat if flat.dtype.kind in "biuf" else flat.astype(np.float64)
            # as read back: a NaN without its payload
            values = tuple([math.nan if v != v else v for v in wide.tolist()])
            back = np.array(values, np.float64 if wide.dtype.kind == "f" else kind).astype(kind)
        if back.tobytes() == raw:
            body = literal_text(values)
    shape = tuple_text([str(n) for n in array.shape])
    return f"data({name}, {shape}, {body or repr(base64.b64encode(raw).decode())})"


class RelativeFiles:
    """Names of source files relative to the folder of the kernel's file, that is of its first location."""

    def __init__(self, kernel: Kernel) -> None:
        first = next((loc.file for loc in kernel.locs if loc.line > 0 and not loc.file.startswith("<")), "")
        self.folder = os.path.dirname(os.path.abspath(first)) if first else ""
        self.names: dict[str, str] = {}

    def __call__(self, file: str) -> str:
        """Name of a file, with forward slashes and in ASCII."""
        name = self.names.get(file)
        if name is None:
            name = file
            if self.folder and os.path.isabs(file):
                try:
                    name = os.path.relpath(file, self.folder)
                except ValueError:  # another drive
                    name = os.path.basename(file)
            name = self.names[file] = ascii(name.replace(os.sep, "/"))[1:-1]
        return name
