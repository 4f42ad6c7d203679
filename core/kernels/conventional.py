"""The conventional step: a tile of a state in, a row's tokens one at a time, the state out, after any of them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..launch import Launch
from ..layout import Buffers, Inputs, Layout, Weights
from .arguments import Rows, dims, on_device, tokens
from .formats import load_state, store_state
from .recurrence import (
    at,
    beta_of,
    decayed,
    g_of,
    inverse_norm,
    load_chunks,
    load_gates,
    readout,
    scaled,
    store_chunks,
    store_output,
    token,
    updated,
)  # fmt: skip


@triton.jit
def store_keyed(pool, d, slot, i_h, o_v, s, seed):
    """A tile of a state into this slot, on which stochastic rounding's draws depend; without a seed, to the nearest."""
    if seed is None:
        store_state(pool, d, 0, slot, i_h, o_v, s, None)
    else:
        key = tl.load(seed)
        store_state(pool, d, 0, slot, i_h, o_v, s, (slot.to(tl.int32), key.to(tl.int32), (key >> 32).to(tl.int32)))


@triton.jit
def _conventional_kernel(
    slots, first, t, x, w, pool, last, trail, to, corrections, raw, out, seed, d, T: tl.constexpr, BLOCK_V: tl.constexpr
):
    NV: tl.constexpr = d.V // BLOCK_V
    i_h = tl.program_id(0) // NV % d.H
    i_b = tl.program_id(0) // NV // d.H
    i_g = i_h // (d.H // d.G)
    o_v = tl.program_id(0) % NV * BLOCK_V + tl.arange(0, BLOCK_V)
    slot = tl.load(slots + i_b).to(tl.int64)
    at_first, rows = i_b * T, T
    if first is not None:
        at_first = tl.load(first + i_b).to(tl.int32)
    if t is not None:
        rows = tl.load(t + i_b).to(tl.int32)
    if slot < 0:
        if out is not None:
            for i in range(rows):
                tl.store(token(out, at_first + i, i_h) + o_v, tl.zeros([BLOCK_V], out.ptr.dtype.element_ty))
        return

    s = load_state(pool, d, 0, slot, i_h, o_v)
    for i in range(rows):
        n = at_first + i
        k, v = load_chunks(token(x.k, n, i_g), True, d), tl.load(token(x.v, n, i_h) + o_v).to(tl.float32)
        b, a = load_gates(x, d, n, i_h, True)
        if raw is not None and tl.program_id(0) % NV == 0:
            p_raw = at(raw, 0, slot, i_h) + i * raw.row
            store_chunks(p_raw, k, True, d)
            if d.PER_CHANNEL:
                store_chunks(p_raw + d.K, a, True, d)
        beta = beta_of(b, w, d, i_h)
        k, s = scaled(k, inverse_norm(k, d), d), decayed(s, g_of(a, beta, w, d, i_h), d)
        u = beta * (v - readout(s, k, d) if d.DELTA else v)
        s = updated(s, u, k, d)
        if corrections is not None:
            tl.store(at(corrections, 0, slot, i_h) + i * corrections.row + o_v, u)
        if out is not None:
            q = load_chunks(token(x.q, n, i_g), True, d)
            q = scaled(q, d.SCALE * inverse_norm(q, d), d)
            store_output(readout(s, q, d), v, x, w, out, n, i_h, o_v)
        if to is not None:
            to_slot = tl.load(to + i_b * T + i).to(tl.int64)
            if to_slot >= 0:
                store_keyed(trail, d, to_slot, i_h, o_v, s, seed)
    if last is not None:
        last_slot = tl.load(last + i_b).to(tl.int64)
        if (last_slot >= 0) & (rows > 0):
            store_keyed(pool, d, last_slot, i_h, o_v, s, seed)


def conventional(
    slots: Tensor,
    T: int,
    first: Tensor | None,
    t: Tensor | None,
    x: Inputs,
    w: Weights,
    pool: Buffers,
    last: Tensor | None,
    trail: Buffers | None,
    to: Tensor | None,
    corrections: Rows | None,
    raw: Rows | None,
    out: Tensor | None,
    seed: Tensor | None,
    layout: Layout,
    launch: Launch,
) -> None:
    """As ``replayssm.conventional.step``, of pools of Rows."""
    with on_device(slots):
        _conventional_kernel[(slots.shape[0] * layout.H * (layout.V // launch.BLOCK_V),)](
            slots,
            first,
            t,
            x,
            w,
            pool,
            last,
            trail,
            to,
            corrections,
            raw,
            tokens(out),
            seed,
            dims(layout, launch.BLOCK_K),
            T=T,
            BLOCK_V=launch.BLOCK_V,
            num_warps=launch.warps,
        )
