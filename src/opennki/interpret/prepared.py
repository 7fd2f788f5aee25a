"""A kernel planned once and run many times on the caller's buffers."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from opennki.interpret import simulate as sim
from opennki.ir.nodes import Kernel
from opennki.ir.results import call_results


class Prepared:
    """A kernel planned once; `run` may be called from several threads at once."""

    def __init__(self, kernel: Kernel, level: str = "fast") -> None:
        self.kernel = kernel
        self.checks = sim.Checks.of(level)
        self.tape = sim.tape_of(kernel, self.checks)
        self.results = call_results(kernel)

    def run(self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], *, seed: int = 0, out: Any = None) -> None:
        """Run on arrays of the storage dtypes; results are written into `outputs`, in the order of `call_results`."""
        # an input that is written shares memory with its output: it is read before that is written
        given = [np.array(a) for a in inputs]
        results, news = sim.simulate(self.kernel, given, self.checks, seed=seed, out=out, tape=self.tape)
        changed = dict(zip((a for a in self.kernel.params if a in self.kernel.written_params), news, strict=True))
        for i, (result, target) in enumerate(zip(self.results, outputs, strict=True)):
            value = results[i] if result.operand is None else changed[self.kernel.params[result.operand]]
            target[...] = value if value.dtype == target.dtype else value.view(target.dtype)
