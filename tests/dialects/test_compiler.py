"""nki.compiler: addresses of directly allocated tensors, decorators, directives."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from opennki.dialects.neuronxcc import compiler as ncc
from opennki.dialects.neuronxcc import language as nl
from opennki.errors import NkiError, NkiTypeError, NkiValueError, NkiWarning
from opennki.ir.nodes import Alloc, For, statements
from opennki.kernels.entry import baremetal, jit, simulate_kernel
from opennki.kernels.generic import GenericKernel
from opennki.kernels.options import CompileOpts, compile_opts

A = np.arange(128 * 64, dtype=np.float32).reshape(128, 64)


def copier(shape, buffer, dtype=np.float32, other=None):
    """A kernel that makes one tensor (and `other`, another buffer) and copies A."""

    def kernel(a):
        out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
        nl.ndarray(shape, dtype=dtype, buffer=buffer)
        if other is not None:
            nl.ndarray(shape, dtype=dtype, buffer=other)
        nl.store(out, nl.load(a))
        return out

    return jit(kernel, mode="simulation", platform_target="trn1")


def table(shape, buffer, dtype=np.float32):
    """Addresses in the IR of the one tensor that is placed."""
    kernel = copier(shape, buffer, dtype).trace(A)
    (found,) = [
        s.placement for s in statements(kernel.body) if isinstance(s, Alloc) and s.placement is not None
    ]
    return found


def fixed(*address):
    return lambda idx, pdim_size, fdim_size: address


# ---- placement functions ----


def test_a_placement_gets_the_block_indices_and_the_size_of_a_tile():
    seen = []

    def place(idx, pdim_size, fdim_size):
        seen.append((idx, pdim_size, fdim_size))
        return 0, 1024 * (2 * idx[0] + idx[1])

    found = table((2, 2, nl.par_dim(128), 4, 8), ncc.sbuf.alloc(place), nl.bfloat16)
    assert seen == [((i, j), 128, 64) for i in range(2) for j in range(2)]
    assert found == ((0, 0), (0, 1024), (0, 2048), (0, 3072))


def test_without_block_dimensions_the_index_is_empty():
    assert table((32, 4), ncc.sbuf.alloc(lambda idx, p, f: (96 if idx == () else 0, f))) == ((96, 16),)


@pytest.mark.parametrize(
    "partitions, start", [(p, s) for p in (1, 32, 33, 64, 65, 128) for s in (0, 32, 64, 96, 16, 128)]
)
def test_start_partitions_follow_the_documented_rule(partitions, start):
    legal = {0} if partitions > 64 else {0, 64} if partitions > 32 else {0, 32, 64, 96}
    if start in legal:
        assert table((partitions, 4), ncc.sbuf.alloc(fixed(start, 0))) == ((start, 0),)
    else:
        with pytest.raises(NkiValueError, match=f"start partition {start}"):
            table((partitions, 4), ncc.sbuf.alloc(fixed(start, 0)))


@pytest.mark.parametrize(
    "address, what",
    [
        ((8, 0, 0), "bank 8"),
        ((-1, 0, 0), "bank -1"),
        ((0, 32, 0), "start partition 32"),
        ((0, 0, 4), "byte address 4"),
    ],
)
def test_psum_has_eight_banks_and_no_other_address(address, what):
    with pytest.raises(NkiValueError, match=what):
        table((32, 4), ncc.psum.alloc(fixed(*address)))
    assert table((32, 4), ncc.psum.alloc(fixed(7, 0, 0))) == ((7, 0, 0),)


def test_a_psum_tile_fits_one_bank():
    assert table((128, 512), ncc.psum.alloc(fixed(0, 0, 0))) == ((0, 0, 0),)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NkiWarning)
        with pytest.raises(NkiValueError, match="2052 bytes per partition"):
            table((128, 513), ncc.psum.alloc(fixed(0, 0, 0)))


def test_a_negative_byte_address_is_an_error():
    with pytest.raises(NkiValueError, match="byte address -4"):
        table((128, 4), ncc.sbuf.alloc(fixed(0, -4)))


@pytest.mark.parametrize("target, last", [("trn1", 176 * 1024 - 16), ("trn2", 224 * 1024 - 16392 - 16)])
def test_an_address_beyond_the_usable_sbuf_is_a_warning(target, last):
    for byte, expected in ((last, 0), (last + 4, 1)):
        kernel = copier((128, 4), ncc.sbuf.alloc(fixed(0, byte)), other=None)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            kernel.copy(platform_target=target).trace(A)
        assert len([w for w in caught if issubclass(w.category, NkiWarning)]) == expected


@pytest.mark.parametrize("result", [(0,), (0, 0, 0), 0, None, (0, 1.5), "ab"])
def test_what_a_placement_returns_is_checked(result):
    with pytest.raises(NkiTypeError, match="gives"):
        table((128, 4), ncc.sbuf.alloc(lambda idx, p, f: result))


def test_the_error_names_the_block_and_the_line():
    placement = ncc.psum.alloc(lambda idx, p, f: (8 * idx[0], 0, 0))

    def kernel(a):
        nl.ndarray((2, nl.par_dim(128), 4), dtype=np.float32, buffer=placement, name="acc")  # HERE
        return a

    with pytest.raises(NkiValueError) as caught:
        jit(kernel, platform_target="trn1").trace(A)
    text = str(caught.value)
    assert "block (1,) of the tensor 'acc'" in text and "# HERE" in text and "fix:" in text


def test_too_many_blocks_are_an_error_before_any_is_placed():
    with pytest.raises(NkiValueError, match="blocks with a placement"):
        table((65537, nl.par_dim(128), 4), ncc.sbuf.alloc(fixed(0, 0)))


# ---- mod_alloc, by the documented formula ----


def reference_modulo(idx, counts, scale, base):
    counts = counts or (1,) * len(idx)
    linear = 0
    for i, n in zip(idx, counts, strict=True):
        linear = linear * n + i % n
    return base + linear * scale


@pytest.mark.parametrize(
    "blocks, pars, frees",
    [((3,), (), (2,)), ((2, 4), (1, 4), (2, 1)), ((2, 4), (), (2, 3)), ((5,), (4,), ())],
)
def test_sbuf_mod_alloc_is_the_documented_formula(blocks, pars, frees):
    found = table(
        (*blocks, nl.par_dim(32), 8),
        ncc.sbuf.mod_alloc(base_addr=100, num_par_tiles=pars, num_free_tiles=frees),
    )
    expected = [
        (reference_modulo(i, pars, 32, 0), reference_modulo(i, frees, 32, 100)) for i in np.ndindex(*blocks)
    ]
    assert list(found) == expected


def test_psum_mod_alloc_is_the_documented_formula():
    found = table((3, 4, nl.par_dim(128), 512), ncc.psum.mod_alloc(base_bank=1, num_bank_tiles=(1, 7)))
    assert list(found) == [(reference_modulo(i, (1, 7), 1, 1), 0, 0) for i in np.ndindex(3, 4)]


def test_tile_counts_of_a_tensor_without_blocks_are_accepted():
    assert table((128, 8), ncc.sbuf.mod_alloc(base_addr=64, num_free_tiles=(2,))) == ((0, 64),)


def test_tile_counts_must_fit_the_block_dimensions():
    with pytest.raises(NkiValueError, match="2 tile counts for 1 block"):
        table((2, nl.par_dim(128), 8), ncc.sbuf.mod_alloc(base_addr=0, num_free_tiles=(2, 1)))


@pytest.mark.parametrize(
    "call",
    [
        lambda: ncc.sbuf.mod_alloc(base_addr=0, base_partition=32),
        lambda: ncc.psum.mod_alloc(base_bank=0, base_addr=4),
        lambda: ncc.psum.mod_alloc(base_bank=0, num_free_tiles=(2,)),
        lambda: ncc.sbuf.alloc(3),
    ],
)
def test_arguments_of_the_namespaces_are_checked(call):
    with pytest.raises(NkiError):
        call()


# ---- mixing ----


def test_one_memory_is_allocated_in_one_way():
    direct = ncc.sbuf.mod_alloc(base_addr=0)
    for first, second in (
        (direct, nl.sbuf),
        (nl.sbuf, direct),
        (direct, None),
        (ncc.sbuf.auto_alloc(), direct),
    ):
        with pytest.raises(NkiValueError, match=r"allocated (directly|automatically)"):
            copier((128, 4), first, other=second if second is not None else ncc.sbuf.auto_alloc()).trace(A)


def test_sbuf_and_psum_are_separate():
    copier((128, 4), ncc.sbuf.mod_alloc(base_addr=0), other=nl.psum).trace(A)
    copier((128, 4), nl.sbuf, other=ncc.psum.mod_alloc(base_bank=0)).trace(A)


def test_auto_alloc_is_the_default_memory():
    copier((128, 4), ncc.sbuf.auto_alloc(), other=nl.sbuf).trace(A)
    copier((128, 4), ncc.psum.auto_alloc(), other=nl.psum).trace(A)


# ---- decorators ----


def plain(a):
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    x = nl.ndarray(a.shape, dtype=a.dtype, buffer=ncc.sbuf.alloc(fixed(3, -1)))
    x[...] = nl.load(a)
    nl.store(out, x)
    return out


@pytest.mark.parametrize(
    "form",
    [
        lambda k: ncc.force_auto_alloc(k),
        lambda k: ncc.force_auto_alloc()(k),
        lambda k: jit(ncc.force_auto_alloc(k)),
        lambda k: ncc.force_auto_alloc(jit(k, mode="simulation")),
        lambda k: baremetal(ncc.force_auto_alloc(k)),
        lambda k: ncc.skip_middle_end_transformations(ncc.force_auto_alloc(jit(k))),
    ],
)
def test_force_auto_alloc_ignores_placements(form):
    kernel = form(plain)
    np.testing.assert_array_equal(simulate_kernel(kernel, A), A)
    traced = kernel.trace(A)
    assert all(s.placement is None for s in statements(traced.body) if isinstance(s, Alloc))
    with pytest.raises(NkiValueError, match="start partition 3"):
        simulate_kernel(plain, A)


def test_a_decorator_copies_the_kernel():
    kernel = jit(plain, mode="simulation", platform_target="trn2")
    changed = ncc.enable_stack_allocator(log_level=20)(ncc.skip_middle_end_transformations(kernel[2]))
    assert compile_opts(kernel) == CompileOpts()
    assert compile_opts(changed) == CompileOpts(
        skip_middle_end=True, allocator="stack", allocator_log_level=20
    )
    assert type(changed) is GenericKernel and changed.grid == 2 and changed.mode == "simulation"
    assert changed.kwargs["platform_target"] == "trn2" and changed.__name__ == "plain"


@pytest.mark.parametrize(
    "decorator", [ncc.skip_middle_end_transformations, ncc.enable_stack_allocator, ncc.force_auto_alloc]
)
def test_decorators_refuse_what_is_no_function(decorator):
    with pytest.raises(NkiTypeError):
        decorator(3)


# ---- directives ----


@pytest.mark.parametrize(
    "directive, text",
    [
        (ncc.multi_buffer(), "multi_buffer(2)"),
        (ncc.multi_buffer(factor=3), "multi_buffer(3)"),
        (ncc.no_reorder(), "no_reorder()"),
        (ncc.allocation_scope(), "allocation_scope()"),
    ],
)
def test_directives_of_loops_reach_the_ir(directive, text):
    @jit(platform_target="trn1")
    def kernel(a):
        out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
        for i in nl.sequential_range(2, directives=directive):
            nl.store(out[:, nl.ds(32 * i, 32)], nl.load(a[:, nl.ds(32 * i, 32)]))
        return out

    (loop,) = [s for s in statements(kernel.trace(A).body) if isinstance(s, For)]
    assert loop.directives == (text,)
    np.testing.assert_array_equal(simulate_kernel(kernel, A), A)


def test_scopes_stand_in_a_with():
    def kernel(a):
        out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
        with ncc.allocation_scope(), ncc.no_reorder():
            nl.store(out, nl.load(a))
        return out

    np.testing.assert_array_equal(simulate_kernel(kernel, A), A)


@pytest.mark.parametrize("factor", [0, -1, 1.5, True, "2"])
def test_multi_buffer_takes_a_positive_integer(factor):
    with pytest.raises(NkiValueError, match="multi_buffer"):
        ncc.multi_buffer(factor)


def test_other_directives_are_refused():
    with pytest.raises(NkiTypeError, match="directives"):
        nl.affine_range(2, directives="no_reorder")
