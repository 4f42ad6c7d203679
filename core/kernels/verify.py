"""A step of up to T tokens per row in one pass over the checkpoint, chains of drafts: the tile form of decode.

    P(x) = S0 (E(0,i) * x) + sum_j u_j (k_j^T (E(j,i) * x))                over the ring's records j
    (I + A) U = diag(beta) (V - [DELTA] P(K)),  A_im = beta_i k_i^T (E(m,i) * k_m), m < i         by substitution in fp32
    o_i = P(q_i) + sum_{m <= i} F_im u_m,       F_im = q_i^T (E(m,i) * k_m)

A later token never reaches an earlier row: what it holds, NaN included, is left out there, not multiplied by zero. Decode has a
kernel of its own, since a matrix product has at least 16 columns; its vector form unrolled over tokens is no substitute for
this one: at T = 8 and V = K = 128 it spilled 2 to 3 KB a thread on sm_90 and compiled for tens of seconds, this one for two.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..cursor import PLAN_WIDTH
from ..launch import Launch, dot_precision
from ..layout import Buffers, Layout
from .arguments import Inputs, Weights, dims, on_device, tokens
from .formats import load_read, load_state, planned_rng, store_state
from .recurrence import (
    G_FLOOR,
    append_record,
    at,
    decayed,
    exp,
    fold,
    inverse_norm,
    load_beta,
    load_chunks,
    load_g,
    load_ring,
    load_scalars,
    scaled,
    token,
    wrap,
)


@triton.jit
def cumulative(pool, d, layer, slot, i_h, start, count, g):
    """Cumulative decay up to each token: the ring's after its newest record (0 for an empty ring) plus the step's own."""
    if d.STORES_G:
        p_gsum = at(pool.gsum, layer, slot, i_h) + wrap(start + tl.maximum(count, 1) - 1, d.R) * pool.gsum.row
        if d.PER_CHANNEL:
            c = ()
            for i_k in tl.static_range(d.K // d.BLOCK_K):
                o_k = i_k * d.BLOCK_K + tl.arange(0, d.BLOCK_K)
                newest = tl.load(p_gsum + o_k, mask=count > 0, other=0.0)
                c += (newest[None, :] + tl.cumsum(tl.maximum(g[i_k], G_FLOOR), 0),)
            return c
        else:
            return tl.load(p_gsum, mask=count > 0, other=0.0) + tl.cumsum(tl.maximum(g, G_FLOOR), 0)
    else:
        return tl.cumsum(g, 0)


@triton.jit
def column(x, m_m, d):
    """The one row of chunks that m_m [T, 1] marks: chunks [BK]; what other rows hold is not multiplied, only left out."""
    y = ()
    for i_k in tl.static_range(d.K // d.BLOCK_K):
        y += (tl.sum(tl.where(m_m, x[i_k], 0.0), 0),)
    return y


@triton.jit
def window(q, k, c, beta, d, t, TP: tl.constexpr):
    """How the step's tokens see each other: F [T, T], rows the outputs, and X = (I + A)^-1 diag(beta) by substitution.

    One token m at a time, all later rows at once: E(m,i) is exp(c_i - c_m), never a quotient of two exponentials.
    """
    o_t = tl.arange(0, TP)
    F = tl.zeros([TP, TP], tl.float32)
    A = tl.zeros([TP, TP], tl.float32)
    for m in range(t):
        m_m = (o_t == m)[:, None]
        k_m, f, a = column(k, m_m, d), tl.zeros([TP, d.BLOCK_K], tl.float32), tl.zeros([TP, d.BLOCK_K], tl.float32)
        if d.PER_CHANNEL:
            c_m = column(c, m_m, d)
        for i_k in tl.static_range(d.K // d.BLOCK_K):
            k_i = k_m[i_k][None, :]
            if d.PER_CHANNEL:
                k_i = k_i * tl.exp(tl.minimum(c[i_k] - c_m[i_k][None, :], 0.0))
            f += q[i_k] * k_i
            if d.DELTA:
                a += k[i_k] * k_i
        f_m, a_m = tl.sum(f, 1), tl.sum(a, 1)
        if not d.PER_CHANNEL:
            E = tl.exp(tl.minimum(c - tl.sum(tl.where(o_t == m, c, 0.0), 0), 0.0))
            f_m, a_m = f_m * E, a_m * E
        F = tl.where((o_t[None, :] == m) & (o_t[:, None] >= m), f_m[:, None], F)
        A = tl.where((o_t[None, :] == m) & (o_t[:, None] > m), (beta * a_m)[:, None], A)
    X = tl.where(o_t[:, None] == o_t[None, :], beta[:, None], 0.0)
    if d.DELTA:
        for i in range(1, t):  # X_i = beta_i e_i - sum_{m < i} A_im X_m
            A_i = tl.sum(tl.where((o_t == i)[:, None], A, 0.0), 0)
            X_i = tl.sum(tl.where((o_t < i)[:, None], A_i[:, None] * X, 0.0), 0)
            X = tl.where((o_t == i)[:, None], X - X_i[None, :], X)
    return F, X


@triton.jit
def history(q, k, c, w, pool, d, layer, slot, i_h, start, count, t, TP: tl.constexpr):
    """The ring's records' weights in P(q_i) and P(k_i), [W, T], and E(0,i) [T] of one g per head.

    k_j^T (E(j,i) * x_i), times beta_j where the ring holds v instead of u. One token at a time.
    """
    i_g = i_h // (d.H // d.G)
    o_t, o_j = tl.arange(0, TP), tl.arange(0, d.W_PAD)
    m_j, row_j = (o_j < count)[:, None], wrap(start + o_j, d.R)[:, None]
    w_q, w_k = tl.zeros([d.W_PAD, TP], tl.float32), tl.zeros([d.W_PAD, TP], tl.float32)
    for i in range(t):
        q_i, k_i = column(q, (o_t == i)[:, None], d), column(k, (o_t == i)[:, None], d)
        a_q, a_k = tl.zeros([d.W_PAD, d.BLOCK_K], tl.float32), tl.zeros([d.W_PAD, d.BLOCK_K], tl.float32)
        if d.PER_CHANNEL:
            c_i = column(c, (o_t == i)[:, None], d)
        for i_k in tl.static_range(d.K // d.BLOCK_K):
            o_k = i_k * d.BLOCK_K + tl.arange(0, d.BLOCK_K)[None, :]
            k_j = tl.load(at(pool.k, layer, slot, i_g) + row_j * pool.k.row + o_k, mask=m_j, other=0.0).to(tl.float32)
            if d.PER_CHANNEL:
                gsum_j = tl.load(at(pool.gsum, layer, slot, i_h) + row_j * pool.gsum.row + o_k, mask=m_j, other=0.0)
                k_j *= tl.exp(c_i[i_k][None, :] - gsum_j)
            a_q += k_j * q_i[i_k][None, :]
            a_k += k_j * k_i[i_k][None, :]
        w_q = tl.where((o_t == i)[None, :], tl.sum(a_q, 1)[:, None], w_q)
        w_k = tl.where((o_t == i)[None, :], tl.sum(a_k, 1)[:, None], w_k)
    scale = tl.zeros([d.W_PAD], tl.float32) + 1.0
    if d.NORMALIZE:
        scale = load_scalars(pool.rnorm, d, layer, slot, i_g, start, count)
    if d.BETA != "one" and not d.DELTA:
        scale *= load_scalars(pool.beta, d, layer, slot, i_h, start, count)
    E_j = scale[:, None]
    if not d.STORES_G:  # exactly: suffix sums of A beta over the records after j
        A = tl.load(w.A + i_h).to(tl.float32)
        suffix = tl.cumsum(A * load_scalars(pool.beta, d, layer, slot, i_h, wrap(start + 1, d.R), count - 1), 0, reverse=True)
        E_j *= tl.exp(suffix[:, None] + c[None, :])
        c += tl.sum(A * load_scalars(pool.beta, d, layer, slot, i_h, start, count), 0)
    elif not d.PER_CHANNEL:
        gsum_j = load_scalars(pool.gsum, d, layer, slot, i_h, start, count)
        E_j *= tl.exp(tl.minimum(c[None, :] - gsum_j[:, None], 0.0))
    return w_q * E_j, w_k * E_j, c


@triton.jit
def readouts(s, x, d, PRECISION: tl.constexpr):
    """s x_i of a state tile and rows in chunks: [BV, T]."""
    p = tl.dot(s[0], tl.trans(x[0]), input_precision=PRECISION)
    for i_k in tl.static_range(1, d.K // d.BLOCK_K):
        p += tl.dot(s[i_k], tl.trans(x[i_k]), input_precision=PRECISION)
    return p


@triton.jit
def causal(x, M, t):
    """sum_{m <= i} M_im x_m for each row of V: x [BV, T], M [T, T]."""
    o_t = tl.arange(0, M.shape[0])
    y = tl.zeros_like(x)
    for m in range(t):
        x_m = tl.sum(tl.where((o_t == m)[None, :], x, 0.0), 1)
        M_m = tl.sum(tl.where((o_t == m)[None, :], M, 0.0), 1)
        y += tl.where((o_t >= m)[None, :], x_m[:, None] * M_m[None, :], 0.0)
    return y


@triton.jit
def emit(x, w, pool, out, d, layer, slot, i_h, append, n, t, o_v, F, X, p_q, p_k):
    """The tokens' u and outputs for a tile of V, stored; raw v and u appended to the ring. P(Q), P(K): [BV, T]."""
    o_t = tl.arange(0, F.shape[0])
    m_t = o_t < t
    v = tl.load(token(x.v, n, i_h) + o_t[None, :] * x.v.token + o_v[:, None], mask=m_t[None, :], other=0.0).to(tl.float32)
    u = causal(v - p_k, X, t)
    o = p_q + causal(u, F, t)
    if w.D is not None:
        o += tl.load(w.D + i_h).to(tl.float32) * v
    if x.z is not None:
        p_z = token(x.z, n, i_h) + o_t[None, :] * x.z.token + o_v[:, None]
        z = tl.load(p_z, mask=m_t[None, :], other=0.0).to(tl.float32)
        o *= z * tl.sigmoid(z)
    p_o = token(out, n, i_h) + o_t[None, :] * out.token + o_v[:, None]
    tl.store(p_o, o.to(out.ptr.dtype.element_ty), mask=m_t[None, :])
    row = wrap(append + o_t, d.R)[None, :]
    p_v = at(pool.v, layer, slot, i_h) + row * pool.v.row + o_v[:, None]
    tl.store(p_v, v.to(pool.v.ptr.dtype.element_ty), mask=m_t[None, :])
    if d.DELTA:
        if pool.u.ptr.dtype.element_ty == tl.float16:  # saturate: a helper's overflow must not become an infinity
            u = tl.clamp(u, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
        p_u = at(pool.u, layer, slot, i_h) + row * pool.u.row + o_v[:, None]
        tl.store(p_u, u.to(pool.u.ptr.dtype.element_ty), mask=m_t[None, :])


@triton.jit(do_not_specialize=["layer"])
def _verify_kernel(
    plan,
    layer,
    x,
    w,
    pool,
    out,
    d,
    WIDTH: tl.constexpr,
    TP: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    i_h = tl.program_id(0) % d.H
    p_plan = plan + tl.load(plan + tl.program_id(0) // d.H * WIDTH + 9) * WIDTH
    i_g = i_h // (d.H // d.G)
    slot, start, count = tl.load(p_plan).to(tl.int64), tl.load(p_plan + 1), tl.load(p_plan + 2)
    t, flush, append, n = tl.load(p_plan + 3), tl.load(p_plan + 4) > 0, tl.load(p_plan + 5), tl.load(p_plan + 6)
    for i in range(t, tl.load(p_plan + 7)):  # rows that the batch row owns and no token fills
        for o in range(0, d.V, BLOCK_V):
            p_o = token(out, n + i, i_h) + o + tl.arange(0, BLOCK_V)
            tl.store(p_o, tl.zeros([BLOCK_V], out.ptr.dtype.element_ty))
    if ((t > 0) | flush) == 0:
        return

    o_t = tl.arange(0, TP)
    m_t = o_t < t
    tall = (n + o_t)[:, None], m_t[:, None]
    q = load_chunks(token(x.q, tall[0], i_g), tall[1], d)
    k = load_chunks(token(x.k, tall[0], i_g), tall[1], d)
    rq, rk = inverse_norm(q, d) * tl.full([TP], d.SCALE, tl.float32), inverse_norm(k, d) * tl.full([TP], 1.0, tl.float32)
    beta = load_beta(x, w, d, n + o_t, i_h, m_t) * tl.full([TP], 1.0, tl.float32)
    if d.PER_CHANNEL:
        g = load_g(x, w, d, tall[0], i_h, tall[1], beta)
    else:
        g = load_g(x, w, d, n + o_t, i_h, m_t, beta)
    c = cumulative(pool, d, layer, slot, i_h, start, tl.where(flush, 0, count), g)
    append_record(pool, d, layer, slot, i_h, wrap(append + o_t, d.R), m_t, k, rk, beta, g, c)
    q, k = scaled(q, rq[:, None], d), scaled(k, rk[:, None], d)
    F, X = window(q, k, c, beta, d, t, TP)

    live = tl.where(flush, 0, count)
    w_q, w_k, c = history(q, k, c, w, pool, d, layer, slot, i_h, start, live, t, TP)
    E = tl.zeros([TP], tl.float32) + 1.0
    if d.PER_CHANNEL:
        q, k = decayed(q, c, d), decayed(k, c, d)
    else:
        E = exp(c)
    for o in range(0, d.V, BLOCK_V):
        o_v = o + tl.arange(0, BLOCK_V)
        if flush:
            s = load_state(pool, d, layer, slot, i_h, o_v)
            s = fold(s, pool, w.A, d, layer, slot, i_h, start, count, o_v)
            store_state(pool, d, layer, slot, i_h, o_v, s, planned_rng(p_plan))
        else:
            s = load_read(pool, d, layer, slot, i_h, o_v)
        u_j = load_ring(pool.u if d.DELTA else pool.v, d, layer, slot, i_h, start, live, o_v)  # [BV, W]
        p_q = readouts(s, q, d, PRECISION) * E[None, :] + tl.dot(u_j, w_q, input_precision=PRECISION)
        p_k = tl.zeros_like(p_q)
        if d.DELTA:
            p_k = readouts(s, k, d, PRECISION) * E[None, :] + tl.dot(u_j, w_k, input_precision=PRECISION)
        emit(x, w, pool, out, d, layer, slot, i_h, append, n, t, o_v, F, X, p_q, p_k)


def verify(
    plan: Tensor,
    layer: int,
    x: Inputs,
    w: Weights,
    pool: Buffers,
    out: Tensor,
    T: int,
    layout: Layout,
    launch: Launch,
    tree: Tensor | None = None,
) -> None:
    """One step of one layer, T <= 16 tokens per row at most: reads plan rows, writes ``out`` [N, H, V] and the pool."""
    if tree is not None:
        raise NotImplementedError("parents: supported is None (chains) with backend='triton', got a tree; use backend='torch'")
    with on_device(plan):
        _verify_kernel[(plan.shape[0] * layout.H,)](
            plan,
            layer,
            x,
            w,
            pool,
            tokens(out),
            dims(layout, launch.BLOCK_K, least_W=16),  # a matrix product has at least 16 of everything
            WIDTH=PLAN_WIDTH,
            TP=max(16, 1 << (T - 1).bit_length()),
            BLOCK_V=launch.BLOCK_V,
            PRECISION=dot_precision(),
            num_warps=launch.warps,
        )
