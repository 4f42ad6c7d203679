"""vLLM: Mamba-2's conventional step and its replaying one."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from ..contest import Contestant
from ..work import Work


class Update(Contestant):
    """selective_state_update at the launch settings of vLLM's own table for the device."""

    name = "vllm selective_state_update"

    def __init__(self, work: Work, candidate=None) -> None:
        super().__init__(work, candidate)
        from vllm.model_executor.layers.mamba.ops import mamba_ssm

        self.ops, self.layout = mamba_ssm, work.layout
        self.state = work.states()
        self.out = torch.empty(work.B, work.layout.H, work.layout.V, dtype=work.layout.act, device=work.device)
        self.x = [self.inputs(work.entry(e)) for e in range(work.entries)]

    def inputs(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        """One token set under vLLM's names; what is one value a head is broadcast with stride 0."""
        H, V, K, w = self.layout.H, self.layout.V, self.layout.K, self.work.w
        return {
            "x": x["v"],
            "dt": x["b"][..., None].expand(-1, H, V),
            "A": w["A"][:, None, None].expand(H, V, K),
            "B": x["k"],
            "C": x["q"],
            "D": w["D"][:, None].expand(H, V),
            "dt_bias": w["dt_bias"][:, None].expand(H, V),
            "dt_softplus": True,
            "null_block_id": -1,
            "out": self.out,
        }

    def step(self, layer: int, g: int, e: int, i: int) -> Tensor:
        forced = self.ops.override_ssm_config(self.candidate) if self.candidate else contextlib.nullcontext()
        with forced:
            self.ops.selective_state_update(self.state[layer], state_batch_indices=self.work.slots[g], **self.x[e])
        return self.out


class SweptUpdate(Update):
    """The same kernel at the fastest of some (BLOCK_SIZE_M, warps)."""

    name = "vllm selective_state_update (swept)"
    candidates = ((4, 1), (8, 1), (16, 1), (32, 1), (8, 2), (16, 2), (32, 4), (64, 4))


class Replay(Update):
    """selective_state_update_replayssm_output_only: two launches a layer. Its cursors are computed beforehand, uncharged."""

    name = "vllm replay"

    def __init__(self, work: Work, candidate=None) -> None:
        super().__init__(work, candidate)
        from vllm.model_executor.layers.mamba.ops import selective_state_update_replayssm_output_only as replay

        self.run = replay.selective_state_update_replayssm_output_only
        layout, S, L = work.layout, work.slots.numel(), work.layout.W

        def ring(*shape: int, dtype: torch.dtype = layout.act) -> Tensor:
            x = torch.zeros(work.layers, S, *shape, dtype=dtype, device=work.device)
            return x.normal_().abs_() if work.staggered else x

        self.x_cache, self.B_cache = ring(layout.H, L, layout.V), ring(layout.G, L, layout.K)
        self.dt_cache = ring(layout.H, L, dtype=torch.float32)
        self.bc_pre = torch.empty(work.B, layout.G, L, device=work.device)
        at = torch.arange(work.steps, device=work.device)[:, None, None] + work.phases
        self.write_pos, self.is_flush = (at % L).int(), (at % L == L - 1).to(torch.int8)

    def step(self, layer: int, g: int, e: int, i: int) -> Tensor:
        self.run(
            self.state[layer],
            state_batch_indices=self.work.slots[g],
            x_cache=self.x_cache[layer],
            dt_cache=self.dt_cache[layer],
            B_cache=self.B_cache[layer],
            bc_pre=self.bc_pre,
            write_pos=self.write_pos[i, g],
            is_flush=self.is_flush[i, g],
            max_cache_len=self.layout.W,
            **self.x[e],
        )
        return self.out

    def held(self, steps: int) -> tuple[Tensor, Tensor | int]:
        return self.state[0], (self.work.phases.flatten() + steps) % self.layout.W


class Verify(Update):
    """selective_state_update over drafts: it writes a state per token, and the next step starts from the last accepted."""

    @classmethod
    def states(cls, T: int) -> int:
        return T

    def __init__(self, work: Work, candidate=None) -> None:
        super().__init__(work, candidate)
        states, T = self.state, work.T
        self.state = states.new_zeros(work.layers, states.shape[1] * T, *states.shape[2:])
        self.state[:, ::T] = states
        slots = work.slots[..., None] * T + torch.arange(T, dtype=torch.int32, device=work.device)
        offsets = torch.arange(0, work.B * T + 1, T, dtype=torch.int32, device=work.device)
        before = torch.cat([torch.ones_like(work.accepted[:1]), work.accepted[:-1]])
        self.tokens = [
            [
                {"state_batch_indices": slots[g], "num_accepted_tokens": before[i, g], "cu_seqlens": offsets}
                for g in range(work.groups)
            ]
            for i in range(work.steps)
        ]
        self.out = torch.empty(work.B * T, work.layout.H, work.layout.V, dtype=work.layout.act, device=work.device)
        self.x = [self.inputs(work.entry(e)) for e in range(work.entries)]

    def step(self, layer: int, g: int, e: int, i: int) -> Tensor:
        self.ops.selective_state_update(self.state[layer], **self.tokens[i][g], **self.x[e])
        return self.out

    def held(self, steps: int) -> tuple[Tensor, Tensor | int]:
        states = self.state[0].unflatten(0, (-1, self.work.T))
        return states[torch.arange(len(states)), self.work.accepted[steps - 1].flatten().long() - 1], 0
