"""The PyTorch example: a GPT with kernels trains under torch.compile as the same model without, and it notices when it does not."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

EXAMPLE = Path(__file__).parents[2] / "examples" / "torch_transformer.py"
SMALL = ["--width", "64", "--heads", "2", "--blocks", "1", "--sequences", "1", "--steps", "3"]


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("torch_transformer", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    path = sys.path.copy()
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def losses_in(shown):
    rows = [line.split() for line in shown.replace("│", " ").splitlines()]
    return [(float(r[1]), float(r[2])) for r in rows if len(r) == 3 and r[0].isdigit()]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "none"])
def test_gradients_match_and_the_loss_falls(example, capsys, backend):
    assert example.main([*SMALL, "--backend", backend]) == 0
    shown = capsys.readouterr().out
    assert "gradients of 10 parameters" in shown
    losses = losses_in(shown)
    assert len(losses) == 3 and losses[-1][0] < losses[0][0] - 0.1
    for ours, plain in losses:
        assert ours == pytest.approx(plain, rel=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_default_backend(example):
    """Inductor, which compiles C++ for what is around the kernels; the model in PyTorch alone runs eagerly."""
    args = example.arguments(SMALL)
    found = example.models(args)
    programs = {"NKI": torch.compile(found["NKI"], fullgraph=True), "PyTorch": found["PyTorch"]}
    assert max(example.differences(found, programs, next(example.batches(args))).values()) < example.TOLERANCE
    losses = example.train(args, found, programs)
    assert losses["NKI"] == pytest.approx(losses["PyTorch"], rel=1e-4) and losses["NKI"][-1] < losses["NKI"][0] - 0.1


def test_the_kernels_are_in_the_compiled_program(example):
    """One program without a break, forward and backward kernels in it."""
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    graphs = []

    def keep(graph, inputs):
        graphs.append(str(graph.graph))
        return make_boxed_func(graph.forward)

    args = example.arguments([*SMALL, "--tokens", "128"])
    model = example.models(args)["NKI"]
    batch = next(example.batches(args))
    torch.compile(model, backend=aot_autograd(fw_compiler=keep), fullgraph=True)(*batch).backward()
    forward, backward = graphs
    # three norms and an attention
    assert forward.count("torch.ops.opennki.") == 4 and backward.count("torch.ops.opennki.") == 4


@pytest.mark.slow
def test_a_loss_that_rises_is_noticed(example, capsys):
    assert example.main([*SMALL, "--backend", "none", "--rate", "-0.01"]) == 1
    assert "the loss does not fall" in capsys.readouterr().out


@pytest.mark.slow
def test_a_wrong_gradient_is_noticed(example, capsys, monkeypatch):
    """A backward pass that leaves the change of the norm out: each value is plausible, and the loss would fall."""

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return example.rms_norm_torch(x, weight)

        @staticmethod
        def backward(ctx, g):
            x, weight = ctx.saved_tensors
            return g * weight, (g * x).sum((0, 1))

    monkeypatch.setitem(example.OPERATIONS, "NKI", (Norm.apply, example.attention_torch))
    assert example.main([*SMALL, "--backend", "none"]) == 1
    assert "the gradients differ by more than 1e-05" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", ["--tokens 100", "--width 100 --heads 3", "--width 256 --heads 1", "--steps 1"])
def test_sizes_that_the_kernels_cannot_do(example, wrong, capsys):
    with pytest.raises(SystemExit) as stopped:
        example.main(wrong.split())
    assert stopped.value.code == 2 and "--" in capsys.readouterr().err.splitlines()[-1]
