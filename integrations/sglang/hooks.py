"""Where SGLang's own code is told of ReplaySSM. Every hook does nothing in a server that did not choose it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from sglang.kernels.ops.mamba.mamba_state_scatter_triton import fused_conv_window_scatter_with_mask
from sglang.kernels.ops.mamba.triton_ops import ssu_dispatch
from sglang.srt.configs.mamba_utils import BaseLinearStateParams
from sglang.srt.layers.attention.linear.utils import LinearAttnKernelBackend
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.utils.common import rank0_log
from torch import Tensor

from ... import Layout
from ...metrics import Meter
from . import layers as model_layers
from . import names
from .backends import BACKENDS
from .kernels import ReplaySSU
from .layers import Layers
from .metrics import Counters
from .pool import ReplayMambaPool, describe, ring_bytes
from .replay import Replay
from .settings import NAME, chosen, settings_of


@dataclass
class Sized:
    """What was found when SGLang sized the pool of this process's model, for the pool it then makes, and what counts its steps.

    Attributes:
        counted: whether SGLang collects metrics.
        meter: of the pool, once it is made.
        counters: once SGLang has shown its own.
    """

    layout: Layout | None = None
    layers: Layers | None = None
    counted: bool = False
    meter: Meter | None = None
    counters: Counters | None = None


sized = Sized()


def register() -> list[str]:
    """Register the hooks; their targets are returned. Nothing is replaced before ``HookRegistry.apply_hooks``."""
    ssu_dispatch._BACKEND_REGISTRY[NAME] = ReplaySSU
    around: dict[str, Callable[..., Any]] = {
        f"{names.CONFIGURATOR}._handle_max_mamba_cache": size,
        f"{names.REQUEST_POOL}._init_mamba_pool": make_pool,
        f"{names.GDN}.GDNKernelDispatcher.__init__": dispatch,
        f"{names.KDA}.KDAKernelDispatcher.__init__": dispatch,
        f"{names.HYBRID_BACKEND}.update_mamba_state_after_mtp_verify": commit,
        names.COMMIT: accept,
        names.ARRIVAL: arrive,
    } | dict.fromkeys(names.present(*names.DONATIONS), donate)
    after = [f"{names.GDN}.GDNAttnBackend.__init__", f"{names.KDA}.KDAAttnBackend.__init__", f"{names.MAMBA2_BACKEND}.__init__"]
    for target, hook in around.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    for target in after:
        HookRegistry.register(target, become, HookType.AFTER)
    HookRegistry.register(f"{names.METRICS}.log_stats", show, HookType.AFTER)
    return [*around, *after, f"{names.METRICS}.log_stats"]


# ---- the pool ----------------------------------------------------------------------------------------------------------


def size(original: Callable[..., float], self: Any, total_rest_memory: float) -> float:
    """SGLang divides memory: each slot is charged with our ring, and no state is set aside per draft."""
    linear, mamba2 = chosen(self.server_args)
    if self.is_draft_worker or not (linear or mamba2):
        return original(self, total_rest_memory)
    parameters = self.mambaish_config.mamba2_cache_params
    sized.counted = self.server_args.enable_metrics
    sized.layers = found = model_layers.of(self.model, parameters, linear, mamba2)
    drafts = None if self.spec_algorithm.is_none() else get_spec().speculative_num_draft_tokens
    sized.layout = layout = settings_of(self.server_args).layout(
        found.recurrence, found.H, found.G, found.V, found.K, drafts or 1, self.model_dtype, parameters.dtype.temporal
    )
    if self.server_args.enable_deterministic_inference:
        sized.layout = layout = dataclasses.replace(layout, stagger=False)
    if parameters.shape.temporal != (layout.H, layout.V, layout.K):
        raise RuntimeError(f"states: expected {[layout.H, layout.V, layout.K]}, got SGLang's {parameters.shape.temporal}")
    windows = sum(rows * columns for rows, columns in parameters.shape.conv) * parameters.dtype.conv.itemsize * (drafts or 0)
    algorithm, self.spec_algorithm = self.spec_algorithm, SpeculativeAlgorithm.NONE
    try:
        with _charged((ring_bytes(layout) + windows) * len(parameters.layers)):
            return original(self, total_rest_memory)
    finally:
        self.spec_algorithm = algorithm


@contextmanager
def _charged(extra: int):
    """SGLang's bytes of a slot are that much more."""
    own = BaseLinearStateParams.mamba_cache_per_req
    BaseLinearStateParams.mamba_cache_per_req = property(lambda self: own.fget(self) + extra)
    try:
        yield
    finally:
        BaseLinearStateParams.mamba_cache_per_req = own


