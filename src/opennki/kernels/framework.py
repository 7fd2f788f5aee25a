"""FrameworkKernel: from a call with a framework's tensors to the payload of a custom call.

A framework integrator implements three hooks: `is_framework_tensor`, `map_framework_tensor` and
`translate_to_neuron_dtype`. Everything else (tracing, encoding, aliases, the cache of specialisations) is here.
Source: seeds "FrameworkKernel: The Custom-Call Emitter".
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from threading import RLock
from typing import Any, NamedTuple

import numpy as np

from opennki import settings
from opennki.errors import NkiTypeError
from opennki.ir.nodes import Kernel
from opennki.ir.results import CallResult, call_results
from opennki.isa import dtypes
from opennki.kernels.base import TraceKernel
from opennki.kernels.options import compile_opts
from opennki.kernels.payload import encode_backend_config
from opennki.kernels.speckey import captured, return_shape_dtype_or_hashable
from opennki.trace.kernel import DeclTensor, Options, Output, map_arrays, rebuild, trace_bound
from opennki.trace.mac import matmul_mac_count

MAX_SPECIALISATIONS = 512
"""Specialisations that a kernel keeps; the least recently used is forgotten."""


class ReturnType(NamedTuple):
    """dtype (NumPy) and shape of one result of the custom call."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class DumpedConfig(NamedTuple):
    """What `dump_config` returns: the payload, and the names of the operands and results of the custom call."""

    backend_config: str
    input_names: list[str]
    output_names: list[str]


@dataclass(frozen=True, slots=True, eq=False)
class TraceResult:
    """Everything about one specialisation of a kernel.

    operand_output_aliases: (operand, output) pairs that share a buffer. return_types: one for each result of the
    custom call. payload: dumped_config as bytes. kernel_return: the kernel's own return value, with `Output` places
    in it. result_is_sequence: it is a tuple or list. ir: the traced kernel. operands: shape and dtype of each
    operand.
    """

    dumped_config: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    operand_output_aliases: tuple[tuple[int, int], ...]
    constant_values: dict[str, Any]
    return_types: tuple[ReturnType, ...]
    has_collectives: bool
    kernel_return: Any
    result_is_sequence: bool
    func_name: str
    ir: Kernel
    operands: tuple[DeclTensor, ...]
    results: tuple[CallResult, ...] = field(default=())
    payload: bytes = b""

    @property
    def has_prints(self) -> bool:
        """Whether the kernel prints, so that a call of it must happen even where nobody uses its results."""
        return prints(self.ir)

    def assemble(self, values: list[Any]) -> Any:
        """The kernel's return value, with the results of the custom call in their places. A kernel that returns nothing
        gives the new values of the inputs that it writes: one, or a tuple of them."""
        if self.ir.outputs:
            return rebuild(self.kernel_return, values)
        return values[0] if len(values) == 1 else tuple(values)


def prints(kernel: Kernel) -> bool:
    """Whether a kernel has an instruction that acts outside of its tensors (device_print)."""
    from opennki.ir.nodes import Instr, statements
    from opennki.isa.declare import ISA

    return any(isinstance(s, Instr) and ISA[s.op].family == "print" for s in statements(kernel.body))


def between_ranks(kernel: Kernel) -> bool:
    """Whether a kernel has an instruction in which ranks meet."""
    from opennki.ir.nodes import Instr, statements
    from opennki.isa.declare import ISA
    from opennki.isa.meeting import BETWEEN_RANKS

    return any(isinstance(s, Instr) and ISA[s.op].meets in BETWEEN_RANKS for s in statements(kernel.body))


