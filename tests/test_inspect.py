"""`opennki inspect`: every form of a compiled program, and files that are none."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import opennki.dialects.neuronxcc as nki
import opennki.dialects.neuronxcc.language as nl
import opennki.dialects.neuronxcc.typing as nt
from opennki.cli import app
from opennki.kernels.framework import UnifiedKernel
from opennki.tools import hlo_reader, inspect
from opennki.tools.hlo_reader import UnreadableFile, find_calls

SRC = Path(__file__).parent.parent / "src"
JAX, XLA = hlo_reader.TARGETS
F32 = np.float32


def add(a, b, scale=2.0):
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.load(a) + nl.load(b) * scale)
    return out


def into(x: nt.mutable_tensor, y):
    """x is changed; its old value plus y is returned, and it."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x)
    nl.store(out, tile + nl.load(y))
    nl.store(x, tile * 2.0)
    return out, x


A = np.zeros((4, 8), F32)
PAYLOAD = UnifiedKernel(add, platform_target="trn2").dump_config(A, A).backend_config
OTHER = UnifiedKernel(into, platform_target="trn1").dump_config(A, A).backend_config


@pytest.fixture
def shown(tmp_path):
    """(exit status, stdout, stderr) of `opennki inspect` on data."""

    def run(data, *args):
        path = tmp_path / "file"
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        return invoke(str(path), *args)

    return run


def invoke(*args, **kwargs):
    done = CliRunner().invoke(app, ["inspect", *args], **kwargs)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout, done.stderr


def masked(out):
    """Output without the size and digest of payloads, which hold line numbers of this file."""
    return re.sub(r"\d+ bytes, sha256 [0-9a-f]{16}", "N bytes, sha256 ...", out)


def payloads(data):
    kind, calls = find_calls(data if isinstance(data, bytes) else data.encode())
    return kind, [(c.target, c.payload.decode(), c.problem) for c in calls]


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


def mlir(config, target=JAX):
    return f"""module @m {{
  func.func public @main(%arg0: tensor<4x8xf32>) -> tensor<4x8xf32> {{
    %0 = stablehlo.custom_call @Sharding(%arg0) {{backend_config = "unrelated"}} : (tensor<4x8xf32>) -> tensor<4x8xf32>
    %1 = stablehlo.custom_call @{target}(%0, %0) {{{config}, mhlo.frontend_attributes = {{a = "b, backend_config = y"}}}} : () -> ()
    %2 = stablehlo.custom_call @Sharding(%1) {{backend_config = "unrelated"}} : (tensor<4x8xf32>) -> tensor<4x8xf32>
    return %2 : tensor<4x8xf32>
  }}
}}
"""


def hlo(config, target=XLA, before=""):
    target = f'custom_call_target="{target}"'
    called = f"""custom-call(%custom-call.1, %p0.1), {before}{target}, output_to_operand_aliasing={{{{0}}: (1, {{}})}}"""
    return f"""HloModule m, entry_computation_layout={{(f32[4,8]{{1,0}})->f32[4,8]{{1,0}}}}

ENTRY %main (p0.1: f32[4,8]) -> f32[4,8] {{
  %p0.1 = f32[4,8]{{1,0}} parameter(0), metadata={{op_name="custom-call(\\"x"}}
  %custom-call.1 = f32[4,8]{{1,0}} custom-call(%p0.1), custom_call_target="Sharding", backend_config="unrelated"
  %custom-call.2 = (f32[4,8]{{1,0}}, /*index=1*/f32[4]{{0}}) {called}, metadata={{op_name="backend_config=\\"no\\""}}{config}
  ROOT %r = f32[4,8]{{1,0}} custom-call(%custom-call.2), custom_call_target="Sharding", backend_config="unrelated"
}}
"""


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


def varint(n):
    out = bytearray()
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    return bytes([*out, n])


def number(field, n):
    return varint(field << 3) + varint(n)


def message(field, data):
    data = data.encode() if isinstance(data, str) else data
    return varint(field << 3 | 2) + varint(len(data)) + data


def instruction(name, opcode, *extra):
    shape = number(2, 11) + message(3, b"\4\x08")
    return message(2, message(1, name) + message(2, opcode) + message(3, shape) + number(35, 1) + b"".join(extra))


def module(*calls, padding=0):
    """An HloModuleProto with calls (target, backend_config) in two computations."""
    body = instruction("p.1", "parameter", message(7, "metadata")) * (1 + padding)
    body += b"".join(instruction(f"call.{i}", "custom-call", message(28, t), message(43, c)) for i, (t, c) in enumerate(calls))
    computations = message(3, message(1, "other") + instruction("a", "add")) + message(3, message(1, "main") + body + number(5, 7))
    return message(1, "jit_f") + message(2, "main") + computations + number(5, 3)


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


# ---- speed and hostile files ----


