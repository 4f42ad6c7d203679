"""Errors as they are found, kept on the device: what was worst, what exceeded its bound, and when first."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import formats
from ..layout import Layout

NEVER = 2**62


def distance(x: Tensor, exact: Tensor, dims: int, size: Tensor | None = None) -> Tensor:
    """|x - exact| / (|exact| + size) over the last `dims` dimensions, in fp64; what is no number is infinitely far."""
    last = tuple(range(-dims, 0))
    x, exact = x.double(), exact.double()
    norm = exact.square().sum(last).sqrt()
    norm = norm if size is None else norm + size
    far = (x - exact).square().sum(last).sqrt() / norm.clamp(min=1e-30)
    return torch.where(far.isfinite(), far, math.inf)


def bounds(layout: Layout) -> dict[str, float]:
    """Largest distance of each kind that passes: three times and more what long walks measured; a wrong state's is about 1."""
    act = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[layout.act]
    stored = {"fp32": 1e-5, "fp16": 4e-3, "bf16": 2e-2, "int16": 2e-3, "int8": 5e-2, "e4m3": 0.3, "nvfp4": 0.75}
    copied = {None: 0.0, "int8": 2e-2, "e4m3": 0.1, "nvfp4": 0.4}
    state = stored[formats.base(layout.state)]
    read = copied[layout.read and formats.base(layout.read)]
    return {
        "outputs": act + state + read,
        "states": state,
        "snapshots": state,
        "convolution": act,
        "windows": 0.0,
        "padding": 0.0,
    }


@dataclass(frozen=True)
class Found:
    """Of one kind: how many values were compared, the largest distance, the bound, how many beyond it, and the first's step."""

    compared: int
    worst: float
    bound: float
    wrong: int
    first: int | None


class Check:
    """What the comparisons of a walk found. ``note`` reads nothing back; ``found`` does."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.bounds, self.step = bounds(layout), 0
        self.kinds = {name: i for i, name in enumerate(self.bounds)}
        self._worst = torch.zeros(len(self.kinds), dtype=torch.float64, device=device)
        self._counts = torch.zeros(2, len(self.kinds), dtype=torch.int64, device=device)
        self._first = torch.full((len(self.kinds),), NEVER, dtype=torch.int64, device=device)

    def note(self, kind: str, far: Tensor, on: Tensor | None = None) -> None:
        """Distances of a kind; ``on``, which broadcasts to them, says which count."""
        on = torch.ones_like(far, dtype=torch.bool) if on is None else on.expand_as(far)
        at, far = self.kinds[kind], torch.where(on, far, 0.0)
        if far.numel():
            wrong = (~(far <= self.bounds[kind])).sum()
            self._worst[at] = torch.maximum(self._worst[at], far.max())
            self._counts[:, at] += torch.stack([on.sum(), wrong])
            self._first[at] = torch.where((wrong > 0) & (self._first[at] == NEVER), self.step, self._first[at])

    def found(self) -> dict[str, Found]:
        """Everything so far; waits for the device."""
        worst, (compared, wrong), first = self._worst.tolist(), self._counts.tolist(), self._first.tolist()
        return {
            name: Found(compared[i], worst[i], self.bounds[name], wrong[i], None if first[i] == NEVER else first[i])
            for name, i in self.kinds.items()
        }
