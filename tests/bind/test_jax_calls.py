"""Kernels called with JAX arrays: values, results, dtypes, the custom call, errors."""

from __future__ import annotations

import base64
import json
import re

import ml_dtypes
import jax
import jax.numpy as jnp
import numpy as np
import pytest


from opennki.bind.jax import TARGET, JAXKernel, JaxTraceResult, nki_call_p
from opennki.errors import NkiError, NkiTypeError, NkiValueError
from opennki.kernels.framework import UnifiedKernel
from opennki.kernels.payload import decode_backend_config
from tests.bind import kernels as k

X, Y = k.numbers(64, 16), k.numbers(64, 16, seed=1)


@pytest.fixture(autouse=True)
def target(monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")


def lowered(f, *args):
    return jax.jit(f).trace(*args).lower(lowering_platforms=("neuron",)).as_text()


def payloads(text):
    return re.findall(r'(?:backend_config|opaque) = "([A-Za-z0-9+/=]{20,})"', text)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_values(wrap):
    np.testing.assert_array_equal(wrap(lambda x, y: k.axpy(x, y))(X, jnp.asarray(Y)), X * 2 + Y)
    np.testing.assert_array_equal(wrap(lambda x, y: k.axpy(x, y, a=-0.5))(jnp.asarray(X), Y), X * -0.5 + Y)
    np.testing.assert_array_equal(wrap(lambda x: k.rows[2](x))(jnp.asarray(X)), X * 2)
    np.testing.assert_allclose(wrap(k.matmul)(jnp.asarray(X), jnp.asarray(Y)), X.T @ Y, rtol=1e-5, atol=1e-5)


def test_results_keep_their_structure():
    double, (narrow, total) = jax.jit(k.several)(jnp.asarray(X))
    np.testing.assert_array_equal(double, X * 2)
    np.testing.assert_array_equal(np.asarray(narrow), X.astype(ml_dtypes.bfloat16))
    np.testing.assert_allclose(total, X.sum(1, keepdims=True), rtol=1e-5, atol=1e-6)
    assert narrow.dtype == jnp.bfloat16 and total.shape == (64, 1)


def test_an_input_that_is_written_is_a_result_and_stays_as_it_was():
    acc = jnp.asarray(Y)
    new = k.accumulate(jnp.asarray(X), acc)
    np.testing.assert_array_equal(new, X + Y)
    np.testing.assert_array_equal(acc, Y)
    out = jnp.zeros((64, 16))
    np.testing.assert_array_equal(k.nki.jit(k.scale_into, mode="jax", kernel_return=False)(jnp.asarray(X), out), X * 3)
    assert not np.asarray(out).any()


def test_a_donated_input_is_updated_in_place():
    step = jax.jit(k.accumulate, donate_argnums=1)
    acc = jnp.asarray(Y)
    where = acc.unsafe_buffer_pointer()
    new = step(jnp.asarray(X), acc)
    np.testing.assert_array_equal(new, X + Y)
    assert acc.is_deleted() and new.unsafe_buffer_pointer() == where


@pytest.mark.parametrize("kernel", [k.copy, k.move], ids=["copy", "move"])
@pytest.mark.parametrize(
    "dtype",
    [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32)]
    + ["bool", "float16", "bfloat16", "float32", "float8_e4m3", "float8_e4m3fn", "float8_e5m2"],
)
def test_dtypes(dtype, kernel):
    if kernel is k.copy and dtype == "uint32":
        values = np.arange(64, dtype=np.uint32).reshape(4, 16)  # SBUF arithmetic is float32
    else:
        values = k.numbers(4, 16, seed=3) * 10
    x = jnp.asarray(values).astype(dtype)
    got = jax.jit(kernel)(x)
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(got).view(np.uint8), np.asarray(x).view(np.uint8))


def test_an_empty_operand_is_passed_and_an_empty_tensor_cannot_be_made():
    @k.nki.jit
    def with_cache(x, cache):
        return k.copy.func(x) if cache.shape[0] == 0 else k.copy.func(cache)

    np.testing.assert_array_equal(jax.jit(with_cache)(jnp.asarray(X), jnp.zeros((0, 4))), X)
    with pytest.raises(NkiValueError, match="size 0"):
        k.move(jnp.zeros((0, 4)))


@pytest.mark.parametrize("shape", [(), (1,), (2, 3, 4, 5)])
def test_any_shape_moves(shape):
    x = jnp.asarray(k.numbers(*shape))
    np.testing.assert_array_equal(jax.jit(k.move)(x), x)


def test_64_bit_integers_are_refused_with_the_way_out():
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        with pytest.raises(NkiTypeError, match="int64") as caught:
            k.move(jnp.arange(8, dtype=jnp.int64).reshape(2, 4))
    assert "convert the array before the call" in str(caught.value)


def test_a_transposed_operand_arrives_row_major():
    x = jnp.asarray(X)
    np.testing.assert_array_equal(jax.jit(lambda a: k.copy(a.T))(x[:, :16]), X[:, :16].T)


