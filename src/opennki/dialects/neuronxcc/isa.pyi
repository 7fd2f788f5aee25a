# Made by `python -m opennki.tools.stubs` from signatures and docstrings; do not edit.
"""`neuronxcc.nki.isa`: one function per instruction, made from the declarations in `opennki.isa`.

`help(nisa.tensor_tensor)` or `opennki ops tensor_tensor` shows operands, memories, dtypes, limits and cost.
"""
from typing import Any

from opennki.dialects.neuronxcc import isa_constants as constants
from opennki.isa.enums import dge_mode as dge_mode
from opennki.isa.enums import engine
from opennki.isa.enums import engine as engine
from opennki.isa.enums import oob_mode as oob_mode
from opennki.isa.enums import reduce_cmd as reduce_cmd
from opennki.isa.target import nc_version
from opennki.isa.target import nc_version as nc_version
from opennki.lang.data import fp32 as fp32
from opennki.lang.tensor import Tensor

dma_engine: engine
gpsimd_engine: engine
scalar_engine: engine
tensor_engine: engine
unknown_engine: engine
vector_engine: engine


def activation(op: Any, data: Tensor, *, bias: Tensor | None = None, scale: Tensor | float = 1.0, reduce_op: Any = None, reduce_res: Tensor | None = None, reduce_cmd: Any = ..., mask: Any = None, dtype: Any = None, **kwargs: Any) -> Tensor:
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


def activation_reduce(op: Any, data: Tensor, *, reduce_op: Any, reduce_res: Tensor, bias: Tensor | None = None, scale: Tensor | float = 1.0, mask: Any = None, dtype: Any = None, **kwargs: Any) -> Tensor:
    """Activation and its reduction: result = op(data * scale + bias), reduce_res = fold of it over all free
    elements.

    The same as activation with reduce_cmd=reset_reduce. data: [P, F...] in SBUF or PSUM, P <= 128. scale: a
    number or a float32 [P, 1] tile. bias: [P, 1] tile, float32, float16 or bfloat16. reduce_op: add (others
    from trn2). reduce_res: [P, 1] tile in SBUF or PSUM, written; the fold takes the float32 values before
    they are rounded to the dtype of the result. Result: shape of data, dtype of data unless dtype is given.
    mask counts the dimensions of data; elements outside are neither written nor folded. Cost: max(64, F) + 64
    cycles.
    """


def affine_select(pred: Any, on_true_tile: Tensor, on_false_value: Any, *, mask: Any = None, dtype: Any = None, **kwargs: Any) -> Tensor:
    """Selects by an index comparison: result = on_true_tile where pred holds, on_false_value elsewhere.

    pred: one comparison of affine expressions of nl.arange / nl.mgrid, loop indices and program ids (no &, no
    values of tiles), of the shape of on_true_tile. on_true_tile: [P, F...], P <= 128, float or 8/16-bit
    integer; PSUM is accepted, as public kernels do it (the data is moved to SBUF first). on_false_value: a
    number, float32. Result: SBUF, dtype of on_true_tile unless dtype is given. mask counts the dimensions of
    the tile. Cost: 150 + F cycles.
    """


def bn_aggr(data: Tensor, *, mask: Any = None, dtype: Any = None, **kwargs: Any) -> Tensor:
    """Mean and variance of each partition from the results of one or more bn_stats.

    data: a tile in SBUF or PSUM, at most 128 partitions; triples (count, mean, variance * count), so the
    number of elements per partition is a multiple of three. Result: (P, 2): mean and variance (divided by the
    count); dtype, or that of data. float32 arithmetic. Where all counts are 0 the result is NaN. A mask
    counts the dimensions of data and excludes triples.
    """


