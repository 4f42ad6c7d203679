"""Drives a ReplayState and the fp64 oracle over the same tokens."""

from __future__ import annotations

import os
import random

import pytest
import torch
from torch import Tensor

from replayssm import Layout, ReplayState, reference
from tests.cases import inputs, weights

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
# On a GPU the kernels are compiled; on a CPU they run where the interpreter was asked for.
BACKENDS = ["torch", pytest.param("triton", marks=pytest.mark.skipif(
    not GPU and os.environ.get("TRITON_INTERPRET") != "1", reason="kernels need a GPU or TRITON_INTERPRET=1"))]  # fmt: skip
BOUND = 3e-5  # worst element over the rms: fp32 sums of up to 256 products and a window of 16 tokens


class Requests:
    """Some live requests of one layer in a ReplayState, every token they took, and the oracle's view of them.

    Rows of the state that must not be read hold NaN: unused slots, ring rows before they are written, padding rows' inputs.
    """

    kind = ReplayState

    def __init__(
        self,
        layout: Layout,
        slots: list[int],
        backend: str,
        seed: int = 0,
        poison: bool = True,
        buffers=None,
        z: bool = False,
        state_slots: int = 0,
        debug: bool = True,
    ):
        self.layout, self.live, self.z = layout, slots, z
        self.generator = torch.Generator().manual_seed(seed)
        self.w = weights(layout, self.generator)
        derived = layout.recurrence.decay == "derived"
        A = self.w["A"][None].to(DEVICE) if derived else None
        total = state_slots or max(slots, default=0) + 2
        self.state = self.kind(layout, 1, total, DEVICE, backend, A=A, buffers=buffers, max_rows=max(8, total + 4), debug=debug)
        self.step_weights = {n: None if x is None else x.to(DEVICE) for n, x in self.w.items() if not (derived and n == "A")}
        if poison:
            for x in self.state.buffers:
                if x is not None:
                    fill_nan(x)
        initial = torch.randn(len(slots), layout.H, layout.V, layout.K, generator=self.generator) * layout.K**-0.5
        self.state.load(self.tensor(slots), initial[None].to(DEVICE))
        self.initial = self.state.materialize(self.tensor(slots))[0].cpu()  # as stored
        self.tokens: dict[int, list[dict[str, Tensor]]] = {slot: [] for slot in slots}
        self.outputs: dict[int, list[Tensor]] = {slot: [] for slot in slots}

    def tensor(self, values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    def draw(self, slots: list[int]) -> dict[str, Tensor]:
        """Random tokens [B, ...], NaN in padding rows."""
        x = inputs(self.layout, len(slots), self.generator, z=self.z)
        for i, slot in enumerate(slots):
            if slot < 0:
                for one in x.values():
                    one[i] = float("nan")
        return x

    def decode(self, slots: list[int], force: list[int] | None = None, x: dict[str, Tensor] | None = None) -> Tensor:
        """One plain decode step of these slots, some of them padding (< 0)."""
        x = self.draw(slots) if x is None else x
        plan = self.state.plan(self.tensor(slots), force=None if force is None else self.tensor(force))
        o = self.state.step(0, plan, **{n: one.to(DEVICE) for n, one in x.items()}, **self.step_weights).cpu()
        self.state.commit(plan)
        for i, slot in enumerate(slots):
            if slot >= 0:
                self.tokens[slot].append({n: one[i : i + 1] for n, one in x.items()})
                self.outputs[slot].append(o[i])
            else:
                assert not o[i].any(), "padding rows' outputs must be zero"
        return o

    def oracle(self, slot: int, tokens: int | None = None, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        """Outputs and state after the slot's first tokens (default: all), token by token from its initial state."""
        rows = self.tokens[slot][:tokens]
        initial = self.initial[self.live.index(slot)]
        if not rows:
            return torch.empty(0), initial.to(dtype)
        joined = {n: torch.cat([r[n] for r in rows]) for n in rows[0]}
        return reference.decode(self.layout.recurrence, initial, **joined, **self.w, dtype=dtype)

    def check(self, bound: float, output_rounding: float = 0.0, state_rounding: float = 0.0) -> None:
        """Every request's outputs and materialized state within `bound` of the oracle's rms, plus an element's rounding."""
        states = self.state.materialize(self.tensor(self.live))[0].cpu()
        for i, slot in enumerate(self.live):
            o, s = self.oracle(slot)
            if self.outputs[slot]:
                error = relative_worst(torch.stack(self.outputs[slot]), o, output_rounding)
                assert error < bound, f"slot {slot}: output error {error:.2e}"
            error = relative_worst(states[i], s, state_rounding)
            assert error < bound, f"slot {slot}: state error {error:.2e}"


class Speculation:
    """Requests that take several tokens a step, in a ReplayState and in the fp64 ring; NaN wherever nothing may be read.

    A row's tokens are a chain, or with ``parents`` a tree; then ``paths`` are the tokens that may stay.
    """

    kind = ReplayState

    def __init__(self, case, backend: str, slots: list[int], W: int, T: int, seed: int = 0, **kwargs):
        self.layout = case.layout(W=W, T_max=T, **kwargs)
        self.live, self.T, self.random = slots, T, random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        w = weights(self.layout, self.generator)
        derived = self.layout.recurrence.decay == "derived"
        A = w["A"][None].to(DEVICE) if derived else None
        total = max(slots) + 2
        self.state = self.kind(self.layout, 1, total, DEVICE, backend, A=A, max_rows=total + 4, debug=True)
        self.weights = {name: x if x is None else x.to(DEVICE) for name, x in w.items() if not (derived and name == "A")}
        self.ring = reference.Ring(self.layout.recurrence, W, self.layout.R, self.layout.phases, **w)
        for x in self.state.buffers:
            if x is not None:
                fill_nan(x)
        H, V, K = self.layout.H, self.layout.V, self.layout.K
        initial = torch.randn(len(slots), H, V, K, generator=self.generator) * K**-0.5
        self.state.load(self.tensor(slots), initial[None].to(DEVICE))
        for slot, one in zip(slots, initial, strict=True):
            self.ring.load(slot, one)

    def tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    def draw(self, rows: int, t: list[int]) -> dict[str, Tensor]:
        """Padded tokens [rows T, ...], NaN beyond each row's t."""
        x = inputs(self.layout, rows * self.T, self.generator)
        for i, n in enumerate(t):
            for one in x.values():
                one[i * self.T + n : (i + 1) * self.T] = float("nan")
        return x

    def table(self, rows: list[list[int]] | None, filler: int) -> Tensor | None:
        """Rows filled up to T_max, as one tensor."""
        return None if rows is None else self.tensor([[*row, *[filler] * (self.T - len(row))] for row in rows])

    def step(self, slots, t, accepted, force=None, x=None, packed=False, parents=None, paths=None) -> Tensor:
        """One step; returns padded outputs [rows T, H, V] after checking all that the oracle has as numbers."""
        t = [n if slot >= 0 else 0 for slot, n in zip(slots, t, strict=True)]
        x = self.draw(len(slots), t) if x is None else x
        options = {"force": None if force is None else self.tensor(force), "parents": self.table(parents, 99)}
        rows = [i * self.T + j for i, n in enumerate(t) for j in range(n)]
        if packed:
            cu_seqlens = self.tensor([sum(t[:i]) for i in range(len(t) + 1)])
            plan = self.state.plan(self.tensor(slots), cu_seqlens=cu_seqlens, **options)
            given = {name: one[rows].to(DEVICE) for name, one in x.items()}
        else:
            plan = self.state.plan(self.tensor(slots), t=self.tensor(t), **options)
            given = {name: one.to(DEVICE) for name, one in x.items()}
        o = self.state.step(0, plan, **given, **self.weights).cpu()
        for _ in range(2):  # the second is harmless
            self.state.commit(plan, self.tensor(accepted), self.table(paths, -1))
        if packed:
            padded = torch.zeros(len(slots) * self.T, *o.shape[1:], dtype=o.dtype)
            padded[rows] = o
            o = padded
        for i, slot in enumerate(slots):
            mine = o[i * self.T : (i + 1) * self.T]
            assert not mine[t[i] :].any(), "rows that no token fills must be zero"
            if slot < 0:
                continue
            tokens = [{name: one[[i * self.T + j]] for name, one in x.items()} for j in range(t[i])]
            expected = self.ring.step(slot, tokens, bool(force and force[i]), parents and parents[i])
            kept = paths[i][: accepted[i]] if paths else list(range(accepted[i]))
            if t[i]:
                numbers = expected.flatten(1).isfinite().all(1)
                assert numbers[kept].all(), "what a kept token sees is spoiled"
                error = relative_worst(mine[: t[i]][numbers], expected[numbers]) if numbers.any() else 0.0
                assert error < BOUND, f"slot {slot}: output error {error:.2e}"
            self.ring.commit(slot, accepted[i], kept)
            cursors, theirs = self.state.cursors, self.ring.slots[slot]
            assert (int(cursors.start[slot]), int(cursors.count[slot])) == (theirs.start, theirs.count)
        return o

    def check(self) -> None:
        """Every request's exact state."""
        states = self.state.materialize(self.tensor(self.live))[0].cpu()
        for state, slot in zip(states, self.live, strict=True):
            error = relative_worst(state, self.ring.materialize(slot))
            assert error < BOUND, f"slot {slot}: state error {error:.2e}"

    def walk(self, steps: int) -> None:
        """Random drafts, acceptance, forced flushes, order of rows, padding; padded and packed style in turn."""
        for i in range(steps):
            slots = self.random.sample(self.live, self.random.randint(1, len(self.live))) + [-1] * (i % 2)
            self.random.shuffle(slots)
            t = [self.random.randint(0, self.T) for _ in slots]
            accepted = [self.random.randint(0, n) for n in t]
            force = [int(self.random.random() < 0.1) for _ in slots]
            self.step(slots, t, accepted, force, packed=i % 3 == 0)
        self.check()


def rows(x: Tensor) -> Tensor:
    """A tensor's bytes, to compare and copy any dtype."""
    return x if x.dtype.itemsize > 1 else x.view(torch.uint8)


def sliced(layout: Layout, x: dict[str, Tensor | None], part: int, parts: int) -> dict[str, Tensor | None]:
    """What a rank sees of tokens or weights of all heads."""
    found = {}
    for name, one in x.items():
        n = layout.G if name in ("q", "k") else layout.H
        dim = 1 if name in ("q", "k", "v", "a", "b") else 0
        size = max(1, n // parts)
        found[name] = None if one is None else one.narrow(dim, part * n // parts, size).contiguous()
    return found


def fill_nan(x: Tensor) -> None:
    """NaN in every element; integers, which have none, are read with a scale that is NaN."""
    x.fill_(float("nan") if x.is_floating_point() else 0x7F)


def relative_worst(x: Tensor, reference: Tensor, rounding: float = 0.0) -> float:
    """Largest |x - reference| - rounding |reference| over the rms of the reference; NaN stays NaN and so fails any bound."""
    x, reference = x.double(), reference.double()
    excess = (x - reference).abs() - rounding * reference.abs()
    return float(excess.max() / reference.square().mean().sqrt().clamp(min=1e-30))
