"""Random weights and tokens of a few layers, on the device, where they are needed."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import Layout


class Inputs:
    """Weights of `layers` layers, and tokens for them.

    Attributes:
        A: [L, H] or None; weights: A, dt_bias and D with layers in front.
        conv: weight [L, C, width] and bias [L, C] of the convolution.
    """

    def __init__(self, layout: Layout, layers: int, device: torch.device, seed: int) -> None:
        self.layout, self.layers, self.device = layout, layers, device
        self.generator = torch.Generator(device).manual_seed(seed)
        row, H, conv = layout.recurrence, layout.H, layout.conv
        assert conv is not None
        ready = row.decay == "ready"
        self.A = None if ready else -(self._rand(layers, H) * 3 - 2).exp()
        per_head = (H, layout.K) if row.per_channel else (H,)
        self.weights = {
            "A": self.A,
            "dt_bias": self._rand(layers, *per_head) * 2 - 3 if row.biased else None,
            "D": None if row.delta else self._rand(layers, H),
        }
        self.conv = self._randn(layers, conv.channels, conv.width), self._randn(layers, conv.channels)

    def _rand(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, device=self.device)

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device)

    def of_step(self, layer: int) -> dict[str, Tensor | None]:
        """One layer's weights as ``ReplayState.step`` takes them: without an A that the state keeps."""
        kept = self.layout.recurrence.decay == "derived"
        return {name: None if one is None or (name == "A" and kept) else one[layer] for name, one in self.weights.items()}

    def of_conv(self, layer: int) -> tuple[Tensor, Tensor]:
        """One layer's convolution."""
        weight, bias = self.conv
        return weight[layer], bias[layer]

    def draw(self, B: int, T: int, nan: Tensor | None = None) -> tuple[dict[str, Tensor], Tensor]:
        """Tokens [L, B, T, ...] of the recurrence and of the convolution, NaN where ``nan`` [B, T] says so."""
        layout, row = self.layout, self.layout.recurrence
        H, G, V, K, act = layout.H, layout.G, layout.V, layout.K, layout.act
        shape = self.layers, B, T
        x = {"q": self._randn(*shape, G, K), "k": self._randn(*shape, G, K), "v": self._randn(*shape, H, V)}
        if not row.normalize:  # states of order one without a norm
            x["k"] *= K**-0.5
        if row.beta != "one":
            x["b"] = self._randn(*shape, H)
        if row.stores_g:
            x["a"] = self._randn(*shape, *((H, K) if row.per_channel else (H,)))
            if row.decay == "ready":
                x["a"] = -torch.nn.functional.softplus(x["a"] - 3)
        assert layout.conv is not None
        x["conv"] = self._randn(*shape, layout.conv.channels)
        for name, one in x.items():
            one = one if name == "a" and row.decay == "ready" else one.to(act)
            x[name] = one if nan is None else one.masked_fill(nan.view(1, B, T, *[1] * (one.dim() - 3)), float("nan"))
        return x, x.pop("conv")
