"""What the fake managers of TensorRT-LLM do where the shim leaves the work to the engine: pools, slots, moves.

Names that start with ``fake_`` are the tests' own; the rest carries the contract's names and parameters.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import torch
from torch import Tensor


class Pool:
    """Slots of a pool that interleaves all layers within a slot, as V2 does; what holds no request is NaN."""

    def fake_pool(self, given):
        one = SimpleNamespace(**given)
        layers, slots, rows = one.mamba_num_layers, one.kv_cache_config.slots, one.max_batch_size
        ssm_shape = (one.mamba_num_heads, one.mamba_head_dim, one.mamba_d_state)
        channels = one.mamba_num_heads * one.mamba_head_dim + 2 * one.mamba_n_groups * one.mamba_d_state
        conv_shape, dtypes = (channels, one.mamba_d_conv - 1), (one.mamba_ssm_cache_dtype, one.mamba_cache_dtype)
        self.mamba_pp_layers = [2 * layer + 1 for layer in range(layers)]  # others are attention
        self.mamba_layer_offsets = {layer: i for i, layer in enumerate(self.mamba_pp_layers)}
        self.local_num_mamba_layers, self.max_batch_size = layers, rows
        self.ssm_state_shape, self.conv_state_shape = list(ssm_shape), list(conv_shape)
        self._n_groups_per_rank = one.mamba_n_groups
        self.ssm_state_dtype, self.conv_state_dtype = dtypes
        self.spec_config, self.kv_cache_config = one.spec_config, one.kv_cache_config
        self.fake_device = device = one.kv_cache_config.device
        ssm = torch.full((slots, layers, *ssm_shape), float("nan"), dtype=dtypes[0], device=device)
        conv = torch.full((slots, layers, *conv_shape), float("nan"), dtype=dtypes[1], device=device)
        self.all_ssm_states = [ssm[:, layer] for layer in range(layers)]
        self.all_conv_states = [conv[:, layer] for layer in range(layers)]
        self.cuda_state_indices = torch.zeros(rows, dtype=torch.int32, device=device)
        self._host_state_indices = torch.zeros(rows, dtype=torch.int32)
        self._request_id_to_state_index, self._request_id_to_is_dummy, self.kv_cache_map = {}, {}, {}
        self.fake_free = list(range(slots - 1))  # the last slot is all paddings'

    def fake_take(self, rid):
        self.kv_cache_map[rid] = SimpleNamespace(is_active=True, slot=self.fake_free.pop(len(self.fake_free) // 2), kept=None)

    def fake_leave(self, slot):
        """Another request may get the slot, or nobody; nothing of the former one is there any more."""
        for states in (*self.all_ssm_states, *self.all_conv_states):
            states[slot] = float("nan")
        self.fake_free.append(slot)

    def fake_state(self, slot):
        return [states[slot].clone() for states in (*self.all_ssm_states, *self.all_conv_states)]

    def fake_bring(self, slot, state):
        for states, one in zip((*self.all_ssm_states, *self.all_conv_states), state, strict=True):
            states[slot] = one

    def fake_relocate(self, rid):
        """The pool moves a live request's pages to another slot."""
        cache = self.kv_cache_map[rid]
        state, old = self.fake_state(cache.slot), cache.slot
        cache.slot = self.fake_free.pop(0)
        self.fake_bring(cache.slot, state)
        self.fake_leave(old)

    def fake_resume(self, rid):
        cache = self.kv_cache_map[rid]
        cache.slot, cache.is_active = self.fake_free.pop(0), True
        self.fake_bring(cache.slot, cache.kept)

    def fake_free_request(self, rid):
        self.fake_leave(self.kv_cache_map.pop(rid).slot)
        self._request_id_to_state_index.pop(rid, None)

    def suspend_request(self, req):
        cache = self.kv_cache_map[req.py_request_id]
        cache.kept, cache.is_active = self.fake_state(cache.slot), False
        self.fake_leave(cache.slot)

    def prepare_resources(self, scheduled_batch):
        requests = scheduled_batch.context_requests + scheduled_batch.generation_requests
        self._setup_state_indices(requests, num_contexts=len(scheduled_batch.context_requests))
        self._reset_context_mamba_slots(len(scheduled_batch.context_requests))

    def fake_indices(self, requests):
        self._host_state_indices.zero_()
        for i, one in enumerate(requests):
            self._host_state_indices[i] = self.kv_cache_map[one.py_request_id].slot
        self.cuda_state_indices.copy_(self._host_state_indices)
        for one, slot in zip(requests, self._host_state_indices.tolist(), strict=False):
            self._request_id_to_state_index[one.py_request_id] = slot

    def get_state_indices(self, request_ids=None, is_padding=None):
        return self.cuda_state_indices

    def is_speculative(self):
        return self.spec_config is not None

    def fake_rows(self, attn_metadata):
        return slice(attn_metadata.num_contexts, attn_metadata.num_seqs)

    def shutdown(self):
        self.all_ssm_states = self.all_conv_states = None


