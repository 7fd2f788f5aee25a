"""nl.loop_reduce: accumulate a tile over loops.

`acc[...] = nl.loop_reduce(x, np.add, loop_indices=[i])` makes acc = op(acc, x) in each iteration, from the
identity of op on; `acc = nl.loop_reduce(...)` does so on a new tile that outlives the loops. Source:
api_legacy language.loop_reduce.
"""

from __future__ import annotations

from types import FrameType
from typing import Any

from opennki.errors import NkiTypeError, NkiValueError, user_frame
from opennki.ir.affine import Affine, Pred
from opennki.ir.build import current
from opennki.isa import dtypes, scalar
from opennki.lang import ops
from opennki.lang.bytecode import following
from opennki.lang.create import fill
from opennki.lang.emit import call, dtype_name
from opennki.lang.index import Index, Mask
from opennki.lang.tensor import Tensor


class LoopReduction:
    """One iteration of a reduction, on its way into the accumulator."""

    def __init__(self, tile: Tensor, op: str, loops: tuple[Any, ...], mask: Any) -> None:
        self.tile, self.op, self.loops, self.mask = tile, op, loops, mask

    def accumulate_into(self, into: Tensor) -> None:
        """into = op(into, tile), from the identity of op on."""
        first = _first_iteration(self.loops, into)
        if first is not None:
            fill(into, _identity(self.op, into.access.dtype), first if first.preds else None)
        mask = self.mask
        if self.tile.mask:
            defined = Mask(self.tile.mask, self.tile.shape)
            mask = defined if mask is None else defined & mask
        call(
            "accumulate",
            (),
            {"dst": into, "data": ops.off_psum(ops.fit(self.tile, into), into), "op": self.op, "mask": mask},
        )

    def __getattr__(self, name: str) -> Any:
        raise NkiValueError(
            "the result of nl.loop_reduce is used inside an expression",
            rule="it is assigned: acc[...] = nl.loop_reduce(...) or acc = nl.loop_reduce(...)",
            why="the destination is also the accumulator",
            fix="assign it, and use the accumulator after the loops",
        )


def _first_iteration(loops: tuple[Any, ...], into: Tensor) -> Mask | None:
    """The condition that all loops are at their start; None where it is known not to hold.

    A loop that is unrolled gives numbers: its start is the first value that is seen here for the same
    destination.
    """
    builder = current()
    numbers = tuple(v for v in loops if isinstance(v, int))
    if numbers:
        a = into.access
        key = (builder.here(), a.alloc.id, tuple((d.base.key(), d.strides) for d in a.dims))
        if builder.options.setdefault("loop_reduce", {}).setdefault(key, numbers) != numbers:
            return None
    preds = [Pred(Affine(v.lo).add(Affine(0, ((v, 1),)), -1)) for v in _variables(loops)]
    return Mask(tuple(preds), ())


def _variables(loops: tuple[Any, ...]) -> list[Any]:
    return [
        v for value in loops if isinstance(value, Index) for v in value.base.variables() if v.kind == "loop"
    ]


def _identity(op: str, dtype: str) -> Any:
    value = scalar.SCALAR[op].identity
    if value is None:
        raise NkiValueError(
            f"nl.loop_reduce with {op}",
            rule="the operator has an identity: add, multiply, maximum, minimum and the like",
        )
    return int(max(-(2.0**62), min(value, 2.0**62))) if dtypes.is_integer(dtype) else float(value)


def loop_reduce(x: Any, op: Any, loop_indices: Any, dtype: Any = None, mask: Any = None) -> Any:
    """Accumulate a tile over the loops of `loop_indices` (an index, or a list or tuple of them)."""
    x = ops.need_tile(x, "nl.loop_reduce: x")
    try:
        name = scalar.resolve(op)
    except TypeError as exc:
        raise NkiTypeError(f"nl.loop_reduce: {exc}",
                           rule="an operator is a function of nl or the NumPy ufunc of the same meaning") from None
    loops = tuple(loop_indices) if isinstance(loop_indices, (list, tuple)) else (loop_indices,)
    for value in loops:
        if not (isinstance(value, int) or (isinstance(value, Index) and not value.shape)):
            raise NkiTypeError(
                f"nl.loop_reduce: loop_indices holds {value!r}",
                rule="loop_indices are indices of nl.affine_range or nl.sequential_range loops",
            )
    kind = x.access.dtype if dtype is None else dtype_name(dtype)
    _identity(name, kind)
    reduction = LoopReduction(x, name, loops, mask)
    frame = user_frame()
    if frame is None or not _stored_to_name(frame):
        return reduction
    accumulator = _outer_tile(x, kind, loops)
    reduction.accumulate_into(accumulator)
    return accumulator


def _stored_to_name(frame: FrameType) -> bool:
    """True when the call that is running is the whole right side of `name = ...`."""
    after = following(frame.f_code, frame.f_lasti, frozenset({"PRECALL", "CALL"}))
    return after is not None and after.opname in ("STORE_FAST", "STORE_NAME", "STORE_DEREF", "STORE_GLOBAL")


def _outer_tile(x: Tensor, dtype: str, loops: tuple[Any, ...]) -> Tensor:
    """A tile made outside of the loops, the same one in every pass over their bodies."""
    builder = current()
    loc = builder.here()
    scopes = getattr(builder, "scopes", [])
    sites = {v.site for v in _variables(loops)}
    outer = next((i for i, s in enumerate(scopes) if s.record.registry.get("site") in sites), len(scopes))
    if any(s.record.registry.get("site") not in sites for s in scopes[outer:]):
        raise NkiValueError(
            "acc = nl.loop_reduce(...) inside a loop that is not in loop_indices",
            rule="the accumulator would be needed once per iteration of that loop",
            fix=(
                "make the accumulator with nl.ndarray before the loops and assign to it: acc[i] = "
                "nl.loop_reduce(...)"
            ),
        )

    def make() -> Any:
        inner = scopes[outer:]
        del scopes[outer:]
        try:
            return builder.alloc(x.shape, dtype, "sbuf", loc=loc)
        finally:
            scopes.extend(inner)

    kept = builder.options.setdefault("loop_reduce_tiles", {})
    key = (loc, x.shape, dtype, id(scopes[outer - 1].record) if outer else 0)
    alloc = kept.get(key)
    if alloc is None:
        alloc = kept[key] = make()
    elif outer:
        scopes[outer - 1].record.allocs[alloc.id] = alloc
    return Tensor.of(alloc)
