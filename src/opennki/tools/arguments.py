"""What commands take on the command line for a kernel: its arguments as texts, its target and its launch grid."""

from __future__ import annotations

import ast
import re
from typing import Any

from opennki.errors import NkiError
from opennki.isa import dtypes
from opennki.kernels.base import TraceKernel
from opennki.kernels.generic import GenericKernel
from opennki.trace.kernel import DeclTensor


def kernel_for(kernel: Any, target: str | None, grid: str) -> Any:
    """A function or kernel as a kernel for a target and a launch grid."""
    if not isinstance(kernel, TraceKernel):
        kernel = GenericKernel(kernel, "trace")
    if target:
        kernel = kernel.copy(platform_target=target)
    if grid:
        try:
            kernel = kernel[tuple(int(n) for n in grid.split(","))]
        except ValueError as exc:
            if isinstance(exc, NkiError):
                raise
            raise LookupError(f"--grid {grid}: integers with commas") from None
    return kernel


def split(text: str) -> list[str]:
    """Parts between commas that are outside of brackets and quotes."""
    parts, depth, quote, start = [], 0, "", 0
    for i, c in enumerate(text):
        if quote:
            quote = "" if c == quote else quote
        elif c in "'\"":
            quote = c
        elif c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [p.strip() for p in [*parts, text[start:]] if p.strip()]


def parse_arguments(texts: list[str]) -> tuple[list[Any], dict[str, Any]]:
    """(positional, named) arguments of texts such as 128x512:float32, 3, (1, 2), name=value."""
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if equals and name.strip().isidentifier():
            named[name.strip()] = parse_argument(value)
        else:
            positional.append(parse_argument(text))
    return positional, named


def parse_argument(text: str) -> DeclTensor | Any:
    """A tensor by shape and dtype, a Python literal, or the text itself."""
    text = text.strip()
    shape, colon, dtype = text.partition(":")
    if colon and re.fullmatch(r"\d+(x\d+)*x?", shape.replace(" ", "")):
        try:
            kind = dtypes.canonical(dtype.strip())
        except TypeError as exc:
            raise LookupError(f"--arg {text}: {exc}") from None
        return DeclTensor(tuple(int(n) for n in shape.replace(" ", "").split("x") if n), kind)
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text  # also what looks like a literal and is none: an unhashable key, a nesting too deep for the parser
