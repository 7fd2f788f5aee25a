"""The vendor's module names, served by opennki: `import neuronxcc.nki` works where the vendor's package is
not installed.

Importing this module installs two finders. Use it as `import opennki.dropin`, `pytest -p opennki.dropin` or
`opennki run`.

* Ahead of all others: `neuronxcc` and what it holds, unless a package that really has `neuronxcc.nki` is
  installed (the placeholders of package registries do not). The modules are the same objects as
  `opennki.dialects.neuronxcc...`.
* After all others: names of the vendor that opennki does not have (`nki`, `torch_neuronx`, ...). Importing
  one is a ModuleNotFoundError that says so; `importlib.util.find_spec` answers None as for any module that is
  not there.

Nothing heavy is imported: a vendor's module is loaded when a kernel imports it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from opennki.errors import UNKNOWN, Loc, NkiNotYet, user_frame

_HERE = "opennki.dialects.neuronxcc"
_NKI = "neuronxcc.nki"

# Vendor's module -> ours; "" is a package that only holds others.
MODULES: dict[str, str] = {
    "neuronxcc": f"{_HERE}.package",
    _NKI: _HERE,
    f"{_NKI}.language": f"{_HERE}.language",
    f"{_NKI}.language.iterators": f"{_HERE}.iterators",
    f"{_NKI}.language.constants": f"{_HERE}.constants",
    f"{_NKI}.isa": f"{_HERE}.isa",
    f"{_NKI}.isa.constants": f"{_HERE}.isa_constants",
    f"{_NKI}.isa.neuron_isa": f"{_HERE}.isa",
    f"{_NKI}.typing": f"{_HERE}.typing",
    f"{_NKI}.compiler": f"{_HERE}.compiler",
    f"{_NKI}.compiler.backends": "",
    f"{_NKI}.compiler.backends.neuron": "",
    f"{_NKI}.compiler.backends.neuron.dimensions": f"{_HERE}.dimensions",
    f"{_NKI}.compiler.backends.neuron.indexing": f"{_HERE}.backend_types",
    f"{_NKI}.compiler.backends.neuron.tensor": f"{_HERE}.backend_types",
    f"{_NKI}.compiler.backends.neuron.TraceKernel": f"{_HERE}.backend_kernels",
    f"{_NKI}.compiler.backends.neuron.FrameworkKernel": f"{_HERE}.backend_kernels",
    f"{_NKI}.compiler.backends.neuron.NumpyKernel": f"{_HERE}.backend_kernels",
    f"{_NKI}.compile": f"{_HERE}.compile",
    f"{_NKI}._jax": f"{_HERE}.jax_bridge",
    f"{_NKI}._torch_xla": f"{_HERE}.torch_xla_bridge",
    f"{_NKI}.nccl": f"{_HERE}.nccl",
    f"{_NKI}.nccl.collectives": f"{_HERE}.nccl",
    f"{_NKI}.distributed": f"{_HERE}.distributed",
    f"{_NKI}._private": "",
    f"{_NKI}._private.private_api": f"{_HERE}.private_api",
    f"{_NKI}._private_kernels": "",
    f"{_NKI}._private_kernels.attention": f"{_HERE}.private_attention",
    f"{_NKI}.kernels": f"{_HERE}.kernels",
    **{
        f"{_NKI}.kernels.{name}": f"{_HERE}.kernels.{name}"
        for name in (
            "attention",
            "allocated_attention",
            "allocated_fused_linear",
            "double_row_matmul",
            "tutorial",
            "vision",
        )
    },
    "neuronxcc.kra": "",
    "neuronxcc.kra.kralib": f"{_HERE}.kra_kralib",
    "neuronxcc.kra.profiler": f"{_HERE}.kra_profiler",
    "neuronxcc.kra.profile_lib": f"{_HERE}.kra_profile_lib",
    "neuronxcc.starfish": "",
    "neuronxcc.starfish.support": "",
    "neuronxcc.starfish.support.dtype": f"{_HERE}.support_dtype",
    "neuronxcc.starfish.support.util": f"{_HERE}.support_util",
}

_VENDOR: dict[str, str] = {}
for _name, _ours in MODULES.items():
    _VENDOR.setdefault(_ours, _name)

# Stand-ins for what drivers of frameworks import, served by the finder that comes last: real packages win.
_TORCH = "opennki.dialects.torch_shims"
SHIMS: dict[str, str] = {
    "torch_xla": f"{_TORCH}.torch_xla",
    "torch_xla.core": "",
    "torch_xla.core.xla_model": f"{_TORCH}.xla_model",
    "torch_neuronx": f"{_TORCH}.torch_neuronx",
    "torch_neuronx.utils": f"{_TORCH}.neuronx_utils",
    "torch_neuronx.xla_impl": "",
    "torch_neuronx.xla_impl.ops": f"{_TORCH}.xla_ops",
    "jax_neuronx": "opennki.dialects.jax_neuronx",
}

# Top-level names that opennki will serve later. The second name is one that the real package has.
LATER: dict[str, str] = {
    "nki": "nki.language",
}


class NotYetModule(NkiNotYet, ModuleNotFoundError):
    """A module of the vendor that opennki does not have: an ImportError, so that `try: import` works."""

    def __init__(self, name: str) -> None:
        super().__init__(name, loc=_importer())
        # The import statement `from package import name` swallows an error with the name that it asked for.
        self.name = None if MODULES.get(name.rpartition(".")[0]) == "" else name


def _importer() -> Loc:
    """The line that imports: outside of opennki and of Python's import machinery."""
    frame = user_frame()
    while frame is not None and "importlib" in frame.f_code.co_filename:
        frame = user_frame(frame.f_back) if frame.f_back is not None else None
    return (
        Loc(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) if frame is not None else UNKNOWN
    )


