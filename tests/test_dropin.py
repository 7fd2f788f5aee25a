"""The drop-in: the vendor's module names, real packages, names that do not exist yet."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import opennki.dropin as dropin
from opennki.errors import ISSUES, NkiNotYet

SRC = str(Path(__file__).parent.parent / "src")


def python(code, *args, path=(), cwd=None):
    """Run code in a new interpreter; returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=120,
        env={"PYTHONPATH": ":".join([SRC, *map(str, path)]), "PATH": "", "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def package(root, name, text=""):
    """A package (with its parents) in a folder."""
    folder = root
    for part in name.split("."):
        folder = folder / part
        folder.mkdir(exist_ok=True)
        if not (folder / "__init__.py").exists():
            (folder / "__init__.py").write_text("")
    (folder / "__init__.py").write_text(text)


@pytest.mark.parametrize("vendor, ours", [(v, o) for v, o in dropin.MODULES.items() if o])
def test_modules_are_shared(vendor, ours):
    assert importlib.import_module(vendor) is importlib.import_module(ours)
    assert sys.modules[vendor].__spec__.name == ours  # so that it can be reloaded


def test_every_import_form_gives_the_same_module():
    import neuronxcc.nki as nki
    import neuronxcc.nki.language as nl
    from neuronxcc import nki as again
    from neuronxcc.nki import isa as nisa
    from neuronxcc.nki.isa import constants, neuron_isa
    from neuronxcc.nki.language import constants as sizes
    from neuronxcc.nki.language import iterators
    from neuronxcc.starfish.support import dtype

    from opennki.dialects import neuronxcc as ours

    assert nki is again is ours and nl is ours.language is nki.language and nisa is nki.isa is neuron_isa
    assert constants.oob_mode is nisa.oob_mode and sizes.sizeinbytes("bfloat16") == 2
    assert iterators.sync_program and dtype.bfloat16 == nl.bfloat16


def test_names_that_public_kernels_import_exist():
    from neuronxcc.nki import (  # noqa: F401
        FrameworkKernel,
        baremetal,
        benchmark,
        jit,
        profile,
        simulate_kernel,
        tensor,
        trace,
    )
    from neuronxcc.nki._private.private_api import core_barrier, sendrecv  # noqa: F401
    from neuronxcc.nki.compile import GenericKernel  # noqa: F401
    from neuronxcc.nki.compiler.backends.neuron.dimensions import VNC, CCPipeline  # noqa: F401
    from neuronxcc.nki._private_kernels.attention import attention_isa_kernel  # noqa: F401
    from neuronxcc.nki.isa.constants import dge_mode, oob_mode  # noqa: F401
    from neuronxcc.nki.isa.neuron_isa import dma_copy  # noqa: F401
    from neuronxcc.nki.kernels.attention import FlashConfig, flash_attn_bwd, flash_fwd  # noqa: F401
    from neuronxcc.nki.kernels.vision import resize_nearest_fixed_dma_kernel  # noqa: F401
    from neuronxcc.nki.language import par_dim  # noqa: F401
    from neuronxcc.nki.language.constants import sizeinbytes  # noqa: F401
    from neuronxcc.nki.nccl.collectives import collective_permute_implicit  # noqa: F401
    from neuronxcc.nki.typing import scalar, tensor  # noqa: F401, F811
    from neuronxcc.starfish.support.dtype import bfloat16, static_cast  # noqa: F401
    from neuronxcc.starfish.support.util import allclose  # noqa: F401


MISSING = {
    "import neuronxcc.nki._private_kernels.qkv": "neuronxcc.nki._private_kernels.qkv",
    "from neuronxcc.nki._private_kernels.qkv import rmsnorm_qkv_isa_kernel": "neuronxcc.nki._private_kernels.qkv",
    "from neuronxcc.nki._private_kernels.attention import no_such_name": "neuronxcc.nki._private_kernels.attention.no_such_name",
    "from neuronxcc.nki.compiler.backends.neuron.schedule import Schedule": ""
    "neuronxcc.nki.compiler.backends.neuron.schedule",
    "from neuronxcc.nki.language import no_such_name": "neuronxcc.nki.language.no_such_name",
    "from neuronxcc.nki.isa.constants import no_such_name": "neuronxcc.nki.isa.constants.no_such_name",
    "from neuronxcc.nki import no_such_name": "neuronxcc.nki.no_such_name",
    "from neuronxcc.nki.kernels.vision import no_such_name": "neuronxcc.nki.kernels.vision.no_such_name",
    "from neuronxcc.starfish.support import no_such_name": "neuronxcc.starfish.support.no_such_name",
    "from neuronxcc import no_such_name": "neuronxcc.no_such_name",
    "import neuronxcc.no_such_name": "neuronxcc.no_such_name",
}


def run_line(line):
    """Run one import statement as a line of this file."""
    exec(compile(line, __file__, "exec"), {})


@pytest.mark.parametrize("line", MISSING)
def test_what_does_not_exist_says_so(line):
    with pytest.raises(ImportError) as caught:
        run_line(line)
    text = str(caught.value)
    assert isinstance(caught.value, NkiNotYet)
    assert f"{MISSING[line]} is not in opennki yet" in text and ISSUES in text
    assert text.startswith(__file__) and "importlib" not in text


@pytest.mark.parametrize(
    "name, missing",
    [
        ("nki", "nki"),
        ("nki.language", "nki"),
        ("jax_neuronx.core", "jax_neuronx.core"),
        ("torch_neuronx.xla_impl.base", "torch_neuronx.xla_impl.base"),
        ("torch_xla.distributed.xla_backend", "torch_xla.distributed"),
    ],
)
def test_frameworks_and_the_new_dialect_say_so_when_imported(name, missing):
    with pytest.raises(ModuleNotFoundError, match=rf"{missing} is not in opennki yet"):
        importlib.import_module(name)


def test_libraries_that_ask_for_torch_xla_are_told_that_it_is_not_installed():
    code = (
        "import opennki.dropin, importlib.util\n"
        "print([importlib.util.find_spec(n) for n in ('torch_xla', 'torch_neuronx', 'nki')])\n"
        "import torch_xla.core.xla_model as xm\nprint(xm.mark_step())"
    )
    assert python(code) == "[None, None, None]\nNone"


def test_find_spec_answers_none_for_what_does_not_exist():
    for name in ("nki", "neuronxcc.nki._private_kernels.qkv", "neuronxcc.no_such_name"):
        assert importlib.util.find_spec(name) is None
    assert importlib.util.find_spec("neuronxcc.nki.language") is not None
    with pytest.raises(ModuleNotFoundError):
        importlib.util.find_spec("no_such_package.module")


def test_unrelated_imports_are_left_alone():
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module("nkix")
    assert not isinstance(caught.value, NkiNotYet)
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module("opennki.no_such_module")
    assert not isinstance(caught.value, NkiNotYet)


def test_installing_twice_changes_nothing():
    before = list(sys.meta_path)
    dropin.install()
    assert sys.meta_path == before


def test_importing_it_is_light_and_lazy():
    code = (
        "import sys, opennki.dropin\n"
        "assert 'neuronxcc' not in sys.modules and 'opennki.dialects.neuronxcc.language' not in sys.modules\n"
        "import neuronxcc.nki.language, neuronxcc.nki.isa, neuronxcc.nki.compiler\n"
        "print([m for m in ('jax', 'torch', 'typer', 'rich') if m in sys.modules])"
    )
    assert python(code) == "[]"


def test_a_real_package_wins(tmp_path):
    package(tmp_path, "neuronxcc.nki.language", "REAL = True")
    package(tmp_path, "nki.language", "REAL = True")
    code = (
        "import opennki.dropin, importlib.util\nimport neuronxcc.nki.language as nl, nki.language\n"
        "print(nl.REAL, nki.language.REAL)\n"
        "try:\n    import neuronxcc.nki.isa\nexcept ImportError as e:\n    print(type(e).__name__)"
    )
    assert python(code, path=[tmp_path]) == "True True\nModuleNotFoundError"


@pytest.mark.parametrize("first", ["", "import neuronxcc\n"])
def test_a_placeholder_does_not(tmp_path, first):
    package(tmp_path, "neuronxcc", "PLACEHOLDER = True")
    code = (
        first + "import opennki.dropin\nimport neuronxcc.nki.language as nl, neuronxcc\n"
        "print(nl.__name__, hasattr(neuronxcc, 'PLACEHOLDER'))"
    )
    assert python(code, path=[tmp_path]) == "opennki.dialects.neuronxcc.language False"


def test_a_folder_of_the_same_name_is_no_package(tmp_path):
    (tmp_path / "neuronxcc" / "nki").mkdir(parents=True)
    code = "import opennki.dropin\nimport neuronxcc.nki.language as nl\nprint(nl.__name__)"
    assert python(code, cwd=tmp_path) == "opennki.dialects.neuronxcc.language"


def test_as_a_pytest_plugin(pytester):
    pytester.makepyfile(
        "import neuronxcc.nki.language as nl\n\ndef test_it():\n    assert nl.tile_size.pmax == 128"
    )
    pytester.runpytest_subprocess("-p", "opennki.dropin").assert_outcomes(passed=1)
