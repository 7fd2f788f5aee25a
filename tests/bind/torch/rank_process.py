"""One of the processes of a torch.distributed program: run by test_ranks.py."""

import os
import signal
import sys
import threading
import time

import opennki
import opennki.dropin
import neuronxcc.nki as nki
import neuronxcc.nki.distributed as dist
import neuronxcc.nki.language as nl
import neuronxcc.nki.nccl as nccl
import neuronxcc.nki.typing as nt
import numpy as np
import torch
import torch.distributed as td


@nki.jit(platform_target="trn2")
def total(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    dist.all_reduce([x], [out], np.add)
    return out


@nki.jit(platform_target="trn2")
def shifted(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nccl.collective_permute_implicit(dst=out, src=x)
    return out


@nki.jit(platform_target="trn2")
def into(x: nt.mutable_tensor):
    dist.all_reduce([x], [x], np.add)
    return x


way = sys.argv[1]
td.init_process_group("gloo")
me, count = td.get_rank(), td.get_world_size()
shards = [torch.randn(8, 4, generator=torch.Generator().manual_seed(rank)) for rank in range(count)]


def works(x=shards[me]):
    wanted = opennki.launch(total, count, lambda r: (shards[r],), engine="threads")[me]
    assert torch.equal(total(x), wanted)
    assert torch.equal(shifted(x), shards[me - 1])
    y = x.clone()
    into(y)
    assert torch.equal(y, wanted)
    for _ in range(10):
        total(x)
    if way == "plain":
        assert torch.equal(torch.compile(lambda x: total(x * 2) + 1, fullgraph=True, backend="aot_eager")(x), wanted * 2 + 1)


def attempt(call):
    try:
        print("got", call())
    except opennki.errors.NkiError as error:
        sys.stdout.write(f"{me}: {error}\n")
    sys.stdout.flush()


works()
td.barrier()  # a process that is killed before the others have what it sent takes a part of that with it
if way == "killed":
    if me == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    attempt(lambda: total(shards[me]))
elif way == "launch":  # the same over opennki.launch, which is killed in its second run
    for step in range(2):
        if step and me == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        attempt(lambda: opennki.launch(total, 4, lambda r: (torch.ones(2, 2),)))
elif way == "gone":
    if me == 1:
        sys.exit(0)
    attempt(lambda: total(shards[me]))
elif way == "shapes":
    attempt(lambda: total(torch.ones(4 + me, 2)))
    works()
elif way == "kernels":
    attempt(lambda: (total if me else shifted)(shards[me]))
    works()
elif way == "interrupted":
    if me == 0:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            total(shards[me])
        except KeyboardInterrupt:
            sys.stdout.write("interrupted\n")
    else:
        time.sleep(3)
        attempt(lambda: total(shards[me]))
elif way.startswith("ended"):  # as torchrun does it, which asks the others to end before it is known to them that one has
    if me == 1:
        time.sleep(1.5)
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    attempt((lambda: total(shards[me])) if way == "ended" else lambda: opennki.launch(total, 2, lambda r: (torch.ones(2, 2),)))
    time.sleep(10)
elif way == "asked":
    if me == 0:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    else:
        time.sleep(5)
    attempt(lambda: total(shards[me]))
elif way == "late":
    if me == 1:
        time.sleep(4)
    works()
if me == 0 or way not in ("killed", "gone", "launch"):
    sys.stdout.write(f"{me} ends\n")
