"""The ReplayState behind a transformers cache, and what stands in its layers where recurrent-state tensors were."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from ... import Layout, ReplayState

GRADIENTS = "ReplaySSM decodes without gradients; call under torch.no_grad(), as generate() does, or disable(model)"


class Replay:
    """One cache's ReplayState, shared by all recurrent layers: slot b is row b; made when the first layer loads.

    Args:
        layout, layers: of the model.
        transposed: whether the model's state tensors are [B, H, K, V].
        A, backend, debug: as ReplayState takes them.
    """

    def __init__(
        self, layout: Layout, layers: int, transposed: bool, A: Tensor | None, backend: str | None, debug: bool | None
    ) -> None:
        self.layout, self.layers, self.transposed, self.A = layout, layers, transposed, A
        self.backend, self.debug = backend, debug
        self.state: ReplayState | None = None
        self.folded = True

    def allocate(self, slots: int, device: torch.device) -> ReplayState:
        """A new state of that many rows."""
        return ReplayState(self.layout, self.layers, slots, device, backend=self.backend, A=self.A, debug=self.debug)

    def load(self, layer: int, states: Tensor) -> None:
        """The model's own prefill computed these states of one layer."""
        if states.requires_grad:
            raise NotImplementedError(GRADIENTS)
        if self.state is None:
            self.slots = torch.arange(states.shape[0], dtype=torch.int32, device=states.device)
            self.state = self.allocate(states.shape[0], states.device)
        states = states.transpose(-1, -2) if self.transposed else states
        self.state.load(self.slots, states.contiguous(), layer=layer)

    def step(self, layer: int, **inputs: Tensor) -> Tensor:
        """One token of every row: the first recurrent layer plans, the last commits."""
        if inputs["v"].requires_grad:
            raise NotImplementedError(GRADIENTS)
        if layer == 0:
            self.plan = self.state.plan(self.slots)
        o = self.state.step(layer, self.plan, **inputs)
        if layer == self.layers - 1:
            self.state.commit(self.plan)
            self.folded = False
        return o

    def tensor(self, layer: int) -> Tensor:
        """One layer's exact state, fp32, in the model's shape; folds all layers' rings first."""
        if not self.folded:
            self.state.fold(self.slots)
            self.folded = True
        states = self.layout.format.decode(self.state.buffers.state[layer])
        return states.transpose(-1, -2) if self.transposed else states


class ReplayedState:
    """Stands in ``cache.layers[i].recurrent_states[0]``: answers the tensor methods used on it."""

    def __init__(self, replay: Replay, layer: int) -> None:
        self.replay, self.layer, self.layout = replay, layer, replay.layout

    def step(self, **inputs: Tensor) -> Tensor:
        """This layer's output [B, H, V] for one token of every row."""
        return self.replay.step(self.layer, **inputs)

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
            self.replay.state.reset(self.replay.slots)

    def index_select(self, dim: int, index: Tensor) -> ReplayedState:
        """``cache.reorder_cache(index)``: all layers at once, when the first asks."""
        if self.layer == 0 and self.replay.state is not None:
            self.replay.state.copy(self.replay.slots[index], self.replay.slots)
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


def attach(cache: Cache, layer: int, indices: list[int], replay) -> None:
    """Let a cache hold its recurrent states in a Replay, from the first module that sees it on.

    Args:
        cache: a DynamicCache that knows the model's configuration; states it has already are loaded.
        layer: the cache layer of the module that asks.
        indices: the cache layers of all the model's recurrent modules.
        replay: makes a Replay for this cache.

    Raises:
        NotImplementedError: a cache or a way of decoding that is not supported, by name.
    """
    if not isinstance(cache, DynamicCache) or cache.offloading:
        kind = "an offloading " if getattr(cache, "offloading", False) else ""
        raise NotImplementedError(f"cache: supported is DynamicCache without offloading, got {kind}{type(cache).__name__}")
    layers = cache.layers
    if len(layers) <= max(indices) or not all(hasattr(layers[index], "recurrent_states") for index in indices):
        raise ValueError(f"cache: expected DynamicCache(config=model.config), got one with layers {layers}")
    if layers[layer].record_past:
        raise NotImplementedError("assisted decoding: a cache that must roll back is not supported; call generate() without it")
    if isinstance(layers[layer].recurrent_states[0], ReplayedState):
        return
    shared = replay()
    for i, index in enumerate(indices):
        one = layers[index]
        before, one.recurrent_states[0] = one.recurrent_states[0], ReplayedState(shared, i)
        one.is_recurrent_states_initialized[0] = True
        if before is not None:
            one.recurrent_states[0].copy_(before)


def state_of(cache: Cache) -> ReplayState:
    """The ReplayState behind a cache that an enabled model has filled: slot b is row b.

    Raises: ValueError for any other cache.
    """
    for layer in cache.layers:
        held = getattr(layer, "recurrent_states", {}).get(0)
        if isinstance(held, ReplayedState) and held.replay.state is not None:
            return held.replay.state
    raise ValueError("cache: expected one that a model filled while ReplaySSM was enabled, got another")
