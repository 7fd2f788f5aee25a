"""The native library, compiled for each level that this CPU has."""

from __future__ import annotations

import ctypes as C

import pytest
from tests.execute import native

from opennki import settings
from opennki.execute import build


@pytest.fixture(scope="session")
def native_levels():
    """{level: library} for the best level of this CPU and those below it."""
    cc = build.compiler()
    if cc is None:
        pytest.fail("the tests of native code need a C compiler")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OPENNKI_CPU_LEVEL", raising=False)
        best = build.cpu_level()
        folder = settings.current().cache_dir / "native"
    family = next((row for row in build.LEVELS.values() if best in row), (best,))
    below = [(name, flags) for name, flags in family[family.index(best) :] if name in native.LEVELS]
    return {name: C.CDLL(str(build.compile_library(cc, flags, folder, name))) for name, flags in below}
