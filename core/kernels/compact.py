"""The accepted path of a tree, moved together: ring rows append + path[i] to append + i, every layer and tensor in one launch.

A program owns one head's row of each ring tensor; the convolution's channels count as heads of BLOCK. Paths ascend, so
path[i] >= i: in that order a row is read before another takes its place, and by the thread that writes the element.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..cursor import PLAN_WIDTH
from ..layout import STORED, Buffers, Layout
from .arguments import rows
from .prepared import Prepared
from .recurrence import at, wrap


class Row(NamedTuple):
    """Elements of one row of a ring tensor: of one head, of all."""

    head: tl.constexpr
    total: tl.constexpr


@triton.jit
def mine(row, i_h, o):
    """Which of a head's elements o there are: none beyond the last head."""
    return (o < row.head) & (i_h * row.head + o < row.total)


@triton.jit(do_not_specialize_on_alignment=["plan", "path", "accepted"])
def _compact_kernel(
    plan,
    path,
    accepted,
    pending,
    rings,
    rows,
    layers,
    T_MAX: tl.constexpr,
    R: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_h = tl.program_id(0) % HEADS
    layer = tl.program_id(0) // HEADS % layers
    i_b = tl.program_id(0) // HEADS // layers
    p_plan = plan + i_b * WIDTH
    slot, append, ticket = tl.load(p_plan).to(tl.int64), tl.load(p_plan + 5), tl.load(p_plan + 8)
    if (slot < 0) | (tl.load(pending + slot, mask=slot >= 0, other=0) != ticket):
        return

    n = (tl.load(p_plan + 3) if accepted is None else tl.load(accepted + i_b)).to(tl.int32)
    o = tl.arange(0, BLOCK)
    for i in range(n):
        node = tl.load(path + i_b * T_MAX + i).to(tl.int32)
        source, target = wrap(append + node, R), wrap(append + i, R)
        record = ()
        for j in tl.static_range(len(rings)):  # all loads before the first store: one wait a record
            m = (node > i) & mine(rows[j], i_h, o)
            record += (tl.load(at(rings[j], layer, slot, i_h) + source * rings[j].row + o, mask=m),)
        for j in tl.static_range(len(rings)):
            m = (node > i) & mine(rows[j], i_h, o)
            tl.store(at(rings[j], layer, slot, i_h) + target * rings[j].row + o, record[j], mask=m)


@lru_cache(maxsize=256)
def _rows(layout: Layout) -> tuple[tuple[Row, ...], int, int]:
    """Each ring tensor's Row in the order of Buffers, the heads of the one that has most, BLOCK."""
    block, sizes = triton.next_power_of_2(max(layout.V, layout.K)), []
    for name, ((heads, _, *dim), _) in layout.tensors.items():
        if name not in STORED:
            width = dim[0] if dim else 1
            sizes.append((block if name == "conv" else width, heads * width))
    most = max(triton.cdiv(total, head) for head, total in sizes)
    return tuple(Row(tl.constexpr(head), tl.constexpr(total)) for head, total in sizes), most, block


def compact(B: int, buffers: Buffers, pending: Tensor, layout: Layout) -> Prepared:
    """Moves the kept records of B rows' still pending slots: of path [B, T_max] the first accepted[b] (None: t) nodes.

    Call it with (plan, path, accepted).
    """
    widths, heads, block = _rows(layout)
    rings = [rows(ring) for ring in buffers[len(STORED) :] if ring is not None]
    if buffers.conv is not None:
        rings[-1] = rings[-1]._replace(head=block)
    layers = buffers.state.shape[0]
    return Prepared(
        _compact_kernel,
        pending.device,
        (B * layers * heads,),
        (pending, tuple(rings), widths, layers),
        T_MAX=layout.T_max,
        R=layout.R,
        HEADS=heads,
        WIDTH=PLAN_WIDTH,
        BLOCK=block,
        num_warps=1,
    )
