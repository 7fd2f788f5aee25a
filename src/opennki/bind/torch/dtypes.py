"""dtypes of torch and of kernels. Source: seeds "PyTorch-XLA bridge" (translate_to_neuron_dtype and its override)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from opennki import settings
from opennki.errors import UNKNOWN, NkiTypeError
from opennki.isa import dtypes
from opennki.kernels.framework import public_dtype

# torch has no dtypes of its own for these; the bits are held by one of the same size
_CONTAINERS = {"float8_e4m3": "float8_e4m3fn", "tfloat32": "float32", "float32r": "float32"}

NEURON_OF: dict[Any, str] = {
    getattr(torch, name): name for name in dtypes.NAMES if name not in _CONTAINERS and isinstance(getattr(torch, name, None), torch.dtype)
}
"""torch dtype -> canonical name."""

CONTAINER_OF: dict[str, Any] = {
    name: getattr(torch, _CONTAINERS.get(name, name)) for name in dtypes.NAMES if hasattr(torch, _CONTAINERS.get(name, name))
}
"""Canonical name -> the torch dtype whose tensors hold its bits."""

NUMPY_OF: dict[str, Any] = {name: public_dtype(name) for name in dtypes.NAMES}


@lru_cache(maxsize=64)
def _overrides(table: tuple[str, ...]) -> dict[Any, str]:
    found: dict[Any, str] = {}
    for pair in table:
        source, _, target = pair.partition("=")
        dtype = getattr(torch, source, None)
        if not isinstance(dtype, torch.dtype) or target not in dtypes.NAMES or dtype.itemsize != dtypes.itemsize(target):
            raise NkiTypeError(
                f"OPENNKI_TORCH_DTYPES maps {source} to {target}", loc=UNKNOWN,
                rule=f"it maps dtypes of torch to names of the same size among {', '.join(dtypes.NAMES)}",
            )
        found[dtype] = target
    return found


def neuron_name(dtype: Any) -> Any:
    """The canonical name of a torch dtype, as OPENNKI_TORCH_DTYPES or the table has it; other dtypes as they are."""
    table = settings.current().torch_dtypes
    override = _overrides(table).get(dtype) if table else None
    return override or NEURON_OF.get(dtype, dtype)


def checked_name(dtype: Any) -> str:
    """The canonical name of a torch dtype. Errors: NkiTypeError for one that kernels do not have."""
    name = neuron_name(dtype)
    if not isinstance(name, str):
        raise NkiTypeError(f"a tensor of dtype {dtype}", rule=f"a kernel takes tensors of {', '.join(sorted(dtypes.NAMES))}",
                           fix="convert it first")
    return name


def result_dtype(name: str, kernel: str) -> Any:
    """The torch dtype of a result. Errors: NkiTypeError for one whose values torch would read wrongly."""
    dtype = CONTAINER_OF.get(name)
    table = settings.current().torch_dtypes
    if dtype is not None and (name != "float8_e4m3" or (table and _overrides(table).get(dtype) == name)):
        return dtype
    eight = name == "float8_e4m3"
    raise NkiTypeError(
        f"{kernel} returns a tensor of dtype {name}, which torch does not have", loc=UNKNOWN,
        rule="results are of a dtype that torch has",
        why="float8_e4m3 (largest value 240) and torch.float8_e4m3fn (448) read the same bits as other numbers" if eight else "",
        fix="return another dtype" + (", such as nl.float8_e4m3fn, or set OPENNKI_TORCH_DTYPES=float8_e4m3fn=float8_e4m3 to keep the "
                                      "bits of one in tensors of the other" if eight else ""),
    )
