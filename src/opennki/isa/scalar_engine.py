"""Instructions of the Scalar Engine: activation functions with scale, bias and a running sum.

The engine has one accumulator register per partition, float32, which lives on between instructions.
"""
from __future__ import annotations

from math import prod
from typing import Annotated as T
from typing import Any

import numpy as np

from opennki.errors import NkiValueError, make
from opennki.isa import cost
from opennki.isa.declare import (
    NUMERIC,
    ON_CHIP,
    PARTITIONS,
    Array,
    Attr,
    DType,
    In,
    Mask,
    Op,
    Out,
    Register,
    Result,
    instruction,
)
from opennki.isa.enums import reduce_cmd as cmd
from opennki.isa.known import certain
from opennki.isa.reduce import reduce_free
from opennki.isa.scalar import ACTIVATIONS, SCALAR

_REDUCE_OPS = frozenset({"add", "multiply", "maximum", "minimum"})
_BIAS_DTYPES = ("float32", "float16", "bfloat16")
_BIAS, _SCALE = "err_activation_bias_invalid_type", "err_activation_scale_scalar_or_vector"
# Rows of the mask that hold no element leave the row's register and its element of reduce_res alone.
_MASK_DIMS = {"bias": (0, None), "scale": (0, None), "reduce_res": (0, None)}


def _is_vector(tile: Any) -> bool:
    return bool(prod(tile.shape[1:]) == 1)


def _check_activation(c: Any, target: Any) -> None:
    if getattr(c.scale, "space", None):
        if not _is_vector(c.scale):
            raise make("err_activation_scale_scalar_or_vector", f"scale has shape {tuple(c.scale.shape)}",
                       operand="scale")
        if c.scale.dtype != "float32":
            raise make("err_activation_scale_invalid_type", f"scale is {c.scale.dtype}", operand="scale")
    if c.bias is not None:
        if not _is_vector(c.bias) or c.bias.dtype not in _BIAS_DTYPES:
            raise make("err_activation_bias_invalid_type", f"bias is {c.bias.dtype} {tuple(c.bias.shape)}",
                       operand="bias")
        if c.op == "reciprocal" and target.generation < 3:
            raise NkiValueError(
                f"reciprocal takes no bias on {target.name}", operand="bias",
                rule="the reciprocal activation has no bias before trn2",
                why="the Scalar Engine of NeuronCore-v2 computes op(data * scale) for it",
                fix="add the bias with nl.add first, or leave it out")
    if c.reduce_op is not None and c.reduce_op != "add" and target.generation < 3:
        raise NkiValueError(
            f"reduce_op {c.reduce_op} is not available on {target.name}", operand="reduce_op",
            rule="reduce_op is np.add before trn2",
            why="the accumulator of the Scalar Engine only adds there",
            fix="use np.add, or reduce with nisa.tensor_reduce")


def _check_reduce(c: Any, target: Any) -> None:
    _check_activation(c, target)
    if c.reduce_cmd in (cmd.reduce, cmd.reset_reduce) and c.reduce_op is None:
        raise NkiValueError(
            f"reduce_cmd {cmd(c.reduce_cmd).name} without reduce_op", operand="reduce_op",
            rule="reduce and reset_reduce need a reduce_op", why="the accumulator has to know how to combine",
            fix="pass reduce_op=np.add, or leave reduce_cmd out")


@np.errstate(all="ignore")
def _apply(op: str, data: Array, bias: Array | None, scale: Any) -> Array:
    """op(data * scale + bias), each step rounded to float32."""
    if getattr(scale, "ndim", 0):
        x = data * scale
    else:
        x = data if certain(np.equal(scale, 1)) else data * np.asarray(scale, np.float32)
    if bias is not None:
        x = x + bias if x is data else np.add(x, bias, out=x)
    return np.asarray(SCALAR[op].raw(x))


@np.errstate(all="ignore")
def _accumulate(op: str | None, x: Array, regs: Array, mask: Array | None, command: int) -> Array:
    """New accumulators: 0 for reset, else each row folded by `op`, for reduce after the old value."""
    axes = tuple(range(1, x.ndim))
    rows = None
    if mask is not None:
        mask = np.broadcast_to(mask, x.shape)
        rows = mask.any(axis=axes, keepdims=True).reshape(regs.shape)
    if op is None or command == cmd.reset:
        total = np.zeros_like(regs)
    else:
        if mask is not None:
            x = np.where(mask, x, np.float32(SCALAR[op].identity))
        total = reduce_free(x, op, axes).reshape(regs.shape)
        if command == cmd.reduce:
            total = SCALAR[op].raw(regs, total)
    return total if rows is None else np.where(rows, total, regs)


def _cost(d: Any, hw: Any) -> float:
    # Reading the accumulators takes an instruction of its own.
    return cost.streaming(d, hw) + (hw.min_ii if cost.attr(d, "reduce_res") is not None else 0)


