"""Flash attention, backward.

With p = exp(scale q.k - lse), which the log-sum-exp of the forward pass gives at once, and D the sums of dy o over the
head dimension: dv = p.T dy, ds = p (dy.v - D), dq = scale ds k, dk = scale ds.T q. The kernel walks over blocks of
keys, and for each over all tiles of 128 queries that see it. Scores have queries as partitions, where lse and D are one
number for a partition, which the Scalar and the Vector Engine apply on the way; and where p and ds are the moving
operands of the products for dv and dk, which add up in PSUM over all queries and heads of a group. Only ds is
transposed, for dq, which adds up in SBUF.

Queries, dy, their transposes and dq of a range of queries stay in SBUF while all keys pass. What does not fit is cut into
several ranges, whose dk and dv add up in HBM.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import opennki.dialects.neuronxcc.isa as nisa
import opennki.dialects.neuronxcc.language as nl
from opennki.dialects.neuronxcc.constants import sizeinbytes
from opennki.dialects.neuronxcc.kernels import _tools as t

_RESIDENT = 0.6  # part of SBUF for what stays in it for a range of queries


@dataclass(frozen=True)
class Sizes:
    """How the problem is cut. d is `parts` times `width`; keys are taken `block` at a time, a multiple of 128; queries
    `span` at a time, a multiple of 128, and of these `lanes` tiles of 128 together; group: heads of queries for one of keys."""

    group: int
    width: int
    parts: int
    queries: int
    span: int
    keys: int
    block: int
    lanes: int

    @property
    def tiles(self) -> int:
        """Tiles of 128 queries in a range."""
        return self.span // t.ROWS


def sizes(group: int, d: int, queries: int, keys: int, dtype: Any) -> Sizes:
    """The cut for a head dimension that is at most 128 or a multiple of it."""
    parts = -(-d // t.ROWS)
    width = d // parts
    # dk and dv take two banks of PSUM each at most
    block = t.largest_divisor(keys, next(size for size in (t.BANK, t.BANK // 2, t.ROWS) if parts * size <= 2 * t.BANK))
    # a query takes itself and dy in both layouts, and its gradient in float32
    each = group * parts * (2 * (1 + width / t.ROWS) * sizeinbytes(dtype) + 4)
    room = _RESIDENT * nl.tile_size.total_available_sbuf_size
    tiles = queries // t.ROWS
    span = next(n for n in range(tiles, 0, -1) if tiles % n == 0 and (n * t.ROWS * each <= room or n == 1))
    # two tiles fill the time in which engines wait for each other, as far as PSUM has room
    lanes = 2 if parts == 1 and span % 2 == 0 and sizeinbytes(dtype) == 2 else 1
    return Sizes(group, width, parts, queries, span * t.ROWS, keys, block, lanes)


class Backward:
    """The parts of the kernel that do not change. before: factor of the queries; within: factor of the scores."""

    def __init__(self, cut: Sizes, dtype: Any, scale: float, scope: t.Scope, bias: Any, seed: Any, rate: float, place: Any):
        self.cut, self.dtype, self.scale, self.scope, self.bias = cut, dtype, scale, scope, bias
        self.before, self.within = (scale, 1.0) if bias is not None or scale <= 0 else (1.0, scale)
        self.seed, self.keep, self.place = seed, 1.0 - rate, place
        self.rate = rate
        self.ones = nl.ones((t.ROWS, t.ROWS), dtype=dtype) if rate > 0 else None
        self.threes = nl.ones((3, cut.block), dtype=nl.bfloat16)

    # ---- what is loaded ----
    def load(self, into: Any, source: Any, start: Any, length: int, factor: float = 1.0) -> None:
        """Fill a tile (width, parts, length) from `start` of source (d, sequence)."""
        cut = self.cut
        for n in range(cut.parts):
            part = source[nl.ds(n * cut.width, cut.width), nl.ds(start, length)]
            if factor == 1.0:
                into[:, n, :] = nl.load(part, dtype=self.dtype)
            else:
                into[:, n, :] = nl.multiply(nl.load(part), factor, dtype=self.dtype)

    def turn(self, into: Any, tile: Any, length: int) -> None:
        """Fill (128, length / 128, d) with the transpose of a tile (width, parts, length)."""
        cut = self.cut
        for i in nl.affine_range(length // t.ROWS):
            for n in range(cut.parts):
                turned = nisa.nc_transpose(tile[:, n, nl.ds(i * t.ROWS, t.ROWS)])
                into[:, i, n * cut.width : (n + 1) * cut.width] = nl.copy(turned, dtype=self.dtype)

    def products_with_output(self, o: Any, dy: Any) -> Any:
        """Minus D as (128, group, queries / 128) float32: the sums of dy o over d, times what dropout keeps.

        o, dy: (group, d, queries). The sum over d, which are partitions, is a product with ones.
        """
        cut = self.cut
        step = t.largest_divisor(cut.queries, t.BANK)
        sums = nl.ndarray((t.ROWS, cut.group, cut.queries // t.ROWS), dtype=nl.float32)
        ones = nl.ones((cut.width, 1), dtype=nl.float32)
        for g in nl.affine_range(cut.group):
            for b in nl.affine_range(cut.queries // step):
                products = nl.ndarray((cut.width, cut.parts, step), dtype=nl.float32)
                for n in range(cut.parts):
                    part = (g, nl.ds(n * cut.width, cut.width), nl.ds(b * step, step))
                    products[:, n, :] = nl.multiply(nl.load(o[part]), nl.load(dy[part]), dtype=nl.float32)
                for i in nl.affine_range(step // t.ROWS):
                    total: Any = nl.zeros((t.ROWS, 1), dtype=nl.float32, buffer=nl.psum)
                    for n in range(cut.parts):
                        total += nisa.nc_matmul(products[:, n, nl.ds(i * t.ROWS, t.ROWS)], ones)
                    sums[:, g, nl.ds(b * (step // t.ROWS) + i, 1)] = nl.multiply(total, -self.keep)
        return sums

    def logs(self, lse: Any) -> Any:
        """The negated log-sum-exp (128, group, queries / 128) float32 of lse (group, 128, queries / 128)."""
        cut = self.cut
        logs = nl.ndarray((t.ROWS, cut.group, cut.queries // t.ROWS), dtype=nl.float32)
        for g in nl.affine_range(cut.group):
            logs[:, g, :] = nl.multiply(nl.load(lse[g]), -1.0, dtype=nl.float32)
        return logs

    def sinks(self, out: Any, sinks: Any, logs: Any, products: Any) -> None:
        """Store the gradients of the sinks, (1, group): minus the sums of exp(sink - lse) D over the queries."""
        cut = self.cut
        loaded = nl.load(sinks, dtype=nl.float32)
        tops = nl.broadcast_to(loaded, shape=(t.ROWS, cut.group))
        ones = nl.ones((t.ROWS, 1), dtype=nl.float32)
        rows = nl.ndarray((t.ROWS, cut.group), dtype=nl.float32)
        for g in nl.affine_range(cut.group):
            weights = nisa.activation(op=nl.exp, data=logs[:, g, :], bias=tops[:, nl.ds(g, 1)], dtype=nl.float32)
            weighted = nl.multiply(weights, products[:, g, :])
            rows[:, nl.ds(g, 1)] = nl.sum(weighted, axis=1, keepdims=True)
        total = nisa.nc_matmul(ones, rows)
        nl.store(out, nl.multiply(total, 1.0 / self.keep))

    # ---- the pairs of a block of keys and 128 queries ----
    def weights(self, query_tile: Any, keys: Any, log: Any, query: Any, key: Any) -> Any:
        """(128, block): the softmax of 128 queries for a block of keys."""
        cut = self.cut
        scores: Any = nl.zeros((t.ROWS, cut.block), dtype=nl.float32, buffer=nl.psum)
        for n in range(cut.parts):
            scores += nisa.nc_matmul(query_tile[:, n, :], keys[:, n, :])
        p = nl.ndarray((t.ROWS, cut.block), dtype=self.dtype)
        source = scores
        if self.bias is not None:
            source = nl.add(scores, nl.load(self.bias[nl.ds(query, t.ROWS), nl.ds(key, cut.block)]), dtype=nl.float32)
        p[...] = nisa.activation(op=nl.exp, data=source, scale=self.within, bias=log, dtype=self.dtype)
        t.hide(p, self.scope, query, key, (t.ROWS, cut.block), False, 0.0)
        return p

    def mask(self, head: Any, query_tile: Any, key_tile: Any) -> Any:
        """(128, block) of what dropout keeps, the same tiles as in the forward pass."""
        cut = self.cut
        mask = nl.ndarray((t.ROWS, cut.block), dtype=self.dtype)
        for c in nl.affine_range(cut.block // t.ROWS):
            index = self.place(head, query_tile, key_tile + c)
            mask[:, nl.ds(c * t.ROWS, t.ROWS)] = t.kept(self.seed, self.ones, self.rate, index)
        return mask

    def gradients(self, heads: Any, keys: Any, keys_turned: Any, values: Any, dk: Any, dv: Any, at: Any) -> None:
        """Add what some tiles of 128 queries and a block of keys give each other to the gradients.

        heads: of one head of queries, `Resident`. at: `Place` of the queries and keys.
        """
        cut = self.cut
        lanes = range(cut.lanes)
        p = [self.weights(heads.q[:, :, at.columns(lane)], keys, heads.logs[:, at.index(lane)], at.query(lane), at.key) for lane in lanes]
        turns = []
        for lane in lanes:
            turn: Any = nl.zeros((t.ROWS, cut.block), dtype=nl.float32, buffer=nl.psum)
            for n in range(cut.parts):
                turn += nisa.nc_matmul(heads.dy[:, n, at.columns(lane)], values[:, n, :])
            if self.rate == 0:  # minus D of each query
                turn += nisa.nc_matmul(heads.products[:, at.columns(lane)], self.threes)
            turns.append(turn)
        ds, taken = [], []
        for lane in lanes:
            made = nl.ndarray((t.ROWS, cut.block), dtype=self.dtype)
            if self.rate > 0:
                mask = self.mask(at.head, at.tile(lane), at.key_tile)
                taken.append(nl.multiply(p[lane], mask, dtype=self.dtype))
                gradient = nl.multiply(turns[lane], mask, dtype=nl.float32)
                less = nl.add(gradient, heads.sums[:, at.index(lane)], dtype=nl.float32)
                made[...] = nl.multiply(less, p[lane], dtype=self.dtype)
            else:
                taken.append(p[lane])
                made[...] = nl.multiply(turns[lane], p[lane], dtype=self.dtype)
            ds.append(made)
        for lane in lanes:
            for n in range(cut.parts):
                part = slice(n * cut.width, (n + 1) * cut.width)
                place = (slice(None), n % dk.per, slice(None))
                dv.of(n)[place] += nisa.nc_matmul(heads.dy_turned[:, at.inner(lane), part], taken[lane])
                dk.of(n)[place] += nisa.nc_matmul(heads.q_turned[:, at.inner(lane), part], ds[lane])
        self._add_queries(heads.dq, ds, keys_turned, at)

    def _add_queries(self, dq: Any, ds: Any, keys_turned: Any, at: Any) -> None:
        """Add ds k of the lanes to dq; the transposes of all lanes share a bank, and so do the products."""
        cut = self.cut
        tiles, lanes = cut.block // t.ROWS, range(cut.lanes)
        bank = nl.ndarray((t.ROWS, tiles, cut.lanes * t.ROWS), dtype=self.dtype, buffer=nl.psum)
        for lane in lanes:
            for c in range(tiles):
                bank[:, c, lane * t.ROWS : (lane + 1) * t.ROWS] = nisa.nc_transpose(ds[lane][:, c * t.ROWS : (c + 1) * t.ROWS])
        turned = nl.ndarray((t.ROWS, tiles, cut.lanes * t.ROWS), dtype=self.dtype)
        turned[...] = nl.copy(bank, dtype=self.dtype)
        for n in range(cut.parts):
            part: Any = nl.zeros((cut.width, cut.lanes * t.ROWS), dtype=nl.float32, buffer=nl.psum)
            for c in range(tiles):
                part += nisa.nc_matmul(keys_turned[:, c, n * cut.width : (n + 1) * cut.width], turned[:, c, :])
            place = dq[:, n, nl.ds(at.first * t.ROWS, cut.lanes * t.ROWS)]
            place[...] = nl.add(place, part)


@dataclass(frozen=True)
class Resident:
    """What stays in SBUF for a range of queries: q and dy (width, group, parts, span) and their transposes (128, group, span /
    128, d), dq (width, group, parts, span) float32, minus D as three parts (3, group, span) or, for dropout, as columns of
    (128, group, tiles of the sequence), like the negated log-sum-exp; `of` is that of one head."""

    q: Any
    dy: Any
    q_turned: Any
    dy_turned: Any
    dq: Any
    products: Any
    sums: Any
    logs: Any

    def of(self, g: Any) -> Resident:
        """The tiles of head g of the group, without its dimension."""
        return Resident(*(None if x is None else x[:, g] for x in (getattr(self, f.name) for f in fields(self))))


@dataclass(frozen=True)
class Place:
    """Where tiles of queries are: in head `head` of the group, `first` of them in the range, which begins with tile `start` of
    the sequence; and the block of keys that begins with `key`, tile `key_tile`."""

    head: Any
    first: Any
    start: Any
    key: Any
    key_tile: Any

    def inner(self, lane: int) -> Any:
        """Tile of the range."""
        return self.first + lane

    def tile(self, lane: int) -> Any:
        """Tile of the sequence."""
        return self.start + self.first + lane

    def query(self, lane: int) -> Any:
        """First query of the tile."""
        return self.tile(lane) * t.ROWS

    def columns(self, lane: int) -> Any:
        """The tile's queries in the range."""
        return nl.ds(self.inner(lane) * t.ROWS, t.ROWS)

    def index(self, lane: int) -> Any:
        """The tile's column among those of the sequence."""
        return nl.ds(self.tile(lane), 1)


