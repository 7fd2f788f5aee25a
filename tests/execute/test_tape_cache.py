"""Lowered tapes in files: the same bits, damage that does no harm, and several processes at once."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from tests.bind import kernels as k
from tests.execute import differ
from tests.toolchain import kernels as files

from opennki.bind import host
from opennki.errors import NkiParseError
from opennki.execute import executor as executors
from opennki.execute import tape_cache, tape_file
from opennki.execute.executor import executor_of
from opennki.interpret.checks import Checks, tape_of
from opennki.ir.parse import from_text
from opennki.kernels.framework import UnifiedKernel
from opennki.toolchain import nrt

nl = k.nl
X = np.random.default_rng(1).standard_normal((256, 64)).astype(np.float32)


def rows(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(x.shape[0] // 128):
        tile = nl.load(x[i * 128 : (i + 1) * 128])
        nl.store(out[i * 128 : (i + 1) * 128], tile / (1 + nl.max(nl.abs(tile), axis=1, keepdims=True)))
    return out


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder of its own, with the native library of the other one."""
    from opennki.execute import build

    lib = build.library()
    monkeypatch.setattr(executors, "library", lambda: lib)
    monkeypatch.setenv("OPENNKI_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("OPENNKI_TAPE_CACHE_MB", "256")
    return tmp_path / "tapes"


@pytest.fixture
def payload():
    return UnifiedKernel(rows).dump_config(X).backend_config.encode()


def run(payload):
    """Run a payload as a new process would."""
    host._kernels.clear()
    out = np.zeros_like(X)
    host.run_payload(payload, [X], [out])
    return out


def lowers_nothing(monkeypatch):
    def refused(*args):
        raise AssertionError("it is lowered again")

    monkeypatch.setattr(executors, "Lowering", refused)


def test_a_known_payload_is_not_lowered_again(cache, payload, monkeypatch):
    want = run(payload)
    assert len(list(cache.iterdir())) == 1
    lowers_nothing(monkeypatch)
    assert np.array_equal(run(payload), want)
    monkeypatch.setenv("NKI_PRECISE_FP", "0")  # another tape
    with pytest.raises(NkiParseError, match="lowered again"):
        run(payload)


def test_none_is_kept_where_the_setting_is_0(cache, payload, monkeypatch):
    monkeypatch.setenv("OPENNKI_TAPE_CACHE_MB", "0")
    run(payload)
    assert not cache.exists()


def test_a_neff_that_another_process_has_run_is_not_lowered_again(cache, monkeypatch):
    model = files.compiled().neff
    monkeypatch.setenv("OPENNKI_CALL_CHECKS", "off")

    def result():
        nrt._LOADED.clear()  # as a new process would
        with nrt.NrtClient() as client:
            client.try_lock_device()
            client.modelLoad(model)
            return client.modelExecute([files.A, files.B])

    want = result()
    assert len(list(cache.iterdir())) == 1
    lowers_nothing(monkeypatch)
    assert all(np.array_equal(a, b) for a, b in zip(result(), want, strict=True))
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "foreign", "folder", "fifo", "link"])
def test_damage_is_ignored_and_replaced(cache, payload, monkeypatch, damage):
    want = run(payload)
    (path,) = cache.iterdir()
    data = path.read_bytes()
    if damage in ("cut", "empty", "flipped", "foreign"):
        path.write_bytes({"cut": data[:-5], "empty": b"", "flipped": data[:300] + bytes([data[300] ^ 1]) + data[301:],
                          "foreign": b"#!/bin/sh\n" * 100}[damage])  # fmt: skip
    else:
        path.unlink()
        {"folder": path.mkdir, "fifo": lambda: os.mkfifo(path), "link": lambda: path.symlink_to("/dev/zero")}[damage]()
    assert np.array_equal(run(payload), want)
    if damage != "folder":
        assert path.read_bytes() == data
        lowers_nothing(monkeypatch)
        assert np.array_equal(run(payload), want)


def test_a_folder_that_takes_nothing_is_no_error(cache, payload, monkeypatch):
    cache.write_text("a file in its place")
    want = run(payload)
    cache.unlink()

    def full(*args):
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        assert np.array_equal(run(payload), want)
    assert not list(cache.iterdir())  # nor a part of a file


