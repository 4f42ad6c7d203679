"""One token per row: outputs from checkpoint and ring, the new record appended.

P(x) = S0 (E(0,t) * x) + sum_j u_j (k_j^T (E(j,t) * x))
u_t = beta_t (v_t - [DELTA] P(k_t)),  o_t = P(q_t) + u_t (k_t^T q_t)
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..cursor import PLAN_WIDTH
from ..launch import Launch
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
    decayed,
    dot,
    g_of,
    inverse_norm,
    load_chunks,
    load_factors,
    load_gates,
    load_scalars,
    load_stored,
    readout,
    scaled,
    store_output,
    token,
    widened,
    wrap,
)  # fmt: skip


@triton.jit
def cumulative(newest, d, g):
    """The ring's cumulative g after its newest record plus this token's, no lower than the floor."""
    if d.PER_CHANNEL:
        gsum = ()
        for i_k in tl.static_range(d.K // d.BLOCK_K):
            gsum += (newest[i_k] + tl.maximum(g[i_k], G_FLOOR),)
        return gsum
    else:
        return newest + tl.maximum(g, G_FLOOR)


@triton.jit
def load_newest(pool, d, layer, slot, i_h, start, count):
    """The ring's cumulative g after its newest record, 0 for an empty ring."""
    p_gsum = at(pool.gsum, layer, slot, i_h) + wrap(start + tl.maximum(count, 1) - 1, d.R) * pool.gsum.row
    if d.PER_CHANNEL:
        return load_chunks(p_gsum, count > 0, d)
    else:
        return tl.load(p_gsum, mask=count > 0, other=0.0)


