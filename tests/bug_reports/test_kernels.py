"""Reports on whole kernels: windows, LoRA, attention of two eras, placement, debugging, entry points."""

from __future__ import annotations

import math
import sys
import warnings

import numpy as np
import pytest
from tests.lang.harness import BF16, close, run, sample

from opennki import baremetal, benchmark, jit, simulate_kernel, trace
from opennki.dialects.neuronxcc import compiler as ncc
from opennki.dialects.neuronxcc import isa as nisa
from opennki.dialects.neuronxcc import language as nl
from opennki.errors import NkiError, NkiNotYet, NkiValueError, NkiWarning


# ---- BR027: shifted windows -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("where", ["sbuf", "hbm"])
def test_BR027_shifted_windows_of_a_4d_tensor(where):
    """Shifted window load rejected with jargon: X[b, :, i:i+oh, j:j+ow] loads for every shift, also from a tile."""
    def windows(x):
        batch, channels, height, width = x.shape
        oh, ow = height - 2, width - 2
        out = nl.ndarray((batch, 3, 3, channels, oh, ow), x.dtype, buffer=nl.shared_hbm)
        for b in nl.affine_range(batch):
            tile = nl.load(x[b])
            for i in nl.affine_range(3):
                for j in nl.affine_range(3):
                    if where == "hbm":
                        window = nl.load(x[b, :, nl.ds(i, oh), nl.ds(j, ow)])
                    else:
                        window = nl.copy(tile[:, nl.ds(i, oh), nl.ds(j, ow)])
                    nl.store(out[b, i, j], window)
        return out
    x = sample((2, 16, 18, 18))
    got = run(windows, x)
    for i in range(3):
        for j in range(3):
            np.testing.assert_array_equal(got[:, i, j], x[:, :, i:i + 16, j:j + 16])


def test_BR027_python_slices_with_loop_indices():
    """The report's own spelling, i:i+oh with an unrolled and with a symbolic index."""
    def window_sum(x, loop):
        out = nl.ndarray((16, 16, 16), np.float32, buffer=nl.shared_hbm)
        total = nl.zeros((16, 16, 16), np.float32, buffer=nl.sbuf)
        for i in loop(3):
            for j in loop(3):
                total += nl.load(x[0, :, i:i + 16, j:j + 16])
        nl.store(out, total)
        return out
    x = sample((1, 16, 18, 18))
    want = np.zeros((16, 16, 16), np.float32)
    for i in range(3):
        for j in range(3):
            want += x[0, :, i:i + 16, j:j + 16]
    for loop in (nl.static_range, nl.sequential_range):
        np.testing.assert_array_equal(run(window_sum, x, loop), want)


# ---- BR055: messages and debugging ----------------------------------------------------------------------------------
def test_BR055_partitions_that_do_not_match_are_explained():
    """Outer-product style broadcast gives an internal error: a partition mismatch says so, with both shapes and the line."""
    def kernel(x, w):
        out = nl.ndarray((64, 8, 9), np.float32, buffer=nl.shared_hbm)
        nl.store(out, nl.multiply(nl.load(x), nl.load(w)))  # outer
        return out
    with pytest.raises(NkiError) as caught:
        run(kernel, sample((64, 8, 9)), sample((32, 8, 9)))
    error, text = caught.value, str(caught.value)
    assert error.code == "err_num_partition_mismatch"
    assert "(64, 8, 9)" in text and "(32, 8, 9)" in text and "# outer" in text and "test_kernels.py:" in text


