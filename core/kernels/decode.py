"""One token per row: outputs from checkpoint and ring, the new record appended, the ring folded first where the plan says so.

    P(x) = S0 (E(0,t) * x) + sum_j u_j (k_j^T (E(j,t) * x))
    u_t = beta_t (v_t - [DELTA] P(k_t)),  o_t = P(q_t) + u_t (k_t^T q_t)
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..cursor import PLAN_WIDTH
from ..launch import Launch
from ..layout import Buffers, Layout
from .arguments import Inputs, Weights, dims, on_device, tokens
from .formats import load_state, store_state
from .recurrence import G_FLOOR, at, fold, inverse_norm, load_beta, load_g, token, wrap


@triton.jit
def cumulative(pool, d, layer, slot, i_h, start, count, o_k, m_k):
    """The ring's cumulative g after its newest record, channels o_k (0: one per head); 0 for an empty ring."""
    newest = wrap(start + tl.maximum(count, 1) - 1, d.R)
    return tl.load(at(pool.gsum, layer, slot, i_h) + newest * pool.gsum.row + o_k, mask=m_k & (count > 0), other=0.0)


@triton.jit
def load_u(pool, d, layer, slot, i_h, start, count, o_v):
    """The records' u, or v where u is beta v: a tile [BV, W]."""
    o_j = tl.arange(0, d.W_PAD)
    ring = pool.u if d.DELTA else pool.v
    p_u = at(ring, layer, slot, i_h) + wrap(start + o_j, d.R)[None, :] * ring.row + o_v[:, None]
    return tl.load(p_u, mask=(o_j < count)[None, :], other=0.0).to(tl.float32)


@triton.jit
def emit(x, w, pool, out, d, layer, slot, append, n, i_h, o_v, beta, kq, p_q, p_k):
    """The token's u and output for a tile of V, both stored; the raw v and u appended to the ring."""
    v = tl.load(token(x.v, n, i_h) + o_v).to(tl.float32)
    u = beta * (v - p_k)
    o = p_q + u * kq
    if w.D is not None:
        o += tl.load(w.D + i_h).to(tl.float32) * v
    if x.z is not None:
        z = tl.load(token(x.z, n, i_h) + o_v).to(tl.float32)
        o *= z * tl.sigmoid(z)
    tl.store(token(out, n, i_h) + o_v, o.to(out.ptr.dtype.element_ty))
    p_v = at(pool.v, layer, slot, i_h) + append * pool.v.row
    tl.store(p_v + o_v, v.to(pool.v.ptr.dtype.element_ty))
    if d.DELTA:
        p_u = at(pool.u, layer, slot, i_h) + append * pool.u.row
        tl.store(p_u + o_v, u.to(pool.u.ptr.dtype.element_ty))


@triton.jit
def append_record(pool, d, layer, slot, i_h, start, count, flush, append, o_k, m_k, k, rk, beta, g):
    """The parts of a record that no tile of V owns: k and 1/|k| by the group's first head; beta, g and its sum by each."""
    heads = d.H // d.G
    if i_h % heads == 0:
        i_g = i_h // heads
        tl.store(at(pool.k, layer, slot, i_g) + append * pool.k.row + o_k, k.to(pool.k.ptr.dtype.element_ty), mask=m_k)
        if d.NORMALIZE:
            tl.store(at(pool.rnorm, layer, slot, i_g) + append * pool.rnorm.row, rk)
    if d.BETA != "one":
        tl.store(at(pool.beta, layer, slot, i_h) + append * pool.beta.row, beta)
    if d.STORES_G:
        p_g = at(pool.g, layer, slot, i_h) + append * pool.g.row
        p_gsum = at(pool.gsum, layer, slot, i_h) + append * pool.gsum.row
        since = tl.where(flush, 0, count)  # a folded ring's sums begin anew
        if d.PER_CHANNEL:
            gsum = cumulative(pool, d, layer, slot, i_h, start, since, o_k, m_k) + tl.maximum(g, G_FLOOR)
            tl.store(p_g + o_k, g, mask=m_k)
            tl.store(p_gsum + o_k, gsum, mask=m_k)
        else:
            gsum = cumulative(pool, d, layer, slot, i_h, start, since, 0, True) + tl.maximum(g, G_FLOOR)
            tl.store(p_g, g)
            tl.store(p_gsum, gsum)