# ---- the custom call ----


def test_the_payload_is_the_same_on_every_road():
    args = jnp.asarray(X), jnp.asarray(Y)
    neuron, cpu = lowered(k.axpy, *args), jax.jit(k.axpy).lower(*args).as_text()
    mine = UnifiedKernel(k.axpy).dump_config(X, Y).backend_config
    assert payloads(neuron) == payloads(cpu) == [mine]


def test_the_canonical_call_reads_as_documented():
    text = lowered(k.accumulate, jnp.asarray(X), jnp.asarray(Y))
    assert f"stablehlo.custom_call @{TARGET}" in text and "api_version = 0" in text
    assert "output_operand_aliases = [#stablehlo.output_operand_alias<output_tuple_indices = [], operand_index = 1" in text
    assert 'mhlo.frontend_attributes = {nki.has_collectives = "false", nki.kernel = "accumulate"}' in text
    assert "operand_layouts = [dense<[1, 0]> : tensor<2xindex>" in text
    config = json.loads(base64.b64decode(payloads(text)[0]))
    assert config["mac_count"] == 0 and config["platform_target"] == "trn2" and config["func_name"] == "accumulate"


def test_the_hlo_of_the_cpu_names_target_alias_and_kernel():
    text = jax.jit(k.accumulate).lower(jnp.asarray(X), jnp.asarray(Y)).compile().as_text()
    line = next(line for line in text.splitlines() if "custom-call" in line)
    assert f'custom_call_target="{TARGET}"' in line and "API_VERSION_TYPED_FFI" in line
    assert "output_to_operand_aliasing={{}: (1, {})}" in line
    assert 'nki.kernel="accumulate"' in line and "accumulate/nki_call" in line
    assert decode_backend_config(re.search(r'opaque = "([^"]+)"', line)[1]).aliases == ((1, 0),)


def test_several_results_have_tuple_aliases():
    @k.nki.jit
    def both(x, acc: k.nt.mutable_tensor):
        out = k.nl.ndarray(x.shape, dtype=x.dtype, buffer=k.nl.shared_hbm)
        tile = k.nl.load(x)
        k.nl.store(out, tile)
        k.nl.store(acc, k.nl.load(acc) + tile)
        return out, acc

    text = lowered(both, jnp.asarray(X), jnp.asarray(Y))
    assert "output_tuple_indices = [1], operand_index = 1" in text
    out, acc = jax.jit(both)(jnp.asarray(X), jnp.asarray(Y))
    np.testing.assert_array_equal(out, X)
    np.testing.assert_array_equal(acc, X + Y)


def test_the_primitive_is_in_the_jaxpr_with_a_short_name():
    jaxpr = jax.make_jaxpr(k.rows[2])(jnp.asarray(X))
    (equation,) = jaxpr.eqns
    assert equation.primitive is nki_call_p and isinstance(equation.params["trace"], JaxTraceResult)
    assert "rows[2]" in str(jaxpr)


def test_equal_kernels_are_lowered_once():
    results = [JAXKernel(k.axpy.func).specialise({"x": d, "y": d, "a": 2.0}) for d in [k_decl((64, 16))] for _ in range(2)]
    one, two = (JaxTraceResult(r, lambda: None) for r in results)
    assert one == two and hash(one) == hash(two) and one != JaxTraceResult(results[0], lambda: None, inline=True)


def k_decl(shape):
    from opennki.trace.kernel import DeclTensor

    return DeclTensor(shape, "float32")


def test_eval_shape_runs_nothing():
    shape = jax.eval_shape(k.several, jax.ShapeDtypeStruct((64, 16), jnp.float32))
    assert shape[0].shape == (64, 16) and shape[1][0].dtype == jnp.bfloat16


# ---- dispatch and settings ----


def test_mode_jax_takes_numpy_arrays():
    got = k.nki.jit(k.axpy.func, mode="jax")(X, Y)
    assert isinstance(got, jax.Array)
    np.testing.assert_array_equal(got, X * 2 + Y)


def test_a_strict_platform_has_the_vendors_words(monkeypatch):
    monkeypatch.setenv("OPENNKI_STRICT_PLATFORM", "1")
    with pytest.raises(NkiValueError, match="nki only support on neuron, current target: cpu"):
        k.axpy(jnp.asarray(X), jnp.asarray(Y))


def test_the_trace_is_made_again_at_lowering(monkeypatch):
    traces = []

    @k.nki.jit
    def counted(x):
        traces.append(1)
        return k.copy.func(x)

    jax.jit(counted).lower(jnp.asarray(X))
    assert len(traces) == 1
    monkeypatch.setenv("NKI_DONT_CACHE_TRACE_FOR_JAX_LOWERING", "TRUE")
    jax.jit(lambda x: counted(x)).lower(jnp.asarray(X))
    assert len(traces) == 2


