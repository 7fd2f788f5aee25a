"""Instruction streams: what each engine and DMA queue runs, with waits and signals. Text and JSON forms.

A kernel's statements have numbers in program order (`numbered`). A stream holds the statements of one queue in program order, with the
loops and branches around them. A semaphore is a counter that one stream signals and another waits for: `Wait` goes on when it has reached
a count, which is affine in the indices of the loops around it and in the counters of do-while loops (`w<number>`: how often the loop's
body has begun before, since the kernel started). A stream finishes an instruction before it signals and before it begins the next one.
"""
from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from opennki.errors import NkiParseError
from opennki.ir.nodes import Alloc, Kernel, Stmt, statements

VERSION = 1
MAX_STREAMS = 256
MAX_NODES = 4_000_000
MAX_DEPTH = 64
MAX_NUMBER = 1 << 53
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,31}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Count:
    """const + sum(coefficient * index)."""

    const: int
    terms: tuple[tuple[str, int], ...] = ()

    def value(self, env: dict[str, int]) -> int:
        """The number, for values of the indices."""
        total = self.const
        for name, c in self.terms:
            total += c * env[name]
        return total

    def __str__(self) -> str:
        text = " + ".join([f"{c}*{n}" if c != 1 else n for n, c in self.terms])
        if not text:
            return str(self.const)
        return text if not self.const else f"{text} + {self.const}" if self.const > 0 else f"{text} - {-self.const}"


@dataclass(frozen=True, slots=True)
class Issue:
    """Run the instruction with this number."""

    number: int


@dataclass(frozen=True, slots=True)
class Clear:
    """Start the accumulation of a PSUM tensor from zero: tensor `tensor` is made anew. On the device this is the start flag of the first
    matmul of a group."""

    tensor: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until a semaphore has reached a count; a count of 0 or less is reached from the start."""

    semaphore: int
    count: Count


@dataclass(frozen=True, slots=True)
class Signal:
    """Add to a semaphore."""

    semaphore: int
    amount: int = 1


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop: `index` counts 0 .. trips - 1."""

    number: int
    index: str
    trips: int
    body: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Branch:
    """A branch on the predicate of the statement with this number."""

    number: int
    then: tuple[Node, ...]
    orelse: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class Repeat:
    """A do-while loop: the body, which ends with its test and signals after that; then again if the test was true. `index` is its
    counter."""

    number: int
    index: str
    body: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Test:
    """Read the condition of the do-while loop with this number. Signals may follow it in the body: that the condition has been read."""

    number: int


Node = Issue | Clear | Wait | Signal | Loop | Branch | Repeat | Test


@dataclass(frozen=True, slots=True)
class Semaphore:
    """A counter from one stream to another. `body`: number of the statement in whose body it is used, -1 for the kernel's own."""

    number: int
    producer: str
    consumer: str
    body: int = -1


@dataclass(frozen=True, slots=True)
class Stream:
    """The instructions of an engine, or of a DMA queue (engine dma)."""

    name: str
    engine: str
    body: tuple[Node, ...]

    def nodes(self) -> Iterator[Node]:
        """All nodes, outer before inner."""
        yield from _nodes(self.body)


@dataclass(frozen=True, slots=True)
class Streams:
    """The streams of one program instance of a kernel, and their semaphores."""

    kernel: str
    target: str
    streams: tuple[Stream, ...]
    semaphores: tuple[Semaphore, ...]

    def without(self, semaphore: int) -> Streams:
        """The same streams without the waits and signals of a semaphore."""
        return Streams(self.kernel, self.target, tuple(Stream(s.name, s.engine, _without(s.body, semaphore)) for s in self.streams),
                       tuple(s for s in self.semaphores if s.number != semaphore))

    def text(self) -> str:
        """The streams as text, one node a line."""
        lines = [f"streams({self.kernel!r}, target={self.target!r})"]
        lines += [f"semaphore s{s.number}: {s.producer} -> {s.consumer}" + (f" in {s.body}" if s.body >= 0 else "")
                  for s in self.semaphores]
        for stream in self.streams:
            lines.append(f"{stream.name}:")
            lines += _lines(stream.body, 1)
        return "\n".join(lines) + "\n"

    def to_json(self) -> dict[str, Any]:
        """A record of numbers, texts and lists."""
        return {"version": VERSION, "kernel": self.kernel, "target": self.target,
                "semaphores": [[s.number, s.producer, s.consumer, s.body] for s in self.semaphores],
                "streams": [{"name": s.name, "engine": s.engine, "body": [_record(n) for n in s.body]} for s in self.streams]}

    @staticmethod
    def from_json(data: Any) -> Streams:
        """Read what `to_json` gives. Raises NkiParseError for anything else: sizes and nesting are bounded, indices in scope, semaphores
        declared, and each is signalled by its producer and waited for by its consumer only."""
        return _Reader().streams(data)