def test_BR055_breakpoint_and_print_work_inside_a_kernel(monkeypatch, capsys):
    """breakpoint() in a kernel: with eager=True the debugger stops in the kernel's own frame, in each iteration, and sees values."""
    stops = []

    def fake_debugger(*args, **kwargs):
        frame = sys._getframe(1)
        stops.append((frame.f_code.co_name, frame.f_locals["i"], repr(frame.f_locals["tile"])))
    monkeypatch.setattr(sys, "breakpointhook", fake_debugger)

    def kernel(x):
        out = nl.ndarray((3, 2, 2), x.dtype, buffer=nl.shared_hbm)
        for i in nl.affine_range(3):
            tile = nl.load(x[i]) * 2.0
            breakpoint()
            print("iteration", i, tile)
            nl.store(out[i], tile)
        return out
    x = np.arange(12, dtype=np.float32).reshape(3, 2, 2)
    got = simulate_kernel(jit(kernel), x, eager=True)
    np.testing.assert_array_equal(got, x * 2)
    assert [(name, i) for name, i, _ in stops] == [("kernel", 0), ("kernel", 1), ("kernel", 2)]
    for (_, i, shown), want in zip(stops, x * 2, strict=True):
        assert type(i) is int
        for value in want.reshape(-1):
            assert f"{value:g}." in shown
    printed = capsys.readouterr().out
    for i in range(3):
        assert f"iteration {i}" in printed
    assert "22." in printed


def test_BR055_eager_mode_runs_every_program_and_reports_errors_at_their_line():
    """Eager mode covers grids and branches; a failing kernel names its line and leaves the caller's arrays alone."""
    def kernel(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        p = nl.program_id(0)
        tile = nl.load(x[p])
        if p % 2 == 1:
            tile = tile + 1.0
        nl.store(out[p], tile)
        return out

    def broken(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        tile = nl.ndarray((2, 2), x.dtype, buffer=nl.sbuf)
        nl.store(out[0], tile)  # unwritten
        return out
    x = sample((4, 2, 2))
    np.testing.assert_array_equal(run(kernel, x, grid=4, eager=True), run(kernel, x, grid=4))
    with pytest.raises(NkiError, match="never written") as caught:
        run(broken, x, eager=True)
    assert "# unwritten" in str(caught.value)

    def half_done(x, out):
        nl.store(out[0], nl.load(x[0]))
        tile = nl.ndarray((2, 2), x.dtype, buffer=nl.sbuf)
        nl.store(out[1], tile)
    result = np.full_like(x, 7)
    with pytest.raises(NkiError, match="never written"):
        simulate_kernel(trace(half_done), x, result, eager=True)
    np.testing.assert_array_equal(result, np.full_like(x, 7))


# ---- BR056: LoRA ----------------------------------------------------------------------------------------------------
def lora(x, w, a, b, scale):
    """y = x @ w + scale * (x @ a) @ b with three levels of tiles; x is given transposed, (K, M)."""
    (k_size, m_size), n_size, rank = x.shape, w.shape[1], a.shape[1]
    p, wide = 128, 256
    out = nl.ndarray((m_size, n_size), x.dtype, buffer=nl.shared_hbm)
    k_tiles, m_tiles, n_tiles = k_size // p, m_size // p, n_size // wide
    down = nl.ndarray((k_tiles, nl.par_dim(p), rank), a.dtype, buffer=nl.sbuf)
    for k in nl.affine_range(k_tiles):
        down[k] = nl.load(a[nl.ds(k * p, p), :])
    up = nl.load(b)
    for m in nl.affine_range(m_tiles):
        block = nl.ndarray((k_tiles, nl.par_dim(p), p), x.dtype, buffer=nl.sbuf)
        for k in nl.affine_range(k_tiles):
            block[k] = nl.load(x[nl.ds(k * p, p), nl.ds(m * p, p)])
        low = nl.zeros((rank, p), np.float32, buffer=nl.psum)
        for k in nl.affine_range(k_tiles):
            low += nl.matmul(down[k], block[k], transpose_x=True)
        low_rank = nl.multiply(low, scale, dtype=x.dtype)
        for n in nl.affine_range(n_tiles):
            total = nl.zeros((p, wide), np.float32, buffer=nl.psum)
            for k in nl.affine_range(k_tiles):
                total += nl.matmul(block[k], nl.load(w[nl.ds(k * p, p), nl.ds(n * wide, wide)]), transpose_x=True)
            total += nl.matmul(low_rank, up[:, nl.ds(n * wide, wide)], transpose_x=True)
            nl.store(out[nl.ds(m * p, p), nl.ds(n * wide, wide)], total)
    return out


def test_BR056_lora_with_three_levels_of_tiles():
    """Compiler abort code with no cause: par_dim buffers in nested affine loops give the result of NumPy."""
    x, w = sample((512, 256), seed=1, low=-1, high=1), sample((512, 512), seed=2, low=-1, high=1)
    a, b = sample((512, 16), seed=3, low=-1, high=1), sample((16, 512), seed=4, low=-1, high=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NkiWarning)
        got = run(lora, x, w, a, b, 0.25)
    wide = [v.astype(np.float64) for v in (x, w, a, b)]
    want = wide[0].T @ wide[1] + 0.25 * (wide[0].T @ wide[2]) @ wide[3]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-3)


# ---- BR057: what a device would refuse ------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [np.int32, np.uint8])
def test_BR057_a_type_error_of_the_device_is_found_without_it(dtype):
    """conv2d simulates, then type error on device: rules on types hold in simulation too."""
    def bias_of_wrong_type(x, bias):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nisa.activation(op=nl.exp, data=nl.load(x), bias=nl.load(bias)))
        return out
    with pytest.raises(NkiError) as caught:
        run(bias_of_wrong_type, sample((128, 32)), np.ones((128, 1), dtype))
    assert caught.value.code == "err_activation_bias_invalid_type" and caught.value.loc.file == __file__


