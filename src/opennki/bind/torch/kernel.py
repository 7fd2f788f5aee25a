"""PyTorchXLAKernel: a call of a kernel with torch tensors. On the CPU it runs one of the custom ops of `ops`, on an XLA device
it becomes the custom call of PyTorch/XLA; the devices of the tensors decide. Source: seeds "PyTorch-XLA bridge".
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from operator import is_
from typing import Any

import numpy as np
import torch

from opennki import settings
from opennki.bind.torch import dtypes, ending, ops
from opennki.errors import UNKNOWN, NkiTypeError, NkiValueError
from opennki.kernels.base import TraceKernel, leaves
from opennki.kernels.framework import FrameworkKernel, TraceResult
from opennki.kernels.speckey import watcher
from opennki.kernels.torch_arrays import to_torch
from opennki.trace.kernel import DeclTensor, map_arrays

_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_PLAIN = frozenset({int, bool, str, type(None)})
DENSE, _keys_of = ops.DENSE, ops.keys_of
_KEPT_CALLS = 1024
_settings = settings.reader("platform_target_override", "torch_dtypes", "eager", *settings.NUMERICS)

_rules: weakref.WeakKeyDictionary[Callable[..., Any], ops.Rule] = weakref.WeakKeyDictionary()
_rules_given = 0  # how often one was given


class Launch:
    """A specialisation, ready to be called with the tensors of a call.

    order: positions of the operands among those tensors. seen: what the kernel takes from around it. rule: its derivative, the one of
    `rules` rules given.
    """

    __slots__ = ("order", "payload", "plan", "prints", "result", "rule", "rules", "seen")

    def __init__(self, result: TraceResult, order: list[int] | None, rule: ops.Rule | None, seen: tuple[Any, ...]) -> None:
        for r in result.results:
            dtypes.result_dtype(r.dtype, result.func_name)
        self.result, self.order, self.rule, self.seen, self.rules = result, order, rule, seen, _rules_given
        self.payload = result.dumped_config
        self.plan = ops.plan_of(self.payload)
        self.prints = result.has_prints
        if rule is not None:
            ops.use_rule(self.payload, rule, result.constant_values)

    def __call__(self, tensors: list[Any], plain: bool = False) -> Any:
        """Run on the operands and assemble what the kernel returns. plain: the tensors are all of `ops.DENSE`."""
        if self.order is not None:
            tensors = [tensors[i] for i in self.order]
        plain = plain and ops.unseen()
        if self.plan.written:
            return self.result.assemble(self.written(tensors, plain))
        if plain:
            return self.result.assemble(ops.invoke_plain(self.plan, tensors))
        return self.result.assemble(ops.invoke(tensors, self.payload, self.prints))

    def written(self, tensors: list[Any], plain: bool) -> list[Any]:
        """The results of a kernel that writes parameters: those tensors themselves, changed, and the new ones."""
        plan = self.plan
        if tensors[plan.written[0]].device.type == "xla" or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
            # new values, with a history where one is wanted, copied into the tensors as by any in-place operation of torch
            values: list[Any] = list(ops.invoke_plain(plan, tensors) if plain else ops.invoke(tensors, self.payload, self.prints))
            for operand, home in zip(plan.written, plan.homes, strict=True):
                values[home] = tensors[operand].copy_(values[home])
            return values
        values = [None] * len(plan.results)
        for operand, home in zip(plan.written, plan.homes, strict=True):
            values[home] = tensors[operand]
        if plain:
            makers = plan.makers or plan.made()
            for i in plan.fresh:
                new, shape, strides = makers[i]
                values[i] = new(shape, strides)
            ops.apply_into(plan, tensors, values)
            return values
        like = tensors[plan.written[0]]  # new tensors of its kind: batched in vmap
        for i in plan.fresh:
            spec = plan.results[i]
            values[i] = like.new_empty(spec.shape, dtype=spec.dtype)
        ops.call_into([tensors[i] for i in plan.rest], values, self.payload)
        return values


class PyTorchXLAKernel(FrameworkKernel):
    """A kernel in PyTorch programs: eager, under torch.compile, torch.export, torch.func, autograd.

    A parameter that the kernel writes is changed in place, as by an operation of torch whose name ends in an underscore, and is what
    the kernel returns for it. A kernel that returns nothing gives the tensors that it writes. NumPy arrays among the
    arguments are tensors too.
    """

    mode = "torchxla"

    def __init__(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(func, *args, **kwargs)
        self._launches: dict[Any, Launch] = {}
        self._seen = watcher(self.func)

    def copied(self) -> None:
        self._launches = {}

    def is_framework_tensor(self, t: Any) -> bool:
        return isinstance(t, (torch.Tensor, DeclTensor))

    def map_framework_tensor(self, t: Any) -> tuple[tuple[int, ...], Any]:
        return t.shape, t.dtype

    def translate_to_neuron_dtype(self, dtype: Any) -> Any:
        return dtypes.neuron_name(dtype)

    def platform_target(self) -> str | None:
        return self._use_existing_target_or_retrieve_from_torch_neuronx()

    def _use_existing_target_or_retrieve_from_torch_neuronx(self) -> str | None:
        """The target that the call names, else the one of NEURON_PLATFORM_TARGET_OVERRIDE, else that of the chip, which the real
        torch_neuronx knows where a program has imported it."""
        existing = super().platform_target()
        if existing or settings.current().platform_target_override:
            return existing
        ask = getattr(sys.modules.get("torch_neuronx.utils"), "get_platform_target", None)
        return None if ask is None or str(ask.__module__).startswith("opennki.") else str(ask())

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the kernel, or put it into the program that is being made. Errors: NkiError at the kernel's line."""
        ending.enter()
        try:
            return self._call(args, kwargs)
        finally:
            ending.leave()

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key: list[Any] = [_settings()]
        tensors: list[Any] = []
        plain = True
        for value in (*args, *kwargs, None, *kwargs.values()) if kwargs else args:
            kind = type(value)
            if kind in _TENSORS:
                if not DENSE or _keys_of(value).raw_repr() not in DENSE:
                    if not value.is_cpu:
                        return self._call_any(args, kwargs)
                    plain = False
                key.append(value.shape)
                key.append(value.dtype)
                tensors.append(value)
            elif kind in _PLAIN:
                key.append(kind)
                key.append(value)
            elif kind is float:
                key.append(value.hex())
            else:
                return self._call_any(args, kwargs)
        return self._launch_of(tuple(key), args, kwargs)(tensors, plain)

    def _launch_of(self, key: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The launch for a key of plain arguments."""
        launch = self._launches.get(key)
        if launch is None and settings.current().eager:
            return lambda tensors, plain: TraceKernel.call(self, args, kwargs)
        if launch is None or not all(map(is_, launch.seen, self._seen())):
            launch = self.launch(*_declared(args, kwargs))
            if self.enable_cache:
                if len(self._launches) >= _KEPT_CALLS:
                    self._launches.clear()
                self._launches[key] = launch
        elif launch.rules != _rules_given:
            launch = self._launches[key] = Launch(launch.result, launch.order, _rules.get(self.func), launch.seen)
        return launch

    def _call_any(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same for arguments of every kind and tensors on every device."""
        args, kwargs = _from_numpy((args, kwargs))
        tensors = [value for value in leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        places = {t.device.type for t in tensors}
        if "xla" in places:
            from opennki.bind.torch_xla import bridge  # registers the ops of XLA tensors

            bridge.one_device(self.func_name, tensors)
        elif not places <= {"cpu", "meta"}:
            raise NkiValueError(
                f"{self.func_name} is called with tensors on {', '.join(sorted(places))}", loc=UNKNOWN,
                rule="kernels run on tensors of the CPU, or of an XLA device", fix="move the tensors with .cpu()")
        return self.launch(*_declared(args, kwargs))(tensors)

    def launch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
        """The specialisation for a call whose tensors are DeclTensors, each an object of its own."""
        seen = self._seen()
        given = [value for value in leaves((args, kwargs)) if isinstance(value, DeclTensor)]
        place = {id(value): i for i, value in enumerate(given)}
        mapped, operands = self._map_args(self.bind(args, kwargs))
        order = [place[id(operand)] for operand in operands]
        result = self.specialise(mapped)
        return Launch(result, None if order == list(range(len(given))) else order, _rules.get(self.func), seen)


def _from_numpy(value: Any) -> Any:
    """The value with each NumPy array in it as a tensor on the same memory."""
    return map_arrays(value, "", lambda array, _: to_torch(array), lambda v: isinstance(v, np.ndarray))


def _declared(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with each tensor as a DeclTensor of its own."""

    def declare(tensor: Any, _: str) -> DeclTensor:
        return DeclTensor(tuple(int(n) for n in tensor.shape), dtypes.checked_name(tensor.dtype))

    def is_tensor(value: Any) -> bool:
        return isinstance(value, torch.Tensor)

    return (tuple(map_arrays(v, "", declare, is_tensor) for v in args),
            {name: map_arrays(v, "", declare, is_tensor) for name, v in kwargs.items()})


def register_autograd(kernel: Any, backward: Callable[..., Any], *, setup_context: Callable[..., None] | None = None) -> None:
    """Give a kernel a derivative, which may be a kernel too. The arguments are those of `torch.library.register_autograd`.

    kernel: of nki.jit, with or without a grid. backward(ctx, *gradients): one gradient for each result in; one for each operand, in
    the order of the kernel's parameters, or None, out. setup_context(ctx, inputs, output): keeps what backward needs,
    `inputs` being the operands and `output` the results; without it, ctx.saved_tensors has all of both. ctx.constants has the
    arguments that are no tensors. A second rule takes the place of the first. Errors: NkiTypeError.
    """
    if not isinstance(kernel, TraceKernel):
        raise NkiTypeError(f"{kernel!r} is no kernel", rule="a derivative belongs to a kernel of nki.jit")
    global _rules_given
    _rules[kernel.func] = ops.Rule(backward, setup_context)
    _rules_given += 1


def rule_of(kernel: Any) -> ops.Rule | None:
    """The derivative that `register_autograd` gave to a kernel."""
    return _rules.get(kernel.func)
