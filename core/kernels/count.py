"""Counts of a plan and of a commit, added to a meter's totals: one tiny launch each. What they are: ``metrics.Counts``."""

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor

from ..cursor import PLAN_WIDTH
from ..layout import Layout
from .cursor import BLOCK, flush_rule, phase
from .prepared import Prepared


@triton.jit
def add(totals, at: tl.constexpr, x):
    """totals[at] += sum of x [BLOCK], by the one program that adds."""
    tl.store(totals + at, tl.load(totals + at) + tl.sum(x.to(tl.int64), 0))


@triton.jit(do_not_specialize=["B"])
def _count_plan_kernel(
    plan,
    totals,
    B,
    W: tl.constexpr,
    PHASES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    TOKENS: tl.constexpr,
    FLUSHES: tl.constexpr,
    FORCED: tl.constexpr,
    LIVE: tl.constexpr,
    FOLDED: tl.constexpr,
):
    i_b = tl.arange(0, BLOCK)
    p = plan + i_b * WIDTH
    slot = tl.load(p, mask=i_b < B, other=-1).to(tl.int64)
    live = slot >= 0
    count, t = tl.load(p + 2, mask=live, other=0), tl.load(p + 3, mask=live, other=0)
    flush, flushes = tl.load(p + 4, mask=live, other=0), tl.load(p + 10, mask=live, other=0)
    due = flush_rule(i_b * 0, count, t, W, phase(slot, flushes, PHASES))
    add(totals, STEPS, t > 0)
    add(totals, TOKENS, t)
    add(totals, FLUSHES, flush)
    add(totals, FORCED, tl.where(due, 0, flush))
    add(totals, LIVE, tl.where(t > 0, (1 - flush) * count, 0))
    add(totals, FOLDED, flush * count)


@triton.jit
def _count_commit_kernel(plan, pending, accepted, totals, B, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ACCEPTED: tl.constexpr):
    i_b = tl.arange(0, BLOCK)
    p = plan + i_b * WIDTH
    slot = tl.load(p, mask=i_b < B, other=-1).to(tl.int64)
    live = slot >= 0
    live &= tl.load(pending + slot, mask=live, other=0) == tl.load(p + 8, mask=live, other=0)
    kept = tl.load(p + 3 if accepted is None else accepted + i_b, mask=live, other=0)
    add(totals, ACCEPTED, kept)


def plan(B: int, totals: Tensor, at: Mapping[str, int], layout: Layout) -> Prepared:
    """Counts plan rows: call it with (plan,). ``at``: where totals [...] int64, which are added to, hold each of Counts."""
    places = {name.upper(): at[name] for name in ("steps", "tokens", "flushes", "forced", "live", "folded")}
    return Prepared(
        _count_plan_kernel, totals.device, (1,), (totals, B), W=layout.W, PHASES=layout.phases, WIDTH=PLAN_WIDTH,
        BLOCK=max(BLOCK, triton.next_power_of_2(B)), **places,
    )  # fmt: skip


def commit(B: int, totals: Tensor, at: Mapping[str, int]) -> Prepared:
    """Counts what a commit keeps: call it with (plan, pending, accepted); pending [S]: of the cursors before it."""
    return Prepared(
        _count_commit_kernel, totals.device, (1,), (totals, B), WIDTH=PLAN_WIDTH, BLOCK=max(BLOCK, triton.next_power_of_2(B)),
        ACCEPTED=at["accepted"],
    )  # fmt: skip
