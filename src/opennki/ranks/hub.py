"""Connections between the processes of a framework's program, over which several runs travel at once.

The framework's own store of keys introduces the processes to each other: each says there where it listens, and a word that strangers do not
know. The lower one of two processes listens. A connection is made when a run first needs it, and messages find their run by the number
that they carry; `Line` is the channel of one run (`ranks.mesh.Channel`), whose processes are those that have ranks in it.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import queue
import secrets
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from opennki import background
from opennki.errors import UNKNOWN, NkiError
from opennki.ranks import wire
from opennki.ranks.mesh import exactly, hear, say

MOST_OVER = 4096  # runs that are remembered as over
POLL_SECONDS = 0.02

Message = tuple[dict[str, Any], dict[str, Any]]


class Store(Protocol):
    """What the processes of a program share before they know each other."""

    def put(self, key: str, text: str) -> None:
        """Set a key, once."""

    def get(self, key: str) -> str | None:
        """The text of a key; None where nobody has set it yet. May wait for some milliseconds."""


class Hub:
    """This process among the others. `opened(number)`, where it is set, is called for a message of a run that this process does not know
    yet, and makes a line for it or does not; then the message waits for one. `patience`: seconds in which another process comes."""

    opened: Callable[[str], None] | None = None

    def __init__(self, process: int, store: Store, host: str, patience: float) -> None:
        self.process, self.store, self.patience = process, store, patience
        self.lock = threading.Condition()
        self.sockets: dict[int, socket.socket] = {}
        self.sending: dict[int, threading.Lock] = {}
        self.calling: set[int] = set()
        self.gone: set[int] = set()
        self.lines: dict[str, Line] = {}
        self.early: dict[str, list[tuple[int, Message]]] = {}
        self.over: OrderedDict[str, None] = OrderedDict()
        self.token = secrets.token_hex(16)
        self.listener = socket.create_server((host, 0), backlog=128)
        self._thread(self._accept)
        store.put(f"opennki/{process}", json.dumps([*self.listener.getsockname()[:2], self.token]))

    def line(self, number: str, processes: Sequence[int]) -> Line:
        """The channel of a run."""
        with self.lock:
            made = self.lines[number] = Line(self, number, processes)
            for peer, message in self.early.pop(number, ()):
                made.arrived(peer, message)
            for peer in self.gone:
                made.lost(peer)
        return made

    def forget(self, number: str) -> None:
        """A run is over: messages that still come for it are dropped."""
        with self.lock:
            self.lines.pop(number, None)
            self.over[number] = None
            while len(self.over) > MOST_OVER:
                self.over.popitem(last=False)

    # ---- connections ----
    def reach(self, peer: int) -> socket.socket:
        """The connection to another process; waits for it. Raises EOFError where that has gone, and NkiError where it does not come."""
        until = time.monotonic() + self.patience
        with self.lock:
            if peer < self.process and peer not in self.sockets and peer not in self.calling and peer not in self.gone:
                self.calling.add(peer)
                self._thread(self._call, peer, until)
            while peer not in self.sockets:
                if peer in self.gone:
                    raise EOFError(f"process {peer} has gone")
                if not self.lock.wait(max(0.0, until - time.monotonic())):
                    raise NkiError(
                        f"process {peer} has not called a kernel with collectives within {self.patience:g} s", loc=UNKNOWN,
                        rule="all processes that have ranks call it", fix="call it in all processes, or raise OPENNKI_MEETING_SECONDS",
                    )  # fmt: skip
            return self.sockets[peer]

    def send(self, peer: int, frame: bytes) -> None:
        """Send a frame; raises OSError where the other process has gone."""
        try:
            to = self.reach(peer)
        except (EOFError, NkiError) as exc:
            raise OSError(str(exc)) from None
        with self.sending[peer]:
            to.sendall(frame)

    def _thread(self, work: Callable[..., None], *args: Any) -> None:
        background.start(work, *args, name="opennki-hub")

    def _call(self, peer: int, until: float) -> None:
        """Connect to a lower process, once it has said where it is."""
        try:
            while (text := self.store.get(f"opennki/{peer}")) is None:
                if time.monotonic() > until:
                    return
                time.sleep(POLL_SECONDS)
            host, port, token = json.loads(text)
            one = socket.create_connection((str(host), int(port)), timeout=self.patience)
            say(one, {"token": token, "process": self.process})
            self._connected(peer, one)
        except Exception:  # it has said so and is not there, or the store has gone with its process
            self._lost(peer)
        finally:
            with self.lock:
                self.calling.discard(peer)

    def _accept(self) -> None:
        while True:
            try:
                one, _ = self.listener.accept()
            except OSError:
                return
            one.settimeout(5.0)
            try:
                hello = hear(one)
                peer = hello.get("process")
                if hmac.compare_digest(str(hello.get("token", "")), self.token) and isinstance(peer, int) and peer > self.process:
                    self._connected(peer, one)
                    continue
            except (OSError, EOFError, ValueError):
                pass
            one.close()

    def _connected(self, peer: int, one: socket.socket) -> None:
        one.settimeout(None)
        with contextlib.suppress(OSError):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self.lock:
            if peer in self.sockets:
                one.close()
                return
            self.sending[peer] = threading.Lock()
            self.sockets[peer] = one
            self.lock.notify_all()
        self._thread(self._receive, peer, one)

    def _lost(self, peer: int) -> None:
        with self.lock:
            self.gone.add(peer)
            self.sockets.pop(peer, None)
            lines = list(self.lines.values())
            self.lock.notify_all()
        for line in lines:
            line.lost(peer)

    def _receive(self, peer: int, source: socket.socket) -> None:
        try:
            while True:
                text, body = wire.lengths(bytes(exactly(source, wire.HEAD.size)))
                message = wire.decode(bytes(exactly(source, text)), exactly(source, body))
                self._arrived(peer, str(message[0].get("run")), message)
        except (OSError, EOFError, NkiError):
            self._lost(peer)
        finally:
            source.close()

    def _arrived(self, peer: int, number: str, message: Message) -> None:
        with self.lock:
            if number in self.over:
                return
            known = number in self.lines
        if not known and self.opened is not None:
            self.opened(number)
        with self.lock:
            if number in self.lines:
                self.lines[number].arrived(peer, message)
            elif number not in self.over:
                self.early.setdefault(number, []).append((peer, message))


class Line:
    """The channel of one run: its processes are numbered from 0, in the order of `members`."""

    def __init__(self, hub: Hub, number: str, members: Sequence[int]) -> None:
        self.hub, self.number, self.members = hub, number, list(members)
        self.process, self.processes = self.members.index(hub.process), len(self.members)
        self.place = {member: i for i, member in enumerate(self.members)}
        self.arriving: list[queue.SimpleQueue[Message | None]] = [queue.SimpleQueue() for _ in self.members]

    def send(self, peer: int, frame: bytes) -> None:
        """Send a frame."""
        self.hub.send(self.members[peer], frame)

    def receive(self, peer: int) -> Message:
        """The next message of a peer."""
        self.hub.reach(self.members[peer])
        message = self.arriving[peer].get()
        if message is None:
            raise EOFError("the connection was closed")
        return message

    def close(self) -> None:
        """The run is over; who still receives ends."""
        self.hub.forget(self.number)
        for peer in self.members:
            self.lost(peer)

    def arrived(self, peer: int, message: Message) -> None:
        """A message has come for this run; one of a process that has no part in it is dropped."""
        if peer in self.place:
            self.arriving[self.place[peer]].put(message)

    def lost(self, peer: int) -> None:
        """A process has gone."""
        if peer in self.place:
            self.arriving[self.place[peer]].put(None)


def place_towards(host: str) -> str:
    """The address of this machine by which it reaches a host, and is reached from there."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except (OSError, IndexError):
        return socket.gethostname()