@triton.jit
def history(x, w, pool, d, layer, slot, start, count, n, i_h, rq, rk, beta, BLOCK_K: tl.constexpr):
    """What the tiles of V share when nothing is folded: q and k decayed from the checkpoint on, in chunks of K, and per
    record its weight in P(q) and P(k), [W]: k_j^T (E(j,t) * x), times beta_j where the ring holds v instead of u."""
    i_g = i_h // (d.H // d.G)
    o_j = tl.arange(0, d.W_PAD)
    m_j = o_j < count
    row_j = wrap(start + o_j, d.R)
    c_q, c_k = tl.zeros([d.W_PAD], tl.float32), tl.zeros([d.W_PAD], tl.float32)
    q_0, k_0 = (), ()
    for i_k in tl.static_range(d.K // BLOCK_K):
        o_k = i_k * BLOCK_K + tl.arange(0, BLOCK_K)
        m_k = o_k < d.K
        q = tl.load(token(x.q, n, i_g) + o_k).to(tl.float32) * rq
        k = tl.load(token(x.k, n, i_g) + o_k).to(tl.float32) * rk
        p_k = at(pool.k, layer, slot, i_g) + row_j[:, None] * pool.k.row + o_k[None, :]
        k_j = tl.load(p_k, mask=m_j[:, None], other=0.0).to(tl.float32)  # [W, BK]
        if d.PER_CHANNEL:
            g = load_g(x, w, d, n, i_h, o_k, m_k, True, beta)
            gsum = cumulative(pool, d, layer, slot, i_h, start, count, o_k, m_k) + tl.maximum(g, G_FLOOR)
            p_gsum = at(pool.gsum, layer, slot, i_h) + row_j[:, None] * pool.gsum.row + o_k[None, :]
            k_j *= tl.exp(gsum[None, :] - tl.load(p_gsum, mask=m_j[:, None], other=0.0))
            c_q += tl.sum(k_j * q[None, :], 1)
            q *= tl.exp(gsum)
            if d.DELTA:
                c_k += tl.sum(k_j * k[None, :], 1)
                k *= tl.exp(gsum)
        else:
            c_q += tl.sum(k_j * q[None, :], 1)
            if d.DELTA:
                c_k += tl.sum(k_j * k[None, :], 1)
        q_0 += (q,)
        k_0 += (k,)
    scale_j = tl.zeros([d.W_PAD], tl.float32) + 1.0
    if d.NORMALIZE:
        scale_j = tl.load(at(pool.rnorm, layer, slot, i_g) + row_j * pool.rnorm.row, mask=m_j, other=0.0)
    if d.BETA != "one" and not d.DELTA:
        scale_j *= tl.load(at(pool.beta, layer, slot, i_h) + row_j * pool.beta.row, mask=m_j, other=0.0)
    return q_0, k_0, c_q * scale_j, c_k * scale_j


@triton.jit
def head_decay(w, pool, d, layer, slot, i_h, start, count, g):
    """(E(j,t) [W], E(0,t)) of one g per head: exact suffix sums of A beta where g is derived, else by the ring's sums."""
    o_j = tl.arange(0, d.W_PAD)
    m_j = o_j < count
    if d.STORES_G:
        gsum = cumulative(pool, d, layer, slot, i_h, start, count, 0, True) + tl.maximum(g, G_FLOOR)
        p_gsum = at(pool.gsum, layer, slot, i_h) + wrap(start + o_j, d.R) * pool.gsum.row
        return tl.exp(gsum - tl.load(p_gsum, mask=m_j, other=0.0)), tl.exp(gsum)
    else:
        A = tl.load(w.A + i_h).to(tl.float32)
        p_beta = at(pool.beta, layer, slot, i_h)
        beta_j = tl.load(p_beta + wrap(start + o_j, d.R) * pool.beta.row, mask=m_j, other=0.0)
        beta_after = tl.load(p_beta + wrap(start + o_j + 1, d.R) * pool.beta.row, mask=o_j + 1 < count, other=0.0)
        g_after = tl.where(o_j + 1 == count, g, A * beta_after)
        return tl.exp(tl.cumsum(g_after, 0, reverse=True)), tl.exp(tl.sum(A * beta_j, 0) + g)


@triton.jit(do_not_specialize=["layer"])
def _decode_kernel(
    plan, layer, x, w, pool, out, d, WIDTH: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr
):
    i_s = tl.program_id(0) % SPLIT
    i_h = tl.program_id(0) // SPLIT % d.H
    i_g = i_h // (d.H // d.G)
    NV: tl.constexpr = d.V // BLOCK_V // SPLIT
    tile_v = i_s * NV * BLOCK_V + tl.arange(0, BLOCK_V)
    o_k = tl.arange(0, d.K_PAD)
    m_k = o_k < d.K

    p_plan = plan + tl.program_id(0) // SPLIT // d.H * WIDTH
    slot, start, count = tl.load(p_plan).to(tl.int64), tl.load(p_plan + 1), tl.load(p_plan + 2)
    live, flush, append, n = tl.load(p_plan + 3) > 0, tl.load(p_plan + 4) > 0, tl.load(p_plan + 5), tl.load(p_plan + 6)
    if (live | flush) == 0:
        if tl.load(p_plan + 7) > 0:
            for i_v in range(NV):
                tl.store(token(out, n, i_h) + tile_v + i_v * BLOCK_V, tl.zeros([BLOCK_V], out.ptr.dtype.element_ty))
        return

    m_x = m_k & live
    q = tl.load(token(x.q, n, i_g) + o_k, mask=m_x, other=0.0).to(tl.float32)
    k = tl.load(token(x.k, n, i_g) + o_k, mask=m_x, other=0.0).to(tl.float32)
    rq, rk = d.SCALE * inverse_norm(q, d), inverse_norm(k, d)
    kq = tl.sum(k * q, 0) * rk * rq
    beta = load_beta(x, w, d, n, i_h, live)
    g = load_g(x, w, d, n, i_h, o_k, m_x, live, beta)
    if (i_s == 0) & live:
        append_record(pool, d, layer, slot, i_h, start, count, flush, append, o_k, m_k, k, rk, beta, g)

    p_state = at(pool.state, layer, slot, i_h)
    if flush:
        q_t, k_t = q * rq * tl.exp(g), k * rk * tl.exp(g)
        for i_v in tl.range(NV):
            o_v = tile_v + i_v * BLOCK_V
            s = fold(load_state(p_state, o_v, o_k, m_k, d.K), pool, w.A, d, layer, slot, i_h, start, count, o_v, o_k, m_k)
            store_state(p_state, o_v, o_k, m_k, s, d.K)
            if live:
                p_q = tl.sum(s * q_t[None, :], 1)
                p_k = tl.sum(s * k_t[None, :], 1) if d.DELTA else 0.0
                emit(x, w, pool, out, d, layer, slot, append, n, i_h, o_v, beta, kq, p_q, p_k)
    else:
        q_0, k_0, c_q, c_k = history(x, w, pool, d, layer, slot, start, count, n, i_h, rq, rk, beta, BLOCK_K)
        E_0 = 1.0
        if not d.PER_CHANNEL:
            E_j, E_0 = head_decay(w, pool, d, layer, slot, i_h, start, count, g)
            c_q, c_k = c_q * E_j, c_k * E_j
        for i_v in tl.range(NV, num_stages=STAGES):
            o_v = tile_v + i_v * BLOCK_V
            a_q, a_k = tl.zeros([BLOCK_V, BLOCK_K], tl.float32), tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
            for i_k in tl.static_range(d.K // BLOCK_K):
                o_c = i_k * BLOCK_K + tl.arange(0, BLOCK_K)
                s = load_state(p_state, o_v, o_c, o_c < d.K, d.K)
                a_q += s * q_0[i_k][None, :]
                if d.DELTA:
                    a_k += s * k_0[i_k][None, :]
            u_j = load_u(pool, d, layer, slot, i_h, start, count, o_v)  # [BV, W]
            p_q = tl.sum(a_q, 1) * E_0 + tl.sum(u_j * c_q[None, :], 1)
            p_k = tl.sum(a_k, 1) * E_0 + tl.sum(u_j * c_k[None, :], 1) if d.DELTA else 0.0
            emit(x, w, pool, out, d, layer, slot, append, n, i_h, o_v, beta, kq, p_q, p_k)


def decode(plan: Tensor, layer: int, x: Inputs, w: Weights, pool: Buffers, out: Tensor, layout: Layout, launch: Launch) -> None:
    """One step of one layer, a token per row at most: reads plan rows [B, len(PLAN)], writes ``out`` [N, H, V] and the pool."""
    grid = (plan.shape[0] * layout.H * launch.SPLIT,)
    with on_device(plan):
        _decode_kernel[grid](
            plan,
            layer,
            x,
            w,
            pool,
            tokens(out),
            dims(layout),
            WIDTH=PLAN_WIDTH,
            BLOCK_V=launch.BLOCK_V,
            BLOCK_K=launch.BLOCK_K,
            SPLIT=launch.SPLIT,
            STAGES=launch.stages,
            num_warps=launch.warps,
        )
