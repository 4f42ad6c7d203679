"""flash-linear-attention: fused_recurrent of GDN and KDA, one token at a time; it returns each new state in a new tensor."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..contest import Contestant
from ..work import Work


class GDN(Contestant):
    """fused_recurrent_gated_delta_rule with gates, norms and sigmoid in the kernel and states [V, K]."""

    name = "fla fused_recurrent"

    def __init__(self, work: Work, candidate=None) -> None:
        super().__init__(work, candidate)
        self.run = self.function()
        B, states = work.B, work.states()
        self.state = {
            (layer, g): states[layer, g * B : (g + 1) * B] for layer in range(work.layers) for g in range(work.groups)
        }
        names = {"q": "q", "k": "k", "v": "v", "a": "g", "b": "beta"}
        self.x = [{names[n]: t.unsqueeze(1) for n, t in work.entry(e).items()} for e in range(work.entries)]
        self.weights = {
            "A_log": work.w["A"].neg().log(),
            "dt_bias": work.w["dt_bias"],
            "scale": work.layout.recurrence.q_scale(work.layout.K),
        } | work.safe_gate

    def function(self) -> Callable[..., tuple[Tensor, Tensor]]:
        """The family's function."""
        from fla.ops.gated_delta_rule.fused_recurrent import fused_recurrent_gated_delta_rule

        return fused_recurrent_gated_delta_rule

    def step(self, layer: int, g: int, e: int, i: int) -> Tensor:
        o, self.state[layer, g] = self.run(
            initial_state=self.state[layer, g],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            state_v_first=True,
            **self.weights,
            **self.x[e],
        )
        return o[:, 0]

    def held(self, steps: int) -> tuple[Tensor, Tensor | int]:
        return torch.cat([self.state[0, g] for g in range(self.work.groups)]), 0


class KDA(GDN):
    """fused_recurrent_kda, with the same options."""

    def function(self) -> Callable[..., tuple[Tensor, Tensor]]:
        from fla.ops.kda.fused_recurrent import fused_recurrent_kda

        return fused_recurrent_kda
