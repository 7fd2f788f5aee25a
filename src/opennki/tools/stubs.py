"""Generate the `.pyi` files of the dialect from signatures, declarations and docstrings.

python -m opennki.tools.stubs           write them
python -m opennki.tools.stubs --check   exit status 1 if one is not what would be written
"""

from __future__ import annotations

import enum
import importlib
import inspect
import re
import sys
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

from opennki.dialects.neuronxcc._signatures import signature_of
from opennki.isa.declare import ISA, Attr, Instruction, Tile

DIALECT = "opennki.dialects.neuronxcc"
MODULES = ("language", "isa", "compiler", "typing")
HEAD = "# Made by `python -m opennki.tools.stubs` from signatures and docstrings; do not edit."
# What the modules import for their own use
_OWN = frozenset(
    {
        "annotations",
        "Any",
        "Callable",
        "FUNCTIONS",
        "Grid",
        "Index",
        "TracebackType",
        "check_extra",
        "missing",
        "replace_fields",
    }
)
_LITERALS = (bool, int, float, str, type(None))


def public(module: ModuleType) -> list[str]:
    """Names of a module that users see, sorted."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    return sorted(
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and name not in _OWN
        and not isinstance(value, ModuleType)
        and getattr(value, "__module__", "") != "builtins"
    )


def default(value: Any) -> str:
    """A default in a stub: a literal, else `...`."""
    if type(value) in _LITERALS and value == value and value not in (float("inf"), float("-inf")):
        return repr(value)
    return "()" if value == () and type(value) is tuple else "..."


def annotation(value: Any) -> str:
    """An annotation as text; Any where there is none."""
    if value is inspect.Parameter.empty:
        return "Any"
    if isinstance(value, str):  # names of other modules are imported by themselves
        return re.sub(r"\b(?:loops|memory|create|data|annotations)\.", "", value)
    return getattr(value, "__name__", "Any")


def parameters(signature: inspect.Signature, types: dict[str, str]) -> str:
    """The parameter list of a stub."""
    parts, star = [], False
    for p in signature.parameters.values():
        kind = types.get(p.name) or annotation(p.annotation)
        if p.kind is p.VAR_POSITIONAL:
            parts.append(f"*{p.name}: {kind}")
            star = True
            continue
        if p.kind is p.KEYWORD_ONLY and not star:
            parts.append("*")
            star = True
        prefix = "**" if p.kind is p.VAR_KEYWORD else ""
        parts.append(
            f"{prefix}{p.name}: {kind}" + ("" if p.default is p.empty else f" = {default(p.default)}")
        )
    return ", ".join(parts)


def operand_types(decl: Instruction) -> dict[str, str]:
    """Types of the parameters of an instruction."""
    types = {}
    for p in decl.params:
        if isinstance(p.spec, Tile):
            types[p.name] = (
                "Tensor" + (" | float" if p.spec.scalar else "") + (" | None" if p.spec.optional else "")
            )
        elif isinstance(p.spec, Attr) and p.spec.types == (bool,):
            types[p.name] = "bool"
    return types


def result_type(decl: Instruction) -> str:
    """What an instruction returns."""
    count = len(decl.results)
    return "None" if not count else "Tensor" if count == 1 else f"tuple[{', '.join(['Tensor'] * count)}]"


def function(name: str, fn: Any) -> str:
    """Stub of a function."""
    decl = ISA.get(name) if getattr(fn, "__module__", "") == "neuronxcc.nki.isa" else None
    if decl is not None:
        listed, result = parameters(signature_of(decl), operand_types(decl)), result_type(decl)
    else:
        signature = inspect.signature(fn)
        listed, result = parameters(signature, {}), annotation(signature.return_annotation)
    doc = inspect.getdoc(fn) or ""
    return f"def {name}({listed}) -> {result}:\n{docstring(doc)}\n"


def docstring(text: str) -> str:
    """A docstring, indented by one level."""
    text = text.replace("\\", "\\\\").replace('"""', "'''")
    lines = text.split("\n")
    body = "\n".join(["    " + f'"""{lines[0]}', *("    " + line if line else "" for line in lines[1:])])
    return body + ('\n    """' if len(lines) > 1 else '"""')


