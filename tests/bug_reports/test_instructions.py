"""Reports on single instructions: matmul, reductions, selection, top-8, transfers with runtime indices, printing."""

from __future__ import annotations

import inspect
import io
import warnings

import numpy as np
import pytest
from tests.lang.harness import instructions, run, sample, tiles

from opennki import jit, simulate_kernel
from opennki.dialects.neuronxcc import isa as nisa
from opennki.dialects.neuronxcc import language as nl
from opennki.errors import NkiError, NkiNotYet, NkiTypeError, NkiWarning
from opennki.isa.declare import ISA


# ---- BR007 ----------------------------------------------------------------------------------------------------------
def replaced(data, vals, imm):
    """(data with first matches replaced, places): the values are walked from the last to the first."""
    out, index = data.copy(), np.full(vals.shape, -1)
    for p in range(data.shape[0]):
        taken = set()
        for j in range(7, -1, -1):
            for i in range(data.shape[1]):
                if i not in taken and data[p, i] == vals[p, j]:
                    taken.add(i)
                    out[p, i], index[p, j] = imm, i
                    break
    return out, index


def test_BR007_match_replace8_walks_repeated_values_in_the_device_order():
    """match_replace8 tie order: values are walked in reverse, the first match goes to the last column of a repeated value."""
    data = np.tile(np.array([[5, 1, 5, 5, 2, 2, 9, 5, 2, 0]], np.float32), (3, 1))
    vals = np.array([[5, 5, 2, 9, 5, 2, 7, 5], [9, 2, 2, 2, 2, 2, 2, 2], [5] * 8], np.float32)

    def kernel(x, v):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        places = nl.ndarray(v.shape, nl.uint32, buffer=nl.shared_hbm)
        index = nl.ndarray(v.shape, nl.uint32, buffer=nl.sbuf)
        nl.store(out, nisa.nc_match_replace8(data=nl.load(x), vals=nl.load(v), imm=-1.0, dst_idx=index))
        nl.store(places, index)
        return out, places
    got, places = run(kernel, data, vals, target="trn2")
    want, index = replaced(data, vals, -1.0)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(places[index >= 0], index[index >= 0])


# ---- BR011, BR037, BR059, BR017, BR019: Tensor Engine ---------------------------------------------------------------
def test_BR011_all_free_dimensions_of_the_moving_operand_are_computed():
    """nc_matmul dropped higher free dims: (128, 4, 128) moving equals the flattened (128, 512), bit for bit."""
    x, y = sample((128, 64), seed=1), sample((128, 4, 128), seed=2)

    def whole(a, b):
        out = nl.ndarray((64, 4, 128), np.float32, buffer=nl.shared_hbm)
        nl.store(out, nisa.nc_matmul(nl.load(a), nl.load(b)))
        return out

    def flat(a, b):
        out = nl.ndarray((64, 512), np.float32, buffer=nl.shared_hbm)
        nl.store(out, nisa.nc_matmul(nl.load(a), nl.load(b)))
        return out
    got = run(whole, x, y)
    np.testing.assert_array_equal(got.reshape(64, 512), run(flat, x, y.reshape(128, 512)))
    assert (np.abs(got).max(axis=(0, 2)) > 0).all()


def test_BR037_matmul_orientation_and_storing_psum():
    """matmul orientation confusing: x.T @ y is (64, 512) in PSUM, and nl.store takes it from there."""
    x, y = sample((128, 64), seed=1), sample((128, 512), seed=2)

    def kernel(a, b):
        result = nl.matmul(nl.load(a), nl.load(b), transpose_x=True)
        assert result.shape == (64, 512) and result.buffer == nl.psum
        out = nl.ndarray(result.shape, result.dtype, buffer=nl.shared_hbm)
        nl.store(out, result)
        return out
    np.testing.assert_allclose(run(kernel, x, y), x.astype(np.float64).T @ y, rtol=1e-4, atol=1e-3)


