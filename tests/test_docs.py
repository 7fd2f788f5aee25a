"""The documents: every Python block runs, what is shown as its output is its output, links lead somewhere, generated pages are current.

A fenced block is one of: `python` (run; the blocks of a document share their names), `text output` (what the Python block before it
prints, warnings of opennki included; --update-golden writes it anew), `text`, `console`.
"""

import contextlib
import io
import linecache
import re
import warnings
from pathlib import Path

import pytest

import opennki.dropin  # noqa: F401
from opennki.errors import NkiWarning
from opennki.interpret.simulate import POLICIES

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])
KINDS = {"python", "text", "text output", "console"}
_FENCE = re.compile(r"^```(?P<kind>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def blocks(path):
    """(kind, text) of each fenced block."""
    return [(m["kind"].strip(), m["body"]) for m in _FENCE.finditer(path.read_text(encoding="utf-8"))]


def run(source, name, names):
    """What a block prints; warnings of opennki are part of it."""
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    out = io.StringIO()
    with contextlib.redirect_stdout(out), warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("always", NkiWarning)
        warnings.showwarning = lambda message, *_: print(message)
        exec(compile(source, name, "exec"), names)
    return out.getvalue()


def by_name(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", DOCUMENTS, ids=by_name)
def test_blocks_have_a_known_kind(path):
    kinds = [kind for kind, _ in blocks(path)]
    assert set(kinds) <= KINDS
    assert len(re.findall(r"^```", path.read_text(encoding="utf-8"), re.MULTILINE)) == 2 * len(kinds)


@pytest.mark.parametrize("path", [p for p in DOCUMENTS if any(kind == "python" for kind, _ in blocks(p))], ids=by_name)
def test_python_blocks_run_and_print_what_is_shown(path, request):
    if path.name == "pytorch.md":
        pytest.importorskip("torch")
    text = path.read_text(encoding="utf-8")
    names, printed, parts, end, number = {"__name__": "__main__"}, None, [], 0, 0
    for match in _FENCE.finditer(text):
        kind, body = match["kind"].strip(), match["body"]
        if kind == "python":
            number += 1
            printed = run(body, f"block{number}.py", names)
        elif kind == "text output":
            assert printed is not None, "an output without a block before it"
            shown = "".join(f"{line.rstrip()}\n" for line in printed.splitlines())
            parts += [text[end:match.start("body")], shown]
            end, printed = match.end("body"), None
    actual = "".join([*parts, text[end:]])
    if request.config.getoption("--update-golden"):
        path.write_text(actual, encoding="utf-8")
        return
    assert actual.splitlines() == text.splitlines()


@pytest.mark.parametrize("path", DOCUMENTS, ids=by_name)
def test_links_lead_to_files(path):
    for target in _LINK.findall(path.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (path.parent / target).exists(), target


@pytest.mark.parametrize("path", DOCUMENTS, ids=by_name)
def test_named_source_files_exist(path):
    for name in re.findall(r"`((?:src|tests|docs|examples|benchmarks)/[\w/.]+)`", path.read_text(encoding="utf-8")):
        assert (ROOT / name).exists(), name


def test_the_instruction_page_is_current():
    from opennki.tools.reference_page import page

    assert (ROOT / "docs/instructions.md").read_text(encoding="utf-8") == page(), "run: opennki ops --markdown > docs/instructions.md"


@pytest.mark.parametrize("path", [ROOT / "README.md", ROOT / "docs/checks.md"], ids=by_name)
def test_the_table_of_checks_is_that_of_the_interpreter(path):
    rows = re.findall(r"^\| `(\w+)` \|.*\| (error|warn|off) \|", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert dict(rows) == POLICIES["full"]
