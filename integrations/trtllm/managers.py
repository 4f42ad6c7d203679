"""TensorRT-LLM's cache managers with ReplaySSM as their recurrent state: a subclass of whichever it picks.

Three shapes of them are known: as they are ("current"), and the two forms of pull request 18843, which keep a strategy object
or a state object. A class of none of these is refused by name.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from replayssm import Recurrence

from . import engine
from .adapter import Adapter
from .contract import Form
from .engine import Refused
from .settings import Settings


def form_of(base: type) -> Form:
    """Which shape a manager class has. Raises Refused."""
    if hasattr(base, "_initialize_model_state"):
        return "state"
    if "state_update_strategy" in inspect.signature(base.__init__).parameters:
        return "strategy"
    if all(hasattr(base, name) for name in ("_refresh_dummy_request_mask", "_setup_mtp_intermediate_states")):
        return "current"
    raise Refused(
        f"{base.__name__}: supported are hybrid managers with _initialize_model_state, with state_update_strategy, or with "
        "_refresh_dummy_request_mask and _setup_mtp_intermediate_states; set kv_cache_config.use_kv_cache_manager_v2: true"
    )


def managed(base: type, recurrence: Recurrence, settings: Settings) -> type:
    """A subclass of a manager class whose recurrent state is ReplaySSM. Raises Refused for a class of an unknown shape."""
    form = form_of(base)
    loads = settings.read is not None or recurrence.per_channel
    if form == "current" and loads and not hasattr(base, "suspend_request"):
        raise Refused(
            f"{base.__name__}: supported without a read copy and with Mamba-2 and Gated DeltaNet alone, since it completes "
            "state transfers after naming their slots; set kv_cache_config.use_kv_cache_manager_v2: true"
        )
    mixins: tuple[type, ...] = ({"current": Current, "strategy": Strategy, "state": State}[form],)
    if hasattr(base, "suspend_request"):
        mixins = (Suspends, *mixins)
    return type(base.__name__, (*mixins, base), {"_recurrence": recurrence, "_settings": settings, "__module__": __name__})


class Managed:
    """What all shapes share.

    Attributes:
        replayssm: the adapter, which mixers find here.
    """

    _recurrence: Recurrence
    _settings: Settings
    _adapter: type[Adapter] = Adapter
    replayssm: Adapter

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.replayssm = self._adapter(self._recurrence, self._settings, kwargs.get("spec_config") is not None)
        super().__init__(*args, **self._arguments(kwargs))
        if getattr(self.kv_cache_config, "enable_kv_pool_rebalance", False):
            raise ValueError(
                "kv_cache_config.enable_kv_pool_rebalance: expected false, rings are made for the pool's slots, got true"
            )

    def _arguments(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return kwargs

    @property
    def use_replay_state_update(self) -> bool:
        """Read by mixers: whether they verify by the calls that the shim replaces."""
        return self.replayssm.uses_replay

    def update_mamba_states(
        self,
        attn_metadata: Any,
        num_accepted_tokens: torch.Tensor,
        state_indices: Any = None,
        accepted_leaf_positions: Any = None,
    ) -> None:
        """After sampling: keep the accepted tokens."""
        if accepted_leaf_positions is not None:
            raise NotImplementedError(
                "accepted_leaf_positions: expected None, got a tensor; draft trees are not supported here"
            )
        self._keep(attn_metadata, num_accepted_tokens, state_indices)

    def _keep(self, *args: Any) -> None:
        super().update_mamba_states(*args)

    def _moved(self, old_slots: list[int], new_slots: list[int]) -> None:
        """Generation requests' slots before and after: some moved; those that had none come with their state in the pool."""
        self.replayssm.relocate_slots(old_slots, new_slots)
        came = [new for old, new in zip(old_slots, new_slots, strict=True) if old < 0]
        if came:
            with ordered(self):
                self.replayssm.reset_slots(None, came)


class Suspends:
    """For managers that suspend requests: their pages may then leave the GPU and their slot go to another request."""

    def suspend_request(self, req: Any) -> None:
        """Fold the request's ring first; it resumes as one that comes with its state in the pool."""
        rid = req.py_request_id
        slot, cache = self._request_id_to_state_index.get(rid, -1), self.kv_cache_map.get(rid)
        if slot >= 0 and cache is not None and cache.is_active:
            with ordered(self):
                self.replayssm.settle([slot])
            del self._request_id_to_state_index[rid]
        super().suspend_request(req)


