"""Kernels in pickles and deep copies: by the name of their function, as Python pickles functions.

A decorated function is found under its name as the kernel, so that is where `restore` looks. What a kernel has cached stays behind.
"""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable
from functools import reduce
from typing import Any


def function_at(module: str, qualname: str) -> Any:
    """The plain function at a name, out of the kernels that decorate it; None where there is none."""
    try:
        found = reduce(getattr, qualname.split("."), importlib.import_module(module))
    except (ImportError, AttributeError):
        return None
    seen = set()
    while isinstance(getattr(found, "func", None), Callable) and id(found) not in seen:  # type: ignore[arg-type]
        seen.add(id(found))
        found = found.func
    return found


def reduced(kernel: Any, cls: type, state: dict[str, Any]) -> tuple[Any, ...]:
    """What `__reduce__` of a kernel returns. Errors: PicklingError for a function that its name does not find."""
    func = kernel.func
    module, qualname = getattr(func, "__module__", None), getattr(func, "__qualname__", None)
    if not module or not qualname or function_at(module, qualname) is not func:
        raise pickle.PicklingError(
            f"the kernel {kernel.func_name} cannot be pickled: {module}.{qualname} does not find its function. Define the kernel at the "
            "top of a module, as for a function that is pickled"
        )
    return restore, (cls, module, qualname, state)


def restore(cls: type, module: str, qualname: str, state: dict[str, Any]) -> Any:
    """The kernel of a pickle. Errors: UnpicklingError where the function is gone."""
    func = function_at(module, qualname)
    if func is None:
        raise pickle.UnpicklingError(f"there is no kernel {module}.{qualname} here")
    return cls.of_state(func, state)  # type: ignore[attr-defined]