class SpecialisationCache(OrderedDict[Any, TraceResult]):
    """The most recently used specialisations, and the lock under which one is made."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = RLock()

    def get_or_make(self, key: Any, make: Callable[[], TraceResult]) -> TraceResult:
        """The entry of a key, made once however many threads ask for it."""
        with self.lock:
            found = self.get(key)
            if found is None:
                found = self[key] = make()
                while len(self) > MAX_SPECIALISATIONS:
                    self.popitem(last=False)
            else:
                self.move_to_end(key)
            return found


class FrameworkKernel(TraceKernel):
    """Base of framework bindings. NKI kernels are XLA custom calls in HLO; this class makes their payload.

    func: the kernel function. func_name: its name in the payload. grid: the launch grid. enable_cache: keep
    specialisations, on the attribute `__neuron_kernel_interface_kernel_cache__`.
    """

    mode = "framework"

    def __init__(
        self,
        func: Callable[..., Any],
        func_name: str | None = None,
        grid: Any = None,
        enable_cache: bool = True,
        *,
        cache: SpecialisationCache | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(func, grid, **kwargs)
        if func_name:
            self.func_name = func_name
        self.enable_cache = enable_cache
        self.__neuron_kernel_interface_kernel_cache__ = self.new_cache() if cache is None else cache

    @staticmethod
    def new_cache() -> SpecialisationCache:
        """An empty cache of specialisations."""
        return SpecialisationCache()

    @classmethod
    def of_generic(cls, kernel: TraceKernel, cache: Any) -> FrameworkKernel:
        """The kernel of this class for a kernel of nki.jit."""
        return cls(kernel.func, kernel.func_name, kernel.grid, cache=cache, **kernel.kwargs)

    # ---- the three hooks of an integrator ----
    def is_framework_tensor(self, t: Any) -> bool:
        """Whether an argument is a tensor of the framework; anything else is a compile-time constant."""
        raise NotImplementedError(f"{type(self).__name__}.is_framework_tensor")

    def map_framework_tensor(self, t: Any) -> tuple[tuple[int, ...], Any]:
        """(shape, dtype) of a tensor, the dtype as the framework has it."""
        raise NotImplementedError(f"{type(self).__name__}.map_framework_tensor")

    def translate_to_neuron_dtype(self, dtype: Any) -> Any:
        """A dtype of the framework as a name ("bfloat16"), an nl dtype or a NumPy dtype."""
        raise NotImplementedError(f"{type(self).__name__}.translate_to_neuron_dtype")

    # ---- config ----
    def dump_config(self, *args: Any, **kwargs: Any) -> DumpedConfig:
        """(backend_config, input names, output names) for these arguments.

        This is still used by legacy framework code: its signature does not change.
        """
        result = self.dump_config_with_boundargs(self.bind(args, kwargs))
        return DumpedConfig(result.dumped_config, list(result.input_names), list(result.output_names))

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
        """A call bound to the kernel's signature, defaults applied. Errors: NkiTypeError."""
        signature = _signature(self.func)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as exc:
            raise NkiTypeError(f"{self.func_name}: {exc}", rule=f"the signature is {signature}") from None
        bound.apply_defaults()
        return bound

    def dump_config_with_boundargs(self, boundargs: inspect.BoundArguments) -> TraceResult:
        """Everything about the specialisation for bound arguments, from the cache or traced.

        Errors: NkiError at the user's line; err_nki_param_not_hashable for a constant that cannot be a key.
        """
        return self.specialise(self._map_args(boundargs)[0])

    def resolve(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[TraceResult, list[Any]]:
        """What a binding calls: the specialisation for a call, and the tensors among its arguments in the order of the
        kernel's operands. Errors: those of `bind` and `dump_config_with_boundargs`."""
        mapped, tensors = self._map_args(self.bind(args, kwargs))
        return self.specialise(mapped), tensors

    def specialise(self, mapped: dict[str, Any]) -> TraceResult:
        """The specialisation for arguments by name, whose tensors are DeclTensors."""
        options = self.options()  # target and settings are resolved before the cache is asked
        if not self.enable_cache:
            return self._trace(mapped, options)
        cache: SpecialisationCache = self.__neuron_kernel_interface_kernel_cache__
        return cache.get_or_make(self._generate_hash_key(mapped, options), lambda: self._trace(mapped, options))

    def _map_args(self, boundargs: inspect.BoundArguments) -> tuple[dict[str, Any], list[Any]]:
        """Arguments by name with tensors as DeclTensors, and the tensors in the order of the kernel's operands."""
        tensors: list[Any] = []

        def declared(tensor: Any, _: str) -> DeclTensor:
            tensors.append(tensor)
            return self._map_to_decltensor(tensor)

        arguments = boundargs.arguments.items()
        return {name: map_arrays(value, name, declared, self.is_framework_tensor) for name, value in arguments}, tensors

    def _map_to_decltensor(self, tensor: Any) -> DeclTensor:
        shape, dtype = self.map_framework_tensor(tensor)
        return DeclTensor(tuple(int(n) for n in shape), _neuron_dtype(self.translate_to_neuron_dtype(dtype), dtype))

    def _generate_hash_key(self, mapped: dict[str, Any], options: Options) -> Any:
        return (
            tuple((name, return_shape_dtype_or_hashable(value, name)) for name, value in mapped.items()),
            options.grid,
            options.cores,
            options.target_name,
            options.is_fallback,
            options.flags,
            options.old_style,
            compile_opts(self),
            settings.raw(*settings.NUMERICS),
            captured(self.func),
        )

    def _trace(self, mapped: dict[str, Any], options: Options) -> TraceResult:
        bound = inspect.BoundArguments(_signature(self.func), OrderedDict(mapped))
        kernel, operands = trace_bound(self.func, bound, options, self.func_name)
        constants = {name: value for name, value in mapped.items() if not _has_tensor(value)}
        macs = matmul_mac_count(kernel)
        is_sequence = isinstance(kernel.returns, (list, tuple)) if kernel.outputs else len(kernel.written_params) > 1
        config = encode_backend_config(
            kernel,
            func_name=self.func_name,
            grid=options.grid,
            matmul_mac_count=macs,
            platform_target=options.target_name,
            platform_target_is_fallback=options.is_fallback,
            opts=self._opts(options),
            constant_values=constants,
            result_is_sequence=is_sequence,
        )
        results = call_results(kernel)
        return TraceResult(
            config,
            tuple(p.name for p in kernel.params),
            tuple(r.name for r in results),
            self.generate_operand_output_aliases(results),
            constants,
            self.translate_return_types(results),
            kernel.has_collectives,
            kernel.returns if kernel.outputs else tuple(Output(i) for i in range(len(results))),
            is_sequence,
            self.func_name,
            kernel,
            tuple(operands),
            tuple(results),
            config.encode("ascii"),
        )

    def _opts(self, options: Options) -> dict[str, Any]:
        """The options as the payload has them."""
        return {**asdict(compile_opts(self)), "experimental_flags": sorted(options.flags)}

    def translate_return_types(self, results: list[CallResult]) -> tuple[ReturnType, ...]:
        """dtype and shape of each result of the custom call."""
        return tuple(ReturnType(public_dtype(r.dtype), r.shape) for r in results)

    @staticmethod
    def generate_operand_output_aliases(results: list[CallResult]) -> tuple[tuple[int, int], ...]:
        """(operand, output) of every result that is the new value of an operand."""
        return tuple((r.operand, i) for i, r in enumerate(results) if r.operand is not None)


class UnifiedKernel(FrameworkKernel):
    """The payload for anything that has a shape and a dtype that NumPy knows: arrays, or mere descriptions of them.

    For tools that need the custom call and no framework: `UnifiedKernel(f).dump_config(array)`.
    """

    mode = "unified"

    def is_framework_tensor(self, t: Any) -> bool:
        return isinstance(t, DeclTensor) or (
            hasattr(t, "shape") and hasattr(t, "dtype") and not isinstance(t, (np.generic, type)) and isinstance(t.shape, tuple)
        )

    def map_framework_tensor(self, t: Any) -> tuple[tuple[int, ...], Any]:
        return tuple(t.shape), t.dtype

    def translate_to_neuron_dtype(self, dtype: Any) -> Any:
        return dtype


class LegacyFrameworkKernel(UnifiedKernel):
    """The same for kernels of the older style, whose outputs are parameters that they write and do not return."""

    mode = "legacy"

    @property
    def old_style(self) -> bool:
        return True


def public_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype in which users see a tensor of a canonical dtype name."""
    return np.dtype(bool) if name == "bool" else dtypes.storage(name)


def _neuron_dtype(value: Any, shown: Any) -> str:
    try:
        return dtypes.canonical(value)
    except (TypeError, ValueError):
        raise NkiTypeError(
            f"a tensor of dtype {shown}", rule=f"a kernel takes tensors of {', '.join(sorted(dtypes.NAMES))}", fix="convert it first"
        ) from None


def _has_tensor(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_tensor, value))
    if isinstance(value, dict):
        return any(map(_has_tensor, value.values()))
    return isinstance(value, DeclTensor)


@lru_cache(maxsize=4096)
def _signature(func: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(func)


__all__ = [
    "DumpedConfig",
    "FrameworkKernel",
    "LegacyFrameworkKernel",
    "ReturnType",
    "TraceResult",
    "UnifiedKernel",
]
