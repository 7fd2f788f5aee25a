"""The documented error codes: rule, reason and remedy of each (source: api_legacy "Errors", public error pages)."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """What a documented code means. `base` picks the exception class in errors.py."""

    base: str
    rule: str
    why: str
    fix: str


CATALOGUE: dict[str, Entry] = {
    "err_1d_arange_not_supported": Entry(
        "value", "an index has at least two dimensions",
        "a tile is addressed by partition and free element, and a bare nl.arange does not say which it is",
        "write nl.arange(n)[:, None] for the partition dimension or nl.arange(n)[None, :] for a free one"),
    "err_activation_bias_invalid_type": Entry(
        "type", "the bias of an activation is a float32, float16 or bfloat16 vector",
        "the Scalar Engine adds one floating-point bias per partition",
        "load or cast the bias to a [P, 1] tile of one of these types"),
    "err_activation_scale_invalid_type": Entry(
        "type", "a scale tile is float32", "the Scalar Engine multiplies in float32 and reads the scale as such",
        "cast the scale tile to float32, or give a Python number"),
    "err_activation_scale_scalar_or_vector": Entry(
        "value", "the scale is a number or a [P, 1] vector", "the Scalar Engine has one scale per partition",
        "use a [P, 1] tile, or multiply with nl.multiply first"),
    "err_ambiguous_tensor_truth_value": Entry(
        "value", "a tensor of several elements has no truth value",
        "Python's and, or, not and if need one bool",
        "use & for masks, nl.logical_and / nl.logical_or for tiles, and nl.where to select"),
    "err_annotation_shape_mismatch": Entry(
        "value", "a local nt.tensor[...] annotation states the real shape",
        "the annotation is checked so that a wrong layout shows at once",
        "correct the annotation or the expression"),
    "err_bias_tensor_must_be_specified_in_allocation": Entry(
        "value", "a directly allocated kernel gives the bias of every activation",
        "without one the compiler makes a zero tile, for which a hand-allocated kernel has no place",
        "allocate a zero [P, 1] tile and pass it as bias"),
    "err_cannot_assign_to_index": Entry(
        "type", "an index or mask cannot be assigned to", "it is an expression, not memory",
        "build a tensor with nl.ndarray, or an index tile with nisa.iota"),
    "err_cannot_update_immutable_parameter": Entry(
        "value", "a kernel does not write to its parameters",
        "a parameter is an input of the framework's graph and may be read elsewhere",
        "write to a tensor made with nl.ndarray(..., buffer=nl.shared_hbm) and return it, "
        "or annotate the parameter as nt.mutable_tensor and return it"),
    "err_control_flow_condition_depending_on_arange": Entry(
        "value", "if and while do not depend on nl.arange or nl.mgrid values",
        "an arange stands for all elements of a tile at once, a branch is taken by the whole program",
        "pass the comparison as mask=, or use nl.where"),
    "err_copy_dynamic_indirect_indices_not_natively_supported": Entry(
        "value", "a plain copy has no runtime index",
        "a dynamic offset needs the instruction that reads it from memory",
        "use nisa.tensor_copy_dynamic_src or nisa.tensor_copy_dynamic_dst"),
    "err_dynamic_control_flow_not_supported": Entry(
        "value", "Python's if does not depend on the values of a tensor",
        "the kernel is traced before any value exists",
        "use nl.where or a mask; for a runtime loop use nt.scalar with the do-while form"),
    "err_exceed_max_supported_dimension": Entry(
        "value", "the operand has no more dimensions than the API takes",
        "the instruction addresses a limited number of dimensions",
        "reshape or index the operand to fewer dimensions"),
    "err_failed_to_infer_tile_from_local_tensor": Entry(
        "value", "a compute API takes a tile, whose partition dimension is first",
        "block dimensions before the partition dimension are many tiles, not one",
        "index the block dimensions, as in t[i]"),
    "err_hbm_tensor_with_init_value_not_supported": Entry(
        "value", "nl.zeros, nl.ones and nl.full make on-chip tensors only",
        "HBM is written by DMA, there is no instruction that fills it",
        "make it with nl.ndarray and nl.store a value into it"),
    "err_indirect_indices_are_not_supported_with_nki_api": Entry(
        "value", "this API takes no runtime indices", "its access pattern is fixed when the kernel is compiled",
        "gather with nl.load or nisa.dma_copy first"),
    "err_indirect_indices_free_dim": Entry(
        "value", "a runtime index addresses the partition or block dimension, the others use nl.arange",
        "an indirect DMA moves one row per index",
        "move the indexed dimension first, and build the other indices with nl.arange"),
    "err_leading_dimension_of_tensor_must_be_partition": Entry(
        "value", "the first dimension of an on-chip tensor is the partition dimension",
        "block dimensions are many tiles and deprecated",
        "put the partition dimension first or use a list of tiles"),
    "err_local_variable_used_out_of_scope": Entry(
        "value", "a tensor made in a loop or branch body is used there only",
        "its memory is free again when the body ends",
        "make the tensor with nl.ndarray before the loop and assign with t[...] = value inside"),
    "err_mutable_parameter_not_returned": Entry(
        "value", "a mutable parameter is returned by the kernel",
        "the framework learns from the return value that the buffer has changed",
        "add the parameter to the return value"),
    "err_nested_kernel_with_spmd_grid": Entry(
        "value", "a kernel called inside a kernel has no launch grid",
        "the outer kernel already runs on the grid", "drop the [grid], pass indices as arguments"),
    "err_nki_api_outside_of_nki_kernel": Entry(
        "error", "an NKI API runs inside a traced kernel",
        "it adds an instruction to the kernel that is being traced, and there is none",
        "call it from a function under nki.jit, or through nki.simulate_kernel"),
    "err_num_partition_exceed_arch_limit": Entry(
        "value", "a tile has at most 128 partitions", "SBUF and PSUM have 128 partitions",
        "tile the partition dimension by nl.tile_size.pmax"),
    "err_num_partition_mismatch": Entry(
        "value", "the operands of an instruction have the same number of partitions",
        "each lane of an engine works on its own partition",
        "broadcast with nl.broadcast_to, or load the tile with the same partition size"),
    "err_shared_hbm_must_in_kernel_level": Entry(
        "value", "a shared_hbm tensor is made at the top level of the kernel",
        "it is shared by all program instances and outlives loops and callees",
        "make it before the loop, or use nl.private_hbm"),
    "err_size_of_dimension_exceed_arch_limit": Entry(
        "value", "each dimension is within the limit of the API", "the engine has a fixed size",
        "tile the dimension"),
    "err_store_dst_shape_smaller_than_other_shape": Entry(
        "value", "the target of an assignment is at least as large as the value",
        "a value may be broadcast up, never cut down", "index the value or enlarge the target"),
    "err_tensor_access_out_of_bound": Entry(
        "index", "every index is inside the tensor",
        "an access outside reads or overwrites other data on the device",
        "correct the index, or exclude the elements with mask="),
    "err_tensor_creation_on_scratchpad_with_init_value_not_supported": Entry(
        "value", "a directly allocated tensor has no initial value",
        "the fill would be an instruction that you did not place",
        "make it with nl.ndarray and fill it with nisa.memset or an assignment"),
    "err_tensor_output_not_written_to": Entry(
        "value", "every output is stored to, and a kernel has an output",
        "an output that is never written holds garbage on the device",
        "store to it on every path; look for a loop that never runs"),
    "err_transpose_on_tensor_engine_not_allowed_in_allocated_kernel": Entry(
        "value", "a directly allocated kernel does not transpose on the Tensor Engine implicitly",
        "the identity matrix and the PSUM tile would have no place",
        "use nisa.nc_matmul with your own identity and is_transpose, or pass transpose_x=True"),
    "err_unexpected_output_dependencies": Entry(
        "value", "iterations of an affine_range, and programs of a grid, write to different places",
        "they may run in any order or at the same time",
        "index the target with the loop index or program id, or use nl.sequential_range"),
    "err_unsupported_expression_in_mask": Entry(
        "type", "a mask is made of comparisons of affine index expressions joined by &",
        "the mask becomes bounds of the access pattern", "use nl.where for conditions on values"),
    "err_unsupported_memory": Entry(
        "type", "each operand is in a memory that its engine reaches",
        "compute engines reach SBUF and PSUM only, GpSimd has no path to PSUM, the Tensor Engine reads SBUF "
        "and writes PSUM",
        "nl.load from HBM first, or copy between PSUM and SBUF with nl.copy"),
    "err_unsupported_mixing_basic_advanced_tensor_indexing": Entry(
        "value", "one index tuple is either basic (int, slice, nl.ds, ...) or advanced (nl.arange, nl.mgrid)",
        "the two give a tile its dimensions in different ways",
        "write the slice as nl.arange, or the arange as a slice"),
    "err_while_loop_requires_unconditional_entry": Entry(
        "value", "a runtime while loop is entered unconditionally",
        "the device runs the body before it has the condition",
        "use the do-while form: cond = nt.scalar(True); while cond: ...; cond = nt.scalar(value)"),
    "err_read_modify_write_on_kernel_parameter": Entry(
        "value", "a kernel parameter is not both read and written",
        "its buffer may be donated, and the order is not defined", "copy it to a new tensor first"),
    "err_nki_param_not_hashable": Entry(
        "type", "an argument that is no tensor is a compile-time constant and is hashable",
        "it is part of the key under which the traced kernel is kept",
        "pass a tuple instead of a list, or a frozen dataclass"),
    "err_multi_cores_spmd_not_supported": Entry(
        "value", "a grid over several physical cores needs trn2 or later",
        "earlier chips have one physical core per logical core",
        "drop nl.nc, or set platform_target or NEURON_PLATFORM_TARGET_OVERRIDE to trn2"),
}
# the name that older releases used
CATALOGUE["err_tensor_creation_on_scratchpad_with_init_value_not_allowed"] = CATALOGUE[
    "err_tensor_creation_on_scratchpad_with_init_value_not_supported"]
