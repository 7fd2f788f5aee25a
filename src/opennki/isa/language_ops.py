"""Operations that the language needs besides the documented instructions: random numbers, synchronisation,
printing.

Random numbers are counter based: a draw depends on a key only, never on the order of execution.

* Before `random_seed` runs the key is (seed of the run, call site, program ids, iterations of the open
  loops).
* After it, the key is (given seed, distance from the call site of random_seed, iterations that differ from
  those in which it ran). So one seed gives one sequence wherever it is set - in every program, in the forward
  and the backward kernel - while two draws after one seed differ.

The state between the two is the register file "rng": `STATE_ROWS` float32, shared by the instructions of a
program, handed over and taken back whole whatever the number of partitions. Its rows hold 16 bits each, which
float32 keeps exactly.
"""
from __future__ import annotations

from math import prod
from typing import Annotated as T
from typing import Any

import numpy as np

from opennki.errors import NkiTypeError, NkiValueError, make
from opennki.isa import cost, meeting
from opennki.isa.declare import (
    ANYWHERE,
    FLOATS,
    INTS,
    NUMERIC,
    ON_CHIP,
    Array,
    Attr,
    DType,
    In,
    Mask,
    Op,
    Plumbing,
    Register,
    Result,
    instruction,
)
from opennki.isa.gpsimd_engine import take_rows
from opennki.isa.reduce import reduce_list
from opennki.isa.rng import uniform
from opennki.isa.scalar import SCALAR

STATE_ROWS = 128
_WORDS = STATE_ROWS // 2
_U32 = 0xFFFFFFFF


def pack_state(words: list[int]) -> Array:
    """State of the generator from 32-bit words (1, seed, call site, number of positions, positions...)."""
    padded = np.zeros(_WORDS, np.uint32)
    padded[: len(words)] = np.array(words, np.uint32)
    return padded.view(np.uint16).astype(np.float32).reshape(STATE_ROWS, 1)


def unpack_state(state: Array | None) -> list[int]:
    """The 32-bit words of a state; empty before random_seed has run."""
    if state is None:
        return []
    words = np.ascontiguousarray(state, np.float32).reshape(-1).astype(np.uint16).view(np.uint32)
    return [int(w) for w in words[: 4 + int(words[3])]] if words[0] else []


def draw_key(stream: tuple[int, ...], state: Array | None) -> tuple[int, tuple[int, ...]]:
    """(seed, stream) for the generator. `stream` is (seed of the run, call site, program ids...,
    iterations...)."""
    words = unpack_state(state)
    if not words:
        return int(stream[0]), tuple(int(v) for v in stream[1:])
    seed, call, seeded_at, here = words[1], words[2], words[4:], [int(v) & _U32 for v in stream[2:]]
    common = 0
    while common < min(len(seeded_at), len(here)) and seeded_at[common] == here[common]:
        common += 1
    # The count of positions that do not match tells (1, 3) from (1, 2, 3) after a seed in (1, 2).
    return seed, ((int(stream[1]) - call) & _U32, len(seeded_at) - common, *here[common:])


def seeded(seed: Array, stream: tuple[int, ...]) -> Array:
    """The state after random_seed with the first element of a tile, at a place of the program."""
    value = seed.reshape(-1)[0]
    if value.dtype.kind in "iub":
        word = int(value) & _U32
    else:
        number = float(value)
        word = int(number) & _U32 if np.isfinite(number) else 0
    position = [int(v) & _U32 for v in stream[2:]][: _WORDS - 4]
    return pack_state([1, word, int(stream[1]) & _U32, len(position), *position])


def drawn(stream: tuple[int, ...], state: Array | None, shape: tuple[int, ...]) -> Array:
    """Uniform float32 in [0, 1) of a shape, for a place of the program and the state of the generator."""
    seed, key = draw_key(stream, state)
    return uniform(seed, key, shape)


def _check_seed(c: Any, target: Any) -> None:
    shape = getattr(c.seed, "shape", ())
    if prod(shape) != 1:
        raise NkiValueError(f"seed has shape {tuple(shape)}", operand="seed",
                            rule="the seed is one 32-bit value",
                            why="the generator has one seed", fix="index one element, as in seed[0, 0]")


