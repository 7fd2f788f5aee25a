"""The one defined order of reductions and scans, whatever the memory layout of the operand.

The reduced extent is flattened row-major. Element i goes to lane i mod 32, and each lane accumulates its
elements one after the other in float32 (the accumulator is the left operand). Then a fixed binary tree joins
the lanes: lane j with lane j+16, then j+8, j+4, j+2, j+1. A lane without elements counts as the identity of
the operator (add: -0.0, multiply: 1, maximum: -inf, minimum: +inf), so it changes no bit. subtract is x0 +
(-x1) + (-x2) + ... in that order. Logical operators read nonzero as true and give 0 or 1; bitwise operators
take integers and keep their dtype.

No step contracts a multiply and an add into one rounding, so a native executor that follows the order is
bit-equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from opennki.isa.scalar import SCALAR, ScalarFunction, resolve
from opennki.isa.zeros import MAXIMUM, MINIMUM

Array = npt.NDArray[Any]
LANES = 32

# The ufunc of one accumulation step; its left operand is the accumulator.
_STEP: dict[str, np.ufunc] = {
    "add": np.add,
    "subtract": np.add,  # of negated elements
    "multiply": np.multiply,
    "maximum": MAXIMUM,
    "minimum": MINIMUM,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "logical_xor": np.logical_xor,
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
}
_BLOCK = 1 << 16  # elements per transposed block: it stays in the L2 cache


def _operator(op: object, dtype: np.dtype[Any], what: str) -> tuple[ScalarFunction, np.ufunc, Any]:
    """Table entry, ufunc of one accumulation step, and identity; the operator must take the dtype."""
    entry = SCALAR[resolve(op)]
    if not entry.reducible:
        legal = ", ".join(sorted(name for name, e in SCALAR.items() if e.reducible))
        raise ValueError(f"{what}: {entry.name} does not reduce; operators that do are {legal}")
    ufunc = _STEP[entry.name]
    if entry.group == "logical":
        return entry, ufunc, bool(entry.identity)
    if entry.group == "bitvec":
        if dtype.kind not in "iu":
            raise TypeError(f"{what}: {entry.name} works on the bits of integers, got {dtype}")
        zero = dtype.type(0)
        return entry, ufunc, ~zero if entry.name == "bitwise_and" else zero
    if dtype != np.float32:
        raise TypeError(f"{what}: {entry.name} accumulates in float32, got {dtype}")
    return entry, ufunc, np.float32(-0.0 if entry.name == "subtract" else entry.identity)


def _tree(lanes: Array, ufunc: np.ufunc) -> Array:
    """Join the lanes along axis 0 (at most 32, the missing ones at the end); the result has no lane axis."""
    n = lanes.shape[0]
    half = LANES // 2
    while half:
        if n > half:
            joined = ufunc(lanes[: n - half], lanes[half:n])
            # Lanes whose partner is missing would meet the identity: they stay as they are.
            lanes = joined if n == 2 * half else np.concatenate([joined, lanes[n - half : half]])
            n = half
        half //= 2
    return np.asarray(lanes[0])


def _reduce_rows(x: Array, ufunc: np.ufunc, identity: Any) -> Array:
    """Reduce a (rows, n) array along its second axis in the defined order."""
    rows, n = x.shape
    full = n // LANES
    if full <= 1:
        lanes = np.array(x[:, :LANES].T, order="C")
    else:
        # Blocks of (step, row, lane) make each step one long vector operation. Their first slot carries the
        # lanes over.
        v = x[:, : full * LANES].reshape(rows, full, LANES)
        steps = max(4, _BLOCK // (rows * LANES))
        if steps >= full:
            block = np.ascontiguousarray(v.transpose(1, 0, 2))
            return _tail(np.ascontiguousarray(ufunc.reduce(block, axis=0, initial=identity).T), x, full, ufunc)
        block = np.empty((steps + 1, rows, LANES), x.dtype)
        acc = np.full((rows, LANES), identity, x.dtype)
        for k in range(0, full, steps):
            count = min(steps, full - k)
            block[0] = acc
            block[1 : count + 1] = v[:, k : k + count].transpose(1, 0, 2)
            ufunc.reduce(block[: count + 1], axis=0, out=acc, initial=identity)
        lanes = np.ascontiguousarray(acc.T)
    return _tail(lanes, x, full, ufunc)


def _tail(lanes: Array, x: Array, full: int, ufunc: np.ufunc) -> Array:
    """Add the last, incomplete step (elements from 32 * full) to (lane, row), then join the lanes."""
    rest = x.shape[1] - full * LANES
    if full and rest:
        ufunc(lanes[:rest], x[:, full * LANES :].T, out=lanes[:rest])
    return _tree(lanes, ufunc)


def _free_axes(axes: int | Sequence[int], ndim: int) -> tuple[int, ...]:
    given = (axes,) if isinstance(axes, int | np.integer) else tuple(axes)
    result = []
    for axis in given:
        if not -ndim <= axis < ndim:
            raise ValueError(f"reduce_free: axis {axis} is out of range for {ndim} dimensions")
        result.append(int(axis) % ndim)
    if 0 in result:
        raise ValueError("reduce_free: axis 0 is the partition axis; only free axes reduce here")
    if len(set(result)) != len(result) or not result:
        raise ValueError(f"reduce_free: axes {given} must be one or more different free axes")
    return tuple(sorted(result))


@np.errstate(all="ignore")
def reduce_free(x: Array, op: object, axes: int | Sequence[int], keepdims: bool = False) -> Array:
    """Reduce over free axes in the defined order.

    x: (P, ...) float32 (arithmetic), integer (bitwise), any real dtype (logical); op: see `scalar.resolve`;
    axes: one or more of 1..ndim-1, negative ones counted from the end. Returns float32 (bitwise: the dtype of
    x) without the reduced axes, or with size 1 there if keepdims. An empty extent gives the identity. Raises
    ValueError for a bad axis or an operator that does not reduce, TypeError for a dtype the operator does not
    take.
    """
    entry, ufunc, identity = _operator(op, x.dtype, "reduce_free")
    reduced = _free_axes(axes, x.ndim)
    if entry.group == "logical":
        x = np.not_equal(x, 0)
    kept = [axis for axis in range(x.ndim) if axis not in reduced]
    kept_shape = tuple(x.shape[axis] for axis in kept)
    rows = 1
    for size in kept_shape:
        rows *= size
    n = 1
    for axis in reduced:
        n *= x.shape[axis]
    shape = kept_shape
    if keepdims:
        shape = tuple(1 if axis in reduced else size for axis, size in enumerate(x.shape))
    if not rows or not n:
        value: Array = np.full(shape, identity, x.dtype)
    else:
        if entry.name == "subtract":
            x = _negated(x, reduced)
        # With a C-contiguous operand the order of the loops below depends on the shape alone.
        flat = np.ascontiguousarray(x.transpose(*kept, *reduced)).reshape(rows, n)
        value = _reduce_rows(flat, ufunc, identity).reshape(shape)
    return value.astype(np.float32) if entry.group == "logical" else value


@np.errstate(all="ignore")
def reduce_partition(x: Array, op: object) -> Array:
    """Reduce over the partition axis (axis 0) in the defined order: lanes are partition index mod 32.

    x: (P, ...), dtypes as for `reduce_free`. Returns (1, ...). Errors as `reduce_free`.
    """
    entry, ufunc, identity = _operator(op, x.dtype, "reduce_partition")
    if not x.ndim:
        raise ValueError("reduce_partition: a 0-d array has no partition axis")
    if entry.group == "logical":
        x = np.not_equal(x, 0)
    p, shape = x.shape[0], (1, *x.shape[1:])
    if not x.size:
        value: Array = np.full(shape, identity, x.dtype)
    else:
        if entry.name == "subtract":
            x = _negated(x, (0,))
        flat = np.ascontiguousarray(x).reshape(p, -1)
        full = p // LANES
        if full <= 1:
            lanes = flat[:LANES].copy()
        else:
            steps = flat[: full * LANES].reshape(full, LANES, -1)
            lanes = ufunc.reduce(steps, axis=0, initial=identity)
        rest = p - full * LANES
        if full and rest:
            ufunc(lanes[:rest], flat[full * LANES :], out=lanes[:rest])
        value = _tree(lanes, ufunc).reshape(shape)
    return value.astype(np.float32) if entry.group == "logical" else value


@np.errstate(all="ignore")
def reduce_list(arrays: Sequence[Array], op: object) -> Array:
    """Reduce over a list of arrays of one shape in the defined order: lanes are positions in the list mod 32.

    dtypes and errors as for `reduce_free`. Returns an array of the shape. It is made in blocks of rows: what is made on the way, up to 32
    arrays, has the size of one.
    """
    entry, ufunc, _ = _operator(op, arrays[0].dtype, "reduce_list")
    shape = arrays[0].shape
    rows = max(1, _BLOCK // max(1, prod(shape[1:])))
    if not shape or shape[0] <= rows:
        value = _reduce_lanes(arrays, entry, ufunc)
    else:
        blocks = (slice(first, first + rows) for first in range(0, shape[0], rows))
        value = np.empty(shape, np.bool_ if entry.group == "logical" else arrays[0].dtype)
        for block in blocks:
            value[block] = _reduce_lanes([x[block] for x in arrays], entry, ufunc)
    return value.astype(np.float32) if entry.group == "logical" else value


def _reduce_lanes(arrays: Sequence[Array], entry: ScalarFunction, ufunc: np.ufunc) -> Array:
    lanes: list[Array] = []
    for i, x in enumerate(arrays):
        value = np.not_equal(x, 0) if entry.group == "logical" else np.negative(x) if entry.name == "subtract" and i else x
        if i < LANES:
            lanes.append(value)
        else:
            lanes[i % LANES] = ufunc(lanes[i % LANES], value)
    half = LANES // 2
    while half:
        lanes[: max(0, len(lanes) - half)] = [ufunc(a, b) for a, b in zip(lanes, lanes[half:], strict=False)]
        del lanes[half:]
        half //= 2
    return np.array(lanes[0])


def _negated(x: Array, reduced: tuple[int, ...]) -> Array:
    """x with every element but the first of each reduced extent negated."""
    first = tuple(0 if axis in reduced else slice(None) for axis in range(x.ndim))
    value: Array = np.negative(x)
    value[first] = x[first]
    return value


@np.errstate(all="ignore")
def scan_free(
    data0: Array,
    data1: Array,
    initial: float | Array,
    op0: object,
    op1: object,
    reverse0: bool = False,
    reverse1: bool = False,
) -> Array:
    """r[i] = op1(op0(data0[i], r[i-1]), data1[i]) along the flattened free axes, in float32.

    data0, data1: (P, ...) float32 of one shape; initial: r[-1], a number or float32 with P elements (P, 1).
    reverse0 makes data0 the right operand of op0, reverse1 makes data1 the left operand of op1. op0 and op1
    take two operands and are no bitwise operators. Returns float32 of the shape of data0. Raises ValueError
    for operators or shapes that do not fit.
    """
    f0, f1 = (_scan_operator(op) for op in (op0, op1))
    if data0.shape != data1.shape or not data0.ndim:
        raise ValueError(f"scan_free: data0 {data0.shape} and data1 {data1.shape} must be tiles of one shape")
    p = data0.shape[0]
    if np.size(initial) not in (1, p):
        raise ValueError(f"scan_free: initial has {np.size(initial)} elements, needs 1 or {p}, one a partition")
    if not data0.size:
        return np.empty(data0.shape, np.float32)
    # One step of all partitions is one contiguous row of the transposed operands.
    rows0 = np.array(data0.reshape(p, -1).T, np.float32, order="C")
    rows1 = np.array(data1.reshape(p, -1).T, np.float32, order="C")
    result = np.empty_like(rows0)
    state: Array = np.empty(p, np.float32)
    state[...] = np.reshape(np.asarray(initial, np.float32), -1)
    between = np.empty(p, np.float32)
    if not (reverse0 or reverse1):
        for a, b, out in zip(rows0, rows1, result):
            f0(a, state, out=between)
            f1(between, b, out=out)
            state = out
    else:
        for a, b, out in zip(rows0, rows1, result):
            f0(*((state, a) if reverse0 else (a, state)), out=between)
            f1(*((b, between) if reverse1 else (between, b)), out=out)
            state = out
    return np.ascontiguousarray(result.T).reshape(data0.shape)


def running(step: Callable[..., Array], state: Array, *rows: Array) -> tuple[Array, Array]:
    """The states after each column, (P, F) float32, and the last one, (P,): state = step(state, *columns), from left to right.

    state: float32 (P,); rows: one or more (P, F), of which `step` gets column after column.
    """
    out: Array = np.empty(rows[0].shape, np.float32)
    for i in range(out.shape[1]):
        state = step(state, *[x[:, i] for x in rows])
        out[:, i] = state
    return out, state


def _scan_operator(op: object) -> Any:
    entry = SCALAR[resolve(op)]
    if entry.arity != 2 or entry.group == "bitvec":
        raise ValueError(f"scan_free: {entry.name} is not an arithmetic operator of two operands")
    if isinstance(entry.raw, np.ufunc):
        return entry.raw

    def step(a: Array, b: Array, out: Array) -> None:
        out[...] = entry.raw(a, b)

    return step
