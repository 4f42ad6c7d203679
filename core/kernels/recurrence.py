"""Device helpers of the recurrence: gates, norms, records, sums over K. Each quotes the formula it computes.

A row of K (q, k, a per-channel g) is a tuple of fp32 chunks [BK], and a tile of a state a tuple of [BV, BK]: sums over K are
taken chunk by chunk in registers and across threads once, and no size of K is padded. Several tokens at once are chunks
[T, BK]: the same helpers, given token numbers and masks [T], or [T, 1] where they meet a row of K.
"""

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
def load_stored(p, live, d):
    """A contiguous row of K as chunks of its stored dtype; zeros unless live."""
    x = ()
    for i_k in tl.static_range(d.K // d.BLOCK_K):
        x += (tl.load(p + i_k * d.BLOCK_K + tl.arange(0, d.BLOCK_K), mask=live, other=0.0),)
    return x


@triton.jit
def widened(x, d):
    """A row of K in fp32."""
    y = ()
    for i_k in tl.static_range(d.K // d.BLOCK_K):
        y += (x[i_k].to(tl.float32),)
    return y


@triton.jit
def load_chunks(p, live, d):
    """A contiguous row of K as fp32 chunks; zeros unless live."""
    return widened(load_stored(p, live, d), d)


@triton.jit
def store_chunks(p, x, live, d):
    """A row of K, rounded to what p points to, where live."""
    for i_k in tl.static_range(d.K // d.BLOCK_K):
        tl.store(p + i_k * d.BLOCK_K + tl.arange(0, d.BLOCK_K), x[i_k].to(p.dtype.element_ty), mask=live)


@triton.jit
def dot(x, y, d):
    """x^T y of two rows of K."""
    total = x[0] * y[0]
    for i_k in tl.static_range(1, d.K // d.BLOCK_K):
        total += x[i_k] * y[i_k]
    return tl.sum(total, -1)


@triton.jit
def high(x):
    """x rounded to the 11 significant bits that tf32 holds; what is left is below 2^-12 of it. A NaN stays in what is left."""
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def product(a, b, c, PRECISION: tl.constexpr, A_EXACT: tl.constexpr = False, B_EXACT: tl.constexpr = False):
    """c + a b to fp32's accuracy: plainly, or as products of tf32 parts, whose rest is below 2^-23.

    An EXACT side is one that tf32 holds as it is: what came from 16 bits. tl.dot's own "tf32x3" also looks for infinities,
    which costs it a third of its instructions.
    """
    if PRECISION == "ieee":
        return tl.dot(a, b, c, input_precision="ieee")
    elif A_EXACT and B_EXACT:
        return tl.dot(a, b, c, input_precision="tf32")
    elif A_EXACT:
        b_high = high(b)
        return tl.dot(a, b_high, tl.dot(a, b - b_high, c, input_precision="tf32"), input_precision="tf32")
    elif B_EXACT:
        a_high = high(a)
        return tl.dot(a_high, b, tl.dot(a - a_high, b, c, input_precision="tf32"), input_precision="tf32")
    else:
        a_high, b_high = high(a), high(b)
        c = tl.dot(a_high, b - b_high, tl.dot(a - a_high, b_high, c, input_precision="tf32"), input_precision="tf32")
        return tl.dot(a_high, b_high, c, input_precision="tf32")


@triton.jit
def rows_product(x, y, d, PRECISION: tl.constexpr, X_EXACT: tl.constexpr, Y_EXACT: tl.constexpr):
    """x y^T of rows in chunks of K: [X, Y]."""
    p = tl.zeros([x[0].shape[0], y[0].shape[0]], tl.float32)
    for i_k in tl.static_range(d.K // d.BLOCK_K):
        p = product(x[i_k], tl.trans(y[i_k]), p, PRECISION, X_EXACT, Y_EXACT)
    return p


@triton.jit
def scaled(x, r, d):
    """x * r, r a scalar or [T, 1]."""
    y = ()
    for i_k in tl.static_range(d.K // d.BLOCK_K):
        y += (x[i_k] * r,)
    return y


@triton.jit
def exp(x):
    """e^x = 2^n e^r for x <= 88, to an ulp. The hardware's 2^x is off by up to 2^-22, which a state would accumulate.

    Source: Cephes' expf, a polynomial of degree 6 on |r| <= ln(2) / 2.
    """
    x = tl.maximum(x, -104.0, propagate_nan=tl.PropagateNan.ALL)  # below, and for -inf: 0
    n = tl.floor(x * 1.4426950408889634 + 0.5)
    r = (x - n * 0.693359375) + n * 2.12194440e-4
    p = (((1.9875691500e-4 * r + 1.3981999507e-3) * r + 8.3334519073e-3) * r + 4.1665795894e-2) * r + 1.6666665459e-1
    return ((p * r + 0.5) * (r * r) + r + 1.0) * tl.exp2(n)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), its exponent kept in exp's range."""
    return tl.math.div_rn(1.0, 1.0 + exp(tl.minimum(-x, 88.0, propagate_nan=tl.PropagateNan.ALL)))


@triton.jit
def decayed(x, g, d):
    """x * exp(g), g per channel or per head."""
    y = ()
    for i_k in tl.static_range(d.K // d.BLOCK_K):
        y += (x[i_k] * (exp(g[i_k]) if d.PER_CHANNEL else exp(g)),)
    return y


@triton.jit
def inverse_norm(x, d):
    """1 / sqrt(|x|^2 + eps) where the family normalises, else 1."""
    r = 1.0
    if d.NORMALIZE:
        r = tl.math.div_rn(1.0, tl.math.sqrt_rn(dot(x, x, d) + d.EPS))
    return r


@triton.jit
def softplus(x):
    """log(1 + exp(x)) = max(x, 0) + log(1 + y), y = exp(-|x|), as 2 atanh(y / (2 + y)); x above 20."""
    y = exp(-tl.abs(x))
    s = tl.math.div_rn(y, 2.0 + y)  # 1 + y would round a small beta's digits away: 5e-5 of it at softplus(x) = 1e-3
    series = s * 0.0
    for i in tl.static_range(8):
        series = series * s * s + 1.0 / (15 - 2 * i)
    return tl.where(x > LINEAR_ABOVE, x, tl.maximum(x, 0.0) + 2.0 * s * series)


@triton.jit
def load_gates(x, d, n, i_h, live):
    """The inputs (b, a) of token n's beta and g as stored, where there are such; a in chunks of K per channel."""
    b, a = 1.0, 0.0
    if d.BETA != "one":
        b = tl.load(token(x.b, n, i_h), mask=live, other=0.0)
    if d.STORES_G:
        if d.PER_CHANNEL:
            tall: tl.constexpr = len(n.shape) == 1
            p_a = token(x.a, n, i_h)
            a = load_stored(p_a[:, None] if tall else p_a, live[:, None] if tall else live, d)
        else:
            a = tl.load(token(x.a, n, i_h), mask=live, other=0.0)
    return b, a


@triton.jit
def beta_of(b, w, d, i_h):
    """softplus(b + dt_bias), sigmoid(b), b or 1."""
    if d.BETA == "one":
        return b
    else:
        beta = b.to(tl.float32)
        if d.BETA == "softplus":
            if w.dt_bias is not None:
                beta += tl.load(w.dt_bias + i_h).to(tl.float32)
            beta = softplus(beta)
        if d.BETA == "sigmoid":
            beta = sigmoid(beta)
        return beta


@triton.jit
def gate(a, w, d, i_h, o_g):
    """g of raw inputs a, o_g their offsets in dt_bias: A softplus(a + dt_bias), lower_bound sigmoid(-A (a + dt_bias)) or a."""
    if d.DECAY != "ready":
        if w.dt_bias is not None:
            a += tl.load(w.dt_bias + o_g).to(tl.float32)
        A = tl.load(w.A + i_h).to(tl.float32)
        if d.DECAY == "softplus":
            a = A * softplus(a)
        else:
            a = d.LOWER_BOUND * sigmoid(-A * a)
    return a


@triton.jit
def g_of(a, beta, w, d, i_h):
    """A beta, or the gate of its input; chunks of K per channel."""
    if d.DECAY == "derived":
        return tl.load(w.A + i_h).to(tl.float32) * beta
    elif d.PER_CHANNEL:
        g = ()
        for i_k in tl.static_range(d.K // d.BLOCK_K):
            o_g = i_h * d.K + i_k * d.BLOCK_K + tl.arange(0, d.BLOCK_K)
            g += (gate(a[i_k].to(tl.float32), w, d, i_h, o_g),)
        return g
    else:
        return gate(a.to(tl.float32), w, d, i_h, i_h)


@triton.jit
def append_record(pool, d, layer, slot, i_h, row, live, k, rk, beta):
    """What no tile of V owns of a record: k and 1/|k| by the group's first head, beta by each."""
    tall: tl.constexpr = len(k[0].shape) == 2
    heads = d.H // d.G
    if i_h % heads == 0:
        i_g = i_h // heads
        p_k = at(pool.k, layer, slot, i_g) + (row[:, None] if tall else row) * pool.k.row
        store_chunks(p_k, k, live[:, None] if tall else live, d)
        if d.NORMALIZE:
            tl.store(at(pool.rnorm, layer, slot, i_g) + row * pool.rnorm.row, rk, mask=live)
    if d.BETA != "one":
        tl.store(at(pool.beta, layer, slot, i_h) + row * pool.beta.row, beta, mask=live)


@triton.jit
def append_decay(ring, d, layer, slot, i_h, row, live, g):
    """A record's g, or its sum."""
    if d.PER_CHANNEL:
        tall: tl.constexpr = len(g[0].shape) == 2
        p_g = at(ring, layer, slot, i_h) + (row[:, None] if tall else row) * ring.row
        store_chunks(p_g, g, live[:, None] if tall else live, d)
    else:
        tl.store(at(ring, layer, slot, i_h) + row * ring.row, g, mask=live)


@triton.jit
def load_ring(ring, d, layer, slot, i_h, start, n, o_v):
    """The n records' rows of v or u from ring row `start` on: a tile [BV, W], zeros beyond."""
    o_j = tl.arange(0, d.W_PAD)
    p = at(ring, layer, slot, i_h) + wrap(start + o_j, d.R)[None, :] * ring.row + o_v[:, None]
    return tl.load(p, mask=(o_j < n)[None, :], other=0.0).to(tl.float32)


@triton.jit
def load_scalars(ring, d, layer, slot, i_h, start, n):
    """The n records' scalars (beta, g, 1/|k|) from ring row `start` on: [W], zeros beyond."""
    o_j = tl.arange(0, d.W_PAD)
    return tl.load(at(ring, layer, slot, i_h) + wrap(start + o_j, d.R) * ring.row, mask=o_j < n, other=0.0)


@triton.jit
def load_factors(pool, d, layer, slot, i_h, start, count):
    """What each record's weight is multiplied with beside its decay: 1/|k_j|, and beta_j where the ring's v stands for u."""
    factor = 1.0
    if d.NORMALIZE:
        factor *= load_scalars(pool.rnorm, d, layer, slot, i_h // (d.H // d.G), start, count)
    if d.BETA != "one" and not d.DELTA:
        factor *= load_scalars(pool.beta, d, layer, slot, i_h, start, count)
    return factor


@triton.jit
def clear(out, first, last, i_h, tile_v, NV: tl.constexpr):
    """Zeros in the outputs of packed rows that a batch row owns and no token fills."""
    for n in range(first, last):
        for i_v in range(NV):
            p = token(out, n, i_h) + tile_v + i_v * tile_v.shape[0]
            tl.store(p, tl.zeros(tile_v.shape, out.ptr.dtype.element_ty))


@triton.jit
def updated(s, u, k, d):
    """s + u k^T of a state tile."""
    after = ()
    for i_k in tl.static_range(d.K // d.BLOCK_K):
        after += (s[i_k] + u[:, None] * k[i_k][None, :],)
    return after


@triton.jit
def readout(s, x, d):
    """s x of a state tile and a row of K: [BV]."""
    total = s[0] * x[0][None, :]
    for i_k in tl.static_range(1, d.K // d.BLOCK_K):
        total += s[i_k] * x[i_k][None, :]
    return tl.sum(total, 1)


@triton.jit
def store_output(o, v, x, w, out, n, i_h, o_v):
    """A token's output for a tile of V, after the epilogue: o + D v, then * silu(z)."""
    if w.D is not None:
        o += tl.load(w.D + i_h).to(tl.float32) * v
    if x.z is not None:
        z = tl.load(token(x.z, n, i_h) + o_v).to(tl.float32)
        o *= z * tl.sigmoid(z)
    tl.store(token(out, n, i_h) + o_v, o.to(out.ptr.dtype.element_ty))
