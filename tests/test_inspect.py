"""`opennki inspect`: every form of a compiled program, and files that are none."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import subprocess
import sys

import pytest
from tests.inspect_files import (
    JAX,
    OTHER,
    PAYLOAD,
    SRC,
    RANKS,
    XLA,
    add,
    hlo,
    into,
    invoke,
    masked,
    message,
    mlir,
    module,
    number,
    payloads,
    varint,
)

import opennki.dialects.neuronxcc as nki
from opennki.tools import hlo_reader
from opennki.tools.hlo_reader import UnreadableFile, find_calls

@pytest.fixture
def shown(tmp_path):
    """(exit status, stdout, stderr) of `opennki inspect` on data."""

    def run(data, *args):
        path = tmp_path / "file"
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        return invoke(str(path), *args)

    return run


# ---- what JAX writes ----


@pytest.fixture(scope="module")
def program():
    """A jitted function with two calls of one kernel and one of another, and its arguments."""
    jax = pytest.importorskip("jax")
    one, two = nki.jit(add, platform_target="trn2"), nki.jit(into, platform_target="trn1")

    def f(a, b):
        c = one(a, b)
        return one(b, c) + two(b, c)[0]

    return jax.jit(f), (jax.numpy.ones((4, 8)), jax.numpy.ones((4, 8)))


def forms(f, args):
    """(kind, data) of each form in which JAX can write the program."""
    lowered = f.lower(*args)
    neuron = f.trace(*args).lower(lowering_platforms=("neuron",))
    yield "MLIR text", lowered.as_text()
    yield "MLIR text", lowered.as_text(debug_info=True)
    yield "HLO text", lowered.as_text(dialect="hlo")
    yield "HLO text", lowered.compile().as_text()
    yield "HLO protobuf", lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()
    yield "MLIR text", neuron.as_text()
    yield "HLO text", neuron.as_text(dialect="hlo")
    yield "HLO protobuf", neuron.compiler_ir("hlo").as_serialized_hlo_module_proto()
    for stage in (lowered, neuron):
        operation = stage.compiler_ir().operation
        yield "MLIR text", operation.get_asm(print_generic_op_form=True)
        if stage is lowered:
            bytecode = io.BytesIO()
            operation.write_bytecode(bytecode)
            yield "MLIR bytecode", bytecode.getvalue()


def test_every_form_that_jax_writes(program, shown):
    f, args = program
    count = 0
    for kind, data in forms(f, args):
        status, out, err = shown(data, "--json")
        found = json.loads(out)
        assert (status, err, found["kind"]) == (0, "", kind)
        first, second = found["kernels"]
        assert [first["func_name"], second["func_name"]] == ["add", "into"]
        assert [len(first["calls"]), len(second["calls"])] == [2, 1] and first["calls"][0]["target"] == JAX
        assert second["aliases"] == [[0, 1]] and first["aliases"] == []
        assert payloads(data)[1][0] == (JAX, PAYLOAD, "")
        count += 1
    assert count == 11


def test_jax_export(program, shown):
    export = pytest.importorskip("jax.export")
    from opennki.bind.jax import export_checks

    f, args = program
    made = export.export(f, disabled_checks=export_checks())(*args)
    data = made.mlir_module_serialized
    assert data.startswith(hlo_reader.BYTECODE)
    # a flatbuffer holds it as bytes with their length before them (jax.export.serialize needs a package for this)
    wrapped = b"\x3c\0\0\0" + bytes(60) + len(data).to_bytes(4, "little") + data + b"\0\0tail"
    for form in (data, wrapped):
        status, out, _ = shown(form, "--no-ir")
        assert status == 0 and "1: add x 2" in out and "2: into" in out
    assert shown(data[: len(data) // 2])[0] == 2
    status, out, err = shown(wrapped[: len(wrapped) // 2])
    assert (status, out) == (2, "") and err.count("\n") == 1
    try:
        serialized = made.serialize()
    except ImportError:
        return
    assert shown(bytes(serialized), "--no-ir")[1] == shown(data, "--no-ir")[1]


def test_bytecode_without_jax(shown, tmp_path, monkeypatch):
    (tmp_path / "jax.py").write_text("raise ImportError('no jax')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    status, out, err = shown(b"ML\xefR\x0dStableHLO_v1.15.0\0")
    assert (status, out) == (2, "") and "pip install jax" in err and "as_text()" in err


# ---- text by hand ----


@pytest.mark.parametrize(
    "text",
    [
        mlir(f'api_version = 0 : i32, backend_config = "{PAYLOAD}"'),
        mlir(f'backend_config = "", mhlo.backend_config = {{opaque = "{PAYLOAD}"}}'),
        mlir(f'backend_config = {{other = "x", opaque = "{PAYLOAD}"}}'),
        mlir(f'backend_config = {{\n      opaque =\n "{PAYLOAD}"}}').replace(") {backend", ")\n  {backend"),
        mlir('backend_config = "' + "".join(f"\\{ord(c):02X}" for c in PAYLOAD) + '"'),
        mlir('backend_config = "' + PAYLOAD.replace("e", "\\65", 3) + '"'),
        mlir(f'backend_config = "{{opaque = \\22{PAYLOAD}\\22}}"'),
        mlir(f'backend_config = "{PAYLOAD}"').replace("stablehlo.", "mhlo."),
        mlir(f'backend_config = "{PAYLOAD}"', f'"{JAX}"'),
        mlir(f'"backend_config" = "{PAYLOAD}", backend_config = "{PAYLOAD}"'),
        mlir(f'backend_config = "{PAYLOAD}"').replace("\n", "\r\n"),
        mlir(f'backend_config = "{PAYLOAD}"').replace("\n", " "),
        f'"builtin.module"() ({{ %1 = "stablehlo.custom_call"(%0) <{{api_version = 0 : i32, backend_config = "{PAYLOAD}", '
        f'call_target_name = "{JAX}", '
        'operand_layouts = [dense<[1, 0]> : tensor<2xindex>]}> : (tensor<4xf32>) -> tensor<4xf32> }) : () -> ()',
        f'"builtin.module"() ({{ %1 = "stablehlo.custom_call"(%0) <{{api_version = 4 : i32, call_target_name = "{JAX}"}}> '
        f'{{mhlo.backend_config = {{opaque = "{PAYLOAD}"}}}} : (tensor<4xf32>) -> tensor<4xf32> }}) : () -> ()',
    ],
)
def test_mlir_text(text):
    assert payloads(text) == ("MLIR text", [(JAX, PAYLOAD, "")])


@pytest.mark.parametrize(
    "text",
    [
        hlo(f', backend_config="{PAYLOAD}"'),
        hlo("", before=f'backend_config="{PAYLOAD}", '),
        hlo(f', backend_config={{opaque = "{PAYLOAD}"}}'),
        hlo(f', backend_config={{opaque="{PAYLOAD}", other = {{opaque = "x"}}}}'),
        hlo(', backend_config="' + "".join(f"\\{ord(c):03o}" for c in PAYLOAD) + '"'),
        hlo(', backend_config="' + PAYLOAD.replace("e", "\\x65", 3) + '"'),
        hlo(f', backend_config="{{opaque = \\"{PAYLOAD}\\"}}"'),
        hlo(f',\n    frontend_attributes={{nki.kernel="add"}},\n    backend_config="{PAYLOAD}"'),
        hlo(f', backend_config="{PAYLOAD}"').replace("\n", "\r\n"),
        hlo(f', backend_config="{PAYLOAD}"').replace("\n", " "),
        hlo("", before=f'backend_config="{PAYLOAD}", ').replace("\n", " "),
    ],
)
def test_hlo_text(text):
    assert payloads(text) == ("HLO text", [(XLA, PAYLOAD, "")])
    assert payloads(text.replace(XLA, RANKS)) == ("HLO text", [(RANKS, PAYLOAD, "")])


def test_a_name_that_is_no_call():
    names = [f"func.func private @{JAX}()", f'foo = "{JAX}"', f"// {JAX}", f'custom_call_target="{JAX}2", backend_config="x"',
             f'custom_call @{JAX}.x() {{backend_config = "x"}}']
    for name in names:
        assert payloads(mlir('backend_config = "x"', "Sharding") + name + "\n")[1] == []


def test_a_target_name_inside_of_a_payload_is_no_call():
    inner = f'custom_call_target=\\"{XLA}\\", backend_config=\\"y\\"'
    assert len(payloads(hlo(f', backend_config="x {inner}"'))[1]) == 1


@pytest.mark.parametrize("text, problem", [
    (hlo(""), "no payload"), (mlir("api_version = 0 : i32"), "no payload"), (mlir('backend_config = ""'), "no payload"),
    (mlir("mhlo.backend_config = {a = 1}"), "no payload"), (mlir("backend_config = 7"), "no payload"),
    (hlo(f', backend_config="{PAYLOAD}"').partition(PAYLOAD)[0] + PAYLOAD[:50], "inside of a string"),
    (mlir(f'backend_config = "{PAYLOAD}"').partition(PAYLOAD)[0], "inside of a string"),
    (mlir("a = " + "[" * 1000), "brackets"),
])  # fmt: skip
def test_calls_without_a_payload(text, problem, shown):
    (call,) = find_calls(text.encode())[1]
    assert problem in call.problem and call.payload == b""
    status, out, err = shown(text)
    assert (status, err) == (1, "") and problem in out and "a call without a kernel" in out


# ---- protobuf by hand ----


def test_protobufs(shown):
    typed = [(JAX, f'{{opaque = "{PAYLOAD}"}}'), (JAX, f'{{a = "x", opaque="{PAYLOAD}"}}')]
    plain = module(("Sharding", "x"), (XLA, PAYLOAD), *typed, (JAX, OTHER))
    hlo_proto = message(1, plain) + message(3, message(1, b"\x08\1"))
    assert find_calls(plain)[1][0].place == "call.1"
    for data in (plain, hlo_proto, message(1, hlo_proto) + message(2, b"\x08\1")):
        assert payloads(data) == ("HLO protobuf", [(XLA, PAYLOAD, ""), (JAX, PAYLOAD, ""), (JAX, PAYLOAD, ""), (JAX, OTHER, "")])
    status, out, _ = shown(plain, "--no-ir")
    assert status == 0 and f"1: add x 3\n  calls            {XLA}, {JAX} at call.1, call.2, call.3\n" in out and "2: into\n" in out
    assert "shares the buffer of operand 0" in out
    assert shown(module((JAX, "")))[0] == 1 and shown(module(("Sharding", "x")))[0] == 1


@pytest.mark.parametrize("data", [
    b"\x0a\x05jit_f", module((JAX, PAYLOAD))[:-200],
    b"\x1a\xff\xff\xff\xff\x7f", b"\x1a" + b"\xff" * 40, b"\x1a\2\x12", b"\0\0\0\0", b"\x0b\x0c",
    message(3, b"\x0a\x01\x80\x12\xff"),
    message(1, message(1, message(1, module((JAX, PAYLOAD))))), module((JAX, PAYLOAD)).replace(b"\x12", b"\x13"),
    b"\x7fELF\2\1\1\0" + bytes(100), b"\x1f\x8b\x08\0" + bytes(10), b"PK\3\4" + bytes(10), bytes(1000), b"\xff" * 1000, b"\x1a\0",
])  # fmt: skip
def test_damaged_files_are_refused(data, shown):
    with pytest.raises(UnreadableFile):
        find_calls(data)
    status, out, err = shown(data)
    assert (status, out) == (2, "") and err.startswith("opennki: ") and err.count("\n") == 1 and "Traceback" not in err


def test_wrong_wire_types_inside_are_skipped_or_refused():
    good = module((JAX, PAYLOAD))
    name = message(28, JAX)
    for wire in (0, 1, 5):  # the target as a number: no target, or what follows is no field
        with contextlib.suppress(UnreadableFile):
            assert payloads(good.replace(name, varint(28 << 3 | wire) + name[2:]))[1] == []
    fixed = good.replace(number(5, 3), varint(99 << 3 | 5) + b"abcd" + varint(98 << 3 | 1) + b"abcdefgh")
    assert payloads(fixed)[1] == [(JAX, PAYLOAD, "")]


def test_the_number_of_fields_and_calls_is_bounded(monkeypatch):
    monkeypatch.setattr(hlo_reader, "MAX_FIELDS", 100)
    with pytest.raises(UnreadableFile, match="more than 100 fields"):
        find_calls(module((JAX, PAYLOAD)) + number(5, 3) * 200)
    monkeypatch.setattr(hlo_reader, "MAX_CALLS", 3)
    for data in (module(*[(JAX, PAYLOAD)] * 4), (hlo(', backend_config="x"') * 4).encode()):
        with pytest.raises(UnreadableFile, match="more than 3"):
            find_calls(data)


def test_the_size_of_a_file_is_bounded(monkeypatch):
    monkeypatch.setattr(hlo_reader, "MAX_FILE_BYTES", 1 << 20)
    with pytest.raises(UnreadableFile, match="more than 1 MiB"), open("/dev/zero", "rb") as file:
        hlo_reader.read_calls(file)


# ---- the command ----


def test_a_payload_alone(shown, golden):
    status, out, err = shown(PAYLOAD)
    assert (status, err) == (0, "")
    golden(masked(out))
    wrapped = "\n".join(PAYLOAD[i : i + 76] for i in range(0, len(PAYLOAD), 76)) + "\n"
    assert shown(wrapped) == shown(f' "{PAYLOAD}"\n') == shown(b"\xef\xbb\xbf" + PAYLOAD.encode()) == (0, out, "")
    assert invoke("-", input=PAYLOAD) == (0, out, "")
    assert shown(b"\xff\xfe" + PAYLOAD.encode("utf-16-le"))[1] == out
    assert shown(PAYLOAD, "--no-ir")[1] == out.partition("\nopennki_ir")[0]


def test_aliases_options_and_several_kernels(shown, golden):
    text = hlo(f', backend_config="{OTHER}"') + hlo(f', backend_config="{PAYLOAD}"') * 2
    status, out, err = shown(text, "--no-ir")
    assert (status, err) == (0, "")
    golden(masked(out))
    assert shown(text, "--no-ir", "--kernel", "2")[1] == out.partition("\n\n")[2]
    for wrong in ("0", "3", "-1"):
        status, out, err = shown(text, "--kernel", wrong)
        assert (status, out) == (2, "") and "kernels 1 to 2" in err


def test_json(shown):
    status, out, err = shown(hlo(f', backend_config="{OTHER}"'), "--json", "--no-ir")
    found = json.loads(out)["kernels"][0]
    config = json.loads(base64.b64decode(OTHER))
    assert (status, err) == (0, "") and "serialize_ir_string" not in found
    assert {k: found[k] for k in ("number", "calls", "bytes", "aliases")} == {
        "number": 1, "calls": [{"target": XLA, "place": "line 6"}], "bytes": len(OTHER), "aliases": [[0, 1]],
    }
    assert all(found[k] == v for k, v in config.items() if k not in ("serialize_ir_string", "source_locations"))
    assert json.loads(shown(OTHER, "--json")[1])["kernels"][0]["serialize_ir_string"] == config["serialize_ir_string"]


def test_a_corrupt_payload_is_reported_and_the_others_are_shown(shown):
    broken = PAYLOAD[:-50]
    text = hlo(f', backend_config="{broken}"') + hlo(f', backend_config="{PAYLOAD}"') + hlo(', backend_config="?"') + hlo("") + hlo("")
    status, out, err = shown(text, "--no-ir")
    assert (status, err) == (1, "")
    heads = [line for line in out.splitlines() if line[:1].isdigit()]
    assert heads == ["1: a call without a kernel", "2: add", "3: a call without a kernel", "4: a call without a kernel x 2"]
    assert out.count("this is no payload of a kernel") == 2 and "it is not base64" in out
    assert shown(text, "--kernel", "2", "--no-ir")[0] == 0
    found = json.loads(shown(text, "--json")[1])["kernels"]
    assert ["error" in k for k in found] == [True, False, True, True]


def test_another_compilers_payload_is_explained(shown, golden):
    config = {"kernel_version": 1, "func_name": "flash\x1b[31m", "grid": [2, 4], "serialize_ir_string": "AAAA" * 500, "mac_count": 7}
    config["opts"] = {"a": [1] * 500}
    payload = base64.b64encode(json.dumps(config).encode()).decode()
    status, out, err = shown(hlo(f', backend_config="{payload}"', JAX))
    assert (status, err) == (1, "")
    golden(masked(out))
    keys = json.loads(shown(payload, "--json")[1])["kernels"][0]["keys"]
    assert keys["grid"] == "[2, 4]" and keys["serialize_ir_string"] == "2000 characters"


@pytest.mark.parametrize("data, status, text", [
    (b"", 2, "it is empty"), (b" \n\t", 2, "it is empty"), (b"HloModule m\n", 1, "this HLO text has no call"),
    (b"print('hello')\n", 1, "this text has no call"),
    (mlir('backend_config = "x"', "Sharding").encode(), 1, "this MLIR text has no call"), (b"\x1f\x8b\x08", 2, "compressed"),
])  # fmt: skip
def test_files_without_calls(shown, data, status, text):
    assert shown(data)[:2] == (status, "") and text in shown(data)[2]


def test_files_that_cannot_be_read(tmp_path):
    for path, text in [("no_such_file.hlo", "No such file"), (str(tmp_path), "directory"), ("a\0b", "null byte"), ("x" * 5000, "too long")]:
        status, out, err = invoke(path)
        assert (status, out) == (2, "") and text in err and err.isprintable() is False and err.count("\n") == 1


def test_the_terminal_gets_no_control_characters(shown):
    config = json.loads(base64.b64decode(PAYLOAD))
    config["opts"] = {"\x1b[2J": "\x1b]0;title\x07", "é": ["\u202e"]}
    config["constant_values"] = {"\n": "\n", "\ud83d\ude00": 1}
    for field in ("func_name", "serialize_ir_string"):
        config[field] = config[field].replace("add", "\x1b[31m" if field == "func_name" else "\\x1b[31m", 1)
    status, out, _ = shown(base64.b64encode(json.dumps(config).encode()))
    assert status == 0 and out.isascii() and all(c.isprintable() or c == "\n" for c in out)


def test_as_a_command(tmp_path):
    path = tmp_path / "module.hlo"
    path.write_text(hlo(f', backend_config="{PAYLOAD}"'))
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    command = [sys.executable, "-m", "opennki", "inspect"]
    done = subprocess.run([*command, str(path)], capture_output=True, text=True, env=env, timeout=120)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("1: add\n") and done.stdout.endswith("outputs(t1)\n")
    done = subprocess.run([*command, "-"], input="nothing here", capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 1 and done.stderr == "opennki: -: this text has no call of an NKI kernel\n"
