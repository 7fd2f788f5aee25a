"""The instruction reference, rendered from the declarations."""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from opennki.dialects.neuronxcc._signatures import signature_of
from opennki.isa import declare
from opennki.isa.declare import ISA, Instruction, Tile
from opennki.isa.scalar import SCALAR, ScalarFunction
from opennki.isa.target import TRN1, TRN2, TRN3

HOMES = {"isa": "nki.isa", "language": "nki.language", "internal": "internal"}
GENERATIONS = (TRN1, TRN2, TRN3)


def find(name: str) -> tuple[Instruction | None, ScalarFunction | None]:
    """The instruction and the scalar function of a name, also written `nisa.name` or `nki.isa.name`."""
    last = name.rpartition(".")[2]
    return ISA.get(last) or ISA.get(last.lstrip("_")), SCALAR.get(last)


def similar(name: str) -> list[str]:
    """Names that are like this one."""
    import difflib

    last = name.rpartition(".")[2]
    known = sorted({*ISA, *SCALAR})
    return [n for n in known if last and last in n][:8] or difflib.get_close_matches(last, known, 5)


def summary(doc: str) -> str:
    """First sentence of a docstring."""
    first = " ".join(doc.split("\n\n")[0].split())
    return first.split(". ")[0].rstrip(".")


def grid(*columns: str, title: str | None = None) -> Table:
    """An empty table in the style of the reference: long words are folded, not cut."""
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        made.add_column(column, overflow="fold", no_wrap=number == 0)
    return made


def console() -> Console:
    """A console of the terminal's width; 120 where the output is no terminal and COLUMNS does not say."""
    found = Console(highlight=False, soft_wrap=False)
    plain = not sys.stdout.isatty() and found.width == 80  # what rich assumes when nothing says
    return Console(highlight=False, soft_wrap=False, width=120) if plain else found


def table(surface: str = "all") -> Table:
    """All instructions: home, name, engines, what it does."""
    made = grid(
        "name", "home", "engines", "meaning", title=f"{len(ISA)} instructions; `opennki ops NAME` shows one"
    )
    for decl in sorted(ISA.values(), key=lambda d: (d.surface, d.name)):
        if surface in ("all", decl.surface):
            made.add_row(
                Text(decl.name), HOMES[decl.surface], ", ".join(decl.engines), Text(summary(decl.doc))
            )
    return made


def scalar_table() -> Table:
    """All scalar functions: operators of tensor_tensor, activations of activation, and so on."""
    made = grid(
        "name",
        "group",
        "engines",
        "reducible",
        "valid input",
        "meaning",
        title=f"{len(SCALAR)} scalar functions",
    )
    for f in sorted(SCALAR.values(), key=lambda f: (f.group, f.name)):
        made.add_row(
            Text(f.name),
            f.group,
            ", ".join(f.engines) or "composed",
            "yes" if f.reducible else "",
            domain(f),
            Text(summary(f.doc)),
        )
    return made


def domain(f: ScalarFunction) -> str:
    """Documented valid input of a scalar function, as text."""
    if f.domain is None:
        return ""
    low, high = f.domain
    return f"{low:g} <= {'|x|' if f.domain_of_magnitude else 'x'} <= {high:g}"


def page(decl: Instruction, out: Console) -> None:
    """Print everything that is declared of an instruction."""
    home = HOMES[decl.surface]
    out.print(
        Text(
            f"{decl.name if home == 'internal' else f'{home}.{decl.name}'}{public_signature(decl)}",
            style="bold",
        )
    )
    out.print()
    out.print(Text(inspect.cleandoc(decl.doc)))
    out.print()
    facts = [
        ("engines", ", ".join(decl.engines) + (" (chosen by the operands)" if decl.choose_engine else "")),
        ("results", results(decl)),
        ("source", decl.source),
    ]
    if decl.min_generation > 2:
        facts.append(("needs", f"gen{decl.min_generation} or later"))
    if decl.suspends:
        facts.append(("synchronises", "waits for other programs"))
    for label, text in facts:
        out.print(Text(f"{label:<13}{text}"))
    out.print()
    out.print(operands(decl))
    if decl.limits:
        out.print(limits(decl))
    out.print(Text("cost, in cycles of the engine (d: dimensions, hw: target)", style="bold"))
    out.print(Text(textwrap.indent(source_of(decl.cost), "    ")))


def public_signature(decl: Instruction) -> str:
    """Signature as text, with operators and enumerations by name."""
    parts, seen_star = [], False
    shown = signature_of(decl) if decl.surface == "isa" else decl.signature
    for p in shown.parameters.values():
        if p.kind is p.KEYWORD_ONLY and not seen_star:
            parts.append("*")
            seen_star = True
        text = f"**{p.name}" if p.kind is p.VAR_KEYWORD else p.name
        parts.append(text if p.default is p.empty else f"{text}={value_text(p.default)}")
    return f"({', '.join(parts)})"


def value_text(value: Any) -> str:
    """A default as the user would write it."""
    if hasattr(value, "name") and type(value).__module__.startswith("opennki"):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, type) or inspect.isroutine(value):
        return (
            f"np.{value.__name__}"
            if str(getattr(value, "__module__", "")).startswith("numpy")
            else value.__name__
        )
    return repr(value)


