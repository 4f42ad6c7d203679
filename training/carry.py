"""A transformers cache for training on endless streams: state goes on from window to window, gradients do not."""

from __future__ import annotations

from torch import Tensor, cat
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer


class _State(LinearAttentionLayer):
    """Recurrent and convolution states replaced, not copied into: the backward pass still needs the window's first ones."""

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int = 4, **kwargs) -> Tensor:
        before = self.conv_states[state_idx]
        full = conv_states if before is None else cat([before, conv_states], -1)
        self.conv_states[state_idx] = full[..., -conv_kernel_size:].detach().clone()
        self.has_previous_state[state_idx] = True
        return full

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs) -> Tensor:
        self.recurrent_states[state_idx] = recurrent_states.detach()
        return recurrent_states


class _Window(DynamicSlidingWindowLayer):
    """The last keys and values of an attention layer."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        full = super().update(key_states, value_states)
        self.keys, self.values = self.keys.detach().clone(), self.values.detach().clone()
        return full


def carried(config: PreTrainedConfig) -> DynamicCache:
    """An empty cache of that kind for a hybrid model whose attention has ``config.sliding_window``."""
    cache = DynamicCache(config=config)
    for i, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[i] = _Window(config.sliding_window)
        elif config.layer_types[i] == "linear_attention":
            cache.layers[i] = _State()
    return cache
