"""Instructions as steps: each becomes one closure that reads views, calls the declaration's body and writes the results.

What is proven when the kernel is planned costs nothing here: a step without mask, runtime index, shadow state or unproven bounds is the
lean path. No instruction is named; the declaration says how operands arrive.
"""
from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from opennki.errors import Loc
from opennki.interpret import races, shadow, touched
from opennki.interpret.marking import excluded, mark
from opennki.interpret.mask import Masker, clip, index_values, truth_of
from opennki.interpret.views import Layout, View, compile_affine, value_of
from opennki.ir.affine import Affine, Range, Var
from opennki.ir.nodes import Access, IndexTile, Instr, PredTile
from opennki.ir.verify import call_view, iteration_shape, reads_of
from opennki.isa import dtypes
from opennki.isa.declare import ISA, Instruction, Param, Plumbing, Register, Tile, arrivals

Array = np.ndarray
Step = Callable[[Any], Any]


class Operand:
    """A tile operand of a step."""

    __slots__ = ("dims", "fit", "name", "read", "reads", "register", "scalar_shape", "tile", "view", "words", "zero")

    def __init__(self, name: str, view: View, words: tuple[str, ...], raw: bool, reads: bool, dims: Any) -> None:
        self.name, self.view, self.words, self.reads, self.dims = name, view, words, reads, dims
        dtype = view.access.dtype
        self.read = None if raw or dtype in ("float32", "float32r", "tfloat32") else dtypes.reader(dtype)
        self.fit: tuple[int, ...] | None = None
        self.zero: Masker | None = None


def _shape_for(words: tuple[str, ...], shape: tuple[int, ...], iteration: tuple[int, ...]) -> tuple[int, ...] | None:
    """Shape in which an operand arrives, None if it is its own."""
    if words == ("*",):
        return None
    if len(words) == 2 and not words[1].endswith("*"):
        if words[1] == "1":
            wanted = (shape[0],) + (1,) * max(1, len(iteration) - 1)
        else:
            wanted = (shape[0], prod(shape[1:]))
    elif (words[-1].endswith("*") and prod(shape) == prod(iteration)
          and (len(iteration) != len(shape) or shape[:1] == iteration[:1])):
        wanted = iteration
    else:
        return None
    return None if wanted == shape else wanted


