"""The exact state after n records, anywhere: fold in place, materialize for a prefix cache, load after prefill. One kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..cursor import Cursors
from ..launch import Launch
from ..layout import Buffers, Layout
from .arguments import dims, on_device
from .formats import NO_FOLD, load_state, store_state
from .recurrence import fold


@triton.jit(do_not_specialize=["first"])
def _materialize_kernel(source, from_slots, cursors, n, target, to_slots, keys, A, first, d, B, BLOCK_V: tl.constexpr):
    NV: tl.constexpr = d.V // BLOCK_V
    i_h = tl.program_id(0) // NV % d.H
    i_b = tl.program_id(0) // NV // d.H % B
    layer = tl.program_id(0) // NV // d.H // B
    slot, to = tl.load(from_slots + i_b).to(tl.int64), tl.load(to_slots + i_b).to(tl.int64)
    if (slot < 0) | (to < 0):
        return

    o_v = tl.program_id(0) % NV * BLOCK_V + tl.arange(0, BLOCK_V)
    s = load_state(source, d, layer, slot, i_h, o_v)
    flushes = NO_FOLD
    if cursors is not None:
        flushes = tl.load(cursors.flushes + slot)
        records = tl.load(cursors.count + slot)
        if n is not None:
            records = tl.minimum(records, tl.load(n + i_b).to(tl.int32))
        A_layer = A
        if A is not None:
            A_layer = A + layer * d.H
        s = fold(s, source, A_layer, d, layer, slot, i_h, tl.load(cursors.start + slot), records, o_v)
    rng = None
    if keys is not None:
        key = tl.load(keys + to)
        rng = flushes, key.to(tl.int32), (key >> 32).to(tl.int32)
    store_state(target, d, first + layer, to, i_h, o_v, s, rng)


def materialize(
    source: Buffers,
    from_slots: Tensor,
    cursors: Cursors | None,
    n: Tensor | None,
    target: Buffers,
    to_slots: Tensor,
    keys: Tensor | None,
    A: Tensor | None,
    first: int,
    layout: Layout,
    launch: Launch,
) -> None:
    """target[first:, to_slots[i]] = source[:, from_slots[i]] after its first n[i] records (None: all).

    Either side is a pool or a caller's states (arguments.states), fp32, bf16 or fp16 contiguous in [V, K]. A source with
    ``cursors`` is the pool, folded with ``A`` [L, H]; a target with ``keys`` is the pool, rounded to its formats for the
    requests' keys [S]. Rows with a negative slot on either side are left alone.
    """
    B, state = from_slots.shape[0], source.state
    grid = (state.ptr.shape[0] * B * layout.H * (layout.V // launch.BLOCK_V),)
    with on_device(state.ptr):
        _materialize_kernel[grid](
            source,
            from_slots,
            cursors,
            n,
            target,
            to_slots,
            keys,
            A,
            first,
            dims(layout, launch.BLOCK_K),
            B,
            BLOCK_V=launch.BLOCK_V,
            num_warps=launch.warps,
        )