class Imports:
    """Import lines of a stub."""

    def __init__(self) -> None:
        self.lines: set[str] = set()

    def of(self, module: str, name: str, public: str = "") -> None:
        """Import a name for annotations, or as a public name of the module."""
        self.lines.add(f"from {module} import {name}" + (f" as {public}" if public else ""))


def constant(name: str, value: Any, imports: Imports) -> str:
    """Stub of a name that is no function: a re-export (empty text) or an annotated name."""
    if isinstance(value, ModuleType):
        parent, _, own = value.__name__.rpartition(".")
        imports.of(parent, own, name)
        return ""
    if isinstance(value, type):
        home = "numpy" if issubclass(value, np.generic) else value.__module__
        imports.of(home, name if home == "numpy" else value.__name__, name)
        return ""
    if isinstance(value, np.dtype):
        imports.lines.add("import numpy as np")
        return f"{name}: np.dtype[Any]"
    kind = type(value)
    if kind.__module__ != "builtins" and not (isinstance(value, enum.Enum) and kind.__module__ == "builtins"):
        imports.of(kind.__module__, kind.__name__)
    return f"{name}: {kind.__name__}"


def stub(name: str) -> str:
    """Text of the stub of a dialect module."""
    module = importlib.import_module(f"{DIALECT}.{name}")
    imports, constants, functions = Imports(), [], []
    for entry in public(module):
        value = getattr(module, entry)
        if isinstance(value, FunctionType):
            functions.append(function(entry, value))
        else:
            constants.append(constant(entry, value, imports))
    body = "\n\n".join(functions)
    for known, home in (
        ("Tensor", "opennki.lang.tensor"),
        ("Directive", "opennki.lang.loops"),
        ("Callable", "collections.abc"),
        ("RuntimeScalar", "opennki.lang.loops"),
        ("LoopRange", "opennki.lang.loops"),
        ("NC", "opennki.lang.loops"),
        ("SpmdDim", "opennki.lang.loops"),
        ("nc_version", "opennki.isa.target"),
        ("Index", "opennki.lang.index"),
        ("Grid", "opennki.lang.ranges"),
        ("Mask", "opennki.lang.index"),
        ("ParDim", "opennki.lang.create"),
    ):
        if f" {known}" in body or f"[{known}" in body:
            imports.of(home, known)
    doc = (module.__doc__ or "").strip()
    return "\n".join(
        [
            HEAD,
            f'"""{doc}\n"""' if "\n" in doc else f'"""{doc}"""',
            "from typing import Any",
            "",
            *sorted(imports.lines),
            "",
            *filter(None, constants),
            "",
            "",
            body,
        ]
    )


def path_of(name: str) -> Path:
    """Where the stub of a dialect module lies."""
    return Path(str(importlib.import_module(f"{DIALECT}.{name}").__file__)).with_suffix(".pyi")


def stale() -> list[Path]:
    """Stubs that are missing or not what would be written."""
    return [
        path
        for name in MODULES
        for path in [path_of(name)]
        if not path.exists() or path.read_text(encoding="utf-8") != stub(name)
    ]


def main(args: list[str]) -> int:
    """Write the stubs, or check them."""
    if args not in ([], ["--check"]):
        print("usage: python -m opennki.tools.stubs [--check]", file=sys.stderr)
        return 2
    found = stale()
    if args:
        for path in found:
            print(f"{path.name} is not current: run python -m opennki.tools.stubs", file=sys.stderr)
        return 1 if found else 0
    for name in MODULES:
        path_of(name).write_text(stub(name), encoding="utf-8", newline="\n")
    print(f"{len(found)} of {len(MODULES)} stubs changed")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
