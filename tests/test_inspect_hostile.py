"""`opennki inspect` on large and hostile files."""

from __future__ import annotations

import io
import random

import pytest
from tests.inspect_files import JAX, OTHER, PAYLOAD, XLA, hlo, message, mlir, module, payloads

from opennki.tools import hlo_reader, inspect
from opennki.tools.hlo_reader import find_calls


class Counted(bytes):
    """Bytes that count how much of them is searched backwards."""

    searched = 0

    def rfind(self, needle, start=0, end=None):
        Counted.searched += (len(self) if end is None else end) - start
        return super().rfind(needle, start, end)


@pytest.mark.parametrize("piece", [
    f'custom_call_target="{JAX}" ', f'call_target_name = "{JAX}" ', f"custom_call @{JAX} ", f"custom_call @{JAX}(",
    f'custom_call @{JAX} {{"', f'{JAX} "',
    f'custom_call_target="{JAX}", a="\\', f'"\\"{JAX}', f'custom_call @"{JAX}" {{backend_config = {{',
    f'custom-call( custom_call_target="{JAX}" (',
])  # fmt: skip
def test_hostile_text_is_gone_through_a_fixed_number_of_times(piece, monkeypatch):
    scanned = 0
    token = hlo_reader._TOKEN

    class Token:
        def search(self, data, position):
            nonlocal scanned
            m = token.search(data, position)
            scanned += (len(data) if m is None else m.end()) - position
            return m

    monkeypatch.setattr(hlo_reader, "_TOKEN", Token())
    data = Counted(piece.encode() * 3000)
    Counted.searched = 0
    find_calls(data)
    assert scanned + Counted.searched <= 4 * len(data)


def test_large_files(monkeypatch):
    filler = '  %x.{} = f32[4,8]{{1,0}} add(%x.1, %x.2), metadata={{op_name="jit(f)/add" stack_frame_id=2}}\n'
    body = "".join(filler.format(i) for i in range(1000)) * 240
    text = (hlo(f', backend_config="{PAYLOAD}"') + body + hlo(f', backend_config="{PAYLOAD}"')).encode()
    assert len(text) > 20 << 20
    read = 0
    token = hlo_reader._TOKEN

    class Token:
        def search(self, data, position):
            nonlocal read
            read += 1
            return token.search(data, position)

    monkeypatch.setattr(hlo_reader, "_TOKEN", Token())
    assert len(payloads(text)[1]) == 2 and read < 1000  # only the calls are taken apart
    data = module((JAX, PAYLOAD), padding=300_000)
    assert len(data) > 11 << 20
    wire = []
    monkeypatch.setattr(hlo_reader, "_Wire", lambda d, make=hlo_reader._Wire: wire.append(make(d)) or wire[-1])
    assert len(payloads(data)[1]) == 1 and wire[0].read < 400_000  # instructions without the target are skipped whole


def hostile(rng, samples):
    data = bytearray(rng.choice(samples))
    for _ in range(rng.choice([1, 1, 2, 6])):
        at = rng.randrange(min(len(data), rng.choice([500, 5000])) + 1)
        kind = rng.randrange(4)
        if kind == 0 and at < len(data):
            data[at] = rng.choice([rng.randrange(256), *b'a{}"=\\,:(<\n'])
        elif kind == 1:
            data[at : at + rng.randrange(16)] = rng.choice([b"", b'"', b"{", b"\\", b"custom_call_target=", JAX.encode(), rng.randbytes(2)])
        elif kind == 2:
            del data[at : at + rng.randrange(1, 40)]
        else:
            other = rng.choice(samples)
            start = rng.randrange(len(other))
            data[at:at] = other[start : start + rng.randrange(40)]
    return bytes(data[: rng.randrange(len(data) + 1)] if rng.random() < 0.2 else data)


def test_hostile_files_are_refused_or_shown(monkeypatch):
    monkeypatch.setattr(hlo_reader, "_text_of_bytecode", lambda module: module.decode("latin-1").encode())
    configs = [f'backend_config = "{PAYLOAD}"', f'mhlo.backend_config = {{opaque = "{PAYLOAD}"}}']
    texts = [*map(mlir, configs), hlo(f', backend_config="{PAYLOAD}"')]
    samples = [*map(str.encode, texts),
               module((JAX, PAYLOAD), (XLA, OTHER)), message(1, module((JAX, PAYLOAD))), PAYLOAD.encode(), b"ML\xefR" + bytes(40)]
    rng = random.Random(5)
    statuses = []
    for i in range(500):
        data = rng.randbytes(rng.randrange(400)) if i % 8 == 0 else hostile(rng, samples)
        monkeypatch.setattr("sys.stdin", type("Input", (), {"buffer": io.BytesIO(data)}))
        out, err = io.StringIO(), io.StringIO()
        status = inspect.show("-", out=out, err=err, as_json=bool(i % 3 == 0))
        assert bool(err.getvalue()) == (not out.getvalue()) and (out.getvalue() + err.getvalue()).isascii()
        statuses.append(status)
    assert all(statuses.count(s) > 20 for s in (0, 1, 2)), [statuses.count(s) for s in (0, 1, 2)]
