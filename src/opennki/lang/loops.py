"""Loops and the launch grid: affine_range, sequential_range, static_range, program_id, spmd_dim, nc.

Source: api_legacy section 1 (loops, SPMD grid) and neuronxcc.nki.language.
"""
from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from opennki.errors import NkiTypeError, NkiValueError, make, warn
from opennki.ir.affine import variable
from opennki.ir.build import current
from opennki.lang.index import Index


@dataclass(frozen=True)
class Directive:
    """A directive of a loop: `ncc.multi_buffer(n)` or `ncc.no_reorder()`."""

    text: str

    def __repr__(self) -> str:
        return self.text


class LoopRange:
    """What affine_range and sequential_range return: iterable once or more, with the length of a range."""

    def __init__(self, kind: str, args: tuple[Any, ...], directives: Any) -> None:
        self.kind, self.args = kind, args
        given = directives if isinstance(directives, (list, tuple)) else () if directives is None else (directives,)
        for d in given:
            if not isinstance(d, Directive):
                raise NkiTypeError(f"directives={d!r}", rule="a loop directive is ncc.multi_buffer(n) or ncc.no_reorder()")
        self.directives = tuple(d.text for d in given)
        if not 1 <= len(args) <= 3:
            raise NkiTypeError(f"nl.{kind}_range takes 1 to 3 arguments, not {len(args)}",
                               rule=f"nl.{kind}_range(stop), (start, stop) or (start, stop, step)")
        for a in args:
            if isinstance(a, float) or not hasattr(a, "__index__"):
                raise NkiTypeError(f"nl.{kind}_range of {a!r}", rule="the bounds of a loop are integers",
                                   fix="use // instead of / for the number of tiles")

    def _range(self) -> range:
        bounds = [operator.index(a) for a in self.args]
        if len(bounds) == 3 and not bounds[2]:
            raise NkiValueError(f"nl.{self.kind}_range of step 0", rule="the step of a loop is not 0")
        return range(*bounds)

    def __iter__(self) -> Iterator[Any]:
        bounds = self._range()
        return current().loop(self.kind, bounds.start, bounds.stop, bounds.step, self.directives)  # type: ignore[attr-defined,no-any-return]

    def __len__(self) -> int:
        return len(self._range())

    def __getitem__(self, key: Any) -> Any:
        return self._range()[key]


def affine_range(*args: Any, directives: Any = None, **kwargs: Any) -> LoopRange:
    """Loop of independent iterations: `affine_range(stop)`, `(start, stop)`, `(start, stop, step)`.

    Iterations may run in any order: each writes its own elements, except for accumulation with `+=`
    (err_unexpected_output_dependencies).
    """
    return LoopRange("affine", args, directives)


def sequential_range(*args: Any, directives: Any = None, **kwargs: Any) -> LoopRange:
    """Loop of ordered iterations, which may use what earlier ones wrote into tensors made before the loop."""
    return LoopRange("sequential", args, directives)


def static_range(*args: Any, **kwargs: Any) -> range:
    """Loop that is unrolled when the kernel is traced; the index is a Python int."""
    return range(*(operator.index(a) for a in args))


@dataclass(frozen=True)
class NC:
    """A grid dimension over physical cores: `nl.nc(2)`."""

    n: int

    def __mul__(self, other: Any) -> SpmdDim:
        return spmd_dim(self, other)

    def __rmul__(self, other: Any) -> SpmdDim:
        return spmd_dim(other, self)


@dataclass(frozen=True)
class SpmdDim:
    """A grid dimension of several sub-dimensions, the outermost first; those of NC choose the core."""

    dims: tuple[Any, ...]

    @property
    def size(self) -> int:
        """Number of program instances along the dimension."""
        return prod(d.n if isinstance(d, NC) else d for d in self.dims)

    def core(self, index: int) -> tuple[int, int]:
        """(core, number of cores) of an instance along this dimension."""
        core, cores = 0, 1
        for d in reversed(self.dims):
            n = d.n if isinstance(d, NC) else d
            index, digit = divmod(index, n)
            if isinstance(d, NC):
                core, cores = core + digit * cores, cores * n
        return core, cores

    def __mul__(self, other: Any) -> SpmdDim:
        return spmd_dim(self, other)

    def __rmul__(self, other: Any) -> SpmdDim:
        return spmd_dim(other, self)


def nc(n: Any) -> NC:
    """A grid dimension mapped onto n physical NeuronCores of a logical core."""
    count = operator.index(n)
    if count < 1:
        raise NkiValueError(f"nl.nc({count})", rule="the number of cores is positive")
    return NC(count)


def spmd_dim(*dims: Any) -> SpmdDim:
    """A grid dimension built from sub-dimensions (ints and nl.nc), outermost first."""
    flat: list[Any] = []
    for d in dims:
        flat += d.dims if isinstance(d, SpmdDim) else [d if isinstance(d, NC) else operator.index(d)]
    return SpmdDim(tuple(flat))


