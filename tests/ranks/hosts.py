"""Two hosts on this machine: network namespaces with a cable between them where the system allows that, else two loopback addresses."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import uuid
from dataclasses import dataclass

NAMESPACES = "two network namespaces joined by a veth pair"
LOOPBACK = "two loopback addresses (network namespaces are not possible here: they need root and iproute2)"


@dataclass(frozen=True)
class Host:
    """Where processes run: words that stand before a command, the address, and the network interface that has it."""

    prefix: tuple[str, ...]
    address: str
    interface: str


@contextlib.contextmanager
def two_hosts():
    """(what they are, first host, second host)."""
    tag = uuid.uuid4().hex[:6]
    names = [f"onki{tag}a", f"onki{tag}b"]
    try:
        made = _namespaces(names)
        if made:
            yield (NAMESPACES, *(Host(("ip", "netns", "exec", name), f"10.87.65.{n}", name) for n, name in enumerate(names, 1)))
        else:
            yield (LOOPBACK, Host((), "127.0.0.1", "lo"), Host((), "127.0.0.2", "lo"))
    finally:
        for name in names:
            if shutil.which("ip"):
                subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _namespaces(names):
    if not shutil.which("ip") or os.geteuid():
        return False
    a, b = names
    commands = [["ip", "netns", "add", a], ["ip", "netns", "add", b],
                ["ip", "link", "add", a, "netns", a, "type", "veth", "peer", "name", b, "netns", b]]
    for n, name in enumerate(names, 1):
        inside = ["ip", "-n", name]
        commands += [[*inside, "addr", "add", f"10.87.65.{n}/24", "dev", name], [*inside, "link", "set", name, "up"],
                     [*inside, "link", "set", "lo", "up"]]
    return all(subprocess.run(command, capture_output=True, check=False).returncode == 0 for command in commands)


def say(capsys, what):
    """Tell which of the two it was, whatever pytest hides."""
    with capsys.disabled():
        print(f"\n*** two hosts: {what} ***")
