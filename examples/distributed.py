"""Kernels with collectives on several ranks, compared with NumPy: tensor-parallel MLP, ring attention, mixture of experts.

    python examples/distributed.py                            8 ranks on threads of this process
    python examples/distributed.py --engine processes         ... in forked processes
    opennki launch -n 2 examples/distributed.py               ... in processes that meet over TCP
    torchrun --nproc-per-node 2 examples/distributed.py --gloo
    python examples/distributed.py --engine ray               ... as tasks of a Ray cluster
"""
import argparse
import sys
import time
from pathlib import Path

import numpy as np

import opennki

sys.path.insert(0, str(Path(__file__).parent))
from distributed_kernels import CASES


def main():
    """Run the cases and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--gloo", action="store_true", help="initialise torch.distributed, as torchrun wants")
    args = parser.parse_args()
    if args.gloo:
        import torch.distributed

        torch.distributed.init_process_group("gloo")
    worst = 0.0
    for name in args.case or CASES:
        kernel, args_of, wanted = CASES[name](args.ranks)
        start = time.perf_counter()
        results = opennki.launch(kernel, args.ranks, args_of, engine=args.engine, processes=args.processes)
        seconds = time.perf_counter() - start
        here = [r for r, result in enumerate(results) if result is not None]
        error = max(np.linalg.norm(results[r] - wanted(r)) / np.linalg.norm(wanted(r)) for r in here)
        worst = max(worst, error)
        sys.stdout.write(f"{name:10} {args.ranks} ranks, {len(here)} of them here, {seconds:.2f} s, relative L2 error {error:.1e}\n")
    if args.gloo:
        torch.distributed.destroy_process_group()
    return 0 if worst < 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main())
