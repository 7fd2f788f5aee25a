"""Kernels in whole PyTorch/XLA programs: dynamo, errors, threads, the end of the process, forks, pickles, drivers."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading

import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm

from opennki.bind.failures import cause_of
from tests.bind import kernels as k
from tests.bind.torch_xla.helpers import DEVICE, SOURCE, X, Y, hlo, on, python, settle

pytestmark = pytest.mark.timeout(400)  # a new process imports torch and torch_xla, which takes a minute on a busy machine
INDEX = torch.tensor([[1], [2]], dtype=torch.int32)


@pytest.fixture(autouse=True)
def settled():
    torch._dynamo.reset()
    yield
    settle()


# ---- torch.compile(backend="openxla") -------------------------------------------------------------------------------
def openxla(f):
    return torch.compile(f, backend="openxla", fullgraph=True)


def test_values_in_a_compiled_program():
    f = openxla(lambda x, y: torch.sin(k.axpy(x, y, a=3.0)) + k.rows[2](x))
    for _ in range(3):
        torch.testing.assert_close(f(*on(X, Y)).cpu(), torch.sin(X * 3 + Y) + X * 2)
    g = openxla(lambda x: k.several(x))
    double, (narrow, total) = g(on(X))
    assert torch.equal(double.cpu(), X * 2) and narrow.dtype == torch.bfloat16 and total.shape == (64, 1)


def test_a_written_parameter_of_a_compiled_program():
    f = openxla(lambda x, acc: k.accumulate(x, acc) + 1)
    x, acc = on(X, Y.clone())
    torch.testing.assert_close(f(x, acc).cpu(), X + Y + 1)
    torch.testing.assert_close(acc.cpu(), X + Y)


def test_queued_calls_of_a_compiled_program_end():
    """PyTorch/XLA waits for the program before with the GIL held, which a kernel in that program needs."""
    out, _ = python("""
import torch, torch_xla
from tests.bind import kernels as k
x = torch.ones(64, 16).to(torch_xla.device())
f = torch.compile(lambda x: k.axpy(x, x, a=0.5), backend="openxla", fullgraph=True)
y = x
for n in range(200):
    y = f(y) * (2 / 3)
print(round(float(y.cpu().mean()), 3))
""", NEURON_PLATFORM_TARGET_OVERRIDE="trn2")
    assert out == "1.0"


def test_compiled_and_lazy_programs_in_turns():
    f = openxla(lambda x: k.axpy(x, x))
    x = on(X)
    for n in range(5):
        y = f(x)
        z = k.axpy(x, y)
        assert torch.equal(z.cpu(), X * 2 + X * 3)


# ---- errors ---------------------------------------------------------------------------------------------------------
def test_an_error_of_a_kernel_and_the_steps_after_it():
    x, index = on(X, INDEX)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="out_of_bound") as caught:
            k.pick(x, index + 999).cpu()
        assert "kernels.py" in str(caught.value) and isinstance(cause_of(caught.value), IndexError)
        assert torch.equal(k.pick(x, index).cpu(), X[[1, 2]]), "the error is raised once, and not again by what has nothing to do with it"


def test_an_error_that_nobody_waited_for_is_not_raised_by_a_later_kernel():
    x, index = on(X, INDEX)
    bad = k.pick(x, index + 999)
    xm.mark_step()
    while True:  # until the program has failed
        try:
            xm.wait_device_ops()
        except RuntimeError as error:
            assert cause_of(error) is not None
            break
    del bad
    assert torch.equal(k.pick(x, index).cpu(), X[[1, 2]])


def test_an_error_of_a_compiled_program():
    f = openxla(lambda table, index: k.pick(table, index) * 2)
    x, index = on(X, INDEX)
    assert torch.equal(f(x, index).cpu(), X[[1, 2]] * 2)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out_of_bound"):
            f(x, index + 999).cpu()
        settle()
        assert torch.equal(f(x, index).cpu(), X[[1, 2]] * 2)


def test_an_error_while_tracing_is_at_the_kernels_line():
    with pytest.raises(Exception, match=r"kernels\.py:\d+"):
        k.axpy(on(torch.zeros(256, 16)), on(torch.zeros(256, 16)))


# ---- threads and processes ------------------------------------------------------------------------------------------
def test_three_threads():
    wrong = []

    def work(n):
        x, y = on(torch.full((64, 16), float(n)), Y)
        for i in range(30):
            if not torch.equal(k.axpy(x, y, a=float(n % 2 + 1)).cpu(), x.cpu() * (n % 2 + 1) + Y):
                wrong.append((n, i))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    assert not any(t.is_alive() for t in threads) and not wrong


def test_the_end_of_the_process_with_work_in_flight():
    out, errors = python("""
