"""Every collected bug report has a test of ours, or waits for a later issue with a reason.

Ids are those of the public reports that were collected for this project; the tests are named after them.
"""

from __future__ import annotations

import re
from pathlib import Path

IDS = frozenset(f"BR{n:03d}" for n in (
    1, 3, 6, 7, 11, 13, 14, 15, 16, 17, 19, 21, 22, 24, 25, 26, 27, 29, 31, 33, 34, 36, 37, 38, 39, 41, 42, 43, 44, 45, 47, 49,
    50, 51, 52, 55, 56, 57, 59, 60, 61, 62, 63, 64, 65, 67, 69, 70, 71, 74, 75, 76, 77, 78, 80, 85, 87, 88, 89, 90, 91))

# id -> (issue that brings what is missing, what the report needs): no test of these reports exists yet
LATER = {
    "BR042": ("new namespace", "nested fori_loop with runtime bounds"),
    "BR049": ("5: toolchain", "the allocator: overflow with byte counts, source line and the list of live tensors"),
    "BR052": ("5: toolchain", "SBUF use per partition in the profile"),
    "BR063": ("5: toolchain", "benchmark in both namespaces, and the overhead of a second call"),
    "BR067": ("5: toolchain", "a 224 x 224 convolution under benchmark within a time limit"),
    "BR069": ("5: toolchain", "warm-up apart from the latency"),
    "BR070": ("5: toolchain", "device time and host overhead as separate fields"),
    "BR074": ("5: toolchain", "a relative artifacts_dir"),
    "BR091": ("5: toolchain", "accessed elements in the viewer's data"),
}

# tested here as far as this issue goes; the rest of the report waits
REST = {
    "BR021": ("new namespace", "fori_loop; here the do-while form"),
    "BR031": ("new namespace", "dynamic_range; here sequential and unrolled loops"),
    "BR037": ("new namespace", "the message that asks for tensor_copy before a store"),
    "BR041": ("new namespace", "fori_loop, while_loop, dynamic_range; here the legacy loops"),
    "BR043": ("5: toolchain", "overlap in the timing model"),
    "BR045": ("5: toolchain", "random delays of engines and DMA; here the race checks"),
    "BR060": ("5: toolchain", "the label of benchmark output"),
    "BR062": ("new namespace", "a legacy kernel under the new jit"),
    "BR064": ("new namespace", "a hint for each removed function"),
    "BR065": ("new namespace", "its signatures; the legacy ones are checked against the documented list by the stubs"),
    "BR077": ("7: collectives", "sendrecv, and two calls in one graph"),
}


def ids_in_tests():
    """Ids in the names of the tests of this folder."""
    here = Path(__file__).parent
    names = [n for f in here.glob("test_*.py") for n in re.findall(r"^def (test_\w+)", f.read_text(encoding="utf-8"), re.M)]
    return {i for name in names for i in re.findall(r"BR\d{3}", name)}


def test_every_report_is_tested_or_waits_for_a_later_issue():
    assert len(IDS) == 61
    assert ids_in_tests() | set(LATER) == IDS
    assert not ids_in_tests() & set(LATER), "a report that is tested is no longer later"


def test_what_waits_says_for_what():
    for entry, (issue, reason) in {**LATER, **REST}.items():
        assert entry in IDS and re.match(r"\d: |new namespace", issue) and len(reason) > 10
    assert set(REST) <= ids_in_tests()


def test_every_test_says_what_is_right():
    """Each test has a docstring: the title of the report or what must hold."""
    for file in Path(__file__).parent.glob("test_*.py"):
        text = file.read_text(encoding="utf-8")
        for name, following in re.findall(r"^def (test_BR\w+)\(.*\):\n(.*)", text, re.M):
            assert following.strip().startswith('"""'), f"{file.name}: {name}"
