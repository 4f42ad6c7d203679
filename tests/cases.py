"""Geometries and inputs of the tests: the served models with their heads reduced, and awkward sizes, each with its why."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from replayssm import GDN, GLA, KDA, KDA_SAFE, MAMBA2, Layout, Recurrence


@dataclass(frozen=True)
class Case:
    """A layer's sizes and why they are here."""

    name: str
    recurrence: Recurrence
    H: int
    G: int
    V: int
    K: int
    why: str

    def layout(self, **kwargs) -> Layout:
        """The layout of this case; fp32 activations unless told, so that errors are the kernels' own."""
        return Layout(self.recurrence, self.H, self.G, self.V, self.K, **{"act": torch.float32} | kwargs)

    def __str__(self) -> str:
        return self.name


# V and K are the models' own; H and G are cut to what the interpreter can run, their ratio kept where it fits.
MODELS = [
    Case("nemotron-3-nano-4b", MAMBA2, 12, 1, 80, 128, "H/G = 12, V = 80 is no power of two"),
    Case("nemotron-3-nano-30b", MAMBA2, 8, 1, 64, 128, "H/G = 8"),
    Case("nemotron-3-super", MAMBA2, 16, 1, 64, 128, "H/G = 16"),
    Case("nemotron-3-ultra", MAMBA2, 2, 1, 64, 128, "H/G = 32, cut to 2"),
    Case("qwen3.5-4b", GDN, 4, 2, 128, 128, "H/G = 2, as qwen3-next-80b"),
    Case("qwen3.5-122b", GDN, 4, 1, 128, 128, "H/G = 4, as qwen3.5-397b"),
    Case("qwen3.5-27b", GDN, 3, 1, 128, 128, "H/G = 3"),
    Case("kimi-linear-48b", KDA, 2, 2, 128, 128, "per-channel decay, H = G"),
    Case("kimi-k3", KDA_SAFE, 3, 3, 128, 128, "safe gate, lower bound -5; odd H; as glm-5.3-flash"),
]
AWKWARD = [
    Case("v256-k256", MAMBA2, 2, 1, 256, 256, "Falcon-H1, Plamo: the largest tile"),
    Case("gdn-v80-k48", GDN, 2, 1, 80, 48, "neither dimension a power of two"),
    Case("kda-v48-k80", KDA, 2, 2, 48, 80, "per channel, K no power of two"),
    Case("gla", GLA, 4, 2, 32, 64, "per channel without the delta rule, beta = 1"),
    Case("smallest", GDN, 1, 1, 16, 16, "one head, one tile"),
]
FAMILY = {
    case.recurrence.name: case
    for case in (
        Case("mamba2", MAMBA2, 2, 1, 32, 32, "small"),
        Case("gdn", GDN, 2, 1, 32, 32, "small"),
        Case("kda", KDA, 2, 2, 32, 32, "small"),
        Case("kda_safe", KDA_SAFE, 2, 2, 32, 32, "small"),
        Case("gla", GLA, 2, 1, 32, 32, "small"),
    )
}
READY = {
    name: dataclasses.replace(
        c, name=f"{name}-ready", recurrence=dataclasses.replace(c.recurrence, beta="ready", decay="ready")
    )
    for name, c in FAMILY.items()
    if name in ("gdn", "kda")
}


def weights(layout: Layout, generator: torch.Generator, device: torch.device | str = "cpu") -> dict[str, Tensor | None]:
    """A, dt_bias and D of one layer, as the family takes them: decays from nearly none to strong."""
    row, H = layout.recurrence, layout.H

    def rand(*shape):
        return torch.rand(*shape, generator=generator)

    bias = (H, layout.K) if row.per_channel else (H,)
    w = {"A": -torch.exp(rand(H) * 3 - 2), "dt_bias": rand(*bias) * 2 - 3, "D": None}
    if row.decay == "ready":
        w["A"] = None
    if row.decay == "ready" and row.beta in ("ready", "one"):
        w["dt_bias"] = None
    if not row.delta and not row.per_channel:
        w["D"] = rand(H)
    return {name: x if x is None else x.to(device) for name, x in w.items()}


def inputs(
    layout: Layout, N: int, generator: torch.Generator, device: torch.device | str = "cpu", z: bool = False
) -> dict[str, Tensor]:
    """q, k, v and the gates of N tokens, in the layout's activation dtype (ready gates in fp32)."""
    row, H, G, V, K = layout.recurrence, layout.H, layout.G, layout.V, layout.K

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    x = {"q": randn(N, G, K), "k": randn(N, G, K), "v": randn(N, H, V)}
    if not row.normalize:  # keep states of order one without a norm
        x["k"] = x["k"] * K**-0.5
    gate_shape = (N, H, K) if row.per_channel else (N, H)
    if row.beta != "one":
        x["b"] = torch.sigmoid(randn(N, H)) if row.beta == "ready" else randn(N, H)
    if row.stores_g:
        x["a"] = -torch.nn.functional.softplus(randn(*gate_shape) - 3) if row.decay == "ready" else randn(*gate_shape)
    if z:
        x["z"] = randn(N, H, V)
    ready = {"b": row.beta == "ready", "a": row.decay == "ready"}
    return {name: t.to(torch.float32 if ready.get(name) else layout.act).to(device) for name, t in x.items()}


def relative(x: Tensor, reference: Tensor) -> float:
    """|x - reference| / |reference| over all elements; NaN stays NaN and so fails any bound."""
    x, reference = x.double().cpu(), reference.double().cpu()
    return float((x - reference).norm() / reference.norm().clamp(min=1e-30))
