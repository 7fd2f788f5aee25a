"""The PyTorch API of current Neuron releases, on the ops here: `nki_op` and `wrap_nki` of `torch_neuronx`.

Source: reference/bindings.md B5; the public torch-neuronx documentation of custom NKI operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from opennki.errors import UNKNOWN, NkiTypeError
from opennki.kernels.base import TraceKernel
from opennki.kernels.generic import GenericKernel


def nki_op(name: str, *, mutates_args: str | Iterable[str]) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: a function that calls kernels as a custom op of torch, `torch.library.custom_op` with the function itself as
    the rule for shapes, since kernels know those of their results.

    name: "namespace::op". mutates_args: names of the parameters that the function changes. The function is annotated, as for
    torch.library.custom_op. Returns the op, with `register_autograd` and `register_vmap`.
    """
    if not isinstance(name, str) or name.count("::") != 1:
        raise NkiTypeError(f"nki_op({name!r})", loc=UNKNOWN, rule='an op has a name of the form "namespace::op"',
                           fix='write @nki_op("my_library::my_op", mutates_args={})')

    def decorate(function: Callable[..., Any]) -> Any:
        op = torch.library.custom_op(name, function, mutates_args=mutates_args)
        op.register_fake(function)
        return op

    return decorate


def wrap_nki(kernel: Any) -> Any:
    """A kernel to be called in PyTorch programs: `wrap_nki(kernel)[grid](...)`, or without a grid. A plain function is jitted first."""
    return kernel if isinstance(kernel, TraceKernel) else GenericKernel(kernel)
