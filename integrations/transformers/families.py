"""Which transformers modules hold a recurrence, and how their calls read in the core's words."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import CellType, FunctionType

import torch
from torch import Tensor, nn

from ... import GDN, KDA, MAMBA2, Recurrence
from .cache import ReplayedState


def _delta_step(*args, initial_state: ReplayedState, **kwargs) -> tuple[Tensor, ReplayedState]:
    """One token of Gated DeltaNet or KDA, as ``_delta_verify`` takes it."""
    return _delta_verify(initial_state, *args, **kwargs), initial_state


def _kda_step(*args, **kwargs) -> tuple[Tensor, ReplayedState]:
    """KDA modules move the convolution window by a single token for good, whatever the cache records."""
    o, state = _delta_step(*args, **kwargs)
    state.keep()
    return o, state


def _delta_verify(
    state: ReplayedState,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor | None = None,
    **kwargs,
) -> Tensor:
    """One token or a few of Gated DeltaNet or KDA: q, k, v [B, T, H, ...], g and beta as the model computed them."""
    if cu_seqlens is not None:
        raise NotImplementedError("cu_seq_lens_q: packed sequences are not supported in decoding; pass a padded batch")
    shared = state.layout.H // state.layout.G
    return _packed(state, q=query[:, :, ::shared], k=key[:, :, ::shared], v=value, b=beta, a=g)


def _mamba2_verify(
    state: ReplayedState, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **kwargs
) -> Tensor:
    """A few tokens of Mamba-2: x [B, T, H, V], dt [B, T, H]. As for one token, and unlike in a prefill, dt has no limits."""
    return _packed(state, {"dt_bias": kwargs["dt_bias"], "D": kwargs["D"]}, q=C, k=B, v=hidden_states, b=dt)


def _packed(state: ReplayedState, weights: dict[str, Tensor] | None = None, **inputs: Tensor) -> Tensor:
    """[B, T, H, V] of inputs [B, T, ...]."""
    B, T = inputs["v"].shape[:2]
    o = state.step(T, **{name: x.flatten(0, 1) for name, x in inputs.items()}, **(weights or {}))
    return o.unflatten(0, (B, T))


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


class Call(threading.local):
    """What the functions under transformers' names cannot see in their arguments.

    Attributes:
        state: of the module that runs, or None where it has no cache.
        drafts: how many of the forward's last tokens are drafts, or None where the model's caller did not say.
    """

    state: ReplayedState | None = None
    drafts: int | None = None


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
        verify: takes the chunk function's place for drafts.
        tokens: the chunk function's arguments [B, T, ...], by position or name.
    """

    recurrence: Recurrence
    step: str
    chunk: str
    initial: str
    sizes: tuple[str, str, str, str]
    transposed: bool
    decode: Callable
    verify: Callable
    tokens: tuple[int | str, ...]

    def prefill(self, chunk: Callable, call: Call) -> Callable:
        """transformers' own chunk function, given the exact state as a tensor where its cache holds ours, then drafts."""

        def chunk_then_drafts(*args, **kwargs):
            state, t = call.state, args[0].shape[1]
            begun = isinstance(kwargs.get(self.initial), ReplayedState)
            drafts = 0 if state is None else state.replay.drafts(t, begun, call.drafts)
            if drafts == t:
                return self.verify(state, *args, **kwargs), state
            if begun:
                kwargs[self.initial] = kwargs[self.initial].tensor()
            if not drafts:
                return chunk(*args, **kwargs)
            some, named = self.cut(args, kwargs, slice(t - drafts))
            o, states = chunk(*some, **named)
            state.copy_(states)
            some, named = self.cut(args, kwargs, slice(t - drafts, t))
            return torch.cat([o, self.verify(state, *some, **named)], 1), state

        return chunk_then_drafts

    def cut(self, args: tuple, kwargs: dict, tokens: slice) -> tuple[list, dict]:
        """The chunk function's arguments for some of the tokens."""
        some = [x[:, tokens] if i in self.tokens else x for i, x in enumerate(args)]
        return some, {name: x[:, tokens] if name in self.tokens else x for name, x in kwargs.items()}

    def decay(self, mixers: list[nn.Module]) -> Tensor | None:
        """A [layers, H] fp32 where the core derives g from it."""
        if self.recurrence.decay != "derived":
            return None
        return torch.stack([-torch.exp(mixer.A_log.detach().float()) for mixer in mixers])

    def rebind(self, forward: Callable, call: Call) -> Callable:
        """A copy of a module's ``forward``, decorators included, that finds our functions under transformers' names."""
        inner = getattr(forward, "__wrapped__", None)
        names, cells = forward.__globals__, forward.__closure__
        if inner is None:
            missing = {self.step, self.chunk} - set(forward.__code__.co_names)
            if missing:
                raise NotImplementedError(f"{forward.__qualname__}: expected calls of {sorted(missing)}, found none")
            names = names | {self.step: self.decode, self.chunk: self.prefill(names[self.chunk], call)}
        else:
            ours = CellType(self.rebind(inner, call))
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
    verify=_delta_verify,
    tokens=(0, 1, 2, "g", "beta"),
)
_kda = Family(
    recurrence=dataclasses.replace(KDA, beta="ready", decay="ready"),
    step="recurrent_kimi_delta_attention",
    chunk="chunk_kimi_delta_attention",
    initial="initial_state",
    sizes=("num_heads", "num_heads", "head_dim", "head_dim"),
    transposed=True,
    decode=_kda_step,
    verify=_delta_verify,
    tokens=(0, 1, 2, "g", "beta"),
)
_mamba2 = Family(
    recurrence=MAMBA2,
    step="mamba2_selective_state_update",
    chunk="mamba2_chunk_scan",
    initial="initial_states",
    sizes=("num_heads", "n_groups", "head_dim", "ssm_state_size"),
    transposed=False,
    decode=_mamba2_step,
    verify=_mamba2_verify,
    tokens=(0, 1, 3, 4),
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
