"""What TensorRT-LLM's cache managers hold as their recurrent state: one object for both forms of the seam and for none.

The form with a strategy calls ``bind(context, manager)`` and ``update(batch, manager)``; the form with a state calls
``bind(context, ssm_states, conv_states)`` and ``update(batch)``. The managers without a seam are made to call the second.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from replayssm import Recurrence

from . import engine
from .layouts import layout_of, rings_in, stacked
from .recurrent import Recurrent
from .settings import Settings


@dataclass(frozen=True)
class LayerCache:
    """One layer's views, under the names that mixers read; the engine's own history is None throughout."""

    conv: Tensor
    temporal: Tensor
    intermediate_conv_window: Tensor | None = None
    intermediate_ssm: None = None
    mamba_ssm_rand_seed: None = None
    old_x: None = None
    old_B: None = None
    old_dt: None = None
    old_dA_cumsum: None = None
    cache_buf_idx: None = None
    prev_num_accepted_tokens: None = None
    has_kda_replay_caches: bool = False


class Adapter:
    """Everything the engine asks of a state, translated to ``Recurrent``.

    Args:
        recurrence: of the model's layers.
        settings: the user's.
        speculative: whether drafts are verified.

    Attributes:
        recurrent: None until bound, and on ranks without recurrent layers.
        intermediate_conv: [L, rows, tokens, C, width - 1], the convolution windows that the engine's verify step writes and
            ``update`` promotes; None where the core keeps the convolution.
    """

    key = "replayssm"
    data_roles = ()
    state_indices_alignment = 1
    intermediate_ssm = None  # no state per draft token, which is the point
    rand_seed = None

    def __init__(self, recurrence: Recurrence, settings: Settings, speculative: bool) -> None:
        self.recurrence, self.settings, self.speculative = recurrence, settings, speculative
        self.recurrent: Recurrent | None = None
        self.intermediate_conv: Tensor | None = None
        self.intermediate_indices: Tensor | None = None
        self._conv_states: list[Tensor] = []

    @property
    def uses_replay(self) -> bool:
        """Mixers then verify by the calls that the shim replaces, and write no state per draft token."""
        return self.speculative and not self.recurrence.per_channel

    # ---- life ----------------------------------------------------------------------------------------------------------

    def buffer_configs(self, context: Any, layer_id: int) -> tuple:
        """Nothing of the pool's: rings are allocated beside it."""
        return ()

    def bytes_per_slot(self, context: Any, layer_id: int) -> int:
        """Nothing of the pool's."""
        return 0

    def on_resources_updated(self, scheduled_batch: Any, manager: Any) -> None:
        """Nothing: acceptance comes by ``update``."""

    def validate(self, context: Any) -> None:
        """Sizes that the core cannot hold are refused before the pool is made."""
        if context.mamba_pp_layers:
            layout_of(self.recurrence, context, context.ssm_state_dtype, self.settings, history=None)

    def bind(self, context: Any, *states: Any, history: Any = None, conv_scratch: bool = True) -> None:
        """Take the pool's views once they are final: those of a manager, or ssm_states and conv_states.

        Args:
            history: what ``rings_in`` takes, or None where the rings are ours.
            conv_scratch: whether ``update`` promotes convolution windows, and so needs room for them.
        """
        manager = states[0] if len(states) == 1 else None
        ssm_states, conv_states = states if manager is None else (manager.all_ssm_states, manager.all_conv_states)
        if len(ssm_states):
            self._bind(context, ssm_states, conv_states, history, conv_scratch)
        if manager is not None:
            self._publish(manager)

    def _bind(self, context: Any, ssm_states: Any, conv_states: Any, history: Any, conv_scratch: bool) -> None:
        pool = stacked(ssm_states, engine.memory)
        rows = None if history is None else history.old_x.shape[3]
        layout = layout_of(self.recurrence, context, pool.dtype, self.settings, rows)
        self._conv_states = list(conv_states)
        self.recurrent = Recurrent(
            layout,
            pool,
            self._conv_states if layout.conv else None,
            rows=context.state_index_capacity,
            history=None if history is None else rings_in(history, layout),
            backend=self.settings.backend,
            debug=self.settings.debug,
        )
        if self.speculative:
            self.intermediate_indices = torch.arange(context.max_batch_size, dtype=torch.int32, device=pool.device)
            if conv_scratch and layout.conv is None:
                shape = (len(conv_states), context.max_batch_size, layout.T_max, *context.conv_state_shape)
                self.intermediate_conv = torch.zeros(shape, dtype=context.conv_state_dtype, device=pool.device)
        rings = pool.shape[0] * pool.shape[1] * (layout.slot_bytes - layout.state_bytes)
        engine.once(f"ReplaySSM: {pool.shape[0]} {self.recurrence.name} layers, {pool.shape[1]} slots, {layout.spec}; "
                    f"{rings / 2**30:.2f} GiB beside the state pool")  # fmt: skip

    def _publish(self, manager: Any) -> None:
        """Names under which mixers read the manager that keeps a strategy."""
        manager._use_replay_state_update = self.uses_replay
        manager.intermediate_ssm_states, manager.mamba_ssm_rand_seed = None, None
        manager.intermediate_conv_states, manager.intermediate_state_indices = self.intermediate_conv, self.intermediate_indices

    def shutdown(self, manager: Any = None) -> None:
        """Let go of every view of the pool."""
        self.recurrent, self.intermediate_conv, self.intermediate_indices, self._conv_states = None, None, None, []
        if manager is not None:
            self._publish(manager)

    # ---- slots ---------------------------------------------------------------------------------------------------------

    def reset_slots(self, slots: Tensor | None, host_slots: list[int]) -> None:
        """The slots begin anew, from a prompt or from a state that came with the request."""
        if self.recurrent is not None:
            self.recurrent.restart(host_slots, brought=True)

    def begin_slots(self, host_slots: list[int]) -> None:
        """The slots are about to take in a prompt, or more of one."""
        if self.recurrent is not None:
            self.recurrent.restart(host_slots, brought=False)

    def settle(self, host_slots: list[int]) -> None:
        """The engine is about to read or move the slots' states."""
        if self.recurrent is not None:
            self.recurrent.settle(host_slots)

    def relocate_slots(self, old_slots: list[int], new_slots: list[int]) -> None:
        """Live requests' states were moved; a slot that was none held nothing."""
        if self.recurrent is not None:
            self.recurrent.relocate(old_slots, new_slots)

    def on_state_transfer_complete(self, request_ids: list[int], manager: Any) -> None:
        """States of these requests came from another server."""
        slots = manager._request_id_to_state_index
        self.reset_slots(None, [slots[one] for one in request_ids if one in slots])

    def refresh_dummy_request_mask(self, is_dummy: list[bool]) -> None:
        """Which rows of the coming batch stand for no request."""
        if self.recurrent is not None:
            self.recurrent.dummies(is_dummy)

    def dummy_request_mask(self, start: int, end: int) -> Tensor | None:
        """A part of the mask."""
        return None if self.recurrent is None else self.recurrent.dummy[start:end]

    # ---- a step --------------------------------------------------------------------------------------------------------

    def source_state_indices(self, count: int) -> Tensor:
        """Rows of ``intermediate_conv`` of the batch's generation requests."""
        if self.intermediate_indices is None:
            raise RuntimeError("intermediate_indices: expected speculative decoding, which allocates them")
        return self.intermediate_indices[:count]

    def layer_cache_fields(self, layer_offset: int) -> dict[str, Tensor]:
        """What mixers find beside the two pool views."""
        conv = self.intermediate_conv
        return {} if conv is None else {"intermediate_conv_window": conv[layer_offset]}

    def make_layer_cache(self, layer_offset: int, conv: Tensor, temporal: Tensor) -> LayerCache:
        """The object that a mixer takes its views from."""
        return LayerCache(conv, temporal, **self.layer_cache_fields(layer_offset))

    def update(self, batch: Any, manager: Any = None) -> bool:
        """Keep the accepted tokens; promote the accepted convolution windows."""
        if self.recurrent is None:
            return True
        self.recurrent.accept(batch.num_accepted_tokens)
        if self.intermediate_conv is not None:
            promote = engine.require("_promote_mamba_state_triton")
            for layer, states in enumerate(self._conv_states):
                promote(
                    states[None],
                    self.intermediate_conv[layer : layer + 1],
                    batch.source_state_indices,
                    batch.accepted_positions,
                    batch.destination_state_indices,
                )
        return True

    def get_replay_metadata(self) -> Any:
        """Counters in the engine's words, for its own bookkeeping: read there, moved by the core alone."""
        if self.recurrent is None or not self.uses_replay:
            return None
        cursors, layout = self.recurrent.state.cursors, self.recurrent.layout
        return engine.require("ReplayStateUpdateMetadata")(
            cursors.count, torch.zeros_like(cursors.count), layout.T_max, layout.W
        )

    def iter_buffers(self) -> Iterable[Tensor]:
        """Ours, for the engine's search for invalid values: nothing, since unused ring rows may hold anything."""
        return ()