def test_the_folder_is_bounded_and_what_was_used_last_stays(cache, monkeypatch, payload):
    run(payload)
    (path,) = cache.iterdir()
    data = path.read_bytes()
    old = [cache / f"{n:040x}.tape" for n in range(9)]
    for n, one in enumerate(old):
        one.write_bytes(data + b"\0" * (200 << 10))
        os.utime(one, (1000 + n, 1000 + n))
    (cache / f"{tape_cache.TEMPORARY}dead").write_bytes(b"x")
    os.utime(cache / f"{tape_cache.TEMPORARY}dead", (1000, 1000))
    (cache / "notes.txt").write_text("of somebody else")
    monkeypatch.setenv("OPENNKI_TAPE_CACHE_MB", "1")
    path.unlink()
    run(payload)
    left = {one.name for one in cache.iterdir()}
    assert path.name in left and "notes.txt" in left and f"{tape_cache.TEMPORARY}dead" not in left
    assert sum(one.stat().st_size for one in cache.iterdir()) <= 1 << 20
    assert old[-1].name in left and old[0].name not in left


WRITER = """
import os, sys
os.environ["OPENNKI_TAPE_CACHE_MB"] = "256"
from opennki.execute import tape_cache, tape_file
from pathlib import Path
data = Path(sys.argv[1]).read_bytes()
tape_file.written = lambda image, facts: data
print("ready", flush=True)
while True:
    tape_cache.write(Path(sys.argv[2]), None, None)
"""


def test_processes_write_at_once_and_are_killed(cache, payload, tmp_path):
    run(payload)
    (path,) = cache.iterdir()
    kept = tmp_path / "kept"
    kept.write_bytes(path.read_bytes())
    for _ in range(3):
        writers = [
            subprocess.Popen([sys.executable, "-c", WRITER, str(kept), str(path)], stdout=subprocess.PIPE) for _ in range(2)
        ]  # fmt: skip
        for one in writers:
            assert one.stdout.readline() == b"ready\n"
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            assert tape_cache.read(path) is not None
        for one in writers:
            one.send_signal(signal.SIGKILL)
            one.wait()
            one.stdout.close()
        assert tape_cache.read(path) is not None


# ---- the format ----
def tapes(count):
    for seed in range(count):
        text, _ = differ.program(seed)
        found = executor_of(tape_of(from_text(text), Checks.of("off")))
        if found is not None and not found.steps and found.image.calls:
            yield tape_file.written(found.image, found.facts)


def test_what_is_read_is_what_was_written():
    count = 0
    for data in tapes(60):
        image, facts = tape_file.read(data)
        assert tape_file.written(image, facts) == data
        count += 1
    assert count > 30


def sealed(data):
    """Bytes with a checksum that is right for them."""
    body = data[tape_file._HEAD.size :]
    _, _, version, size = tape_file._HEAD.unpack_from(data)
    return tape_file._HEAD.pack(tape_file.MARK, hashlib.blake2b(body, digest_size=32).digest(), version, size) + body


def damaged(data, draw):
    data = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 5))):
        at = draw.randrange(tape_file._HEAD.size, len(data))
        kind = draw.randrange(4)
        if kind == 0:
            data[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            data[at : at + 8] = draw.choice((b"\xff" * 8, b"\0" * 8, b"\xff\xff\xff\x7f" * 2, b'99999999'))
        elif kind == 2:
            del data[at : at + draw.randrange(1, 30)]
        else:
            data[at:at] = draw.choice((b"[", b"]", b"-", b"null", b"1e9", bytes(24)))
    return bytes(data)


def test_any_damage_is_found_by_the_checksum():
    draw = random.Random(4)
    for data in tapes(12):
        for _ in range(30):
            other = damaged(data, draw)
            if other != data:
                with pytest.raises(ValueError):
                    tape_file.read(other)


def test_what_does_not_fit_is_refused_or_harmless_to_read():
    draw, refused, total = random.Random(5), 0, 0
    for data in tapes(30):
        for _ in range(40):
            total += 1
            try:
                image, _ = tape_file.read(sealed(damaged(data, draw)))
                image.laid()
            except ValueError:
                refused += 1
    assert total > 500 and refused > total / 3
