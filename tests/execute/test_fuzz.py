"""Random kernels by native code and by the interpreter, a bounded number of them; and the small kernels of what they have found."""

from __future__ import annotations

import json
from random import Random

import pytest
from tests.execute import differ
from tests.execute.random_programs import OPS

from opennki.execute import abi, build
from opennki.execute.executor import coverage
from opennki.ir.nodes import DoWhile, For, If, Instr, statements
from opennki.ir.parse import from_text

PROGRAMS = 60


def outcome(seed, found=None):
    text, styles = differ.program(seed)
    try:
        return differ.check(text, styles, found)
    except (differ.Undefined, differ.Refused):
        return None


def test_random_kernels_agree():
    differences, agreed, ops = {}, 0, set()
    for seed in range(PROGRAMS):
        found = []
        what = outcome(seed, found)
        if what:
            differences[seed] = what
        elif what is not None and found:
            agreed += coverage(found[0])["native"] > 0
            ops |= {s.op for s in statements(from_text(differ.program(seed)[0]).body) if isinstance(s, Instr)}
    assert not differences, f"scripts/fuzz_executor.py --seed N --programs 1 makes them smaller: {differences}"
    assert agreed > PROGRAMS / 2  # that many really compared something
    assert len(ops) > len(OPS) * 0.75, f"never there: {set(OPS) - ops}"


def with_meetings(text, seed):
    """The kernel with barriers at random places, also in its loops and branches."""
    random, kernel = Random(seed), from_text(text)

    def insert(body):
        for stmt in body:
            for inner in (("body",) if isinstance(stmt, (For, DoWhile)) else ("then", "orelse") if isinstance(stmt, If) else ()):
                insert(getattr(stmt, inner))
        for place in range(len(body), -1, -1):
            if random.random() < 0.25:
                body.insert(place, Instr("barrier", (), ((),)))

    insert(kernel.body)
    return kernel


def test_random_kernels_with_meetings_agree():
    differences, parts = {}, 0
    for seed in range(PROGRAMS):
        text, styles = differ.program(seed)
        kernel, found = with_meetings(text, seed), []
        try:
            what = differ.difference(kernel, differ.arrays_of(kernel, styles), found)
        except (differ.Undefined, differ.Refused):
            continue
        if what:
            differences[seed] = what
        parts += sum(coverage(one)["native"] > 0 for one in found)
    assert not differences
    assert parts > 2 * PROGRAMS


def test_a_program_depends_on_its_number_alone():
    assert differ.program(7) == differ.program(7) != differ.program(8)


def test_a_wrong_native_function_is_found_and_made_small(monkeypatch):
    assert build.library().lib is not None  # its numbers are the right ones
    monkeypatch.setitem(abi.FUNCTIONS, "multiply", abi.FUNCTIONS["add"])

    def still(smaller, styles):
        try:
            return "differ, first" in differ.check(smaller, styles)
        except (differ.Undefined, differ.Refused):
            return False

    found = (differ.program(seed, ["tensor_tensor", "tensor_copy"]) for seed in range(100))
    text, styles = next(program for program in found if still(*program))
    small = differ.shrunk(text, styles, still, 150)
    instructions = [s for s in statements(from_text(small).body) if isinstance(s, Instr)]
    assert len(instructions) <= 6 < text.count("=") and any("multiply" in s.operands for s in instructions)


