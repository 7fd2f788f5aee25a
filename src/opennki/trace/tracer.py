"""The tracer: symbolic loops and conditionals without rewriting the user's source.

The body of an affine or sequential loop runs once, with a symbolic index. A condition on indices that intervals cannot answer takes one
side and is recorded on the innermost open loop, whose iterator then yields its index once more for each other feasible side (a pass); at
the top level the kernel function itself runs again. The passes of a body are merged into nested `If`s (see `trace.merge`).

Where Python needs a number (`lst[i]`, `range(i)`), where a pass changes Python state that another iteration sees, or where a loop is left
by `break` or `return`, the kernel is traced again with that one loop unrolled (`Retrace`). Source: design "Tracing rules".
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from opennki.errors import NkiError, NkiValueError, make, user_frame, warn
from opennki.ir.affine import Affine, Pred, Range, Var, implied, narrowed, variable
from opennki.ir.build import Builder
from opennki.ir.nodes import Access, Alloc, DoWhile, For, Instr
from opennki.isa.target import Target
from opennki.lang.index import Condition, Index
from opennki.trace import merge, pystate

MAX_PATHS = 64
MAX_RETRACES = 200
_SAME = "a kernel body does the same each time it is traced"
_STEADY = "let control flow depend on arguments and loop indices only, not on state outside of the kernel"


class Retrace(BaseException):
    """Trace the kernel again with these loops unrolled (not an Exception: user code must not swallow it)."""

    def __init__(self, sites: set[Any], why: str, advice: NkiError | None = None) -> None:
        self.sites, self.why, self.advice = sites, why, advice
        super().__init__(why)


class Record:
    """What the passes over one scope share: tensors, loop variables and inner records, unified by place and occurrence."""

    __slots__ = ("allocs", "kind", "open", "registry")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.registry: dict[Any, Any] = {}
        self.allocs: dict[int, Alloc] = {}
        self.open = True


class Scope:
    """One pass over a body: its statements, the decisions to replay, and those taken."""

    __slots__ = ("counters", "forwarded", "guarded", "nodes", "ranges", "record", "replay", "taken")

    def __init__(self, record: Record, replay: list[bool], ranges: dict[Var, Range], guarded: bool) -> None:
        self.record, self.replay, self.ranges, self.guarded = record, replay, ranges, guarded
        self.nodes: list[Any] = []
        self.taken: list[merge.Decision] = []
        self.counters: dict[Any, int] = {}

    def occurrence(self, key: Any) -> int:
        """How often a place was reached in this pass."""
        n = self.counters.get(key, 0)
        self.counters[key] = n + 1
        return n


class Tracer(Builder):
    """Builds the IR of one kernel."""

    def __init__(self, target: Target, target_name: str = "", is_fallback: bool = False, unrolled: frozenset[Any] = frozenset(),
                 eager: Callable[[Any], None] | None = None, program: tuple[int, ...] | None = None) -> None:
        super().__init__(target, target_name, is_fallback)
        self.unrolled = unrolled
        self.eager = eager
        self.program = program
        self.forwarding = eager is None
        self.scopes: list[Scope] = []
        self.home: dict[int, Record] = {}
        self.depth = 0
        self.abort: Retrace | None = None
        self._calls: dict[Any, int] = {}

    # ---- scopes --------------------------------------------------------------------------------------------------------------
    def push(self, record: Record, replay: list[bool]) -> Scope:
        """Open a pass."""
        scope = Scope(record, replay, self.ranges, self.guarded)
        self.scopes.append(scope)
        self.nodes = scope.nodes
        record.open = True
        return scope

    def pop(self) -> Scope:
        """Close a pass."""
        scope = self.scopes.pop()
        self.ranges, self.guarded = scope.ranges, scope.guarded
        if self.scopes:
            self.nodes = self.scopes[-1].nodes
        return scope

    def shared(self, key: Any, build: Callable[[], Any]) -> Any:
        """The object of a place in the current scope, the same one in every pass."""
        scope = self.scopes[-1]
        full = (key, scope.occurrence(key))
        found = scope.record.registry.get(full)
        if found is None:
            found = scope.record.registry[full] = build()
        return found

    def check_abort(self) -> None:
        """Trace again if a loop was left early."""
        if self.abort is not None:
            raise self.abort

    # ---- statements ----------------------------------------------------------------------------------------------------------
    def alloc(self, shape: tuple[int, ...], dtype: str, space: str, *, name: str = "", kind: str = "local", pdim: int = 0,
              placement: Any = None, loc: int | None = None, temporary: bool = False) -> Alloc:
        """Make a tensor; the same place in another pass over the scope gives the same tensor."""
        index = self.here() if loc is None else loc
        key = ("alloc", index, shape, dtype, space, name, pdim)

        def build() -> Alloc:
            self.allocs += 1
            return Alloc(self.allocs, name, shape, dtype, space, kind, pdim, placement, self.loc(index))
        made: Alloc = self.shared(key, build)
        self.forwarded.pop(made.id, None)  # what an earlier pass did with it is another path's business
        record = self.scopes[-1].record
        record.allocs[made.id] = made
        self.home[made.id] = record
        if temporary:
            self.temporaries.add(made.id)
        if self.eager is not None:
            self.eager(made)
        return made

    def instr(self, instr: Instr) -> None:
        """Append an instruction (and run it in eager mode)."""
        if self.abort is not None:
            raise self.abort
        self.nodes.append(instr)
        if self.eager is not None:
            self.eager(instr)

    def call_number(self, loc: int) -> int:
        """Number of a random call site: place and occurrence, whatever the path."""
        key = ("call", loc, tuple(id(s.record) for s in self.scopes))
        return int(self.shared(key, lambda: self._calls.setdefault(len(self._calls), len(self._calls)) + 1))

    def in_kernel_scope(self) -> bool:
        """True at the top level of the kernel, outside loops and callees."""
        return len(self.scopes) == 1 and self.depth == 0

    def open_allocs(self, alloc: Alloc) -> bool:
        """True while the scope that a tensor was made in is open."""
        record = self.home.get(alloc.id)
        return record is None or record.open

    # ---- conditions ----------------------------------------------------------------------------------------------------------
    def facts(self) -> list[Affine]:
        """What the decisions of the current path say."""
        return [(d.pred if d.choice else d.pred.negated()).expr for scope in self.scopes for d in scope.taken]

    def decide(self, pred: Pred) -> bool:
        """Truth of a scalar predicate: by intervals, by what the path already took, else take a side and record it."""
        self.check_abort()
        lo, hi = pred.expr.range(self.ranges)
        if lo >= 0:
            return True
        if hi < 0:
            return False
        facts = self.facts()
        if facts and implied(pred.expr, facts, self.ranges):
            return True
        if facts and implied(pred.negated().expr, facts, self.ranges):
            return False
        yes, no = narrowed(self.ranges, pred), narrowed(self.ranges, pred.negated())
        if yes is None or no is None:
            return yes is not None
        scope = self.scopes[-1]
        if scope.record.kind == "while":
            sites = {v.site for v in pred.expr.variables() if v.kind == "loop"}
            if not sites:
                raise NkiValueError("a condition on the program id inside a runtime while loop", rule="it is decided before the loop",
                                    fix="take the branch outside of the loop")
            raise Retrace(sites, "a condition inside a runtime while loop")
        position = len(scope.taken)
        choice = scope.replay[position] if position < len(scope.replay) else True
        scope.taken.append(merge.Decision(len(scope.nodes), pred, choice, self.here()))
        self.ranges = yes if choice else no
        self.guarded = True
        return choice

    def concrete(self, expr: Affine) -> int:
        """The number that Python needs: unroll the loops of the expression, or split by the values of the program id."""
        if expr.is_const:
            return expr.const
        lo, hi = expr.range(self.ranges)
        if lo == hi:
            return lo
        sites = {v.site for v in expr.variables() if v.kind == "loop"}
        if sites:
            self.abort = Retrace(sites, f"{expr} is needed as a number")
            raise self.abort
        if hi - lo >= MAX_PATHS:
            raise NkiValueError(f"the program id is needed as a Python number, one of {hi - lo + 1}",
                                rule=f"a kernel body is specialised for at most {MAX_PATHS} values",
                                fix="use the program id in index expressions only")
        for value in range(lo, hi):
            if bool(Condition((Pred(expr.add(-value)), Pred(Affine(value).add(expr, -1))))):
                return value
        return hi

    # ---- loops ---------------------------------------------------------------------------------------------------------------
    def loop(self, kind: str, start: int, stop: int, step: int, directives: tuple[str, ...]) -> Iterator[Any]:
        """Iterator over a range: symbolic, or of Python ints where the loop is unrolled."""
        self.check_abort()
        trips = max(0, -(-(stop - start) // step)) if step > 0 else max(0, -(-(start - stop) // -step))
        frame = user_frame()
        site = pystate.site(frame)
        if trips == 0:
            return iter(())
        if self.eager is not None or site in self.unrolled or not pystate.plain_for(frame):
            return iter(range(start, start + trips * step, step))
        return Loop(self, kind, start, step, trips, directives, frame, site)

    # ---- do-while ------------------------------------------------------------------------------------------------------------
    def while_test(self, entered: bool, cond: Access | None) -> bool:
        """The test of `while scalar:`: opens the loop the first time, closes it the second."""
        frame = user_frame()
        assert frame is not None
        key = (frame, frame.f_lineno)
        top = self.scopes[-1]
        if top.record.kind == "while" and top.record.registry.get("key") == key:
            if cond is None:
                raise NkiValueError("the condition of a runtime while loop is a constant at its end",
                                    rule="the condition is recomputed in the body: cond = nt.scalar(tile)")
            self.close_repeat(cond)
            return False
        if cond is not None:
            is_while = self.loc(self.here()).source().startswith("while")
            raise make("err_while_loop_requires_unconditional_entry" if is_while else "err_dynamic_control_flow_not_supported",
                       "the truth of a runtime scalar is needed")
        if not entered:
            return False
        self.open_repeat(key)
        return True

    def open_repeat(self, key: Any = None) -> None:
        """Begin the body of a do-while loop."""
        if self.eager is not None:
            raise NkiValueError("a loop with a condition that is known at run time", rule="eager mode runs each statement once",
                                fix="run without eager")
        record = Record("while")
        record.registry["key"] = key
        self.push(record, [])

    def close_repeat(self, cond: Access | None) -> None:
        """End the body of a do-while loop; without a condition, as what raised an error in the body ends it."""
        top = self.pop()
        top.record.open = False
        if cond is not None:
            self.nodes.append(DoWhile([*top.record.allocs.values(), *merge.flatten(top.nodes)], cond, self.here()))

    # ---- whole kernels -------------------------------------------------------------------------------------------------------
    def run(self, body: Callable[[], Any]) -> tuple[list[Any], list[Any]]:
        """Run the kernel function once per path; returns the merged statements and the value of each path."""
        record = Record("kernel")
        passes, values, pending = [], [], [[]]  # type: ignore[var-annotated]
        while pending:
            self._bounded(passes)
            replay: list[bool] = pending.pop()
            self.push(record, replay)
            try:
                values.append(body())
            except NameError as exc:
                self._explain(exc)
                raise
            self.check_abort()
            if len(self.scopes) > 1:
                sites = {s.record.registry.get("site") for s in self.scopes[1:]}
                raise Retrace(sites - {None}, "a loop is left by return")
            scope = self.pop()
            passes.append(merge.Pass(scope.taken, scope.nodes))
            pending += merge.alternatives(scope.taken, len(replay))
        return [*record.allocs.values(), *merge.merged(passes)], values

    def _explain(self, error: NameError) -> None:
        """A variable that only other paths through the kernel set: say which path this one is."""
        path = "; ".join(f"{'' if d.choice else 'not '}{d.pred} ({self.loc(d.loc)})" for s in self.scopes for d in s.taken)
        if path:
            error.add_note(f"A kernel is traced once for each side of a condition on program ids or loop indices, here with {path}. "
                           "What is used after the condition is set on both sides.")

    def _bounded(self, passes: list[Any]) -> None:
        if len(passes) >= MAX_PATHS:
            raise NkiValueError(f"over {MAX_PATHS} paths through the kernel", rule="conditions on program ids split the kernel body",
                                fix="use masks or nl.where instead of if")


class Loop:
    """Iterator of one symbolic loop."""

    def __init__(self, tracer: Tracer, kind: str, start: int, step: int, trips: int, directives: tuple[str, ...], frame: Any,
                 site: Any) -> None:
        self.tracer, self.kind, self.trips, self.directives, self.frame, self.site = tracer, kind, trips, directives, frame, site
        self.loc = tracer.here()
        self.var: Var = tracer.shared(("var", site, trips), self._new_var)
        self.record: Record = tracer.shared(("record", site, trips), lambda: Record("loop"))
        self.record.registry["site"] = site
        self.index = Index(variable(self.var).scale(step).add(start))
        self.passes: list[merge.Pass] = []
        self.pending: list[list[bool]] = [[]]
        self.scope: Scope | None = None
        self.before: Any = None
        self.done = False

    def _new_var(self) -> Var:
        self.tracer.options["vars"] = n = self.tracer.options.get("vars", 0) + 1
        return Var(f"i{n}", 0, self.trips - 1, "loop", self.site)

    def __iter__(self) -> Loop:
        return self

    def __next__(self) -> Index:
        tracer = self.tracer
        tracer.check_abort()
        if self.scope is not None:
            self._end_pass()
        else:
            self.before = pystate.snapshot(self.frame)
        if not self.pending:
            self._finish()
            raise StopIteration
        if len(self.passes) >= MAX_PATHS:
            raise Retrace({self.site}, f"over {MAX_PATHS} paths through the loop")
        self.replay = self.pending.pop()
        self.scope = tracer.push(self.record, self.replay)
        return self.index

    def _end_pass(self) -> None:
        tracer, scope = self.tracer, self.scope
        assert scope is not None
        if tracer.scopes[-1] is not scope:
            inner = {s.record.registry.get("site") for s in tracer.scopes[tracer.scopes.index(scope) + 1:]}
            raise Retrace((inner - {None}) or {self.site}, "an inner loop is left by break")
        tracer.pop()
        if self.trips > 1 or self.pending or len(scope.taken) > len(self.replay):
            changed = pystate.changed(self.frame, self.before)
            if changed:
                raise Retrace({self.site}, f"the loop body changes {changed}")
        self.passes.append(merge.Pass(scope.taken, scope.nodes))
        self.pending += merge.alternatives(scope.taken, len(self.replay))

    def _finish(self) -> None:
        self.done = True
        self.record.open = False
        self.scope = None
        body = [*self.record.allocs.values(), *merge.merged(self.passes)]
        self.tracer.nodes.append(For(self.var, self.trips, self.kind, body, self.directives, self.loc))

    def __del__(self) -> None:
        # dropped before its end: the loop was left by break or return (or by an exception, when the trace is over anyway)
        if not self.done and self.scope is not None and self.tracer.abort is None:
            advice = None
            if self.trips > 1 and not self.passes and not self.scope.taken:
                advice = NkiValueError(f"the loop of {self.trips} iterations is left in the first one: the others never run",
                                       loc=self.tracer.loc(self.loc), rule="a break or return that no condition guards ends a loop",
                                       why="it may be indented too far", fix="move it out of the loop, or drop the loop")
            self.tracer.abort = Retrace({self.site}, "the loop is left by break or return", advice)


def retrace(attempt: Callable[[frozenset[Any]], Any]) -> Any:
    """Trace, again with more loops unrolled as long as the trace asks for it."""
    unrolled: frozenset[Any] = frozenset()
    for _ in range(MAX_RETRACES):
        try:
            return attempt(unrolled)
        except Retrace as again:
            if again.advice is not None:
                warn(again.advice)
            more = unrolled | {s for s in again.sites if s is not None}
            if more == unrolled:
                raise NkiError(f"the kernel cannot be traced: {again.why}", rule=_SAME, fix=_STEADY) from None
            unrolled = more
    raise NkiError(f"the kernel still cannot be traced after {MAX_RETRACES} loops were unrolled", rule=_SAME, fix=_STEADY)
