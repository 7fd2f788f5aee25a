"""Threads, forks, pickles, imports: kernels in processes that do other things too."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from tests.bind import kernels as k
from tests.bind.kernels import nki, nl

X, Y = torch.from_numpy(k.numbers(64, 16)), torch.from_numpy(k.numbers(64, 16, seed=1))


class Block(torch.nn.Module):
    """A module that holds kernels: one on a grid, one in a list."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(X.clone())
        self.kernel = k.rows[2]
        self.others = [k.axpy]

    def forward(self, x):
        return self.kernel(self.others[0](x, self.weight.detach()))


def python(code, **kwargs):
    """Standard output of a new process."""
    path = os.pathsep.join([os.path.dirname(os.path.dirname(nki.__file__)).rsplit("opennki", 1)[0], os.getcwd()])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, **kwargs,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join([path, os.environ.get("PYTHONPATH", "")])})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_torch_is_imported_when_a_tensor_shows_up_and_dynamo_is_not():
    code = """
import sys
import opennki, opennki.dropin
import numpy as np
import neuronxcc.nki as nki
import neuronxcc.nki.language as nl
def double(x):
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.load(x) * 2)
    return out
kernel = nki.jit(double)
nki.simulate_kernel(kernel, np.ones((2, 2), np.float32))
print("torch" in sys.modules, end=" ")
import torch
nki.simulate_kernel(kernel, np.ones((2, 2), np.float32))
print("opennki.bind.torch" in sys.modules, end=" ")
print(float(kernel(torch.ones(2, 2)).sum()), "opennki.bind.torch" in sys.modules, "torch._dynamo" in sys.modules)
"""
    assert python(code) == "False False 8.0 True False"


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_three_threads(compiled):
    torch._dynamo.reset()
    f = (lambda x, n: k.axpy(x, Y, a=float(n)))
    if compiled:
        f = torch.compile(f, backend="aot_eager")
    wrong = []

    def work(n):
        x = torch.full((64, 16), float(n))
        for i in range(100):
            acc = torch.zeros(64, 16)
            k.accumulate(x, acc)
            if not torch.equal(f(x, n % 2 + 1), x * (n % 2 + 1) + Y) or not torch.equal(acc, x):
                wrong.append((n, i))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    assert not any(t.is_alive() for t in threads) and not wrong


def test_one_trace_for_three_threads():
    traced, barrier = [], threading.Barrier(3)

    @nki.jit
    def kernel(x):
        traced.append(1)
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.load(x))
        return out

    threads = [threading.Thread(target=lambda: (barrier.wait(), kernel(X))) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert traced == [1]


def test_a_kernel_in_a_backward_pass_on_threads():
    from opennki.bind.torch import register_autograd

    register_autograd(k.rows, lambda ctx, d: k.rows[2](d))
    x = X.clone().requires_grad_()
    gradients = []

    def work():
        gradients.append(torch.autograd.grad(k.rows[2](x).sum(), x)[0])

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert len(gradients) == 3 and all(torch.equal(g, torch.full_like(X, 2.0)) for g in gradients)


def test_a_fork_after_kernels_have_run():
    code = """
import os, sys, numpy as np, torch
from tests.bind import kernels as k
x = torch.from_numpy(k.numbers(64, 16))
big = torch.ones(128, 512)
k.rows[2](x), k.copy(big)
children = []
for n in range(3):
    pid = os.fork()
    if pid == 0:
        ok = torch.equal(k.rows[2](x), x * 2) and torch.equal(k.axpy(x, x, a=float(n)), x * n + x) and torch.equal(k.copy(big), big)
        os._exit(0 if ok else 1)
    children.append(pid)
print([os.waitpid(pid, 0)[1] for pid in children], torch.equal(k.axpy(x, x), x * 3))
"""
    assert python(code) == "[0, 0, 0] True"


def test_a_module_that_holds_kernels_is_pickled_and_copied(tmp_path):
    block = Block()
    expected = (X * 2 + X) * 2
    assert torch.equal(block(X), expected)
    for twin in (pickle.loads(pickle.dumps(block)), copy.deepcopy(block), copy.copy(block)):
        assert torch.equal(twin(X), expected)
        assert twin.kernel.grid == 2 and twin.others[0].func is k.axpy.func
    torch.save(block, tmp_path / "block.pt")
    assert torch.equal(torch.load(tmp_path / "block.pt", weights_only=False)(X), expected)
    (tmp_path / "kernel.pkl").write_bytes(pickle.dumps(k.rows[2]))
    code = (f"import pickle, torch\nkernel = pickle.load(open({str(tmp_path / 'kernel.pkl')!r}, 'rb'))\n"
            "print(float(kernel(torch.ones(64, 16)).sum()), kernel)")
    assert python(code).startswith("2048.0 <GenericKernel rows mode='auto' grid=2>")


@pytest.mark.parametrize("make", [
    lambda f: nki.jit(f, platform_target="trn2", mode="torchxla"), lambda f: nki.trace(f),
    lambda f: nki.baremetal(f, save_neff_name="f.neff"), lambda f: nki.jit(f, mode="simulation")[4]],
    ids=["jit", "trace", "baremetal", "simulation"])
def test_kinds_of_kernels_in_pickles(make):
    kernel = make(k.copy.func)
    twin = pickle.loads(pickle.dumps(kernel))
    assert type(twin) is type(kernel) and twin.mode == kernel.mode and twin.grid == kernel.grid and twin.kwargs == kernel.kwargs
    assert twin.func is kernel.func and twin is not kernel


def test_a_kernel_without_a_name_cannot_be_pickled_but_copied():
    local = nki.jit(lambda x: x)
    with pytest.raises(pickle.PicklingError, match="Define the kernel at the top of a module"):
        pickle.dumps(local)
    assert copy.deepcopy(local).func is local.func


def test_a_dataloader_worker_runs_kernels():
    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, i):
            return k.axpy(X * i, Y)

    loader = torch.utils.data.DataLoader(Rows(), batch_size=2, num_workers=1)
    assert torch.equal(torch.cat(list(loader)), torch.stack([X * i * 2 + Y for i in range(4)]))


def test_exit_while_a_thread_runs_a_kernel():
    code = """
import threading, time, torch
from tests.bind import kernels as k
x = torch.ones(64, 16)
def work():
    while True:
        k.axpy(x, x)
threading.Thread(target=work, daemon=True).start()
time.sleep(0.5)
print("end", flush=True)
"""
    assert python(code) == "end"


def test_results_are_numbers_of_their_own():
    kept = [k.axpy(X, Y, a=float(n)) for n in range(4)]
    for n, result in enumerate(kept):
        np.testing.assert_array_equal(result, X * n + Y)
