"""Causal depthwise convolution of a step's tokens over the conv-input ring, whose rollback is a pointer move.

Input a is token a of the step, or for a < 0 a committed one, -1 the newest. A window is walked from its token back.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..cursor import PLAN_WIDTH
from ..layout import Layout
from .arguments import Rows, Tokens
from .prepared import Prepared
from .recurrence import at, token, wrap

BLOCK = 256


@triton.jit
def before(a, parents):
    """The input that input a follows; parents [T_max] of a row, None where each token follows the one before."""
    if parents is None:
        return a - 1
    else:
        return tl.where(a >= 0, tl.load(parents + a, mask=a >= 0, other=0), a - 1)


@triton.jit(do_not_specialize=["layer"], do_not_specialize_on_alignment=["plan", "tree"])
def _conv_kernel(
    plan,
    tree,
    layer,
    x,
    weight,
    bias,
    out,
    ring,
    C,
    R: tl.constexpr,
    T_MAX: tl.constexpr,
    TAPS: tl.constexpr,
    SILU: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    NC = tl.cdiv(C, BLOCK)
    i_b = tl.program_id(0) // NC
    o_c = tl.program_id(0) % NC * BLOCK + tl.arange(0, BLOCK)
    m_c = o_c < C
    p_plan = plan + i_b * WIDTH
    slot, t, append, first = tl.load(p_plan).to(tl.int64), tl.load(p_plan + 3), tl.load(p_plan + 5), tl.load(p_plan + 6)
    owned = tl.load(p_plan + 7)
    parents = None if tree is None else tree + i_b * 2 * T_MAX

    for i_t in range(owned):
        y = tl.zeros([BLOCK], tl.float32)
        if i_t < t:
            if bias is not None:
                y += tl.load(bias + o_c, mask=m_c, other=0.0).to(tl.float32)
            a = i_t
            for back in tl.static_range(TAPS):
                row = wrap(append + a + tl.where(append + a < 0, R, 0), R)
                old = tl.load(at(ring, layer, slot, 0) + row * ring.row + o_c, mask=m_c & (a < 0), other=0.0)
                new = tl.load(token(x, first + a, 0) + o_c, mask=m_c & (a >= 0), other=0.0)
                tap = tl.load(weight + o_c * TAPS + TAPS - 1 - back, mask=m_c, other=0.0).to(tl.float32)
                y += (old + new).to(tl.float32) * tap
                a = before(a, parents)
            if SILU:
                y *= tl.sigmoid(y)
        tl.store(token(out, first + i_t, 0) + o_c, y.to(out.ptr.dtype.element_ty), mask=m_c)
    for i_t in range(t):
        here = tl.load(token(x, first + i_t, 0) + o_c, mask=m_c, other=0.0)
        tl.store(
            at(ring, layer, slot, 0) + wrap(append + i_t, R) * ring.row + o_c, here.to(ring.ptr.dtype.element_ty), mask=m_c
        )


def conv(B: int, taps: int, silu: bool, tree: bool, ring: Rows, layout: Layout) -> Prepared:
    """One layer's convolution of B rows: call it with (plan, tree, layer, x, weight, bias, out), x and out Tokens.

    It writes out [N, C] of the step's inputs x [N, C] and appends x to the ring. weight [C, taps], bias [C], both contiguous.
    """
    C = ring.ptr.shape[-1]
    return Prepared(
        _conv_kernel,
        ring.ptr.device,
        (B * triton.cdiv(C, BLOCK),),
        (ring, C),
        lambda plan, tree, layer, x, weight, bias, out: (plan, tree, layer, Tokens(*x), weight, bias, Tokens(*out)),
        R=layout.R,
        T_MAX=layout.T_max if tree else 1,
        TAPS=taps,
        SILU=silu,
        WIDTH=PLAN_WIDTH,
        BLOCK=BLOCK,
    )