def _folding(c: Any, op: str, tile: Any) -> dict[str, Any]:
    # AWS's own attention kernel (nki-samples, for Stable Diffusion) writes the sum of exponentials as an instruction of its own, on the
    # ground that the compiler makes one of both.
    if op != "add" or c.reduce_cmd != cmd.idle or c.reduce_res is not None:
        return {}
    return {"reduce_op": op, "reduce_res": tile, "reduce_cmd": cmd.reset_reduce}


@instruction(
    engine="scalar", family="activation", source="api_legacy: isa.activation",
    results=(Result(shape="data", dtype="data"),), limits=(PARTITIONS,), mask_on="data", mask_dims=_MASK_DIMS,
    check=_check_reduce, cost=_cost, folding=_folding)
def activation(op: T[str, Op(ACTIVATIONS)], data: T[Array, In("P F*")], *,
               bias: T[Array | None, In("P 1", ON_CHIP, NUMERIC, optional=True, shape_code=_BIAS)] = None,
               scale: T[Any, In("P 1", ON_CHIP, NUMERIC, scalar=True, shape_code=_SCALE)] = 1.0,
               reduce_op: T[str | None, Op(_REDUCE_OPS, optional=True)] = None,
               reduce_res: T[Array | None, Out("P 1", optional=True)] = None,
               reduce_cmd: T[cmd, Attr((cmd,), tuple(cmd)[:4])] = cmd.idle,
               mask: T[Any, Mask] = None, dtype: T[Any, DType] = None,
               regs: T[Array | None, Register("scalar")] = None, **kwargs: Any) -> tuple[Any, ...]:
    """Activation function on the Scalar Engine: result = op(data * scale + bias), computed in float32.

    op: one of the activation functions. data: [P, F...] in SBUF or PSUM, P <= 128. scale: a number or a
    float32 [P, 1] tile. bias: [P, 1] tile, float32, float16 or bfloat16 (none for reciprocal before trn2).
    Result: shape of data, in SBUF (or PSUM), dtype of data unless dtype is given.

    The result, before it is rounded to its dtype, can be folded over the free elements into one accumulator
    register per partition: reduce_cmd idle leaves the registers, reset sets them to 0, reduce folds into them
    by reduce_op, reset_reduce starts anew. reduce_res: [P, 1] tile that gets the registers afterwards.
    reduce_op: add (others from trn2). mask counts the dimensions of data; elements outside are neither
    written nor folded. Cost: max(64, F) cycles; 64 more to read the registers into reduce_res.
    """
    if regs is None:
        regs = np.zeros((data.shape[0],) + (1,) * (data.ndim - 1), np.float32)
    out = _apply(op, data, bias, scale)
    if reduce_cmd != cmd.idle:
        regs = _accumulate(reduce_op, out, regs, mask, reduce_cmd)
    return out, (None if reduce_res is None else regs), regs


@instruction(
    engine="scalar", family="activation", source="api_legacy: isa.activation_reduce",
    results=(Result(shape="data", dtype="data"),), limits=(PARTITIONS,), mask_on="data", mask_dims=_MASK_DIMS,
    check=_check_activation, cost=lambda d, hw: cost.streaming(d, hw) + hw.min_ii)
def activation_reduce(op: T[str, Op(ACTIVATIONS)], data: T[Array, In("P F*")], *,
                      reduce_op: T[str, Op(_REDUCE_OPS)], reduce_res: T[Array, Out("P 1")],
                      bias: T[Array | None, In("P 1", ON_CHIP, NUMERIC, optional=True, shape_code=_BIAS)] = None,
                      scale: T[Any, In("P 1", ON_CHIP, NUMERIC, scalar=True, shape_code=_SCALE)] = 1.0,
                      mask: T[Any, Mask] = None, dtype: T[Any, DType] = None,
                      regs: T[Array | None, Register("scalar")] = None, **kwargs: Any) -> tuple[Any, ...]:
    """Activation and its reduction: result = op(data * scale + bias), reduce_res = fold of it over all free
    elements.

    The same as activation with reduce_cmd=reset_reduce. data: [P, F...] in SBUF or PSUM, P <= 128. scale: a
    number or a float32 [P, 1] tile. bias: [P, 1] tile, float32, float16 or bfloat16. reduce_op: add (others
    from trn2). reduce_res: [P, 1] tile in SBUF or PSUM, written; the fold takes the float32 values before
    they are rounded to the dtype of the result. Result: shape of data, dtype of data unless dtype is given.
    mask counts the dimensions of data; elements outside are neither written nor folded. Cost: max(64, F) + 64
    cycles.
    """
    values: tuple[Any, ...] = activation(
        op, data, bias=bias, scale=scale, reduce_op=reduce_op, reduce_res=reduce_res,
        reduce_cmd=cmd.reset_reduce, mask=mask, regs=regs)
    return values
