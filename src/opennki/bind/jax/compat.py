"""What differs between versions of JAX, and the few names of it that are not public, each with a way without it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo as hlo

from opennki.errors import UNKNOWN, NkiValueError


def effect() -> Any:
    """A JAX effect for kernels that print, or None where this JAX has no such effects.

    Without one, a call whose results nobody uses is dropped before it reaches XLA.
    """
    return _effect


def _make_effect() -> Any:
    try:
        from jax._src import effects
    except ImportError:
        return None

    class NkiPrintEffect(effects.Effect):  # type: ignore[misc]
        """The call prints."""

        def __str__(self) -> str:
            return "NkiPrint"

        def __eq__(self, other: object) -> bool:
            return type(other) is type(self)

        def __hash__(self) -> int:
            return hash(NkiPrintEffect)

    for name in (
        "lowerable_effects",
        "control_flow_allowed_effects",
        "remat_allowed_effects",
        "custom_derivatives_allowed_effects",
        "partial_eval_kept_effects",
    ):
        allowed = getattr(effects, name, None)
        if allowed is not None:
            allowed.add_type(NkiPrintEffect)
    return NkiPrintEffect()


_effect = _make_effect()


def varying(aval: Any) -> frozenset[Any]:
    """Mesh axes of a shard_map over which a value varies, where this JAX counts them."""
    manual = getattr(aval, "mat", None)  # jax 0.10; `vma` before
    return frozenset(getattr(manual if manual is not None else aval, "varying" if manual is not None else "vma", ()) or ())


def shaped(shape: tuple[int, ...], dtype: np.dtype[Any], avals: Sequence[Any]) -> Any:
    """The abstract value of a result. Inside shard_map it varies over the mesh axes that the operands vary over."""
    for aval in avals:
        if varying(aval):
            try:
                sharding = aval.sharding.update(spec=jax.sharding.PartitionSpec(*[None] * len(shape)))
                return aval.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)
            except (AttributeError, TypeError):  # a JAX that builds them otherwise
                break
    return jax.core.ShapedArray(shape, dtype)


def equal_varying(operands: Sequence[Any]) -> list[Any]:
    """Operands of one call that all vary over the same mesh axes, as check_vma of shard_map asks for."""
    axes = [varying(getattr(x, "aval", None)) for x in operands]
    union: frozenset[Any] = frozenset().union(*axes)
    if not union or all(a == union for a in axes):
        return list(operands)
    cast = getattr(jax.lax, "pcast", None)
    out = []
    for x, have in zip(operands, axes, strict=True):
        missing = tuple(sorted(union - have, key=str))
        if not missing:
            out.append(x)
        elif cast is not None:
            out.append(cast(x, missing, to="varying"))
        else:
            out.append(jax.lax.pvary(x, missing))
    return out


def committed(array: Any) -> bool:
    """Whether an array is bound to its device; one whose JAX does not say counts as bound."""
    return bool(getattr(array, "committed", getattr(array, "_committed", True)))


def apply_primitive(primitive: Any, *args: Any, **params: Any) -> Any:
    """Run a primitive outside of jit."""
    try:
        from jax._src.dispatch import apply_primitive as apply
    except ImportError:
        with jax.disable_jit(False):
            return jax.jit(lambda *a: primitive.bind(*a, **params))(*args)
    return apply(primitive, *args, **params)


def rank_words(ctx: Any, name: str) -> tuple[Any, Any] | None:
    """In a lowering rule: a value with the rank of the device, the number of ranks, and what `_processes` adds, and its abstract value;
    None in a program of one device. Ranks are positions in the mesh, `mesh.devices.flat`. Errors: NkiValueError where it is not known
    which devices take part."""
    axes = ctx.module_context.axis_context
    mesh = getattr(axes, "mesh", None)
    count = int(mesh.size) if mesh is not None else int(getattr(axes, "num_devices", None) or 1)
    if count == 1:
        return None
    manual = getattr(axes, "manual_axes", None)
    if mesh is None or set(manual or ()) != {n for n, size in mesh.shape.items() if size > 1} | set(manual or ()):
        raise NkiValueError(
            f"{name} has collectives, and is called in a program of {count} devices outside of shard_map", loc=UNKNOWN,
            rule="a kernel with collectives runs on every device of the mesh, each of which is a rank",
            fix="call it inside jax.shard_map, with all axes of the mesh manual",
        )
    more = [count, *_processes(ctx, mesh)]
    one = ir.RankedTensorType.get((1,), ir.IntegerType.get_unsigned(32))
    index = hlo.broadcast_in_dim(one, hlo.partition_id(), mlir.dense_int_array([]))
    words = hlo.concatenate([index, mlir.ir_constant(np.array(more, np.uint32))], 0)
    return words, jax.core.ShapedArray((1 + len(more),), np.dtype(np.uint32))


def _processes(ctx: Any, mesh: Any) -> list[int]:
    """Where a program runs in several processes: a number of the call site, and the processes of the ranks with how many each has."""
    if jax.process_count() == 1:
        return []
    devices = getattr(mesh, "devices", None)
    if devices is None:  # a mesh of which only the shape is known is one of all devices
        devices = np.array(jax.devices())
        if devices.size != mesh.size:
            raise NkiValueError(f"a mesh of {mesh.size} abstract devices, and there are {devices.size}", loc=UNKNOWN,
                                rule="it is known which process has a rank", fix="give shard_map a mesh of devices")  # fmt: skip
    processes = [int(d.process_index) for d in np.asarray(devices).flat]
    if len(set(processes)) == 1:
        return []
    out = [next(ctx.module_context.channel_iterator)]
    for process, ranks in itertools.groupby(processes):
        out += [process, len(list(ranks))]
    return out


def coordinator() -> tuple[Any, str] | None:
    """The client of jax.distributed's store of keys, and the address of the coordinator; None where it was not initialised."""
    try:
        from jax._src.distributed import global_state
    except ImportError:
        return None
    client = getattr(global_state, "client", None)
    return (client, str(getattr(global_state, "coordinator_address", "") or "localhost")) if client is not None else None


def make_primitive(name: str) -> Any:
    """A primitive with several results."""
    primitive = jex.Primitive(name)
    primitive.multiple_results = True
    return primitive
