"""A step of up to T tokens per row in one pass over the checkpoint: chains and trees of drafts, by matrix products.

    P(x) = S0 (E(0,i) * x_i) + sum_j u_j (k_j^T (E(j,i) * x_i))          x the rows [Q; K], j the ring's records
    (I + A) U = diag(beta) (V - [DELTA] P(K)),  A_im = beta_i k_i^T (E(m,i) * k_m), m an ancestor of i   by substitution, fp32
    O = P(Q) + F U,                             F_im = q_i^T (E(m,i) * k_m), m an ancestor of i or i itself

Both are linear in what a row of V brings, w = [P(Q), V - P(K)]: [O, U] = w (B + I)^T with one small matrix B per head. A token
that is no ancestor never reaches another's row: B is made by selection, and what is not finite in w is left out of the product
and put back where it belongs. Decode has a kernel of its own, since a matrix product has at least 16 columns: GDN at batch 256
takes 167 us there and 272 here with T = 4 (bench/results/h200).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..cursor import PLAN_WIDTH
from ..launch import Launch, dot_precision
from ..layout import Buffers, Layout
from .arguments import dims, named
from .formats import load_read
from .prepared import Prepared
from .recurrence import (
    G_FLOOR,
    append_decay,
    append_record,
    at,
    beta_of,
    clear,
    exp,
    g_of,
    inverse_norm,
    load_chunks,
    load_factors,
    load_gates,
    load_ring,
    load_scalars,
    load_stored,
    product,
    rows_product,
    token,
    widened,
    wrap,
)


@triton.jit
def descends(tree, i_b, o_i, o_m, t, T_MAX: tl.constexpr):
    """Whether token o_m is o_i itself or an ancestor of it, over the two's shapes; without a tree, whether it is not later."""
    if tree is None:
        return (o_m <= o_i) & (o_m >= 0) & (o_i < t)
    else:
        ancestors = tl.load(tree + (2 * i_b + 1) * T_MAX + o_i, mask=o_i < t, other=0)
        return (((ancestors >> tl.maximum(o_m, 0)) & 1) > 0) & (o_m >= 0)


