"""The builder: where the statements of the kernel that is being traced go.

The language layer talks to `current()`. `Builder` is straight-line; `trace.tracer.Tracer` adds symbolic control flow.
"""
from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from types import CodeType, FrameType
from typing import Any

from opennki.errors import UNKNOWN, Loc, NkiError, make, user_frame
from opennki.ir.affine import Affine, Pred, Range, Var, implied
from opennki.ir.nodes import Access, Alloc, Dim, Instr, Stmt
from opennki.isa.target import Target

# called with the user's frame at each of its statements, except for the functions in quiet_codes (checks of annotations, see lang)
line_hook: Callable[[Builder, FrameType], None] | None = None
quiet_codes: set[CodeType] = set()
_current: ContextVar[Builder | None] = ContextVar("opennki_builder", default=None)


def current() -> Builder:
    """The builder of the kernel that is being traced; raises err_nki_api_outside_of_nki_kernel."""
    builder = _current.get()
    if builder is None:
        raise make("err_nki_api_outside_of_nki_kernel", "an NKI API was called outside of a kernel")
    return builder


def maybe_current() -> Builder | None:
    """The builder, or None outside of kernels."""
    return _current.get()


def activate(builder: Builder | None) -> Any:
    """Make a builder current; returns the token for `deactivate`."""
    return _current.set(builder)


def deactivate(token: Any) -> None:
    """Restore what was current before `activate`."""
    _current.reset(token)


class Forwarded:
    """A temporary whose maker was made to write elsewhere; `expand` gives the statements that keep it."""

    __slots__ = ("expand", "index", "nodes")

    def __init__(self, nodes: list[Any], index: int, expand: Callable[[], list[Stmt]]) -> None:
        self.nodes, self.index, self.expand = nodes, index, expand


