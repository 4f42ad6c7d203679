"""transformers' reference functions, plain torch on any device; gates as its modules compute them."""

from __future__ import annotations

import inspect

from torch import Tensor
from torch.nn.functional import softplus

from ..contest import Contestant
from ..work import Work


class GDN(Contestant):
    """torch_recurrent_gated_delta_rule; states [K, V], beta in the activation dtype."""

    name = "transformers"

    def __init__(self, work: Work, candidate=None) -> None:
        super().__init__(work, candidate)
        self.run, self.w = inspect.unwrap(self.function()), work.w  # not what an installed package offers in its place
        self.state = work.states().transpose(-1, -2).contiguous()
        self.x = [self.inputs(work.entry(e)) for e in range(work.entries)]

    def function(self):
        """The family's function."""
        from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

        return torch_recurrent_gated_delta_rule

    def inputs(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        """One token set under transformers' names: q and k once per value head."""
        layout, A = self.work.layout, self.w["A"]
        heads = layout.H // layout.G
        A = A[:, None] if layout.recurrence.per_channel else A
        return {
            "query": x["q"].repeat_interleave(heads, 1)[:, None],
            "key": x["k"].repeat_interleave(heads, 1)[:, None],
            "value": x["v"][:, None],
            "g": (A * softplus(x["a"].float() + self.w["dt_bias"]))[:, None],
            "beta": x["b"].sigmoid()[:, None],
        }

    def step(self, layer: int, g: int, e: int, i: int) -> Tensor:
        slots = self.work.slots[g].long()
        o, self.state[layer, slots] = self.run(
            **self.x[e], initial_state=self.state[layer, slots], output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        return o[:, 0]

    def held(self, steps: int) -> tuple[Tensor, Tensor | int]:
        return self.state[0].transpose(-1, -2), 0


class KDA(GDN):
    """recurrent_kimi_delta_attention."""

    def function(self):
        from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention

        return recurrent_kimi_delta_attention


class Mamba2(GDN):
    """mamba2_selective_state_update; states [V, K], dt in the activation dtype."""

    def __init__(self, work: Work, candidate=None) -> None:
        super().__init__(work, candidate)
        self.state = work.states()

    def function(self):
        from transformers.models.mamba2.modeling_mamba2 import mamba2_selective_state_update

        return mamba2_selective_state_update

    def inputs(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        H, V, K = self.work.layout.H, self.work.layout.V, self.work.layout.K
        weights = {name: self.w[name][:, None].expand(H, V) for name in ("D", "dt_bias")}
        return weights | {
            "hidden_states": x["v"],
            "dt": x["b"][..., None].expand(-1, H, V),
            "A": self.w["A"][:, None, None].expand(H, V, K),
            "B": x["k"],
            "C": x["q"],
            "dt_softplus": True,
        }

    def step(self, layer: int, g: int, e: int, i: int) -> Tensor:
        slots = self.work.slots[g].long()
        state = self.state[layer, slots]
        o = self.run(state, **self.x[e])
        self.state[layer, slots] = state
        return o

    def held(self, steps: int) -> tuple[Tensor, Tensor | int]:
        return self.state[0], 0
