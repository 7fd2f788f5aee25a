"""Symbolic loops and conditionals against plain Python: the same statements in the same order, whatever the loop does."""
import random
import textwrap

import pytest

from opennki.ir.affine import Var
from opennki.ir.build import activate, current, deactivate
from opennki.ir.nodes import For, If, Instr, statements
from opennki.isa import target as targets
from opennki.lang.emit import call
from opennki.lang.index import Index
from opennki.lang.loops import affine_range, program_id, sequential_range
from opennki.lang.tensor import Tensor
from opennki.trace.tracer import Tracer, retrace

TRN1 = targets.resolve("trn1")
SIZE = 1 << 14


def trace(body, grid=()):
    """Trace a function of `log(tag, i, j)`; returns (statements, grid variables, number of attempts)."""
    attempts = []
    pids = tuple(Var(f"pid{a}", 0, n - 1, "pid") for a, n in enumerate(grid))

    def attempt(unrolled):
        attempts.append(unrolled)
        tracer = Tracer(TRN1, unrolled=unrolled)
        tracer.grid = pids
        token = activate(tracer)

        def run():
            tensor = Tensor.of(current().alloc((128, SIZE), "float32", "sbuf"))

            def log(tag, i=0, j=0):
                # the place that is written encodes what the statement saw
                call("memset", ((128, 1), float(tag), "float32"), {}, into=tensor[:, slot(i, j)])
            body(log)
        try:
            return tracer.run(run)[0]
        finally:
            deactivate(token)
    return retrace(attempt), pids, len(attempts)


def slot(i, j):
    expression = i * 64 + j + 4096
    return expression if isinstance(expression, Index) else int(expression)


def events(body, env):
    """Run the traced statements: the list of (tag, encoded place)."""
    out = []
    for stmt in body:
        if isinstance(stmt, Instr):
            access = stmt.results[0]
            out.append((stmt.operands[1], access.dims[1].base.evaluate(env)))
        elif isinstance(stmt, For):
            for i in range(stmt.trips):
                out += events(stmt.body, {**env, stmt.var: i})
        elif isinstance(stmt, If):
            out += events(stmt.then if stmt.pred.expr.evaluate(env) >= 0 else stmt.orelse, env)
    return out


def plain(body, monkey=None):
    """What plain Python does."""
    out = []
    body(lambda tag, i=0, j=0: out.append((float(tag), slot(int(i), int(j)))))
    return out


def check(source, grid=()):
    """Trace the program in `source` (a body with R for ranges) and compare with Python for every program id."""
    namespace = {}
    code = "def program(log, R, pid):\n" + textwrap.indent(textwrap.dedent(source), "    ")
    exec(compile(code, f"<program {hash(code)}>", "exec"), namespace)  # our own generated text
    program = namespace["program"]
    body, pids, attempts = trace(lambda log: program(log, affine_range, program_id(0) if grid else 0), grid)
    for number in range(grid[0] if grid else 1):
        env = {v: number for v in pids}
        assert events(body, env) == plain(lambda log, n=number: program(log, range, n)), f"program {number} of\n{source}"
    return body, attempts


def test_a_body_runs_once():
    body, attempts = check("for i in R(1000000):\n    log(1, i % 7, 0) if False else log(2)\n" .replace("1000000", "50"))
    assert attempts == 1
    assert sum(isinstance(s, Instr) for s in statements(body)) == 1


def test_million_trips_cost_nothing():
    def body(log):
        for i in sequential_range(1_000_000):
            log(1, 0, 0)
            if i == 999_999:
                log(2, 0, 0)
    statements_, _, attempts = trace(body)
    assert attempts == 1 and sum(isinstance(s, Instr) for s in statements(statements_)) == 2