def test_a_trace_for_other_shapes_has_the_vendors_words():
    trace = JaxTraceResult(JAXKernel(k.copy.func).specialise({"x": k_decl((8, 4))}), lambda: None)
    with pytest.raises(NkiTypeError, match="NKI trace is not properly cached, use ``export NKI_DONT_CACHE_TRACE_FOR_JAX_LOWERING=TRUE``"):
        nki_call_p.bind(jnp.zeros((8, 5)), trace=trace)


def test_simulation_refuses_jax_arrays():
    with pytest.raises(NkiTypeError, match="NumPy arrays"):
        k.nki.simulate_kernel(k.copy, jnp.asarray(X))


def test_a_tensor_without_an_nki_dtype_says_which_there_are():
    with pytest.raises(NkiTypeError, match="complex64"):
        k.copy(jnp.zeros((2, 2), jnp.complex64))


# ---- errors while running ----


def message_of(call):
    with pytest.raises(Exception) as caught:
        jax.block_until_ready(call())
    return str(caught.value)


def test_a_kernel_error_has_the_kernels_line_and_the_next_call_is_right():
    table, good, bad = jnp.asarray(k.numbers(8, 4)), jnp.asarray([[1], [3]], jnp.int32), jnp.asarray([[1], [9]], jnp.int32)
    step = jax.jit(k.pick)
    np.testing.assert_array_equal(step(table, good), np.asarray(table)[[1, 3]])
    text = message_of(lambda: step(table, bad))
    assert re.search(r"kernels\.py:\d+", text) and "nl.load(table[" in text and "out" in text.lower()
    np.testing.assert_array_equal(step(table, good), np.asarray(table)[[1, 3]])


def call(payload, *args, shapes=((64, 16),)):
    results = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    return jax.jit(lambda *a: jax.ffi.ffi_call(TARGET, results)(*a, opaque=payload))(*args)


def changed(**keys):
    kernel = UnifiedKernel(k.copy, platform_target="trn2")
    config = json.loads(base64.b64decode(kernel.dump_config(X).backend_config))
    config.update(keys)
    return base64.b64encode(json.dumps(config).encode()).decode()


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        ("", "no payload"),
        ("%%%", "not base64"),
        ("aGVsbG8=", "not JSON"),
        (changed(kernel_version=2), "newer opennki"),
        (changed(serialize_ir_string="opennki_ir = 1\n"), "cut short"),
        (changed(grid=[4]), "grid"),
    ],
    ids=["empty", "base64", "json", "newer", "ir", "grid"],
)
def test_a_corrupt_payload_is_an_exception_and_the_process_lives(payload, words):
    assert words in message_of(lambda: call(payload, jnp.asarray(X)))
    np.testing.assert_array_equal(call(changed(), jnp.asarray(X))[0], X)


def test_buffers_that_the_payload_does_not_name():
    good = changed()
    assert "float32[64, 16]" in message_of(lambda: call(good, jnp.zeros((32, 16))))
    assert "operands" in message_of(lambda: call(good, jnp.asarray(X), jnp.asarray(X)))
    assert "results" in message_of(lambda: call(good, jnp.asarray(X), shapes=((64, 16), (1, 1))))
    np.testing.assert_array_equal(call(good, jnp.asarray(X))[0], X)


def test_an_error_while_tracing_is_the_kernels_own():
    with pytest.raises(NkiError) as caught:
        jax.jit(k.axpy)(jnp.zeros((200, 4)), jnp.zeros((200, 4)))
    assert "kernels.py" in str(caught.value)


def test_denormals_are_as_in_the_interpreter():
    tiny = np.full((4, 4), 1e-40, np.float32)
    got = np.asarray(jax.jit(lambda x: k.axpy(x, x, a=3.0))(jnp.asarray(tiny)))
    np.testing.assert_array_equal(got, k.nki.simulate_kernel(k.axpy, tiny, tiny, a=3.0))
    assert (got != 0).all()


def test_the_older_call_with_output_parameters():
    import jax_neuronx

    shape = jax.ShapeDtypeStruct((64, 16), jnp.float32)
    np.testing.assert_array_equal(jax_neuronx.nki_call(k.scale_into, jnp.asarray(X), out_shape=shape), X * 3)
    f = jax.jit(lambda x: jax_neuronx.nki_call(k.scale_into.func, x, out_shape=(shape,)))
    (got,) = f(jnp.asarray(X))
    np.testing.assert_array_equal(got, X * 3)


def test_the_vendors_module_has_the_bridge():
    from neuronxcc.nki import _jax
    from neuronxcc.nki.compiler.backends.neuron.FrameworkKernel import FrameworkKernel
    from neuronxcc.nki.compiler.backends.neuron.TraceKernel import TraceKernel

    assert _jax.JAXKernel is JAXKernel and issubclass(JAXKernel, FrameworkKernel) and issubclass(FrameworkKernel, TraceKernel)
    assert _jax.nki_call_p is nki_call_p