def bn_stats(data: Tensor, *, mask: Any = None, dtype: Any = None, **kwargs: Any) -> Tensor:
    """Mean and variance statistics of each partition, in the form that bn_aggr combines.

    data: a tile in SBUF or PSUM, at most 128 partitions and 512 elements per partition
    (nl.tile_size.bn_stats_fmax). Result: (P, 6): count, mean, variance * count of the elements at even
    positions, then of those at odd positions; dtype, or that of data. float32 arithmetic; the variance is
    around the mean, divided by the count. What a mask excludes is not counted.
    """


def builtin_custom_op(function_name: Any, lib_file_name: Any, ulib_to_ucode_version: Any, ulib_to_isa_version: Any, srcs: Any, dsts: Any, **kwargs: Any) -> None:
    """Calls a function of a prebuilt library of the GpSimd Engine; always an error here.

    The vendor's signature: function and library name, two versions, source and destination tiles. The
    libraries are machine code of the GpSimd cores and their meaning is not public, so the call is refused
    with an explanation when it is traced.
    """


def dma_copy(*, dst: Tensor, src: Tensor, mask: Any = None, dst_rmw_op: Any = None, oob_mode: Any = ..., dge_mode: Any = ...) -> None:
    """Copies src to dst by DMA: dst = src, or dst = dst + src with dst_rmw_op=np.add.

    dst, src: tiles of one shape in HBM or SBUF (a PSUM tile goes through SBUF); the dtypes may differ, then
    each element is cast; with equal dtypes bits are kept. The sum is in float32. Either may be indexed at run
    time by a [N, 1] integer tile in SBUF along its first dimension. dst is read only with dst_rmw_op; rows
    that an index names twice are then not defined. oob_mode.error raises for an index outside, oob_mode.skip
    leaves the row (not with dst_rmw_op). dge_mode: who makes the descriptors, hwdge from trn2. mask counts
    the dimensions of the tiles. Cost: bytes / sustained DMA rate, half the rate with dst_rmw_op.
    """


def dma_transpose(src: Tensor, *, axes: Any = None, mask: Any = None, dtype: Any = None, dge_mode: Any = ..., **kwargs: Any) -> Tensor:
    """Transposes a tile while it is moved into SBUF: the first and the last dimension of src change places.

    src: HBM or SBUF, 2 to 4 dimensions, indexed at run time by one element, or from trn2 by a [N, 1] tile.
    axes: (1, 0), (2, 1, 0) or (3, 1, 2, 0), by default the one for the dimensions of src. Result:
    src.transpose(axes) in SBUF, so the last dimension of src is at most 128; dtype of src unless dtype is given;
    bits are kept where the dtype is. dge_mode: hwdge from trn2. mask (2 dimensions) counts those of src. Cost:
    bytes / (0.9 of the sustained DMA rate from HBM, 0.5 of it from SBUF).
    """


def dropout(data: Tensor, prob: Tensor | float, *, mask: Any = None, dtype: Any = None, **kwargs: Any) -> Tensor:
    """Replaces elements by 0 with a probability; survivors are unchanged (no scaling by 1 / (1 - prob)).

    data: [P, F...] in SBUF or PSUM, P <= 128. prob: a number or a [P, 1] float tile; 0 keeps everything, 1
    zeroes everything; outside [0, 1] the vendor defines nothing, here everything is kept. Integer data: a
    prob tile is float32, the result has the dtype of data. Result: shape of data, dtype of data unless dtype
    is given. The numbers drawn are those of nl.rand. mask counts the dimensions of data. Cost: max(64, F)
    cycles.
    """


def get_nc_version() -> nc_version:
    """Generation of the NeuronCore that the kernel is traced for: gen2 (trn1, inf2), gen3 (trn2) or gen4
    (trn3).

    Raises err_nki_api_outside_of_nki_kernel.
    """


