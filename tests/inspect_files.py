"""Files with payloads: what `opennki inspect` is tested on, written by hand; and the command itself."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from typer.testing import CliRunner

import opennki.dialects.neuronxcc.language as nl
import opennki.dialects.neuronxcc.typing as nt
from opennki.cli import app
from opennki.kernels.framework import UnifiedKernel
from opennki.tools import hlo_reader
from opennki.tools.hlo_reader import find_calls

SRC = Path(__file__).parent.parent / "src"
RANKS, JAX, XLA = hlo_reader.TARGETS
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
