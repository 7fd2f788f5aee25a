"""Many ranks on few cores: what 64 ranks of a tensor-parallel MLP (hidden 4096) take beside their tensors and their compute.

    python benchmarks/ranks.py [--ranks 64] [--hidden 4096] [--tokens 64] [--repeat 5]

Limits: memory at most 1.2 x the sum of the tensors of all ranks (arguments, results, and what the kernel has in HBM); the rank machinery at
most 10 % of compute.

Memory is the largest growth of the resident memory of all processes of the run together, pages that they share counted once (PSS), from
before the arguments are made. Compute is the same kernel, rank by rank on one thread, each rank alone, so that its collective is a copy,
and then the reduction, which every engine has to do; the machinery is what `opennki.launch` with one thread takes more. As that is the
difference of two large times, it is also measured by itself: as many ranks that only meet, with one number each. In turns; medians.
"""
import argparse
import gc
import multiprocessing
import os
import statistics
import sys
import threading
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

import opennki.dropin  # isort: skip
import neuronxcc.nki as nki
import neuronxcc.nki.distributed as dist
import neuronxcc.nki.language as nl

import opennki
from opennki.execute.executor import native
from opennki.interpret.prepared import Prepared
from opennki.isa.reduce import reduce_list

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from distributed_kernels import P, tensor_parallel_mlp

MOST_MEMORY, MOST_OVERHEAD = 1.2, 0.10


def resident():
    """Bytes of this process and its children, shared pages counted once."""
    total = 0
    me = os.getpid()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            stat = Path(entry.path, "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
            if int(entry.name) != me and int(stat[1]) != me:
                continue
            rollup = Path(entry.path, "smaps_rollup").read_text(encoding="ascii")
        except OSError:
            continue
        total += next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")) * 1024
    return total


class Peak:
    """The largest value of `resident` in a `with` block, looked at every few milliseconds."""

    def __enter__(self):
        self.most, self.over = resident(), threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def _watch(self):
        while not self.over.wait(0.004):
            self.most = max(self.most, resident())

    def __exit__(self, *error):
        self.over.set()
        self.thread.join()


@nki.jit(platform_target="trn2")
def only_meet(x):
    """Nothing but a collective."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    dist.all_reduce([x], [out], np.add)
    return out


class Case:
    """The arguments of all ranks, and the ways to run them."""

    def __init__(self, ranks, hidden, tokens):
        self.ranks, self.hidden, self.tokens = ranks, hidden, tokens
        part = max(P, 4 * hidden // ranks // P * P)
        rng = np.random.default_rng(0)
        self.x = rng.standard_normal((hidden, tokens), np.float32)
        self.up = [rng.standard_normal((hidden, part), np.float32) for _ in range(ranks)]
        self.down = [rng.standard_normal((part, hidden), np.float32) for _ in range(ranks)]
        partial_and_out = 2 * ranks * tokens * hidden * 4
        self.tensors = self.x.nbytes + sum(a.nbytes for a in (*self.up, *self.down)) + partial_and_out

    def args_of(self, rank):
        """Arguments of a rank."""
        return self.x, self.up[rank], self.down[rank]

    def launch(self, **options):
        """All ranks."""
        return opennki.launch(tensor_parallel_mlp, self.ranks, self.args_of, checks="off", **options)

    def compute(self):
        """The work of all ranks, one after the other: each is alone, so that its collective is a copy. Then the reduction."""
        traced, _ = tensor_parallel_mlp.specialize_and_call(self.args_of(0), {})
        plan = Prepared(traced, "off", native=native)
        shape = self.tokens, self.hidden
        partial = [np.empty(shape, np.float32) for _ in range(self.ranks)]
        for rank, result in enumerate(partial):
            plan.run(self.args_of(rank), [result])
        total = reduce_list(partial, "add")
        return [total.copy() for _ in range(self.ranks)]


def memory(ranks, hidden, tokens, options):
    """Growth of memory at its peak over the sum of the tensors. In a process of its own."""
    opennki.launch(tensor_parallel_mlp, 2, Case(2, 512, tokens).args_of, checks="off", **options)  # what the first call loads
    gc.collect()
    before = resident()
    case = Case(ranks, hidden, tokens)
    with Peak() as peak:
        results = case.launch(**options)
    assert len(results) == ranks
    return (peak.most - before) / case.tensors


def main():
    """Print the table; exit status 1 where a limit does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("ranks", 64), ("hidden", 4096), ("tokens", 64), ("repeat", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    size = args.ranks, args.hidden, args.tokens
    good = True
    for name, options in (("2 threads", {"threads": 2}), ("2 processes", {"processes": 2})):
        ratio = in_a_process(size, options)
        good &= ratio <= MOST_MEMORY
        print(f"memory, {name}: {ratio:.3f} x the tensors (at most {MOST_MEMORY})", flush=True)
    case = Case(*size)
    rounds, overheads, meetings = [], [], []
    one_number = np.ones((1, 1), np.float32)
    wanted = case.launch(threads=1)
    ways = [case.compute, lambda: case.launch(threads=1), lambda: case.launch(threads=2), lambda: case.launch(processes=2)]
    for turn in range(args.repeat):
        seconds, used = [0.0] * len(ways), [0.0] * len(ways)
        for which in [(turn + i) % len(ways) for i in range(len(ways))]:  # whoever comes after another finds its memory warm
            start, cpu = time.perf_counter(), time.process_time()
            results = ways[which]()
            used[which], seconds[which] = time.process_time() - cpu, time.perf_counter() - start
            assert all(np.array_equal(a, b) for a, b in zip(results, wanted, strict=True))
            del results
        cpu = time.process_time()
        opennki.launch(only_meet, args.ranks, lambda rank: (one_number,), checks="off", threads=1)
        meetings.append((time.process_time() - cpu) / used[0])
        rounds.append(seconds)
        overheads.append(used[1] / used[0] - 1)  # of processor time, which neighbours disturb less
    compute, one, two, processes = map(statistics.median, zip(*rounds, strict=True))
    overhead = statistics.median(overheads)
    alone = statistics.median(meetings)
    good &= alone <= MOST_OVERHEAD and overhead <= MOST_OVERHEAD
    print(f"compute {compute:.2f} s; launch on 1 thread {one:.2f} s, on 2 threads {two:.2f} s, in 2 processes {processes:.2f} s")
    print(f"rank machinery: {100 * overhead:.1f} % of compute by difference, {100 * alone:.1f} % by itself "
          f"(at most {100 * MOST_OVERHEAD:.0f} %)")
    return 0 if good else 1


def _memory_into(pipe, *given):
    pipe.send(memory(*given))
    pipe.close()


def in_a_process(size, options):
    """`memory` in a process that may have children."""
    mine, theirs = multiprocessing.Pipe(False)
    process = multiprocessing.get_context("spawn").Process(target=_memory_into, args=(theirs, *size, options))
    process.start()
    theirs.close()
    ratio = mine.recv()
    process.join()
    return ratio


if __name__ == "__main__":
    sys.exit(main())
