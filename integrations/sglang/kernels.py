"""What SGLang calls where its recurrence kernels were: its packed tensors as tokens of a step."""

from __future__ import annotations

from typing import Any

from sglang.kernels.ops.mamba.triton_ops.ssu_dispatch import MambaSSUBackend
from sglang.srt.layers.attention.linear.kernels.kda_triton import TritonKDAKernel
from torch import Tensor

from .replay import Replay
from .settings import NAME


class ReplayLinearKernel(TritonKDAKernel):
    """GDN and KDA, in a dispatcher's decode and verify; SGLang before 0.5.22 lets no other class have KDA's safe gate."""

    supports_packed_decode = True
    supports_packed_decode_safe_gate = True
    supports_safe_gate_verify = True
    supports_fused_chain_verify = False
    supports_strided_target_verify_qkv = True

    replay: Replay  # set by the backend that owns the dispatcher

    def packed_decode(
        self, mixed_qkv: Tensor, a: Tensor, b: Tensor, *, dt_bias: Tensor, cache_indices: Tensor, **kwargs: Any
    ) -> Tensor:
        """[1, B, H, V] of one token a request, mixed_qkv [B, 2 G K + H V]."""
        of = self.replay.layout
        q, k, v = mixed_qkv.split([of.G * of.K, of.G * of.K, of.H * of.V], -1)
        q, k, v = q.unflatten(-1, (of.G, of.K)), k.unflatten(-1, (of.G, of.K)), v.unflatten(-1, (of.H, of.V))
        return self.decode(q[None], k[None], v[None], a, b, dt_bias=dt_bias, cache_indices=cache_indices)

    def decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        *,
        dt_bias: Tensor,
        cache_indices: Tensor,
        **kwargs: Any,
    ) -> Tensor:
        """The same of q, k [1, B, G, K], v [1, B, H, V], which SGLang 0.5.20 and 0.5.21 have for KDA's safe gate."""
        return self.replay.decode(cache_indices, q=q[0], k=k[0], v=v[0], **self._gates(v.shape[1], a, b, dt_bias))[None]

    def target_verify(
        self,
        A_log: Tensor,
        dt_bias: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        *,
        cache_indices: Tensor,
        cache_steps: int,
        retrieve_parent_token: Tensor | None,
        **kwargs: Any,
    ) -> Tensor:
        """[1, B t, H, V] of q, k [1, B t, G, K], v [1, B t, H, V]."""
        N = q.shape[1]
        gates = self._gates(N, a, b, dt_bias)
        slots = cache_indices[: N // cache_steps]
        return self.replay.verify(slots, cache_steps, retrieve_parent_token, q=q[0], k=k[0], v=v[0], **gates)[None]

    def _gates(self, N: int, a: Tensor, b: Tensor, dt_bias: Tensor) -> dict[str, Tensor]:
        """In the core's shapes; some models have dimensions of 1, or heads and channels in one."""
        of = self.replay.layout
        per_head = (of.H, of.K) if of.recurrence.per_channel else (of.H,)
        return {"a": a.reshape(N, *per_head), "b": b.reshape(N, of.H), "dt_bias": dt_bias.reshape(per_head)}


class ReplaySSU(MambaSSUBackend):
    """Mamba-2: ``--mamba-backend replayssm``. SGLang makes one for the process, before it makes a pool."""

    replay: Replay  # set by the backend whose mixer runs

    def __init__(self, **kwargs: Any) -> None:
        """SGLang's rounding options; settings.check refused them."""

    @property
    def name(self) -> str:
        """For SGLang's log."""
        return NAME

    def __call__(
        self,
        state: Tensor,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        state_batch_indices: Tensor | None = None,
        pad_slot_id: int = -1,
        out: Tensor | None = None,
        disable_state_update: bool = False,
        intermediate_states_buffer: Tensor | None = None,
        cache_steps: int | None = None,
        retrieve_parent_token: Tensor | None = None,
        intermediate_state_indices: Tensor | None = None,
    ) -> None:
        """x, out [B, H, P] or, to verify, [B, t, H, P]; dt, dt_bias and D are expanded over P."""
        assert dt_bias is not None and D is not None and out is not None and state_batch_indices is not None
        weights = {"dt_bias": dt_bias[:, 0], "D": D[:, 0]}
        if x.dim() == 3:
            self.replay.decode(state_batch_indices, q=C, k=B, v=x, b=dt[..., 0], out=out, **weights)
            return
        tokens = {"q": C, "k": B, "v": x, "b": dt[..., 0], "out": out}
        flat = {name: one.flatten(0, 1) for name, one in tokens.items()}
        self.replay.verify(state_batch_indices, x.shape[1], retrieve_parent_token, **flat, **weights)
