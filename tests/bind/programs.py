"""JAX programs that call handlers of ours: helpers of the tests beside this file."""

from __future__ import annotations

import functools
import itertools

import pytest

from opennki.bind import xla_ffi

jax = pytest.importorskip("jax")
pytest.importorskip("jax.ffi")
jnp = jax.numpy
VERSION = xla_ffi.version_from_header(jax.ffi.include_dir())
_names = (f"opennki_test_{n}" for n in itertools.count())
_alive = []


def register(handler, name=None, api_version=1):
    """Register a handler for the rest of the process; returns the target's name."""
    name = name or next(_names)
    _alive.append(handler)
    kind = None if api_version else b"xla._CUSTOM_CALL_TARGET"
    jax.ffi.register_ffi_target(name, xla_ffi.capsule(handler, kind), platform="cpu", api_version=api_version)
    return name


def target(run, **kwargs):
    return register(xla_ffi.typed_handler(run, version=VERSION, **kwargs))


def caller(name, *results, aliases=None, **attributes):
    """A function of arrays that calls the target; results are arrays or ShapeDtypeStructs to take shapes from."""
    specs = [jax.ShapeDtypeStruct(r.shape, r.dtype) for r in results]
    attributes.setdefault("opaque", "payload")

    def call(*arrays):
        return jax.ffi.ffi_call(name, specs, input_output_aliases=aliases)(*arrays, **attributes)

    return call


def copy(payload, inputs, outputs):
    for source, out in zip(inputs, outputs):
        out[...] = source


@functools.cache
def copy_target():
    return target(copy)


def message(call, *arrays):
    """Text of the error that a program raises."""
    with pytest.raises(Exception, match="INTERNAL") as caught:
        jax.block_until_ready(call(*arrays))
    return str(caught.value)
