"""Sliding-window attention for model classes whose configuration offers none.

A ``config.json`` with ``"attn_implementation": "sliding_window"`` and ``"sliding_window": N`` gives the attention layers of any
transformers class a window of N tokens, once this module is imported; without it transformers refuses the name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import and_masks, sdpa_mask, sliding_window_overlay

NAME = "sliding_window"


def window_mask(*, mask_function: Callable, config: Any, **kwargs: Any) -> Tensor | None:
    """SDPA's mask, without the keys that lie ``config.sliding_window`` tokens back or more."""
    size = config.sliding_window
    kwargs.pop("local_size", None)
    return sdpa_mask(
        mask_function=and_masks(mask_function, sliding_window_overlay(size)), local_size=size, config=config, **kwargs
    )


AttentionInterface.register(NAME, sdpa_attention_forward)
AttentionMaskInterface.register(NAME, window_mask)
