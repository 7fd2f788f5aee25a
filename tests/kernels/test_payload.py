"""The payload of a custom call: what is in it, that it is the same bytes everywhere, and the schema of its keys."""

from __future__ import annotations

import base64
import dataclasses
import enum
import json
import os
import re
import subprocess
import sys
from math import inf, nan

import ml_dtypes
import numpy as np
import pytest
from tests.kernels.payloads import F32, SRC, coded, config_of, refused
from tests.trace.test_golden_ir import CASES

import opennki.dialects.neuronxcc.language as nl
from opennki.bind.host import HostKernel
from opennki.errors import NkiParseError
from opennki.ir.print import to_text
from opennki.kernels import payload as p
from opennki.kernels.payload import KEYS, KERNEL_VERSION, NkiForeignPayload, constant_json, decode_backend_config


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
    "function": (config_of, {"object": f"{config_of.__module__}.config_of"}),
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
