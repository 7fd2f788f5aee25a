"""The compiler as a command, `opennki-neuronx-cc`: the command line of the vendor's `neuronx-cc` for NKI kernels.

    opennki-neuronx-cc compile --framework XLA penguin.py --internal-tensorizer-opt-level=nki --pipeline compile SaveTemps --target trn2

Exit status: 0 compiled; 1 the kernel or a file cannot be compiled; 2 the command line is wrong; 70 an internal error. Messages go to
standard error, those of `--verbose info` to standard output. Files appear complete or not at all; the NEFF comes last. Source of the
options: aws-neuron-sdk neuron-compiler-cli-reference-guide.rst, and the command in seeds "baremetal".
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from opennki._version import __version__
from opennki.errors import ISSUES, NkiError, render
from opennki.isa.declare import ISA
from opennki.isa.target import TARGETS
from opennki.toolchain import NEFF_NAME
from opennki.toolchain import compile as driver
from opennki.toolchain.files import write_file

OK, FAILED, USAGE, INTERNAL = 0, 1, 2, 70
LOG_NAME = "log-neuron-cc.txt"
_NO_EFFECT = "accepted, no effect: "
_LEVELS = ("debug", "info", "warning", "error", "critical")

# Options of the vendor's compiler that change nothing about a kernel here: (names, values, why). "" takes no value, "*" any value.
ACCEPTED: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("--model-type",), "generic transformer unet-inference", "it is for models"),
    (("--auto-cast",), "none matmult all", "the dtypes of a kernel are those that it names"),
    (("--auto-cast-type",), "bf16 fp16 tf32 fp8_e4m3", "the dtypes of a kernel are those that it names"),
    (("--distribution-strategy",), "*", "it is for models"),
    (("--logical-nc-config", "--lnc", "-lnc"), "1 2", "the launch grid says which cores a kernel uses"),
    (("--optlevel", "-O"), "1 2 3", "a kernel is compiled as it is written"),
    (("--enable-experimental-O1",), "", "a kernel is compiled as it is written"),
    (("--enable-mixed-precision-accumulation",), "", "PSUM accumulates in float32 always"),
    (("--disable-mixed-precision-accumulation",), "", "PSUM accumulates in float32 always"),
    (("--enable-saturate-infinity",), "", "it is for transposes that the compiler adds"),
    (("--enable-fast-context-switch",), "", "it is for weights"),
    (("--enable-fast-loading-neuron-binaries",), "", "NEFF files are not compressed"),
    (("--disable-dge",), "", "it is for the DMA rings of the device"),
    (("--disable-internal-io-dge",), "", "it is for the DMA rings of the device"),
    (("--enable-dge-notifs",), "", "it is for the DMA rings of the device"),
    (("--internal-skip-backend-allocation-opt-nki",), "", "tensors stay where the kernel puts them"),
    (("--internal-compiler-debug-mode",), "*", "nothing is left out"),
    (("--internal-backend-options",), "*", "there is no backend of that name"),
    (("--internal-hlo2tensorizer-options",), "*", "there is no HLO"),
    (("--tensorizer-options",), "*", "a kernel is in tiles already"),
    (("--hbm-scratchpad-page-size",), "*", "HBM is not paged"),
    (("--retry_failed_compilation",), "", "the same kernel fails again"),
    (("--enable-branch-hint",), "", "branches have no cost of their own"),
)


class _Usage(Exception):
    """A wrong command line."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise _Usage(message)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = _Parser(prog="neuronx-cc", allow_abbrev=False, description="The opennki compiler for NKI kernels: from the IR text of a traced "
                   "kernel to a NEFF file for the opennki runtime. It takes the command line of the vendor's neuronx-cc.",
                   epilog="Exit status: 0 compiled; 1 the kernel or a file cannot be compiled; 2 wrong command line; 70 internal error.")
    made.add_argument("--version", action="version", version=f"opennki-neuronx-cc {__version__} (opennki {__version__})")
    commands = made.add_subparsers(dest="command", metavar="<command>", parser_class=_Parser)
    one = commands.add_parser("compile", allow_abbrev=False, help="compile a kernel", description="Compile a kernel.")
    one.add_argument("model_files", nargs="+", metavar="<model_files>", help=f"IR text of a kernel ({driver.PENGUIN})")
    one.add_argument("--framework", required=True, metavar="XLA", help="framework of the model: XLA")
    one.add_argument("--target", required=True, metavar="<arch>", help=f"one of {', '.join(TARGETS)}")
    one.add_argument("--output", default=NEFF_NAME, metavar="<file>", help="the NEFF file (default: %(default)s)")
    one.add_argument("--pipeline", nargs="+", default=["compile"], metavar="<stage>",
                     help="compile, and SaveTemps to write <function>.TensorizerBIR.json too (default: compile)")
    one.add_argument("--internal-tensorizer-opt-level", default="nki", metavar="nki", help="nki: the program is a kernel, in tiles")
    one.add_argument("--internal-nki-allocator", default="auto", choices=("auto", "stack", "forced"),
                     help="who places tensors: the decorators of nki.compiler set it (default: %(default)s)")
    one.add_argument("--internal-nki-skip-middle-end", action="store_true", help="skip_middle_end_transformations of nki.compiler")
    one.add_argument("--logfile", default=LOG_NAME, metavar="<file>", help="log of the passes (default: %(default)s)")
    one.add_argument("--verbose", default="warning", metavar="<level>", help=f"one of {', '.join(_LEVELS)} (default: %(default)s)")
    for names, values, why in ACCEPTED:
        if values:
            one.add_argument(*names, metavar="<value>" if values == "*" else "{" + ",".join(values.split()) + "}",
                             choices=None if values == "*" else values.split(), help=_NO_EFFECT + why)
        else:
            one.add_argument(*names, action="store_true", help=_NO_EFFECT + why)
    operators = commands.add_parser("list-operators", allow_abbrev=False, help="list the instructions",
                                    description="List the instructions that a kernel may have, one a line.")
    operators.add_argument("--framework", required=True, metavar="XLA", help="framework of the model: XLA")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script. Returns the exit status."""
    try:
        options = parser().parse_args(argv)
        if options.command is None:
            raise _Usage("a command is missing: compile or list-operators")
        if options.framework.upper() != "XLA":
            raise _Usage(f"--framework {options.framework}: only XLA is known")
        if options.command == "list-operators":
            print("\n".join(sorted(ISA)))
            return OK
        _check(options)
    except _Usage as exc:
        _say(f"{exc}\nSee: neuronx-cc compile --help")
        return USAGE
    except SystemExit as exc:  # --help, --version
        return int(exc.code or 0)
    return _compile(options)


def _check(options: argparse.Namespace) -> None:
    """Errors: _Usage for values that do not fit together."""
    if len(options.model_files) != 1:
        raise _Usage(f"{len(options.model_files)} model files ({' '.join(options.model_files)}): a kernel is one file")
    if options.target.strip().lower() not in TARGETS:
        raise _Usage(f"--target {options.target}: one of {', '.join(TARGETS)}")
    unknown = [stage for stage in options.pipeline if stage not in ("compile", "SaveTemps")]
    if unknown or "compile" not in options.pipeline:
        raise _Usage(f"--pipeline {' '.join(options.pipeline)}: compile, or compile SaveTemps")
    if options.internal_tensorizer_opt_level != "nki":
        raise _Usage(f"--internal-tensorizer-opt-level={options.internal_tensorizer_opt_level}: only nki, for kernels")
    if options.verbose.lower() not in _LEVELS:
        raise _Usage(f"--verbose {options.verbose}: one of {', '.join(_LEVELS)}")


def _compile(options: argparse.Namespace) -> int:
    log = [f"opennki-neuronx-cc {__version__}: {options.model_files[0]} for {options.target}"]
    loud = options.verbose.lower() in ("info", "debug")

    def note(text: str) -> None:
        log.append(text)
        if loud:
            print(text, flush=True)

    status = OK
    try:
        path = Path(options.model_files[0])
        if path.suffix in (".pb", ".hlo", ".mlir", ".neff", ".onnx"):
            raise NkiError(f"{path} is not the IR text of a kernel", rule=f"the input is {driver.PENGUIN}, as opennki writes it",
                           fix="models are compiled by the vendor's neuronx-cc; kernels inside them run through their framework's bridge")
        began = perf_counter()
        source = driver.read_tensorizer_ir(path)
        note(f"read and verify: {(perf_counter() - began) * 1e3:.1f} ms")
        made = driver.compile_kernel(source, options.target, note, allocator=options.internal_nki_allocator,
                                     skip_middle_end=options.internal_nki_skip_middle_end)
        for text in made.warnings:
            log.append(f"warning: {text}")
            _say(f"warning: {text}")
        output = Path(options.output)
        if "SaveTemps" in options.pipeline:
            write_file(output.parent / made.bir_name, made.bir, "the BIR")
        write_file(output, made.neff, "the NEFF")
        note(f"wrote {output}: {len(made.neff)} bytes")
    except NkiError as error:
        status = FAILED
        log.append(render(error))
        _say(render(error))
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    except Exception as exc:  # of opennki itself: the details go to the log, and the user gets one line
        status = INTERNAL
        log.append(traceback.format_exc())
        _say(f"internal error: {type(exc).__name__}: {exc}\nThe details are in {options.logfile}; please report it: {ISSUES}")
    try:
        write_file(options.logfile, ("\n".join(log) + "\n").encode("utf-8", "replace"), "the log")
    except NkiError as error:
        if status == OK:  # what was asked for is there
            _say(f"warning: {error.message}")
    return status


def _say(text: str) -> None:
    print("neuronx-cc: " + text, file=sys.stderr, flush=True)


def run() -> None:
    """The console script."""
    status = main()
    sys.stdout.flush()
    sys.exit(status)


if __name__ == "__main__":
    run()
