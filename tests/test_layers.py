"""Layers import one way, and files stay small."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src"
PACKAGE = SRC / "opennki"

# A layer may import itself and what stands before it. A new module or folder is given its place here.
LAYERS = (
    ("_version", "background", "catalogue", "collector", "errors", "settings"),
    ("isa",),
    ("ir",),
    ("lang",),
    ("trace",),
    ("passes",),
    ("interpret",),
    ("execute",),
    ("ranks",),
    ("timing",),
    ("report",),
    ("toolchain",),
    ("kernels",),
    ("bind",),
    ("dialects",),
    ("__init__", "__main__", "cli", "dropin", "frameworks", "tools"),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
MAX_LINES = 520


def part(dotted):
    """First name below the package: opennki.isa.target -> isa; the package itself -> __init__."""
    return dotted.split(".")[1] if "." in dotted else "__init__"


def module_name(path, root):
    parts = list(path.relative_to(root).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


def is_type_checking(test):
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING")


def imports(path, root):
    """Every (line, dotted name) of the package that a file imports, at any depth, except for type checking.

    `from opennki import x` counts as opennki.x where x is a module, else as the package itself.
    """
    module, is_package = module_name(path, root), path.name == "__init__.py"

    def is_module(dotted):
        base = root.joinpath(*dotted.split("."))
        return base.is_dir() or base.with_suffix(".py").exists()

    def of(node):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".")[: len(module.split(".")) - node.level + is_package]
                base = ".".join([*package, *([node.module] if node.module else [])])
            for a in node.names:
                yield f"{base}.{a.name}" if is_module(f"{base}.{a.name}") else base
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.args[0].value

    def walk(node):
        for dotted in of(node):
            if dotted.split(".")[0] == "opennki":
                yield node.lineno, dotted
        if isinstance(node, ast.If) and is_type_checking(node.test):
            children = node.orelse
        else:
            children = ast.iter_child_nodes(node)
        for child in children:
            yield from walk(child)

    return list(walk(ast.parse(path.read_text(encoding="utf-8"), str(path))))


def violations(root):
    """One line for each import against the order, and for each module without a place in it."""
    found = []
    for path in sorted((root / "opennki").rglob("*.py")):
        here, shown = part(module_name(path, root)), path.relative_to(root)
        if here not in RANK:
            found.append(f"{shown}: {here} has no place in LAYERS")
            continue
        for line, dotted in imports(path, root):
            there = part(dotted)
            if there not in RANK:
                found.append(f"{shown}:{line}: {dotted} has no place in LAYERS")
            elif RANK[there] > RANK[here]:
                found.append(f"{shown}:{line}: {here} imports {dotted}, a later layer")
    return found


def test_layers_import_one_way():
    assert list(PACKAGE.rglob("*.py"))
    assert violations(SRC) == []


def test_files_stay_small():
    sizes = {}
    for pattern in ("*.py", "*.c", "*.h", "*.cpp"):
        for path in SRC.rglob(pattern):
            sizes[str(path.relative_to(SRC))] = len(path.read_text(encoding="utf-8").splitlines())
    assert sizes
    assert {name: n for name, n in sizes.items() if n > MAX_LINES} == {}


@pytest.mark.parametrize("where, source, caught", [
    ("isa/x.py", "from opennki.ir import nodes", True),
    ("isa/x.py", "import opennki.kernels.base as k", True),
    ("isa/x.py", "def f():\n    from opennki.trace import t", True),
    ("isa/x.py", "from ..ir import nodes", True),
    ("isa/x.py", "from .. import ir", True),
    ("isa/__init__.py", "from ..ir import nodes", True),
    ("isa/sub/x.py", "from ...lang import tensors", True),
    ("isa/x.py", "from opennki import ir", True),
    ("isa/x.py", "from opennki import jit", True),
    ("isa/x.py", "import importlib\nimportlib.import_module('opennki.lang')", True),
    ("isa/x.py", "if TYPE_CHECKING:\n    pass\nelse:\n    import opennki.ir", True),
    ("errors.py", "from opennki.isa import target", True),
    ("brand_new/x.py", "", True),
    ("isa/x.py", "if TYPE_CHECKING:\n    from opennki.ir import nodes", False),
    ("isa/x.py", "import typing\nif typing.TYPE_CHECKING:\n    import opennki.lang", False),
    ("isa/x.py", "from opennki.isa import target\nfrom . import target\nfrom opennki import settings", False),
    ("isa/__init__.py", "from .target import Target\nfrom . import target", False),
    ("ir/x.py", "from opennki.isa.target import Target\nimport numpy\nfrom ..errors import NkiError", False),
    ("cli.py", "import opennki\nfrom opennki.dialects import neuronxcc\nfrom opennki import dropin", False),
])
def test_the_check_bites(tmp_path, where, source, caught):
    root = tmp_path
    for name in ("isa", "isa/sub", "ir", "lang", "trace", "kernels", "dialects", "brand_new"):
        (root / "opennki" / name).mkdir(parents=True, exist_ok=True)
    for name in ("isa/target.py", "settings.py", "errors.py", "dropin.py", "__init__.py"):
        (root / "opennki" / name).touch()
    (root / "opennki" / where).write_text(source, encoding="utf-8")
    assert bool(violations(root)) is caught