@instruction(
    engine="vector", family="random", source="api_legacy: language.random_seed", surface="language",
    random=True, raw=True,
    limits=(), mask_dims={"seed_state": (None, None)}, check=_check_seed, cost=lambda d, hw: float(hw.min_ii))
def random_seed(seed: T[Any, In("P F*", ON_CHIP, NUMERIC, scalar=True)], *, mask: T[Any, Mask] = None,
                stream: T[Any, Plumbing("stream")] = (0, 0),
                seed_state: T[Array | None, Register("rng")] = None, **kwargs: Any) -> Array:
    """Sets the seed of the random numbers that this program draws from here on.

    seed: a number or a tile of one element, taken as 32 bits (a float as its integer part). The same seed
    gives the same sequence in every program and kernel: the n-th draw after it depends on the seed, n and the
    loop iterations between only. mask guards the instruction. Cost: 64 cycles.
    """
    return seeded(np.asarray(seed), stream)


def _shape(c: Any) -> tuple[int, ...]:
    return (c.shape,) if isinstance(c.shape, int) else tuple(c.shape)


def _check_rand(c: Any, target: Any) -> None:
    shape = _shape(c)
    if not shape or any(not isinstance(n, int) or n < 1 for n in shape):
        raise NkiValueError(f"shape is {c.shape}", operand="shape",
                            rule="a shape is a tuple of positive integers",
                            why="the tile is made when the kernel is compiled",
                            fix="pass compile-time integers")
    if shape[0] > target.partitions:
        raise make("err_num_partition_exceed_arch_limit", f"shape is {shape}", operand="shape")


@instruction(
    engine="vector", family="random", source="api_legacy: language.rand", surface="language", random=True,
    limits=(),
    results=(Result(shape=_shape, dtype=lambda c: "float32"),), check=_check_rand, cost=cost.streaming)
def rand(shape: T[Any, Attr((tuple, list, int))], dtype: T[Any, DType] = np.float32, *,
         stream: T[Any, Plumbing("stream")] = (0, 0), seed_state: T[Array | None, Register("rng")] = None,
         **kwargs: Any) -> tuple[Array, Array | None]:
    """A tile of random numbers, uniform in [0, 1).

    shape: (P, F...), P <= 128. dtype: of the result, float32 by default; a narrower one rounds, so that 1 can
    occur. The numbers depend on the seed, the call site, the program and the iterations of the open loops
    (after nl.random_seed: see there). Result: SBUF. Cost: max(64, F) cycles, assumed.
    """
    dims = (shape,) if isinstance(shape, int) else tuple(shape)
    return drawn(stream, seed_state, dims), seed_state


def _check_dropout(c: Any, target: Any) -> None:
    prob = getattr(c.prob, "dtype", None) if getattr(c.prob, "space", None) else None
    if prob is not None and prod(c.prob.shape[1:]) != 1:
        raise NkiValueError(f"prob has shape {tuple(c.prob.shape)}", operand="prob",
                            rule="prob is a number or a [P, 1] tile",
                            why="there is one probability per partition",
                            fix="index one column, as in prob[:, 0:1]")
    if prob is not None and prob not in FLOATS:
        raise NkiTypeError(f"prob is {prob}", operand="prob", rule="a prob tile is a float",
                           why="a probability lies between 0 and 1", fix="cast it to float32")
    if c.data.dtype in INTS:
        if prob not in (None, "float32"):
            raise NkiTypeError(f"prob is {prob} and data {c.data.dtype}", operand="prob",
                               rule="for integer data prob is float32",
                               why="the engine then compares in float32", fix="cast prob to float32")
        if getattr(c, "dtype", None) not in (None, c.data.dtype):
            raise NkiTypeError(f"dtype is {c.dtype} and data {c.data.dtype}", operand="dtype",
                               rule="for integer data the result has the dtype of data",
                               why="survivors are passed through unchanged",
                               fix="leave dtype out and cast afterwards")


