"""Vector Engine, elementwise: arithmetic of tiles and scalars, copies, fill, cross-partition shuffle."""
from __future__ import annotations

from typing import Annotated as T
from typing import Any

import numpy as np

from opennki.errors import NkiTypeError, NkiValueError, make
from opennki.isa import cost
from opennki.isa.declare import (
    PARTITIONS,
    Affine,
    Array,
    Attr,
    DType,
    EngineChoice,
    In,
    InOut,
    Mask,
    Op,
    Out,
    Result,
    instruction,
)
from opennki.isa.dtypes import convert, is_integer, promote
from opennki.isa.enums import engine
from opennki.isa.known import certain
from opennki.isa.scalar import SCALAR
from opennki.isa.vector_rules import (
    ALU,
    ARITHMETIC,
    BINARY,
    BITVEC,
    EXACT_INT,
    GPSIMD_ONLY,
    INT32,
    apply,
    apply_bits,
    apply_exact,
    at_most_dims,
    choose,
    dtype_of,
    elements,
    gpsimd_reaches,
    in_psum,
    included,
    not_both_in_psum,
    only_integers,
    rate,
    result_dtype,
)

KEEP = 255
QUADRANT = 32
_PREDICATES = "bool uint8 uint16 uint32"
_GPSIMD_WHY = "of the compute engines only GpSimd has this function"


# ---- two tiles -------------------------------------------------------------------------------------------


def _exact_integers(c: Any) -> bool:
    """32-bit integers, an operator that GpSimd computes on integers, and operands that it reaches."""
    kinds = {dtype_of(c.data1), dtype_of(c.data2)}
    return c.op in EXACT_INT and kinds <= INT32 and not in_psum(c, "data1", "data2") and c.engine != "vector"


def _tensor_tensor_engine(c: Any, _target: Any) -> str:
    return "gpsimd" if c.op == "power" or _exact_integers(c) else "vector"


def _tensor_tensor_check(c: Any, target: Any) -> None:
    not_both_in_psum(c, "data1", "data2")
    if c.op in BITVEC:
        choose(c, f"the bitwise operator {c.op}", "vector", "bitwise units are in the Vector Engine only",
               "drop engine=")
        only_integers(c, c.op, "data1", "data2", result=promote(dtype_of(c.data1), dtype_of(c.data2)))
    elif c.op == "power":
        choose(c, "power", "gpsimd", _GPSIMD_WHY, "drop engine=, or use nki.isa.gpsimd_engine")
    gpsimd_reaches(c, c.engine or _tensor_tensor_engine(c, target), "data1", "data2",
                   because=_GPSIMD_WHY if c.op == "power" else "")


def _tensor_tensor_cost(d: Any, hw: Any) -> float:
    if d.engine == "gpsimd":
        return float(hw.gpsimd_start + 2 * d.F)  # no formula is documented: isa_costs.json, inferred
    spaces = [d.spaces["data1"], d.spaces["data2"]]
    fast = set(d.dtypes.values()) == {"bfloat16"} and cost.attr(d, "op") in EXACT_INT and "psum" not in spaces
    return float(max(hw.min_ii, d.F if fast or spaces.count("psum") == 1 else 2 * d.F))


@instruction(
    engine="vector gpsimd", family="elementwise", source="api_legacy: isa.tensor_tensor",
    results=(Result("data1", lambda c: promote(dtype_of(c.data1), dtype_of(c.data2))),),
    raw=lambda c: c.op in BITVEC or _exact_integers(c),
    check=_tensor_tensor_check, choose_engine=_tensor_tensor_engine, cost=_tensor_tensor_cost)
def tensor_tensor(data1: T[Array, In("P F*", spread=True)], data2: T[Array, In("P F*", spread=True)], op: T[str, Op(BINARY)], *,
                  dtype: T[Any, DType] = None, mask: T[Any, Mask] = None,
                  engine: T[Any, EngineChoice] = engine.unknown, **kwargs: Any) -> Array:
    """data1 op data2, element by element.

    data1, data2: tiles with the same number of partitions (at most 128) and of elements per partition; one of
    one element per partition is read again for each element of the other, as public kernels do; no other
    broadcasting. SBUF or PSUM, but not both in PSUM. op: a binary ALU operator. Result: the shape of data1;
    dtype, or the promoted dtype of both. Arithmetic is done in float32 and rounded once. Exceptions: bitwise
    operators take and make integers, keep the bits and run on the Vector Engine; add, subtract and multiply
    of int32 and uint32 tiles in SBUF run on GpSimd unless engine says vector, are exact, and saturate to the
    result dtype. power runs on GpSimd. GpSimd does not reach PSUM.
    """
    if op in BITVEC:
        return apply_bits(op, data1, data2)
    if data1.dtype.kind in "iu":
        return apply_exact(op, data1, data2)
    return apply(op, data1, data2)