class Plan:
    """What is known of an instruction before it runs. view: makes the views of operands and results; a plan that is only looked at needs no
    more of them than where they are, and has no writers."""

    def __init__(self, instr: Instr, layout: Layout, ranges: dict[Var, Range], loc: Loc | None, tracked: set[Any],
                 stream: list[int], seed: int, suspects: tuple[Any, ...] = (), view: Callable[..., View] = View) -> None:
        self.instr, self.loc, self.view = instr, loc, view
        decl = self.decl = ISA[instr.op]
        self.layout = layout
        uniform, arriving = arrivals(decl)
        info = None if uniform else call_view(decl, instr.operands, instr.engine, instr.results[0].dtype if instr.results else None)
        raw = self.raw = decl.raw(info)
        self.mask_dims = {name: decl.masked_dims(name, info) for name in decl.mask_dims} if decl.mask_dims else {}
        masked = bool(instr.mask)
        self.static: dict[str, Any] = {}
        self.inputs: list[Operand] = []
        self.outputs: list[tuple[View, Any, str]] = []
        self.lazy: list[tuple[str, Any]] = []
        self.iteration = iteration_shape(decl, instr)
        out_views: list[tuple[View, str]] = []
        for access in instr.results:
            out_views.append((view(access, layout, ranges, f"{instr.op}: result", loc, masked), "result"))
        registers: list[tuple[View, str]] = []
        skip = bool(instr.operands[decl.index["oob_mode"]]) if "oob_mode" in decl.index else False
        operands, static = instr.operands, self.static
        for number, param, name, own in arriving:
            value = operands[number]
            if value.__class__ in own:
                static[name] = value
            else:
                self._operand(param, value, raw, ranges, out_views, registers, skip, stream, seed)
        for made, _ in out_views:
            if made.dynamic is not None:
                made.dynamic.skip = skip
        for made, name in out_views + registers:
            self.outputs.append((made, self._writer(made) if view is View else None, name))
        for op in self.inputs:
            if op.words != ("*",):
                op.fit = _shape_for(op.words, op.view.shape, self.iteration)
        self.masker = Masker(instr.mask, self.iteration, layout) if masked else None
        self.tracked = [o for o in self.inputs if o.reads and o.view.alloc in tracked] if tracked else []
        self.tracked_out = [v for v, _, _ in self.outputs if v.alloc in tracked] if tracked else []
        self.suspects: list[Any] = []
        self.suspect_reads: list[Any] = []
        self.shared_writes: dict[View, races.What] = {}
        self.shared_reads: list[Any] = []
        if suspects:
            self._suspect(suspects)

    def _suspect(self, suspects: tuple[Any, ...]) -> None:
        layout, loc = self.layout, self.loc
        # what another iteration may touch too: (view, slot of the variable, suspect)
        loops = [s for s in suspects if s.var.kind != "pid"]
        self.suspects = [(v, layout.var(s.var), s) for s in loops if s.mode != "read"
                         for v, _, _ in self.outputs if v.access is s.access]
        self.suspect_reads = [(o, layout.var(s.var), s) for s in loops if s.mode == "read" for o in self.inputs
                              if o.view.access is s.access]
        # and what another program may
        shared = [s for s in suspects if s.var.kind == "pid"]
        self.shared_writes = {v: races.What(v, s, loc) for s in shared if s.mode != "read" for v, _, _ in self.outputs
                              if v.access is s.access}
        self.shared_reads = [(o, races.What(o.view, s, loc)) for s in shared if s.mode == "read" for o in self.inputs
                             if o.view.access is s.access]

    def _operand(self, param: Param, value: Any, raw: bool, ranges: dict[Var, Range], outs: list[tuple[View, str]],
                 registers: list[tuple[View, str]], skip: bool, stream: list[int], seed: int) -> None:
        spec, name, decl, layout = param.spec, param.name, self.decl, self.layout
        if isinstance(spec, Plumbing):
            if spec.kind == "stream":
                call, slots = self.instr.call, list(stream)
                self.lazy.append((name, lambda m: (m.seed, call, *(m.env[s] for s in slots))))
            elif param.required:
                self.static[name] = None
            return
        if isinstance(spec, Register):
            view = self.view(value, layout, ranges, f"{decl.name}: {name}", self.loc)
            op = Operand(name, view, ("P", "1"), False, True, (0, None))
            self.inputs.append(op)
            registers.append((view, name))
            return
        if isinstance(value, Access):
            view = self.view(value, layout, ranges, f"{decl.name}: {name}", self.loc, bool(self.instr.mask))
            if view.dynamic is not None:
                view.dynamic.skip = skip
            reads = reads_of(decl, param, self.instr.operands)
            op = Operand(name, view, spec.dims, raw, reads, self.mask_dims.get(name))
            if value.mask:
                op.zero = Masker(value.mask, value.shape, layout)
            self.inputs.append(op)
            if spec.writes:
                outs.append((view, name))
            return
        if isinstance(value, Affine) or (isinstance(value, tuple) and any(isinstance(v, Affine) for v in value)):
            self.lazy.append((name, _affine_value(value, layout, isinstance(spec, Tile) and not raw)))
        elif isinstance(value, IndexTile):
            base, strides, shape = compile_affine(value.base, layout), value.strides, value.shape
            zero = (0,) * len(shape)
            self.lazy.append((name, lambda m: index_values(value_of(base, m.env), strides, zero, shape)))
        elif isinstance(value, PredTile):
            preds = [(compile_affine(p.expr, layout), p.strides) for p in value.preds]
            shape = value.shape or self.iteration
            zero = (0,) * len(shape)

            def truth(m: Any) -> Array:
                out: Any = None
                for base, strides in preds:
                    part = truth_of(value_of(base, m.env), strides, zero, shape)
                    out = part if out is None else out & part
                return np.ones(shape, bool) if out is None else out
            self.lazy.append((name, truth))
        elif isinstance(spec, Tile) and isinstance(value, (int, float)) and not isinstance(value, bool) and not raw:
            self.static[name] = np.float32(value)
        else:
            self.static[name] = value

    @staticmethod
    def _writer(view: View) -> Callable[[Array, Any], None]:
        dtype = view.access.dtype
        write = dtypes.writer(dtype)
        storage = dtypes.storage(dtype)
        plain = dtype in ("float32", "float32r")

        def store(out: Array, value: Any) -> None:
            if value.__class__ is not np.ndarray:
                value = np.asarray(value)
            if value.shape != out.shape and value.size == out.size:
                value = value.reshape(out.shape)
            kind = value.dtype
            if kind == np.float32 and plain:
                out[...] = value
                return
            if value.size > 1 and not any(value.strides):
                value = value[(slice(0, 1),) * value.ndim]  # one number for all elements is converted once
            if kind == np.float32:
                write(out, value)
            elif kind == storage and dtype not in ("tfloat32", "bool"):  # bits are rounded there, and every number but 0 is 1
                out[...] = value
            else:
                dtypes.convert(value, dtypes.canonical(kind), dtype, out)
        return store