@instruction(
    engine="vector", family="random", source="api_legacy: isa.dropout", random=True, raw=True,
    results=(Result(shape="data", dtype="data"),), mask_dims={"prob": (0, None), "seed_state": (None, None)},
    check=_check_dropout,
    cost=cost.streaming)
def dropout(data: T[Array, In("P F*", ON_CHIP)], prob: T[Any, In("P 1", ON_CHIP, NUMERIC, scalar=True)], *,
            mask: T[Any, Mask] = None, dtype: T[Any, DType] = None,
            stream: T[Any, Plumbing("stream")] = (0, 0),
            seed_state: T[Array | None, Register("rng")] = None, **kwargs: Any) -> tuple[Array, Array | None]:
    """Replaces elements by 0 with a probability; survivors are unchanged (no scaling by 1 / (1 - prob)).

    data: [P, F...] in SBUF or PSUM, P <= 128. prob: a number or a [P, 1] float tile; 0 keeps everything, 1
    zeroes everything; outside [0, 1] the vendor defines nothing, here everything is kept. Integer data: a
    prob tile is float32, the result has the dtype of data. Result: shape of data, dtype of data unless dtype
    is given. The numbers drawn are those of nl.rand. mask counts the dimensions of data. Cost: max(64, F)
    cycles.
    """
    chance = np.asarray(prob).astype(np.float32)
    dropped = (drawn(stream, seed_state, data.shape) < chance) & (chance <= 1)
    return np.where(dropped, np.zeros((), data.dtype), data), seed_state


def _check_broadcast(c: Any, target: Any) -> None:
    if not 1 <= c.partitions <= target.partitions:
        raise make("err_num_partition_exceed_arch_limit", f"a broadcast to {c.partitions} partitions",
                   operand="partitions")


@instruction(
    positional=True,  # the result has all of its partitions, whatever the mask leaves of them
    engine="gpsimd", family="copy", source="api_legacy: language.broadcast_to", surface="internal", raw=True,
    limits=(),
    results=(Result(shape=lambda c: (c.partitions, *c.src.shape[1:]), dtype="src"),), check=_check_broadcast,
    mask_dims={"src": (None, 1, 2, 3, 4)}, cost=cost.gpsimd)
def partition_broadcast(src: T[Array, In("1 F*", ON_CHIP)], *, partitions: T[int, Attr((int,))],
                        mask: T[Any, Mask] = None, dtype: T[Any, DType] = None) -> Array:
    """Copies a tile of one partition to several: result[p, ...] = src[0, ...].

    src: [1, F...] in SBUF or PSUM. partitions: 1 to 128. Result: [partitions, F...] in SBUF; bits are kept
    where the dtype is. The language makes it where a function broadcasts over partitions, which no Vector
    Engine instruction does. Cost: 150 + F cycles, assumed (the compiler may use the Tensor Engine instead).
    """
    return np.broadcast_to(src, (partitions, *src.shape[1:]))


def _check_gather_flattened(c: Any, target: Any) -> None:
    for name in ("data", "indices"):
        if not 2 <= len(getattr(c, name).shape) <= 4:
            raise make("err_exceed_max_supported_dimension",
                       f"{name} has {len(getattr(c, name).shape)} dimensions, gather_flattened takes 2 to 4",
                       operand=name)


@instruction(
    positional=True, engine="gpsimd", family="gather", source="api_legacy: language.gather_flattened", surface="language",
    raw=True,
    results=(Result(shape=lambda c: tuple(c.indices.shape), dtype="data"),), check=_check_gather_flattened,
    mask_dims={"data": (0, None, None, None)}, cost=cost.gpsimd)
def gather_flattened(data: T[Array, In("P S*", ON_CHIP)], indices: T[Array, In("P F*", ON_CHIP, "uint32")], *,
                     mask: T[Any, Mask] = None, dtype: T[Any, DType] = None, **kwargs: Any) -> Array:
    """Gathers elements of each partition by index: result[p, i...] = flattened data[p][indices[p, i...]].

    data: [P, ...], indices: [P, ...] uint32, 2 to 4 dimensions each, P <= 128. Result: shape of indices,
    dtype of data unless dtype is given. An index outside is undefined on the device; here it gives NaN or the
    largest integer. mask counts the dimensions of indices. Cost: not documented; 150 + F cycles is assumed.
    """
    rows = data.reshape(data.shape[0], -1)
    positions = indices.reshape(indices.shape[0], -1).astype(np.int64)
    return take_rows(rows, positions).reshape(indices.shape)


