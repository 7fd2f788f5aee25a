"""The thread pool and the buffers of the native library."""

from __future__ import annotations

import ctypes as C
import os
import signal
import threading
import time

import numpy as np
import pytest

Task = C.CFUNCTYPE(None, C.c_void_p, C.c_int64, C.c_int)


@pytest.fixture(scope="module")
def lib(native_levels):
    found = next(iter(native_levels.values()))
    found.nki_alloc.restype = C.c_void_p
    found.nki_alloc.argtypes = [C.c_size_t]
    found.nki_free.argtypes = [C.c_void_p]
    found.nki_free.restype = None
    found.nki_kept.restype = C.c_size_t
    return found


def run(lib, threads, tasks, body):
    """Run body(task, worker) in the pool; failures are raised here."""
    failures = []

    def call(_, task, worker):
        try:
            body(task, worker)
        except BaseException as exc:
            failures.append(exc)

    lib.nki_parallel(C.c_int(threads), C.c_int64(tasks), Task(call), None)
    if failures:
        raise failures[0]


def collect(lib, threads, tasks):
    done, workers = [], set()
    run(lib, threads, tasks, lambda t, w: (done.append(t), workers.add(w)))
    assert sorted(done) == list(range(tasks))
    assert workers <= set(range(max(threads, 1)))
    return workers


@pytest.mark.parametrize("threads", [-1, 0, 1, 2, 3, 8])
@pytest.mark.parametrize("tasks", [0, 1, 2, 7, 500])
def test_every_task_runs_once(lib, threads, tasks):
    for _ in range(5):
        collect(lib, threads, tasks)


def test_threads_work_at_the_same_time(lib):
    """Four tasks that wait for each other end only if four threads have them."""
    meeting = threading.Barrier(4)
    seen = {}
    run(lib, 4, 4, lambda t, w: (meeting.wait(20), seen.__setitem__(w, threading.get_ident())))
    assert set(seen) == {0, 1, 2, 3}
    assert len(set(seen.values())) == 4
    assert seen[0] == threading.get_ident()


def test_more_threads_later(lib):
    for n in (2, 6, 3):
        meeting = threading.Barrier(n)
        run(lib, n, n, lambda t, w, meeting=meeting: meeting.wait(20))


def test_nested_calls_run_in_the_caller(lib):
    inner = []

    def body(task, worker):
        me = threading.get_ident()
        run(lib, 4, 10, lambda t, w: inner.append((task, t, w, threading.get_ident() == me)))

    run(lib, 3, 6, body)
    assert sorted(inner) == [(a, b, 0, True) for a in range(6) for b in range(10)]


def test_concurrent_callers(lib):
    errors = []

    def caller():
        try:
            for _ in range(60):
                collect(lib, 3, 20)
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=caller) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
        assert not t.is_alive()
    assert not errors


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:.*fork.*:RuntimeWarning")
def test_a_forked_child_has_a_pool_of_its_own(lib):
    collect(lib, 3, 50)
    pid = os.fork()
    if pid == 0:
        ok = False
        try:
            meeting = threading.Barrier(3)
            run(lib, 3, 3, lambda t, w: meeting.wait(20))
            collect(lib, 3, 50)
            ok = True
        finally:
            os._exit(0 if ok else 1)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            assert status == 0
            break
        time.sleep(0.02)
    else:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        pytest.fail("the child hangs")
    collect(lib, 3, 50)  # and the parent still has its own


def test_an_idle_pool_takes_no_time(lib):
    collect(lib, 4, 50)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.05


def test_tasks_keep_subnormals_whatever_the_caller_does(lib):
    """The caller flushes subnormals to zero; tasks do not, and the caller does again afterwards."""
    torch = pytest.importorskip("torch")
    tiny = np.full(4, 1e-40, np.float32)

    def kept():
        return bool((tiny * np.float32(0.5)).all())

    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU does not flush")
    try:
        assert not kept()
        for threads in (1, 3):
            seen = []
            meeting = threading.Barrier(threads)
            run(lib, threads, threads, lambda t, w, meeting=meeting, seen=seen: (meeting.wait(20), seen.append(kept())))
            assert seen == [True] * threads
            assert not kept()
    finally:
        torch.set_flush_denormal(False)
    assert kept()


def test_buffers_are_used_again(lib):
    lib.nki_trim()
    a = lib.nki_alloc(5_000_000)
    assert a % 64 == 0
    C.memset(a, 7, 5_000_000)
    lib.nki_free(a)
    assert 5_000_000 <= lib.nki_kept() < 5_700_000
    b = lib.nki_alloc(4_990_000)  # about the same size
    assert b == a
    assert lib.nki_kept() == 0
    c = lib.nki_alloc(4_990_000)
    assert c != b
    C.memset(c, 1, 4_990_000)
    lib.nki_free(b)
    lib.nki_free(c)
    lib.nki_trim()
    assert lib.nki_kept() == 0


def test_buffers_kept_are_bounded(lib):
    lib.nki_trim()
    mib = 1 << 20
    several = [lib.nki_alloc(60 * mib) for _ in range(6)]  # never touched, so they cost no memory
    assert len(set(several)) == 6
    for x in several:
        lib.nki_free(x)
        assert lib.nki_kept() <= 256 * mib
    assert lib.nki_kept() >= 180 * mib
    huge = lib.nki_alloc(300 * mib)
    kept = lib.nki_kept()
    lib.nki_free(huge)
    assert lib.nki_kept() == kept
    many = [lib.nki_alloc(100) for _ in range(300)]
    for x in many:
        lib.nki_free(x)
    assert lib.nki_kept() <= 256 * mib
    lib.nki_free(None)
    lib.nki_free(lib.nki_alloc(0))
    assert lib.nki_alloc(2**63) is None
    lib.nki_trim()
    assert lib.nki_kept() == 0


def test_buffers_from_several_threads(lib):
    errors = []

    def work(seed):
        rng = np.random.default_rng(seed)
        try:
            for _ in range(300):
                n = int(rng.integers(1, 40_000))
                p = lib.nki_alloc(n)
                C.memset(p, seed, n)
                assert C.string_at(p, n) == bytes([seed]) * n
                lib.nki_free(p)
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(1, 5)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not errors
    lib.nki_trim()
