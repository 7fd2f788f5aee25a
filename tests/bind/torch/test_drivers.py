"""Drivers of torch tutorials run on CPU tensors where torch_xla and torch_neuronx are not installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest
import torch

import opennki.dropin  # noqa: F401

SOURCE = str(Path(importlib.util.find_spec("opennki").origin).parent.parent)

KERNEL = """
import neuronxcc.nki as nki
import neuronxcc.nki.language as nl


@nki.jit
def add_programs(a, b):
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    rows = nl.ds(nl.program_id(0) * 128, 128)
    cols = nl.ds(nl.program_id(1) * 64, 64)
    nl.store(out[rows, cols], nl.load(a[rows, cols]) + nl.load(b[rows, cols]))
    return out


def into(a, out):
    nl.store(out, nl.load(a) * 2)
"""

DRIVER = """
import argparse
import torch
import torch_neuronx
from torch_xla.core import xla_model as xm
import torch_xla
from neuronxcc.nki.docs.examples.adding.adding_kernels import into
from adding_kernels import add_programs

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--columns", type=int)
    columns = parser.parse_args().columns
    device = xm.xla_device()
    assert device == torch_xla.device()
    a = torch.rand((256, columns), dtype=torch.bfloat16).to(device=device)
    xm.mark_step()
    out = add_programs[2, columns // 64](a, a)
    xm.mark_step()
    old = torch.zeros(128, columns, device=device)
    torch_neuronx.nki_jit(into)(a[:128].float(), old)
    xm.wait_device_ops()
    torch_xla.sync()
    xm.master_print("match" if torch.equal(out, a + a) and torch.equal(old, a[:128].float() * 2) else "differ")
"""


@pytest.fixture
def driver(tmp_path):
    (tmp_path / "adding_kernels.py").write_text(KERNEL)
    (tmp_path / "adding_torch.py").write_text(DRIVER)

    def run(*words):
        return subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=tmp_path, timeout=120,
                              env={**os.environ, "PYTHONPATH": SOURCE})

    return run


def test_a_driver_runs_unedited(driver):
    done = driver("-W", "always", "-m", "opennki", "run", "adding_torch.py", "--columns", "128")
    assert done.stdout == "match\n", done.stderr
    assert "DeprecationWarning: torch_neuronx.nki_jit is deprecated" in done.stderr


def test_a_file_that_is_not_beside_the_driver_is_missing(driver, tmp_path):
    (tmp_path / "other.py").write_text("from neuronxcc.nki.docs.examples.adding.absent import x")
    done = driver("-m", "opennki", "run", "other.py")
    assert "neuronxcc.nki.docs.examples.adding.absent is not in opennki yet" in done.stderr


def test_the_deprecated_nki_jit():
    from neuronxcc.nki import _torch_xla
    from tests.bind import kernels as k

    import torch_neuronx

    assert _torch_xla.nki_jit is torch_neuronx.nki_jit
    x = torch.ones(4, 4)
    for options in ({}, {"platform_target": "trn2"}):
        with pytest.warns(DeprecationWarning, match=r"torch_neuronx\.nki_jit is deprecated") as caught:
            kernel = torch_neuronx.nki_jit(**options)(k.axpy.func) if options else torch_neuronx.nki_jit(k.axpy.func)
        assert caught[0].filename == __file__
        assert torch.equal(kernel(x, x), x * 3)


def test_the_vendors_modules_have_the_bridge():
    from neuronxcc.nki import _torch_xla

    import torch_neuronx
    from opennki.bind.torch import PyTorchXLAKernel, nki_op, wrap_nki
    from opennki.kernels.framework import FrameworkKernel

    assert _torch_xla.PyTorchXLAKernel is PyTorchXLAKernel and issubclass(PyTorchXLAKernel, FrameworkKernel)
    assert (torch_neuronx.nki_op, torch_neuronx.wrap_nki) == (nki_op, wrap_nki)
    with pytest.raises(AttributeError, match=r"torch_neuronx\.trace is not in opennki yet"):
        torch_neuronx.trace


def test_the_stand_ins_import_no_torch():
    code = textwrap.dedent("""
        import sys, opennki.dropin, torch_neuronx, torch_xla, torch_xla.core.xla_model as xm
        torch_neuronx.nki_jit
        xm.mark_step(), xm.wait_device_ops(), torch_xla.sync()
        print("torch" in sys.modules, xm.get_ordinal(), xm.xrt_world_size(), xm.is_master_ordinal(), xm.get_xla_supported_devices())
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": SOURCE})
    assert done.stdout.split("\n")[0] == "False 0 1 True ['cpu']", done.stderr


def test_the_seed_of_the_stand_in():
    import torch_xla.core.xla_model as xm

    before = xm.get_rng_state()
    xm.set_rng_state(2**40 + 3)
    assert xm.get_rng_state() == 2**40 + 3
    xm.set_rng_state(before)


def test_the_target_of_the_stand_in(monkeypatch):
    from torch_neuronx.utils import get_platform_target

    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    assert get_platform_target() == "trn2"
    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE")
    with pytest.warns(UserWarning, match="Unable to read MLA target"):
        assert get_platform_target() == "trn1"


@pytest.mark.filterwarnings("ignore:Unable to read MLA target")
def test_the_target_is_asked_of_the_real_torch_neuronx(monkeypatch):
    from opennki.bind.torch import PyTorchXLAKernel
    from opennki.kernels.payload import decode_backend_config
    from tests.bind import kernels as k

    def target(kernel):
        dumped = kernel.build_cache_kernel(PyTorchXLAKernel).dump_config(torch.ones(4, 4))
        config = decode_backend_config(dumped.backend_config).config
        return config["platform_target"], config["platform_target_is_fallback"]

    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE")
    assert target(k.copy) == ("trn1", True)
    real = types.ModuleType("torch_neuronx.utils")
    exec("def get_platform_target(): return 'trn2'", real.__dict__)
    real.get_platform_target.__module__ = "torch_neuronx.utils.utils"
    monkeypatch.setitem(sys.modules, "torch_neuronx.utils", real)
    assert target(k.copy) == ("trn2", False)
    assert target(k.nki.jit(k.copy, platform_target="trn1")) == ("trn1", False), "what the call names is first"
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn3")
    assert target(k.copy) == ("trn3", False)


def test_an_optimizer_steps():
    import torch_xla.core.xla_model as xm

    w = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([w], lr=0.5)
    w.sum().backward()
    xm.optimizer_step(optimizer)
    assert torch.equal(w.detach(), torch.full((3,), 0.5))
