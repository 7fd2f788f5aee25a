"""Allocation: every placement is legal, nothing that is alive together meets, and what does not fit is explained."""
import numpy as np
import pytest

import opennki.dropin  # noqa: F401  isort: skip
import neuronxcc.nki as nki
import neuronxcc.nki.compiler as ncc
import neuronxcc.nki.language as nl
from opennki.errors import NkiValueError
from opennki.isa import target as targets
from opennki.passes.allocate import allocate
from opennki.passes.inplace import in_place
from opennki.passes.memory_map import capacity

X = np.zeros((512, 64), np.float32)


def traced(kernel, *args, target="trn1"):
    return nki.jit(kernel, mode="simulation", platform_target=target).trace(*args)


def check(memory):
    """Legal places, and no two tensors that are alive together in one place. A tensor of several buffers is alive in all of its loop."""
    for name in ("sbuf", "psum"):
        placed = []
        for alloc, p, interval in memory.of(name):
            where = interval if p.copies == 1 else memory.live.span(memory.live.loops(alloc)[-1])
            assert p.partitions == alloc.shape[alloc.pdim] and p.buffer == name
            for copy in range(p.copies):
                for block in range(p.blocks):
                    start, address = p.at(block, copy)
                    assert 0 <= address and address + p.size <= capacity(memory.target, name)
                    assert start + p.partitions <= 128 and start % 32 == 0
                    bank = memory.target.psum_bank_bytes
                    if name == "psum":
                        assert (p.size > bank and address % bank == 0) or address // bank == (address + p.size - 1) // bank
            placed += [(alloc, where, r) for r in p.regions()]
        shared = in_place(memory.kernel, memory.live)
        for n, (a, i, r) in enumerate(placed):
            for b, j, s in placed[:n]:
                assert a is b or not i.meets(j) or not r.meets(s) or (shared.get(a) is b and r == s), (a.name, b.name)
    return memory


