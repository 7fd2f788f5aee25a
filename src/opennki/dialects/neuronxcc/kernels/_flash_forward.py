"""Flash attention, forward.

The softmax of a row does not change when one number is taken off all of its scores, so that any number near the row's
largest score serves. The kernel finds it in a first pass over the keys, which makes scores with queries as partitions
and keeps only the maximum of each row. A second pass makes the scores again with keys as partitions. Their exponentials
have the layout in which the Tensor Engine takes them to the product with the values, so that no block of them is ever
transposed, and nothing that was summed up is rescaled: the products of a whole row add up in PSUM. Two things ride on
products: the number that is taken off, as a product of ones with three bfloat16 parts of it (which are exact together),
and the sums of the exponentials, as one more column of ones in the values.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

import opennki.dialects.neuronxcc.isa as nisa
import opennki.dialects.neuronxcc.language as nl
from opennki.dialects.neuronxcc.constants import sizeinbytes
from opennki.dialects.neuronxcc.kernels import _tools as t

_RESIDENT = 0.72  # part of SBUF that keys and values may take for the whole of a program


def keys_and_values(k: Any, v: Any, dtype: Any, size: int, k_by_head: bool = True, v_by_head: bool = False) -> Any:
    """A function of a chunk index, which gives keys (d, size) and values (128, size / 128, d + 1), the last column ones.

    k and v: (d, keys) where `by_head`, else (keys, d). They are loaded once where they fit, else by each call.
    """
    d, length = k.shape if k_by_head else k.shape[::-1]

    def fill(keys: Any, values: Any, start: Any, tiles: int) -> None:
        """Load from key `start`: a chunk into all of keys and values."""
        part = nl.ds(start, size)
        row, tile, column = nl.mgrid[0 : t.ROWS, 0:tiles, 0:d]
        if k_by_head:
            keys[...] = nl.load(k[:, part], dtype=dtype)
        else:
            tall = nl.load(k[start + tile * t.ROWS + row, column], dtype=dtype)
            for n in nl.affine_range(tiles):
                keys[:, nl.ds(n * t.ROWS, t.ROWS)] = nl.copy(nisa.nc_transpose(tall[:, n, :]), dtype=dtype)
        if v_by_head:
            wide = nl.load(v[:, part], dtype=dtype)
            for n in nl.affine_range(tiles):
                values[:, n, 0:d] = nl.copy(nisa.nc_transpose(wide[:, nl.ds(n * t.ROWS, t.ROWS)]), dtype=dtype)
        else:
            values[:, :, 0:d] = nl.load(v[start + tile * t.ROWS + row, column], dtype=dtype)
        values[:, :, d : d + 1] = nl.ones((t.ROWS, tiles, 1), dtype=dtype)

    bytes_each = (1 + (d + 1) / t.ROWS) * length * sizeinbytes(dtype)
    chunks, tiles = length // size, size // t.ROWS
    if bytes_each > _RESIDENT * nl.tile_size.total_available_sbuf_size:

        def fresh(chunk: Any) -> Any:
            keys = nl.ndarray((d, size), dtype=dtype)
            values = nl.ndarray((t.ROWS, tiles, d + 1), dtype=dtype)
            fill(keys, values, chunk * size, tiles)
            return keys, values

        return fresh
    all_keys = nl.ndarray((chunks, nl.par_dim(d), size), dtype=dtype)
    all_values = nl.ndarray((chunks, nl.par_dim(t.ROWS), tiles, d + 1), dtype=dtype)
    for chunk in nl.affine_range(chunks):
        fill(all_keys[chunk], all_values[chunk], chunk * size, tiles)
    return lambda chunk: (all_keys[chunk], all_values[chunk])


class Forward:
    """The parts of the kernel that do not change between the blocks of one program.

    queries, keys: lengths, multiples of 128. block: queries that are worked on together, 512 at most. chunk: keys that
    are loaded together. Both are cut down to what divides the lengths. bias: (queries, keys) in HBM or None. dropout:
    None, or the seed, a tile of ones (128, 128) and the rate. start: position of the first query. With a bias, or a
    scale that is not positive, queries come scaled.
    """

    def __init__(self, queries: int, keys: int, d: int, dtype: Any, scale: float, scope: t.Scope, bias: Any = None, dropout: Any = None,
                 block: int = t.BANK, chunk: int = 4 * t.BANK, start: Any = 0):
        self.block, self.chunk = t.largest_divisor(queries, min(block, t.BANK)), t.largest_divisor(keys, chunk)
        self.step = t.largest_divisor(self.chunk, t.BANK)  # keys of one product
        self.start = start
        self.chunks, self.d, self.dtype = keys // self.chunk, d, dtype
        self.tiles = self.block // t.ROWS
        self.scope, self.bias, self.dropout = scope, bias, dropout
        self.before, self.within = (scale, 1.0) if bias is not None or scale <= 0 else (1.0, scale)
        # three parts of bfloat16 hold all bits of a float32
        self.ones = nl.ones((3, t.ROWS), dtype=nl.bfloat16)
        self.identity: Any = nl.load(nl.shared_identity_matrix(t.ROWS, dtype=dtype)) if bias is not None else None

    def queries(self, q: Any) -> Any:
        """A block of queries (d, block), scaled where it has to be."""
        loaded = nl.load(q, dtype=self.dtype if self.before == 1.0 else None)
        return loaded if self.before == 1.0 else nl.multiply(loaded, self.before, dtype=self.dtype)

    def seen(self, query: Any, queries: int, key: Any, keys: int) -> bool:
        """Whether some pair is seen; decided while tracing, or an `if` of the IR."""
        return all(self.scope.meets(query, queries, key, keys))

    def biases(self, query: Any, key: Any, keys: int) -> Any:
        """Tiles (128, keys) of the bias for each 128 queries of the block; -inf becomes a number, which products need."""
        tiles = nl.ndarray((t.ROWS, self.tiles, keys), dtype=self.dtype)
        lowest = -6.0e4 if self.dtype == nl.float16 else t.LOWEST / 4
        for i in nl.affine_range(self.tiles):
            loaded = nl.load(self.bias[nl.ds(query + i * t.ROWS, t.ROWS), nl.ds(key, keys)])
            tiles[:, i, :] = nl.maximum(loaded, lowest, dtype=self.dtype)
        return tiles

    def largest(self, load: Any, queries: Any, query: Any) -> Any:
        """(128, tiles) float32: the largest score that each query of the block sees."""
        blocks = self.chunk // self.step
        found = nl.full((t.ROWS, self.tiles, self.chunks * blocks), t.LOWEST, dtype=nl.float32)
        for chunk in nl.affine_range(self.chunks):
            if self.seen(query, self.block, chunk * self.chunk, self.chunk):
                keys, _ = load(chunk)
                for b in nl.affine_range(blocks):
                    key = chunk * self.chunk + b * self.step
                    if self.seen(query, self.block, key, self.step):
                        bias = self.biases(query, key, self.step) if self.bias is not None else None
                        for i in nl.affine_range(self.tiles):
                            place = found[:, i, nl.ds(chunk * blocks + b, 1)]
                            self._largest_of(place, queries, i, keys[:, nl.ds(b * self.step, self.step)], bias, query + i * t.ROWS, key)
        return nisa.tensor_reduce(np.max, found, axis=(2,))

    def _largest_of(self, place: Any, queries: Any, i: Any, keys: Any, bias: Any, query: Any, key: Any) -> None:
        """Write the largest score of each of 128 queries for `step` keys."""
        if self.seen(query, t.ROWS, key, self.step):
            scores: Any = nl.zeros((t.ROWS, self.step), dtype=nl.float32, buffer=nl.psum)
            scores += nisa.nc_matmul(queries[:, nl.ds(i * t.ROWS, t.ROWS)], keys)
            if bias is not None:
                scores += nisa.nc_matmul(self.identity, bias[:, i, :])
            if any(crosses for crosses, _, _ in self.scope.cuts(query, t.ROWS, key, self.step)):
                inside = nl.copy(scores, dtype=nl.float32)
                t.hide(inside, self.scope, query, key, (t.ROWS, self.step), False, t.LOWEST)
                place[...] = nisa.tensor_reduce(np.max, inside, axis=(1,), keepdims=True)
            else:
                place[...] = nisa.tensor_reduce(np.max, scores, axis=(1,), keepdims=True)

    def weighted(self, load: Any, queries: Any, shift: Any, query: Any, place: Any) -> Any:
        """Two PSUM tiles (128, 2, d + 1) at most: sums of values, weighted by exponentials, and the exponentials' sums.

        place: what dropout needs to know of the block, a function of the tiles of queries and keys.
        """
        sums = [nl.zeros((t.ROWS, min(2, self.tiles - n), self.d + 1), dtype=nl.float32, buffer=nl.psum) for n in range(0, self.tiles, 2)]
        blocks, each = self.chunk // self.step, self.step // t.ROWS
        for chunk in nl.affine_range(self.chunks):
            if self.seen(query, self.block, chunk * self.chunk, self.chunk):
                keys, values = load(chunk)
                for b in nl.affine_range(blocks):
                    key = chunk * self.chunk + b * self.step
                    if self.seen(query, self.block, key, self.step):
                        bias = self.biases(query, key, self.step) if self.bias is not None else None
                        for c in nl.affine_range(each):
                            columns = nl.ds(b * self.step + c * t.ROWS, t.ROWS)
                            at = key + c * t.ROWS
                            exps = self._exponentials(keys[:, columns], queries, shift, bias, c, query, at)
                            self._add(sums, exps, values[:, b * each + c, :], place, (chunk * blocks + b) * each + c)
        return sums

    def _exponentials(self, keys: Any, queries: Any, shift: Any, bias: Any, c: Any, query: Any, key: Any) -> Any:
        """(128 keys, block) of exponentials, zero where a query does not see a key."""
        scores: Any = nl.zeros((t.ROWS, self.block), dtype=nl.float32, buffer=nl.psum)
        scores += nisa.nc_matmul(keys, queries)
        scores += nisa.nc_matmul(self.ones, shift)
        if bias is not None:
            for i in nl.affine_range(self.tiles):
                scores[:, nl.ds(i * t.ROWS, t.ROWS)] += nisa.nc_matmul(bias[:, i, nl.ds(c * t.ROWS, t.ROWS)], self.identity)
        exps = nl.ndarray((t.ROWS, self.block), dtype=self.dtype)
        exps[...] = nisa.activation(op=nl.exp, data=scores, scale=self.within, dtype=self.dtype)
        t.hide(exps, self.scope, query, key, (t.ROWS, self.block), True, 0.0)
        return exps

    def _add(self, sums: Any, exps: Any, values: Any, place: Any, key_tile: Any) -> None:
        """Add the products of 128 keys to the sums."""
        d = self.d
        taken = exps
        if self.dropout is not None:
            seed, ones, rate = self.dropout
            mask = nl.ndarray((t.ROWS, self.block), dtype=self.dtype)
            for i in nl.affine_range(self.tiles):
                kept = t.kept(seed, ones, rate, place(i, key_tile))
                mask[:, nl.ds(i * t.ROWS, t.ROWS)] = nl.copy(nisa.nc_transpose(kept), dtype=self.dtype)
            taken = nl.multiply(exps, mask, dtype=self.dtype)
        for i in range(self.tiles):
            part = nl.ds(i * t.ROWS, t.ROWS)
            if self.dropout is None:
                sums[i // 2][:, i % 2, :] += nisa.nc_matmul(taken[:, part], values)
            else:  # the sum is that of the softmax before dropout
                sums[i // 2][:, i % 2, 0:d] += nisa.nc_matmul(taken[:, part], values[:, 0:d])
                sums[i // 2][:, i % 2, d : d + 1] += nisa.nc_matmul(exps[:, part], values[:, d : d + 1])


def _tile_of_block(place: Any, g: Any, first: Any, i: Any, key_tile: Any) -> Any:
    return place(g, first + i, key_tile)


def forward(q: Any, k: Any, v: Any, o: Any, lse: Any, work: Forward, place: Any = None, o_by_head: bool = False, **layouts: bool) -> None:
    """One program: q (group, d, queries), k (d, keys), v (keys, d), o (group, queries, d), or (group, d, queries) if
    `o_by_head`, lse (group, 128, queries / 128) or None. layouts: those of `keys_and_values`."""
    group, d, queries = q.shape
    load = keys_and_values(k, v, work.dtype, work.chunk, **layouts)
    tiles = work.tiles
    for g in nl.affine_range(group):
        logs = nl.ndarray((t.ROWS, queries // t.ROWS), dtype=nl.float32) if lse is not None else None
        for block in nl.affine_range(queries // work.block):
            query = block * work.block
            tile = work.queries(q[g, :, nl.ds(query, work.block)])
            at = work.start + query
            largest = work.largest(load, tile, at)
            shift = t.split_rows(nl.multiply(largest, -1.0), tiles)
            sums = work.weighted(load, tile, shift, at, partial(_tile_of_block, place, g, block * tiles))
            if o_by_head:
                wide = nl.ndarray((d, work.block), dtype=o.dtype)
            for i in range(tiles):
                part = nl.ds(query + i * t.ROWS, t.ROWS)
                total = sums[i // 2][:, i % 2, d : d + 1]
                inverse = nl.reciprocal(total if work.dropout is None else nl.multiply(total, 1.0 - work.dropout[2]))
                out = nl.multiply(sums[i // 2][:, i % 2, 0:d], inverse, dtype=o.dtype)
                if o_by_head:
                    wide[:, i * t.ROWS : (i + 1) * t.ROWS] = nl.copy(nisa.nc_transpose(out), dtype=o.dtype)
                else:
                    nl.store(o[g, part, :], out)
                if logs is not None:
                    top = nl.multiply(largest[:, i : i + 1], work.within)
                    logs[:, nl.ds(block * tiles + i, 1)] = nl.add(nl.log(total), top)
            if o_by_head:
                nl.store(o[g, :, nl.ds(query, work.block)], wide)
        if lse is not None:
            nl.store(lse[g], logs)