class Current(Managed):
    """Managers without a seam: their history holds the rings where they allocate one, and their hooks are overridden."""

    def _arguments(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        kwargs.pop("kda_replay_num_spec", None)  # a history of draft records alone, too short for a ring
        return kwargs | {"use_replay_state_update": self.replayssm.uses_replay}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The engine would fold its own history, whose memory now holds our rings, into the pool.
        self._use_gdn_cached_replay_all_layer_commit = False
        if self.local_num_mamba_layers:
            context = SimpleNamespace(
                ssm_state_shape=self.ssm_state_shape,
                conv_state_shape=self.conv_state_shape,
                conv_state_dtype=self.conv_state_dtype,
                n_groups_per_rank=self._n_groups_per_rank,
                spec_config=self.spec_config,
                max_batch_size=self.max_batch_size,
                state_index_capacity=self.cuda_state_indices.shape[0],
                stochastic_rounding=getattr(self, "_mamba_ssm_stochastic_rounding", False),
            )
            history = self if self.replayssm.uses_replay else None
            self.replayssm.bind(context, self.all_ssm_states, self.all_conv_states, history=history, conv_scratch=False)

    def _setup_mtp_intermediate_states(self, spec_config: Any, max_batch_size: int) -> None:
        if not self._recurrence.per_channel:
            super()._setup_mtp_intermediate_states(spec_config, max_batch_size)
            return
        self.spec_config = spec_config
        self.intermediate_ssm_states = self.intermediate_conv_states = self.intermediate_state_indices = None

    def _refresh_dummy_request_mask(self, is_dummy: list[bool]) -> None:
        super()._refresh_dummy_request_mask(is_dummy)
        self.replayssm.refresh_dummy_request_mask(is_dummy)

    def _setup_state_indices(self, requests: Any = None, *contexts: int, **named: int) -> None:
        given = self.requests if requests is None else requests
        first = contexts[0] if contexts else named.get("num_contexts")
        running = given[first:] if first is not None else [one for one in given if one.is_context_finished]
        slots = self._request_id_to_state_index
        old = [slots.get(one.py_request_id, -1) for one in running]
        super()._setup_state_indices(requests, *contexts, **named)
        if self.replayssm.recurrent is not None:
            self._moved(old, [slots[one.py_request_id] for one in running])

    def _reset_context_mamba_slots(self, num_contexts: int) -> None:
        super()._reset_context_mamba_slots(num_contexts)
        self.replayssm.begin_slots(self._host_state_indices[:num_contexts].tolist())

    def _keep(self, attn_metadata: Any, num_accepted_tokens: torch.Tensor, state_indices: Any) -> None:
        """Records by our cursors; convolution windows, where the engine keeps them, by its own promotion."""
        if self.replayssm.recurrent is not None:
            first, last = attn_metadata.num_contexts, attn_metadata.num_seqs
            self.replayssm.recurrent.accept(num_accepted_tokens[first:last])
        if not self._recurrence.per_channel:
            super()._keep(attn_metadata, num_accepted_tokens, state_indices)

    def seed_kda_replay_caches_for_disagg_gen(self, request_ids: list[int]) -> None:
        """States of these requests came from another server."""
        self.replayssm.on_state_transfer_complete(request_ids, self)

    def shutdown(self) -> None:
        """Views of the pool go before the pool."""
        self.replayssm.shutdown()
        super().shutdown()


class Strategy(Managed):
    """The seam's first form: the manager takes the adapter as its strategy and calls it by itself."""

    def _arguments(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return kwargs | {"state_update_strategy": self.replayssm, "use_replay_state_update": self.replayssm.uses_replay}

    @property
    def _adapter(self) -> type[Adapter]:
        return type("ReplaySSMStrategy", (Adapter, engine.require("MambaStateUpdateStrategy")), {})

    def _setup_state_indices(self, *args: Any, **kwargs: Any) -> None:
        with ordered(self):  # the strategy's reset_slots reads states that the engine brought
            super()._setup_state_indices(*args, **kwargs)


class State(Managed):
    """The seam's second form: the manager asks for a state, and leaves its slots and its moves to its subclass."""

    def _initialize_model_state(self) -> Adapter:
        self._speculative_state = self.replayssm
        self.replayssm.validate(self._state_layout)
        return self.replayssm

    def _setup_model_state(self) -> None:
        self.replayssm.bind(self._state_layout, self.all_ssm_states, self.all_conv_states)

    def _on_state_slots_relocated(self, old_slots: list[int], new_slots: list[int]) -> None:
        self._moved(old_slots, new_slots)

    def _reset_model_slots(self, slots: torch.Tensor, host_slots: list[int]) -> None:
        self.replayssm.begin_slots(host_slots)

    def _refresh_dummy_request_mask(self, is_dummy: list[bool]) -> None:
        super()._refresh_dummy_request_mask(is_dummy)
        self.replayssm.refresh_dummy_request_mask(is_dummy)

    def _update_speculative_state(self, batch: Any) -> None:
        self.replayssm.update(batch)

    def mamba_layer_cache(self, layer_idx: int) -> Any:
        """The views that a mixer works on."""
        offset = self.mamba_layer_offsets[layer_idx]
        return self.replayssm.make_layer_cache(offset, self.all_conv_states[offset], self.all_ssm_states[offset])

    def get_replay_state_update_metadata(self) -> Any:
        """Counters in the engine's words."""
        return self.replayssm.get_replay_metadata()

    def on_state_transfer_complete(self, request_ids: list[int]) -> None:
        """States of these requests came from another server."""
        self.replayssm.on_state_transfer_complete(request_ids, self)

    def shutdown(self) -> None:
        """Views of the pool go before the pool."""
        self.replayssm.shutdown()
        super().shutdown()


@contextlib.contextmanager
def ordered(manager: Any):
    """Work on the current stream between the pool's migrations: after those it started, before those it starts next."""
    stream = getattr(manager, "_stream", None)
    if stream is None or not torch.cuda.is_available():
        yield
        return
    current = torch.cuda.current_stream()
    current.wait_stream(stream)
    yield
    stream.wait_stream(current)


def selecting(
    original: Callable[..., type], choose: Callable[[Any], tuple[Recurrence, Settings] | None]
) -> Callable[..., type]:
    """TensorRT-LLM's choice of a manager class, then ours of its subclass where ``choose(model_config)`` wants one."""

    @functools.wraps(original)
    def get_kv_cache_manager_cls(model_config: Any, *args: Any, **kwargs: Any) -> type:
        base = original(model_config, *args, **kwargs)
        chosen = choose(model_config)
        if chosen is None:
            return base
        recurrence, settings = chosen
        try:
            return managed(base, recurrence, settings)
        except Refused as reason:
            if settings.mode == "require":
                raise
            engine.fallback(reason)
            return base

    return get_kv_cache_manager_cls
