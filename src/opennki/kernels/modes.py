"""How a call finds its kernel class: the table of modes, and the detection of frameworks by argument.

A framework registers where its tensors come from and where its kernel class lives. Nothing of it is imported
until an argument of it shows up, or its mode is asked for by name. Source: seeds "Dispatch", compute_mode.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from opennki import settings
from opennki.errors import UNKNOWN, NkiNotYet, NkiTypeError, NkiValueError
from opennki.kernels.base import leaves


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework whose tensors can be arguments of a kernel.

    mode: its name in nki.jit(mode=...). module: its top-level module; where that was never imported, no argument is
    its tensor. is_tensor(module, value): whether a value is one. kernel: "module:Class" of its kernel class, a
    FrameworkKernel; None while there is none. auto: whether mode="auto" looks for its tensors. compiled: the module that
    puts calls into the graphs of torch.compile, see `opennki.kernels.compiling`. types(module): types all of whose objects are its
    tensors and no other framework's, so that calls with them need no second look.
    """

    mode: str
    module: str
    is_tensor: Callable[[ModuleType, Any], bool]
    kernel: str | None
    auto: bool = True
    compiled: str | None = None
    types: Callable[[ModuleType], tuple[type, ...]] = lambda module: ()


_FRAMEWORKS: dict[str, Framework] = {}
_LOCAL: dict[str, str] = {
    "baremetal": "opennki.kernels.numpy_kernel:BaremetalKernel",
    "benchmark": "opennki.kernels.numpy_kernel:BenchmarkKernel",
    "profile": "opennki.kernels.numpy_kernel:ProfileKernel",
    "simulation": "opennki.kernels.numpy_kernel:SimulateKernel",
}


def register_framework(framework: Framework) -> None:
    """Make a framework known to nki.jit. A second one of the same mode takes the place of the first.

    Errors: NkiValueError for a mode that is opennki's own.
    """
    if framework.mode in _LOCAL or framework.mode in ("auto", "trace"):
        raise NkiValueError(f"mode {framework.mode!r} is opennki's own", rule="a framework has a mode name of its own")
    _FRAMEWORKS[framework.mode] = framework
    _known.clear()


def unregister_framework(mode: str) -> None:
    """Forget a framework."""
    _FRAMEWORKS.pop(mode, None)
    _known.clear()


def frameworks() -> list[Framework]:
    """The registered frameworks, first come first asked."""
    return list(_FRAMEWORKS.values())


class _ModeMap(Mapping[str, Any]):
    """Mode name -> kernel class; a class is imported when it is first asked for."""

    def __getitem__(self, mode: str) -> Any:
        place = _LOCAL.get(mode)
        if place is None:
            framework = _FRAMEWORKS.get(mode)
            if framework is None:
                raise KeyError(mode)
            if framework.kernel is None:
                raise NkiNotYet(f"nki.jit(mode={mode!r})")
            place = framework.kernel
        module, _, name = place.partition(":")
        try:
            loaded = sys.modules.get(module)
            return getattr(loaded if loaded is not None else importlib.import_module(module), name)
        except ModuleNotFoundError as exc:
            if mode in _FRAMEWORKS and exc.name and exc.name.split(".")[0] == _FRAMEWORKS[mode].module:
                raise NkiValueError(
                    f"Unknown framework '{exc.name}': it is not installed", rule=f"mode {mode!r} needs the package {exc.name}",
                    fix=f"install {exc.name}, or choose another mode",
                ) from exc
            raise

    def __iter__(self) -> Iterator[str]:
        return iter([*_LOCAL, *_FRAMEWORKS])

    def __len__(self) -> int:
        return len(_LOCAL) + len(_FRAMEWORKS)


_native_mode_map = _ModeMap()


def modes() -> tuple[str, ...]:
    """The names that nki.jit(mode=...) takes."""
    return (*_FRAMEWORKS, *_LOCAL, "trace", "auto")


def check_mode(mode: Any) -> str:
    """The mode, if nki.jit takes it. Errors: NkiTypeError, NkiValueError with the vendor's words."""
    if not isinstance(mode, str):
        raise NkiTypeError(f"mode={mode!r}", rule=f"a mode is one of {', '.join(modes())}")
    if mode not in ("trace", "auto") and mode not in _LOCAL and mode not in _FRAMEWORKS:
        raise NkiValueError(f"mode '{mode}' passed to nki.jit", rule=f"a mode is one of {', '.join(modes())}", loc=None)
    return mode


def is_framework_value(value: Any) -> Framework | None:
    """The framework whose tensor a value is, None for any other value."""
    for framework in _FRAMEWORKS.values():
        module = sys.modules.get(framework.module)
        # a module that is only half imported cannot have made a tensor yet
        if module is not None and framework.is_tensor(module, value):
            return framework
    return None


_CONTAINERS = (list, tuple, dict)
_CONSTANTS = frozenset({int, float, bool, str, type(None)})
_UNSET = (None,)
_simulator = settings.reader("simulator")
_known: dict[tuple[type, ...], Any] = {}  # kernel class by the types of the arguments, where these decide
_KEPT = 1024


def compute_mode(args: tuple[Any, ...], kwargs: dict[str, Any], mode: str = "auto") -> Any:
    """The kernel class for a call: that of the mode, or by the first framework tensor among the arguments, in
    the order of registration (JAX before PyTorch); BaremetalKernel if there is none.

    Errors: NkiValueError for an unknown mode, or a platform that the framework's class refuses.
    """
    if _simulator() != _UNSET and settings.current().simulator:
        return _native_mode_map["simulation"]
    if mode != "auto":
        try:
            return _native_mode_map[mode]
        except KeyError:
            raise NkiValueError(
                f"mode '{mode}' passed to nki.jit", rule=f"a mode is one of {', '.join(modes())}", loc=UNKNOWN
            ) from None
    types = tuple(map(type, args)) if not kwargs else (*map(type, args), *map(type, kwargs.values()))
    known = _known.get(types)
    if known is not None:
        return known
    values: list[Any] | None = None
    for framework in _FRAMEWORKS.values():
        module = sys.modules.get(framework.module)
        if module is None or not framework.auto:
            continue
        if values is None:
            values = [*args, *kwargs.values()]
            if any(isinstance(v, _CONTAINERS) for v in values):
                values = list(leaves(values))
        for value in values:
            if framework.is_tensor(module, value):
                kind = _native_mode_map[framework.mode]
                if _CONSTANTS.issuperset(set(types).difference(framework.types(module))):
                    if len(_known) >= _KEPT:
                        _known.clear()
                    _known[types] = kind
                return kind
    return _native_mode_map["baremetal"]
