"""FlashInfer's tensors and its callers' bookkeeping, driven beside the fp64 oracle."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from replayssm import MAMBA2, reference
from replayssm.integrations import flashinfer as fi
from tests.harness import DEVICE, relative_worst

WEIGHTS = ("A", "D", "dt_bias")


def expanded(x: Tensor, *dims: int) -> Tensor:
    """One value a head, as FlashInfer takes it: stride 0 over the dims that follow."""
    return x[(..., *[None] * len(dims))].expand(*x.shape, *dims)


class Mamba:
    """Requests of one Mamba-2 layer in a caller's pool, T tokens a step of which it accepts some."""

    def __init__(self, T: int, window: int, live: list[int], seed: int = 0, dtype=torch.float32, state=torch.float32, **sizes):
        self.H, self.G, self.V, self.K = (sizes.get(n, d) for n, d in zip("HGVK", (4, 2, 16, 32), strict=True))
        self.T, self.L, self.live, self.S = T, window + T, live, max(live) + 2
        self.g, self.random, self.dtype = torch.Generator().manual_seed(seed), random.Random(seed), dtype
        S, H, G, V, K, L = self.S, self.H, self.G, self.V, self.K, self.L
        nan = float("nan")
        self.pool = {
            "state": torch.full((S, H, V, K), nan).to(state),
            "x_cache": torch.full((S, H, L, V), nan, dtype=dtype),
            "B_cache": torch.full((S, G, L, K), nan, dtype=dtype),
            "dt_cache": torch.full((S, H, L), nan),
        }
        self.pool["state"][live] = (self.randn(len(live), H, V, K) * K**-0.5).to(state)
        self.start, self.prev = (torch.zeros(S, dtype=torch.int32) for _ in range(2))
        self.start[live] = torch.tensor([self.random.randrange(L) for _ in live], dtype=torch.int32)
        self.weights = {"A": -torch.exp(self.randn(H)), "D": self.randn(H), "dt_bias": self.randn(H) - 2}
        self.exact = {slot: self.pool["state"][slot].double() for slot in live}
        self.flushes = 0

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.g, device="cpu").to(DEVICE)

    def inputs(self, rows: int, T: int) -> dict[str, Tensor]:
        """x, dt, B, C and z of [rows, T] tokens."""
        H, G, V, K = self.H, self.G, self.V, self.K
        x = {"x": (H, V), "B": (G, K), "C": (G, K), "z": (H, V)}
        x = {name: self.randn(rows, T, *shape).to(self.dtype) for name, shape in x.items()}
        return x | {"B": (x["B"].float() * K**-0.5).to(self.dtype), "dt": self.randn(rows, T, H)}

    def as_given(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        """Weights and gates expanded, as FlashInfer takes them."""
        V, K, w = self.V, self.K, self.weights
        return x | {
            "dt": expanded(x["dt"], V),
            "A": expanded(w["A"], V, K),
            "D": expanded(w["D"], V),
            "dt_bias": expanded(w["dt_bias"], V),
        }

    def oracle(self, slot: int, x: dict[str, Tensor], row: int, n: int) -> tuple[Tensor, Tensor]:
        """Outputs and state after a row's first n tokens."""
        if not n:
            return torch.empty(0), self.exact[slot]
        token = {ours: x[theirs][row, :n] for ours, theirs in zip("qkvbz", ("C", "B", "x", "dt", "z"), strict=True)}
        return reference.decode(MAMBA2, self.exact[slot], **token, **self.weights)

    def bookkeeping(self, slots: list[int], t: list[int], accepted: list[int]) -> list[bool]:
        """What FlashInfer leaves to its caller: who flushed, and the cursors after the step."""
        flushed = []
        for slot, n, kept in zip(slots, t, accepted, strict=True):
            flush = slot >= 0 and int(self.prev[slot]) + n > self.L - self.T
            flushed.append(flush)
            if flush:
                self.start[slot] = (self.start[slot] + self.prev[slot]) % self.L
                self.prev[slot] = kept
            elif slot >= 0:
                self.prev[slot] += kept
        return flushed

    def step(self, slots: list[int], bound: float, state_bound: float, pad: int = -1, packed: bool = False, **kwargs) -> None:
        """One call, its outputs against the oracle; where a row flushes, its state too."""
        T, batch = self.T, len(slots)
        t = [self.random.randint(1, T) if packed else T for _ in slots]
        x = self.inputs(batch, T)
        for row, slot in enumerate(slots):
            if slot < 0:
                for one in x.values():
                    one[row] = float("nan")
        given = x
        if packed:
            mine = [(row, i) for row, n in enumerate(t) for i in range(n)]
            given = {name: torch.stack([one[row, i] for row, i in mine])[None] for name, one in x.items()}
            kwargs |= {"cu_seqlens": torch.tensor([sum(t[:i]) for i in range(batch + 1)], dtype=torch.int32), "max_seqlen": T}
        out = torch.full(given["x"].shape, 9.0, dtype=self.dtype)
        indices = torch.tensor([pad if slot < 0 else slot for slot in slots], dtype=torch.int32)
        returned = fi.checkpointing_ssu(
            **self.pool,
            ring_start=self.start,
            prev_num_accepted_tokens=self.prev,
            **self.as_given(given),
            out=out,
            dt_softplus=True,
            state_batch_indices=indices,
            pad_slot_id=pad,
            **kwargs,
        )
        assert returned is out
        if packed:
            rows = torch.zeros(batch, T, self.H, self.V)
            for (row, i), one in zip(mine, out[0], strict=True):
                rows[row, i] = one
            out = rows
        accepted = [self.random.randint(0, n) if T > 1 else 1 for n in t]
        flushed = self.bookkeeping(slots, t, accepted)
        for row, slot in enumerate(slots):
            if slot < 0:
                assert not out[row].any()
                continue
            o, _ = self.oracle(slot, x, row, t[row])
            assert relative_worst(out[row, : t[row]], o) < bound
            if flushed[row]:
                self.flushes += 1
                assert relative_worst(self.state(slot, kwargs.get("state_scale")), self.exact[slot]) < state_bound
            self.exact[slot] = self.oracle(slot, x, row, accepted[row])[1]

    def state(self, slot: int, scale: Tensor | None) -> Tensor:
        state = self.pool["state"][slot].float()
        return state if scale is None else state * scale[slot][..., None]
