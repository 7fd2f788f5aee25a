"""The payload of a custom call: what is in it, that it is the same bytes everywhere, and a decoder that trusts nothing."""

from __future__ import annotations

import base64
import dataclasses
import enum
import json
import os
import random
import re
import subprocess
import sys
import tracemalloc
from math import inf, nan
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from tests.trace.test_golden_ir import CASES

import opennki.dialects.neuronxcc.language as nl
from opennki.bind import host
from opennki.bind.host import HostKernel, host_kernel
from opennki.errors import NkiError, NkiParseError, NkiValueError
from opennki.ir.locations import read_locations
from opennki.ir.print import to_text
from opennki.kernels import payload as p
from opennki.kernels.framework import UnifiedKernel
from opennki.kernels.payload import KEYS, KERNEL_VERSION, NkiForeignPayload, constant_json, decode_backend_config, read_config

F32 = np.float32
SRC = Path(__file__).parents[2] / "src"


def scale(x, table, factor=2.0, name="n"):
    """out = x * factor where it is below the table; x gets its first half doubled."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    t = nl.load(table)
    for i in nl.affine_range(x.shape[0] // 128):
        rows = nl.ds(i * 128, 128)
        tile = nl.load(x[rows]) * factor
        if i >= 1:
            tile = nl.add(tile, t)
        nl.store(out[rows], tile)
    return out


def config_of(func=scale, arrays=(np.zeros((256, 8), F32), np.zeros((128, 8), F32)), grid=None, **kwargs):
    """The payload of a kernel, and its keys."""
    raw = UnifiedKernel(func, grid=grid, platform_target="trn2").dump_config(*arrays, **kwargs).backend_config
    return raw, json.loads(base64.b64decode(raw))


def coded(config):
    """A payload of any JSON value, or of JSON text."""
    text = config if isinstance(config, str) else json.dumps(config)
    return base64.b64encode(text.encode("utf-8", "surrogatepass"))


def refused(payload, *texts, kind=NkiParseError):
    """The error of a payload, which has the texts in it."""
    with pytest.raises(NkiParseError) as e:
        decode_backend_config(payload)
    assert type(e.value) is kind and len(str(e.value)) < 2000
    for text in texts:
        assert text in str(e.value)
    assert str(e.value).isascii()
    return e.value


@pytest.fixture
def config():
    return config_of()[1]


# ---- what is in it ----


def test_keys_stand_in_order(config):
    assert list(config) == [*KEYS, "source_locations"]
    assert config["kernel_version"] == KERNEL_VERSION and config["func_name"] == "scale" and config["grid"] == []
    assert config["constant_values"] == {"factor": 2.0, "name": "n"} and config["platform_target"] == "trn2"
    assert config["serialize_dims"]["inputs"][1] == {"name": "table", "shape": [128, 8], "dtype": "float32"}


@pytest.mark.parametrize("name", CASES)
def test_round_trip(name):
    func, arrays, grid = CASES[name]
    raw, config = config_of(func, arrays, grid)
    found = decode_backend_config(raw)
    assert to_text(found.kernel) == config["serialize_ir_string"]
    assert found.config == config and decode_backend_config(raw.encode()).config == config
    assert [r.shape for r in found.results] == [tuple(t["shape"]) for t in config["serialize_dims"]["outputs"]]
    HostKernel(found).plan()


def test_a_result_that_shares_a_buffer():
    def twice(x):
        nl.store(x, nl.load(x) * 2.0)

    raw, config = config_of(twice, [np.zeros((128, 8), F32)])
    assert config["serialize_dims"]["outputs"] == [{"name": "x", "shape": [128, 8], "dtype": "float32", "operand": 0}]
    assert decode_backend_config(raw).aliases == ((0, 0),) and config["kernel_return"] is False


# ---- the same bytes everywhere ----

KERNEL_FILE = '''
import sys
import numpy as np
import opennki.dialects.neuronxcc.language as nl
from opennki.kernels.framework import UnifiedKernel

WORDS = {"a", "b", "c", "delta", "epsilon"}


def kernel(x, names=None, f=len):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.load(x) * len(names))
    return out


if __name__ == "__main__":
    names = tuple(sorted(WORDS))
    made = UnifiedKernel(kernel, platform_target="trn2").dump_config(np.zeros((128, 4), np.float32), names=names, f=lambda y: y)
    print(made.backend_config)
'''


def test_the_same_bytes_from_any_process_folder_and_hash_seed(tmp_path):
    printed = set()
    for number, (folder, seed) in enumerate([("one", "0"), ("two/deeper", "1"), ("three", "4242")]):
        file = tmp_path / folder / "kernels.py"
        file.parent.mkdir(parents=True)
        file.write_text(KERNEL_FILE)
        where = [tmp_path, file.parent, "/"][number]
        done = subprocess.run(
            [sys.executable, str(file) if number != 1 else file.name], cwd=where, capture_output=True, text=True, timeout=120, check=True,
            env={**os.environ, "PYTHONPATH": str(SRC), "PYTHONHASHSEED": seed},
        )
        printed.add(done.stdout)
    assert len(printed) == 1
    config = json.loads(base64.b64decode(printed.pop()))
    assert str(tmp_path) not in json.dumps(config) and "kernels.py" in config["source_locations"]
    assert config["constant_values"] == {
        "names": ["a", "b", "c", "delta", "epsilon"], "f": {"object": "__main__.<lambda>"},
    }


class Colour(enum.Enum):
    RED = object()


class Word(str, enum.Enum):  # noqa: UP042  not a StrEnum: its text is its name
    ONE = "one"


@dataclasses.dataclass
class Tiling:
    rows: int
    call: object = None


class Plain:
    pass


CONSTANTS = {
    "None": (None, None),
    "True": (True, True),
    "int": (3, 3),
    "large": (1 << 80, str(1 << 80)),
    "huge": (1 << 20000, hex(1 << 20000)),
    "float": (0.1, 0.1),
    "nan": (nan, "nan"),
    "inf": (-inf, "-inf"),
    "NumPy float": (np.float64(0.5), 0.5),
    "NumPy float32": (F32(0.1), {"dtype": "float32", "value": "0.1"}),
    "NumPy nan": (np.float64(nan), "nan"),
    "bfloat16": (ml_dtypes.bfloat16(0.5), {"dtype": "bfloat16", "value": "0.5"}),
    "str": ("é\ud800", "é\ud800"),
    "bytes": (b"x", {"object": "builtins.bytes"}),
    "enum": (Colour.RED, "Colour.RED"),
    "str enum": (Word.ONE, "Word.ONE"),
    "dtype": (nl.bfloat16, {"dtype": "bfloat16"}),
    "NumPy dtype": (np.dtype("int32"), {"dtype": "int32"}),
    "list": ([1, (2.0, None)], [1, [2.0, None]]),
    "dict": ({"a": 1}, {"a": 1}),
    "dict of ints": ({1: "a", "1": "b"}, {"items": [[1, "a"], ["1", "b"]]}),
    "dict of functions": ({len: 1}, {"items": [[{"object": "builtins.len"}, 1]]}),
    "dataclass": (Tiling(2, Plain()), {"type": "Tiling", "rows": 2, "call": {"object": f"{__name__}.Plain"}}),
    "class": (Tiling, {"object": f"{__name__}.Tiling"}),
    "function": (config_of, {"object": f"{__name__}.config_of"}),
    "method": ("".join, {"object": "builtins.str.join"}),
    "slot wrapper": ((1).__add__, {"object": "builtins.int.__add__"}),
    "object": (Plain(), {"object": f"{__name__}.Plain"}),
    "set": ({1}, {"object": "builtins.set"}),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_have_no_addresses(name):
    value, expected = CONSTANTS[name]
    shown = constant_json(value)
    assert shown == expected and type(shown) is type(expected)
    text = json.dumps(shown, allow_nan=False)
    assert not re.search(r" at 0x|<", text) and text == json.dumps(constant_json(value), allow_nan=False)


def test_deep_constants_end():
    deep = [Plain()]
    for _ in range(100):
        deep = [deep]
    shown = constant_json(deep)
    assert " at 0x" not in json.dumps(shown)
    tree: object = 1
    for _ in range(20):
        tree = {1: Tiling(1, {2: tree})}
    config = config_of()[1]
    config["constant_values"] = {"deep": shown, "tree": constant_json(tree)}
    decode_backend_config(coded(config))


# ---- the schema ----

OTHER = {int: ["1", 1.0, True, None, []], str: [1, None, ["x"]], bool: [0, 1, "true", None], list: [{}, "[]", None], dict: [[], "{}", None]}


@pytest.mark.parametrize("key", KEYS)
def test_a_key_is_missing(config, key):
    del config[key]
    kind = NkiForeignPayload if key == "serialize_ir_string" else NkiParseError
    refused(coded(config), key, kind=kind)


@pytest.mark.parametrize("key, value", [(k, v) for k, kind in [*KEYS.items(), ("source_locations", str)] for v in OTHER[kind]])
def test_a_key_is_of_the_wrong_kind(config, key, value):
    config[key] = value
    foreign = key == "serialize_ir_string" and value is None
    refused(coded(config), key, kind=NkiForeignPayload if foreign else NkiParseError)


@pytest.mark.parametrize(
    "key, value",
    [
        ("kernel_version", 0), ("kernel_version", -1), ("func_name", "other"), ("func_name", ""), ("grid", [2]), ("grid", ["2"]),
        ("grid", [-1]), ("grid", [True]), ("grid", [1 << 40]), ("has_collectives", True), ("matmul_mac_count", -1),
        ("matmul_mac_count", 1), ("matmul_mac_count", 1 << 200), ("mac_count", 1), ("platform_target", "trn1"),
        ("platform_target", "trn9"), ("kernel_return", False), ("serialize_dims", {}), ("serialize_dims", {"inputs": [], "outputs": []}),
        ("colour", "red"), ("kernel_return ", True), ("é", 1), ("\x1b[31m", 1),
    ],
)  # fmt: skip
def test_a_key_has_a_wrong_value(config, key, value):
    config[key] = value
    refused(coded(config), ascii(key)[1:-1])


@pytest.mark.parametrize("change", [lambda d: d["inputs"][0].update(shape=[256.0, 8]), lambda d: d["inputs"][0].update(dtype="float16"),
                                    lambda d: d["outputs"][0].update(operand=0), lambda d: d["inputs"].reverse(),
                                    lambda d: d["outputs"][0].update(name="x"), lambda d: d.update(extra=1)])
def test_operands_disagree_with_the_ir(config, change):
    change(config["serialize_dims"])
    refused(coded(config), "serialize_dims")


def test_a_newer_version(config):
    config["kernel_version"] = KERNEL_VERSION + 1
    refused(coded(config), f"kernel_version is {KERNEL_VERSION + 1}", "newer", "upgrade opennki")
    config["kernel_version"] = 10**4000
    refused(coded(config), "kernel_version", "newer")


@pytest.mark.parametrize(
    "payload, text",
    [
        ("", "not JSON"), ("!", "not base64"), ("é", "not base64"), (b"\xff\x00", "not base64"), ("QQ", "not base64"),
        ("QQ==QQ==", "not base64"), (" QQ==", "not base64"), ("QQ==\n", "not base64"), (coded("{"), "not JSON"), (coded(""), "not JSON"),
        (coded("[]"), "not a JSON object"), (coded("1"), "not a JSON object"), (coded("null"), "not a JSON object"),
        (coded("\ufeff{}"), "not JSON"), (base64.b64encode('{"a":1}'.encode("utf-16")), "not JSON"), (coded('{"a":\xff}'), "not JSON"),
        (base64.b64encode(b'{"a":"\xff"}'), "not JSON"), (coded('{"a": 1} x'), "not JSON"), (coded("{'a': 1}"), "not JSON"),
        (coded('{"a": 1e999}'), "not a finite number"), (coded('{"a": NaN}'), "NaN' is not a finite"),
        (coded('{"a": -Infinity}'), "finite"),
        (coded('{"a": ' + "9" * 5000 + "}"), "not JSON"), (coded('{"a":"\\ud800"}'), "not JSON"), (coded('{"\\udc00":1}'), "not JSON"),
        (coded("[" * 100_000), "not JSON"), (coded('{"a":' * 100_000), "not JSON"),
        (coded('{"a":' + "[" * 40 + "]" * 40 + "}"), "nests deeper"),
        (coded('{"a": 1, "b": 2, "a": 3}'), "the key 'a' is there twice"), (coded('{"x": {"a": 1, "a": 1}}'), "twice"),
    ],
)  # fmt: skip
def test_no_payload(payload, text):
    refused(payload, "this is no payload of a kernel", text)


def test_nesting_is_bounded_wherever_it_is(config):
    for depth in (p.MAX_NESTING, 300, 900):
        value: object = []
        for _ in range(depth):
            value = [value]
        for key in ("kernel_version", "func_name", "opts", "colour", "constant_values"):
            refused(coded({**config, key: value}), "nests deeper" if depth < 900 else "this is no payload")


def test_a_truncated_payload():
    raw, _ = config_of()
    for n in range(0, len(raw), 37):
        refused(raw[:n], "this is no payload")


def test_sizes_are_bounded_before_anything_is_read(monkeypatch, config):
    monkeypatch.setattr(p, "MAX_PAYLOAD_BYTES", 1000)
    refused(b"!" * 1001, "more than 1000")
    monkeypatch.undo()
    monkeypatch.setattr(p, "MAX_OTHER_BYTES", 1000)
    config["opts"] = {"a": "[" * 5000}
    decode_backend_config(coded(config))  # what is in strings does not count
    config["opts"] = {"a": [[]] * 5000}
    refused(coded(config), "outside of strings")


# ---- payloads of another compiler ----


def test_another_compilers_payload_is_recognised(config):
    config["serialize_ir_string"] = base64.b64encode(b"\x00binary").decode()
    error = refused(coded(config), "another compiler", "func_name", kind=NkiForeignPayload)
    assert error.config["func_name"] == "scale"
    refused(coded({"func_name": "x", "kernel_format": "y"}), "func_name, kernel_format", kind=NkiForeignPayload)
    refused(coded({}), "another compiler", kind=NkiForeignPayload)
    refused(coded({"\x1b[31m" * 100: 1}), "another compiler", kind=NkiForeignPayload)


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
    decode_backend_config(raw)  # well formed ...
    with pytest.raises(NkiError):
        host_kernel(raw)  # ... and not legal


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
    n = p.MAX_PROGRAMS + 1
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


def hostile_cases(seed, count, kernels):
    """Decode, verify and plan changed payloads. Returns how many could be decoded, and planned."""
    rng = random.Random(seed)
    decoded = planned = 0
    for _ in range(count):
        raw = changed(rng, *rng.choice(kernels))
        try:
            found = decode_backend_config(raw)
            decoded += 1
            HostKernel(found).plan()
            planned += 1
        except NkiError as exc:
            assert str(exc)
    return decoded, planned


def test_hostile_changes_are_refused_or_harmless():
    kernels = [config_of(), *(config_of(*CASES[name]) for name in ("matmul", "gather", "programs", "edge"))]
    decoded, planned = hostile_cases(0, 800, kernels)
    assert 600 > decoded > 80 and 0 < planned < decoded  # neither are the changes so coarse that the first check finds them all


def test_an_operand_that_a_check_does_not_expect_is_a_fault_of_the_payload():
    raw = with_ir(config_of(*CASES["matmul"])[1], ("tile_size=()", "tile_size=(i1//2)"))
    with pytest.raises(NkiParseError, match="matmul: the IR in this payload is not legal") as e:
        host_kernel(raw)
    assert isinstance(e.value.__cause__, TypeError)


def test_config_is_read_without_the_ir(config):
    config["serialize_ir_string"] = "opennki_ir = nonsense"
    assert read_config(coded(config))["func_name"] == "scale"
