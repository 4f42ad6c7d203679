"""The shim in the scenarios of ``replayssm parity``: steps, slots and snapshots as SGLang's pool and backends call for them.

SGLang itself is not needed: these are the calls that its hooks make, over a pool of its layout, whose slot 0 is padding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ... import GDN, KDA, KDA_SAFE, MAMBA2, Layout, ReplayState
from ...export import Export
from ...parity import PADDING, Ours
from .layers import Layers
from .replay import Replay


class Shim(Ours):
    """``Replay`` over SGLang's states."""

    backend = None  # as an engine leaves it: kernels on a GPU

    def arrange(self, layout: Layout) -> Layout:
        if layout.recurrence not in (MAMBA2, GDN, KDA, KDA_SAFE):
            raise NotImplementedError(f"SGLang has no {layout.recurrence.name} layers")
        if layout.format.block is not None:
            raise NotImplementedError(f"SGLang's states have no scales, got state {layout.state!r}")
        return layout

    def slots(self, n: int) -> list[int]:
        return [1 + slot for slot in super().slots(n)]

    def build(self, slots: int, A: Tensor | None) -> ReplayState:
        layout, L = self.layout, self.problem.layers
        shape = L, slots + 1, layout.H, layout.V, layout.K  # and one that snapshots go to
        self.pool = torch.full(shape, float("nan"), dtype=layout.format.dtype, device=self.device)
        buffers = layout.allocate(L, slots + 1, self.device, state=self.pool)
        weights = self.problem.weights["A"]
        assert weights is not None
        logarithms = layout.recurrence.decay != "derived"
        kept = tuple((weights.neg().log() if logarithms else weights).unbind())
        layers = Layers(layout.recurrence, layout.H, layout.G, layout.V, layout.K, kept, logarithms)
        self.replay = Replay(layout, buffers, layers)
        return self.replay.state

    def admit(self, requests: Sequence[int], states: Tensor) -> None:
        """SGLang assigns slots, and its prefill writes their states."""
        for request in requests:
            self.at[request] = self.free.pop(0)
        slots = self.of(requests)
        self.replay.assigned.append(slots)
        self.replay.begin()
        self.pool[:, slots.long()] = states.to(self.pool.dtype)
        for layer in range(self.problem.layers):
            self.replay.layer = layer
            self.replay.prefilled(slots)

    def of(self, requests: Sequence[int]) -> Tensor:
        return self.tensor([0 if request == PADDING else self.at[request] for request in requests])

    def step(self, rows: Sequence[int], t: Sequence[int], accepted: Sequence[int], x: dict[str, Tensor]) -> Tensor:
        T = x["v"].shape[2]
        if any(n != T for n, row in zip(t, rows, strict=True) if row != PADDING):
            raise NotImplementedError(f"a batch of SGLang's has as many tokens in every request, got {list(t)}")
        self.replay.begin()
        o = []
        for layer in range(self.problem.layers):
            self.replay.layer = layer
            tokens: dict[str, Tensor | None] = {name: one[layer].flatten(0, 1) for name, one in x.items()}
            tokens |= {name: one for name, one in self.weights[layer].items() if name != "A"}
            slots = self.of(rows)
            o.append(self.replay.decode(slots, **tokens) if T == 1 else self.replay.verify(slots, T, None, **tokens))
        if T > 1:
            self.replay.commit(len(rows), self.tensor(accepted), None)
        return torch.stack(o).unflatten(1, (len(rows), T))

    def states(self, requests: Sequence[int]) -> tuple[Tensor, Sequence[int]]:
        """What SGLang's own code reads once the shim has settled it."""
        slots = self.of(requests)
        self.replay.settle(slots)
        return self.pool[:, slots.long()].float(), [0] * len(requests)

    def snapshot(self, request: int, back: int) -> Tensor:
        """A track of SGLang's, to a slot of its prefix cache."""
        to = self.pool.shape[1] - 1
        every = torch.ones(1, dtype=torch.bool, device=self.device)
        self.replay.snapshot(self.of([request]), every, self.tensor([to]), self.tensor([back]))
        return self.pool[:, to].float().clone()

    def leave(self, request: int) -> Export:
        """As a retracted request's state goes to the host: settled first."""
        self.replay.settle(self.of([request]))
        return super().leave(request)

    def finish(self, request: int) -> None:
        """SGLang says nothing to anyone; the slot's next request begins anew."""
        self.free.insert(0, self.at.pop(request))
