"""Shapes and strides of symbols: views, and what a mask narrows."""

from __future__ import annotations

from math import prod

import numpy as np


class Unsupported(Exception):
    """A body does something that has no native form; the text says what."""


def broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The common shape. Raises Unsupported."""
    common: tuple[int, ...] = ()
    for shape in shapes:
        if shape == common or not shape:
            continue
        if common:
            break
        common = shape
    else:
        return common  # of one shape and numbers, as most are
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError as exc:
        raise Unsupported(str(exc)) from None


def strides_of(shape: tuple[int, ...], strides: tuple[int, ...], new: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a tile seen in another shape. Raises Unsupported where it would have to be copied."""
    if shape == new and 0 not in shape:
        return tuple([0 if n == 1 else s for n, s in zip(shape, strides, strict=True)])
    if prod(shape) != prod(new):
        raise Unsupported(f"a reshape of {shape} to {new}")
    old = [(n, s) for n, s in zip(shape, strides, strict=True) if n != 1]
    out: list[int] = []
    i = 0
    remaining, stride = (old[0] if old else (1, 0))
    for n in new:
        if n == 1:
            out.append(0)
            continue
        # join old dimensions until they hold n
        while remaining % n and i + 1 < len(old) and stride == old[i + 1][0] * old[i + 1][1]:
            i += 1
            remaining, stride = remaining * old[i][0], old[i][1]
        if remaining == 1 and i + 1 < len(old):
            i += 1
            remaining, stride = old[i]
            while remaining % n and i + 1 < len(old) and stride == old[i + 1][0] * old[i + 1][1]:
                i += 1
                remaining, stride = remaining * old[i][0], old[i][1]
        if remaining % n:
            raise Unsupported(f"a reshape of {shape} to {new} that is no view")
        remaining //= n
        out.append(stride * remaining)
        if remaining == 1 and i + 1 < len(old):
            i += 1
            remaining, stride = old[i]
    return tuple(out)


# What narrows a dimension: a dimension of the iteration space; -1: nothing; WHOLE: nothing, but all of it is there, whatever narrows the
# operands beside it; JOINED: a part of such a dimension; a tuple: dimensions that were joined, as (size, what narrows it) of each.
Tag = int | tuple[tuple[int, int], ...]
Axes = tuple[Tag, ...]
JOINED, WHOLE = -2, -3


def carried(shape: tuple[int, ...], axes: Axes, new: tuple[int, ...]) -> Axes:
    """What narrows the dimensions of a value that is seen in another shape."""
    if not axes or all(a == -1 for a in axes):
        return (-1,) * len(new) if axes else ()
    atoms: list[tuple[int, int]] = []
    for n, a in zip(shape, axes, strict=True):
        if n != 1:
            atoms += a if isinstance(a, tuple) else [(n, a)]
    out: list[Tag] = []
    i = 0
    for n in new:
        if n == 1:
            out.append(-1)
            continue
        taken: list[tuple[int, int]] = []
        have = 1
        while have < n and i < len(atoms):
            size, tag = atoms[i]
            i += 1
            if have * size > n and tag in (-1, WHOLE) and n % have == 0 and size % (n // have) == 0:
                atoms.insert(i, (size // (n // have), tag))
                size = n // have
            taken.append((size, tag))
            have *= size
        if have != n:
            return (JOINED,) * len(new)
        tags = {tag for _, tag in taken}
        out.append(next(iter(tags)) if len(taken) == 1 or tags <= {-1} or tags <= {WHOLE} else tuple(taken))
    return tuple(out)


def aligned(axes: Axes, shape: tuple[int, ...], wanted: tuple[int, ...]) -> Axes:
    """What narrows a value that is broadcast to a shape, for each dimension of that shape."""
    if not axes:
        return (-1,) * len(wanted)
    if len(shape) > len(wanted) or any(n not in (1, w) for n, w in zip(reversed(shape), reversed(wanted), strict=False)):
        return carried(shape, axes, wanted) if prod(shape) == prod(wanted) else (JOINED,) * len(wanted)
    padded = (-1,) * (len(wanted) - len(shape)) + axes
    sizes = (1,) * (len(wanted) - len(shape)) + shape
    return tuple(-1 if n == 1 else a for n, a in zip(sizes, padded, strict=True))


def joined_shape(shape: tuple[int, ...], axes: Axes) -> tuple[int, ...]:
    """The shape with joined dimensions taken apart."""
    out: list[int] = []
    for n, a in zip(shape, axes or (-1,) * len(shape), strict=True):
        out += [size for size, _ in a] if isinstance(a, tuple) else [n]
    return tuple(out)


def joined(shape: tuple[int, ...], strides: list[tuple[int, ...]]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """The shape and strides with neighbouring dimensions joined where that is the same walk for all of them."""
    sizes: list[int] = []
    walks: list[list[int]] = [[] for _ in strides]
    for axis, n in enumerate(shape):
        if n == 1:
            continue
        if sizes and all([w[-1] == s[axis] * n for w, s in zip(walks, strides, strict=True)]):
            sizes[-1] *= n
            for w, s in zip(walks, strides, strict=True):
                w[-1] = s[axis]
        else:
            sizes.append(n)
            for w, s in zip(walks, strides, strict=True):
                w.append(s[axis])
    if not sizes:
        return (1,), [(0,) for _ in strides]
    return tuple(sizes), [tuple(w) for w in walks]
