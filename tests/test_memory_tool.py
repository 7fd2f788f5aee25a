"""`opennki memory`: the map as text, SVG and JSON."""

from __future__ import annotations

import json
import xml.dom.minidom

import pytest
from typer.testing import CliRunner

from opennki.cli import app

SCRIPT = """
import logging
import neuronxcc.nki as nki
import neuronxcc.nki.compiler as ncc
import neuronxcc.nki.language as nl

@nki.jit
def product(a, b):
    out = nl.ndarray((a.shape[1], b.shape[1]), dtype=nl.float32, buffer=nl.shared_hbm)
    for m in nl.affine_range(a.shape[1] // 128):
        acc = nl.zeros((128, 512), dtype=nl.float32, buffer=nl.psum)
        for k in nl.affine_range(a.shape[0] // 128):
            left = nl.load(a[nl.ds(k * 128, 128), nl.ds(m * 128, 128)])
            acc += nl.matmul(left, nl.load(b[nl.ds(k * 128, 128), :]), transpose_x=True)
        nl.store(out[nl.ds(m * 128, 128), :], nl.exp(acc))
    return out

@nki.jit
def huge(a):
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    wide = nl.ndarray((128, 50000), dtype=nl.float32, buffer=nl.sbuf, name="wide")
    wide[:, 0:512] = nl.load(a)
    nl.store(out, wide[:, 0:512])
    return out

@ncc.enable_stack_allocator(log_level=logging.INFO)
@ncc.skip_middle_end_transformations
@nki.jit
def stacked(a):
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    blocks = nl.ndarray((4, nl.par_dim(128), 128), dtype=a.dtype, buffer=nl.sbuf, name="blocks")
    for i in nl.affine_range(4):
        blocks[i] = nl.load(a[:, nl.ds(i * 128, 128)])
        nl.store(out[:, nl.ds(i * 128, 128)], blocks[i])
    return out

@ncc.force_auto_alloc
@nki.jit
def forced(a):
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    one = nl.ndarray((128, 512), dtype=a.dtype, buffer=ncc.sbuf.mod_alloc(base_addr=4096), name="one")
    one[...] = nl.load(a)
    nl.store(out, one)
    return out

@nki.jit
def placed(a):
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    one = nl.ndarray((128, 512), dtype=a.dtype, buffer=ncc.sbuf.mod_alloc(base_addr=4096), name="one")
    one[...] = nl.load(a)
    nl.store(out, one)
    return out
"""


@pytest.fixture
def show(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "k.py").write_text(SCRIPT)

    def run(kernel, args="128x512:float32", *more):
        return CliRunner().invoke(app, ["memory", f"k.py:{kernel}", "--args", args, *more])
    return run


def test_the_map_of_a_matmul(show, tmp_path, golden):
    done = show("product", "512x256:float32, 512x512:float32", "--svg", "map.svg", "--json", "map.json")
    assert done.exit_code == 0, done.output
    golden("\n".join(line.rstrip() for line in done.output.splitlines()))
    picture = xml.dom.minidom.parse(str(tmp_path / "map.svg"))
    titles = [t.firstChild.data for t in picture.getElementsByTagName("title")]
    assert len(titles) == 4 and any("[128, 512] float32, 2,048 bytes x 2" in t for t in titles)
    data = json.loads((tmp_path / "map.json").read_text())
    assert data["kernel"] == "product" and len(data["memories"]["sbuf"]["tensors"]) == 3
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["k.py", "map.json", "map.svg"], "no parts are left"


def test_over_capacity_is_an_error_with_the_tensors(show):
    done = show("huge")
    assert done.exit_code == 1 and "wide (128, 50000) float32: 200,000 at line" in done.output + done.stderr


@pytest.mark.parametrize("kernel, words", [
    ("stacked", ["allocator stack", "4 x 512", "PSUM: not used"]), ("forced", ["allocator forced", "2,048"]),
    ("placed", ["allocator auto", "4,096", "1 own"])])
def test_the_allocator_is_that_of_the_decorators(show, kernel, words):
    done = show(kernel)
    assert done.exit_code == 0, done.output
    assert all(word in done.output for word in words), done.output
    assert ("4,096" in done.output) is (kernel == "placed")


def test_a_file_that_cannot_be_written_is_said(show):
    done = show("placed", "128x512:float32", "--svg", "there/is/no.svg")
    assert done.exit_code == 2 and "cannot write there/is/no.svg" in done.output + done.stderr