def vendor_name(name: str) -> str:
    """The vendor's name of a name in a module of ours: `from neuronxcc.nki.isa import x` asks for ours."""
    module, rest = name, ""
    while module not in _VENDOR and "." in module:
        module, _, last = module.rpartition(".")
        rest = f".{last}{rest}"
    return _VENDOR.get(module, module) + rest


def _asked_only() -> bool:
    """True when importlib.util.find_spec asks whether a module exists, and nobody imports it."""
    # The caller of find_spec is importlib's _find_spec, and the caller of that is who wants to know.
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name in ("find_spec", "_find_spec"):
        if frame.f_globals.get("__name__") == "importlib.util":
            return True
        frame = frame.f_back
    return False


class _Loader(Loader):
    """Gives the existing module under its second name."""

    def __init__(self, ours: str) -> None:
        self.ours = ours
        self.spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Our module, or a new empty package."""
        if self.ours:
            module = importlib.import_module(self.ours)
            self.spec = module.__spec__
            return module
        module = ModuleType(
            spec.name, f"Package `{spec.name}`, of which opennki has the parts that kernels import."
        )
        module.__getattr__ = _missing_in(spec.name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """The module is loaded; importlib has given it the spec of the second name, which would break
        reloading."""
        if self.spec is not None:
            module.__spec__ = self.spec


def _missing_in(package: str) -> Callable[[str], Any]:
    from opennki.dialects.neuronxcc._missing import missing

    return missing(package, ())


def _elsewhere(name: str, path: Sequence[str] | None, skip: tuple[MetaPathFinder, ...]) -> ModuleSpec | None:
    """What the other finders know; a folder without __init__ that only happens to have the name does not
    count."""
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        if finder in skip or find is None:
            continue
        spec: ModuleSpec | None = find(name, path)
        if spec is not None:
            return spec if spec.origin is not None and spec.loader is not None else None
    return None


def really_installed(name: str, witness: str, skip: tuple[MetaPathFinder, ...] = ()) -> bool:
    """True when a package is installed that has the module `witness`. Imports nothing."""
    spec = _elsewhere(name, None, skip)
    for end in range(len(name.split(".")) + 1, len(witness.split(".")) + 1):
        if spec is None or spec.submodule_search_locations is None:
            return False
        spec = _elsewhere(".".join(witness.split(".")[:end]), list(spec.submodule_search_locations), skip)
    return spec is not None


def _example(name: str) -> ModuleSpec | None:
    """`neuronxcc.nki.docs.examples.<tutorial>.<file>`, under which drivers of published tutorials import the file that lies beside
    them; None for another name, or where there is no such file."""
    parts = name.removeprefix(f"{_NKI}.docs").split(".")
    if not name.startswith(f"{_NKI}.docs") or parts[1:2] not in ([], ["examples"]) or len(parts) > 4:
        return None
    if len(parts) < 4:
        return ModuleSpec(name, _Loader(""), origin="opennki", is_package=True)
    file = Path(sys.path[0] or ".", f"{parts[3]}.py")
    return importlib.util.spec_from_file_location(name, file) if file.is_file() else None


class Served(MetaPathFinder):
    """Serves `neuronxcc` and its modules."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Spec of a module of ours under the vendor's name; NotYetModule for one that the vendor alone
        has."""
        root = name.split(".", 1)[0]
        if root == "opennki" and name.startswith(_HERE + "."):
            return self._ours(name, path)
        if root != "neuronxcc" or _real():
            return None
        ours = MODULES.get(name)
        if ours is not None:
            # A package, so that `from module import name` asks here for a name that it does not have.
            return ModuleSpec(name, _Loader(ours), origin="opennki", is_package=True)
        example = _example(name)
        if example is not None or _asked_only():
            return example
        raise NotYetModule(name)

    def _ours(self, name: str, path: Sequence[str] | None) -> ModuleSpec | None:
        """Submodules of the shared modules, which import statements look up under our own name."""
        vendors = vendor_name(name)
        if MODULES.get(vendors, name) != name and _elsewhere(name, path, (self,)) is None:
            return ModuleSpec(name, _Loader(MODULES[vendors]), origin="opennki")
        if vendors in MODULES or _asked_only() or _elsewhere(name, path, (self,)) is not None:
            return None
        raise NotYetModule(vendors)


class Later(MetaPathFinder):
    """Says which names of the vendor opennki does not have."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None, or NotYetModule when the name is imported."""
        root = name.split(".", 1)[0]
        if name in SHIMS and not _asked_only():  # who only asks is told the truth: it is not installed
            return ModuleSpec(name, _Loader(SHIMS[name]), origin="opennki", is_package=True)
        served = getattr(sys.modules.get(root), "__spec__", None)
        ours = root in SHIMS and (
            served is None or served.origin == "opennki" or served.name in SHIMS.values()
        )
        if (ours or (root in LATER and root not in sys.modules)) and not _asked_only():
            raise NotYetModule(name)
        return None


_SERVED, _LATER = Served(), Later()
_known_real: bool | None = None


def _real() -> bool:
    """True when the vendor's own package is installed; asked once."""
    global _known_real
    if _known_real is None:
        _known_real = really_installed("neuronxcc", _NKI, (_SERVED, _LATER))
    return _known_real


def install() -> None:
    """Install the finders; a second call does nothing. A placeholder that is imported already is replaced."""
    if _SERVED not in sys.meta_path:
        sys.meta_path.insert(0, _SERVED)
    if _LATER not in sys.meta_path:
        sys.meta_path.append(_LATER)
    if "neuronxcc" in sys.modules and _NKI not in sys.modules and not _real():
        for name in [n for n in sys.modules if n == "neuronxcc" or n.startswith("neuronxcc.")]:
            del sys.modules[name]


def uninstall() -> None:
    """Remove the finders; modules that are imported stay."""
    global _known_real
    _known_real = None
    for finder in (_SERVED, _LATER):
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)


install()
