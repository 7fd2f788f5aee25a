"""Finds the custom calls of NKI kernels in compiler input and output: HLO and StableHLO as text, HLO as protobuf, MLIR
bytecode, and a payload alone.

Everything read is hostile: sizes are bounded before reading, text is gone through once from left to right, protobufs by a loop
over a fixed number of levels. Field numbers: xla/service/hlo.proto.
"""

from __future__ import annotations

import re
import subprocess
import sys
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

TARGETS = ("AwsNeuronCustomNativeKernelOnRanks", "AwsNeuronCustomNativeKernel", "AwsNeuronNkiKernel")  # a prefix comes after
"""Names of the custom call: in JAX programs, in PyTorch/XLA programs."""
MAX_FILE_BYTES = 1 << 30
MAX_FIELDS = 1 << 22  # of a protobuf
MAX_CALLS = 1 << 16
MAX_BRACKETS = 256
BYTECODE = b"ML\xefR"
_TIMEOUT = 300  # seconds for jaxlib to read bytecode


class UnreadableFile(Exception):
    """A file that is none of the forms, or is damaged."""


@dataclass(frozen=True, slots=True)
class Call:
    """One custom call: its target, where it stands ("line 12", an instruction name), and its payload or why there is none."""

    target: str
    place: str
    payload: bytes = b""
    problem: str = ""


def read_calls(file: BinaryIO) -> tuple[str, list[Call]]:
    """(kind of file, its calls of NKI kernels in order). Errors: UnreadableFile, OSError."""
    data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise UnreadableFile(f"it has more than {MAX_FILE_BYTES >> 20} MiB")
    return find_calls(data)


def find_calls(data: bytes) -> tuple[str, list[Call]]:
    """(kind of file, its calls of NKI kernels in order). Errors: UnreadableFile."""
    if not data.strip():
        raise UnreadableFile("it is empty")
    if data[:2] == b"\x1f\x8b" or data[:4] in (b"PK\x03\x04", b"\x28\xb5\x2f\xfd"):
        raise UnreadableFile("it is compressed; unpack it first")
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):  # what a redirection writes in PowerShell
        data = data.decode("utf-16", "replace").encode("utf-8", "replace")
    if data[:3] == b"\xef\xbb\xbf":
        data = data[3:]
    if _is_text(data):
        if _PAYLOAD.fullmatch(data):
            return "payload", [Call("", "", b"".join(data.strip(b" \t\r\n\"'").split()))]
        return _text(data)
    module = _bytecode(data)
    if module is not None:
        return "MLIR bytecode", _text(_text_of_bytecode(module))[1]
    return "HLO protobuf", _protobuf(data)


# ---- text ----


def _is_text(data: bytes) -> bool:
    try:
        return not _BINARY.search(data) and bool(data.decode("utf-8"))
    except UnicodeDecodeError:
        return False


_BINARY = re.compile(rb"[\x00-\x08\x0e-\x1f\x7f]")
_PAYLOAD = re.compile(rb"\s*+[\"']?(?:[A-Za-z0-9+/]++=*+[\r\n]*+)++[\"']?\s*+")
_TARGET = re.compile("|".join(TARGETS).encode())
# One token. A string that is not closed ends with the text, so that no quote is looked at twice.
_TOKEN = re.compile(
    rb"""\"((?:[^\"\\]++|\\.)*+)(\"?)|([A-Za-z_](?:[\w.$]|-(?!>))*+)|([{}()\[\]<>])|(->)|([=,:\n])|//[^\n]*+""", re.DOTALL
)
_CONFIGS = (b"backend_config", b"mhlo.backend_config")
_ATTRIBUTE = b"opaque"  # of the typed FFI form
_PAIRS = {ord(b): ord(a) for a, b in ("{}", "()", "[]", "<>")}
_KINDS = {
    "HLO text": re.compile(rb"^\s*+HloModule\b|custom_call_target="),
    "MLIR text": re.compile(rb"^\s*+(?:module|#loc|\"builtin|func\.func)|stablehlo\.|mhlo\."),
}
_HEAD = 1 << 16  # bytes in which these are looked for
_NONE = "it has no payload in a backend_config"
_CUT = "the file ends inside of a string"