def _affine_value(value: Any, layout: Layout, number: bool) -> Callable[[Any], Any]:
    if isinstance(value, tuple):
        parts = [compile_affine(v, layout) if isinstance(v, Affine) else v for v in value]
        return lambda m: tuple(value_of(p, m.env) for p in parts)
    compiled = compile_affine(value, layout)
    if number:
        return lambda m: np.float32(value_of(compiled, m.env))
    return lambda m: value_of(compiled, m.env)


def _values(result: Any, count: int) -> list[Any]:
    if isinstance(result, tuple):
        return [v for v in result if v is not None] if len(result) != count else list(result)
    return [] if result is None else [result]


def compile_step(plan: Plan) -> Step:
    """The step of a planned instruction."""
    general = plan.masker is not None or bool(plan.tracked) or bool(plan.tracked_out) or bool(
        plan.suspects) or bool(plan.suspect_reads) or bool(plan.shared_writes) or bool(plan.shared_reads) or (
        plan.decl.family == "print") or any(
        o.view.dynamic is not None for o in plan.inputs) or any(v.dynamic is not None for v, _, _ in plan.outputs)
    return _general(plan) if general else _lean(plan)


def _lean(plan: Plan) -> Step:
    body, static, lazy = plan.decl.body, plan.static, plan.lazy
    inputs = [(o.name, o.view.get, o.read, o.fit, o.zero) for o in plan.inputs]
    outputs = [(v.get, w) for v, w, _ in plan.outputs]
    count = len(outputs)
    if count == 1 and not lazy and all(z is None for *_, z in inputs):
        get_out, write = outputs[0]
        if not inputs and not plan.decl.random:
            return _constant(body, static, plan.outputs[0])
        if all(fit is None for _, _, _, fit, _ in inputs):
            simple = [(n, g, r) for n, g, r, _, _ in inputs]
            if len(simple) == 1:
                return _unary(body, static, simple[0], get_out, write)

            def fast(machine: Any) -> None:
                kw = dict(static)
                for name, get, read in simple:
                    kw[name] = get(machine) if read is None else read(get(machine))
                value = body(**kw)
                write(get_out(machine), value[0] if value.__class__ is tuple else value)
            return fast

    def step(machine: Any) -> None:
        kw = dict(static)
        for name, get, read, fit, zero in inputs:
            array = get(machine)
            if zero is not None:
                array = _zeroed(array, zero, machine)
            if read is not None:
                array = read(array)
            kw[name] = array if fit is None else array.reshape(fit)
        for name, value_at in lazy:
            kw[name] = value_at(machine)
        for (get, write), value in zip(outputs, _values(body(**kw), count), strict=True):
            write(get(machine), value)
    return step


def _unary(body: Callable[..., Any], static: dict[str, Any], operand: Any, get_out: Any, write: Any) -> Step:
    """The step of an instruction with one tile operand and one result."""
    name, get, read = operand

    def step(machine: Any) -> None:
        array = get(machine)
        value = body(**{name: array if read is None else read(array)}, **static)
        write(get_out(machine), value[0] if value.__class__ is tuple else value)
    return step


def _constant(body: Callable[..., Any], static: dict[str, Any], output: tuple[View, Any, str]) -> Step:
    """The step of an instruction without operands: its value is the same each time, so it is computed and rounded once."""
    view, write, _ = output
    kept: list[Array] = []

    def step(machine: Any) -> None:
        out = view.get(machine)
        if kept:
            out[...] = kept[0]
            return
        value = body(**static)
        value = np.asarray(value[0] if value.__class__ is tuple else value)
        write(out, value)
        if value.size and not any(value.strides):  # one number for all elements
            kept.append(np.array(out[(slice(0, 1),) * out.ndim]))
    return step


def _zeroed(array: Array, mask: Masker, machine: Any) -> Array:
    """An operand with the elements outside its mask as zero."""
    out = np.zeros_like(array)
    box = mask.box(machine.env)
    if box is None:
        return out
    part = tuple(slice(a, b) for a, b in zip(*box, strict=True))
    where = mask.where(machine.env, *box)
    out[part] = array[part] if where is None else np.where(where, array[part], np.zeros((), array.dtype))
    return out


