"""BLAS runs on one thread inside a simulation, and as before after it."""
import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits

import opennki.dropin  # noqa: F401  isort: skip
import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
from opennki.interpret import blas


def blas_threads():
    return [lib["num_threads"] for lib in threadpool_info() if lib["user_api"] == "blas"]


def test_one_thread_inside_a_simulation_and_as_before_after_it():
    blas._libraries.cache_clear()  # other tests may have loaded a BLAS since: that of SciPy, or of PyTorch
    seen = []

    def kernel(x):
        out = nl.ndarray((128, 128), dtype=nl.float32, buffer=nl.shared_hbm)
        for _ in nl.affine_range(2):
            t = nl.load(x)
            nl.store(out, nl.copy(nisa.nc_matmul(t, t)))
        return out
    x = np.ones((128, 128), np.float32)
    with threadpool_limits(2, "blas"):
        before = blas_threads()
        nki.simulate_kernel(nki.jit(kernel, platform_target="trn1"), x, progress=lambda done, total: seen.append(blas_threads()),
                            checks={"race": "off"})
        assert blas_threads() == before
    assert seen and all(set(threads) == {1} for threads in seen)
