"""What a kernel raises inside a JAX program: the text, the exception itself, the next call, signals."""

from __future__ import annotations

import ctypes
import functools
import operator
import signal
import threading
import weakref
from _thread import interrupt_main

import numpy as np
import pytest

from opennki.bind import failures, xla_ffi
from opennki.errors import Loc, NkiError, NkiValueError, render
from tests.bind.programs import VERSION, caller, copy, jax, jnp, message, register, target

def failing(exc):
    """A target whose kernel raises on payload "bad" and copies otherwise; programs (bad, good) on it."""
    def run(payload, inputs, outputs):
        if payload == b"bad":
            raise exc
        copy(payload, inputs, outputs)

    name, x = target(run), jnp.ones(3)
    return jax.jit(caller(name, x, opaque="bad")), jax.jit(caller(name, x, opaque="good")), x


def works(call, x):
    return np.array_equal(call(x)[0], x)


def test_an_error_of_a_kernel_arrives_whole_and_the_next_call_is_right():
    error = NkiValueError("tile is too large", loc=Loc(__file__, 1, "kernel"), operand="x[0:128]", rule="r", why="w", fix="f")
    bad, good, x = failing(error)
    for _ in range(3):
        text = message(bad, x)
        assert f"INTERNAL: {render(error)}\n[nki-error " in text
        assert works(good, x)
    assert f"{__file__}:1: tile is too large\n    \"\"\"What a kernel raises" in text
    assert failures.cause_of(text) is error


@pytest.mark.parametrize("exc, start", [
    (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero"), (KeyError("k"), "KeyError: 'k'"),
    (AssertionError(), "AssertionError"), (KeyboardInterrupt(), "KeyboardInterrupt"), (SystemExit(3), "SystemExit: 3"),
    (GeneratorExit(), "GeneratorExit"), (MemoryError(), "MemoryError")], ids=lambda v: v if isinstance(v, str) else "")
def test_any_exception_becomes_an_error_with_its_class_and_line(exc, start):
    bad, good, x = failing(exc)
    text = message(bad, x)
    assert f"INTERNAL: {start}\n  at {__file__}:" in text
    assert "in run\n      raise exc" in text
    assert failures.cause_of(text) is exc
    assert works(good, x)


@pytest.mark.parametrize("what", ["say \"no\" and 'no'", "two\n  lines\r\n\ttab", "größer ≤ 128 — 核 🙂", "x" * 8192 + "end", "%s %n {}"])
def test_an_error_text_arrives_unchanged(what):
    bad, good, x = failing(NkiError(what, loc=Loc("k.py", 3)))
    assert f"INTERNAL: k.py:3: {what}\n[nki-error " in message(bad, x)
    assert works(good, x)


def test_an_error_text_that_c_cannot_carry_is_escaped_or_cut():
    assert "a\\0b \\udc80 c" in message(failing(NkiError("a\0b \udc80 c"))[0], jnp.ones(3))
    text = message(failing(NkiError("<" + "x" * 10**6 + ">", loc=Loc("k.py", 3)))[0], jnp.ones(3))
    assert len(text) < 70_000 and "k.py:3: <xx" in text and "characters left out" in text and "xx>\n[nki-error" in text


def test_an_error_whose_text_fails_is_still_an_error():
    class Odd(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    bad, good, x = failing(Odd())
    assert "Odd: <its text cannot be had: RuntimeError>" in message(bad, x)
    assert works(good, x)


def test_an_error_while_reporting_is_still_an_error(monkeypatch):
    bad, good, x = failing(ValueError("first"))

    def keep(exc):
        raise KeyboardInterrupt

    monkeypatch.setattr(failures, "keep", keep)
    assert "KeyboardInterrupt while an error of a kernel was reported" in message(bad, x)
    assert works(good, x)


def test_a_kept_error_does_not_hold_the_buffers():
    views = []

    def run(payload, inputs, outputs):
        mine = inputs[0]
        views.append(weakref.ref(mine))
        try:
            mine / None
        except TypeError as exc:
            raise ValueError("later") from exc

    x = jnp.ones(3)
    cause = failures.cause_of(message(jax.jit(caller(target(run), x)), x))
    assert isinstance(cause, ValueError) and isinstance(cause.__cause__, TypeError)
    assert cause.__traceback__ is not None
    assert views[0]() is None


def test_an_exception_that_the_user_handles_keeps_its_variables():
    bad, _, x = failing(ValueError("kernel"))

    def users():
        precious = 5
        raise LookupError

    try:
        users()
    except LookupError as mine:
        text = message(bad, x)
        frame = mine.__traceback__.tb_next.tb_frame
    assert failures.cause_of(text).__context__.__class__ is LookupError     # the program ran on this thread
    assert frame.f_locals == {"precious": 5}


def test_failures_are_bounded_and_found_by_their_token():
    first = ValueError("first")
    text = failures.keep(first)
    assert failures.cause_of(text) is first and failures.cause_of(RuntimeError(f"INTERNAL: {text}; and more")) is first
    for n in range(failures.KEPT):
        last = failures.keep(ValueError(str(n)))
    assert failures.cause_of(text) is None and str(failures.cause_of(last)) == str(n)
    assert failures.cause_of("no token") is None and failures.cause_of("[nki-error 99999999]") is None
    noted = ValueError("v")
    noted.add_note("a note")
    assert failures.describe(noted) == "ValueError: v\na note"


def test_a_signal_that_is_waiting_when_the_handler_starts():
    """Ctrl-C during XLA's own code: Python runs the signal handler at the first instruction of our function."""
    handler = xla_ffi.typed_handler(copy, version=VERSION)
    ran = []

    def probe(frame):
        if xla_ffi._Frame.from_address(frame).extension:
            return handler(frame)
        ran.append(threading.current_thread())
        # One call of C code for Python: no Python instruction between the signal and the handler.
        return list(map(operator.call, [interrupt_main, functools.partial(handler, frame)]))[1]

    name, x = register(ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(probe)), jnp.ones(3)
    call, before = jax.jit(caller(name, x)), signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        text = message(call, x)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ran == [threading.main_thread()]
    assert "INTERNAL: KeyboardInterrupt" in text and isinstance(failures.cause_of(text), KeyboardInterrupt)
