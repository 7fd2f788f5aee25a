"""Payloads that nobody of ours has written: IR that is not legal, sizes, source locations, hostile changes."""

from __future__ import annotations

import base64
import json
import math
import random
import re
import tracemalloc

import numpy as np
import pytest
from tests.kernels.payloads import F32, coded, config_of, refused
from tests.trace.test_golden_ir import CASES

import opennki.dialects.neuronxcc.language as nl
from opennki.bind import host
from opennki.bind.host import HostKernel, host_kernel
from opennki.errors import NkiError, NkiParseError, NkiValueError
from opennki.ir.locations import read_locations
from opennki.ir.sizes import MAX_PROGRAMS
from opennki.kernels.payload import decode_backend_config, read_config
from opennki.timing.resident import executed


# ---- the IR inside ----


def with_ir(config, *changes):
    """The payload with parts of its IR replaced."""
    ir = config["serialize_ir_string"]
    for old, new in changes:
        assert old in ir
        ir = ir.replace(old, new)
    return coded({**config, "serialize_ir_string": ir})


@pytest.mark.parametrize(
    "old, new",
    [
        ("opennki_ir = 1", "opennki_ir = 2"), ("opennki_ir = 1", "opennki_ir"), ("outputs(", "outputs(x9, "), ("vector.", "vector.no_"),
        ("affine(2)", "affine(__import__('os'))"), ("affine(2)", "affine(-1)"), ("sbuf(", "cloud("), ("float32", "float33"), ("\n", "\r\n"),
        ("outputs", "é"), ("affine(2)", "affine(2**40)"), ("(128, 8)", f"({1 << 41}, 8)"),
    ],
)  # fmt: skip
def test_ir_garbage(config, old, new):
    refused(with_ir(config, (old, new)), "<ir>:")


@pytest.mark.parametrize(
    "old, new",
    [
        ("op0='multiply'", "op0='sort'"), ("vector.tensor_scalar", "tensor.tensor_scalar"), ("sbuf(", "psum("),
        ("sbuf(float32, (128", "sbuf(float32, (129"),
        ("op0='multiply', ", ""),
    ],
)  # fmt: skip
def test_illegal_instructions(config, old, new):
    raw = with_ir(config, (old, new))
    read_config(raw)  # the keys are right ...
    for read in (decode_backend_config, host_kernel):
        with pytest.raises(NkiError):
            read(raw)  # ... and the IR is not legal


def test_host_kernels_are_refused_for_the_same_reasons(config):
    for raw in (b"!", coded({}), with_ir(config, ("affine(2)", "affine(-1)"))):
        with pytest.raises(NkiParseError):
            host_kernel(raw)


# ---- sizes of a kernel ----

HUGE = [
    ("for i1 in", "t99 = sbuf(float32, (128, 1099511627))\nfor i1 in"),
    ("for i1 in", "t99 = shared_hbm(uint8, (1099511627776,))\nfor i1 in"),
    ("        t", "        t99 = psum(float32, (1099511627776, 1))\n        t"),
]


@pytest.mark.parametrize("old, new", HUGE)
def test_huge_tensors_are_refused(config, old, new):
    ir = config["serialize_ir_string"].replace(old, new, 1)
    tracemalloc.start()
    refused(coded({**config, "serialize_ir_string": ir}), "t99 alone has", "at most")
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def test_many_large_tensors_are_refused(config):
    lines = "".join(f"t{100 + i} = shared_hbm(float32, (1073741824,))\n" for i in range(200))
    refused(with_ir(config, ("for i1 in", lines + "for i1 in")), "its tensors have more than")


