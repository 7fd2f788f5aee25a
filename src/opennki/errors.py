"""The errors that users see: one small tree, each with a place, a rule, a reason and a way out.

    NkiError                     a kernel or a call breaks a rule; `code` is the documented err_* code if there is one
      NkiTypeError   (TypeError)     an operand or argument of the wrong kind
      NkiValueError  (ValueError)    a value, shape or control flow that is not allowed
      NkiIndexError  (IndexError)    an access outside a tensor
      NkiReadError   (ValueError)    a read of elements that were never written
      NkiNotYet      (NotImplementedError)  a documented name that opennki does not have yet
      NkiDifferentiationError (NotImplementedError)  a kernel without a derivative is differentiated
      NkiParseError  (ValueError)    IR text, a payload or a file that is not well formed
      NkiFileError   (OSError)       a file or folder that cannot be read or written
    NkiWarning (UserWarning)     the same report where a check is set to warn

The documented codes, with rule, reason and remedy, are in `catalogue.py` (source: api_legacy "Errors").
"""
from __future__ import annotations

import contextlib
import linecache
import os
import sys
import warnings
from dataclasses import dataclass
from types import CodeType, FrameType

from opennki.catalogue import CATALOGUE

ISSUES = "https://github.com/opennki/opennki/issues"
_ROOT = os.path.dirname(os.path.abspath(__file__)) + os.sep
# the kernels that come with opennki are kernels like a user's: errors, IR and profiles name their lines
_LIBRARY = os.path.join(_ROOT, "dialects", "neuronxcc", "kernels") + os.sep
# a `with` of ours enters through here: its line is that of the user's with statement
_CONTEXTS = contextlib.__file__
_internal: dict[CodeType, bool] = {}


@dataclass(frozen=True, slots=True)
class Loc:
    """A place in user source: file, line (1-based) and function."""

    file: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    def source(self) -> str:
        """The source line, stripped; empty if the file cannot be read (notebook cells come from linecache)."""
        return linecache.getline(self.file, self.line).strip()


UNKNOWN = Loc("<unknown>", 0)


def user_frame(frame: FrameType | None = None) -> FrameType | None:
    """The innermost frame that is not opennki's own."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        inside = _internal.get(code)
        if inside is None:
            file = code.co_filename
            inside = _internal[code] = (
                (file.startswith(_ROOT) and not file.startswith(_LIBRARY)) or file == _CONTEXTS)
        if not inside:
            return frame
        frame = frame.f_back
    return None


def caller() -> Loc:
    """Location of the user's line that is running now."""
    frame = user_frame(sys._getframe(1))
    return UNKNOWN if frame is None else Loc(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


class NkiError(Exception):
    """A broken rule: where, which operand, which rule, why, and what to do.

    `message` says what is wrong here; rule, why and fix come from the catalogue unless they are given.
    """

    def __init__(self, message: str, *, code: str = "", loc: Loc | None = None, operand: str = "",
                 rule: str = "", why: str = "", fix: str = "") -> None:
        entry = CATALOGUE.get(code)
        self.message = message
        self.code = code
        self.loc = loc if loc is not None else caller()
        self.operand = operand
        self.rule = rule or (entry.rule if entry else "")
        self.why = why or (entry.why if entry else "")
        self.fix = fix or (entry.fix if entry else "")
        Exception.__init__(self, message)  # not the next class's: some bases of subclasses take other arguments

    def __str__(self) -> str:
        return render(self)


class NkiTypeError(NkiError, TypeError):
    """An operand or argument of the wrong kind."""


class NkiValueError(NkiError, ValueError):
    """A value, shape or control flow that is not allowed."""


class NkiIndexError(NkiError, IndexError):
    """An access outside a tensor."""


class NkiReadError(NkiError, ValueError):
    """A read of elements that were never written."""


class NkiNotYet(NkiError, NotImplementedError):
    """A documented name that opennki does not have yet."""

    def __init__(self, name: str, loc: Loc | None = None) -> None:
        super().__init__(f"{name} is not in opennki yet", loc=loc,
                         fix=f"see whether it is planned, or ask for it: {ISSUES}")


class NkiDifferentiationError(NkiError, NotImplementedError):
    """A kernel is differentiated and has no derivative."""


class NkiParseError(NkiError, ValueError):
    """IR text, a payload or a file that is not well formed."""


class NkiFileError(NkiError, OSError):
    """A file or folder that cannot be read or written. `errno` and `filename` are those of the system's error, where there is one."""


class NkiWarning(UserWarning):
    """A broken rule of a check that is set to warn."""


_BASES: dict[str, type[NkiError]] = {"type": NkiTypeError, "value": NkiValueError, "index": NkiIndexError,
                                     "read": NkiReadError, "error": NkiError}


def render(error: NkiError) -> str:
    """Text of an error: file:line, source line, operand, rule, reason, remedy."""
    head = f"{error.loc}: " if error.loc is not UNKNOWN else ""
    lines = [head + (f"{error.code}: " if error.code else "") + error.message]
    source = error.loc.source() if error.loc is not UNKNOWN else ""
    if source:
        lines.append(f"    {source}")
    lines += [f"  {label}: {text}" for label, text in (("operand", error.operand), ("rule", error.rule),
                                                       ("why", error.why), ("fix", error.fix)) if text]
    return "\n".join(lines)


def make(code: str, message: str, *, loc: Loc | None = None, operand: str = "", fix: str = "") -> NkiError:
    """Build the error of a documented code, of the class that the catalogue gives it."""
    entry = CATALOGUE[code]
    return _BASES[entry.base](message, code=code, loc=loc if loc is not None else caller(), operand=operand, fix=fix)


def warn(error: NkiError) -> None:
    """Report a broken rule as a warning that points at the user's line."""
    warnings.warn_explicit(NkiWarning(render(error)), None, error.loc.file, max(error.loc.line, 1))
