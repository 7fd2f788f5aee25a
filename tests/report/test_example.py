"""The report of a real kernel: the flash attention example, with the use of its memories, in a browser."""

from __future__ import annotations

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from opennki.passes.allocate import allocate
from opennki.report import chrome_trace
from opennki.report.occupancy import occupancy
from opennki.timing import estimate
from tests.report import test_report

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@pytest.fixture(scope="module")
def traced():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        patch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
        import flash_attention

        q, k = (np.zeros((128, 2048), ml_dtypes.bfloat16) for _ in range(2))
        return flash_attention.flash_attention.trace(q, k, np.zeros((2048, 128), ml_dtypes.bfloat16))


def test_occupancy_is_that_of_the_memory_map(traced):
    timeline, memory = estimate(traced, record=True), allocate(traced)
    used = occupancy(timeline, memory)
    for name, size in (("sbuf", memory.target.sbuf_usable_bytes), ("psum", memory.target.psum_partition_bytes)):
        part = used[name]
        assert part["capacity"] == size and part["at"] == sorted(set(part["at"])) and part["bytes"][-1] == 0
        high = max(r.address + r.size for p in memory.placements.values() if p.buffer == name for r in p.regions())
        assert 0 < max(part["bytes"]) <= high <= size
    assert chrome_trace(timeline, used).count('"ph":"C"') == sum(len(p["at"]) for p in used.values())


@test_report.needs_browser
def test_the_report_of_the_example(traced, tmp_path):
    timeline = estimate(traced, record=True)
    text = test_report.browse(tmp_path, timeline, "--dump-dom", occupancy=occupancy(timeline, allocate(traced)))
    assert 'data-ready="yes"' in text and "flash_attention on trn2" in text
    assert "new_max = nl.maximum(row_max" in text, "source lines by cost"
    assert int(re.search(r'data-drawn="(\d+)"', text)[1]) > 500