def _general(plan: Plan) -> Step:
    decl, body, static, lazy, masker = plan.decl, plan.decl.body, plan.static, plan.lazy, plan.masker
    iteration = plan.iteration
    whole = (0,) * len(iteration), iteration
    wants_mask = bool(decl.mask_on) and "mask" in decl.index
    loc, family = plan.loc, decl.family
    outputs = plan.outputs
    tracked = {o.name for o in plan.tracked}
    suspected = {view for view, _, _ in plan.suspects}
    shared = plan.shared_writes
    read_by_others = {o.name for o, _ in plan.shared_reads}
    one_row_at_a_time = any(v.dynamic is not None and any(o.view is v and o.reads for o in plan.inputs) for v, _, _ in outputs)

    def run(machine: Any, box: Any, where: Array | None) -> None:
        lo, hi = box
        full = box == whole
        kw = dict(static)
        taints: list[tuple[Array, bool | None]] = []
        origin: Loc | None = None
        machine.inside = None
        for n, o in enumerate(plan.inputs):
            view = o.view
            if full:
                part = ((0,) * len(view.shape), view.shape)
                array = view.get(machine) if o.reads or view.dynamic is None else None
            else:
                part = _part(o.name, o.dims, view.shape, lo, hi, decl, iteration)
                array = view.box(machine, *part) if o.reads or view.dynamic is None else None
            if o.name in tracked:
                state = view.shadow(machine, *part)
                least = state.min(initial=1)
                if o.zero is not None and (not least or state.max(initial=1) > 1):
                    state = np.where(_zeroed(np.ones(state.shape, np.uint8), o.zero, machine) > 0, state, 1)
                    least = state.min(initial=1)
                if not least:
                    unread = (state == shadow.NEVER) & (where if where is not None and where.shape == state.shape else True)
                    if unread.any():
                        kind, error = ("accumulate", shadow.accumulate_error) if accumulates(plan, o) else ("read", shadow.read_error)
                        made = error(view, np.where(unread, 0, 1), loc)
                        if o.name in read_by_others:  # another program that has not come to it may write it: then it is a race
                            machine.races.put_off(kind, made)
                        else:
                            machine.report(kind, made)
                if state.max(initial=1) > 1:
                    taint = state == shadow.MASKED
                    if where is not None and where.shape == taint.shape:
                        taint &= where
                    taints.append((taint, None if accumulates(plan, o) else n == 1 and family == "matmul"))
                    origin = machine.origins.get(view.slot, origin)
            if array is None:
                kw[o.name] = None
                continue
            if o.zero is not None:
                array = _zeroed(array, o.zero, machine)
            if o.read is not None:
                array = o.read(array)
            if o.fit is not None:
                array = array.reshape(o.fit if full else _refit(o, array.shape, lo, hi, iteration))
            kw[o.name] = array
        for o, slot, suspect in plan.suspect_reads:
            shape = o.view.shape
            part = ((0,) * len(shape), shape) if full else _part(o.name, o.dims, shape, lo, hi, decl, iteration)
            touched.read(machine, o.view, slot, suspect, part, where)
        for o, what in plan.shared_reads:
            shape = o.view.shape
            part = ((0,) * len(shape), shape) if full else _part(o.name, o.dims, shape, lo, hi, decl, iteration)
            races.touch(machine, what, part, where)
        for name, value_at in lazy:
            value = value_at(machine)
            if not full and isinstance(value, np.ndarray) and value.shape == iteration:
                value = value[tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))]
            kw[name] = value
        if wants_mask:
            kw["mask"] = where
        if family == "print":
            machine.print(plan, kw, lo, hi)
            return
        skipped = machine.inside
        values = _values(body(**kw), len(outputs))
        for (view, write, name), value in zip(outputs, values, strict=True):
            if full:
                part = ((0,) * len(view.shape), view.shape)
            else:
                part = _part(name, plan.mask_dims.get(name), view.shape, lo, hi, decl, iteration)
            shape = tuple(b - a for a, b in zip(*part, strict=True))
            if shape != view.shape and isinstance(value, np.ndarray) and value.ndim == len(shape) and value.shape != shape:
                # a body that knows an extent of its result by itself makes all of it
                value = value[tuple(slice(a, b) if n == whole_n else slice(None) for n, whole_n, a, b in zip(
                    value.shape, view.shape, *part, strict=True))]
            keep: Array | None
            order: Any = plan.mask_dims.get(name)
            if where is not None and turned(order, iteration, view.shape):
                keep = where.transpose(order)
            else:
                keep = where if where is not None and where.shape == shape and not (wants_mask and name != decl.mask_on and
                                                                                    view.shape != iteration) else None
            if skipped is not None and skipped.shape == shape:
                keep = skipped if keep is None else keep & skipped
            if view.dynamic is not None:
                stored = np.empty(shape, view.dtype)
                write(stored, np.broadcast_to(value, shape) if np.size(value) != stored.size else value)
                if view in shared:
                    before = races.bits(view.dynamic.gather(machine, *part))
                machine.inside = skipped
                view.dynamic.scatter(machine, stored, keep, *part)
            else:
                out = view.box(machine, *part) if not full else view.get(machine)
                if view in shared:
                    before = races.bits(out)
                if keep is None:
                    write(out, value)
                else:
                    stored = np.empty(shape, view.dtype)
                    write(stored, value)
                    np.copyto(out, stored, where=keep)
            mark(machine, plan, view, part, keep, taints, origin)
            if view in suspected:
                for which, slot, suspect in plan.suspects:
                    if which is view:
                        touched.wrote(machine, view, slot, suspect, part, keep)
            if view in shared:
                now = out if view.dynamic is None else view.dynamic.gather(machine, *part)
                races.touch(machine, shared[view], part, keep, races.bits(now) != before)
                machine.inside = skipped

    def step(machine: Any) -> None:
        if masker is None:
            if one_row_at_a_time:
                _rows(machine, plan, run, whole)
            else:
                run(machine, whole, None)
            return
        box = masker.box(machine.env)
        if box is None:
            excluded(machine, plan, None)
            return
        if box != whole:
            excluded(machine, plan, box)
            if decl.positional or decl.random:  # a mask does not shift positions or the numbers drawn
                run(machine, whole, _inside_box(machine, masker, box, iteration))
                return
        run(machine, box, masker.where(machine.env, *box))
    return step


