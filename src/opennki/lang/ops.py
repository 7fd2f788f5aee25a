"""Operations on tensors: assignment, operators, elementwise functions. Each becomes instructions of the ISA.

Language-level operations broadcast like NumPy; an instruction does not. The free dimensions are broadcast by access patterns of
stride 0, the partition dimension by an instruction (`partition_broadcast`). Source: api_legacy section 1 and neuronxcc.nki.language.
"""
from __future__ import annotations

from typing import Any

import numpy as np

from opennki.errors import NkiTypeError, NkiValueError, make
from opennki.ir.build import Forwarded, current
from opennki.ir.nodes import Access, Instr
from opennki.isa import dtypes, scalar
from opennki.isa.declare import ISA
from opennki.lang import view
from opennki.lang.emit import call, redirect, tile_access
from opennki.lang.index import Index, broadcast_shapes
from opennki.lang.tensor import DynamicIndex, Tensor

_TENSOR_TENSOR = ISA["tensor_tensor"].params[ISA["tensor_tensor"].index["op"]].spec.names
_TENSOR_SCALAR = ISA["tensor_scalar"].params[ISA["tensor_scalar"].index["op0"]].spec.names
_ACTIVATION = ISA["activation"].params[ISA["activation"].index["op"]].spec.names


def is_number(value: Any) -> bool:
    """True for Python and NumPy numbers and scalar index expressions."""
    return isinstance(value, (int, float, np.number, np.bool_)) or (isinstance(value, Index) and not value.shape) or (
        isinstance(value, np.ndarray) and value.ndim == 0)


def plain_number(value: Any) -> Any:
    """A Python number of what `is_number` accepts."""
    if isinstance(value, (np.generic, np.ndarray)):
        return value.item()
    return value.__index__() if isinstance(value, Index) else value


def need_tile(value: Any, what: str) -> Tensor:
    """The on-chip tile that a compute API needs."""
    if not isinstance(value, Tensor):
        if isinstance(value, np.ndarray):
            raise NkiTypeError(f"{what} is a NumPy array", rule="an operand is a tile",
                               fix="pass the array as an argument of the kernel, or embed it with nl.shared_constant, and nl.load it")
        raise NkiTypeError(f"{what} is {type(value).__name__} {value!r}", rule="an operand is a tile in SBUF or PSUM")
    if not value.on_chip:
        raise make("err_unsupported_memory", f"{what} is in HBM", operand=value.describe())
    if value.block:
        raise make("err_failed_to_infer_tile_from_local_tensor",
                   f"{what} is {value.describe()}, whose dimension {value.block} is the partition dimension")
    return value


def joint_shape(x: tuple[int, ...], y: tuple[int, ...], what: str) -> tuple[int, ...]:
    """Shape of two operands: as NumPy broadcasts, else partition with partition and the free dimensions from the right."""
    try:
        return broadcast_shapes(x, y)
    except ValueError:
        pass
    short, long = sorted((x, y), key=len)
    if (len(short) < len(long) and short[0] in (1, long[0])) or long[0] == 1:
        padded = (short[0],) + (1,) * (len(long) - len(short)) + short[1:]
        try:
            return broadcast_shapes(padded, long)
        except ValueError:
            pass
    if x[0] != y[0] and 1 not in (x[0], y[0]):
        raise make("err_num_partition_mismatch", f"{what}: the operands have shapes {x} and {y}")
    raise NkiValueError(f"{what}: the shapes {x} and {y} do not broadcast together",
                        rule="operands broadcast by NumPy's rules, the partition dimension first")


