"""The shipped stubs are those that the generator writes."""

from __future__ import annotations

import ast
import importlib
import inspect

import pytest

from opennki.tools import stubs


@pytest.mark.parametrize("name", stubs.MODULES)
def test_stubs_are_current(name):
    assert stubs.path_of(name).read_text(encoding="utf-8") == stubs.stub(name), (
        "run python -m opennki.tools.stubs"
    )


@pytest.mark.parametrize("name", stubs.MODULES)
def test_a_stub_has_every_public_name_with_its_parameters(name):
    module = importlib.import_module(f"{stubs.DIALECT}.{name}")
    tree = ast.parse(stubs.stub(name))
    functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
    names = {
        *functions,
        *(n.target.id for n in tree.body if isinstance(n, ast.AnnAssign)),
        *(a.asname for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names if a.asname),
    }
    assert names == set(stubs.public(module))
    for entry, node in functions.items():
        expected = inspect.signature(getattr(module, entry)).parameters
        a = node.args
        given = [
            x.arg
            for x in [
                *a.posonlyargs,
                *a.args,
                *([a.vararg] if a.vararg else []),
                *a.kwonlyargs,
                *([a.kwarg] if a.kwarg else []),
            ]
        ]
        assert given == list(expected), entry
        assert [x.arg for x in a.kwonlyargs] == [
            p for p in expected if expected[p].kind is inspect.Parameter.KEYWORD_ONLY
        ]
        assert ast.get_docstring(node)


def test_check_reports_a_stale_stub(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(stubs, "path_of", lambda name: tmp_path / f"{name}.pyi")
    assert stubs.main(["--check"]) == 1
    assert "isa.pyi is not current" in capsys.readouterr().err
    assert stubs.main([]) == 0 and stubs.main(["--check"]) == 0
    (tmp_path / "isa.pyi").write_text("def nc_matmul() -> None: ...")
    capsys.readouterr()
    assert stubs.main(["--check"]) == 1
    assert capsys.readouterr().err.count("is not current") == 1
    assert stubs.main(["--wrong"]) == 2