def iota(expr: Any, dtype: Any, *, mask: Any = None, **kwargs: Any) -> Tensor:
    """Writes the values of an index expression to a tile: result = expr, computed in int32, then cast to
    dtype.

    expr: an affine combination of nl.arange / nl.mgrid, loop indices and program ids, at least 2 dimensions;
    its broadcast shape is the shape of the result, the first dimension are the partitions, <= 128. dtype: of
    the result, required; integers saturate. Result: SBUF. Cost: 150 + F cycles.
    """


def local_gather(src_buffer: Tensor, index: Tensor, num_elem_per_idx: Any = 1, num_valid_indices: Any = None, *, mask: Any = None) -> Tensor:
    """Gathers runs of elements by index within each group of 16 partitions.

    The indices of a group are those of its 16 rows of index, taken down the partitions first: i-th index =
    index[16 g + i % 16, i // 16]; result[p, i, :] = flattened src_buffer[p][index : index +
    num_elem_per_idx]. src_buffer: [P, ...], index: [P, ...] uint16, both in SBUF, P a multiple of 16. An
    index is an offset in elements. num_elem_per_idx: 1, 2, 4, 8, 16 or 32. num_valid_indices: how many
    indices of a group are used, all by default, at most 4096. Result: [P, n / 16, 16, num_elem_per_idx], or
    [P, n, num_elem_per_idx] where 16 does not divide n; dtype of src_buffer. An index outside is undefined on
    the device; here it gives NaN or the largest integer. Cost: 150 + n * num_elem_per_idx / C cycles, C = (28
    + 4 E) / (4 E) / min(4 / bytes per element, E), E = num_elem_per_idx.
    """


def max8(*, src: Tensor, mask: Any = None, dtype: Any = None, **kwargs: Any) -> Tensor:
    """The eight largest values of each partition, in descending order.

    src: a tile in SBUF or PSUM, at most 128 partitions, up to five dimensions, 8 to 16384 elements per
    partition. Result: (P, 8); dtype, or that of src. Repeated values count as often as they occur. NaN counts
    as larger than infinity, as it also passes through nl.max (the vendor does not say). What a mask excludes
    counts as -inf.
    """


def memset(shape: Any, value: Any, dtype: Any, *, mask: Any = None, engine: Any = ..., **kwargs: Any) -> Tensor:
    """A new tile filled with a constant.

    shape: the first dimension is the partition dimension (at most 128), whatever nl.par_dim says. value: a
    number, rounded once to dtype (to nearest even; integers saturate). dtype: that of the tile. Vector or
    GpSimd Engine.
    """


def nc_find_index8(*, data: Tensor, vals: Tensor, mask: Any = None, dtype: Any = None, **kwargs: Any) -> Tensor:
    """Where each of eight values occurs first in its partition.

    data: a tile in SBUF or PSUM, at most 128 partitions, up to five dimensions, 8 to 16384 elements per
    partition, counted from 0 over all free dimensions. vals: eight elements per partition, up to three
    dimensions. Result: (P, 8), uint32 (or uint16 by dtype). A value that vals holds k times gets its first k
    places, in ascending order (2.32 documentation). A value that is not there (or NaN) gets all ones,
    0xFFFFFFFF or 0xFFFF; 2.26 calls that undefined. What a mask excludes is not found.
    """


def nc_match_replace8(*, data: Tensor, vals: Tensor, imm: Any, dst_idx: Tensor | None = None, mask: Any = None, dtype: Any = None, **kwargs: Any) -> Tensor:
    """A copy of data in which the first match of each of eight values is replaced by imm.

    data: a tile in SBUF or PSUM, at most 128 partitions, up to five dimensions, at most 16384 elements per
    partition. vals: eight elements per partition, up to three dimensions. imm: a number. Result: the shape of
    data; dtype, or that of data. dst_idx: a tile of the shape of vals, set to the places of the matches,
    counted from 0 over all free dimensions. The eight values are walked from the last to the first, as the
    device does, and each takes its first match that is still there: of a value that vals holds k times, the
    first k matches are replaced, and the first place goes to the last of its columns in dst_idx. An element
    that was replaced matches no more, even if imm is in vals. A value that is not there (or NaN) replaces
    nothing and gets all ones in dst_idx (undefined by the vendor). What a mask excludes
    matches nothing.
    """


