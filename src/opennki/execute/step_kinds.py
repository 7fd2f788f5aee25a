"""The steps of each form of value: what `execute.steps.Steps` calls for what is not elementwise."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from math import prod
from typing import Any

import numpy as np

from opennki.execute import abi
from opennki.execute import abi_steps as S
from opennki.execute.program import Elementwise, Program
from opennki.execute.record import BOOL, INT64, Part, Sym, number, tile
from opennki.execute.shapes import JOINED, WHOLE, Axes, Unsupported, strides_of
from opennki.execute.steps import Steps, as_value
from opennki.interpret.views import View
from opennki.ir.affine import Affine, Var, variable

Pair = tuple[int, int]


def _rows(steps: Steps, value: Sym) -> Sym:
    """A value as a tile of rows and elements."""
    held = steps.tile(value)
    return held if held.ndim == 2 else steps.tile(held.reshape(held.shape[0], prod(held.shape[1:])))


def _result(steps: Steps, value: Sym, shape: tuple[int, ...], dtype: str, axes: Axes) -> tuple[Sym, Sym]:
    """A temporary tile for what a kernel computes in a shape of its own, and the value in its own shape."""
    out = steps.scratch(shape, dtype, axes)
    return out, as_value(out, value).reshape(value.shape)


# ---- products, scans, folds over the partitions ----------------------------------------------------------------------


def matmul(steps: Steps, value: Sym) -> Sym:
    """A product of matrices; also one that may pass bits on."""
    a, b = (_floating(steps, x) for x in value.args)
    (m, k), n = a.shape, b.shape[1]
    axes = ((a.axes or (-1, -1))[0], (b.axes or (-1, -1))[1])
    if any(axis != -1 for axis in ((a.axes or (-1, -1))[1], (b.axes or (-1, -1))[0])):
        raise Unsupported("a mask on the contraction")
    out, made = _result(steps, value, (m, n), "float32", axes)
    what = abi.Matmul()
    what.K, what.M, what.N = k, m, n
    what.s_dtype, what.m_dtype = steps.dtype(a.source), steps.dtype(b.source)
    what.s_stride[:], what.m_stride[:], what.d_stride[:] = [a.strides[1], a.strides[0]], list(b.strides), list(out.strides)
    steps.add(S.S_ROUTE if value.kind == "route" else abi.K_MM, what, [a.source, b.source, out.source], (m, n), ())
    return made


def _floating(steps: Steps, value: Sym) -> Sym:
    """A tile of floats; of an operand of which only a part may be there, a copy of that part."""
    held = steps.tile(value)
    partly = steps.one.narrow and any(a != -1 for a in held.axes)
    if steps.dtype(held.source) > 6 or held.raw or partly:
        return steps.stored(number(held), "float32")
    return held


def scan(steps: Steps, value: Sym) -> Sym:
    """A scan along rows."""
    x, y = (_rows(steps, a) for a in value.args[:2])
    rows, n = x.shape
    axes = x.axes
    if axes and (isinstance(axes[1], tuple) or axes[1] == JOINED):
        return steps.tile(_as_running(value, x, y)).reshape(value.shape)
    out, made = _result(steps, value, (rows, n), "float32", axes)
    what = abi.Scan()
    what.rows, what.n = rows, n
    what.x_stride[:], what.y_stride[:], what.d_stride[:] = list(x.strides), list(y.strides), list(out.strides)
    what.x_dtype, what.y_dtype, what.d_dtype = steps.dtype(x.source), steps.dtype(y.source), 0
    what.op0, what.op1 = (abi.FUNCTIONS[op] for op in value.more["ops"])
    what.reverse0, what.reverse1 = map(int, value.more["reverse"])
    sources = [x.source, y.source, out.source]
    initial = value.args[2]
    if initial.kind == "const":
        what.initial = initial.value
    else:
        initial = steps.tile(initial)
        step = 0 if initial.size == 1 else strides_of(initial.shape, initial.strides, (rows,))[0]
        what.has_initial_tile, what.i_stride, what.i_dtype = 1, step, steps.dtype(initial.source)
        sources.append(initial.source)
    steps.add(abi.K_SCAN, what, sources, (rows, n), axes)
    return made


def _as_running(value: Sym, x: Sym, y: Sym) -> Sym:
    """A scan as a program over columns."""
    from opennki.execute import forms

    (op0, op1), (reverse0, reverse1) = value.more["ops"], value.more["reverse"]

    def step(state: Sym, a: Sym, b: Sym) -> Sym:
        between = forms.call(op0, *((state, a) if reverse0 else (a, state)))
        return forms.call(op1, *((b, between) if reverse1 else (between, b)))

    flat = (x.shape[0], prod(x.shape[1:]))
    initial = value.args[2]
    start = forms.broadcast_to(initial.reshape(initial.size) if initial.size > 1 else initial.reshape(()), flat[:1])
    return forms.running(step, start, x.reshape(flat), y.reshape(flat))[0]


def partition_fold(steps: Steps, value: Sym) -> Sym:
    """A fold over the partitions."""
    x, columns = steps.tile(value.args[0]), -1
    if x.ndim > 2 and any(a != -1 for a in x.axes[1:]):
        columns = _whole(steps, x)  # they do not depend on each other
        x = x.but(axes=(x.axes[0],) + (-1,) * (x.ndim - 1))
    x = _rows(steps, x)
    p, f = x.shape
    axes = (x.axes[0], columns if columns == WHOLE else x.axes[1]) if x.axes else ()
    out, made = _result(steps, value, (1, f), _name(value), (-1, axes[1]) if axes else ())
    what = abi.PartitionFold()
    what.p, what.f = p, f
    what.x_stride[:] = list(x.strides)
    what.d_stride = out.strides[1]
    what.x_dtype, what.d_dtype, what.fn = steps.dtype(x.source), steps.dtype(out.source), abi.FUNCTIONS[value.name]
    steps.add(abi.K_PFOLD, what, [x.source, out.source], (p, f), axes)
    return made


def _whole(steps: Steps, held: Sym) -> int:
    """What narrows a result that is computed for all elements, also those that a mask leaves out: they have to be there."""
    source = held.source.base if isinstance(held.source, Part) else held.source
    if not isinstance(source, int) or steps.one.views[source].bounds:
        raise Unsupported("a mask of dimensions that are joined")
    return WHOLE


def _name(value: Sym) -> str:
    from opennki.execute.record import storage_name

    return storage_name(value.dtype) if value.raw else "float32"


def running(steps: Steps, value: Sym) -> list[Sym]:
    """A program over the partitions for one column after the other, and the last state."""
    narrow = bool(steps.one.narrow)
    rows = [steps.tile(a) for a in value.args[1:]]
    p = value.args[1].shape[0]
    if narrow:  # columns are of several dimensions where a mask narrows one of them
        apart = [steps.unjoined(r) for r in rows]
        shape = max((r.shape for r in apart), key=len)
        rows = [r if r.shape == shape else r.reshape(shape) for r in apart]
    else:
        shape = rows[0].shape
    tags: list[Any] = [-1] * len(shape)
    for r in rows:
        tags = [t if a in (-1, WHOLE) else a for t, a in zip(tags, r.axes or (-1,) * len(shape), strict=True)]
    state = steps.stored(value.args[0] if value.args[0].shape == (p,) else _spread(value.args[0], (p,)))
    state = state.but(axes=(tags[0],) if narrow else ())
    out = steps.scratch(shape, "float32", tuple(tags) if narrow else ())
    turned = (*tags[1:], tags[0]) if narrow else ()
    columns, zeros = (*shape[1:], p), (0,) * (len(shape) - 1)
    slots = [tile(state.source, columns, (*zeros, 4), np.dtype(np.float32), False, turned)]
    slots += [r.but(shape=columns, strides=(*r.strides[1:], r.strides[0]), axes=turned) for r in rows]
    step = _replaced(value.more["step"], slots, columns, {})
    pairs = [(tile(out.source, columns, (*out.strides[1:], out.strides[0]), out.dtype, True, turned), step),
             (tile(state.source, columns, (*zeros, 4), out.dtype, True, turned), step)]  # fmt: skip
    program = Program(None, steps.dtype, True, [], lambda a, b: a == b, steps.apart, lambda a, b: not steps.disjoint(a, b))
    kind, what, sources, extent = Elementwise(program, pairs).made()
    if program.preds_used or program.indices_used:
        raise Unsupported("index values in a scan")
    steps.add(kind, what, sources, extent, turned)
    return [as_value(out, value).reshape(value.shape), state]


def _spread(value: Sym, shape: tuple[int, ...]) -> Sym:
    from opennki.execute.forms import broadcast_to

    return broadcast_to(value, shape)


def _replaced(value: Sym, slots: list[Sym], shape: tuple[int, ...], done: dict[int, Sym]) -> Sym:
    """The expression of a step with tiles in the place of its operands."""
    if value.kind == "slot":
        return slots[value.source]
    if value.kind == "const":
        return value
    if value.kind not in ("call", "select"):
        raise Unsupported(f"{value.kind} in a scan")
    if id(value) not in done:
        done[id(value)] = value.but(shape=shape, args=tuple(_replaced(a, slots, shape, done) for a in value.args))
    return done[id(value)]


# ---- by index ----------------------------------------------------------------------------------------------------------


def take(steps: Steps, value: Sym) -> Sym:
    """Elements of rows by position."""
    x, at = value.args
    x = steps.tile(x) if x.raw else _float_rows(steps, x)
    at = steps.tile(at.args[0] if at.kind == "wide" and at.name == "load" else at)
    axes = at.axes
    out, made = _result(steps, value, at.shape, _name(value), axes)
    what = S.Take()
    what.rows, what.n, what.size = at.shape[0], at.shape[1], x.shape[1]
    what.x_stride[:], what.p_stride[:], what.d_stride[:] = list(x.strides), list(at.strides), list(out.strides)
    what.p_dtype, what.width, what.poison = steps.dtype(at.source), x.dtype.itemsize, value.more["poison"]
    steps.add(S.S_TAKE, what, [x.source, at.source, out.source], at.shape, axes)
    return made


def fetched(steps: Steps, value: Sym) -> Sym:
    """A tile whose indices are read from memory."""
    view = steps.one.views[value.source]
    out = steps.scratch(value.shape, view.access.dtype, value.axes)
    truth = steps.scratch(value.shape, "uint8", value.axes) if view.dynamic.skip else None
    _fetch(steps, value.source, out, truth, False)
    steps.inside = None
    if truth is not None:
        steps.inside = Sym("tile", value.shape, BOOL, strides=truth.strides, source=truth.source, axes=value.axes)
    return as_value(out, value)


def scatter(steps: Steps, out: Sym, value: Sym, guards: list[Sym]) -> None:
    """Store a value in a tile whose indices are read from memory."""
    view = steps.one.views[out.source]
    plain = value.kind == "tile" and value.raw and value.shape == out.shape and steps.dtype(value.source) == steps.dtype_of(view)
    if plain:
        held = value
    else:
        held = steps.scratch(out.shape, view.access.dtype, out.axes)
        steps.store(held, value)
    truth = None
    if guards:
        truth = steps.scratch(out.shape, "uint8", out.axes)
        whole: Any = None
        for g in guards:
            whole = g if whole is None else whole & g
        steps.store(truth, whole)
    _fetch(steps, out.source, held, truth, True)


def _fetch(steps: Steps, source: int, tile_: Sym, truth: Sym | None, scatters: bool) -> None:
    view: View = steps.one.views[source]
    dynamic = view.dynamic
    assert dynamic is not None
    rank = len(view.shape)
    if rank > abi.RANK:
        raise Unsupported("too many dimensions")
    what = S.Fetch()
    what.rank, what.width, what.scatter, what.skip = rank, view.itemsize, int(scatters), int(dynamic.skip)
    what.masked = int(scatters and truth is not None)
    what.skip = int(dynamic.skip)
    if scatters and dynamic.skip and truth is None:
        truth = tile_  # nothing reads it
    what.shape[:rank], what.t_stride[:rank], what.o_stride[:rank] = view.shape, view.strides, tile_.strides
    if truth is not None and truth is not tile_:
        what.m_stride[:rank] = truth.strides
    indices, sources, n = [], [source, tile_.source], 0
    for axis, (dim, unit, index, size) in enumerate(zip(view.dims, view.steps, dynamic.tiles, view.access.view_shape, strict=True)):
        if index is None:
            continue
        if n == S.AXES:
            raise Unsupported("more runtime indices than native code takes")
        steps.one.views.append(index)
        steps.one.axes[len(steps.one.views) - 1] = ()
        one = what.axes[n]
        one.size, one.unit, one.axis = size, unit * view.itemsize, axis
        one.stride[:rank] = dim.strides
        count = prod(index.shape)
        one.step = 0 if count == 1 else strides_of(index.shape, index.strides, (count,))[0]
        one.dtype = abi.DTYPES[index.access.dtype]
        if count not in (1, view.shape[0]):
            raise Unsupported("a runtime index of another shape")
        sources.append(len(steps.one.views) - 1)
        indices.append(dim.base)
        n += 1
    what.n_axes = n
    if truth is not None:
        sources.append(truth.source)
    error = 0 if dynamic.skip else steps.one.report(view, None) - steps.errors
    steps.add(S.S_FETCH, what, sources, view.shape, tile_.axes, (), [steps.one.begin(view), *indices], error)


# ---- random numbers ------------------------------------------------------------------------------------------------------


def _stream(steps: Steps, value: Sym, what: Any) -> list[Affine]:
    stream = value.more["stream"]
    variables: dict[int, Var] = {slot: var for var, slot in steps.lowering.layout.vars.items()}
    found = [variable(steps.lowering.seed), *(variable(variables[slot]) for slot in stream.slots)]
    if len(found) > 24:
        raise Unsupported("random numbers in so many loops")
    what.call, what.n_index = stream.call, len(found)
    return found


def uniform(steps: Steps, value: Sym) -> Sym:
    """Random numbers."""
    out = steps.scratch(value.shape, "float32")
    what = S.Random()
    what.n = value.size
    indices = _stream(steps, value, what)
    sources = [out.source]
    if value.args:
        state = steps.tile(value.args[0])
        what.state_stride = strides_of(state.shape, state.strides, (state.size,))[0]
        sources.append(state.source)
    steps.add(S.S_UNIFORM, what, sources, value.shape[:1], (), (), indices)
    return as_value(out, value)


def seeded(steps: Steps, value: Sym) -> Sym:
    """The state of the generator for a seed."""
    seed = value.args[0]
    if seed.kind == "const":
        array = np.asarray(seed.more["int"] & 0xFFFFFFFF, np.int64) if "int" in seed.more else np.float32(seed.value)
        from opennki.execute.record import Constant

        held = tile(Constant(np.asarray(array).reshape(1)), (1,), (8,), np.asarray(array).dtype, True)
    else:
        held = steps.tile(seed)
    out = steps.scratch(value.shape, "float32")
    what = S.Random()
    what.state_stride, what.dtype = 4, steps.dtype(held.source)
    indices = _stream(steps, value, what)
    steps.add(S.S_SEED, what, [out.source, held.source], (1,), (), (), indices)
    return as_value(out, value)


# ---- searches -------------------------------------------------------------------------------------------------------------


def _float_rows(steps: Steps, value: Sym) -> Sym:
    held = steps.tile(value)
    return held if steps.dtype(held.source) in (0, 6) and not held.raw else steps.stored(number(held), "float32")


def largest(steps: Steps, value: Sym) -> Sym:
    """The largest values of rows."""
    x = _float_rows(steps, value.args[0])
    out = steps.scratch(value.shape, "float32")
    what = S.Search()
    what.rows, what.n, what.count = x.shape[0], x.shape[1], value.shape[1]
    what.x_stride[:], what.d_stride[:] = list(x.strides), list(out.strides)
    steps.add(S.S_LARGEST, what, [x.source, out.source], value.shape, ())
    return as_value(out, value)


def match(steps: Steps, value: Sym) -> list[Sym]:
    """Where values occur in rows, and which elements were taken."""
    x, values = (_float_rows(steps, a) for a in value.args[:2])
    out, taken = steps.scratch(value.shape, "float32"), steps.scratch(x.shape, "float32")
    what = S.Search()
    what.rows, what.n, what.count = x.shape[0], x.shape[1], value.shape[1]
    what.x_stride[:], what.v_stride[:] = list(x.strides), list(values.strides)
    what.d_stride[:], what.t_stride[:] = list(out.strides), list(taken.strides)
    what.backwards = int(value.more["backwards"])
    sources = [x.source, values.source, out.source, taken.source]
    if len(value.args) > 2:
        mask = steps.tile(value.args[2])
        mask = mask if mask.shape == x.shape else mask.reshape(x.shape)
        mask = steps.tile(mask)
        what.m_stride[:], what.masked = list(mask.strides), 1
        sources.append(mask.source)
    steps.add(S.S_MATCH, what, sources, value.shape, ())
    return [as_value(out, value), as_value(taken, value).but(dtype=BOOL)]


def segments(steps: Steps, value: Sym) -> list[Sym]:
    """Bounds of runs of equal elements."""
    ids = value.args[0]
    held = steps.tile(ids)
    if held.dtype.itemsize != 4:
        raise Unsupported("segments of another dtype")
    outs = [steps.scratch(value.shape, "int32") for _ in range(2)]
    what = S.Segments()
    what.n, what.x_stride, what.raw = value.size, held.strides[0], int(held.dtype.kind == "i")
    steps.add(S.S_SEGMENTS, what, [held.source, *(o.source for o in outs)], value.shape, ())
    return [tile(o.source, o.shape, o.strides, o.dtype, True) for o in outs]


# ---- other forms ----------------------------------------------------------------------------------------------------------


def later(steps: Steps, value: Sym) -> Sym:
    """A value in another form, once it is in memory."""
    return steps.tile(value.more["how"](steps.contiguous(value.args[0])))


def part(steps: Steps, value: Sym) -> Sym:
    """One of several results."""
    kinds: dict[str, Callable[[Steps, Sym], list[Sym]]] = {"running": running, "match": match, "segments": segments}
    made = value.args[0]
    if id(made) not in steps.results:
        steps.results[id(made)] = kinds[made.kind](steps, made)
        steps.alive.append(made)
    return steps.results[id(made)][value.more["which"]]


def cast(steps: Steps, value: Sym) -> Sym:
    """An integer as another dtype."""
    return steps.stored(value, _name(value))


def concat(steps: Steps, value: Sym) -> Sym:
    """Values side by side."""
    return steps.stored(value, "int64" if value.dtype == INT64 else "")


def store_concat(steps: Steps, out: Sym, value: Sym, guards: Any) -> None:
    """Store each part of a concatenation where it belongs."""
    if out.shape != value.shape:
        steps.store(out, steps.tile(value).reshape(out.shape), guards)
        return
    if guards:
        steps.store(out, steps.tile(value), guards)
        return
    axis = value.more["axis"]
    at, pairs = 0, []
    for p in value.args:
        source = out.source
        offset = at * out.strides[axis]
        source = Part(source.base, source.offset + offset) if isinstance(source, Part) else Part(source, offset) if offset else source
        pairs.append((out.but(shape=p.shape, source=source), p))
        at += p.shape[axis]
    if all(p.kind in ("call", "select", "fold", "const", "tile") and not p.raw for _, p in pairs):
        lowered = [(o, steps.lowered(p)) for o, p in pairs]
        with suppress(Unsupported), steps.together():
            steps._program(lowered, ())
            return
    for o, p in pairs:
        steps.store(o, p)


COMPUTE: dict[str, Callable[[Steps, Sym], Sym]] = {
    "matmul": matmul, "route": matmul, "scan": scan, "pfold": partition_fold, "take": take, "fetched": fetched, "uniform": uniform,
    "seeded": seeded, "largest": largest, "late": later, "part": part, "cast": cast, "concat": concat,
}  # fmt: skip
