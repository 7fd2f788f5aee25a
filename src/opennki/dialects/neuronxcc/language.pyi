# Made by `python -m opennki.tools.stubs` from signatures and docstrings; do not edit.
"""`neuronxcc.nki.language`: the tile language. Names, signatures and defaults are the vendor's; the
meaning is in `opennki.lang`.

A tile is a tensor in SBUF or PSUM whose first dimension is the partition dimension (at most 128). `mask`
narrows an operation to the elements for which a comparison of index expressions holds; the others of a new
tile stay undefined. `dtype` is that of the result. Source: api_legacy section 1 and entries of
neuronxcc.nki.language.
"""
from typing import Any

from numpy import bool_ as bool_
from numpy import float16 as float16
from numpy import float32 as float32
from numpy import int16 as int16
from numpy import int32 as int32
from numpy import int8 as int8
from numpy import uint16 as uint16
from numpy import uint32 as uint32
from numpy import uint8 as uint8
from opennki.lang.data import TileSize
from opennki.lang.data import bfp16 as bfp16
from opennki.lang.data import fp32 as fp32
from opennki.lang.index import Index
from opennki.lang.loops import LoopRange
from opennki.lang.loops import NC
from opennki.lang.loops import SpmdDim
from opennki.lang.memory import Buffer
from opennki.lang.memory import OnChip
from opennki.lang.ranges import Grid
from opennki.lang.ranges import _MGrid
from opennki.lang.ranges import ds as ds
from opennki.lang.tensor import Tensor
from opennki.lang.tensor import Tensor as Tensor
import numpy as np

bfloat16: np.dtype[Any]
float32r: np.dtype[Any]
float8_e4m3: np.dtype[Any]
float8_e4m3fn: np.dtype[Any]
float8_e5m2: np.dtype[Any]
hbm: Buffer
mgrid: _MGrid
private_hbm: Buffer
psum: OnChip
sbuf: OnChip
shared_hbm: Buffer
tfloat32: np.dtype[Any]
tile_size: TileSize