HEAD = "opennki_ir = 1\nkernel('random', target='trn3')\n"
FOUND = {
    # two values of a fused program took one register: temporaries were known by an address that was used again
    "three copies in one program": ("""
t1 = param.shared_hbm(int32, (128, 1), name='p0')
t2 = param.shared_hbm(int32, (16, 8), name='p1')
t3 = param.shared_hbm(uint32, (16, 8), name='p2')
t6 = shared_hbm(uint32, (16, 8))
t5 = shared_hbm(int32, (16, 8))
t4 = shared_hbm(int32, (4, 128, 1))
t7 = psum(int32, (4, 128, 1), pdim=1)
for i1 in sequential(4):
    dma_copy(dst=t7.tile(128, 1)[i1, d0, d1], src=t1, oob_mode=0, dge_mode=3)
t8 = sbuf(int32, (16, 8))
dma_copy(dst=t8, src=t2, oob_mode=0, dge_mode=3)
t9 = sbuf(uint32, (16, 8))
dma_copy(dst=t9, src=t3, oob_mode=0, dge_mode=3)
dma_copy(dst=t4.tile(128, 1)[0, d0, d1], src=t7.tile(128, 1)[3, d0, d1], oob_mode=0, dge_mode=3)
dma_copy(dst=t5, src=t8, oob_mode=0, dge_mode=3)
dma_copy(dst=t6, src=t9, oob_mode=0, dge_mode=3)
outputs(t6, t5)
""", {"p0": "normal", "p1": "special", "p2": "normal"}),
    # a mask counts the dimensions of what is transposed: a square result hid that
    "a mask on a square transposition": ("""
t1 = param.shared_hbm(int8, (16, 16), name='p0')
t2 = param.shared_hbm(int8, (16, 16), name='p1')
t3 = shared_hbm(int8, (16, 16))
t4 = psum(int8, (16, 16))
dma_copy(dst=t4, src=t2, oob_mode=0, dge_mode=3)
t5 = sbuf(int8, (16, 16))
dma_copy(dst=t5, src=t1, oob_mode=0, dge_mode=3)
t4 = tensor.nc_transpose(data=t5, mask=[d1 - 8 >= 0])
dma_copy(dst=t3, src=t4, oob_mode=0, dge_mode=3)
outputs(t3)
""", {"p0": "ramp", "p1": "normal"}),
    # a step that was given up with others was still named by what had been lowered, and read before anybody wrote it
    "a choice by integers that are repeated": ("""
t1 = param.shared_hbm(int16, (8, 44), name='p0')
t2 = param.shared_hbm(float16, (8, 40), name='p1')
t3 = shared_hbm(float32, (8, 4, 10))
t4 = sbuf(int16, (8, 44))
dma_copy(dst=t4, src=t1, oob_mode=0, dge_mode=3)
t5 = sbuf(float16, (8, 40))
dma_copy(dst=t5, src=t2, oob_mode=0, dge_mode=3)
t6 = sbuf(float32, (8, 4, 10))
t7 = register.register(float32, (128, 1), name='vector_acc')
vector.select_reduce(dst=t6, predicate=t4.tile(8, 4, 10)[d0, d1], on_true=t5, on_false=t5.tile(8, 1)[d0, d1], reduce_cmd=3, reduce_op='maximum', reverse_pred=False, registers=t7.tile(8, 1)[d0, d1], call=1)
dma_copy(dst=t3, src=t6, oob_mode=0, dge_mode=3)
outputs(t3)
""", {"p0": "ramp", "p1": "small"}),  # noqa: E501
    # a loop without iterations ran once, and counted as one that writes all of the output
    "a loop without iterations": ("""
t1 = param.shared_hbm(float16, (8, 32), name='p0')
t2 = shared_hbm(float16, (8, 32))
for i1 in affine(0):
    t3 = sbuf(float16, (8, 32))
    dma_copy(dst=t3, src=t1, oob_mode=0, dge_mode=3)
    dma_copy(dst=t2, src=t3, oob_mode=0, dge_mode=3)
outputs(t2)
""", {"p0": "small"}),
    # the interpreter kept the bits of a uint8 in a bool
    "bits stored as truth": ("""
t1 = param.shared_hbm(uint8, (4, 75), name='p0')
t2 = param.shared_hbm(uint16, (4, 75), name='p1')
t3 = shared_hbm(bool, (4, 75))
t4 = sbuf(uint8, (4, 75))
dma_copy(dst=t4, src=t1, oob_mode=0, dge_mode=3)
t5 = sbuf(uint16, (4, 75))
dma_copy(dst=t5, src=t2, oob_mode=0, dge_mode=3)
t6 = sbuf(bool, (4, 75))
t6 = vector.tensor_tensor(data1=t4, data2=t5, op='bitwise_and')
dma_copy(dst=t3, src=t6, oob_mode=0, dge_mode=3)
outputs(t3)
""", {"p0": "bits", "p1": "bits"}),
    # an instruction that makes a result of its own size ended the interpreter where a mask narrows it
    "a mask on a constant": ("""
t1 = param.shared_hbm(float32, (8, 31), name='p0')
t2 = shared_hbm(float32, (8, 31))
t3 = sbuf(float32, (8, 31))
dma_copy(dst=t3, src=t1, oob_mode=0, dge_mode=3)
t3 = gpsimd.memset(shape=(8, 31), value=2.5, mask=[d1 - 7 >= 0])
dma_copy(dst=t2, src=t3, oob_mode=0, dge_mode=3)
outputs(t2)
""", {"p0": "normal"}),
    # the operator & of two comparisons of recorded values raised an error of Python
    "two comparisons": ("""
t1 = param.shared_hbm(float32, (4, 8), name='p0')
t2 = shared_hbm(float32, (4, 8))
t3 = sbuf(float32, (4, 8))
dma_copy(dst=t3, src=t1, oob_mode=0, dge_mode=3)
t4 = register.register(float32, (128, 1), name='vector_acc')
t5 = sbuf(float32, (4, 8))
t5 = vector.range_select(on_true_tile=t3, comp_op0='greater', comp_op1='less', bound0=t3.tile(4, 1)[d0, d1 + 2], \
bound1=t3.tile(4, 1)[d0, d1], reduce_cmd=0, reduce_op='maximum', range_start=36, on_false_value=-1.0, registers=t4.tile(4, 1)[d0, d1])
dma_copy(dst=t2, src=t5, oob_mode=0, dge_mode=3)
outputs(t2)
""", {"p0": "normal"}),
    # a copy that goes through float32 changes large integers, also where it copies a tile onto itself
    "a copy onto itself": ("""
t1 = param.shared_hbm(uint32, (8, 2), name='p0')
t2 = shared_hbm(uint32, (8, 2))
t3 = sbuf(uint32, (8, 2))
dma_copy(dst=t3, src=t1, oob_mode=0, dge_mode=3)
t3 = scalar.tensor_copy_dynamic_src(src=t3)
dma_copy(dst=t2, src=t3, oob_mode=0, dge_mode=3)
outputs(t2)
""", {"p0": "bits"}),
    # the bits of an integer stored as tfloat32 are rounded
    "bits stored as tfloat32": ("""
t1 = param.shared_hbm(int32, (8, 65), name='p0')
t2 = shared_hbm(tfloat32, (8, 65))
t3 = sbuf(int32, (8, 65))
dma_copy(dst=t3, src=t1, oob_mode=0, dge_mode=3)
t4 = sbuf(tfloat32, (8, 65))
t4 = vector.tensor_copy(src=t3.bitcast(tfloat32).tile(8, 65)[d0, d1])
dma_copy(dst=t2, src=t4, oob_mode=0, dge_mode=3)
outputs(t2)
""", {"p0": "bits"}),
    # an operand in the place of the result, but not in its order
    "a transposition in place": ("""
t1 = param.shared_hbm(float32, (8, 8), name='p0')
t2 = shared_hbm(float32, (8, 8))
t3 = sbuf(float32, (8, 8))
dma_copy(dst=t3, src=t1, oob_mode=0, dge_mode=3)
t3 = dma.dma_transpose(src=t3, dge_mode=0)
dma_copy(dst=t2, src=t3, oob_mode=0, dge_mode=3)
outputs(t2)
""", {"p0": "normal"}),
    # an operand that is an index expression of one value lost its number where it took another shape
    "an index expression as a number": ("""
t1 = param.shared_hbm(float32, (8, 33), name='p0')
t2 = param.shared_hbm(int8, (8, 3, 11), name='p1')
t3 = shared_hbm(float32, (8, 33))
t4 = sbuf(float32, (8, 33))
dma_copy(dst=t4, src=t1, oob_mode=0, dge_mode=3)
t5 = sbuf(int8, (8, 3, 11))
dma_copy(dst=t5, src=t2, oob_mode=0, dge_mode=3)
t6 = sbuf(float32, (8, 33))
t6 = vector.scalar_tensor_tensor(data=t4, op0='subtract', operand0=index(4096), op1='subtract', operand1=t5, reverse0=False, reverse1=True)
dma_copy(dst=t3, src=t6, oob_mode=0, dge_mode=3)
outputs(t3)
""", {"p0": "normal", "p1": "normal"}),
    # an empty half of the elements: its count is 0, not the sum of nothing, which is -0
    "statistics of one element": ("""
t1 = param.shared_hbm(float32, (64, 1), name='p0')
t2 = shared_hbm(float32, (64, 6))
t3 = sbuf(float32, (64, 1))
dma_copy(dst=t3, src=t1, oob_mode=0, dge_mode=3)
t4 = sbuf(float32, (64, 6))
t4 = vector.bn_stats(data=t3, mask=[d0 >= 0])
dma_copy(dst=t2, src=t4, oob_mode=0, dge_mode=3)
outputs(t2)
""", {"p0": "normal"}),
    # a result stored in a part of the operand before the other result had read it
    "a result in a part of an operand": ("""
t1 = param.shared_hbm(float8_e5m2, (64, 65), name='p0')
t2 = param.shared_hbm(float32, (64, 4), name='p1')
t3 = shared_hbm(float8_e4m3, (64, 65))
t4 = sbuf(float8_e5m2, (64, 65))
dma_copy(dst=t4, src=t1, oob_mode=0, dge_mode=3)
t5 = psum(float32, (64, 4))
dma_copy(dst=t5, src=t2, oob_mode=0, dge_mode=3)
t6 = sbuf(float8_e4m3, (64, 65))
t7 = register.register(float32, (128, 1), name='vector_acc')
t6 = vector.range_select(on_true_tile=t4, comp_op0='greater', comp_op1='greater', bound0=t5.tile(64, 1)[d0, d1], \
bound1=t5.tile(64, 1)[d0, d1 + 1], reduce_cmd=2, reduce_res=t4.tile(64, 1)[d0, d1 + 64], reduce_op='maximum', range_start=0, \
on_false_value=-3.4028234663852886e+38, registers=t7.tile(64, 1)[d0, d1])
dma_copy(dst=t3, src=t6, oob_mode=0, dge_mode=3)
outputs(t3)
""", {"p0": "small", "p1": "normal"}),
    # two results that share elements: the later one counts
    "results that overlap": ("""
t1 = param.shared_hbm(uint8, (64, 1), name='p0')
t2 = param.shared_hbm(int16, (128, 1), name='p1')
t3 = shared_hbm(int16, (128, 1))
t4 = sbuf(uint8, (64, 1))
dma_copy(dst=t4, src=t1, oob_mode=0, dge_mode=3)
t5 = psum(int16, (128, 1))
dma_copy(dst=t5, src=t2, oob_mode=0, dge_mode=3)
t6 = register.register(float32, (128, 1), name='scalar_acc')
t5.tile(64, 1)[d0, d1] = scalar.activation_reduce(op='sigmoid', data=t4, reduce_op='maximum', reduce_res=t5.tile(64, 1)[d0 + 46, d1], \
scale=5, regs=t6.tile(64, 1)[d0, d1])
dma_copy(dst=t3, src=t5, oob_mode=0, dge_mode=3)
outputs(t3)
""", {"p0": "special", "p1": "small"}),
    # a sum in 64 bits that has to be held before it is stored was held as float32, and its operands were known by an id that was used again
    "an exact sum onto its own rows, turned": ("""
t1 = param.shared_hbm(uint32, (8, 8), name='p7')
t2 = shared_hbm(uint32, (8, 8))
t3 = sbuf(uint32, (8, 8))
dma_copy(dst=t3, src=t1, oob_mode=0, dge_mode=3)
t3[-d0 + 7, d1] = gpsimd.tensor_tensor(data1=t3, data2=t3.tile(8, 1)[d0, d1 + 7], op='add')
dma_copy(dst=t2, src=t3, oob_mode=0, dge_mode=3)
outputs(t2)
""", {"p7": "special"}),
}  # fmt: skip


