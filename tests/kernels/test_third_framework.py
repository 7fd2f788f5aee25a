"""A framework that opennki knows nothing about: its own tensors and dtypes, eager calls, and graphs that run later."""

from __future__ import annotations

import sys
import types

import ml_dtypes
import numpy as np
import pytest

from opennki import jit
from opennki.bind.host import run_payload
from opennki.dialects.neuronxcc import language as nl
from opennki.dialects.neuronxcc import typing as nt
from opennki.errors import NkiTypeError
from opennki.kernels.framework import FrameworkKernel, UnifiedKernel
from opennki.kernels.modes import Framework, register_framework, unregister_framework

BF16 = np.dtype(ml_dtypes.bfloat16)


# ---- the framework: nothing here knows of kernels ----------------------------------------------------------
class DType:
    """A dtype is an object with a name of the framework's own."""

    def __init__(self, name, storage):
        self.name, self.storage = name, np.dtype(storage)


DTYPES = [DType("f32", np.float32), DType("brain16", BF16), DType("i32", np.int32), DType("truth", np.bool_), DType("f64", np.float64)]


class Tensor:
    """Eager: it has a buffer. In a graph: only a shape and a dtype, and the graph gives it a value when it runs."""

    def __init__(self, shape, dtype, buffer=None):
        self.dims, self.kind, self.buffer = shape, dtype, buffer


def tensor(array):
    array = np.array(array)
    return Tensor(array.shape, next(d for d in DTYPES if d.storage == array.dtype), array)


HANDLERS = {}


class Graph:
    """`with Graph() as g:` stores calls; `g.run({tensor: array}, tensor)` executes them in order."""

    current = None

    def __init__(self):
        self.calls = []

    def __enter__(self):
        Graph.current = self
        return self

    def __exit__(self, *_):
        Graph.current = None

    def placeholder(self, shape, dtype):
        return Tensor(shape, dtype)

    def run(self, feeds, *wanted):
        values = dict(feeds)
        for target, config, inputs, outputs in self.calls:
            arrays = [x.buffer if x.buffer is not None else values[x] for x in inputs]
            values.update(zip(outputs, execute(target, config, arrays, outputs), strict=True))
        return [values[w] for w in wanted]


def execute(target, config, arrays, outputs):
    results = [np.empty(o.dims, o.kind.storage) for o in outputs]
    HANDLERS[target](config, arrays, results)
    return results


def custom_call(target, config, inputs, specs):
    """specs: (shape, dtype) of each result."""
    outputs = [Tensor(shape, dtype) for shape, dtype in specs]
    if Graph.current is not None:
        Graph.current.calls.append((target, config, inputs, outputs))
        return outputs
    for out, value in zip(outputs, execute(target, config, [x.buffer for x in inputs], outputs), strict=True):
        out.buffer = value
    return outputs


# ---- its binding: three hooks, a call, a handler, a registration -------------------------------------------
NAMES = {"f32": "float32", "brain16": "bfloat16", "i32": np.int32, "truth": nl.bool_, "f64": "float64"}


class MiniKernel(FrameworkKernel):
    mode = "mini"

    def is_framework_tensor(self, t):
        return isinstance(t, Tensor)

    def map_framework_tensor(self, t):
        return t.dims, t.kind

    def translate_to_neuron_dtype(self, dtype):
        return NAMES[dtype.name]

    def call(self, args, kwargs):
        result, tensors = self.resolve(args, kwargs)
        specs = [(shape, next(d for d in DTYPES if d.storage == dtype)) for dtype, shape in result.return_types]
        return result.assemble(custom_call("nki", result.dumped_config.encode(), tensors, specs))


@pytest.fixture(autouse=True)
def mini(monkeypatch):
    module = types.ModuleType("mini")
    module.Tensor, module.MiniKernel = Tensor, MiniKernel
    monkeypatch.setitem(sys.modules, "mini", module)
    monkeypatch.setitem(HANDLERS, "nki", run_payload)
    register_framework(Framework("mini", "mini", lambda mini, value: isinstance(value, mini.Tensor), "mini:MiniKernel"))
    yield
    unregister_framework("mini")


# ---- kernels -----------------------------------------------------------------------------------------------
@jit
def scaled(x, factor=2.0):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.load(x) * factor)
    return out


@jit
def accumulate(total: nt.mutable_tensor, x):
    nl.store(total, nl.load(total) + nl.load(x))
    return total


X = np.arange(8, dtype=np.float32).reshape(2, 4)


def test_a_tensor_among_the_arguments_picks_the_framework():
    result = scaled(tensor(X), factor=3.0)
    assert isinstance(result, Tensor) and result.kind.name == "f32"
    np.testing.assert_array_equal(result.buffer, X * 3)
    np.testing.assert_array_equal(scaled(x=tensor(X)).buffer, X * 2)
    assert set(scaled._cached_kernel) >= {MiniKernel}
    with pytest.warns(UserWarning, match="BaremetalKernel"):
        assert isinstance(scaled(X), np.ndarray)


def test_the_mode_by_name():
    np.testing.assert_array_equal(jit(scaled, mode="mini")(tensor(X)).buffer, X * 2)
    np.testing.assert_array_equal(MiniKernel(scaled)(tensor(X)).buffer, X * 2)