def pipeline(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    total = nl.zeros((128, 64), dtype=nl.float32, name="total")
    for i in nl.affine_range(4):
        tile = nl.load(x[nl.ds(i * 128, 128), :])
        twice = nl.multiply(tile, 2.0)
        nl.store(out[nl.ds(i * 128, 128), :], nl.add(twice, total))
    return out


def test_placements_are_legal_and_apart():
    check(allocate(traced(pipeline, X)))


def shown(memory):
    return "\n".join(f"{name} {a.name or a!r}{list(a.shape)} live {i.start}..{i.end} at {p.address} size {p.size} x{p.copies}" +
                     (f" bank {p.bank}" if p.bank is not None else "") for name in ("sbuf", "psum") for a, p, i in memory.of(name))


def product(a, b):
    out = nl.ndarray((a.shape[1], b.shape[1]), dtype=nl.float32, buffer=nl.shared_hbm)
    for m in nl.affine_range(a.shape[1] // 128):
        acc = nl.zeros((128, 512), dtype=nl.float32, buffer=nl.psum)
        for k in nl.affine_range(a.shape[0] // 128):
            acc += nl.matmul(nl.load(a[nl.ds(k * 128, 128), nl.ds(m * 128, 128)]), nl.load(b[nl.ds(k * 128, 128), :]), transpose_x=True)
        nl.store(out[nl.ds(m * 128, 128), :], acc)
    return out


def test_the_map_of_a_matmul(golden):
    from opennki.ir.print import to_text
    kernel = traced(product, np.zeros((512, 256), np.float32), np.zeros((512, 512), np.float32))
    golden(to_text(kernel) + "\n" + shown(check(allocate(kernel))))


def loop_of(directives, kind=nl.affine_range, width=64, trips=8):
    def kernel(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        for i in kind(trips, directives=directives):
            tile = nl.ndarray((128, width), dtype=x.dtype, buffer=nl.sbuf, name="tile")
            tile[:, 0:64] = nl.load(x[0:128, 0:64])
            nl.store(out[0:128, 0:64], tile[:, 0:64])
        return out
    return traced(kernel, X)


@pytest.mark.parametrize("directives, copies", [(None, 4), (ncc.multi_buffer(2), 2), (ncc.multi_buffer(6), 6), (ncc.multi_buffer(1), 1),
                                                (ncc.multi_buffer(100), 8), (ncc.no_reorder(), 1)])
def test_buffers_of_the_tensors_of_a_loop(directives, copies):
    memory = check(allocate(loop_of(directives)))
    assert {a.name: p.copies for a, p, _ in memory.of("sbuf")} == {"tile": copies} and not memory.notes


def test_what_has_no_room_gets_fewer_buffers_and_a_note():
    memory = check(allocate(loop_of(ncc.multi_buffer(8), width=12000)))
    assert [p.copies for _, p, _ in memory.of("sbuf")] == [2]
    assert "2 of the 8 buffers" in memory.notes[0]
    memory = check(allocate(loop_of(None, width=12000)))
    assert [p.copies for _, p, _ in memory.of("sbuf")] == [3] and not memory.notes


def test_psum_tiles_get_banks_of_their_own_while_there_are_enough():
    def kernel(count):
        def run(x):
            out = nl.ndarray((128, 64), dtype=x.dtype, buffer=nl.shared_hbm)
            tiles = [nl.zeros((128, 64), dtype=nl.float32, buffer=nl.psum) for _ in range(count)]
            for t in tiles:
                nl.store(out, nl.copy(t))
            return out
        return traced(run, X)
    assert sorted(p.bank for _, p, _ in check(allocate(kernel(8))).of("psum")) == list(range(8))
    many = check(allocate(kernel(20)))
    assert len({p.address for _, p, _ in many.of("psum")}) == 20
    with pytest.raises(NkiValueError, match="16,640 bytes per partition of PSUM are alive at once, 16,384 are there"):
        allocate(kernel(65))


def test_over_capacity_names_what_is_alive_and_what_to_shrink():
    def kernel(x):
        out = nl.ndarray((128, 64), dtype=x.dtype, buffer=nl.shared_hbm)
        big = nl.zeros((128, 30000), dtype=nl.float32, name="big")
        small = nl.zeros((128, 20000), dtype=nl.float32, name="small")
        nl.store(out, nl.add(big[:, 0:64], small[:, 0:64]))
        return out
    with pytest.raises(NkiValueError) as caught:
        allocate(traced(kernel, X))
    text = str(caught.value)
    assert "big (128, 30000) float32: 120,000 at line" in text and "small (128, 20000) float32: 80,000 at line" in text
    assert "shrink big first" in text and "180,224 are there" in text


def test_short_tiles_move_to_later_quadrants_only_where_full_columns_do_not_fit():
    def kernel(width):
        def run(x):
            out = nl.ndarray((4, width), dtype=x.dtype, buffer=nl.shared_hbm)
            rows = []
            for i in range(4):
                row = nl.ndarray((1, width), dtype=x.dtype, buffer=nl.sbuf, name=f"row{i}")
                row[...] = nl.load(x[i:i + 1, :])
                rows.append(row)
            for i in range(4):
                nl.store(out[i:i + 1, :], rows[i])
            return out
        return traced(run, np.zeros((4, width), np.float32))
    assert {p.start_partition for _, p, _ in check(allocate(kernel(4096))).of("sbuf")} == {0}
    assert {p.start_partition for _, p, _ in check(allocate(kernel(30000))).of("sbuf")} == {0, 32, 64, 96}


@pytest.mark.parametrize("width, chain", [(20000, 1), (20000, 4), (15000, 2)])
def test_results_take_the_place_of_operands_where_memory_is_short(width, chain):
    def kernel(x):
        out = nl.ndarray((128, width), dtype=x.dtype, buffer=nl.shared_hbm)
        a = nl.load(x)
        b = nl.load(x)
        c = nl.add(a, b)
        for _ in range(chain - 1):
            c = nl.exp(c)
        nl.store(out, c)
        return out
    memory = check(allocate(traced(kernel, np.zeros((128, width), np.float32))))
    addresses = [p.address for _, p, _ in memory.of("sbuf")]
    if width == 20000:
        assert len(set(addresses)) == 2 and len(addresses) == 2 + chain
    else:
        assert len(set(addresses[:3])) == 3, "with room for three there is no need"


def test_what_is_read_again_keeps_its_place():
    def kernel(x):
        out = nl.ndarray((128, 20000), dtype=x.dtype, buffer=nl.shared_hbm)
        a, b = nl.load(x), nl.load(x)
        nl.store(out, nl.add(nl.add(a, b), nl.multiply(a, b)))
        return out
    with pytest.raises(NkiValueError, match="alive at once"):
        allocate(traced(kernel, np.zeros((128, 20000), np.float32)))


def test_the_stack_allocator_gives_back_from_the_top():
    def kernel(x):
        out = nl.ndarray((128, 64), dtype=x.dtype, buffer=nl.shared_hbm)
        bottom = nl.load(x[0:128, :])
        for _ in nl.static_range(3):
            above = nl.multiply(bottom, 2.0)
            bottom += nl.add(above, 1.0)
        nl.store(out, bottom)
        return out
    memory = check(allocate(traced(kernel, X), allocator="stack"))
    tensors = list(memory.of("sbuf"))
    assert tensors[0][1].address == 0 and memory.peaks["sbuf"].high == 3 * 256 < 256 * len(tensors)
    with pytest.raises(NkiValueError, match="auto, stack or forced"):
        allocate(traced(kernel, X), allocator="heap")


def test_block_dimensions_that_an_iteration_owns_shrink_to_buffers():
    def kernel(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        blocks = nl.ndarray((4, nl.par_dim(128), 64), dtype=x.dtype, buffer=nl.sbuf, name="blocks")
        for i in nl.affine_range(4):
            blocks[i] = nl.load(x[nl.ds(i * 128, 128), :])
            nl.store(out[nl.ds(i * 128, 128), :], blocks[i])
        return out
    made = traced(kernel, X)
    memory = check(allocate(made, skip_middle_end=True))
    assert [(p.blocks, p.copies) for _, p, _ in memory.of("sbuf")] == [(4, 1)]
    memory = check(allocate(made))
    assert [(p.blocks, p.copies) for _, p, _ in memory.of("sbuf")] == [(1, 4)]
    assert {a.name for a in memory.placements} == {"blocks"} and len(memory.placements) == 2


def test_direct_placements_stay():
    def kernel(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        tiles = nl.ndarray((4, nl.par_dim(128), 64), dtype=x.dtype, name="tiles",
                           buffer=ncc.sbuf.mod_alloc(base_addr=1024, num_free_tiles=(2,)))
        for i in nl.affine_range(4):
            tiles[i] = nl.load(x[nl.ds(i * 128, 128), :])
            nl.store(out[nl.ds(i * 128, 128), :], tiles[i])
        return out
    (_, place, _), = allocate(traced(kernel, X)).of("sbuf")
    assert place.direct and [place.at(b) for b in range(4)] == [(0, 1024), (0, 1280)] * 2
    assert [(r.address, r.size) for r in place.regions()] == [(1024, 256), (1280, 256)]


@pytest.mark.parametrize("target", ["trn1", "trn2", "trn3"])
def test_the_room_is_that_of_the_target(target):
    usable = targets.resolve(target).sbuf_usable_bytes
    elements = usable // 4
    def kernel(n):
        def run(x):
            out = nl.ndarray((128, 64), dtype=x.dtype, buffer=nl.shared_hbm)
            big = nl.zeros((128, n), dtype=nl.float32)
            nl.store(out, big[:, 0:64])
            return out
        return traced(run, X, target=target)
    assert check(allocate(kernel(elements))).peaks["sbuf"].high == elements * 4
    with pytest.raises(NkiValueError, match="alive at once"):
        allocate(kernel(elements + 1))


def test_the_map_as_json():
    import json
    data = json.loads(json.dumps(allocate(traced(product, np.zeros((512, 256), np.float32), np.zeros((512, 512), np.float32))).to_json()))
    psum, = data["memories"]["psum"]["tensors"]
    assert psum["bank"] == 0 and psum["copies"] == 2 and data["memories"]["sbuf"]["bytes_per_partition"] == 180224
    assert all(t["line"] > 0 and t["file"].endswith("test_allocate.py") for t in data["memories"]["sbuf"]["tensors"])
