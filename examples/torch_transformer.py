"""A small GPT in PyTorch whose attention and RMSNorm are NKI kernels, forward and backward, trained on the CPU under torch.compile.

    python examples/torch_transformer.py                       (or: --steps 40 --tokens 256 --blocks 1 --backend aot_eager)

The model predicts the next byte of a text: the source of its own kernels. At the start the gradients of all parameters are compared with
those of the same model in PyTorch alone; then both are trained side by side on the same batches.
"""
import argparse
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F

from opennki.bind.torch import register_autograd

sys.path.insert(0, str(Path(__file__).parent))
import nki_kernels as kernels

BYTES = 256
TOLERANCE = 1e-5  # relative L2 of the gradient of a parameter; float32 sums in another order differ by 1e-7 to 1e-6


# ---- the operations, by kernels and without ------------------------------------------------------------------------
def keep_operands(ctx, inputs, output):
    """What the backward kernels need: the results of the forward pass are not among it."""
    ctx.save_for_backward(*inputs)


register_autograd(kernels.rms_norm_forward, lambda ctx, d_out: kernels.rms_norm_backward(*ctx.saved_tensors, d_out),
                  setup_context=keep_operands)
register_autograd(kernels.attention_forward, lambda ctx, d_out: kernels.attention_backward[d_out.shape[0]](*ctx.saved_tensors, d_out),
                  setup_context=keep_operands)


def rms_norm(x, weight):
    """x / rms(x) * weight over the last dimension of x (..., d), weight (d,); the leading sizes multiply to a multiple of 128."""
    return kernels.rms_norm_forward(x.reshape(-1, x.shape[-1]), weight[None]).reshape(x.shape)


def attention(q, k, v):
    """Causal attention of each head: q, k, v (heads, tokens, d), one program of the grid for each head."""
    return kernels.attention_forward[q.shape[0]](q, k, v)


def rms_norm_torch(x, weight):
    """`rms_norm` in PyTorch alone."""
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + kernels.EPS) * weight