def normalise_grid(grid: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(sizes, core of each program) of what stands in `kernel[...]`."""
    dims = tuple(grid) if isinstance(grid, (tuple, list)) else (grid,)
    parts = []
    for d in dims:
        if isinstance(d, NC):
            d = SpmdDim((d,))
        if not isinstance(d, SpmdDim):
            if isinstance(d, bool) or not hasattr(d, "__index__"):
                raise NkiTypeError(f"launch grid {grid!r}", rule="a grid is made of integers, nl.nc and nl.spmd_dim")
            n = operator.index(d)
            if n == 0:
                # published kernels launch with [0] and mean one program
                warn(NkiValueError(f"launch grid {grid!r} runs one program", rule="each dimension of a grid is at least 1", fix="write 1"))
                n = 1
            d = SpmdDim((n,))
        if d.size < 1:
            raise NkiValueError(f"launch grid {grid!r}", rule="each dimension of a grid is at least 1")
        parts.append(d)
    sizes = tuple(p.size for p in parts)
    if all(p.core(0)[1] == 1 for p in parts):
        return sizes, ()
    cores = []
    for program in range(prod(sizes)):
        rest, core, count = program, 0, 1
        for p in reversed(parts):
            rest, digit = divmod(rest, p.size)
            own, n = p.core(digit)
            core, count = core + own * count, count * n
        cores.append(core)
    return sizes, tuple(cores)


def program_id(axis: Any) -> Any:
    """Index of this program instance along a grid axis (0 when launched without a grid)."""
    builder = current()
    axis = operator.index(axis)
    if not builder.grid and axis == 0:
        return 0
    if not 0 <= axis < len(builder.grid):
        raise NkiValueError(f"nl.program_id({axis}) of a grid of {len(builder.grid)} dimensions", rule="the axis is one of the grid")
    program = getattr(builder, "program", None)
    if program is not None:
        return program[axis]
    var = builder.grid[axis]
    return Index(variable(var)) if var.hi > 0 else 0


def num_programs(axes: Any = None) -> int:
    """Number of program instances along an axis or axes; of the whole grid when axes is None."""
    sizes = tuple(v.hi + 1 for v in current().grid)
    if axes is None:
        return prod(sizes)
    chosen = (axes,) if isinstance(axes, int) else tuple(axes)
    if not sizes and all(a == 0 for a in chosen):
        return 1
    for a in chosen:
        if not 0 <= a < len(sizes):
            raise NkiValueError(f"nl.num_programs({axes}) of a grid of {len(sizes)} dimensions", rule="the axis is one of the grid")
    return prod(sizes[a] for a in chosen)


def program_ndim() -> int:
    """Number of dimensions of the launch grid; 0 when launched without one."""
    return len(current().grid)


class RuntimeScalar:
    """A scalar that is known at run time (`nt.scalar(x)`): a condition of a do-while loop, or an index."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def index_value(self) -> Any:
        """The index that it stands for: a [1, 1] tile, or a number."""
        value = self.value
        while isinstance(value, RuntimeScalar):
            value = value.value
        return operator.index(value) if isinstance(value, (bool, int)) else value

    def __add__(self, other: Any) -> Any:
        return self.index_value() + other

    __radd__ = __add__

    def __bool__(self) -> bool:
        from opennki.lang.tensor import Tensor
        builder = current()
        value = self.value
        if isinstance(value, RuntimeScalar):
            value = value.value
        if isinstance(value, Tensor):
            if value.size != 1:
                raise make("err_ambiguous_tensor_truth_value", f"the truth of {value.describe()} is needed")
            from opennki.lang.emit import tile_access
            return builder.while_test(False, tile_access(value, "condition", builder))  # type: ignore[attr-defined,no-any-return]
        return builder.while_test(bool(value), None)  # type: ignore[attr-defined,no-any-return]


class Repeat:
    """What do_while returns: the statements under `with` are the body of the loop."""

    def __init__(self, cond: Any) -> None:
        from opennki.lang.tensor import Tensor
        if not isinstance(cond, Tensor) or cond.size != 1:
            what = cond.describe() if isinstance(cond, Tensor) else type(cond).__name__
            raise NkiTypeError(f"do_while of {what}", rule="the condition is a tensor of one element, which the body writes",
                               fix="cond = nl.ndarray((1, 1), dtype=np.uint8, buffer=nl.hbm) before the loop")
        self.cond = cond

    def __enter__(self) -> None:
        current().open_repeat()  # type: ignore[attr-defined]

    def __exit__(self, kind: Any, error: Any, place: Any) -> None:
        from opennki.lang.emit import tile_access
        builder = current()
        builder.close_repeat(tile_access(self.cond, "condition", builder) if kind is None else None)  # type: ignore[attr-defined]


def do_while(cond: Any) -> Repeat:
    """A loop that is repeated while a tensor says so: `with do_while(cond): ...` runs the body, and again as long as the element of `cond`
    is not zero afterwards, as the body stores it there. The body runs at least once.

    cond: a tensor of one element in HBM, SBUF or PSUM, made before the loop. The body is traced once: a `return` inside returns from the
    kernel after the loop, and what it makes is gone afterwards.
    """
    return Repeat(cond)
