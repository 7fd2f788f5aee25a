"""Tensors as kernels see them: a handle on an `Access`, with indexing, views and in-place assignment.

Source: api_legacy section 1 (indexing, views, outputs) and entry `neuronxcc.nki.tensor`.
"""
from __future__ import annotations

import operator
from math import prod
from typing import Any

import numpy as np

from opennki.errors import NkiTypeError, NkiValueError, make
from opennki.ir.affine import Affine, Pred
from opennki.ir.build import maybe_current
from opennki.ir.nodes import Access, Alloc, whole
from opennki.isa import dtypes
from opennki.lang import view
from opennki.lang.index import Condition, Index, Mask, broadcast_shapes
from opennki.lang.loops import RuntimeScalar
from opennki.lang.ranges import Grid, ds
from opennki.lang.view import New

ZERO = Affine()
Bound = tuple[New, int, int, tuple[int, ...]]


class DynamicIndex:
    """A runtime index plus an index expression: `offset_tile + nl.arange(n)[None, :]`."""

    __slots__ = ("index", "tile")
    __array_ufunc__ = None

    def __init__(self, tile: Tensor, index: Index) -> None:
        self.tile, self.index = tile, index

    def __add__(self, other: Any) -> DynamicIndex:
        return DynamicIndex(self.tile, self.index + other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> DynamicIndex:
        return DynamicIndex(self.tile, self.index - other)


class Tensor:
    """A tensor in HBM, SBUF or PSUM, or a view of one. `shape`, `dtype`, `ndim`, `itemsize`, `buffer` are read-only."""

    __slots__ = ("__weakref__", "access", "block", "bounds", "mask", "mutable")

    def __init__(self, access: Access, block: int = 0, bounds: tuple[Bound, ...] = (), mask: tuple[Pred, ...] = (),
                 mutable: bool = True) -> None:
        self.access, self.block, self.bounds, self.mask, self.mutable = access, block, bounds, mask, mutable

    @classmethod
    def of(cls, alloc: Alloc) -> Tensor:
        """Handle of a whole tensor."""
        return cls(whole(alloc), alloc.pdim if alloc.on_chip else 0)

    # ---- facts --------------------------------------------------------------------------------------------------------------------
    @property
    def shape(self) -> tuple[int, ...]:
        """Shape; on chip (block..., partition, free...)."""
        return self.access.shape

    @property
    def dtype(self) -> Any:
        """Element type, as a NumPy dtype."""
        return dtypes.public(self.access.dtype)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.access.shape)

    @property
    def shape_2d(self) -> tuple[int, int]:
        """(partitions, elements of each) of a tile: dimension 0, and the others as one. Undocumented; public kernels use it."""
        shape = self.access.shape
        return (shape[0] if shape else 1), prod(shape[1:])

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return dtypes.itemsize(self.access.dtype)

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.access.size

    @property
    def name(self) -> str:
        """Name given by the user, or of the parameter."""
        return self.access.alloc.name or f"tensor {self.access.alloc!r}"

    @property
    def buffer(self) -> Any:
        """Memory the tensor lives in."""
        from opennki.lang.memory import BUFFERS
        return BUFFERS.get(self.access.alloc.space, self.access.alloc.space)

    @property
    def on_chip(self) -> bool:
        """True in SBUF and PSUM."""
        return self.access.alloc.on_chip

    def describe(self) -> str:
        """Name, shape, dtype and memory, for messages."""
        memory = self.access.space.upper()
        return f"{self.name} {self.shape} {self.access.dtype} in {memory}"

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        builder = maybe_current()
        values = builder.options["values"](self) if builder is not None and "values" in builder.options else None
        return f"<{self.describe()}>" if values is None else f"<{self.describe()}:\n{values}>"

    def __bool__(self) -> bool:
        if not self.on_chip:
            return True  # the truth of a handle in HBM, as in `if bias:` for an optional argument
        if self.size == 1:
            raise make("err_dynamic_control_flow_not_supported", f"the truth of {self.describe()} is needed")
        raise make("err_ambiguous_tensor_truth_value", f"the truth of {self.describe()} is needed")

    def __index__(self) -> int:
        raise make("err_dynamic_control_flow_not_supported", f"{self.describe()} is used as a Python number",
                   fix="index with the tile itself (indirect access), or pass the number as an argument of the kernel")

    def __iter__(self) -> Any:
        return (self[i] for i in range(self.shape[0]))

    __hash__ = object.__hash__

    # ---- indexing ---------------------------------------------------------------------------------------------------------------
    def __getitem__(self, key: Any) -> Tensor:
        keys = tuple(key) if isinstance(key, (tuple, Grid)) else (key,)
        keys = tuple(k.index_value() if isinstance(k, RuntimeScalar) else k for k in keys)
        if any(isinstance(k, (Mask, Condition)) for k in keys):
            return self._masked(keys)
        for k in keys:
            if isinstance(k, (Tensor, DynamicIndex)) or (isinstance(k, Index) and k.shape):
                return self._advanced(keys)
        return self._basic(keys)

    def _masked(self, keys: tuple[Any, ...]) -> Tensor:
        found = keys[0].preds if isinstance(keys[0], Mask) else keys[0].as_preds() if isinstance(keys[0], Condition) else None
        if len(keys) != 1 or found is None:
            raise make("err_unsupported_expression_in_mask", "a mask beside other indices")
        rank = len(self.shape)
        preds = tuple(align(p, len(keys[0].shape) if isinstance(keys[0], Mask) else 0, rank) for p in found)
        a = self.access
        return Tensor(Access(a.alloc, a.dtype, a.dims, a.shape, a.view, a.mask + preds), self.block, self.bounds, self.mask)

    def _expand(self, keys: tuple[Any, ...]) -> list[Any]:
        if sum(k is Ellipsis for k in keys) > 1:
            raise NkiValueError(f"an index of {self.describe()} with more than one ...", rule="... stands for all dimensions that are left")
        used = sum(1 for k in keys if k is not None and k is not Ellipsis)
        if used > len(self.shape):
            raise make("err_tensor_access_out_of_bound",
                       f"{used} indices on {self.describe()}, which has {len(self.shape)} dimensions")
        out: list[Any] = []
        for k in keys:
            if k is Ellipsis:
                out += [slice(None)] * (len(self.shape) - used)
            else:
                out.append(k)
        return out + [slice(None)] * (len(self.shape) - sum(1 for k in out if k is not None))

    def _basic(self, keys: tuple[Any, ...]) -> Tensor:
        expanded = self._expand(keys)
        plan: list[tuple[str, Any, int]] = []
        axis, block = 0, self.block
        keep_partition = self.on_chip
        for k in expanded:
            if k is None:
                plan.append(("new", None, -1))
                continue
            size = self.shape[axis]
            if isinstance(k, (slice, ds)):
                plan.append(("span", view.span(k, size, axis), axis))
            elif isinstance(k, (str, float)) or (not isinstance(k, Index) and not hasattr(k, "__index__")):
                raise NkiTypeError(f"index {k!r} of {self.describe()}",
                                   rule="an index is an int, a slice, nl.ds, ..., or an expression of nl.arange or loop indices")
            elif keep_partition and axis == self.block:
                plan.append(("span", (view.scalar_base(k, size), 1, 1), axis))
            else:
                plan.append(("int", view.scalar_base(k, size), axis))
                block -= axis < self.block
            axis += 1
        shape = tuple(1 if kind == "new" else v[1] for kind, v, _ in plan if kind != "int")
        if self.on_chip:
            while len(shape) - block < 2:
                shape += (1,)
        rank = len(shape)
        news, bounds, position = [], [], 0
        for kind, value, axis in plan:
            if kind == "new":
                position += 1
                continue
            if kind == "int":
                new = New(value, (0,) * rank)
            else:
                base, length, step = value
                strides = [0] * rank
                strides[position] = step if length > 1 else 0
                new = New(base, tuple(strides))
                position += 1
            news.append(new)
            if not view.check_bound(new, self.shape[axis], shape, axis):
                bounds.append((new, self.shape[axis], axis, shape))
        return Tensor(view.compose(self.access, news, shape), block, self._carry(news, shape) + tuple(bounds),
                      self._carry_mask(news, rank))

    def _advanced(self, keys: tuple[Any, ...]) -> Tensor:
        dynamic = any(isinstance(k, (Tensor, DynamicIndex)) for k in keys)
        if any(k is None or k is Ellipsis or isinstance(k, (slice, ds)) for k in keys) and not dynamic:
            raise make("err_unsupported_mixing_basic_advanced_tensor_indexing", f"index of {self.describe()}")
        expanded = self._expand(keys)
        # beside runtime indices, slices are dimensions of their own after those of the index expressions (an index tile [N, 1] is one)
        slices = sum(isinstance(k, (slice, ds)) for k in expanded)
        ranks = [len(k.shape) for k in (k.index if isinstance(k, DynamicIndex) else k for k in expanded) if isinstance(k, Index)]
        if 1 in ranks:
            raise make("err_1d_arange_not_supported", f"a one-dimensional index on {self.describe()}")
        before = max(ranks, default=0) or int(any(isinstance(k, Tensor) and k.size > 1 for k in expanded))
        indices: list[tuple[Index, Tensor | None]] = []
        number = 0
        for axis, k in enumerate(expanded):
            tile = None
            if isinstance(k, DynamicIndex):
                tile, k = k.tile, k.index
            elif isinstance(k, Tensor):
                tile, k = k, Index(ZERO)
            elif k is None:
                raise make("err_unsupported_mixing_basic_advanced_tensor_indexing", f"None beside a runtime index of {self.describe()}")
            elif isinstance(k, (slice, ds)):
                base, length, step = view.span(k, self.shape[axis], axis)
                place = before + number
                number += 1
                rank = before + slices
                k = Index(base, tuple(step if j == place and length > 1 else 0 for j in range(rank)),
                          tuple(length if j == place else 1 for j in range(rank)))
                indices.append((k, None))
                continue
            elif not isinstance(k, Index):
                k = Index(view.scalar_base(k, self.shape[axis]))
            if slices and k.shape:
                k = Index(k.base, k.strides + (0,) * slices, k.shape + (1,) * slices)
            indices.append((k, tile))
        shapes = [k.shape for k, _ in indices if k.shape]
        tiles = [t for _, t in indices if t is not None and t.size > 1]
        rank = max([len(s) for s in shapes] + [2 if tiles and not slices else 0] + [2 if self.on_chip else 0])
        # an index tile [N, 1] belongs to the first dimension, whatever the rank of the others
        shapes += [(t.shape[0],) + (1,) * (rank - 1) for t in tiles]
        try:
            shape = broadcast_shapes(*shapes, (1,) * rank)
        except ValueError as exc:
            raise NkiValueError(f"the indices of {self.describe()} do not broadcast: {exc}",
                                rule="index expressions broadcast to the shape of the tile") from None
        news, bounds = [], []
        for axis, (k, tile) in enumerate(indices):
            dyn = None
            if tile is not None:
                dyn = self._index_tile(tile)
            new = New(k.base, (0,) * (rank - len(k.strides)) + k.strides, dyn)
            news.append(new)
            if not view.check_bound(new, self.shape[axis], shape, axis):
                bounds.append((new, self.shape[axis], axis, shape))
        return Tensor(view.compose(self.access, news, shape), self._block_of(news), self._carry(news, shape) + tuple(bounds),
                      self._carry_mask(news, rank))

    @staticmethod
    def _index_tile(tile: Tensor) -> Access:
        if not dtypes.is_integer(tile.access.dtype):
            raise NkiTypeError(f"index tile {tile.describe()}", rule="a runtime index is an integer tile")
        if not tile.on_chip:
            raise make("err_unsupported_memory", f"index tile {tile.describe()}", fix="nl.load the indices into SBUF")
        if tile.size != tile.shape[0] and tile.size != 1:
            raise make("err_indirect_indices_free_dim", f"index tile {tile.describe()}, expected shape [N, 1]")
        return tile.access

    def _block_of(self, news: list[New]) -> int:
        """Block dimensions of the result: the tile dimensions before the one along which the partition index varies."""
        if not self.on_chip or not self.block:
            return 0
        varying = next((j for j, s in enumerate(news[self.block].strides) if s), None)
        if varying:
            return varying
        return 0

    def _carry(self, news: list[New], shape: tuple[int, ...]) -> tuple[Bound, ...]:
        """Bounds of this view that were not proven, for a view of it."""
        out = []
        for new, size, axis, _ in self.bounds:
            base, strides = new.base, [0] * len(shape)
            for coefficient, inner in zip(new.strides, news, strict=True):
                if coefficient:
                    base = base.add(inner.base.scale(coefficient))
                    for k, s in enumerate(inner.strides):
                        strides[k] += coefficient * s
            moved = New(base, tuple(strides), new.dyn)
            if not view.check_bound(moved, size, shape, axis):
                out.append((moved, size, axis, shape))
        return tuple(out)

    def _carry_mask(self, news: list[New], rank: int) -> tuple[Pred, ...]:
        """The mask under which this tile is defined, over the dimensions of a view."""
        out = []
        for pred in self.mask:
            base, strides = pred.expr, [0] * rank
            for coefficient, new in zip(pred.strides, news, strict=True):
                if coefficient:
                    base = base.add(new.base.scale(coefficient))
                    for k, s in enumerate(new.strides):
                        strides[k] += coefficient * s
            out.append(Pred(base, tuple(strides)))
        return tuple(out)

    # ---- views --------------------------------------------------------------------------------------------------------------------
    def reshape(self, *dims_: Any, shape: Any = None) -> Tensor:
        """View with the same elements in another shape; one dimension may be -1."""
        dims = _shape(dims_ if shape is None else (shape,))
        if -1 in dims:
            rest = -int(np.prod(dims))
            if rest <= 0 or self.size % rest:
                raise NkiValueError(f"cannot reshape {self.describe()} to {dims}", rule="a reshape keeps the number of elements")
            dims = tuple(self.size // rest if n == -1 else n for n in dims)
        access = view.reshape(self.access, dims)
        block = 0
        if self.on_chip and self.block:
            partitions = self.shape[self.block]
            block = next((i for i, n in enumerate(dims)
                          if n == partitions and int(np.prod(dims[:i])) == int(np.prod(self.shape[:self.block]))), 0)
        return Tensor(access, block, (), ())

    def broadcast_to(self, *dims_: Any, shape: Any = None) -> Tensor:
        """View repeated along dimensions of size 1, by NumPy's rules."""
        return Tensor(view.broadcast(self.access, _shape(dims_ if shape is None else (shape,))), self.block, (), ())

    def expand_dims(self, axis: Any) -> Tensor:
        """View with a dimension of size 1 more; axis 0, the partition dimension, is not allowed on chip."""
        axes = (axis,) if isinstance(axis, int) else tuple(axis)
        rank = len(self.shape) + len(axes)
        places = {a + rank if a < 0 else a for a in axes}
        if 0 in places and self.on_chip:
            raise make("err_leading_dimension_of_tensor_must_be_partition", f"expand_dims at axis 0 of {self.describe()}")
        source = iter(self.shape)
        return Tensor(view.reshape(self.access, tuple(1 if i in places else next(source) for i in range(rank))), self.block)

    def view(self, dtype: Any) -> Tensor:
        """View of the same bytes as another dtype."""
        name = _dtype(dtype)
        access = view.reinterpret(self.access, name, self.itemsize, dtypes.itemsize(name))
        return Tensor(access, self.block, self.bounds, self.mask)

    def assert_shape(self, shape: Any) -> Tensor:
        """The tensor itself; raises if its shape is another."""
        if tuple(shape) != self.shape:
            raise NkiValueError(f"{self.describe()} has shape {self.shape}, expected {tuple(shape)}", rule="assert_shape states the shape")
        return self

    def as_tile(self) -> Tensor:
        """The tensor itself as a tile."""
        return self

    def permute(self, *axes: Any) -> Tensor:
        """View with dimensions in another order."""
        order = _shape(axes)
        a = self.access
        dims = tuple(type(d)(d.base, tuple(d.strides[i] for i in order), d.dyn) for d in a.dims)
        return Tensor(Access(a.alloc, a.dtype, dims, tuple(a.shape[i] for i in order), a.view, a.mask), self.block)

    def get_tile_indices(self) -> Grid:
        """Index grid of the tile, one index per dimension."""
        rank = len(self.shape)
        return Grid([Index(ZERO, tuple(int(i == j and n > 1) for j in range(rank)), tuple(n if i == j else 1 for j in range(rank)))
                     for i, n in enumerate(self.shape)])

    def get_tile_mask(self) -> Mask | bool:
        """The mask under which the elements of the tile are defined: those inside the tensor it was taken from."""
        preds = list(self.mask)
        for new, size, _, _ in self.bounds:
            preds.append(Pred(Affine(size - 1).add(new.base, -1), tuple(-s for s in new.strides)))
            preds.append(Pred(new.base, new.strides))
        return Mask(tuple(preds), self.shape) if preds else True

    # ---- assignment (the operations are installed by lang.ops) ----------------------------------------------------------------------
    def __setitem__(self, key: Any, value: Any) -> None:
        from opennki.lang import ops
        ops.assign(self if key is Ellipsis else self[key], value)


def align(pred: Pred, rank: int, wanted: int) -> Pred:
    """A predicate over `rank` dimensions as one over `wanted`: as NumPy broadcasts, or partition first when it has fewer."""
    strides = pred.strides or (0,) * rank
    if len(strides) == wanted:
        return pred
    if len(strides) < wanted:
        return Pred(pred.expr, strides + (0,) * (wanted - len(strides)))
    if not any(strides[wanted:]):
        return Pred(pred.expr, strides[:wanted])
    return Pred(pred.expr, strides[-wanted:])


def _shape(args: tuple[Any, ...]) -> tuple[int, ...]:
    dims = args[0] if len(args) == 1 and not isinstance(args[0], (int, np.integer, Index)) else args
    return tuple(operator.index(n) for n in dims)


def _dtype(dtype: Any) -> str:
    try:
        return dtypes.canonical(dtype)
    except TypeError as exc:
        raise NkiTypeError(str(exc), rule="a dtype is one of nl.float32, nl.bfloat16, ..., or its NumPy equivalent") from None
