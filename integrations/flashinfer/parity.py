"""The calls in the scenarios of ``replayssm parity``, over tensors and cursors that a caller of FlashInfer's holds.

Mamba-2 decodes from the ring of ``checkpointing_ssu``, whose cursors the caller moves. GDN and KDA take conventional steps:
drafts are verified with a state per token (GDN), or frozen and committed (KDA).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ... import GDN, KDA, KDA_SAFE, MAMBA2, Layout, ReplayState
from ...export import Export
from ...parity import PADDING, Implementation, Problem
from . import (
    checkpointing_ssu,
    gated_delta_rule_decode_pretranspose,
    recurrent_kda,
    recurrent_kda_commit,
    replayssm_materialize,
)
from .translate import FORMATS


class Calls(Implementation):
    """States [S, H, V, K] of each layer, with a page's stride between slots; -1 is padding."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        given = problem.layout
        (dtype,) = [dtype for dtype, name in FORMATS.items() if name == given.state] or [None]
        if dtype is None or given.format.block is not None or given.read is not None:
            raise NotImplementedError(f"states without scales and without a read copy are run here, got {given.state!r}")
        rows = given.W + given.T_max
        self.layout = Layout(given.recurrence, given.H, given.G, given.V, given.K, given.W, given.T_max, rows,
                             state=given.state, act=given.act, stagger=False)  # fmt: skip
        self.L, self.device, self.S = problem.layers, problem.device, problem.scenario.requests + 2
        self.free, self.at = list(range(self.S - 1, 0, -1)), dict[int, int]()
        shape = self.L, 2 * self.S, given.H, given.V, given.K
        self.state = torch.full(shape, float("nan"), dtype=dtype, device=self.device)[:, ::2]
        self.w = [{name: None if x is None else x[layer] for name, x in problem.weights.items()} for layer in range(self.L)]

    def tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def of(self, rows: Sequence[int]) -> Tensor:
        return self.tensor([-1 if row == PADDING else self.at[row] for row in rows])

    def admit(self, requests: Sequence[int], states: Tensor) -> None:
        for i, request in enumerate(requests):
            self.at[request] = self.free.pop(0)
            self.state[:, self.at[request]] = states[:, i].to(self.state.dtype)

    def step(self, rows: Sequence[int], t: Sequence[int], accepted: Sequence[int], x: dict[str, Tensor]) -> Tensor:
        T = x["v"].shape[2]
        if any(n != T for n, row in zip(t, rows, strict=True) if row != PADDING):
            raise NotImplementedError("these calls take as many tokens of every row")
        x = {name: one.nan_to_num() for name, one in x.items()}  # padding's
        one = self.gdn if self.layout.recurrence == GDN else self.kda
        return torch.stack([one(layer, rows, accepted, {name: y[layer] for name, y in x.items()}) for layer in range(self.L)])

    def gdn(self, layer: int, rows: Sequence[int], accepted: Sequence[int], x: dict[str, Tensor]) -> Tensor:
        """One layer, verified with a state per token of which the caller keeps one."""
        A, T, slots = self.w[layer]["A"], x["v"].shape[1], self.of(rows)
        assert A is not None
        trail = None
        if T > 1:
            shape = len(rows), T, *self.state.shape[2:]
            trail = torch.empty(shape, dtype=self.state.dtype, device=self.device)
        o, _ = gated_delta_rule_decode_pretranspose(
            x["q"], x["k"], x["v"], None, A.neg().log(), x["a"], self.w[layer]["dt_bias"], x["b"],  # type: ignore[arg-type]
            initial_state=self.state[layer], initial_state_indices=slots, intermediate_states_buffer=trail,
            disable_state_update=trail is not None,
        )  # fmt: skip
        for i, (row, n) in enumerate(zip(rows, accepted, strict=True)):
            if trail is not None and row != PADDING and n:
                self.state[layer, self.at[row]] = trail[i, n - 1]
        return o

    def kda(self, layer: int, rows: Sequence[int], accepted: Sequence[int], x: dict[str, Tensor]) -> Tensor:
        """One layer, frozen in a verification and committed after it."""
        A, T, slots, row = self.w[layer]["A"], x["v"].shape[1], self.of(rows), self.layout.recurrence
        assert A is not None
        gate = {"A_log": A.neg().log(), "dt_bias": self.w[layer]["dt_bias"], "use_gate_in_kernel": True}
        gate["lower_bound"] = row.lower_bound if row.decay == "safe" else None
        given = (x["q"], x["k"], x["v"], x["a"], x["b"])
        if T == 1:
            o, _ = recurrent_kda(
                *given, initial_state=self.state[layer], ssm_state_indices=slots, beta_is_logit=True, **gate  # type: ignore[arg-type]
            )  # fmt: skip
            return o
        H, V, K = self.state.shape[2:]
        corrections = torch.zeros(self.S, H, T, V, device=self.device)
        kg = torch.zeros(self.S, H, T, 2 * K, dtype=self.layout.act, device=self.device)
        o, _ = recurrent_kda(
            *given, initial_state=self.state[layer], initial_state_indices=slots, num_spec_tokens=T - 1, beta_is_logit=True,
            disable_state_update=True, correction_cache=corrections, kg_cache=kg, **gate,  # type: ignore[arg-type]
        )  # fmt: skip
        recurrent_kda_commit(self.state[layer], corrections, kg, slots, self.tensor(accepted), **gate)  # type: ignore[arg-type]
        return o

    def states(self, requests: Sequence[int]) -> tuple[Tensor, Sequence[int]]:
        return self.state[:, self.of(requests).long()].float(), [0] * len(requests)

    def snapshot(self, request: int, back: int) -> Tensor:
        if back:
            raise NotImplementedError("a conventional step keeps no state but the last")
        return self.state[:, self.at[request]].float().clone()

    def rings(self) -> dict[str, Tensor]:
        """Tensors [L, S, ...] beside the states, by the names of Buffers."""
        return {}

    def cursors(self) -> dict[str, Tensor]:
        """start and count [S]."""
        return {}

    def leave(self, request: int) -> Export:
        slot, zero = self.at[request], torch.zeros(1, dtype=torch.int32)
        found = {name: torch.zeros(self.L, 1, *shape, dtype=dtype) for name, (shape, dtype) in self.layout.tensors.items()}
        held = {"state": self.state} | self.rings()
        found |= {name: x[:, slot : slot + 1].cpu() for name, x in held.items()}
        cursors = dict.fromkeys(("start", "count", "flushes"), zero) | {"key": zero.long()}
        cursors |= {name: x[slot : slot + 1].cpu() for name, x in self.cursors().items()}
        self.finish(request)
        return Export(self.layout, found | {f"cursor.{name}": x for name, x in cursors.items()})

    def enter(self, request: int, exported: Export) -> None:
        """As ours in this layout; what has no ring takes the folded state."""
        self.at[request] = slot = self.free.pop(0)
        if not self.rings():
            exported = self._folded(exported)
        found = exported.to(self.layout).tensors
        for name, x in ({"state": self.state} | self.rings()).items():
            x[:, slot] = found[name][:, 0].to(x.device)
        for name, x in self.cursors().items():
            x[slot] = found[f"cursor.{name}"][0]

    def _folded(self, exported: Export) -> Export:
        slots = torch.zeros(1, dtype=torch.int32)
        state = ReplayState(exported.layout, self.L, 1, backend="torch")
        state.import_(slots, exported)
        state.fold(slots)
        return state.export(slots)

    def finish(self, request: int) -> None:
        self.free.insert(0, self.at.pop(request))


