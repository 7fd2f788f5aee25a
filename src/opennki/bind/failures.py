"""A kernel's exception on its way through a runtime that carries text only.

XLA turns what a handler reports into an exception of its own, which holds a message and nothing else. So the
message is made to stand alone, and ends in a token, `[nki-error 17]`, by which the exception itself can be
found again in this process: `cause_of(error)`.
"""
from __future__ import annotations

import re
import threading
import traceback
from itertools import count
from types import TracebackType

from opennki.errors import Loc, NkiError, user_frame

KEPT = 64           # exceptions that can still be found; older ones are dropped
MAX_TEXT = 65536    # characters of a message; what is longer is cut in the middle
_TOKEN = re.compile(r"\[nki-error (\d+)\]")

_lock = threading.Lock()
_numbers = count(1)
_kept: dict[int, BaseException] = {}


def describe(exc: BaseException) -> str:
    """The text a user needs: an NkiError as it is; any other with its class, and the NkiError that caused it or the
    line that raised it."""
    try:
        text = str(exc)
    except BaseException as why:    # the text is the user's code too, and must not cost us the report
        text = f"<its text cannot be had: {type(why).__name__}>"
    if not isinstance(exc, NkiError):
        text = f"{type(exc).__name__}: {text}" if text else type(exc).__name__
        place = _place(exc.__traceback__)
        if isinstance(exc.__cause__, NkiError):     # a runtime index outside of its tensor is an IndexError
            text += f"\n{exc.__cause__}"
        elif place is not None:
            source = place.source()
            text += f"\n  at {place} in {place.function}" + (f"\n      {source}" if source else "")
    text = "\n".join([text, *map(str, getattr(exc, "__notes__", ()))])
    if len(text) > MAX_TEXT:
        half = MAX_TEXT // 2
        text = f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
    return text


def _place(tb: TracebackType | None) -> Loc | None:
    """The innermost line of the user's in a traceback; the innermost line of all where the user has none."""
    places = [(frame, line) for frame, line in traceback.walk_tb(tb)]
    mine = [p for p in places if user_frame(p[0]) is p[0]]
    if not places:
        return None
    frame, line = (mine or places)[-1]
    return Loc(frame.f_code.co_filename, line, frame.f_code.co_name)


def keep(exc: BaseException) -> str:
    """Keep an exception for `cause_of`, and return its message with the token at the end.

    The local variables of the frames it went through are dropped: they hold views of the runtime's buffers, and
    a debugger or a traceback that prints locals would read memory that is no longer there.
    """
    text = describe(exc)
    _drop_locals(exc)
    with _lock:
        number = next(_numbers)
        _kept[number] = exc
        for old in list(_kept)[:-KEPT]:
            del _kept[old]
    return f"{text}\n[nki-error {number}]"


def _drop_locals(exc: BaseException) -> None:
    """Clear the finished frames of an exception and of those it came from.

    A program may run while the user handles an exception, on the user's own thread, and then that one is in the
    chain too. It is not the kernel's, and is known by starting in a frame that still runs: it keeps its variables.
    """
    running = {frame for frame, _ in traceback.walk_stack(None)}
    seen: set[int] = set()
    pending: list[BaseException | None] = [exc]
    while pending:
        link = pending.pop()
        tb = link.__traceback__ if link is not None else None
        if link is None or id(link) in seen or (link is not exc and tb is not None and tb.tb_frame in running):
            continue
        seen.add(id(link))
        traceback.clear_frames(tb)
        pending += [link.__cause__, link.__context__, *(link.exceptions if isinstance(link, BaseExceptionGroup) else ())]


def count_kept() -> int:
    """How many exceptions were kept so far: it has grown where a kernel has failed since."""
    with _lock:
        return max(_kept, default=0)


def cause_of(error: BaseException | str) -> BaseException | None:
    """The exception that a runtime's error reports, by the token in its text; None if it is not one of ours.

    For `raise ... from cause_of(error)`, or to re-raise a KeyboardInterrupt that a handler had to swallow.
    """
    tokens = _TOKEN.findall(str(error))
    with _lock:
        return _kept.get(int(tokens[-1])) if tokens else None