def _text(data: bytes) -> tuple[str, list[Call]]:
    """Calls of HLO or MLIR text. Each is read between the end of the one before and the next name of a target, so that the text
    is gone through a fixed number of times, whatever is in it."""
    calls: list[Call] = []
    lines, counted, end = 1, 0, 0
    names = [m.span() for m, _ in zip(_TARGET.finditer(data), range(MAX_CALLS + 1))]
    if len(names) > MAX_CALLS:
        raise UnreadableFile(f"it names the custom calls more than {MAX_CALLS} times")
    for (start, stop), (limit, _) in zip(names, [*names[1:], (len(data), 0)]):
        if start < end:
            continue  # in a string of the call before
        found = _call(data, end, start, stop, limit)
        if found is not None:
            payload, problem, end = found
            lines += data.count(b"\n", counted, start)
            counted = start
            calls.append(Call(data[start:stop].decode(), f"line {lines}", payload, problem))
    kind = next((name for name, pattern in _KINDS.items() if pattern.search(data[:_HEAD])), "text")
    return kind, calls


def _call(data: bytes, after: int, start: int, stop: int, limit: int) -> tuple[bytes, str, int] | None:
    """(payload, problem, end) of the custom call whose target is named at start..stop; None if that names no call."""
    before = data[max(after, start - 64) : start]
    if data[stop : stop + 1].isalnum() or data[stop : stop + 1] in (b"_", b"-", b"."):
        return None  # a longer name
    if re.search(rb'custom_call_target\s*=\s*"$', before):
        return _scan(data, max(after, data.rfind(b"\n", after, start)), start, limit, hlo=True)
    if re.search(rb'call_target_name\s*=\s*"$', before):  # the generic form has its attributes in the order of their names
        begin = data.rfind(b'custom_call"(', after, start)
        return _scan(data, max(after, begin + 12 if begin >= 0 else after), start, limit, hlo=False)
    if re.search(rb'custom_call\s*@"?$', before):
        return _scan(data, stop + (data[start - 1 : start] == b'"'), start, limit, hlo=False)
    return None


def _scan(data: bytes, begin: int, start: int, limit: int, *, hlo: bool) -> tuple[bytes, str, int]:
    """The configuration of the statement around `start`, from `begin` on.

    A statement of HLO ends with its line, unless that ends in a comma. An operation of MLIR ends at the colon of its type, outside
    of every bracket; its configuration is in a dictionary, {...} or <{...}>.
    """
    brackets = bytearray()
    key, equals, comma, inside, position, payload = b"", False, False, 0, begin, b""
    while position < limit and not (payload and position > start):
        m = _TOKEN.search(data, position)
        if m is None:
            return payload, "" if payload else _NONE, len(data)
        position = m.end()
        string, closed, word, bracket, _, mark = m.groups()
        here = not brackets if hlo else brackets in (b"{", b"<{")  # where the attributes are
        if string is not None:
            if equals and ((here and key in _CONFIGS) or (inside and key == _ATTRIBUTE and len(brackets) == inside)):
                if not closed:
                    return b"", _CUT, len(data)
                payload = payload or _unescaped(string, octal=hlo and not inside)
            equals, comma = False, False
        elif word is not None:
            key, equals, comma = word, False, False
            if hlo and word.startswith(b"custom-call"):  # another instruction of the same line, or an operand
                if position < start:
                    brackets, inside, payload = bytearray(), 0, b""
                elif not brackets:
                    break
        elif bracket is not None:
            code = bracket[0]
            if code in _PAIRS:
                if brackets and brackets[-1] == _PAIRS[code]:
                    brackets.pop()
                    inside = inside if len(brackets) >= inside else 0
            else:
                if len(brackets) == MAX_BRACKETS:
                    return b"", "its brackets nest too deep", position
                brackets.append(code)
                if code == 0x7B and here and equals and key in _CONFIGS:
                    inside = len(brackets)
            equals, comma = False, False
        elif mark == b"=":
            equals = True
        elif mark == b",":
            key, equals, comma = b"", False, True
        elif mark == (b"\n" if hlo else b":") and not brackets and not comma and m.start() > start:
            break
    return payload, "" if payload else _NONE, max(position, start)


