"""Writes the HLO module of one custom call as a protobuf, with no protobuf library and no framework.

The wire format is written by hand: a handful of messages, whose field numbers are those of xla/service/hlo.proto and
xla/xla_data.proto. `opennki.tools.hlo_reader` reads such modules. Source: seeds "PyTorch-XLA bridge" (call_impl, OutputOperandAliasing).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from opennki.errors import UNKNOWN, NkiTypeError

TARGET = "AwsNeuronNkiKernel"

# xla::PrimitiveType by canonical name (the vendor's nki_dtype_to_xla_type_map)
XLA_TYPES: dict[str, int] = {
    "bool": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint8": 6, "uint16": 7, "uint32": 8, "uint64": 9, "float16": 10,
    "float32": 11, "float64": 12, "bfloat16": 16, "float8_e5m2": 19, "float8_e4m3fn": 20, "float8_e4m3": 28, "tfloat32": 11,
    "float32r": 11,
}
_TUPLE = 13

Shaped = tuple[str, tuple[int, ...]]


def _varint(n: int) -> bytes:
    out = bytearray()
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    out.append(n)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes | str) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _packed(field: int, values: Iterable[int]) -> bytes:
    data = b"".join(map(_varint, values))
    return _bytes(field, data) if data else b""


def build_xla_type(dtype: str, shape: Sequence[int]) -> bytes:
    """ShapeProto of a row-major tensor. Errors: NkiTypeError for a dtype that XLA does not have."""
    kind = XLA_TYPES.get(dtype)
    if kind is None:
        raise NkiTypeError(f"XLA has no element type for {dtype}", loc=UNKNOWN, rule=f"it has {', '.join(XLA_TYPES)}")
    layout = _packed(1, range(len(shape) - 1, -1, -1))
    return _number(2, kind) + _packed(3, shape) + _bytes(5, layout) + _packed(6, [0] * len(shape))


def output_operand_aliasing(pairs: Iterable[tuple[int, int]], results: int) -> bytes:
    """OutputOperandAliasing of (operand, output) pairs, for a call with that many results: a tuple where there are several."""
    return b"".join(
        _bytes(74, (_packed(1, [output]) if results > 1 else b"") + (_number(2, operand) if operand else b"")) for operand, output in pairs
    )


def custom_call_module(
    operands: Sequence[Shaped],
    results: Sequence[Shaped],
    backend_config: str,
    *,
    target: str = TARGET,
    aliases: Iterable[tuple[int, int]] = (),
    attributes: Mapping[str, str] | None = None,
    api_version: int = 0,
    side_effect: bool = False,
    name: str = "NkiKernelCallImpl",
) -> bytes:
    """HloModuleProto, serialized, whose entry computation is one custom call of its parameters.

    operands, results: (canonical dtype, shape). aliases: (operand, output) pairs. attributes: frontend attributes.
    api_version: 0 unspecified, the vendor's form; 4 for handlers of the typed FFI. Several results are a tuple. Errors: NkiTypeError.
    """
    types = [build_xla_type(*o) for o in operands]
    outs = [build_xla_type(*r) for r in results]
    result = outs[0] if len(outs) == 1 else _number(2, _TUPLE) + b"".join(_bytes(4, o) for o in outs)
    instructions = [
        _bytes(1, f"p{n}.{n + 1}") + _bytes(2, "parameter") + _bytes(3, shape) + (_number(9, n) if n else b"") + _number(35, n + 1)
        for n, shape in enumerate(types)
    ]
    call = len(types) + 1
    extra = _bytes(28, target) + _bytes(43, backend_config)
    if side_effect:
        extra += _number(65, 1)
    if attributes:
        extra += _bytes(68, b"".join(_bytes(1, _bytes(1, key) + _bytes(2, value)) for key, value in attributes.items()))
    extra += output_operand_aliasing(aliases, len(outs))
    if api_version:
        extra += _number(77, api_version)
    instructions.append(
        _bytes(1, f"custom-call.{call}") + _bytes(2, "custom-call") + _bytes(3, result) + _number(35, call)
        + _packed(36, range(1, call)) + extra
    )
    program = b"".join(_bytes(1, shape) for shape in types) + _bytes(2, result) + b"".join(_bytes(3, f"p{n}") for n in range(len(types)))
    number = call + 1
    entry = f"{name}.{number}"
    computation = _bytes(1, entry) + b"".join(_bytes(2, i) for i in instructions)
    computation += _bytes(4, program) + _number(5, number) + _number(6, call)
    return _bytes(1, entry) + _bytes(2, entry) + _bytes(3, computation) + _bytes(4, program) + _number(5, number) + _number(6, number)