# ---- a tile and scalars ----------------------------------------------------------------------------------


def _tensor_scalar_engine(c: Any, _target: Any) -> str:
    return "gpsimd" if {c.op0, c.op1} & GPSIMD_ONLY else "vector"


def _tensor_scalar_check(c: Any, target: Any) -> None:
    if (c.op1 is None) != (c.operand1 is None) and not (c.op1 and SCALAR[c.op1].arity == 1):
        raise NkiTypeError("op1 and operand1 go together",
                           operand="operand1" if c.operand1 is None else "op1",
                           rule="op1 and operand1 are both given or both None",
                           why="the second operator takes the second operand", fix="give both, or neither")
    ops = [op for op in (c.op0, c.op1) if op is not None]
    bitvec = [op in BITVEC for op in ops]
    if any(bitvec) and not all(bitvec):
        raise NkiTypeError(f"{c.op0} and {c.op1} are of two kinds", operand="op1",
                           rule="op0 and op1 are both bitwise or both arithmetic",
                           why="between them the value is either a bit pattern or a float32",
                           fix="use two instructions")
    if all(bitvec):
        choose(c, f"the bitwise operator {c.op0}", "vector", "bitwise units are in the Vector Engine only",
               "drop engine=")
        used = ["data"] + [f"operand{i}" for i, op in enumerate(ops) if SCALAR[op].arity == 2]
        only_integers(c, c.op0, *used, result=dtype_of(c.data))
        return
    special = next((op for op in ops if op in GPSIMD_ONLY), None)
    if special:
        choose(c, special, "gpsimd", _GPSIMD_WHY, "drop engine=, or use nki.isa.gpsimd_engine")
    elif c.engine == "gpsimd":
        choose(c, f"tensor_scalar with {' and '.join(ops)}", "vector scalar",
               "GpSimd runs tensor_scalar for rsqrt and power only", "drop engine=")
    elif c.engine == "scalar":
        _scalar_engine_has(c, target)
    gpsimd_reaches(c, c.engine or _tensor_scalar_engine(c, target), "data", "operand0", "operand1",
                   because=_GPSIMD_WHY)


def _scalar_engine_has(c: Any, target: Any) -> None:
    if target.generation < 3:
        raise NkiValueError(f"tensor_scalar does not run on the Scalar Engine of {target.name}",
                            operand="engine",
                            rule="the Scalar Engine runs tensor_scalar from NeuronCore-v3 (trn2) on",
                            why="earlier ones have no such instruction",
                            fix="drop engine=, or use nki.isa.activation with scale and bias")
    if (c.op0, c.op1) not in (("multiply", "add"), ("multiply", None), ("add", None)):
        raise NkiValueError(f"the Scalar Engine does not run op0={c.op0} with op1={c.op1}", operand="engine",
                            rule="on the Scalar Engine: multiply then add, multiply, or add",
                            why="its tensor_scalar is scale and bias", fix="drop engine=")


def _tensor_scalar_cost(d: Any, hw: Any) -> float:
    if d.engine == "gpsimd":
        return float(4 * max(hw.min_ii, d.F))
    return float(max(hw.min_ii, d.F / rate(d, hw, "operand0", "operand1")))


def _as_activation(c: Any) -> tuple[str, ...]:
    """A product and a sum with scalars are the scale and bias of an activation: public profiles show the compiler's choice of it."""
    kinds = {dtype_of(c.data), result_dtype(c, dtype_of(c.data))}
    simple = c.op0 in ("multiply", "add", "subtract") and c.op1 in (None, "add", "subtract") and not (c.op1 and c.op0 != "multiply")
    return ("scalar",) if simple and not any(is_integer(k) for k in kinds) else ()


