"""FlashInfer: Mamba-2's conventional step and its replaying one, from objects compiled ahead (``replayssm bench stage``)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..contest import Absent, Contestant, schedule
from ..work import Work, snapshots

WINDOW = 16  # the most that checkpointing_ssu supports


class Update(Contestant):
    """selective_state_update; its algorithm is FlashInfer's own choice."""

    name = "flashinfer selective_state_update"

    def __init__(self, work: Work, candidate=None) -> None:
        super().__init__(work, candidate)
        import flashinfer.mamba

        self.ops, self.layout = flashinfer.mamba, work.layout
        self.state = work.states()
        shape = self.tokens(work.layout.H, work.layout.V)
        self.out = torch.empty(shape, dtype=work.layout.act, device=work.device)
        self.x = [self.inputs(work.entry(e)) for e in range(work.entries)]

    def tokens(self, *shape: int) -> tuple[int, ...]:
        """The shape of a per-token tensor, of one token or several a request."""
        return (self.work.B, *shape) if self.work.T == 1 else (self.work.B, self.work.T, *shape)

    def inputs(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        """One token set under FlashInfer's names; what is one value a head is broadcast with stride 0."""
        (H, G, V, K), w = (getattr(self.layout, n) for n in "HGVK"), self.work.w
        weights = {name: w[name].to(self.layout.act)[:, None].expand(H, V) for name in ("D", "dt_bias")}
        return weights | {
            "x": x["v"].view(self.tokens(H, V)),
            "dt": x["b"].view(self.tokens(H, 1)).expand(self.tokens(H, V)),
            "A": w["A"][:, None, None].expand(H, V, K),
            "B": x["k"].view(self.tokens(G, K)),
            "C": x["q"].view(self.tokens(G, K)),
            "dt_softplus": True,
            "pad_slot_id": -1,
            "out": self.out,
        }

    def step(self, layer: int, g: int, e: int, i: int) -> Tensor:
        self.ops.selective_state_update(self.state[layer], state_batch_indices=self.work.slots[g], **self.x[e])
        return self.out


class Verify(Update):
    """selective_state_update over drafts: it writes a state per token beside the pool; copying one back is not charged."""

    def __init__(self, work: Work, candidate=None) -> None:
        super().__init__(work, candidate)
        self.snapshots = snapshots(work)
        self.rows = torch.arange(work.B, dtype=torch.int32, device=work.device)

    def step(self, layer: int, g: int, e: int, i: int) -> Tensor:
        self.ops.selective_state_update(
            self.state[layer],
            state_batch_indices=self.work.slots[g],
            disable_state_update=True,
            intermediate_states_buffer=self.snapshots[layer],
            intermediate_state_indices=self.rows,
            cache_steps=self.work.T,
            **self.x[e],
        )
        return self.out.flatten(0, 1)

    def settle(self, i: int, g: int) -> None:
        for state, snapshot in zip(self.state, self.snapshots, strict=True):
            state[self.work.slots[g].long()] = snapshot[self.rows.long(), self.work.accepted[i, g].long() - 1]


class Checkpointing(Update):
    """checkpointing_ssu in one kernel. Its cursors, the host's business there, are computed beforehand, uncharged."""

    name = "flashinfer checkpointing_ssu (one kernel)"
    algorithm = "monolith"

    def __init__(self, work: Work, candidate=None) -> None:
        if work.T > WINDOW:
            raise Absent(f"at most {WINDOW} tokens")
        super().__init__(work, candidate)
        layout, S, R = work.layout, work.slots.numel(), WINDOW + work.T

        def ring(*shape: int, dtype: torch.dtype = layout.act) -> Tensor:
            x = torch.zeros(work.layers, S, *shape, dtype=dtype, device=work.device)
            return x.normal_().abs_() if work.staggered else x

        self.rings = {"x_cache": ring(layout.H, R, layout.V), "B_cache": ring(layout.G, R, layout.K)}
        self.rings["dt_cache"] = ring(layout.H, R, dtype=torch.float32)
        self.cursors = [
            {"ring_start": start, "prev_num_accepted_tokens": count} for start, count, _ in schedule(work, WINDOW, R)
        ]
        self.scratch = self.allocate_scratch()

    def tokens(self, *shape: int) -> tuple[int, ...]:
        return (self.work.B, self.work.T, *shape)

    def allocate_scratch(self) -> dict[str, Tensor]:
        """Buffers between its kernels; one kernel needs none."""
        return {}

    def step(self, layer: int, g: int, e: int, i: int) -> Tensor:
        self.ops.checkpointing_ssu(
            self.state[layer],
            state_batch_indices=self.work.slots[g],
            algorithm=self.algorithm,
            **{name: x[layer] for name, x in self.rings.items()},
            **self.cursors[i],
            **self.scratch,
            **self.x[e],
        )
        return self.out.flatten(0, 1)

    def held(self, steps: int) -> tuple[Tensor, Tensor | int]:
        """A flush folds what came before its step: the tokens that it lacks are its ring's."""
        before = self.cursors[steps - 1]["prev_num_accepted_tokens"]
        flush = before + self.work.T > WINDOW
        return self.state[0], torch.where(flush, 0, before) + self.work.accepted[steps - 1].flatten()


class TwoKernelCheckpointing(Checkpointing):
    """checkpointing_ssu with the products of keys and queries prepared by a first kernel."""

    name = "flashinfer checkpointing_ssu (two kernels)"
    algorithm = "two-kernel"

    def allocate_scratch(self) -> dict[str, Tensor]:
        # The package's own name of the module is taken by the function.
        from sys import modules

        allocate = modules["flashinfer.mamba.checkpointing_ssu"].allocate_checkpointing_ssu_scratch
        work = self.work
        names = ("cb_scaled", "cumAdt_vec", "cb_old")
        return dict(zip(names, allocate(work.B, self.layout.H, work.T, WINDOW, self.layout.act, work.device), strict=True))
