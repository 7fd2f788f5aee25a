"""Shortcuts that a body may take where it knows the values of its operands.

A body is also the meaning of an instruction where operands have no values yet (`bind.inline` expands kernels into a JAX program). What
it computes there must not depend on a shortcut that only the values can justify.
"""
from __future__ import annotations

from typing import Any


def certain(truth: Any) -> bool:
    """Whether all truth values hold, and this is known: False where there are no values yet.

    A body may compute the same result in another way where it is True.
    """
    return bool(truth.all())
