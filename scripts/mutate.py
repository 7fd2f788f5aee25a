"""Mutation testing of the instruction declarations: change one thing in a body, and its test must fail.

    python scripts/mutate.py [--module NAME ...] [--limit N] [--seed S] [--jobs J] [--timeout 60] [--list]

Mutated are the bodies of the declarations in src/opennki/isa, the functions of the same module that they call, the shared numeric
functions (reduce, rng, vector_rules), and the functions, identities and domains of the table of scalar functions. A mutant flips or drops
one operator, replaces a constant, negates a condition, or swaps a function for its counterpart (minimum for maximum). Checks, result rules,
messages and costs are not mutated here; tests/errors holds those.

Every mutant runs `pytest -x` on the test files of its module, in a copy of the tree, in a process forked after the slow imports. A failure
kills the mutant, and so does the time limit. Survivors are printed: each is a gap in the tests, or equivalent to the original, or nearly so
(a constant of a block size). The exit status is 1 if a module's tests fail without a mutant.
"""
from __future__ import annotations

import argparse
import ast
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ISA = "src/opennki/isa"
SHARED = ("reduce", "rng", "vector_rules")
# modules that have no test file of their own name
TESTS = {"vector_rules": ("vector_elementwise", "vector_reduce", "vector_topk")}

BINARY: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}
COMPARE: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.GtE, ast.LtE), ast.LtE: (ast.Gt, ast.Lt), ast.Gt: (ast.LtE, ast.GtE), ast.GtE: (ast.Lt, ast.Gt), ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,), ast.In: (ast.NotIn,), ast.NotIn: (ast.In,),
}
_PAIRS = ("min max", "minimum maximum", "fmin fmax", "argmin argmax", "any all", "floor ceil", "zeros ones", "zeros_like ones_like",
          "add subtract", "multiply divide", "logical_and logical_or", "bitwise_and bitwise_or", "greater less_equal", "less greater_equal",
          "equal not_equal", "left_shift right_shift", "sin cos", "sqrt square", "exp log", "isnan isinf", "cumsum cumprod", "sum prod",
          "remainder fmod", "tanh arctan", "abs negative", "trunc floor", "sign abs", "var std", "log1p log")
SWAPS: dict[str, str] = {}
for _a, _b in (pair.split() for pair in _PAIRS):
    SWAPS.setdefault(_a, _b)
    SWAPS.setdefault(_b, _a)


@dataclass(frozen=True)
class Mutant:
    """Replace source[start:end] (bytes of the file) by `new`."""

    module: str
    function: str
    line: int
    start: int
    end: int
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.module}.py:{self.line} {self.function}: {self.old} -> {self.new}"