def numbered(kernel: Kernel) -> dict[int, Stmt]:
    """The statements of a kernel, except for allocations, by their number in program order."""
    return dict(enumerate(s for s in statements(kernel.body) if not isinstance(s, Alloc)))


def _nodes(body: tuple[Node, ...]) -> Iterator[Node]:
    for node in body:
        yield node
        if isinstance(node, (Loop, Repeat)):
            yield from _nodes(node.body)
        elif isinstance(node, Branch):
            yield from _nodes(node.then)
            yield from _nodes(node.orelse)


def _without(body: tuple[Node, ...], semaphore: int) -> tuple[Node, ...]:
    out: list[Node] = []
    for node in body:
        if isinstance(node, (Wait, Signal)) and node.semaphore == semaphore:
            continue
        if isinstance(node, Loop):
            node = Loop(node.number, node.index, node.trips, _without(node.body, semaphore))
        elif isinstance(node, Repeat):
            node = Repeat(node.number, node.index, _without(node.body, semaphore))
        elif isinstance(node, Branch):
            node = Branch(node.number, _without(node.then, semaphore), _without(node.orelse, semaphore))
        out.append(node)
    return tuple(out)


def _lines(body: tuple[Node, ...], depth: int) -> Iterator[str]:
    pad = "    " * depth
    for node in body:
        if isinstance(node, Issue):
            yield f"{pad}issue {node.number}"
        elif isinstance(node, Clear):
            yield f"{pad}clear t{node.tensor}"
        elif isinstance(node, Test):
            yield f"{pad}test {node.number}"
        elif isinstance(node, Wait):
            yield f"{pad}wait s{node.semaphore} >= {node.count}"
        elif isinstance(node, Signal):
            yield f"{pad}signal s{node.semaphore}" + (f" + {node.amount}" if node.amount != 1 else "")
        elif isinstance(node, Loop):
            yield f"{pad}loop {node.number}: {node.index} < {node.trips}"
            yield from _lines(node.body, depth + 1)
        elif isinstance(node, Repeat):
            yield f"{pad}repeat {node.number}: {node.index}"
            yield from _lines(node.body, depth + 1)
        else:
            yield f"{pad}branch {node.number}:"
            yield from _lines(node.then, depth + 1)
            if node.orelse:
                yield f"{pad}else:"
                yield from _lines(node.orelse, depth + 1)


def _record(node: Node) -> list[Any]:
    if isinstance(node, Issue):
        return ["issue", node.number]
    if isinstance(node, Clear):
        return ["clear", node.tensor]
    if isinstance(node, Test):
        return ["test", node.number]
    if isinstance(node, Wait):
        return ["wait", node.semaphore, node.count.const, [[n, c] for n, c in node.count.terms]]
    if isinstance(node, Signal):
        return ["signal", node.semaphore, node.amount]
    if isinstance(node, Loop):
        return ["loop", node.number, node.index, node.trips, [_record(n) for n in node.body]]
    if isinstance(node, Repeat):
        return ["repeat", node.number, node.index, [_record(n) for n in node.body]]
    return ["branch", node.number, [_record(n) for n in node.then], [_record(n) for n in node.orelse]]


