"""Which checks run, and the plan of a kernel for them."""
from __future__ import annotations

import functools
import os
from dataclasses import dataclass, field
from typing import Any

from opennki import settings
from opennki.collector import collection_put_off
from opennki.errors import NkiError, NkiValueError, warn
from opennki.interpret.machine import FREE_ABOVE, Tape
from opennki.interpret.precision import widened
from opennki.ir.nodes import Kernel
from opennki.passes.allocate import capacity_problems
from opennki.passes.contract import contracted
from opennki.passes.initialised import resized
from opennki.passes.roll import rolled

POLICIES: dict[str, dict[str, str]] = {
    "full": {"read": "error", "masked": "warn", "race": "error", "repeated": "warn", "carried": "warn", "accumulate": "warn",
             "unwritten": "warn", "capacity": "warn"},
}
# both keep the checks that cost nothing at run time
POLICIES["fast"] = POLICIES["off"] = dict.fromkeys(POLICIES["full"], "off")


@dataclass(slots=True)
class Checks:
    """Which checks run and what each does: error, warn or off, by kind (read, masked, race, repeated, carried,
    accumulate, unwritten, capacity)."""

    level: str = "full"
    policy: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, value: Any) -> Checks:
        """From a level name, or a dict of actions by kind on top of the full level."""
        if isinstance(value, Checks):
            return value
        if isinstance(value, dict):
            unknown = set(value) - set(POLICIES["full"])
            if unknown or any(v not in ("error", "warn", "off") for v in value.values()):
                raise NkiValueError(f"checks={value!r}", rule=f"kinds are {', '.join(POLICIES['full'])}, actions error, warn or off")
            return cls("full", {**POLICIES["full"], **value})
        if value not in POLICIES:
            raise NkiValueError(f"checks={value!r}", rule=f"a level is one of {', '.join(POLICIES)}")
        return cls(value, dict(POLICIES[value]))


@functools.cache
def _memory() -> int:
    """Bytes of memory of this machine, 0 where it does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


@collection_put_off()
def tape_of(kernel: Kernel, checks: Checks, roll: bool = False) -> Tape:
    """Plan a kernel (the plan can be run many times); with NKI_PRECISE_FP=0 its low-precision tensors are in float32. `roll`: sequences of
    equal statements are planned as the loops that they were (`passes.roll`), which is what native code wants."""
    if not settings.current().precise_fp:
        kernel = widened(kernel)
    full = [("capacity", e) for e in capacity_problems(kernel)] if checks.policy.get("capacity", "warn") != "off" else []
    kernel = contracted(rolled(kernel) if roll and checks.level != "full" else kernel)
    tape = Tape(kernel, track=any(checks.policy.get(k, "error") != "off" for k in ("read", "masked", "accumulate")),
                races=any(checks.policy.get(k, "error") != "off" for k in ("race", "carried")),
                partial=checks.policy.get("unwritten", "warn") != "off",
                certain=checks.level != "off",
                lazy=checks.level != "full",  # what is known without running costs nothing
                free_above=FREE_ABOVE if checks.level == "full" else max(FREE_ABOVE, _memory() // 4))
    tape.problems += full
    if checks.level == "fast":
        gone = resized(kernel)
        tape.watch = {a for a in tape.unset_reads if a.space not in ("shared_hbm", "register") and a not in gone}
    return tape


class Reporter:
    """What to do with a broken rule: raise, warn once per place, or nothing, by kind of check."""

    def __init__(self, policy: dict[str, str]) -> None:
        self.policy = policy
        self.seen: set[Any] = set()

    def __call__(self, kind: str, error: NkiError) -> None:
        action = self.policy.get(kind, "error")
        if action == "error":
            raise error
        if action == "warn" and (kind, error.loc) not in self.seen:
            self.seen.add((kind, error.loc))
            warn(error)
