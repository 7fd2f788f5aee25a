"""A connection between every two processes of a run: sockets of forked processes, or TCP with a meeting point.

A channel gives `processes` (how many), `process` (this one), `send(peer, frame)` and `receive(peer)`, both blocking; `receive` raises
EOFError when the peer has gone. `ranks.hub.Line` is another channel.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import struct
import time
from collections.abc import Callable
from typing import Any, Protocol

from opennki.errors import NkiError
from opennki.ranks import wire

CONNECT_SECONDS = 60.0
_SHORT = struct.Struct("<I")
_MOST_HELLO = 1 << 16
MOST_AHEAD = 64 << 20  # bytes of memory that are made ready before anything has arrived


class Channel(Protocol):
    """How frames reach the other processes."""

    process: int
    processes: int

    def send(self, peer: int, frame: bytes) -> None:
        """Send a frame; raises OSError when the peer has gone."""

    def receive(self, peer: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """The next message of a peer, decoded; raises EOFError or OSError when it has gone."""

    def close(self) -> None:
        """Let go of the connections."""


class Mesh:
    """Sockets to all peers."""

    def __init__(self, process: int, sockets: dict[int, socket.socket]) -> None:
        self.process, self.processes, self.sockets = process, len(sockets) + 1, sockets
        for one in sockets.values():
            one.settimeout(None)

    def send(self, peer: int, frame: bytes) -> None:
        """Send a frame."""
        self.sockets[peer].sendall(frame)

    def receive(self, peer: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """The next message of a peer."""
        text, body = wire.lengths(bytes(exactly(self.sockets[peer], wire.HEAD.size)))
        return wire.decode(bytes(exactly(self.sockets[peer], text)), exactly(self.sockets[peer], body))

    def close(self) -> None:
        """Close all sockets; threads that wait at them go on."""
        for one in self.sockets.values():
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


def exactly(source: socket.socket, count: int) -> bytearray:
    """`count` bytes. Above MOST_AHEAD, memory grows with what arrives, not with what a header claims."""
    out, filled = bytearray(min(count, MOST_AHEAD)), 0
    while filled < count:
        if filled == len(out):
            out += bytes(min(count - filled, MOST_AHEAD))
        with memoryview(out) as whole, whole[filled:] as rest:
            got = source.recv_into(rest)
        if not got:
            raise EOFError("the connection was closed")
        filled += got
    return out


def pairs(processes: int) -> Callable[[int], Mesh]:
    """Connected sockets for processes that will be forked: call what this returns with the number of the process, once in each."""
    ends: dict[tuple[int, int], socket.socket] = {}
    for a in range(processes):
        for b in range(a + 1, processes):
            ends[a, b], ends[b, a] = socket.socketpair()

    def mine(process: int) -> Mesh:
        for (owner, _), one in ends.items():
            if owner != process:
                one.close()
        return Mesh(process, {peer: one for (owner, peer), one in ends.items() if owner == process})

    return mine


class MeetingPoint:
    """Where the processes of a TCP run find each other: each says its number and where it listens, and gets the places of all.

    `token` keeps strangers out: a connection that does not know it is closed.
    """

    def __init__(self, processes: int, token: str, host: str = "127.0.0.1") -> None:
        self.processes, self.token = processes, token
        self.listener = socket.create_server((host, 0))
        self.address = self.listener.getsockname()[:2]

    def serve(self) -> None:
        """Introduce the processes to each other. Raises NkiError when they do not all come in time."""
        found: dict[int, tuple[socket.socket, list[Any]]] = {}
        until = time.monotonic() + CONNECT_SECONDS
        try:
            while len(found) < self.processes:
                self.listener.settimeout(max(0.0, until - time.monotonic()))
                try:
                    one, _ = self.listener.accept()
                    one.settimeout(5.0)
                    hello = _hello(one, self.token)
                except TimeoutError:
                    if time.monotonic() >= until:
                        missing = sorted(set(range(self.processes)) - set(found))
                        raise NkiError(f"processes {missing} did not come to the meeting point within {CONNECT_SECONDS:g} s") from None
                    continue
                except (OSError, EOFError, ValueError):
                    continue
                number, place = hello.get("process"), hello.get("place")
                if isinstance(number, int) and 0 <= number < self.processes and number not in found and isinstance(place, list):
                    found[number] = one, place
                else:
                    one.close()
            table = [found[n][1] for n in range(self.processes)]
            for one, _ in found.values():
                say(one, {"places": table})
        finally:
            for one, _ in found.values():
                one.close()
            self.listener.close()


def say(to: socket.socket, value: dict[str, Any]) -> None:
    text = json.dumps(value).encode()
    to.sendall(_SHORT.pack(len(text)) + text)


def hear(source: socket.socket) -> dict[str, Any]:
    (size,) = _SHORT.unpack(exactly(source, _SHORT.size))
    if size > _MOST_HELLO:
        raise ValueError("a greeting that is too long")
    value = json.loads(exactly(source, size))
    if not isinstance(value, dict):
        raise ValueError("a greeting of another form")
    return value


def _hello(source: socket.socket, token: str) -> dict[str, Any]:
    value = hear(source)
    if not hmac.compare_digest(str(value.get("token", "")), token):
        source.close()
        raise ValueError("a stranger")
    return value


def join(process: int, processes: int, address: tuple[str, int], token: str, host: str | None = None) -> Mesh:
    """Meet the other processes at a `MeetingPoint` and connect to all. Raises NkiError when that fails."""
    until = time.monotonic() + CONNECT_SECONDS
    try:
        with socket.create_connection(address, timeout=CONNECT_SECONDS) as point:
            listener = socket.create_server((host or point.getsockname()[0], 0), backlog=processes)
            say(point, {"token": token, "process": process, "place": list(listener.getsockname()[:2])})
            places = hear(point)["places"]
        sockets: dict[int, socket.socket] = {}
        for peer in range(process):  # lower numbers listen
            one = socket.create_connection((str(places[peer][0]), int(places[peer][1])), timeout=CONNECT_SECONDS)
            say(one, {"token": token, "process": process})
            sockets[peer] = one
        while len(sockets) < processes - 1:
            listener.settimeout(max(0.1, until - time.monotonic()))
            one, _ = listener.accept()
            one.settimeout(5.0)
            try:
                caller = _hello(one, token).get("process")
            except (OSError, EOFError, ValueError):
                continue
            if isinstance(caller, int) and process < caller < processes and caller not in sockets:
                sockets[caller] = one
        listener.close()
    except (OSError, EOFError, ValueError, LookupError, TypeError) as exc:
        raise NkiError(
            f"process {process} of {processes} could not reach the others: {exc}",
            rule="all processes of a run meet at OPENNKI_RENDEZVOUS",
            fix="start them together, as `opennki launch -n N` does",
        ) from None
    for one in sockets.values():
        if one.family == socket.AF_INET:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Mesh(process, sockets)
