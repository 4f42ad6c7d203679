"""The shim in the scenarios of ``replayssm parity``: steps and slots as TensorRT-LLM's managers and mixers call for them.

Checkpoints lie in a pool of pages, a page's layers side by side; rings in the engine's double-buffered history where it has one
(Mamba-2 and GDN), at its strides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from replayssm import GDN, KDA, KDA_SAFE, MAMBA2, Layout, ReplayState
from replayssm.parity import PADDING, Ours

from .layouts import FORMATS, rings_in
from .recurrent import Batch, Recurrent


class Shim(Ours):
    """``Recurrent`` over a pool and a history as the engine allocates them."""

    backend = None  # as an engine leaves it: kernels on a GPU

    def arrange(self, layout: Layout) -> Layout:
        if layout.recurrence not in (MAMBA2, GDN, KDA, KDA_SAFE):
            raise NotImplementedError(f"TensorRT-LLM has no {layout.recurrence.name} layers")
        if layout.state not in FORMATS.values():
            raise NotImplementedError(f"mamba_ssm_cache_dtype: supported are {list(FORMATS.values())}, got {layout.state}")
        return dataclasses.replace(layout, order="token", R=2 * (layout.W + layout.T_max))

    def build(self, slots: int, A: Tensor | None) -> ReplayState:
        layout, L, two = self.layout, self.problem.layers, 2
        (dtype,) = (dtype for dtype, name in FORMATS.items() if name == layout.state)
        shape = slots, L, layout.H, layout.V, layout.K
        self.pool = torch.full(shape, float("nan"), dtype=dtype, device=self.device).transpose(0, 1)
        history = None
        if not layout.recurrence.per_channel:
            rows = layout.R // two

            def one(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
                return torch.full((L, slots, two, *shape), float("nan"), dtype=dtype, device=self.device)

            history = rings_in(
                SimpleNamespace(
                    old_x=one(rows, layout.H, layout.V, dtype=layout.act),
                    old_B=one(rows, layout.G, layout.K, dtype=layout.act),
                    old_dt=one(layout.H, rows),
                    old_dA_cumsum=one(layout.H, rows),
                ),
                layout,
            )
        self.recurrent = Recurrent(layout, self.pool, None, slots + 8, history, self.backend, debug=True)
        if A is not None and self.recurrent.A is not None:
            self.recurrent.A.copy_(A)
        return self.recurrent.state

    def admit(self, requests: Sequence[int], states: Tensor) -> None:
        """A prefill of the engine's wrote the pool."""
        for request in requests:
            self.at[request] = self.free.pop(0)
        slots = [self.at[request] for request in requests]
        self.recurrent.restart(slots, brought=False)
        self.pool[:, slots] = states.to(self.pool.dtype)
        self.recurrent.restart(slots, brought=True)

    def step(self, rows: Sequence[int], t: Sequence[int], accepted: Sequence[int], x: dict[str, Tensor]) -> Tensor:
        """Padding rows are dummies, which share one slot."""
        T = x["v"].shape[2]
        if any(n != T for n, row in zip(t, rows, strict=True) if row != PADDING):
            raise NotImplementedError(f"generation batch: expected as many tokens in every request, got {list(t)}")
        self.recurrent.dummies([row == PADDING for row in rows])
        slots = self.tensor([self.state.slots - 1 if row == PADDING else self.at[row] for row in rows])
        self.recurrent.begin(Batch(slots, contexts=0, tokens=T))
        o = []
        for layer in range(self.problem.layers):
            tokens = {name: one[layer].flatten(0, 1) for name, one in x.items()}
            o.append(self.recurrent.step(layer, **tokens, **self.weights[layer]))
            self.recurrent.finish(layer)
        if T > 1:
            self.recurrent.accept(self.tensor(accepted))
        return torch.stack(o).unflatten(1, (len(rows), T))

    def states(self, requests: Sequence[int]) -> tuple[Tensor, Sequence[int]]:
        """What the engine reads in its pool once it has asked for it."""
        slots = [self.at[request] for request in requests]
        self.recurrent.settle(slots)
        return self.pool[:, slots].float(), [0] * len(slots)

    def finish(self, request: int) -> None:
        """The engine frees the slot and says nothing; the slot's next request begins anew."""
        self.free.insert(0, self.at.pop(request))
