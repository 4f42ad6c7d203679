"""SGLang's attention backends of recurrent layers: theirs, with the layer named to our kernels and states kept exact."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.attention.hybrid_linear_attn_backend import Mamba2AttnBackend
from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend
from sglang.srt.layers.attention.linear.kda_backend import KDAAttnBackend
from torch import Tensor

from .kernels import ReplayLinearKernel, ReplaySSU
from .replay import Replay


def _prefills(forward_batch: Any) -> bool:
    """Whether SGLang's prefill kernels read and write states; a decode batch may be labelled as a prefill, to be padded."""
    mode = getattr(forward_batch, "logical_forward_mode", forward_batch.forward_mode)
    return mode.is_extend() and not mode.is_target_verify() and not mode.is_draft_extend_v2()


# An instance of SGLang's class becomes ours after its construction, which Python allows along single inheritance alone.


def _replayed(base: type) -> type:
    """What all of our backends share."""

    class Replayed(base):
        """Over a subclass of MambaAttnBackendBase."""

        @property
        def replay(self) -> Replay:
            """Of the pool whose slots the batches name."""
            return self.req_to_token_pool.mamba_pool.replay

        def enter(self, layer_id: int) -> bool:
            """Tell the kernels which layer runs; whether it is the last."""
            self.replay.layer = self.req_to_token_pool.mamba_map[layer_id]
            return self.replay.layer == self.replay.last

        def _replay_metadata(self, *args: Any, **kwargs: Any) -> Any:
            """Of a step in a CUDA graph."""
            self.replay.begin()
            return super()._replay_metadata(*args, **kwargs)

        def _forward_metadata(self, forward_batch: Any) -> Any:
            """Of any other batch."""
            metadata = super()._forward_metadata(forward_batch)
            self._before(forward_batch, metadata.mamba_cache_indices)
            return metadata

        def supports_prefill_graph_extend(self) -> bool:
            """Whether SGLang may capture prefills; a read copy is written beside them."""
            return self.replay.layout.read is None and super().supports_prefill_graph_extend()

        def refresh_prefill_graph_metadata(self, meta: Any, forward_batch: Any) -> None:
            """Of a prefill in a CUDA graph."""
            super().refresh_prefill_graph_metadata(meta, forward_batch)
            self._before(forward_batch, self.req_to_token_pool.get_mamba_indices(forward_batch.req_pool_indices))

        def _before(self, forward_batch: Any, slots: Tensor) -> None:
            self.replay.begin()
            if _prefills(forward_batch):
                self.replay.weights_changed()
                self.replay.settle(slots)

        def _track_mamba_state_decode(
            self,
            forward_batch: Any,
            conv_states: Tensor,
            ssm_states: Tensor,
            cache_indices: Tensor,
            layer_id: int | None = None,
        ) -> None:
            """A snapshot for the prefix cache: SGLang copies convolution windows, and states that are overwritten then."""
            super()._track_mamba_state_decode(forward_batch, conv_states, ssm_states, cache_indices, layer_id)
            self._snapshot(forward_batch.mamba_track_mask, cache_indices)

        def _snapshot(self, mask: Tensor | None, slots: Tensor) -> None:
            """After the last layer."""
            if mask is not None and self.replay.layer == self.replay.last:
                B = slots.shape[0]
                self.replay.snapshot(slots, mask[-B:], self.forward_metadata.mamba_track_indices[-B:])

    return Replayed


def _linear(base: type) -> type:
    """What GDN's and KDA's share."""

    class ReplayedLinear(_replayed(base)):
        """GDN and KDA; states change in forward_decode and forward_extend."""

        def become(self) -> None:
            """After construction."""
            kernel = ReplayLinearKernel()
            kernel.replay = self.replay
            dispatcher = self.kernel_dispatcher
            dispatcher.decode_kernel = dispatcher.verify_kernel = dispatcher.tree_verify_kernel = kernel
            dispatcher.supports_packed_decode = dispatcher.supports_packed_decode_safe_gate = True
            dispatcher.verify_kernel_is_flashinfer = False
            self._fused_chain_verify_fn = None  # KDA's convolution and verification in one kernel, which would pass ours by

        def forward_decode(self, layer: Any, *args: Any, **kwargs: Any) -> Any:
            """SGLang's, up to our kernel."""
            self.enter(layer.layer_id)
            layer._k3_onorm_gate = None  # Kimi-K3's whole layer in one kernel, likewise
            return super().forward_decode(layer, *args, **kwargs)

        def forward_extend(self, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            """SGLang's; its states stay exact, the read copy follows."""
            self.enter(layer.layer_id)
            o = super().forward_extend(layer, forward_batch, *args, **kwargs)
            if _prefills(forward_batch):
                self.replay.prefilled(self.forward_metadata.mamba_cache_indices)
            return o

    return ReplayedLinear


class ReplayGDNBackend(_linear(GDNAttnBackend)):
    """Gated DeltaNet: Qwen3-Next, Qwen3.5."""


class ReplayKDABackend(_linear(KDAAttnBackend)):
    """Kimi Delta Attention: Kimi-Linear, Kimi-K3, GLM-5.3."""


class ReplayMamba2Backend(_replayed(Mamba2AttnBackend)):
    """Mamba-2: Nemotron-H. A batch holds prefills first, then decodes, whose mixer calls our state update."""

    def become(self) -> None:
        """After construction."""

    def forward(
        self, mixer: Any, hidden_states: Tensor, output: Tensor | None, layer_id: int, forward_batch: Any, **kwargs: Any
    ) -> Any:
        """SGLang's, and the snapshots."""
        self.enter(layer_id)
        ReplaySSU.replay = self.replay
        o = super().forward(mixer, hidden_states, output, layer_id, forward_batch, **kwargs)
        of = self.forward_metadata
        if of.num_prefills:
            self.replay.prefilled(of.mamba_cache_indices[: of.num_prefills])
        if of.num_decodes and not of.is_target_verify:
            self._snapshot(forward_batch.mamba_track_mask, of.mamba_cache_indices[-of.num_decodes :])
        return o


BACKENDS = {GDNAttnBackend: ReplayGDNBackend, KDAAttnBackend: ReplayKDABackend, Mamba2AttnBackend: ReplayMamba2Backend}
