"""Which transformers modules hold a recurrence, and how their calls read in the core's words."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from types import CellType, FunctionType

import torch
from torch import Tensor, nn

from ... import GDN, KDA, MAMBA2, Recurrence
from .cache import ReplayedState


def _delta_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: ReplayedState,
    cu_seqlens: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, ReplayedState]:
    """One token of Gated DeltaNet or KDA: q, k, v [B, 1, H, ...], g and beta as the model computed them."""
    if cu_seqlens is not None:
        raise NotImplementedError("cu_seq_lens_q: packed sequences are not supported in decoding; pass a padded batch")
    layout = initial_state.layout
    shared = layout.H // layout.G  # the model repeated q and k for every value head of a group
    o = initial_state.step(q=query[:, 0, ::shared], k=key[:, 0, ::shared], v=value[:, 0], b=beta[:, 0], a=g[:, 0])
    return o[:, None], initial_state


def _mamba2_step(
    state: ReplayedState,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    **kwargs,
) -> Tensor:
    """One token of Mamba-2: x [B, H, V]; B, C [B, G, K]; dt, dt_bias, D expanded over V; A is the state's own."""
    return state.step(q=C, k=B, v=hidden_states, b=dt[..., 0], dt_bias=dt_bias[:, 0], D=D[:, 0])


@dataclass(frozen=True)
class Family:
    """How the modules of one family call their recurrence.

    Attributes:
        recurrence: the core's row; "ready" where the module computes beta and g itself.
        step, chunk: names in the module's file of the functions for one token and for many.
        initial: the chunk function's argument that takes the state.
        sizes: the module's attributes that hold H, G, V and K.
        transposed: whether transformers keeps the state as [K, V].
        decode: takes the step function's place.
    """

    recurrence: Recurrence
    step: str
    chunk: str
    initial: str
    sizes: tuple[str, str, str, str]
    transposed: bool
    decode: Callable

    def prefill(self, chunk: Callable) -> Callable:
        """transformers' own chunk function, given the exact state as a tensor where its cache holds ours."""

        def call(*args, **kwargs):
            if isinstance(kwargs.get(self.initial), ReplayedState):
                kwargs[self.initial] = kwargs[self.initial].tensor()
            return chunk(*args, **kwargs)

        return call

    def decay(self, mixers: list[nn.Module]) -> Tensor | None:
        """A [layers, H] fp32 where the core derives g from it."""
        if self.recurrence.decay != "derived":
            return None
        return torch.stack([-torch.exp(mixer.A_log.detach().float()) for mixer in mixers])

    def rebind(self, forward: Callable) -> Callable:
        """A copy of a module's ``forward``, decorators included, that finds our functions under transformers' names."""
        inner = getattr(forward, "__wrapped__", None)
        names, cells = forward.__globals__, forward.__closure__
        if inner is None:
            missing = {self.step, self.chunk} - set(forward.__code__.co_names)
            if missing:
                raise NotImplementedError(f"{forward.__qualname__}: expected calls of {sorted(missing)}, found none")
            names = names | {self.step: self.decode, self.chunk: self.prefill(names[self.chunk])}
        else:
            ours = CellType(self.rebind(inner))
            cells = tuple(ours if cell.cell_contents is inner else cell for cell in cells)
        copy = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, cells)
        copy.__kwdefaults__ = forward.__kwdefaults__
        return copy


_gdn = Family(
    recurrence=dataclasses.replace(GDN, beta="ready", decay="ready"),
    step="torch_recurrent_gated_delta_rule",
    chunk="torch_chunk_gated_delta_rule",
    initial="initial_state",
    sizes=("num_v_heads", "num_k_heads", "head_v_dim", "head_k_dim"),
    transposed=True,
    decode=_delta_step,
)
_kda = Family(
    recurrence=dataclasses.replace(KDA, beta="ready", decay="ready"),
    step="recurrent_kimi_delta_attention",
    chunk="chunk_kimi_delta_attention",
    initial="initial_state",
    sizes=("num_heads", "num_heads", "head_dim", "head_dim"),
    transposed=True,
    decode=_delta_step,
)
_mamba2 = Family(
    recurrence=MAMBA2,
    step="mamba2_selective_state_update",
    chunk="mamba2_chunk_scan",
    initial="initial_states",
    sizes=("num_heads", "n_groups", "head_dim", "ssm_state_size"),
    transposed=False,
    decode=_mamba2_step,
)

# By class name: importing six modelling files to compare classes would cost seconds.
MIXERS = {
    "Qwen3NextGatedDeltaNet": _gdn,
    "Qwen3_5GatedDeltaNet": _gdn,
    "Qwen3_5MoeGatedDeltaNet": _gdn,
    "KimiLinearDeltaAttention": _kda,
    "Glm5NextTextLinearAttention": _kda,
    "Mamba2Mixer": _mamba2,
    "NemotronHMamba2Mixer": _mamba2,
}
