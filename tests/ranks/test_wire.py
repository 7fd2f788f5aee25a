"""Messages between ranks: what is sent arrives, and hostile bytes are refused."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opennki.errors import NkiParseError
from opennki.ranks import wire


def split(frame):
    text, body = wire.lengths(frame[: wire.HEAD.size])
    start = wire.HEAD.size + text
    assert len(frame) == start + body
    return frame[wire.HEAD.size : start], frame[start:]


@given(st.sampled_from(sorted(wire.DTYPES)), st.lists(st.integers(0, 4), max_size=4), st.integers(0, 2**32))
def test_arrays_arrive_as_they_are(name, shape, seed):
    dtype = wire.DTYPES[name]
    count = int(np.prod(shape)) * dtype.itemsize
    data = np.random.default_rng(seed).integers(0, 2 if name == "bool" else 256, count, dtype=np.uint8)
    array = data.view(dtype).reshape(shape) if count else np.zeros(shape, dtype)
    header, arrays = wire.decode(*split(wire.encode({"kind": "x", "key": [1, ["a"]]}, {"src": array, "t": array[..., None].T})))
    assert header == {"kind": "x", "key": [1, ["a"]]} and wire.tuples(header["key"]) == (1, ("a",))
    for sent, got in ((array, arrays["src"]), (array[..., None].T, arrays["t"])):
        assert got.shape == sent.shape and got.dtype == sent.dtype and got.tobytes() == sent.tobytes()


def test_hostile_bytes_are_refused():
    frame = wire.encode({"kind": "bring", "key": ["op", "f.py", 3]}, {"src": np.arange(6, dtype=np.int32).reshape(2, 3)})
    text, body = split(frame)
    rng = random.Random(0)
    for _ in range(3000):
        broken = bytearray(text)
        for _ in range(rng.randint(1, 4)):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        cut = body[: rng.randint(0, len(body))]
        try:
            header, arrays = wire.decode(bytes(broken), cut)
        except NkiParseError:
            continue
        assert isinstance(header, dict) and sum(a.nbytes for a in arrays.values()) == len(cut)


@pytest.mark.parametrize("arrays", [
    [["src", "object", [1]]], [["src", "int32", [-1]]], [["src", "int32", [1 << 62, 1 << 62]]], [["src", "int32", [True]]],
    [["src", "int32", "ab"]], ["src"], [["src", "int32", [1] * 40]], "none", [["src", "int32", [9]]],
])  # fmt: skip
def test_arrays_that_cannot_be(arrays):
    with pytest.raises(NkiParseError):
        wire.decode(json.dumps({"kind": "x", "arrays": arrays}).encode(), b"1234")


def test_lengths_are_bounded():
    with pytest.raises(NkiParseError, match="bounded"):
        wire.lengths(wire.HEAD.pack(1 << 31, 0))
    with pytest.raises(NkiParseError, match="bounded"):
        wire.lengths(wire.HEAD.pack(1, 1 << 60))
    deep = b'{"kind":"x","arrays":[],"key":' + b"[" * 100000 + b"]" * 100000 + b"}"
    with pytest.raises(NkiParseError):
        wire.tuples(wire.decode(deep, b"")[0]["key"])
