"""The ReplayState behind a transformers cache, and what stands in its layers where recurrent-state tensors were."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from ... import Layout, Plan, ReplayState
from ...cursor import committed, flush_rule
from ...metrics import Counted, Meter
from .speculation import Speculation

GRADIENTS = "ReplaySSM decodes without gradients; call under torch.no_grad(), as generate() does, or disable(model)"


class Replay:
    """One cache's ReplayState, shared by all recurrent layers: slot b is row b; made when the first layer loads.

    While the cache records its past, a step stays uncommitted until the cache is cropped or anything else needs the state:
    ``pending`` is its plan then. ``count`` follows on the host what the first row's cursor counts on the device.

    Args:
        layout, layers: of the model.
        transposed: whether the model's state tensors are [B, H, K, V].
        meter: what counts its steps, or None.
        kwargs: A, backend and debug as ReplayState takes them.
    """

    def __init__(self, layout: Layout, layers: int, transposed: bool, meter: Meter | None = None, **kwargs: Any) -> None:
        self.layout, self.layers, self.transposed, self.meter, self.kwargs = layout, layers, transposed, meter, kwargs
        self.state: ReplayState | None = None
        self.pending: Plan | None = None
        self.recording, self.folded, self.count = False, True, 0
        self.speculation = Speculation(layout, layers)

    def allocate(self, slots: int, device: torch.device) -> ReplayState:
        """A new state of that many rows."""
        if self.meter is not None:
            return Counted(self.layout, self.layers, slots, device, meter=self.meter, **self.kwargs)
        return ReplayState(self.layout, self.layers, slots, device, **self.kwargs)

    def load(self, layer: int, states: Tensor) -> None:
        """The model's own prefill computed these states of one layer."""
        if states.requires_grad:
            raise NotImplementedError(GRADIENTS)
        if self.state is None:
            self.slots = torch.arange(states.shape[0], dtype=torch.int32, device=states.device)
            self.state = self.allocate(states.shape[0], states.device)
            self.reset()
        states = (states.transpose(-1, -2) if self.transposed else states).contiguous()
        if layer == 0:
            self.settle()
        # Rings are empty: the prefill began from nothing, or read the state by ``tensor``. Drafts after it may be pending.
        self.state.load_layer(layer, self.slots, states)

    def step(self, layer: int, t: int, **inputs: Tensor) -> Tensor:
        """t tokens of every row, packed: the first recurrent layer plans, the last commits unless the past is recorded."""
        if inputs["v"].requires_grad:
            raise NotImplementedError(GRADIENTS)
        if layer == 0:
            self.settle()
            self.pending = self.state.plan(self.slots, t)
        o = self.state.step(layer, self.pending, **inputs)
        if layer == self.layers - 1:
            self.folded = False
            if not self.recording:
                self._commit(t)
        return o

    def settle(self, dropped: int = 0) -> None:
        """Commit what is pending but each row's last tokens: an uncommitted step can lose as many as it has."""
        if dropped > (self.pending.T if self.pending else 0):
            raise NotImplementedError(
                f"cache.crop: expected at most the {self.pending.T if self.pending else 0} tokens that can be taken back, got "
                f"{dropped}; a model enabled with draft_tokens = n takes back n drafts of the forward just made"
            )
        if self.pending is not None:
            tokens, kept = self.pending.T, self.pending.T - dropped
            self.speculation = self.speculation.and_a_step(tokens, kept, self.count, self._flush(tokens))
            self._commit(kept)

    def _commit(self, kept: int) -> None:
        t = self.pending.T
        self.state.commit(self.pending, torch.full_like(self.slots, kept) if kept < t else None)
        flush = self._flush(t)
        _, self.count = committed(0, self.count, flush, kept, self.layout.R)
        self.pending = None

    def _flush(self, t: int) -> int:
        """Whether the first row folds: all its windows are whole, since slot 0 has no phase."""
        return int(flush_rule(0, self.count, t, self.layout.W, phase=0))

    def reorder(self, index: Tensor) -> None:
        """Row i becomes what row index[i] was."""
        self.settle()
        self.state.copy(self.slots[index], self.slots)
        self.count = int(self.state.cursors.count[0])

    def reset(self) -> None:
        """All rows start anew, each with random bits of its own."""
        self.settle()
        self.state.reset(self.slots, keys=self.slots.long())
        self.count = 0

    def drafts(self, t: int, begun: bool, announced: int | None) -> int:
        """How many of a forward's last tokens are steps of ours; those before them are transformers' own prefill.

        Args:
            t: tokens of the forward.
            begun: whether a state is there already.
            announced: drafts among them, where the model's caller said so.
        """
        if not self.recording:
            return 0
        if begun and t <= self.layout.T_max and announced in (None, t - 1):
            return t
        return announced if announced is not None and announced < min(t, self.layout.T_max) else 0

    def tensor(self, layer: int) -> Tensor:
        """One layer's exact state, fp32, in the model's shape; folds all layers' rings first."""
        if not self.folded:
            self.settle()
            self.state.fold(self.slots)
            self.folded, self.count = True, 0
        states = self.layout.format.decode(self.state.buffers.layer(layer).checkpoint)
        return states.transpose(-1, -2) if self.transposed else states