def turned(dims: Any, iteration: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a result has the dimensions that a mask counts, in another order."""
    if dims is None or len(dims) != len(shape) or len(shape) != len(iteration) or None in dims:
        return False
    order = tuple(range(len(dims)))
    return tuple(sorted(dims)) == order != tuple(dims) and shape == tuple(iteration[k] for k in dims)


def _inside_box(machine: Any, masker: Masker, box: Any, iteration: tuple[int, ...]) -> Array:
    """Truth values of a mask over the whole iteration space."""
    truth = np.zeros(iteration, bool)
    rest = masker.where(machine.env, *box)
    truth[tuple(slice(a, b) for a, b in zip(*box, strict=True))] = True if rest is None else rest
    return truth


def _part(name: str, dims: Any, shape: tuple[int, ...], lo: tuple[int, ...], hi: tuple[int, ...], decl: Instruction,
          iteration: tuple[int, ...]) -> Any:
    """The part of an operand or result that belongs to a box of the iteration space."""
    if dims is None and decl.mask_on and name != decl.mask_on and shape != iteration:
        dims = (0,)
    return clip(lo, hi, shape, iteration, dims)


def _refit(o: Operand, shape: tuple[int, ...], lo: tuple[int, ...], hi: tuple[int, ...], iteration: tuple[int, ...]) -> tuple[int, ...]:
    assert o.fit is not None
    if o.words[-1].endswith("*") and o.fit == iteration:
        return tuple(b - a for a, b in zip(lo, hi, strict=True))
    if o.words[-1] == "1":
        return (shape[0],) + (1,) * (len(o.fit) - 1)
    return (shape[0], prod(shape[1:]))


def accumulates(plan: Plan, o: Operand) -> bool:
    """Accumulation into PSUM that was never written starts from zero, as the first matmul of a group overwrites."""
    return plan.decl.family == "matmul" and plan.decl.params[plan.decl.index[o.name]].spec.role == "inout"


def _rows(machine: Any, plan: Plan, run: Any, whole: Any) -> None:
    """A read-modify-write of rows that are named at run time: rows that occur twice are updated one after the other."""
    view = next(v for v, _, _ in plan.outputs if v.dynamic is not None)
    assert view.dynamic is not None
    offsets, _ = view.dynamic.flat(machine, *whole)
    first = offsets.reshape(offsets.shape[0], -1)[:, 0]
    if len(np.unique(first)) == len(first):
        run(machine, whole, None)
        return
    (lo, hi) = whole
    for row in range(hi[0]):
        run(machine, ((row, *lo[1:]), (row + 1, *hi[1:])), None)
