"""The command line: `opennki run | launch | ops | trace | compare | memory | bench | profile | sweep | inspect | doctor`."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from opennki._version import __version__
from opennki.errors import UNKNOWN, NkiError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="opennki runs, checks and shows NKI kernels on this machine.",
)


# what the commands that take a kernel have in common
KernelName = Annotated[str, typer.Argument(help="script.py:kernel")]
Arguments = Annotated[str, typer.Option("--args", help='Arguments, with commas: "128x512:float32, 3"')]
Argument = Annotated[list[str] | None, typer.Option("--arg", help="One argument, such as 128x512:bfloat16 or name=value; may be repeated.")]
TargetName = Annotated[str | None, typer.Option("--target", help="trn1, trn2, inf2, ...")]
Ranks = Annotated[int | None, typer.Option("--ranks", min=1, help="Ranks that run it at the same time; default: all of an instance.")]
Grid = Annotated[str, typer.Option("--grid", help='Launch grid, such as "4,2"')]


def main() -> None:
    """Entry point of the console script and of `python -m opennki`."""
    app()


def _version(on: bool) -> None:
    if on:
        print(f"opennki {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def _fail(message: str) -> typer.Exit:
    print(f"opennki: {message}", file=sys.stderr)
    return typer.Exit(2)


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
    }
)
def run(
    ctx: typer.Context,
    script: Annotated[str, typer.Argument(help="Python file, or module with -m")],
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module.")] = False,
    full_traceback: Annotated[
        bool, typer.Option("--full-traceback", help="Show frames of opennki too.")
    ] = False,
) -> None:
    """Run a script with its arguments; `import neuronxcc.nki` in it gets opennki.

    Options of the script stand after it. An error of a kernel is printed with its line, rule and remedy; exit
    status 1.
    """
    from opennki.tools.run_script import run as run_script

    if not module and not Path(script).exists():
        raise _fail(f"there is no file {script}")
    raise typer.Exit(run_script(script, list(ctx.args), module=module, full=full_traceback))


@app.command()
def ops(
    name: Annotated[
        str | None, typer.Argument(help="Instruction or scalar function, e.g. tensor_tensor")
    ] = None,
    surface: Annotated[str, typer.Option(help="isa, language, internal or all")] = "all",
    scalar: Annotated[bool, typer.Option("--scalar", help="List the scalar functions instead.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print all of it as one Markdown page.")] = False,
    coverage: Annotated[
        bool, typer.Option("--coverage", help="Lower examples of each and say what the native executor leaves to the interpreter.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --coverage: print JSON.")] = False,
) -> None:
    """List the instructions, or show one: signature, engines, operands, limits, cost, meaning."""
    from opennki.tools import reference

    if coverage:
        _coverage(name, surface, as_json)
        return

    if markdown:
        from opennki.tools.reference_page import page

        print(page(), end="")
        return
    console = reference.console()
    if name is None:
        if surface not in ("all", *reference.HOMES):
            raise _fail(f"--surface {surface}: one of isa, language, internal, all")
        console.print(reference.scalar_table() if scalar else reference.table(surface))
        return
    decl, function = reference.find(name)
    if decl is None and function is None:
        close = reference.similar(name)
        raise _fail(
            f"there is no instruction or scalar function {name!r}"
            + (f"; did you mean {', '.join(close)}?" if close else "")
        )
    if decl is not None:
        reference.page(decl, console)
    if function is not None:
        if decl is not None:
            console.print()
        reference.scalar_page(function, console)


def _coverage(name: str | None, surface: str, as_json: bool) -> None:
    from opennki.execute.build import library
    from opennki.tools import coverage, reference

    native = library()
    if native.lib is None:
        raise _fail(f"there is no native executor: {native.origin}")
    decl = reference.find(name)[0] if name else None
    if name and decl is None:
        raise _fail(f"there is no instruction {name!r}")
    found = [coverage.of(decl.name)] if decl else coverage.rows(surface)
    if as_json:
        print(json.dumps(coverage.document(found), indent=1))
    else:
        reference.console().print(coverage.table(found))


@app.command()
def trace(
    kernel: KernelName,
    args: Arguments = "",
    arg: Annotated[
        list[str] | None,
        typer.Option(
            "--arg", help="One argument, such as 128x512:bfloat16, 3 or name=value; may be repeated."
        ),
    ] = None,
    target: TargetName = None,
    grid: Grid = "",
    locations: Annotated[
        bool, typer.Option("--locations", help="Show the source line of each node.")
    ] = False,
) -> None:
    """Trace a kernel for the given argument shapes and print its IR.

    An argument SHAPE:DTYPE is a tensor (the dimensions with an x between them); anything else is a Python
    literal, or text.
    """
    made = _loaded(kernel, args, arg, target, grid, lambda made, positional, named: _text(made, positional, named, locations))
    print(made, end="")


def _loaded(kernel: str, args: str, arg: list[str] | None, target: str | None, grid: str,
            use: Callable[[Any, list[Any], dict[str, Any]], Any]) -> Any:
    """What `use` makes of the kernel that script.py:kernel names and of the arguments; errors are reported, with exit status 1."""
    from opennki.tools.arguments import kernel_for, parse_arguments, split
    from opennki.tools.run_script import load, report

    path, _, attribute = kernel.rpartition(":")
    if not path or not attribute:
        raise _fail(f"{kernel!r}: write script.py:kernel")
    if not Path(path).is_file():
        raise _fail(f"there is no file {path}")
    try:
        positional, named = parse_arguments([*split(args), *(arg or [])])
        with contextlib.redirect_stdout(sys.stderr):  # what the script prints is not part of the answer
            loaded = load(path, attribute)
        return use(kernel_for(loaded, target, grid), positional, named)
    except LookupError as exc:
        if type(exc) is not LookupError:
            report(exc, sys.stderr)
            raise typer.Exit(1) from None
        raise _fail(str(exc)) from None
    except Exception as exc:  # an error of the kernel, or of the user's module
        if isinstance(exc, NkiError) and Path(exc.loc.file).parent.name in ("typer", "click"):
            exc.loc = UNKNOWN  # the call came from this command line, not from a line of the user's
        report(exc, sys.stderr)
        raise typer.Exit(1) from None


def _text(kernel: Any, args: list[Any], kwargs: dict[str, Any], locations: bool) -> str:
    import re
    import warnings

    from opennki.ir.print import to_text
    from opennki.isa.target import FALLBACK_WARNING

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", re.escape(FALLBACK_WARNING))  # the text names the target
        return to_text(kernel.trace(*args, **kwargs), locations)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False})
def launch(
    ctx: typer.Context,
    script: Annotated[str, typer.Argument(help="Python file")],
    processes: Annotated[int, typer.Option("-n", "--processes", help="How many processes run it.", min=1, max=4096)] = 2,
) -> None:
    """Run a script in several processes whose calls of opennki.launch share their ranks.

    Options of the script stand after it. When a process fails the others are stopped; exit status 1.
    """
    from opennki.tools.launch import launch as launch_script

    if not Path(script).exists():
        raise _fail(f"there is no file {script}")
    raise typer.Exit(launch_script(script, list(ctx.args), processes))


@app.command()
def inspect(
    file: Annotated[str, typer.Argument(help="HLO, StableHLO, jax.export or payload; - is standard input")],
    no_ir: Annotated[bool, typer.Option("--no-ir", help="Leave the kernel IR out.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    kernel: Annotated[int | None, typer.Option("--kernel", help="Show the kernel with this number only.")] = None,
) -> None:
    """Show the NKI kernels in a compiled program: what each custom call computes.

    FILE is HLO or StableHLO text, a serialized HLO module, StableHLO bytecode, a jax.export file, or the payload of one call.
    Exit status 1 if a call has no kernel that can be read, or there is no call.
    """
    from opennki.tools.inspect import show

    status = show(file, ir=not no_ir, as_json=as_json, number=kernel, out=sys.stdout, err=sys.stderr)
    if status:
        raise typer.Exit(status)


@app.command()
def compare(
    kernel: KernelName,
    args: Arguments = "",
    arg: Argument = None,
    target: TargetName = None,
    grid: Grid = "",
    seed: Annotated[int, typer.Option(help="Seed of the values of the tensors.")] = 0,
    tape: Annotated[bool, typer.Option("--tape", help="Also print what native code runs: calls, loops and branches.")] = False,
) -> None:
    """Run a kernel by native code and by the interpreter, on random values, and say where they first differ.

    Names the first instruction, with its source line, whose native form changes a bit of a result, and whether that is one that may differ
    (docs/executor.md). Arguments as for `opennki trace`. Exit status 0 where all results have the same bits, 1 where they differ or the
    kernel has an error, 2 for wrong words.
    """
    from opennki.tools.compare import compare as run

    made = _loaded(kernel, args, arg, target, grid, lambda made, positional, named: run(made, positional, named, seed))
    print(made.text)
    if tape and made.tape:
        print(made.tape)
    raise typer.Exit(0 if made.equal else 1)


@app.command()
def memory(
    kernel: KernelName,
    args: Arguments = "",
    arg: Argument = None,
    target: TargetName = None,
    grid: Grid = "",
    svg: Annotated[str | None, typer.Option("--svg", help="Also draw the map into this file.")] = None,
    as_json: Annotated[str | None, typer.Option("--json", help="Also write the map into this file, as JSON.")] = None,
) -> None:
    """Show where the tensors of a kernel live in SBUF and PSUM, over program order.

    Arguments as for `opennki trace`. Exit status 1 where a memory is too small, with what is alive at its fullest point.
    """
    from opennki.tools.memory import memory_of, show, write

    made = _loaded(kernel, args, arg, target, grid, memory_of)
    show(made)
    try:
        write(made, svg, as_json)
    except OSError as exc:
        raise _fail(f"cannot write {' and '.join(f for f in (svg, as_json) if f)}: {exc.strerror}") from None


@app.command()
def bench(
    kernel: KernelName,
    args: Arguments = "",
    arg: Argument = None,
    target: TargetName = None,
    grid: Grid = "",
    ranks: Ranks = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Estimate the latency of a kernel: what bounds it, and what each source line costs.

    Arguments as for `opennki trace`. The numbers are those of a timing model; no device is measured.
    """
    from opennki.tools.latency import bench as run

    print(_loaded(kernel, args, arg, target, grid, lambda made, positional, named: run(made, positional, named, as_json, ranks)))


