"""SGLang: GDN's and KDA's conventional decode step and their replaying one, and the same over drafts."""

from __future__ import annotations

import torch
from torch import Tensor

from ..contest import Absent, Contestant
from ..work import Work, snapshots


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
        } | work.safe_gate
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

    def held(self, steps: int) -> tuple[Tensor, Tensor | int]:
        return self.state[0], (self.work.phases.flatten() + steps) % self.layout.W


class Verify(Contestant):
    """fused_sigmoid_gating_delta_rule_update as target verify: a state per token beside the pool; copying one back is not
    charged."""

    name = "sglang verify"

    def __init__(self, work: Work, candidate=None) -> None:
        super().__init__(work, candidate)
        from sglang.kernels.ops.attention.linear import fused_sigmoid_gating_recurrent as recurrent

        self.run, self.layout = recurrent.fused_sigmoid_gating_delta_rule_update, work.layout
        self.kda = work.layout.recurrence.per_channel
        self.state = work.states()
        self.rows = torch.arange(work.B, dtype=torch.int32, device=work.device)
        self.weights = {
            "A_log": work.w["A"].neg().log(),
            "dt_bias": work.w["dt_bias"],
            "softplus_beta": 1.0,
            "softplus_threshold": 20.0,
            "scale": work.layout.recurrence.q_scale(work.layout.K),
            "use_qk_l2norm_in_kernel": True,
            "is_kda": self.kda,
            "disable_state_update": True,
        } | work.safe_gate
        self.x = [self.inputs(work.entry(e)) for e in range(work.entries)]
        self.caches = self.allocate_caches()

    def inputs(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        """One token set [1, B T, ...], sequences told apart by their offsets."""
        work = self.work
        offsets = torch.arange(0, work.B * work.T + 1, work.T, dtype=torch.int32, device=work.device)
        tokens = {name: one[None] for name, one in x.items()}
        return tokens | {"a": x["a"].flatten(1), "b": x["b"], "cu_seqlens": offsets}

    def allocate_caches(self) -> list[dict[str, Tensor]]:
        """Per layer, where the kernel keeps what a commit needs."""
        self.snapshots = snapshots(self.work)
        rest = {"intermediate_state_indices": self.rows, "cache_steps": self.work.T}
        return [{"intermediate_states_buffer": one} | rest for one in self.snapshots]

    def step(self, layer: int, g: int, e: int, i: int) -> Tensor:
        o = self.run(
            initial_state_source=self.state[layer],
            initial_state_indices=self.work.slots[g],
            **self.caches[layer],
            **self.weights,
            **self.x[e],
        )
        return o[0]

    def settle(self, i: int, g: int) -> None:
        for state, snapshot in zip(self.state, self.snapshots, strict=True):
            state[self.work.slots[g].long()] = snapshot[self.rows.long(), self.work.accepted[i, g].long() - 1]


class KDAReplayVerify(Verify):
    """The same kernel keeping inputs instead of states, which one launch a step folds into every layer's state."""

    name = "sglang replay verify"

    def allocate_caches(self) -> list[dict[str, Tensor]]:
        from sglang.kernels.ops.attention.linear import kda_replayssm_spec_decode as replay

        self.commit = replay.commit_kda_replayssm_spec_all_layers
        layout, work = self.layout, self.work

        def ring(*shape: int, dtype: torch.dtype = layout.act) -> Tensor:
            return torch.zeros(work.layers, work.slots.numel(), *shape, dtype=dtype, device=work.device)

        self.rings = {
            "rawv": ring(layout.H, work.T, layout.V),
            "rawk": ring(layout.G, work.T, layout.K),
            "g": ring(layout.H, work.T, layout.K, dtype=torch.float32),
            "beta": ring(layout.H, work.T, dtype=torch.float32),
        }
        return [
            {"cache_ring": True} | {f"replayssm_{name}": x[layer] for name, x in self.rings.items()}
            for layer in range(work.layers)
        ]

    def end(self, i: int, g: int) -> None:
        self.commit(
            self.state,
            *(self.rings[name] for name in ("rawv", "rawk", "g", "beta")),
            ssm_state_indices=self.work.slots[g],
            accept_lens=self.work.accepted[i, g],
            max_cache_len=self.work.T,
            num_k_heads=self.layout.G,
            null_block_id=-1,
        )

    def settle(self, i: int, g: int) -> None:
        pass


class GDNReplayVerify(Verify):
    """gdn_replayssm_spec_decode: three launches a layer, cursors advanced by its own launch a step."""

    name = "sglang replay verify"
    candidates = (32, 16)  # its ring's rows, a power of two of at least 2 T

    def allocate_caches(self) -> list[dict[str, Tensor]]:
        from sglang.kernels.ops.attention.linear import gdn_replayssm_spec_decode as replay

        self.replay, self.L = replay, self.candidate
        layout, work, S, L = self.layout, self.work, self.work.slots.numel(), self.L
        if 2 * work.T > L:
            raise Absent(f"a ring of {L} rows holds at most {L // 2} drafts a step")

        def ring(*shape: int, dtype: torch.dtype = layout.act) -> Tensor:
            return torch.zeros(work.layers, S, *shape, dtype=dtype, device=work.device)

        rings = {
            "d_cache": ring(layout.H, L, layout.V),
            "k_cache": ring(layout.G, L, layout.K),
            "g_cache": ring(layout.H, L, dtype=torch.float32),
            "rawv_cache": ring(layout.H, L, layout.V),
            "rawk_cache": ring(layout.G, L, layout.K),
            "beta_cache": ring(layout.H, L, dtype=torch.float32),
        }
        self.cursors = {
            "write_pos": (work.phases.flatten() % (L - 2 * work.T + 1)).int(),
            "cache_base": torch.zeros(S, dtype=torch.int32, device=work.device),
            "is_flush": torch.zeros(S, dtype=torch.int8, device=work.device),
        }
        self.sizes = {"max_cache_len": L, "max_spec_len": work.T, "null_block_id": -1}
        self.out = torch.empty(work.B * work.T, layout.H, layout.V, dtype=layout.act, device=work.device)
        names = ("A_log", "dt_bias", "scale", "use_qk_l2norm_in_kernel")
        self.weights = {name: self.weights[name] for name in names}
        return [{name: x[layer] for name, x in rings.items()} for layer in range(work.layers)]

    def inputs(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        work = self.work
        return x | {"query_start_loc": torch.arange(0, work.B * work.T + 1, work.T, dtype=torch.int32, device=work.device)}

    def step(self, layer: int, g: int, e: int, i: int) -> Tensor:
        self.replay.gdn_replayssm_spec_decode(
            checkpoint_state=self.state[layer],
            ssm_state_indices=self.work.slots[g],
            replay_indices=self.work.slots[g],
            out=self.out,
            **self.caches[layer],
            **self.cursors,
            **self.sizes,
            **self.weights,
            **self.x[e],
        )
        return self.out

    def end(self, i: int, g: int) -> None:
        self.replay.commit_gdn_replayssm_spec(
            num_accepted=self.work.accepted[i, g], replay_indices=self.work.slots[g], **self.cursors, **self.sizes
        )

    def settle(self, i: int, g: int) -> None:
        pass

    def held(self, steps: int) -> tuple[Tensor, Tensor | int]:
        return self.state[0], self.cursors["write_pos"]
