"""DMA engines: copies, transpositions and sums against NumPy, rules by their errors."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from opennki.errors import NkiValueError
from opennki.isa import dma
from opennki.isa.declare import ISA
from opennki.isa.enums import dge_mode, oob_mode
from opennki.isa.target import TRN1, TRN2

from .bodies import FLOATS, INTS, NUMPY, call, check, operand, run, same

pytestmark = pytest.mark.oracle


@pytest.mark.parametrize("dtype", FLOATS + INTS)
def test_copy_keeps_bits(dtype):
    src = operand((128, 3, 5), dtype)
    same(run("dma_copy", dst=np.zeros_like(src), src=src), src.copy())
    same(run("tiled_offloaded_memcpy", dst=np.zeros_like(src), src=src), src.copy())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e5m2", "float8_e4m3"])
def test_copy_casts_once(dtype):
    src = operand((16, 40), "float32")
    with np.errstate(all="ignore"):
        want = src.astype(NUMPY[dtype])
    same(run("dma_copy", dst=np.zeros((16, 40), NUMPY[dtype]), src=src), want)
    same(run("tiled_offloaded_memcpy", dst=np.zeros((16, 40), NUMPY[dtype]), src=src), want)


def test_integer_casts_saturate():
    src = np.array([[300, -5, 127, 2**31 - 1]], np.int32)
    same(run("dma_copy", dst=np.zeros((1, 4), np.uint8), src=src), np.array([[255, 0, 127, 255]], np.uint8))
    floats = np.array([[np.nan, np.inf, 2.5, -3.5]], np.float32)
    same(run("dma_copy", dst=np.zeros((1, 4), np.int8), src=floats),
         np.array([[0, 127, 2, -4]], np.int8))


@pytest.mark.parametrize("dtype", FLOATS)
def test_rmw_adds_in_float32(dtype):
    old, src = operand((8, 50), dtype, 1), operand((8, 50), dtype, 2)
    with np.errstate(all="ignore"):
        want = (old.astype(np.float32) + src.astype(np.float32)).astype(NUMPY[dtype])
    same(run("dma_copy", dst=old, src=src, dst_rmw_op="add"), want)


COPY = {"dst": ((128, 512), "float32", "hbm"), "src": ((128, 512), "float32")}


def test_what_copies_accept():
    check("dma_copy", **COPY, dst_rmw_op="add")
    check("dma_copy", **COPY, oob_mode=oob_mode.skip)
    check("dma_copy", **COPY, dge_mode=dge_mode.swdge)
    check("dma_copy", TRN2, **COPY, dge_mode=dge_mode.hwdge)


@pytest.mark.parametrize("given,text", [
    ({"dst_rmw_op": "add", "oob_mode": oob_mode.skip}, "dst_rmw_op together with oob_mode.skip"),
    ({"dge_mode": dge_mode.hwdge}, "hwdge is not available on trn1"),
])
def test_what_copies_refuse(given, text):
    with pytest.raises(NkiValueError, match=text) as e:
        check("dma_copy", **COPY, **given)
    assert e.value.rule and e.value.why and e.value.fix


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3", "int32", "uint8"])
@pytest.mark.parametrize("shape,axes",
                         [((5, 7), (1, 0)), ((3, 4, 6), (2, 1, 0)), ((2, 3, 4, 5), (3, 1, 2, 0))])
def test_transpose_moves_bits(shape, axes, dtype):
    src = operand(shape, dtype)
    want = np.empty([shape[a] for a in axes], src.dtype)
    for index in np.ndindex(*shape):
        want[tuple(index[a] for a in axes)] = src[index]
    same(run("dma_transpose", src=src), want)
    same(run("dma_transpose", src=src, axes=axes), want)
    same(run("dma_transpose", src=src, axes=list(axes)), want)
    assert ISA["dma_transpose"].results[0].shape(call("dma_transpose", src=src)) == want.shape


def test_transpose_casts():
    src = operand((5, 7), "float32")
    with np.errstate(all="ignore"):
        same(run("dma_transpose", src=src, dtype="bfloat16"), src.astype(NUMPY["bfloat16"]).T)


@pytest.mark.parametrize("shape,given,text", [
    ((4,), {}, "1 dimensions"), ((2, 2, 2, 2, 2), {}, "5 dimensions"),
    ((4, 4), {"axes": (2, 1, 0)}, r"axes \(2, 1, 0\)"),
    ((2, 3, 4), {"axes": (1, 2, 0)}, r"axes \(1, 2, 0\)"), ((8, 129), {}, "129, becomes the partition"),
    ((8, 8), {"dge_mode": dge_mode.hwdge}, "hwdge"), ((2, 3, 4), {"mask": object()}, "mask on a transpose"),
])
def test_what_transposes_refuse(shape, given, text):
    with pytest.raises(NkiValueError, match=text):
        check("dma_transpose", src=(shape, "float32", "hbm"), **given)


def test_what_transposes_accept():
    check("dma_transpose", src=((2048, 128), "float32", "hbm"), axes=[1, 0], mask=object())
    check("dma_transpose", TRN2, src=((16, 2, 4, 128), "bfloat16"), dge_mode=dge_mode.hwdge)


@pytest.mark.parametrize("count", [1, 2, 5, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fma_sums_in_order(count, dtype):
    srcs = [operand((4, 30), dtype, i) for i in range(count)]
    scales = [0.7, -0.5, 3.0, 0.0, 0.1, 2.0, 1.0, -1.0][:count]
    with np.errstate(all="ignore"):
        want = srcs[0].astype(np.float32) * np.float32(scales[0])
        for s, f in zip(srcs[1:], scales[1:]):
            want = want + s.astype(np.float32) * np.float32(f)
        want = want.astype(NUMPY[dtype])
    got = run("tiled_offloaded_fma", dst=np.zeros((4, 30), NUMPY[dtype]), scales=scales,
              **{f"src{i}": s for i, s in enumerate(srcs)})
    same(got, want)
    exact = sum(np.float64(f) * s.astype(np.float64) for s, f in zip(operands(count), scales))
    got = run("tiled_offloaded_fma", dst=np.zeros((4, 30), np.float32), scales=tuple(scales),
              **{f"src{i}": s for i, s in enumerate(operands(count))})
    np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5)


def operands(count):
    return [operand((4, 30), "float32", i, special=False) for i in range(count)]


def test_what_fma_refuses():
    t = ((4, 4), "float32", "hbm")
    check("tiled_offloaded_fma", src0=t, src1=t, dst=t, scales=[1.0, 1.0])
    with pytest.raises(NkiValueError, match="1 scales for 2 sources"):
        check("tiled_offloaded_fma", src0=t, src1=t, dst=t, scales=[1.0])
    with pytest.raises(NkiValueError, match="not contiguous"):
        check("tiled_offloaded_fma", src0=t, src2=t, dst=t, scales=[1.0, 1.0])
    assert dma.MAX_SOURCES == sum(p.name.startswith("src") for p in ISA["tiled_offloaded_fma"].params)


def test_cost_follows_bytes_and_engines():
    def cost(name, hw=TRN1, p=128, f=512, dtypes=None, **more):
        dtypes = dtypes or {"src": "float32", "dst": "float32", "src0": "float32"}
        return ISA[name].cost(SimpleNamespace(P=p, F=f, dtypes=dtypes, **more), hw)

    nbytes = 128 * 512 * 4
    # trn1: 16 engines of 17 bytes/ns, 272 together; the base clock is 1.4 GHz
    assert cost("dma_copy") == pytest.approx(nbytes / 272 * 1.4)
    assert cost("dma_copy", p=4) == pytest.approx(4 * 512 * 4 / 17 * 1.4)
    assert cost("dma_copy", dst_rmw_op="add") == pytest.approx(2 * cost("dma_copy"))
    assert cost("dma_copy", dtypes={"src": "bfloat16", "dst": "float32"}) == cost("dma_copy")
    assert cost("dma_transpose", TRN2, spaces={"src": "hbm"}) == pytest.approx(nbytes / (368 * 0.9) * 1.2)
    assert cost("dma_transpose", TRN2, spaces={"src": "sbuf"}) == pytest.approx(nbytes / (368 * 0.5) * 1.2)
    two = {"src0": "float32", "src1": "float32", "dst": "float32"}
    assert cost("tiled_offloaded_fma", dtypes=two) == pytest.approx(4 * cost("tiled_offloaded_memcpy"))
