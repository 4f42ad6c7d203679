"""The recurrence every family shares, and the families as rows of one table.

Per value head and token, with state ``s`` [V, K]:

    s' = s * exp(g)                        g: natural-log decay <= 0, one per head or one per channel of K
    u  = beta * (v - [delta] s' k)         k, q: L2-normalised and scaled where the row says so
    s  = s' + u k^T
    o  = s q                               then + D v and * silu(z) where given

Source: Mamba-2 (Dao & Gu 2024), Gated DeltaNet (Yang et al. 2024), Kimi Delta Attention (Kimi Team 2025).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

L2_EPS = 1e-6
SOFTPLUS_LINEAR_ABOVE = 20.0
# A readout's cumulative decay holds each token's g no lower than this: what is older then weighs less than fp32 resolves.
READOUT_G_FLOOR = -20.0

Beta = Literal["softplus", "sigmoid", "one", "ready"]
Decay = Literal["derived", "softplus", "safe", "ready"]


@dataclass(frozen=True)
class Recurrence:
    """One row of the table: which of the recurrence's parts a family uses.

    Attributes:
        name: the row's name in messages and results.
        delta: whether ``u`` subtracts what the state already holds for ``k`` (the delta rule).
        per_channel: whether ``g`` has one value per channel of K (else one per head).
        beta: how the input ``b`` becomes beta: ``softplus(b + dt_bias)``, ``sigmoid(b)``, ``1``, or ``b`` itself ("ready").
        decay: how the input ``a`` becomes g: ``A * beta`` ("derived", takes no ``a`` and stores no g),
            ``A * softplus(a + dt_bias)``, ``lower_bound * sigmoid(-A * (a + dt_bias))`` ("safe"), or ``a`` itself ("ready").
        normalize: whether q and k are divided by ``sqrt(|x|^2 + 1e-6)``.
        scale: factor on q; None means ``K ** -0.5`` where q is normalised and 1 elsewhere.
        lower_bound: lowest g of the "safe" decay.
    """

    name: str
    delta: bool
    per_channel: bool
    beta: Beta
    decay: Decay
    normalize: bool
    scale: float | None = None
    lower_bound: float = 0.0

    def __post_init__(self) -> None:
        for name, known in (("beta", get_args(Beta)), ("decay", get_args(Decay))):
            if getattr(self, name) not in known:
                raise ValueError(f"recurrence {self.name}: {name}: expected one of {list(known)}, got {getattr(self, name)!r}")
        if self.decay == "derived" and (self.per_channel or self.beta == "one"):
            raise NotImplementedError(
                f"recurrence {self.name}: decay 'derived' is A * beta, one per head; got per_channel={self.per_channel}, "
                f"beta={self.beta!r}; supported with per-channel decay: 'softplus', 'safe', 'ready'"
            )
        if self.beta == "softplus" and (self.per_channel or self.decay in ("softplus", "safe")):
            raise NotImplementedError(
                f"recurrence {self.name}: beta 'softplus' takes dt_bias [H] for itself; got decay={self.decay!r}, "
                f"per_channel={self.per_channel}; supported with it: 'derived' or 'ready', one per head"
            )
        if self.decay == "safe" and not self.lower_bound < 0:
            raise ValueError(f"recurrence {self.name}: lower_bound: expected < 0 for the safe decay, got {self.lower_bound}")

    @property
    def biased(self) -> bool:
        """Whether a gate adds dt_bias."""
        return "softplus" in (self.beta, self.decay) or self.decay == "safe"

    @property
    def stores_g(self) -> bool:
        """Whether the ring holds g; a derived g is A * beta and is not stored."""
        return self.decay != "derived"

    def q_scale(self, K: int) -> float:
        """The factor on q for a state dimension of K."""
        return self.scale if self.scale is not None else (K**-0.5 if self.normalize else 1.0)


MAMBA2 = Recurrence("mamba2", delta=False, per_channel=False, beta="softplus", decay="derived", normalize=False)
GDN = Recurrence("gdn", delta=True, per_channel=False, beta="sigmoid", decay="softplus", normalize=True)
KDA = Recurrence("kda", delta=True, per_channel=True, beta="sigmoid", decay="softplus", normalize=True)
KDA_SAFE = Recurrence("kda_safe", delta=True, per_channel=True, beta="sigmoid", decay="safe", normalize=True, lower_bound=-5.0)
GLA = Recurrence("gla", delta=False, per_channel=True, beta="one", decay="ready", normalize=False)
FAMILIES = {row.name: row for row in (MAMBA2, GDN, KDA, KDA_SAFE, GLA)}


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), and x itself above 20."""
    return torch.where(x > SOFTPLUS_LINEAR_ABOVE, x, torch.log1p(torch.exp(x.clamp(max=SOFTPLUS_LINEAR_ABOVE))))


def gates(
    row: Recurrence, b: Tensor | None, a: Tensor | None, A: Tensor | None, dt_bias: Tensor | None, v: Tensor
) -> tuple[Tensor, Tensor]:
    """beta [N, H] and g [N, H, KG] of N tokens, in the dtype of ``v`` (fp32 for the backend, fp64 for the oracle).

    Args:
        b: [N, H], the input of beta; None where beta is 1.
        a: [N, H] or [N, H, K], the input of g; None where g is derived.
        A: [H], ``-exp(A_log)``; None where g is ready.
        dt_bias: [H] or [H, K]; added to the input of whichever softplus or safe gate the row has.
        v: [N, H, V], taken for its shape, dtype and device alone.
    """
    bias = 0.0 if dt_bias is None else dt_bias.to(v.dtype)
    if row.beta == "one":
        beta = v.new_ones(v.shape[:2])
    else:
        b = b.to(v.dtype)
        beta = {"softplus": lambda: softplus(b + bias), "sigmoid": lambda: torch.sigmoid(b), "ready": lambda: b}[row.beta]()
    if row.decay == "derived":
        return beta, (A.to(v.dtype) * beta)[..., None]
    a = a.to(v.dtype)
    if row.decay == "ready":
        g = a
    else:
        A = A.to(v.dtype)[:, None] if row.per_channel else A.to(v.dtype)
        g = A * softplus(a + bias) if row.decay == "softplus" else row.lower_bound * torch.sigmoid(-A * (a + bias))
    return beta, g if row.per_channel else g[..., None]


def unit(row: Recurrence, x: Tensor) -> Tensor:
    """x / sqrt(|x|^2 + 1e-6) over the last dimension where the row normalises, else x."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS) if row.normalize else x


def epilogue(o: Tensor, v: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    """o + D v, then * silu(z): o, v, z [N, H, V], D [H]."""
    if D is not None:
        o = o + D.to(o.dtype)[:, None] * v
    return o if z is None else o * torch.nn.functional.silu(z.to(o.dtype))