@pytest.mark.parametrize("source", [
    "for i in R(8):\n    if i == 3:\n        log(1, i)\n    log(2, i)",
    "for i in R(8):\n    log(1 if i >= 4 else 2, i)",
    "for i in R(8):\n    if i > 2 and i < 5:\n        log(1, i)\n    else:\n        log(2, i)",
    "for i in R(8):\n    if i < 2 or i > 5:\n        log(1, i)",
    "for i in R(8):\n    if not i == 0:\n        log(1, i)",
    "for i in R(6):\n    for j in R(5):\n        if i * 2 >= j + 3:\n            log(1, i, j)\n"
    "        elif i == j:\n            log(2, i, j)\n        else:\n            log(3, i, j)",
    "for i in R(9):\n    if i % 2 == 0:\n        log(1, i // 2)\n    else:\n        log(2, i % 3)",
    "for i in R(4):\n    for j in R(i):\n        log(1, i, j)",
    "for i in R(4):\n    for j in R(4):\n        if j == 2:\n            break\n        log(1, i, j)",
    "for i in R(6):\n    if i == 4:\n        return\n    log(1, i)",
    "for i in R(6):\n    if i == 4:\n        continue\n    log(1, i)",
    "total = 0\nfor i in R(5):\n    total += i\n    log(1, total)",
    "seen = []\nfor i in R(5):\n    seen.append(i)\n    log(len(seen), i)",
    "table = [3, 1, 4, 1, 5]\nfor i in R(5):\n    log(table[i], i)",
    "first = True\nfor i in R(5):\n    if first:\n        log(1, i)\n        first = False\n    else:\n        log(2, i)",
    "for k, i in enumerate(R(4)):\n    log(k, i)",
    "for i, j in zip(R(4), R(4)):\n    log(1, i, j)",
    "for v in [i * 2 for i in R(4)]:\n    log(1, v)",
    "state = {'n': 0}\nfor i in R(3):\n    state['n'] += 2\n    log(state['n'], i)",
    "for i in R(3):\n    x = 0\n    for j in R(3):\n        x = x + 1\n        log(x, i, j)",
    "for i in R(10):\n    log(max(i, 4), min(i, 6)) if False else log(1, max(i, 4), min(i, 6))",
    "for i in reversed(range(3)):\n    for j in R(2, 8, 3):\n        log(1, i, j)",
])
def test_programs(source):
    check(source)


@pytest.mark.parametrize("source", [
    "if pid == 2:\n    log(1)\nelse:\n    log(2, pid)",
    "for i in R(4):\n    if i < pid:\n        log(1, i, pid)\n    else:\n        log(2, i)",
    "names = [5, 6, 7, 8]\nlog(names[pid], pid)",
    "for i in R(pid + 1):\n    log(1, i, pid)",
])
def test_program_ids(source):
    check(source, grid=(4,))


def expression(rng, names):
    kind = rng.randrange(6)
    if kind == 0 or not names:
        return str(rng.randrange(6))
    if kind == 1:
        return rng.choice(names)
    if kind == 2:
        return f"({expression(rng, names)} + {expression(rng, names)})"
    if kind == 3:
        return f"({expression(rng, names)} * {rng.randrange(1, 4)})"
    if kind == 4:
        return f"({expression(rng, names)} // {rng.randrange(1, 4)})"
    return f"({expression(rng, names)} % {rng.randrange(2, 5)})"


def condition(rng, names):
    kind = rng.randrange(8)
    if kind == 0:
        return f"({condition(rng, names)} and {condition(rng, names)})"
    if kind == 1:
        return f"({condition(rng, names)} or {condition(rng, names)})"
    if kind == 2:
        return f"(not {condition(rng, names)})"
    return f"({expression(rng, names)} {rng.choice(['<', '<=', '>', '>=', '==', '!='])} {expression(rng, names)})"


def block(rng, names, depth, loops):
    lines = []
    for _ in range(rng.randrange(1, 4)):
        kind = rng.randrange(7)
        if kind <= 1 or depth == 0:
            lines.append(f"log({rng.randrange(9)}, {expression(rng, names)} % 60, {expression(rng, names)} % 60)")
        elif kind <= 3 and loops < 3:
            name = f"i{len(names)}"
            inner = [*names, name]
            lines.append(f"for {name} in R({rng.randrange(1, 5)}):")
            lines += ["    " + line for line in block(rng, inner, depth - 1, loops + 1)]
        elif kind == 4:
            lines.append(f"c = c + {rng.randrange(1, 3)}")
            lines.append(f"log(7, c % 50, {expression(rng, names)} % 60)")
        else:
            lines.append(f"if {condition(rng, names)}:")
            lines += ["    " + line for line in block(rng, names, depth - 1, loops)]
            if loops and rng.random() < 0.15:
                lines.append("    " + rng.choice(["break", "continue"]))
            elif rng.random() < 0.5:
                lines.append("else:")
                lines += ["    " + line for line in block(rng, names, depth - 1, loops)]
    return lines