@triton.jit
def load_window(ring, d, layer, slot, i_h, start, count):
    """The records' rows of k or of a per-channel decay as stored: chunks [W, BK], zeros beyond."""
    o_j = tl.arange(0, d.W_PAD)
    m_j, row_j = (o_j < count)[:, None], wrap(start + o_j, d.R)[:, None]
    x = ()
    for i_k in tl.static_range(d.K // d.BLOCK_K):
        o_k = i_k * d.BLOCK_K + tl.arange(0, d.BLOCK_K)[None, :]
        # Four values a thread: with eight of 16 bits, fp32 tiles of this shape would get eight too, half a sector at a time.
        p = tl.max_contiguous(at(ring, layer, slot, i_h) + row_j * ring.row + o_k, [1, 4])
        x += (tl.load(p, mask=m_j, other=0.0),)
    return x


@triton.jit
def load_decays(pool, d, layer, slot, i_h, start, count):
    """What E(j,t) is made of: the records' cumulative g, or, where g is derived, beta of each and of the one after it."""
    if d.PER_CHANNEL:
        return load_window(pool.gsum, d, layer, slot, i_h, start, count)
    elif d.STORES_G:
        return load_scalars(pool.gsum, d, layer, slot, i_h, start, count)
    else:
        after = load_scalars(pool.beta, d, layer, slot, i_h, wrap(start + 1, d.R), count - 1)
        return load_scalars(pool.beta, d, layer, slot, i_h, start, count), after


@triton.jit
def load_tile(pool, d, layer, slot, i_h, start, count, o_v):
    """Rows o_v of the state that readouts use, and of the records' u (of v without the delta rule), [W, BV]."""
    o_j = tl.arange(0, d.W_PAD)
    ring = pool.u if d.DELTA else pool.v
    p = at(ring, layer, slot, i_h) + wrap(start + o_j, d.R)[:, None] * ring.row + o_v[None, :]
    u_j = tl.load(tl.max_contiguous(p, [1, 4]), mask=(o_j < count)[:, None], other=0.0)
    return load_read(pool, d, layer, slot, i_h, o_v), u_j


@triton.jit
def head_decay(decays, w, d, i_h, count, g, gsum):
    """(E(j,t) [W], E(0,t)) of one g per head: exact suffix sums of A beta where g is derived, else by the ring's sums."""
    if d.STORES_G:
        return tl.exp(gsum - decays), tl.exp(gsum)
    else:
        A = tl.load(w.A + i_h).to(tl.float32)
        g_after = tl.where(tl.arange(0, d.W_PAD) == count - 1, g, A * decays[1])
        return tl.exp(tl.cumsum(g_after, 0, reverse=True)), tl.exp(tl.sum(A * decays[0], 0) + g)


@triton.jit
def history(q, k, k_j, gsum_j, gsum, d):
    """Each record's weight in P(q) and P(k), [W]: k_j^T (E(j,t) * x); ``load_factors`` and a decay per head come later."""
    a_q, a_k = tl.zeros([d.W_PAD, d.BLOCK_K], tl.float32), tl.zeros([d.W_PAD, d.BLOCK_K], tl.float32)
    for i_k in tl.static_range(d.K // d.BLOCK_K):
        y = k_j[i_k].to(tl.float32)
        if d.PER_CHANNEL:
            y *= tl.exp(gsum[i_k][None, :] - gsum_j[i_k])
        a_q += y * q[i_k][None, :]
        if d.DELTA:
            a_k += y * k[i_k][None, :]
    return tl.sum(a_q, 1), tl.sum(a_k, 1)


@triton.jit
def emit(x, w, pool, out, d, layer, slot, append, n, i_h, o_v, beta, kq, p_q, p_k):
    """The token's u and output for a tile of V, both stored; the raw v and u appended to the ring."""
    v = tl.load(token(x.v, n, i_h) + o_v).to(tl.float32)
    u = beta * (v - p_k)
    store_output(p_q + u * kq, v, x, w, out, n, i_h, o_v)
    p_v = at(pool.v, layer, slot, i_h) + append * pool.v.row
    tl.store(p_v + o_v, v.to(pool.v.ptr.dtype.element_ty))
    if d.DELTA:
        p_u = at(pool.u, layer, slot, i_h) + append * pool.u.row
        if pool.u.ptr.dtype.element_ty == tl.float16:  # saturate: a helper's overflow must not become an infinity
            u = tl.clamp(u, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(p_u + o_v, u.to(pool.u.ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["layer"], do_not_specialize_on_alignment=["plan"])
def _decode_kernel(
    plan, layer, x, w, out, pool, d, WIDTH: tl.constexpr, BLOCK_V: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr
):
    i_s = tl.program_id(0) % SPLIT
    i_h = tl.program_id(0) // SPLIT % d.H
    i_g = i_h // (d.H // d.G)
    p_plan = plan + tl.program_id(0) // SPLIT // d.H * WIDTH
    NV: tl.constexpr = d.V // BLOCK_V // SPLIT
    tile_v = i_s * NV * BLOCK_V + tl.arange(0, BLOCK_V)

    slot, start, count = tl.load(p_plan).to(tl.int64), tl.load(p_plan + 1), tl.load(p_plan + 2)
    t, flush, append, n = tl.load(p_plan + 3), tl.load(p_plan + 4), tl.load(p_plan + 5), tl.load(p_plan + 6)
    count = tl.where(flush > 0, 0, count)
    if t == 0:
        clear(out, n, n + tl.load(p_plan + 7), i_h, tile_v, NV)
        return

    # All that needs no arithmetic first is loaded first and stored last: a small batch waits for memory once.
    k_j = load_window(pool.k, d, layer, slot, i_g, start, count)
    decays = load_decays(pool, d, layer, slot, i_h, start, count)
    factors = load_factors(pool, d, layer, slot, i_h, start, count)
    newest = load_newest(pool, d, layer, slot, i_h, start, count) if d.STORES_G else 0.0
    b, a = load_gates(x, d, n, i_h, True)
    q, k = load_stored(token(x.q, n, i_g), True, d), load_stored(token(x.k, n, i_g), True, d)
    if NV == 1:
        s, u_j = load_tile(pool, d, layer, slot, i_h, start, count, tile_v)

    q, k = widened(q, d), widened(k, d)
    beta = beta_of(b, w, d, i_h)
    g = g_of(a, beta, w, d, i_h)
    gsum = cumulative(newest, d, g) if d.STORES_G else g
    rk = inverse_norm(k, d)
    q_t, k_t = scaled(q, d.SCALE * inverse_norm(q, d), d), scaled(k, rk, d)
    kq = dot(k_t, q_t, d)
    w_q, w_k = history(q_t, k_t, k_j, decays, gsum, d)
    w_q, w_k, E_0 = w_q * factors, w_k * factors, 1.0
    if d.PER_CHANNEL:
        q_t, k_t = decayed(q_t, gsum, d), decayed(k_t, gsum, d)
    else:
        E_j, E_0 = head_decay(decays, w, d, i_h, count, g, gsum)
        w_q, w_k = w_q * E_j, w_k * E_j
    for i_v in tl.range(NV, num_stages=STAGES):
        o_v = tile_v + i_v * BLOCK_V
        if NV > 1:
            s, u_j = load_tile(pool, d, layer, slot, i_h, start, count, o_v)
        p_q = readout(s, q_t, d) * E_0 + tl.sum(u_j.to(tl.float32) * w_q[:, None], 0)
        p_k = readout(s, k_t, d) * E_0 + tl.sum(u_j.to(tl.float32) * w_k[:, None], 0) if d.DELTA else 0.0
        emit(x, w, pool, out, d, layer, slot, append, n, i_h, o_v, beta, kq, p_q, p_k)
    if i_s == 0:
        append_record(pool, d, layer, slot, i_h, append, True, k, rk, beta)
        if d.STORES_G:
            append_decay(pool.g, d, layer, slot, i_h, append, True, g)
            append_decay(pool.gsum, d, layer, slot, i_h, append, True, gsum)


def decode(B: int, pool: Buffers, layout: Layout, launch: Launch) -> Prepared:
    """One step of one layer and B rows, a token per row at most: call it with (plan, layer, x, w, out), x and out of Tokens.

    It reads plan rows [B, len(PLAN)] and writes out [N, H, V] and the pool.
    """
    return Prepared(
        _decode_kernel,
        pool.state.ptr.device,
        (B * layout.H * launch.SPLIT,),
        (pool, dims(layout, launch.BLOCK_K)),
        named,
        WIDTH=PLAN_WIDTH,
        BLOCK_V=launch.BLOCK_V,
        SPLIT=launch.SPLIT,
        STAGES=launch.stages,
        num_warps=launch.warps,
    )
