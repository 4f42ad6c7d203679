"""The oracle: fp64, token by token, nothing clever. It imports nothing from the backends and they import nothing from it.

``decode`` is the plain recurrence. ``Ring`` is the ring contract around it: slots, plans, commits, folds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .cursor import committed, flush_rule, phase
from .recurrence import Recurrence, epilogue, gates, unit


def decode(
    row: Recurrence,
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor | None = None,
    a: Tensor | None = None,
    A: Tensor | None = None,
    dt_bias: Tensor | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Outputs [T, H, V] and final state [H, V, K] of T tokens of one request; arguments as in ``ReplayState.step``.

    ``dtype=torch.float32`` is the conventional in-place recurrence of the engines, whose error is the yardstick.
    """
    s = state.to(dtype)
    H, G = v.shape[1], k.shape[1]
    beta, g = gates(row, b, a, A, dt_bias, v.to(dtype))
    q_hat = (unit(row, q.to(dtype)) * row.q_scale(q.shape[-1])).repeat_interleave(H // G, dim=1)
    k_hat = unit(row, k.to(dtype)).repeat_interleave(H // G, dim=1)
    o = torch.empty(v.shape, dtype=dtype, device=v.device)
    for t in range(v.shape[0]):
        s = s * torch.exp(g[t])[:, None, :]  # [H, V, K] * [H, 1, KG]
        u = v[t].to(dtype)
        if row.delta:
            u = u - torch.einsum("hvk,hk->hv", s, k_hat[t])
        s = s + torch.einsum("hv,hk->hvk", beta[t][:, None] * u, k_hat[t])
        o[t] = torch.einsum("hvk,hk->hv", s, q_hat[t])
    return epilogue(o, v.to(dtype), D, z), s


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor, silu: bool = True) -> Tensor:
    """Depthwise causal convolution in fp64: x [T, C], weight [C, width], history [width - 1, C] -> [T, C]."""
    full = torch.cat([history, x]).to(torch.float64)
    windows = torch.stack([full[i : i + x.shape[0]] for i in range(weight.shape[1])])  # [width, T, C]
    y = torch.einsum("itc,ci->tc", windows, weight.to(torch.float64))
    y = y if bias is None else y + bias.to(torch.float64)
    return torch.nn.functional.silu(y) if silu else y


@dataclass
class Slot:
    """One live request: the exact checkpoint, its cursors, the committed records since, and the step under way."""

    checkpoint: Tensor
    start: int = 0
    count: int = 0
    flushes: int = 0
    records: list[dict[str, Tensor]] = field(default_factory=list)
    step: list[dict[str, Tensor]] | None = None
    flush: bool = False


class Ring:
    """The ring contract of one layer in fp64, for a dictionary of live slots.

    A step's tokens are dictionaries of the per-token arguments of ``decode``, each with a leading dimension of 1;
    ``phases`` is the layout's; ``weights`` holds A, dt_bias and D, which all tokens share.
    """

    def __init__(self, row: Recurrence, W: int, R: int, phases: int, **weights: Tensor | None) -> None:
        self.row, self.W, self.R, self.phases, self.weights = row, W, R, phases, weights
        self.slots: dict[int, Slot] = {}

    def load(self, slot: int, state: Tensor) -> None:
        """After prefill: the slot starts anew from this state [H, V, K]."""
        self.slots[slot] = Slot(state.to(torch.float64))

    def _run(self, state: Tensor, records: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
        if not records:
            return torch.empty(0), state
        joined = {name: torch.cat([r[name] for r in records]) for name in records[0]}
        return decode(self.row, state, **joined, **self.weights)  # type: ignore[arg-type]  # keywords of tensors alone

    def step(
        self, slot: int, tokens: list[dict[str, Tensor]], force: bool = False, parents: list[int] | None = None
    ) -> Tensor | None:
        """Outputs [t, H, V] of the step's tokens (None for t = 0); a flush folds the committed records first.

        Token i follows token parents[i] < i, or the committed records where that is -1; None: the token before.
        """
        s = self.slots[slot]
        s.flush = bool(flush_rule(force, s.count, len(tokens), self.W, phase(slot, s.flushes, self.phases)))
        if s.flush:
            _, s.checkpoint = self._run(s.checkpoint, s.records)
            s.records, (s.start, s.count) = [], committed(s.start, s.count, 1, 0, self.R)
            s.flushes += 1
        s.step = tokens
        states, outputs = {-1: self.materialize(slot)}, []
        for i, token in enumerate(tokens):
            o, states[i] = self._run(states[i - 1 if parents is None else parents[i]], [token])
            outputs.append(o)
        return torch.cat(outputs) if outputs else None

    def commit(self, slot: int, accepted: int, path: list[int] | None = None) -> None:
        """Keep the first `accepted` tokens of the step, or of a path through its tree; again changes nothing."""
        s = self.slots[slot]
        if s.step is None:
            return
        kept = range(accepted) if path is None else path[:accepted]
        s.records += [s.step[i] for i in kept]
        s.count += accepted
        s.step = None

    def materialize(self, slot: int, n: int | None = None) -> Tensor:
        """The state [H, V, K] after the first n committed records (None: all)."""
        s = self.slots[slot]
        return self._run(s.checkpoint, s.records[: s.count if n is None else n])[1]

    def fold(self, slot: int) -> None:
        """Flush in place, outside a step."""
        s = self.slots[slot]
        s.checkpoint = self.materialize(slot)
        s.start, s.count = committed(s.start, s.count, 1, 0, self.R)
        s.flushes += 1
        s.records = []
