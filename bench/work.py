"""What is measured: the served models' layers, and the same weights, states and tokens for every contestant."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from replayssm import Layout
from replayssm.models import MODELS as SERVED

# Twice an H200's L2: state that a step does not touch again before the next one comes from memory, as in a model.
COLD_BYTES = 128 * 2**20
# Probability that a draft token stays, given that all before it did.
ACCEPTANCE = 0.75
# Layers that are measured.
MODELS = {
    name: SERVED[name] for name in ("Qwen3.5-4B", "Kimi-Linear-48B-A3B", "Nemotron-3-Super-120B-A12B", "Nemotron-3-Nano-4B")
}


class Work:
    """One measurement's requests: weights, starting states and tokens, drawn from one seed, so equal for every contestant.

    Args:
        layout: of every layer.
        layers: how many share one plan.
        B: requests of a step.
        T: tokens of a request and step.
        groups: sets of B requests that take turns, so that small batches do not find their states in the L2.
        steps: how many steps are run, of which ``accepted`` says what stays.
        entries: different token sets; a timing has one per layer, a check one per step.
        staggered: whether requests start at different points of their window.

    Attributes:
        w: A, dt_bias [H] or [H, K], D [H] or None; fp32 tensors of bf16 values, which every contestant can hold exactly.
        x: per name of ``ReplayState.step``, [entries, B T, ...] in the activation dtype.
        slots: [groups, B] int32.
        accepted: [steps, groups, B] int32, tokens that stay: the first, and each draft after it with probability 0.75 until
            the first that does not.
    """

    def __init__(
        self,
        layout: Layout,
        layers: int,
        B: int,
        T: int = 1,
        groups: int = 1,
        steps: int = 1,
        entries: int | None = None,
        staggered: bool = True,
        device: torch.device | str = "cuda",
        seed: int = 0,
    ) -> None:
        self.layout, self.layers, self.B, self.T, self.groups = layout, layers, B, T, groups
        self.steps, self.staggered, self.device, self.seed = steps, staggered, torch.device(device), seed
        self.slots = torch.arange(groups * B, device=device, dtype=torch.int32).view(groups, B)
        generator = torch.Generator(device).manual_seed(seed)
        row, H, G, V, K = layout.recurrence, layout.H, layout.G, layout.V, layout.K

        def rand(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=generator, device=device)

        self.w: dict[str, Tensor | None] = {
            "A": -torch.exp(rand(H) * 3 - 2),
            "dt_bias": (rand(*((H, K) if row.per_channel else (H,))) * 2 - 3).bfloat16().float(),
            "D": None if row.delta else rand(H).bfloat16().float(),
        }
        self.entries = layers if entries is None else entries
        shapes = {"q": (G, K), "k": (G, K), "v": (H, V), "b": (H,)}
        if row.stores_g:
            shapes["a"] = (H, K) if row.per_channel else (H,)

        def tokens(name: str, shape: tuple[int, ...]) -> Tensor:
            x = torch.randn(self.entries, B * T, *shape, generator=generator, device=device)
            keep_states_small = K**-0.5 if name == "k" and not row.normalize else 1.0
            return (x * keep_states_small).to(layout.act)

        self.x = {name: tokens(name, shape) for name, shape in shapes.items()}
        stays = rand(steps, groups, B, T - 1) < ACCEPTANCE
        self.accepted = 1 + stays.cumprod(-1).sum(-1, dtype=torch.int32)

    @property
    def safe_gate(self) -> dict[str, float]:
        """The safe decay's lowest g under the name that all peers give it; nothing for other decays."""
        row = self.layout.recurrence
        return {"lower_bound": row.lower_bound} if row.decay == "safe" else {}

    def states_of(self, layer: int) -> Tensor:
        """One layer's starting states [groups B, H, V, K] in fp32, values that the checkpoint's format holds."""
        layout, one = self.layout, replace(self.layout.format, stochastic=False)
        generator = torch.Generator(self.device).manual_seed(self.seed + 1 + layer)
        shape = (self.groups * self.B, layout.H, layout.V, layout.K)
        x = torch.randn(shape, generator=generator, device=self.device) * layout.K**-0.5
        return one.decode(one.encode(x))

    def states(self) -> Tensor:
        """All layers' [layers, groups B, H, V, K] in the checkpoint's dtype, as peers hold them: they know no scales."""
        layout = self.layout
        if layout.format.block is not None:
            raise NotImplementedError(f"state {layout.state!r}: expected a format without scales")
        shape = (self.layers, self.groups * self.B, layout.H, layout.V, layout.K)
        states = torch.empty(shape, dtype=layout.format.dtype, device=self.device)
        for layer in range(self.layers):
            states[layer] = self.states_of(layer)
        return states

    def entry(self, e: int) -> dict[str, Tensor]:
        """One token set, [B T, ...] each."""
        return {name: x[e] for name, x in self.x.items()}

    @cached_property
    def phases(self) -> Tensor:
        """[groups, B] where in its window each request starts: spread evenly, or 0 for all."""
        at = torch.arange(self.groups * self.B, device=self.device).view(self.groups, self.B)
        return at if self.staggered else torch.zeros_like(at)


def snapshots(work: Work) -> list[Tensor]:
    """Per layer, a state per request and token [B, T, H, V, K]; layers share buffers where fewer are cold already."""
    layout = work.layout
    shape = (work.B, work.T, layout.H, layout.V, layout.K)
    buffers = min(work.layers, max(1, -(-COLD_BYTES // (layout.state_bytes * work.B * work.T))))
    made = [torch.empty(shape, dtype=layout.format.dtype, device=work.device) for _ in range(buffers)]
    return [made[layer % buffers] for layer in range(work.layers)]


def cold_groups(layout: Layout, layers: int, B: int) -> int:
    """How many sets of B requests take turns so that a state returns only after COLD_BYTES of others."""
    return max(1, -(-COLD_BYTES // ((layout.copy_bytes or layout.state_bytes) * layers * B)))
