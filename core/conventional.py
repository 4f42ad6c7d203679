"""The conventional step, without a ring: every state is read, takes its row's tokens and is written back.

What ReplaySSM replaces, on the same recurrence and number formats: for engines whose contract is a whole state after every
call, for a state after every draft token, and for verification that leaves the state alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import formats, kernels, launch
from .eager import scatter
from .formats import Stored
from .kernels import arguments
from .kernels.arguments import tokens
from .layout import Buffers, Inputs, Layout, Weights
from .recurrence import epilogue, gates, unit


def step(
    slots: Tensor,
    T: int,
    x: dict[str, Tensor | None],
    w: dict[str, Tensor | None],
    pool: Buffers,
    layout: Layout,
    backend: str,
    out: Tensor | None = None,
    last: Tensor | None = None,
    trail: Buffers | None = None,
    to: Tensor | None = None,
    corrections: Tensor | None = None,
    raw: Tensor | None = None,
    first: Tensor | None = None,
    t: Tensor | None = None,
    seed: Tensor | None = None,
) -> None:
    """One layer's tokens, at most T a row.

    Args:
        slots: [B] int, the slot of ``pool`` whose state a row starts from; negative rows are padding: outputs 0, no writes.
        x, w: packed tokens and weights as ``ReplayState.step`` takes them, absent ones None; without ``out`` no q.
        pool: checkpoints [1, S, H, V, K] of one layer, with their scales, contiguous within a head.
        out: [N, H, V], written; None where only states are wanted.
        last: [B] int, the slot of ``pool`` that takes the state after the row's last token; negative: none. None: none at all.
        trail, to: another pool of the same format and [B, T] int, the slot of it that takes the state after each token;
            negative: none. It may be ``pool``: no row starts from a slot that another one writes.
        corrections, raw: [S, H, at least T, V] fp32 and [S, H, at least T, K + K], per channel alone: take u of the row's i-th
            token, and its k and the input of its g as they came, at [slot, :, i].
        first, t: [B] int, the row's first packed token and its number of tokens; None: row b has T from b T on.
        seed: [1] int64, with formats that round stochastically: bits depend on it, the slot and the element.
    """
    if not slots.shape[0]:
        return
    if backend == "torch":
        _eager(slots, T, x, w, pool, layout, out, last, trail, to, corrections, raw, first, t, seed)
        return
    inputs = Inputs(*(tokens(x[name]) for name in Inputs._fields))  # type: ignore[arg-type]  # kernels' Tokens
    u, kept = (None if one is None else arguments.rows(one[None]) for one in (corrections, raw))
    kernels.conventional.conventional(
        slots,
        T,
        first,
        t,
        inputs,
        Weights(**w),
        arguments.pool(pool),
        last,
        None if trail is None else arguments.pool(trail),
        to,
        u,
        kept,
        out,
        seed,
        layout,
        launch.conventional(layout),
    )


def _eager(slots, T, x, w, pool, layout, out, last, trail, to, corrections, raw, first, t, seed):
    row, B, device = layout.recurrence, slots.shape[0], slots.device
    heads, live, at = layout.H // layout.G, slots >= 0, slots.clamp(min=0).long()
    first = torch.arange(B, device=device) * T if first is None else first.long()
    t = torch.full_like(first, T) if t is None else t.long()
    state = layout.format.decode(Stored(*(None if one is None else one[0, at] for one in pool.checkpoint)))
    for i in range(T):
        n, on = (first + i).clamp(max=x["v"].shape[0] - 1), live & (i < t)
        token = {name: one if one is None else one[n] for name, one in x.items()}
        v = token["v"].float()
        k = unit(row, token["k"].float()).repeat_interleave(heads, 1)
        beta, g = gates(row, token["b"], token["a"], w["A"], w["dt_bias"], v)
        s = state * torch.exp(g)[:, :, None, :]
        u = beta[..., None] * (v - torch.einsum("bhvk,bhk->bhv", s, k) if row.delta else v)
        state = torch.where(on[:, None, None, None], s + torch.einsum("bhv,bhk->bhvk", u, k), state)
        if corrections is not None:
            scatter(corrections[:, :, i], torch.where(on, slots, -1), u)
        if raw is not None:
            both = torch.cat([token["k"].repeat_interleave(heads, 1), token["a"].to(token["k"].dtype)], -1)
            scatter(raw[:, :, i], torch.where(on, slots, -1), both)
        if out is not None:
            q = (unit(row, token["q"].float()) * row.q_scale(layout.K)).repeat_interleave(heads, 1)
            o = epilogue(torch.einsum("bhvk,bhk->bhv", state, q), v, w["D"], token["z"])
            scatter(out, torch.where(i < t, first + i, -1), torch.where(live[:, None, None], o, 0.0))
        if trail is not None:
            _store(trail, torch.where(on, to[:, i], -1), state, seed, layout)
    if last is not None:
        _store(pool, torch.where(live & (t > 0), last, -1), state, seed, layout)


def _store(pool: Buffers, slots: Tensor, state: Tensor, seed: Tensor | None, layout: Layout) -> None:
    """Round fp32 states [B, H, V, K] into these slots."""
    draws = None
    if layout.format.stochastic:
        draws = formats.draws(layout.seed, 0, seed.expand(slots.shape[0]), slots, layout.H, layout.V, layout.K)
    for target, values in zip(pool.checkpoint, layout.format.encode(state, draws), strict=True):
        if target is not None:
            scatter(target[0], slots, values)