def make_pool(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """The pool of the model that was sized is ours, and hears of the slots that its allocator gives away."""
    if sized.layout is None:
        original(self, *args, **kwargs)
        return
    self.mamba_pool_cls = partial(ReplayMambaPool, layout=sized.layout, layers=sized.layers, counted=sized.counted)
    original(self, *args, **kwargs)
    sized.meter = self.mamba_pool.replay.meter
    rank0_log(describe(sized.layout, self.mamba_pool.replay.last + 1))
    self.mamba_allocator.alloc = partial(_assign, self.mamba_allocator.alloc, self.mamba_pool.replay)


def _assign(alloc: Callable[[int], Tensor | None], replay: Replay, need_size: int) -> Tensor | None:
    slots = alloc(need_size)
    if slots is not None:
        replay.assigned.append(slots)
    return slots


def replay_of(request_pool: Any) -> Replay | None:
    """The Replay behind SGLang's pool of requests, where it is ours."""
    return getattr(getattr(request_pool, "mamba_pool", None), "replay", None)


def donate(original: Callable[..., Any], self: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """The prefix cache takes the request's own slot, or copies it: its ring is folded first. With extra buffers, those."""
    request_pool = self.req_to_token_pool if hasattr(self, "req_to_token_pool") else self.cache.req_to_token_pool
    replay, slot = replay_of(request_pool), names.slot_of(req)
    if replay is not None and slot is not None and not request_pool.enable_mamba_extra_buffer:
        replay.settle(slot.reshape(1))
    return original(self, req, *args, **kwargs)


def arrive(original: Callable[..., None], self: Any, decode_req: Any) -> None:
    """What a prefill server sent is in the request's slot: SGLang's state, without a read copy."""
    original(self, decode_req)
    replay, slot = replay_of(self.scheduler.req_to_token_pool), names.slot_of(decode_req.req)
    if replay is not None and slot is not None and replay.layout.read is not None:
        replay.received.append(slot.reshape(1))


# ---- metrics -----------------------------------------------------------------------------------------------------------


def show(result: None, self: Any, *args: Any, **kwargs: Any) -> None:
    """SGLang shows its own values, at its logging interval and by a thread whose stream waits for no step: ours follow."""
    if sized.meter is None:
        return
    if sized.counters is None:
        sized.counters = Counters(sized.meter, self)
    sized.counters.update()


# ---- the backends ------------------------------------------------------------------------------------------------------


def dispatch(original: Callable[..., None], self: Any, decode_backend: LinearAttnKernelBackend, *rest: Any) -> None:
    """SGLang calls a backend it does not know "custom", and has no kernel for it; ours comes later, in ``become``."""
    original(self, LinearAttnKernelBackend.TRITON if decode_backend.is_custom() else decode_backend, *rest)


def become(result: None, self: Any, model_runner: Any) -> None:
    """A backend over our pool becomes ours; a draft model's stays SGLang's."""
    if replay_of(model_runner.req_to_token_pool) is None or model_runner.is_draft_worker:
        return
    if type(self) not in BACKENDS:
        raise NotImplementedError(f"{NAME}: supported are {[one.__name__ for one in BACKENDS]}, got {type(self).__name__}")
    self.__class__ = BACKENDS[type(self)]
    self.become()


# ---- speculation -------------------------------------------------------------------------------------------------------


def accept(
    original: Callable[..., None],
    target_worker: Any,
    batch: Any,
    accept_lens: Tensor,
    accept_index: Tensor,
    draft_token_num: int,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Which drafts of a tree stay, in order; SGLang hands on the last one alone."""
    replay = replay_of(target_worker.model_runner.req_to_token_pool)
    if replay is not None and accept_index.numel():
        first = torch.arange(accept_lens.shape[0], device=accept_lens.device)[:, None] * draft_token_num
        replay.accepted = accept_lens, (accept_index - first).clamp(min=0)
    original(target_worker, batch, accept_lens, accept_index, draft_token_num, *args, **kwargs)


def commit(
    original: Callable[..., None],
    self: Any,
    last_correct_step_indices: Tensor,
    mamba_track_indices: Tensor | None,
    mamba_steps_to_track: Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """SGLang knows what was accepted: cursors move, convolution windows are SGLang's to roll back, snapshots are taken."""
    backend = self.linear_attn_backend
    replay, last = replay_of(backend.req_to_token_pool), last_correct_step_indices
    if replay is None:
        original(self, last, mamba_track_indices, mamba_steps_to_track, *args, **kwargs)
        return
    planned = backend.forward_metadata.mamba_cache_indices
    slots, B = planned[: last.shape[0]], last.shape[0]
    accepted, path = replay.accepted or (last + 1, None)
    replay.accepted = None
    replay.commit(planned.shape[0], accepted, path)
    windows = backend.req_to_token_pool.get_speculative_mamba2_params_all_layers()
    pairs = list(zip(windows.conv, windows.intermediate_conv_window, strict=True))
    for conv, window in pairs:
        fused_conv_window_scatter_with_mask(conv, window, slots, last)
    if mamba_track_indices is None:
        return
    steps = mamba_steps_to_track
    for conv, window in pairs:
        fused_conv_window_scatter_with_mask(conv, window, mamba_track_indices, steps)
    kept = steps if path is None else (path[:B] == steps[:, None]).int().argmax(1)
    replay.snapshot(slots, steps >= 0, mamba_track_indices, accepted - kept - 1)