def nc_matmul(stationary: Tensor, moving: Tensor, *, is_stationary_onezero: bool = False, is_moving_onezero: bool = False, is_transpose: bool = False, tile_position: Any = (), tile_size: Any = (), mask: Any = None, perf_mode: Any = None, **kwargs: Any) -> Tensor:
    """Matrix product of two SBUF tiles into PSUM: result[m, n] = sum over k of stationary[k, m] * moving[k,
    n].

    stationary: [K, M], K <= 128 partitions, M <= 128 free elements. moving: [K, N], N <= 512 free elements
    (the result fits one PSUM bank of 2 KiB per partition); it may have several free dimensions, the result
    has the same ones. Both in SBUF, fp8, bfloat16, float16, tfloat32 or float32. An operand may be masked,
    `x[i < n]`: elements outside read as zero, which shortens the contraction. Result: [M, N] float32 in PSUM;
    the sum is in float32. `acc += nc_matmul(...)` into a PSUM tile accumulates in place.

    is_stationary_onezero, is_moving_onezero: the operand holds only 0 and 1 (speeds up float32, changes no
    value). is_transpose: the moving tile is an identity matrix and the stationary tile is transposed bit for
    bit. (Before trn2 the hardware multiplies instead, so there NaN and infinity spread over their row; this
    is not reproduced.) tile_position, tile_size: (row, column) of the part of the PE array to use, both or
    neither, multiples of 32. perf_mode "double_row_gen3" (trn2 and later): fp8 operands [K, 2, F]; the
    contraction runs over K and the pair, M and N are the elements after the pair. mask counts the dimensions
    of the result. Cost: max(min(64, M), N) cycles, times 4 for float32, times 2 for float32 with a onezero
    operand.
    """