def _copy_moves(c: Any) -> tuple[str, ...]:
    return () if any(is_integer(k) for k in (dtype_of(c.src), result_dtype(c, dtype_of(c.src)))) else ("scalar",)


@instruction(
    engine="vector scalar gpsimd", family="tensor_scalar", source="api_legacy: isa.tensor_scalar", moves=_as_activation,
    results=(Result("data", "data"),), raw=lambda c: c.op0 in BITVEC,
    check=_tensor_scalar_check, choose_engine=_tensor_scalar_engine, cost=_tensor_scalar_cost)
def tensor_scalar(data: T[Array, In("P F*")], op0: T[str, Op(ALU)], operand0: T[Any, In("P 1", scalar=True)],
                  reverse0: T[bool, Attr((bool,))] = False, op1: T[Any, Op(ALU, optional=True)] = None,
                  operand1: T[Any, In("P 1", scalar=True, optional=True)] = None,
                  reverse1: T[bool, Attr((bool,))] = False, *, dtype: T[Any, DType] = None,
                  mask: T[Any, Mask] = None, engine: T[Any, EngineChoice] = engine.unknown,
                  **kwargs: Any) -> Array:
    """(data op0 operand0) op1 operand1, with operands that are one value, or one value per partition.

    data: a tile in SBUF or PSUM, at most 128 partitions. operand0, operand1: a number, or a tile with one
    element per partition. reverse0, reverse1: the operand is the left side of its operator. op1 and operand1
    are optional together. A unary operator (abs, rsqrt, invert ...) ignores its operand. Result: the shape of
    data; dtype, or that of data. Arithmetic is done in float32 and rounded once, at the end. Bitwise
    operators take and make integers, keep the bits, run on the Vector Engine, and do not mix with arithmetic
    ones. rsqrt and power run on GpSimd, which does not reach PSUM; the Scalar Engine (trn2 and later) runs
    multiply, add, and multiply then add.
    """
    if op0 in BITVEC:
        bits = apply_bits(op0, data, operand0, reverse0)
        return bits if op1 is None else apply_bits(op1, bits, operand1, reverse1)
    value = apply(op0, data, operand0, reverse0)
    return value if op1 is None else apply(op1, value, operand1, reverse1)


def _scalar_tensor_tensor_check(c: Any, _target: Any) -> None:
    at_most_dims(c, "data", 1)
    not_both_in_psum(c, "data", "operand1")


def _scalar_tensor_tensor_cost(d: Any, hw: Any) -> float:
    fast = (d.dtypes["data"] == d.dtypes["operand1"] == "bfloat16" and (cost.attr(d, "op0"),
                                                                        cost.attr(d, "op1")) == ("subtract",
                                                                                                 "multiply")
            and d.F % 2 == 0)
    return float(max(hw.min_ii, d.F if fast else 2 * d.F))


@instruction(
    engine="vector", family="tensor_scalar", source="api_legacy: isa.scalar_tensor_tensor",
    results=(Result("data", "data"),), check=_scalar_tensor_tensor_check, cost=_scalar_tensor_tensor_cost)
def scalar_tensor_tensor(*, data: T[Array, In("P F*")], op0: T[str, Op(ARITHMETIC)],
                         operand0: T[Any, In("P 1", scalar=True)], op1: T[str, Op(ARITHMETIC & BINARY)],
                         operand1: T[Array, In("P F*")], reverse0: T[bool, Attr((bool,))] = False,
                         reverse1: T[bool, Attr((bool,))] = False, dtype: T[Any, DType] = None,
                         mask: T[Any, Mask] = None, **kwargs: Any) -> Array:
    """(data op0 operand0) op1 operand1, with a scalar operand first and a tile second.

    data: a two-dimensional tile, at most 128 partitions. operand0: a number, or a tile with one element per
    partition. operand1: a tile with the elements of data. SBUF or PSUM, but data and operand1 not both in
    PSUM. reverse0, reverse1: the operand is the left side of its operator. Arithmetic operators only, in
    float32, rounded once at the end. Result: the shape of data; dtype, or that of data.
    """
    return apply(op1, apply(op0, data, operand0, reverse0), operand1, reverse1)


@instruction(
    engine="vector", family="elementwise", source="api_legacy: isa.reciprocal",
    results=(Result("data", "data"),), moves=lambda c: ("scalar",),
    cost=lambda d, hw: cost.streaming(d, hw) if d.engine == "scalar" else float(max(hw.min_ii, 8 * d.F)))
