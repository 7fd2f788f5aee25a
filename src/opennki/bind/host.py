"""Payloads run on this machine: what the CPU handler of every bridge calls.

A payload is decoded, verified and planned once; the plan is kept under the payload's bytes, bounded in number and
size. Arrays are the framework's own buffers: nothing is copied that the kernel does not change.
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from threading import Lock
from typing import Any

import numpy as np

from opennki import settings
from opennki.errors import UNKNOWN, NkiTypeError, NkiValueError
from opennki.execute.executor import native
from opennki.interpret.prepared import Prepared
from opennki.ir.admit import legal
from opennki.isa import dtypes
from opennki.kernels.framework import between_ranks
from opennki.kernels.payload import Payload, decode_backend_config

MAX_KERNELS = 256
MAX_PLANS = 8  # of a kernel, for different settings
MAX_BYTES = 256 << 20  # of payloads that are kept

_settings = settings.reader("call_checks", "seed", *settings.NUMERICS)


class HostKernel:
    """A decoded payload, ready to run on buffers."""

    __slots__ = ("digest", "inputs", "lock", "meets", "outputs", "payload", "plans")

    def __init__(self, payload: Payload, digest: bytes = b"") -> None:
        """`digest`: of the payload's bytes."""
        self.payload, self.digest = payload, digest
        kernel = payload.kernel
        self.inputs = [_Buffer(p.name, p.shape, p.dtype) for p in kernel.params]
        self.outputs = [_Buffer(r.name, r.shape, r.dtype) for r in payload.results]
        self.meets = between_ranks(kernel)
        self.plans: dict[Any, tuple[Prepared, int]] = {}
        self.lock = Lock()

    def plan(self) -> tuple[Prepared, int]:
        """The kernel planned for the settings as they are now, and the seed."""
        key = _settings()
        plan = self.plans.get(key)
        if plan is None:
            current = settings.current()
            with self.lock:
                plan = self.plans.get(key)
                if plan is None:
                    with legal(self.payload.func_name, "this payload"):
                        made = Prepared(self.payload.kernel, current.call_checks, native=partial(native, payload=self.digest))
                    self.fits(made)
                    if len(self.plans) >= MAX_PLANS:
                        self.plans.clear()
                    plan = self.plans[key] = made, current.seed
        return plan

    def fits(self, plan: Prepared) -> None:
        """Refuse a kernel whose own tensors cannot be in the memory of this machine, before they are made. Errors:
        NkiValueError."""
        memory = physical_memory()
        own = [a for a in plan.tape.layout.allocs if a.kind == "local"]
        sizes = {a: a.size * dtypes.itemsize(a.dtype) for a in own}
        # those in shared HBM live as long as the call; of the others at least the largest one is there at once
        needed = sum(n for a, n in sizes.items() if a.space == "shared_hbm") + max(
            (n for a, n in sizes.items() if a.space != "shared_hbm"), default=0)
        if memory and needed > memory:
            raise NkiValueError(
                f"{self.payload.func_name}: its tensors need {needed >> 20} MiB, and this machine has {memory >> 20} MiB of memory",
                loc=UNKNOWN, rule="a kernel that runs on this machine fits into its memory", fix="call the kernel with smaller arrays",
            )

    def run(self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> None:
        """Run on row-major buffers; results are written into `outputs`, which may share memory with the inputs that
        they alias. Errors: NkiTypeError for a wrong number, shape or dtype; NkiError of the kernel at its line."""
        prepared, seed = self.plan()
        prepared.run(self.fitted("operand", self.inputs, inputs), self.fitted("result", self.outputs, outputs), seed=seed)

    def fitted(self, what: str, wanted: list[_Buffer], given: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The buffers in storage dtypes, after a check of number, shape and dtype."""
        if len(wanted) != len(given):
            raise NkiTypeError(
                f"{self.payload.func_name}: the call has {len(given)} {what}s, and the kernel in its payload {len(wanted)}",
                loc=UNKNOWN, rule="a custom call has the operands and results that its payload names",
            )
        return [g if g.dtype is w.public and w.same and g.shape == w.shape else w.fit(what, g) for w, g in zip(wanted, given)]


class _Buffer:
    """Shape and dtype of an operand or result."""

    __slots__ = ("dtype", "name", "public", "same", "shape", "view")

    def __init__(self, name: str, shape: tuple[int, ...], dtype: str) -> None:
        self.name, self.shape, self.dtype = name, shape, dtype
        self.view = dtypes.storage(dtype)
        self.public = np.dtype(bool) if dtype == "bool" else self.view
        self.same = self.public == self.view

    def fit(self, what: str, array: np.ndarray) -> np.ndarray:
        given = array.dtype
        if array.shape != self.shape or (given is not self.public and given != self.public):
            raise NkiTypeError(
                f"{what} {self.name!r} is {array.dtype.name}{list(array.shape)}, and {self.public.name}{list(self.shape)} in the payload",
                loc=UNKNOWN, rule="a custom call has the operands and results that its payload names",
                fix="call the kernel again for these shapes: a payload is for one set of them",
            )
        return array if self.same else array.view(self.view)


def physical_memory() -> int:
    """Bytes of memory of this machine; 0 where that is not known."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


_kernels: OrderedDict[bytes, HostKernel] = OrderedDict()
_lock = Lock()


def host_kernel(payload: bytes) -> HostKernel:
    """The kernel of a payload, decoded once. Errors: NkiParseError, NkiError for IR that is not legal."""
    with _lock:
        found = _kernels.get(payload)
        if found is not None:
            _kernels.move_to_end(payload)
            return found
    made = HostKernel(decode_backend_config(payload), hashlib.sha256(payload).digest())
    with _lock:
        found = _kernels.setdefault(payload, made)
        while len(_kernels) > MAX_KERNELS or (sum(map(len, _kernels)) > MAX_BYTES and len(_kernels) > 1):
            _kernels.popitem(last=False)
    return found


def run_payload(payload: bytes, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> None:
    """Run the kernel of a payload on buffers. Errors: as HostKernel.run, and NkiParseError for what is no payload."""
    host_kernel(payload).run(inputs, outputs)