class _Reader:
    """Reads hostile input."""

    def __init__(self) -> None:
        self.nodes = 0
        self.semaphores: dict[int, Semaphore] = {}
        self.stream = ""

    def fail(self, what: str) -> NkiParseError:
        return NkiParseError(f"instruction streams: {what}", rule="as opennki.passes.program.Streams.to_json writes them")

    def streams(self, data: Any) -> Streams:
        if not isinstance(data, dict) or set(data) != {"version", "kernel", "target", "semaphores", "streams"}:
            raise self.fail("not a record of streams")
        if data["version"] != VERSION or isinstance(data["version"], bool):
            raise self.fail(f"version {str(data['version'])[:20]}, this is version {VERSION}")
        names = [self.text(data["kernel"], 1024), self.text(data["target"], 64)]
        rows = self.items(data["semaphores"], MAX_NODES)
        for row in rows:
            number, producer, consumer, body = self.row(row, 4)
            made = Semaphore(self.number(number), self.name(producer), self.name(consumer), self.number(body, -1))
            if made.number in self.semaphores or made.producer == made.consumer:
                raise self.fail(f"semaphore {made.number} is declared twice, or from a stream to itself")
            self.semaphores[made.number] = made
        found: list[Stream] = []
        for item in self.items(data["streams"], MAX_STREAMS):
            if not isinstance(item, dict) or set(item) != {"name", "engine", "body"}:
                raise self.fail("a stream has a name, an engine and a body")
            self.stream = self.name(item["name"])
            if any(s.name == self.stream for s in found):
                raise self.fail(f"two streams {self.stream}")
            found.append(Stream(self.stream, self.name(item["engine"]), self.body(item["body"], {}, 0)))
        known = {s.name for s in found}
        if any(s.producer not in known or s.consumer not in known for s in self.semaphores.values()):
            raise self.fail("a semaphore of a stream that is not there")
        return Streams(names[0], names[1], tuple(found), tuple(self.semaphores.values()))

    def body(self, data: Any, scope: dict[str, int], depth: int) -> tuple[Node, ...]:
        rows = self.items(data, MAX_NODES)
        self.nodes += len(rows)
        if depth > MAX_DEPTH or self.nodes > MAX_NODES:
            raise self.fail(f"over {MAX_DEPTH} levels or {MAX_NODES} nodes")
        return tuple([self.node(row, scope, depth) for row in rows])

    def node(self, row: Any, scope: dict[str, int], depth: int) -> Node:
        kind = row[0] if isinstance(row, list) and row and isinstance(row[0], str) else ""
        if kind in ("issue", "clear", "test"):
            number = self.number(self.row(row, 2)[1])
            return Issue(number) if kind == "issue" else Clear(number) if kind == "clear" else Test(number)
        if kind == "wait":
            _, semaphore, const, terms = self.row(row, 4)
            pairs = [self.row(t, 2) for t in self.items(terms, MAX_DEPTH)]
            count = Count(self.number(const, -MAX_NUMBER), tuple((self.name(n), self.number(c)) for n, c in pairs))
            if any(n not in scope for n, _ in count.terms) or len({n for n, _ in count.terms}) != len(count.terms):
                raise self.fail("a count of indices that are not in scope")
            return Wait(self.end(semaphore, "consumer"), count)
        if kind == "signal":
            _, semaphore, amount = self.row(row, 3)
            return Signal(self.end(semaphore, "producer"), self.number(amount, 1))
        if kind == "loop":
            _, number, index, trips, body = self.row(row, 5)
            name = self.index(index, scope)
            return Loop(self.number(number), name, self.number(trips, 1), self.body(body, {**scope, name: 1}, depth + 1))
        if kind == "repeat":
            _, number, index, body = self.row(row, 4)
            name = self.index(index, scope)
            inner = self.body(body, {**scope, name: 1}, depth + 1)
            steps = [n for n in inner if not isinstance(n, Signal)]
            if not steps or steps[-1] != Test(self.number(number)) or sum(isinstance(n, Test) for n in steps) != 1:
                raise self.fail("the body of a repeat ends with its test and signals")
            return Repeat(self.number(number), name, inner)
        if kind == "branch":
            _, number, then, orelse = self.row(row, 4)
            return Branch(self.number(number), self.body(then, scope, depth + 1), self.body(orelse, scope, depth + 1))
        raise self.fail(f"a node {str(row)[:40]!r}")

    def end(self, semaphore: Any, role: str) -> int:
        made = self.semaphores.get(self.number(semaphore))
        if made is None or getattr(made, role) != self.stream:
            raise self.fail(f"stream {self.stream} is not the {role} of semaphore {str(semaphore)[:20]}")
        return made.number

    def index(self, value: Any, scope: dict[str, int]) -> str:
        name = self.name(value)
        if name in scope:
            raise self.fail(f"two loops around one another have the index {name}")
        return name

    def items(self, value: Any, most: int) -> list[Any]:
        if not isinstance(value, list) or len(value) > most:
            raise self.fail("a list is expected, and not too long")
        return value

    def row(self, value: Any, size: int) -> list[Any]:
        if len(self.items(value, size)) != size:
            raise self.fail(f"{size} entries are expected")
        return value

    def number(self, value: Any, least: int = 0) -> int:
        if type(value) is not int or not least <= value <= MAX_NUMBER:
            raise self.fail(f"a number of at least {least} is expected")
        return value

    def name(self, value: Any) -> str:
        if not isinstance(value, str) or not _NAME.fullmatch(value):
            raise self.fail("a name is expected")
        return value

    def text(self, value: Any, most: int) -> str:
        if not isinstance(value, str) or len(value) > most:
            raise self.fail("a text is expected")
        return value