def reciprocal(data: T[Array, In("P F*")], *, dtype: T[Any, DType] = None, mask: T[Any, Mask] = None,
               **kwargs: Any) -> Array:
    """1 / data, element by element.

    data: a tile in SBUF or PSUM, at most 128 partitions. float32 arithmetic, rounded once to dtype, or that
    of data; 1/0 is infinity with the sign of the zero. Eight cycles per element:
    nki.isa.activation(op=nl.reciprocal) is faster.
    """
    with np.errstate(all="ignore"):
        return np.asarray(np.divide(np.float32(1), data, dtype=np.float32))


# ---- copies ----------------------------------------------------------------------------------------------


def _copy_is_exact(c: Any) -> bool:
    """Vector and GpSimd copy bits where source and result have one dtype; all else goes through float32."""
    return c.engine != "scalar" and result_dtype(c, dtype_of(c.src)) == dtype_of(c.src)


def _copy_check(c: Any, _target: Any) -> None:
    gpsimd_reaches(c, c.engine, "src", "dst")


def _copy_cost(d: Any, hw: Any) -> float:
    if d.engine == "gpsimd":
        return cost.streaming(d, hw)
    return float(max(hw.min_ii, d.F / rate(d, hw)))


def _dynamic_copy_cost(d: Any, hw: Any) -> float:
    return float(max(hw.min_ii_dynamic, d.F))


@instruction(
    engine="vector scalar gpsimd", family="copy", source="api_legacy: isa.tensor_copy", moves=_copy_moves,
    results=(Result("src", "src"),), raw=_copy_is_exact, check=_copy_check, cost=_copy_cost)
def tensor_copy(src: T[Array, In("P F*")], *, mask: T[Any, Mask] = None, dtype: T[Any, DType] = None,
                engine: T[Any, EngineChoice] = engine.unknown, **kwargs: Any) -> Array:
    """A copy of src, on chip, with an optional change of dtype.

    src: a tile in SBUF or PSUM, at most 128 partitions. Result: the shape of src; dtype, or that of src; in
    SBUF unless it is assigned to a PSUM tensor. Vector (default) and GpSimd copy the bits where the dtype
    stays; another dtype, and the Scalar Engine always, go through float32 (int32 beyond 2^24 loses low bits).
    GpSimd does not reach PSUM.
    """
    return src


@instruction(
    engine="vector scalar gpsimd", family="copy", source="api_legacy: isa.tensor_copy_dynamic_src",
    results=(Result("src", "src"),), raw=_copy_is_exact, check=_copy_check, cost=_dynamic_copy_cost)
def tensor_copy_dynamic_src(src: T[Array, In("P F*", indirect=True)], *, mask: T[Any, Mask] = None,
                            dtype: T[Any, DType] = None, engine: T[Any, EngineChoice] = engine.unknown,
                            **kwargs: Any) -> Array:
    """A copy of a tile whose place in the free dimensions is read from memory, t[ip, offset[0, i] + if].

    src: a tile in SBUF or PSUM; the offset is one integer element of an SBUF tile, the same for all
    partitions. Result and conversion as tensor_copy. An offset outside the tensor is an error when the kernel
    runs.
    """
    return src


@instruction(
    engine="vector scalar gpsimd", family="copy", source="api_legacy: isa.tensor_copy_dynamic_dst",
    raw=lambda c: c.engine != "scalar" and dtype_of(c.dst) == dtype_of(c.src), check=_copy_check,
    cost=_dynamic_copy_cost)
def tensor_copy_dynamic_dst(*, dst: T[Array, Out("P F*", indirect=True)], src: T[Array, In("P F*")],
                            mask: T[Any, Mask] = None, dtype: T[Any, DType] = None,
                            engine: T[Any, EngineChoice] = engine.unknown, **kwargs: Any) -> Array:
    """Copy src into a tile whose place in the free dimensions is read from memory, t[ip, offset[0, i] + if].

    dst: written in place, SBUF or PSUM; the offset is one integer element of an SBUF tile, the same for all
    partitions. src: a tile with the partitions and elements of dst. Conversion as tensor_copy, to the dtype
    of dst. An offset outside the tensor is an error when the kernel runs.
    """
    return src


