# ruff: noqa: F401, I001
"""Whether an installed wheel runs kernels by the native code that it carries, without a compiler: run by the Python that has it.

    python scripts/check_wheel.py
"""

from __future__ import annotations

import os
import sys
import tempfile

os.environ["PATH"] = tempfile.mkdtemp()  # no compiler
os.environ["OPENNKI_CACHE_DIR"] = tempfile.mkdtemp()  # and nothing compiled before

import opennki.dropin
import numpy as np
import neuronxcc.nki as nki
import neuronxcc.nki.language as nl

from opennki.execute import build
from opennki.execute.executor import coverage, executor_of
from opennki.interpret.checks import Checks, tape_of


@nki.jit(platform_target="trn2")
def rms_norm(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(x.shape[0] // 128):
        tile = nl.load(x[i * 128 : (i + 1) * 128])
        nl.store(out[i * 128 : (i + 1) * 128], tile * nl.rsqrt(nl.mean(nl.square(tile), axis=1, keepdims=True) + 1e-6))
    return out


def main() -> int:
    if build.compiler() is not None:
        return fail("there is a compiler, so this shows nothing")
    x = np.random.default_rng(0).standard_normal((256, 512), np.float32)
    want = nki.simulate_kernel(rms_norm, x)
    levels = [name for name, _ in build.levels_here() if build.NEEDS.get(name, set()) <= build.cpu_features()]
    for level in levels:
        if level in build.NEEDS:
            os.environ["OPENNKI_CPU_LEVEL"] = level
        library = build.library()
        if library.lib is None or library.origin != "in the package" or library.level != level:
            return fail(f"the library is {library}, wanted the one of the package at {level}")
        executor = executor_of(tape_of(rms_norm.trace(x), Checks.of("off")))
        if executor is None or coverage(executor)["interpreted"]:
            return fail("the kernel does not run natively")
        if not np.array_equal(nki.simulate_kernel(rms_norm, x, checks="fast"), want):
            return fail(f"native code at {level} and the interpreter differ")
        print(f"{level}: {library.origin}, the same bits as the interpreter")
    return 0


def fail(why: str) -> int:
    print(f"check_wheel: {why}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