@pytest.mark.parametrize("seed", range(120))
def test_random_programs(seed):
    rng = random.Random(seed)
    source = "c = 0\n" + "\n".join(block(rng, [], 4, 0))
    try:
        compile(f"def f(log, R, pid):\n{textwrap.indent(source, '    ')}", "x", "exec")
    except SyntaxError:
        source = "c = 0\nlog(1)"
    check(source)


def many(log, a=0, b=0, c=0, d=0, e=0, f=0, g=0, h=0, k=0, m=0, n=0, o=0, p=0, q=0, r=0, s=0, i=0, j=0):
    """A helper with more keywords than Python passes in one instruction."""
    log(a + b + c + d + e + f + g + h + k + m + n + o + p + q + r + s, i, j)


def test_a_call_with_many_keywords_unrolls_nothing():
    def body(log):
        for i in affine_range(1000):
            for j in affine_range(1000):
                many(log=log, a=1, b=1, c=1, d=1, e=1, f=1, g=1, h=1, k=1, m=1, n=1, o=1, p=1, q=1, r=1, s=1, i=i % 3, j=j % 5)
    statements_, _, attempts = trace(body)
    assert attempts == 1 and sum(isinstance(s, Instr) for s in statements(statements_)) == 1


def test_long_displays_and_comprehensions_in_a_body_unroll_nothing():
    def body(log):
        for i in affine_range(1000):
            table = [i % 3, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30,
                     31, 32, 33, 34]
            squares = [[a * b for a in range(3)] for b in range(2)]
            log(len(table) + squares[1][2], table[0])
    statements_, _, attempts = trace(body)
    assert attempts == 1 and sum(isinstance(s, Instr) for s in statements(statements_)) == 1


@pytest.mark.parametrize("source", [
    "for i in R(4):\n    log(1, i)\nfor h in R(4):\n    for i in R(5):\n        log(2, i, h)",
    "x = 0\nfor i in R(4):\n    if i > 1:\n        x = i\n    else:\n        x = 2\n    log(1, x)",
    "x = 0\nfor h in R(3):\n    for i in R(4):\n        x = i + 1\n        if x > h:\n            continue\n        log(1, x, h)",
])
def test_a_variable_that_each_iteration_sets_itself_carries_nothing(source):
    _, attempts = check(source)
    assert attempts == 1


@pytest.mark.parametrize("source", [
    "x = 0\nfor h in R(4):\n    for i in R(3):\n        if i > h:\n            x = 7\n    log(1, x, h)",
    "x = 0\nfor i in R(4):\n    try:\n        int('a')\n        x = i\n    except ValueError:\n        pass\n    x = x + 1\n    log(1, x)",
    "x = 0\nfor i in R(4):\n    if i == 2:\n        x = 5\n    log(1, x, i)",
    "x = 0\nfor i in R(4):\n    try:\n        x = i\n        log(1, x)\n    except ValueError:\n        log(2, x)\n    log(3, x)",
])
def test_a_variable_that_one_path_leaves_alone_is_carried(source):
    check(source)


@pytest.mark.parametrize(("condition", "mask", "kept"), [
    ("128 * i + 127 >= 512 * h", "128 * i >= 512 * h", 0),  # the same on integers
    ("i >= h", "i + 3 >= h", 0),
    ("i > h", "i >= h", 0),
    ("i >= h", "i > h", 1),
    ("i >= h", "h >= i", 1),
    ("not i > h", "h >= i", 0),
    ("128 * i + 126 >= 512 * h", "128 * i >= 512 * h", 0),
    ("128 * i + 128 >= 512 * h", "128 * i >= 512 * h", 1),
])
def test_a_mask_that_the_path_decides_is_dropped(condition, mask, kept):
    source = f"def body(put):\n    for h in R(4):\n        for i in R(16):\n            if {condition}:\n                put({mask})"
    namespace = {"R": affine_range}
    exec(source, namespace)
    tracer = Tracer(TRN1)
    token = activate(tracer)
    try:
        nodes, _ = tracer.run(lambda: namespace["body"](lambda m: call("memset", ((128, 4), 1.0, "float32"), {"mask": m})))
    finally:
        deactivate(token)
    found = [s for s in statements(nodes) if isinstance(s, Instr)]
    assert len(found) == 1 and len(found[0].mask) == kept
    # and the intervals agree with every value of the indices
    holds = [eval(mask, {"i": i, "h": h}) for h in range(4) for i in range(16) if eval(condition, {"i": i, "h": h})]
    assert kept or all(holds)
