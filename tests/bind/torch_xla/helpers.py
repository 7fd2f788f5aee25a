"""What the tests beside this file share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
import torch_xla
import torch_xla.core.xla_model as xm

import opennki
from tests.bind import kernels as k

DEVICE = torch_xla.device()
X, Y = torch.from_numpy(k.numbers(64, 16)), torch.from_numpy(k.numbers(64, 16, seed=1))
SOURCE = Path(opennki.__file__).parent.parent


def on(*tensors):
    """The tensors on the XLA device."""
    moved = [t.to(DEVICE) for t in tensors]
    return moved[0] if len(moved) == 1 else moved


def hlo(*tensors):
    """The text of the program that would make these tensors."""
    return torch_xla._XLAC._get_xla_tensors_hlo(list(tensors))


def settle():
    """Wait for what is pending, whatever becomes of it."""
    while True:
        try:
            return xm.wait_device_ops()
        except RuntimeError:
            pass


def python(code, status=0, timeout=300, **environment):
    """Output and errors of a new process that ends with this status, in time."""
    paths = [str(SOURCE), str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=timeout,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment})
    assert done.returncode == status, (done.returncode, done.stdout, done.stderr)
    return done.stdout.strip(), done.stderr
