"""XLA's typed handler: arrays, payload, floating-point mode, threads. Programs are real JAX programs."""

from __future__ import annotations

import ctypes
import gc
import re
import subprocess
import sys
import threading

import numpy as np
import pytest

from opennki.bind import failures, fpmode, xla_ffi
from opennki.errors import NkiTypeError, NkiValueError
from tests.bind.programs import VERSION, caller, copy, copy_target, jax, jnp, message, register, target


@pytest.fixture
def x64():
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


# --- arrays -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16", "float32",
    "float64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3", "complex64", "complex128"])
@pytest.mark.parametrize("shape", [(), (3, 5), (2, 1, 3, 1, 2, 1, 2, 1, 2)], ids=str)
def test_every_dtype_arrives_with_its_bits(x64, dtype, shape):
    kind = np.dtype(getattr(jnp, dtype if dtype != "bool" else "bool_"))
    values = np.arange(np.prod(shape)).reshape(shape) % 7 - 3
    x = jnp.asarray((np.abs(values) if dtype.startswith("u") else values).astype(kind))
    seen = []

    def run(payload, inputs, outputs):
        seen.append([(a.dtype, a.shape, a.flags.c_contiguous) for a in inputs + outputs])
        copy(payload, inputs, outputs)

    [y] = jax.jit(caller(target(run), x))(x)
    assert np.asarray(y).tobytes() == np.asarray(x).tobytes() and y.dtype == kind and y.shape == shape
    assert seen == [[(kind, shape, True)] * 2]


def test_empty_arrays():
    """Next to one that is not: XLA drops a call of which every result is empty."""
    empty, full, seen = jnp.zeros((0, 4), jnp.bfloat16), jnp.ones(3), []

    def run(payload, inputs, outputs):
        seen.extend((a.shape, a.dtype.name, a.flags.writeable) for a in inputs + outputs)
        copy(payload, inputs, outputs)

    ys = jax.jit(caller(target(run), empty, full))(empty, full)
    assert ys[0].shape == (0, 4) and np.array_equal(ys[1], full)
    assert seen == [((0, 4), "bfloat16", False), ((3,), "float32", False), ((0, 4), "bfloat16", True), ((3,), "float32", True)]


@pytest.mark.parametrize("dtype", ["int4", "uint4", "float8_e4m3b11fnuz", "float8_e5m2fnuz"])
def test_a_dtype_that_kernels_lack_is_named(dtype):
    x, plain = jnp.ones(8, getattr(jnp, dtype)), jnp.ones(8, jnp.float32)
    text = message(jax.jit(caller(copy_target(), plain, plain)), plain, x)
    shown = f"({dtype}|number 0)"       # the FFI of early versions has no number for int4
    assert re.search(f"operand 1 has XLA's element type {shown}, which kernels do not have", text) and "float8_e4m3fn" in text
    assert re.search(f"output 1 has XLA's element type {shown},", message(jax.jit(caller(copy_target(), plain, x)), plain, plain))
    assert isinstance(failures.cause_of(text), NkiTypeError)


def test_several_operands_and_outputs_keep_their_order():
    xs = [jnp.full((2, n), n, jnp.float32) for n in range(1, 41)]

    def run(payload, inputs, outputs):
        for source, out in zip(inputs, reversed(outputs)):
            out[...] = source

    ys = jax.jit(caller(target(run), *reversed(xs)))(*xs)
    assert [np.asarray(y).tolist() for y in ys] == [np.asarray(x).tolist() for x in reversed(xs)]


def test_no_operands():
    def run(payload, inputs, outputs):
        assert inputs == []
        outputs[0][...] = 7

    assert np.asarray(jax.jit(caller(target(run), np.zeros(3, np.int32)))()[0]).tolist() == [7, 7, 7]


def test_a_transposed_operand_comes_row_major():
    x = jnp.arange(12.).reshape(3, 4)
    [y] = jax.jit(lambda a: caller(copy_target(), a.T)(a.T))(x)
    assert np.array_equal(y, np.asarray(x).T)


def test_nothing_is_copied():
    seen = []

    def run(payload, inputs, outputs):
        seen.extend(a.ctypes.data for a in inputs + outputs)
        copy(payload, inputs, outputs)

    x = jnp.arange(4096.)
    call = jax.jit(caller(target(run), x))
    [y] = jax.block_until_ready(call(x))
    assert seen == [x.unsafe_buffer_pointer(), y.unsafe_buffer_pointer()]


def test_inputs_are_read_only():
    def run(payload, inputs, outputs):
        copy(payload, inputs, outputs)
        inputs[0][0] = 5

    x = jnp.zeros(4)
    assert "ValueError: assignment destination is read-only" in message(jax.jit(caller(target(run), x)), x)
    assert np.asarray(x).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("donated", [False, True])
