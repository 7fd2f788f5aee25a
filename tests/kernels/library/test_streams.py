"""The kernels on placed memory, their engines and DMA queues side by side: what the compiler makes of them gives what simulation gives."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import opennki.dropin  # noqa: F401  isort: skip
import pytest

from neuronxcc import nki
from neuronxcc.nki import kernels
from opennki.interpret.queues import run_streams
from opennki.passes.allocate import allocate
from opennki.passes.streams import streams
from tests.kernels.library.attention_oracle import BF16, normal

CONFIG = kernels.FlashConfig(seq_tile_size=512)
FP8 = ml_dtypes.float8_e4m3


def backward_inputs(dtype):
    q, dy = (normal(n, 1, 2, 32, 256, dtype=dtype) for n in (1, 4))
    k, v = (normal(n, 1, 1, 32, 256, dtype=dtype) for n in (2, 3))
    return q, k, v, normal(5, 1, 2, 32, 256, dtype=dtype), dy, np.abs(normal(6, 1, 2, 128, 2)) + 3, None


CALLS = {
    "forward": (kernels.flash_fwd[1, 1], (normal(1, 1, 2, 32, 256), normal(2, 1, 1, 32, 512), normal(3, 1, 1, 512, 32), None),
                {"config": CONFIG, "sliding_window": 300}),
    "backward": (kernels.flash_attn_bwd[1, 1], backward_inputs(BF16), {"use_causal_mask": True, "mixed_precision": True}),
    "fused attention": (kernels.fused_self_attn_for_SD_small_head_size[1],
                        (normal(1, 1, 32, 256), normal(2, 1, 256, 32), normal(3, 1, 256, 32)), {}),
    "allocated attention": (kernels.allocated_fused_self_attn_for_SD_small_head_size[1],
                            (normal(1, 1, 64, 1024), normal(2, 1, 64, 1024), normal(3, 1, 1024, 64)), {}),
    "projection": (kernels.allocated_fused_rms_norm_qkv, (normal(1, 1, 300, 1024, dtype=BF16), normal(2, 1024, 100, dtype=BF16)), {}),
    "double row": (kernels.quantized_double_row_matmul,
                   (normal(1, 128, 512), normal(2, 256, 1024).astype(FP8), normal(3, 128, 512), 1, 1, 2), {}),
    "scatter": (kernels.select_and_scatter_kernel, (normal(1, 2, 70, 16, 14), normal(2, 2, 70, 8, 7)), {}),
    "resize": (kernels.resize_nearest_fixed_dma_kernel, (normal(1, 2, 9, 7, 16), (2, 17, 13, 16)), {}),
    "pool": (kernels.adaptive_avg_pool2d_kernel, (normal(1, 1, 140, 13, 11), (4, 3)), {}),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("target", ["trn1", "trn2"])
def test_streams(name, target, monkeypatch):
    if name == "double row" and target == "trn1":
        target = "trn3"  # it is not for trn1
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", target)
    kernel, args, kwargs = CALLS[name]
    made = kernel.trace(*args, **kwargs)
    memory = allocate(made)
    expected = nki.simulate_kernel(kernel, *args, **kwargs)
    got = run_streams(made, memory, streams(made, memory), [a for a in args if isinstance(a, np.ndarray)], order=1)
    for a, b in zip(got, expected if isinstance(expected, tuple) else (expected,), strict=True):
        assert np.array_equal(a, b)
