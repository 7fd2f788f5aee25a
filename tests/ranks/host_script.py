"""What each process of a run on several hosts does: the example's cases, whose results of this process's ranks go to a file.

    host_script.py FOLDER gloo | host_script.py FOLDER die | host_script.py FOLDER ray ADDRESS
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "examples"))
from distributed_kernels import CASES

import opennki

RANKS = 8


def main():
    """Run the cases; with `die`, the last process kills itself before the second one."""
    folder, engine = Path(sys.argv[1]), sys.argv[2]
    options, me = {"engine": "ray", "processes": 2}, 0
    if engine == "ray":
        import ray

        ray.init(address=sys.argv[3], log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}})
    else:
        import torch.distributed

        torch.distributed.init_process_group("gloo")
        options, me = {"engine": "gloo"}, torch.distributed.get_rank()
    for number, (name, case) in enumerate(CASES.items()):
        if engine == "die" and me == 1 and number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        kernel, args_of, _ = case(RANKS)
        results = opennki.launch(kernel, RANKS, args_of, **options)
        np.savez(folder / f"{name}-{me}.npz", **{str(r): value for r, value in enumerate(results) if value is not None})
    if engine == "ray":
        nodes = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        (folder / "nodes").write_text(" ".join(sorted(nodes)), encoding="utf-8")
        ray.shutdown()
    else:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