def nc_stream_shuffle(src: Tensor, dst: Tensor, shuffle_mask: Any, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> None:
    """Move partitions within each quadrant of 32: dst[q*32 + i] = src[q*32 + shuffle_mask[i]].

    src, dst: tiles in SBUF or PSUM of one dtype and the same number of elements per partition; they may be
    the same tile. shuffle_mask: 32 integers 0..31, the same for every quadrant; 255 leaves the partition of
    dst as it is. src may have fewer partitions than dst, where shuffle_mask names only those it has ([0] * 32
    spreads one partition over 32). mask counts the dimensions of dst.
    """


def nc_transpose(data: Tensor, *, mask: Any = None, dtype: Any = None, engine: Any = ..., **kwargs: Any) -> Tensor:
    """Transposes a tile between partition and free dimension: result[f, p] = data[p, f].

    data: [P, F], free dimensions are flattened. Tensor Engine (the default for SBUF): up to 128 x 128, from
    SBUF to PSUM. Vector Engine (the default for PSUM): up to 32 x 32, from SBUF or PSUM. Result: [F, P] in
    PSUM, dtype of data unless dtype is given; bits are kept where the dtype is. (Before trn2 the Tensor
    Engine multiplies with an identity matrix, so there NaN and infinity spread; this is not reproduced.) mask
    counts the dimensions of data. Cost: Vector Engine max(64, F); Tensor Engine max(P, min(64, F)), twice
    that for 4-byte data.
    """


def range_select(*, on_true_tile: Tensor, comp_op0: Any, comp_op1: Any, bound0: Tensor, bound1: Tensor, reduce_cmd: Any = ..., reduce_res: Tensor | None = None, reduce_op: Any = ..., range_start: Any = 0, on_false_value: Any = -3.4028234663852886e+38, mask: Any = None, dtype: Any = None, **kwargs: Any) -> Tensor:
    """on_true_tile where its position is in a range of each partition, fp32.min elsewhere (trn2 and later).

    With i = range_start + free position: selected where (i comp_op0 bound0) and (i comp_op1 bound1).
    on_true_tile: a float tile in SBUF or PSUM, at most 128 partitions. comp_op0, comp_op1: equal, less,
    less_equal, greater, greater_equal. bound0, bound1: float32 tiles with one element per partition.
    Positions are compared in float32: exact below 2^24. range_start: an integer. on_false_value: fp32.min
    only. Result: the shape of on_true_tile; dtype, or its dtype (fp32.min becomes -inf in narrower floats).
    reduce_res, reduce_cmd, reduce_op: as in select_reduce; the registers are the same.
    """


def reciprocal(data: Tensor, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Tensor:
    """1 / data, element by element.

    data: a tile in SBUF or PSUM, at most 128 partitions. float32 arithmetic, rounded once to dtype, or that
    of data; 1/0 is infinity with the sign of the zero. Eight cycles per element:
    nki.isa.activation(op=nl.reciprocal) is faster.
    """


def scalar_tensor_tensor(*, data: Tensor, op0: Any, operand0: Tensor | float, op1: Any, operand1: Tensor, reverse0: bool = False, reverse1: bool = False, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Tensor:
    """(data op0 operand0) op1 operand1, with a scalar operand first and a tile second.

    data: a two-dimensional tile, at most 128 partitions. operand0: a number, or a tile with one element per
    partition. operand1: a tile with the elements of data. SBUF or PSUM, but data and operand1 not both in
    PSUM. reverse0, reverse1: the operand is the left side of its operator. Arithmetic operators only, in
    float32, rounded once at the end. Result: the shape of data; dtype, or that of data.
    """


def select_reduce(*, dst: Tensor, predicate: Tensor, on_true: Tensor, on_false: Tensor | float, reduce_res: Tensor | None = None, reduce_cmd: Any = ..., reduce_op: Any = ..., reverse_pred: bool = False, mask: Any = None, dtype: Any = None, **kwargs: Any) -> None:
    """dst = on_true where predicate is not zero, on_false elsewhere, with an optional maximum per partition.

    dst: written in place. predicate: bool or an integer of at most 16 bits. on_true: any dtype but tfloat32,
    int32 and uint32. All have the same partitions (at most 128) and elements, SBUF or PSUM, on_true and
    predicate not both in PSUM. on_false: a number, or a tile with one element per partition. reverse_pred:
    select on_true where predicate is zero. reduce_res: a float tile with one element per partition, set to
    the accumulator registers of the Vector Engine after the instruction. reduce_cmd: reset_reduce takes the
    maximum of this selection, reduce that with what the registers held, reset sets them to -inf, idle leaves
    them (on the device they may change). Values are reduced before they are rounded to dst.
    """


def sequence_bounds(*, segment_ids: Tensor, dtype: Any = None) -> Tensor:
    """Start and end of the segment that each element belongs to.

    segment_ids: [1, n] float32 or int32; equal neighbours form a segment, 0 is padding. Result: [1, 2, n] in
    SBUF, dtype of segment_ids unless dtype (float32 or int32) is given; result[0, 0, i] is the first element
    of the segment of i, result[0, 1, i] one past its last; for padding they are n and -1. Cost: not
    documented; 150 + 2 n cycles is assumed.
    """


def tensor_copy(src: Tensor, *, mask: Any = None, dtype: Any = None, engine: Any = ..., **kwargs: Any) -> Tensor:
    """A copy of src, on chip, with an optional change of dtype.

    src: a tile in SBUF or PSUM, at most 128 partitions. Result: the shape of src; dtype, or that of src; in
    SBUF unless it is assigned to a PSUM tensor. Vector (default) and GpSimd copy the bits where the dtype
    stays; another dtype, and the Scalar Engine always, go through float32 (int32 beyond 2^24 loses low bits).
    GpSimd does not reach PSUM.
    """


def tensor_copy_dynamic_dst(*, dst: Tensor, src: Tensor, mask: Any = None, dtype: Any = None, engine: Any = ..., **kwargs: Any) -> None:
    """Copy src into a tile whose place in the free dimensions is read from memory, t[ip, offset[0, i] + if].

    dst: written in place, SBUF or PSUM; the offset is one integer element of an SBUF tile, the same for all
    partitions. src: a tile with the partitions and elements of dst. Conversion as tensor_copy, to the dtype
    of dst. An offset outside the tensor is an error when the kernel runs.
    """


def tensor_copy_dynamic_src(src: Tensor, *, mask: Any = None, dtype: Any = None, engine: Any = ..., **kwargs: Any) -> Tensor:
    """A copy of a tile whose place in the free dimensions is read from memory, t[ip, offset[0, i] + if].

    src: a tile in SBUF or PSUM; the offset is one integer element of an SBUF tile, the same for all
    partitions. Result and conversion as tensor_copy. An offset outside the tensor is an error when the kernel
    runs.
    """


def tensor_copy_predicated(*, src: Tensor | float, dst: Tensor, predicate: Tensor, reverse_pred: bool = False, mask: Any = None, dtype: Any = None, **kwargs: Any) -> None:
    """dst = src where predicate is not zero (where it is zero with reverse_pred); dst is unchanged elsewhere.

    src: a tile of the dtype and elements of dst, or a number (0 or 1 for bool). dst: changed in place. predicate: bool, uint8,
    uint16 or uint32, with the elements of dst. SBUF or PSUM, but src and predicate not both in PSUM. Copied
    elements keep their bits.
    """


def tensor_partition_reduce(op: Any, data: Tensor, *, mask: Any = None, dtype: Any = None, **kwargs: Any) -> Tensor:
    """Reduces over the partitions: result[0, ...] = op over p of data[p, ...].

    op: add, maximum (in float32), bitwise_or or bitwise_and (of integers, on bits). data: [P, F...], P <=
    128. Result: [1, F...] in SBUF, dtype of data unless dtype is given. mask counts the dimensions of data;
    elements outside are left out. Cost: not documented; 150 + 2 F cycles is assumed.
    """


def tensor_reduce(op: Any, data: Tensor, axis: Any, *, mask: Any = None, dtype: Any = None, negate: bool = False, keepdims: bool = False, **kwargs: Any) -> Tensor:
    """Reduce free dimensions of a tile with an associative operator.

    op: an ALU operator that reduces (add, multiply, maximum, minimum, subtract, logical or bitwise and, or,
    xor). data: a tile in SBUF or PSUM, at most 128 partitions. axis: an integer, tuple or list of free
    dimensions as they are in data; negative ones count from the end. (The vendor documents the trailing ones;
    other ones are reached through the access pattern.) Result: data without these dimensions, (P, 1) at
    least, or with size 1 there if keepdims; dtype, or that of data. Arithmetic in float32, rounded once;
    negate changes the sign of the result. Bitwise operators take and make integers. A mask counts the
    dimensions of data: what it excludes is no operand.
    """


def tensor_scalar(data: Tensor, op0: Any, operand0: Tensor | float, reverse0: bool = False, op1: Any = None, operand1: Tensor | float | None = None, reverse1: bool = False, *, dtype: Any = None, mask: Any = None, engine: Any = ..., **kwargs: Any) -> Tensor:
    """(data op0 operand0) op1 operand1, with operands that are one value, or one value per partition.

    data: a tile in SBUF or PSUM, at most 128 partitions. operand0, operand1: a number, or a tile with one
    element per partition. reverse0, reverse1: the operand is the left side of its operator. op1 and operand1
    are optional together. A unary operator (abs, rsqrt, invert ...) ignores its operand. Result: the shape of
    data; dtype, or that of data. Arithmetic is done in float32 and rounded once, at the end. Bitwise
    operators take and make integers, keep the bits, run on the Vector Engine, and do not mix with arithmetic
    ones. rsqrt and power run on GpSimd, which does not reach PSUM; the Scalar Engine (trn2 and later) runs
    multiply, add, and multiply then add.
    """


def tensor_scalar_cumulative(*, src: Tensor, dst: Tensor, op0: Any, op1: Any, imm0: Tensor | float, imm1: Tensor | float | None = None, reduce_cmd: Any = ..., mask: Any = None, dtype: Any = None, **kwargs: Any) -> None:
    """dst = running op1 of (src op0 imm0) along the free dimensions: r[i] = (src[i] op0 imm0) op1 r[i-1].

    src: a tile in SBUF or PSUM, at most 128 partitions, any dtype of at most 16 bits or float32. dst: written
    in place, the elements of src. op0: an arithmetic operator. op1: add, subtract, multiply, maximum or
    minimum. imm0, imm1: a number, or a float32 tile with one element per partition. float32 arithmetic, the
    state is not rounded in between. r[-1] is in the accumulator registers of the Vector Engine, one per
    partition, where the last value stays. reduce_cmd: reset_reduce starts at the neutral value of op1 (0, 1,
    -inf or inf), load_reduce at imm1 (which the other commands
    do not use), reduce where they are.
    """


def tensor_scalar_reduce(*, data: Tensor, op0: Any, operand0: Tensor | float, reduce_op: Any, reduce_res: Tensor, reverse0: bool = False, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Tensor:
    """data op0 operand0, and its reduction over all free dimensions.

    data: a tile in SBUF or PSUM, at most 128 partitions. op0: an arithmetic operator; a unary one ignores
    operand0. operand0: a number, or a tile with one element per partition. reduce_op: add, subtract,
    multiply, maximum or minimum. reduce_res: a tile with one element per partition, written in place.
    reverse0 is not supported. Result: the shape of data; dtype, or that of data. float32 arithmetic; the
    reduction sees values before they are rounded to the result dtype.
    """


def tensor_tensor(data1: Tensor, data2: Tensor, op: Any, *, dtype: Any = None, mask: Any = None, engine: Any = ..., **kwargs: Any) -> Tensor:
    """data1 op data2, element by element.

    data1, data2: tiles with the same number of partitions (at most 128) and of elements per partition; one of
    one element per partition is read again for each element of the other, as public kernels do; no other
    broadcasting. SBUF or PSUM, but not both in PSUM. op: a binary ALU operator. Result: the shape of data1;
    dtype, or the promoted dtype of both. Arithmetic is done in float32 and rounded once. Exceptions: bitwise
    operators take and make integers, keep the bits and run on the Vector Engine; add, subtract and multiply
    of int32 and uint32 tiles in SBUF run on GpSimd unless engine says vector, are exact, and saturate to the
    result dtype. power runs on GpSimd. GpSimd does not reach PSUM.
    """


def tensor_tensor_scan(data0: Tensor, data1: Tensor, initial: Tensor | float, op0: Any, op1: Any, reverse0: bool = False, reverse1: bool = False, *, dtype: Any = None, mask: Any = None, **kwargs: Any) -> Tensor:
    """Scan along the free dimensions: r[i] = (data0[i] op0 r[i-1]) op1 data1[i], with r[-1] = initial.

    data0, data1: tiles with the same partitions (at most 128) and elements, SBUF or PSUM, not both in PSUM;
    several free dimensions are one sequence. initial: a number, or a tile with one element per partition.
    op0, op1: binary arithmetic operators. reverse0: data0 is the right side of op0; reverse1: data1 is the
    left side of op1. float32 arithmetic, the state is not rounded in between. Result: the shape of data0;
    dtype, or the promoted dtype of both. A mask counts the dimensions of data0: the scan passes over what it
    excludes.
    """