@app.command()
def profile(
    kernel: KernelName,
    args: Arguments = "",
    arg: Argument = None,
    target: TargetName = None,
    grid: Grid = "",
    ranks: Ranks = None,
    out: Annotated[str, typer.Option("--out", "-o", help="Folder that the files go into.")] = "profile",
) -> None:
    """Write the profile of a kernel into a folder: report.html, trace.json for Perfetto, summary.json, profile.ntff, file.neff.

    Arguments as for `opennki trace`. The numbers are those of a timing model; no device is measured.
    """
    from opennki.tools.latency import profile as run

    print(_loaded(kernel, args, arg, target, grid, lambda made, positional, named: run(made, positional, named, out, ranks)))


@app.command()
def sweep(
    kernel: KernelName,
    grid: Annotated[list[str] | None, typer.Option("--grid", help="A parameter and its values: rows=128,256 or n=128..4096*2.")] = None,
    args: Arguments = "",
    arg: Argument = None,
    target: TargetName = None,
    out: Annotated[str, typer.Option("--out", "-o", help="Folder of the results; what is done there is not done again.")] = "sweep",
    jobs: Annotated[int | None, typer.Option("--jobs", "-j", min=1, max=1024, help="Processes; default OPENNKI_NUM_THREADS.")] = None,
    limit: Annotated[float, typer.Option("--time-limit", min=0.1, help="Seconds that a point may take.")] = 300.0,
    checks: Annotated[str, typer.Option("--checks", help="Checks of the runs: full, fast, off, or none to not run the kernel.")] = "fast",
    seed: Annotated[int, typer.Option(help="Seed of the values of the tensors.")] = 0,
    retry: Annotated[bool, typer.Option("--retry", help="Run points again that did not succeed.")] = False,
    parquet: Annotated[bool | None, typer.Option("--parquet/--no-parquet", help="Default: where pyarrow is installed.")] = None,
    plot: Annotated[bool | None, typer.Option("--plot/--no-plot", help="Default: where matplotlib is installed.")] = None,
    ray: Annotated[bool, typer.Option("--ray", help="Run on a Ray cluster.")] = False,
    ray_address: Annotated[str | None, typer.Option("--ray-address", help="The cluster; default: as Ray finds it.")] = None,
) -> None:
    """Estimate and run a kernel for all combinations of shapes, dtypes, targets and tuning parameters, side by side.

    {name} in the name of the kernel and in arguments stands for the values of --grid name=...; `target` and `launch` are the target and the
    launch grid; other parameters are keyword arguments of the kernel. Results go to results.csv, results.parquet and plot.svg. A point that
    fails, crashes or takes too long is a row with its error.
    """
    from opennki.tools.arguments import split
    from opennki.tools.run_script import report
    from opennki.tools.sweep.run import Options
    from opennki.tools.sweep.run import sweep as run
    from opennki.tools.sweep.tables import has

    path, _, attribute = kernel.rpartition(":")
    if not path or not attribute:
        raise _fail(f"{kernel!r}: write script.py:kernel")
    if not Path(path).is_file():
        raise _fail(f"there is no file {path}")
    if checks not in ("full", "fast", "off", "none"):
        raise _fail(f"--checks {checks}: one of full, fast, off, none")
    try:
        for what, asked in (("parquet", parquet), ("plot", plot)):
            if asked is None and not has(what):
                print(f"opennki: no {what}, pip install 'opennki[sweep]' brings what it needs", file=sys.stderr)
        options = Options(out, jobs, limit, checks, seed, retry, ("csv", "parquet") if (has("parquet") if parquet is None else parquet)
                          else ("csv",), has("plot") if plot is None else plot, ray or ray_address is not None, ray_address)  # fmt: skip
        text, status = run(path, attribute, [*split(args), *(arg or [])], target, grid or [], options)
    except NkiError as exc:
        exc.loc = UNKNOWN
        report(exc, sys.stderr)
        raise typer.Exit(1) from None
    print(text)
    raise typer.Exit(status)


@app.command()
def doctor() -> None:
    """Show versions, settings and the machine: what to put into a bug report."""
    from opennki.tools.machine import show

    show()


if __name__ == "__main__":
    main()
