"""Values that have a native kernel of their own, over whole tiles: products of matrices, copies, scans, folds over the partitions."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from opennki.execute import abi
from opennki.execute.record import Sym, Unsupported, strides_of
from opennki.execute.shapes import joined

if TYPE_CHECKING:
    from opennki.execute.program import Made, Program


def product(program: Program, out: Sym, value: Sym) -> Made | None:
    """A product of matrices, that is added to its tile or not; None for another value. Raises Unsupported."""
    accumulate = abi.ADDS_NOTHING
    if value.kind == "call" and value.name == "add":
        left, right = value.args
        if left.kind == "tile" and right.kind == "matmul":
            if not program.same(left.source, out.source):
                raise Unsupported("an accumulation into another tile")
            accumulate, value = abi.ADDS_TO_RESULT, right
    if value.kind != "matmul":
        return None
    a, b = value.args
    m, k = a.shape
    n = b.shape[1]
    if program.dtype(out.source) != 0:
        raise Unsupported("a product that is not stored in float32")
    d = strides_of(out.shape, out.strides, (m, n))
    what = abi.Matmul()
    what.K, what.M, what.N = k, m, n
    what.s_dtype, what.m_dtype = program.dtype(a.source), program.dtype(b.source)
    if max(what.s_dtype, what.m_dtype) > 6:
        raise Unsupported("a product of integers")
    what.s_stride[:] = [a.strides[1], a.strides[0]]
    what.m_stride[:] = list(b.strides)
    what.d_stride[:] = list(d)
    what.accumulate = accumulate
    return abi.K_MM, what, [a.source, b.source, out.source], (m, n)


def copy_scan_fold(program: Program, out: Sym, value: Sym) -> Made | None:
    """A copy of bits, a scan, or a fold over the partitions; None for another value. Raises Unsupported."""
    if value.kind == "tile" and value.raw and program.dtype_of(value.source) == program.dtype_of(out.source) and value.size == out.size:
        shape = out.shape
        strides = value.strides if value.shape == shape else strides_of(value.shape, value.strides, shape)
        width = value.dtype.itemsize
        if not program.keeps_axes:
            shape, (d, s) = joined(shape, [out.strides, strides])
        else:
            d, s = out.strides, strides
        if len(shape) > abi.RANK:
            raise Unsupported("too many dimensions")
        what = abi.Copy()
        what.rank, what.width = len(shape), width
        what.shape[: len(shape)] = shape
        what.d_stride[: len(shape)] = d
        what.s_stride[: len(shape)] = s
        return abi.K_COPY, what, [out.source, value.source], tuple(shape)
    if value.kind == "scan":
        x, y, initial = value.args
        rows, n = x.shape
        scan = abi.Scan()
        scan.rows, scan.n = rows, n
        scan.x_stride[:], scan.y_stride[:] = list(x.strides), list(y.strides)
        scan.d_stride[:] = list(strides_of(out.shape, out.strides, (rows, n)))
        scan.x_dtype, scan.y_dtype, scan.d_dtype = program.dtype(x.source), program.dtype(y.source), program.dtype(out.source)
        scan.op0, scan.op1 = (abi.FUNCTIONS[op] for op in value.more["ops"])
        scan.reverse0, scan.reverse1 = map(int, value.more["reverse"])
        sources = [x.source, y.source, out.source]
        if initial.kind == "tile":
            scan.has_initial_tile, scan.i_stride, scan.i_dtype = 1, initial.strides[0], program.dtype(initial.source)
            sources.append(initial.source)
        else:
            scan.initial = initial.value
        return abi.K_SCAN, scan, sources, x.shape
    if value.kind == "pfold":
        (x,) = value.args
        if value.raw and program.dtype(x.source) != program.dtype(out.source):
            raise Unsupported("bits stored as another dtype")
        p, f = x.shape[0], prod(x.shape[1:])
        down = abi.PartitionFold()
        down.p, down.f = p, f
        down.x_stride[:] = list(strides_of(x.shape, x.strides, (p, f)))
        down.d_stride = strides_of(out.shape, out.strides, (f,))[0]
        down.x_dtype, down.d_dtype, down.fn = program.dtype(x.source), program.dtype(out.source), abi.FUNCTIONS[value.name]
        return abi.K_PFOLD, down, [x.source, out.source], x.shape
    return None
