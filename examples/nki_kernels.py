"""RMSNorm and causal attention, forward and backward, as NKI kernels: what the examples in JAX and PyTorch are made of.

The backward kernels take the inputs of the forward pass and compute again what they need.
"""
import opennki.dropin  # noqa: F401  isort: skip  (provides neuronxcc)
import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl

ROWS = 128  # partitions of a tile: rows that are worked on together
EPS = 1e-6


# ---- RMSNorm -----------------------------------------------------------------------------------------------
def inverse_rms(rows):
    """1 / sqrt(mean of squares + EPS) of each row of a tile (ROWS, d), as (ROWS, 1)."""
    squares = nl.ndarray((ROWS, 1), dtype=nl.float32)
    nisa.activation_reduce(op=nl.square, data=rows, reduce_op=nl.add, reduce_res=squares)
    return nisa.activation(op=nl.rsqrt, data=squares, scale=1 / rows.shape[1], bias=nl.full((ROWS, 1), EPS, dtype=nl.float32))


@nki.jit(platform_target="trn2")
def rms_norm_forward(x, weight):
    """x / rms(x) * weight for x of shape (rows, d) and weight of shape (1, d); rows is a multiple of 128."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    weights = nl.broadcast_to(nl.load(weight), shape=(ROWS, x.shape[1]))
    for i in nl.affine_range(x.shape[0] // ROWS):
        part = nl.ds(i * ROWS, ROWS)
        tile = nl.load(x[part, :])
        nl.store(out[part, :], nl.multiply(nl.multiply(tile, inverse_rms(tile)), weights, dtype=x.dtype))
    return out


@nki.jit(platform_target="trn2")
def rms_norm_backward(x, weight, d_out):
    """The gradients of `rms_norm_forward`: d_x of shape (rows, d), d_weight of shape (1, d)."""
    rows, d = x.shape
    d_x = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    d_weight = nl.ndarray((1, d), dtype=weight.dtype, buffer=nl.shared_hbm)
    weights = nl.broadcast_to(nl.load(weight), shape=(ROWS, d))
    ones = nl.ones((ROWS, 1), dtype=nl.float32)
    column_sums = nl.zeros((1, d), dtype=nl.float32, buffer=nl.psum)

    for i in nl.affine_range(rows // ROWS):
        part = nl.ds(i * ROWS, ROWS)
        tile, d_tile = nl.load(x[part, :]), nl.load(d_out[part, :])
        inverse = inverse_rms(tile)
        normed = nl.multiply(tile, inverse)
        # a sum over partitions is a product with a column of ones
        column_sums += nisa.nc_matmul(ones, nl.multiply(d_tile, normed))
        d_normed = nl.multiply(d_tile, weights)
        # what changes the length of a row does not change its normed value
        along = nl.mean(nl.multiply(d_normed, normed), axis=1, keepdims=True)
        d_rows = nl.subtract(d_normed, nl.multiply(normed, along))
        nl.store(d_x[part, :], nl.multiply(d_rows, inverse, dtype=x.dtype))
    nl.store(d_weight, column_sums)
    return d_x, d_weight


# ---- causal attention --------------------------------------------------------------------------------------
def turned(source, head, columns):
    """source[head] of shape (tokens, d) as a tile (d, columns), its first `columns` tokens."""
    out = nl.ndarray((source.shape[2], columns), dtype=nl.float32)
    for j in nl.affine_range(columns // ROWS):
        part = nl.ds(j * ROWS, ROWS)
        out[:, part] = nl.copy(nisa.nc_transpose(nl.load(source[head, part, :])))
    return out


def attention_weights(q_turned, k_turned, i):
    """softmax of the scores of the i-th block of queries, (ROWS, tokens); zero where the key is in the future.

    A row of scores fits into one PSUM bank up to 512 tokens, so that the softmax is over whole rows.
    """
    d, tokens = k_turned.shape
    scores = nl.multiply(nisa.nc_matmul(q_turned, k_turned), d ** -0.5)
    row, column = nl.mgrid[0:ROWS, 0:tokens]
    scores = nisa.affine_select(pred=(i * ROWS + row >= column), on_true_tile=scores, on_false_value=nl.fp32.min)
    minus_max = nl.negative(nl.max(scores, axis=1, keepdims=True))
    sums = nl.ndarray((ROWS, 1), dtype=nl.float32)
    exps = nisa.activation_reduce(op=nl.exp, data=scores, bias=minus_max, reduce_op=nl.add, reduce_res=sums)
    return nl.multiply(exps, nl.reciprocal(sums))


@nki.jit(platform_target="trn2")
def attention_forward(q, k, v):
    """softmax(q k.T / sqrt(d), causal) v, for one head in each program of the grid.

    q, k, v and the result: (heads, tokens, d) float32, d <= 128, tokens a multiple of 128 and at most 512.
    """
    _, tokens, d = q.shape
    head = nl.program_id(0)
    out = nl.ndarray(q.shape, dtype=q.dtype, buffer=nl.shared_hbm)
    k_turned = turned(k, head, tokens)

    for i in nl.affine_range(tokens // ROWS):
        part = nl.ds(i * ROWS, ROWS)
        weights = attention_weights(nl.copy(nisa.nc_transpose(nl.load(q[head, part, :]))), k_turned, i)
        product = nl.zeros((ROWS, d), dtype=nl.float32, buffer=nl.psum)
        for j in nl.affine_range(tokens // ROWS):
            if j <= i:  # later keys have no weight
                keys = nl.ds(j * ROWS, ROWS)
                product += nisa.nc_matmul(nl.copy(nisa.nc_transpose(weights[:, keys])), nl.load(v[head, keys, :]))
        nl.store(out[head, part, :], nl.copy(product, dtype=q.dtype))
    return out


@nki.jit(platform_target="trn2")
def attention_backward(q, k, v, d_out):
    """The gradients of `attention_forward`: d_q, d_k, d_v, each of the shape of q.

    With p the attention weights: d_v = p.T d_out and, as each row of p sums to one,
    d_scores = p * (d_out v.T - its mean under p). Keys collect from all blocks of queries, so their gradients stay in SBUF until the end.
    """
    _, tokens, d = q.shape
    head = nl.program_id(0)
    d_q, d_k, d_v = (nl.ndarray(q.shape, dtype=q.dtype, buffer=nl.shared_hbm) for _ in range(3))
    k_turned, v_turned = turned(k, head, tokens), turned(v, head, tokens)
    blocks = tokens // ROWS
    d_keys, d_values = (nl.zeros((ROWS, blocks, d), dtype=nl.float32) for _ in range(2))

    for i in nl.sequential_range(blocks):
        part = nl.ds(i * ROWS, ROWS)
        queries, d_rows = nl.load(q[head, part, :]), nl.load(d_out[head, part, :])
        weights = attention_weights(nl.copy(nisa.nc_transpose(queries)), k_turned, i)
        d_weights = nisa.nc_matmul(nl.copy(nisa.nc_transpose(d_rows)), v_turned)
        mean = nl.sum(nl.multiply(weights, d_weights), axis=1, keepdims=True)
        d_scores = nl.multiply(nl.multiply(nl.subtract(d_weights, mean), weights), d ** -0.5)

        d_queries = nl.zeros((ROWS, d), dtype=nl.float32, buffer=nl.psum)
        for j in nl.affine_range(blocks):
            if j <= i:
                keys = nl.ds(j * ROWS, ROWS)
                # the queries are the contraction here, and they are the partitions already
                d_keys[:, j, :] += nisa.nc_matmul(d_scores[:, keys], queries)
                d_values[:, j, :] += nisa.nc_matmul(weights[:, keys], d_rows)
                d_queries += nisa.nc_matmul(nl.copy(nisa.nc_transpose(d_scores[:, keys])), nl.load(k[head, keys, :]))
        nl.store(d_q[head, part, :], nl.copy(d_queries, dtype=q.dtype))

    for j in nl.affine_range(blocks):
        keys = nl.ds(j * ROWS, ROWS)
        nl.store(d_k[head, keys, :], nl.copy(d_keys[:, j, :], dtype=q.dtype))
        nl.store(d_v[head, keys, :], nl.copy(d_values[:, j, :], dtype=q.dtype))
    return d_q, d_k, d_v
