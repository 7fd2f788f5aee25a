"""`neuronxcc.nki.language`: the tile language. Names, signatures and defaults are the vendor's; the
meaning is in `opennki.lang`.

A tile is a tensor in SBUF or PSUM whose first dimension is the partition dimension (at most 128). `mask`
narrows an operation to the elements for which a comparison of index expressions holds; the others of a new
tile stay undefined. `dtype` is that of the result. Source: api_legacy section 1 and entries of
neuronxcc.nki.language.
"""

from __future__ import annotations

import builtins
from typing import Any

import numpy as np

from opennki.dialects.neuronxcc._missing import missing
from opennki.isa import dtypes
from opennki.isa.enums import oob_mode as _oob_mode
from opennki.lang import create, data, loops, memory, reduce, transfer
from opennki.lang import loop_reduce as _loop_reduce
from opennki.lang.data import bfp16, fp32, tile_size  # noqa: F401
from opennki.lang.index import Index
from opennki.lang.keywords import check_extra
from opennki.lang.math import FUNCTIONS
from opennki.lang.math import named as _named
from opennki.lang.ranges import Grid, ds, mgrid  # noqa: F401
from opennki.lang.ranges import arange as _arange
from opennki.lang.tensor import Tensor

bool = builtins.bool

# ---- data types and memories ----
uint8, int8, uint16, int16, uint32, int32 = np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32
float16, float32, bool_ = np.float16, np.float32, np.bool_
bfloat16, tfloat32, float32r = dtypes.bfloat16, dtypes.tfloat32, dtypes.float32r
float8_e4m3, float8_e4m3fn, float8_e5m2 = dtypes.float8_e4m3, dtypes.float8_e4m3fn, dtypes.float8_e5m2
sbuf, psum, hbm, private_hbm, shared_hbm = (
    memory.sbuf,
    memory.psum,
    memory.hbm,
    memory.private_hbm,
    memory.shared_hbm,
)


# ---- elementwise ----
def _functions(names: str) -> list[Any]:
    return [FUNCTIONS[name] for name in names.split()]


abs, arctan, ceil, cos, erf, erf_dx, exp = _functions("abs arctan ceil cos erf erf_dx exp")
floor, gelu, gelu_apprx_sigmoid, gelu_apprx_tanh = _functions("floor gelu gelu_apprx_sigmoid gelu_apprx_tanh")
gelu_dx, invert, log, mish, negative, reciprocal = _functions("gelu_dx invert log mish negative reciprocal")
relu, rsqrt, sigmoid, sign, silu, silu_dx, sin = _functions("relu rsqrt sigmoid sign silu silu_dx sin")
softplus, sqrt, square, tan, tanh, trunc = _functions("softplus sqrt square tan tanh trunc")
add, subtract, multiply, divide, power = _functions("add subtract multiply divide power")
maximum, minimum, fmod, mod = _functions("maximum minimum fmod mod")
bitwise_and, bitwise_or, bitwise_xor = _functions("bitwise_and bitwise_or bitwise_xor")
left_shift, right_shift = _functions("left_shift right_shift")
equal, not_equal, greater, greater_equal = _functions("equal not_equal greater greater_equal")
less, less_equal, logical_and, logical_or = _functions("less less_equal logical_and logical_or")
logical_xor, logical_not = _functions("logical_xor logical_not")


# ---- reductions ----
def _reduction(name: str, op: str, what: str) -> Any:
    def fn(
        x: Any, axis: Any, *, dtype: Any = None, mask: Any = None, keepdims: bool = False, **kwargs: Any
    ) -> Tensor:
        check_extra(f"nl.{name}", kwargs)
        return reduce.reduce(op, f"nl.{name}", x, axis, dtype, mask, keepdims)

    return _named(
        fn,
        name,
        op,
        f"{what} over free axes (an int, or a tuple); the axes are dropped unless keepdims, (P, 1) stays "
        f"at least. "
        "Dtype of x unless dtype is given; computed in float32.",
    )


max = _reduction("max", "maximum", "The largest element")
min = _reduction("min", "minimum", "The smallest element")
sum = _reduction("sum", "add", "The sum")
prod = _reduction("prod", "multiply", "The product")


