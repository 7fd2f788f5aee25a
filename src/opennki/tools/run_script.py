"""Run a script under the drop-in as `python script.py` would, and show its errors without our frames."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TextIO

import opennki
from opennki.errors import NkiError

_ROOT = os.path.dirname(os.path.abspath(opennki.__file__)) + os.sep
_HIDDEN = ("<frozen runpy>", "<frozen importlib")


def run(
    target: str, args: list[str], *, module: bool = False, full: bool = False, err: TextIO | None = None
) -> int:
    """Run a script (or, with `module`, a module by name) as __main__ with its own sys.argv and sys.path[0].

    Returns the exit status: that of SystemExit, 1 for an exception, which is printed to `err`; 130 for an
    interrupt. An NkiError is printed as its report alone; other exceptions with the frames of the user, or
    with all frames if `full`.
    """
    import opennki.dropin  # noqa: F401

    err = err or sys.stderr
    saved = sys.argv, list(sys.path)
    sys.argv = [target, *args]
    sys.path.insert(0, os.getcwd() if module else os.path.dirname(os.path.abspath(target)))
    try:
        if module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(target, run_name="__main__")
    except SystemExit as exc:
        return _status(exc, err)
    except KeyboardInterrupt:
        return 130
    except BaseException as exc:
        sys.stdout.flush()
        report(exc, err, full)
        return 1
    finally:
        sys.argv, sys.path[:] = saved
        sys.stdout.flush()
    return 0


def _status(exc: SystemExit, err: TextIO) -> int:
    if exc.code is None:
        return 0
    if isinstance(exc.code, int):
        return exc.code
    print(exc.code, file=err)
    return 1


def report(exc: BaseException, err: TextIO, full: bool = False) -> None:
    """Print an exception for the user."""
    if full:
        traceback.print_exception(exc, file=err)
    elif isinstance(exc, NkiError):
        print(f"{type(exc).__name__}: {exc}", file=err)
    else:
        lines = without_our_frames(exc)
        print("".join(lines), end="", file=err)
        if _ours_raised(exc):
            print(
                "This exception comes from inside opennki and is no rule of the language: please report it.\n"
                f"  `opennki run --full-traceback` shows all frames; issues: {opennki.errors.ISSUES}",
                file=err,
            )


def _last(tb: TracebackType | None) -> TracebackType | None:
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    return tb


def is_ours(filename: str) -> bool:
    """True for files of opennki and of the machinery that runs a script."""
    return filename.startswith((_ROOT, *_HIDDEN))


def _ours_raised(exc: BaseException) -> bool:
    last = _last(exc.__traceback__)
    return last is not None and last.tb_frame.f_code.co_filename.startswith(_ROOT)


def without_our_frames(exc: BaseException) -> list[str]:
    """The traceback as Python prints it, without frames of opennki, in causes and contexts as well."""
    shown = traceback.TracebackException.from_exception(exc, compact=True)
    pending: list[traceback.TracebackException | None] = [shown]
    seen: set[int] = set()
    while pending:
        one = pending.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.stack = traceback.StackSummary.from_list([f for f in one.stack if not is_ours(f.filename)])
        pending += [one.__cause__, one.__context__, *(one.exceptions or ())]
    return list(shown.format())


def load(path: str, attribute: str) -> object:
    """The object of a script, imported under the drop-in (its `__main__` block does not run). LookupError if
    it has no such name."""
    return found(load_module(path), attribute, path)


def load_module(path: str) -> ModuleType:
    """A script, imported under the drop-in."""
    import importlib.util

    import opennki.dropin  # noqa: F401

    file = Path(path).resolve()
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise LookupError(f"{path} is no Python file")
    sys.path.insert(0, str(file.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def found(module: ModuleType, attribute: str, path: str) -> object:
    """What a dotted name stands for in a module. LookupError, with the names that there are, if it has no such."""
    here: object = module
    for part in attribute.split("."):
        if not hasattr(here, part):
            kernels = ", ".join(
                n
                for n, v in vars(module).items()
                if callable(v) and getattr(v, "__module__", "") == module.__name__
            )
            raise LookupError(f"{path} has no {attribute!r}" + (f"; it has {kernels}" if kernels else ""))
        here = getattr(here, part)
    return here
