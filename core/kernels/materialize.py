"""The exact state after n records, anywhere: flush and fold in place, materialize for a prefix cache, load after prefill.

One kernel, one launch for all layers. A flush is this launch, once per engine step, and no branch of the kernels that read out.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..cursor import PLAN_WIDTH, Cursors
from ..launch import Launch, dot_precision, resident
from ..layout import Buffers, Layout
from .arguments import dims
from .formats import NO_FOLD, load_state, planned_rng, store_state
from .prepared import Prepared
from .recurrence import load_ring
from .response import folded, response


@triton.jit
def planned(plan, i, WIDTH: tl.constexpr):
    """(slot, target slot, start, records, rng) of the plan's i-th flushing row."""
    p = plan + tl.load(plan + i * WIDTH + 9) * WIDTH
    slot = tl.load(p).to(tl.int64)
    return slot, slot, tl.load(p + 1), tl.load(p + 2), planned_rng(p)


@triton.jit
def asked(slots, to_slots, cursors, n, i):
    """(slot, target slot, start, records, flushes) of the i-th pair of slots; a negative target where either is negative."""
    slot, to = tl.load(slots + i).to(tl.int64), tl.load(to_slots + i).to(tl.int64)
    to = tl.where(slot < 0, slot, to)
    start, records, flushes = tl.zeros_like(i), tl.zeros_like(i), NO_FOLD + tl.zeros_like(i)
    if cursors is not None:
        start = tl.load(cursors.start + slot, mask=to >= 0, other=0)
        flushes = tl.load(cursors.flushes + slot, mask=to >= 0, other=0)
        records = tl.load(cursors.count + slot, mask=to >= 0, other=0)
        if n is not None:
            records = tl.minimum(records, tl.load(n + i).to(tl.int32))
    return slot, to, start, records, flushes


@triton.jit(do_not_specialize=["first", "L", "B"], do_not_specialize_on_alignment=["plan", "from_slots", "n", "to_slots"])
def _materialize_kernel(
    plan,
    from_slots,
    n,
    to_slots,
    source,
    cursors,
    target,
    keys,
    A,
    first,
    d,
    L,
    B,
    WIDTH: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    NV: tl.constexpr = d.V // BLOCK_V
    FOLDS: tl.constexpr = (plan is not None) | (cursors is not None)
    rows = B
    if plan is not None:
        rows = tl.load(plan + 13)
    # A fixed number of programs share what there is to do: few rows flush, and the host does not know how many.
    for i in range(tl.cdiv(L * rows * d.H - tl.program_id(0), tl.num_programs(0))):
        item = tl.program_id(0) + i * tl.num_programs(0)
        layer, i_b, i_h = item // d.H // rows, item // d.H % rows, item % d.H
        if plan is not None:
            slot, to, start, records, rng = planned(plan, i_b, WIDTH)
        else:
            slot, to, start, records, flushes = asked(from_slots, to_slots, cursors, n, i_b)
            rng = None
            if keys is not None:
                key = tl.load(keys + to, mask=to >= 0, other=0)
                rng = flushes, key.to(tl.int32), (key >> 32).to(tl.int32)
        if to >= 0:
            if FOLDS:
                EXACT: tl.constexpr = source.k.ptr.dtype.element_ty != tl.float32
                A_layer = A
                if A is not None:
                    A_layer = A + layer * d.H
                keys_j, factor, mix, out, E = response(source, A_layer, d, layer, slot, i_h, start, records, EXACT, PRECISION)
            for i_v in range(NV):
                o_v = i_v * BLOCK_V + tl.arange(0, BLOCK_V)
                s = load_state(source, d, layer, slot, i_h, o_v)
                if FOLDS:
                    v_j = load_ring(source.v, d, layer, slot, i_h, start, records, o_v)
                    s = folded(s, records, keys_j, factor, mix, out, E, v_j, d, EXACT, PRECISION)
                store_state(target, d, first + layer, to, i_h, o_v, s, rng)


def _prepared(
    source: Buffers,
    target: Buffers,
    B: int,
    layout: Layout,
    launch: Launch,
    cursors: Cursors | None = None,
    keys: Tensor | None = None,
    A: Tensor | None = None,
    first: int = 0,
) -> Prepared:
    """Call it with (plan, None, None, None), or with (None, from_slots, n, to_slots)."""
    L, device = source.state.ptr.shape[0], source.state.ptr.device
    d = dims(layout, launch.BLOCK_K, least_W=16)  # a matrix product has at least 16 of everything
    return Prepared(
        _materialize_kernel,
        device,
        (min(L * B * layout.H, resident(device)),),
        (source, cursors, target, keys, A, first, d, L, B),
        WIDTH=PLAN_WIDTH,
        BLOCK_V=launch.BLOCK_V,
        PRECISION=dot_precision(),
        num_warps=launch.warps,
        num_stages=launch.stages,
    )


def flush(B: int, pool: Buffers, A: Tensor | None, layout: Layout, launch: Launch) -> Prepared:
    """Folds the rings of a plan's flushing rows into their checkpoints and read copies, all layers; A [L, H].

    Call it with (plan, None, None, None).
    """
    return _prepared(pool, pool, B, layout, launch, A=A)


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
    launched = _prepared(source, target, from_slots.shape[0], layout, launch, cursors, keys, A, first)
    launched(None, from_slots, n, to_slots)
