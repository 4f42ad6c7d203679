"""TensorRT-LLM's sizes and tensors as core's: the layout of a layer, the pool and the history as strided views."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from replayssm import GDN, KDA, KDA_SAFE, MAMBA2, Conv, Layout, Recurrence

if TYPE_CHECKING:
    from .contract import Family
    from .settings import Settings

Memory = Callable[[int, torch.dtype, int], Tensor]
FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
WINDOW = 16


def recurrence_of(family: Family, config: Any) -> Recurrence:
    """The core's row of a model family; Kimi's gate depends on the pretrained config."""
    if family != "kda":
        return {"mamba2": MAMBA2, "gdn": GDN}[family]
    text = getattr(config, "text_config", config)
    lower_bound = text.linear_attn_config.get("gate_lower_bound")
    return KDA if lower_bound is None else dataclasses.replace(KDA_SAFE, lower_bound=lower_bound)


def layout_of(recurrence: Recurrence, context: Any, pool: torch.dtype, settings: Settings, history: int | None) -> Layout:
    """The layout of one layer.

    Args:
        context: sizes of this rank: MambaCacheBuildContext, MambaStateLayout, or a manager of the same attributes.
        pool: the state pool's dtype.
        history: rows of each half of the engine's history that the ring shall live in, or None.

    Raises: ValueError, NotImplementedError: what cannot be, naming the setting.
    """
    H, V, K = context.ssm_state_shape
    channels, back = context.conv_state_shape
    tokens = 1 if context.spec_config is None else context.spec_config.tokens_per_gen_step
    own_conv = recurrence.per_channel  # Kimi's decode op holds its convolution, so replacing one is replacing both
    W, R = settings.window or max(WINDOW, tokens), 2 * history if history else 0
    if R and W + tokens > R:
        raise ValueError(
            f"window: expected at most {R - tokens}, the engine's history of {R} rows less {tokens} tokens, got {W}"
        )
    return Layout(
        recurrence,
        H=H,
        G=H if own_conv else context.n_groups_per_rank,
        V=V,
        K=K,
        W=W,
        T_max=tokens,
        R=R,
        state=_checkpoint(pool, settings, context),
        read=settings.read,
        act=context.conv_state_dtype,
        conv=Conv(channels, back + 1) if own_conv else None,
        order="token",
        stagger=settings.stagger,
        seed=settings.seed,
    )


def _checkpoint(pool: torch.dtype, settings: Settings, context: Any) -> str:
    if pool not in FORMATS:
        raise NotImplementedError(f"mamba_ssm_cache_dtype: supported are {list(FORMATS)}, got {pool}")
    if settings.checkpoint == "auto":
        rounded = pool == torch.float16 and getattr(context, "stochastic_rounding", False)
        return "fp16+sr" if rounded else FORMATS[pool]
    if settings.checkpoint.removesuffix("+sr") != FORMATS[pool]:
        raise ValueError(
            f"checkpoint: expected {FORMATS[pool]}, the state pool's format (kv_cache_config.mamba_ssm_cache_dtype), "
            f"got {settings.checkpoint}"
        )
    return settings.checkpoint


def stacked(states: list[Tensor] | Tensor, memory: Memory | None = None) -> Tensor:
    """One view [L, S, ...] of per-layer pool views [S, ...] that lie at one stride.

    Args:
        memory: makes a tensor over so many elements at an address, for views whose torch storages differ.

    Raises: NotImplementedError: layers at no one stride, which the kernels could not address.
    """
    if isinstance(states, Tensor):
        return states
    first = states[0]
    if len(states) == 1:
        return first[None]
    step, size = states[1].data_ptr() - first.data_ptr(), first.element_size()
    alike = all(x.shape == first.shape and x.stride() == first.stride() and x.dtype == first.dtype for x in states)
    spaced = all(x.data_ptr() == first.data_ptr() + i * step for i, x in enumerate(states))
    if not (alike and spaced and step > 0 and step % size == 0):
        raise NotImplementedError(
            f"state pool: expected {len(states)} layers of one shape at one stride, got addresses "
            f"{[x.data_ptr() for x in states[:4]]}... with strides {first.stride()}"
        )
    shape, strides = (len(states), *first.shape), (step // size, *first.stride())
    if any(x.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() for x in states):
        elements = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        assert memory is not None
        first = memory(first.data_ptr(), first.dtype, elements)
    return first.as_strided(shape, strides)


def rings_in(history: Any, layout: Layout) -> dict[str, Tensor]:
    """The ring as views of the engine's double-buffered, token-major history: its two halves, one after the other, are one ring
    of twice the rows, whose append row wraps where the engine would flip its buffer index.

    Rows of keys and values are the engine's rows, at its strides. Its per-head scalars [2, heads, rows] have no one row stride,
    so beta and g take their memory and not their order. What rows hold is the core's (raw inputs), not what the engine's own
    kernels would write there, so the two never share a history.

    Args:
        history: has old_x [L, S, 2, rows, heads, head_dim], old_B [L, S, 2, rows, groups, d_state], both of the activation
            dtype, old_dt and old_dA_cumsum [L, S, 2, heads, rows] fp32, all contiguous.
    """
    L, S, two, rows, *_ = history.old_x.shape
    if two * rows != layout.R:
        raise ValueError(f"history: expected {layout.R} rows in two halves, got {two} of {rows}")
    views = {
        "v": history.old_x.view(L, S, two * rows, layout.H, layout.V).transpose(2, 3),
        "k": history.old_B.view(L, S, two * rows, layout.G, layout.K).transpose(2, 3),
        "beta": history.old_dt.view(L, S, layout.H, two * rows),
    }
    return views | ({"g": history.old_dA_cumsum.view(L, S, layout.H, two * rows, 1)} if layout.recurrence.stores_g else {})
