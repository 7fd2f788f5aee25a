"""The floating-point mode of a thread, without any framework."""

from __future__ import annotations

import ctypes
import platform
import threading

import pytest

from opennki.bind import fpmode

UPWARD = {"x86_64": 0x800, "aarch64": 0x400000, "arm64": 0x400000}.get(platform.machine())
pytestmark = pytest.mark.skipif(not fpmode.AVAILABLE or UPWARD is None, reason="no access to the floating-point mode here")


def third():
    one, three = 1.0, 3.0
    return one / three


@pytest.fixture
def upward():
    """A thread mode that is not the default one: rounding towards plus infinity."""
    library = ctypes.PyDLL(None)
    nearest = third()
    library.fesetround(UPWARD)
    yield nearest
    library.fesetround(0)


def test_the_default_mode_inside_and_the_old_one_after(upward):
    up = third()
    assert up > upward
    mode = fpmode.enter()
    inside = third()
    fpmode.leave(mode)
    assert inside == upward and third() == up


def test_the_old_mode_is_back_after_an_exception(upward):
    up = third()
    with pytest.raises(ZeroDivisionError):
        with fpmode.precise():
            assert third() == upward
            1 / 0
    assert third() == up


def test_modes_nest(upward):
    up = third()
    with fpmode.precise():
        with fpmode.precise():
            assert third() == upward
        assert third() == upward
    assert third() == up


def test_the_mode_is_of_one_thread(upward):
    seen = []
    with fpmode.precise():
        thread = threading.Thread(target=lambda: seen.append(third() > upward))
        thread.start()
        thread.join()
        assert third() == upward
    assert seen in ([True], [False]) and third() > upward


def test_denormals_are_kept_here():
    assert not fpmode.flushes_denormals()


def test_where_the_library_is_not_known_nothing_happens(monkeypatch, upward):
    monkeypatch.setattr(fpmode, "_get", None)
    with fpmode.precise():
        assert third() > upward