class ReplayedState:
    """Stands in ``cache.layers[i].recurrent_states[0]``: answers the tensor methods used on it."""

    def __init__(self, replay: Replay, layer: int) -> None:
        self.replay, self.layer, self.layout = replay, layer, replay.layout

    def step(self, t: int = 1, **inputs: Tensor) -> Tensor:
        """This layer's output [B t, H, V] for t tokens of every row, packed.

        While the past is recorded, the convolution hands over one token, or a few, as a slice of a longer window.
        """
        inputs = {name: x if x.stride(-1) == 1 else x.contiguous() for name, x in inputs.items()}
        return self.replay.step(self.layer, t=t, **inputs)

    def keep(self) -> None:
        """The step just made, where the cache cannot take its token back."""
        if self.layer == self.replay.layers - 1:
            self.replay.settle()

    def tensor(self) -> Tensor:
        """The exact state, fp32, in the model's own shape."""
        return self.replay.tensor(self.layer)

    def copy_(self, states: Tensor | ReplayedState) -> None:
        """After a prefill: load its state. After a decode step the module hands back this object: nothing to do."""
        if states is not self:
            self.replay.load(self.layer, states)

    def zero_(self) -> None:
        """``cache.reset()``: all layers at once, when the first asks."""
        if self.layer == 0 and self.replay.state is not None:
            self.replay.reset()

    def index_select(self, dim: int, index: Tensor) -> ReplayedState:
        """``cache.reorder_cache(index)``: all layers at once, when the first asks."""
        if self.layer == 0 and self.replay.state is not None:
            self.replay.reorder(index)
        return self

    def to(self, *args, **kwargs) -> ReplayedState:
        """KDA modules cast the state they hand back to fp32; nothing else may move or read it."""
        if (args, kwargs) != ((torch.float32,), {}):
            raise NotImplementedError(
                "recurrent state: ReplaySSM holds it; it is not offloaded, and a disabled model cannot use this cache"
            )
        return self

    def __getattr__(self, name: str):
        raise AttributeError(f"{name}: this recurrent state is held by ReplaySSM; only a model it is enabled on can use it")


def _crop(self, tokens_to_remove: int) -> None:
    """``crop`` of a cache's first recurrent layer: transformers' own crops the convolution window alone."""
    self.recurrent_states[0].replay.settle(max(0, -tokens_to_remove))
    type(self).crop(self, tokens_to_remove)


def _crop_nothing(self, tokens_to_remove: int) -> None:
    """``crop`` of a linear-attention layer that no module uses (Nemotron-H's MLPs): transformers' own finds no window."""


def attach(cache: Cache, layer: int, indices: list[int], replay) -> ReplayedState:
    """Let a cache hold its recurrent states in a Replay, from the first module that sees it on.

    Args:
        cache: a DynamicCache that knows the model's configuration; states it has already are loaded.
        layer: the cache layer of the module that asks.
        indices: the cache layers of all the model's recurrent modules.
        replay: makes a Replay for this cache.

    Returns:
        What holds the state of the layer that asks.

    Raises:
        NotImplementedError: a cache or a way of decoding that is not supported, by name.
    """
    if not isinstance(cache, DynamicCache) or cache.offloading:
        kind = "an offloading " if getattr(cache, "offloading", False) else ""
        raise NotImplementedError(f"cache: supported is DynamicCache without offloading, got {kind}{type(cache).__name__}")
    layers = cache.layers
    if len(layers) <= max(indices) or not all(hasattr(layers[index], "recurrent_states") for index in indices):
        raise ValueError(f"cache: expected DynamicCache(config=model.config), got one with layers {layers}")
    held = layers[layer].recurrent_states[0]
    if isinstance(held, ReplayedState):
        _record(held.replay, layers[layer].record_past)
        return held
    shared = replay()
    _record(shared, layers[layer].record_past)
    layers[indices[0]].crop = MethodType(_crop, layers[indices[0]])
    for index in set(range(len(layers))) - set(indices):
        if type(layers[index]) is LinearAttentionLayer:
            layers[index].crop = MethodType(_crop_nothing, layers[index])
    for i, index in enumerate(indices):
        one = layers[index]
        before, one.recurrent_states[0] = one.recurrent_states[0], ReplayedState(shared, i)
        one.is_recurrent_states_initialized[0] = True
        if before is not None:
            one.recurrent_states[0].copy_(before)
    return layers[layer].recurrent_states[0]


def _record(replay: Replay, on: bool) -> None:
    if on and replay.layout.T_max == 1:
        raise NotImplementedError(
            "assisted decoding: a cache that must roll back needs enable(model, draft_tokens=n), n the most drafts of a forward"
        )
    replay.recording = on


def state_of(cache: Cache) -> ReplayState:
    """The ReplayState behind a cache that an enabled model has filled: slot b is row b. Uncommitted drafts are kept.

    Raises: ValueError for any other cache.
    """
    replay = _replay_of(cache)
    replay.settle()
    return replay.state


def speculation_of(cache: Cache) -> Speculation:
    """What assisted generation did with a cache that an enabled model has filled, up to the last ``crop``; reads no device.

    Raises: ValueError for any other cache.
    """
    return _replay_of(cache).speculation


def _replay_of(cache: Cache) -> Replay:
    for layer in cache.layers:
        held = getattr(layer, "recurrent_states", {}).get(0)
        if isinstance(held, ReplayedState) and held.replay.state is not None:
            return held.replay
    raise ValueError("cache: expected one that a model filled while ReplaySSM was enabled, got another")
