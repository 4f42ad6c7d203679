"""Device half of the state formats: rows of a head's checkpoint or read copy in, fp32 chunks [BV, BK] out, and back.

A stored state is values, and with scales an fp32 (nvfp4: e4m3) per block of K, and with two levels an fp32 per row; an absent
tensor is None. The values' dtype says the number type; uint8 holds two e2m1. ``f``, a Coding, has the rest.
"""

import triton
import triton.language as tl

from ..formats import E4M3_MAX, LOADED, TINY
from .recurrence import at

MAGNITUDE = tl.constexpr(0x7FFFFFFF)
LEAST = tl.constexpr(TINY)
MOST_SCALE = tl.constexpr(E4M3_MAX)
NO_FOLD = tl.constexpr(LOADED)


@triton.jit
def load_state(pool, d, layer, slot, i_h, o_v):
    """Rows o_v of a head's checkpoint: what folds continue from."""
    return load(pool.state, pool.state_scale, pool.state_row_scale, d.STATE, d, layer, slot, i_h, o_v)


@triton.jit
def load_read(pool, d, layer, slot, i_h, o_v):
    """Rows o_v of what readouts use: the read copy, or the checkpoint where there is none."""
    if pool.read is None:
        return load(pool.state, pool.state_scale, pool.state_row_scale, d.STATE, d, layer, slot, i_h, o_v)
    else:
        return load(pool.read, pool.read_scale, pool.read_row_scale, d.READ, d, layer, slot, i_h, o_v)


@triton.jit
def store_state(pool, d, layer, slot, i_h, o_v, s, rng):
    """Round fp32 chunks to the checkpoint and, independently, to the read copy.

    rng: (flush number, low and high half of the request's key); None into a caller's tensor, which rounds to nearest.
    """
    store(pool.state, pool.state_scale, pool.state_row_scale, d.STATE, d, layer, slot, i_h, o_v, s, rng)
    if pool.read is not None:
        store(pool.read, pool.read_scale, pool.read_row_scale, d.READ, d, layer, slot, i_h, o_v, s, None)


@triton.jit
def planned_rng(p_plan):
    """The rng of a plan row's fold."""
    return tl.load(p_plan + 10), tl.load(p_plan + 11), tl.load(p_plan + 12)


# ---- in ----------------------------------------------------------------------------------------------------------------


@triton.jit
def load(values, scale, row_scale, f, d, layer, slot, i_h, o_v):
    """Rows o_v of a stored [V, K] state: numbers times scales."""
    s = load_numbers(at(values, layer, slot, i_h), o_v, d)
    if scale is not None:
        c = load_scales(scale, row_scale, f, d, layer, slot, i_h, o_v)
        s = spread(s, c, f, d)
    return s