def abs(x: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Any:
    """Absolute value. Elementwise on a tile in SBUF or PSUM; a new tile of its shape, in its dtype unless dtype is given."""


def add(x: Any, y: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Any:
    """a + b; on the Scalar Engine from gen3; int32 exactly on GpSimd. Elementwise; a is x, b is y, at least one of them a tile in SBUF or PSUM; shapes broadcast as in NumPy, over partitions too. A new tile; the promoted dtype unless dtype is given."""


def affine_range(*args: Any, **kwargs: Any) -> LoopRange:
    """Loop of independent iterations, like range. directives=ncc.multi_buffer(n) or ncc.no_reorder()."""


def all(x: Any, axis: Any, *, dtype: Any = ..., mask: Any = None, **kwargs: Any) -> Tensor:
    """1 where every element along the free axes is nonzero, else 0."""


def all_reduce(x: Any, op: Any, program_axes: Any, *, dtype: Any = None, mask: Any = None, parallel_reduce: bool = True, asynchronous: bool = False, **kwargs: Any) -> Tensor:
    """x reduced over the programs along axes of the launch grid; every program gets the result."""


def arange(*args: Any) -> Index:
    """Index vector start .. stop-1: arange(stop) or arange(start, stop). Add dimensions with [:, None]
    before indexing a tensor.
    """


def arctan(x: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Any:
    """Arc tangent. Elementwise on a tile in SBUF or PSUM; a new tile of its shape, in its dtype unless dtype is given."""


def atomic_rmw(dst: Any, value: Any, op: Any, *, mask: Any = None, **kwargs: Any) -> None:
    """dst = dst + value in HBM; op is np.add; dst is indexed by an index tile [N, 1] in SBUF."""


def bitwise_and(x: Any, y: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Any:
    """Bitwise and. Elementwise; a is x, b is y, at least one of them a tile in SBUF or PSUM; shapes broadcast as in NumPy, over partitions too. A new tile; the promoted dtype unless dtype is given."""


def bitwise_or(x: Any, y: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Any:
    """Bitwise or. Elementwise; a is x, b is y, at least one of them a tile in SBUF or PSUM; shapes broadcast as in NumPy, over partitions too. A new tile; the promoted dtype unless dtype is given."""


def bitwise_xor(x: Any, y: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Any:
    """Bitwise exclusive or. Elementwise; a is x, b is y, at least one of them a tile in SBUF or PSUM; shapes broadcast as in NumPy, over partitions too. A new tile; the promoted dtype unless dtype is given."""


def broadcast_to(src: Any, *, shape: Any, **kwargs: Any) -> Tensor:
    """A new tile with src repeated by NumPy's rules, over partitions too; src itself if it has the shape."""


def ceil(x: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Any:
    """Smallest integer not below a. Elementwise on a tile in SBUF or PSUM; a new tile of its shape, in its dtype unless dtype is given."""


def copy(src: Any, *, mask: Any = None, dtype: Any = None, **kwargs: Any) -> Tensor:
    """A copy of an on-chip tile in SBUF, or in the PSUM tensor that it is assigned to."""


def cos(x: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Any:
    """Cosine. Elementwise on a tile in SBUF or PSUM; a new tile of its shape, in its dtype unless dtype is given."""


def device_print(prefix: Any, x: Any, *, mask: Any = None, **kwargs: Any) -> None:
    """Print a prefix and the values of a tile, in simulation only."""


def divide(x: Any, y: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Any:
    """a / b. Elementwise; a is x, b is y, at least one of them a tile in SBUF or PSUM; shapes broadcast as in NumPy, over partitions too. A new tile; the promoted dtype unless dtype is given."""


def dropout(x: Any, rate: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Tensor:
    """x with elements set to 0 with probability rate (a number, or a tile of one element or of one per
    partition).
    """


def empty_like(a: Any, dtype: Any = None, *, buffer: Any = None, name: str = '', **kwargs: Any) -> Tensor:
    """A new tensor with the shape and dtype of a and undefined contents."""


def equal(x: Any, y: Any, *, dtype: Any = ..., mask: Any = None, **kwargs: Any) -> Any:
    """1 if a == b else 0. Elementwise; a is x, b is y, at least one of them a tile in SBUF or PSUM; shapes broadcast as in NumPy, over partitions too. A new tile; bool, stored as uint8, unless dtype is given."""


def erf(x: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Any:
    """Error function. Elementwise on a tile in SBUF or PSUM; a new tile of its shape, in its dtype unless dtype is given."""


def erf_dx(x: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Any:
    """Derivative of erf: 2/sqrt(pi) exp(-a²). Elementwise on a tile in SBUF or PSUM; a new tile of its shape, in its dtype unless dtype is given."""


def exp(x: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Any:
    """e to the power a. Elementwise on a tile in SBUF or PSUM; a new tile of its shape, in its dtype unless dtype is given."""


def expand_dims(data: Any, axis: Any) -> Tensor:
    """View with dimensions of size 1 more, not at axis 0."""


def finfo(dtype: Any) -> Any:
    """Limits of a floating-point dtype: min, max, eps, tiny, bits."""


def floor(x: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Any:
    """Largest integer not above a. Elementwise on a tile in SBUF or PSUM; a new tile of its shape, in its dtype unless dtype is given."""


def fmod(x: Any, y: Any, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Any:
    """Remainder of a / b with the sign of a, as in C. Elementwise; a is x, b is y, at least one of them a tile in SBUF or PSUM; shapes broadcast as in NumPy, over partitions too. A new tile; the promoted dtype unless dtype is given."""


def full(shape: Any, fill_value: Any, dtype: Any, *, buffer: Any = None, name: str = '', **kwargs: Any) -> Tensor:
    """A new on-chip tensor filled with a number."""


def gather_flattened(data: Any, indices: Any, *, mask: Any = None, dtype: Any = None, **kwargs: Any) -> Tensor:
    """Elements of each partition by index: result[p, i...] = flattened data[p][indices[p, i...]]; indices
    are uint32.
    """


def gelu(x: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Any:
    """a/2 (1 + erf(a / sqrt(2))). Elementwise on a tile in SBUF or PSUM; a new tile of its shape, in its dtype unless dtype is given."""


def gelu_apprx_sigmoid(x: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Any:
    """a sigmoid(1.702 a); usual constant, the vendor states none. Elementwise on a tile in SBUF or PSUM; a new tile of its shape, in its dtype unless dtype is given."""


def gelu_apprx_tanh(x: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Any:
    """a/2 (1 + tanh(sqrt(2/pi) (a + 0.044715 a³))); usual constants, the vendor states none. Elementwise on a tile in SBUF or PSUM; a new tile of its shape, in its dtype unless dtype is given."""


def gelu_dx(x: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Any:
    """Derivative of gelu. Elementwise on a tile in SBUF or PSUM; a new tile of its shape, in its dtype unless dtype is given."""


def gemm_grid() -> Grid:
    """Index grid of the result, or the moving operand, of the largest matmul."""


def gemm_stationary_grid() -> Grid:
    """Index grid of the stationary operand of the largest matmul."""


def greater(x: Any, y: Any, *, dtype: Any = ..., mask: Any = None, **kwargs: Any) -> Any:
    """1 if a > b else 0. Elementwise; a is x, b is y, at least one of them a tile in SBUF or PSUM; shapes broadcast as in NumPy, over partitions too. A new tile; bool, stored as uint8, unless dtype is given."""


def greater_equal(x: Any, y: Any, *, dtype: Any = ..., mask: Any = None, **kwargs: Any) -> Any:
    """1 if a >= b else 0. Elementwise; a is x, b is y, at least one of them a tile in SBUF or PSUM; shapes broadcast as in NumPy, over partitions too. A new tile; bool, stored as uint8, unless dtype is given."""


def invert(x: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Any:
    """Bitwise not. Elementwise on a tile in SBUF or PSUM; a new tile of its shape, in its dtype unless dtype is given."""


def left_shift(x: Any, y: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Any:
    """a << b, bits leaving at the top are lost; 0 for a count of the width or more. Elementwise; a is x, b is y, at least one of them a tile in SBUF or PSUM; shapes broadcast as in NumPy, over partitions too. A new tile; the promoted dtype unless dtype is given."""


def less(x: Any, y: Any, *, dtype: Any = ..., mask: Any = None, **kwargs: Any) -> Any:
    """1 if a < b else 0. Elementwise; a is x, b is y, at least one of them a tile in SBUF or PSUM; shapes broadcast as in NumPy, over partitions too. A new tile; bool, stored as uint8, unless dtype is given."""


def less_equal(x: Any, y: Any, *, dtype: Any = ..., mask: Any = None, **kwargs: Any) -> Any:
    """1 if a <= b else 0. Elementwise; a is x, b is y, at least one of them a tile in SBUF or PSUM; shapes broadcast as in NumPy, over partitions too. A new tile; bool, stored as uint8, unless dtype is given."""


def load(src: Any, *, mask: Any = None, dtype: Any = None, **kwargs: Any) -> Tensor:
    """A new SBUF tile with the elements of an HBM tensor or index of it, at most 128 rows. mode (undocumented): what an index outside
    the tensor does, nisa.oob_mode.error or skip, which leaves the row undefined.
    """


def load_transpose2d(src: Any, *, mask: Any = None, dtype: Any = None, **kwargs: Any) -> Tensor:
    """A new SBUF tile with the transpose of a 2-dimensional HBM tensor or index: result[j, i] = src[i, j]."""


def log(x: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Any:
    """Natural logarithm. Elementwise on a tile in SBUF or PSUM; a new tile of its shape, in its dtype unless dtype is given."""


def logical_and(x: Any, y: Any, *, dtype: Any = ..., mask: Any = None, **kwargs: Any) -> Any:
    """1 if both operands are nonzero else 0. Elementwise; a is x, b is y, at least one of them a tile in SBUF or PSUM; shapes broadcast as in NumPy, over partitions too. A new tile; bool, stored as uint8, unless dtype is given."""


def logical_not(x: Any, *, dtype: Any = ..., mask: Any = None, **kwargs: Any) -> Any:
    """1 if the operand is zero else 0. Elementwise on a tile; bool unless dtype is given."""


def logical_or(x: Any, y: Any, *, dtype: Any = ..., mask: Any = None, **kwargs: Any) -> Any:
    """1 if any operand is nonzero else 0. Elementwise; a is x, b is y, at least one of them a tile in SBUF or PSUM; shapes broadcast as in NumPy, over partitions too. A new tile; bool, stored as uint8, unless dtype is given."""


def logical_xor(x: Any, y: Any, *, dtype: Any = ..., mask: Any = None, **kwargs: Any) -> Any:
    """1 if exactly one operand is nonzero else 0. Elementwise; a is x, b is y, at least one of them a tile in SBUF or PSUM; shapes broadcast as in NumPy, over partitions too. A new tile; bool, stored as uint8, unless dtype is given."""


def loop_reduce(x: Any, op: Any, loop_indices: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Any:
    """Accumulate a tile over loops: `acc[...] = nl.loop_reduce(x, np.add, loop_indices=[i])` makes acc =
    op(acc, x) in each iteration, from the identity of op on. A mask leaves out the elements, or whole
    iterations, for which it does not hold.
    """


def matmul(x: Any, y: Any, *, transpose_x: bool = False, mask: Any = None, **kwargs: Any) -> Tensor:
    """x @ y, or x.T @ y with transpose_x, float32 in PSUM. x: [M, K] ([K, M] with transpose_x), y: [K, N];
    M, K <= 128, N <= 512.
    """


def max(x: Any, axis: Any, *, dtype: Any = None, mask: Any = None, keepdims: bool = False, **kwargs: Any) -> Tensor:
    """The largest element over free axes (an int, or a tuple); the axes are dropped unless keepdims, (P, 1) stays at least. Dtype of x unless dtype is given; computed in float32."""


def maximum(x: Any, y: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Any:
    """The larger operand; NaN if either is NaN. Elementwise; a is x, b is y, at least one of them a tile in SBUF or PSUM; shapes broadcast as in NumPy, over partitions too. A new tile; the promoted dtype unless dtype is given."""


def mean(x: Any, axis: Any, *, dtype: Any = None, mask: Any = None, keepdims: bool = False, **kwargs: Any) -> Tensor:
    """Arithmetic mean over free axes, computed in float32; dtype of x (float32 for integers) unless dtype
    is given.
    """


def min(x: Any, axis: Any, *, dtype: Any = None, mask: Any = None, keepdims: bool = False, **kwargs: Any) -> Tensor:
    """The smallest element over free axes (an int, or a tuple); the axes are dropped unless keepdims, (P, 1) stays at least. Dtype of x unless dtype is given; computed in float32."""


def minimum(x: Any, y: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Any:
    """The smaller operand; NaN if either is NaN. Elementwise; a is x, b is y, at least one of them a tile in SBUF or PSUM; shapes broadcast as in NumPy, over partitions too. A new tile; the promoted dtype unless dtype is given."""


def mish(x: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Any:
    """a tanh(softplus(a)). Elementwise on a tile in SBUF or PSUM; a new tile of its shape, in its dtype unless dtype is given."""


def mod(x: Any, y: Any, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Any:
    """Remainder of a / b with the sign of b, as in Python. Elementwise; a is x, b is y, at least one of them a tile in SBUF or PSUM; shapes broadcast as in NumPy, over partitions too. A new tile; the promoted dtype unless dtype is given."""


def multiply(x: Any, y: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Any:
    """a * b; on the Scalar Engine from gen3; int32 exactly on GpSimd. Elementwise; a is x, b is y, at least one of them a tile in SBUF or PSUM; shapes broadcast as in NumPy, over partitions too. A new tile; the promoted dtype unless dtype is given."""


def nc(n: Any) -> NC:
    """A grid dimension mapped onto n physical NeuronCores of a logical core."""


def ndarray(shape: Any, dtype: Any, *, buffer: Any = None, name: str = '', **kwargs: Any) -> Tensor:
    """A new tensor with undefined contents, in SBUF unless buffer says otherwise. par_dim marks the
    partition dimension.
    """


def negative(x: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Any:
    """-a. Elementwise on a tile in SBUF or PSUM; a new tile of its shape, in its dtype unless dtype is given."""


def not_equal(x: Any, y: Any, *, dtype: Any = ..., mask: Any = None, **kwargs: Any) -> Any:
    """1 if a != b else 0. Elementwise; a is x, b is y, at least one of them a tile in SBUF or PSUM; shapes broadcast as in NumPy, over partitions too. A new tile; bool, stored as uint8, unless dtype is given."""


def num_programs(axes: Any = None) -> int:
    """Number of program instances along an axis or axes; of the whole grid when axes is None."""


def ones(shape: Any, dtype: Any, *, buffer: Any = None, name: str = '', **kwargs: Any) -> Tensor:
    """A new on-chip tensor of ones."""


def par_dim(size: Any) -> int:
    """Mark a size in a shape as the partition dimension."""


def power(x: Any, y: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Any:
    """a to the power b. Elementwise; a is x, b is y, at least one of them a tile in SBUF or PSUM; shapes broadcast as in NumPy, over partitions too. A new tile; the promoted dtype unless dtype is given."""


def prod(x: Any, axis: Any, *, dtype: Any = None, mask: Any = None, keepdims: bool = False, **kwargs: Any) -> Tensor:
    """The product over free axes (an int, or a tuple); the axes are dropped unless keepdims, (P, 1) stays at least. Dtype of x unless dtype is given; computed in float32."""


def program_id(axis: Any) -> Any:
    """Index of this program instance along a grid axis (0 when launched without a grid)."""


def program_ndim() -> int:
    """Number of dimensions of the launch grid; 0 when launched without one."""


def rand(shape: Any, dtype: Any = ..., **kwargs: Any) -> Tensor:
    """A tile of random numbers, uniform in [0, 1)."""


def random_seed(seed: Any, *, mask: Any = None, **kwargs: Any) -> None:
    """Set the seed of the random numbers that follow: a number, or a tile of one element."""


def reciprocal(x: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Any:
    """1 / a. Elementwise on a tile in SBUF or PSUM; a new tile of its shape, in its dtype unless dtype is given."""


def relu(x: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Any:
    """max(a, 0). Elementwise on a tile in SBUF or PSUM; a new tile of its shape, in its dtype unless dtype is given."""


def right_shift(x: Any, y: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Any:
    """Logical a >> b, zeros entering at the top, whatever the sign; 0 for a count of the width or more. Elementwise; a is x, b is y, at least one of them a tile in SBUF or PSUM; shapes broadcast as in NumPy, over partitions too. A new tile; the promoted dtype unless dtype is given."""


def rms_norm(x: Any, w: Any, axis: Any, n: Any, epsilon: float = 1e-06, *, dtype: Any = None, compute_dtype: Any = None, mask: Any = None, **kwargs: Any) -> Tensor:
    """x / sqrt(sum(x * x) / n + epsilon) * w over free axes, computed in float32; w broadcasts to x, (1,
    F) for instance.
    """


def rsqrt(x: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Any:
    """1 / sqrt(a). Elementwise on a tile in SBUF or PSUM; a new tile of its shape, in its dtype unless dtype is given."""


def sequential_range(*args: Any, **kwargs: Any) -> LoopRange:
    """Loop of ordered iterations, like range."""


def shared_constant(constant: Any, dtype: Any = None, **kwargs: Any) -> Tensor:
    """A NumPy array that is known at trace time, as a tensor in HBM; nl.load reads it."""


def shared_identity_matrix(n: Any, dtype: Any = ..., **kwargs: Any) -> Tensor:
    """The n x n identity as a constant tensor in HBM."""


def sigmoid(x: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Any:
    """1 / (1 + exp(-a)). Elementwise on a tile in SBUF or PSUM; a new tile of its shape, in its dtype unless dtype is given."""


def sign(x: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Any:
    """-1, 0 or 1; NaN for NaN. Elementwise on a tile in SBUF or PSUM; a new tile of its shape, in its dtype unless dtype is given."""


def silu(x: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Any:
    """a sigmoid(a). Elementwise on a tile in SBUF or PSUM; a new tile of its shape, in its dtype unless dtype is given."""


def silu_dx(x: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Any:
    """Derivative of silu: s (1 + a (1 - s)) with s = sigmoid(a). Elementwise on a tile in SBUF or PSUM; a new tile of its shape, in its dtype unless dtype is given."""


def sin(x: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Any:
    """Sine. Elementwise on a tile in SBUF or PSUM; a new tile of its shape, in its dtype unless dtype is given."""


def softmax(x: Any, axis: Any, *, dtype: Any = None, compute_dtype: Any = None, mask: Any = None, **kwargs: Any) -> Tensor:
    """exp(x - max(x)) / sum(exp(x - max(x))) over free axes, computed in float32; compute_dtype acts as
    dtype.
    """


def softplus(x: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Any:
    """log(1 + exp(a)). Elementwise on a tile in SBUF or PSUM; a new tile of its shape, in its dtype unless dtype is given."""


def spmd_dim(*dims: Any) -> SpmdDim:
    """A grid dimension built from sub-dimensions (ints and nl.nc), outermost first."""


def sqrt(x: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Any:
    """Square root. Elementwise on a tile in SBUF or PSUM; a new tile of its shape, in its dtype unless dtype is given."""


def square(x: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Any:
    """a * a. Elementwise on a tile in SBUF or PSUM; a new tile of its shape, in its dtype unless dtype is given."""


def static_cast(input_data: Any, dtype: Any) -> Any:
    """A tile, array or number in another dtype; works on arrays outside of kernels."""


def static_range(*args: Any) -> range:
    """Loop that is unrolled when the kernel is traced; the index is a Python int."""


def store(dst: Any, value: Any, *, mask: Any = None, **kwargs: Any) -> None:
    """Write a tile (SBUF or PSUM) or a number to an HBM tensor or index of it; the value is cast, and
    broadcast up. mode (undocumented): what an index outside the tensor does, nisa.oob_mode.error or skip, which leaves the row out.
    """


def subtract(x: Any, y: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Any:
    """a - b; reduces as x0 - x1 - x2 - ...; int32 exactly on GpSimd. Elementwise; a is x, b is y, at least one of them a tile in SBUF or PSUM; shapes broadcast as in NumPy, over partitions too. A new tile; the promoted dtype unless dtype is given."""


def sum(x: Any, axis: Any, *, dtype: Any = None, mask: Any = None, keepdims: bool = False, **kwargs: Any) -> Tensor:
    """The sum over free axes (an int, or a tuple); the axes are dropped unless keepdims, (P, 1) stays at least. Dtype of x unless dtype is given; computed in float32."""


def tan(x: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Any:
    """Tangent. Elementwise on a tile in SBUF or PSUM; a new tile of its shape, in its dtype unless dtype is given."""


def tanh(x: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Any:
    """Hyperbolic tangent. Elementwise on a tile in SBUF or PSUM; a new tile of its shape, in its dtype unless dtype is given."""


def transpose(x: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Tensor:
    """The transpose of a tile of at most 128 x 128, in PSUM."""


def trunc(x: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Any:
    """Integer part of a. Elementwise on a tile in SBUF or PSUM; a new tile of its shape, in its dtype unless dtype is given."""


def var(x: Any, axis: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Tensor:
    """Variance over free axes, divided by the number of elements as numpy.var; computed in float32."""


def where(condition: Any, x: Any, y: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Tensor:
    """x where the condition (a tile, or a comparison of indices) is nonzero, y elsewhere."""


def zeros(shape: Any, dtype: Any, *, buffer: Any = None, name: str = '', **kwargs: Any) -> Tensor:
    """A new on-chip tensor of zeros."""


def zeros_like(a: Any, dtype: Any = None, *, buffer: Any = None, name: str = '', **kwargs: Any) -> Tensor:
    """A new on-chip tensor of zeros with the shape and dtype of a."""