def attention_torch(q, k, v):
    """`attention` in PyTorch alone."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


OPERATIONS = {"NKI": (rms_norm, attention), "PyTorch": (rms_norm_torch, attention_torch)}


# ---- the model ------------------------------------------------------------------------------------------------------
class RMSNorm(nn.Module):
    """RMSNorm by the given operation."""

    def __init__(self, width, operation):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.operation = operation

    def forward(self, x):
        return self.operation(x, self.weight)


class Block(nn.Module):
    """Attention and an MLP, each after a norm and beside a way around it."""

    def __init__(self, width, heads, operations):
        super().__init__()
        norm, self.attention = operations
        self.heads = heads
        self.attention_norm, self.mlp_norm = RMSNorm(width, norm), RMSNorm(width, norm)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        sequences, tokens, _ = x.shape
        # (3, sequences * heads, tokens, d): a head of a sequence is one program of the kernels
        qkv = self.qkv(self.attention_norm(x)).reshape(sequences, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.reshape(3, sequences * self.heads, tokens, -1).unbind()
        mixed = self.attention(q, k, v).reshape(sequences, self.heads, tokens, -1).transpose(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    """Scores of the next byte at each position."""

    def __init__(self, args, operations):
        super().__init__()
        self.embedding = nn.Embedding(BYTES, args.width)
        self.position = nn.Parameter(torch.randn(args.tokens, args.width) * args.width ** -0.5)
        self.blocks = nn.ModuleList([Block(args.width, args.heads, operations) for _ in range(args.blocks)])
        self.norm = RMSNorm(args.width, operations[0])
        self.readout = nn.Linear(args.width, BYTES, bias=False)

    def forward(self, inputs, targets):
        """The mean cross entropy in nats; inputs and targets: (sequences, tokens) integers."""
        x = self.embedding(inputs) + self.position
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.readout(self.norm(x)).flatten(0, 1), targets.flatten())


def models(args):
    """The model by each of OPERATIONS, with the same parameters."""
    found = {}
    for name, operations in OPERATIONS.items():
        torch.manual_seed(args.seed)
        found[name] = GPT(args, operations)
    return found


# ---- training -------------------------------------------------------------------------------------------------------
def batches(args):
    """Random windows of the text, the same ones in every run: inputs and targets."""
    text = torch.frombuffer(bytearray(Path(kernels.__file__).read_bytes()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(args.seed)
    while True:
        starts = torch.randint(0, len(text) - args.tokens, (args.sequences,), generator=generator)
        windows = torch.stack([text[s:s + args.tokens + 1] for s in starts])
        yield windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def differences(found, programs, batch):
    """Relative L2 difference of the gradient of each parameter, NKI against PyTorch alone."""
    gradients = {}
    for name, model in found.items():
        programs[name](*batch).backward()
        gradients[name] = {key: p.grad for key, p in model.named_parameters()}
        model.zero_grad()
    return {key: float((g - gradients["PyTorch"][key]).norm() / gradients["PyTorch"][key].norm()) for key, g in gradients["NKI"].items()}


def train(args, found, programs):
    """The losses before each step: {operations: [...]}."""
    losses = {name: [] for name in found}
    optimizers = {name: torch.optim.Adam(model.parameters(), lr=abs(args.rate), maximize=args.rate < 0) for name, model in found.items()}
    for _, batch in zip(range(args.steps), batches(args)):
        for name, optimizer in optimizers.items():
            optimizer.zero_grad()
            loss = programs[name](*batch)
            loss.backward()
            optimizer.step()
            losses[name].append(loss.item())
    return losses


def arguments(argv):
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=128, help="length of a sequence: 128, 256, 384 or 512")
    parser.add_argument("--sequences", type=int, default=2, help="sequences of a batch")
    parser.add_argument("--width", type=int, default=128, help="d_model, at most 512")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--rate", type=float, default=2e-3, help="learning rate of Adam")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=["inductor", "aot_eager", "eager", "none"], default="inductor",
                        help="of torch.compile; none: run eagerly")
    args = parser.parse_args(argv)
    if args.tokens not in (128, 256, 384, 512):
        parser.error("--tokens is 128, 256, 384 or 512: a row of scores is one bank of PSUM")
    if args.width % args.heads or not 1 <= args.width // args.heads <= 128 or args.width > 512:
        parser.error("--width is at most 512 and a multiple of --heads, a head at most 128 wide")
    if args.steps < 2:
        parser.error("--steps is at least 2, so that the loss can fall")
    return args


def main(argv=None):
    """Compare gradients, train, print the losses. Returns 0 if the gradients agree and the loss falls."""
    args = arguments(argv)
    console = Console(force_terminal=sys.stdout.isatty(), width=100)
    console.print(f"{args.blocks} blocks, d_model {args.width}, {args.heads} heads, {args.sequences} x {args.tokens} bytes, "
                  f"backend {args.backend}")
    found = models(args)
    programs = {name: model if args.backend == "none" else torch.compile(model, backend=args.backend, fullgraph=True)
                for name, model in found.items()}

    start = time.perf_counter()
    with console.status("compiling, comparing gradients ..."):
        differing = differences(found, programs, next(batches(args)))
    worst = max(differing, key=differing.get)
    console.print(f"gradients of {len(differing)} parameters, NKI against PyTorch: largest relative L2 difference {differing[worst]:.1e} "
                  f"({worst}), {time.perf_counter() - start:.1f} s", highlight=False, soft_wrap=True)
    if not differing[worst] < TOLERANCE:
        console.print(f"the gradients differ by more than {TOLERANCE:.0e}:", {k: v for k, v in differing.items() if not v < TOLERANCE})
        return 1

    start = time.perf_counter()
    with console.status("training ..."):
        losses = train(args, found, programs)
    table = Table(title=f"loss in nats per byte ({time.perf_counter() - start:.1f} s)")
    for column in ("step", "loss NKI", "loss PyTorch"):
        table.add_column(column, justify="right")
    for step, pair in enumerate(zip(*losses.values()), 1):
        table.add_row(str(step), *(f"{value:.5f}" for value in pair))
    console.print(table)
    if not losses["NKI"][-1] < losses["NKI"][0]:
        console.print("the loss does not fall")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