def _predicated_check(c: Any, _target: Any) -> None:
    if dtype_of(c.src):
        not_both_in_psum(c, "src", "predicate")
        if dtype_of(c.src) != dtype_of(c.dst):
            raise NkiTypeError(f"src is {dtype_of(c.src)}, dst is {dtype_of(c.dst)}", operand="src",
                               rule="src and dst have one dtype", why="elements are copied bit by bit",
                               fix="convert src with nl.copy(src, dtype=dst.dtype)")
    elif dtype_of(c.dst) == "bool" and (not isinstance(c.src, (int, float)) or c.src not in (0, 1)):
        raise NkiTypeError(f"the number {c.src} into a tile of bool", operand="src", rule="a number that becomes a bool is 0 or 1",
                           why="elements are copied bit by bit, and no other bits stand for a truth value",
                           fix="compare, as in src=int(x != 0), or use a tile of another dtype")


def _predicated_cost(d: Any, hw: Any) -> float:
    one = [d.spaces.get("src"), d.spaces["predicate"]].count("psum") == 1
    return float(max(hw.min_ii, d.F if one else 2 * d.F))


@instruction(
    engine="vector", family="select", source="api_legacy: isa.tensor_copy_predicated", raw=True,
    check=_predicated_check, cost=_predicated_cost)
def tensor_copy_predicated(*, src: T[Any, In("P F*", scalar=True)], dst: T[Array, InOut("P F*")],
                           predicate: T[Array, In("P F*", dtypes=_PREDICATES)],
                           reverse_pred: T[bool, Attr((bool,))] = False, mask: T[Any, Mask] = None,
                           dtype: T[Any, DType] = None, **kwargs: Any) -> Array:
    """dst = src where predicate is not zero (where it is zero with reverse_pred); dst is unchanged elsewhere.

    src: a tile of the dtype and elements of dst, or a number (0 or 1 for bool). dst: changed in place. predicate: bool, uint8,
    uint16 or uint32, with the elements of dst. SBUF or PSUM, but src and predicate not both in PSUM. Copied
    elements keep their bits.
    """
    chosen = (predicate == 0) if reverse_pred else (predicate != 0)
    if not isinstance(src, np.ndarray):
        # as storage, bool looks like uint8
        number = np.asarray(src, np.int64 if isinstance(src, (int, np.integer)) else np.float32)
        src = convert(number, number.dtype.name, dst.dtype.name)
    return np.where(chosen, src, dst)


# ---- fill and shuffle ------------------------------------------------------------------------------------


def _memset_check(c: Any, _target: Any) -> None:
    if len(c.shape) < 2:
        raise NkiValueError(f"memset makes a tile of shape {tuple(c.shape)}", operand="shape",
                            rule="a tile on chip has a partition and at least one free dimension",
                            why="SBUF is addressed by partition and byte",
                            fix="use shape (n, 1) for one element each")
    if c.shape[0] > _target.partitions:
        raise make("err_num_partition_exceed_arch_limit", f"memset makes a tile of {c.shape[0]} partitions",
                   operand="shape")


def _memset_cost(d: Any, hw: Any) -> float:
    halved = cost.attr(d, "value") == 0 and set(d.dtypes.values()) <= {"bfloat16", "float16"}
    return float(max(hw.min_ii, d.F / 2 if halved else d.F))


@instruction(
    engine="vector gpsimd", family="elementwise", source="api_legacy: isa.memset", limits=(), raw=True,
    results=(Result(lambda c: tuple(int(n) for n in c.shape), lambda c: str(c.dtype)),),
    check=_memset_check, cost=_memset_cost)
def memset(shape: T[tuple[int, ...], Attr((tuple, list))],
           value: T[Any, Attr((bool, int, float, np.number, np.bool_))],
           dtype: T[Any, DType], *, mask: T[Any, Mask] = None, engine: T[Any, EngineChoice] = engine.unknown,
           **kwargs: Any) -> Array:
    """A new tile filled with a constant.

    shape: the first dimension is the partition dimension (at most 128), whatever nl.par_dim says. value: a
    number, rounded once to dtype (to nearest even; integers saturate). dtype: that of the tile. Vector or
    GpSimd Engine.
    """
    number = value.item() if isinstance(value, (np.number, np.bool_)) else value
    if isinstance(number, int):
        if -2**63 <= number < 2**63:
            return np.broadcast_to(np.int64(number), tuple(shape))
        number = max(-10**39, min(number, 10**39))  # infinity to float32; Python refuses longer ones
    with np.errstate(all="ignore"):
        return np.broadcast_to(np.float32(number), tuple(shape))


