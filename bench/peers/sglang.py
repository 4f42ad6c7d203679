"""SGLang: GDN's and KDA's conventional decode step and their replaying one."""

from __future__ import annotations

import torch
from torch import Tensor

from ..contest import Contestant
from ..work import Work


class PackedDecode(Contestant):
    """fused_recurrent_*_packed_decode: q, k and v packed in one tensor, the state updated in place."""

    name = "sglang packed decode"

    def __init__(self, work: Work, candidate=None) -> None:
        super().__init__(work, candidate)
        from sglang.kernels.ops.attention.fla import fused_recurrent

        self.layout, self.kda = work.layout, work.layout.recurrence.per_channel
        self.run = (
            fused_recurrent.fused_recurrent_kda_packed_decode
            if self.kda
            else fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode
        )
        self.state = work.states()
        self.out = torch.empty(work.B, 1, work.layout.H, work.layout.V, dtype=work.layout.act, device=work.device)
        self.weights = {
            "A_log": work.w["A"].neg().log(),
            "dt_bias": work.w["dt_bias"],
            "scale": work.layout.recurrence.q_scale(work.layout.K),
            "use_qk_l2norm_in_kernel": True,
        }
        self.x = [self.inputs(work.entry(e)) for e in range(work.entries)]
        if self.kda:
            self.flatten_gates()

    def inputs(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        """One token set under SGLang's names."""
        packed = torch.cat([x[name].flatten(1) for name in ("q", "k", "v")], dim=1)
        return {"mixed_qkv": packed, "a": x["a"], "b": x["b"]}

    def flatten_gates(self) -> None:
        """The conventional KDA step takes [B, H K] where the replaying one takes [B, H, K]."""
        self.weights["dt_bias"] = self.weights["dt_bias"].flatten()
        for x in self.x:
            x["a"] = x["a"].flatten(1)

    def step(self, layer: int, g: int, e: int, i: int) -> Tensor:
        self.run(
            initial_state=self.state[layer], out=self.out, ssm_state_indices=self.work.slots[g], **self.weights, **self.x[e]
        )
        return self.out[:, 0]


class Replay(PackedDecode):
    """fused_recurrent_linear_replayssm_decode. Its cursors are computed beforehand, uncharged."""

    name = "sglang replay"
    candidates = (64, 32, 16)  # block_v; 64 is its own

    def __init__(self, work: Work, candidate=None) -> None:
        super().__init__(work, candidate)
        from sglang.kernels.ops.attention.linear import fused_recurrent_linear_replayssm as replay

        self.run_replay = replay.fused_recurrent_linear_replayssm_decode
        layout, S, L = work.layout, work.slots.numel(), work.layout.W

        def ring(*shape: int, dtype: torch.dtype = layout.act) -> Tensor:
            x = torch.zeros(work.layers, S, *shape, dtype=dtype, device=work.device)
            return x.normal_() if work.staggered else x

        gates = (layout.H, L, layout.K) if self.kda else (layout.H, L)
        self.rings = {
            "d_cache": ring(layout.H, L, layout.V),
            "k_cache": ring(layout.G, L, layout.K),
            "g_cache": ring(*gates, dtype=torch.float32).abs_().neg_(),
        }
        at = torch.arange(work.steps, device=work.device)[:, None, None] + work.phases
        self.write_pos = (at % L).int()

    def flatten_gates(self) -> None:
        pass

    def step(self, layer: int, g: int, e: int, i: int) -> Tensor:
        self.run_replay(
            initial_state=self.state[layer],
            out=self.out,
            ssm_state_indices=self.work.slots[g],
            write_pos=self.write_pos[i, g],
            is_kda=self.kda,
            block_v=self.candidate,
            **{name: x[layer] for name, x in self.rings.items()},
            **self.weights,
            **self.x[e],
        )
        return self.out[:, 0]