@instruction(
    engine="sync", family="print", source="api_legacy: language.device_print", surface="language", limits=(),
    raw=True,
    mask_on="x", cost=lambda d, hw: 0.0)
def device_print(prefix: T[str, Attr((str,))], x: T[Array, In("*", ANYWHERE)], *, mask: T[Any, Mask] = None,
                 **kwargs: Any) -> tuple[()]:
    """Prints a prefix and the values of a tile, in simulation only.

    x: a tile of any shape and dtype in any memory. Makes no tile. On a device it does nothing, so its cost is
    0.
    """
    return ()


@instruction(engine="sync", family="sync", source="api_legacy: language.iterators.sync_program",
             surface="internal",
             limits=(), meets=meeting.programs_along, cost=lambda d, hw: float(hw.min_ii))
def barrier(*, program_axes: T[Any, Attr((tuple, list))] = ()) -> tuple[()]:
    """Waits until all programs along the given axes of the grid (all axes by default) have come here.

    What a program wrote to shared HBM before it is seen by the others after it. Cost: 64 cycles; the waiting
    is not in it.
    """
    return ()


@instruction(engine="gpsimd", family="sync", source="api_legacy: _private.private_api.core_barrier",
             surface="internal",
             limits=(), meets=meeting.programs_on_cores, cost=lambda d, hw: float(hw.min_ii))
def core_barrier(*, cores: T[Any, Attr((tuple, list))]) -> tuple[()]:
    """Waits until the programs of all listed cores of a logical NeuronCore have come here.

    cores: physical cores, as in (0, 1). What one wrote to shared HBM before it is seen by the others after
    it. The vendor's signature is core_barrier(tensor, cores); the tensor, which is only partly written then,
    orders its accesses there and is not an operand here, because the barrier orders all of them. Cost: 64
    cycles; the waiting is not in it.
    """
    return ()


_REDUCIBLE = frozenset(name for name, f in SCALAR.items() if f.reducible)


def _bitwise(op: str) -> bool:
    return SCALAR[op].group == "bitvec"


def _check_all_reduce(c: Any, target: Any) -> None:
    if _bitwise(c.op) and c.x.dtype not in INTS:
        raise NkiTypeError(f"{c.op} of {c.x.dtype} data", operand="x",
                           rule="a bitwise reduction takes integers",
                           why="it works on bits", fix="view the data as an integer type of the same size")


@instruction(
    engine="dma", family="collective", source="api_legacy: language.all_reduce", surface="language",
    meets=meeting.programs_along, dma_share=lambda d, hw: 0.5,
    results=(Result(shape="x", dtype="x"),), raw=lambda c: _bitwise(c.op), check=_check_all_reduce,
    cost=lambda d, hw: cost.dma(hw, d.P, cost.tile_bytes(d, "x"), 0.5))
def all_reduce(x: T[Any, In("P F*", ON_CHIP)], op: T[str, Op(_REDUCIBLE)],
               program_axes: T[Any, Attr((tuple, list, int))], *, dtype: T[Any, DType] = None,
               mask: T[Any, Mask] = None,
               parallel_reduce: T[bool, Attr((bool,))] = True, asynchronous: T[bool, Attr((bool,))] = False,
               **kwargs: Any) -> Array:
    """Reduces a tile over the programs of the grid: every program gets op over the tiles of all of them.

    x: [P, F...] in SBUF or PSUM, of one shape in all programs that differ only in their position along
    program_axes (axes of the launch grid; programs are cores or serial instances, not chips). op: a reducible
    operator. Programs are folded in the order of their number, as elements of a reduction are (32 lanes and a
    tree), in float32, and rounded once to dtype, that of x by default. parallel_reduce and asynchronous change
    no value. The body gets the list of the tiles. Cost: not documented; the bytes of one tile at half the DMA
    rate is assumed.
    """
    return reduce_list(x, op)