@pytest.mark.parametrize("level", ["fast", "full"])
def test_huge_loops_and_tensors_are_planned_in_little_memory(config, monkeypatch, level):
    monkeypatch.setenv("OPENNKI_CALL_CHECKS", level)
    raw = with_ir(config, ("affine(2)", f"affine({1 << 40})"), ("for i1 in", "t99 = sbuf(float32, (128, 536870912))\nfor i1 in"))
    monkeypatch.setattr(host, "physical_memory", lambda: 0)
    tracemalloc.start()
    HostKernel(decode_backend_config(raw)).plan()
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def test_what_does_not_fit_into_this_machine_is_refused_before_it_is_made(config, monkeypatch):
    raw = with_ir(config, ("for i1 in", "t99 = sbuf(float32, (128, 536870912))\nfor i1 in"))
    kernel = HostKernel(decode_backend_config(raw))
    monkeypatch.setattr(host, "physical_memory", lambda: 8 << 30)
    arrays = [np.zeros((256, 8), F32), np.zeros((128, 8), F32)]
    with pytest.raises(NkiValueError, match=r"scale: its tensors need .* MiB, and this machine has 8192 MiB"):
        kernel.run(arrays, [np.zeros((256, 8), F32)])


def test_huge_grids_are_refused():
    _, config = config_of(*CASES["programs"])
    n = MAX_PROGRAMS + 1
    ir = config["serialize_ir_string"].replace("pid0[3]", f"pid0[{n}]")
    refused(coded({**config, "grid": [n], "serialize_ir_string": ir}), f"{n} programs")