def broadcast_tile(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The tile in a larger shape: free dimensions by stride 0, partitions by an instruction."""
    if x.shape == shape:
        return x
    current_shape = x.shape
    if len(current_shape) < len(shape):
        lead = len(shape) - len(current_shape)
        numpy_way = (1,) * lead + current_shape
        fits = all(n in (1, m) for n, m in zip(numpy_way, shape, strict=True))
        partition_way = (current_shape[0],) + (1,) * lead + current_shape[1:]
        x = x.reshape(partition_way if not fits or current_shape[0] == shape[0] else numpy_way)
    if x.shape[0] == 1 and shape[0] > 1:
        mask = x.mask
        x = call("partition_broadcast", (x,), {"partitions": shape[0]})
        x.mask = mask if not any(p.strides and p.strides[0] for p in mask) else ()
    if x.shape == shape:
        return x
    return Tensor(view.broadcast(x.access, shape), 0, x.bounds, x.mask if all(not any(p.strides) for p in x.mask) else ())


def assign(into: Tensor, value: Any) -> None:
    """`into[...] = value`: write in place, broadcasting the value up."""
    if isinstance(value, DynamicIndex):
        raise NkiTypeError("an index expression is assigned to a tensor", rule="a tensor is assigned a tile or a number",
                           fix="make its values with nisa.iota")
    builder = current()
    if isinstance(value, Index) and value.shape:
        value = call("iota", (value,), {"dtype": into.dtype})
    if is_number(value):
        _fill(into, value)
        return
    if hasattr(type(value), "accumulate_into"):  # an nl.loop_reduce
        value.accumulate_into(into)
        return
    if not isinstance(value, Tensor):
        raise NkiTypeError(f"{type(value).__name__} {value!r} is assigned to {into.describe()}",
                           rule="a tensor is assigned a tile or a number")
    if view.same_place(value.access, into.access):
        return  # `t[i] += v` ends in the assignment of t[i] to itself
    if not into.on_chip or not value.on_chip:
        if into.on_chip and not value.on_chip:
            raise make("err_unsupported_memory", f"{value.describe()} is assigned to {into.describe()}")
        call("dma_copy", (), {"dst": into, "src": fit(value, into)})
        return
    if any(True for _ in into.access.dynamic()) or any(True for _ in value.access.dynamic()):
        raise make("err_copy_dynamic_indirect_indices_not_natively_supported", f"assignment to {into.describe()}")
    value = fit(value, into)
    if redirect(value, into):
        return
    _check_written(builder, into)
    call("tensor_copy", (value,), {"mask": defined(value)}, into=into)


def _same_tile(a: Access | None, b: Access | None) -> bool:
    """True when two accesses address the same elements in the same order."""
    if a is b or a is None or b is None:
        return a is b
    return (a.alloc is b.alloc and a.shape == b.shape and a.dtype == b.dtype and a.view_shape == b.view_shape
            and all(x.strides == y.strides and x.base.key() == y.base.key() and _same_tile(x.dyn, y.dyn)
                    for x, y in zip(a.dims, b.dims, strict=True)))


def defined(value: Tensor) -> Any:
    """The mask under which a tile is defined, as a mask argument: an assignment copies only what its maker wrote."""
    if not value.mask:
        return None
    from opennki.lang.index import Mask
    return Mask(value.mask, value.shape)


def _check_written(builder: Any, into: Tensor) -> None:
    tile_access(into, "assignment", builder)


def fit(value: Tensor, into: Tensor) -> Tensor:
    """The value in the shape of the target."""
    if value.shape == into.shape:
        return value
    source = value
    if value.size == into.size and [n for n in value.shape if n != 1] == [n for n in into.shape if n != 1]:
        return value.reshape(into.shape)
    try:
        shape = joint_shape(value.shape, into.shape, "assignment")
    except NkiValueError:
        shape = ()
    if shape != into.shape:
        if value.size == into.size and value.on_chip and into.on_chip and value.shape[0] == into.shape[0]:
            return value.reshape(into.shape)
        raise make("err_store_dst_shape_smaller_than_other_shape",
                   f"a value of shape {source.shape} is assigned to {into.describe()}")
    return broadcast_tile(value, into.shape) if value.on_chip else Tensor(view.broadcast(value.access, into.shape), 0, value.bounds)


def _fill(into: Tensor, value: Any) -> None:
    if isinstance(value, (np.generic, np.ndarray)):
        value = value.item()
    if not into.on_chip:
        raise make("err_unsupported_memory", f"a number is assigned to {into.describe()}", fix="nl.store a value into it")
    if isinstance(value, Index):
        value = value.base.const if value.base.is_const else current().concrete(value.base)
    call("memset", (into.shape, value, into.access.dtype), {}, into=into)


def accumulate(self: Tensor, other: Any, op: str) -> Tensor:
    """`self op= other` in place."""
    builder = current()
    name = ISA["nc_matmul"]
    if op == "add" and isinstance(other, Tensor) and self.access.space == "psum" and other.shape == self.shape:
        instr = builder.last_instr()
        if (builder.forwarding and instr is not None and instr.op == "nc_matmul" and instr.results
                and instr.results[0].alloc is other.access.alloc and other.access.is_whole and not self.access.mask):
            operands = list(instr.operands)
            operands[name.index["dst"]] = tile_access(self, "+=", builder)
            operands[name.index["accumulate"]] = True
            fused = Instr(instr.op, (), tuple(operands), instr.mask, instr.engine, instr.loc)
            nodes, index = builder.replace_last(fused)
            builder.writes.setdefault(self.access.alloc.id, instr.loc)

            def expand() -> list[Any]:
                copied = builder_copy(instr)
                return [instr, *copied(self.access)]
            builder.forwarded[other.access.alloc.id] = Forwarded(nodes, index, expand)
            return self
    value = elementwise(op, self, off_psum(other, self), into=self)
    assert value is self
    return self


def builder_copy(instr: Instr) -> Any:
    """How to accumulate a kept matmul result: product to PSUM, accumulate the same product again."""
    def statements(target: Access) -> list[Any]:
        decl = ISA["nc_matmul"]
        operands = list(instr.operands)
        operands[decl.index["dst"]] = target
        operands[decl.index["accumulate"]] = True
        return [Instr(instr.op, (), tuple(operands), instr.mask, instr.engine, instr.loc)]
    return statements


def off_psum(other: Any, self: Tensor) -> Any:
    """Vector instructions read at most one operand from PSUM: copy the other to SBUF."""
    if isinstance(other, Tensor) and other.access.space == "psum" and self.access.space == "psum":
        copied = call("tensor_copy", (other,), {"mask": defined(other)})
        copied.mask = other.mask
        return copied
    return other


def elementwise(op: Any, x: Any, y: Any, dtype: Any = None, mask: Any = None, into: Tensor | None = None) -> Any:
    """x op y with broadcasting; at least one of them is a tile. The dtype is promoted (bool for comparisons) unless it is given."""
    name = scalar.resolve(op)
    if dtype is None and into is None and scalar.SCALAR[name].group in ("comparison", "logical"):
        dtype = "bool"
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return _tile_tile(name, need_tile(x, f"nl.{name}: x"), need_tile(y, f"nl.{name}: y"), dtype, mask, into)
    if isinstance(x, Tensor) and is_number(y):
        return _tile_number(name, need_tile(x, f"nl.{name}: x"), y, False, dtype, mask, into)
    if isinstance(y, Tensor) and is_number(x):
        return _tile_number(name, need_tile(y, f"nl.{name}: y"), x, True, dtype, mask, into)
    for value, what in ((x, "x"), (y, "y")):
        if not is_number(value):
            need_tile(value, f"nl.{name}: {what}")
    raise NkiTypeError(f"nl.{name} of two numbers", rule="at least one operand is a tile", fix="use Python arithmetic")


def _joint_dtype(name: str, x: str, y: str) -> str:
    """Promoted dtype of a result. The quotient of integers is float32, as in Python: public kernels take nl.floor of it."""
    kind = dtypes.promote(x, y)
    return "float32" if name == "divide" and dtypes.is_integer(kind) else kind


def _tile_tile(name: str, x: Tensor, y: Tensor, dtype: Any, mask: Any, into: Tensor | None) -> Any:
    shape = joint_shape(x.shape, y.shape, f"nl.{name}")
    kind = dtype if dtype is not None else _joint_dtype(name, x.access.dtype, y.access.dtype)
    if into is not None:
        if shape != into.shape:
            raise make("err_store_dst_shape_smaller_than_other_shape", f"{into.describe()} is updated with shape {shape}")
        kind = None
    vector = _per_partition(x, y, shape)
    if vector is not None and name in _TENSOR_SCALAR and not _bits_differ(name, x, y):
        data, operand, reverse = vector
        data = broadcast_tile(data, shape)
        return call("tensor_scalar", (data, name, operand), {"reverse0": reverse, "dtype": kind, "mask": mask}, into=into)
    x, y = broadcast_tile(_reachable(name, x), shape), broadcast_tile(_reachable(name, y), shape)
    if x.access.space == "psum" and y.access.space == "psum":
        y = call("tensor_copy", (y,), {"mask": defined(y)})
    if name not in _TENSOR_TENSOR:
        return call("elementwise", (name, x, y), {"dtype": kind, "mask": mask}, into=into)
    return call("tensor_tensor", (x, y, name), {"dtype": kind, "mask": mask}, into=into)


def _per_partition(x: Tensor, y: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor, bool] | None:
    """(data, [P, 1] operand, reversed) when one operand is a vector of one element per partition."""
    for data, operand, reverse in ((x, y, False), (y, x, True)):
        if (operand.size == operand.shape[0] == shape[0] and data.size > operand.size and data.shape[0] == shape[0]
                and operand.access.dtype in ("float32", "float16", "bfloat16")):
            return data, operand.reshape((operand.shape[0], 1)) if len(operand.shape) != 2 else operand, reverse
    return None


def _reachable(name: str, x: Tensor) -> Tensor:
    """The tile where the engine of an operator reaches it: power runs on GpSimd, which has no path to PSUM."""
    if name != "power" or x.access.space != "psum":
        return x
    return call("tensor_copy", (x,), {"mask": defined(x)})  # type: ignore[no-any-return]


def _bits_differ(name: str, x: Tensor, y: Tensor) -> bool:
    return scalar.SCALAR[name].group == "bitvec" or name == "power"


def _tile_number(name: str, x: Tensor, number: Any, reverse: bool, dtype: Any, mask: Any, into: Tensor | None) -> Any:
    if isinstance(number, np.ndarray):
        number = number[()]
    kind = dtype
    if kind is None and into is None:
        kind = _joint_dtype(name, x.access.dtype, dtypes.weak(number) if not isinstance(number, Index) else "int32")
    number, x = plain_number(number), _reachable(name, x)
    if name not in _TENSOR_SCALAR:
        return call("elementwise", (name, x, number, reverse), {"dtype": None if into is not None else kind, "mask": mask}, into=into)
    return call("tensor_scalar", (x, name, number), {"reverse0": reverse, "dtype": None if into is not None else kind, "mask": mask},
                into=into)


def unary(op: Any, x: Any, dtype: Any = None, mask: Any = None) -> Any:
    """op(x) elementwise, in the dtype of x unless one is given."""
    name = scalar.resolve(op)
    x = need_tile(x, f"nl.{name}: x")
    if name in _ACTIVATION:
        return call("activation", (name, x), {"dtype": dtype, "mask": mask})
    return call("elementwise", (name, x), {"dtype": dtype, "mask": mask})


def _operator(op: str, swapped: bool = False) -> Any:
    def method(self: Tensor, other: Any) -> Any:
        if isinstance(other, Index) and other.shape:
            if op != "add":
                return NotImplemented
            return DynamicIndex(self, other)
        if op == "add" and isinstance(other, DynamicIndex):
            return NotImplemented
        if isinstance(other, np.ndarray) and other.ndim:
            need_tile(other, f"an operand of nl.{op}")
        if not isinstance(other, Tensor) and not is_number(other):
            return NotImplemented
        x, y = (other, self) if swapped else (self, other)
        return elementwise(op, x, y)
    return method


def _inplace(op: str) -> Any:
    def method(self: Tensor, other: Any) -> Any:
        return accumulate(self, other, op)
    return method


for _symbol, _op in (("add", "add"), ("sub", "subtract"), ("mul", "multiply"), ("truediv", "divide"), ("pow", "power"), ("mod", "mod"),
                     ("and", "bitwise_and"), ("or", "bitwise_or"), ("xor", "bitwise_xor"), ("lshift", "left_shift"),
                     ("rshift", "right_shift")):
    setattr(Tensor, f"__{_symbol}__", _operator(_op))
    setattr(Tensor, f"__r{_symbol}__", _operator(_op, swapped=True))
    setattr(Tensor, f"__i{_symbol}__", _inplace(_op))
for _symbol, _op in (("eq", "equal"), ("ne", "not_equal"), ("lt", "less"), ("le", "less_equal"), ("gt", "greater"),
                     ("ge", "greater_equal")):
    setattr(Tensor, f"__{_symbol}__", _operator(_op))

_REFLECTED = {"add": "__radd__", "subtract": "__rsub__", "multiply": "__rmul__", "divide": "__rtruediv__", "power": "__rpow__",
              "remainder": "__rmod__", "bitwise_and": "__rand__", "bitwise_or": "__ror__", "bitwise_xor": "__rxor__",
              "left_shift": "__rlshift__", "right_shift": "__rrshift__", "equal": "__eq__", "not_equal": "__ne__", "less": "__gt__",
              "less_equal": "__ge__", "greater": "__lt__", "greater_equal": "__le__"}


def _array_ufunc(self: Tensor, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
    """NumPy was asked to compute with a tile: a NumPy number on the left of an operator is fine, all else is an error."""
    reflected = _REFLECTED.get(ufunc.__name__)
    if method == "__call__" and reflected and not kwargs and inputs[1] is self and isinstance(inputs[0], (np.generic, np.ndarray)):
        result = getattr(self, reflected)(inputs[0])
        if result is not NotImplemented:
            return result
    raise NkiTypeError(f"np.{ufunc.__name__} of {self.describe()}", rule="NumPy functions do not take tiles",
                       why="the kernel is traced before any value exists",
                       fix="use the function of nl or nisa, such as nl.exp, nl.add, nl.maximum")


Tensor.__array_ufunc__ = _array_ufunc  # type: ignore[attr-defined]
Tensor.__neg__ = lambda self: elementwise("multiply", self, -1 if dtypes.is_integer(self.access.dtype) else -1.0)  # type: ignore[attr-defined, operator]
Tensor.__invert__ = lambda self: unary("invert", self)  # type: ignore[attr-defined, operator]
Tensor.__abs__ = lambda self: unary("abs", self)  # type: ignore[attr-defined]
Tensor.astype = lambda self, dtype: cast(self, dtype)  # type: ignore[attr-defined]


def cast(x: Tensor, dtype: Any) -> Tensor:
    """A copy of a tile in another dtype."""
    return call("tensor_copy", (need_tile(x, "astype"),), {"dtype": dtype})  # type: ignore[no-any-return]
