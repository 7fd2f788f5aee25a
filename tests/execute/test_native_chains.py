"""Operations of an elementwise program that run as one chain give what they give one after the other: NumPy's bits."""

from __future__ import annotations

import random

import numpy as np
import pytest

from opennki.execute import abi
from opennki.execute.assemble import elementwise, uop
from opennki.isa import dtypes
from opennki.isa.dtype_names import STORAGE
from opennki.isa.reduce import reduce_free
from tests.execute import native

FUNCTIONS = {
    "exp": None, "square": lambda v, w: v * v, "itself": lambda v, w: v * v, "negative": lambda v, w: -v,
    "add": lambda v, w: v + w, "times": lambda v, w: v * w, "less": lambda v, w: v - w, "from": lambda v, w: w - v,
    "larger": lambda v, w: np.where((v > w) | np.isnan(v), v, w),
}  # fmt: skip
NAMES = {"times": "multiply", "itself": "multiply", "less": "subtract", "from": "subtract", "larger": "maximum"}
CHAINS = [
    "exp sum", "exp sum write", "exp sum narrow", "add_row exp", "add_row exp sum", "add_row exp sum write", "add_row exp sum narrow",
    "less_row exp", "less_row exp sum", "less_row exp sum write", "less_row exp sum narrow", "times_row add_row exp sum write",
    "times_row add_row exp sum narrow", "times_row largest", "times_row largest keep", "times_row largest write", "add largest write",
    "square sum", "itself sum", "less_row square sum", "less_row write square sum", "less_row keep square sum", "less square sum",
    "add square sum", "add write square sum", "add sum write", "times sum", "less_row times_row write", "less_row times write",
    "times_row times write", "times_row add_row write", "times_row add write", "times add write", "times add_row write",
    "times from write", "times_row from_row write", "add_row exp sum largest write", "times_row largest write narrow sum",
    "chosen largest", "chosen largest write", "times_row chosen write", "times_row chosen largest keep", "times_row chosen largest write",
    "chosen chosen largest", "exp chosen sum", "chosen exp sum", "chosen add_row exp sum narrow", "chosen less_row exp sum write",
]  # fmt: skip
PAYLOAD = np.uint32(0xFFE12345).view(np.float32)  # a NaN with more bits than bfloat16 keeps
SIZES = [(1, 64), (3, 1), (5, 40), (9, 128), (4, 300), (2, 1024), (2, 2500), (40, 33)]


FORMS = {level: (level, 1) for level in native.LEVELS}
if "v4" in FORMS:
    FORMS["v4 without instructions for bfloat16"] = ("v4", 0)


@pytest.fixture(params=FORMS.values(), ids=FORMS.keys())
def lib(request):
    level, wanted = request.param
    made = native.at_level(level)
    made.nki_tiles_use(wanted)
    yield made
    made.nki_tiles_use(1)


def numbers(draw, shape):
    rng = np.random.default_rng(draw.randint(0, 1 << 30))
    x = (rng.standard_normal(shape) * draw.choice([2, 2, 2, 40])).astype(np.float32)
    x[rng.random(shape) < 0.05] = draw.choice([0.0, -0.0, 1.0])
    if draw.random() < 0.3:
        x.reshape(-1)[rng.integers(0, x.size)] = draw.choice([np.nan, PAYLOAD, np.inf, -np.inf, -1e30, 1e-40])
    return x


EDGES = [
    87.0, -87.0, 87.00001, -87.00001, -87.4, -88.0, 88.7, 88.8, 89.0, 89.1, -103.9, -104.0, -104.1, -3e38, 3e38,
    np.inf, -np.inf, np.nan, PAYLOAD,
]  # fmt: skip