def _shuffle_check(c: Any, _target: Any) -> None:
    if dtype_of(c.src) != dtype_of(c.dst):
        raise NkiTypeError(f"src is {dtype_of(c.src)}, dst is {dtype_of(c.dst)}", operand="dst",
                           rule="src and dst have one dtype", why="partitions are moved bit by bit",
                           fix="make dst with the dtype of src")
    if elements(c.src) != elements(c.dst):
        raise NkiValueError(f"src has {elements(c.src)} elements per partition, dst {elements(c.dst)}",
                            operand="dst",
                            rule="src and dst have the same number of elements per partition",
                            why="whole partitions are moved", fix="index both to the same free size")
    pattern = tuple(c.shuffle_mask)
    if len(pattern) != QUADRANT:
        raise NkiValueError(f"shuffle_mask has {len(pattern)} elements", operand="shuffle_mask",
                            rule=f"shuffle_mask has {QUADRANT} elements",
                            why="it says what each partition of a quadrant gets",
                            fix=f"give {QUADRANT} numbers, {KEEP} where dst stays")
    for i, p in enumerate(pattern):
        if isinstance(p, (int, np.integer)) and not (0 <= p < QUADRANT or p == KEEP):
            raise NkiValueError(f"shuffle_mask[{i}] is {p}", operand="shuffle_mask",
                                rule=f"an element is a partition 0 to {QUADRANT - 1}, or {KEEP}",
                                why="data does not leave its quadrant", fix="correct the element")
    if all(isinstance(p, (int, np.integer)) for p in pattern):
        _shuffle_source(pattern, c.dst.shape[0], c.src.shape[0])


def _shuffle_source(pattern: tuple[Any, ...], wanted: int, given: int) -> Array:
    """For each partition of dst the partition of src, KEEP taken as -1; raises where src has none."""
    part = np.arange(wanted)
    pick = np.asarray(pattern, np.int64)[part % QUADRANT]
    source = np.where(pick == KEEP, -1, part - part % QUADRANT + pick)
    if (source >= given).any():
        p = int(np.argmax(source >= given))
        raise make("err_tensor_access_out_of_bound",
                   f"partition {p} of dst is to get partition {int(source[p])} of src, which has {given}",
                   operand="shuffle_mask")
    return source


def _keeps_some(c: Any) -> bool:
    return KEEP in c.shuffle_mask


@instruction(
    positional=True, engine="vector", family="shuffle", source="api_legacy: isa.nc_stream_shuffle", raw=True, mask_on="dst",
    mask_dims={"src": (None, 1, 2, 3, 4)},  # partitions of src are named by shuffle_mask
    limits=(PARTITIONS,), check=_shuffle_check, cost=cost.streaming)
def nc_stream_shuffle(src: T[Array, In("*")], dst: T[Array, InOut("P F*", when=_keeps_some)],
                      shuffle_mask: T[Any, Affine(many=True)],
                      *, dtype: T[Any, DType] = None, mask: T[Any, Mask] = None, **kwargs: Any) -> Array:
    """Move partitions within each quadrant of 32: dst[q*32 + i] = src[q*32 + shuffle_mask[i]].

    src, dst: tiles in SBUF or PSUM of one dtype and the same number of elements per partition; they may be
    the same tile. shuffle_mask: 32 integers 0..31, the same for every quadrant; 255 leaves the partition of
    dst as it is. src may have fewer partitions than dst, where shuffle_mask names only those it has ([0] * 32
    spreads one partition over 32). mask counts the dimensions of dst.
    """
    source = _shuffle_source(tuple(shuffle_mask), dst.shape[0], src.shape[0])
    moved = src.reshape(src.shape[0], -1)[np.maximum(source, 0)].reshape(dst.shape)
    keep = (source < 0).reshape((-1,) + (1,) * (dst.ndim - 1))
    chosen = included(mask, dst)
    if chosen is not None:
        keep = keep | ~chosen
    return moved if certain(~keep) else np.where(keep, dst, moved)
