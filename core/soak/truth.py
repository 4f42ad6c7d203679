"""What requests should be: the fp64 oracle over a batch, whose requests stand side by side as heads of one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import reference
from ..layout import Layout
from ..recurrence import unit


@dataclass(frozen=True)
class Run:
    """What some tokens of B requests give, all layers."""

    outputs: Tensor  # [L, B, T, H, V]
    sizes: Tensor  # [L, B, T]  |state| |q| / sqrt(K): what an output's norm is where q is no special direction
    states: Tensor  # [L, B, H, V, K]  after each request's n tokens
    marked: Tensor  # [L, B, H, V, K]  after its first `mark` of them


def run(
    layout: Layout,
    weights: dict[str, Tensor | None],
    states: Tensor,
    x: dict[str, Tensor],
    n: Tensor,
    mark: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Run:
    """Advance states [L, B, H, V, K] by the first n [B] of the tokens x [L, B, T, ...]; weights [L, ...].

    Tokens from n on may hold anything; their outputs mean nothing. ``dtype=torch.float32`` is an engine's prefill.
    """
    row, (L, B, H, V, K), T = layout.recurrence, states.shape, x["v"].shape[2]
    w = {
        name: None if one is None else one[:, None].expand(L, B, *one.shape[1:]).flatten(0, 2) for name, one in weights.items()
    }
    s = states.to(dtype).flatten(0, 2)
    marked, outputs, sizes = s, [], []
    for i in range(T):
        token = {name: one[:, :, i].flatten(0, 2)[None] for name, one in x.items()}
        o, after = reference.decode(row, s, **token, **w, dtype=dtype)  # type: ignore[arg-type]  # keywords of tensors alone
        s = torch.where(_per_head(i < n, L, H), after, s)
        if mark is not None:
            marked = torch.where(_per_head(mark == i + 1, L, H), s, marked)
        q = (unit(row, x["q"][:, :, i].to(dtype)) * row.q_scale(K)).square().sum(-1).mean(-1)
        sizes.append((s.view(L, B, -1).square().sum(-1) * q / K).sqrt())
        outputs.append(o.view(L, B, H, V))
    return Run(torch.stack(outputs, 2), torch.stack(sizes, 2), s.view(L, B, H, V, K), marked.view(L, B, H, V, K))


def _per_head(on: Tensor, L: int, H: int) -> Tensor:
    """[B] -> [L B H, 1, 1]."""
    return on[None, :, None].expand(L, -1, H).flatten()[:, None, None]


def convolve(weight: Tensor, bias: Tensor, windows: Tensor, x: Tensor) -> Tensor:
    """The causal convolution, fp64, of x [L, B, T, C] after windows [L, B, width - 1, C]; weight [L, C, width], bias [L, C]."""
    L, B, T, C = x.shape
    lines, history = (one.permute(2, 0, 1, 3).flatten(1) for one in (x, windows))  # [T, L B C]
    taps, offset = (one[:, None].expand(L, B, *one.shape[1:]).flatten(0, 2) for one in (weight, bias))
    return reference.causal_conv(lines, taps, offset, history).view(T, L, B, C).permute(1, 2, 0, 3)


def slide(windows: Tensor, x: Tensor, n: Tensor) -> Tensor:
    """The window [L, B, width - 1, C] after the first n [B] inputs of x [L, B, T, C]."""
    at = n[:, None] + torch.arange(windows.shape[2], device=x.device)
    return torch.cat([windows, x], 2)[:, torch.arange(len(n), device=x.device)[:, None], at]


class Truth:
    """States in fp64 and convolution windows of many requests, by request number; number -1 is nobody's.

    Attributes:
        states: [L, N + 1, H, V, K] fp64.
        windows: [L, N + 1, width - 1, C].
    """

    def __init__(self, layout: Layout, weights: dict[str, Tensor | None], requests: int, device: torch.device) -> None:
        L = next(len(one) for one in weights.values() if one is not None)
        assert layout.conv is not None
        self.layout, self.weights = layout, weights
        self.states = torch.zeros(L, requests + 1, layout.H, layout.V, layout.K, dtype=torch.float64, device=device)
        self.windows = torch.zeros(
            L, requests + 1, layout.conv.width - 1, layout.conv.channels, dtype=layout.act, device=device
        )

    def advance(
        self, numbers: Tensor, x: dict[str, Tensor], conv: Tensor, n: Tensor, mark: Tensor
    ) -> tuple[Run, Tensor, Tensor]:
        """The requests take the first n tokens; what comes of it, the window after `mark` of them, and the windows before."""
        before = self.windows[:, numbers]
        found = run(self.layout, self.weights, self.states[:, numbers], x, n, mark)
        self.states[:, numbers] = found.states
        self.windows[:, numbers] = slide(before, conv, n)
        return found, slide(before, conv, mark), before
