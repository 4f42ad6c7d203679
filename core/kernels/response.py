"""The fold by matrix products: a head's records once, then every tile of its state.

The recurrence is linear in (S, V), so n records act on each row of a state alike:

    S_n = S_0 * E(0,n) + (V - [DELTA] S_0 (E(0,i) * k_i)^T) N,      N [W, K]

Per head, N = X^T (E(i,n) * k_i) with (I + A) X = diag(beta), A_im = beta_i k_i^T (E(m,i) * k_m) for m < i: substitution in
fp32, every exponent a sum of the g between. Per channel, N is what the recurrence itself makes of the unit vectors as values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .recurrence import (
    at,
    decayed,
    exp,
    inverse_norm,
    load_scalars,
    load_stored,
    product,
    readout,
    rows_product,
    scaled,
    updated,
    widened,
    wrap,
)


@triton.jit
def decayed_rows(s, g, d):
    """s * exp(g) of a tile [., BK], g per channel or per head."""
    after = ()
    for i_k in tl.static_range(d.K // d.BLOCK_K):
        after += (s[i_k] * (exp(g[i_k])[None, :] if d.PER_CHANNEL else exp(g)),)
    return after


@triton.jit
def record_of_channels(pool, d, layer, slot, i_h, row, live):
    """What came in with a ring row's token, as stored: k, beta and g per channel; zeros unless live."""
    k = load_stored(at(pool.k, layer, slot, i_h // (d.H // d.G)) + row * pool.k.row, live, d)
    beta = 1.0
    if d.BETA != "one":
        beta = tl.load(at(pool.beta, layer, slot, i_h) + row * pool.beta.row, mask=live, other=0.0)
    return k, beta, load_stored(at(pool.g, layer, slot, i_h) + row * pool.g.row, live, d)


@triton.jit
def response(pool, A, d, layer, slot, i_h, start, n, EXACT: tl.constexpr, PRECISION: tl.constexpr):
    """(rows, factor, mix, out, E) of n records from ring row `start` on: rows * factor is E(0,i) * k_i, mix out is N."""
    if d.PER_CHANNEL:
        return channel_response(pool, d, layer, slot, i_h, start, n)
    else:
        i_g = i_h // (d.H // d.G)
        o_j = tl.arange(0, d.W_PAD)
        row, live = wrap(start + o_j, d.R)[:, None], (o_j < n)[:, None]
        k = ()
        for i_k in tl.static_range(d.K // d.BLOCK_K):
            o_k = (tl.arange(0, d.BLOCK_K) + i_k * d.BLOCK_K)[None, :]
            k += (tl.load(at(pool.k, layer, slot, i_g) + row * pool.k.row + o_k, mask=live, other=0.0).to(tl.float32),)
        r = inverse_norm(k, d) * tl.full([d.W_PAD], 1.0, tl.float32)
        beta = tl.where(o_j < n, 1.0, 0.0)
        if d.BETA != "one":
            beta = load_scalars(pool.beta, d, layer, slot, i_h, start, n)
        if d.STORES_G:
            g = load_scalars(pool.g, d, layer, slot, i_h, start, n)
        else:
            g = tl.load(A + i_h).to(tl.float32) * beta
        later = o_j[:, None] > o_j[None, :]
        after = tl.where(later, g[:, None], 0.0)  # of token i, in the columns of all before it
        out_factor = r * exp(tl.sum(after, 0))
        if d.DELTA:
            L = rows_product(k, k, d, PRECISION, EXACT, EXACT) * r[:, None] * r[None, :] * exp(tl.cumsum(after, 0))
            mix = tl.trans(solved(tl.where(later, L, 0.0), beta, n)) * out_factor[None, :]
        else:
            mix = tl.where(o_j[:, None] == o_j[None, :], (beta * out_factor)[:, None], 0.0)
        return k, r * exp(tl.cumsum(g, 0)), mix, k, exp(tl.sum(g, 0))


@triton.jit
def solved(L, beta, n):
    """(I + diag(beta) L)^-1 diag(beta) for a strictly lower L [W, W], by substitution over its first n rows."""
    o_j = tl.arange(0, L.shape[0])
    X = tl.zeros_like(L)
    for i in range(n):
        at_i = (o_j == i)[:, None]
        L_i, beta_i = tl.sum(tl.where(at_i, L, 0.0), 0), tl.sum(tl.where(o_j == i, beta, 0.0), 0)
        X_i = beta_i * (tl.where(o_j == i, 1.0, 0.0) - tl.sum(L_i[:, None] * X, 0))
        X = tl.where(at_i, X_i[None, :], X)
    return X


@triton.jit
def channel_response(pool, d, layer, slot, i_h, start, n):
    """``response`` of a decay per channel, one token of the recurrence at a time."""
    o_j = tl.arange(0, d.W_PAD)
    Y, Kd, E = (), (), ()
    for _ in tl.static_range(d.K // d.BLOCK_K):
        Y += (tl.zeros([d.W_PAD, d.BLOCK_K], tl.float32),)
        Kd += (tl.zeros([d.W_PAD, d.BLOCK_K], tl.float32),)
        E += (tl.full([d.BLOCK_K], 1.0, tl.float32),)
    k_next, beta_next, g_next = record_of_channels(pool, d, layer, slot, i_h, start, n > 0)
    for i in range(n):
        k, beta, g = widened(k_next, d), beta_next, g_next
        # The next record is under way, untouched, while this one is taken in: a flush waits for this chain of tokens.
        k_next, beta_next, g_next = record_of_channels(pool, d, layer, slot, i_h, wrap(start + i + 1, d.R), i + 1 < n)
        k = scaled(k, inverse_norm(k, d), d)
        E, Y = decayed(E, g, d), decayed_rows(Y, g, d)
        u = tl.where(o_j == i, 1.0, 0.0)
        if d.DELTA:
            u -= readout(Y, k, d)
            Kd_i = ()
            for i_k in tl.static_range(d.K // d.BLOCK_K):
                Kd_i += (tl.where((o_j == i)[:, None], (E[i_k] * k[i_k])[None, :], Kd[i_k]),)
            Kd = Kd_i
        Y = updated(Y, beta * u, k, d)
    ones = tl.full([d.W_PAD], 1.0, tl.float32)
    return Kd, ones, tl.where(o_j[:, None] == o_j[None, :], ones[None, :], 0.0), Y, E


@triton.jit
def folded(s, n, rows, factor, mix, out, E, v, d, EXACT: tl.constexpr, PRECISION: tl.constexpr):
    """A state tile after the n records of a response, v [BV, W] their raw values; for n = 0 the bits it had."""
    ROWS_EXACT: tl.constexpr = EXACT and not d.PER_CHANNEL
    x = v
    if d.DELTA:
        x -= rows_product(s, rows, d, PRECISION, False, ROWS_EXACT) * factor[None, :]
    if not d.PER_CHANNEL:
        x = product(x, mix, tl.zeros_like(v), PRECISION)
    after = ()
    for i_k in tl.static_range(d.K // d.BLOCK_K):
        # Added outside the product: its accumulator truncates, which a state would accumulate.
        added = product(x, out[i_k], tl.zeros_like(s[i_k]), PRECISION, False, ROWS_EXACT)
        E_k = E[i_k][None, :] if d.PER_CHANNEL else E
        after += (tl.where(n > 0, tl.fma(s[i_k], E_k + tl.zeros_like(s[i_k]), added), s[i_k]),)
    return after
