"""The cursor state machine: what a slot remembers, what a step plans, what a commit moves.

The rules are plain arithmetic, so one source serves Python integers, torch tensors and (through ``triton.jit``) the kernels.

Per slot, shared by all layers:
    start    ring row of the oldest live record, 0 ... R - 1
    count    live (committed, not yet folded) records, 0 ... W
    pending  odd: ticket of the slot's newest plan, still uncommitted; even: nothing pending
    flushes  how many folds the request has had
    key      the request's own number, for random rounding
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# Columns of a plan row (int32). `rows`: packed token rows the batch row owns, from `first` on; `t` of them are live tokens.
# `start` and `count` are from before the flush that a plan does; `flushes` and the two parts of `key` are what its rounding is
# keyed by. `order` is no part of its row: read down the column it lists all rows, the `flushing` that flush first.
PLAN = (
    "slot", "start", "count", "t", "flush", "append", "first", "rows", "ticket", "order", "flushes", "key_low", "key_high",
    "flushing",
)  # fmt: skip
PLAN_WIDTH = len(PLAN)


class Cursors(NamedTuple):
    """Device tensors [S] of every slot's cursor; int32, key int64. Owned by ReplayState, moved by plan and commit alone."""

    start: Tensor
    count: Tensor  # type: ignore[assignment]  # the contract's name; tuple.count is not wanted here
    pending: Tensor
    flushes: Tensor
    key: Tensor


# What a request takes along: all but `pending`, which belongs to the slot.
CARRIED = {"start": torch.int32, "count": torch.int32, "flushes": torch.int32, "key": torch.int64}


@dataclass(frozen=True, eq=False)
class Plan:
    """One engine step: what every layer reads instead of cursors. Views of the state's fixed buffers, until the next ``plan``.

    Plans of one form are one object, by which a state finds what it keeps ready.

    Attributes:
        rows: [B, len(PLAN)] int32.
        T: most tokens of a row.
        tokens: packed token rows N of this step's tensors; None where only the device knows (cu_seqlens).
        tree: [B, 2, T_max] int32: each token's parent (-1: the committed history), and the bits of the token itself and its
            ancestors (bit m: token m); None where every token follows the one before.
    """

    rows: Tensor
    T: int
    tokens: int | None
    tree: Tensor | None = None


def allocate(slots: int, device: torch.device | str) -> Cursors:
    """Zeroed cursors for that many slots."""
    dtypes = (torch.int32,) * 4 + (torch.int64,)
    return Cursors(*(torch.zeros(slots, dtype=dtype, device=device) for dtype in dtypes))


def phase(slot, flushes, phases):
    """By how many records a request's window is shorter: before its first fold 0 ... phases - 1, by its slot; then 0.

    Requests admitted on one step thereby fold on different steps from the first window on, at half a fold more per request;
    those that are folded by force on one step go on together.
    phases is W, or 1 where windows shall not depend on slots. The fractional part of slot times the golden ratio, here
    40503 / 2^16, is spread evenly by slots in a row and by any stride. Most folds of a step over the mean of a cycle, 256
    requests, the worst of W = 8, 11, 16, 18, 20 and of several first slots:

        slots                in a row  every 2nd  5th   16th   17th   32nd   9 of 10 at random
        this                 1.12      1.12       1.17  1.17   1.27   1.25   1.20
        slot mod W           1.05      2.04       5.00  16.00  1.05   16.00  1.17
        slot's bits reversed 1.05      2.04       1.09  16.03  1.09   20.00  1.20
        digit sum in base W  1.09      1.85       4.56  1.55   13.99  1.55   1.17
        a random hash        1.72      1.72       1.64  1.95   1.83   1.80   1.72
    """
    return (flushes == 0) * ((slot * 40503 & 0xFFFF) * phases >> 16)


def flush_rule(force, count, t, W, phase):
    """Whether a step of t tokens folds its ring first: force, or its tokens do not fit, or the window is short and full.

    A short window is full at W - phase records, whatever t: with t tokens a step the steps before a fold are spread, too.
    """
    return (force != 0) | (count + t > W) | ((t > 0) & (count + phase >= W))


def append_row(start, count, R):
    """Ring row of the first record a step appends, on both branches."""
    return (start + count) % R


def next_ticket(pending):
    """Ticket of the next plan: the next odd number, so that an older plan's commit finds another ticket and does nothing."""
    return (pending + 1) | 1


def committed(start, count, flush, accepted, R):
    """(start, count) after a step of which `accepted` tokens stay; flush is 0 or 1."""
    return (start + flush * count) % R, (1 - flush) * count + accepted