def test_BR057_integer_matmul_is_refused():
    """An integer operand of a matmul, which NumPy would multiply, is a type error at its line."""
    def integer_matmul(x, y):
        out = nl.ndarray((32, 32), np.float32, buffer=nl.shared_hbm)
        nl.store(out, nl.matmul(nl.load(x), nl.load(y), transpose_x=True))
        return out
    with pytest.raises(TypeError, match="int32") as caught:
        run(integer_matmul, np.ones((128, 32), np.int32), np.ones((128, 32), np.int32))
    assert caught.value.loc.file == __file__


# ---- BR047, BR050, BR051: placement ---------------------------------------------------------------------------------
def test_BR047_manual_sbuf_placement_without_psum():
    """Manual SBUF allocation fails without PSUM: the exp kernel gives the same with sbuf.alloc, mod_alloc and by default."""
    def by_function(idx, partitions, size):
        return 0, idx[0] * size

    def kernel(x, how):
        count = x.shape[0]
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        buffers = {"default": nl.sbuf, "function": ncc.sbuf.alloc(by_function),
                   "modulo": ncc.sbuf.mod_alloc(base_addr=0, num_free_tiles=(2,))}
        tiles = nl.ndarray((count, nl.par_dim(128), 512), x.dtype, buffer=buffers[how])
        for i in nl.affine_range(count):
            tiles[i] = nl.load(x[i])
            tiles[i] = nisa.activation(op=nl.exp, data=tiles[i], bias=zero_bias(how))
            nl.store(out[i], tiles[i])
        return out

    def zero_bias(how):
        if how == "default":
            return None
        bias = nl.ndarray((128, 1), np.float32, buffer=ncc.sbuf.mod_alloc(base_addr=32768))
        bias[...] = nisa.memset((128, 1), 0, np.float32)
        return bias
    x = sample((4, 128, 512))
    want = run(kernel, x, "default")
    close(want, np.exp(x.astype(np.float64)), steps=4)
    for how in ("function", "modulo"):
        np.testing.assert_array_equal(run(kernel, x, how), want)


def rms_norm(x, gamma, epsilon=1e-6):
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    tile = nl.ndarray((128, x.shape[2]), x.dtype, buffer=ncc.sbuf.mod_alloc(base_addr=0))
    tile[...] = nl.load(x[0])
    squares = nl.sum(nl.multiply(tile, tile, dtype=np.float32), axis=1, keepdims=True)
    bias = nl.ndarray((128, 1), np.float32, buffer=ncc.sbuf.mod_alloc(base_addr=65536))
    bias[...] = nisa.memset((128, 1), epsilon, np.float32)
    scale = nisa.activation(op=nl.rsqrt, data=squares, bias=bias, scale=1.0 / x.shape[2])
    weight = nl.broadcast_to(nl.load(gamma), shape=(128, x.shape[2]))
    nl.store(out[0], nl.multiply(tile * scale, weight))
    return out