def results(decl: Instruction) -> str:
    """What the instruction returns, as text."""
    if not decl.results:
        return "none: it writes into its operands" if decl.outputs else "none"
    parts = []
    for r in decl.results:
        shape = f"shape of {r.shape}" if isinstance(r.shape, str) else "a shape of its own"
        dtype = (
            f"dtype of {r.dtype}"
            if isinstance(r.dtype, str) and r.dtype in decl.index
            else str(r.dtype)
            if isinstance(r.dtype, str)
            else "a dtype of its own"
        )
        parts.append(
            f"a tile in {r.space.upper()} ({shape}, {dtype}"
            + (
                ""
                if len(r.spaces) == 1
                else ", or in " + " or ".join(s.upper() for s in r.spaces if s != r.space)
            )
            + ")"
        )
    return "; ".join(parts)


def dtype_text(kinds: frozenset[str]) -> str:
    """A set of dtypes, short."""
    for name, known in (("numeric", declare.NUMERIC), ("floats", declare.FLOATS), ("integers", declare.INTS)):
        if kinds == known:
            return name
        if len(known) - len(kinds) in (1, 2) and kinds < known:
            return f"{name} but {', '.join(sorted(known - kinds))}"
    return ", ".join(sorted(kinds))


def operands(decl: Instruction) -> Table:
    """Operands and attributes with role, dimensions, memories and dtypes."""
    made = grid("operand", "role", "dimensions", "memory", "dtypes or values")
    shown = signature_of(decl).parameters if decl.surface == "isa" else decl.signature.parameters
    for p in decl.params:
        s = p.spec
        if p.name not in shown and not isinstance(s, declare.Register):
            continue  # filled in by the tracer
        if isinstance(s, Tile):
            extra = [
                t
                for t, on in (
                    ("a number", s.scalar),
                    ("None", s.optional),
                    ("runtime indices", s.indirect),
                    ("t[mask]", s.operand_mask),
                )
                if on
            ]
            made.add_row(
                Text(p.name),
                {"in": "read", "out": "written", "inout": "read and written"}[s.role],
                Text(" ".join(s.dims)),
                ", ".join(m.upper() for m in s.spaces),
                Text(dtype_text(s.dtypes) + (f"; also {', '.join(extra)}" if extra else "")),
            )
        elif isinstance(s, declare.Op):
            made.add_row(
                Text(p.name),
                "operator",
                "",
                "",
                Text(", ".join(sorted(s.names)) + ("; or None" if s.optional else "")),
            )
        elif isinstance(s, declare.Attr):
            values = [
                value_text(c) if not isinstance(c, (int, str)) or hasattr(c, "name") else repr(c)
                for c in s.choices
            ]
            text = ", ".join(values) if values else " or ".join(t.__name__ for t in s.types)
            made.add_row(Text(p.name), "constant", "", "", Text(text))
        elif isinstance(s, declare.Affine):
            made.add_row(
                Text(p.name),
                "constant",
                "",
                "",
                "integer, loop index expression" + (", or a tuple of them" if s.many else ""),
            )
        elif isinstance(s, declare.Index):
            made.add_row(Text(p.name), "index", "", "", "expression of nl.arange and loop indices")
        elif isinstance(s, declare.Predicate):
            made.add_row(Text(p.name), "predicate", "", "", "comparison of index expressions")
        elif isinstance(s, declare.Register):
            made.add_row(
                Text(f"({s.engine} registers)"),
                "read and written",
                "P",
                "REGISTER",
                "float32, kept between instructions",
            )
        elif isinstance(s, declare.Plumbing):
            what = {
                "mask": "comparison of index expressions; narrows the instruction",
                "dtype": "dtype of the result",
                "engine": "member of nisa.engine",
                "shape": "shape of the result",
            }
            made.add_row(Text(p.name), s.kind, "", "", what.get(s.kind, ""))
    return made


def limits(decl: Instruction) -> Table:
    """Limits with their values on each generation and the reason."""
    made = grid("limit", *(t.name for t in GENERATIONS), "why", "error")
    for limit in decl.limits:
        made.add_row(
            Text(f"{limit.dim} <= {limit.at_most}"),
            *(str(getattr(t, limit.at_most)) for t in GENERATIONS),
            Text(limit.why),
            Text(limit.code),
        )
    return made


def scalar_page(f: ScalarFunction, out: Console) -> None:
    """Print everything that is known of a scalar function."""
    out.print(Text(f"{f.name}({', '.join('ab'[: f.arity])})   scalar function", style="bold"))
    out.print()
    out.print(Text(inspect.cleandoc(f.doc)))
    out.print()
    rows = [
        ("group", f.group),
        ("engines", ", ".join(f.engines) or "none: composed of other instructions"),
        ("valid input", domain(f) or "any"),
        (
            "reducible",
            f"yes, neutral element {f.identity:g}"
            if f.reducible and f.identity is not None
            else "yes"
            if f.reducible
            else "no",
        ),
        ("C", f.c),
        ("operand of", ", ".join(used_by(f.name)) or "none"),
    ]
    for label, text in rows:
        out.print(Text(f"{label:<13}{text}"))


def used_by(name: str) -> Iterator[str]:
    """Instructions that take the scalar function as an operator."""
    for decl in ISA.values():
        if any(isinstance(p.spec, declare.Op) and name in p.spec.names for p in decl.params):
            yield decl.name


def source_of(fn: Callable[..., Any]) -> str:
    """Source of a function, or the expression of a lambda; docstring left out."""
    code = fn.__code__
    lines = linecache.getlines(code.co_filename)
    for node in ast.walk(ast.parse("".join(lines))) if lines else ():
        if getattr(node, "lineno", 0) != code.co_firstlineno:
            continue
        if isinstance(node, ast.Lambda) and fn.__name__ == "<lambda>":
            return ast.unparse(node.body)
        if isinstance(node, ast.FunctionDef) and node.name == fn.__name__:
            return ast.unparse(ast.Module(node.body[1:] if ast.get_docstring(node) else node.body, []))
    return fn.__doc__ or fn.__name__