@pytest.mark.parametrize("dtype", [np.float32, BF16, np.int32, np.bool_], ids=str)
def test_dtypes_go_through_the_hook(dtype):
    @jit
    def same(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.load(x))
        return out

    array = (X % 3).astype(dtype)
    result = same(tensor(array))
    assert result.kind.storage == result.buffer.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(result.buffer, array)


def test_a_dtype_that_no_kernel_takes():
    with pytest.raises(NkiTypeError, match="float64"):
        scaled(tensor(X.astype(np.float64)))


def test_tensors_in_lists_and_dicts_and_results_in_a_structure():
    @jit
    def sums(parts, more):
        out = nl.ndarray(parts[0].shape, dtype=nl.float32, buffer=nl.shared_hbm)
        half = nl.ndarray(parts[0].shape, dtype=nl.bfloat16, buffer=nl.shared_hbm)
        total = nl.load(parts[0]) + nl.load(parts[1]) + nl.load(more["c"])
        nl.store(out, total)
        nl.store(half, total)
        return {"out": out, "pair": (half, more["n"])}

    result = sums([tensor(X), tensor(X + 1)], {"c": tensor(X + 2), "n": 7})
    np.testing.assert_array_equal(result["out"].buffer, 3 * X + 3)
    half, seven = result["pair"]
    np.testing.assert_array_equal(half.buffer, (3 * X + 3).astype(BF16))
    assert seven == 7


def test_a_grid():
    @jit
    def each(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        row = nl.ds(nl.program_id(0), 1)
        nl.store(out[row, :], nl.load(x[row, :]) * (nl.program_id(0) + 1))
        return out

    np.testing.assert_array_equal(each[2](tensor(X)).buffer, X * np.array([[1], [2]], np.float32))


def test_a_written_parameter_is_a_result_and_the_tensor_stays():
    total = tensor(X)
    np.testing.assert_array_equal(accumulate(total, tensor(X)).buffer, 2 * X)
    np.testing.assert_array_equal(total.buffer, X)


def test_a_graph_runs_later_and_more_than_once():
    with Graph() as graph:
        x = graph.placeholder((2, 4), DTYPES[0])
        step = accumulate(scaled(x), x)
        result = scaled(step, factor=0.5)
        with_constant = accumulate(result, tensor(X))
    assert result.buffer is None and len(graph.calls) == 4
    for feed in (X, X - 4):
        found, other = graph.run({x: feed}, result, with_constant)
        np.testing.assert_array_equal(found, feed * 1.5)
        np.testing.assert_array_equal(other, feed * 1.5 + X)


def test_a_graph_that_is_given_other_shapes_says_so():
    with Graph() as graph:
        x = graph.placeholder((2, 4), DTYPES[0])
        result = scaled(x)
    with pytest.raises(NkiTypeError, match=r"operand 'x' is float32\[3, 4\], and float32\[2, 4\] in the payload"):
        graph.run({x: np.zeros((3, 4), np.float32)}, result)


def test_an_error_in_the_kernel_is_at_its_line():
    @jit
    def wrong(x):
        return nl.exp(x)

    with pytest.raises(NkiTypeError, match="HBM") as caught:
        wrong(tensor(X))
    assert caught.value.loc.source() == "return nl.exp(x)"


# ---- run_payload -------------------------------------------------------------------------------------------
def payload_of(kernel, *arrays):
    return UnifiedKernel(kernel).dump_config(*arrays).backend_config.encode()


def test_the_payload_does_not_depend_on_the_framework():
    for kernel, arrays in ((scaled, [X]), (accumulate, [X, X])):
        assert MiniKernel(kernel).dump_config(*map(tensor, arrays)) == UnifiedKernel(kernel).dump_config(*arrays)


def test_a_result_may_share_memory_with_the_operand_that_it_aliases():
    total = X.copy()
    run_payload(payload_of(accumulate, X, X), [total, X], [total])
    np.testing.assert_array_equal(total, 2 * X)


@pytest.mark.parametrize(("inputs", "outputs", "words"), [
    ([X], [X.copy(), X.copy()], "2 results"),
    ([X, X], [X.copy()], "2 operands"),
    ([X.astype(np.int32)], [X.copy()], "operand 'x' is int32"),
    ([X], [np.zeros((4, 2), np.float32)], r"float32\[4, 2\]"),
])
def test_buffers_that_do_not_fit_are_refused_and_nothing_is_written(inputs, outputs, words):
    before = [o.copy() for o in outputs]
    with pytest.raises(NkiTypeError, match=words):
        run_payload(payload_of(scaled, X), inputs, outputs)
    for old, new in zip(before, outputs, strict=True):
        np.testing.assert_array_equal(old, new)


# ---- hooks -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("missing", ["is_framework_tensor", "map_framework_tensor", "translate_to_neuron_dtype"])
def test_a_missing_hook_is_named(missing):
    hooks = {"is_framework_tensor", "map_framework_tensor", "translate_to_neuron_dtype"} - {missing}
    partly = type("Partly", (FrameworkKernel,), {name: getattr(MiniKernel, name) for name in hooks})
    with pytest.raises(NotImplementedError, match=f"Partly.{missing}"):
        partly(scaled.func).dump_config(tensor(X))
