"""Messages over torch.distributed: between machines, started by torchrun, or by whatever initialised its process group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from opennki.ranks import wire

SECONDS = 3600.0  # that a rank may compute between two messages


class Gloo:
    """A process group of its own over all processes, so that messages do not meet those of the program."""

    def __init__(self) -> None:
        import datetime

        self.process, self.processes = dist.get_rank(), dist.get_world_size()
        self.group: Any = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=SECONDS))

    def send(self, peer: int, frame: bytes) -> None:
        """Send a frame: its length, then its bytes."""
        try:
            dist.send(torch.tensor([len(frame)]), peer, group=self.group)
            dist.send(torch.frombuffer(bytearray(frame), dtype=torch.uint8), peer, group=self.group)
        except RuntimeError as exc:
            raise OSError(str(exc)) from None

    def receive(self, peer: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """The next message of a peer."""
        size = torch.zeros(1, dtype=torch.int64)
        try:
            dist.recv(size, peer, group=self.group)
            count = int(size)
            if not wire.HEAD.size <= count <= wire.MOST_HEADER + wire.MOST_BODY:
                raise ValueError(f"a message of {count} bytes")
            data = torch.empty(count, dtype=torch.uint8)
            dist.recv(data, peer, group=self.group)
        except RuntimeError as exc:
            raise EOFError(str(exc)) from None
        frame = memoryview(data.numpy())
        text, body = wire.lengths(bytes(frame[: wire.HEAD.size]))
        if text + body + wire.HEAD.size != count:
            raise ValueError(f"a message of {count} bytes whose header says {text} + {body}")
        start = wire.HEAD.size + text
        return wire.decode(bytes(frame[wire.HEAD.size : start]), frame[start:])

    def close(self) -> None:
        """The group belongs to torch.distributed, which ends it."""
