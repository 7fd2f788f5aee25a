"""`neuronxcc.nki.kernels.attention`: attention, forward and backward.

Names, arguments, layouts and results as the vendor documents them (public reference kernels of nki-samples); the
kernels are opennki's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import opennki.dialects.neuronxcc.language as nl
from opennki.dialects.neuronxcc._missing import missing
from opennki.dialects.neuronxcc.kernels import _flash_backward, _flash_forward, _tools
from opennki.kernels.entry import jit

_M = "neuronxcc.nki.kernels.attention"


@dataclass(frozen=True)
class FlashConfig:
    """Configuration of flash_fwd.

    seq_tile_size: keys and values that are loaded together; attn_core_tile_size: the most tiles of 128 queries that are
    worked on together; training: return the log-sum-exp for the backward pass, too; should_transpose_v: v comes as
    (batch, heads, d, seq); lse_dtype: dtype of the log-sum-exp by name, "" for float32, or that of the inputs without
    mixed precision.
    """

    seq_tile_size: int = 2048
    attn_core_tile_size: int = 256
    training: bool = True
    should_transpose_v: bool = False
    lse_dtype: str = ""


@jit
def flash_fwd(
    q: Any,
    k: Any,
    v: Any,
    seed: Any,
    logit_bias: Any = None,
    softmax_scale: float | None = None,
    use_causal_mask: bool = True,
    sliding_window: int = -1,
    mixed_precision: bool = True,
    dropout_p: float = 0.0,
    config: FlashConfig | None = None,
) -> Any:
    """softmax(q.T k * softmax_scale + logit_bias, masked) v, for the grid [batch, heads of keys].

    A smaller grid computes what belongs to its programs alone.

    q: (batch, heads, d, seq_q) with d <= 128. k: (batch, kv_heads, d, seq_k). v: (batch, kv_heads, seq_k, d), or
    (batch, kv_heads, d, seq_k) with config.should_transpose_v. All of one dtype. seq_q is a multiple of 128, seq_k of
    config.seq_tile_size, which is a multiple of 512. seed: int32 (1,), or None without dropout. logit_bias: (1, 1,
    seq_q, seq_k). softmax_scale: 1 / sqrt(d) by default. use_causal_mask: a query sees the keys up to its own position.
    sliding_window > 0: only the last so many of these. mixed_precision: products of bfloat16, else of the inputs' dtype;
    sums and softmax are float32. dropout_p: probability with which a weight is dropped; the others grow by
    1 / (1 - dropout_p).

    Returns o (batch, heads, seq_q, d) and, in training, lse (batch, heads, 128, seq_q / 128), where lse[..., p, n]
    belongs to query 128 n + p. Errors: NkiValueError and NkiTypeError for arguments against these rules.
    """
    config = FlashConfig() if config is None else config
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _tools.require_rank(name, tensor, 4, "(batch, heads, d, seq)")
    batch, heads, d, queries = q.shape
    kv_heads, keys = k.shape[1], k.shape[3]
    turned = config.should_transpose_v
    _tools.require_small_head("q", d)
    _tools.require_shape("k", k, (batch, kv_heads, d, keys), "(batch, kv_heads, d, seq_k)")
    layout = "(batch, kv_heads, d, seq_k)" if turned else "(batch, kv_heads, seq_k, d)"
    _tools.require_shape("v", v, (batch, kv_heads, d, keys) if turned else (batch, kv_heads, keys, d), layout)
    _tools.require_one_dtype(q=q, k=k, v=v)
    scale = float(d**-0.5 if softmax_scale is None else softmax_scale)
    _tools.check_attention(heads, kv_heads, dropout_p, scale, logit_bias, "logit_bias", queries, keys)
    _tools.check_sequence("q", queries)
    size = config.seq_tile_size
    _tools.require(
        size >= _tools.BANK and size % _tools.BANK == 0 and keys % size == 0,
        f"seq_tile_size is {size} for {keys} keys",
        operand="config",
        rule="seq_tile_size is a multiple of 512 that divides the sequence of keys",
        fix=f"pass config=FlashConfig(seq_tile_size={_tools.largest_divisor(keys, 2048)})"
        if keys % _tools.BANK == 0
        else "pad the keys to a multiple of 512",
    )
    _tools.require(
        config.training or (seed is None and dropout_p == 0.0),
        "seed or dropout_p is given without training",
        operand="dropout_p",
        rule="there is no dropout in inference",
        fix="pass seed=None and dropout_p=0.0, or a config with training=True",
    )
    _tools.require(
        sliding_window <= 0 or queries < keys + sliding_window,
        f"{queries} queries see no key: there are {keys} keys and the window is {sliding_window}",
        operand="sliding_window",
        rule="each query sees a key",
        fix="pass as many keys as queries, or a larger window",
    )
    _tools.require_grid((batch, kv_heads), "batch, heads of keys", part=True)

    o = nl.ndarray((batch, heads, queries, d), dtype=q.dtype, buffer=nl.shared_hbm)
    lse = None
    if config.training:
        lse_dtype = nl.float32 if mixed_precision else q.dtype
        if config.lse_dtype:
            _tools.require(
                config.lse_dtype in ("float32", "bfloat16", "float16"),
                f"lse_dtype is {config.lse_dtype!r}",
                operand="config",
                rule='lse_dtype is "", "float32", "bfloat16" or "float16"',
                fix='pass lse_dtype="float32"',
            )
            lse_dtype = getattr(nl, config.lse_dtype)
        lse = nl.ndarray((batch, heads, _tools.ROWS, queries // _tools.ROWS), dtype=lse_dtype, buffer=nl.shared_hbm)

    dtype = _tools.product_dtype(q.dtype, mixed_precision)
    group = heads // kv_heads
    b, kv = nl.program_id(0), nl.program_id(1)
    dropout = None
    if dropout_p > 0.0:
        dropout = (_tools.load_seed(seed, "seed"), nl.ones((_tools.ROWS, _tools.ROWS), dtype=dtype), float(dropout_p))
    work = _flash_forward.Forward(
        queries,
        keys,
        d,
        dtype,
        scale,
        _tools.Scope(use_causal_mask, sliding_window),
        None if logit_bias is None else logit_bias[0, 0],
        dropout,
        block=_tools.ROWS * max(1, config.attn_core_tile_size),
        chunk=size,
    )

    def place(g: Any, query_tile: Any, key_tile: Any) -> Any:
        return _tools.kept_index(b, kv * group + g, heads, query_tile, queries // _tools.ROWS, key_tile, keys // _tools.ROWS)

    mine = nl.ds(kv * group, group)
    _flash_forward.forward(
        q[b, mine], k[b, kv], v[b, kv], o[b, mine], None if lse is None else lse[b, mine], work, place, v_by_head=turned
    )
    return (o, lse) if config.training else o


@jit
def flash_attn_bwd(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    o_ref: Any,
    dy_ref: Any,
    lse_ref: Any,
    seed_ref: Any,
    logit_bias_ref: Any = None,
    use_causal_mask: bool = False,
    mixed_precision: bool = False,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    sliding_window: int = -1,
    sinks: Any = None,
) -> Any:
    """The gradients of flash_fwd, for the grid [batch, heads of keys].

    q_ref, o_ref, dy_ref: (batch, heads, d, seq_q); k_ref, v_ref: (batch, kv_heads, d, seq_k); all of one dtype. d is at
    most 128, or a multiple of 128 up to 1024. seq_q and seq_k are multiples of 128. lse_ref: (batch, heads, 128, seq_q /
    128) as flash_fwd returns it, with the sinks in the sum if there are any. The other arguments are those of the forward
    pass; a sliding window asks for use_causal_mask. sinks: (batch, heads), one more score for each query that takes
    weight and gives nothing.

    Products are of the inputs' dtype, whatever mixed_precision says; sums and softmax are float32. Returns dq, dk, dv, shaped as
    q_ref, k_ref and v_ref, and dsinks (batch, heads) with sinks, which is float32 under mixed precision. logit_bias has no
    gradient. Errors: NkiValueError and NkiTypeError for arguments against these rules.
    """
    named = {"q_ref": q_ref, "k_ref": k_ref, "v_ref": v_ref, "o_ref": o_ref, "dy_ref": dy_ref}
    for name, tensor in named.items():
        _tools.require_rank(name, tensor, 4, "(batch, heads, d, seq)")
    batch, heads, d, queries = q_ref.shape
    kv_heads, keys = k_ref.shape[1], k_ref.shape[3]
    rows = _tools.ROWS
    _tools.require_one_dtype(**named)
    for name, tensor in named.items():
        shape = (batch, kv_heads, d, keys) if name in ("k_ref", "v_ref") else (batch, heads, d, queries)
        _tools.require_shape(name, tensor, shape, "(batch, heads, d, seq)")
    _tools.require(
        0 < d <= rows or (d % rows == 0 and d <= 8 * rows),
        f"the head dimension is {d}",
        operand="q_ref",
        rule="d is at most 128, or a multiple of 128 up to 1024",
        why="a contraction runs over 128 partitions at a time",
        fix="pad d with zeros; q_ref has the layout (batch, heads, d, seq)",
    )
    scale = float(d**-0.5 if softmax_scale is None else softmax_scale)
    _tools.check_attention(heads, kv_heads, dropout_p, scale, logit_bias_ref, "logit_bias_ref", queries, keys)
    _tools.check_sequence("q_ref", queries)
    _tools.check_sequence("k_ref", keys)
    _tools.require_rank("lse_ref", lse_ref, 4, "(batch, heads, 128, seq_q / 128)")
    _tools.require_shape("lse_ref", lse_ref, (batch, heads, rows, queries // rows), "(batch, heads, 128, seq_q / 128)")
    _tools.require(
        sliding_window <= 0 or use_causal_mask,
        f"sliding_window is {sliding_window} without use_causal_mask",
        operand="sliding_window",
        rule="a sliding window goes with the causal mask",
        fix="pass use_causal_mask=True",
    )
    if sinks is not None:
        _tools.require_rank("sinks", sinks, 2, "(batch, heads)")
        _tools.require_shape("sinks", sinks, (batch, heads), "(batch, heads)")
    _tools.require_grid((batch, kv_heads), "batch, heads of keys")

    dq = nl.ndarray(q_ref.shape, dtype=q_ref.dtype, buffer=nl.shared_hbm)
    dk = nl.ndarray(k_ref.shape, dtype=q_ref.dtype, buffer=nl.shared_hbm)
    dv = nl.ndarray(v_ref.shape, dtype=q_ref.dtype, buffer=nl.shared_hbm)
    dsinks = None
    if sinks is not None:
        dsinks = nl.ndarray((batch, heads), dtype=nl.float32 if mixed_precision else q_ref.dtype, buffer=nl.shared_hbm)

    dtype = q_ref.dtype
    group = heads // kv_heads
    b, kv = nl.program_id(0), nl.program_id(1)

    def place(g: Any, query_tile: Any, key_tile: Any) -> Any:
        return _tools.kept_index(b, kv * group + g, heads, query_tile, queries // rows, key_tile, keys // rows)

    work = _flash_backward.Backward(
        _flash_backward.sizes(group, d, queries, keys, dtype),
        dtype,
        scale,
        _tools.Scope(use_causal_mask, sliding_window),
        None if logit_bias_ref is None else logit_bias_ref[0, 0],
        _tools.load_seed(seed_ref, "seed_ref") if dropout_p > 0.0 else None,
        float(dropout_p),
        place,
    )
    mine = nl.ds(kv * group, group)
    sink, dsink = (None if x is None else x[nl.ds(b, 1), mine] for x in (sinks, dsinks))
    _flash_backward.backward(
        work, q_ref[b, mine], k_ref[b, kv], v_ref[b, kv], o_ref[b, mine], dy_ref[b, mine], lse_ref[b, mine],
        dq[b, mine], dk[b, kv], dv[b, kv], sink, dsink,
    )
    return (dq, dk, dv) if sinks is None else (dq, dk, dv, dsinks)


@jit
def fused_self_attn_for_SD_small_head_size(
    q_ref: Any, k_ref: Any, v_ref: Any, use_causal_mask: bool = False, mixed_precision: bool = True
) -> Any:
    """softmax(0.125 q.T k, masked) v of Stable Diffusion, for the grid [batch].

    q_ref: (batch, d, seq), k_ref and v_ref: (batch, seq, d), all of one dtype; d <= 128, seq a multiple of 128.
    mixed_precision: products of bfloat16, else of the inputs' dtype; sums and softmax are float32. Returns (batch, seq, d).
    Errors: NkiValueError and NkiTypeError for arguments against these rules.
    """
    _tools.require_rank("q_ref", q_ref, 3, "(batch, d, seq)")
    batch, d, length = q_ref.shape
    _tools.check_small_attention(q_ref, k_ref, v_ref, (batch, length, d), "(batch, seq, d)")
    _tools.require_grid((batch,), "batch")
    out = nl.ndarray((batch, length, d), dtype=q_ref.dtype, buffer=nl.shared_hbm)
    dtype = _tools.product_dtype(q_ref.dtype, mixed_precision)
    work = _flash_forward.Forward(length, length, d, dtype, _tools.SD_SCALE, _tools.Scope(use_causal_mask, 0))
    b = nl.program_id(0)
    one = nl.ds(b, 1)
    _flash_forward.forward(q_ref[one], k_ref[b], v_ref[b], out[one], None, work, k_by_head=False)
    return out


_ISA_KERNELS = {"CausalAttentionMMSoftmaxMMWithoutSwap": True, "AttentionMMSoftmaxMMWithoutSwap": False}


def attention_isa_kernel(
    q: Any,
    k: Any,
    v: Any,
    scale: float,
    out: Any,
    kernel_name: str = "CausalAttentionMMSoftmaxMMWithoutSwap",
) -> None:
    """softmax(scale q.T k, masked) v, written to `out`: a plain function, which callers jit, `nki_jit()(attention_isa_kernel)`.

    q: (batch * heads, d, seq_q) with d <= 128, k: (batch * heads, d, seq_k), v: (batch * heads, seq_k, d), all of one dtype;
    k and v may have fewer heads, which divide those of q: head h of q takes head h * kv_heads // heads. Sequences are
    multiples of 128. out: (batch * heads, d, seq_q), or (batch * heads, seq_q, d) if it has that shape only. kernel_name:
    "CausalAttentionMMSoftmaxMMWithoutSwap", or "AttentionMMSoftmaxMMWithoutSwap" without a mask. Grid: none, or [n], whose
    programs share out the heads, or the queries where n does not divide the heads. Products of the inputs' dtype; sums and
    softmax are float32. Source: callers in public repositories, as the vendor's body is not public. Errors: NkiValueError
    and NkiTypeError for arguments against these rules.
    """
    causal = _ISA_KERNELS.get(kernel_name)
    _tools.require(
        causal is not None,
        f"kernel_name is {kernel_name!r}",
        operand="kernel_name",
        rule="kernel_name is one of " + ", ".join(_ISA_KERNELS),
        why="the name says which mask is used",
        fix="pass one of these names",
    )
    for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out)):
        _tools.require_rank(name, tensor, 3, "(batch * heads, d, seq)")
    heads, d, queries = q.shape
    kv_heads, _, keys = k.shape
    _tools.require_shape("k", k, (kv_heads, d, keys), "(batch * heads, d, seq_k)")
    _tools.require_shape("v", v, (kv_heads, keys, d), "(batch * heads, seq_k, d)")
    by_head = tuple(out.shape) == (heads, d, queries)
    _tools.require_shape("out", out, (heads, d, queries) if by_head else (heads, queries, d), "(batch * heads, d, seq_q) or (.., seq_q, d)")
    _tools.require_one_dtype(q=q, k=k, v=v)
    _tools.require_small_head("q", d)
    _tools.check_attention(heads, kv_heads, 0.0, float(scale), None, "", queries, keys)
    _tools.check_sequence("q", queries)
    _tools.check_sequence("k", keys)

    programs = nl.num_programs(0) if nl.program_ndim() else 1
    if nl.program_ndim():
        _tools.require_grid((programs,), "programs")
    me: Any = nl.program_id(0) if programs > 1 else 0
    part = queries if heads % programs == 0 else queries // programs
    _tools.require(
        heads % programs == 0 or (part % _tools.ROWS == 0 and part * programs == queries),
        f"{programs} programs for {heads} heads of {queries} queries",
        operand="grid",
        rule="the programs divide the heads, or the tiles of 128 queries",
        fix="launch it without a grid",
    )
    mine = heads // programs if part == queries else heads
    first_head, first = (me * mine, 0) if part == queries else (0, me * part)
    scope = _tools.Scope(bool(causal), 0)
    work = _flash_forward.Forward(part, keys, d, q.dtype, float(scale), scope, start=first)
    columns = nl.ds(first, part)
    for h in nl.affine_range(mine):
        one = nl.ds(first_head + h, 1)
        kv = first_head + h if kv_heads == heads else (first_head + h) // (heads // kv_heads)
        into = out[one, :, columns] if by_head else out[one, columns]
        _flash_forward.forward(q[one, :, columns], k[kv], v[kv], into, None, work, o_by_head=by_head)


__all__ = ["FlashConfig", "attention_isa_kernel", "flash_attn_bwd", "flash_fwd", "fused_self_attn_for_SD_small_head_size"]
__getattr__ = missing(_M)
