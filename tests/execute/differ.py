"""A kernel by native code and by the interpreter, to the last bit, and the smallest part of it at which they differ.

The functions whose last bits may differ (exp, tanh, products of matrices ...) are tested by themselves; here the interpreter computes them
by the native library as well, so that everything else has to agree in every bit.
"""

from __future__ import annotations

import copy
import ctypes as C
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from tests.execute import native as library
from tests.execute.random_programs import Programs

from opennki.errors import NkiError
from opennki.execute import abi, calls, tape_file, templates
from opennki.execute.executor import Executor, executor_of
from opennki.execute.parts import by_parts
from opennki.interpret.checks import Checks, tape_of
from opennki.interpret.prepared import Prepared
from opennki.ir.nodes import DoWhile, For, If, Instr, Kernel, Stmt
from opennki.ir.parse import from_text
from opennki.ir.print import to_text
from opennki.ir.verify import verify
from opennki.isa import dtypes, tensor_engine
from opennki.isa import target as targets
from opennki.isa.bodies import Translator
from opennki.isa.declare import ISA

REFERENCE = Checks.of({"masked": "error", **dict.fromkeys(("race", "repeated", "carried", "accumulate", "unwritten", "capacity"), "off")})


# ---- the interpreter with the library's functions ------------------------------------------------------------------------
def _function(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    if name not in abi.APPROXIMATE:
        return plain

    def function(*args: Any, out: Any = None) -> Any:
        wide = np.broadcast_arrays(*(np.asarray(a, np.float32) for a in args))
        flat = [np.ascontiguousarray(a).reshape(-1) for a in wide]
        made = library.call(library.best(), name, *flat).reshape(wide[0].shape)
        if out is None:
            return made
        out[...] = made
        return out

    return function


class _Product(np.ndarray):
    """An array whose products are the library's: their order of additions depends on the dtype that the operands have in memory (`of`)."""

    of = "float32"

    def __array_finalize__(self, parent: Any) -> None:
        self.of = getattr(parent, "of", "float32")

    def __matmul__(self, other: Any) -> Any:
        kinds = self.of, getattr(other, "of", "float32")
        arrays = [np.ascontiguousarray(np.asarray(x), np.float32) for x in (self.T, other)]
        (k, m), n = arrays[0].shape, arrays[1].shape[1]
        a, b = (dtypes.from_float32(x, of) for x, of in zip(arrays, kinds, strict=True))
        out = np.empty((m, n), np.float32)
        strides = [(x.itemsize * x.shape[1], x.itemsize) for x in (a, b, out)]
        what = abi.Matmul(k, m, n, *(abi.DTYPES[of] for of in kinds), *strides, 0, 0)
        lib = library.best()
        lib.nki_mm_scratch.restype = C.c_size_t
        held = np.empty(int(lib.nki_mm_scratch(C.byref(what))) + 64, np.uint8)
        scratch = (held.ctypes.data + 63) & ~63
        lib.nki_mm_run(C.byref(what), library.pointer(a), library.pointer(b), library.pointer(out), C.c_void_p(scratch))
        return out


def _reader(dtype: str) -> Callable[[Any], Any]:
    """`dtypes.reader`, whose arrays know what they were."""
    read = _plain_reader(dtype)

    def remembered(array: Any) -> Any:
        made = read(array).view(_Product)
        made.of = dtype
        return made

    return remembered if dtype in NARROW else read


_plain_reader = dtypes.reader
NARROW = ("bfloat16", "float16", "float8_e4m3", "float8_e4m3fn", "float8_e5m2")


def _float32(x: Any) -> Any:
    """`tensor_engine._float32`, which remembers what operands were that are read as they are (`raw`)."""
    made = np.asanyarray(x, np.float32).view(_Product)
    if not isinstance(x, _Product) and x.dtype.name in NARROW:
        made.of = x.dtype.name
    return made


_BODIES = Translator(np, {tensor_engine._float32: _float32}, _function)
_native: dict[str, Any] = {}


@contextmanager
def library_functions() -> Iterator[None]:
    """Plans made in here compute approximate functions and products by the native library."""
    before = dict(ISA)
    if not _native:
        _native.update({name: replace(decl, body=_BODIES.body(name)) for name, decl in before.items()})
    try:
        ISA.update(_native)
        dtypes.reader = _reader
        yield
    finally:
        ISA.update(before)
        dtypes.reader = _plain_reader


# ---- values --------------------------------------------------------------------------------------------------------------
_SPECIAL = (0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 1e-45, -1e-45, 1.1754944e-38, 3.4028235e38, 2.5, -3.5, 65504.0, 240.0, 448.0)


def values(shape: tuple[int, ...], dtype: str, style: str, seed: int) -> np.ndarray:
    """An array of a style: normal, small (whole numbers), bits (any), special (NaN, infinities, zeros, denormals), ramp, below N."""
    rng = np.random.default_rng(seed)
    storage = np.dtype(bool) if dtype == "bool" else dtypes.storage(dtype)
    if style.startswith("below"):
        return rng.integers(0, int(style.split()[1]), shape).astype(storage)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if style == "bits":
        raw = rng.integers(0, 256, (*shape, storage.itemsize), dtype=np.uint8).view(storage).reshape(shape)
        return dtypes.from_float32(raw, dtype) if dtype == "tfloat32" else raw
    if style == "ramp":
        made = np.arange(np.prod(shape, dtype=int)).reshape(shape) % 251 - 20.0
    elif style == "small":
        made = rng.integers(-4, 9, shape).astype(np.float64)
    else:
        made = rng.standard_normal(shape) * 3
        if style == "special":
            made = np.where(rng.random(shape) < 0.4, rng.choice(_SPECIAL, shape), made)
    with np.errstate(all="ignore"):
        if storage.kind in "iu":
            info = np.iinfo(storage)
            made = np.nan_to_num(made * (1 if style in ("small", "ramp") else 40), nan=0.0)
            return np.clip(made, float(info.min), float(info.max) - (128 if info.bits == 32 else 0)).astype(storage)
        return dtypes.from_float32(made.astype(np.float32), dtype).astype(storage)


def arrays_of(kernel: Kernel, styles: dict[str, str]) -> list[np.ndarray]:
    """The arguments of a kernel; each depends on its name alone, so that a smaller kernel has the same."""
    return [values(p.shape, p.dtype, styles[p.name], zlib.crc32(p.name.encode())) for p in kernel.params]


# ---- two runs --------------------------------------------------------------------------------------------------------------
class Undefined(Exception):
    """The kernel reads elements without a value: what comes out is not defined."""


class Refused(Exception):
    """The interpreter itself fails, without an error of its own: nothing to compare with."""


def _run(plan: Prepared, kernel: Kernel, arrays: list[np.ndarray]) -> list[np.ndarray]:
    places = [*kernel.outputs, *plan.extra]
    results = [np.zeros(o.shape, dtypes.storage(o.dtype)) for o in places]
    inputs = [np.ascontiguousarray(a.view(np.uint8) if a.dtype == bool else a) for a in copy.deepcopy(arrays)]
    plan.run(inputs, results, seed=3)
    return results


def _different(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    one, two = (np.ascontiguousarray(x).reshape(-1).view(np.uint8).reshape(x.size, x.itemsize) for x in (a, b))
    differ = (one != two).any(axis=1)
    if differ.any() and a.dtype.kind not in "iub":
        with np.errstate(all="ignore"):
            differ &= ~(np.isnan(a.astype(np.float32)) & np.isnan(b.astype(np.float32))).reshape(-1)
    return differ


def reread(executor: Executor | None) -> Executor | None:
    """Native code whose tape was written to a file and read again; None where it has no form in files."""
    if executor is None or executor.steps or executor.image.watches:
        return None
    kept = tape_file.read(tape_file.written(executor.image, executor.facts))
    return Executor(executor.tape, None, executor.lib, kept)


def from_afar(tape: Any) -> Executor | None:
    """Native code that takes all of HBM for larger than the caches: results go past them, and what comes next is asked for."""
    before, calls.FAR = calls.FAR, 0
    templates.forget()  # what it knows of forms is for tensors that are as large as they are
    try:
        return executor_of(tape)
    finally:
        calls.FAR = before
        templates.forget()


def difference(kernel: Kernel, arrays: list[np.ndarray], found: list[Any] | None = None) -> str:
    """How native code and the interpreter differ, in a line; empty where they agree. Raises Undefined, Refused."""
    library.best().nki_poison_from_now(1)  # what reads temporary memory that nobody wrote does not agree by chance
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with library_functions():
            reference = Prepared(kernel, REFERENCE)
            tape = tape_of(kernel, Checks.of("off"))
        wanted, error = None, ""
        try:
            wanted = _run(reference, kernel, arrays)
        except NkiError as exc:
            error = f"{type(exc).__name__}: {exc.message}"
            if any(word in error for word in ("never written", "masked", "undefined", "no value")):
                raise Undefined(error) from None
        except Exception as exc:
            raise Refused(f"{type(exc).__name__}: {exc}") from None
        executor: Executor | None = executor_of(tape)
        if tape.suspends:
            by_parts(tape)
            made = tape.part.made if tape.steps and tape.part is not None else []
        else:
            made = [executor] if executor is not None else []
        if not made:
            return ""
        if found is not None:
            found += made
        plan = Prepared(kernel, "off", tape, (lambda _: executor) if executor is not None else None)
        turns = [plan, plan]  # the second run has the memory of the first one
        others = [reread(executor), from_afar(tape) if executor is not None else None]  # and a tape from a file
        turns += [Prepared(kernel, "off", tape, lambda _, one=one: one) for one in others if one is not None]
        for turn, plan in enumerate(turns):
            try:
                got = _run(plan, kernel, arrays)
            except NkiError as exc:
                mine = f"{type(exc).__name__}: {exc.message}"
                return "" if mine == error else f"native code raises {mine!r}, the interpreter {error!r}"
            if wanted is None:
                return f"the interpreter raises {error!r}, native code nothing"
            for number, (a, b) in enumerate(zip(wanted, got, strict=True)):
                differ = _different(a, b)
                if differ.any():
                    at = int(np.argmax(differ))
                    where = tuple(map(int, np.unravel_index(at, a.shape)))
                    return (f"result {number} {a.dtype}{list(a.shape)}, run {turn + 1}: {int(differ.sum())} of {differ.size} differ, "
                            f"first {where}: interpreter {a.reshape(-1)[at]!r}, native {b.reshape(-1)[at]!r}")  # fmt: skip
    return ""


# ---- smaller ---------------------------------------------------------------------------------------------------------------
def shrunk(text: str, styles: dict[str, str], still: Callable[[str, dict[str, str]], bool], budget: int = 400) -> str:
    """The smallest kernel text found for which `still` holds: statements, loops, masks and operands are taken away one by one."""
    best, number, changed = text, 0, False
    while budget > 0:
        smaller = _smaller(best, number)
        if smaller is None:  # all parts have been tried; once more where that changed something
            if not changed:
                break
            number, changed = 0, False
            continue
        budget -= 1
        if smaller != best and _is_kernel(smaller) and still(smaller, styles):
            best, changed = smaller, True  # the parts after it have moved up
        else:
            number += 1
    return best


def _is_kernel(text: str) -> bool:
    try:
        kernel = from_text(text)
        verify(kernel, targets.resolve(kernel.target))
    except NkiError:
        return False
    return True


def _edits(body: list[Stmt]) -> Iterator[Callable[[], None]]:
    """What can be taken away, large parts first."""
    for i, stmt in enumerate(body):
        if isinstance(stmt, (Instr, For, If, DoWhile)):
            yield lambda i=i: body.__delitem__(i)
    for i, stmt in enumerate(body):
        if isinstance(stmt, If):
            yield lambda i=i, s=stmt: body.__setitem__(slice(i, i + 1), s.then)
            if stmt.orelse:
                yield lambda i=i, s=stmt: body.__setitem__(slice(i, i + 1), s.orelse)
                yield lambda s=stmt: s.orelse.clear()
        elif isinstance(stmt, DoWhile):
            yield lambda i=i, s=stmt: body.__setitem__(slice(i, i + 1), s.body)
        elif isinstance(stmt, For) and stmt.trips > 1:
            yield lambda s=stmt: setattr(s, "trips", 1)
        elif isinstance(stmt, Instr) and stmt.mask:
            yield lambda i=i, s=stmt: body.__setitem__(i, replace(s, mask=s.mask[1:]))
    for stmt in body:
        if isinstance(stmt, (For, DoWhile)):
            yield from _edits(stmt.body)
        elif isinstance(stmt, If):
            yield from _edits(stmt.then)
            yield from _edits(stmt.orelse)


def _all_edits(kernel: Kernel) -> list[Callable[[], None]]:
    out = list(_edits(kernel.body))
    for i in range(len(kernel.outputs)):
        out.append(lambda i=i: kernel.outputs.__delitem__(i))
    return out


def _smaller(text: str, number: int) -> str | None:
    """The text without its part `number`, None where there are fewer parts; the same text where it is no kernel then."""
    kernel = from_text(text)
    edits = _all_edits(kernel)
    if number >= len(edits):
        return None
    edits[number]()
    _unused(kernel)
    try:
        return to_text(kernel)
    except NkiError:
        return text


def _unused(kernel: Kernel) -> None:
    """Take away tensors that nothing uses."""
    from opennki.ir.nodes import Alloc, statements
    from opennki.ir.verify import accesses

    used = {o.alloc for o in kernel.outputs}
    for s in statements(kernel.body):
        if isinstance(s, Instr):
            used |= {a.alloc for a, _, _ in accesses(s)}
        elif isinstance(s, DoWhile) and s.cond is not None:
            used.add(s.cond.alloc)

    def clean(body: list[Stmt]) -> None:
        body[:] = [s for s in body if not (isinstance(s, Alloc) and s not in used)]
        for s in body:
            if isinstance(s, (For, DoWhile)):
                clean(s.body)
            elif isinstance(s, If):
                clean(s.then)
                clean(s.orelse)

    clean(kernel.body)
    kernel.params = [p for p in kernel.params if p in used]


# ---- one program of the fuzzer ---------------------------------------------------------------------------------------------
def program(seed: int, ops: list[str] | None = None) -> tuple[str, dict[str, str]]:
    """The text of the program of a seed, and the styles of its parameters."""
    made = Programs(seed, ops)
    return to_text(made.kernel()), made.styles


def check(text: str, styles: dict[str, str], found: list[Any] | None = None) -> str:
    """How the two differ on a program; a crash of either counts as a difference. Raises Undefined, Refused."""
    kernel = from_text(text)
    try:
        return difference(kernel, arrays_of(kernel, styles), found)
    except (Undefined, Refused):
        raise
    except Exception as exc:
        return f"native code fails: {type(exc).__name__}: {exc}"
