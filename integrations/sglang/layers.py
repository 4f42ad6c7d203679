"""The recurrent layers of a loaded SGLang model: their recurrence, their sizes, and the weights that decays come from."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ... import GDN, KDA, KDA_SAFE, MAMBA2, Recurrence
from .settings import NAME


@dataclass(frozen=True)
class Layers:
    """Recurrent layers in the order of SGLang's pool, as this rank holds them.

    Attributes:
        H, G, V, K: of every layer.
        weights: per layer the tensor that A comes from.
        logarithms: whether they are A_log, A being ``-exp(A_log)``; else they are A.
    """

    recurrence: Recurrence
    H: int
    G: int
    V: int
    K: int
    weights: tuple[Tensor, ...]
    logarithms: bool

    def A(self, out: Tensor) -> None:
        """Write A [layers, H] fp32."""
        torch._foreach_copy_(list(out.unbind()), [one.detach().reshape(-1) for one in self.weights])
        if self.logarithms:
            out.exp_().neg_()


def of(model: nn.Module, parameters: Any, linear: bool, mamba2: bool) -> Layers:
    """The model's recurrent layers, those that SGLang keeps state for.

    Args:
        parameters: SGLang's ``mamba2_cache_params``.
        linear, mamba2: the families that the server's arguments chose.

    Raises:
        NotImplementedError: no layers of a chosen family, or layers of several kinds.
    """
    from sglang.srt.layers.attention.mamba.mamba import MambaMixer2
    from sglang.srt.layers.radix_linear_attention import RadixLinearAttention

    modules = list(model.modules())
    mixers = [one for one in modules if isinstance(one, MambaMixer2)]
    attentions = [one for one in modules if isinstance(one, RadixLinearAttention) and one.layer_id in parameters.layers]
    if linear and attentions and not mixers:
        found = [_attention(one, parameters) for one in sorted(attentions, key=lambda one: one.layer_id)]
    elif mamba2 and mixers and not attentions:
        found = [_mixer(one) for one in mixers]
    else:
        option = "--mamba-backend" if mamba2 else "--linear-attn-decode-backend"
        raise NotImplementedError(
            f"{option} {NAME}: expected a model with {'Mamba-2' if mamba2 else 'GDN or KDA'} layers alone, got "
            f"{type(model).__name__} with {len(mixers)} Mamba-2 and {len(attentions)} GDN or KDA layers"
        )
    shapes = {dataclasses.replace(one, weights=()) for one in found}
    if len(shapes) > 1:
        raise NotImplementedError(f"{NAME}: supported are recurrent layers of one shape, got {sorted(map(str, shapes))}")
    return dataclasses.replace(shapes.pop(), weights=tuple(one.weights[0] for one in found))


def _attention(one: Any, parameters: Any) -> Layers:
    recurrence = GDN
    if parameters.is_kda:
        bound = one.lower_bound
        recurrence = KDA if bound is None else dataclasses.replace(KDA_SAFE, lower_bound=float(bound))
    sizes = (one.num_v_heads, one.num_k_heads, one.head_v_dim, one.head_k_dim)
    return Layers(recurrence, *sizes, weights=(one.A_log,), logarithms=True)


def _mixer(one: Any) -> Layers:
    sizes = (one.num_heads // one.tp_size, one.n_groups // one.tp_size, one.head_dim, one.ssm_state_size)
    return Layers(MAMBA2, *sizes, weights=(one.A,), logarithms=False)