class CurrentV2(Pool):
    """A manager without a seam: with replay it allocates a double-buffered history, which the shim's rings live in."""

    def __init__(self, mamba_d_state, mamba_d_conv, mamba_num_heads, mamba_n_groups, mamba_head_dim, mamba_num_layers,
                 mamba_layer_mask, mamba_cache_dtype, mamba_ssm_cache_dtype, kv_cache_config, kv_cache_type, *, num_layers,
                 num_kv_heads, head_dim, tokens_per_block, max_seq_len, max_batch_size, mapping, dtype=None, spec_config=None,
                 layer_mask=None, is_estimating_kv_cache=None, is_draft=None, use_replay_state_update=None,
                 mamba_ssm_stochastic_rounding=None, conv_state_layout=None, **kwargs):  # fmt: skip
        assert "kda_replay_num_spec" not in kwargs
        self._mamba_ssm_stochastic_rounding = bool(mamba_ssm_stochastic_rounding)
        self.fake_pool(locals())
        self._setup_mtp_intermediate_states(spec_config, max_batch_size)
        self._use_replay_state_update, self._use_gdn_cached_replay_all_layer_commit = use_replay_state_update, True
        self.old_x = self.old_B = self.old_dt = self.old_dA_cumsum = None
        if use_replay_state_update:
            L, S, rows = mamba_num_layers, kv_cache_config.slots, max(16, spec_config.tokens_per_gen_step)
            on = {"dtype": mamba_cache_dtype, "device": self.fake_device}
            self.old_x = torch.zeros(L, S, 2, rows, mamba_num_heads, mamba_head_dim, **on)
            self.old_B = torch.zeros(L, S, 2, rows, mamba_n_groups, mamba_d_state, **on)
            self.old_dt, self.old_dA_cumsum = torch.zeros(2, L, S, 2, mamba_num_heads, rows, device=self.fake_device).unbind()

    def _setup_mtp_intermediate_states(self, spec_config, max_batch_size):
        self.intermediate_ssm_states, self.intermediate_conv_states = None, None
        if spec_config is not None:
            shape = (len(self.all_conv_states), max_batch_size, spec_config.tokens_per_gen_step, *self.conv_state_shape)
            self.intermediate_conv_states = torch.full(
                shape, float("nan"), dtype=self.conv_state_dtype, device=self.fake_device
            )

    def _refresh_dummy_request_mask(self, is_dummy):
        self.fake_mask = torch.tensor(is_dummy)

    def _setup_state_indices(self, requests, num_contexts=0):
        self.fake_indices(requests)
        self._refresh_dummy_request_mask([one.is_dummy for one in requests])

    def _reset_context_mamba_slots(self, num_contexts):
        for history in (self.old_x, self.old_B, self.old_dt, self.old_dA_cumsum):
            if history is not None:
                history[:, self.cuda_state_indices[:num_contexts].long()] = 0

    def mamba_layer_cache(self, layer_idx):
        layer = self.mamba_layer_offsets[layer_idx]
        scratch = self.intermediate_conv_states
        return SimpleNamespace(
            conv=self.all_conv_states[layer], temporal=self.all_ssm_states[layer],
            intermediate_conv_window=None if scratch is None else scratch[layer], intermediate_ssm=None,
            **{name: getattr(self, name) for name in ("old_x", "old_B", "old_dt", "old_dA_cumsum")},
            cache_buf_idx=None, prev_num_accepted_tokens=None, mamba_ssm_rand_seed=None, has_kda_replay_caches=False,
        )  # fmt: skip

    def get_replay_state_update_metadata(self):
        return SimpleNamespace(replay_step_width=self.spec_config.tokens_per_gen_step)

    def update_mamba_states(self, attn_metadata, num_accepted_tokens, state_indices=None, accepted_leaf_positions=None):
        assert not self._use_gdn_cached_replay_all_layer_commit, "the engine would fold its history into the pool"
        rows = self.fake_rows(attn_metadata)
        position = num_accepted_tokens[rows] - 1
        promote(self.all_conv_states, self.intermediate_conv_states, position, self.cuda_state_indices[rows])