import torch, torch_xla
from tests.bind import kernels as k
x = torch.ones(128, 512).to(torch_xla.device())
for _ in range(50):
    x = k.axpy(x, x, a=0.5)
torch_xla.sync()
print("end", flush=True)
""", NEURON_PLATFORM_TARGET_OVERRIDE="trn2")
    assert out == "end" and "rror" not in errors


def test_the_end_of_the_process_with_an_error_in_flight_says_so():
    out, errors = python("""
import torch, torch_xla
from tests.bind import kernels as k
d = torch_xla.device()
y = k.pick(torch.ones(64, 16).to(d), torch.full((2, 1), 999, dtype=torch.int32).to(d))
torch_xla.sync()
print("end", flush=True)
""", NEURON_PLATFORM_TARGET_OVERRIDE="trn2")
    assert out == "end" and "nobody has waited for it" in errors and "out_of_bound" in errors


def test_a_daemon_thread_at_the_end_of_the_process():
    out, _ = python("""
import threading, time, torch, torch_xla
from tests.bind import kernels as k
x = torch.ones(64, 16).to(torch_xla.device())
k.axpy(x, x).cpu()
def work():
    while True:
        k.axpy(x, x).cpu()
threading.Thread(target=work, daemon=True).start()
time.sleep(0.5)
print("end", flush=True)
""", NEURON_PLATFORM_TARGET_OVERRIDE="trn2")
    assert out == "end"


def test_a_fork_after_the_import():
    out, _ = python("""
import os, torch, torch_xla
import opennki.bind.torch_xla.bridge
from tests.bind import kernels as k
pid = os.fork()
x = torch.ones(64, 16)
ok = torch.equal(k.axpy(x, x), x * 3)
if pid == 0:
    y = x.to(torch_xla.device())  # the device starts in each process
    os._exit(0 if ok and torch.equal(k.axpy(y, y).cpu(), x * 3) else 1)
print(os.waitpid(pid, 0)[1], ok, torch.equal(k.axpy(x.to(torch_xla.device()), x.to(torch_xla.device())).cpu(), x * 3))
""", NEURON_PLATFORM_TARGET_OVERRIDE="trn2")
    assert out == "0 True True"


class Block(torch.nn.Module):
    """A module that holds a kernel."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)
        self.kernel = k.rows[2]

    def forward(self, x):
        return self.kernel(self.linear(x))


def test_a_module_that_holds_a_kernel_in_a_pickle():
    block = Block()
    block.to(DEVICE)(on(X)).cpu()
    twin = pickle.loads(pickle.dumps(block.cpu())).to(DEVICE)
    with torch.no_grad():
        torch.testing.assert_close(twin(on(X)).cpu(), block.linear(X) * 2)


# ---- drivers --------------------------------------------------------------------------------------------------------
def test_a_driver_of_the_older_api(tmp_path):
    """torch_neuronx is a stand-in here, torch_xla the real one."""
    (tmp_path / "driver.py").write_text("""
import torch, torch_neuronx, torch_xla
import torch_xla.core.xla_model as xm
import neuronxcc.nki.language as nl

@torch_neuronx.nki_jit
def double_into(a, out):
    nl.store(out, nl.load(a) * 2)

device = xm.xla_device()
a = torch.ones(64, 16, device=device)
out = torch.zeros(64, 16, device=device)
double_into(a, out)
xm.mark_step()
print(out.device.type, float(out.cpu().sum()))
""")
    done = subprocess.run([sys.executable, "-W", "ignore", "-m", "opennki", "run", "driver.py"], cwd=tmp_path, capture_output=True,
                          text=True, timeout=300, env={**os.environ, "PYTHONPATH": str(SOURCE)})
    assert done.stdout.strip() == "xla 2048.0", done.stderr


def test_the_program_of_a_compiled_kernel_has_the_call():
    x = on(X)
    text = hlo(k.axpy(x, x) + 1)
    assert text.count('custom_call_target="AwsNeuronNkiKernel"') == 1 and torch_xla.__version__.startswith("2.")
