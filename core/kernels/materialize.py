"""The exact state after n records, anywhere: fold in place, materialize for a prefix cache, load after prefill. One kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..cursor import Cursors
from ..launch import Launch
from ..layout import Buffers, Layout
from .arguments import dims, on_device, rows
from .formats import load_state, store_state
from .recurrence import at, fold


@triton.jit
def _materialize_kernel(
    source, from_slots, pool, cursors, n, target, to_slots, A, d, B, FOLD: tl.constexpr, BLOCK_V: tl.constexpr
):
    NV: tl.constexpr = d.V // BLOCK_V
    i_h = tl.program_id(0) // NV % d.H
    i_b = tl.program_id(0) // NV // d.H % B
    layer = tl.program_id(0) // NV // d.H // B
    slot, to = tl.load(from_slots + i_b).to(tl.int64), tl.load(to_slots + i_b).to(tl.int64)
    if (slot < 0) | (to < 0):
        return

    o_v = tl.program_id(0) % NV * BLOCK_V + tl.arange(0, BLOCK_V)
    s = load_state(at(source, layer, slot, i_h), o_v, d)
    if FOLD:
        records = tl.load(cursors.count + slot)
        if n is not None:
            records = tl.minimum(records, tl.load(n + i_b).to(tl.int32))
        A_layer = A
        if A is not None:
            A_layer = A + layer * d.H
        s = fold(s, pool, A_layer, d, layer, slot, i_h, tl.load(cursors.start + slot), records, o_v)
    store_state(at(target, layer, to, i_h), o_v, s, d)


def materialize(
    source: Tensor,
    from_slots: Tensor,
    pool: Buffers | None,
    cursors: Cursors | None,
    n: Tensor | None,
    target: Tensor,
    to_slots: Tensor,
    A: Tensor | None,
    layout: Layout,
    launch: Launch,
) -> None:
    """target[:, to_slots[i]] = source[:, from_slots[i]] after its first n[i] records (None: all); without a pool, as it is.

    ``source`` and ``target`` are states [L, slots, H, V, K] of any supported dtype, contiguous in [V, K]; ``A`` [L, H].
    Rows with a negative slot on either side are left alone.
    """
    B = from_slots.shape[0]
    grid = (source.shape[0] * B * layout.H * (layout.V // launch.BLOCK_V),)
    with on_device(source):
        _materialize_kernel[grid](
            rows(source),
            from_slots,
            pool,
            cursors,
            n,
            rows(target),
            to_slots,
            A,
            dims(layout, launch.BLOCK_K),
            B,
            FOLD=pool is not None,
            BLOCK_V=launch.BLOCK_V,
            num_warps=launch.warps,
        )
