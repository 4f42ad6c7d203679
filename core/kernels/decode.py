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
from .formats import load_read, load_state, planned_rng, store_state
from .recurrence import (
    G_FLOOR,
    append_decay,
    append_record,
    at,
    decayed,
    dot,
    fold,
    inverse_norm,
    load_beta,
    load_chunks,
    load_g,
    load_scalars,
    readout,
    scaled,
    token,
    wrap,
)  # fmt: skip


@triton.jit
def cumulative(pool, d, layer, slot, i_h, start, count, g):
    """The ring's cumulative g after its newest record (0 for an empty ring) plus this token's, no lower than the floor."""
    p_gsum = at(pool.gsum, layer, slot, i_h) + wrap(start + tl.maximum(count, 1) - 1, d.R) * pool.gsum.row
    if d.PER_CHANNEL:
        newest = load_chunks(p_gsum, count > 0, d)
        gsum = ()
        for i_k in tl.static_range(d.K // d.BLOCK_K):
            gsum += (newest[i_k] + tl.maximum(g[i_k], G_FLOOR),)
        return gsum
    else:
        return tl.load(p_gsum, mask=count > 0, other=0.0) + tl.maximum(g, G_FLOOR)


@triton.jit
def head_decay(w, pool, d, layer, slot, i_h, start, count, g, gsum):
    """(E(j,t) [W], E(0,t)) of one g per head: exact suffix sums of A beta where g is derived, else by the ring's sums."""
    if d.STORES_G:
        return tl.exp(gsum - load_scalars(pool.gsum, d, layer, slot, i_h, start, count)), tl.exp(gsum)
    else:
        o_j = tl.arange(0, d.W_PAD)
        A = tl.load(w.A + i_h).to(tl.float32)
        beta_after = load_scalars(pool.beta, d, layer, slot, i_h, wrap(start + 1, d.R), count - 1)
        g_after = tl.where(o_j == count - 1, g, A * beta_after)
        total = tl.sum(A * load_scalars(pool.beta, d, layer, slot, i_h, start, count), 0) + g
        return tl.exp(tl.cumsum(g_after, 0, reverse=True)), tl.exp(total)


@triton.jit
def history(q, k, pool, d, layer, slot, i_h, start, count, gsum):
    """Each record's weight in P(q) and P(k), [W]: k_j^T (E(j,t) * x), times beta_j where the ring holds v instead of u;
    a decay per head is left to the caller."""
    i_g = i_h // (d.H // d.G)
    o_j = tl.arange(0, d.W_PAD)
    m_j, row_j = (o_j < count)[:, None], wrap(start + o_j, d.R)[:, None]
    a_q, a_k = tl.zeros([d.W_PAD, d.BLOCK_K], tl.float32), tl.zeros([d.W_PAD, d.BLOCK_K], tl.float32)
    for i_k in tl.static_range(d.K // d.BLOCK_K):
        o_k = i_k * d.BLOCK_K + tl.arange(0, d.BLOCK_K)[None, :]
        # Four values a thread: with eight of 16 bits, fp32 tiles of this shape would get eight too, half a sector at a time.
        p_k = tl.max_contiguous(at(pool.k, layer, slot, i_g) + row_j * pool.k.row + o_k, [1, 4])
        k_j = tl.load(p_k, mask=m_j, other=0.0).to(tl.float32)  # [W, BK]
        if d.PER_CHANNEL:
            gsum_j = tl.load(at(pool.gsum, layer, slot, i_h) + row_j * pool.gsum.row + o_k, mask=m_j, other=0.0)
            k_j *= tl.exp(gsum[i_k][None, :] - gsum_j)
        a_q += k_j * q[i_k][None, :]
        if d.DELTA:
            a_k += k_j * k[i_k][None, :]
    w_q, w_k = tl.sum(a_q, 1), tl.sum(a_k, 1)
    if d.NORMALIZE:
        rnorm = load_scalars(pool.rnorm, d, layer, slot, i_g, start, count)
        w_q, w_k = w_q * rnorm, w_k * rnorm
    if d.BETA != "one" and not d.DELTA:
        w_q *= load_scalars(pool.beta, d, layer, slot, i_h, start, count)
    return w_q, w_k


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
        if pool.u.ptr.dtype.element_ty == tl.float16:  # saturate: a helper's overflow must not become an infinity
            u = tl.clamp(u, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(p_u + o_v, u.to(pool.u.ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["layer"])
def _decode_kernel(
    plan, layer, x, w, pool, out, d, WIDTH: tl.constexpr, BLOCK_V: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr
):
    i_s = tl.program_id(0) % SPLIT
    i_h = tl.program_id(0) // SPLIT % d.H
    i_g = i_h // (d.H // d.G)
    p_plan = plan + tl.load(plan + tl.program_id(0) // SPLIT // d.H * WIDTH + 9) * WIDTH
    NV: tl.constexpr = d.V // BLOCK_V // SPLIT
    tile_v = i_s * NV * BLOCK_V + tl.arange(0, BLOCK_V)

    slot, start, count = tl.load(p_plan).to(tl.int64), tl.load(p_plan + 1), tl.load(p_plan + 2)
    live, flush, append, n = tl.load(p_plan + 3) > 0, tl.load(p_plan + 4) > 0, tl.load(p_plan + 5), tl.load(p_plan + 6)
    if (live | flush) == 0:
        for i in range(tl.load(p_plan + 7)):  # rows that the batch row owns and no token fills
            for i_v in range(NV):
                p_o = token(out, n + i, i_h) + tile_v + i_v * BLOCK_V
                tl.store(p_o, tl.zeros([BLOCK_V], out.ptr.dtype.element_ty))
        return

    q, k = load_chunks(token(x.q, n, i_g), live, d), load_chunks(token(x.k, n, i_g), live, d)
    rk = inverse_norm(k, d)
    beta = load_beta(x, w, d, n, i_h, live)
    g = load_g(x, w, d, n, i_h, live, beta)
    gsum = g
    if d.STORES_G:
        gsum = cumulative(pool, d, layer, slot, i_h, start, tl.where(flush, 0, count), g)
    if (i_s == 0) & live:
        append_record(pool, d, layer, slot, i_h, append, True, k, rk, beta)
        if d.STORES_G:
            append_decay(pool.g, d, layer, slot, i_h, append, True, g)
            append_decay(pool.gsum, d, layer, slot, i_h, append, True, gsum)
    q, k = scaled(q, d.SCALE * inverse_norm(q, d), d), scaled(k, rk, d)
    kq = dot(k, q, d)

    o_j = tl.arange(0, d.W_PAD)
    row_j = wrap(start + o_j, d.R)
    if flush:
        q_t, k_t = decayed(q, g, d), decayed(k, g, d)
        for i_v in tl.range(NV):
            o_v = tile_v + i_v * BLOCK_V
            s = load_state(pool, d, layer, slot, i_h, o_v)
            s = fold(s, pool, w.A, d, layer, slot, i_h, start, count, o_v)
            store_state(pool, d, layer, slot, i_h, o_v, s, planned_rng(p_plan))
            if live:
                p_k = readout(s, k_t, d) if d.DELTA else 0.0
                emit(x, w, pool, out, d, layer, slot, append, n, i_h, o_v, beta, kq, readout(s, q_t, d), p_k)
    else:
        w_q, w_k = history(q, k, pool, d, layer, slot, i_h, start, count, gsum)
        E_0 = 1.0
        if d.PER_CHANNEL:
            q, k = decayed(q, gsum, d), decayed(k, gsum, d)
        else:
            E_j, E_0 = head_decay(w, pool, d, layer, slot, i_h, start, count, g, gsum)
            w_q, w_k = w_q * E_j, w_k * E_j
        for i_v in tl.range(NV, num_stages=STAGES):
            o_v = tile_v + i_v * BLOCK_V
            s = load_read(pool, d, layer, slot, i_h, o_v)
            ring = pool.u if d.DELTA else pool.v
            p_u = at(ring, layer, slot, i_h) + row_j[:, None] * ring.row + o_v[None, :]
            u_j = tl.load(tl.max_contiguous(p_u, [1, 4]), mask=(o_j < count)[:, None], other=0.0).to(tl.float32)  # [W, BV]
            p_q = readout(s, q, d) * E_0 + tl.sum(u_j * w_q[:, None], 0)
            p_k = readout(s, k, d) * E_0 + tl.sum(u_j * w_k[:, None], 0) if d.DELTA else 0.0
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
            dims(layout, launch.BLOCK_K),
            WIDTH=PLAN_WIDTH,
            BLOCK_V=launch.BLOCK_V,
            SPLIT=launch.SPLIT,
            STAGES=launch.stages,
            num_warps=launch.warps,
        )
