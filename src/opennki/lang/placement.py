"""Direct allocation: evaluate the placement of a tensor, and check it against the documented address rules.

`ncc.sbuf.alloc` / `mod_alloc` and their PSUM forms carry a function of the block indices. It is called here
once for each block, when the tensor is made, so that a bad address is an error at that line and the IR holds
plain addresses. Source: api_legacy neuronxcc.nki.compiler (sbuf.alloc, sbuf.mod_alloc, psum.alloc,
psum.mod_alloc).
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from itertools import product
from math import prod
from typing import Any

from opennki.errors import NkiTypeError, NkiValueError, caller, warn
from opennki.ir.build import Builder
from opennki.isa import dtypes
from opennki.lang.memory import Buffer

MAX_BLOCKS = 65536
FORCE_AUTO = "force_auto_alloc"  # name of the option that the decorator sets
Table = tuple[tuple[int, ...], ...]


def place(
    builder: Builder, shape: tuple[int, ...], pdim: int, dtype: str, buffer: Buffer, name: str = ""
) -> Table | None:
    """Addresses of the blocks of a new on-chip tensor, row-major over its block dimensions; None if the
    compiler chooses.

    shape: sizes, those before `pdim` are block dimensions; dtype: canonical name. An address is
    (start_partition, byte_addr) in SBUF and (bank, start_partition, byte_addr) in PSUM. Marks the kernel as
    directly allocated. Raises NkiValueError for an address against the rules and for a kernel that mixes
    direct and automatic allocation in one memory; an address beyond the capacity is a warning, as all
    capacity checks are. Under `force_auto_alloc` requests are ignored.
    """
    if buffer.space not in ("sbuf", "psum") or builder.options.get(FORCE_AUTO):
        return None
    what = f"tensor {name!r}" if name else f"tensor {shape}"
    _one_way(builder, buffer, what)
    if buffer.placement is None:
        return None
    builder.allocate_directly()
    blocks = shape[:pdim]
    if prod(blocks) > MAX_BLOCKS:
        raise NkiValueError(
            f"the {what} has {prod(blocks)} blocks with a placement of their own",
            rule=f"a directly allocated tensor has at most {MAX_BLOCKS} blocks",
            fix="make a tensor in the loop instead",
        )
    partitions, width = shape[pdim], prod(shape[pdim + 1 :]) * dtypes.itemsize(dtype)
    return tuple(
        [_address(builder, buffer, idx, partitions, width, what) for idx in product(*map(range, blocks))]
    )


def _one_way(builder: Builder, buffer: Buffer, what: str) -> None:
    """Within a kernel, the tensors of one memory are placed all directly or all by the compiler."""
    direct = buffer.placement is not None
    known = builder.options.setdefault("allocation", {})
    before = known.setdefault(buffer.space, (direct, caller()))
    if before[0] != direct:
        memory, kinds = buffer.space.upper(), ("automatically", "directly")
        raise NkiValueError(
            f"the {what} is allocated {kinds[direct]}, the {memory} tensor at {before[1]} {kinds[before[0]]}",
            rule=f"in one kernel the {memory} tensors are allocated all directly or all automatically",
            why="the compiler cannot place a tensor where it does not know what else lives",
            fix=f"give both a placement of ncc.{buffer.space}, or neither (or use ncc.force_auto_alloc)",
        )


def _address(
    builder: Builder, buffer: Buffer, idx: tuple[int, ...], partitions: int, width: int, what: str
) -> tuple[int, ...]:
    assert buffer.placement is not None
    names = ("bank", "start_partition", "byte_addr")[buffer.space == "sbuf" :]
    found = _ask(buffer.placement, idx, partitions, width)
    if (
        not isinstance(found, (tuple, list))
        or len(found) != len(names)
        or not all(hasattr(v, "__index__") for v in found)
    ):
        raise NkiTypeError(
            f"the placement of {what} gives {found!r} for block {idx}",
            rule=f"a placement in {buffer.space.upper()} returns the integers ({', '.join(names)})",
        )
    address = tuple([operator.index(v) for v in found])
    where = f"block {idx} of the {what}" if idx else f"the {what}"
    (_check_sbuf if buffer.space == "sbuf" else _check_psum)(
        builder.target, address, partitions, width, where
    )
    return address


def _ask(
    placement: Callable[..., Any], idx: tuple[int, ...], partitions: int, width: int
) -> Any:
    """The answer of a placement function: by the documented names where it has them, as vendor kernels bind its other arguments
    with functools.partial; else by position."""
    arguments = {"idx": idx, "pdim_size": partitions, "fdim_size": width}
    try:
        known = set(inspect.signature(placement).parameters)
    except (TypeError, ValueError):
        known = set()
    return placement(**arguments) if known >= set(arguments) else placement(*arguments.values())


def _fail(where: str, got: str, rule: str, why: str = "", fix: str = "") -> NkiValueError:
    return NkiValueError(f"{where} is placed at {got}", rule=rule, why=why, fix=fix)


def start_partitions(partitions: int, target: Any) -> tuple[int, ...]:
    """The partitions at which a tile of so many partitions may start."""
    step = target.quadrant_partitions
    while step < partitions:
        step *= 2
    return tuple(range(0, target.partitions, step))


def _check_sbuf(target: Any, address: tuple[int, ...], partitions: int, width: int, where: str) -> None:
    start, byte = address
    legal = start_partitions(partitions, target)
    if start not in legal:
        raise _fail(
            where,
            f"start partition {start}",
            f"a tile of {partitions} partitions starts at partition {' or '.join(map(str, legal))}",
            "engines reach the partitions in groups of 32",
        )
    if byte < 0 or byte % target.sbuf_min_align:
        raise _fail(
            where,
            f"byte address {byte}",
            f"a byte address is a multiple of {target.sbuf_min_align} and not negative",
        )
    if byte + width > target.sbuf_usable_bytes:
        warn(
            _fail(
                where,
                f"bytes {byte} to {byte + width} of a partition",
                f"SBUF of {target.name} has {target.sbuf_usable_bytes} bytes per partition for kernels",
                f"{target.sbuf_reserved_bytes} of its {target.sbuf_partition_bytes} bytes are the compiler's",
                "use fewer or smaller buffers",
            )
        )


def _check_psum(target: Any, address: tuple[int, ...], partitions: int, width: int, where: str) -> None:
    bank, start, byte = address
    if not 0 <= bank < target.psum_banks:
        raise _fail(
            where,
            f"bank {bank}",
            f"PSUM has the banks 0 to {target.psum_banks - 1}",
            fix="take the bank modulo the number of banks",
        )
    if start or byte:
        raise _fail(
            where,
            f"start partition {start}, byte address {byte}",
            "start_partition and byte_addr are 0 in PSUM",
            "a PSUM tile fills whole banks in this release",
        )
    if width > target.psum_bank_bytes:
        raise _fail(
            where,
            f"bank {bank} with {width} bytes per partition",
            f"a PSUM bank has {target.psum_bank_bytes} bytes per partition",
            "a directly allocated PSUM tile fits one bank",
            "split the free dimension into block dimensions",
        )
