"""Drives a ReplayState and the fp64 oracle over the same tokens."""

from __future__ import annotations

import os

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


class Requests:
    """Some live requests of one layer in a ReplayState, every token they took, and the oracle's view of them.

    Rows of the state that must not be read hold NaN: unused slots, ring rows before they are written, padding rows' inputs.
    """

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
        self.state = ReplayState(
            layout, 1, total, DEVICE, backend, A=A, buffers=buffers, max_rows=max(8, total + 4), debug=debug
        )
        self.step_weights = {n: None if x is None else x.to(DEVICE) for n, x in self.w.items() if not (derived and n == "A")}
        if poison:
            for x in self.state.buffers:
                if x is not None:
                    x.fill_(float("nan"))
        self.initial = torch.randn(len(slots), layout.H, layout.V, layout.K, generator=self.generator)
        self.initial = layout.format.decode(layout.format.encode(self.initial * layout.K**-0.5))
        self.state.load(self.tensor(slots), self.initial[None].to(DEVICE))
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


def relative_worst(x: Tensor, reference: Tensor, rounding: float = 0.0) -> float:
    """Largest |x - reference| - rounding |reference| over the rms of the reference; NaN stays NaN and so fails any bound."""
    x, reference = x.double(), reference.double()
    excess = (x - reference).abs() - rounding * reference.abs()
    return float(excess.max() / reference.square().mean().sqrt().clamp(min=1e-30))