def check(lib, steps, rows, n, draw, edges=False):
    """A program of these steps on random numbers, some of them EDGES if that is asked for, against NumPy."""
    pad = draw.choice([0, 0, 3])

    def tile(dtype="float32"):
        return np.zeros((rows, n + pad), STORAGE[dtype])[:, :n]

    tiles, wanted, first, row_phase, last, preds, bases = [], [], [], [], [], [], []
    register = iter(range(64))

    def operand(array, dtype="float32"):
        tiles.append((np.broadcast_to(array, (rows, n)), dtype))
        return len(tiles) - 1

    def stored(phase, value, want, dtype="float32", row=False):
        out = np.zeros((rows, 1), np.float32) if row else tile(dtype)
        phase.append(uop(abi.STORE, operand(out, dtype), value))
        wanted.append((out, want, dtype))

    x = tile()
    x[...] = numbers(draw, x.shape)
    for _ in range(draw.randint(0, 12) if edges else 0):
        x[draw.randrange(rows), draw.randrange(n)] = draw.choice(EDGES)
    here = next(register)
    first.append(uop(abi.LOAD, here, operand(x)))
    value, kept = x.copy(), 0
    with np.errstate(all="ignore"):
        for step in steps:
            name, _, row = step.partition("_")
            if name in ("sum", "largest"):
                made = next(register)
                fn = "add" if name == "sum" else "maximum"
                first.append(uop(abi.FOLD, made, here, fn=fn))
                stored(row_phase, made, reduce_free(value, fn, 1, keepdims=True), row=True)
            elif name in ("write", "narrow"):
                stored(first, here, value, "bfloat16" if name == "narrow" else "float32")
            elif name == "chosen":
                truth, other, made = next(register), next(register), next(register)
                down, along = draw.choice([(1, -1), (0, -1), (-2, 1), (0, 3), (1, 0)])
                preds.append((down, along))
                bases.append(draw.randint(-2 * n, 2 * n))
                fill = np.float32(draw.choice([-3.0, -3.0e38]))
                first += [uop(abi.PRED, truth, len(preds) - 1), uop(abi.CONST, other, imm=float(fill))]
                first.append(uop(abi.SELECT, made, here, other, truth))
                holds = bases[-1] + down * np.arange(rows)[:, None] + along * np.arange(n) >= 0
                value, here = np.where(holds, value, fill), made
            elif name == "keep":
                if any(op.code == abi.KEEP and op.a == here for op in first):
                    continue  # once is what lowering asks for
                first.append(uop(abi.KEEP, kept, here))
                again = next(register)
                last.append(uop(abi.KEPT, again, kept))
                stored(last, again, value)
                kept += 1
            else:
                other, w = -1, None
                if name in ("add", "times", "less", "from", "larger"):
                    w = tile() if not row else np.zeros((rows, 1), np.float32)
                    w[...] = numbers(draw, w.shape)
                    other = next(register)
                    first.append(uop(abi.LOAD, other, operand(w)))
                made = next(register)
                if name == "itself":
                    other = here
                a, b = (other, here) if name == "from" else (here, other)
                first.append(uop(abi.FUNC, made, a, b, fn=NAMES.get(name, name)))
                value = native.call(lib, "exp", np.ascontiguousarray(value)) if name == "exp" else FUNCTIONS[name](value, w)
                here = made
        stored(first, here, value)
    # stores and kept rows come after everything of their phase, as lowering has it
    first.sort(key=lambda op: op.code in (abi.STORE, abi.KEEP))
    phases = [(False, first), (True, row_phase), (False, last)]
    program = elementwise(1, 1, (rows, n), phases, [(a.strides, d) for a, d in tiles], preds)
    program.run(lib, [a.ctypes.data for a, _ in tiles], bases)
    for out, want, dtype in wanted:
        native.assert_same(out, dtypes.from_float32(want, dtype) if dtype != "float32" else want, (steps, rows, n, pad))


@pytest.mark.parametrize("chain", CHAINS)
def test_chains(lib, chain):
    for number, (rows, n) in enumerate(SIZES):
        check(lib, chain.split(), rows, n, random.Random(number))


@pytest.mark.parametrize("chain", ["exp sum narrow", "add_row exp sum narrow"])
def test_exp_of_what_is_not_plain(lib, chain):
    """Numbers around the bounds between which exp is normal, in groups that are and are not all like that."""
    for seed in range(60):
        check(lib, chain.split(), 8, 192, random.Random(1000 + seed), edges=True)


def test_random_chains(lib):
    names = [*FUNCTIONS, "add_row", "times_row", "less_row", "from_row", "sum", "sum", "largest", "write", "narrow", "keep", "chosen"]
    for seed in range(250):
        draw = random.Random(seed)
        steps = [draw.choice(names) for _ in range(draw.randint(2, 6))]
        check(lib, steps, *draw.choice(SIZES), draw)