def test_an_aliased_output_is_its_operand(donated):
    seen = []

    def run(payload, inputs, outputs):
        seen.append((inputs[0].ctypes.data, outputs[0].ctypes.data))
        outputs[0] += 1

    x = jnp.arange(4096.)
    pointer = x.unsafe_buffer_pointer()
    call = jax.jit(caller(target(run), x, aliases={0: 0}), donate_argnums=(0,) if donated else ())
    [y] = jax.block_until_ready(call(x))
    [(source, out)] = seen
    assert source == out == y.unsafe_buffer_pointer()
    assert np.array_equal(y, np.arange(1., 4097))
    assert (source == pointer) is donated and x.is_deleted() is donated
    if not donated:
        assert np.array_equal(x, np.arange(4096.))


# --- payload ----------------------------------------------------------------------------------------------

def test_each_call_site_gets_its_own_payload_and_the_same_object_each_time(monkeypatch):
    monkeypatch.setattr(xla_ffi, "_KEPT_PAYLOADS", 2)   # so that entries are dropped and read again
    seen = []
    name = target(lambda payload, inputs, outputs: (seen.append(payload), copy(payload, inputs, outputs)))
    x = jnp.ones(3)
    texts = ["", "é\n\"q\"", "a" * 70_000, "b" * 70_000]
    calls = [jax.jit(caller(name, x, opaque=t)) for t in texts]
    for call in calls * 2:
        jax.block_until_ready(call(x))
    assert seen == [t.encode() for t in texts] * 2
    seen.clear()
    for _ in range(2):
        jax.block_until_ready(calls[2](x))
    assert seen[0] is seen[1]


def test_a_payload_at_the_address_of_an_old_one_is_read_anew():
    seen = []
    name = target(lambda payload, inputs, outputs: (seen.append(payload), copy(payload, inputs, outputs)))
    x = jnp.ones(3)
    for n in range(20):
        call = jax.jit(caller(name, x, opaque=f"{n:05d}" * 40))
        jax.block_until_ready(call(x))
        del call
        jax.clear_caches()
        gc.collect()
    assert seen == [f"{n:05d}".encode() * 40 for n in range(20)]


class Attributes:
    """The attributes of a frame in memory that a test can change in place: names, and (type, bytes or address) each."""

    def __init__(self, *names):
        self.spans = [xla_ffi._Span(ctypes.cast(ctypes.c_char_p(n), ctypes.c_void_p), len(n)) for n in names]
        self.items = [xla_ffi._Span() for _ in names]
        self.types = (ctypes.c_int * len(names))()
        self.alive = names
        self.pointers = [(ctypes.c_void_p * len(names))(*map(ctypes.addressof, a)) for a in (self.spans, self.items)]

    def put(self, i, kind, value):
        held = ctypes.create_string_buffer(value, len(value) + 1)
        self.alive += (held,)
        self.types[i], self.items[i].data, self.items[i].size = kind, ctypes.addressof(held), len(value)
        return self

    def frame(self, size):
        return size, ctypes.addressof(self.types), *map(ctypes.addressof, self.pointers)


def test_a_remembered_place_is_never_trusted():
    attributes, payloads = Attributes(b"kernel", b"opaque"), xla_ffi._Payloads("opaque")
    attributes.put(0, 4, b"not this").put(1, 4, b"first")
    first = payloads.read(*attributes.frame(2))
    assert first == b"first" and payloads.read(*attributes.frame(2)) is first
    attributes.put(1, 4, b"other")                              # other bytes, same length
    assert payloads.read(*attributes.frame(2)) == b"other"
    attributes.put(1, 4, b"longer than that")
    assert payloads.read(*attributes.frame(2)) == b"longer than that"
    attributes.put(1, 4, b"")
    assert [payloads.read(*attributes.frame(2)) for _ in range(2)] == [b"", b""]
    attributes.put(1, 3, b"")                                   # no string any more
    with pytest.raises(NkiValueError, match="no string attribute 'opaque'"):
        payloads.read(*attributes.frame(2))
    with pytest.raises(NkiValueError, match="no string attribute 'opaque'"):
        payloads.read(*attributes.frame(1))                     # fewer attributes than the place
    attributes.pointers[0][:] = attributes.pointers[0][::-1]    # the names change places
    assert payloads.read(*attributes.frame(2)) == b"not this"


def test_only_the_named_attribute_is_read():
    seen = []
    name = target(lambda payload, inputs, outputs: (seen.append(payload), copy(payload, inputs, outputs)), attribute="kernel")
    x = jnp.ones(3)
    call = caller(name, x, a=np.int32(3), kernel="mine", kernem="other", z=np.arange(3), opaque="no")
    jax.block_until_ready(jax.jit(call)(x))
    assert seen == [b"mine"]
    assert "no string attribute 'kernel'" in message(jax.jit(caller(name, x)), x)
    assert "no string attribute 'kernel'" in message(jax.jit(caller(name, x, kernel=np.int32(3))), x)