@pytest.mark.parametrize("hidden", [2048, 8192])
def test_BR050_an_allocated_rms_norm_runs(hidden):
    """Allocated RMSNorm kernel fails: with skip_middle_end_transformations and a placement it gives the right norm (bf16)."""
    x, gamma = sample((1, 128, hidden), BF16, seed=5), sample((1, hidden), BF16, seed=6)
    wide = x.astype(np.float64)
    want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * gamma.astype(np.float64)
    for decorate in (lambda f: f, ncc.skip_middle_end_transformations, ncc.force_auto_alloc):
        got = jit(decorate(rms_norm), mode="simulation", platform_target="trn1").simulate(x, gamma)
        np.testing.assert_allclose(got.astype(np.float64), want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("decorators", [(), (ncc.skip_middle_end_transformations,), (ncc.force_auto_alloc,),
                                        (ncc.skip_middle_end_transformations, ncc.enable_stack_allocator)])
@pytest.mark.parametrize("form", ["matmul", "nc_matmul"])
def test_BR051_compiler_decorators_change_no_value(decorators, form):
    """skip_middle_end_transformations breaks matmul: U @ x with nl.matmul and nc_matmul gives the same with each decorator."""
    def kernel(u, x):
        out = nl.ndarray((128, 1), np.float32, buffer=nl.shared_hbm)
        if form == "matmul":
            nl.store(out, nl.matmul(nl.load(u), nl.load(x), transpose_x=True))
        else:
            nl.store(out, nisa.nc_matmul(nl.load(u), nl.load(x)))
        return out
    u, x = sample((128, 128), seed=1), sample((128, 1), seed=2)
    decorated = kernel
    for decorator in decorators:
        decorated = decorator(decorated)
    got = jit(decorated, mode="simulation", platform_target="trn1").simulate(u, x)
    np.testing.assert_array_equal(got, run(kernel, u, x))
    np.testing.assert_allclose(got, u.astype(np.float64).T @ x, rtol=1e-4, atol=1e-3)


# ---- BR060, BR062: what ran -----------------------------------------------------------------------------------------
def twice(x):
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.load(x) * 2.0)
    return out


def twice_into(x, out):
    nl.store(out, nl.load(x) * 2.0)


def test_BR060_a_result_says_what_computed_it():
    """Published numbers came from a fallback: running without a device says so on each call, and a latency that it is an estimate."""
    x = sample((8, 16))
    with pytest.warns(NkiWarning, match="virtual NeuronCore of this machine, not on a device"):
        np.testing.assert_array_equal(baremetal(twice)(x), x * 2)
    kernel = benchmark(twice)
    with pytest.warns(NkiWarning, match="latency by a timing model, not on a device"):
        kernel(x)
    assert "estimate" in str(kernel.benchmark_result)
    with pytest.raises(NkiValueError, match="benchmark_result"):
        _ = benchmark(twice).benchmark_result


