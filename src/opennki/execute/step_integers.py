"""Values of 64-bit integers: stored by an elementwise program over such (native/integers.c)."""

from __future__ import annotations

from typing import Any

from opennki.execute import abi
from opennki.execute import abi_steps as S
from opennki.execute.record import Sym, storage_name, widened
from opennki.execute.shapes import Axes, Unsupported, aligned
from opennki.execute.steps import Steps
from opennki.execute.values import leaves
from opennki.ir.affine import Affine


def store_wide(steps: Steps, out: Sym, value: Sym, guards: Any = ()) -> None:
    """Store a value of 64-bit integers."""
    wraps = 0
    if value.kind == "cast":
        inner = value.args[0]
        target = {v: k for k, v in abi.DTYPES.items() if k not in ("float32r",)}.get(steps.dtype(out.source))
        if target != (storage_name(value.dtype) if value.raw else "float32"):  # through the dtype that it is cast to
            steps.store(out, steps.tile(value), guards)
            return
        wraps, value = int(value.more.get("wraps", False)), inner
    value = widened(value)
    if value.shape != out.shape and value.size == out.size and value.size > 1:
        value = value.reshape(out.shape)
    ops: list[tuple[int, ...]] = []
    tiles: list[tuple[Any, tuple[int, ...], int]] = []
    tables: list[tuple[Affine, tuple[int, ...]]] = []
    done: dict[int, tuple[int, Sym]] = {}
    registers = 0

    def spread(leaf: Sym) -> tuple[int, ...]:
        grown = (1,) * (out.ndim - leaf.ndim) + leaf.shape
        if len(grown) != out.ndim or any(n not in (1, w) for n, w in zip(grown, out.shape, strict=True)):
            raise Unsupported("an operand of another shape")
        strides = (0,) * (out.ndim - leaf.ndim) + (leaf.strides or (0,) * leaf.ndim)
        return tuple(0 if n == 1 else s for n, s in zip(grown, strides, strict=True))

    def place(leaf: Sym) -> int:
        tiles.append((leaf.source, spread(leaf), steps.dtype(leaf.source)))
        return len(tiles) - 1

    def emit(code: str, a: int = -1, b: int = -1, c: int = -1, imm: int = 0) -> int:
        nonlocal registers
        ops.append((S.WIDE.index(code), registers, a, b, c, 0, imm))
        registers += 1
        return registers - 1

    def compute(v: Sym) -> int:
        if id(v) in done:
            return done[id(v)][0]
        if v.kind == "const":
            made = emit("const", imm=int(v.more.get("int", v.value)))
        elif v.kind == "exact":
            made = emit(v.name, *(compute(widened(a)) for a in v.args))
        elif v.kind != "wide":
            made = emit("load", place(steps.tile(v)))
        elif v.name == "load":
            made = emit("load", place(steps.tile(v.args[0])))
        elif v.name == "const":
            made = emit("const", imm=v.more["int"])
        elif v.name == "index":
            leaf = v.args[0]
            tables.append((steps.one.indices[leaf.source][0], spread(leaf)))
            made = emit("index", len(tables) - 1)
        elif v.name == "select":
            x, y, c = (compute(a) for a in v.args)
            made = emit("select", x, y, c)
        else:
            made = emit(v.name, *(compute(a) for a in v.args))
        done[id(v)] = made, v  # which stays alive, so that nothing else has its id
        return made

    result = compute(value)
    guard = -1
    for g in guards:
        one = compute(g)
        guard = one if guard < 0 else emit("multiply", guard, one)
    tiles.append((out.source, out.strides, steps.dtype(out.source)))
    ops.append((S.WIDE.index("store"), len(tiles) - 1, result, wraps, guard, 0, 0))
    if len(tiles) > 32 or len(tables) > 8 or any(t[2] < 0 for t in tiles) or out.ndim > abi.RANK:
        raise Unsupported("more operands than a step takes")
    axes: Axes = ()
    if steps.one.narrow:
        axes = out.axes
        for leaf in [x for x in leaves(value) if x.kind not in ("const",) and x.size > 1]:
            if aligned(leaf.axes, leaf.shape, out.shape) != axes and leaf.kind == "tile":
                raise Unsupported("operands that a mask narrows in different ways")
    rank = max(1, out.ndim)
    what = S.Wide()
    keep = (
        (S.WideOp * len(ops))(*ops),  # type: ignore[misc]
        (abi.Tile * len(tiles))(*[abi.Tile((abi.C.c_int64 * abi.RANK)(*s), d, 0) for _, s, d in tiles]),
        (abi.AffineTile * max(1, len(tables)))(*[abi.AffineTile((abi.C.c_int64 * abi.RANK)(*s)) for _, s in tables]),
    )
    what.rank, what.n_ops, what.n_tiles, what.n_registers = rank, len(ops), len(tiles), registers
    what.shape[:rank] = out.shape or (1,)
    what.ops, what.tiles, what.indices = keep
    steps.add(S.S_WIDE, what, [t[0] for t in tiles], out.shape or (1,), axes, (), [e for e, _ in tables])
