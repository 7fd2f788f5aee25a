"""The native library at each level that this CPU has, and calls of it on NumPy arrays."""

from __future__ import annotations

import ctypes as C
import functools
import os
from pathlib import Path
from typing import Any

import numpy as np

from opennki import settings
from opennki.execute import abi, build
from opennki.isa.dtype_names import STORAGE
from opennki.isa.scalar import SCALAR

LEVELS = [name for name, _ in dict(build.LEVELS).get("x86_64", ())] if os.uname().machine == "x86_64" else [build.cpu_level()[0]]
LEVELS = [name for name in LEVELS if build.NEEDS.get(name, set()) <= build.cpu_features()]
if os.environ.get("OPENNKI_TEST_SANITIZE"):  # see scripts/sanitize.sh
    # at -O1, which keeps what is there to be found, and compiles in a third of the time
    build.FLAGS = (*build.FLAGS, "-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer")
    LEVELS = LEVELS[:1] if os.environ["OPENNKI_TEST_SANITIZE"] != "all" else LEVELS


@functools.cache
def at_level(level: str) -> C.CDLL:
    """The library compiled for a level; with OPENNKI_TEST_SANITIZE=1 under the address and undefined-behaviour sanitizers."""
    cc = build.compiler()
    assert cc is not None, "the tests of native code need a C compiler"
    flags = next((f for levels in build.LEVELS.values() for name, f in levels if name == level), ())
    lib = C.CDLL(str(build.compile_library(cc, flags, Path(settings.current().cache_dir) / "native", level)))
    assert lib.nki_abi() == abi.ABI
    return lib


def best() -> C.CDLL:
    """The library that kernels use."""
    lib = build.library()
    assert lib.lib is not None, lib.origin
    return lib.lib


def pointer(a: np.ndarray) -> C.c_void_p:
    return C.c_void_p(a.ctypes.data)


def call(lib: C.CDLL, name: str, *operands: np.ndarray) -> np.ndarray:
    """A scalar function on contiguous float32 arrays."""
    out = np.empty_like(operands[0])
    function = lib.nki_call1 if SCALAR[name].arity == 1 else lib.nki_call2
    function(C.c_int(abi.FUNCTIONS[name]), pointer(out), *map(pointer, operands), C.c_int64(out.size))
    return out


def to_float(lib: C.CDLL, dtype: str, a: np.ndarray) -> np.ndarray:
    out = np.empty(a.shape, np.float32)
    lib.nki_to_float(C.c_int(abi.DTYPES[dtype]), pointer(a), pointer(out), C.c_int64(a.size))
    return out


def from_float(lib: C.CDLL, dtype: str, a: np.ndarray) -> np.ndarray:
    out = np.empty(a.shape, STORAGE[dtype])
    lib.nki_from_float(C.c_int(abi.DTYPES[dtype]), pointer(a), pointer(out), C.c_int64(a.size))
    return out


def assert_same(got: np.ndarray, want: np.ndarray, what: Any = "") -> None:
    """The same bits; any NaN is like any other NaN."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape and got.dtype == want.dtype, (got.shape, got.dtype, want.shape, want.dtype, what)
    view = np.dtype(f"u{got.dtype.itemsize}")
    differ = np.ascontiguousarray(got).view(view) != np.ascontiguousarray(want).view(view)
    if got.dtype.kind not in "biu":
        with np.errstate(all="ignore"):
            differ &= ~(np.isnan(got.astype(np.float32)) & np.isnan(want.astype(np.float32)))
    if differ.any():
        at = np.argwhere(differ)[:5]
        raise AssertionError(
            f"{what}: {differ.sum()} of {differ.size} differ, at {at.tolist()}: "
            f"{[got[tuple(i)] for i in at]} for {[want[tuple(i)] for i in at]}"
        )


def random_bits(n: int, seed: int = 0) -> np.ndarray:
    """float32 of random bits: NaNs, infinities and denormals among them."""
    return np.random.default_rng(seed).integers(0, 1 << 32, n, dtype=np.uint32).view(np.float32)