def test_BR060_an_error_in_a_kernel_is_not_swallowed():
    """No fall-back hides a failing kernel: the error comes out of every entry point."""
    def broken(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        return out
    x = sample((8, 16))
    for call in (lambda: jit(broken)(x), lambda: simulate_kernel(jit(broken), x), lambda: baremetal(broken)(x),
                 lambda: jit(broken, mode="simulation")(x)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(NkiError, match="never stored to"):
                call()


@pytest.mark.parametrize("old", [False, True])
def test_BR062_baremetal_gives_real_results(old):
    """Legacy baremetal returns zeros quietly: it computes, into the returned array or into the argument that is written."""
    x = sample((8, 16))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if old:
            result = np.full((8, 16), -1, np.float32)
            assert baremetal(twice_into)(x, result) is None
        else:
            result = baremetal(twice)(x)
    np.testing.assert_array_equal(result, x * 2)


# ---- BR064: attention of two eras -----------------------------------------------------------------------------------
def attention(q, k, v):
    """softmax(q.T @ k / sqrt(d)) @ v of (d, n), (d, n), (n, d): scores in one piece."""
    depth, count = q.shape
    out = nl.ndarray((count, depth), q.dtype, buffer=nl.shared_hbm)
    write_attention(q, k, v, out)
    return out


def write_attention(q, k, v, out):
    depth, count = q.shape
    keys = nl.load(k)
    for i in nl.affine_range(count // 128):
        queries = nl.load(q[:, nl.ds(i * 128, 128)]) * (1 / math.sqrt(depth))
        scores = nl.copy(nl.matmul(queries, keys, transpose_x=True))
        weights = nl.softmax(scores, axis=1)
        acc = nl.zeros((128, depth), np.float32, buffer=nl.psum)
        for j in nl.affine_range(count // 128):
            turned = nl.copy(nl.transpose(weights[:, nl.ds(j * 128, 128)]))
            acc += nl.matmul(turned, nl.load(v[nl.ds(j * 128, 128), :]), transpose_x=True)
        nl.store(out[nl.ds(i * 128, 128), :], acc)


def online_attention(q, k, v):
    """The same with running maximum and sum over blocks of keys (the second version of such a tutorial)."""
    depth, count = q.shape
    out = nl.ndarray((count, depth), q.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(count // 128):
        queries = nl.load(q[:, nl.ds(i * 128, 128)]) * (1 / math.sqrt(depth))
        most = nl.full((128, 1), -1e30, np.float32, buffer=nl.sbuf)
        total = nl.zeros((128, 1), np.float32, buffer=nl.sbuf)
        acc = nl.zeros((128, depth), np.float32, buffer=nl.sbuf)
        for j in nl.sequential_range(count // 128):
            scores = nl.copy(nl.matmul(queries, nl.load(k[:, nl.ds(j * 128, 128)]), transpose_x=True))
            new = nl.maximum(most, nl.max(scores, axis=1, keepdims=True))
            shrink = nl.exp(most - new)
            weights = nl.exp(scores - new)
            total[...] = total * shrink + nl.sum(weights, axis=1, keepdims=True)
            product = nl.matmul(nl.copy(nl.transpose(weights)), nl.load(v[nl.ds(j * 128, 128), :]), transpose_x=True)
            acc[...] = acc * shrink + product
            most[...] = nl.copy(new)
        nl.store(out[nl.ds(i * 128, 128), :], acc / total)
    return out


def reference_attention(q, k, v):
    scores = q.astype(np.float64).T @ k / math.sqrt(q.shape[0])
    weights = np.exp(scores - scores.max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True) @ v


def test_BR064_attention_in_the_styles_of_both_eras():
    """Published attention tutorials fail to trace: outputs as last argument (old) and as return value, one- and two-pass softmax."""
    q, k = sample((64, 256), seed=1, low=-1, high=1), sample((64, 256), seed=2, low=-1, high=1)
    v = sample((256, 64), seed=3, low=-1, high=1)
    want = reference_attention(q, k, v)
    for kernel in (attention, online_attention):
        np.testing.assert_allclose(run(kernel, q, k, v), want, rtol=1e-4, atol=1e-5)
    out = np.zeros((256, 64), np.float32)
    assert simulate_kernel(trace(write_attention), q, k, v, out) is None
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(out, run(attention, q, k, v))


def test_BR064_a_name_that_is_not_there_says_so():
    """A name of another release is an error that names it and where to ask, not an AttributeError of our internals."""
    def kernel(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.no_such_function(nl.load(x)))
        return out
    with pytest.raises(NkiNotYet, match=r"neuronxcc\.nki\.language\.no_such_function") as caught:
        run(kernel, sample((4, 4)))
    assert "http" in str(caught.value)