class StrategyV2(CurrentV2):
    """The seam's first form: the manager keeps a strategy and calls it."""

    def __init__(self, mamba_d_state, mamba_d_conv, mamba_num_heads, mamba_n_groups, mamba_head_dim, mamba_num_layers,
                 mamba_layer_mask, mamba_cache_dtype, mamba_ssm_cache_dtype, kv_cache_config, kv_cache_type, *, num_layers,
                 num_kv_heads, head_dim, tokens_per_block, max_seq_len, max_batch_size, mapping, dtype=None, spec_config=None,
                 layer_mask=None, is_estimating_kv_cache=None, is_draft=None, use_replay_state_update=None,
                 mamba_ssm_stochastic_rounding=None, conv_state_layout=None, state_update_strategy=None,
                 aux_cache_extensions=None, **kwargs):  # fmt: skip
        self.fake_pool(locals())
        self.fake_strategy = state_update_strategy
        context = fake_context(self)
        state_update_strategy.validate(context)
        state_update_strategy.bind(context, self)

    def _setup_state_indices(self, requests, num_contexts=0):
        running = [one.py_request_id for one in requests[num_contexts:]]
        old = [self._request_id_to_state_index.get(one, -1) for one in running]
        self.fake_indices(requests)
        self.fake_strategy.refresh_dummy_request_mask([one.is_dummy for one in requests])
        new = [self._request_id_to_state_index[one] for one in running]
        self.fake_strategy.relocate_slots(old, new)
        fresh = [b for a, b in zip(old, new, strict=True) if a < 0]
        if fresh:
            self.fake_strategy.reset_slots(torch.tensor(fresh), fresh)

    def _reset_context_mamba_slots(self, num_contexts):
        slots = self.cuda_state_indices[:num_contexts]
        if num_contexts:
            self.fake_strategy.reset_slots(slots.long(), slots.tolist())

    def mamba_layer_cache(self, layer_idx):
        layer = self.mamba_layer_offsets[layer_idx]
        return self.fake_strategy.make_layer_cache(layer, self.all_conv_states[layer], self.all_ssm_states[layer])

    def get_replay_state_update_metadata(self):
        return self.fake_strategy.get_replay_metadata()

    def update_mamba_states(self, attn_metadata, num_accepted_tokens, state_indices=None, accepted_leaf_positions=None):
        assert self.fake_strategy.update(fake_batch(self, attn_metadata, num_accepted_tokens), self)

    def on_state_transfer_complete(self, request_ids):
        self.fake_strategy.on_state_transfer_complete(request_ids, self)