class Ring(Calls):
    """Mamba-2 by ``checkpointing_ssu`` and ``replayssm_materialize``."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        layout, L, S = self.layout, self.L, self.S

        def ring(*shape: int, dtype: torch.dtype = layout.act) -> Tensor:
            return torch.full((L, S, *shape), float("nan"), dtype=dtype, device=self.device)

        self.x_cache, self.B_cache = ring(layout.H, layout.R, layout.V), ring(layout.G, layout.R, layout.K)
        self.dt_cache = ring(layout.H, layout.R, dtype=torch.float32)
        self.start, self.count = (torch.zeros(S, dtype=torch.int32, device=self.device) for _ in range(2))

    def rings(self) -> dict[str, Tensor]:
        return {"k": self.B_cache, "v": self.x_cache, "beta": self.dt_cache}

    def cursors(self) -> dict[str, Tensor]:
        return {"start": self.start, "count": self.count}

    def admit(self, requests: Sequence[int], states: Tensor) -> None:
        super().admit(requests, states)
        slots = self.of(requests).long()
        self.start[slots], self.count[slots] = 0, 0

    def step(self, rows: Sequence[int], t: Sequence[int], accepted: Sequence[int], x: dict[str, Tensor]) -> Tensor:
        """Rows of T tokens each, or of any number, packed; then the caller's cursors."""
        (H, V, K), T = self.state.shape[2:], x["v"].shape[2]
        even = all(n == T for n in t)
        tokens = [i * T + j for i, n in enumerate(t) for j in range(n)]
        ends = self.tensor([0, *torch.tensor(t).cumsum(0).tolist()])
        more = {} if even else {"cu_seqlens": ends, "max_seqlen": T}
        outputs = torch.zeros(self.L, len(rows) * T, H, V, dtype=self.layout.act, device=self.device)
        for layer in range(self.L):
            given = {name: one[layer].flatten(0, 1) for name, one in x.items()}
            given = {name: one.unflatten(0, (-1, T)) if even else one[tokens][None] for name, one in given.items()}
            w = {name: one for name, one in self.w[layer].items() if one is not None}
            o = torch.empty_like(given["v"])
            checkpointing_ssu(
                self.state[layer], self.x_cache[layer], self.B_cache[layer], self.dt_cache[layer], self.start, self.count,
                given["v"], given["b"][..., None].expand(*given["v"].shape), w["A"][:, None, None].expand(H, V, K),
                given["k"], given["q"], o, D=w["D"][:, None].expand(H, V), dt_bias=w["dt_bias"][:, None].expand(H, V),
                dt_softplus=True, state_batch_indices=self.of(rows), **more,  # type: ignore[arg-type]
            )  # fmt: skip
            outputs[layer, tokens] = o.flatten(0, 1)
        for row, n, kept in zip(rows, t, accepted, strict=True):
            if row != PADDING:
                slot = self.at[row]
                count = int(self.count[slot])
                flush = count + n > self.layout.W
                self.start[slot] = (int(self.start[slot]) + flush * count) % self.layout.R
                self.count[slot] = kept if flush else count + kept
        return outputs.unflatten(1, (len(rows), T))

    def states(self, requests: Sequence[int]) -> tuple[Tensor, Sequence[int]]:
        """The checkpoints, which lack the rings' tokens."""
        slots = self.of(requests).long()
        return self.state[:, slots].float(), self.count[slots].tolist()

    def snapshot(self, request: int, back: int) -> Tensor:
        """All layers by one call, into a slot that nobody has."""
        slot, to, L = self.at[request], 0, self.L
        A = [w["A"] for w in self.w]
        layers = (self.state, self.x_cache, self.B_cache, self.dt_cache)
        tables = [
            torch.tensor(values, dtype=torch.int64, device=self.device)
            for x in layers
            for values in ([one.data_ptr() for one in x], [x.stride(1)] * L)
        ]
        pointers = torch.tensor([one.data_ptr() for one in A if one is not None], dtype=torch.int64, device=self.device)
        none = torch.zeros(L, dtype=torch.int64, device=self.device)
        source, target = (torch.full((L, 1), one, dtype=torch.int32, device=self.device) for one in (slot, to))
        layout = self.layout
        replayssm_materialize(
            *tables, pointers, none, none, source, target, self.start[slot : slot + 1].clone(),
            self.count[slot : slot + 1] - back, self.tensor([0]), state_dtype=self.state.dtype, input_dtype=layout.act,
            matrixA_dtype=torch.float32, dim=layout.V, dstate=layout.K, num_heads=layout.H,
            heads_per_group=layout.H // layout.G, max_window=layout.W, ring_buffer_len=layout.R,
        )  # fmt: skip
        return self.state[:, to].float().clone()


def Shim(problem: Problem) -> Implementation:
    """The calls of the problem's family."""
    row = problem.layout.recurrence
    if row not in (MAMBA2, GDN, KDA, KDA_SAFE):
        raise NotImplementedError(f"FlashInfer has no {row.name} calls")
    return Ring(problem) if row == MAMBA2 else Calls(problem)