def _unescaped(string: bytes, octal: bool) -> bytes:
    """Content of a string of HLO (octal escapes) or MLIR (two hexadecimal digits); the payload of a dictionary written as a string."""
    if b"\\" in string:
        string = (_HLO_ESCAPE if octal else _MLIR_ESCAPE).sub(_character, string)
    return payload_of(string)


def payload_of(config: bytes) -> bytes:
    """The payload in a backend_config: the string itself, or the attribute `opaque` of the typed form."""
    if config.lstrip()[:1] != b"{":
        return config
    key, equals = b"", False
    for m in _TOKEN.finditer(config):
        if m[1] is not None:
            if equals and key == _ATTRIBUTE:
                return _MLIR_ESCAPE.sub(_character, m[1])
            equals = False
        elif m[3] is not None:
            key, equals = m[3], False
        elif m[6] is not None:
            equals = m[6] == b"="
    return config


_HLO_ESCAPE = re.compile(rb"\\(?:([0-7]{1,3})|x([0-9A-Fa-f]{1,2})|(.))", re.DOTALL)
_MLIR_ESCAPE = re.compile(rb"\\(?:(?!)()|([0-9A-Fa-f]{2})|(.))", re.DOTALL)
_LETTERS = {b"n": b"\n", b"t": b"\t", b"r": b"\r"}


def _character(m: re.Match[bytes]) -> bytes:
    if m[1]:
        return bytes([int(m[1], 8) & 255])
    return bytes([int(m[2], 16)]) if m[2] else _LETTERS.get(m[3], m[3])


# ---- protobuf ----

_MODULE, _COMPUTATION = 3, 2  # HloModuleProto.computations, HloComputationProto.instructions
_NAME, _OPCODE, _CALL_TARGET, _CONFIG = 1, 2, 28, 43  # of HloInstructionProto
_OPCODES = re.compile(rb"[a-z][a-z0-9-]{0,63}")
_FIXED = {1: 8, 5: 4}  # bytes of the wire types of fixed size


class _Wire:
    """Fields of protobuf messages, and how many were read."""

    def __init__(self, data: bytes) -> None:
        self.data, self.read = data, 0

    def varint(self, at: int, end: int) -> tuple[int, int]:
        data, value, shift = self.data, 0, 0
        while at < end and shift < 70:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value, at
            shift += 7
        raise UnreadableFile(f"a number of the protobuf is cut short or too long at byte {at}")

    def fields(self, at: int, end: int) -> Iterator[tuple[int, int, int]]:
        """(field number, start, end) of each field with a length; the others are skipped."""
        data = self.data
        while at < end:
            self.read += 1
            if self.read > MAX_FIELDS:
                raise UnreadableFile(f"the protobuf has more than {MAX_FIELDS} fields")
            tag = data[at]
            if tag < 128:  # most are of one byte
                at += 1
            else:
                tag, at = self.varint(at, end)
            number, wire = tag >> 3, tag & 7
            if number == 0:
                raise UnreadableFile(f"the protobuf has a field number 0 at byte {at}")
            if wire == 0:
                at = self.varint(at, end)[1]
            elif wire == 2:
                size, at = self.varint(at, end)
                if size > end - at:
                    raise UnreadableFile(f"the protobuf is cut short: a field at byte {at} has {size} bytes, and {end - at} are left")
                yield number, at, at + size
                at += size
            elif wire in _FIXED and _FIXED[wire] <= end - at:
                at += _FIXED[wire]
            else:
                raise UnreadableFile(f"the protobuf has an unknown or cut field at byte {at}")

    def module(self) -> tuple[int, int]:
        """Where the HloModuleProto is: the whole file, or field 1 of an HloProto, or of one in an HloSnapshot."""
        at, end = 0, len(self.data)
        for _ in range(3):
            if self.is_module(at, end):
                return at, end
            inner = next((span for number, *span in self.fields(at, end) if number == 1), None)
            if inner is None:
                break
            at, end = inner
        raise UnreadableFile("the protobuf is no HloModuleProto and has none inside")

    def is_module(self, at: int, end: int) -> bool:
        """Whether a message has a computation with an instruction in it."""
        try:
            for number, *span in self.fields(at, end):
                if number != _MODULE:
                    continue
                for inner, *instruction in self.fields(*span):
                    if inner == _COMPUTATION:
                        codes = [self.data[a:b] for n, a, b in self.fields(*instruction) if n == _OPCODE]
                        return len(codes) == 1 and _OPCODES.fullmatch(codes[0]) is not None
                return False
        except UnreadableFile:
            pass
        return False