# --- floating-point mode ----------------------------------------------------------------------------------

@pytest.mark.skipif(not fpmode.AVAILABLE, reason="no access to the floating-point mode here")
def test_kernels_keep_denormals_and_xla_gets_its_mode_back():
    seen = []

    def probe(frame):       # a handler without the mode
        f = xla_ffi._Frame.from_address(frame)
        if f.extension:
            xla_ffi._fill_metadata(f.extension, VERSION)
        elif f.stage == 3:
            seen.append(("xla", threading.get_ident(), fpmode.flushes_denormals()))

    def run(payload, inputs, outputs):
        seen.append(("kernel", threading.get_ident(), fpmode.flushes_denormals()))
        np.multiply(inputs[0], np.float32(1), out=outputs[0])
        if payload == b"bad":
            raise ValueError

    probe_name = register(ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(probe))
    x = jnp.asarray(np.full(64, 1e-40, np.float32))
    kernel_name = target(run)

    @jax.jit
    def program(a):
        look, kernel = caller(probe_name, a, aliases={0: 0}), caller(kernel_name, a)
        return look(kernel(look(a)[0])[0])[0]

    y = np.asarray(program(x))
    assert np.array_equal(y.view(np.int32), np.full(64, 1e-40, np.float32).view(np.int32))
    me = seen[0][1]
    assert seen == [("xla", me, True), ("kernel", me, False), ("xla", me, True)]
    # The user's thread is as before, after an error too.
    message(jax.jit(caller(kernel_name, x, opaque="bad")), x)
    assert not fpmode.flushes_denormals()


# --- threads ----------------------------------------------------------------------------------------------

def test_threads_share_a_handler():
    name = target(lambda payload, inputs, outputs: np.add(inputs[0], int(payload), out=outputs[0]))
    x = jnp.arange(16.)
    calls = [jax.jit(caller(name, x, opaque=str(n))) for n in range(4)]
    wrong = []

    def work(n):
        try:
            for _ in range(500):
                if np.asarray(calls[n](x)[0])[3] != 3 + n:
                    wrong.append(n)
        except BaseException as exc:
            wrong.append(exc)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == [] and not any(t.is_alive() for t in threads)


# --- the rest ---------------------------------------------------------------------------------------------

def test_the_untyped_handler_gets_addresses():
    seen, errors = [], []

    def run(payload, inputs, output):
        seen.append(payload)
        if payload == b"bad":
            raise ValueError("bad")
        a, b = (xla_ffi.view(inputs[i], (2, 4), np.float32, writable=False) for i in range(2))
        outs = [output]
        if payload == b"two":
            outs = [int(p) for p in xla_ffi.view(output, (2,), np.uint64)]
        for out, value in zip(outs, (a + b, a * b)):
            xla_ffi.view(out, (2, 4), np.float32)[...] = value

    name = register(xla_ffi.untyped_handler(run, errors.append), api_version=0)
    x = jnp.arange(8, dtype=jnp.float32).reshape(2, 4)
    spec = jax.ShapeDtypeStruct(x.shape, x.dtype)

    def call(payload, specs):
        function = jax.ffi.ffi_call(name, specs, custom_call_api_version=3, legacy_backend_config=payload)
        return jax.block_until_ready(jax.jit(function)(x, x))

    assert np.array_equal(call("one", spec), x + x)
    added, multiplied = call("two", (spec, spec))
    assert np.array_equal(added, x + x) and np.array_equal(multiplied, x * x)
    call("bad", spec)
    assert seen == [b"one", b"two", b"bad"] and [str(e) for e in errors] == ["bad"]


def test_the_version_comes_from_the_header(tmp_path):
    assert VERSION[0] == 0 and VERSION[1] >= 1
    with pytest.raises(NkiValueError, match="no version of XLA's FFI"):
        xla_ffi.version_from_header(str(tmp_path))
    header = tmp_path / "xla" / "ffi" / "api" / "c_api.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define XLA_FFI_API_MAJOR 7\n")
    with pytest.raises(NkiValueError, match="no version of XLA's FFI"):
        xla_ffi.version_from_header(str(tmp_path))
    header.write_text("#define XLA_FFI_API_MAJOR 7\n#define XLA_FFI_API_MINOR 12\n")
    assert xla_ffi.version_from_header(str(tmp_path)) == (7, 12)
    with pytest.raises(NkiValueError, match=r"FFI 7\.12"):
        xla_ffi.typed_handler(copy, version=(7, 12))


def test_xla_refuses_another_version_with_a_clean_error():
    handler = xla_ffi.typed_handler(copy, version=(0, VERSION[1] + 50))
    x = jnp.ones(3)
    with pytest.raises(Exception, match=r"(?i)version"):
        jax.block_until_ready(jax.jit(caller(register(handler), x))(x))


def test_no_framework_is_imported():
    code = "import sys, opennki.bind.xla_ffi; sys.exit('jax' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