@triton.jit
def load_numbers(p, o_v, d):
    """The numbers alone; packed ones: low nibbles are the first half of the row's chunks, high nibbles the second."""
    if p.dtype.element_ty == tl.uint8:
        low, high = (), ()
        for i_k in tl.static_range(d.K // d.BLOCK_K // 2):
            o_k = i_k * d.BLOCK_K + tl.arange(0, d.BLOCK_K)
            byte = tl.load(p + o_v[:, None] * (d.K // 2) + o_k[None, :]).to(tl.int32)
            low, high = low + (e2m1(byte << 28),), high + (e2m1(byte << 24),)
        return low + high
    else:
        s = ()
        for i_k in tl.static_range(d.K // d.BLOCK_K):
            o_k = i_k * d.BLOCK_K + tl.arange(0, d.BLOCK_K)
            s += (tl.load(p + o_v[:, None] * d.K + o_k[None, :]).to(tl.float32),)
        return s


@triton.jit
def e2m1(x):
    """The e2m1 in an int32's top four bits: its sign and three bits at fp32's sign and lowest exponents, times 2^126."""
    bits = (x >> 6) & -0x7E400000  # an arithmetic shift keeps the sign bit on top: 0x81c00000
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def load_scales(scale, row_scale, f, d, layer, slot, i_h, o_v):
    """Scales of each chunk's blocks, [BV, blocks]."""
    N: tl.constexpr = d.BLOCK_K // f.BLOCK if f.BLOCK < d.BLOCK_K else 1
    c = ()
    for i_k in tl.static_range(d.K // d.BLOCK_K):
        o_b = i_k * d.BLOCK_K // f.BLOCK + tl.arange(0, N)
        x = tl.load(at(scale, layer, slot, i_h) + o_v[:, None] * (d.K // f.BLOCK) + o_b[None, :]).to(tl.float32)
        if row_scale is not None:
            x *= tl.load(at(row_scale, layer, slot, i_h) + o_v)[:, None]
        c += (x,)
    return c


@triton.jit
def spread(s, c, f, d):
    """Chunks [BV, BK] times their blocks' factors [BV, blocks]."""
    y = ()
    for i_k in tl.static_range(d.K // d.BLOCK_K):
        if f.BLOCK < d.BLOCK_K:
            x = tl.reshape(s[i_k], [s[i_k].shape[0], d.BLOCK_K // f.BLOCK, f.BLOCK]) * c[i_k][:, :, None]
            y += (tl.reshape(x, s[i_k].shape),)
        else:
            y += (s[i_k] * c[i_k],)
    return y


# ---- out ---------------------------------------------------------------------------------------------------------------


@triton.jit
def store(values, scale, row_scale, f, d, layer, slot, i_h, o_v, s, rng):
    """Rows o_v to a stored [V, K] state, scales first."""
    p = at(values, layer, slot, i_h)
    if scale is not None:
        s = scaled_to(scale, row_scale, f, d, layer, slot, i_h, o_v, s)
    y = ()
    for i_k in tl.static_range(d.K // d.BLOCK_K):
        if f.STOCHASTIC and rng is not None:
            y += (rounded(s[i_k], f.MBITS, f.EMIN, draws(rng, d, layer, i_h, o_v, i_k)),)
        elif scale is not None:
            y += (rounded(s[i_k], f.MBITS, f.EMIN, None),)
        else:
            y += (s[i_k],)
    if p.dtype.element_ty == tl.uint8:
        for i_k in tl.static_range(d.K // d.BLOCK_K // 2):
            o_k = i_k * d.BLOCK_K + tl.arange(0, d.BLOCK_K)
            byte = e2m1_code(y[i_k]) | e2m1_code(y[i_k + d.K // d.BLOCK_K // 2]) << 4
            tl.store(p + o_v[:, None] * (d.K // 2) + o_k[None, :], byte.to(tl.uint8))
    else:
        for i_k in tl.static_range(d.K // d.BLOCK_K):
            o_k = i_k * d.BLOCK_K + tl.arange(0, d.BLOCK_K)
            tl.store(p + o_v[:, None] * d.K + o_k[None, :], y[i_k].to(p.dtype.element_ty))


@triton.jit
def e2m1_code(y):
    """The four bits of an e2m1 number in fp32."""
    code = (tl.abs(y) * 1.1754943508222875e-38).to(tl.int32, bitcast=True) >> 22  # 2^-126: exponents 0 ... 3
    return code | (y.to(tl.int32, bitcast=True) >> 28) & 8


@triton.jit
def scaled_to(scale, row_scale, f, d, layer, slot, i_h, o_v, s):
    """Stores the scales of fp32 chunks and returns the chunks over them, within the number type's range."""
    largest, factors = magnitudes(s, f, d), ()
    if row_scale is not None:
        row = row_maximum(largest, d)
        total = divided(row, MOST_SCALE * f.MOST)
        tl.store(at(row_scale, layer, slot, i_h) + o_v[:, None], total)
    for i_k in tl.static_range(d.K // d.BLOCK_K):
        if row_scale is not None:
            c, factor = second_level(largest[i_k], row, total)
        else:
            c, factor = single_level(largest[i_k], f)
        o_b = i_k * d.BLOCK_K // f.BLOCK + tl.arange(0, c.shape[1])
        p = at(scale, layer, slot, i_h) + o_v[:, None] * (d.K // f.BLOCK) + o_b[None, :]
        tl.store(p, c.to(scale.ptr.dtype.element_ty))
        factors += (factor,)
    s, y = spread(s, factors, f, d), ()
    for i_k in tl.static_range(d.K // d.BLOCK_K):
        y += (tl.clamp(s[i_k], -f.MOST, f.MOST, propagate_nan=tl.PropagateNan.ALL),)
    return y


@triton.jit
def single_level(a, f):
    """(scale, 1 / scale) of blocks whose largest magnitudes are a: a / most."""
    a = tl.maximum(a, LEAST, propagate_nan=tl.PropagateNan.ALL)
    return divided(a, f.MOST), tl.math.div_rn(tl.zeros_like(a) + f.MOST, a)


@triton.jit
def second_level(a, row, total):
    """(e4m3 scale, 1 / (scale total)) of blocks whose largest magnitudes are a; the row's is `row`, its own scale `total`."""
    c = rounded(tl.minimum(a * tl.math.div_rn(tl.zeros_like(row) + MOST_SCALE, row), MOST_SCALE), 3, -6, None)
    both = c * total
    return c, tl.where(both > 0, tl.math.div_rn(tl.zeros_like(both) + 1.0, tl.where(both > 0, both, 1.0)), 0.0)


@triton.jit
def divided(x, y):
    """x / y, correctly rounded, of a tile and a number."""
    return tl.math.div_rn(x, tl.zeros_like(x) + y)


@triton.jit
def row_maximum(largest, d):
    """The largest of each row's blocks, [BV, 1]."""
    row = tl.max(largest[0].to(tl.int32, bitcast=True), 1)
    for i_k in tl.static_range(1, d.K // d.BLOCK_K):
        row = tl.maximum(row, tl.max(largest[i_k].to(tl.int32, bitcast=True), 1))
    return tl.maximum(row.to(tl.float32, bitcast=True), LEAST, propagate_nan=tl.PropagateNan.ALL)[:, None]


@triton.jit
def magnitudes(s, f, d):
    """The largest |s| of each chunk's blocks, [BV, blocks], found as integers, of which a NaN's is above all numbers'."""
    SPAN: tl.constexpr = f.BLOCK // d.BLOCK_K if f.BLOCK > d.BLOCK_K else 1  # chunks that share a scale
    own = ()
    for i_k in tl.static_range(d.K // d.BLOCK_K):
        bits = s[i_k].to(tl.int32, bitcast=True) & MAGNITUDE
        if f.BLOCK < d.BLOCK_K:
            own += (tl.max(tl.reshape(bits, [bits.shape[0], d.BLOCK_K // f.BLOCK, f.BLOCK]), 2),)
        else:
            own += (tl.max(bits, 1)[:, None],)
    shared = ()
    for i_k in tl.static_range(d.K // d.BLOCK_K):
        largest = own[i_k // SPAN * SPAN]
        for j in tl.static_range(1, SPAN):
            largest = tl.maximum(largest, own[i_k // SPAN * SPAN + j])
        shared += (largest.to(tl.float32, bitcast=True),)
    return shared


# ---- rounding ----------------------------------------------------------------------------------------------------------


@triton.jit
def rounded(x, MBITS: tl.constexpr, EMIN: tl.constexpr, r):
    """x to multiples of 2^(max(e, EMIN) - MBITS), 2^e <= |x|: to nearest even, or up in magnitude where r falls below the rest.

    n = |x| / spacing;  floor(n) + [r < n - floor(n)]. Every product is exact, so fused or not it is the same.
    """
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    exponent = tl.maximum((x.to(tl.int32, bitcast=True) & MAGNITUDE) >> 23, 127 + EMIN)
    n = tl.abs(x) * ((-exponent + (254 + MBITS)) << 23).to(tl.float32, bitcast=True)
    if r is None:
        n = (n + 8388608.0) - 8388608.0
    else:
        below = tl.floor(n)
        n = below + tl.where(r < n - below, 1.0, 0.0)
    y = n * ((exponent - MBITS) << 23).to(tl.float32, bitcast=True)
    return (y.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def draws(rng, d, layer, i_h, o_v, i_k):
    """A chunk of uniform numbers in [0, 1), [BV, BK]: a Philox call of key (seed, layer) per four columns of K.

    sm_100 converts with random bits of its own accord (cvt.rs); here the rounding is integer arithmetic everywhere.
    """
    o_c = i_k * (d.BLOCK_K // 4) + tl.arange(0, d.BLOCK_K // 4)
    call = (i_h * d.V + o_v)[:, None] * (d.K // 4) + o_c[None, :]
    none = tl.zeros_like(call)
    key = (tl.cast(layer, tl.int64) << 32) | d.SEED
    a, b, c, e = tl.philox(key, call, none + rng[0], none + rng[1], none + rng[2])
    words = tl.join(tl.join(a, c), tl.join(b, e))  # [BV, BK / 4, 2, 2], in the order a b c e
    return tl.reshape((words >> 8).to(tl.float32), [call.shape[0], d.BLOCK_K]) * 5.9604644775390625e-08