class Counted(bytes):
    """Bytes that count how much of them is searched backwards."""

    searched = 0

    def rfind(self, needle, start=0, end=None):
        Counted.searched += (len(self) if end is None else end) - start
        return super().rfind(needle, start, end)


@pytest.mark.parametrize("piece", [
    f'custom_call_target="{JAX}" ', f'call_target_name = "{JAX}" ', f"custom_call @{JAX} ", f"custom_call @{JAX}(",
    f'custom_call @{JAX} {{"', f'{JAX} "',
    f'custom_call_target="{JAX}", a="\\', f'"\\"{JAX}', f'custom_call @"{JAX}" {{backend_config = {{',
    f'custom-call( custom_call_target="{JAX}" (',
])  # fmt: skip
def test_hostile_text_is_gone_through_a_fixed_number_of_times(piece, monkeypatch):
    scanned = 0
    token = hlo_reader._TOKEN

    class Token:
        def search(self, data, position):
            nonlocal scanned
            m = token.search(data, position)
            scanned += (len(data) if m is None else m.end()) - position
            return m

    monkeypatch.setattr(hlo_reader, "_TOKEN", Token())
    data = Counted(piece.encode() * 3000)
    Counted.searched = 0
    find_calls(data)
    assert scanned + Counted.searched <= 4 * len(data)


def test_large_files(monkeypatch):
    filler = '  %x.{} = f32[4,8]{{1,0}} add(%x.1, %x.2), metadata={{op_name="jit(f)/add" stack_frame_id=2}}\n'
    body = "".join(filler.format(i) for i in range(1000)) * 240
    text = (hlo(f', backend_config="{PAYLOAD}"') + body + hlo(f', backend_config="{PAYLOAD}"')).encode()
    assert len(text) > 20 << 20
    read = 0
    token = hlo_reader._TOKEN

    class Token:
        def search(self, data, position):
            nonlocal read
            read += 1
            return token.search(data, position)

    monkeypatch.setattr(hlo_reader, "_TOKEN", Token())
    assert len(payloads(text)[1]) == 2 and read < 1000  # only the calls are taken apart
    data = module((JAX, PAYLOAD), padding=300_000)
    assert len(data) > 11 << 20
    wire = []
    monkeypatch.setattr(hlo_reader, "_Wire", lambda d, make=hlo_reader._Wire: wire.append(make(d)) or wire[-1])
    assert len(payloads(data)[1]) == 1 and wire[0].read < 400_000  # instructions without the target are skipped whole


def hostile(rng, samples):
    data = bytearray(rng.choice(samples))
    for _ in range(rng.choice([1, 1, 2, 6])):
        at = rng.randrange(min(len(data), rng.choice([500, 5000])) + 1)
        kind = rng.randrange(4)
        if kind == 0 and at < len(data):
            data[at] = rng.choice([rng.randrange(256), *b'a{}"=\\,:(<\n'])
        elif kind == 1:
            data[at : at + rng.randrange(16)] = rng.choice([b"", b'"', b"{", b"\\", b"custom_call_target=", JAX.encode(), rng.randbytes(2)])
        elif kind == 2:
            del data[at : at + rng.randrange(1, 40)]
        else:
            other = rng.choice(samples)
            start = rng.randrange(len(other))
            data[at:at] = other[start : start + rng.randrange(40)]
    return bytes(data[: rng.randrange(len(data) + 1)] if rng.random() < 0.2 else data)


def test_hostile_files_are_refused_or_shown(monkeypatch):
    monkeypatch.setattr(hlo_reader, "_text_of_bytecode", lambda module: module.decode("latin-1").encode())
    configs = [f'backend_config = "{PAYLOAD}"', f'mhlo.backend_config = {{opaque = "{PAYLOAD}"}}']
    texts = [*map(mlir, configs), hlo(f', backend_config="{PAYLOAD}"')]
    samples = [*map(str.encode, texts),
               module((JAX, PAYLOAD), (XLA, OTHER)), message(1, module((JAX, PAYLOAD))), PAYLOAD.encode(), b"ML\xefR" + bytes(40)]
    rng = random.Random(5)
    statuses = []
    for i in range(500):
        data = rng.randbytes(rng.randrange(400)) if i % 8 == 0 else hostile(rng, samples)
        monkeypatch.setattr("sys.stdin", type("Input", (), {"buffer": io.BytesIO(data)}))
        out, err = io.StringIO(), io.StringIO()
        status = inspect.show("-", out=out, err=err, as_json=bool(i % 3 == 0))
        assert bool(err.getvalue()) == (not out.getvalue()) and (out.getvalue() + err.getvalue()).isascii()
        statuses.append(status)
    assert all(statuses.count(s) > 20 for s in (0, 1, 2)), [statuses.count(s) for s in (0, 1, 2)]
