"""Elementwise functions of the language, generated from the table of scalar functions.

Each is an object of Python functions that names its scalar function in `nki_op`, so that it can stand as the
operator of an instruction (`nisa.activation(op=nl.exp)`). Source: api_legacy neuronxcc.nki.language.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opennki.isa.scalar import SCALAR
from opennki.lang import ops
from opennki.lang.keywords import check_extra

_UNARY = """
    abs arctan ceil cos erf erf_dx exp floor gelu gelu_apprx_sigmoid gelu_apprx_tanh gelu_dx invert log mish
    negative reciprocal relu rsqrt sigmoid sign silu silu_dx sin softplus sqrt square tan tanh trunc"""
_BINARY = """add subtract multiply divide power maximum minimum
    bitwise_and bitwise_or bitwise_xor left_shift right_shift"""
_REMAINDERS = "fmod mod"
_PREDICATES = "equal not_equal greater greater_equal less less_equal logical_and logical_or logical_xor"


def named(fn: Callable[..., Any], name: str, op: str, doc: str) -> Callable[..., Any]:
    """Give a function its public name, operator and documentation."""
    fn.__name__ = fn.__qualname__ = name
    fn.__doc__ = doc
    fn.nki_op = op  # type: ignore[attr-defined]
    return fn


def _unary(name: str) -> Callable[..., Any]:
    def fn(x: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Any:
        check_extra(f"nl.{name}", kwargs)
        return ops.unary(name, x, dtype, mask)

    return named(
        fn,
        name,
        name,
        f"{SCALAR[name].doc} Elementwise on a tile in SBUF or PSUM; a new tile of its shape, in its dtype "
        f"unless "
        "dtype is given.",
    )


def _binary_doc(name: str, dtype: str) -> str:
    return (
        f"{SCALAR[name].doc} Elementwise; a is x, b is y, at least one of them a tile in SBUF or PSUM; "
        f"shapes broadcast as in NumPy, "
        f"over partitions too. A new tile; {dtype} unless dtype is given."
    )


def _binary(name: str) -> Callable[..., Any]:
    def fn(x: Any, y: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Any:
        check_extra(f"nl.{name}", kwargs)
        return ops.elementwise(name, x, y, dtype, mask)

    return named(fn, name, name, _binary_doc(name, "the promoted dtype"))


def _remainder(name: str) -> Callable[..., Any]:
    def fn(x: Any, y: Any, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Any:
        check_extra(f"nl.{name}", kwargs)
        return ops.elementwise(name, x, y, dtype, mask)

    return named(fn, name, name, _binary_doc(name, "the promoted dtype"))


def _predicate(name: str) -> Callable[..., Any]:
    def fn(x: Any, y: Any, *, dtype: Any = bool, mask: Any = None, **kwargs: Any) -> Any:
        check_extra(f"nl.{name}", kwargs)
        return ops.elementwise(name, x, y, bool if dtype is None else dtype, mask)

    return named(fn, name, name, _binary_doc(name, "bool, stored as uint8,"))


def _logical_not() -> Callable[..., Any]:
    def fn(x: Any, *, dtype: Any = bool, mask: Any = None, **kwargs: Any) -> Any:
        check_extra("nl.logical_not", kwargs)
        return ops.unary("logical_not", x, bool if dtype is None else dtype, mask)

    return named(
        fn,
        "logical_not",
        "logical_not",
        f"{SCALAR['logical_not'].doc} Elementwise on a tile; bool unless dtype is given.",
    )


FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: make(name)
    for names, make in (
        (_UNARY, _unary),
        (_BINARY, _binary),
        (_REMAINDERS, _remainder),
        (_PREDICATES, _predicate),
    )
    for name in names.split()
}
FUNCTIONS["logical_not"] = _logical_not()