class Builder:
    """Collects statements. `nodes` is the list that statements are appended to; an entry may be a list of statements (a
    temporary that had to be kept after all), which `flatten` dissolves.
    """

    forwarding = True

    def __init__(self, target: Target, target_name: str = "", is_fallback: bool = False) -> None:
        self.target = target
        self.target_name = target_name or target.name
        self.is_fallback = is_fallback
        self.nodes: list[Any] = []
        self.locs: list[Loc] = []
        self._loc_index: dict[tuple[str, int, str], int] = {}
        self.ranges: dict[Var, Range] = {}
        self.guarded = False
        self.allocs = 0
        self.constants: dict[int, Any] = {}
        self.constant_allocs: list[Alloc] = []
        self._constant_index: dict[Any, Alloc] = {}
        self._registers: dict[str, Alloc] = {}
        self.forwarded: dict[int, Forwarded] = {}
        self.temporaries: set[int] = set()
        self.writes: dict[int, int] = {}
        self.turned: set[int] = set()  # results of transposes, which the compiler keeps where their user reads them
        self.has_collectives = False
        self.grid: tuple[Var, ...] = ()
        self.options: dict[str, Any] = {}
        self.last_frame: Any = None

    # ---- places -------------------------------------------------------------------------------------------------------------
    def here(self) -> int:
        """Index of the user's current line in the table of locations."""
        frame = user_frame()
        if frame is None:
            return -1
        self.last_frame = frame
        code = frame.f_code
        if line_hook is not None and code not in quiet_codes:
            line_hook(self, frame)
        key = (code.co_filename, frame.f_lineno, code.co_name)
        index = self._loc_index.get(key)
        if index is None:
            index = self._loc_index[key] = len(self.locs)
            self.locs.append(Loc(*key))
        return index

    def loc(self, index: int) -> Loc:
        """Location by its index."""
        return self.locs[index] if index >= 0 else UNKNOWN

    # ---- control flow (the tracer overrides these) -----------------------------------------------------------------------------
    def facts(self) -> list[Affine]:
        """What is known to be >= 0 on the current path."""
        return []

    def undecided(self, preds: tuple[Pred, ...], shape: tuple[int, ...]) -> tuple[Pred, ...]:
        """The predicates of a mask over a tile of `shape` that are not known to hold for all of it on the current path."""
        if not preds or 0 in shape:
            return preds
        facts = self.facts()
        least = [p.expr.add(sum(min(0, s * (n - 1)) for s, n in zip(p.strides, shape, strict=False))) for p in preds]
        return tuple(p for p, low in zip(preds, least, strict=True) if not implied(low, facts, self.ranges))

    def decide(self, pred: Pred) -> bool:
        """Truth of a scalar predicate on the current path."""
        lo, hi = pred.expr.range(self.ranges)
        if lo >= 0:
            return True
        if hi < 0:
            return False
        raise NkiError(f"{pred} is not constant here")

    def concrete(self, expr: Affine) -> int:
        """The value of an expression that Python needs as a number."""
        if expr.is_const:
            return expr.const
        raise NkiError(f"{expr} is not constant here")

    def in_kernel_scope(self) -> bool:
        """True at the top level of the kernel, outside loops and callees."""
        return True

    def open_allocs(self, alloc: Alloc) -> bool:
        """True while the scope that a tensor was made in is open."""
        return True

    # ---- statements ---------------------------------------------------------------------------------------------------------
    def alloc(self, shape: tuple[int, ...], dtype: str, space: str, *, name: str = "", kind: str = "local", pdim: int = 0,
              placement: Any = None, loc: int | None = None, temporary: bool = False) -> Alloc:
        """Make a tensor and put its allocation into the current scope."""
        index = self.here() if loc is None else loc
        self.allocs += 1
        made = Alloc(self.allocs, name, shape, dtype, space, kind, pdim, placement, self.loc(index))
        self.place(made)
        return made

    def place(self, alloc: Alloc) -> None:
        """Append an allocation to the current scope."""
        self.nodes.append(alloc)

    def instr(self, instr: Instr) -> None:
        """Append an instruction."""
        self.nodes.append(instr)

    def call_number(self, loc: int) -> int:
        """Number of a call site of a random instruction."""
        return loc + 1

    def constant(self, array: Any, dtype: str) -> Alloc:
        """A constant tensor in HBM; equal constants are one."""
        key = (dtype, array.shape, array.tobytes())
        found = self._constant_index.get(key)
        if found is None:
            self.allocs += 1
            found = Alloc(self.allocs, "", tuple(array.shape), dtype, "shared_hbm", "constant", 0, None, self.loc(self.here()))
            self._constant_index[key] = found
            self.constants[found.id] = array
            self.constant_allocs.append(found)
        return found

    def register(self, engine: str, partitions: int) -> Access:
        """The accumulator registers of an engine, for the first `partitions` lanes."""
        alloc = self._registers.get(engine)
        if alloc is None:
            self.allocs += 1
            alloc = Alloc(self.allocs, f"{engine}_acc", (self.target.partitions, 1), "float32", "register", "register")
            self._registers[engine] = alloc
        return Access(alloc, alloc.dtype, (Dim(Affine(), (1, 0)), Dim(Affine(), (0, 1))), (partitions, 1))

    def registers(self) -> list[Alloc]:
        """All registers in use."""
        return list(self._registers.values())

    # ---- direct allocation ------------------------------------------------------------------------------------------------------
    def allocate_directly(self) -> None:
        """A tensor has a placement of its own: what the compiler cannot add to such a kernel is an error, also where it came before."""
        self.options["direct_allocation"] = True
        if "implicit" in self.options:
            raise make(*self.options["implicit"][:2], loc=self.options["implicit"][2])

    def not_allocated_directly(self, code: str, message: str, loc: Loc) -> None:
        """The statement needs a tile that the compiler adds: an error in a directly allocated kernel."""
        if self.options.get("direct_allocation"):
            raise make(code, message, loc=loc)
        self.options.setdefault("implicit", (code, message, loc))

    # ---- temporaries ------------------------------------------------------------------------------------------------------------
    def last_instr(self) -> Instr | None:
        """The statement appended last, if it is an instruction."""
        for node in reversed(self.nodes):
            if isinstance(node, Alloc):
                continue
            return node if isinstance(node, Instr) else None
        return None

    def replace_last(self, instr: Instr) -> tuple[list[Any], int]:
        """Replace the instruction appended last; returns its place."""
        for index in range(len(self.nodes) - 1, -1, -1):
            if isinstance(self.nodes[index], Instr):
                self.nodes[index] = instr
                return self.nodes, index
        raise AssertionError("no instruction to replace")

    def keep(self, alloc: Alloc) -> None:
        """A temporary is used after its maker was forwarded: make it again."""
        forwarded = self.forwarded.pop(alloc.id, None)
        if forwarded is not None:
            forwarded.nodes[forwarded.index] = forwarded.expand()


def flatten(nodes: list[Any]) -> list[Stmt]:
    """Statements of a list in which kept temporaries are lists."""
    out: list[Stmt] = []
    for node in nodes:
        if isinstance(node, list):
            out.extend(node)
        else:
            out.append(node)
    return out