def test_a_kernel_that_could_not_be_decoded_is_not_encoded():
    def copy(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        for i in nl.affine_range(x.shape[0] // 128):
            nl.store(out[nl.ds(i * 128, 128)], nl.load(x[nl.ds(i * 128, 128)]))
        return out

    class Described:
        def __init__(self, *shape):
            self.shape, self.dtype = shape, np.dtype(F32)

    assert decode_backend_config(config_of(copy, [Described(1 << 30, 32)])[0]).kernel.params[0].shape == (1 << 30, 32)
    with pytest.raises(NkiValueError, match=r"copy: its tensors have more than .* \(x alone has"):
        config_of(copy, [Described(1 << 34, 32)])


# ---- source locations ----


def places(config, *names, lines=(0,)):
    table = {"opennki_locations": 1, "places": [[n, 1, "f"] for n in names], "lines": list(lines)}
    return coded({**config, "source_locations": json.dumps(table)})


@pytest.mark.parametrize(
    "table",
    [
        "x", "[]", "{}", '{"opennki_locations":2}', '{"opennki_locations":1,"places":[],"lines":[0]}',
        '{"opennki_locations":1,"places":[["f",0,"g"]],"lines":[]}', '{"opennki_locations":1,"places":[["f",1]],"lines":[]}',
        '{"opennki_locations":1,"places":[["f",true,"g"]],"lines":[]}', '{"opennki_locations":1,"places":{},"lines":[]}',
        '{"opennki_locations":1,"places":[["f",1,"g"]],"lines":[1]}', '{"opennki_locations":1,"places":[],"lines":[NaN]}', "[" * 100_000,
    ],
)  # fmt: skip
def test_source_locations_garbage(config, table):
    config["source_locations"] = table
    with pytest.raises(NkiParseError, match="source locations"):
        decode_backend_config(coded(config))


def test_tables_of_locations_are_bounded():
    for item in ("[]", "0", "{}"):
        table = '{"opennki_locations":1,"places":[],"lines":[' + f"{item}," * (17 << 20) + "0]}"
        with pytest.raises(NkiParseError, match="entries"):
            read_locations(table)


@pytest.mark.parametrize("name, shown", [
    ("../../etc/passwd", "<passwd>"), ("/etc/passwd", "<passwd>"), ("a/../../etc/passwd", "<passwd>"), ("kernels.py", "<kernels.py>"),
    ("sub/kernels.py", "<sub/kernels.py>"), ("..\\..\\secret.py", "<secret.py>"),
    ("C:/secret.py", "<secret.py>"), ("C:secret.py", "<C:secret.py>"),
    ("<../../etc/passwd", "<passwd>"), ("<stdin>", "<stdin>"), ("</etc/passwd>", "<passwd>"), ("a\0b", "<ax00b>"),
    ("\x1b[31m", "<x1b[31m>"),
    ("\ud800", "<ud800>"), ("", "<>"), ("./", "<>"), ("//server/share/x", "<x>"),
])  # fmt: skip
def test_files_of_this_machine_are_not_shown(config, name, shown):
    kernel = decode_backend_config(places(config, name)).kernel
    assert re.sub(r"\\", "", kernel.locs[0].file) == shown
    assert kernel.locs[0].source() == ""


def test_an_error_shows_no_line_of_a_file_of_this_machine(config, tmp_path, monkeypatch):
    (tmp_path / "secret.py").write_text("PASSWORD = 'hunter2'\n" * 40)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    config["serialize_ir_string"] = config["serialize_ir_string"].replace("op0='multiply'", "op0='sort'")
    for name in ("secret.py", str(tmp_path / "secret.py"), "./secret.py", f"../{tmp_path.name}/secret.py"):
        with pytest.raises(NkiError) as e:
            host_kernel(places(config, name, lines=[0] * 40))
        assert "<secret.py>:1" in str(e.value) and "PASSWORD" not in str(e.value)


def test_errors_of_a_payload_made_here_show_the_users_line():
    def reads_too_much(x, index):
        out = nl.ndarray((4, 8), dtype=x.dtype, buffer=nl.shared_hbm)
        rows = nl.load(index)
        nl.store(out, nl.load(x[rows, nl.arange(8)[None, :]]))  # HERE
        return out

    raw, _ = config_of(reads_too_much, [np.zeros((16, 8), F32), np.zeros((4, 1), np.int32)])
    with pytest.raises(IndexError) as e:
        host_kernel(raw.encode()).run([np.zeros((16, 8), F32), np.full((4, 1), 99, np.int32)], [np.zeros((4, 8), F32)])
    assert "# HERE" in str(e.value.__cause__)


# ---- hostile changes ----

_WORDS = [
    "t1", "x0", "x1", "sbuf", "psum", "'add'", "'exp'", "None", "()", "(1,)", "((1, 'x'), 2)", "float32", "int8", "bool", "i1", "d0", "d1",
    "pass", "outputs(t1)", "float8_e4m3", "vector", "tensor", "dma", "True", "'x'", "nan", "index(3)", "iota((4, 4), d0)",
    "pred((4, 4), d0 >= 0)", "t1[0, 0]", "t3.tile(1, 1)[0, 0]", "(i1//2)", "\n", "    ", "[", ")",
]  # fmt: skip
_NUMBERS = ["0", "1", "-1", "2", "7", "128", "129", "1000", "2.5", "1099511627776", str(1 << 63), "-0.0", "inf"]
_PIECE = re.compile(r"(-?\d[\d.]*)|\w+(?:\.\w+)?|'[^'\n]*'|\([^()\n]*\)|[^\w\s]|\n")


def changed(rng, raw, config):
    """A payload with one to three hostile changes: in its base64, its JSON, its keys or its texts."""
    kind = rng.choice("bjkssssss")
    times = range(rng.choice([1, 1, 2, 3]))
    if kind == "b":
        data = bytearray(raw.encode())
        for _ in times:
            data[rng.randrange(len(data))] = rng.choice([rng.randrange(256), *b"AQgw+/="])
        return bytes(data)
    if kind == "j":
        data = bytearray(base64.b64decode(raw))
        for _ in times:
            at = rng.randrange(len(data))
            if rng.random() < 0.5:
                data[at] = rng.randrange(256)
            else:
                data[at : at + rng.randrange(8)] = bytes(rng.choices(b'{}[]",:\\0e', k=rng.randrange(4)))
        return base64.b64encode(data)
    config = json.loads(json.dumps(config))
    if kind == "k":
        keys = list(config)
        for _ in times:
            a, b = rng.choice(keys), rng.choice(keys)
            config[a], config[b] = config[b], config[a]
        return coded(config)
    key = "serialize_ir_string" if rng.random() < 0.9 else "source_locations"
    text = config[key]
    pieces = [m for m in _PIECE.finditer(text) if m.start() > text.find("t1 = ")]
    if rng.random() < 0.9:  # what has a meaning: numbers, names and tuples
        pieces = [m for m in pieces if len(m[0]) > 1 or m[0].isalnum()]
    for _ in times:
        old, other = rng.choice(pieces), rng.choice(pieces)
        if rng.random() < 0.5:
            other = rng.choice([m for m in pieces if bool(m[1]) == bool(old[1]) and m[0][0].isalpha() == old[0][0].isalpha()])
        new = rng.choice(_NUMBERS if old[1] else _WORDS) if rng.random() < 0.4 else other[0]
        text = text[: old.start()] + new + text[old.end() :]
        pieces = [m for m in pieces if m.end() < old.start()] or pieces[:1]
    config[key] = text
    return coded(config)


def is_small(kernel):
    """Whether a kernel that was decoded may run in a test: a change may have made it arbitrarily large."""
    programs = math.prod(v.hi + 1 for v in kernel.payload.kernel.grid)
    buffers = sum(math.prod(b.shape) * b.view.itemsize for b in (*kernel.inputs, *kernel.outputs))
    return executed(kernel.payload.kernel.body) * programs < 2000 and buffers < 1 << 26


def hostile_cases(seed, count, kernels):
    """Decode, plan and run changed payloads. Returns how many could be decoded, and how many ran to their end."""
    rng = random.Random(seed)
    decoded = ran = 0
    for _ in range(count):
        raw = changed(rng, *rng.choice(kernels))
        try:
            found = decode_backend_config(raw)
            decoded += 1
            kernel = HostKernel(found)
            kernel.plan()
            if is_small(kernel):
                kernel.run([np.ones(b.shape, b.public) for b in kernel.inputs], [np.ones(b.shape, b.public) for b in kernel.outputs])
                ran += 1
        except NkiError as exc:
            assert str(exc)
        except IndexError as exc:  # of a runtime index, whose report is its cause
            assert isinstance(exc.__cause__, NkiError)
    return decoded, ran


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("level", ["off", "fast", "full"])
def test_hostile_changes_are_refused_or_harmless(level, monkeypatch):
    monkeypatch.setenv("OPENNKI_CALL_CHECKS", level)
    kernels = [config_of(), *(config_of(*CASES[name]) for name in ("matmul", "gather", "programs", "edge"))]
    decoded, ran = hostile_cases(0, 800, kernels)
    assert 600 > decoded > 40 and 20 < ran < decoded  # neither are the changes so coarse that the first check finds them all


def test_an_operand_that_a_check_does_not_expect_is_a_fault_of_the_payload():
    raw = with_ir(config_of(*CASES["matmul"])[1], ("tile_size=()", "tile_size=(i1//2)"))
    with pytest.raises(NkiParseError, match="matmul: the IR in this payload is not legal") as e:
        host_kernel(raw)
    assert isinstance(e.value.__cause__, TypeError)


def test_config_is_read_without_the_ir(config):
    config["serialize_ir_string"] = "opennki_ir = nonsense"
    assert read_config(coded(config))["func_name"] == "scale"


@pytest.mark.parametrize("rows", [1, 2, 128])
def test_a_kernel_on_any_number_of_partitions_is_admitted(rows):
    """The accumulator registers in a payload are those of the partitions in use."""
    def kernel(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.exp(nl.load(x)))
        return out

    made, _ = config_of(kernel, [np.zeros((rows, 8), F32)])
    x = np.linspace(0, 1, rows * 8, dtype=F32).reshape(rows, 8)
    out = np.zeros_like(x)
    host_kernel(made.encode()).run([x], [out])
    assert np.allclose(out, np.exp(x), rtol=1e-5)
