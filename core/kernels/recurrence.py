"""Device helpers of the recurrence: gates, norms, one token's update, the fold. Each quotes the formula it computes."""

import triton
import triton.language as tl

from ..recurrence import READOUT_G_FLOOR, SOFTPLUS_LINEAR_ABOVE

G_FLOOR = tl.constexpr(READOUT_G_FLOOR)
LINEAR_ABOVE = tl.constexpr(SOFTPLUS_LINEAR_ABOVE)


@triton.jit
def at(rows, layer, slot, i_h):
    """Pointer to a slot's head: 64-bit offsets."""
    return rows.ptr + tl.cast(layer, tl.int64) * rows.layer + slot * rows.slot + i_h * rows.head


@triton.jit
def token(x, n, i_h):
    """Pointer to a packed token's head: 64-bit offsets."""
    return x.ptr + tl.cast(n, tl.int64) * x.token + i_h * x.head


@triton.jit
def wrap(row, R: tl.constexpr):
    """row mod R for 0 <= row < 2 R."""
    return tl.where(row >= R, row - R, row)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), x above 20."""
    return tl.where(x > LINEAR_ABOVE, x, tl.log(1.0 + tl.exp(tl.minimum(x, LINEAR_ABOVE))))


@triton.jit
def load_beta(x, w, d, n, i_h, live):
    """beta of token n: softplus(b + dt_bias), sigmoid(b), b or 1."""
    beta = 1.0
    if d.BETA != "one":
        beta = tl.load(token(x.b, n, i_h), mask=live, other=0.0).to(tl.float32)
        if d.BETA == "softplus":
            if w.dt_bias is not None:
                beta += tl.load(w.dt_bias + i_h).to(tl.float32)
            beta = softplus(beta)
        if d.BETA == "sigmoid":
            beta = tl.sigmoid(beta)
    return beta


@triton.jit
def load_g(x, w, d, n, i_h, o_k, m_k, live, beta):
    """g of token n: [BK] per channel, else a scalar. A beta, A softplus(a + dt_bias), lower_bound sigmoid(-A (a + dt_bias)) or a."""
    if d.DECAY == "derived":
        return tl.load(w.A + i_h).to(tl.float32) * beta
    else:
        if d.PER_CHANNEL:
            a = tl.load(token(x.a, n, i_h) + o_k, mask=m_k, other=0.0).to(tl.float32)
            if w.dt_bias is not None:
                a += tl.load(w.dt_bias + i_h * d.K + o_k, mask=m_k, other=0.0).to(tl.float32)
        else:
            a = tl.load(token(x.a, n, i_h), mask=live, other=0.0).to(tl.float32)
            if w.dt_bias is not None:
                a += tl.load(w.dt_bias + i_h).to(tl.float32)
        if d.DECAY == "softplus":
            a = tl.load(w.A + i_h).to(tl.float32) * softplus(a)
        if d.DECAY == "safe":
            a = d.LOWER_BOUND * tl.sigmoid(-tl.load(w.A + i_h).to(tl.float32) * a)
        return a


@triton.jit
def inverse_norm(x, d):
    """1 / sqrt(|x|^2 + eps) where the family normalises, else 1."""
    r = 1.0
    if d.NORMALIZE:
        r = tl.rsqrt(tl.sum(x * x, 0) + d.EPS)
    return r


@triton.jit
def decayed(s, g, d):
    """s * exp(g): s [BV, BK], g [BK] or scalar."""
    if d.PER_CHANNEL:
        return s * tl.exp(g)[None, :]
    else:
        return s * tl.exp(g)


@triton.jit
def fold(s, pool, A, d, layer, slot, i_h, start, n, o_v, o_k, m_k):
    """The state tile [BV, K_PAD] after n raw records from ring row `start` on, one token of the recurrence at a time.

    s' = s exp(g);  u = beta (v - [DELTA] s' k);  s = s' + u k^T
    """
    i_g = i_h // (d.H // d.G)
    row = start
    for _ in range(n):
        k = tl.load(at(pool.k, layer, slot, i_g) + row * pool.k.row + o_k, mask=m_k, other=0.0).to(tl.float32)
        u = tl.load(at(pool.v, layer, slot, i_h) + row * pool.v.row + o_v).to(tl.float32)
        k *= inverse_norm(k, d)
        beta = 1.0
        if d.BETA != "one":
            beta = tl.load(at(pool.beta, layer, slot, i_h) + row * pool.beta.row)
        if d.STORES_G:
            p_g = at(pool.g, layer, slot, i_h) + row * pool.g.row
            if d.PER_CHANNEL:
                g = tl.load(p_g + o_k, mask=m_k, other=0.0)
            else:
                g = tl.load(p_g)
        else:
            g = tl.load(A + i_h) * beta
        s = decayed(s, g, d)
        if d.DELTA:
            u -= tl.sum(s * k[None, :], 1)
        s += (beta * u)[:, None] * k[None, :]
        row = wrap(row + 1, d.R)
    return s
