"""`neuronxcc.nki.kernels.vision`: pooling backward, resizing and adaptive pooling.

Names, arguments, layouts and results as the vendor documents them (public reference kernels of nki-samples); the
kernels are opennki's own.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import opennki.dialects.neuronxcc.isa as nisa
import opennki.dialects.neuronxcc.language as nl
from opennki.dialects.neuronxcc._missing import missing
from opennki.dialects.neuronxcc.constants import sizeinbytes
from opennki.dialects.neuronxcc.kernels import _tools
from opennki.kernels.entry import jit

_M = "neuronxcc.nki.kernels.vision"
_ROWS = _tools.ROWS
_WINDOW, _STRIDE = 3, 2


def _row_tiles(rows: int) -> Any:
    """(loop, size of a tile, first row) for each part of some rows: whole tiles of 128, and what is left."""
    whole = rows // _ROWS
    if whole:
        yield nl.affine_range(whole), _ROWS, 0
    if rows % _ROWS:
        yield nl.affine_range(1), rows % _ROWS, whole * _ROWS


# ---- the gradient of max pooling ------------------------------------------------------------------------------------
@jit
def select_and_scatter_kernel(operand_tensor: Any, source_tensor: Any, out_tensor: Any = None) -> Any:
    """The gradient of a max pooling with windows of 3 x 3, stride 2 and padding 1.

    operand_tensor: (n, c, h, w), what was pooled. source_tensor: (n, c, (h + 1) // 2, (w + 1) // 2), the gradient of the
    pooled image, of the same dtype. Each of its elements is added where its window has its largest element; of equal ones,
    the first in rows; the padding is never chosen. Sums are float32. Returns (n, c, h, w) of the same dtype; programs of
    older releases pass the tensor to write to as out_tensor. Errors: NkiValueError and NkiTypeError for other shapes.
    """
    for name, tensor in (("operand_tensor", operand_tensor), ("source_tensor", source_tensor)):
        _tools.require_rank(name, tensor, 4, "(n, c, h, w)")
    n, c, height, width = operand_tensor.shape
    pooled = tuple((size + 2 - _WINDOW) // _STRIDE + 1 for size in (height, width))
    _tools.require_shape("source_tensor", source_tensor, (n, c, *pooled), "(n, c, (h + 1) // 2, (w + 1) // 2)")
    _tools.require_one_dtype(operand_tensor=operand_tensor, source_tensor=source_tensor)
    out = out_tensor
    if out is None:
        out = nl.ndarray((n, c, height, width), dtype=operand_tensor.dtype, buffer=nl.shared_hbm)
    else:
        _tools.require_shape("out_tensor", out, (n, c, height, width), "(n, c, h, w)")
    operand, source, result = (x.reshape((n * c, *x.shape[2:])) for x in (operand_tensor, source_tensor, out))
    # two images of two rows, and eight rows of windows, for each row of windows, in three buffers
    each = 2 * _STRIDE * (width + 2) * 4 + 8 * pooled[1] * 4
    band = max(1, nl.tile_size.total_available_sbuf_size // 3 // each - 1)
    bands = -(-pooled[0] // band)
    band = -(-pooled[0] // bands)
    for loop, rows, start in _row_tiles(n * c):
        for tile in loop:
            part = nl.ds(tile * _ROWS + start, rows)
            for first in range(0, pooled[0], band):
                _scatter_band(operand, source, result, part, rows, first, min(first + band, pooled[0]))
    return out if out_tensor is None else None


def _scatter_band(operand: Any, source: Any, result: Any, part: Any, rows: int, first: int, last: int) -> None:
    """Write what the rows of windows first .. last - 1 own: two rows of the image each. The row of windows after them
    shares the last of these rows and is computed here, too."""
    _, height, width = operand.shape
    _, windows_down, windows = source.shape
    count = min(last + 1, windows_down) - first
    above, below = _STRIDE * first - 1, min(_STRIDE * (first + count - 1) + 1, height - 1)
    image = nl.full((rows, _STRIDE * count + 1, width + 2), _tools.LOWEST, dtype=nl.float32)
    top = max(above, 0)
    image[:, top - above : below - above + 1, 1 : width + 1] = nl.load(operand[part, top : below + 1, :])
    left = nl.copy(nl.load(source[part, first : first + count, :]), dtype=nl.float32)
    total = nl.zeros((rows, _STRIDE * count + 1, width + 2), dtype=nl.float32)

    def at(tensor: Any, y: int, x: int) -> Any:
        """Element (y, x) of every window."""
        down, along = nl.arange(count)[None, :, None], nl.arange(windows)[None, None, :]
        return tensor[nl.arange(rows)[:, None, None], _STRIDE * down + y, _STRIDE * along + x]

    largest = _largest(image, rows, count, windows, at)
    steps = [(y, x) for y in range(_WINDOW) for x in range(_WINDOW)]
    for y, x in steps:
        chosen = nl.equal(at(image, y, x), largest, dtype=nl.float32)
        gradient = nl.multiply(chosen, left)
        if (y, x) != steps[-1]:  # the first of equal ones takes it all
            left = nl.subtract(left, gradient)
        place = at(total, y, x)
        place[...] = nl.add(place, gradient)
    own = min(_STRIDE * last, height) - _STRIDE * first
    nl.store(result[part, _STRIDE * first : _STRIDE * first + own, :], total[:, 1 : own + 1, 1 : width + 1])


def _largest(image: Any, rows: int, count: int, windows: int, at: Any) -> Any:
    """(rows, count, windows): the largest element of each window, first along x, then down."""
    height = _STRIDE * count + 1
    part, down, along = nl.arange(rows)[:, None, None], nl.arange(height)[None, :, None], nl.arange(windows)[None, None, :]
    wide = nl.maximum(image[part, down, _STRIDE * along], image[part, down, _STRIDE * along + 1])
    wide = nl.maximum(wide, image[part, down, _STRIDE * along + 2])
    top, middle, bottom = (wide[part, _STRIDE * nl.arange(count)[None, :, None] + y, along] for y in range(_WINDOW))
    return nl.maximum(nl.maximum(top, middle), bottom)


# ---- resizing -------------------------------------------------------------------------------------------------------
def _nearest(size: int, out: int) -> Any:
    """The source of each element: floor(i * size / out) in float32, as frameworks compute it."""
    found = np.floor(np.arange(out, dtype=np.float32) * np.float32(size / out)).astype(np.int64)
    return np.minimum(found, size - 1)


@jit
def resize_nearest_fixed_dma_kernel(data_tensor: Any, out_shape: Any) -> Any:
    """Resize images to the nearest pixel, by DMA alone.

    data_tensor: (batch, h, w, c). out_shape: (batch, out_h, out_w, c); programs of older releases pass the tensor to
    write to in its place. Pixel (y, x) of the result is pixel (floor(y h / out_h), floor(x w / out_w)) of the image. Grid:
    [batch], or none. Returns out_shape of the same dtype. Errors: NkiValueError for other shapes.
    """
    _tools.require_rank("data_tensor", data_tensor, 4, "(batch, h, w, c)")
    into = out_shape if hasattr(out_shape, "shape") else None
    shape = tuple(int(x) for x in (out_shape if into is None else into.shape))
    batch, height, width, channels = data_tensor.shape
    _tools.require(
        len(shape) == 4 and shape[0] == batch and shape[3] == channels and min(shape) > 0,
        f"out_shape is {shape} for images {tuple(data_tensor.shape)}",
        operand="out_shape",
        rule="out_shape is (batch, out_h, out_w, c) with the batch and channels of data_tensor",
        fix=f"pass ({batch}, out_h, out_w, {channels})",
    )
    if nl.program_ndim():
        _tools.require_grid((batch,), "batch")
    out = nl.ndarray(shape, dtype=data_tensor.dtype, buffer=nl.shared_hbm) if into is None else into
    pixels = shape[1] * shape[2]
    table = _nearest(height, shape[1])[:, None] * width + _nearest(width, shape[2])[None, :]
    tiles = -(-pixels // _ROWS)
    # pixel 128 n + p is in row p and column n
    padded = np.zeros(tiles * _ROWS, np.int32)
    padded[:pixels] = table.reshape(-1)
    places = nl.load(nl.shared_constant(np.ascontiguousarray(padded.reshape(tiles, _ROWS).T), dtype=nl.int32))
    images, results = data_tensor.reshape((batch, height * width, channels)), out.reshape((batch, pixels, channels))
    mine = [nl.program_id(0)] if nl.program_ndim() else nl.affine_range(batch)
    for b in mine:
        image, result = images[b], results[b]
        for loop, rows, start in _row_tiles(pixels):
            for tile in loop:
                column = places[0:rows, nl.ds(tile + start // _ROWS, 1)]
                pixel = nl.load(image[column, nl.arange(channels)[None, :]])
                nl.store(result[nl.ds(tile * _ROWS + start, rows), :], pixel)
    return out if into is None else None


# ---- adaptive pooling -----------------------------------------------------------------------------------------------
def _regions(size: int, out: int) -> list[tuple[int, int]]:
    """First and last + 1 element that each output takes the mean of."""
    return [(i * size // out, -(-(i + 1) * size // out)) for i in range(out)]


@jit
def adaptive_avg_pool2d_kernel(in_tensor: Any, output_size: Any) -> Any:
    """Means over regions that cut the image evenly, as torch.nn.AdaptiveAvgPool2d.

    in_tensor: (n, c, h, w) float32, float16 or bfloat16. output_size: a number, or (out_h, out_w), not larger than the
    image. Element (y, x) is the mean of rows floor(y h / out_h) to ceil((y + 1) h / out_h) - 1 and the columns alike; sums
    are float32. Returns (n, c, out_h, out_w) of the same dtype. Errors: NkiValueError for other arguments.
    """
    _tools.require_rank("in_tensor", in_tensor, 4, "(n, c, h, w)")
    n, c, height, width = in_tensor.shape
    size = output_size if isinstance(output_size, tuple | list) else (output_size, output_size)
    _tools.require(
        len(size) == 2 and all(isinstance(x, int | np.integer) for x in size) and 0 < size[0] <= height and 0 < size[1] <= width,
        f"output_size is {output_size} for images of {height} x {width}",
        operand="output_size",
        rule="output_size is a number or two, positive and not larger than the image",
        fix=f"pass at most ({height}, {width})",
    )
    down, along = int(size[0]), int(size[1])
    out = nl.ndarray((n, c, down, along), dtype=in_tensor.dtype, buffer=nl.shared_hbm)
    images, results = in_tensor.reshape((n * c, height, width)), out.reshape((n * c, down, along))
    pool = _Pool(height, width, down, along, sizeinbytes(in_tensor.dtype))
    for loop, rows, start in _row_tiles(n * c):
        for tile in loop:
            part = nl.ds(tile * _ROWS + start, rows)
            for first, last in pool.bands():
                pool.band(images, results, part, rows, first, last)
    return out


class _Pool:
    """Means of regions of images, one image in a partition."""

    def __init__(self, height: int, width: int, down: int, along: int, itemsize: int) -> None:
        self.down, self.along = _regions(height, down), _regions(width, along)
        self.even = height % down == 0 and width % along == 0
        self.width = width
        # rows of the image that are in SBUF at a time, with their sums along x; several buffers have to fit
        self.rows = max(1, nl.tile_size.total_available_sbuf_size // 5 // (width * itemsize + along * 4))

    def bands(self) -> Any:
        """Rows of the result that are computed together: as many as have their part of the image in SBUF."""
        first = 0
        while first < len(self.down):
            last = first + 1
            while last < len(self.down) and self.down[last][1] - self.down[first][0] <= self.rows:
                last += 1
            yield first, last
            first = last

    def band(self, images: Any, results: Any, part: Any, rows: int, first: int, last: int) -> None:
        """Rows first .. last - 1 of the result. A region that does not fit is summed up in pieces."""
        low, high = self.down[first][0], self.down[last - 1][1]
        sums = nl.ndarray((rows, last - first, len(self.along)), dtype=nl.float32)
        pieces = range(low, high, self.rows)
        for at in pieces:
            end = min(at + self.rows, high)
            image = nl.load(images[part, at:end, :])
            into = sums if at == low else nl.ndarray((rows, last - first, len(self.along)), dtype=nl.float32)
            self._sums(image, into, rows, at, end, first, last)
            if at != low:
                sums[...] = nl.add(sums, into)
        nl.store(results[part, first:last, :], self._means(sums, rows, first, last))

    def _sums(self, image: Any, into: Any, rows: int, low: int, high: int, first: int, last: int) -> None:
        """Sums over the regions of rows first .. last - 1, as far as they are in an image of the rows low .. high - 1."""
        if self.even and low == self.down[first][0] and high == self.down[last - 1][1]:
            tall, wide = (high - low) // (last - first), self.width // len(self.along)
            p, row, column = nl.arange(rows)[:, None, None, None, None], nl.arange(last - first), nl.arange(len(self.along))
            cells = image[
                p,
                row[None, :, None, None, None] * tall + nl.arange(tall)[None, None, None, :, None],
                column[None, None, :, None, None] * wide + nl.arange(wide)[None, None, None, None, :],
            ]
            into[...] = nisa.tensor_reduce(np.add, cells, axis=(3, 4), dtype=nl.float32)
            return
        across = nl.ndarray((rows, high - low, len(self.along)), dtype=nl.float32)
        for x, (left, right) in enumerate(self.along):
            across[:, :, x : x + 1] = nisa.tensor_reduce(np.add, image[:, :, left:right], axis=(2,), dtype=nl.float32, keepdims=True)
        p, along = nl.arange(rows)[:, None, None], nl.arange(len(self.along))[None, :, None]
        for y in range(first, last):
            top, bottom = max(self.down[y][0], low), min(self.down[y][1], high)
            lines = across[p, top - low + nl.arange(bottom - top)[None, None, :], along]
            into[:, y - first, :] = nisa.tensor_reduce(np.add, lines, axis=(2,), dtype=nl.float32)

    def _means(self, sums: Any, rows: int, first: int, last: int) -> Any:
        """Sums over the number of elements of their regions, which are few different numbers."""
        tall, wide = ([b - a for a, b in regions] for regions in (self.down[first:last], self.along))
        if len(set(tall)) == 1 and len(set(wide)) == 1:
            return nl.multiply(sums, 1.0 / (tall[0] * wide[0]), dtype=nl.float32)
        means = nl.ndarray(sums.shape, dtype=nl.float32)
        scaled = nl.ndarray(sums.shape, dtype=nl.float32)
        for column, n in enumerate(wide):
            scaled[:, :, column : column + 1] = nl.multiply(sums[:, :, column : column + 1], 1.0 / n)
        for row, n in enumerate(tall):
            means[:, row, :] = nl.multiply(scaled[:, row, :], 1.0 / n)
        return means


__all__ = ["adaptive_avg_pool2d_kernel", "resize_nearest_fixed_dma_kernel", "select_and_scatter_kernel"]
__getattr__ = missing(_M)