def test_BR037_a_wrong_orientation_is_explained():
    """Without transpose_x the shapes do not fit: the message gives both shapes and the rule."""
    with pytest.raises(NkiError, match=r"\(128, 64\).*\(128, 512\)") as caught:
        tiles(lambda a, b: nl.matmul(a, b), sample((128, 64)), sample((128, 512)))
    assert "contracted dimension" in str(caught.value)


@pytest.mark.parametrize("k", [1, 32, 33, 127, 128])
def test_BR059_a_short_contraction_works(k):
    """All simulator tests silently fell back: a contraction over fewer than 128 partitions runs and is right."""
    x, y = sample((k, 48), seed=1), sample((k, 80), seed=2)

    def kernel(a, b):
        out = nl.ndarray((48, 80), np.float32, buffer=nl.shared_hbm)
        nl.store(out, nisa.nc_matmul(nl.load(a), nl.load(b)))
        return out
    np.testing.assert_allclose(run(kernel, x, y), x.astype(np.float64).T @ y, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("call", [
    lambda a, b: nisa.nc_matmul(nl.ndarray((48, 80), np.float32, buffer=nl.psum), a, b),
    lambda a, b: nisa.nc_matmul(a, b, out=a),
    lambda a, b: nisa.nc_matmul(a),
    lambda a, b: nisa.nc_matmul(stationary=a, moving=b, accumulate=True),
    lambda a, b: nl.add(a, b, None, "x"),
])
def test_BR059_a_wrong_call_is_a_type_error(call):
    """A call with the form of another release raises TypeError at the user's line, with the signature."""
    def kernel(a, b):
        out = nl.ndarray((48, 80), np.float32, buffer=nl.shared_hbm)
        nl.store(out, call(nl.load(a), nl.load(b)))
        return out
    with pytest.raises(TypeError) as caught:
        run(kernel, sample((128, 48)), sample((128, 80)))
    if isinstance(caught.value, NkiTypeError):
        assert caught.value.loc.file == __file__


def test_BR017_reading_psum_that_was_never_written_is_an_error():
    """accumulate on PSUM never written: a first += of a matmul starts from zero, any other read of unwritten PSUM is an error
    with the line and the tensor."""
    def other(a, b):
        out = nl.ndarray((48, 80), np.float32, buffer=nl.shared_hbm)
        acc = nl.ndarray((48, 80), np.float32, buffer=nl.psum, name="acc")
        nl.store(out, nl.exp(acc))  # unwritten
        acc[...] = nisa.nc_matmul(nl.load(a), nl.load(b))
        return out
    with pytest.raises(NkiError) as caught:
        run(other, sample((128, 48)), sample((128, 80)))
    text = str(caught.value)
    assert "acc" in text and "never written" in text and "# unwritten" in text


def test_BR017_the_first_accumulation_into_unwritten_psum_is_warned_about():
    """The first accumulating matmul into a PSUM tile that was made without a value: a warning with line and tensor name."""
    def kernel(a, b):
        out = nl.ndarray((48, 80), np.float32, buffer=nl.shared_hbm)
        acc = nl.ndarray((48, 80), np.float32, buffer=nl.psum, name="acc")
        acc += nisa.nc_matmul(nl.load(a), nl.load(b))  # first
        nl.store(out, acc)
        return out
    x, y = sample((128, 48)), sample((128, 80))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = run(kernel, x, y)
    np.testing.assert_allclose(got, x.astype(np.float64).T @ y, rtol=1e-4, atol=1e-3)
    found = [str(w.message) for w in caught if issubclass(w.category, NkiWarning)]
    assert len(found) == 1 and "acc" in found[0] and "# first" in found[0] and "nl.zeros" in found[0]


@pytest.mark.parametrize("checks", ["full", "fast", "off"])
def test_BR017_each_accumulation_group_starts_anew(checks):
    """A PSUM tile made without a value in a loop body: the groups of all iterations start from zero, with and without checks."""
    def kernel(a, b):
        out = nl.ndarray((3, 48, 80), np.float32, buffer=nl.shared_hbm)
        weights = nl.load(b)
        for i in nl.affine_range(3):
            acc = nl.ndarray((48, 80), np.float32, buffer=nl.psum)
            for k in nl.affine_range(2):
                acc += nisa.nc_matmul(nl.load(a[i, k]), weights)
            nl.store(out[i], acc)
        return out
    x, y = sample((3, 2, 128, 48), seed=1), sample((128, 80), seed=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = jit(kernel, mode="simulation", platform_target="trn1").simulate(x, y, checks=checks)
    np.testing.assert_allclose(got, np.einsum("ikpm,pn->imn", x.astype(np.float64), y), rtol=1e-4, atol=1e-3)


def test_BR019_transpose_runs_on_the_engine_that_was_asked_for():
    """nc_transpose ignored engine: the choice is in the instruction stream, and one that is not possible is refused."""
    def kernel(x, which):
        out = nl.ndarray(x.shape[::-1], x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nisa.nc_transpose(nl.load(x), engine=which))
        return out
    small, large = sample((32, 32)), sample((128, 128))
    for array, which, name in ((small, nisa.engine.vector, "vector"), (small, nisa.engine.tensor, "tensor"),
                               (large, nisa.engine.tensor, "tensor")):
        stream = instructions(kernel, array, which)
        assert [i.engine for i in stream if i.op == "nc_transpose"] == [name]
        np.testing.assert_array_equal(run(kernel, array, which), array.T)
    with pytest.raises(NkiError, match="32") as caught:
        run(kernel, large, nisa.engine.vector)
    assert caught.value.code == "err_size_of_dimension_exceed_arch_limit" and "Tensor Engine" in caught.value.fix


# ---- BR015, BR016: Vector Engine ------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(128, 4, 64), (64, 3, 5, 7)])
@pytest.mark.parametrize("axis", [1, 2, 3, (1, 2), (2, 3), (1, 2, 3), -1])
@pytest.mark.parametrize("keepdims", [False, True])
def test_BR015_tensor_reduce_axes_are_those_of_the_tile(shape, axis, keepdims):
    """tensor_reduce axis meaning for 3-D/4-D: the axis is the real dimension of the tile."""
    axes = axis if isinstance(axis, tuple) else (axis,)
    if max(axes) >= len(shape):
        with pytest.raises(NkiError):
            tiles(lambda t: nisa.tensor_reduce(np.add, t, axis=axis, keepdims=keepdims), sample(shape))
        return
    x = sample(shape)
    for op, oracle in ((np.add, np.sum), (np.max, np.max)):
        got = tiles(lambda t, op=op: nisa.tensor_reduce(op, t, axis=axis, keepdims=keepdims), x)
        want = oracle(x.astype(np.float64), axis=axis, keepdims=keepdims)
        np.testing.assert_allclose(got.reshape(want.shape), want, rtol=1e-5, atol=1e-5)


def test_BR016_range_select_honours_fill_and_reduce_command():
    """range_select ignored its fill value and reduce command: reset starts anew, reduce goes on, and the fill is fp32.min only."""
    x = sample((8, 16), seed=3)
    low, high = np.full((8, 1), 2, np.float32), np.full((8, 1), 9, np.float32)

    def kernel(data, b0, b1, second):
        outs = [nl.ndarray(s, np.float32, buffer=nl.shared_hbm) for s in ((8, 16), (8, 1), (8, 1))]
        tile, lo, hi = nl.load(data), nl.load(b0), nl.load(b1)
        held = [nl.ndarray((8, 1), np.float32, buffer=nl.sbuf) for _ in range(2)]
        args = {"comp_op0": np.greater_equal, "comp_op1": np.less, "bound0": lo, "bound1": hi, "reduce_op": np.max}
        first = nisa.range_select(on_true_tile=tile, reduce_cmd=nisa.reduce_cmd.reset_reduce, reduce_res=held[0], **args)
        half = nl.multiply(tile, 0.5)
        nisa.range_select(on_true_tile=half, reduce_cmd=second, reduce_res=held[1], **args)
        for out, value in zip(outs, (first, *held), strict=True):
            nl.store(out, value)
        return tuple(outs)
    inside = np.zeros((8, 16), bool)
    inside[:, 2:9] = True
    want = np.where(inside, x, np.finfo(np.float32).min)
    most, half = want.max(1, keepdims=True), np.where(inside, x * np.float32(0.5), want).max(1, keepdims=True)
    for second, final in ((nisa.reduce_cmd.reduce, np.maximum(most, half)), (nisa.reduce_cmd.reset_reduce, half)):
        got = run(kernel, x, low, high, second, target="trn2")
        np.testing.assert_array_equal(got[0], want)
        np.testing.assert_array_equal(got[1], most)
        np.testing.assert_array_equal(got[2], final)

    def other_fill(data, b0, b1):
        out = nl.ndarray((8, 16), np.float32, buffer=nl.shared_hbm)
        nl.store(out, nisa.range_select(on_true_tile=nl.load(data), comp_op0=np.greater_equal, comp_op1=np.less,
                                        bound0=nl.load(b0), bound1=nl.load(b1), on_false_value=0.0))
        return out
    with pytest.raises(NkiError, match="on_false_value"):
        run(other_fill, x, low, high, target="trn2")


# ---- BR013, BR033, BR034: runtime indices ---------------------------------------------------------------------------
def gather(table, index, fill):
    """Rows of a table by index; rows that do not exist leave the destination as it is."""
    out = nl.ndarray((index.shape[0], table.shape[1]), table.dtype, buffer=nl.shared_hbm)
    ids, rows = nl.load(index), nl.load(fill)
    free = nl.arange(table.shape[1])[None, :]
    nisa.dma_copy(dst=rows, src=table[ids[:, 0:1], free], oob_mode=nisa.oob_mode.skip)
    nl.store(out, rows)
    return out


def scatter(table, index, rows):
    """A copy of a table with rows replaced by index; rows that do not exist are dropped."""
    out = nl.ndarray(table.shape, table.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.load(table))
    ids, values = nl.load(index), nl.load(rows)
    free = nl.arange(table.shape[1])[None, :]
    nisa.dma_copy(dst=out[ids[:, 0:1], free], src=values, oob_mode=nisa.oob_mode.skip)
    return out


INDEX_SETS = {
    "mixed": [3, -1, 0, 99, 7, 8, 2, 2**31 - 1],
    "all valid": [7, 6, 5, 4, 3, 2, 1, 0],
    "all invalid": [8, 100, -1, 2**31 - 1, -2**31, 9, 10, 11],
}


@pytest.mark.parametrize("name", INDEX_SETS)
def test_BR013_BR033_BR034_only_rows_in_range_are_touched(name):
    """Gather and scatter with out-of-range and INT_MAX indices and skip: bad lanes read the fill and write nothing, good rows are kept,
    and the next kernel is not affected."""
    ids = np.array(INDEX_SETS[name], np.int64).astype(np.int32).reshape(-1, 1)
    table, fill = sample((8, 16), seed=4), np.full((8, 16), -77, np.float32)
    want = np.stack([table[i] if 0 <= i < 8 else fill[p] for p, i in enumerate(ids[:, 0])])
    np.testing.assert_array_equal(run(gather, table, ids, fill), want)
    replaced_rows = table.copy()
    for p, i in enumerate(ids[:, 0]):
        if 0 <= i < 8:
            replaced_rows[i] = fill[p] + p
    np.testing.assert_array_equal(run(scatter, table, ids, fill + np.arange(8, dtype=np.float32)[:, None]), replaced_rows)
    clean = np.arange(8, dtype=np.int32).reshape(-1, 1)
    np.testing.assert_array_equal(run(gather, table, clean, fill), table)


def test_BR033_without_skip_a_bad_index_is_an_error_of_the_call():
    """Without skip the call raises IndexError; the caller's arrays are as they were and the next call is right."""
    def strict(table, index):
        out = nl.ndarray((8, 16), table.dtype, buffer=nl.shared_hbm)
        ids = nl.load(index)
        nl.store(out, nl.load(table[ids[:, 0:1], nl.arange(16)[None, :]]))
        return out
    table = sample((8, 16))
    before = table.copy()
    with pytest.raises(IndexError):
        run(strict, table, np.array(INDEX_SETS["mixed"], np.int64).astype(np.int32).reshape(-1, 1))
    np.testing.assert_array_equal(table, before)
    np.testing.assert_array_equal(run(strict, table, np.arange(8, dtype=np.int32).reshape(-1, 1)), table)


# ---- BR029, BR031: copies -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("inputs", [1, 2, 3])
@pytest.mark.parametrize("outputs", [1, 2])
def test_BR029_dma_copy_with_any_number_of_inputs_and_outputs(inputs, outputs):
    """shape mismatch from dma_copy only with several inputs: a (128, 2, 512) tile filled slice by slice, whatever else the kernel takes."""
    def kernel(*arrays):
        outs = [nl.ndarray((128, 2, 512), np.float16, buffer=nl.shared_hbm) for _ in range(outputs)]
        total = nl.zeros((128, 2, 512), np.float16, buffer=nl.sbuf)
        for source in arrays:
            tile = nl.ndarray((128, 2, 512), np.float16, buffer=nl.sbuf)
            for m in nl.affine_range(2):
                nisa.dma_copy(dst=tile[:, m, :], src=source[m, :, :])
            total[...] = total + tile
        for out in outs:
            nl.store(out, total)
        return outs[0] if outputs == 1 else tuple(outs)
    arrays = [sample((2, 128, 512), np.float16, seed=s) for s in range(inputs)]
    got = run(kernel, *arrays)
    want = np.zeros((2, 128, 512), np.float16)
    for a in arrays:
        want = (want + a).astype(np.float16)
    for result in (got,) if outputs == 1 else got:
        np.testing.assert_array_equal(result, want.transpose(1, 0, 2))


def test_BR031_partition_offset_copies_in_a_loop():
    """Dynamic loop plus partition-offset copy dies with no message: rows r:r+2 of a (3, 2) tile, two passes, as NumPy does it."""
    def kernel(a):
        out = nl.ndarray(a.shape, a.dtype, buffer=nl.shared_hbm)
        whole = nl.load(a)
        for r in nl.static_range(2):
            part = nl.ndarray((2, 2), a.dtype, buffer=nl.sbuf)
            for _ in nl.sequential_range(2):
                nisa.dma_copy(dst=part, src=whole[r:r + 2, 0:2])
                part[...] = part + 1
            nisa.dma_copy(dst=whole[r:r + 2, 0:2], src=part)
        nl.store(out, whole)
        return out
    a = np.arange(6, dtype=np.int32).reshape(3, 2)
    want = a.copy()
    for r in range(2):
        want[r:r + 2] = want[r:r + 2] + 1
    np.testing.assert_array_equal(run(kernel, a), want)


@pytest.mark.parametrize("start", [0, 1, 31, 32, 100])
def test_BR031_a_copy_back_to_any_partition(start):
    """A tensor copy back into rows that start at any partition gives NumPy's result."""
    def kernel(a):
        out = nl.ndarray(a.shape, a.dtype, buffer=nl.shared_hbm)
        whole = nl.load(a)
        part = nl.ndarray((2, 2), a.dtype, buffer=nl.sbuf)
        part[...] = whole[start:start + 2, 0:2] + 1
        whole[start:start + 2, 0:2] = nl.copy(part)
        nl.store(out, whole)
        return out
    a = np.arange(256, dtype=np.int32).reshape(128, 2)
    want = a.copy()
    want[start:start + 2] += 1
    np.testing.assert_array_equal(run(kernel, a), want)


# ---- BR025: printing ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(5,), (2, 3), (2, 3, 4)])
def test_BR025_device_print_of_any_rank(shape):
    """device_print fails on a 1-D HBM tensor: it prints any rank, from HBM and from SBUF."""
    def kernel(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nl.device_print("input", x)
        tile = nl.load(x)
        nl.device_print("tile", tile)
        nl.store(out, tile)
        return out
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    out = io.StringIO()
    np.testing.assert_array_equal(simulate_kernel(jit(kernel), x, dump_file=out), x)
    text = out.getvalue()
    assert "input" in text and "tile" in text
    for value in x.reshape(-1):
        assert text.count(f"{value:g}.") >= 2


# ---- BR061, BR065: the surface --------------------------------------------------------------------------------------
def test_BR061_an_unsupported_operation_is_a_python_exception():
    """Unsupported op kills the test process: every name that is not there yet raises an exception with that name; pytest survives."""
    with pytest.raises(NkiNotYet, match=r"nki\.isa\.an_instruction_of_the_future.*not in opennki yet") as caught:
        tiles(lambda x: nisa.an_instruction_of_the_future(x), sample((4, 4)))
    assert "github" in str(caught.value) or "issues" in str(caught.value)
    with pytest.raises(NkiNotYet, match=r"nki\.language\.a_function_of_the_future"):
        tiles(lambda x: nl.a_function_of_the_future(x), sample((4, 4)))


def test_BR061_every_instruction_called_with_nothing_is_a_python_exception():
    """Each instruction and function called wrongly raises an exception that names it; none ends the process or returns."""
    names = [(nisa, n) for n, d in ISA.items() if d.surface == "isa"]
    assert len(names) > 30
    for module, name in names:
        function = getattr(module, name)

        def kernel(x, function=function):
            out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
            nl.store(out, function())
            return out
        with pytest.raises(TypeError) as caught:
            run(kernel, sample((4, 4)), target="trn2")
        assert name in str(caught.value)


@pytest.mark.parametrize("module", ["private_api", "nccl", "distributed"])
def test_BR061_documented_functions_without_a_meaning_here_say_so(module):
    """Functions that exist and cannot run yet raise an exception with their name."""
    import importlib
    loaded = importlib.import_module(f"opennki.dialects.neuronxcc.{module}")
    later = [f for n, f in vars(loaded).items() if inspect.isfunction(f) and "Not in opennki yet" in (f.__doc__ or "")]
    for function in later:
        with pytest.raises(NkiNotYet) as caught:
            function()
        assert function.__name__ in str(caught.value)


@pytest.mark.parametrize("name", ["zeros", "ones", "full", "ndarray", "zeros_like", "empty_like"])
def test_BR065_buffer_is_accepted_where_it_is_documented(name):
    """Documented buffer= rejected by nl.zeros: every function that makes a tensor takes it."""
    def kernel(x):
        out = nl.ndarray((128, 512), nl.float16, buffer=nl.shared_hbm)
        tile = nl.load(x)
        if name.endswith("_like"):
            made = getattr(nl, name)(tile, nl.float16, buffer=nl.sbuf)
        elif name == "full":
            made = nl.full((128, 512), 0.5, nl.float16, buffer=nl.sbuf)
        else:
            made = getattr(nl, name)((128, 512), nl.float16, buffer=nl.sbuf)
        assert made.buffer == nl.sbuf
        if name in ("ndarray", "empty_like"):
            made[...] = tile
        nl.store(out, made)
        return out
    x = sample((128, 512), np.float16)
    value = {"zeros": 0, "ones": 1, "full": 0.5, "zeros_like": 0}.get(name)
    np.testing.assert_array_equal(run(kernel, x), x if value is None else np.full_like(x, value))
