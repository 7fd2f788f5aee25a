"""The statements of a kernel as JAX operations: instructions call their bodies, loops and branches become those of JAX.

The counterpart of `interpret.steps` and `interpret.machine` for operands without numbers. No instruction is named here.
"""
from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from opennki.bind.inline_bodies import TRANSLATOR
from opennki.bind.inline_memory import Memory, all_hold, holds, index_values, value_of
from opennki.bind.inline_numbers import read, store
from opennki.bind.inline_values import Unknown, Value, known, plain, to_jax
from opennki.errors import NkiError, NkiValueError
from opennki.interpret.steps import _shape_for
from opennki.ir.affine import Affine, Pred, Range, Var, narrowed
from opennki.ir.nodes import Access, Alloc, DoWhile, For, If, IndexTile, Instr, Kernel, PredTile, Stmt, statements
from opennki.ir.verify import accesses, call_view, iteration_shape, reads_of
from opennki.isa import dtypes
from opennki.isa.declare import ISA, Plumbing, Register, Tile

UNROLL_TRIPS = 4
UNROLL_INSTRUCTIONS = 64
UNROLL_RANDOM = 2048  # instructions: the key of a random number is made of the numbers of the iterations, which are known then


# floats that bfloat16 can hold
_FEW_BITS = frozenset({"bfloat16", "float8_e4m3", "float8_e4m3fn", "float8_e5m2"})


class CannotInline(NkiValueError):
    """A kernel that cannot be expanded into the JAX program around it; names the first such instruction and its line."""


def written(body: list[Stmt]) -> set[Alloc]:
    """The tensors that some statement writes."""
    return {access.alloc for s in statements(body) if isinstance(s, Instr) for access, _, writes in accesses(s) if writes}


def _count(body: list[Stmt]) -> int:
    """Instructions of a body when its short loops are unrolled."""
    total = 0
    for stmt in body:
        if isinstance(stmt, Instr):
            total += 1
        elif isinstance(stmt, For):
            total += _count(stmt.body) * (stmt.trips if unrolled(stmt) else 1)
        elif isinstance(stmt, If):
            total += _count(stmt.then) + _count(stmt.orelse)
        elif isinstance(stmt, DoWhile):
            total += _count(stmt.body)
    return total


def draws(body: list[Stmt]) -> bool:
    """True where random numbers are drawn."""
    return any(isinstance(s, Instr) and ISA[s.op].random for s in statements(body))


def unrolled(loop: For) -> bool:
    """True for short loops of few instructions, and for longer ones that draw random numbers."""
    if loop.trips <= 1:
        return True
    if draws(loop.body):
        return loop.trips * _count(loop.body) <= UNROLL_RANDOM
    return loop.trips <= UNROLL_TRIPS and loop.trips * _count(loop.body) <= UNROLL_INSTRUCTIONS