class Source:
    """A module of src/opennki/isa and what of it is mutated."""

    def __init__(self, module: str, root: Path = ROOT) -> None:
        self.module = module
        self.data = (root / ISA / f"{module}.py").read_bytes()
        self.tree = ast.parse(self.data)
        self.offsets = [0]
        for line in self.data.splitlines(keepends=True):
            self.offsets.append(self.offsets[-1] + len(line))
        self.functions = {f.name: f for f in self.tree.body if isinstance(f, ast.FunctionDef)}
        self.declared = [f for f in self.functions.values() if any("instruction" in ast.dump(d) for d in f.decorator_list)]

    def reached(self, roots: list[ast.AST]) -> list[ast.FunctionDef]:
        """Functions of the module that these nodes name, and those that these name."""
        found: dict[str, ast.FunctionDef] = {}
        todo = list(roots)
        while todo:
            for node in ast.walk(todo.pop()):
                if isinstance(node, ast.Name) and node.id in self.functions and node.id not in found:
                    found[node.id] = self.functions[node.id]
                    todo += self.functions[node.id].body
        return list(found.values())

    def names(self) -> set[str]:
        """Every name in the bodies of the declarations and in what they call here."""
        bodies: list[ast.AST] = [s for f in self.declared for s in f.body]
        bodies += [s for f in self.reached(bodies) for s in f.body]
        nodes = [n for body in bodies for n in ast.walk(body)]
        return {n.id for n in nodes if isinstance(n, ast.Name)} | {n.attr for n in nodes if isinstance(n, ast.Attribute)}

    def places(self, used: set[str]) -> Iterator[tuple[str, ast.AST]]:
        """(function, statement or expression) of everything that is mutated."""
        if self.module == "scalar":
            table: list[ast.AST] = [s.iter for s in self.tree.body if isinstance(s, ast.For)]
            table += [s.value for s in self.tree.body if isinstance(s, ast.Expr) and isinstance(s.value, ast.Call)]
            yield from (("table", node) for node in table)
            functions = self.reached(table)
        elif self.module in SHARED:
            functions = self.reached([self.functions[n] for n in self.functions if n in used])
            functions += [self.functions[n] for n in self.functions if n in used and self.functions[n] not in functions]
        else:
            functions = self.declared + self.reached([s for f in self.declared for s in f.body])
        for function in functions:
            yield from ((function.name, statement) for statement in function.body)

    def mutants(self, used: set[str]) -> list[Mutant]:
        """All mutants of the module, in the order of the source."""
        found = {}
        for function, place in self.places(used):
            for node, new in mutations(place):
                start, end = (self.offsets[a - 1] + b for a, b in ((node.lineno, node.col_offset),
                                                                   (node.end_lineno or 0, node.end_col_offset or 0)))
                old = self.data[start:end].decode()
                mutant = Mutant(self.module, function, node.lineno, start, end, " ".join(old.split()), f"({new})")
                found[start, end, new] = mutant
        return [found[key] for key in sorted(found)]


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes that compute: no messages, annotations, docstrings or f-strings."""
    if isinstance(node, (ast.Raise, ast.JoinedStr)) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "args") and not isinstance(node, ast.Call):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from walk(child)


def mutations(place: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """(node, text in its place) of every change within a statement or expression."""
    for node in walk(place):
        if isinstance(node, ast.BinOp):
            if type(node.op) in BINARY:
                yield node, ast.unparse(ast.BinOp(node.left, BINARY[type(node.op)](), node.right))
            if not isinstance(node.op, ast.MatMult):
                yield node, ast.unparse(node.left)
                yield node, ast.unparse(node.right)
        elif isinstance(node, ast.AugAssign) and type(node.op) in BINARY:
            # the value x of `a += x` becomes one that undoes or omits it
            neutral = {ast.Add: "0 * ({})", ast.Sub: "-({})", ast.Mult: "1 + 0 * ({})", ast.Div: "1 + 0 * ({})"}.get(type(node.op))
            if neutral is not None:
                yield node.value, neutral.format(ast.unparse(node.value))
        elif isinstance(node, ast.Compare):
            for i, op in enumerate(node.ops):
                for other in COMPARE.get(type(op), ()):
                    yield node, ast.unparse(ast.Compare(node.left, [*node.ops[:i], other(), *node.ops[i + 1:]], node.comparators))
        elif isinstance(node, ast.BoolOp):
            yield node, ast.unparse(ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values))
            for i in range(len(node.values)):
                rest = node.values[:i] + node.values[i + 1:]
                yield node, ast.unparse(rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest))
        elif isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.UAdd):
            yield node, ast.unparse(node.operand)
        elif isinstance(node, (ast.If, ast.IfExp, ast.While)) and not isinstance(node.test, ast.Compare):
            yield node.test, f"not ({ast.unparse(node.test)})"
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
            value = node.value
            yield node, repr(not value if isinstance(value, bool) else value + 1)
        elif isinstance(node, ast.Attribute) and node.attr in SWAPS:
            yield node, ast.unparse(ast.Attribute(node.value, SWAPS[node.attr]))
        elif isinstance(node, ast.Name) and node.id in ("min", "max", "any", "all"):
            yield node, SWAPS[node.id]


def sample(mutants: list[Mutant], limit: int, seed: int) -> list[Mutant]:
    """`limit` of the mutants, evenly spaced from a start that the seed gives."""
    if not limit or limit >= len(mutants):
        return mutants
    step = len(mutants) / limit
    first = random.Random(seed).random() * step
    return [mutants[int(first + i * step)] for i in range(limit)]


def tests_of(module: str) -> list[str]:
    """Test files of a module."""
    return [f"tests/isa/test_{name}.py" for name in TESTS.get(module, (module,))]


def preload() -> None:
    """Import what is slow and not mutated, once, before the forks."""
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
    import hypothesis  # noqa: F401
    import ml_dtypes  # noqa: F401
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import scipy.special  # noqa: F401
    with contextlib.suppress(ImportError):
        import torch  # noqa: F401


def copy_tree(to: Path) -> None:
    """What the tests need, without caches."""
    ignore = shutil.ignore_patterns("__pycache__", ".*")
    for name in ("src", "tests", "benchmarks", "examples"):
        shutil.copytree(ROOT / name, to / name, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", to)


def child(tree: Path, files: list[str], log: Path, write_bytecode: bool) -> None:
    """In the fork: run pytest on the tree and leave with its status."""
    status = 70
    try:
        os.setpgid(0, 0)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(tree)
        sys.dont_write_bytecode = not write_bytecode
        sys.path[:0] = [str(tree / "src"), str(tree)]
        import opennki
        if not str(opennki.__file__).startswith(str(tree)):
            raise RuntimeError(f"{opennki.__file__} is not of the copy")
        import pytest
        status = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=line", "--no-header", *files]))
    except BaseException as exc:  # an import of the mutant may raise anything
        print(f"{type(exc).__name__}: {exc}")
    finally:
        sys.stdout.flush()
        os._exit(status)


class Run:
    """A run of tests in a copy of the tree, with a mutant or (None) without."""

    def __init__(self, tree: Path, module: str, mutant: Mutant | None, timeout: float) -> None:
        self.tree, self.mutant = tree, mutant
        self.path = tree / ISA / f"{module}.py"
        self.original = self.path.read_bytes()
        if mutant is not None:
            # bytecode goes by time and size of the source, which a mutant may share with the original
            for cached in self.path.parent.glob(f"__pycache__/{module}.*"):
                cached.unlink()
            self.path.write_bytes(self.original[:mutant.start] + mutant.new.encode() + self.original[mutant.end:])
        self.deadline = time.monotonic() + timeout
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            child(tree, tests_of(module), tree / "log.txt", write_bytecode=mutant is None)

    def poll(self) -> int | None:
        """Exit status of pytest, -9 after the time limit, None while it runs; restores the source at the end."""
        done, status = os.waitpid(self.pid, os.WNOHANG)
        if not done:
            if time.monotonic() < self.deadline:
                return None
            os.killpg(self.pid, signal.SIGKILL)
            _, status = os.waitpid(self.pid, 0)
        self.path.write_bytes(self.original)
        return os.waitstatus_to_exitcode(status)

    def output(self) -> str:
        """The end of what pytest printed."""
        return (self.tree / "log.txt").read_text(errors="replace")[-1000:]


def baseline(trees: list[Path], module: str, timeout: float) -> str:
    """Run the tests in each tree without a mutant (and leave its bytecode there); returns the output of a failure."""
    for tree in trees:
        run = Run(tree, module, None, timeout)
        while (status := run.poll()) is None:
            time.sleep(0.02)
        if status != 0:
            return run.output()
    return ""


def survivors(trees: list[Path], mutants: list[Mutant], timeout: float) -> tuple[list[Mutant], list[Mutant]]:
    """The mutants that the tests do not kill, and those that only the time limit kills; as many at a time as there are trees."""
    found, endless, running, todo = [], [], [], list(reversed(mutants))
    free = list(trees)
    while todo or running:
        while todo and free:
            mutant = todo.pop()
            running.append(Run(free.pop(), mutant.module, mutant, timeout))
        time.sleep(0.02)
        for run in list(running):
            status = run.poll()
            if status is not None:
                running.remove(run)
                free.append(run.tree)
                if status in (0, -signal.SIGKILL):
                    (endless if status else found).append(run.mutant)
    return sorted(found, key=mutants.index), sorted(endless, key=mutants.index)


def main() -> int:
    """Make the mutants, run the tests on each, and print the score."""
    modules = sorted(p.stem for p in (ROOT / ISA).glob("*.py"))
    sources = {m: Source(m) for m in modules}
    mutated = [m for m in modules if sources[m].declared or m == "scalar" or m in SHARED]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--module", action="append", choices=mutated, help="only this module (may be repeated)")
    parser.add_argument("--limit", type=int, default=0, help="mutants per module, evenly spaced (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="where the sample starts")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=60)
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    args = parser.parse_args()

    used = set().union(*(s.names() for s in sources.values()))
    plan = {m: sample(sources[m].mutants(used), args.limit, args.seed) for m in args.module or mutated}
    if args.list:
        print("\n".join(str(mutant) for found in plan.values() for mutant in found))
        return 0
    preload()
    with tempfile.TemporaryDirectory(prefix="opennki-mutants-") as folder:
        trees = [Path(folder) / str(job) for job in range(args.jobs)]
        for tree in trees:
            copy_tree(tree)
        killed = total = 0
        failed = []
        for module, mutants in plan.items():
            start = time.monotonic()
            output = baseline(trees, module, 10 * args.timeout)
            if output:
                print(f"{module}: the tests fail without a mutant\n{output}")
                failed.append(module)
                continue
            alive, endless = survivors(trees, mutants, args.timeout)
            killed, total = killed + len(mutants) - len(alive), total + len(mutants)
            print(f"{module:22} {len(mutants) - len(alive):4} of {len(mutants):4} killed, sampled from "
                  f"{len(sources[module].mutants(used))} ({time.monotonic() - start:.0f} s)", flush=True)
            for mutant in alive:
                print(f"    survived: {mutant}", flush=True)
            for mutant in endless:
                print(f"    killed by the time limit: {mutant}", flush=True)
    if total:
        print(f"mutation score {100 * killed / total:.1f} %: {killed} of {total} mutants killed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
