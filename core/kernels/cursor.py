"""Plan and commit: one tiny launch each for the whole model."""

from __future__ import annotations

import triton
import triton.language as tl

from .. import cursor
from ..cursor import PLAN_WIDTH, Cursors
from ..layout import Layout
from .prepared import Prepared

# The interpreter runs plain functions as they are, and wants to see `tl` in the module of a jitted one.
_device = (lambda rule: rule) if triton.knobs.runtime.interpret else triton.jit
phase, flush_rule, append_row, next_ticket, committed = map(
    _device, (cursor.phase, cursor.flush_rule, cursor.append_row, cursor.next_ticket, cursor.committed)
)
BLOCK = 128


@triton.jit
def ancestors(parents, tree, T_MAX: tl.constexpr, ROUNDS: tl.constexpr):
    """A row's parents, -1 for what is no earlier token, and the bits of each token and its ancestors: 2^r in r rounds."""
    o_t = tl.arange(0, 1 << ROUNDS)
    parent = tl.load(parents + o_t, mask=o_t < T_MAX, other=-1)
    parent = tl.where((parent >= 0) & (parent < o_t), parent, -1).to(tl.int32)
    tl.store(tree + o_t, parent, mask=o_t < T_MAX)
    bits, next_up = 1 << o_t, parent
    for _ in tl.static_range(ROUNDS):
        above = tl.maximum(next_up, 0)
        bits |= tl.where(next_up >= 0, tl.gather(bits, above, 0), 0)
        next_up = tl.where(next_up >= 0, tl.gather(next_up, above, 0), -1)
    tl.store(tree + T_MAX + o_t, bits, mask=o_t < T_MAX)


@triton.jit(
    do_not_specialize=["B"],
    do_not_specialize_on_alignment=["slots", "t", "force", "cu_seqlens", "parents", "plan", "tree"],
)
def _plan_kernel(
    slots,
    t,
    force,
    cu_seqlens,
    parents,
    plan,
    tree,
    cursors,
    B,
    T: tl.constexpr,
    T_MAX: tl.constexpr,
    ROUNDS: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
    PHASES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if tree is not None:
        i_tree = tl.program_id(0) - 1
        if i_tree >= 0:
            ancestors(parents + i_tree * T_MAX, tree + i_tree * 2 * T_MAX, T_MAX, ROUNDS)
            return
    i_b = tl.arange(0, BLOCK)  # one program for all rows: their order is a sum over them
    m_b = i_b < B
    slot = tl.load(slots + i_b, mask=m_b, other=-1).to(tl.int64)
    live = slot >= 0

    start = tl.load(cursors.start + slot, mask=live, other=0)
    count = tl.load(cursors.count + slot, mask=live, other=0)
    flushes = tl.load(cursors.flushes + slot, mask=live, other=0)
    ticket = next_ticket(tl.load(cursors.pending + slot, mask=live, other=0))
    n, first, rows = i_b * 0 + T, i_b * T, i_b * 0 + T
    if cu_seqlens is not None:
        first = tl.load(cu_seqlens + i_b, mask=m_b, other=0).to(tl.int32)
        rows = tl.load(cu_seqlens + i_b + 1, mask=m_b, other=0).to(tl.int32) - first
        n = rows
    if t is not None:
        n = tl.load(t + i_b, mask=m_b, other=0).to(tl.int32)
    forced = i_b * 0
    if force is not None:
        forced = tl.load(force + i_b, mask=m_b, other=0).to(tl.int32)
    n = tl.where(live, n, 0)
    flush = (live & flush_rule(forced, count, n, W, phase(slot, flushes, PHASES))).to(tl.int32)

    p = plan + i_b * WIDTH
    tl.store(p, slot.to(tl.int32), mask=m_b)
    tl.store(p + 1, start, mask=m_b)
    tl.store(p + 2, count, mask=m_b)
    tl.store(p + 3, n, mask=m_b)
    tl.store(p + 4, flush, mask=m_b)
    tl.store(p + 5, append_row(start, count, R), mask=m_b)
    tl.store(p + 6, first, mask=m_b)
    tl.store(p + 7, rows, mask=m_b)
    tl.store(p + 8, ticket, mask=m_b)
    key = tl.load(cursors.key + slot, mask=live, other=0)
    tl.store(p + 10, flushes, mask=m_b)
    tl.store(p + 11, key.to(tl.int32), mask=m_b)
    tl.store(p + 12, (key >> 32).to(tl.int32), mask=m_b)
    before = tl.cumsum(flush, 0)
    flushing = tl.sum(flush, 0)
    rank = tl.where(flush > 0, before - 1, flushing + i_b - before)
    tl.store(plan + rank * WIDTH + 9, i_b, mask=m_b)
    tl.store(p + 13, flushing, mask=m_b)
    # The flush is part of planning: a plan that is dropped leaves its slots folded, and the next one finds them so.
    start, count = committed(start, count, flush, 0, R)
    tl.store(cursors.start + slot, start, mask=live)
    tl.store(cursors.count + slot, count, mask=live)
    tl.store(cursors.flushes + slot, flushes + flush, mask=live)
    tl.store(cursors.pending + slot, ticket, mask=live)


@triton.jit(do_not_specialize=["B"], do_not_specialize_on_alignment=["plan", "accepted"])
def _commit_kernel(plan, accepted, cursors, B, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    i_b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    p = plan + i_b * WIDTH
    slot = tl.load(p, mask=i_b < B, other=-1).to(tl.int64)
    ticket = tl.load(p + 8, mask=i_b < B, other=0)
    live = (slot >= 0) & (tl.load(cursors.pending + slot, mask=slot >= 0, other=0) == ticket)
    if accepted is None:
        kept = tl.load(p + 3, mask=live, other=0)
    else:
        kept = tl.load(accepted + i_b, mask=live, other=0).to(tl.int32)
    tl.store(cursors.count + slot, tl.load(cursors.count + slot, mask=live, other=0) + kept, mask=live)
    tl.store(cursors.pending + slot, ticket + 1, mask=live)


def plan(B: int, T: int, tree: bool, cursors: Cursors, layout: Layout) -> Prepared:
    """A plan row per batch row: call it with (slots, t, force, cu_seqlens, parents, plan, tree), the last two written.

    It marks the slots pending and moves the cursors of those that flush.
    """
    T_max, block = layout.T_max if tree else 1, max(BLOCK, triton.next_power_of_2(B))
    return Prepared(
        _plan_kernel,
        cursors.start.device,
        (1 + B if tree else 1,),
        (cursors, B),
        T=T,
        T_MAX=T_max,
        ROUNDS=(T_max - 1).bit_length(),
        W=layout.W,
        R=layout.R,
        PHASES=layout.phases,
        WIDTH=PLAN_WIDTH,
        BLOCK=block,
        num_warps=min(16, block // 128),
    )


def commit(B: int, cursors: Cursors) -> Prepared:
    """Moves the cursors of the plan's still pending slots: call it with (plan, accepted)."""
    grid = (triton.cdiv(B, BLOCK),)
    return Prepared(_commit_kernel, cursors.start.device, grid, (cursors, B), WIDTH=PLAN_WIDTH, BLOCK=BLOCK)
