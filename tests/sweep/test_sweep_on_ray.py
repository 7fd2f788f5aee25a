"""A sweep on a Ray cluster on this machine; `make test-ray` brings Ray."""

from __future__ import annotations

import csv

from opennki.tools.sweep.run import Options, sweep

KERNELS = """
import os, signal, time
import neuronxcc.nki as nki
import neuronxcc.nki.language as nl


@nki.jit
def copy(x, way="a"):
    while way == "hang":
        time.sleep(0.01)
    if way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.load(x))
    return out
"""


def test_points_on_a_cluster(tmp_path, ray_cluster):
    script, out = tmp_path / "kernels.py", str(tmp_path / "out")
    script.write_text(KERNELS, encoding="utf-8")
    options = Options(out, limit=5.0, ray=True, plot=False)
    grid = ["rows=32,64,96", "way=a,kill,hang"]
    for _ in range(2):  # the second time there is nothing to do
        text, status = sweep(str(script), "copy", ["{rows}x8:float32"], "trn1", grid, options)
        assert status == 0 and "3 ok" in text and "3 crashed" in text and "3 timeout" in text
    with open(tmp_path / "out" / "results.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(r["rows"], r["way"], r["status"]) for r in rows] == [
        (n, way, status) for n in ("32", "64", "96") for way, status in (("a", "ok"), ("kill", "crashed"), ("hang", "timeout"))]
    assert all("SIGKILL" in r["error"] for r in rows if r["way"] == "kill")
