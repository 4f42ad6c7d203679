"""SGLang's pool of recurrent states with our rings beside them."""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.mem_cache import memory_pool
from sglang.srt.platforms import current_platform
from torch import Tensor

from ... import Layout
from .layers import Layers
from .replay import Replay

logger = logging.getLogger(__name__)


def ring_bytes(layout: Layout) -> int:
    """What one layer and slot takes beside SGLang's state: ring, helpers, read copy."""
    return layout.slot_bytes - layout.state_bytes


class ReplayMambaPool(memory_pool.MambaPool):
    """The pool's states are our checkpoints. What moves them between slots is SGLang's own: it finds them exact.

    No state per draft is allocated: drafts live in the ring. Convolution windows per draft are SGLang's own.

    Attributes:
        replay: steps and snapshots of these states.
    """

    def __init__(
        self,
        *,
        layout: Layout,
        layers: Layers,
        counted: bool = False,
        spec_state_size: int,
        cache_params: Any,
        speculative_num_draft_tokens: int | None = None,
        speculative_eagle_topk: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(spec_state_size=spec_state_size, cache_params=cache_params, **kwargs)
        pool = self.mamba_cache
        count, slots = pool.temporal.shape[:2]
        with self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE):
            if speculative_num_draft_tokens is not None:
                dense = not memory_pool.conv_window_dedup_enabled(
                    memory_pool._is_npu, self.device == "cpu", speculative_eagle_topk, cache_params.is_kda
                )
                self.mamba_cache = self._with_drafts(cache_params, spec_state_size, speculative_num_draft_tokens, dense)
            buffers = layout.allocate(count, slots, pool.temporal.device, state=pool.temporal)
        self.replay = Replay(layout, buffers, layers, counted)
        self.mem_usage += count * slots * ring_bytes(layout) / 2**30

    def _with_drafts(self, cache_params: Any, rows: int, drafts: int, dense: bool) -> memory_pool.MambaPool.SpeculativeState:
        """The pool's tensors with a convolution window per draft, in the layout that SGLang's kernels expect."""
        pool, shape = self.mamba_cache, cache_params.shape
        layers, windows, held = pool.temporal.shape[0], [], []
        if not dense and not shape.disable_conv_window_dedup:
            self.conv_window_axis = self._detect_conv_window_axis(shape.conv, shape.conv_kernel - 1)
        for one in shape.conv:
            if dense or shape.disable_conv_window_dedup:
                physical = view = pool.temporal.new_zeros(layers, rows + 1, drafts, *one, dtype=cache_params.dtype.conv)
            else:
                physical, view = self._allocate_deduplicated_conv_window(
                    conv_shape=one, num_mamba_layers=layers, spec_state_size=rows,
                    speculative_num_draft_tokens=drafts, conv_dtype=cache_params.dtype.conv,
                )  # fmt: skip
            windows.append(view)
            held.append(physical)
        self._intermediate_conv_window_phys = held
        self.mem_usage += sum(one.nbytes for one in held) / 2**30
        none = pool.temporal.new_empty(layers, 0)  # SGLang's backends ask only whether it is there
        return self.SpeculativeState(
            conv=pool.conv, temporal=pool.temporal, intermediate_ssm=none, intermediate_conv_window=windows
        )

    def get_cpu_copy(self, indices: Tensor) -> Any:
        """A retracted request's state goes to the host."""
        current_platform.synchronize()  # a step may be running on another stream
        self.replay.settle(indices)
        return super().get_cpu_copy(indices)

    def load_cpu_copy(self, mamba_cache_cpu: Any, indices: Tensor) -> None:
        """And comes back, to decode on."""
        super().load_cpu_copy(mamba_cache_cpu, indices)
        self.replay.loaded(indices)
        current_platform.synchronize()


def describe(layout: Layout, layers: int) -> str:
    """The one line that a server logs."""
    return (
        f"ReplaySSM: {layers} {layout.recurrence.name} layers, window {layout.W}, {layout.T_max} tokens a step, "
        f"state {layout.state}, read {layout.read or 'none'}, u {str(layout.u).removeprefix('torch.')}, "
        f"{layers * layout.slot_bytes:,} bytes per request ({layers * ring_bytes(layout):,} beside SGLang's state)"
    )
