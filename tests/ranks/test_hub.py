"""Connections between the processes of a framework's program: messages find their run, strangers and garbage find nobody."""

from __future__ import annotations

import json
import os
import socket
import struct

import numpy as np
import pytest

from opennki.bind.jax.processes import Sites
from opennki.bind.joined import _table
from opennki.errors import NkiError, NkiValueError
from opennki.ranks import wire
from opennki.ranks.hub import Hub, place_towards
from opennki.ranks.mesh import say
import contextlib


class Store(dict):
    """What the framework's store does."""

    def put(self, key, text):
        self[key] = text


@pytest.fixture
def hubs():
    store = Store()
    made = [Hub(process, store, "127.0.0.1", 5.0) for process in range(3)]
    made[0].place = json.loads(store["opennki/0"])
    return made


def frame(run, text, array=None):
    return wire.encode({"kind": "test", "run": run, "text": text}, {} if array is None else {"x": array})


def ended(one):
    """The other side closes the connection, with unread bytes or without."""
    one.settimeout(10)
    with contextlib.suppress(ConnectionResetError):
        assert one.recv(1) == b""


def test_messages_find_their_run(hubs):
    lines = {(hub.process, run): hub.line(run, [0, 1, 2]) for hub in hubs for run in ("a", "b") if (hub.process, run) != (0, "b")}
    for run in ("a", "b", "a"):
        for sender in (1, 2):
            lines[sender, run].send(0, frame(run, f"{run}{sender}", np.arange(4)))
    late = hubs[0].line("b", [0, 1, 2])  # opened after its messages
    assert [lines[0, "a"].receive(p)[0]["text"] for p in (2, 1, 1)] == ["a2", "a1", "a1"]
    header, arrays = late.receive(2)
    assert header["text"] == "b2" and arrays["x"].tolist() == [0, 1, 2, 3]
    hubs[2].reach(1)  # the higher one calls, as soon as it receives
    lines[1, "a"].send(2, frame("a", "x"))
    assert lines[2, "a"].receive(1)[0]["text"] == "x"


def test_processes_are_numbered_within_a_run(hubs):
    one, two = hubs[1].line("r", [1, 2]), hubs[2].line("r", [1, 2])
    assert (one.process, two.process, one.processes) == (0, 1, 2)
    two.send(0, frame("r", "hello"))
    assert one.receive(1)[0]["text"] == "hello"


def test_messages_of_a_run_that_is_over_are_dropped(hubs):
    first, second = hubs[0].line("r", [0, 1]), hubs[1].line("r", [0, 1])
    second.send(0, frame("r", "1"))
    assert first.receive(1)[0]["text"] == "1"
    first.close()
    second.send(0, frame("r", "2"))
    second.send(0, frame("s", "3"))
    other = hubs[0].line("s", [0, 1])
    assert other.receive(1)[0]["text"] == "3"
    assert "r" not in hubs[0].early
    with pytest.raises(EOFError):
        first.receive(1)


def test_a_process_that_goes_is_noticed(hubs):
    line = hubs[0].line("r", [0, 1])
    hubs[1].line("r", [0, 1]).send(0, frame("r", "last"))
    assert line.receive(1)[0]["text"] == "last"
    hubs[1].sockets[0].shutdown(socket.SHUT_RDWR)
    with pytest.raises(EOFError):
        line.receive(1)
    with pytest.raises(OSError):
        line.send(1, frame("r", "x"))
    with pytest.raises(EOFError):
        hubs[0].line("t", [0, 1]).receive(1)


def test_a_process_that_does_not_come_is_an_error():
    hub = Hub(0, Store(), "127.0.0.1", 0.2)
    with pytest.raises(NkiError, match="process 1 has not called a kernel with collectives within"):
        hub.line("r", [0, 1]).receive(1)


@pytest.mark.parametrize("hello", [{}, {"token": "guess", "process": 1}, {"process": "1"}, {"process": 0}, {"process": -1}, None],
                         ids=str)  # fmt: skip
def test_strangers_are_kept_out(hubs, hello):
    host, port, token = hubs[0].place
    with socket.create_connection((host, port)) as stranger:
        if hello is None:
            stranger.sendall(struct.pack("<I", 1 << 30) + os.urandom(64))
        else:
            say(stranger, {"token": token, **hello} if hello.get("process") in ("1", 0, -1) else hello)
        ended(stranger)
    assert not hubs[0].sockets
    hubs[1].line("r", [0, 1]).send(0, frame("r", "x"))
    assert hubs[0].line("r", [0, 1]).receive(1)[0]["text"] == "x"


@pytest.mark.parametrize("data", [wire.HEAD.pack(1 << 31, 0), wire.HEAD.pack(4, 0) + b"null", wire.HEAD.pack(2, 0) + b"{}", b"\0" * 200])
def test_garbage_ends_the_connection(hubs, data):
    host, port, token = hubs[0].place
    with socket.create_connection((host, port)) as peer:
        say(peer, {"token": token, "process": 1})
        peer.sendall(data)
        ended(peer)
    with pytest.raises(EOFError):
        hubs[0].line("r", [0, 1]).receive(1)


def test_the_table_of_owners():
    assert _table([(0, 2), (1, 1), (0, 1)]) == [0, 0, 1, 0]
    for owners in ([(0, 0)], [(0, -1)], [(0, 1 << 40)], [("0", 1)], [(0, 1.0)], [(0, 65536), (1, 1)], [(0,)]):
        with pytest.raises(ValueError):
            _table(owners)


def test_calls_that_cannot_be_told_apart():
    sites = Sites()
    first = sites.enter("key", 1, "kernel")
    again = sites.enter("key", 1, "kernel")
    sites.enter("other", 2, "kernel")()
    with pytest.raises(NkiValueError, match="two places that are one function"):
        sites.enter("key", 2, "kernel")
    first()
    again()
    sites.enter("key", 2, "kernel")()


def test_the_own_address():
    assert place_towards("127.0.0.1") == "127.0.0.1"
    assert place_towards("no such host.invalid")