def _protobuf(data: bytes) -> list[Call]:
    """Calls of an HloModuleProto, or of a message that has one in it."""
    wire, calls = _Wire(data), list[Call]()
    try:
        at, end = wire.module()
    except UnreadableFile as exc:
        raise UnreadableFile(f"it is no text, no MLIR bytecode and no HLO: {exc}") from None
    wanted = {t.encode(): t for t in TARGETS}
    names = [m.start() for m in _TARGET.finditer(data)]

    def without(first: int, last: int) -> bool:
        """Whether a message has no name of a target in it, and need not be taken apart."""
        i = bisect_left(names, first)
        return i == len(names) or names[i] >= last

    for number, first, last in wire.fields(at, end):
        if number != _MODULE or without(first, last):
            continue
        for inner, start, stop in wire.fields(first, last):
            if inner != _COMPUTATION or without(start, stop):
                continue
            found = {n: data[a:b] for n, a, b in wire.fields(start, stop) if n in (_NAME, _CALL_TARGET, _CONFIG)}
            target = wanted.get(found.get(_CALL_TARGET, b""))
            if target is not None:
                if len(calls) == MAX_CALLS:
                    raise UnreadableFile(f"it has more than {MAX_CALLS} calls")
                payload = payload_of(found.get(_CONFIG, b""))
                place = found.get(_NAME, b"")[:128].decode("utf-8", "replace")
                calls.append(Call(target, place, payload, "" if payload else _NONE))
    return calls


# ---- MLIR bytecode ----


def _bytecode(data: bytes) -> bytes | None:
    """MLIR bytecode: the file, or a vector in the flatbuffer of jax.export, which has its length before it."""
    at = data.find(BYTECODE)
    if at <= 0:
        return data if at == 0 else None
    size = int.from_bytes(data[max(0, at - 4) : at], "little")
    return data[at : at + size] if at >= 4 and size <= len(data) - at else None


# In a process of its own: the reader is C++ that was not written for hostile input, and may end the process.
_READER = """
import sys
data = sys.stdin.buffer.read()
try:
    from jax.interpreters import mlir
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo
except ImportError:
    sys.exit(3)
context = mlir.make_ir_context()
try:
    module = stablehlo.deserialize_portable_artifact(context, data)
except Exception:
    with context:
        module = ir.Module.parse(data)
sys.stdout.buffer.write(str(module).encode("utf-8", "replace"))
"""


def _text_of_bytecode(module: bytes) -> bytes:
    try:
        done = subprocess.run([sys.executable, "-P", "-c", _READER], input=module, capture_output=True, timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise UnreadableFile(f"jaxlib did not read this MLIR bytecode in {_TIMEOUT} seconds") from None
    if done.returncode == 3:
        raise UnreadableFile(
            "it is MLIR bytecode (StableHLO, or jax.export), and JAX, which can read that, is not installed here: pip install jax, "
            "or write text where the file is made: lowered.as_text(), exported.mlir_module()"
        )
    if done.returncode:
        why = next((x for x in done.stderr.decode("utf-8", "replace").splitlines() if "error: " in x), f"status {done.returncode}")
        raise UnreadableFile(f"it is MLIR bytecode that jaxlib does not read: {why.rpartition('error: ')[2][:200]}")
    return done.stdout