class Banks:
    """The sums of dk or dv for a block of keys in PSUM: (width, per, block) float32 for each bank."""

    def __init__(self, cut: Sizes) -> None:
        self.per = max(1, min(cut.parts, t.BANK // cut.block))
        self.banks = [
            nl.zeros((cut.width, min(self.per, cut.parts - n), cut.block), dtype=nl.float32, buffer=nl.psum)
            for n in range(0, cut.parts, self.per)
        ]

    def of(self, n: int) -> Any:
        """The bank of part n of the head dimension, at index n % per."""
        return self.banks[n // self.per]


def backward(work: Backward, q: Any, k: Any, v: Any, o: Any, dy: Any, lse: Any, dq: Any, dk: Any, dv: Any, sinks: Any, dsinks: Any) -> None:
    """One program: q, o, dy, dq (group, d, queries), k, v, dk, dv (d, keys), lse (group, 128, queries / 128), sinks and
    dsinks (1, group) or None."""
    cut = work.cut
    logs = work.logs(lse)
    products = work.products_with_output(o, dy)
    if sinks is not None:
        work.sinks(dsinks, sinks, logs, products)
    spans = cut.queries // cut.span
    if spans == 1:
        _span(work, 0, q, k, v, dy, logs, products, dq, dk, dv, False)
        return
    sums_k, sums_v = (nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.private_hbm) for x in (dk, dv))
    parts = [nl.ds(n * cut.width, cut.width) for n in range(cut.parts)]
    for j in nl.affine_range(cut.keys // cut.block):
        for part in parts:
            for sums in (sums_k, sums_v):
                nl.store(sums[part, nl.ds(j * cut.block, cut.block)], nl.zeros((cut.width, cut.block), dtype=nl.float32))
    for span in nl.sequential_range(spans):
        _span(work, span, q, k, v, dy, logs, products, dq, sums_k, sums_v, True)
    for j in nl.affine_range(cut.keys // cut.block):
        for part in parts:
            for sums, out in ((sums_k, dk), (sums_v, dv)):
                place = (part, nl.ds(j * cut.block, cut.block))
                nl.store(out[place], nl.load(sums[place]))


def _span(
    work: Backward, span: Any, q: Any, k: Any, v: Any, dy: Any, logs: Any, products: Any, dq: Any, dk: Any, dv: Any, add: bool
) -> None:
    """One range of queries with all keys; add: dk and dv have the sums of the ranges before in them."""
    cut = work.cut
    start, group = span * cut.span, cut.group
    heads = Resident(
        nl.ndarray((cut.width, group, cut.parts, cut.span), dtype=work.dtype),
        nl.ndarray((cut.width, group, cut.parts, cut.span), dtype=work.dtype),
        nl.ndarray((t.ROWS, group, cut.tiles, cut.parts * cut.width), dtype=work.dtype),
        nl.ndarray((t.ROWS, group, cut.tiles, cut.parts * cut.width), dtype=work.dtype),
        nl.zeros((cut.width, group, cut.parts, cut.span), dtype=nl.float32),
        nl.ndarray((3, group, cut.span), dtype=nl.bfloat16) if work.rate == 0 else None,
        products,
        logs,
    )
    for g in nl.affine_range(group):
        work.load(heads.q[:, g], q[g], start, cut.span, work.before)
        work.load(heads.dy[:, g], dy[g], start, cut.span)
        work.turn(heads.q_turned[:, g], heads.q[:, g], cut.span)
        work.turn(heads.dy_turned[:, g], heads.dy[:, g], cut.span)
        if work.rate == 0:
            heads.products[:, g, :] = t.split_rows(products[:, g, nl.ds(span * cut.tiles, cut.tiles)], cut.tiles)
    for j in nl.sequential_range(cut.keys // cut.block):
        _block(work, heads, k, v, dk, dv, span * cut.tiles, j, add)
    for g in nl.affine_range(group):
        for n in range(cut.parts):
            part = nl.multiply(heads.dq[:, g, n, :], work.scale / work.keep, dtype=dq.dtype)
            nl.store(dq[g, nl.ds(n * cut.width, cut.width), nl.ds(start, cut.span)], part)


def _block(work: Backward, heads: Resident, k: Any, v: Any, dk: Any, dv: Any, start: Any, j: Any, add: bool) -> None:
    """Block j of the keys with the range of queries that begins with tile `start`."""
    cut = work.cut
    key = j * cut.block
    keys, values = (nl.ndarray((cut.width, cut.parts, cut.block), dtype=work.dtype) for _ in range(2))
    keys_turned = nl.ndarray((t.ROWS, cut.block // t.ROWS, cut.parts * cut.width), dtype=work.dtype)
    work.load(keys, k, key, cut.block)
    work.load(values, v, key, cut.block)
    work.turn(keys_turned, keys, cut.block)
    sums_k, sums_v = Banks(cut), Banks(cut)
    for g in nl.affine_range(cut.group):
        for i in nl.affine_range(cut.tiles // cut.lanes):
            at = Place(g, i * cut.lanes, start, key, j * (cut.block // t.ROWS))
            if all(work.scope.meets(at.query(0), cut.lanes * t.ROWS, key, cut.block)):
                work.gradients(heads.of(g), keys, keys_turned, values, sums_k, sums_v, at)
    scale = 1.0 if work.before != 1.0 else work.scale
    for out, sums, factor in ((dk, sums_k, scale / work.keep), (dv, sums_v, 1.0 / work.keep)):
        for n in range(cut.parts):
            place = (nl.ds(n * cut.width, cut.width), nl.ds(key, cut.block))
            value = nl.multiply(sums.of(n)[:, n % sums.per, :], factor, dtype=out.dtype)
            nl.store(out[place], nl.add(value, nl.load(out[place])) if add else value)
