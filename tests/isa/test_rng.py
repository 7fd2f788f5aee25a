"""Philox4x32-10 against the published known answers, and the laws of streams."""

import numpy as np
import pytest

from opennki.isa import rng


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [  # Random123, kat_vectors, philox4x32 10
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter, key, answer):
    assert tuple(rng.philox4x32(counter, key).tolist()) == answer


def plain_philox(counter, key):
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k[1], p0 & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


@pytest.mark.oracle
def test_element_index_is_the_counter():
    key, upper = rng.stream_key(7, (1, 2, 3))
    got = rng.bits(7, (1, 2, 3), 11)
    for i, word in enumerate(got.tolist()):
        counter = (i // 4, 0, upper & 0xFFFFFFFF, upper >> 32)
        assert word == plain_philox(counter, (key & 0xFFFFFFFF, key >> 32))[i % 4]


def test_vectorised_over_counters():
    c0 = np.array([[0, 5], [6, 2**32 - 1]])
    got = rng.philox4x32((c0, 1, 2, 3), (4, 5))
    assert got.shape == (2, 2, 4) and got.dtype == np.uint32
    assert got[1, 1].tolist() == plain_philox((2**32 - 1, 1, 2, 3), (4, 5))


def test_values_are_frozen():
    """Stored results of users depend on these; a change of the stream hash is a break."""
    assert rng.stream_key(0, ()) == (0x93A9BDB51E5D5285, 0x41AFBACA000E95AE)
    assert rng.bits(42, (3, 0, 7), 5).tolist() == [1404523463, 1262335929, 2970174922, 1233432353, 3698926441]


def test_prefix_and_shape():
    long = rng.bits(1, (2,), 1000)
    for n in (0, 1, 3, 4, 5, 999):
        assert (rng.bits(1, (2,), n) == long[:n]).all() and rng.bits(1, (2,), n).shape == (n,)
    u = rng.uniform(1, (2,), (10, 100))
    assert u.dtype == np.float32 and u.shape == (10, 100)
    assert (u.reshape(-1) == (long >> 8) * 2.0**-24).all()
    assert rng.uniform(1, (2,), 10).shape == (10,)
    assert rng.uniform(1, (2,), (0, 4)).shape == (0, 4)
    assert rng.uniform(1, (2,), ()).shape == ()


def test_streams_differ():
    streams = [(), (0,), (0, 0), (1,), (1, 0), (0, 1), (-1,), (2**63,), (2**64 - 2,)]
    keys = {rng.stream_key(seed, s) for seed in (0, 1, -5, 2**40) for s in streams}
    assert len(keys) == 4 * len(streams)
    assert len({key for key, _ in keys}) == len({upper for _, upper in keys}) == len(keys)
    grid = {rng.stream_key(0, (site, p, i)) for site in range(10) for p in range(20) for i in range(50)}
    assert len(grid) == 10000
    assert rng.stream_key(np.int64(3), (np.uint8(1),)) == rng.stream_key(3, (1,))


def test_uniformity():
    u = rng.uniform(123, (9, 8), 1 << 18).astype(np.float64)
    assert u.min() >= 0 and u.max() < 1
    n = u.size
    assert abs(u.mean() - 0.5) < 5 * np.sqrt(1 / 12 / n)
    counts = np.bincount((u * 256).astype(int), minlength=256)
    chi2 = ((counts - n / 256) ** 2 / (n / 256)).sum()
    assert 150 < chi2 < 380  # 255 degrees of freedom, beyond 1e-6 on either side
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 5 / np.sqrt(n)
    other = rng.uniform(123, (9, 9), 1 << 18)
    assert abs(np.corrcoef(u, other)[0, 1]) < 5 / np.sqrt(n)


def test_bad_input():
    with pytest.raises(ValueError, match="cannot draw -1"):
        rng.bits(0, (), -1)
    for seed, stream in ((1.5, ()), (0, (1.0,)), ("a", ()), (0, (None,))):
        with pytest.raises(TypeError):
            rng.bits(seed, stream, 1)
