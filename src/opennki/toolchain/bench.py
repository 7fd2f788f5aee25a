"""Latency of a compiled kernel: `NeuronBench`, `BenchmarkResult`, `NCLatency`, and the command `opennki-neuron-bench`.

The latency is an estimate of the timing model that the compiler wrote into the NEFF. The model is deterministic and gives one number, so
all percentiles are that number, and what is printed says so. Source: seeds "nki.benchmark"; names as in `neuronxcc.kra.profile_lib`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opennki._version import __version__
from opennki.errors import UNKNOWN, NkiError, NkiValueError, render
from opennki.toolchain import neff as neff_file
from opennki.toolchain.neff import Neff

PERCENTILES = (0, 1, 10, 25, 50, 90, 99, 100)
MIN_ITERS = 2
"""Fewest measured iterations that have percentiles."""
ESTIMATE = "estimate of a deterministic timing model: no device was measured, so every percentile is the same number"


class NCLatency:
    """Latency of a kernel on a NeuronCore, in microseconds, by percentile.

    result_dicts: latency by percentile, in the form of {x: latency} where x is the percentile: 0, 1, 10, 25, 50, 90, 99, 100.
    Errors: NkiValueError for another percentile, or a value that is no time.
    """

    def __init__(self, result_dicts: Mapping[int, float], note: str = "") -> None:
        latencies = {}
        for p, value in result_dicts.items():
            if p not in PERCENTILES or isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
                raise NkiValueError(f"NCLatency: {{{p!r}: {value!r}}}", rule=f"result_dicts maps percentiles {PERCENTILES} to microseconds")
            latencies[int(p)] = float(value)
        self.result_dicts = latencies
        self.note = note

    def get_latency_percentile(self, percentile: int) -> float:
        """Latency of a percentile in microseconds. Errors: NkiValueError for one that was not measured."""
        try:
            return self.result_dicts[percentile]
        except (KeyError, TypeError):
            raise NkiValueError(f"there is no latency for percentile {percentile!r}",
                                rule=f"percentiles are {', '.join(map(str, self.result_dicts))}") from None

    def __str__(self) -> str:
        """Five numbers: minimum, quarter, median, 90th percentile, maximum."""
        names = {0: "min", 25: "p25", 50: "p50", 90: "p90", 100: "max"}
        five = ", ".join(f"{name} {self.result_dicts[p]:.3f}" for p, name in names.items() if p in self.result_dicts)
        return f"NCLatency (us): {five}" + (f" ({self.note})" if self.note else "")

    def __repr__(self) -> str:
        return f"NCLatency({self.result_dicts})"


@dataclass(frozen=True, slots=True)
class BenchmarkResult:
    """What a benchmark found. nc_latency: None where there were too few iterations. func_name, target: the kernel. warmup, iters: runs."""

    nc_latency: NCLatency | None
    func_name: str = ""
    target: str = ""
    warmup: int = 0
    iters: int = 0

    def __str__(self) -> str:
        few = f"no latency: iters={self.iters} is too low (at least {MIN_ITERS})"
        latency = few if self.nc_latency is None else str(self.nc_latency)
        return f"{self.func_name} on {self.target}: {latency}"

    def to_json(self) -> dict[str, Any]:
        """For the command line: percentiles as p0, p1 ..., in microseconds."""
        latency = None if self.nc_latency is None else {f"p{p}": v for p, v in self.nc_latency.result_dicts.items()}
        return {"func_name": self.func_name, "target": self.target, "warmup": self.warmup, "iters": self.iters,
                "nc_latency_us": latency, "estimate": ESTIMATE}


class NeuronBench:
    """Benchmark of a NEFF: a file name or a loaded one; numbers of warmup and measured runs."""

    def __init__(self, neff: str | os.PathLike[str] | Neff, warmup: int = 10, iters: int = 100) -> None:
        self.neff = neff if isinstance(neff, Neff) else neff_file.load(neff)
        self.warmup, self.iters = warmup, iters

    def run(self) -> BenchmarkResult:
        """The latency. The values of the inputs are not used."""
        latency = None
        if self.iters >= MIN_ITERS:
            latency = NCLatency(dict.fromkeys(PERCENTILES, float(self.neff.timing["latency_us"])), ESTIMATE)
        return BenchmarkResult(latency, self.neff.func_name, self.neff.target, self.warmup, self.iters)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise NkiValueError(message, loc=UNKNOWN)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 1 << 31):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of runs")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """`opennki-neuron-bench exec file.neff`: print the latency of a NEFF. Exit status 0, 1 for a bad file, 2 for a bad command line."""
    parser = _Parser(prog="neuron-bench", allow_abbrev=False, description="Latency of a NEFF file of opennki: " + ESTIMATE + ".")
    parser.add_argument("--version", action="version", version=f"opennki-neuron-bench {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="<command>", parser_class=_Parser)
    one = commands.add_parser("exec", allow_abbrev=False, help="print the latency of a NEFF file")
    one.add_argument("neff", metavar="<file.neff>", help="the NEFF file")
    one.add_argument("-w", "--warmup", type=_count, default=10, metavar="<n>", help="runs that are not measured (default: %(default)s)")
    one.add_argument("-n", "--iters", type=_count, default=100, metavar="<n>", help="measured runs (default: %(default)s)")
    one.add_argument("--output-format", choices=("text", "json"), default="text", help="how to print it (default: %(default)s)")
    try:
        options = parser.parse_args(argv)
        if options.command is None:
            raise NkiValueError("a command is missing: exec", loc=UNKNOWN)
    except NkiError as error:
        print(f"neuron-bench: {error.message}\nSee: neuron-bench exec --help", file=sys.stderr)
        return 2
    except SystemExit as exc:  # --help, --version
        return int(exc.code or 0)
    try:
        result = NeuronBench(options.neff, options.warmup, options.iters).run()
    except NkiError as error:
        print(f"neuron-bench: {render(error)}", file=sys.stderr)
        return 1
    print(json.dumps(result.to_json(), indent=1) if options.output_format == "json" else result)
    return 0


def run() -> None:
    """The console script."""
    sys.exit(main())


if __name__ == "__main__":
    run()