def mean(
    x: Any, axis: Any, *, dtype: Any = None, mask: Any = None, keepdims: bool = False, **kwargs: Any
) -> Tensor:
    """Arithmetic mean over free axes, computed in float32; dtype of x (float32 for integers) unless dtype
    is given.
    """
    check_extra("nl.mean", kwargs)
    return reduce.mean(x, axis, dtype, mask, keepdims)


def var(x: Any, axis: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Tensor:
    """Variance over free axes, divided by the number of elements as numpy.var; computed in float32."""
    check_extra("nl.var", kwargs)
    return reduce.var(x, axis, dtype, mask)


def all(x: Any, axis: Any, *, dtype: Any = bool, mask: Any = None, **kwargs: Any) -> Tensor:
    """1 where every element along the free axes is nonzero, else 0."""
    check_extra("nl.all", kwargs)
    return reduce.all_true(x, axis, dtype, mask)


all.nki_op = "logical_and"  # type: ignore[attr-defined]


def softmax(
    x: Any, axis: Any, *, dtype: Any = None, compute_dtype: Any = None, mask: Any = None, **kwargs: Any
) -> Tensor:
    """exp(x - max(x)) / sum(exp(x - max(x))) over free axes, computed in float32; compute_dtype acts as
    dtype.
    """
    check_extra("nl.softmax", kwargs)
    return reduce.softmax(x, axis, dtype, compute_dtype, mask)


def rms_norm(
    x: Any,
    w: Any,
    axis: Any,
    n: Any,
    epsilon: float = 1e-06,
    *,
    dtype: Any = None,
    compute_dtype: Any = None,
    mask: Any = None,
    **kwargs: Any,
) -> Tensor:
    """x / sqrt(sum(x * x) / n + epsilon) * w over free axes, computed in float32; w broadcasts to x, (1,
    F) for instance.
    """
    check_extra("nl.rms_norm", kwargs)
    return reduce.rms_norm(x, w, axis, n, epsilon, dtype, compute_dtype, mask)


def loop_reduce(
    x: Any, op: Any, loop_indices: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any
) -> Any:
    """Accumulate a tile over loops: `acc[...] = nl.loop_reduce(x, np.add, loop_indices=[i])` makes acc =
    op(acc, x) in each iteration, from the identity of op on. A mask leaves out the elements, or whole
    iterations, for which it does not hold.
    """
    check_extra("nl.loop_reduce", kwargs)
    return _loop_reduce.loop_reduce(x, op, loop_indices, dtype, mask)


def all_reduce(
    x: Any,
    op: Any,
    program_axes: Any,
    *,
    dtype: Any = None,
    mask: Any = None,
    parallel_reduce: bool = True,
    asynchronous: bool = False,
    **kwargs: Any,
) -> Tensor:
    """x reduced over the programs along axes of the launch grid; every program gets the result."""
    check_extra("nl.all_reduce", kwargs)
    return data.all_reduce(x, op, program_axes, dtype, mask, parallel_reduce, asynchronous)


# ---- matmul ----
def matmul(x: Any, y: Any, *, transpose_x: bool = False, mask: Any = None, **kwargs: Any) -> Tensor:
    """x @ y, or x.T @ y with transpose_x, float32 in PSUM. x: [M, K] ([K, M] with transpose_x), y: [K, N];
    M, K <= 128, N <= 512.
    """
    check_extra("nl.matmul", kwargs)
    return data.matmul(x, y, transpose_x, mask)


def transpose(x: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Tensor:
    """The transpose of a tile of at most 128 x 128, in PSUM."""
    check_extra("nl.transpose", kwargs)
    return data.transpose(x, dtype, mask)


# ---- moving data ----
def load(src: Any, *, mask: Any = None, dtype: Any = None, **kwargs: Any) -> Tensor:
    """A new SBUF tile with the elements of an HBM tensor or index of it, at most 128 rows. mode (undocumented): what an index outside
    the tensor does, nisa.oob_mode.error or skip, which leaves the row undefined.
    """
    mode = kwargs.pop("mode", _oob_mode.error)
    check_extra("nl.load", kwargs)
    return transfer.load(src, mask, dtype, mode)


def store(dst: Any, value: Any, *, mask: Any = None, **kwargs: Any) -> None:
    """Write a tile (SBUF or PSUM) or a number to an HBM tensor or index of it; the value is cast, and
    broadcast up. mode (undocumented): what an index outside the tensor does, nisa.oob_mode.error or skip, which leaves the row out.
    """
    mode = kwargs.pop("mode", _oob_mode.error)
    check_extra("nl.store", kwargs)
    transfer.store(dst, value, mask, mode)


def load_transpose2d(src: Any, *, mask: Any = None, dtype: Any = None, **kwargs: Any) -> Tensor:
    """A new SBUF tile with the transpose of a 2-dimensional HBM tensor or index: result[j, i] = src[i, j]."""
    check_extra("nl.load_transpose2d", kwargs)
    return transfer.load_transpose2d(src, mask, dtype)


def atomic_rmw(dst: Any, value: Any, op: Any, *, mask: Any = None, **kwargs: Any) -> None:
    """dst = dst + value in HBM; op is np.add; dst is indexed by an index tile [N, 1] in SBUF."""
    check_extra("nl.atomic_rmw", kwargs)
    transfer.atomic_rmw(dst, value, op, mask)


def copy(src: Any, *, mask: Any = None, dtype: Any = None, **kwargs: Any) -> Tensor:
    """A copy of an on-chip tile in SBUF, or in the PSUM tensor that it is assigned to."""
    check_extra("nl.copy", kwargs)
    return data.copy(src, mask, dtype)


copy.nki_op = "copy"  # type: ignore[attr-defined]


def broadcast_to(src: Any, *, shape: Any, **kwargs: Any) -> Tensor:
    """A new tile with src repeated by NumPy's rules, over partitions too; src itself if it has the shape."""
    check_extra("nl.broadcast_to", kwargs)
    return data.broadcast_to(src, shape)


def expand_dims(data: Any, axis: Any) -> Tensor:
    """View with dimensions of size 1 more, not at axis 0."""
    return _expand_dims(data, axis)


_expand_dims = data.expand_dims


def where(condition: Any, x: Any, y: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Tensor:
    """x where the condition (a tile, or a comparison of indices) is nonzero, y elsewhere."""
    check_extra("nl.where", kwargs)
    return data.where(condition, x, y, dtype, mask)


def gather_flattened(
    data: Any, indices: Any, *, mask: Any = None, dtype: Any = None, **kwargs: Any
) -> Tensor:
    """Elements of each partition by index: result[p, i...] = flattened data[p][indices[p, i...]]; indices
    are uint32.
    """
    check_extra("nl.gather_flattened", kwargs)
    return _gather_flattened(data, indices, mask, dtype)


_gather_flattened = data.gather_flattened


def static_cast(input_data: Any, dtype: Any) -> Any:
    """A tile, array or number in another dtype; works on arrays outside of kernels."""
    return data.static_cast(input_data, dtype)


# ---- making tensors ----
def ndarray(shape: Any, dtype: Any, *, buffer: Any = None, name: str = "", **kwargs: Any) -> Tensor:
    """A new tensor with undefined contents, in SBUF unless buffer says otherwise. par_dim marks the
    partition dimension.
    """
    check_extra("nl.ndarray", kwargs)
    return create.ndarray(shape, dtype, buffer, name)


def zeros(shape: Any, dtype: Any, *, buffer: Any = None, name: str = "", **kwargs: Any) -> Tensor:
    """A new on-chip tensor of zeros."""
    check_extra("nl.zeros", kwargs)
    return create.full(shape, 0, dtype, buffer, name, kwargs.get("lazy_initialization"))


def ones(shape: Any, dtype: Any, *, buffer: Any = None, name: str = "", **kwargs: Any) -> Tensor:
    """A new on-chip tensor of ones."""
    check_extra("nl.ones", kwargs)
    return create.full(shape, 1, dtype, buffer, name)


def full(
    shape: Any, fill_value: Any, dtype: Any, *, buffer: Any = None, name: str = "", **kwargs: Any
) -> Tensor:
    """A new on-chip tensor filled with a number."""
    check_extra("nl.full", kwargs)
    return create.full(shape, fill_value, dtype, buffer, name)


def zeros_like(a: Any, dtype: Any = None, *, buffer: Any = None, name: str = "", **kwargs: Any) -> Tensor:
    """A new on-chip tensor of zeros with the shape and dtype of a."""
    check_extra("nl.zeros_like", kwargs)
    return create.like(a, dtype, buffer, name, 0)


def empty_like(a: Any, dtype: Any = None, *, buffer: Any = None, name: str = "", **kwargs: Any) -> Tensor:
    """A new tensor with the shape and dtype of a and undefined contents."""
    check_extra("nl.empty_like", kwargs)
    return create.like(a, dtype, buffer, name)


def shared_constant(constant: Any, dtype: Any = None, **kwargs: Any) -> Tensor:
    """A NumPy array that is known at trace time, as a tensor in HBM; nl.load reads it."""
    check_extra("nl.shared_constant", kwargs)
    return create.shared_constant(constant, dtype)


def shared_identity_matrix(n: Any, dtype: Any = np.uint8, **kwargs: Any) -> Tensor:
    """The n x n identity as a constant tensor in HBM."""
    check_extra("nl.shared_identity_matrix", kwargs)
    return create.identity(n, dtype)


def par_dim(size: Any) -> int:
    """Mark a size in a shape as the partition dimension."""
    return create.par_dim(size)


# ---- random numbers ----
def rand(shape: Any, dtype: Any = np.float32, **kwargs: Any) -> Tensor:
    """A tile of random numbers, uniform in [0, 1)."""
    check_extra("nl.rand", kwargs)
    return data.rand(shape, dtype)


def random_seed(seed: Any, *, mask: Any = None, **kwargs: Any) -> None:
    """Set the seed of the random numbers that follow: a number, or a tile of one element."""
    check_extra("nl.random_seed", kwargs)
    data.random_seed(seed, mask)


def dropout(x: Any, rate: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Tensor:
    """x with elements set to 0 with probability rate (a number, or a tile of one element or of one per
    partition).
    """
    check_extra("nl.dropout", kwargs)
    return data.dropout(x, rate, dtype, mask)


# ---- indices, loops and programs ----
def arange(*args: Any) -> Index:
    """Index vector start .. stop-1: arange(stop) or arange(start, stop). Add dimensions with [:, None]
    before indexing a tensor.
    """
    return _arange(*args)


def affine_range(*args: Any, **kwargs: Any) -> loops.LoopRange:
    """Loop of independent iterations, like range. directives=ncc.multi_buffer(n) or ncc.no_reorder()."""
    return loops.affine_range(*args, **kwargs)


def sequential_range(*args: Any, **kwargs: Any) -> loops.LoopRange:
    """Loop of ordered iterations, like range."""
    return loops.sequential_range(*args, **kwargs)


def static_range(*args: Any) -> range:
    """Loop that is unrolled when the kernel is traced; the index is a Python int."""
    return loops.static_range(*args)


program_id, num_programs, program_ndim = loops.program_id, loops.num_programs, loops.program_ndim
spmd_dim, nc = loops.spmd_dim, loops.nc


def gemm_grid() -> Grid:
    """Index grid of the result, or the moving operand, of the largest matmul."""
    return create.gemm_grid(stationary=False)


def gemm_stationary_grid() -> Grid:
    """Index grid of the stationary operand of the largest matmul."""
    return create.gemm_grid(stationary=True)


# ---- printing and facts ----
def device_print(prefix: Any, x: Any, *, mask: Any = None, **kwargs: Any) -> None:
    """Print a prefix and the values of a tile, in simulation only."""
    check_extra("nl.device_print", kwargs)
    data.device_print(prefix, x, mask)


def finfo(dtype: Any) -> Any:
    """Limits of a floating-point dtype: min, max, eps, tiny, bits."""
    return dtypes.finfo(dtype)


__getattr__ = missing("neuronxcc.nki.language")