@pytest.mark.parametrize("case", FOUND)
def test_found(case):
    text, styles = FOUND[case]
    assert differ.check(HEAD + text.lstrip(), styles) == ""


def test_what_reads_and_writes_a_tensor_at_once_does_not_define_it():
    """select_reduce writes all of a tensor that it also reads, and names the one that it writes first."""
    text = HEAD + """t1 = param.shared_hbm(uint8, (8, 8), name='p0')
t2 = shared_hbm(float16, (8, 8))
t3 = sbuf(float16, (8, 8))
t4 = sbuf(uint8, (8, 8))
dma_copy(dst=t4, src=t1, oob_mode=0, dge_mode=3)
t5 = register.register(float32, (128, 1), name='vector_acc')
vector.select_reduce(dst=t3, predicate=t4, on_true=t3, on_false=1.0, reduce_cmd=0, reduce_op='maximum', reverse_pred=False, registers=t5.tile(8, 1)[d0, d1])
dma_copy(dst=t2, src=t3, oob_mode=0, dge_mode=3)
outputs(t2)
"""  # noqa: E501
    with pytest.raises(differ.Undefined):
        differ.check(text, {"p0": "bits"})


def test_a_kept_failure_can_be_run_again(tmp_path):
    import importlib.util
    from pathlib import Path

    spec = importlib.util.spec_from_file_location("fuzz_executor", Path(__file__).parents[2] / "scripts" / "fuzz_executor.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text, styles = FOUND["bits stored as truth"]
    page = tmp_path / "1.txt"
    page.write_text(f"# program 1: something\n# styles {json.dumps(styles)}\n{HEAD}{text.lstrip()}")
    assert script.replay(page) == 0
