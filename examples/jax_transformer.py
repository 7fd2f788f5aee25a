"""A small transformer in JAX whose attention and RMSNorm are NKI kernels, forward and backward, trained on the CPU.

    python examples/jax_transformer.py                       (or: --steps 40 --tokens 256 --blocks 1)

The model predicts the next byte of a text: the source of its own kernels. At the start the gradients of all parameters are compared
with those of the same model in JAX alone; then both are trained side by side, under jax.jit, on the same batches.
"""
import argparse
import sys
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
import nki_blocks as blocks
import nki_kernels as kernels

OPERATIONS = {"NKI": (blocks.rms_norm, blocks.attention), "JAX": (blocks.rms_norm_jax, blocks.attention_jax)}
BYTES = 256
TOLERANCE = 1e-5  # relative L2 of the gradient of a parameter; float32 sums in another order differ by 1e-7 to 1e-6


def initial_parameters(args):
    """Names and float32 arrays; weights of the scale of 1 / sqrt(inputs)."""
    rng = np.random.default_rng(args.seed)
    d = args.width

    def weight(rows, columns):
        return jnp.asarray(rng.standard_normal((rows, columns), np.float32) * rows ** -0.5)

    ones = jnp.ones(d)
    parameters = {"embedding": weight(BYTES, d), "position": weight(args.tokens, d), "norm": ones, "readout": weight(d, BYTES)}
    for b in range(args.blocks):
        parameters |= {
            f"{b}.attention_norm": ones, f"{b}.qkv": weight(d, 3 * d), f"{b}.out": weight(d, d),
            f"{b}.mlp_norm": ones, f"{b}.up": weight(d, 4 * d), f"{b}.down": weight(4 * d, d),
        }
    return parameters


def loss(parameters, batch, *, operations, heads):
    """Mean cross entropy in nats of each next byte; batch: (sequences, tokens + 1) integers."""
    rms_norm, attention = OPERATIONS[operations]
    inputs, targets = batch[:, :-1], batch[:, 1:]
    sequences, tokens = inputs.shape
    x = parameters["embedding"][inputs] + parameters["position"]
    d = x.shape[-1]

    for b in range(sum(name.endswith(".qkv") for name in parameters)):
        qkv = rms_norm(x, parameters[f"{b}.attention_norm"]) @ parameters[f"{b}.qkv"]
        # (3, sequences * heads, tokens, d / heads): a head of a sequence is one program of the kernels
        q, k, v = qkv.reshape(sequences, tokens, 3, heads, -1).transpose(2, 0, 3, 1, 4).reshape(3, sequences * heads, tokens, -1)
        mixed = attention(q, k, v).reshape(sequences, heads, tokens, -1).transpose(0, 2, 1, 3).reshape(sequences, tokens, d)
        x = x + mixed @ parameters[f"{b}.out"]
        x = x + jax.nn.gelu(rms_norm(x, parameters[f"{b}.mlp_norm"]) @ parameters[f"{b}.up"]) @ parameters[f"{b}.down"]

    scores = jax.nn.log_softmax(rms_norm(x, parameters["norm"]) @ parameters["readout"])
    return -jnp.mean(jnp.take_along_axis(scores, targets[..., None], axis=-1))


@partial(jax.jit, static_argnames=("operations", "heads"))
def loss_and_gradients(parameters, batch, *, operations, heads):
    """`loss` and its gradients."""
    return jax.value_and_grad(loss)(parameters, batch, operations=operations, heads=heads)


@jax.jit
def adam(parameters, moments, gradients, step, rate):
    """One step of Adam. step: counted from 1. Returns new parameters and new moments."""
    new_parameters, new_moments = {}, {}
    for name, g in gradients.items():
        mean, square = moments[name]
        mean, square = 0.9 * mean + 0.1 * g, 0.99 * square + 0.01 * g * g
        change = (mean / (1 - 0.9 ** step)) / (jnp.sqrt(square / (1 - 0.99 ** step)) + 1e-8)
        new_parameters[name], new_moments[name] = parameters[name] - rate * change, (mean, square)
    return new_parameters, new_moments


def batches(args):
    """Random windows of the text, the same ones in every run."""
    text = np.frombuffer(Path(kernels.__file__).read_bytes(), np.uint8).astype(np.int32)
    rng = np.random.default_rng(args.seed)
    while True:
        starts = rng.integers(0, len(text) - args.tokens, args.sequences)
        yield jnp.asarray(np.stack([text[s:s + args.tokens + 1] for s in starts]))


def differences(parameters, batch, heads):
    """Relative L2 difference of the gradient of each parameter, NKI against JAX alone."""
    nki, plain = (loss_and_gradients(parameters, batch, operations=o, heads=heads)[1] for o in OPERATIONS)
    return {name: float(np.linalg.norm(nki[name] - plain[name]) / np.linalg.norm(plain[name])) for name in parameters}


def train(args, parameters):
    """The losses before each step: {operations: [...]}."""
    losses = {operations: [] for operations in OPERATIONS}
    zeros = {name: (jnp.zeros(p.shape),) * 2 for name, p in parameters.items()}
    state = dict.fromkeys(OPERATIONS, (parameters, zeros))
    for step, batch in zip(range(1, args.steps + 1), batches(args)):
        for o in OPERATIONS:
            value, gradients = loss_and_gradients(state[o][0], batch, operations=o, heads=args.heads)
            state[o] = adam(*state[o], gradients, float(step), args.rate)
            losses[o].append(float(value))
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
    console.print(f"{args.blocks} blocks, d_model {args.width}, {args.heads} heads, {args.sequences} x {args.tokens} bytes")
    parameters = initial_parameters(args)

    start = time.perf_counter()
    with console.status("comparing gradients ..."):
        found = differences(parameters, next(batches(args)), args.heads)
    worst = max(found, key=found.get)
    console.print(f"gradients of {len(found)} parameters, NKI against JAX: largest relative L2 difference {found[worst]:.1e} "
                  f"({worst}), {time.perf_counter() - start:.1f} s", highlight=False, soft_wrap=True)
    if not found[worst] < TOLERANCE:
        console.print(f"the gradients differ by more than {TOLERANCE:.0e}:", {k: v for k, v in found.items() if not v < TOLERANCE})
        return 1

    start = time.perf_counter()
    with console.status("training ..."):
        losses = train(args, parameters)
    table = Table(title=f"loss in nats per byte ({time.perf_counter() - start:.1f} s)")
    for column in ("step", "loss NKI", "loss JAX"):
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
