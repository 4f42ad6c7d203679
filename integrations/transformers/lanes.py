"""Rows of one batch that hold their recurrent states in different ways, side by side in one transformers cache."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import Cache

from ... import Layout, ReplayState, reference
from .cache import attach
from .families import MIXERS

OF_THE_LAYER = ("dt_bias", "D")  # of a step's inputs, what is not a row each


class Lane(Protocol):
    """How some rows hold their states."""

    def load(self, layer: int, states: Tensor) -> None:
        """One layer's states [B, H, V, K] after the prompt."""

    def step(self, layer: int, inputs: dict[str, Tensor]) -> Tensor:
        """One token of every row, inputs as ``ReplayState.step`` takes them: this layer's output [B, H, V]."""

    def states(self, rows: int) -> Tensor:
        """The exact states [layers, rows, H, V, K] of the first rows."""


class InPlace:
    """The conventional recurrence: each row's state in `dtype`, read and written for every token."""

    def __init__(self, layout: Layout, A: Tensor | None, dtype: torch.dtype) -> None:
        self.layout, self.A, self.dtype = layout, A, dtype
        self.held: dict[int, Tensor] = {}  # per layer [B H, V, K]: every row's heads are heads of one request

    def load(self, layer: int, states: Tensor) -> None:
        """As of a Lane."""
        self.held[layer] = states.flatten(0, 1).to(self.dtype, copy=True)

    def step(self, layer: int, inputs: dict[str, Tensor]) -> Tensor:
        """As of a Lane."""
        v, state = inputs["v"], self.held[layer]
        heads = {name: x.repeat(v.shape[0]) if name in OF_THE_LAYER else x.flatten(0, 1)[None] for name, x in inputs.items()}
        if self.A is not None:
            heads["A"] = self.A[layer].repeat(v.shape[0])
        o, after = reference.decode(self.layout.recurrence, state, **heads, dtype=self.dtype)
        state.copy_(after)
        return o.to(v.dtype).view(v.shape)

    def states(self, rows: int) -> Tensor:
        """As of a Lane."""
        every = torch.stack([self.held[layer] for layer in sorted(self.held)])
        return every.unflatten(1, (-1, self.layout.H))[:, :rows]


class Replayed:
    """A ReplayState of these rows, each with its own random bits."""

    def __init__(self, layout: Layout, layers: int, rows: int, device: torch.device, A: Tensor | None, backend: str | None):
        self.state = ReplayState(layout, layers, rows, device, backend=backend, A=A, debug=False)
        self.slots = torch.arange(rows, dtype=torch.int32, device=device)
        self.state.reset(self.slots, keys=self.slots.long())

    def load(self, layer: int, states: Tensor) -> None:
        """As of a Lane."""
        self.state.load_layer(layer, self.slots, states.contiguous())

    def step(self, layer: int, inputs: dict[str, Tensor]) -> Tensor:
        """As of a Lane: the first layer plans, the last commits."""
        if layer == 0:
            self.plan = self.state.plan(self.slots)
        o = self.state.step(layer, self.plan, **inputs)
        if layer == self.state.layers - 1:
            self.state.commit(self.plan)
        return o

    def states(self, rows: int) -> Tensor:
        """As of a Lane."""
        return self.state.materialize(self.slots[:rows])


class Lanes:
    """Stands in ``ReplayedState.replay``: row b of lane i is row ``i rows + b`` of the batch.

    The first lane is the conventional recurrence with an fp32 state. `truth` follows the first row of every lane in fp64,
    from that row's own inputs.

    Args:
        model: an enabled transformers model on one device.
        layouts: of the other lanes.
        rows: of every lane.
        backend: as ReplayState takes it.

    Raises:
        ValueError, NotImplementedError: a layout that this device cannot hold.
    """

    recording = False
    pending = None

    def __init__(self, model: nn.Module, layouts: list[Layout], rows: int, backend: str | None = None) -> None:
        mixers = sorted((m for m in model.modules() if type(m).__name__ in MIXERS), key=lambda mixer: mixer.layer_idx)
        family, device = MIXERS[type(mixers[0]).__name__], next(mixers[0].parameters()).device
        self.indices, self.transposed = [mixer.layer_idx for mixer in mixers], family.transposed
        self.layout, self.layers, self.rows = layouts[0], len(mixers), rows
        A = family.decay(mixers)
        self.lanes: list[Lane] = [InPlace(self.layout, A, torch.float32)]
        self.lanes += [Replayed(layout, self.layers, rows, device, A, backend) for layout in layouts]
        self.truth = InPlace(self.layout, A, torch.float64)

    def attach(self, cache: Cache) -> None:
        """Let a new DynamicCache hold its recurrent states here."""
        attach(cache, self.indices[0], self.indices, lambda: self)

    def load(self, layer: int, states: Tensor) -> None:
        """The model's own prefill computed these states of one layer, every lane's rows alike."""
        if self.transposed:
            states = states.transpose(-1, -2)
        for lane, of in zip(self.lanes, states.split(self.rows), strict=True):
            lane.load(layer, of)
        self.truth.load(layer, states[:: self.rows])

    def step(self, layer: int, t: int, **inputs: Tensor) -> Tensor:
        """One token of every row: this layer's output [lanes rows, H, V]."""
        cuts = [slice(i * self.rows, (i + 1) * self.rows) for i in range(len(self.lanes))]
        self.truth.step(layer, _rows(inputs, slice(None, None, self.rows)))
        return torch.cat([lane.step(layer, _rows(inputs, cut)) for lane, cut in zip(self.lanes, cuts, strict=True)])

    def errors(self) -> Tensor:
        """[lanes, layers]: relative error, against fp64, of the first row's state of every lane."""
        truth = self.truth.states(len(self.lanes)).transpose(0, 1)  # [lanes, layers, H, V, K]
        held = torch.cat([lane.states(1) for lane in self.lanes], 1).transpose(0, 1)
        return (held.double() - truth).flatten(2).norm(dim=-1) / truth.flatten(2).norm(dim=-1)

    def drafts(self, t: int, begun: bool, announced: int | None) -> int:
        """As of a Replay: none."""
        return 0

    def settle(self, dropped: int = 0) -> None:
        """As of a Replay: every step is committed."""


def _rows(inputs: dict[str, Tensor], cut: slice) -> dict[str, Tensor]:
    return {name: x if name in OF_THE_LAYER else x[cut] for name, x in inputs.items()}
