"""All benchmarks, each in a process of its own (what `make bench` runs): `python -m benchmarks [NAME ...]`, the names below."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

NAMES = ("trace", "lowering", "interpreter", "prepared", "xla_handler", "jax_call", "torch_call", "timing")


def main(names: list[str]) -> int:
    """Run the benchmarks with these names, all by default; the exit status is that of the last one that failed."""
    unknown = set(names) - set(NAMES)
    if unknown:
        print(f"usage: python -m benchmarks [{'] ['.join(NAMES)}]", file=sys.stderr)
        return 2
    status = 0
    for name in names or NAMES:
        print(f"== {name}", flush=True)
        status = subprocess.run([sys.executable, str(Path(__file__).with_name(f"{name}.py"))], check=False).returncode or status
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