class StateV2(Pool):
    """The seam's second form: a model's manager, whose subclass owns the state."""

    def __init__(self, *args, **kwargs):
        one = SimpleNamespace(**dict(zip(CTOR, args, strict=False)) | kwargs)
        self.fake_pool(vars(one))
        self._state_layout = fake_context(self)
        self._speculative_state = self._initialize_model_state()
        self._setup_model_state()

    def _refresh_dummy_request_mask(self, is_dummy):
        self.fake_mask = torch.tensor(is_dummy)

    def _setup_state_indices(self, requests, num_contexts=0):
        running = [one.py_request_id for one in requests[num_contexts:]]
        old = [self._request_id_to_state_index.get(one, -1) for one in running]
        self.fake_indices(requests)
        self._refresh_dummy_request_mask([one.is_dummy for one in requests])
        self._on_state_slots_relocated(old, [self._request_id_to_state_index[one] for one in running])

    def _reset_context_mamba_slots(self, num_contexts):
        slots = self.cuda_state_indices[:num_contexts]
        if num_contexts:
            self._reset_model_slots(slots.long(), slots.tolist())

    def update_mamba_states(self, attn_metadata, num_accepted_tokens, state_indices=None, accepted_leaf_positions=None):
        self._update_speculative_state(fake_batch(self, attn_metadata, num_accepted_tokens))


CTOR = ("mamba_d_state", "mamba_d_conv", "mamba_num_heads", "mamba_n_groups", "mamba_head_dim", "mamba_num_layers",
        "mamba_layer_mask", "mamba_cache_dtype", "mamba_ssm_cache_dtype", "kv_cache_config", "kv_cache_type")  # fmt: skip


def fake_context(manager):
    return SimpleNamespace(
        mamba_pp_layers=tuple(manager.mamba_pp_layers), conv_state_shape=tuple(manager.conv_state_shape),
        ssm_state_shape=tuple(manager.ssm_state_shape), conv_state_dtype=manager.conv_state_dtype,
        ssm_state_dtype=manager.ssm_state_dtype, n_groups_per_rank=manager._n_groups_per_rank,
        max_batch_size=manager.max_batch_size, state_index_capacity=manager.max_batch_size, spec_config=manager.spec_config,
        stochastic_rounding=False,
    )  # fmt: skip


def fake_batch(manager, attn_metadata, accepted):
    rows = manager.fake_rows(attn_metadata)
    count = rows.stop - rows.start
    return SimpleNamespace(
        num_accepted_tokens=accepted[rows], accepted_positions=accepted[rows] - 1,
        source_state_indices=torch.arange(count, dtype=torch.int32, device=accepted.device),
        destination_state_indices=manager.cuda_state_indices[rows], is_dummy_request=None,
    )  # fmt: skip


def promote(states: list[Tensor], scratch: Tensor, position: Tensor, slots: Tensor) -> None:
    """The engine's promotion of accepted convolution windows."""
    for layer, one in enumerate(states):
        one[slots.long()] = scratch[layer, torch.arange(len(position), device=position.device), position.long()]


def _promote_mamba_state_triton(
    dst, intermediate, src_state_indices, accepted_position_source, dst_state_indices, num_accepted_tokens=None,
    position_source_is_token_count=None, **kwargs,
):  # fmt: skip
    """The fake of the function of this name."""
    rows = intermediate[:, src_state_indices.long()]
    promote(list(dst), rows, accepted_position_source, dst_state_indices)


class ReplayStateUpdateMetadata:
    """The fake of the class of this name."""

    def __init__(self, prev_num_accepted_tokens, cache_buf_idx, replay_step_width, replay_history_size):
        self.prev_num_accepted_tokens, self.cache_buf_idx = prev_num_accepted_tokens, cache_buf_idx
        self.replay_step_width, self.replay_history_size = replay_step_width, replay_history_size


class TensorWrapper:
    """The fake of the class of this name."""

    def __init__(self, data_ptr, dtype, shape, strides=None):
        self.data_ptr, self.dtype, self.shape = data_ptr, dtype, shape


def convert_to_torch_tensor(tensor):
    """The fake of the function of this name, over memory of the CPU."""
    elements = torch.Size(tensor.shape).numel()
    memory = (ctypes.c_byte * (elements * tensor.dtype.itemsize)).from_address(tensor.data_ptr)
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