class Machine:
    """One program of the grid while it is expanded."""

    def __init__(self, kernel: Kernel, memory: Memory, env: dict[Var, Any], ranges: dict[Var, Range], kept: set[Alloc], seed: int) -> None:
        """`kept` are tensors that outlive the program: they are there before it runs."""
        self.kernel, self.memory, self.env, self.ranges, self.kept, self.seed = kernel, memory, env, ranges, kept, seed
        self.stream: list[Any] = [env[v] for v in kernel.grid]
        self._unrolled: dict[For, bool] = {}

    def run(self, body: list[Stmt]) -> None:
        """Expand statements."""
        for stmt in body:
            if isinstance(stmt, Instr):
                self._instr(stmt)
            elif isinstance(stmt, Alloc):
                if stmt not in self.kept:
                    self.memory.clear(stmt)
            elif isinstance(stmt, For):
                self._for(stmt)
            elif isinstance(stmt, If):
                self._if(stmt)
            else:
                self._do_while(stmt)

    # ---- control flow ----
    def _state(self, bodies: Iterable[list[Stmt]]) -> list[Alloc]:
        """The tensors that statements change and that are there before."""
        changed = {a for body in bodies for a in written(body)}
        return [a for a in self.memory.arrays if a in changed]

    def _carry(self, allocs: list[Alloc]) -> tuple[Any, ...]:
        return tuple(to_jax(self.memory.arrays[a]) for a in allocs)

    def _inside(self, body: list[Stmt], allocs: list[Alloc], carry: Iterable[Any], ranges: dict[Var, Range],
                cond: Access | None = None) -> tuple[Any, ...]:
        """Expand a body on other contents: what it leaves in `allocs`, after the truth of `cond` if there is one."""
        before, before_ranges = dict(self.memory.arrays), self.ranges
        self.memory.arrays.update(zip(allocs, carry, strict=True))
        self.ranges = ranges
        try:
            self.run(body)
            again = () if cond is None else (to_jax(self.memory.read(cond, self.env, ranges)).any(),)
            return (*again, *self._carry(allocs))
        finally:
            self.memory.arrays, self.ranges = before, before_ranges

    def _leave(self, allocs: list[Alloc], carry: Iterable[Any]) -> None:
        self.memory.arrays.update(zip(allocs, carry, strict=True))

    def _for(self, loop: For) -> None:
        if loop not in self._unrolled:
            self._unrolled[loop] = unrolled(loop)
        if self._unrolled[loop]:
            outer = self.ranges
            for i in range(loop.trips):
                self.env[loop.var] = i
                self.ranges = {**outer, loop.var: (i, i)}
                self.stream.append(i)
                self.run(loop.body)
                self.stream.pop()
            self.ranges = outer
            return
        allocs = self._state([loop.body])

        def step(i: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            self.env[loop.var] = i
            self.stream.append(i)
            try:
                return self._inside(loop.body, allocs, carry, {**self.ranges, loop.var: (0, loop.trips - 1)})
            finally:
                self.stream.pop()
        self._leave(allocs, lax.fori_loop(0, loop.trips, step, self._carry(allocs)))

    def _if(self, branch: If) -> None:
        value = value_of(branch.pred.expr, self.env)
        lo, hi = branch.pred.expr.range(self.ranges)
        then, orelse = narrowed(self.ranges, branch.pred), narrowed(self.ranges, branch.pred.negated())
        if lo >= 0 or hi < 0 or not isinstance(value, jax.Array):
            taken = lo >= 0 or (hi >= 0 and value >= 0)
            outer = self.ranges
            self.ranges = (then if taken else orelse) or outer
            self.run(branch.then if taken else branch.orelse)
            self.ranges = outer
            return
        allocs = self._state([branch.then, branch.orelse])
        ranges = self.ranges
        self._leave(allocs, lax.cond(
            value >= 0, lambda c: self._inside(branch.then, allocs, c, then or ranges),
            lambda c: self._inside(branch.orelse, allocs, c, orelse or ranges), self._carry(allocs)))

    def _do_while(self, loop: DoWhile) -> None:
        cond = loop.cond
        assert cond is not None
        allocs = self._state([loop.body])

        def step(state: tuple[Any, ...]) -> tuple[Any, ...]:
            count, _, *carry = state
            self.stream.append(count)
            try:
                return (count + 1, *self._inside(loop.body, allocs, carry, self.ranges, cond))
            finally:
                self.stream.pop()
        start = (jnp.zeros((), np.int32), jnp.ones((), bool), *self._carry(allocs))
        self._leave(allocs, lax.while_loop(lambda s: s[1], step, start)[2:])

    # ---- instructions ----
    def _instr(self, instr: Instr) -> None:
        loc = self.kernel.loc(instr.loc)
        try:
            if ISA[instr.op].suspends:
                raise Unknown("programs of the grid that wait for each other")
            with jax.named_scope(instr.op if loc is None else f"{instr.op}:{loc.line}"):
                for access, value in _Call(self, instr).results():
                    self.memory.write(access, value, self.env, self.ranges)
        except NkiError:
            raise
        except Exception as error:
            reason = str(error) if isinstance(error, Unknown) else f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            raise CannotInline(
                f"{instr.op} cannot be expanded into a JAX program: {reason}", loc=loc,
                rule="an expanded instruction is made of operations that JAX has, with operands whose shapes alone are known",
                why="the program is made before any number is there",
                fix="run the kernel as one call (on CPU, the default), or replace the instruction") from error


class _Call:
    """One instruction while it is expanded: its operands as its body gets them, and where its results go."""

    def __init__(self, machine: Machine, instr: Instr) -> None:
        self.machine, self.instr = machine, instr
        self.decl = decl = ISA[instr.op]
        self.info = call_view(decl, instr.operands, instr.engine, instr.results[0].dtype if instr.results else None)
        self.raw = decl.raw(self.info)
        self.iteration = iteration_shape(decl, instr)
        self.skip = bool(instr.operands[decl.index["oob_mode"]]) if "oob_mode" in decl.index else False
        self.skipped: Any = None
        self.given: dict[str, Any] = {}
        self.outs: list[tuple[Access, str]] = [(access, "result") for access in instr.results]
        self.registers: list[tuple[Access, str]] = []

    def results(self) -> list[tuple[Access, Any]]:
        """(tile, its new elements) of everything that the instruction writes."""
        decl, instr = self.decl, self.instr
        for param, value in zip(decl.params, instr.operands, strict=True):
            self._operand(param, value)
        if decl.mask_on and "mask" in decl.index and instr.mask:
            self.given["mask"] = _value(all_hold(instr.mask, self.machine.env, self.iteration))
        if decl.family == "print":
            self._print()
            return []
        outs = self.outs + self.registers
        result = TRANSLATOR.body(instr.op)(**self.given)
        values = [] if result is None else list(result) if isinstance(result, tuple) else [result]
        if len(values) != len(outs):
            values = [v for v in values if v is not None]
        return [(access, self._new(access, name, value)) for (access, name), value in zip(outs, values, strict=True)]

    def _operand(self, param: Any, value: Any) -> None:
        spec, name, machine = param.spec, param.name, self.machine
        if isinstance(spec, Plumbing):
            if spec.kind == "stream":
                self.given[name] = (machine.seed, self.instr.call, *[_value(v) for v in machine.stream])
            elif param.required:
                self.given[name] = None
        elif isinstance(value, Access):
            self._tile(param, value)
        elif isinstance(value, Affine):
            number = value_of(value, machine.env)
            if isinstance(spec, Tile):
                kind = np.int32 if self.raw else np.float32
                # with dimensions, as it may have no number yet: bodies ask 0-d operands for theirs
                number = to_jax(number).astype(kind).reshape((1,) * len(self.iteration)) if isinstance(number, jax.Array) else kind(number)
            self.given[name] = _value(number)
        elif isinstance(value, tuple) and any(isinstance(v, Affine) for v in value):
            self.given[name] = tuple(_value(value_of(v, machine.env)) if isinstance(v, Affine) else v for v in value)
        elif isinstance(value, IndexTile):
            self.given[name] = _value(index_values(value_of(value.base, machine.env), value.strides, value.shape))
        elif isinstance(value, PredTile):
            self.given[name] = _value(all_hold(value.preds, machine.env, value.shape or self.iteration))
        elif isinstance(spec, Tile) and isinstance(value, (int, float)) and not isinstance(value, bool) and not self.raw:
            self.given[name] = np.float32(value)
        else:
            self.given[name] = value

    def _tile(self, param: Any, access: Access) -> None:
        spec, machine = param.spec, self.machine
        register = isinstance(spec, Register)
        if register or reads_of(self.decl, param, self.instr.operands):
            array = machine.memory.read(access, machine.env, machine.ranges)
            if self.skip and any(d.dyn is not None for d in access.dims):
                self._skip(access)
        else:
            # its shape and dtype are all that the body may ask for
            array = np.broadcast_to(np.zeros((), dtypes.storage(access.dtype)), access.shape)
        if access.mask:
            zero = np.zeros((), array.dtype)
            array = jnp.where(all_hold(access.mask, machine.env, access.shape), to_jax(array), zero)
        if register or not self.raw:
            array = read(array, access.dtype)
        fit = _shape_for(("P", "1") if register else spec.dims, access.shape, self.iteration)
        self.given[param.name] = Value(array if fit is None else array.reshape(fit), few_bits=not self.raw and access.dtype in _FEW_BITS)
        if register:
            self.registers.append((access, param.name))
        elif spec.writes:
            self.outs.append((access, param.name))

    def _skip(self, access: Access) -> None:
        inside = self.machine.memory.inside(access, self.machine.env)
        self.skipped = inside if self.skipped is None else self.skipped & inside

    def _print(self) -> None:
        prefix = str(self.given.get("prefix", "")).replace("{", "{{").replace("}", "}}")
        jax.debug.print(prefix + " {}", to_jax(plain(self.given["x"])))

    def _new(self, access: Access, name: str, value: Any) -> Any:
        """The new elements of a tile: what the body returned, rounded, where the mask holds; what was there elsewhere."""
        machine = self.machine
        array = store(plain(value), access.dtype)
        if array.shape != access.shape:
            if prod(array.shape) == prod(access.shape):
                array = array.reshape(access.shape)
            else:
                array = np.broadcast_to(array, access.shape) if known(array) else jnp.broadcast_to(array, access.shape)
        keep = self._keep(access, name)
        if keep is None or (known(keep) and keep.all()):
            return array
        old = machine.memory.read(access, machine.env, machine.ranges)
        if known(keep) and known(array) and known(old):
            return np.where(keep, array, old)
        return jnp.where(keep, to_jax(array), to_jax(old))

    def _keep(self, access: Access, name: str) -> Any:
        """Truth values of an output's elements being written, None for all (as `interpret.steps` narrows an instruction by its mask)."""
        decl, shape, iteration = self.decl, access.shape, self.iteration
        keep: Any = None
        if self.skipped is not None and self.skipped.shape == shape:
            keep = self.skipped
        if not self.instr.mask:
            return keep
        truths = [self._some(shape)]
        if decl.positional or decl.random:
            if shape == iteration:
                truths.append(all_hold(self.instr.mask, self.machine.env, shape))
        else:
            dims = decl.masked_dims(name, self.info)
            if dims is None and decl.mask_on and name != decl.mask_on and shape != iteration:
                dims = (0,)
            truths += [self._seen(pred, shape, dims) for pred in self.instr.mask]
        for truth in truths:
            if truth is not None:
                keep = truth if keep is None else keep & truth
        return keep

    def _moving(self, pred: Pred) -> dict[int, int]:
        """The dimensions of the iteration space that a predicate depends on, with its strides."""
        strides = pred.strides or (0,) * len(self.iteration)
        return {k: s for k, (s, n) in enumerate(zip(strides, self.iteration, strict=True)) if s and n > 1}

    def _seen(self, pred: Pred, shape: tuple[int, ...], dims: Any) -> Any:
        """A predicate over the iteration space, over the elements of an output; None where it does not narrow it."""
        moving, iteration, env = self._moving(pred), self.iteration, self.machine.env
        if len(moving) > 1:
            return holds(pred, env, shape) if shape == iteration else None
        for k, stride in moving.items():
            for j, n in enumerate(shape):
                at = j if dims is None else (dims[j] if j < len(dims) else None)
                if at == k and n == iteration[k] and not (n == 1 and dims is None):
                    return holds(Pred(pred.expr, tuple(stride if i == j else 0 for i in range(len(shape)))), env, shape)
        return None

    def _some(self, shape: tuple[int, ...]) -> Any:
        """Whether the box that the mask narrows the iteration space to has any element; None where that is certain."""
        low: dict[int, Any] = {}
        high: dict[int, Any] = {}
        truth: Any = True
        for pred in self.instr.mask:
            moving, value = self._moving(pred), value_of(pred.expr, self.machine.env)
            if not moving:
                truth = truth & (value >= 0)
            if len(moving) == 1:
                (k, stride), = moving.items()
                if stride > 0:
                    low[k] = jnp.maximum(low.get(k, 0), -(value // stride))
                else:
                    high[k] = jnp.minimum(high.get(k, self.iteration[k]), value // -stride + 1)
        for k in {*low, *high}:
            truth = truth & (low.get(k, 0) < high.get(k, self.iteration[k]))
        return None if truth is True else jnp.broadcast_to(truth, shape)


def _value(value: Any) -> Any:
    return Value(value) if isinstance(value, (np.ndarray, jax.Array)) else value
