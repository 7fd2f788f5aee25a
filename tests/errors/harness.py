"""Invalid kernels in tests: each states the error code and words of its message, and marks the offending line with `# HERE`."""

from __future__ import annotations

import inspect
import re

import ml_dtypes
import numpy as np
import pytest

from opennki import jit, simulate_kernel
from opennki.errors import NkiError

MARK = "# HERE"
BF16 = np.dtype(ml_dtypes.bfloat16)
A = np.arange(128 * 512, dtype=np.float32).reshape(128, 512) / 1000
SMALL = np.arange(12, dtype=np.float32).reshape(3, 4)


def marked_line(fn):
    """(file, line) of the line of a function that carries the mark."""
    lines, start = inspect.getsourcelines(fn)
    found = [start + i for i, line in enumerate(lines) if MARK in line]
    assert len(found) == 1, f"{fn.__name__} marks {len(found)} lines"
    return inspect.getsourcefile(fn), found[0]


def check_report(error, fn, code=None, words=()):
    """The error names its code, the words, the marked line of the kernel and its source, the rule, and the reason or the remedy."""
    text = str(error)
    assert isinstance(error, NkiError), repr(error)
    if code is not None:
        assert error.code == code, text
        assert code in text
    for word in words:
        assert word.lower() in text.lower(), f"{word!r} is not in\n{text}"
    assert (error.loc.file, error.loc.line) == marked_line(fn), text
    assert f"{error.loc.file}:{error.loc.line}" in text
    assert error.loc.source() and error.loc.source() in text
    assert "  rule: " in text, text
    if code:
        assert "  why: " in text and "  fix: " in text, text
    assert not text.count("\n\n") and "object at 0x" not in text, text


def failure(fn, *args, kernel=None, kind=NkiError, **options):
    """The error of simulating a kernel."""
    with pytest.raises(kind) as caught:
        simulate_kernel(fn if kernel is None else kernel, *args, **options)
    return caught.value


class Invalid:
    """A table of kernels that must fail."""

    def __init__(self):
        self.cases = []

    def __call__(self, code, *words, args=(A,), grid=None, target="trn1", kind=NkiError, eager=True):
        """Decorator: the kernel fails with this code. `eager`: also when it is run statement by statement, so that the whole kernel is
        not known."""
        def add(fn):
            for mode in ("traced", "eager")[:1 + eager]:
                self.cases.append(pytest.param(fn, code, words, args, grid, target, kind, mode, id=f"{fn.__name__}-{mode}"))
            return fn
        return add

    def test(self):
        """The test over the table."""
        @pytest.mark.parametrize(("fn", "code", "words", "args", "grid", "target", "kind", "mode"), self.cases)
        def test_invalid(fn, code, words, args, grid, target, kind, mode):
            kernel = jit(fn, mode="simulation", platform_target=target)
            before = [a.copy() for a in args if isinstance(a, np.ndarray)]
            error = failure(fn, *args, kernel=kernel if grid is None else kernel[grid], kind=kind, eager=mode == "eager")
            check_report(error, fn, code, words)
            for old, new in zip(before, [a for a in args if isinstance(a, np.ndarray)]):
                np.testing.assert_array_equal(old, new)
        return test_invalid


def normalised(text):
    """A message without what differs between machines and edits: folders and line numbers."""
    text = re.sub(r"(?:/[^\s:/]+)+/([^\s:/]+\.py)", r"\1", text)
    return re.sub(r"(\.py:|\(line )\d+", r"\1LINE", text)