@triton.jit
def load_rows(x, d, n, i_g, i_x, is_k, m_x):
    """The step's rows [Q; K] as stored, chunks [X, BK]; zeros beyond its tokens."""
    rows = ()
    for i_k in tl.static_range(d.K // d.BLOCK_K):
        o_k = (tl.arange(0, d.BLOCK_K) + i_k * d.BLOCK_K)[None, :]
        q = tl.load(token(x.q, n + i_x, i_g)[:, None] + o_k, mask=(m_x & (is_k == 0))[:, None], other=0.0)
        k = tl.load(token(x.k, n + i_x, i_g)[:, None] + o_k, mask=(m_x & is_k)[:, None], other=0.0)
        rows += (q + k,)
    return rows


@triton.jit
def twice(x, y):
    """Rows [TH, .] or scalars [TH] of Q and of K under each other: [2 TH, .]."""
    both = tl.join(x, y)
    if len(x.shape) == 1:
        return tl.reshape(tl.trans(both), [2 * x.shape[0]])
    else:
        return tl.reshape(tl.permute(both, (2, 0, 1)), [2 * x.shape[0], x.shape[1]])


@triton.jit
def path_decay(g, ring, tree, d, layer, slot, i_h, i_b, append, t, TH: tl.constexpr, T_MAX: tl.constexpr):
    """Each token's sum of g, no lower than the floor, over its path in the step: [TH], chunks [TH, BK] per channel.

    Per channel g is read token by token from ``ring``, which holds it already.
    """
    o_t = tl.arange(0, TH)
    if d.PER_CHANNEL:
        c = ()
        for _ in tl.static_range(d.K // d.BLOCK_K):
            c += (tl.zeros([TH, d.BLOCK_K], tl.float32),)
        for m in range(t):
            on = descends(tree, i_b, o_t, m, t, T_MAX)
            g_m = load_stored(at(ring, layer, slot, i_h) + wrap(append + m, d.R) * ring.row, True, d)
            longer = ()
            for i_k in tl.static_range(d.K // d.BLOCK_K):
                longer += (tl.where(on[:, None], c[i_k] + tl.maximum(g_m[i_k], G_FLOOR)[None, :], c[i_k]),)
            c = longer
        return c
    else:
        path = descends(tree, i_b, o_t[:, None], o_t[None, :], t, T_MAX)
        return tl.sum(tl.where(path, tl.maximum(g, G_FLOOR)[None, :] if d.STORES_G else g[None, :], 0.0), 1)


@triton.jit
def history(x, r, c, last, w, pool, d, layer, slot, i_h, start, count, EXACT: tl.constexpr, PRECISION: tl.constexpr):
    """The ring's part of P: each record's weight [W, X]; the rows and their factors [X] that the checkpoint is read with.

    k_j^T (E(j,i) * x_i), with E(j,i) = exp(c_i) exp(last - gsum_j), both exponents <= 0: last is the newest record's.
    """
    i_g = i_h // (d.H // d.G)
    o_j = tl.arange(0, d.W_PAD)
    m_j, row_j = (o_j < count)[:, None], wrap(start + o_j, d.R)[:, None]
    rows, weight = (), tl.zeros([d.W_PAD, r.shape[0]], tl.float32)
    for i_k in tl.static_range(d.K // d.BLOCK_K):
        o_k = (tl.arange(0, d.BLOCK_K) + i_k * d.BLOCK_K)[None, :]
        k_j = tl.load(at(pool.k, layer, slot, i_g) + row_j * pool.k.row + o_k, mask=m_j, other=0.0).to(tl.float32)
        if d.PER_CHANNEL:
            p_gsum = at(pool.gsum, layer, slot, i_h) + row_j * pool.gsum.row + o_k
            k_j *= tl.exp(last[i_k][None, :] - tl.load(p_gsum, mask=m_j, other=0.0))
            decay = exp(c[i_k])
            x_i = x[i_k] * r[:, None] * twice(decay, decay)
            weight = product(k_j, tl.trans(x_i), weight, PRECISION)
            rows += (x_i * exp(last[i_k])[None, :],)
        else:
            weight = product(k_j, tl.trans(x[i_k]), weight, PRECISION, EXACT, EXACT)
    scale = load_factors(pool, d, layer, slot, i_h, start, count) * tl.full([d.W_PAD], 1.0, tl.float32)
    if d.PER_CHANNEL:
        return weight * scale[:, None], rows, tl.zeros_like(r) + 1.0
    else:
        if d.STORES_G:
            total = last
            scale *= exp(tl.minimum(last - load_scalars(pool.gsum, d, layer, slot, i_h, start, count), 0.0))
        else:  # exactly: suffix sums of A beta over the records after j
            A = tl.load(w.A + i_h).to(tl.float32)
            total = tl.sum(A * load_scalars(pool.beta, d, layer, slot, i_h, start, count), 0)
            after = A * load_scalars(pool.beta, d, layer, slot, i_h, wrap(start + 1, d.R), count - 1)
            scale *= exp(tl.cumsum(after, 0, reverse=True))
        decay = exp(c)
        factor = r * twice(decay, decay)
        return weight * scale[:, None] * factor[None, :], x, factor * exp(total)


@triton.jit
def window(rows, r, c, before, x, pool, d, layer, slot, i_h, n, append, last, t, TH, EXACT, PRECISION: tl.constexpr):
    """x_i^T (E(m,i) * k_m) of the rows x_i and the step's tokens m: [X, X], in the columns of K; zeros but `before`.

    Per channel one token m at a time, its k and its sum of g read back from memory; else one product of all rows.
    """
    o_x, o_t = tl.arange(0, 2 * TH), tl.arange(0, TH)
    if d.PER_CHANNEL:
        i_g = i_h // (d.H // d.G)
        L = tl.zeros([2 * TH, 2 * TH], tl.float32)
        m_t = (o_t < t)[:, None]
        q = load_chunks(token(x.q, n + o_t, i_g)[:, None], m_t, d)
        k = load_chunks(token(x.k, n + o_t, i_g)[:, None], m_t, d)
        for m in range(t):
            k_m = load_chunks(token(x.k, n + m, i_g), True, d)
            p_gsum = at(pool.gsum, layer, slot, i_h) + wrap(append + m, d.R) * pool.gsum.row
            f, a = tl.zeros([TH, d.BLOCK_K], tl.float32), tl.zeros([TH, d.BLOCK_K], tl.float32)
            for i_k in tl.static_range(d.K // d.BLOCK_K):
                c_m = tl.load(p_gsum + tl.arange(0, d.BLOCK_K) + i_k * d.BLOCK_K) - last[i_k]
                E_k = tl.exp(tl.minimum(c[i_k] - c_m[None, :], 0.0)) * k_m[i_k][None, :]
                f += q[i_k] * E_k
                if d.DELTA:
                    a += k[i_k] * E_k
            L = tl.where((o_x == TH + m)[None, :], twice(tl.sum(f, 1), tl.sum(a, 1))[:, None], L)
    else:
        c_x = twice(c, c)
        L = rows_product(rows, rows, d, PRECISION, EXACT, EXACT) * tl.exp(tl.minimum(c_x[:, None] - c_x[None, :], 0.0))
    return tl.where(before, L * r[:, None] * r[None, :], 0.0)


@triton.jit
def transfer(L, before, beta, d, t, TH: tl.constexpr):
    """B [X, X] with [O, U] = w (B + [I, 0])^T: rows of U X = (I + A)^-1 diag(beta), by substitution; rows of O F X."""
    o_x = tl.arange(0, 2 * TH)
    is_k = o_x >= TH
    if d.DELTA:
        B = tl.zeros([2 * TH, 2 * TH], tl.float32)
        for i in range(t):  # X_i = beta_i (e_i - sum_m A_im X_m), whose sum row i has gathered from the ancestors
            at_i = o_x == TH + i
            gathered = tl.sum(tl.where(at_i[:, None], B, 0.0), 0)
            X_i = tl.sum(tl.where(at_i, beta, 0.0), 0) * (tl.where(at_i, 1.0, 0.0) - gathered)
            B = tl.where(at_i[:, None], X_i[None, :], B)
            L_i = tl.sum(tl.where(at_i[None, :], L, 0.0), 1)
            after = tl.sum(tl.where(at_i[None, :], before.to(tl.int32), 0), 1) > 0
            B = tl.where(after[:, None], B + L_i[:, None] * X_i[None, :], B)
        return B
    else:  # X = diag(beta)
        return tl.where(before, L * beta[None, :], tl.where((o_x[:, None] == o_x[None, :]) & is_k[None, :], beta[None, :], 0.0))


@triton.jit
def emit(p, M, reach, x, pool, out, d, layer, slot, i_h, append, n, i_x, is_k, m_x, o_v, PRECISION: tl.constexpr):
    """The tokens' outputs and u for a tile of V from P [BV, X], stored; raw v appended to the ring."""
    live_k = (m_x & is_k)[None, :]
    v_raw = tl.load(token(x.v, n + i_x, i_h)[None, :] + o_v[:, None], mask=live_k, other=0.0)
    w = tl.where(is_k[None, :], v_raw.to(tl.float32) - p if d.DELTA else v_raw.to(tl.float32), p)
    finite = tl.abs(w) < float("inf")
    y = product(tl.where(finite, w, 0.0), M, tl.zeros_like(w), PRECISION)
    if tl.min(finite.to(tl.int32)) == 0:
        spoiled = tl.dot(tl.where(finite, 0.0, 1.0).to(tl.bfloat16), reach)
        y = tl.where(spoiled > 0, float("nan"), y)
    row = wrap(append + i_x, d.R)[None, :]
    tl.store(at(pool.v, layer, slot, i_h) + row * pool.v.row + o_v[:, None], v_raw.to(pool.v.ptr.dtype.element_ty), mask=live_k)
    if d.DELTA:
        u = y
        if pool.u.ptr.dtype.element_ty == tl.float16:  # saturate: a helper's overflow must not become an infinity
            u = tl.clamp(u, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(at(pool.u, layer, slot, i_h) + row * pool.u.row + o_v[:, None], u.to(pool.u.ptr.dtype.element_ty), mask=live_k)
    live_q = (m_x & (is_k == 0))[None, :]
    if x.z is not None:
        z = tl.load(token(x.z, n + i_x, i_h)[None, :] + o_v[:, None], mask=live_q, other=0.0).to(tl.float32)
        y *= z * tl.sigmoid(z)
    tl.store(token(out, n + i_x, i_h)[None, :] + o_v[:, None], y.to(out.ptr.dtype.element_ty), mask=live_q)


@triton.jit
def summed(c, ring, d, layer, slot, i_h, start, count):
    """The ring's cumulative g at its newest record (0 for an empty ring), and with each token's own."""
    p_newest = at(ring, layer, slot, i_h) + wrap(start + tl.maximum(count, 1) - 1, d.R) * ring.row
    if d.PER_CHANNEL:
        last, total = load_stored(p_newest, count > 0, d), ()
        for i_k in tl.static_range(d.K // d.BLOCK_K):
            total += (last[i_k][None, :] + c[i_k],)
        return last, total
    else:
        last = tl.load(p_newest, mask=count > 0, other=0.0)
        return last, last + c


@triton.jit(do_not_specialize=["layer"], do_not_specialize_on_alignment=["plan", "tree"])
def _verify_kernel(
    plan,
    tree,
    layer,
    x,
    w,
    out,
    pool,
    d,
    WIDTH: tl.constexpr,
    T_MAX: tl.constexpr,
    TH: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    i_s = tl.program_id(0) % SPLIT
    i_h = tl.program_id(0) // SPLIT % d.H
    i_b = tl.program_id(0) // SPLIT // d.H
    i_g = i_h // (d.H // d.G)
    p_plan = plan + i_b * WIDTH
    NV: tl.constexpr = d.V // BLOCK_V // SPLIT
    tile_v = i_s * NV * BLOCK_V + tl.arange(0, BLOCK_V)
    slot, start, count = tl.load(p_plan).to(tl.int64), tl.load(p_plan + 1), tl.load(p_plan + 2)
    t, flush, append, n = tl.load(p_plan + 3), tl.load(p_plan + 4) > 0, tl.load(p_plan + 5), tl.load(p_plan + 6)
    clear(out, n + t, n + tl.load(p_plan + 7), i_h, tile_v, NV)
    if t == 0:
        return

    EXACT: tl.constexpr = x.q.ptr.dtype.element_ty != tl.float32
    ring = pool.u if d.DELTA else pool.v
    U_EXACT: tl.constexpr = ring.ptr.dtype.element_ty != tl.float32
    o_x, o_t = tl.arange(0, 2 * TH), tl.arange(0, TH)
    i_x, is_k = o_x % TH, o_x >= TH
    m_x, m_t = i_x < t, o_t < t
    raw = load_rows(x, d, n, i_g, i_x, is_k, m_x)
    rows = widened(raw, d)
    r = inverse_norm(rows, d) * tl.where(is_k, 1.0, d.SCALE)
    b, a = load_gates(x, d, n + o_t, i_h, m_t)
    beta = beta_of(b, w, d, i_h)
    g = g_of(a, beta, w, d, i_h)
    beta = tl.full([TH], 1.0, tl.float32) * beta
    beta = twice(beta, beta)
    live = tl.where(flush, 0, count)
    row = wrap(append + i_x, d.R)
    append_record(pool, d, layer, slot, i_h, row, m_x & is_k, raw, r, beta)
    last = 0.0
    if d.STORES_G:
        append_decay(pool.g, d, layer, slot, i_h, wrap(append + o_t, d.R), m_t, g)
        if d.PER_CHANNEL:
            tl.debug_barrier()
    c = path_decay(g, pool.g, tree, d, layer, slot, i_h, i_b, append, t, TH, T_MAX)
    if d.STORES_G:
        last, total = summed(c, pool.gsum, d, layer, slot, i_h, start, live)
        append_decay(pool.gsum, d, layer, slot, i_h, wrap(append + o_t, d.R), m_t, total)
        if d.PER_CHANNEL:
            tl.debug_barrier()

    o_m = (o_x - TH)[None, :]
    reach = descends(tree, i_b, i_x[:, None], o_m, t, T_MAX)
    before = reach & ((is_k[:, None] == 0) | (i_x[:, None] != o_m))
    L = window(rows, r, c, before, x, pool, d, layer, slot, i_h, n, append, last, t, TH, EXACT, PRECISION)
    B = transfer(L, before, beta, d, t, TH)
    own = o_x[:, None] == o_x[None, :]
    B = tl.where(own & (is_k[:, None] == 0), 1.0, B)
    if w.D is not None:
        B += tl.where((is_k[:, None] == 0) & (i_x[:, None] == o_m), tl.load(w.D + i_h).to(tl.float32), 0.0)
    M, reach = tl.trans(B), tl.trans((reach | own).to(tl.bfloat16))
    weight, rows, factor = history(rows, r, c, last, w, pool, d, layer, slot, i_h, start, live, EXACT, PRECISION)
    EXACT_ROWS: tl.constexpr = EXACT and not d.PER_CHANNEL

    for i_v in tl.range(NV, num_stages=STAGES):
        o_v = tile_v + i_v * BLOCK_V
        s = load_read(pool, d, layer, slot, i_h, o_v)
        u_j = load_ring(ring, d, layer, slot, i_h, start, live, o_v)
        p = rows_product(s, rows, d, PRECISION, False, EXACT_ROWS) * factor[None, :]
        p = product(u_j, weight, p, PRECISION, U_EXACT, False)
        emit(p, M, reach, x, pool, out, d, layer, slot, i_h, append, n, i_x, is_k, m_x, o_v, PRECISION)


def verify(B: int, T: int, pool: Buffers, layout: Layout, launch: Launch) -> Prepared:
    """One step of one layer and B rows, at most T tokens a row: call it with (plan, tree, layer, x, w, out), as ``decode``.

    It reads plan rows and writes out [N, H, V] and the pool.
    """
    return Prepared(
        _verify_kernel,
        pool.state.ptr.device,
        (B * layout.H * launch.SPLIT,),
        (pool, dims(layout, launch.BLOCK_K, least_W=16)),  # a matrix product has at least 16 of everything
        named,
        WIDTH=PLAN_WIDTH,
        T_MAX=layout.T_max,
        TH=max(8, 1 << (T - 1).bit_length()),
        BLOCK_V=launch.BLOCK_V,
        SPLIT=launch.SPLIT,
        STAGES=launch.stages,
        PRECISION=dot_precision(),
        num_warps=launch.warps,
    )
