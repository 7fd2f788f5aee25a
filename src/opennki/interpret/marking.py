"""What becomes of the state of elements when an instruction has written them, or a mask has left them out."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from opennki.errors import Loc, NkiIndexError
from opennki.interpret import shadow
from opennki.interpret.views import View

if TYPE_CHECKING:
    from opennki.interpret.steps import Plan

Array = np.ndarray


def mark(machine: Any, plan: Plan, view: View, part: Any, keep: Array | None, taints: list[tuple[Array, bool | None]],
         origin: Loc | None) -> None:
    """Say of the elements that an instruction has written what they are now: written, or masked."""
    state = machine.shadows[view.slot]
    shape = tuple(b - a for a, b in zip(*part, strict=True))
    bad = shadow.spread(plan.decl.family, taints, shape) if taints else None
    if bad is not None and keep is not None:
        bad = bad & keep
    if bad is not None and bad.any() and view.alloc.space not in ("sbuf", "psum", "register"):
        source = next((o.view for o in plan.tracked), view)
        machine.report("masked", shadow.masked_error(source, origin, plan.loc))
        bad = None
    if state is None or view.dynamic is not None:
        return
    part_state = view.shadow(machine, *part)
    if keep is None:
        part_state[...] = shadow.WRITTEN
    else:
        part_state[keep] = shadow.WRITTEN
        excluded = ~keep & (part_state == shadow.NEVER)
        part_state[excluded] = shadow.MASKED
    if bad is not None:
        part_state[bad] = shadow.MASKED
        machine.origins[view.slot] = origin or plan.loc


def excluded(machine: Any, plan: Plan, box: Any) -> None:
    """What a mask excludes was left undefined on purpose: never-written elements become masked ones."""
    for view, _, _ in plan.outputs:
        if machine.shadows[view.slot] is None or view.dynamic is not None:
            continue
        try:
            state = view.shadow(machine)
        except (ValueError, TypeError):
            continue  # the excluded part is outside the tensor
        if view.bounds and not inside(view, machine):
            continue
        state[state == shadow.NEVER] = shadow.MASKED
        machine.origins.setdefault(view.slot, plan.loc)


def inside(view: View, machine: Any) -> bool:
    """Whether an access is inside of its tensor."""
    try:
        view.check(machine.env, (0,) * len(view.shape), view.shape)
    except NkiIndexError:
        return False
    return True
